// causal: attention forward
// Causal attention: each query sees itself and the keys before it; positions count from the start of q and k.
//
// visible  k <= q
// plan     hopper on sm_90a, float8_e4m3fn, head_dim 192; o bfloat16, default P (error of o 1.1x exact's; 1.1x, 1.0x
//          on peaked rows)
// tile     128 queries x 128 keys, 2 stages, q in shared memory
// roles    1 loader, 3 transposer warps of 40 registers per thread; 8 consumer warps of 232
// launch   overlapping: each kernel of a call starts while the one before it on the stream ends, and waits for it
// shared   q 32768 + k 65536 + v 65536 + v turned over 49152 + ones 1024 + control 1024 = 215040 bytes
// made by  flashgen emit causal --arch sm_90a --pipeline hopper --dtype float8_e4m3fn --head-dim 192 --tile 128x128
//          --stages 2 --q-stages 1

// ---------------------------------------------------------------- types
#define DEVICE __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what one instruction moves

// ---------------------------------------------------------------- addresses of shared memory, as PTX takes them
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---------------------------------------------------------------- ldmatrix: four 8 x 8 blocks, a row a lane
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// ---------------------------------------------------------------- mbarrier: counts arrivals and bytes, a phase a round
DEVICE void mbarrier_init(u64& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes the barriers that this thread initialised visible to the copies of TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}

// Arrives, and lets the phase end only when `bytes` more have been written by TMA.
DEVICE void mbarrier_arrive_expect_tx(u64& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// True once the phase of this parity has ended; waits a while before it says no.
DEVICE bool mbarrier_try_wait(u64& barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(shared_address(&barrier)), "r"(parity) : "memory");
  return done;
}

DEVICE void mbarrier_wait(u64& barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {}
}

// ---------------------------------------------------------------- TMA: boxes of a tensor to shared memory
struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap, passed by value

// Starts to fetch the map into the cache in which copies look it up.
DEVICE void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" :: "l"(&map)); }

// The box at these coordinates of a four-dimensional tensor, innermost first; what lies outside the tensor becomes
// zero.  Its bytes count on `barrier`.
DEVICE void tma_load_4d(void* shared, const TensorMap& map, u64& barrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(&barrier)),
                  "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Shows what this thread wrote to shared memory to TMA and wgmma.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------- setmaxnreg: registers change hands
template <int REGISTERS> DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

template <int REGISTERS> DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// ---------------------------------------------------------------- griddepcontrol: kernels that start before others end
// Until the kernel before this one on its stream has ended, and all that it wrote is there to see.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel behind this one may start once all blocks have come here: its blocks take the places of those that leave.
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---------------------------------------------------------------- wgmma: products of a warpgroup, asynchronous
// Orders the registers and shared memory that this thread wrote before the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N groups of this warpgroup are on their way.
template <int N> DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// Tells the front end that these registers change here: it moves no use of them across a fence or a wait.
template <int N> DEVICE void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i]) :: "memory");
}

// The same of packed fragments.
template <int N> DEVICE void pin_fragments(u32 (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i]) :: "memory");
}

// Where an operand lies in shared memory: rows of 128 bytes, swizzled in blocks of eight.
//   K-major (Q, K):   the next 16 columns are 32 bytes on.
//   MN-major (V):     the next 16 rows are 2,048 bytes on, the next 64 columns `leading_bytes`.
DEVICE u64 matrix_descriptor(const void* operand, u32 leading_bytes) {
  constexpr u64 SWIZZLE_128B = 1ull << 62;
  return (u64)((shared_address(operand) & 0x3FFFF) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 |
         SWIZZLE_128B;
}

DEVICE u64 advance_bytes(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

// s = q k^T over the first 32 columns: what s held is not read.
DEVICE void wgmma_qk_first(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]),
        "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]),
        "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]),
        "=f"(d[48]), "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]),
        "=f"(d[56]), "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])
      : "l"(a), "l"(b));
}

// s += q k^T over 32 columns.
DEVICE void wgmma_qk(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b));
}

// partial = p v over the first 32 keys: what partial held is not read.
DEVICE void wgmma_pv_first(float (&d)[48], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, %52, p, 1, 1;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]),
        "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]),
        "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// partial += p v over 32 keys.
DEVICE void wgmma_pv(float (&d)[48], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, %52, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// sums = p times ones over the first 32 keys: what sums held is not read.
DEVICE void wgmma_sums_first(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, p, 1, 1;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// sums += p times ones over 32 keys.
DEVICE void wgmma_sums(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

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

// The same, of negative numbers 0.
DEVICE u32 cvt_relu_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Four floats as e4m3, the first in the lowest byte; beyond 448 that.
DEVICE u32 cvt_e4m3x4(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// ---------------------------------------------------------------- online softmax, in base 2
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

// ---------------------------------------------------------------- rings of shared-memory stages
// The two barriers of each stage.
template <int STAGES> struct Pipe { u64 full[STAGES], empty[STAGES]; };

// A position in a ring: how many stages were passed.  The parity flips each time it has gone round.
template <int STAGES> struct Ring {
  u32 passed = 0;
  DEVICE int stage() const { return passed % STAGES; }
  DEVICE u32 parity() const { return passed / STAGES % 2; }
};

template <int STAGES> DEVICE void init(Pipe<STAGES>& pipe, int consumers) {
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(pipe.full[stage], 1);
    mbarrier_init(pipe.empty[stage], consumers);
  }
}

// The same where several warps fill a stage.
template <int STAGES> DEVICE void init_filled_by(Pipe<STAGES>& pipe, int consumers, int producers) {
  for (int stage = 0; stage < STAGES; stage++) {
    mbarrier_init(pipe.full[stage], producers);
    mbarrier_init(pipe.empty[stage], consumers);
  }
}

template <int STAGES> DEVICE void await_full(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  mbarrier_wait(pipe.full[at.stage()], at.parity());
}

// The first round passes: the phase before the first counts as ended.
template <int STAGES> DEVICE void await_empty(Pipe<STAGES>& pipe, const Ring<STAGES>& at) {
  mbarrier_wait(pipe.empty[at.stage()], at.parity() ^ 1);
}

// One arrival a warp, by the lane given.
template <int STAGES> DEVICE void release(Pipe<STAGES>& pipe, const Ring<STAGES>& at, int lane = 0) {
  if (threadIdx.x % 32 == lane) mbarrier_arrive(pipe.empty[at.stage()]);
}

// ---------------------------------------------------------------- softmax of a tile in the registers of wgmma
// Warp w, lane l of a warpgroup holds rows 16 w + l / 4 and eight further down of an m64nN accumulator; element
// 4 j + 2 r + e of its array is row r (0 or 1) of these, column 8 j + 2 (l % 4) + e.
//
// Per row: what is subtracted in the exponent (the highest scaled score so far, or less where it lags), and the sum of
// this lane's exponentials.
struct RowState { float row_max[2], sum[2]; };

// A row that has seen nothing: below every score, and finite, so that P of a hidden score of -inf is 2^-inf.
DEVICE RowState nothing_seen() { return {{-3e38f, -3e38f}, {0.f, 0.f}}; }

// The highest of each row over the four lanes that share it.
template <int N> DEVICE void highest_by_floats(const float (&s)[N], float (&highest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
    for (int i = 2 * r + 4; i < N; i += 4) {
      even = fmaxf(even, s[i]);
      odd = fmaxf(odd, s[i + 1]);
    }
    highest[r] = quad_max(fmaxf(even, odd));
  }
}

// The maxima follow the highest of scale * S in any case: its P is 2^offset.  True if one of this lane's rows did.
DEVICE bool follow_exactly(float (&row_max)[2], const float (&highest)[2], float scale, float offset) {
  const float before[2] = {row_max[0], row_max[1]};
#pragma unroll
  for (int r = 0; r < 2; r++) row_max[r] = fmaxf(row_max[r], fmaf(highest[r], scale, -offset));
  return row_max[0] != before[0] || row_max[1] != before[1];
}

template <int N> DEVICE void multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[i / 2 % 2];
}

// ---------------------------------------------------------------- from the registers of wgmma to rows
// Four 8 x 8 blocks, two side by side above two: lane l gives the row l % 16 of the left (l < 16) or right blocks.
DEVICE void stmatrix_x4(void* row, u32 left, u32 left_below, u32 right, u32 right_below) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(left), "r"(left_below), "r"(right), "r"(right_below) : "memory");
}

// Of two pairs of words the bytes at even places, and those at odd ones.
DEVICE u32 even_bytes(u32 low, u32 high) { return __byte_perm(low, high, 0x6420); }

DEVICE u32 odd_bytes(u32 low, u32 high) { return __byte_perm(low, high, 0x7531); }

// ---------------------------------------------------------------- what is known of a tile
enum TileClass { EMPTY, PARTIAL, FULL };  // no, some, all of its pairs are visible

