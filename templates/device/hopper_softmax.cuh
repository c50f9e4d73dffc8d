// ---------------------------------------------------------------- softmax of a tile in the registers of wgmma
// Warp w, lane l of a warpgroup holds rows 16 w + l / 4 and eight further down of an m64nN accumulator; element
// 4 j + 2 r + e of its array is row r (0 or 1) of these, column 8 j + 2 (l % 4) + e.
//
// Per row: what is subtracted in the exponent (the highest scaled score so far, or less where it lags), and the sum of
// this lane's exponentials.
struct RowState { float row_max[2], sum[2]; };

// A row that has seen nothing: below every score, and finite, so that P of a hidden score of -inf is 2^-inf.
DEVICE RowState nothing_seen() { return {{-3e38f, -3e38f}, {0.f, 0.f}}; }

DEVICE bool saw_nothing(float row_max) { return row_max < -2e38f; }

// The highest of each row over the four lanes that share it.
template <int N> DEVICE void highest_by_floats(const float (&s)[N], float (&highest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
    for (int i = 2 * r + 4; i < N; i += 4) {
      even = fmaxf(even, s[i]);
      odd = fmaxf(odd, s[i + 1]);
    }
    highest[r] = quad_max(fmaxf(even, odd));
  }
}

// The highest and the lowest of this lane's elements of row r, as integers.
template <int N> DEVICE int highest_bits(const float (&s)[N], int r) {
  int highest = __float_as_int(s[2 * r]);
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) highest = max(max(highest, __float_as_int(s[i])), __float_as_int(s[i + 1]));
  return highest;
}

template <int N> DEVICE int lowest_bits(const float (&s)[N], int r) {
  int lowest = __float_as_int(s[2 * r]);
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) lowest = min(min(lowest, __float_as_int(s[i])), __float_as_int(s[i + 1]));
  return lowest;
}

// The highest of each row over the four lanes that share it, given the highest `bits` of this lane's: those of the
// highest float unless all are negative, which is asked where some may be; then that has the lowest bits.
template <int N> DEVICE void highest_of_bits(const float (&s)[N], int (&bits)[2], bool negative, float (&highest)[2]) {
  if (negative) {
#pragma unroll
    for (int r = 0; r < 2; r++) bits[r] = bits[r] < 0 ? lowest_bits(s, r) : bits[r];
  }
#pragma unroll
  for (int r = 0; r < 2; r++) highest[r] = quad_max(__int_as_float(bits[r]));
}

// The highest of each row over the four lanes that share it, by integers, of which an instruction takes three
// (VIMNMX3); of floats it takes two (FMNMX).  A lane's scores of a row are seldom all negative.
template <int N> DEVICE void highest_by_integers(const float (&s)[N], float (&highest)[2]) {
  int bits[2] = {highest_bits(s, 0), highest_bits(s, 1)};
  highest_of_bits(s, bits, __any_sync(~0u, min(bits[0], bits[1]) < 0), highest);
}

// The same for maxima of which none is below 0 unless some are `negative`: of scores that are all below it no maximum
// follows any, and one of them is as good as another.  No vote stands between S and its exponentials then.
template <int N> DEVICE void highest_to_follow(const float (&s)[N], bool negative, float (&highest)[2]) {
  int bits[2] = {highest_bits(s, 0), highest_bits(s, 1)};
  highest_of_bits(s, bits, negative, highest);
}

// The maxima follow the highest of S, scaled, where its P is more than the row's limit: true if one of this lane's did.
DEVICE bool follow(float (&row_max)[2], const float (&highest)[2], float scale, const float (&limit)[2]) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    moves[r] = ex2(fmaf(highest[r], scale, -row_max[r])) > limit[r];
    // By the instruction of the exponents: of a plain product ptxas makes a worse plan of registers (2%, head_dim 128).
    if (moves[r]) row_max[r] = fmaf(highest[r], scale, 0.f);
  }
  return moves[0] || moves[1];
}

// The maxima follow the highest of scale * S in any case: its P is 2^offset.  True if one of this lane's rows did.
DEVICE bool follow_exactly(float (&row_max)[2], const float (&highest)[2], float scale, float offset) {
  const float before[2] = {row_max[0], row_max[1]};
#pragma unroll
  for (int r = 0; r < 2; r++) row_max[r] = fmaxf(row_max[r], fmaf(highest[r], scale, -offset));
  return row_max[0] != before[0] || row_max[1] != before[1];
}

