// ---------------------------------------------------------------- prefetch: memory that will be read
DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }
