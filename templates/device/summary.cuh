// ---------------------------------------------------------------- what a warp finds of values
DEVICE Truth over_warp_bool(Truth a) {
  return {__ballot_sync(~0u, a.may_true) != 0, __ballot_sync(~0u, a.may_false) != 0};
}

template <typename T> DEVICE Range<T> over_warp(Range<T> a) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) a = either(a, {__shfl_xor_sync(~0u, a.lo, i), __shfl_xor_sync(~0u, a.hi, i)});
  return a;
}

DEVICE FloatRange over_warp_f32(FloatRange a) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const float lo = float(a.lo), hi = float(a.hi);
    a = either_f32(a, {__shfl_xor_sync(~0u, lo, i), __shfl_xor_sync(~0u, hi, i), a.nan});
  }
  return {a.lo, a.hi, __ballot_sync(~0u, a.nan) != 0};
}

// What a value may be over positions from first to last, each looked at by one lane.
template <typename F> DEVICE Truth extremes_bool(int first, int last, const F& value) {
  const int lane = threadIdx.x % 32;
  Truth found = truth(value(min(first + lane, last)));
  for (int i = first + lane + 32; i <= last; i += 32) found = either_bool(found, truth(value(i)));
  return over_warp_bool(found);
}

template <typename T, typename F> DEVICE Range<T> extremes(int first, int last, const F& value) {
  const int lane = threadIdx.x % 32;
  Range<T> found = single<T>(value(min(first + lane, last)));
  for (int i = first + lane + 32; i <= last; i += 32) found = either(found, single<T>(value(i)));
  return over_warp(found);
}

template <typename F> DEVICE FloatRange extremes_f32(int first, int last, const F& value) {
  const int lane = threadIdx.x % 32;
  FloatRange found = single_f32(value(min(first + lane, last)));
  for (int i = first + lane + 32; i <= last; i += 32) found = either_f32(found, single_f32(value(i)));
  return over_warp_f32(found);
}

// What a condition may be over rows of so many pairs at most, of which each lane looks at one of 32.  Its bits are
// kept, a word for each 32, in rows of so many words.
template <int PAIRS, typename F>
DEVICE Truth rows_of_bits(int row_first, int row_last, int first, int last, const F& value, u32* bits, i64 words) {
  constexpr int ROWS = 8, WORDS = (PAIRS + 31) / 32;  // on their way together
  const int lane = threadIdx.x % 32;
  Truth all = {false, false};
#pragma unroll 1
  for (int row = row_first; row <= row_last; row += ROWS) {
    bool found[WORDS][ROWS];
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) found[j][i] = value(min(row + i, row_last), min(first + j * 32 + lane, last));
    }
    u32 mine[WORDS] = {};
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      const u32 inside = __ballot_sync(~0u, first + j * 32 + lane <= last);
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        const u32 word = __ballot_sync(~0u, found[j][i]) & inside;
        all = either_bool(all, {word != 0, word != inside});
        if (i == lane) mine[j] = word;
      }
    }
    if (lane < ROWS && row + lane <= row_last) {
#pragma unroll
      for (int j = 0; j < WORDS; j++) bits[(row - row_first + lane) * words + j] = mine[j];
    }
  }
  return all;
}

// Integers in two groups, up to the middle of their range and above; where all are equal both hold them.
template <typename T> struct Grouped { Range<T> low, high; };

enum Group { LOW_VALUES, HIGH_VALUES };

template <typename T> DEVICE Range<T> of_group(const Grouped<T>& a, Group group) {
  return group == LOW_VALUES ? a.low : a.high;
}

template <typename T> DEVICE T middle(Range<T> a) { return T(u64(a.lo) + (u64(a.hi) - u64(a.lo)) / 2); }

template <typename T, typename F> DEVICE Grouped<T> groups_of(int first, int last, const F& value) {
  const Range<T> all = extremes<T>(first, last, value);
  Range<T> low = single(all.lo), high = single(all.hi);
  for (int i = first + int(threadIdx.x % 32); i <= last; i += 32) {
    const T found = value(i);
    if (found <= middle(all)) low.hi = max(low.hi, found);
    else high.lo = min(high.lo, found);
  }
  return {over_warp(low), over_warp(high)};
}

// What is possible over tiles, or parts of them, from first to last: few, so that one look after the other will do.
DEVICE Truth over_all_bool(const Truth* found, int first, int last) {
  Truth all = found[first];
#pragma unroll 1
  while (first < last) all = either_bool(all, found[++first]);
  return all;
}

template <typename T> DEVICE Range<T> over_all(const Range<T>* found, int first, int last) {
  Range<T> all = found[first];
#pragma unroll 1
  while (first < last) all = either(all, found[++first]);
  return all;
}

DEVICE FloatRange over_all_f32(const FloatRange* found, int first, int last) {
  FloatRange all = found[first];
#pragma unroll 1
  while (first < last) all = either_f32(all, found[++first]);
  return all;
}
