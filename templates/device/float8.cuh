// ---------------------------------------------------------------- four elements of 8 bits as two words of 16-bit ones
// float16 holds each of them: e5m2 is its upper byte.
DEVICE uint2 f16_of_e5m2(u32 four) { return make_uint2(__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)); }

DEVICE uint2 f16_of_e4m3(u32 four) {
  return make_uint2(cvt_f16x2_e4m3x2(u16(four)), cvt_f16x2_e4m3x2(u16(four >> 16)));
}

// Two elements in the upper bytes of halves: exponent and mantissa moved to their places are the value times 2^-8,
// subnormals too.  480 times 144 is infinite, and no other element is: so it becomes NaN, which its code stands for.
DEVICE u32 f16x2_of_upper_e4m3(u32 two) {
  const u32 bits = two & 0x80008000 | two >> 1 & 0x3f803f80;
  const u32 value = mul_f16x2(bits, 0x5c005c00);            // 2^8
  return fma_f16x2(mul_f16x2(bits, 0x78807880), 0, value);  // 144 * 2^8
}

DEVICE uint2 f16_of_e4m3_by_bits(u32 four) {
  const uint2 upper = f16_of_e5m2(four);
  return make_uint2(f16x2_of_upper_e4m3(upper.x), f16x2_of_upper_e4m3(upper.y));
}

// Of two columns of two keys: each column's keys side by side.
DEVICE u32 columns_apart(u32 word) { return __byte_perm(word, 0, 0x3120); }
