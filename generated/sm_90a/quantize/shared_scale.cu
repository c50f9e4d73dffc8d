// quantize: bfloat16, head_dim 128, less a mean, rotated in 128 columns, as e4m3, on sm_90a
// tiles of 128 rows, 2 lanes a row: 256 threads, 56016 bytes shared

// ---------------------------------------------------------------- types
#define DEVICE __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what one instruction moves

// ---------------------------------------------------------------- fewer registers kept through a loop
// Indices of thread and block, read anew at each use.
DEVICE int thread_index() { int i; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i)); return i; }

// ---------------------------------------------------------------- addresses of shared memory, as PTX takes them
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---------------------------------------------------------------- cp.async: global to shared memory
// Sixteen bytes; with `valid` false zeros are written and nothing is read.
DEVICE void cp_async_16(u32 shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared), "l"(global), "r"(bytes) : "memory");
}

DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups are still on their way.
template <int N> DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// ---------------------------------------------------------------- redux.sync: one value of a warp's
DEVICE u32 redux_max(u32 x) { asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(x)); return x; }

// ---------------------------------------------------------------- mul.wide: all 64 bits of a product
// In an instruction.  Of u64 whose upper halves are 0, the compiler adds up the partial products.
DEVICE u64 mul_wide_u32(u32 a, u32 b) { u64 d; asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b)); return d; }

// ---------------------------------------------------------------- griddepcontrol: kernels that start before others end
// Until the kernel before this one on its stream has ended, and all that it wrote is there to see.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel behind this one may start once all blocks have come here: its blocks take the places of those that leave.
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---------------------------------------------------------------- arithmetic
#define PLUS_INFINITY __int_as_float(0x7f800000)

// Four floats as e4m3, the first in the lowest byte; beyond 448 that.
DEVICE u32 cvt_e4m3x4(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// A stored element as a float.
DEVICE float from_bf16(u16 x) { return __int_as_float(x << 16); }

// ---------------------------------------------------------------- progress: words by which blocks wait for each other
DEVICE u32 load_relaxed(const u32* word) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEVICE void store_relaxed(u32* word, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(word), "r"(value) : "memory");
}

DEVICE u32 atom_add(u32* counter, u32 x) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

DEVICE void nanosleep(u32 duration) { asm volatile("nanosleep.u32 %0;" :: "r"(duration)); }

// ---------------------------------------------------------------- quotients by numbers that the host knows
// Of n from 0 on.  The lower half of `by` is multiplied, the upper is how far the product shifts.
DEVICE int quotient_by(int n, u64 by) { return mul_wide_u32(n, (u32)by) >> (u32)(by >> 32); }

// ---------------------------------------------------------------- tiles of rows, which thread blocks take one by one
constexpr int HEAD_DIM = 128;
constexpr int TILE = 128;  // rows of a tile
constexpr int LANES = 2, ROWS = 32 / LANES;  // lanes that share a row; rows of a warp
constexpr int WARPS = TILE / ROWS, THREADS = 32 * WARPS;
constexpr int ROW_CHUNKS = HEAD_DIM / 8, CHUNKS = ROW_CHUNKS / LANES;  // of 8 elements: of a row, and a lane's of it
constexpr int ROWS_AT_ONCE = 32 / ROW_CHUNKS, CODES_AT_ONCE = 32 / (ROW_CHUNKS / 2);  // that a warp copies, and writes
constexpr int PITCH = 18;  // chunks from row to row in shared memory
constexpr int CODES_PITCH = 144;  // bytes from row to row of codes there
constexpr float LARGEST = 448.f;  // of e4m3
constexpr float LEAST = 7.8886091e-31f;  // 2^-100: what a peak counts as at least, so that its reciprocal is finite

