// ---------------------------------------------------------------- cp.async: global to shared memory
// Sixteen bytes; with `valid` false zeros are written and nothing is read.
DEVICE void cp_async_16(u32 shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared), "l"(global), "r"(bytes) : "memory");
}

DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups are still on their way.
template <int N> DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
