// causal_bottom_right: attention forward
// Causal attention whose last query sees the last key: for queries that continue a cache of keys.
//
// visible  k <= q + kv_len - q_len
// plan     ampere on sm_90a, bfloat16, head_dim 128; o bfloat16, k float8_e4m3fn, v float8_e4m3fn, exact P; k and v
//          are widened in the kernel: products in float16, a row of q times a power of two
// tile     16 rows (queries of all heads that share keys) x 64 keys, 2 stages, q in shared memory
// roles    1 compute warp
// launch   overlapping: each kernel of a call starts while the one before it on the stream ends, and waits for it
// shared   q 4096 + k 16384 + v 16384 + q scales 128 = 36992 bytes
// made by  flashgen emit causal_bottom_right --arch sm_90a --pipeline ampere --dtype bfloat16 --head-dim 128
//          --tile 16x64 --stages 2 --k-dtype float8_e4m3fn --v-dtype float8_e4m3fn --packed --split-keys

// ---------------------------------------------------------------- types
#define DEVICE __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what one instruction moves

// ---------------------------------------------------------------- fewer registers kept through a loop
// Indices of thread and block, read anew at each use.
DEVICE int thread_index() { int i; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i)); return i; }

DEVICE int block_index() { int i; asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i)); return i; }

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

// ---------------------------------------------------------------- ldmatrix: four 8 x 8 blocks, a row a lane
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// ---------------------------------------------------------------- shared memory by address
DEVICE uint2 ld_shared_v2(u32 address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}

DEVICE Chunk ld_shared_v4(u32 address) {
  Chunk x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3]) : "r"(address) : "memory");
  return x;
}

// ---------------------------------------------------------------- mma: d (16 x 8, float32) += a (16 x 16) b (16 x 8)
// Lane l holds d[0], d[1] of row l / 4, columns 2 (l % 4) and one further; d[2], d[3] of the row eight below.
DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------- griddepcontrol: kernels that start before others end
// Until the kernel before this one on its stream has ended, and all that it wrote is there to see.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel behind this one may start once all blocks have come here: its blocks take the places of those that leave.
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---------------------------------------------------------------- arithmetic
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float LN2 = 0.69314718055994530942f;
constexpr float SMALLEST = 1.17549435e-38f;  // the least normal float32
#define PLUS_INFINITY __int_as_float(0x7f800000)
#define MINUS_INFINITY __int_as_float(0xff800000)

// 2^x.
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// The logarithm to base 2.
DEVICE float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Two floats rounded to nearest, the first in the low half.
DEVICE u32 cvt_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEVICE u32 cvt_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Two elements of e4m3 as float16, which holds each.
DEVICE u32 cvt_f16x2_e4m3x2(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
}

// A stored element as a float.
DEVICE float from_bf16(u16 x) { return __int_as_float(x << 16); }

// ---------------------------------------------------------------- four elements of 8 bits as two words of 16-bit ones
DEVICE uint2 f16_of_e4m3(u32 four) {
  return make_uint2(cvt_f16x2_e4m3x2(u16(four)), cvt_f16x2_e4m3x2(u16(four >> 16)));
}

// Of two columns of two keys: each column's keys side by side.
DEVICE u32 columns_apart(u32 word) { return __byte_perm(word, 0, 0x3120); }

// ---------------------------------------------------------------- tiles in shared memory
// Rows of 16-byte chunks; chunk c of row r lies at c ^ r / (8 / GROUP) % GROUP, GROUP = gcd(CHUNKS, 8), so that the
// same chunk of eight rows falls into eight different groups of four banks, whatever the width.
template <int ROWS, int COLUMNS> struct alignas(128) SwizzledTile {
  static constexpr int CHUNKS = COLUMNS / 8, GROUP = (CHUNKS | 8) & -(CHUNKS | 8);
  static constexpr int BLOCK = 16 * COLUMNS * 2;  // bytes from a row to the one 16 further down
  u16 element[ROWS][COLUMNS];
  DEVICE u16* at(int row, int chunk) { return &element[row][8 * (chunk ^ row / (8 / GROUP) % GROUP)]; }
  // From the address of chunk 0 of a row to that of a later one; from that of chunk 1, of one an even number further.
  static DEVICE u32 right(u32 address, int chunks) {
    return (address ^ 16 * (chunks % GROUP)) + 16 * (chunks / GROUP * GROUP);
  }
};

DEVICE constexpr int floor_power_of_two(int n) { return n < 2 ? n : 2 * floor_power_of_two(n / 2); }