struct Tensor {
  const u16* x;
  unsigned char* codes;
  float* descales;
  u32* peaks;
  const float* mean;
  i64 x_batch;
  i64 x_head;
  i64 x_row;
  i64 codes_batch;
  i64 codes_head;
  i64 codes_row;
  u64 by_batch;
  u64 by_heads;
  u64 by_group;
  u64 by_scale;
  int heads;
  int length;
  int tiles;
  int rotated;
  int tiles_of_scale;
  int scales;
  int group;
};

struct Params {
  Tensor of[3];  // those behind the last have no tiles
  u32* ticket;
  int tiles;
  int lead;
  u32 signs[8];
};
static_assert(sizeof(Params) == 504, "Python counts as C++ does");

// Rows of a tensor, from `row` on; none where tensor is negative.
struct Tile { int tensor, batch, head, row; };

// Its peak is found, or its codes made.  Of all scales it has this one, and of `sharing` tiles that have it the place.
struct Work { Tile tile; int codes, scale, own, sharing; };

// The largest of those peaks that a thread block awaited last, which lie there.
struct Known { const u32* peaks; u32 most; };

struct Shared {
  Chunk x[WARPS][ROWS * PITCH];  // the next tile's rows, on their way
  alignas(16) unsigned char codes[WARPS][ROWS * CODES_PITCH];
  alignas(16) float signs[HEAD_DIM];
  u32 peaks[2][WARPS];  // of this tile and of the next
  Known known;
  Work work[4];  // what this thread block does: now, next, and after that; one is that before
};
static_assert(sizeof(Shared) == 56016, "Python counts as C++ does");

typedef float Rows[CHUNKS][8];

DEVICE bool found(const Tile& at) { return at.tensor >= 0; }

// The n-th tile.  Heads are neighbours: their rows often lie side by side, and share angles.
DEVICE Tile tile_of(int n, const Params& p) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const Tensor& t = p.of[i];
    if (n < t.tiles) {
      const int blocks = (t.length + TILE - 1) / TILE, batch = quotient_by(n, t.by_batch), rest = n - batch * (t.heads * blocks);
      const int groups = quotient_by(rest, t.by_group), within = rest - groups * (t.group * blocks);
      const int block = quotient_by(within, t.by_heads);
      return {i, batch, groups * t.group + within - block * t.group, block * TILE};
    }
    n -= t.tiles;
  }
  return {-1, 0, 0, 0};
}

// Chunk i of a lane has this column and the seven behind it.
DEVICE int column(int i) { return 8 * (threadIdx.x % LANES + LANES * i); }

// A lane's row of a tile.
DEVICE int row_of(const Tile& at) { return at.row + threadIdx.x / LANES; }

// Whether a lane has a row from the i-th on: as many rows as CHUNKS_OF_ONE fit a warp are copied at a time.
template <int CHUNKS_OF_ONE, int COUNT> DEVICE bool is_one_of(int of_warp, int i) {
  constexpr int AT_ONCE = 32 / CHUNKS_OF_ONE;
  return (32 % CHUNKS_OF_ONE == 0 || of_warp < AT_ONCE) && (COUNT % AT_ONCE == 0 || of_warp + i < COUNT);
}

// Starts the copy of a warp's rows, side by side; rows behind the last are 0.
DEVICE void fetch(Shared& sm, const Tile& at, const Params& p) {
  if (found(at)) {
    const Tensor& t = p.of[at.tensor];
    const int thread = threadIdx.x, of_warp = thread % 32 / ROW_CHUNKS, chunk = thread % 32 % ROW_CHUNKS;
    const int row = at.row + thread / 32 * ROWS + of_warp;
    const u16* source = t.x + at.batch * t.x_batch + at.head * t.x_head + row * t.x_row + chunk * 8;
    const u32 to = shared_address(sm.x[thread / 32]) + (of_warp * PITCH + chunk) * 16;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
      const bool there = row + i < t.length;
      if (is_one_of<ROW_CHUNKS, ROWS>(of_warp, i)) cp_async_16(to + i * PITCH * 16, there ? source + i * t.x_row : t.x, there);
    }
  }
  cp_async_commit_group();
}

