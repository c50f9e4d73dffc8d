// softcap: attention backward
// Soft-capped scores, as in Gemma 2: tanh keeps them within -cap .. cap.
//
// score    cap * tanh(s / cap)
// plan     ampere on sm_80, bfloat16, head_dim 128
// tile     64 queries x 128 keys, 2 stages
// roles    8 compute warps
// shared   k 32768 + v 32768 + q 32768 + d_o 32768 + ds 32768 + lse, delta 1024 = 164864 bytes
// made by  flashgen emit softcap --arch sm_80 --pipeline ampere --dtype bfloat16 --head-dim 128 --tile 64x128
//          --stages 2 --backward

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

// Tells the compiler that the values are new: what follows from them is computed where it is used.
DEVICE void renew(int& a, int& b, int& c, int& d) { asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d)); }

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

// ---------------------------------------------------------------- st.shared
DEVICE void st_shared_u32(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(x) : "memory");
}

// ---------------------------------------------------------------- mma: d (16 x 8, float32) += a (16 x 16) b (16 x 8)
// Lane l holds d[0], d[1] of row l / 4, columns 2 (l % 4) and one further; d[2], d[3] of the row eight below.
DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------- red: additions in global memory
DEVICE void red_add_f32(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(sum), "f"(x) : "memory");
}

// ---------------------------------------------------------------- arithmetic
constexpr float LOG2E = 1.44269504088896340736f;
#define PLUS_INFINITY __int_as_float(0x7f800000)
#define MINUS_INFINITY __int_as_float(0xff800000)

// 2^x.
DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// What has been made for arguments up to a limit, or for all.  No branch, as NVRTC makes one of `?:` where a side takes
// long: each score would wait for it, and the backward of a soft cap took 1.6 times as long on an H200.
DEVICE float if_small(float argument, float limit, float near, float any) {
  float y;
  asm("{\n.reg .pred small;\n.reg .f32 size;\nabs.f32 size, %1;\nsetp.le.f32 small, size, %4;\n"
      "selp.f32 %0, %2, %3, small;\n}" : "=f"(y) : "f"(argument), "f"(near), "f"(any), "f"(limit));
  return y;
}

// tanh of what is not near 0.
DEVICE float tanh_far(float x) { return 1.f - 2.f * rcp(1.f + ex2(2.f * LOG2E * x)); }

// Near 0, where the difference would lose digits, by the first terms of its series: c * tanh(s / c) is s for large c.
DEVICE float tanh_f32(float x) { return if_small(x, 0x1p-6f, x * fmaf(x * x, -1.f / 3, 1.f), tanh_far(x)); }

// Two floats rounded to nearest, the first in the low half.
DEVICE u32 cvt_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// A stored element as a float.
DEVICE float from_bf16(u16 x) { return __int_as_float(x << 16); }

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

// ---------------------------------------------------------------- plan
constexpr int TILE_Q = 64, TILE_KV = 128;  // rows of q and o, and of k and v, in a tile
constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128;  // columns of q and k, and of v and o
constexpr int QK_COLUMNS = 128, V_COLUMNS = 128;  // the same in a tile
constexpr int STAGES = 2;  // tiles of q and d_o in shared memory
constexpr int BUFFERS = 2;  // of what the warps of a block exchange
constexpr int KV_WARPS = 8, Q_WARPS = 1;  // S: keys by queries; dk, dv: keys by columns
constexpr int WARPS = KV_WARPS * Q_WARPS, THREADS = 32 * WARPS, BLOCKS_PER_SM = 1;
constexpr int WARP_KEYS = TILE_KV / KV_WARPS, M = WARP_KEYS / 16;  // keys of a warp, in blocks of 16
constexpr int QUERIES = 32;  // of a warp at a time
constexpr int DQ_Q_WARPS = 2, DQ_COLUMN_WARPS = WARPS / DQ_Q_WARPS;  // dq: queries by columns
constexpr int DQ_M = TILE_Q / (16 * DQ_Q_WARPS), DQ_BLOCKS = QK_COLUMNS / (8 * DQ_COLUMN_WARPS);  // of 16 x 8, a warp
constexpr int DQ_PART = DQ_BLOCKS / 1;  // of its columns at a time
constexpr int ROW_THREADS = 256;  // of a block that works on rows alone

