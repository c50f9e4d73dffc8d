// ---------------------------------------------------------------- elect.sync: one lane for a warp
// True for one lane of a warp, all of whose lanes are here.  ptxas knows that it is one: behind a comparison of
// threadIdx.x it puts each copy of TMA into a loop over lanes.
DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}
