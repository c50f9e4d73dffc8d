// ---------------------------------------------------------------- st.shared
DEVICE void st_shared_u32(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(x) : "memory");
}
