// causal: attention forward
// Causal attention: each query sees itself and the keys before it; positions count from the start of q and k.
//
// visible  k <= q
// plan     ampere on sm_80, bfloat16, head_dim 128
// tile     128 queries x 128 keys, 2 stages, q in registers
// roles    8 compute warps
// shared   q 32768 + k 65536 + v 65536 = 163840 bytes
// made by  flashgen emit causal --arch sm_80 --pipeline ampere --dtype bfloat16 --head-dim 128 --tile 128x128
//          --stages 2 --layout paged_varlen

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

// ---------------------------------------------------------------- mma: d (16 x 8, float32) += a (16 x 16) b (16 x 8)
// Lane l holds d[0], d[1] of row l / 4, columns 2 (l % 4) and one further; d[2], d[3] of the row eight below.
DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------- mul.wide: all 64 bits of a product
// In an instruction.  Of u64 whose upper halves are 0, the compiler adds up the partial products.
DEVICE u64 mul_wide_u32(u32 a, u32 b) { u64 d; asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b)); return d; }

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

// ---------------------------------------------------------------- quotients by numbers that the host knows
// Of n from 0 on.  The lower half of `by` is multiplied, the upper is how far the product shifts.
DEVICE int quotient_by(int n, u64 by) { return mul_wide_u32(n, (u32)by) >> (u32)(by >> 32); }

// ---------------------------------------------------------------- what is known of a tile
enum TileClass { EMPTY, PARTIAL, FULL };  // no, some, all of its pairs are visible

// ---------------------------------------------------------------- plan
constexpr int TILE_Q = 128, TILE_KV = 128;  // rows of q and o, and of k and v, in a tile
constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128;  // columns of q and k, and of v and o
constexpr int QK_COLUMNS = 128, V_COLUMNS = 128;  // in a tile: steps of 16
constexpr int STAGES = 2;  // tiles of k and of v in shared memory
constexpr int WARPS = 8, THREADS = 32 * WARPS, BLOCKS_PER_SM = 1;
constexpr int WARP_ROWS = TILE_Q / WARPS, M = WARP_ROWS / 16;  // rows of a warp, in blocks of 16
constexpr float SHARE = 0.0625f;  // of what a row has added up: a key with more moves its maximum, and O is rescaled
constexpr float MOST = 0x1p64f;  // P that moves it in any case

typedef u16 bf16;

struct Params {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  bf16* o;
  float* lse;
  const int* cu_seqlens_q;
  const int* kv_lengths;
  const int* q_offsets;
  const int* page_table;
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
  i64 table_row;
  u64 by_page_size;
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int q_tiles;
  int q_rows;
  int q_offset;
  int q_start;
  int pages;
  int page_size;
  int page_rows;
  float scale;
};
static_assert(sizeof(Params) == 240, "what the host packs");

typedef SwizzledTile<TILE_Q, QK_COLUMNS> QTile;

typedef SwizzledTile<TILE_Q, V_COLUMNS> OTile;

typedef SwizzledTile<TILE_KV, QK_COLUMNS> KTile;

typedef SwizzledTile<TILE_KV, V_COLUMNS> VTile;

struct Shared {
  union { QTile q; OTile o; };  // o after the last product with q
  KTile k[STAGES];
  VTile v[STAGES];
};
static_assert(sizeof(Shared) == 163840, "what the plan counted");

struct Rows { int b, h, q_first, q_last; };  // the queries of one tile, clipped to the problem

// ---------------------------------------------------------------- variant
DEVICE bool keep(int b, int h, int q, int k, const Params& p) {
  return k <= q;
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
  return last_tile_of_run(tile, 0, rows.q_last, p);
}

DEVICE TileClass classify(const Rows& rows, int kv_tile, const Params& p) {
  const int k_first = kv_tile * TILE_KV, k_last = min(k_first + TILE_KV, p.kv_len) - 1;
  const bool hidden = rows.q_first < k_last;
  return hidden ? PARTIAL : FULL;
}

// ---------------------------------------------------------------- sequences, each with its own lengths and positions
struct Span { int first, length; };  // of the rows of a sequence

// Inside of the tensor's rows, whatever the numbers say.
DEVICE Span span(const int* starts, int b, int rows, int most) {
  const int first = min(max(__ldg(&starts[b]), 0), rows);
  return {first, min(max(__ldg(&starts[b + 1]) - first, 0), min(most, rows - first))};
}

