// ---------------------------------------------------------------- progress: words by which blocks wait for each other
DEVICE u32 load_acquire(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Shows what this thread did before to whoever reads the value by load_acquire.
DEVICE void store_release(u32* word, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(word), "r"(value) : "memory");
}