// The chunk of a lane's row that has this column.
DEVICE Chunk chunk_of(const Shared& sm, int column) {
  return sm.x[threadIdx.x / 32][threadIdx.x % 32 / LANES * PITCH + column / 8];
}

DEVICE float element(const Chunk& chunk, int j) { return from_bf16(u16(chunk.word[j / 2] >> 16 * (j % 2))); }

DEVICE void widen(float (&x)[8], const Chunk& chunk) {
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = element(chunk, j);
}

// Rows less the mean of all keys; rows behind the last stay 0.
DEVICE void centre(Rows& x, const Tile& at, const Tensor& t) {
  const float* mean = t.mean + ((i64)at.batch * t.heads + at.head) * HEAD_DIM;
  const float times = row_of(at) < t.length ? -1.f : 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float4 of = *(const float4*)(mean + column(i) + j);
      x[i][j] = fmaf(of.x, times, x[i][j]);
      x[i][j + 1] = fmaf(of.y, times, x[i][j + 1]);
      x[i][j + 2] = fmaf(of.z, times, x[i][j + 2]);
      x[i][j + 3] = fmaf(of.w, times, x[i][j + 3]);
    }
  }
}

// 1, or -1 where a column changes its sign.
DEVICE void spread_signs(Shared& sm, const Params& p) {
  for (int i = threadIdx.x; i < HEAD_DIM; i += THREADS) sm.signs[i] = p.signs[i / 32] >> i % 32 & 1u ? -1.f : 1.f;
}

DEVICE void butterfly(float& a, float& b) { const float sum = a + b; b = a - b; a = sum; }

// Signs, then the fast Walsh-Hadamard transform of COUNT chunks of each lane, from FIRST on: columns 1, 2, 4 ... apart.
template <int FIRST, int COUNT> DEVICE void rotate(Rows& x, float factor, const Shared& sm) {
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; ++i) {
    float signs[8];
    *(float4*)signs = *(const float4*)(sm.signs + column(i));
    *(float4*)(signs + 4) = *(const float4*)(sm.signs + column(i) + 4);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {  // a product with a sign is exact: so are these those of butterfly()
      const float b = x[i][j + 1] * signs[j + 1];
      x[i][j + 1] = fmaf(x[i][j], signs[j], -b);
      x[i][j] = fmaf(x[i][j], signs[j], b);
    }
#pragma unroll
    for (int apart = 2; apart < 8; apart *= 2)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (!(j & apart)) butterfly(x[i][j], x[i][j | apart]);
  }
#pragma unroll
  for (int apart = 1; apart < LANES; apart *= 2) {
    const float sign = threadIdx.x & apart ? -1.f : 1.f;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = fmaf(x[i][j], sign, __shfl_xor_sync(~0u, x[i][j], apart));
  }
#pragma unroll
  for (int apart = 1; apart < COUNT; apart *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (!(i & apart)) butterfly(x[FIRST + i][j], x[FIRST + (i | apart)][j]);
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i][j] *= factor;
}

// The rows as they are quantised; those of the next tile are on their way then.
DEVICE void prepare(Rows& x, Shared& sm, const Tile& at, const Tile& next, const Params& p) {
  const Tensor& t = p.of[at.tensor];
  cp_async_wait_group<0>();
  __syncwarp();
  Chunk chunks[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) chunks[i] = chunk_of(sm, column(i));
  __syncwarp();
  fetch(sm, next, p);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) widen(x[i], chunks[i]);
  if (t.mean) centre(x, at, t);
  if (t.rotated) {
    rotate<0, 8>(x, 0.0883883461356163f, sm);  // 128 columns
  }
}

// The largest size of a lane's elements; no maximum takes a NaN.
DEVICE float largest(const Rows& x) {
  float most = LEAST;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[i][j]));
  return most;
}