// ---------------------------------------------------------------- plan
constexpr int WARPGROUPS = 2, TILE_Q = 64 * WARPGROUPS, TILE_KV = 128;  // rows of q and o, and of k and v, in a tile
constexpr int V_HEAD_DIM = 192;  // columns of v and o
constexpr int QK_COLUMNS = 192, V_COLUMNS = 192;  // of q and k, and of v and o, in a product: whole steps of 32
constexpr int STAGES = 2, Q_STAGES = 1;  // tiles of k and of v, and of q, in shared memory
constexpr int WORK_STAGES = 4;  // tiles of queries known
constexpr int THREADS = 128 + 128 * WARPGROUPS;
constexpr int PIECE = 96;  // columns of P V that are multiplied at a time
constexpr int KEYS_ACROSS = 128;  // in a row of V that is turned over
constexpr int V_STAGES = 2;  // tiles of v as stored
constexpr float OFFSET = 8.f;  // P of a row's highest score, as a power of two: e4m3 ends at 448
constexpr int BITS = 4;  // of eight words of P those whose code is 8 (7 + log2 P), rounded in the last bits of a half
constexpr float CODE = 0x1p-21f, CODE_OF_ONE = 3.310561180114746e-06f;  // 8 and 56 as such bits: least is 2^-24
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

typedef u16 bf16;

typedef unsigned char fp8;  // an element of q, k and v: bits

struct Params {
  bf16* o;
  float* lse;
  const float* q_descale;
  const float* k_descale;
  const float* v_descale;
  int* counters;
  i64 o_batch;
  i64 o_head;
  i64 o_row;
  i64 q_descale_batch;
  i64 q_descale_head;
  i64 q_descale_row;
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
  int l2_heads;
  int q_block_log2;
  int k_block_log2;
  int v_block_log2;
  int q_descale_heads;
  float scale;
};
static_assert(sizeof(Params) == 192, "what the host packs");

// Tiles as TMA writes and wgmma reads them: boxes of 128 columns, rows of 128 bytes, swizzled.
typedef fp8 QTile[(QK_COLUMNS + 127) / 128][64][128];  // the rows of one warpgroup

typedef fp8 KTile[(QK_COLUMNS + 127) / 128][TILE_KV][128];

typedef fp8 VTile[(V_COLUMNS + 127) / 128][TILE_KV][128];

typedef fp8 TurnedTile[V_COLUMNS][KEYS_ACROSS];  // V^T: a row is a column of v

typedef fp8 OnesTile[8][KEYS_ACROSS];

struct QorO { QTile q; };

// A tile of queries, and whether they see any key; q_tile < 0: there is none left.
struct alignas(16) Work { int q_tile, h, b, visible; };

// A tile of keys, whether the mask hides some of it, and whether it is the last.
struct alignas(16) Step { int tile, masked, last; };

struct alignas(1024) Shared {
  QorO q_or_o[Q_STAGES][WARPGROUPS];
  KTile k[STAGES];
  VTile v[V_STAGES];
  TurnedTile turned[STAGES];
  OnesTile ones;
  float q_descale[Q_STAGES][WARPGROUPS];
  float k_descale[STAGES], turned_descale[STAGES];
  float v_descale[V_STAGES];
  int v_keys[V_STAGES];  // of a tile of V; 0: none is left
  Work work[WORK_STAGES];
  Step step[STAGES];  // what k holds
  Pipe<WORK_STAGES> work_pipe;
  Pipe<Q_STAGES> q_pipe[WARPGROUPS];
  Pipe<STAGES> k_pipe;
  Pipe<V_STAGES> v_pipe;
  Pipe<STAGES> turned_pipe;
};
static_assert(sizeof(Shared) == 215040, "what the plan counted");

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

// ---------------------------------------------------------------- loader: one thread that copies tiles to consumers
struct Loader {
  Shared& shared;
  const TensorMap &map_q, &map_k, &map_v;
  const Params& p;
  Ring<Q_STAGES> q_ring = {};
  Ring<STAGES> k_ring = {};
  Ring<V_STAGES> v_ring = {};

  DEVICE void load_q(const Work& work) {
    const int first = work.q_tile * TILE_Q;
#pragma unroll 1
    for (int w = 0; w < WARPGROUPS; w++) {
      u64& full = shared.q_pipe[w].full[q_ring.stage()];
      await_empty(shared.q_pipe[w], q_ring);
      shared.q_descale[q_ring.stage()][w] = q_descale(work, work.q_tile * TILE_Q + w * 64);
      mbarrier_arrive_expect_tx(full, sizeof(QTile));
#pragma unroll
      for (int d = 0; d < QK_COLUMNS; d += 128)
        tma_load_4d(shared.q_or_o[q_ring.stage()][w].q[d / 128], map_q, full, d, first + w * 64, work.h, work.b);
    }
    q_ring.passed++;
  }