DEVICE Span queries_of(const Params& p, int b) { return span(p.cu_seqlens_q, b, p.q_rows, p.q_len); }

DEVICE int own_length(const int* lengths, int b, int most) {
  return lengths == nullptr ? most : min(max(__ldg(&lengths[b]), 0), most);
}

DEVICE Span keys_of(const Params& p, int b) { return {0, own_length(p.kv_lengths, b, p.kv_len)}; }

struct Place { int b, tile; };  // a tile of a sequence; b < 0: there is none

// The tile of this number among those of all sequences, each one's late rows first.  A lane counts the tiles of one of
// 32 sequences at a time; the whole warp takes part.
template <typename Lengths> DEVICE Place find_tile(int number, int tile_rows, Lengths span_of, const Params& p) {
  const int lane = threadIdx.x % 32;
  for (int b = 0; b < p.batch; b += 32) {
    const int tiles = b + lane < p.batch ? (span_of(p, b + lane).length + tile_rows - 1) / tile_rows : 0;
    int end = tiles;  // behind the last of this sequence
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += before;
    }
    const u32 behind = __ballot_sync(~0u, number < end);
    if (behind != 0) {
      const int of = __ffs(behind) - 1;
      return {b + of, __shfl_sync(~0u, end, of) - 1 - number};
    }
    number -= __shfl_sync(~0u, end, 31);
  }
  return {-1, 0};
}

DEVICE Place find_queries(int number, int tile_rows, const Params& p) {
  return find_tile(number, tile_rows, [](const Params& p, int b) { return queries_of(p, b); }, p);
}

struct InPage { int page, row; };  // where a key lies; page < 0: nowhere

// A key of a sequence that has `keys` of them and this table.  Entries of others are never read.
DEVICE InPage find_key(int key, int keys, const int* table, const Params& p) {
  if (key >= keys) return {-1, 0};
  const int entry = quotient_by(key, p.by_page_size);
  return {__ldg(&table[entry]), key - entry * p.page_size};
}

// Starts to copy a tile's rows of keys, or of values, each from its page; rows of no key and of no page become zero.
template <int COLUMNS, int TILE_COLUMNS>
DEVICE void load_pages(SwizzledTile<TILE_KV, TILE_COLUMNS>& tile, const u16* source, i64 page_stride, i64 row_stride,
                       int first_key, const Params& p) {
  constexpr int CHUNKS = TILE_COLUMNS / 8, STEP = floor_power_of_two(THREADS / CHUNKS);  // rows copied at a time
  const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll 2  // more entries on their way take registers from O
  for (int step = 0; step < TILE_KV; step += STEP) {
    const int row = first + step;
    if ((THREADS == STEP * CHUNKS || first < STEP) && (TILE_KV % STEP == 0 || row < TILE_KV)) {
      const InPage at = find_key(first_key + row, p.kv_len, p.page_table, p);
      const u32 address = shared_address(tile.at(first + step % 8, chunk)) + (step - step % 8) * 2 * TILE_COLUMNS;
      const u16* there = source + at.page * page_stride + at.row * row_stride + 8 * chunk;
      cp_async_16(address, there, (u32)at.page < (u32)p.pages && 8 * chunk < COLUMNS);
    }
  }
}

// The problem of sequence b, whose queries sit at q_offset to q_len - 1.  A tile from row `first` on, in which the
// sequence has no query, has no key either.
DEVICE Params of_sequence(Params p, int b, int first) {
  constexpr int MAX_LENGTH = 1 << 24;  // positions stay below it: index arithmetic counts on that
  const Span queries = queries_of(p, b), keys = keys_of(p, b);
  const int given = p.q_offset < 0 ? keys.length - queries.length : p.q_offset;
  const int position = p.q_offsets == nullptr ? given : __ldg(&p.q_offsets[b]);
  p.q_offset = min(max(position, 0), MAX_LENGTH - 1 - queries.length);
  p.q_len = p.q_offset + queries.length;
  p.kv_len = first < queries.length ? keys.length : 0;
  p.q_start = queries.first;
  return p;
}

// ---------------------------------------------------------------- schedule
struct Step { int tile; bool partial; };  // a tile of keys (negative: none is left), and whether it is to be masked

