// ---------------------------------------------------------------- named barriers: 16 a block; __syncthreads is number 0
DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
