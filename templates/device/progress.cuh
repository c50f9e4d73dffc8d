// ---------------------------------------------------------------- progress: words by which blocks wait for each other
DEVICE u32 load_acquire(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEVICE u32 load_relaxed(const u32* word) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEVICE void store_relaxed(u32* word, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(word), "r"(value) : "memory");
}

// Shows what this thread did before to whoever reads the value by load_acquire.
DEVICE void store_release(u32* word, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(word), "r"(value) : "memory");
}

// Who sees the sum sees too what this thread, and those that it met at a barrier, wrote before.
DEVICE void red_add_release(u32* counter, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(x) : "memory");
}

DEVICE u32 atom_add(u32* counter, u32 x) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

DEVICE void red_max(u32* counter, u32 x) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" :: "l"(counter), "r"(x) : "memory");
}

DEVICE void nanosleep(u32 duration) { asm volatile("nanosleep.u32 %0;" :: "r"(duration)); }

DEVICE void await_count(const u32* counter, u32 count) {
  while (load_acquire(counter) < count) nanosleep(100);
}