  // Into the stage that `full` is of, which is empty.
  DEVICE void copy_k(u64& full, int tile, int kv_head, int b) {
    mbarrier_arrive_expect_tx(full, sizeof(KTile));
#pragma unroll
    for (int d = 0; d < QK_COLUMNS; d += 128)
      tma_load_4d(shared.k[k_ring.stage()][d / 128], map_k, full, d, tile * TILE_KV, kv_head, b);
    k_ring.passed++;
  }

  DEVICE void load_v(int tile, int kv_head, int b) {
    u64& full = shared.v_pipe.full[v_ring.stage()];
    const float descale = v_descale(tile, kv_head, b);
    await_empty(shared.v_pipe, v_ring);
    shared.v_descale[v_ring.stage()] = descale;
    shared.v_keys[v_ring.stage()] = min(p.kv_len - tile * TILE_KV, TILE_KV);
    mbarrier_arrive_expect_tx(full, sizeof(VTile));
#pragma unroll
    for (int d = 0; d < V_COLUMNS; d += 128)
      tma_load_4d(shared.v[v_ring.stage()][d / 128], map_v, full, d, tile * TILE_KV, kv_head, b);
    v_ring.passed++;
  }

  // What elements of 64 rows of q count by, which may lie beyond the last, and those of a tile of K and of V.
  DEVICE float q_descale(const Work& work, int row) {
    const i64 head = work.h / p.q_descale_heads * p.q_descale_head;
    return p.q_descale[work.b * p.q_descale_batch + head + (min(row, p.q_len - 1) >> p.q_block_log2) * p.q_descale_row];
  }

  DEVICE float k_descale(int tile, int kv_head, int b) {
    const i64 block = tile * TILE_KV >> p.k_block_log2;
    return p.k_descale[b * p.k_descale_batch + kv_head * p.k_descale_head + block * p.k_descale_row];
  }

  DEVICE float v_descale(int tile, int kv_head, int b) {
    const i64 block = tile * TILE_KV >> p.v_block_log2;
    return p.v_descale[b * p.v_descale_batch + kv_head * p.v_descale_head + block * p.v_descale_row];
  }

  // Tells those who turn V over that there is no more.
  DEVICE void end_v() {
    await_empty(shared.v_pipe, v_ring);
    shared.v_keys[v_ring.stage()] = 0;
    mbarrier_arrive(shared.v_pipe.full[v_ring.stage()]);
  }

  Work of = {};  // the tile of queries whose keys are loaded
  int kv_head = 0;
  bool first = true;  // no K of it was loaded

  // What follows is of this tile of queries, or nothing does.
  DEVICE void load(const Work& work) {
    if (work.q_tile < 0) end_v();
    of = work;
    kv_head = work.h / (p.heads / p.kv_heads);
  }

  // V behind its own K: to turn it over takes most of a step.
  DEVICE void load_step(const Step& step) {
    const float descale = k_descale(step.tile, kv_head, of.b);
    await_empty(shared.k_pipe, k_ring);
    shared.k_descale[k_ring.stage()] = descale;
    shared.step[k_ring.stage()] = step;
    copy_k(shared.k_pipe.full[k_ring.stage()], step.tile, kv_head, of.b);
    load_v(step.tile, kv_head, of.b);
    if (first) load_q(of);  // last: nothing is kept through it
    first = step.last;
  }

};

// ---------------------------------------------------------------- scheduler: one warp that hands out tiles
struct Scheduler {
  Shared& shared;
  const Params& p;
  Loader loader;
  Ring<WORK_STAGES> work_ring = {};

  // Lane 0 loads what it tells the consumers of.
  DEVICE void send(const Work& work) {
    if (threadIdx.x == 0) {
      await_empty(shared.work_pipe, work_ring);
      shared.work[work_ring.stage()] = work;
      mbarrier_arrive(shared.work_pipe.full[work_ring.stage()]);
      loader.load(work);
    }
    __syncwarp();
    work_ring.passed++;
  }

  DEVICE void send_step(const Step& step) {
    if (threadIdx.x == 0) loader.load_step(step);
    __syncwarp();
  }

