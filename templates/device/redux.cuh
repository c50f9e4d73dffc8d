// ---------------------------------------------------------------- redux.sync: one value of a warp's
DEVICE u32 redux_max(u32 x) { asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(x)); return x; }