typedef u16 bf16;

struct Params {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  const bf16* o;
  const bf16* d_o;
  const float* lse;
  const float* dlse;
  float* lse_log2;
  float* delta;
  float* dq_sum;
  bf16* dq;
  bf16* dk;
  bf16* dv;
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
  i64 d_o_batch;
  i64 d_o_head;
  i64 d_o_row;
  i64 dq_batch;
  i64 dq_head;
  i64 dq_row;
  i64 dk_batch;
  i64 dk_head;
  i64 dk_row;
  i64 dv_batch;
  i64 dv_head;
  i64 dv_row;
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int q_tiles;
  int kv_tiles;
  float scale;
  float param_cap;
};
static_assert(sizeof(Params) == 336, "what the host packs");

struct Rows { int b, h, q_first, q_last; };  // the queries of one tile, clipped to the problem

// ---------------------------------------------------------------- variant
DEVICE float score(float s, int b, int h, int q, int k, const Params& p) {
  return p.param_cap * tanh_f32(s * rcp(p.param_cap));
}

// d score / ds
DEVICE float slope(float s, int b, int h, int q, int k, const Params& p) {
  const float t = tanh_f32(s * rcp(p.param_cap));
  return p.param_cap * (1.0f - t * t) * (1.0f * rcp(p.param_cap));
}

// ---------------------------------------------------------------- before the products: what each row needs
// The rows of this block: one tile of queries of one head.
DEVICE Rows rows_of_block(const Params& p) {
  const int head = blockIdx.x / p.q_tiles, q_first = blockIdx.x % p.q_tiles * TILE_Q;
  return {head / p.heads, head % p.heads, q_first, min(q_first + TILE_Q, p.q_len) - 1};
}

// The index of this block's tile among all tiles of queries.
DEVICE i64 tile_of_block() { return blockIdx.x; }

DEVICE float dot(const Chunk& a, const Chunk& b) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(from_bf16(a.word[i]), from_bf16(b.word[i]), sum);
    sum = fmaf(from_bf16(a.word[i] >> 16), from_bf16(b.word[i] >> 16), sum);
  }
  return sum;
}

// delta = rowsum(d_o * o) - dlse, and lse to base 2.  Rows with nothing to attend, and those beyond the last query, get
// lse = inf and delta = 0: their P and dS are 0.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
attention_backward_prepare(const __grid_constant__ Params p) {
  constexpr int LANES = 8, CHUNKS = (V_HEAD_DIM / 8 + LANES - 1) / LANES;  // of a row, and of each of its lanes
  constexpr int STEP = ROW_THREADS / LANES, STEPS = (TILE_Q + STEP - 1) / STEP;
  const Rows rows = rows_of_block(p);
  const int lane = threadIdx.x % LANES;
  const i64 first = (i64)(rows.b * p.heads + rows.h) * p.q_len + rows.q_first;
  const bf16* o = p.o + rows.b * p.o_batch + rows.h * p.o_head + rows.q_first * p.o_row;
  const bf16* d_o = p.d_o + rows.b * p.d_o_batch + rows.h * p.d_o_head + rows.q_first * p.d_o_row;
  // All rows are on their way at once.
  Chunk of_o[STEPS][CHUNKS] = {}, of_d_o[STEPS][CHUNKS] = {};
  float lse[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int row = threadIdx.x / LANES + i * STEP;
    const bool inside = row < TILE_Q && rows.q_first + row <= rows.q_last;
    lse[i] = inside && lane == 0 ? p.lse[first + row] : MINUS_INFINITY;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
      if (const int column = 8 * (lane + j * LANES); inside && column < V_HEAD_DIM) {
        of_o[i][j] = *(const Chunk*)(o + row * p.o_row + column);
        of_d_o[i][j] = *(const Chunk*)(d_o + row * p.d_o_row + column);
      }
  }
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int row = threadIdx.x / LANES + i * STEP;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) sum += dot(of_o[i][j], of_d_o[i][j]);
#pragma unroll
    for (int j = 1; j < LANES; j *= 2) sum += __shfl_xor_sync(~0u, sum, j);
    if (lane != 0 || row >= TILE_Q) continue;
    const bool empty = lse[i] == MINUS_INFINITY;
    const float dlse = p.dlse != nullptr && !empty ? p.dlse[first + row] : 0.f;
    p.lse_log2[tile_of_block() * TILE_Q + row] = empty ? PLUS_INFINITY : lse[i] * LOG2E;
    p.delta[tile_of_block() * TILE_Q + row] = empty ? 0.f : sum - dlse;
  }
  float4* dq_sum = (float4*)(p.dq_sum + tile_of_block() * (TILE_Q * QK_COLUMNS));
  for (int i = threadIdx.x; i < TILE_Q * QK_COLUMNS / 4; i += ROW_THREADS)
    dq_sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// ---------------------------------------------------------------- after the products: dq = scale * dq_sum
