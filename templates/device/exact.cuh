// ---------------------------------------------------------------- exact: float32 sums that depend on no order
// A sum is EXACT_DIGITS integers of 64 bits, digit i in units of 2^(32 i - 96): what one float adds to two of them is
// below 2^32, integers have no rounding, and so 2^31 additions in any order end in the same digits.  What lies below
// 2^-96 is cut off; infinities and NaN go to `special`.
constexpr int EXACT_DIGITS = 8;

DEVICE void red_add_i64(i64* sum, i64 x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(sum), "l"(x) : "memory");
}

DEVICE void exact_add(i64* sum, float x, float* special) {
  const int bits = __float_as_int(x), exponent = max(bits >> 23 & 255, 1);
  if (exponent == 255) {
    red_add_f32(special, x);
    return;
  }
  const int bit = exponent - 150 + 96;  // of the mantissa's last bit
  i64 mantissa = (bits & 0x7fffff) | ((bits >> 23 & 255) != 0 ? 1 << 23 : 0);
  mantissa = bit < 0 ? mantissa >> min(-bit, 24) : mantissa << bit % 32;
  if (bits < 0) mantissa = -mantissa;
  const int digit = max(bit, 0) / 32;
  red_add_i64(sum + digit, mantissa & 0xffffffffll);
  red_add_i64(sum + digit + 1, mantissa >> 32);
}

// The sum, rounded: carries first, so that the digits below the highest are not negative.
DEVICE float exact_value(const i64* sum) {
  double value = 0.;
  i64 carry = 0, digit[EXACT_DIGITS];
  for (int i = 0; i < EXACT_DIGITS; i++) {
    carry += sum[i];
    digit[i] = i + 1 < EXACT_DIGITS ? carry & 0xffffffffll : carry;
    carry >>= 32;
  }
  for (int i = EXACT_DIGITS - 1; i >= 0; i--) value = __dadd_rn(__dmul_rn(value, 4294967296.), double(digit[i]));
  return float(value * 0x1p-96);
}