// The tile to visit after `tile`: from the last key to the first, without those in which nothing is visible.
DEVICE Step next_step(int tile, const Rows& rows, const Params& p) {
  tile = previous_tile(tile - 1, rows, p);
  return {tile, classify(rows, tile, p) == PARTIAL};
}

struct Start { int b, h, first; };  // of a tile: its first row is this one of the sequence's; b < 0: there is no tile

// The tile of this block, and its sequence's problem, in which rows of q, o and lse are found by position.
// Heads that share keys and values are neighbours.
DEVICE Start start_of_block(const Params& p) {
  const Place at = find_queries(block_index() / p.heads, TILE_Q, p);
  return {at.b, block_index() % p.heads, at.tile * TILE_Q};
}

DEVICE Params of_tile(const Start& at, const Params& all) {
  Params p = of_sequence(all, at.b, at.first);
  p.q += (p.q_start - p.q_offset) * p.q_row;
  p.o += (p.q_start - p.q_offset) * p.o_row;
  p.lse += p.q_start - p.q_offset;
  p.page_table += at.b * p.table_row;
  return p;
}

DEVICE Rows rows_of_tile(const Start& at, const Params& p) {
  const int q_first = p.q_offset + at.first;
  return {at.b, at.h, q_first, min(q_first + TILE_Q, p.q_len) - 1};
}

DEVICE void load_kv(Shared& shared, int stage, const bf16* k, const bf16* v, Step step, const Params& p) {
  if (step.tile >= 0) {
    const int first = step.tile * TILE_KV;
    load_pages<HEAD_DIM>(shared.k[stage], k, p.k_batch, p.k_row, first, p);
    load_pages<V_HEAD_DIM>(shared.v[stage], v, p.v_batch, p.v_row, first, p);
  }
  cp_async_commit_group();
}

// ---------------------------------------------------------------- one tile
// Accumulators: element [m][j][i] is row 16 m + lane / 4 + 8 (i / 2) of the warp, column 8 j + 2 (lane % 4) + i % 2.
typedef float S[M][TILE_KV / 8][4];

typedef float O[M][V_COLUMNS / 8][4];

typedef u32 Q[QK_COLUMNS / 16][M][4];  // the warp's rows, as the A operands of mma

DEVICE void load_q(Q& q, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 block = shared_address(shared.q.at(warp * WARP_ROWS + lane % 16, lane / 16));
#pragma unroll
  for (int d = 0; d < QK_COLUMNS / 16; d++)
#pragma unroll
    for (int m = 0; m < M; m++) ldmatrix_x4(q[d][m], QTile::right(block, 2 * d) + m * QTile::BLOCK);
}