// dq_sum holds the accumulators of each warp as mma leaves them, for each 16 x 8 block
// the first float of every lane, then the second of every lane, and so on.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
attention_backward_finish(const __grid_constant__ Params p) {
  const Rows rows = rows_of_block(p);
  const float4* dq_sum = (const float4*)(p.dq_sum + tile_of_block() * (TILE_Q * QK_COLUMNS));
  bf16* dq = p.dq + rows.b * p.dq_batch + rows.h * p.dq_head + rows.q_first * p.dq_row;
#pragma unroll 1
  for (int i = threadIdx.x; i < TILE_Q * QK_COLUMNS / 16; i += ROW_THREADS) {
    const int quad = i % 8, block = i / 8;  // four lanes hold a row of the block, and the one eight further down
    const int j = block % DQ_BLOCKS, m = block / DQ_BLOCKS % DQ_M, warp = block / (DQ_BLOCKS * DQ_M);
    const int row = (warp / DQ_COLUMN_WARPS * DQ_M + m) * 16 + quad;
    const int column = (j / 2 * DQ_COLUMN_WARPS + warp % DQ_COLUMN_WARPS) * 16 + j % 2 * 8;
    float x[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) *(float4*)x[n] = dq_sum[block * 32 + 8 * n + quad];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      Chunk chunk;
#pragma unroll
      for (int lane = 0; lane < 4; lane++)
        chunk.word[lane] = cvt_bf16x2(p.scale * x[2 * r][lane], p.scale * x[2 * r + 1][lane]);
      if (rows.q_first + row + 8 * r <= rows.q_last && column < HEAD_DIM)
        *(Chunk*)(dq + (row + 8 * r) * p.dq_row + column) = chunk;
    }
  }
}

// ---------------------------------------------------------------- shared memory of the main kernel
typedef SwizzledTile<TILE_Q, QK_COLUMNS> QTile;

typedef SwizzledTile<TILE_Q, V_COLUMNS> OTile;

typedef SwizzledTile<TILE_KV, QK_COLUMNS> KTile;

typedef SwizzledTile<TILE_KV, V_COLUMNS> VTile;
typedef SwizzledTile<TILE_KV, TILE_Q> ScoreTile;  // transposed: a row a key
struct Shared {
  KTile k;  // at the end dk
  VTile v;  // at the end dv
  QTile q[STAGES];
  OTile d_o[STAGES];
  ScoreTile ds[BUFFERS];
  float lse[STAGES][TILE_Q], delta[STAGES][TILE_Q];
};
static_assert(sizeof(Shared) == 164864, "what the plan counted");