// Starts to copy `rows` rows of COLUMNS elements from global memory; the tile's other rows and columns become zero.
template <int THREADS, int COLUMNS, int ROWS, int TILE_COLUMNS>
DEVICE void load_tile(
    SwizzledTile<ROWS, TILE_COLUMNS>& tile, const u16* source, i64 row_stride, int rows, int thread = threadIdx.x) {
  constexpr int CHUNKS = TILE_COLUMNS / 8, STEP = floor_power_of_two(THREADS / CHUNKS);  // rows copied at a time
  const int first = thread / CHUNKS, chunk = thread % CHUNKS;
  source += first * row_stride + 8 * chunk;
#pragma unroll
  for (int step = 0; step < ROWS; step += STEP) {
    const int row = first + step;
    if ((THREADS == STEP * CHUNKS || first < STEP) && (ROWS % STEP == 0 || row < ROWS)) {
      const u32 address = shared_address(tile.at(first + step % 8, chunk)) + (step - step % 8) * 2 * TILE_COLUMNS;
      cp_async_16(address, source, row < rows && 8 * chunk < COLUMNS);
    }
    source += STEP * row_stride;
  }
}

// The same of rows of 1 << log2 heads: row r is row r >> log2 of head r % (1 << log2).
template <int THREADS, int COLUMNS, int ROWS, int TILE_COLUMNS>
DEVICE void load_packs(SwizzledTile<ROWS, TILE_COLUMNS>& tile, const u16* source, i64 head_stride, i64 row_stride,
                       int log2, int rows) {
  constexpr int CHUNKS = TILE_COLUMNS / 8;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const u16* there = source + (row & (1 << log2) - 1) * head_stride + (row >> log2) * row_stride + 8 * chunk;
    cp_async_16(shared_address(tile.at(row, chunk)), there, row < rows && 8 * chunk < COLUMNS);
  }
}

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

// ---------------------------------------------------------------- what is known of a tile
enum TileClass { EMPTY, PARTIAL, FULL };  // no, some, all of its pairs are visible

// ---------------------------------------------------------------- plan
constexpr int TILE_Q = 16, TILE_KV = 64;  // rows of q and o, and of k and v, in a tile
constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128;  // columns of q and k, and of v and o
constexpr int QK_COLUMNS = 128, V_COLUMNS = 128;  // in a tile: steps of 16
constexpr int STAGES = 2;  // tiles of k and of v in shared memory
constexpr int WARPS = 1, THREADS = 32 * WARPS, BLOCKS_PER_SM = 6;
constexpr int WARP_ROWS = TILE_Q / WARPS, M = WARP_ROWS / 16;  // rows of a warp, in blocks of 16
constexpr float SHARE = 0.0625f;  // of what a row has added up: a key with more moves its maximum, and O is rescaled
constexpr float MOST = 0x1p15f;  // P that moves it in any case

typedef u16 bf16;

typedef unsigned char fp8;  // two of them are copied as one element of 16 bits

struct Params {
  const bf16* q;
  const fp8* k;
  const fp8* v;
  bf16* o;
  float* lse;
  const float* k_descale;
  const float* v_descale;
  float* part_o;
  float2* part_rows;
  i64 q_batch;
  i64 q_head;
  i64 q_row;
  i64 k_batch;
  i64 k_head;
  i64 k_row;
  i64 v_batch;
  i64 v_head;
  i64 v_row;
  i64 o_batch;
  i64 o_head;
  i64 o_row;
  i64 k_descale_batch;
  i64 k_descale_head;
  i64 k_descale_row;
  i64 v_descale_batch;
  i64 v_descale_head;
  i64 v_descale_row;
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int q_tiles;
  int packs;
  int pack_log2;
  int splits;
  int k_block_log2;
  int v_block_log2;
  float scale;
};
static_assert(sizeof(Params) == 264, "what the host packs");

typedef SwizzledTile<TILE_Q, QK_COLUMNS> QTile;

typedef SwizzledTile<TILE_Q, V_COLUMNS> OTile;

typedef SwizzledTile<TILE_KV, QK_COLUMNS / 2> KTile;

typedef SwizzledTile<TILE_KV, V_COLUMNS / 2> VTile;

struct Shared {
  union { QTile q; OTile o; };  // o after the last product with q
  KTile k[STAGES];
  VTile v[STAGES];
  float q_scale[TILE_Q];
};
static_assert(sizeof(Shared) == 36992, "what the plan counted");