  // The tiles of keys that a tile of queries sees, from the last to the first: 32 at a time, each judged by one lane.
  DEVICE void send_all(Work work) {
    const int q_first = work.q_tile * TILE_Q;
    const Rows rows = {work.b, work.h, q_first, min(q_first + TILE_Q, p.q_len) - 1};
    Step step = {-1, 0, 0};
    int top = (p.kv_len + TILE_KV - 1) / TILE_KV - 1;
    while ((top = previous_tile(top, rows, p)) >= 0) {
      const int tile = top - (int)(threadIdx.x % 32);
      const bool in_a_run = tile >= 0 && previous_tile(tile, rows, p) == tile;
      const TileClass found = in_a_run ? classify(rows, tile, p) : EMPTY;
      const u32 masked = __ballot_sync(~0u, found == PARTIAL);
      for (u32 visited = __ballot_sync(~0u, found != EMPTY); visited; visited &= visited - 1) {
        const int i = __ffs(visited) - 1;
        if (step.tile < 0) send(work);
        else send_step(step);
        step = {top - i, int(masked >> i & 1), 0};
      }
      top -= 32;
    }
    step.last = 1;
    work.visible = step.tile >= 0;
    if (work.visible) send_step(step);
    else send(work);
  }

  // Long tiles first, within groups of heads whose keys and values stay in L2: late queries see most if causal.
  DEVICE Work locate(int index) {
    const int group = index / (p.q_tiles * p.l2_heads) * p.l2_heads, rest = index - group * p.q_tiles;
    const int width = min(p.l2_heads, p.heads * p.batch - group), head = group + rest % width;
    return {p.q_tiles - 1 - rest / width, head % p.heads, head / p.heads, 1};
  }

  // A block's first tile follows from its number, the others from a counter, unless each block has one alone.
  DEVICE void run() {
    const int all = p.q_tiles * p.heads * p.batch, blocks = gridDim.x;
    for (int index = blockIdx.x; index < all; index = __shfl_sync(~0u, index, 0)) {
      send_all(locate(index));
      if (all <= blocks) break;
      if (threadIdx.x == 0) index = blocks + atomicAdd(&p.counters[0], 1);
    }
    send(Work{-1, 0, 0, 0});
    // The last block leaves the counters as it found them, for the next launch.
    if (all > blocks && threadIdx.x == 0 &&
        atomicAdd(&p.counters[1], 1) == blocks - 1) p.counters[0] = p.counters[1] = 0;
  }
};

// ---------------------------------------------------------------- transposers: warps that turn V over
struct Transposer {
  Shared& shared;
  static constexpr int WARPS = 3, FIRST = 1;
  Ring<V_STAGES> v_ring = {};
  Ring<STAGES> turned_ring = {};

  // V [key][column] becomes V^T [column][key], 32 keys by 16 columns at a time: read as pairs of bytes and turned over
  // by ldmatrix, bytes sorted, written by stmatrix.  Nothing is shuffled, since two orders are taken as they come:
  //   of 16 keys, place 4 t + i is key 2 t + i (i < 2) or 6 + 2 t + i, which is how S lies in registers of P;
  //   of 16 columns, row 8 e + c is column 2 c + e, which the store of O undoes.
  DEVICE void turn(const VTile& v, TurnedTile& turned) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int d = (threadIdx.x / 32 - FIRST) * 16; d < V_COLUMNS; d += WARPS * 16) {
      const fp8* const from = &v[d / 128][lane][(d % 128 / 16 ^ lane % 8) * 16];
      fp8(&to)[KEYS_ACROSS] = turned[d + lane % 16];
      u32 x[TILE_KV / 32][4];
#pragma unroll
      for (int i = 0; i < TILE_KV / 32; i++) ldmatrix_x4_trans(x[i], shared_address(from + i * 32 * 128));
#pragma unroll
      for (int i = 0; i < TILE_KV / 32; i++)
        stmatrix_x4(&to[((2 * i + lane / 16) ^ lane % 8) * 16],
                    even_bytes(x[i][0], x[i][1]), odd_bytes(x[i][0], x[i][1]),
                    even_bytes(x[i][2], x[i][3]), odd_bytes(x[i][2], x[i][3]));
    }
  }

  DEVICE void run() {
    while (true) {
      const int stage = v_ring.stage(), to = turned_ring.stage();
      await_full(shared.v_pipe, v_ring);
      const int keys = shared.v_keys[stage];
      if (keys == 0) break;
      const float descale = shared.v_descale[stage];
      await_empty(shared.turned_pipe, turned_ring);
      turn(shared.v[stage], shared.turned[to]);
      if (threadIdx.x == FIRST * 32) shared.turned_descale[to] = descale;
      fence_proxy_async();
      __syncwarp();
      release(shared.v_pipe, v_ring);
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.turned_pipe.full[to]);
      v_ring.passed++;
      turned_ring.passed++;
    }
  }
};

