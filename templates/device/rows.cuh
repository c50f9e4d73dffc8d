// ---------------------------------------------------------------- rows: two elements side by side, as words
DEVICE void load_two_b16(u32 (&x)[1], const u16* from) { x[0] = __ldg((const u32*)from); }

DEVICE void load_two_f32(u32 (&x)[2], const float* from) {
  const uint2 found = __ldg((const uint2*)from);
  x[0] = found.x, x[1] = found.y;
}

// The same, each from its own place.
DEVICE void load_each_b16(u32 (&x)[1], const u16* first, const u16* second) {
  x[0] = __ldg(first) | u32(__ldg(second)) << 16;
}

DEVICE void load_each_f32(u32 (&x)[2], const float* first, const float* second) {
  x[0] = __float_as_uint(__ldg(first)), x[1] = __float_as_uint(__ldg(second));
}

DEVICE u16 element_of_b16(const u32 (&x)[1], int i) { return u16(x[0] >> i * 16); }

DEVICE float element_of_f32(const u32 (&x)[2], int i) { return __uint_as_float(x[i]); }
