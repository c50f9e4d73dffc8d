// ---------------------------------------------------------------- sums of a warp: in all, by query, by distance
DEVICE float sum_of_warp(float x) {
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Sums by query that end in a lane.
template <int N>
constexpr int QUERIES_OF_LANE = (N + 3) / 4;

// How far the query of total[i] is behind that of this lane's element 0.
template <int N>
DEVICE int query_of_lane(int i) {
  const int row = threadIdx.x % 32 / 4, sum = i + (row % 2 * 4 + row / 2 % 2 * 2 + row / 4) * QUERIES_OF_LANE<N>;
  return 8 * (sum / 2) + sum % 2;
}

// The sums over the eight lanes of a query, of 2 N queries.  Lanes that have parts of the same sums give away half of
// what they have, step by step, so that each sum ends in one lane.
template <int N>
DEVICE void sum_queries_of_warp(float (&total)[(N + 3) / 4], const float (&sum)[N][2]) {
  constexpr int EACH = QUERIES_OF_LANE<N>;
  const int row = threadIdx.x % 32 / 4;
  float x[4 * EACH], y[2 * EACH];
#pragma unroll
  for (int i = 0; i < 4 * EACH; i++) {
    const float low = i < 2 * N ? sum[i / 2][i % 2] : 0.f;
    const float high = i + 4 * EACH < 2 * N ? sum[i / 2 + 2 * EACH][i % 2] : 0.f;
    x[i] = (row % 2 ? high : low) + __shfl_xor_sync(~0u, row % 2 ? low : high, 4);
  }
#pragma unroll
  for (int i = 0; i < 2 * EACH; i++)
    y[i] = (row / 2 % 2 ? x[i + 2 * EACH] : x[i]) + __shfl_xor_sync(~0u, row / 2 % 2 ? x[i] : x[i + 2 * EACH], 8);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    total[i] = (row / 4 ? y[i + EACH] : y[i]) + __shfl_xor_sync(~0u, row / 4 ? y[i] : y[i + EACH], 16);
}

// Two lanes next to each other have 2 elements each, x[0] and x[1] of a line, x[2] and x[3] of another.  Then the even
// lane has the 4 elements of the first line, and the odd one those of the second.
DEVICE void exchange_lines(float (&x)[4]) {
  const bool odd = threadIdx.x % 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 2], 1);
    (odd ? x[i] : x[i + 2]) = other;
  }
}

// The distances of a warp, 8 at a time, and those whose sums end in one lane.
template <int M, int N>
constexpr int DISTANCES = 2 * M + N;

template <int M, int N>
constexpr int DISTANCES_OF_LANE = (DISTANCES<M, N> + 3) / 4;

// Sums over what this lane has of one distance: sum[s][e] is 8 (s - 2 M + 1) + e further apart than element 0.
// x[m][j][i] is element i of 16 keys by 8 queries of S^T: query 8 j + i % 2 and key 16 m + i / 2 * 8 behind those of
// element 0, which are 2 (l % 4) and l / 4 behind the warp's first (lane l).
template <int M, int N>
DEVICE void sum_diagonals(float (&sum)[DISTANCES<M, N> - 1][2], const float (&x)[M][N][4]) {
#pragma unroll
  for (int s = 0; s < DISTANCES<M, N> - 1; s++) sum[s][0] = sum[s][1] = -0.f;  // what is added to it is the sum
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[2 * (M - m) - 1 + j - i / 2][i % 2] += x[m][j][i];
}

// How much further apart total[i] of this lane is than the warp's first element.
template <int M, int N>
DEVICE int distance_of_lane(int i) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  return 8 * (i + (row / 2 % 2 * 2 + row / 4) * DISTANCES_OF_LANE<M, N> - 2 * M) + (2 * lane - row & 7);
}

// The sums over the warp, likewise.  Distances of one remainder by 8 lie in lanes of even rows, and one column further
// in those of odd rows: so what a lane has of its second column goes to a lane of another row first.
template <int M, int N>
DEVICE void sum_diagonals_of_warp(
    float (&total)[DISTANCES_OF_LANE<M, N>], const float (&sum)[DISTANCES<M, N> - 1][2]) {
  constexpr int EACH = DISTANCES_OF_LANE<M, N>;
  const int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
  // With as many multiples of 8 in all lanes, the first of them before those of element 0.
  float x[4 * EACH][2] = {};
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const bool before = column + e < row;
#pragma unroll
    for (int i = 0; i < DISTANCES<M, N>; i++) {
      const float low = i < DISTANCES<M, N> - 1 ? sum[i][e] : 0.f, high = i > 0 ? sum[i - 1][e] : 0.f;
      x[i][e] = before ? low : high;
    }
  }
  // The lane of the other rows that has a distance of the same remainder.
  const int by_one = (row ^ 1) * 4 + (lane - row % 2 & 3);
  const int by_two = (row ^ 2) * 4 + (lane + 1 - row / 2 % 2 * 2 & 3), by_four = lane ^ 18;
  const bool upper = row / 2 % 2, upper_half = row / 4;
  float y[4 * EACH] = {}, z[2 * EACH];
#pragma unroll
  for (int i = 0; i < DISTANCES<M, N>; i++) y[i] = x[i][0] + __shfl_sync(~0u, x[i][1], by_one);
#pragma unroll
  for (int i = 0; i < 2 * EACH; i++) {
    const float kept = upper ? y[i + 2 * EACH] : y[i], given = upper ? y[i] : y[i + 2 * EACH];
    z[i] = kept + __shfl_sync(~0u, given, by_two);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float kept = upper_half ? z[i + EACH] : z[i], given = upper_half ? z[i] : z[i + EACH];
    total[i] = kept + __shfl_sync(~0u, given, by_four);
  }
}

// Of sums by element: those of one, which are then 0.
template <int N>
DEVICE float take_sum(float (&sum)[N], const i64 (&index)[N], i64 element) {
  float taken = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (index[i] == element) {
      taken += sum[i];
      sum[i] = 0.f;
    }
  return taken;
}

// Whether two of this lane that are not 0 are of one element.
template <int N>
DEVICE bool shares_element(const float (&sum)[N], const i64 (&index)[N]) {
  bool shares = false;
#pragma unroll
  for (int i = 1; i < N; i++) shares |= sum[i - 1] != 0.f && sum[i] != 0.f && index[i - 1] == index[i];
  return shares;
}

// An element of which two sums of one lane are; there is one in the warp.
template <int N>
DEVICE i64 shared_element(const float (&sum)[N], const i64 (&index)[N]) {
  i64 element = 0;
#pragma unroll
  for (int i = 1; i < N; i++)
    if (sum[i - 1] != 0.f && sum[i] != 0.f && index[i - 1] == index[i]) element = index[i];
  return __shfl_sync(~0u, element, __ffs(__ballot_sync(~0u, shares_element(sum, index))) - 1);
}
