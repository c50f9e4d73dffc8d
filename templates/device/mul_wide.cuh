// ---------------------------------------------------------------- mul.wide: all 64 bits of a product
// In an instruction.  Of u64 whose upper halves are 0, the compiler adds up the partial products.
DEVICE u64 mul_wide_u32(u32 a, u32 b) { u64 d; asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b)); return d; }
