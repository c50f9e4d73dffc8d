// ---------------------------------------------------------------- named barriers: 16 a block, 0 is __syncthreads
DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// Waits for all; whether `x` holds in any of the threads.
DEVICE bool bar_any(int barrier, int threads, bool x) {
  u32 any;
  asm volatile(
      "{\n.reg .pred x;\nsetp.ne.u32 x, %3, 0;\n"
      "bar.red.or.pred x, %1, %2, x;\nselp.u32 %0, 1, 0, x;\n}"
      : "=r"(any) : "r"(barrier), "r"(threads), "r"(u32(x)) : "memory");
  return any;
}