// S = Q K^T
DEVICE void multiply_qk(S& s, const Q& q, KTile& k) {
  const int lane = threadIdx.x % 32;
  const u32 k_block = shared_address(k.at(lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
  for (int d = 0; d < QK_COLUMNS / 16; d++) {
#pragma unroll
    for (int n = 0; n < TILE_KV / 16; n++) {
      u32 b[4];
      ldmatrix_x4(b, KTile::right(k_block, 2 * d) + n * KTile::BLOCK);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16_bf16(s[m][2 * n], q[d][m], b[0], b[1]);
        mma_m16n8k16_bf16(s[m][2 * n + 1], q[d][m], b[2], b[3]);
      }
    }
  }
}

// O += P V, P rounded to bf16: the layout of its accumulators is that of an A operand.
DEVICE void multiply_pv(O& o, const S& p, VTile& v) {
  const int lane = threadIdx.x % 32;
  const u32 v_block = shared_address(v.at(lane % 16, lane / 16));
#pragma unroll
  for (int n = 0; n < TILE_KV / 16; n++) {
    u32 a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float (&pair)[4] = p[m][2 * n + i / 2];
        a[m][i] = cvt_bf16x2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
#pragma unroll
    for (int j = 0; j < V_COLUMNS / 16; j++) {
      u32 b[4];
      ldmatrix_x4_trans(b, VTile::right(v_block, 2 * j) + n * VTile::BLOCK);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16_bf16(o[m][2 * j], a[m], b[0], b[1]);
        mma_m16n8k16_bf16(o[m][2 * j + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// S becomes -inf where the mask hides a key; `first` is the tile's first key.
DEVICE void apply_mask(S& s, const Rows& rows, int first, const Params& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int q0 = rows.q_first + warp * WARP_ROWS + lane / 4, k0 = first + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < TILE_KV / 8; j++) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int q = q0 + 16 * m + i / 2 * 8;
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
// o = O / sum and lse = log(sum of e^s); a row without any visible key: 0 and -inf.
DEVICE void store(Shared& shared, O& o, const OnlineSoftmax (&softmax)[M], const Rows& rows, const Params& p) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32, first_row = warp * WARP_ROWS;
  const int tile_rows = rows.q_last - rows.q_first + 1;
  float* lse = p.lse + (i64)rows.h * p.q_rows + rows.q_first;
#pragma unroll
  for (int m = 0; m < M; m++) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_row + 16 * m + 8 * r + lane / 4;
      const float sum = quad_sum(softmax[m].sum[r]);
      factor[r] = sum == 0.f ? 0.f : rcp(sum);
      if (lane % 4 == 0 && row < tile_rows)
        lse[row] = sum == 0.f ? MINUS_INFINITY : lse_of(softmax[m].row_max[r], sum);
    }
    scale_rows(o[m], factor);
#pragma unroll
    for (int j = 0; j < V_COLUMNS / 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u16* chunk = shared.o.at(first_row + 16 * m + 8 * r + lane / 4, j);
        ((u32*)chunk)[lane % 4] = cvt_bf16x2(o[m][j][2 * r], o[m][j][2 * r + 1]);
      }
  }
  __syncwarp();
  bf16* out = p.o + rows.b * p.o_batch + rows.h * p.o_head + rows.q_first * p.o_row;
#pragma unroll
  for (int first = 0; first < WARP_ROWS * OTile::CHUNKS; first += 32) {
    const int row = first_row + (first + lane) / OTile::CHUNKS, chunk = (first + lane) % OTile::CHUNKS;
    if (row < tile_rows && 8 * chunk < V_HEAD_DIM)
      *(Chunk*)(out + row * p.o_row + 8 * chunk) = *(Chunk*)shared.o.at(row, chunk);
  }
}

// ---------------------------------------------------------------- kernel: FlashAttention-2 (Dao 2023), Algorithm 1
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention_forward(const __grid_constant__ Params all) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const Start at = start_of_block(all);
  if (at.b < 0) return;
  const Params p = of_tile(at, all);
  const Rows rows = rows_of_tile(at, p);
  const int kv_head = rows.h / (p.heads / p.kv_heads);
  const bf16* q = p.q + rows.b * p.q_batch + rows.h * p.q_head + rows.q_first * p.q_row;
  const bf16* k = p.k + kv_head * p.k_head;
  const bf16* v = p.v + kv_head * p.v_head;

  O o = {};
  OnlineSoftmax softmax[M];
  const float scale = fmaxf(p.scale * LOG2E, SMALLEST);  // scale 0 times a masked -inf stays -inf
  Step coming[STAGES - 1];  // what is on its way to shared memory, in order
  coming[0] = next_step((p.kv_len + TILE_KV - 1) / TILE_KV, rows, p);
  if (coming[0].tile >= 0) load_tile<THREADS, HEAD_DIM>(shared.q, q, p.q_row, rows.q_last - rows.q_first + 1);
  cp_async_commit_group();
  load_kv(shared, 0, k, v, coming[0], p);
  Q q_fragments;
  if (coming[0].tile >= 0) {
    cp_async_wait_group<STAGES - 1>();
    __syncthreads();
    load_q(q_fragments, shared);
  }
#pragma unroll 1
  for (int stage = 0; coming[0].tile >= 0; stage = stage + 1 == STAGES ? 0 : stage + 1) {
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // every warp's part of this stage has arrived, and no warp reads the stage before
    const Step step = coming[0];
    const Step later = next_step(coming[STAGES - 2].tile, rows, p);
    coming[STAGES - 2] = later;
    load_kv(shared, stage == 0 ? STAGES - 1 : stage - 1, k, v, later, p);

    S s = {};
    multiply_qk(s, q_fragments, shared.k[stage]);
    const int first = step.tile * TILE_KV;
    if (step.partial) apply_mask(s, rows, first, p);
    if (first + TILE_KV > p.kv_len) apply_end(s, first, p);
    rescale(o, softmax, s, scale);
#pragma unroll
    for (int m = 0; m < M; m++) softmax[m].to_probabilities(s[m], scale);
    multiply_pv(o, s, shared.v[stage]);
  }
  store(shared, o, softmax, rows, p);
}
