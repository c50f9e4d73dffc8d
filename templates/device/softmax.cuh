// ---------------------------------------------------------------- online softmax, in base 2
template <int N> DEVICE void scale_rows(float (&o)[N][4], const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) o[j][i] *= factor[i / 2];
}

// The largest value over the four lanes that share a row.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The sum over the four lanes that share a row.
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A row's sink, to base 2, joins the sum that the row's four lanes hold.  The larger of it and the maximum is what is
// subtracted from then on: no exponent is above 0.  O is to follow by the result.
DEVICE float join_sink(float& row_max, float& sum, float sink) {
  if (sink == MINUS_INFINITY) return 1.f;  // none; and -inf - -inf would be NaN
  const float before = row_max;
  row_max = fmaxf(before, sink);
  const float factor = ex2(before - row_max);
  sum = fmaf(sum, factor, 0.25f * ex2(sink - row_max));
  return factor;
}

// ln(2^row_max * sum) of a row that sees a key.  What is as large as the result is rounded once, by the last fmaf: the
// exponent of the sum, an integer, joins the maximum, and what that rounds off, which is exact, joins the logarithm of
// the rest, which is below 1.  Of 2,048 rows of 8,192 scores of N(0, 1) the largest error is computed as 0.74e-6.  That
// of (row_max + lg2(sum)) * LN2 is 1.1e-6, or 2.4e-6 where lg2 errs by the 2^-22 that PTX allows, and that of an exact
// maximum and a rounded logarithm, all in float32, 0.95e-6.
DEVICE float lse_of(float row_max, float sum) {
  const int bits = __float_as_int(sum);
  const float exponent = float((bits >> 23) - 127), rest = lg2(__int_as_float(bits & 0x7fffff | 0x3f800000));
  const float whole = row_max + exponent, rounded_off = row_max - (whole - exponent);
  return sum < PLUS_INFINITY ? fmaf(whole, LN2, (rounded_off + rest) * LN2) : sum;
}

// P of a key beyond which its row's maximum follows it: `share` of what the row has added up, from 1 to `most`.
DEVICE float lag_limit(float sum, float share, float most) {
  const float row_sum = quad_sum(sum);
  return row_sum == 0.f ? most : fminf(fmaxf(share * row_sum, 1.f), most);
}

// Two rows of a 16-row block of S in one thread: accumulator elements 0 and 1 are of row 0, elements 2 and 3 of row 1.
struct OnlineSoftmax {
  float row_max[2] = {MINUS_INFINITY, MINUS_INFINITY};  // so far, scaled; it may lag; -inf: nothing seen
  float sum[2] = {0.f, 0.f};                            // over this thread's columns

  // The maxima follow keys that outweigh a share of their rows (lag_limit), and the sums follow them; O is to follow by
  // `factor` where the result is true.
  template <int N> DEVICE bool track(const float (&s)[N][4], float scale, float share, float most, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float highest = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (int j = 1; j < N; j++) highest = fmaxf(highest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      highest = quad_max(highest) * scale;
      const float before = row_max[r];
      if (ex2(highest - before) > lag_limit(sum[r], share, most)) row_max[r] = highest;
      factor[r] = ex2(before - subtracted(r));
      sum[r] *= factor[r];
    }
    return factor[0] != 1.f || factor[1] != 1.f;
  }

  // S becomes P = 2^(scale * S - row_max), and the sums grow by it.
  template <int N> DEVICE void to_probabilities(float (&s)[N][4], float scale) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float &a = s[j][2 * r], &b = s[j][2 * r + 1];
        a = ex2(fmaf(a, scale, -subtracted(r)));
        b = ex2(fmaf(b, scale, -subtracted(r)));
        sum[r] += a + b;
      }
  }

  DEVICE float subtracted(int r) const { return row_max[r] == MINUS_INFINITY ? 0.f : row_max[r]; }
};