// Infinities become NaN, which e4m3 has.
DEVICE void lose_infinities(Rows& x) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i][j] = fmaf(x[i][j], 0.f, x[i][j]);
}


// Four floats as e4m3, the first in the lowest byte: to nearest even, beyond 448 that.
DEVICE u32 to_e4m3x4(float a, float b, float c, float d) { return cvt_e4m3x4(a, b, c, d); }

// Rows scaled so that their peak is LARGEST: through shared memory, so that neighbours in a warp write side by side.
DEVICE void store(const Rows& x, float peak, Shared& sm, const Tile& at, const Tensor& t) {
  const float factor = LARGEST / peak;
  unsigned char* codes = sm.codes[threadIdx.x / 32];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = x[i][j] * factor;
    const uint2 stored = {to_e4m3x4(y[0], y[1], y[2], y[3]), to_e4m3x4(y[4], y[5], y[6], y[7])};
    *(uint2*)(codes + threadIdx.x % 32 / LANES * CODES_PITCH + column(i)) = stored;
  }
  __syncwarp();
  const int thread = threadIdx.x, of_warp = thread % 32 / (ROW_CHUNKS / 2);
  const int column = thread % 32 % (ROW_CHUNKS / 2) * 16, row = at.row + thread / 32 * ROWS + of_warp;
  unsigned char* to = t.codes + at.batch * t.codes_batch + at.head * t.codes_head + row * t.codes_row + column;
  codes += of_warp * CODES_PITCH + column;
#pragma unroll
  for (int i = 0; i < ROWS; i += CODES_AT_ONCE) {
    if (is_one_of<ROW_CHUNKS / 2, ROWS>(of_warp, i) && row + i < t.length)
      *(uint4*)to = *(const uint4*)(codes + i * CODES_PITCH);
    to += CODES_AT_ONCE * t.codes_row;
  }
}

// Tiles share a scale: a thread block looks at a tile's peak, and later this one or another, when all that share the
// scale have been looked at, reads the tile again, from L2, and makes codes.  Both are work that tickets hand out, so
// that what a block waits for others do already: first the peaks of `lead` tiles, then codes and peaks in turn.
DEVICE Work work_on(const Tile& at, int codes, const Params& p) {
  if (!found(at)) return {at, codes};
  const Tensor& t = p.of[at.tensor];
  const int number = at.row / TILE, of_head = quotient_by(number, t.by_scale), before = of_head * t.tiles_of_scale;
  return {at, codes, (at.batch * t.heads + at.head) * t.scales + of_head, number - before,
          min(t.tiles_of_scale, (t.length + TILE - 1) / TILE - before)};
}

DEVICE Work work_of(int ticket, const Params& p) {
  const int behind = ticket - p.lead, in_turn = 2 * (p.tiles - p.lead);
  if (behind < 0) return work_on(tile_of(ticket, p), 0, p);
  if (behind >= in_turn) return work_on(tile_of(behind - in_turn / 2, p), 1, p);
  return work_on(tile_of(behind % 2 ? behind / 2 : p.lead + behind / 2, p), behind % 2, p);
}

constexpr u32 INFINITE = 1u << 31;  // beside the bits of a peak: there are infinities, or were

// The largest of a warp's peaks, without that bit, beside it, where any lane has it.
DEVICE u32 joined(u32 peak, u32 any) {
  return redux_max(peak) | (__any_sync(~0u, any & INFINITE) ? INFINITE : 0u);
}

// Where the peaks of tiles lie that share a scale.
DEVICE u32* peaks_of(const Work& work, const Params& p) {
  const Tile& at = work.tile;
  const Tensor& t = p.of[at.tensor];
  return t.peaks + (i64)work.scale * t.tiles_of_scale;
}

// The first of them, which are mostly there already: 0 is none.
struct Seen { u32 first, second; };

