// ---------------------------------------------------------------- wgmma: products of a warpgroup, asynchronous
// Orders the registers and shared memory that this thread wrote before the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N groups of this warpgroup are on their way.
template <int N> DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// Tells the front end that these registers change here: it moves no use of them across a fence or a wait.
template <int N> DEVICE void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i]) :: "memory");
}

// The same of packed fragments.
template <int N> DEVICE void pin_fragments(u32 (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i]) :: "memory");
}

// Where an operand lies in shared memory: rows of 128 bytes, swizzled in blocks of eight.
//   K-major (Q, K):   the next 16 columns are 32 bytes on.
//   MN-major (V):     the next 16 rows are 2,048 bytes on, the next 64 columns `leading_bytes`.
DEVICE u64 matrix_descriptor(const void* operand, u32 leading_bytes) {
  constexpr u64 SWIZZLE_128B = 1ull << 62;
  return (u64)((shared_address(operand) & 0x3FFFF) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 |
         SWIZZLE_128B;
}

// The same where blocks of eight rows lie `group_bytes` apart.
DEVICE u64 grouped_matrix_descriptor(const void* operand, u32 leading_bytes, u32 group_bytes) {
  constexpr u64 GROUP = 0x3FFFull << 32;
  return (matrix_descriptor(operand, leading_bytes) & ~GROUP) | (u64)(group_bytes >> 4) << 32;
}

// The same of rows of 64 bytes, K-major.
DEVICE u64 narrow_matrix_descriptor(const void* operand, u32 leading_bytes) {
  constexpr u64 SWIZZLE_64B = 2ull << 62;
  return (u64)((shared_address(operand) & 0x3FFFF) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(512 >> 4) << 32 |
         SWIZZLE_64B;
}

DEVICE u64 advance_bytes(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }
