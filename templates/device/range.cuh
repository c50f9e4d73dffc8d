// ---------------------------------------------------------------- what is known of a tile
enum TileClass { EMPTY, PARTIAL, FULL };  // no, some, all of its pairs are visible

// Which of the two truth values are possible.
struct Truth { bool may_true, may_false; };

DEVICE Truth truth(bool value) { return {value, !value}; }

// One of several, two bits each.
DEVICE Truth truth_in(u32 found, int i) { return {(found >> 2 * i & 1) != 0, (found >> 2 * i & 2) != 0}; }

DEVICE Truth range_logical_and(Truth a, Truth b) { return {a.may_true && b.may_true, a.may_false || b.may_false}; }

DEVICE Truth range_logical_or(Truth a, Truth b) { return {a.may_true || b.may_true, a.may_false && b.may_false}; }

DEVICE Truth range_logical_not(Truth a) { return {a.may_false, a.may_true}; }

DEVICE Truth range_logical_xor(Truth a, Truth b) {
  return {(a.may_true && b.may_false) || (a.may_false && b.may_true),
          (a.may_true && b.may_true) || (a.may_false && b.may_false)};
}

DEVICE Truth range_ne_bool(Truth a, Truth b) { return range_logical_xor(a, b); }

DEVICE Truth range_eq_bool(Truth a, Truth b) { return range_logical_not(range_logical_xor(a, b)); }

DEVICE Truth range_where_bool(Truth condition, Truth a, Truth b) {
  return {(condition.may_true && a.may_true) || (condition.may_false && b.may_true),
          (condition.may_true && a.may_false) || (condition.may_false && b.may_false)};
}

// What is possible if one or the other is.
DEVICE Truth either_bool(Truth a, Truth b) { return {a.may_true || b.may_true, a.may_false || b.may_false}; }

// Integers from lo to hi, both included.
template <typename T> struct Range { T lo, hi; };

template <typename T> DEVICE Range<T> single(T value) { return {value, value}; }

template <typename T, typename U> DEVICE Range<T> range_cast(Range<U> a) { return {T(a.lo), T(a.hi)}; }

template <typename T> DEVICE Truth range_lt(Range<T> a, Range<T> b) { return {a.lo < b.hi, a.hi >= b.lo}; }

template <typename T> DEVICE Truth range_le(Range<T> a, Range<T> b) { return {a.lo <= b.hi, a.hi > b.lo}; }

template <typename T> DEVICE Truth range_gt(Range<T> a, Range<T> b) { return range_lt(b, a); }

template <typename T> DEVICE Truth range_ge(Range<T> a, Range<T> b) { return range_le(b, a); }

template <typename T> DEVICE Truth range_eq(Range<T> a, Range<T> b) {
  return {a.lo <= b.hi && b.lo <= a.hi, !(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo)};
}

template <typename T> DEVICE Truth range_ne(Range<T> a, Range<T> b) { return range_logical_not(range_eq(a, b)); }

template <typename T> DEVICE Range<T> range_minimum(Range<T> a, Range<T> b) {
  return {min(a.lo, b.lo), min(a.hi, b.hi)};
}

template <typename T> DEVICE Range<T> range_maximum(Range<T> a, Range<T> b) {
  return {max(a.lo, b.lo), max(a.hi, b.hi)};
}

// The smallest range that holds four values.
template <typename T> DEVICE Range<T> hull(T w, T x, T y, T z) {
  return {min(min(w, x), min(y, z)), max(max(w, x), max(y, z))};
}

template <typename T> DEVICE Range<T> either(Range<T> a, Range<T> b) { return {min(a.lo, b.lo), max(a.hi, b.hi)}; }

template <typename T> DEVICE Range<T> range_where(Truth condition, Range<T> a, Range<T> b) {
  if (!condition.may_false) return a;
  if (!condition.may_true) return b;
  return {min(a.lo, b.lo), max(a.hi, b.hi)};
}

template <typename T> DEVICE Range<T> range_add(Range<T> a, Range<T> b) { return {a.lo + b.lo, a.hi + b.hi}; }

template <typename T> DEVICE Range<T> range_neg(Range<T> a) { return {-a.hi, -a.lo}; }

template <typename T> DEVICE Range<T> range_sub(Range<T> a, Range<T> b) { return {a.lo - b.hi, a.hi - b.lo}; }

template <typename T> DEVICE Range<T> range_mul(Range<T> a, Range<T> b) {
  return hull(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi);
}

template <typename T> DEVICE Range<T> range_abs(Range<T> a) {
  return {a.lo > 0 ? a.lo : a.hi < 0 ? -a.hi : T(0), max(-a.lo, a.hi)};
}

template <typename T> DEVICE Range<T> range_shift_left(Range<T> a, Range<T> n) {
  return hull(a.lo << n.lo, a.lo << n.hi, a.hi << n.lo, a.hi << n.hi);
}

template <typename T> DEVICE Range<T> range_shift_right(Range<T> a, Range<T> n) {
  return hull(a.lo >> n.lo, a.lo >> n.hi, a.hi >> n.lo, a.hi >> n.hi);
}

// The divisor's range holds no 0.
template <typename T> DEVICE Range<T> range_floor_div(Range<T> a, Range<T> b) {
  return hull(floor_div(a.lo, b.lo), floor_div(a.lo, b.hi), floor_div(a.hi, b.lo), floor_div(a.hi, b.hi));
}

// The remainder by a divisor that is known to be positive.
template <typename T> DEVICE Range<T> range_mod_positive(Range<T> a, Range<T> b) {
  if (b.lo == b.hi) {
    const T first = floor_mod(a.lo, b.lo);
    const u64 width = u64(a.hi) - u64(a.lo);
    if (width < u64(b.lo - first)) return {first, first + T(width)};  // one quotient
  }
  if (a.lo >= 0 && a.hi < b.lo) return a;
  return {T(0), a.lo >= 0 ? min(a.hi, b.hi - 1) : b.hi - 1};
}

// The remainder by a divisor that is known to be negative.
template <typename T> DEVICE Range<T> range_mod_negative(Range<T> a, Range<T> b) {
  if (b.lo == b.hi) {
    const T first = floor_mod(a.lo, b.lo);
    const u64 width = u64(a.hi) - u64(a.lo);
    if (width <= u64(-first)) return {first, first + T(width)};  // one quotient
  }
  if (a.lo > b.hi && a.hi <= 0) return a;
  return {a.hi <= 0 ? max(a.lo, b.lo + 1) : b.lo + 1, T(0)};
}

// The remainder has the sign of the divisor.
template <typename T> DEVICE Range<T> range_mod(Range<T> a, Range<T> b) {
  if (b.lo > 0) return range_mod_positive(a, b);
  if (b.hi < 0) return range_mod_negative(a, b);
  return {min(b.lo, T(-1)) + 1, max(b.hi, T(1)) - 1};
}

// Every bit from the highest one of x down.
template <typename T> DEVICE T smeared(T x) {
  if constexpr (sizeof(T) == 4) return x == 0 ? 0 : T(0xffffffffu >> __clz(x));
  return x == 0 ? 0 : T(0xffffffffffffffffull >> __clzll(x));
}

// The low bits in which values of the range differ.
template <typename T> DEVICE T differing_bits(Range<T> a) { return smeared(a.lo ^ a.hi); }

// The bits of x that differ from its sign.
template <typename T> DEVICE T magnitude_bits(T x) { return x ^ (x >> (8 * sizeof(T) - 1)); }

// `found` cut to what the magnitude bits of a and b can reach: a bit operation needs no more than they have.
template <typename T> DEVICE Range<T> range_no_wider(Range<T> found, Range<T> a, Range<T> b) {
  const T used = smeared(magnitude_bits(a.lo) | magnitude_bits(a.hi) | magnitude_bits(b.lo) | magnitude_bits(b.hi));
  return {max(found.lo, ~used), min(found.hi, used)};
}

// Values with all bits of `ones` and none outside `allowed`; a sign that varies reaches both ways.
template <typename T> DEVICE Range<T> range_of_bits(T ones, T allowed) {
  const T sign = T(1) << (8 * sizeof(T) - 1);
  return ones >= 0 && allowed < 0 ? Range<T>{ones | sign, allowed & ~sign} : Range<T>{ones, allowed};
}

template <typename T> DEVICE Range<T> range_bit_not(Range<T> a) { return {~a.hi, ~a.lo}; }

template <typename T> DEVICE Range<T> range_bit_and(Range<T> a, Range<T> b) {
  const T vary_a = differing_bits(a), vary_b = differing_bits(b);
  Range<T> found = range_of_bits(a.lo & ~vary_a & b.lo & ~vary_b, (a.lo | vary_a) & (b.lo | vary_b));
  if (a.lo >= 0) found.hi = min(found.hi, a.hi);
  if (b.lo >= 0) found.hi = min(found.hi, b.hi);
  if (a.lo >= 0 || b.lo >= 0) found.lo = max(found.lo, T(0));
  return range_no_wider(found, a, b);
}

template <typename T> DEVICE Range<T> range_bit_or(Range<T> a, Range<T> b) {
  return range_bit_not(range_bit_and(range_bit_not(a), range_bit_not(b)));
}

template <typename T> DEVICE Range<T> range_bit_xor(Range<T> a, Range<T> b) {
  const T vary = differing_bits(a) | differing_bits(b), differ = a.lo ^ b.lo;
  return range_no_wider(range_of_bits(differ & ~vary, differ | vary), a, b);
}

// An index clamped into a dimension.
template <typename T> DEVICE Range<T> range_clamp_index(Range<T> i, int size) {
  return {clamp_index(i.lo, size), clamp_index(i.hi, size)};
}

// 64-bit results that may leave 64 bits are unknown; single values wrap.
DEVICE Range<i64> checked(Range<i64> a, double lo, double hi, bool single) {
  const double limit = 4611686018427387904.0;  // 2^62
  return single || (lo >= -limit && hi <= limit) ? a : Range<i64>{i64(1ull << 63), i64(~(1ull << 63))};
}

DEVICE bool is_single(Range<i64> a) { return a.lo == a.hi; }

DEVICE Range<i64> opaque_range(Range<i64> a) { return {opaque_i64(a.lo), opaque_i64(a.hi)}; }

DEVICE Range<i64> range_add_i64(Range<i64> a, Range<i64> b) {
  const Range<i64> c = opaque_range(b), found = {wrapping_add(a.lo, c.lo), wrapping_add(a.hi, c.hi)};
  return checked(found, double(a.lo) + double(b.lo), double(a.hi) + double(b.hi), is_single(a) && is_single(b));
}

DEVICE Range<i64> range_neg_i64(Range<i64> a) {
  return checked({wrapping_neg(a.hi), wrapping_neg(a.lo)}, -double(a.hi), -double(a.lo), is_single(a));
}

DEVICE Range<i64> range_sub_i64(Range<i64> a, Range<i64> b) {
  const Range<i64> c = opaque_range(b), found = {wrapping_sub(a.lo, c.hi), wrapping_sub(a.hi, c.lo)};
  return checked(found, double(a.lo) - double(b.hi), double(a.hi) - double(b.lo), is_single(a) && is_single(b));
}

DEVICE Range<i64> range_mul_i64(Range<i64> a, Range<i64> b) {
  const Range<i64> found = hull(wrapping_mul(a.lo, b.lo), wrapping_mul(a.lo, b.hi), wrapping_mul(a.hi, b.lo),
                                wrapping_mul(a.hi, b.hi));
  const Range<double> x = {double(a.lo), double(a.hi)}, y = {double(b.lo), double(b.hi)}, estimate = range_mul(x, y);
  return checked(found, estimate.lo, estimate.hi, is_single(a) && is_single(b));
}

DEVICE Range<i64> range_abs_i64(Range<i64> a) {
  const i64 least = a.lo > 0 ? a.lo : a.hi < 0 ? wrapping_neg(a.hi) : 0;
  const Range<i64> found = {least, max(wrapping_neg(a.lo), a.hi)};
  return checked(found, double(least), fmax(-double(a.lo), double(a.hi)), is_single(a));
}

DEVICE Range<i64> range_shift_left_i64(Range<i64> a, Range<i64> n) {
  const Range<i64> found = hull(wrapping_shift_left(a.lo, n.lo), wrapping_shift_left(a.lo, n.hi),
                                wrapping_shift_left(a.hi, n.lo), wrapping_shift_left(a.hi, n.hi));
  const Range<double> x = {double(a.lo), double(a.hi)}, factor = {double(1ull << n.lo), double(1ull << n.hi)};
  const Range<double> estimate = range_mul(x, factor);
  return checked(found, estimate.lo, estimate.hi, is_single(a) && is_single(n));
}

// The least value over -1 leaves 64 bits; a divisor that may be 0 has no quotient.
DEVICE Range<i64> range_floor_div_i64(Range<i64> a, Range<i64> b) {
  const i64 lowest = i64(1ull << 63);
  if (b.lo <= 0 && b.hi >= 0) return {lowest, ~lowest};
  if (is_single(a) && is_single(b)) return single(wrapping_floor_div(a.lo, b.lo));
  return a.lo == lowest && b.lo <= -1 && b.hi >= -1 ? Range<i64>{lowest, ~lowest} : range_floor_div(a, b);
}

DEVICE Range<i64> range_cast_i64(Range<i64> a) { return a; }

// A 64-bit value cast to int32: unknown where it may not fit; a single value wraps.
DEVICE Range<int> range_cast_int(Range<i64> a) {
  const int lowest = 1 << 31;
  const bool known = is_single(a) || (a.lo >= lowest && a.hi <= ~lowest);
  return known ? Range<int>{int(a.lo), int(a.hi)} : Range<int>{lowest, ~lowest};
}

DEVICE Range<int> range_cast_bool(Truth a) { return {!a.may_false, a.may_true}; }

// Floats from lo to hi, both float32 values or infinite; `nan`: also none of them.
struct FloatRange { double lo, hi; bool nan; };

DEVICE bool holds(FloatRange a, double x) { return a.lo <= x && a.hi >= x; }

DEVICE bool unbounded(FloatRange a) { return a.lo == -PLUS_INFINITY || a.hi == PLUS_INFINITY; }

// Bounds moved outward to float32 values, those too small to be normal to 0; a bound that is NaN is none.
DEVICE FloatRange outward(double lo, double hi, bool nan) {
  double low = isnan(lo) ? -PLUS_INFINITY : __double2float_rd(lo);
  double high = isnan(hi) ? PLUS_INFINITY : __double2float_ru(hi);
  if (low > 0 && low < SMALLEST) low = 0;
  if (high < 0 && high > -SMALLEST) high = 0;
  return {low, high, nan};
}

// The range of an approximate function, from its values at the ends: widened by more than twice its error, and kept
// inside [low, high].
DEVICE FloatRange approximate(double lo, double hi, bool nan, double relative, double absolute, double low,
                              double high) {
  if (fabs(lo) < PLUS_INFINITY) lo -= __dmul_rn(relative, fabs(lo)) + absolute;
  if (fabs(hi) < PLUS_INFINITY) hi += __dmul_rn(relative, fabs(hi)) + absolute;
  return outward(fmin(fmax(lo, low), high), fmin(fmax(hi, low), high), nan);
}

// What a loop has found after a round, which a tile has or may have.
DEVICE Truth after_round_bool(bool has, Truth found, Truth after) {
  return has ? after : Truth{found.may_true || after.may_true, found.may_false || after.may_false};
}

template <typename T> DEVICE Range<T> after_round(bool has, Range<T> found, Range<T> after) {
  return has ? after : Range<T>{min(found.lo, after.lo), max(found.hi, after.hi)};
}

DEVICE FloatRange after_round_f32(bool has, FloatRange found, FloatRange after) {
  return has ? after : FloatRange{fmin(found.lo, after.lo), fmax(found.hi, after.hi), found.nan || after.nan};
}

DEVICE FloatRange single_f32(float value) { return outward(value, value, isnan(value)); }

// A product or quotient that is no number bounds nothing by itself: its `nan` says so.
DEVICE double or_zero(double x) { return isnan(x) ? 0. : x; }

DEVICE Truth range_lt_f32(FloatRange a, FloatRange b) { return {a.lo < b.hi, a.hi >= b.lo || a.nan || b.nan}; }

DEVICE Truth range_le_f32(FloatRange a, FloatRange b) { return {a.lo <= b.hi, a.hi > b.lo || a.nan || b.nan}; }

DEVICE Truth range_gt_f32(FloatRange a, FloatRange b) { return range_lt_f32(b, a); }

DEVICE Truth range_ge_f32(FloatRange a, FloatRange b) { return range_le_f32(b, a); }

DEVICE Truth range_eq_f32(FloatRange a, FloatRange b) {
  return {a.lo <= b.hi && b.lo <= a.hi, !(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo) || a.nan || b.nan};
}

DEVICE Truth range_ne_f32(FloatRange a, FloatRange b) { return range_logical_not(range_eq_f32(a, b)); }

DEVICE FloatRange either_f32(FloatRange a, FloatRange b) {
  return {fmin(a.lo, b.lo), fmax(a.hi, b.hi), a.nan || b.nan};
}

DEVICE FloatRange range_where_f32(Truth condition, FloatRange a, FloatRange b) {
  if (!condition.may_false) return a;
  if (!condition.may_true) return b;
  return {fmin(a.lo, b.lo), fmax(a.hi, b.hi), a.nan || b.nan};
}

// As fminf and fmaxf: where one side may be NaN, the other side's value comes through.
DEVICE FloatRange or_the_other(FloatRange picked, FloatRange a, FloatRange b) {
  if (a.nan && b.nan) return {fmin(a.lo, b.lo), fmax(a.hi, b.hi), true};
  if (a.nan) return {fmin(picked.lo, b.lo), fmax(picked.hi, b.hi), false};
  if (b.nan) return {fmin(picked.lo, a.lo), fmax(picked.hi, a.hi), false};
  return picked;
}

DEVICE FloatRange range_minimum_f32(FloatRange a, FloatRange b) {
  return or_the_other({fmin(a.lo, b.lo), fmin(a.hi, b.hi), false}, a, b);
}

DEVICE FloatRange range_maximum_f32(FloatRange a, FloatRange b) {
  return or_the_other({fmax(a.lo, b.lo), fmax(a.hi, b.hi), false}, a, b);
}

DEVICE FloatRange range_abs_f32(FloatRange a) {
  return {a.lo > 0 ? a.lo : a.hi < 0 ? -a.hi : 0., fmax(-a.lo, a.hi), a.nan};
}

DEVICE FloatRange range_neg_f32(FloatRange a) { return {-a.hi, -a.lo, a.nan}; }

DEVICE FloatRange range_add_f32(FloatRange a, FloatRange b) {
  const bool opposite = (a.lo == -PLUS_INFINITY && b.hi == PLUS_INFINITY) ||
                        (a.hi == PLUS_INFINITY && b.lo == -PLUS_INFINITY);
  return outward(a.lo + b.lo, a.hi + b.hi, a.nan || b.nan || opposite);
}

DEVICE FloatRange range_sub_f32(FloatRange a, FloatRange b) { return range_add_f32(a, range_neg_f32(b)); }

DEVICE FloatRange range_mul_f32(FloatRange a, FloatRange b) {
  const Range<double> found =
      hull(or_zero(a.lo * b.lo), or_zero(a.lo * b.hi), or_zero(a.hi * b.lo), or_zero(a.hi * b.hi));
  const bool zero_times_infinity = (holds(a, 0.) && unbounded(b)) || (holds(b, 0.) && unbounded(a));
  return outward(found.lo, found.hi, a.nan || b.nan || zero_times_infinity);
}

DEVICE FloatRange range_div_f32(FloatRange a, FloatRange b) {
  const bool nan = a.nan || b.nan || (holds(b, 0.) && holds(a, 0.)) || (unbounded(a) && unbounded(b));
  if (holds(b, 0.)) return {-PLUS_INFINITY, PLUS_INFINITY, nan};
  const Range<double> found =
      hull(or_zero(a.lo / b.lo), or_zero(a.lo / b.hi), or_zero(a.hi / b.lo), or_zero(a.hi / b.hi));
  return outward(found.lo, found.hi, nan);
}

DEVICE FloatRange range_floor_f32(FloatRange a) { return {floor(a.lo), floor(a.hi), a.nan}; }

DEVICE FloatRange range_exp2_f32(FloatRange a) {
  return approximate(ex2(a.lo), ex2(a.hi), a.nan, 0x1p-15, SMALLEST, 0., PLUS_INFINITY);
}

DEVICE FloatRange range_exp_f32(FloatRange a) { return range_exp2_f32({a.lo * LOG2E, a.hi * LOG2E, a.nan}); }

DEVICE FloatRange range_log2_f32(FloatRange a) {
  const double lo = a.lo < SMALLEST ? -PLUS_INFINITY : lg2(a.lo);
  const double hi = a.hi < SMALLEST ? -PLUS_INFINITY : lg2(a.hi);
  return approximate(lo, hi, a.nan || a.lo < 0, 0x1p-20, 0x1p-18, -PLUS_INFINITY, PLUS_INFINITY);
}

DEVICE FloatRange range_log_f32(FloatRange a) {
  const double lo = a.lo < SMALLEST ? -PLUS_INFINITY : lg2(a.lo) * LN2;
  const double hi = a.hi < SMALLEST ? -PLUS_INFINITY : lg2(a.hi) * LN2;
  return approximate(lo, hi, a.nan || a.lo < 0, 0x1p-20, 0x1p-18, -PLUS_INFINITY, PLUS_INFINITY);
}

DEVICE FloatRange range_log1p_f32(FloatRange a) {
  const double lo = a.lo <= -1 ? -PLUS_INFINITY : log1p_f32(a.lo), hi = a.hi <= -1 ? -PLUS_INFINITY : log1p_f32(a.hi);
  return approximate(lo, hi, a.nan || a.lo < -1, 0x1p-17, SMALLEST, -PLUS_INFINITY, PLUS_INFINITY);
}

// For x >= 0 a power is monotone in each operand; a kernel multiplies 0 by an infinity where y may be 0.
DEVICE double corner_of_pow(double x, double y) {
  return x == 0 ? (y > 0 ? 0. : y < 0 ? PLUS_INFINITY : 1.) : y == 0 || x == 1 ? 1. : pow_f32(x, y);
}

DEVICE FloatRange range_pow_f32(FloatRange a, FloatRange b) {
  const double first = a.lo < SMALLEST ? 0. : a.lo, last = a.hi < SMALLEST ? 0. : a.hi;
  const double w = corner_of_pow(first, b.lo), x = corner_of_pow(first, b.hi);
  const double y = corner_of_pow(last, b.lo), z = corner_of_pow(last, b.hi);
  const bool unbounded = fmax(fabs(a.lo), fabs(a.hi)) == PLUS_INFINITY;
  const double size = fmax(fabs(b.lo), fabs(b.hi));
  const bool nan = a.nan || b.nan || a.lo < 0 || (b.lo <= 0 && b.hi >= 0 && (a.lo < SMALLEST || unbounded)) ||
                   (a.lo <= 1 && a.hi >= 1 && size == PLUS_INFINITY);
  return approximate(fmin(fmin(w, x), fmin(y, z)), fmax(fmax(w, x), fmax(y, z)), nan,
                     fmin(0x1p-14 + __dmul_rn(size, 0x1p-21), 1.), SMALLEST, 0., PLUS_INFINITY);
}