// ---------------------------------------------------------------- consumers: a warpgroup owns 64 rows of the tile
typedef float S[TILE_KV / 2];

struct Consumer {
  Shared& shared;
  const Params& p;
  const int warpgroup;
  // This thread's first row and column of a tile.
  const int row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  float scale = 0.f;  // of S of the tile in hand, in the exponent
  float v_descale = 0.f, partial[PIECE / 2] = {};  // of P V of the tile before
  float row_sums[4] = {};  // of P of the tile before
  Ring<WORK_STAGES> work_ring = {};
  Ring<Q_STAGES> q_ring = {};
  Ring<STAGES> k_ring = {}, v_ring = {};
  u32 probabilities[TILE_KV / 8] = {};
  float o[V_COLUMNS / 2] = {};
  RowState state = {};
  float before[2] = {}, added[2] = {};  // the maxima that O and the sums still have, and what a tile adds to the sums
  u32 moved = 0;  // lanes whose maxima are not those of O any more

  // Read where it is used: registers are for fragments.
  DEVICE Work work_at(Ring<WORK_STAGES> at) { return shared.work[at.stage()]; }

  DEVICE Work await_work(Ring<WORK_STAGES> at) {
    await_full(shared.work_pipe, at);
    return work_at(at);
  }

  DEVICE void release_work(Ring<WORK_STAGES> at) {
    __syncwarp();
    release(shared.work_pipe, at);
  }

  // The first tile from `at` on that sees a key.  Those before it get O = 0 and lse = -inf.
  DEVICE Ring<WORK_STAGES> await_visible(Ring<WORK_STAGES> at) {
    Work work = await_work(at);
    while (work.q_tile >= 0 && !work.visible) {
      store_nothing(work);
      release_work(at);
      at.passed++;
      work = await_work(at);
    }
    return at;
  }

  // What S of this tile of K counts by; found under the product.
  DEVICE void find_scale() {
    const float descale = shared.q_descale[q_ring.stage()][warpgroup] * shared.k_descale[k_ring.stage()];
    scale = fmaxf(p.scale * descale * LOG2E, SMALLEST);  // scale 0 times a masked -inf stays -inf
  }

