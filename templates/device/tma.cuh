// ---------------------------------------------------------------- TMA: boxes of a tensor to shared memory
struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap, passed by value

DEVICE void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// The box at these coordinates of a four-dimensional tensor, innermost first; what lies outside the tensor becomes zero.
// Its bytes count on `barrier`.
DEVICE void tma_load_4d(void* shared, const TensorMap& map, u64& barrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
