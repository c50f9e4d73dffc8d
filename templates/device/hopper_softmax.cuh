// ---------------------------------------------------------------- softmax of a tile in the registers of wgmma
// Warp w, lane l of a warpgroup holds rows 16 w + l / 4 and eight further down of an m64nN accumulator; element
// 4 j + 2 r + e of its array is row r (0 or 1) of these, column 8 j + 2 (l % 4) + e.
//
// Per row: what is subtracted in the exponent (the highest scaled score so far, or less), and two sums over this lane's
// keys: of P for lse, and of P as the product with V takes it, by which O is divided.  A key that outweighs all others
// is exact that way, whatever is subtracted: its rounded P cancels.
struct RowState { float row_max[2], sum[2], rounded_sum[2]; };

// A row that has seen nothing: below every score, and finite, so that P of a hidden score of -inf is 2^-inf.
DEVICE RowState nothing_seen() { return {{-3e38f, -3e38f}, {0.f, 0.f}, {0.f, 0.f}}; }

// The highest of row r over the four lanes that share it.
template <int N> DEVICE float highest_of_row(const float (&s)[N], int r) {
  float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
  for (int i = 2 * r + 4; i < N; i += 4) {
    even = fmaxf(even, s[i]);
    odd = fmaxf(odd, s[i + 1]);
  }
  return quad_max(fmaxf(even, odd));
}

// The maxima follow the highest of scale * S where these are more than `slack` above: true if one of this lane's did.
template <int N> DEVICE bool follow(float (&row_max)[2], const float (&s)[N], float scale, float slack) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float highest = highest_of_row(s, r);
    moves[r] = fmaf(highest, scale, -row_max[r]) > slack;
    // By the instruction of the exponents: of a plain product ptxas makes a worse plan of registers (2%, head_dim 128).
    if (moves[r]) row_max[r] = fmaf(highest, scale, 0.f);
  }
  return moves[0] || moves[1];
}

// What P of a tile adds to both sums.
struct Added { float sum[2], rounded_sum[2]; };

// S becomes P = 2^(scale * S - row_max); what that adds.  ROUND is that of the product with V.
template <void ROUND(float&, float&), int N>
DEVICE Added exponentiate_rows(float (&s)[N], float scale, const float (&row_max)[2]) {
  Added added = {};
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
      float low = s[i] = ex2(fmaf(s[i], scale, -row_max[r])), high = s[i + 1] = ex2(fmaf(s[i + 1], scale, -row_max[r]));
      added.sum[r] += low + high;
      ROUND(low, high);
      added.rounded_sum[r] += low + high;
    }
  return added;
}

template <int N> DEVICE void multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[i / 2 % 2];
}