  // S = Q K^T, on its way
  DEVICE void issue_qk(S& s) {
    const u64 k = advance_bytes(matrix_descriptor(shared.k, 16), k_ring.stage() * sizeof(KTile));
    const u64 q =
        advance_bytes(matrix_descriptor(&shared.q_or_o[0][warpgroup], 16), q_ring.stage() * sizeof(shared.q_or_o[0]));
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < QK_COLUMNS; d += 32) {
      const u64 q_part = advance_bytes(q, d / 128 * 64 * 128 + d % 128);
      const u64 k_part = advance_bytes(k, d / 128 * TILE_KV * 128 + d % 128);
      if (d == 0) wgmma_qk_first(s, q_part, k_part);
      else wgmma_qk(s, q_part, k_part);
    }
    wgmma_commit_group();
  }

  // Some columns of P V of one tile of keys, on their way: from 0 on.
  DEVICE void issue_piece(int column) {
    const u64 v =
        advance_bytes(matrix_descriptor(shared.turned, 16), v_ring.stage() * sizeof(TurnedTile) + column * KEYS_ACROSS);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < TILE_KV; n += 32) {
      const u32(&a)[4] = *(u32 (*)[4])&probabilities[n / 8];
      if (n == 0) wgmma_pv_first(partial, a, v);
      else wgmma_pv(partial, a, advance_bytes(v, n));
    }
    wgmma_commit_group();
  }

  // The sums of P of one tile of keys, on their way: P times a matrix of ones.
  DEVICE void issue_sums() {
    const u64 ones = matrix_descriptor(shared.ones, 16);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < TILE_KV; n += 32) {
      const u32(&a)[4] = *(u32 (*)[4])&probabilities[n / 8];
      if (n == 0) wgmma_sums_first(row_sums, a, ones);
      else wgmma_sums(row_sums, a, advance_bytes(ones, n));
    }
  }

  // The rows' sums grow by these; each of four lanes has all of a row's.
  DEVICE void add_sums() {
    pin(row_sums);
    state.sum[0] = fmaf(row_sums[0], 0.25f, state.sum[0]);
    state.sum[1] = fmaf(row_sums[2], 0.25f, state.sum[1]);
  }

  // O grows by these partial sums, in float32, by V's descale.
  DEVICE void fold(int column) {
    pin(partial);
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) o[column / 2 + i] = fmaf(partial[i], v_descale, o[column / 2 + i]);
  }

  // P V, on its way: but for its last piece it has joined O.
  DEVICE void issue_pv() {
    await_full(shared.turned_pipe, v_ring);
    v_descale = shared.turned_descale[v_ring.stage()];
    pin_fragments(probabilities);
    issue_sums();
#pragma unroll
    for (int column = 0; column < V_COLUMNS; column += PIECE) {
      issue_piece(column);
      if (column + PIECE == V_COLUMNS) break;
      wgmma_wait_group<0>();
      fold(column);
    }
  }

  // The last piece joins O; `BEHIND` groups of products behind it stay on their way.  V is released before the
  // additions, which then mix with what follows.
  template <int BEHIND = 0> DEVICE void await_pv() {
    wgmma_wait_group<BEHIND>();
    release(shared.turned_pipe, v_ring);
    v_ring.passed++;
    fold(V_COLUMNS - PIECE);
    add_sums();
  }

  // The same, and K is released: before what S is used for, or ptxas does it last.
  DEVICE void take_scores(S& s) {
    wgmma_wait_group<0>();
    release(shared.k_pipe, k_ring);
    k_ring.passed++;
    pin(s);
  }

  // The query and the key of element i of S.
  DEVICE int query(const Work& work, int i) {
    return work.q_tile * TILE_Q + row + i / 2 % 2 * 8;
  }

  DEVICE int key(int tile, int i) {
    return tile * TILE_KV + column + i / 4 * 8 + i % 2;
  }

  // S becomes -inf where the mask hides the key.
  DEVICE void apply_mask(S& s, const Work work, int tile) {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; i++)
      if (!keep(work.b, work.h, query(work, i), key(tile, i), p)) s[i] = MINUS_INFINITY;
  }

  // S becomes -inf beyond the last key: in the first tile of a schedule, if anywhere.
  DEVICE void cut(S& s, int tile) {
    const int columns = p.kv_len - tile * TILE_KV;
    if (columns >= TILE_KV) return;
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; i++)
      if (column + i / 4 * 8 + i % 2 >= columns) s[i] = MINUS_INFINITY;
  }

  // O and the sums follow the maxima.
  DEVICE void rescale() {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      factor[r] = ex2(before[r] - state.row_max[r]);
      state.sum[r] *= factor[r];
    }
    multiply_rows(o, factor);
  }

  // Maxima, which are exact: P of a row's highest score is 2^OFFSET.
  DEVICE void look(const S& s) {
    before[0] = state.row_max[0];
    before[1] = state.row_max[1];
    float highest[2];
    highest_by_floats(s, highest);
    moved = __ballot_sync(~0u, follow_exactly(state.row_max, highest, scale, OFFSET));
  }

  DEVICE void forget() { state = nothing_seen(); }

  // S becomes P as products take it: of eight words BITS without an exponential.  The order of V's keys is that of S.
  DEVICE void round(const S& s) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float code_scale = scale * CODE, code_shift = fmaf(state.row_max[r], -CODE, CODE_OF_ONE);