// ---------------------------------------------------------------- schedule
// The keys of one tile, clipped to the problem, and the query heads that see them, end_head not among them.
struct Keys { int b, kv_head, first_head, end_head, k_first, k_last; };

struct Step { int head, tile; bool masked; };  // a tile of queries of one head

// Whether this is a step: none is left when all heads are done.
DEVICE bool is_left(const Step& step, const Keys& keys) { return step.head < keys.end_head; }

// The tile of queries to visit next: head by head, from the first query to the last.
DEVICE Step next_step(Step step, const Keys& keys, const Params& p) {
  step.masked = keys.k_first + TILE_KV > p.kv_len;
  if (++step.tile < p.q_tiles) return step;
  return {step.head + 1, 0, step.masked};
}

// The keys of this block.  Early keys first: under a causal mask most queries see them.
DEVICE Keys keys_of_block(const Params& p) {
  const int block = block_index(), head = block / p.kv_tiles, k_first = block % p.kv_tiles * TILE_KV;
  const int kv_head = head % p.kv_heads, group = p.heads / p.kv_heads, k_last = min(k_first + TILE_KV, p.kv_len) - 1;
  return {head / p.kv_heads, kv_head, kv_head * group, (kv_head + 1) * group, k_first, k_last};
}

DEVICE void load_queries(Shared& shared, int stage, const Step& step, const Keys& keys, const Params& p) {
  if (is_left(step, keys)) {
    const int first = step.tile * TILE_Q, thread = thread_index();
    const bf16* q = p.q + keys.b * p.q_batch + step.head * p.q_head + first * p.q_row;
    const bf16* d_o = p.d_o + keys.b * p.d_o_batch + step.head * p.d_o_head + first * p.d_o_row;
    load_tile<THREADS, HEAD_DIM>(shared.q[stage], q, p.q_row, p.q_len - first, thread);
    load_tile<THREADS, V_HEAD_DIM>(shared.d_o[stage], d_o, p.d_o_row, p.q_len - first, thread);
    const i64 tile = (i64)(keys.b * p.heads + step.head) * p.q_tiles + step.tile;
    const int row = thread % (TILE_Q / 4) * 4;
    if (thread < TILE_Q / 4)
      cp_async_16(shared_address(&shared.lse[stage][row]), p.lse_log2 + tile * TILE_Q + row, true);
    else if (thread < TILE_Q / 2)
      cp_async_16(shared_address(&shared.delta[stage][row]), p.delta + tile * TILE_Q + row, true);
  }
  cp_async_commit_group();
}

// ---------------------------------------------------------------- one tile
// Accumulators: element [m][j][i] is row 16 m + lane / 4 + 8 (i / 2) of the warp, column 8 j + 2 (lane % 4) + i % 2.
typedef float S[M][QUERIES / 8][4];  // transposed, as P, dP and dS: a row a key, a column a query

typedef u32 Operand[M][QUERIES / 16][4];  // P or dS rounded to bf16: the A operands of mma

// Columns of dk and dv are dealt to the warps of the same keys in blocks of 16.
template <int COLUMNS> using Gradient = float[M][COLUMNS / (8 * Q_WARPS)][4];

