// ---------------------------------------------------------------- mbarrier: counts arrivals and bytes, a phase a round
DEVICE void mbarrier_init(u64& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes the barriers that this thread initialised visible to the copies of TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}

// Arrives, and lets the phase end only when `bytes` more have been written by TMA.
DEVICE void mbarrier_arrive_expect_tx(u64& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// True once the phase of this parity has ended; waits a while before it says no.
DEVICE bool mbarrier_try_wait(u64& barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(shared_address(&barrier)), "r"(parity) : "memory");
  return done;
}

// The same without waiting.
DEVICE bool mbarrier_test_wait(u64& barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(shared_address(&barrier)), "r"(parity) : "memory");
  return done;
}

DEVICE void mbarrier_wait(u64& barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {}
}