#pragma unroll
      for (int i = r; i < TILE_KV / 8; i += 2) {
        const int first = i / 2 * 8 + r * 2;
        const float a = s[first], b = s[first + 1], c = s[first + 4], d = s[first + 5];
        if (i * 5 % 8 < BITS) {
          const u32 low = cvt_relu_f16x2(fmaf(a, code_scale, code_shift), fmaf(b, code_scale, code_shift));
          const u32 high = cvt_relu_f16x2(fmaf(c, code_scale, code_shift), fmaf(d, code_scale, code_shift));
          probabilities[i] = even_bytes(low, high);
        } else {
          const float row_max = state.row_max[r];
          probabilities[i] = cvt_e4m3x4(ex2(fmaf(a, scale, -row_max)), ex2(fmaf(b, scale, -row_max)),
                                        ex2(fmaf(c, scale, -row_max)), ex2(fmaf(d, scale, -row_max)));
        }
      }
    }
  }

  // S becomes P; it is added up by the product with ones.
  DEVICE void to_probabilities(S& s) {
    look(s);
    round(s);
  }

  DEVICE void run() {
#pragma unroll 1
    while (true) {
      work_ring = await_visible(work_ring);
      if (work_at(work_ring).q_tile < 0) return;
      await_full(shared.q_pipe[warpgroup], q_ring);
      forget();
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 2; i++) o[i] = 0.f;
      bool last = false;
#pragma unroll 1
      while (!last) {
        S s;
        await_full(shared.k_pipe, k_ring);
        issue_qk(s);
        const Step step = shared.step[k_ring.stage()];
        // a vote: so that ptxas knows all lanes to agree, and counts rings in uniform registers
        last = __any_sync(~0u, step.last);
        find_scale();
        take_scores(s);
        if (step.masked) apply_mask(s, work_at(work_ring), step.tile);
        cut(s, step.tile);
        to_probabilities(s);
        if (moved) rescale();
        issue_pv();
        await_pv();
      }
      release(shared.q_pipe[warpgroup], q_ring);
      q_ring.passed++;
      store(state);
      work_ring.passed++;
    }
  }

  DEVICE bf16* output(const Work& work, int q) { return p.o + work.b * p.o_batch + work.h * p.o_head + q * p.o_row; }

  DEVICE void store_lse(const Work& work, int q, float lse) {
    if (threadIdx.x % 4 == 0) p.lse[((i64)work.b * p.heads + work.h) * p.q_len + q] = lse;
  }

  // o = 0 and lse = -inf.
  DEVICE void store_nothing(const Work work) {
    const int q = work.q_tile * TILE_Q + row, column = threadIdx.x % 4 * 8;
#pragma unroll 1
    for (int r = 0; r < 16; r += 8) {
      if (q + r < p.q_len) store_lse(work, q + r, MINUS_INFINITY);
#pragma unroll 1
      for (int d = 0; d < V_HEAD_DIM; d += 32)
        if (q + r < p.q_len && d + column < V_HEAD_DIM) *(Chunk*)(output(work, q + r) + d + column) = {};
    }
  }

  // o = O / sum and lse = log(sum of e^s); a row without any visible key: 0 and -inf.
  DEVICE void store(const RowState& done) {
    const Work work = work_at(work_ring);
    release_work(work_ring);
    const int q = work.q_tile * TILE_Q + row;
    float lse[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = quad_sum(done.sum[r]);
      const float of_keys = lse_of(done.row_max[r], sum);  // of any sum: a branch would part the two rows
      lse[r] = sum == 0.f ? MINUS_INFINITY : of_keys;
      factor[r] = sum == 0.f ? 0.f : rcp(sum);
    }
    multiply_rows(o, factor);
    // A lane has four columns side by side of every 16.
    const int lane = threadIdx.x % 4;
    bf16* const out = output(work, q) + lane * 4;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int d = 0; d < V_COLUMNS; d += 16) {
        const int i = d / 2 + 2 * r;
        if (q + 8 * r < p.q_len)
          *(uint2*)(out + 8 * r * p.o_row + d) = make_uint2(cvt_bf16x2(o[i], o[i + 4]), cvt_bf16x2(o[i + 1], o[i + 5]));
      }
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (q + 8 * r < p.q_len) store_lse(work, q + 8 * r, lse[r]);
  }
};

// Every element is 1.
DEVICE void fill_ones(Shared& shared) {
  constexpr u32 FOUR = 0x38383838;
  if (threadIdx.x < sizeof(OnesTile) / 16) ((uint4*)shared.ones)[threadIdx.x] = make_uint4(FOUR, FOUR, FOUR, FOUR);
  fence_proxy_async();
}

// ---------------------------------------------------------------- kernel: FlashAttention-3 (Shah et al. 2024)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                  const __grid_constant__ TensorMap map_v, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  if (threadIdx.x == 0) {
    for (int w = 0; w < WARPGROUPS; w++) init(shared.q_pipe[w], 4);
    init(shared.k_pipe, 4 * WARPGROUPS);
    init(shared.v_pipe, 3);
    init(shared.work_pipe, 4 * WARPGROUPS);
    init_filled_by(shared.turned_pipe, 4 * WARPGROUPS, 3);
    fence_mbarrier_init();
  }
  if (threadIdx.x == 32) {
    prefetch_tensor_map(map_q);
    prefetch_tensor_map(map_k);
    prefetch_tensor_map(map_v);
  }
  fill_ones(shared);
  __syncthreads();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) Scheduler{shared, p, {shared, map_q, map_k, map_v, p}}.run();
    if (threadIdx.x >= 32) Transposer{shared}.run();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer{shared, p, warpgroup - 1}.run();
  }
}
