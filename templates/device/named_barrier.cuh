// ---------------------------------------------------------------- named barriers: 16 a block, 0 is __syncthreads
DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