// Of a sine whose crests are whole turns and `crest` from 0, with its values at the ends.
DEVICE FloatRange range_of_wave(FloatRange a, double at_lo, double at_hi, double crest) {
  constexpr double turns = 0.15915494309189535, slack = 0x1p-20;
  const double first = __dmul_rn(a.lo, turns), last = __dmul_rn(a.hi, turns);
  const bool far = !(a.lo >= -0x1p24 && a.hi <= 0x1p24);
  const bool crests = far || floor(last - crest + slack) >= ceil(first - crest - slack);
  const bool troughs = far || floor(last - crest - 0.5 + slack) >= ceil(first - crest - 0.5 - slack);
  const bool unbounded = fmax(fabs(a.lo), fabs(a.hi)) == PLUS_INFINITY;
  return outward((troughs ? -1. : fmin(at_lo, at_hi)) - 0x1p-18, (crests ? 1. : fmax(at_lo, at_hi)) + 0x1p-18,
                 a.nan || unbounded);
}

DEVICE FloatRange range_sin_f32(FloatRange a) { return range_of_wave(a, sin_f32(a.lo), sin_f32(a.hi), 0.25); }

DEVICE FloatRange range_cos_f32(FloatRange a) { return range_of_wave(a, cos_f32(a.lo), cos_f32(a.hi), 0.); }

DEVICE FloatRange range_erf_f32(FloatRange a) {
  return approximate(erf_f32(a.lo), erf_f32(a.hi), a.nan, 0x1p-20, 0x1p-18, -1., 1.);
}

DEVICE FloatRange range_tanh_f32(FloatRange a) {
  return approximate(tanh_f32(a.lo), tanh_f32(a.hi), a.nan, 0x1p-20, 0x1p-18, -1., 1.);
}

DEVICE FloatRange range_sigmoid_f32(FloatRange a) {
  return approximate(sigmoid_f32(a.lo), sigmoid_f32(a.hi), a.nan, 0x1p-20, 0x1p-18, 0., 1.);
}

DEVICE FloatRange range_sqrt_f32(FloatRange a) {
  const double lo = a.lo < SMALLEST ? 0. : sqrt_f32(a.lo), hi = a.hi < SMALLEST ? 0. : sqrt_f32(a.hi);
  return approximate(lo, hi, a.nan || a.lo < 0, 0x1p-20, SMALLEST, 0., PLUS_INFINITY);
}

// The inverse root of -0 is -inf.
DEVICE FloatRange range_rsqrt_f32(FloatRange a) {
  const double lo = a.lo <= 0 && a.hi > -SMALLEST ? -PLUS_INFINITY : a.hi < SMALLEST ? PLUS_INFINITY : rsqrt_f32(a.hi);
  const double hi = a.lo < SMALLEST ? PLUS_INFINITY : rsqrt_f32(a.lo);
  return approximate(lo, hi, a.nan || a.lo < 0, 0x1p-20, 0., -PLUS_INFINITY, PLUS_INFINITY);
}

DEVICE FloatRange range_cast_f32(Range<i64> a) { return outward(double(a.lo), double(a.hi), false); }

// Truncated toward zero; beyond T's limits the limit; NaN becomes 0, in 64 bits the least value.
template <typename T> DEVICE Range<T> range_truncate(FloatRange a) {
  const T lowest = T(1) << (8 * sizeof(T) - 1), of_nan = sizeof(T) == 4 ? 0 : lowest;
  const double limit = -double(lowest);
  const T lo = trunc(a.lo) >= limit ? ~lowest : trunc(a.lo) <= -limit ? lowest : T(a.lo);
  const T hi = trunc(a.hi) >= limit ? ~lowest : trunc(a.hi) <= -limit ? lowest : T(a.hi);
  return a.nan ? Range<T>{min(lo, of_nan), max(hi, of_nan)} : Range<T>{lo, hi};
}
