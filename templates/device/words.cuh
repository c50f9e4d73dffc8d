// ---------------------------------------------------------------- what a row sees of 32 keys, a bit each
// Ones from bit n on: all where it is below the first, none where it is beyond the last.
DEVICE u32 ones_from(int n) {
  u32 found;
  asm("shl.b32 %0, %1, %2;" : "=r"(found) : "r"(~0u), "r"(max(n, 0)));
  return found;
}

// Ones below bit n.
DEVICE u32 ones_below(int n) { return ~ones_from(n); }

// All ones where the condition holds.
DEVICE u32 ones_if(bool condition) { return condition ? ~0u : 0u; }
