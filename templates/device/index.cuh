// ---------------------------------------------------------------- places in the grid, read anew at each use
// Cheaper than a register kept through a loop.
DEVICE int thread_index() { int i; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i)); return i; }

DEVICE int block_index() { int i; asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i)); return i; }
