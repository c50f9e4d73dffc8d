// ---------------------------------------------------------------- TMA: boxes of a tensor to shared memory
struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap, passed by value

// Starts to fetch the map into the cache in which copies look it up.
DEVICE void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" :: "l"(&map)); }

// The box at these coordinates of a four-dimensional tensor, innermost first; what lies outside the tensor becomes
// zero.  Its bytes count on `barrier`.
DEVICE void tma_load_4d(void* shared, const TensorMap& map, u64& barrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(&barrier)),
                  "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// The same of a five-dimensional tensor.
DEVICE void tma_load_5d(void* shared, const TensorMap& map, u64& barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(&barrier)),
                  "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// A box of shared memory to these coordinates of a tensor; what lies outside the tensor is not written.
DEVICE void tma_store_4d(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups have yet to read shared memory.
template <int N> DEVICE void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}

// Waits until at most N of this thread's groups are on their way.
template <int N> DEVICE void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory"); }

// Shows what this thread wrote to shared memory to TMA and wgmma.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `bytes` that lie side by side, to shared memory; they count on `barrier`.
DEVICE void bulk_load(void* shared, const void* global, u64& barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}