// Row r of a tile is query q_first + (r >> p.pack_log2) of head h + r % (1 << p.pack_log2): heads that share keys read
// them once.
struct Rows { int b, h, q_first, q_last, part; };  // the queries of one tile, clipped to the problem

// ---------------------------------------------------------------- variant
DEVICE bool keep(int b, int h, int q, int k, const Params& p) {
  return k <= q + p.kv_len - p.q_len;
}

// The last tile, not above `tile`, of the keys from k_first to k_last; -1: there is none.
DEVICE int last_tile_of_run(int tile, int k_first, int k_last, const Params& p) {
  k_first = max(k_first, 0);
  k_last = min(k_last, p.kv_len - 1);
  tile = min(tile, k_last / TILE_KV);
  return k_first <= k_last && k_first / TILE_KV <= tile ? tile : -1;
}

// The last tile of keys, not above `tile`, that one of these queries sees a part of; -1: there is none.
DEVICE int previous_tile(int tile, const Rows& rows, const Params& p) {
  return last_tile_of_run(tile, 0, rows.q_last - (p.q_len - p.kv_len), p);
}

DEVICE TileClass classify(const Rows& rows, int kv_tile, const Params& p) {
  const int k_first = kv_tile * TILE_KV, k_last = min(k_first + TILE_KV, p.kv_len) - 1;
  const bool hidden = rows.q_first - k_last < p.q_len - p.kv_len;
  return hidden ? PARTIAL : FULL;
}

// ---------------------------------------------------------------- schedule
struct Step { int tile; bool partial; };  // a tile of keys (negative: none is left), and whether it is to be masked

// The tile to visit after `tile`: from the last key to the first, without those in which nothing is visible.
// A warp looks at 32 tiles at once, a lane at each.
DEVICE Step next_step(int tile, int others, const Rows& rows, const Params& p) {
  const int lane = threadIdx.x % 32;
  while ((tile = previous_tile(tile - 1, rows, p)) >= 0) {
    const TileClass mine = lane <= tile && previous_tile(tile - lane, rows, p) == tile - lane ?
        classify(rows, tile - lane, p) : EMPTY;
    u32 seen = __ballot_sync(~0u, mine != EMPTY), cut = __ballot_sync(~0u, mine == PARTIAL);
    for (; others > 0 && seen != 0; others--) seen &= seen - 1;
    if (seen != 0) {
      const int ahead = __ffs(seen) - 1;
      return {tile - ahead, (cut >> ahead & 1) != 0};
    }
    tile -= 31;
  }
  return {tile, false};
}

// ---------------------------------------------------------------- parts of a row, each of some of its keys
#define NO_PART make_float2(MINUS_INFINITY, -1.f)  // the maximum and the sum where no key was seen: O is not written

// Where the parts of a row of the tensor lie: side by side.
DEVICE i64 part_of(int part, int b, int h, int row, const Params& p) {
  return (((i64)b * p.heads + h) * p.q_len + row) * p.splits + part;
}

// ---------------------------------------------------------------- parts of a row, folded one after another
// What the sum and O of the parts so far are multiplied by, and those of one more.
struct Weights { float before, part; };

// The two roundings are written down: wherever parts are folded, the bits are the same.  What weighs 0 is not looked
// at.
DEVICE float fold(float before, float part, const Weights& weights) {
  const float kept = __fmul_rn(weights.before, before);
  return weights.part == 0.f ? kept : __fmaf_rn(weights.part, part, kept);
}

// Late queries first: under a causal mask they see most.  Tiles of heads that share keys and values are neighbours.
DEVICE Rows rows_of_block(const Params& p) {
  const int tiles = p.q_tiles * p.packs * p.batch, part = block_index() / tiles;
  const int block = block_index() - part * tiles, head = block / p.q_tiles,
      q_first = (p.q_tiles - 1 - block % p.q_tiles) * (TILE_Q >> p.pack_log2);
  return {head / p.packs, head % p.packs << p.pack_log2, q_first, min(q_first + (TILE_Q >> p.pack_log2), p.q_len) - 1,
      part};
}

