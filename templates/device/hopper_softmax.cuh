// ---------------------------------------------------------------- softmax of one tile, rows spread over quads of lanes
// Registers of wgmma m64nN: warp w, lane l of a warpgroup holds rows 16 w + l / 4 and eight further down; element
// 4 j + 2 r + e of its array is row r (0 or 1) of these, column 8 j + 2 (l % 4) + e.
//
// Per row: the reference that is subtracted in the exponent (a maximum of the scores seen so far, or a little less), and
// the sum of this lane's exponentials.
struct RowState { float reference[2], sum[2]; };

DEVICE RowState no_scores() { return {{NEG_INF, NEG_INF}, {0.f, 0.f}}; }

// How far, as a power of two, a maximum may pass its reference before O is rescaled.
constexpr float RESCALE_LIMIT = 8.f;

// Moves the references after the maxima of `s`; gives what earlier results must be multiplied by, and the offset of the
// exponents to come.  A row that has seen no column yet has reference -inf and offset 0.
template <int N>
DEVICE void update_reference(RowState& row, const float (&s)[N], float scale_log2, float (&rescale)[2], float (&offset)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float even = row.reference[r], odd = s[2 * r + 1];
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
      even = fmaxf(even, s[i]);
      odd = fmaxf(odd, s[i + 1]);
    }
    float top = fmaxf(even, odd);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if ((top - row.reference[r]) * scale_log2 <= RESCALE_LIMIT) top = row.reference[r];
    const float finite = top == NEG_INF ? 0.f : top;
    rescale[r] = exp2_approx((row.reference[r] - finite) * scale_log2);
    offset[r] = finite * scale_log2;
    row.reference[r] = top;
    row.sum[r] *= rescale[r];
  }
}

// s = 2^(scale s - offset), added to the row sums.
template <int N>
DEVICE void exponentiate(RowState& row, float (&s)[N], float scale_log2, const float (&offset)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float even = row.sum[r], odd = 0.f;
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
      even += s[i] = exp2_approx(fmaf(s[i], scale_log2, -offset[r]));
      odd += s[i + 1] = exp2_approx(fmaf(s[i + 1], scale_log2, -offset[r]));
    }
    row.sum[r] = even + odd;
  }
}

template <int N> DEVICE void scale_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[i / 2 % 2];
}
