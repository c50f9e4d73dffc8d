// ---------------------------------------------------------------- quotients by numbers that the host knows
// Of n from 0 on.  The lower half of `by` is multiplied, the upper is how far the product shifts.
DEVICE int quotient_by(int n, u64 by) { return mul_wide_u32(n, (u32)by) >> (u32)(by >> 32); }