DEVICE void load_kv(Shared& shared, int stage, const fp8* k, const fp8* v, Step step, const Params& p) {
  if (step.tile >= 0) {
    const int first = step.tile * TILE_KV;
    if (first + TILE_KV <= p.kv_len) {
      load_tile<THREADS, HEAD_DIM / 2>(shared.k[stage], (const u16*)(k + first * p.k_row), p.k_row / 2, TILE_KV);
      load_tile<THREADS, V_HEAD_DIM / 2>(shared.v[stage], (const u16*)(v + first * p.v_row), p.v_row / 2, TILE_KV);
    } else {
      load_tile<THREADS, HEAD_DIM / 2>(shared.k[stage], (const u16*)(k + first * p.k_row), p.k_row / 2,
          p.kv_len - first);
      load_tile<THREADS, V_HEAD_DIM / 2>(shared.v[stage], (const u16*)(v + first * p.v_row), p.v_row / 2,
          p.kv_len - first);
    }
  }
  cp_async_commit_group();
}

// ---------------------------------------------------------------- one tile
// Accumulators: element [m][j][i] is row 16 m + lane / 4 + 8 (i / 2) of the warp, column 8 j + 2 (lane % 4) + i % 2.
typedef float S[M][TILE_KV / 8][4];

typedef float O[M][V_COLUMNS / 8][4];

typedef u32 Q[QK_COLUMNS / 16][M][4];  // the warp's rows, as the A operands of mma

// Of every 16 columns a lane has four side by side, in q as in k: mma takes columns in any order that both share.
DEVICE u32 first_of_q(QTile& q) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * WARP_ROWS + lane / 4;
  return shared_address(q.at(row, lane % 4 / 2)) + lane % 2 * 8;
}

DEVICE void load_q_step(u32 (&a)[4], u32 first, int m, int d) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const uint2 four = ld_shared_v2(QTile::right(first, 2 * d) + (2 * m + r) * (QTile::BLOCK / 2));
    a[r] = four.x;
    a[r + 2] = four.y;
  }
}

DEVICE void load_q(Q& q, Shared& shared) {
  const u32 first = first_of_q(shared.q);
#pragma unroll
  for (int d = 0; d < QK_COLUMNS / 16; d++)
#pragma unroll
    for (int m = 0; m < M; m++) load_q_step(q[d][m], first, m, d);
}

// Rows of q become float16, each times the power of two that brings its largest element to 2^14 or somewhat more: no
// other loses more than 2^-39 of that.  What undoes it lies in shared memory, since registers are dear.
DEVICE void q_to_f16(Q& q, Shared& shared) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * WARP_ROWS + lane / 4;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 highest = 0;  // bits without their signs: unpacked elements would be kept, and spilled
#pragma unroll
      for (int i = 0; i < QK_COLUMNS / 8; i++) {
        const u32 two = q[i / 2][m][r + i % 2 * 2];
        highest = max(highest, max(two << 1, two << 17));
      }
      const int exponent = max(__float_as_int(quad_max(__uint_as_float(highest >> 1))) >> 23, 15);  // biased by 127
      const float up = __int_as_float(268 - exponent << 23);
      if (lane % 4 == 0) shared.q_scale[row0 + 16 * m + 8 * r] = __int_as_float(exponent - 14 << 23);
#pragma unroll
      for (int i = 0; i < QK_COLUMNS / 8; i++) {
        u32& two = q[i / 2][m][r + i % 2 * 2];
        two = cvt_f16x2(up * from_bf16(u16(two)), up * from_bf16(u16(two >> 16)));
      }
    }
  __syncwarp();
}

DEVICE void undo_scales(S& s, const Shared& shared) {
  const float* const scale = shared.q_scale + thread_index() / 32 * WARP_ROWS + thread_index() % 32 / 4;
#pragma unroll
  for (int m = 0; m < M; m++) {
    const float factor[2] = {scale[16 * m], scale[16 * m + 8]};
    scale_rows(s[m], factor);
  }
}

// Where the operand of a step lies once a lane has it side by side, in the room of the warp's rows.
DEVICE Chunk* step_of_q(QTile& q, int m, int d) {
  return (Chunk*)q.element[threadIdx.x / 32 * WARP_ROWS + 16 * m] + 32 * d + threadIdx.x % 32;
}

DEVICE void arrange_q(QTile& q, const Q& fragments) {
  __syncwarp();  // all lanes have read rows
#pragma unroll
  for (int d = 0; d < QK_COLUMNS / 16; d++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      const u32 (&a)[4] = fragments[d][m];
      *step_of_q(q, m, d) = {a[0], a[1], a[2], a[3]};
    }
}