DEVICE Seen look(const u32* peaks, int count) {
  const int lane = threadIdx.x % 32;
  Seen seen = {1, 1};  // less than any
  if (lane < count) seen.first = load_relaxed(peaks + lane);
  if (lane + 32 < count) seen.second = load_relaxed(peaks + lane + 32);
  return seen;
}

// The largest of them, at each lane of a warp, when all are there.  A long head's are many, and known from the last tile.
DEVICE u32 await_peaks(const Seen& seen, const u32* peaks, int count, Known& known) {
  if (count > 64 && known.peaks == peaks) return known.most;
  u32 most = max(seen.first & ~INFINITE, seen.second & ~INFINITE), any = seen.first | seen.second;
  bool all = count <= 64 && seen.first != 0 && seen.second != 0;
  while (!__all_sync(~0u, all)) {
    all = true;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const u32 peak = load_relaxed(peaks + i);
      all &= peak != 0;
      any |= peak;
      most = max(most, peak & ~INFINITE);
    }
    nanosleep(20);
  }
  most = joined(most, any);
  if (threadIdx.x % 32 == 0) known = {peaks, most};
  __syncwarp();
  return most;
}

// Hands over the largest finite size of a tile's elements, and that there are others.
DEVICE void show_peak(Rows& x, const Work& work, Shared& sm, int parity, const Params& p) {
  u32 most = __float_as_int(largest(x)), any = 0;  // floats above 0 are in the order of their bits
  if (most == __float_as_int(PLUS_INFINITY)) {
    lose_infinities(x);
    most = __float_as_int(largest(x));
    any = INFINITE;
  }
  const u32 of_warp = joined(most, any);
  const int thread = thread_index();  // no lane and no warp is kept in a register for it
  if (thread % 32 == 0) sm.peaks[parity][thread / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x < 32) {
    const u32 of_lane = sm.peaks[parity][threadIdx.x % WARPS], of_tile = joined(of_lane & ~INFINITE, of_lane);
    if (threadIdx.x == 0) store_relaxed(peaks_of(work, p) + work.own, of_tile);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) quantize(const __grid_constant__ Params p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& sm = *(Shared*)memory;
  if (threadIdx.x == 0) {
    sm.known.peaks = nullptr;
    const int first = atom_add(p.ticket, 2);
    sm.work[0] = work_of(first, p);
    sm.work[1] = work_of(first + 1, p);
  }
  spread_signs(sm, p);
  __syncthreads();
  fetch(sm, sm.work[0].tile, p);
#pragma unroll 1
  for (int i = 0; found(sm.work[i % 4].tile); ++i) {
    const Work& work = sm.work[i % 4];
    const int ticket = threadIdx.x == 0 ? atom_add(p.ticket, 1) : 0;
    Seen seen;
    if (work.codes && threadIdx.x / 32 == 1) seen = look(peaks_of(work, p), work.sharing);
    Rows x;
    prepare(x, sm, work.tile, sm.work[(i + 1) % 4].tile, p);
    if (threadIdx.x == 0) sm.work[(i + 2) % 4] = work_of(ticket, p);
    __syncwarp();  // after a long search thread 0 stayed apart else, and its copies came late
    if (work.codes) {
      if (threadIdx.x / 32 == 1) {  // while the first warp finds work
        const u32 peak = await_peaks(seen, peaks_of(work, p), work.sharing, sm.known);
        if (threadIdx.x == 32) {
          sm.peaks[i % 2][0] = peak;
          if (work.own == 0) p.of[work.tile.tensor].descales[work.scale] = __int_as_float(peak & ~INFINITE) / LARGEST;
        }
      }
      __syncthreads();
      const Tensor& t = p.of[work.tile.tensor];
      const u32 peak = sm.peaks[i % 2][0];
      if (peak & INFINITE) lose_infinities(x);
      store(x, __int_as_float(peak & ~INFINITE), sm, work.tile, t);
    } else {
      show_peak(x, work, sm, i % 2, p);
    }
  }
}
