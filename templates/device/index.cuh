// ---------------------------------------------------------------- fewer registers kept through a loop
// Indices of thread and block, read anew at each use.
DEVICE int thread_index() { int i; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i)); return i; }

// Of the four threads that share rows of an accumulator.  Opaque, so that offsets from it stay in instructions.
DEVICE int quad_lane() { int i; asm volatile("mov.u32 %0, %%tid.x;\n\tand.b32 %0, %0, 3;" : "=r"(i)); return i; }

DEVICE int block_index() { int i; asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i)); return i; }

// Tells the compiler that the values are new: what follows from them is computed where it is used.
DEVICE void renew(int& a, int& b, int& c, int& d) { asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d)); }

// Tells the compiler that the ends of a range are new.
DEVICE void renew_range(int& first, int& last) { asm volatile("" : "+r"(first), "+r"(last)); }

// Tells the compiler that this value is new.
DEVICE void renew_one(u32& a) { asm volatile("" : "+r"(a)); }