// S = Q K^T of elements as they are: what they count by is a part of the scale.
DEVICE void multiply_qk(S& s, QTile& q, KTile& k) {
  const int lane = threadIdx.x % 32;
  const u32 k_block = shared_address(k.at(lane, 0));
  const u32 first = shared_address(step_of_q(q, 0, 0));
#pragma unroll
  for (int d = 0; d < QK_COLUMNS / 16; d++) {
    if (d % 4 == 0) __syncwarp();  // as below
    Chunk a[M];
#pragma unroll
    for (int m = 0; m < M; m++) a[m] = ld_shared_v4(first + m * QTile::BLOCK + d * 32 * sizeof(Chunk));
#pragma unroll
    for (int n = 0; n < TILE_KV / 32; n++) {
      u32 fours[4];  // of 32 keys
      ldmatrix_x4(fours, KTile::right(k_block, d) + n * 2 * KTile::BLOCK);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint2 b = f16_of_e4m3(fours[i]);
#pragma unroll
        for (int m = 0; m < M; m++) mma_m16n8k16_f16(s[m][4 * n + i], a[m].word, b.x, b.y);
      }
    }
  }
}

// O += descale * P V, P rounded to float16.  A transposed word has two columns of two keys: even columns are the
// B operand of one product, odd ones that of the next, and O keeps them so.
DEVICE void multiply_pv(O& o, const S& p, VTile& v, float descale) {
  const u32 v_block = shared_address(v.at(threadIdx.x % 32, 0));
  u32 a[TILE_KV / 16][M][4];
#pragma unroll
  for (int n = 0; n < TILE_KV / 16; n++)
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float (&pair)[4] = p[m][2 * n + i / 2];
        a[n][m][i] = cvt_f16x2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
#pragma unroll
  for (int j = 0; j < V_COLUMNS / 16; j++) {
    if (j % 2 == 0) __syncwarp();  // else ptxas loads far ahead, and spills what it widens
    float partial[M][2][4] = {};
#pragma unroll
    for (int n = 0; n < TILE_KV / 32; n++) {
      u32 words[4];  // of 32 keys
      ldmatrix_x4_trans(words, VTile::right(v_block, j) + n * 2 * VTile::BLOCK);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 low = columns_apart(words[2 * h]), high = columns_apart(words[2 * h + 1]);
        const uint2 b0 = f16_of_e4m3(low), b1 = f16_of_e4m3(high);
#pragma unroll
        for (int m = 0; m < M; m++) {
          mma_m16n8k16_f16(partial[m][0], a[2 * n + h][m], b0.x, b1.x);
          mma_m16n8k16_f16(partial[m][1], a[2 * n + h][m], b0.y, b1.y);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float& sum = o[m][2 * j + i / 4][i % 4];
        sum = fmaf(descale, partial[m][i / 4][i % 4], sum);
      }
  }
}

// S becomes -inf where the mask hides a key; `first` is the tile's first key.
DEVICE void apply_mask(S& s, const Rows& rows, int first, const Params& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = warp * WARP_ROWS + lane / 4, k0 = first + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < TILE_KV / 8; j++) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int q = rows.q_first + (row0 + 16 * m + i / 2 * 8 >> p.pack_log2);
        const int k = k0 + 8 * j + i % 2;
        if (!keep(rows.b, rows.h, q, k, p)) s[m][j][i] = MINUS_INFINITY;
      }
  }
}

// S becomes -inf beyond the last key; `first` is the tile's first key.
DEVICE void apply_end(S& s, int first, const Params& p) {
  const int k0 = first + thread_index() % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int j = 0; j < TILE_KV / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (k0 + 8 * j + i % 2 >= p.kv_len) s[m][j][i] = MINUS_INFINITY;
}

// O follows the maxima, which follow S.  What comes next, up to P V, is a single run of instructions.
DEVICE void rescale(O& o, OnlineSoftmax (&softmax)[M], const S& s, float scale) {
  float factor[M][2];
  bool moved = false;
#pragma unroll
  for (int m = 0; m < M; m++) moved |= softmax[m].track(s[m], scale, SHARE, MOST, factor[m]);
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int m = 0; m < M; m++) scale_rows(o[m], factor[m]);
  }
}

// ---------------------------------------------------------------- epilogue
// No key was looked at.
DEVICE void store_no_part(const Rows& rows, const Params& p) {
  for (int row = threadIdx.x; row < (rows.q_last - rows.q_first + 1) << p.pack_log2; row += THREADS)
    p.part_rows[part_of(rows.part, rows.b, rows.h + (row & (1 << p.pack_log2) - 1),
        (rows.q_first + (row >> p.pack_log2)), p)] = NO_PART;
}