// S += A B^T, with A this warp's keys in a tile of k or v, B the queries from `query` on in a tile of q or d_o.
template <int COLUMNS>
DEVICE void multiply_scores(
    S& s, SwizzledTile<TILE_KV, COLUMNS>& keys, SwizzledTile<TILE_Q, COLUMNS>& queries, int query) {
  typedef SwizzledTile<TILE_KV, COLUMNS> A;
  typedef SwizzledTile<TILE_Q, COLUMNS> B;
  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 / Q_WARPS * WARP_KEYS;
  const u32 a_block = shared_address(keys.at(key + lane % 16, lane / 16));
  const u32 b_block = shared_address(queries.at(query + lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
  for (int d = 0; d < COLUMNS / 16; d++) {
    u32 a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) ldmatrix_x4(a[m], A::right(a_block, 2 * d) + m * A::BLOCK);
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++) {
      u32 b[4];
      ldmatrix_x4(b, B::right(b_block, 2 * d) + n * B::BLOCK);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16_bf16(s[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16_bf16(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The layout of accumulators, rounded, is that of an A operand.
DEVICE void round(Operand& a, const S& s) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[m][n][i] = cvt_bf16x2(s[m][2 * n + i / 2][i % 2 * 2], s[m][2 * n + i / 2][i % 2 * 2 + 1]);
}

// This warp's part of P or dS to shared memory, for the other warps.
DEVICE void share(ScoreTile& tile, const Operand& a, int query) {
  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 / Q_WARPS * WARP_KEYS;
  const u32 row = ScoreTile::right(shared_address(tile.at(key + lane / 4, 0)), query / 8) + lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 address = ScoreTile::right(row, 2 * n + i / 2) + (2 * m + i % 2) * (ScoreTile::BLOCK / 2);
        st_shared_u32(address, a[m][n][i]);
      }
}

// d += A B over the queries from `query` on, with A rows of P or dS, B d_o or q.
template <int COLUMNS>
DEVICE void multiply_gradient(
    Gradient<COLUMNS>& d, const Operand& a, SwizzledTile<TILE_Q, COLUMNS>& queries, int query) {
  typedef SwizzledTile<TILE_Q, COLUMNS> B;
  const int lane = threadIdx.x % 32;
  const u32 b_block = shared_address(queries.at(query + lane % 16, lane / 16));
#pragma unroll
  for (int n = 0; n < QUERIES / 16; n++)
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
      u32 b[4];
      ldmatrix_x4_trans(b, B::right(b_block, 2 * j) + n * B::BLOCK);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16_bf16(d[m][2 * j], a[m][n], b[0], b[1]);
        mma_m16n8k16_bf16(d[m][2 * j + 1], a[m][n], b[2], b[3]);
      }
    }
}

// Where the sum of dq of a visited tile begins.
DEVICE float* sum_of(const Step& step, const Keys& keys, const Params& p) {
  return p.dq_sum + ((i64)(keys.b * p.heads + step.head) * p.q_tiles + step.tile) * (TILE_Q * QK_COLUMNS);
}

// dq += dS K over the keys of the tile: this warp's rows and columns are added to those in memory.
DEVICE void add_dq(float* dq_sum, ScoreTile& ds, KTile& k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_chunk = warp / DQ_COLUMN_WARPS * (2 * DQ_M), column_chunk = warp % DQ_COLUMN_WARPS * 2;
  const u32 a_block = ScoreTile::right(shared_address(ds.at(lane / 16 * 8 + lane % 8, lane / 8 % 2)), row_chunk);
  const u32 b_block = KTile::right(shared_address(k.at(lane % 16, lane / 16)), column_chunk);
  dq_sum += warp * (DQ_M * DQ_BLOCKS * 128);
  constexpr int first = 0;
  {
    float dq[DQ_M][DQ_PART][4] = {};
#pragma unroll
    for (int n = 0; n < TILE_KV / 16; n++) {
      u32 a[DQ_M][4];
#pragma unroll
      for (int m = 0; m < DQ_M; m++) ldmatrix_x4_trans(a[m], ScoreTile::right(a_block, 2 * m) + n * ScoreTile::BLOCK);
#pragma unroll
      for (int j = 0; j < DQ_PART / 2; j++) {
        u32 b[4];
        ldmatrix_x4_trans(b, KTile::right(b_block, (first + 2 * j) * DQ_COLUMN_WARPS) + n * KTile::BLOCK);
#pragma unroll
        for (int m = 0; m < DQ_M; m++) {
          mma_m16n8k16_bf16(dq[m][2 * j], a[m], b[0], b[1]);
          mma_m16n8k16_bf16(dq[m][2 * j + 1], a[m], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < DQ_M; m++)
#pragma unroll
      for (int j = 0; j < DQ_PART; j++) {
        float* block = dq_sum + (m * DQ_BLOCKS + first + j) * 128;
#pragma unroll
        for (int i = 0; i < 4; i++) red_add_f32(block + 32 * i + lane, dq[m][j][i]);
      }
  }
}

// Where element [0][0][0] of this lane lies, for the queries of the tile from `query` on; [m][j][i] lies
// 16 m + 8 (i / 2) keys and 8 j + i % 2 queries further.
struct Position { int k, q; };

DEVICE Position position_of(const Keys& keys, const Step& step, int query) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  return {keys.k_first + warp / Q_WARPS * WARP_KEYS + lane / 4, step.tile * TILE_Q + query + lane % 4 * 2};
}

// A bit for each element that the mask hides: those beyond the last key, [m][j][i] in this order.
DEVICE u32 hidden_bits(const Keys& keys, const Step& step, int query, const Params& p) {
  const Position first = position_of(keys, step, query);
  u32 hidden = 0;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = first.k + 16 * m + i / 2 * 8;
        hidden |= u32(k > keys.k_last) << ((m * (QUERIES / 8) + j) * 4 + i);
      }
  return hidden;
}

// With S = score(x) for x = scale * Q K^T: x becomes known in s, P = e^(S - lse) is rounded, and dP becomes
// dL / dS = P (dP - delta).
DEVICE void differentiate(
    S& dp, S& s, Operand& p_rounded, u32 hidden, const float* lse, const float* delta, const Keys& keys,
    const Step& step, int query, const Params& p) {
  const Position first = position_of(keys, step, query);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < QUERIES / 8; j++) {
    const float2 lse_pair = *(const float2*)(lse + 8 * j + lane % 4 * 2);
    const float2 delta_pair = *(const float2*)(delta + 8 * j + lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float probability[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int i = 2 * r + e;
          float &x = s[m][j][i], &d = dp[m][j][i];
          const int q = first.q + 8 * j + i % 2;
          const int k = first.k + 16 * m + i / 2 * 8;
          x *= p.scale;
          const bool hides = hidden >> ((m * (QUERIES / 8) + j) * 4 + i) & 1;
          const float y = hides ? MINUS_INFINITY : score(x, keys.b, step.head, q, k, p);
          probability[e] = ex2(fmaf(y, LOG2E, e == 0 ? -lse_pair.x : -lse_pair.y));
          d = probability[e] * (d - (e == 0 ? delta_pair.x : delta_pair.y));
        }
        p_rounded[m][j / 2][j % 2 * 2 + r] = cvt_bf16x2(probability[0], probability[1]);
      }
  }
}

// dS = dL / d score(x) * d score(x) / dx; exactly 0 where P is 0, whatever the derivative there.
DEVICE void apply_slope(S& ds, const S& x, const Keys& keys, const Step& step, int query, const Params& p) {
  const Position first = position_of(keys, step, query);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int q = first.q + 8 * j + i % 2;
        const int k = first.k + 16 * m + i / 2 * 8;
        ds[m][j][i] = ds[m][j][i] == 0.f ? 0.f : ds[m][j][i] * slope(x[m][j][i], keys.b, step.head, q, k, p);
      }
}

// ---------------------------------------------------------------- epilogue
// A tile of dk or dv leaves through the shared memory of k or v.
template <int COLUMNS>
DEVICE void stage_gradient(SwizzledTile<TILE_KV, COLUMNS>& tile, const Gradient<COLUMNS>& d, float factor) {
  const int lane = thread_index() % 32, warp = thread_index() / 32, key = warp / Q_WARPS * WARP_KEYS;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int j = 0; j < COLUMNS / (8 * Q_WARPS); j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u16* chunk = tile.at(key + 16 * m + 8 * r + lane / 4, (j / 2 * Q_WARPS + warp % Q_WARPS) * 2 + j % 2);
        ((u32*)chunk)[lane % 4] = cvt_bf16x2(d[m][j][2 * r] * factor, d[m][j][2 * r + 1] * factor);
      }
}

