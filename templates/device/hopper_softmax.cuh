// ---------------------------------------------------------------- softmax of a tile in the registers of wgmma
// Warp w, lane l of a warpgroup holds rows 16 w + l / 4 and eight further down of an m64nN accumulator; element
// 4 j + 2 r + e of its array is row r (0 or 1) of these, column 8 j + 2 (l % 4) + e.
//
// Per row: a score to subtract in the exponent (the highest so far, or a little less), and the sum of this lane's
// exponentials.
struct RowState { float offset[2], sum[2]; };

DEVICE RowState nothing_seen() { return {{MINUS_INFINITY, MINUS_INFINITY}, {0.f, 0.f}}; }

// The offsets follow the highest scores; gives what earlier results must be multiplied by, and scale * offset, finite
// also for a row that has seen nothing.
template <int N>
DEVICE void follow(RowState& row, const float (&s)[N], float scale, float (&rescale)[2], float (&shift)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float even = row.offset[r], odd = s[2 * r + 1];
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
      even = fmaxf(even, s[i]);
      odd = fmaxf(odd, s[i + 1]);
    }
    const float highest = quad_max(fmaxf(even, odd)), before = row.offset[r];
    if (!((highest - before) * scale <= OFFSET_SLACK)) row.offset[r] = highest;
    const float finite = row.offset[r] == MINUS_INFINITY ? 0.f : row.offset[r];
    shift[r] = finite * scale;
    rescale[r] = ex2((before - finite) * scale);
    row.sum[r] *= rescale[r];
  }
}

// S becomes P = 2^(scale * S - shift), and is added to the sums.
template <int N> DEVICE void exponentiate(RowState& row, float (&s)[N], float scale, const float (&shift)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float even = row.sum[r], odd = 0.f;
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
      s[i] = ex2(fmaf(s[i], scale, -shift[r]));
      s[i + 1] = ex2(fmaf(s[i + 1], scale, -shift[r]));
      even += s[i];
      odd += s[i + 1];
    }
    row.sum[r] = even + odd;
  }
}

// What the exponentials of one tile may add up to in one lane before the offsets must move: float16 holds each of them.
constexpr float TILE_SUM_LIMIT = 32768.f;

template <int N> DEVICE void multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[i / 2 % 2];
}