// O as it is, with the maximum and the sum of each row.
DEVICE void store_part(const O& o, const OnlineSoftmax (&softmax)[M], const Rows& rows, const Params& p) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = quad_sum(softmax[m].sum[r]);
      const int row = warp * WARP_ROWS + 16 * m + 8 * r + lane / 4;
      if (row >= (rows.q_last - rows.q_first + 1) << p.pack_log2) continue;
      const i64 at = part_of(rows.part, rows.b, rows.h + (row & (1 << p.pack_log2) - 1),
          (rows.q_first + (row >> p.pack_log2)), p);
      if (lane % 4 == 0) p.part_rows[at] = make_float2(softmax[m].row_max[r], sum);
      float* const to = p.part_o + at * V_HEAD_DIM + lane % 4 * 4;
#pragma unroll
      for (int d = 0; d < V_HEAD_DIM; d += 16) {
        const float (&even)[4] = o[m][d / 8], (&odd)[4] = o[m][d / 8 + 1];
        *(float4*)(to + d) = make_float4(even[2 * r], odd[2 * r], even[2 * r + 1], odd[2 * r + 1]);
      }
    }
}

// ---------------------------------------------------------------- kernel: FlashAttention-2 (Dao 2023), Algorithm 1
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention_forward(const __grid_constant__ Params p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const Rows rows = rows_of_block(p);
  const int kv_head = rows.h / (p.heads / p.kv_heads);
  const bf16* q = p.q + rows.b * p.q_batch + rows.h * p.q_head + rows.q_first * p.q_row;
  const fp8* k = p.k + rows.b * p.k_batch + kv_head * p.k_head;
  const fp8* v = p.v + rows.b * p.v_batch + kv_head * p.v_head;

  O o = {};
  OnlineSoftmax softmax[M];
  const float* const k_descale = p.k_descale + rows.b * p.k_descale_batch + kv_head * p.k_descale_head;
  const float* const v_descale = p.v_descale + rows.b * p.v_descale_batch + kv_head * p.v_descale_head;
  const float block_scale = p.scale * LOG2E;
  Step coming[STAGES - 1];  // what is on its way to shared memory, in order
  coming[0] = next_step((p.kv_len + TILE_KV - 1) / TILE_KV, rows.part, rows, p);
  if (coming[0].tile < 0) return store_no_part(rows, p);
  if (coming[0].tile >= 0) load_packs<THREADS, HEAD_DIM>(shared.q, q, p.q_head, p.q_row, p.pack_log2,
      (rows.q_last - rows.q_first + 1) << p.pack_log2);
  cp_async_commit_group();
  load_kv(shared, 0, k, v, coming[0], p);
  if (coming[0].tile >= 0) {
    cp_async_wait_group<STAGES - 1>();
    __syncthreads();
    Q q_fragments;
    load_q(q_fragments, shared);
    q_to_f16(q_fragments, shared);
    arrange_q(shared.q, q_fragments);
  }
#pragma unroll 1
  for (int stage = 0; coming[0].tile >= 0; stage = stage + 1 == STAGES ? 0 : stage + 1) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // every warp's part of this stage has arrived, and no warp reads the stage before
    const Step step = coming[0];
    const float k_of_tile = k_descale[(step.tile * TILE_KV >> p.k_block_log2) * p.k_descale_row];
    const float v_of_tile = v_descale[(step.tile * TILE_KV >> p.v_block_log2) * p.v_descale_row];
    const Step later = next_step(coming[STAGES - 2].tile, p.splits - 1, rows, p);
    coming[STAGES - 2] = later;
    load_kv(shared, stage == 0 ? STAGES - 1 : stage - 1, k, v, later, p);

    S s = {};
    multiply_qk(s, shared.q, shared.k[stage]);
    undo_scales(s, shared);
    const int first = step.tile * TILE_KV;
    const float scale = fmaxf(block_scale * k_of_tile, SMALLEST);  // scale 0 times a masked -inf stays -inf
    if (step.partial) apply_mask(s, rows, first, p);
    if (first + TILE_KV > p.kv_len) apply_end(s, first, p);
    rescale(o, softmax, s, scale);
#pragma unroll
    for (int m = 0; m < M; m++) softmax[m].to_probabilities(s[m], scale);
    multiply_pv(o, s, shared.v[stage], v_of_tile);
  }
  store_part(o, softmax, rows_of_block(p), p);  // found again: registers are dear in the loop
}

