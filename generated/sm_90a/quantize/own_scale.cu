// quantize: bfloat16, head_dim 128, rotated in 128 columns, as e4m3, on sm_90a
// a thread block has 128 rows, 4 lanes a row: 256 threads

// ---------------------------------------------------------------- types
#define DEVICE __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what one instruction moves

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

// ---------------------------------------------------------------- a block of rows in registers
constexpr int HEAD_DIM = 128;
constexpr int BLOCK = 128;  // rows of a thread block
constexpr int LANES = 4, ROWS = 2;  // lanes that share a row; rows of a lane
constexpr int CHUNKS = HEAD_DIM / 8 / LANES;  // of 8 elements that a lane has of a row
constexpr int THREADS = BLOCK / ROWS * LANES, WARPS = (THREADS + 31) / 32;
constexpr float LARGEST = 448.f;  // of e4m3
constexpr float LEAST = 7.8886091e-31f;  // 2^-100: what a peak counts as at least, so that its reciprocal is finite

struct Params {
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
  int heads;
  int length;
  int blocks_of_scale;
  u32 signs[8];
};
static_assert(sizeof(Params) == 136, "Python counts as C++ does");

typedef float Rows[ROWS][CHUNKS][8];

// What a thread block works on: its head of a sequence, the first of its rows, and the scale that it has.
struct Place { int batch, head, row; i64 scale; };

DEVICE Place place(const Params& p) {
  const int blocks = (p.length + BLOCK - 1) / BLOCK, scales = (blocks + p.blocks_of_scale - 1) / p.blocks_of_scale;
  const int block = blockIdx.x % blocks, of = blockIdx.x / blocks;
  return {of / p.heads, of % p.heads, block * BLOCK, (i64)of * scales + block / p.blocks_of_scale};
}

// Chunk i of a lane has this column and the seven behind it.
DEVICE int column(int i) { return 8 * (threadIdx.x % LANES + LANES * i); }

// Row r of a lane.
DEVICE int row_of(int r) { return threadIdx.x / LANES + THREADS / LANES * r; }

DEVICE void load(Rows& x, const Place& at, const Params& p) {
  const u16* source = p.x + at.batch * p.x_batch + at.head * p.x_head;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = at.row + row_of(r);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const Chunk chunk =
          row < p.length ? *(const Chunk*)(source + row * p.x_row + column(i)) : Chunk{0u, 0u, 0u, 0u};
#pragma unroll
      for (int j = 0; j < 8; ++j) x[r][i][j] = from_bf16(u16(chunk.word[j / 2] >> 16 * (j % 2)));
    }
  }
}

// Columns whose bit is set change their sign.
DEVICE void change_signs(Rows& x, const Params& p) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const u32 signs = p.signs[column(i) / 32] >> column(i) % 32;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[r][i][j] = __int_as_float(__float_as_int(x[r][i][j]) ^ (signs >> j & 1u) << 31);
  }
}

DEVICE void butterfly(float& a, float& b) { const float sum = a + b; b = a - b; a = sum; }

// The fast Walsh-Hadamard transform of COUNT chunks of each lane, from FIRST on: columns that are 1, 2, 4 ... apart.
template <int FIRST, int COUNT> DEVICE void rotate(Rows& x, float factor) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i)
#pragma unroll
      for (int apart = 1; apart < 8; apart *= 2)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (!(j & apart)) butterfly(x[r][i][j], x[r][i][j | apart]);
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2)
#pragma unroll
      for (int i = FIRST; i < FIRST + COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float other = __shfl_xor_sync(~0u, x[r][i][j], apart);
          x[r][i][j] = threadIdx.x & apart ? other - x[r][i][j] : x[r][i][j] + other;
        }
#pragma unroll
    for (int apart = 1; apart < COUNT; apart *= 2)
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (!(i & apart)) butterfly(x[r][FIRST + i][j], x[r][FIRST + (i | apart)][j]);
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[r][i][j] *= factor;
  }
}

// The largest finite value of a thread block's rows, at every thread.
DEVICE float peak_of(const Rows& x) {
  __shared__ float peaks[WARPS];
  float peak = LEAST;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float size = fabsf(x[r][i][j]);
        peak = size < PLUS_INFINITY ? fmaxf(peak, size) : peak;
      }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, apart));
  if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
  __syncthreads();
  for (int warp = 0; warp < WARPS; ++warp) peak = fmaxf(peak, peaks[warp]);
  return peak;
}

// Four floats as e4m3, the first in the lowest byte: to nearest even, beyond 448 that.
DEVICE u32 to_e4m3x4(float a, float b, float c, float d) { return cvt_e4m3x4(a, b, c, d); }

DEVICE void store(const Rows& x, float peak, const Place& at, const Params& p) {
  const float factor = LARGEST / peak;
  unsigned char* codes = p.codes + at.batch * p.codes_batch + at.head * p.codes_head;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = at.row + row_of(r);
    if (row >= p.length) continue;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      float y[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        y[j] = x[r][i][j] * factor;
        y[j] = fmaf(y[j], 0.f, y[j]);  // an infinity becomes a NaN, which e4m3 has
      }
      const uint2 stored = {to_e4m3x4(y[0], y[1], y[2], y[3]), to_e4m3x4(y[4], y[5], y[6], y[7])};
      *(uint2*)(codes + row * p.codes_row + column(i)) = stored;
    }
  }
}

// The rows as they are quantised.
DEVICE void prepare(Rows& x, const Place& at, const Params& p) {
  load(x, at, p);
  change_signs(x, p);
  rotate<0, 4>(x, 0.0883883461356163f);  // 128 columns
}

// Each thread block has a scale of its own.
extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ Params p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Place at = place(p);
  Rows x;
  prepare(x, at, p);
  const float peak = peak_of(x);
  if (threadIdx.x == 0) p.descales[at.scale] = peak / LARGEST;
  store(x, peak, at, p);
}