template <int WIDTH, int COLUMNS>
DEVICE void store_gradient(bf16* out, i64 row_stride, SwizzledTile<TILE_KV, COLUMNS>& tile, const Keys& keys) {
#pragma unroll
  for (int i = thread_index(); i < TILE_KV * (COLUMNS / 8); i += THREADS) {
    const int row = i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
    if (keys.k_first + row <= keys.k_last && 8 * chunk < WIDTH)
      *(Chunk*)(out + row * row_stride + 8 * chunk) = *(Chunk*)tile.at(row, chunk);
  }
}

// ---------------------------------------------------------------- kernel: FlashAttention-2 (Dao 2023), Algorithm 2
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention_backward(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  Keys keys = keys_of_block(p);
  Step step = next_step({keys.first_head, -1, false}, keys, p);
  if (is_left(step, keys)) {
    const int rows = p.kv_len - keys.k_first;
    const bf16* k = p.k + keys.b * p.k_batch + keys.kv_head * p.k_head + keys.k_first * p.k_row;
    const bf16* v = p.v + keys.b * p.v_batch + keys.kv_head * p.v_head + keys.k_first * p.v_row;
    load_tile<THREADS, HEAD_DIM>(shared.k, k, p.k_row, rows);
    load_tile<THREADS, V_HEAD_DIM>(shared.v, v, p.v_row, rows);
  }
  load_queries(shared, 0, step, keys, p);
  load_queries(shared, 1, next_step(step, keys, p), keys, p);
  cp_async_wait_group<1>();
  __syncthreads();

  Gradient<QK_COLUMNS> dk = {};
  Gradient<V_COLUMNS> dv = {};
#pragma unroll 1
  for (int i = 0, stage = 0; is_left(step, keys); i++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    renew(keys.b, keys.end_head, keys.k_first, keys.k_last);
#pragma unroll 1
    for (int query = 0; query < TILE_Q; query += QUERIES)
    {
      S s = {}, dp = {};
      Operand p_rounded, ds_rounded;
      multiply_scores(s, shared.k, shared.q[stage], query);
      multiply_scores(dp, shared.v, shared.d_o[stage], query);
      const u32 hidden = step.masked ? hidden_bits(keys, step, query, p) : 0;
      differentiate(
          dp, s, p_rounded, hidden, &shared.lse[stage][query], &shared.delta[stage][query], keys,
          step, query, p);
      apply_slope(dp, s, keys, step, query, p);
      round(ds_rounded, dp);
      share(shared.ds[i % BUFFERS], ds_rounded, query);
      multiply_gradient(dv, p_rounded, shared.d_o[stage], query);
      multiply_gradient(dk, ds_rounded, shared.q[stage], query);
    }
    cp_async_wait_group<0>();
    __syncthreads();  // P and dS are complete, the next queries have arrived, and no warp is in the step before
    float* dq_sum = sum_of(step, keys, p);
    step = next_step(step, keys, p);
    load_queries(shared, stage, next_step(step, keys, p), keys, p);
    add_dq(dq_sum, shared.ds[i % BUFFERS], shared.k);
  }
  __syncthreads();
  const Keys mine = keys_of_block(p);  // anew: only b and the first key are kept through the loop
  bf16* dk_out = p.dk + mine.b * p.dk_batch + mine.kv_head * p.dk_head + mine.k_first * p.dk_row;
  bf16* dv_out = p.dv + mine.b * p.dv_batch + mine.kv_head * p.dv_head + mine.k_first * p.dv_row;
  stage_gradient(shared.k, dk, p.scale);
  stage_gradient(shared.v, dv, 1.f);
  __syncthreads();
  store_gradient<HEAD_DIM>(dk_out, p.dk_row, shared.k, mine);
  store_gradient<V_HEAD_DIM>(dv_out, p.dv_row, shared.v, mine);
}