// ---------------------------------------------------------------- combine: o of its parts, by a warp for each row
constexpr int COMBINE_WARPS = 4;  // of a block
// of 128 columns of o: four in a lane, or one in each thread of a block
constexpr int COLUMN_GROUPS = (V_HEAD_DIM + 127) / 128;

DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// o += weight * part
DEVICE void add_part(float4& o, float weight, const float4& part) {
  o.x = fmaf(weight, part.x, o.x);
  o.y = fmaf(weight, part.y, o.y);
  o.z = fmaf(weight, part.z, o.z);
  o.w = fmaf(weight, part.w, o.w);
}

// Starts to load the parts whose bits are set, the lowest of part `first`, the others of those that come behind it.
template <int AT_ONCE> DEVICE void load_parts(float4 (&o)[AT_ONCE][COLUMN_GROUPS], i64 first, u32 bits,
    const Params& p) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
    for (int group = 0; group < COLUMN_GROUPS; group++)
      if (bits >> i & 1 && 32 * group + lane < V_HEAD_DIM / 4)
        o[i][group] = ((const float4*)(p.part_o + (first + i) * V_HEAD_DIM))[32 * group + lane];
      else o[i][group] = {};
}

DEVICE void scale_part(float4& o, float factor) {
  o = make_float4(factor * o.x, factor * o.y, factor * o.z, factor * o.w);
}

DEVICE void store_columns(bf16* out, const float4& o, float factor) {
  *(uint2*)out = make_uint2(cvt_bf16x2(factor * o.x, factor * o.y), cvt_bf16x2(factor * o.z, factor * o.w));
}
DEVICE void store_columns(bf16* out, float o, float factor) { *out = (bf16)cvt_bf16x2(factor * o, 0.f); }

// A row of o, and what is known of it.
template <typename Columns> struct Combined {
  int b, h, q, count;  // parts
  float row_max, sum;
  Columns o[COLUMN_GROUPS];
};

// Row `index` of o, before any part; false where it is of no sequence.  What it reads the kernel before does not write:
// it is asked before the wait for that one.
template <typename Columns> DEVICE bool begin_row(Combined<Columns>& row, int index, const Params& p) {
  const int head = index / p.q_len;
  row = {};
  row.q = index % p.q_len;
  row.row_max = MINUS_INFINITY;
  row.h = head % p.heads, row.b = head / p.heads;
  if (row.b >= p.batch) return false;
  row.count = p.splits;
  return true;
}

// Its columns from `column` on, and from 128 behind it.
template <typename Columns> DEVICE void end_row(Combined<Columns>& row, int column, const Params& p) {
  const float factor = row.sum == 0.f ? 0.f : rcp(row.sum);
  if (column == 0)
    p.lse[((i64)row.b * p.heads + row.h) * p.q_len + row.q] = row.sum == 0.f ? MINUS_INFINITY :
        lse_of(row.row_max, row.sum);
  bf16* const out = p.o + row.b * p.o_batch + row.h * p.o_head + row.q * p.o_row + column;
#pragma unroll
  for (int group = 0; group < COLUMN_GROUPS; group++)
    if (128 * group + column < V_HEAD_DIM) store_columns(out + 128 * group, row.o[group], factor);
}

// Parts are added in their order, 32 at a time: what they are multiplied by follows the highest maximum so far.
template <int AT_ONCE> DEVICE void combine(const Params& p) {
  const int lane = threadIdx.x % 32;
  Combined<float4> row;
  const bool is_row = begin_row(row, blockIdx.x * COMBINE_WARPS + threadIdx.x / 32, p);
  const i64 parts = is_row ? part_of(0, row.b, row.h, row.q, p) : 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (!is_row) return;  // not before: the next launch relies on what this one has awaited
  float4 of_parts[AT_ONCE][COLUMN_GROUPS];
  // The first ones, whether or not each is written: beside the maxima that tell.
  load_parts(of_parts, parts, row.count < 32 ? (1u << row.count) - 1 : ~0u, p);
#pragma unroll 1
  for (int first = 0; first < row.count; first += 32) {
    const float2 part = first + lane < row.count ? p.part_rows[parts + first + lane] : NO_PART;
    const bool sees = !(part.y <= 0.f);  // a key; a NaN does
    const u32 written = __ballot_sync(~0u, !(part.y < 0.f));
    const float before = row.row_max;
    row.row_max = fmaxf(before, warp_max(sees ? part.x : MINUS_INFINITY));
    if (row.row_max != before) {
      const float factor = ex2(before - row.row_max);
      row.sum *= factor;
#pragma unroll
      for (int i = 0; i < COLUMN_GROUPS; i++) scale_part(row.o[i], factor);
    }
    const float weight = sees ? ex2(part.x - row.row_max) : 0.f;
    const int count = __popc(written);  // the first ones
#pragma unroll 1
    for (int start = 0; start < count; start += AT_ONCE) {
      if (first + start > 0) load_parts(of_parts, parts + first + start, written >> start, p);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float of_part = __shfl_sync(~0u, weight, start + i);
        const float sum_of_part = __shfl_sync(~0u, part.y, start + i);
        if (start + i >= count) break;
        row.sum = fmaf(of_part, sum_of_part, row.sum);
#pragma unroll
        for (int group = 0; group < COLUMN_GROUPS; group++) add_part(row.o[group], of_part, of_parts[i][group]);
      }
    }
  }
  end_row(row, 4 * lane, p);
}

extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, 4)  // of an SM
attention_combine(const __grid_constant__ Params p) { combine<16>(p); }

// Of so few parts that all are on their way at once: registers for more rows on an SM.
extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, 8)
attention_combine_few_parts(const __grid_constant__ Params p) { combine<8>(p); }

// ---------------------------------------------------------------- combine: by a block for each row
// What the parts of a row weigh that lanes of one warp looked at.
struct Weighed {
  float4 parts[32];  // the weights of what is there and of a part, and its sum
  u32 written;  // those that have an O
};

// A thread looks at one part of a row, and a warp at 32: `row_max` becomes the highest of them all.
DEVICE void weigh_parts(float2 part, float& row_max, Weighed* weighed) {
  __shared__ float maxima[COMBINE_WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool sees = !(part.y <= 0.f);  // a key; a NaN does
  const float highest = warp_max(sees ? part.x : MINUS_INFINITY);
  if (lane == 0) maxima[warp] = highest;
  __syncthreads();
  float before = row_max;  // of the warps before this one
  for (int i = 0; i < COMBINE_WARPS; i++) {
    if (i == warp) before = row_max;
    row_max = fmaxf(row_max, maxima[i]);
  }
  const float followed = fmaxf(before, highest);
  const float kept = lane > 0 || followed == before ? 1.f : ex2(before - followed);
  const Weights weights = {kept, sees ? ex2(part.x - followed) : 0.f};
  const u32 written = __ballot_sync(~0u, !(part.y < 0.f));
  weighed[warp].parts[lane] = make_float4(weights.before, weights.part, part.y, 0.f);
  if (lane == 0) weighed[warp].written = written;
}

// A block for a row, where there are few rows of many parts: more SMs load, each more at once.  The bits are the same.
extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, 4)
attention_combine_by_block(const __grid_constant__ Params p) {
  constexpr int PARTS = 64;  // on their way at once
  __shared__ Weighed weighed[COMBINE_WARPS];
  Combined<float> row;
  const bool is_row = begin_row(row, blockIdx.x, p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (!is_row) return;
  const i64 begin = part_of(0, row.b, row.h, row.q, p);
#pragma unroll 1
  for (int first = 0; first < row.count; first += 32 * COMBINE_WARPS) {
    const int part = first + threadIdx.x;
    weigh_parts(part < row.count ? p.part_rows[begin + part] : NO_PART, row.row_max, weighed);
    __syncthreads();
#pragma unroll 1
    for (int start = 0; start < min(32 * COMBINE_WARPS, row.count - first); start += PARTS) {
      const float* const from = p.part_o + (begin + (first + start)) * V_HEAD_DIM + threadIdx.x;
      float parts_of_o[PARTS][COLUMN_GROUPS];
#pragma unroll
      for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int group = 0; group < COLUMN_GROUPS; group++) {
          const bool written = weighed[(start + i) / 32].written >> (start + i) % 32 & 1;
          const bool mine = 128 * group + threadIdx.x < V_HEAD_DIM;
          parts_of_o[i][group] = written && mine ? from[128 * group + i * V_HEAD_DIM] : 0.f;
        }
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        if (i % 8 == 0 && start + i >= row.count - first) break;
        const float4 part = weighed[(start + i) / 32].parts[(start + i) % 32];
        const Weights weights = {part.x, part.y};
        row.sum = fold(row.sum, part.z, weights);
#pragma unroll
        for (int group = 0; group < COLUMN_GROUPS; group++) row.o[group] = fold(row.o[group], parts_of_o[i][group],
            weights);
      }
    }
    __syncthreads();
  }
  end_row(row, threadIdx.x, p);
}
