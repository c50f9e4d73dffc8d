// ---------------------------------------------------------------- arithmetic
constexpr float LOG2E = 1.44269504088896340736f;

constexpr float LN2 = 0.69314718055994530942f;

constexpr float SMALLEST = 1.17549435e-38f;  // the least normal float32

#define PLUS_INFINITY __int_as_float(0x7f800000)

#define MINUS_INFINITY __int_as_float(0xff800000)

// 2^x.
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// 2^x; 0 where `limit` is infinite, whatever x is.
DEVICE float ex2_below(float x, float limit) { return limit < PLUS_INFINITY ? ex2(x) : 0.f; }

// A score as a power of two, rounded before anything is subtracted from it.  In one step with that, what is left of a
// score and its own maximum would be a rounding of both: 2^512 of a bias of -1e10.
DEVICE float to_power_of_two(float score) { return __fmul_rn(score, LOG2E); }

// The same of one that is a power of two.
DEVICE float rounded(float power) { asm("" : "+f"(power)); return power; }

// 2^x of a score less the lse of its row, which is 0 at most but for their roundings.
DEVICE float ex2_of_score(float x) {
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return ex2(x);
}

// The same; 0 where `limit` is infinite.
DEVICE float ex2_of_score_below(float x, float limit) { return limit < PLUS_INFINITY ? ex2_of_score(x) : 0.f; }

// The logarithm to base 2.
DEVICE float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE float sqrt_f32(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE float rsqrt_f32(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE float sigmoid_f32(float x) { return rcp(1.f + ex2(-LOG2E * x)); }

// What has been made for arguments up to a limit, or for all.  No branch, as NVRTC makes one of `?:` where a side takes
// long: each score would wait for it, and the backward of a soft cap took 1.6 times as long on an H200.
DEVICE float if_small(float argument, float limit, float near, float any) {
  float y;
  asm("{\n.reg .pred small;\n.reg .f32 size;\nabs.f32 size, %1;\nsetp.le.f32 small, size, %4;\n"
      "selp.f32 %0, %2, %3, small;\n}" : "=f"(y) : "f"(argument), "f"(near), "f"(any), "f"(limit));
  return y;
}

// tanh of what is not near 0.
DEVICE float tanh_far(float x) { return 1.f - 2.f * rcp(1.f + ex2(2.f * LOG2E * x)); }

// Near 0, where the difference would lose digits, by the first terms of its series: c * tanh(s / c) is s for large c.
DEVICE float tanh_f32(float x) { return if_small(x, 0x1p-6f, x * fmaf(x * x, -1.f / 3, 1.f), tanh_far(x)); }

// Within 2^-11 of itself, by one instruction of the special unit in place of two and a division.
DEVICE float tanh_approx(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Up to which arguments tanh is a polynomial.
constexpr float SMALL_TANH = 0.75f;

// tanh(unit * x) of what is at most SMALL_TANH, within 2^-17.4 and without the special unit: x times a polynomial in
// x^2, whose error is least (Remez) but for the first term, as c * tanh(s / c) is s for large c.  With a term more, for
// what is at most 1, a soft cap took 1.05 of the time on an H200.
DEVICE float small_tanh(float x, float unit = 1.f) {
  const float y = x * x, a = unit * unit * unit, b = unit * unit * a, c = unit * unit * b;
  return x * fmaf(fmaf(fmaf(c * -0.035236404f, y, b * 0.12732511f), y, a * -0.33272402f), y, unit);
}

// The same of what is more, within 2^-17.7, and 1 - |tanh| to 2^-16.2 of itself: that is 2 w / (1 + w), of which the
// special unit would give a reciprocal, too, with w = e^(-2 |unit * x|).
DEVICE float large_tanh(float x, float unit = 1.f) {
  const float w = ex2(-2.f * unit * LOG2E * fabsf(x));
  return copysignf(fmaf(fmaf(fmaf(fmaf(1.3233721f, w, -1.9139405f), w, 1.996299f), w, -1.9999744f), w, 1.f), x);
}

// Abramowitz and Stegun 7.1.26, within 2^-22 of the true value before roundings.
DEVICE float erf_f32(float x) {
  const float size = fabsf(x), t = rcp(fmaf(0.3275911f, size, 1.f));
  const float last = fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f);
  const float series = t * fmaf(fmaf(last, t, -0.284496736f), t, 0.254829592f);
  return copysignf(1.f - series * ex2(-LOG2E * size * size), x);
}

// log(1 + x): near 0, where the sum would lose digits, by the series of 2 atanh(x / (2 + x)).
DEVICE float log1p_f32(float x) {
  const float z = x * rcp(2.f + x), y = z * z;
  const float series = 2.f * z * fmaf(fmaf(fmaf(1.f / 7, y, 0.2f), y, 1.f / 3), y, 1.f);
  return if_small(x, 0.25f, series, lg2(1.f + x) * LN2);
}

// x less the nearest multiple of 2 pi, whose leading and trailing digits are subtracted one after the other.
DEVICE float within_a_turn(float x) {
  const float turns = rintf(x * 0.15915494f);
  return fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, x));
}

DEVICE float sin_f32(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(within_a_turn(x)));
  return y;
}

DEVICE float cos_f32(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(within_a_turn(x)));
  return y;
}

DEVICE float pow_f32(float x, float y) { return ex2(y * lg2(x)); }

// The value, of which the compiler knows nothing.  NVRTC 13.0 computes (i64(a) - b) * c of ints a and b in a loop with
// a - b in 32 bits; so it sees at most one operand of a 64-bit sum.  It also takes int(i64(k) + c) not to wrap.
DEVICE i64 opaque_i64(i64 x) { asm("" : "+l"(x)); return x; }

// Division that rounds down, and its remainder, which has the sign of the divisor.
template <typename T> DEVICE T floor_div(T a, T b) {
  const T quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

template <typename T> DEVICE T floor_mod(T a, T b) {
  if (b > 0 && (b & (b - 1)) == 0) return a & (b - 1);
  const T remainder = a % b;
  return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

// Arithmetic that wraps where it leaves 64 bits, as in Python's int64: C++ takes it for granted that none does.
DEVICE i64 wrapping_add(i64 a, i64 b) { return i64(u64(a) + u64(b)); }

DEVICE i64 wrapping_sub(i64 a, i64 b) { return i64(u64(a) - u64(b)); }

// ptxas 13.0 may make a multiplication by -2^31 of a 64-bit shift by 31: so that is two shifts, which it must not join.
DEVICE i64 wrapping_shift_left(i64 a, i64 n) {
  return n == 31 ? i64(u64(opaque_i64(i64(u64(a) << 30))) << 1) : i64(u64(a) << n);
}

DEVICE i64 wrapping_mul(i64 a, i64 b) {
  if (b == 1ll << 31) return wrapping_shift_left(a, 31);
  if (a == 1ll << 31) return wrapping_shift_left(b, 31);
  return i64(u64(a) * u64(b));
}

DEVICE i64 wrapping_neg(i64 a) { return i64(0ull - u64(a)); }

DEVICE i64 wrapping_abs(i64 a) { return a < 0 ? wrapping_neg(a) : a; }

DEVICE i64 wrapping_floor_div(i64 a, i64 b) { return b == -1 ? wrapping_neg(a) : floor_div(a, b); }

// The nearest index of a dimension.
template <typename T> DEVICE T clamp_index(T i, int size) { return min(max(i, T(0)), T(size - 1)); }

// A bound on positions, clamped so that sums and differences of it with positions fit an int.
template <typename T> DEVICE int bounded(T x) { return int(min(max(x, T(-(1 << 28))), T(1 << 28))); }

// Two floats rounded to nearest, the first in the low half.
DEVICE u32 cvt_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEVICE u32 cvt_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The same, of negative numbers 0.
DEVICE u32 cvt_relu_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The larger of each half.
DEVICE u32 max_u16x2(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Four floats as e4m3, the first in the lowest byte; beyond 448 that.
DEVICE u32 cvt_e4m3x4(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// Two elements of e4m3 as float16, which holds each.
DEVICE u32 cvt_f16x2_e4m3x2(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// A stored element as a float.
DEVICE float from_bf16(u16 x) { return __int_as_float(x << 16); }

DEVICE float from_f16(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
