// ---------------------------------------------------------------- red: additions in global memory
DEVICE void red_add_f32(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(sum), "f"(x) : "memory");
}

DEVICE void red_add_v4_f32(float* sum, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(sum), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