// The same where each row has a scale of its own.
DEVICE bool follow_exactly_each(float (&row_max)[2], const float (&highest)[2], const float (&scale)[2], float offset) {
  const float before[2] = {row_max[0], row_max[1]};
#pragma unroll
  for (int r = 0; r < 2; r++) row_max[r] = fmaxf(row_max[r], fmaf(highest[r], scale[r], -offset));
  return row_max[0] != before[0] || row_max[1] != before[1];
}

// The maxima follow the highest of scale * S where its P is beyond 2^limit: that is 2^offset then, or 2^first of a row
// that had seen none.  True if one of this lane's rows did.
DEVICE bool follow_beyond(float (&row_max)[2], const float (&highest)[2], float scale, float first, float offset,
                          float limit) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    moves[r] = fmaf(highest[r], scale, -row_max[r]) > limit;
    if (moves[r]) row_max[r] = fmaf(highest[r], scale, saw_nothing(row_max[r]) ? -first : -offset);
  }
  return moves[0] || moves[1];
}

// The same where each row has a scale of its own.
DEVICE bool follow_beyond_each(float (&row_max)[2], const float (&highest)[2], const float (&scale)[2], float first,
                               float offset, float limit) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    moves[r] = fmaf(highest[r], scale[r], -row_max[r]) > limit;
    if (moves[r]) row_max[r] = fmaf(highest[r], scale[r], saw_nothing(row_max[r]) ? -first : -offset);
  }
  return moves[0] || moves[1];
}

// The maxima become lower by `step` where P of the highest of scale * S is below 2^least.  True if one of this lane's
// rows did.
DEVICE bool lower_above(float (&row_max)[2], const float (&highest)[2], float scale, float least, float step) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    moves[r] = fmaf(highest[r], scale, -row_max[r]) < least;
    if (moves[r]) row_max[r] -= step;
  }
  return moves[0] || moves[1];
}

// The same where each row has a scale of its own.
DEVICE bool lower_above_each(float (&row_max)[2], const float (&highest)[2], const float (&scale)[2], float least,
                             float step) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    moves[r] = fmaf(highest[r], scale[r], -row_max[r]) < least;
    if (moves[r]) row_max[r] -= step;
  }
  return moves[0] || moves[1];
}

// S becomes tanh(unit * factor * S), each score by its own argument; where none of so many of the warp's is large, by a
// polynomial.  Of floats only those from 2 on have the upper bit of the exponent: an instruction (LOP3) looks at two.
template <int TOGETHER, int N> DEVICE void take_tanh(float (&s)[N], float factor) {
  constexpr float unit = SMALL_TANH / 2.f;
#pragma unroll
  for (int first = 0; first < N; first += TOGETHER) {
    u32 bits = 0;
#pragma unroll
    for (int i = first; i < first + TOGETHER && i < N; i++) {
      s[i] *= factor;
      bits |= __float_as_uint(s[i]);
    }
    if (__all_sync(~0u, (bits & 0x40000000) == 0)) {
#pragma unroll
      for (int i = first; i < first + TOGETHER && i < N; i++) s[i] = small_tanh(s[i], unit);
    } else {
#pragma unroll
      for (int i = first; i < first + TOGETHER && i < N; i++)
        s[i] = if_small(s[i], 0x1.fffffep0f, small_tanh(s[i], unit), large_tanh(s[i], unit));
    }
  }
}

// Row r of S becomes P = 2^(scale * S - row_max); what it adds up to.
template <int N> DEVICE float exponentiate_row(float (&s)[N], int r, float scale, float row_max) {
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) {
    s[i] = ex2(fmaf(s[i], scale, -row_max));
    s[i + 1] = ex2(fmaf(s[i + 1], scale, -row_max));
    even += s[i];
    odd += s[i + 1];
  }
  return even + odd;
}

template <int N> DEVICE void exponentiate_rows(float (&s)[N], float scale, const float (&row_max)[2], float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = exponentiate_row(s, r, scale, row_max[r]);
}

// The same where each row has a scale of its own.
template <int N>
DEVICE void exponentiate_rows_each(float (&s)[N], const float (&scale)[2], const float (&row_max)[2], float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = exponentiate_row(s, r, scale[r], row_max[r]);
}

// A factor of 0 clears a row whatever it holds.
template <int N> DEVICE void clear_or_multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] = factor[i / 2 % 2] == 0.f ? 0.f : o[i] * factor[i / 2 % 2];
}

template <int N> DEVICE void multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[i / 2 % 2];
}
