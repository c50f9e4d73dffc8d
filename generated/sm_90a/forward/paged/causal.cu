// causal: attention forward
// Causal attention: each query sees itself and the keys before it; positions count from the start of q and k.
//
// visible  k <= q
// plan     hopper on sm_90a, bfloat16, head_dim 128
// tile     128 queries x 128 keys, 2 stages, q in shared memory
// roles    1 scheduler, 1 loader, 1 cleaner, 1 idle warp of 40 registers per thread; 8 consumer warps of 232
// launch   overlapping: each kernel of a call starts while the one before it on the stream ends, and waits for it
// shared   q 65536 + k 65536 + v 65536 + control 1024 = 197632 bytes
// made by  flashgen emit causal --arch sm_90a --pipeline hopper --dtype bfloat16 --head-dim 128 --tile 128x128
//          --stages 2 --q-stages 2 --layout paged_varlen

// ---------------------------------------------------------------- types
#define DEVICE __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what one instruction moves

// ---------------------------------------------------------------- fewer registers kept through a loop
// Tells the compiler that the ends of a range are new.
DEVICE void renew_range(int& first, int& last) { asm volatile("" : "+r"(first), "+r"(last)); }

// ---------------------------------------------------------------- addresses of shared memory, as PTX takes them
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---------------------------------------------------------------- mul.wide: all 64 bits of a product
// In an instruction.  Of u64 whose upper halves are 0, the compiler adds up the partial products.
DEVICE u64 mul_wide_u32(u32 a, u32 b) { u64 d; asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b)); return d; }

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

// The same of a five-dimensional tensor.
DEVICE void tma_load_5d(void* shared, const TensorMap& map, u64& barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               :: "r"(shared_address(shared)), "l"(&map), "r"(shared_address(&barrier)),
                  "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
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

// ---------------------------------------------------------------- prefetch: memory that will be read
DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }

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

// The same where blocks of eight rows lie `group_bytes` apart.
DEVICE u64 grouped_matrix_descriptor(const void* operand, u32 leading_bytes, u32 group_bytes) {
  constexpr u64 GROUP = 0x3FFFull << 32;
  return (matrix_descriptor(operand, leading_bytes) & ~GROUP) | (u64)(group_bytes >> 4) << 32;
}

DEVICE u64 advance_bytes(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

// s = q k^T over the first 16 columns: what s held is not read.
DEVICE void wgmma_qk_first(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
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

// s += q k^T over 16 columns.
DEVICE void wgmma_qk(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
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

// The same of the first keys of a tile.
DEVICE void wgmma_qk_first(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
      : "l"(a), "l"(b));
}

// s += q k^T over 16 columns, of them.
DEVICE void wgmma_qk(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
}

// o += p v over 16 keys.
DEVICE void wgmma_pv(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
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

// P of a key beyond which its row's maximum follows it: `share` of what the row has added up, from 1 to `most`.
DEVICE float lag_limit(float sum, float share, float most) {
  const float row_sum = quad_sum(sum);
  return row_sum == 0.f ? most : fminf(fmaxf(share * row_sum, 1.f), most);
}

// ---------------------------------------------------------------- quotients by numbers that the host knows
// Of n from 0 on.  The lower half of `by` is multiplied, the upper is how far the product shifts.
DEVICE int quotient_by(int n, u64 by) { return mul_wide_u32(n, (u32)by) >> (u32)(by >> 32); }

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

// The highest and the lowest of this lane's elements of row r, as integers.
template <int N> DEVICE int highest_bits(const float (&s)[N], int r) {
  int highest = __float_as_int(s[2 * r]);
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) highest = max(max(highest, __float_as_int(s[i])), __float_as_int(s[i + 1]));
  return highest;
}

template <int N> DEVICE int lowest_bits(const float (&s)[N], int r) {
  int lowest = __float_as_int(s[2 * r]);
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) lowest = min(min(lowest, __float_as_int(s[i])), __float_as_int(s[i + 1]));
  return lowest;
}

// The highest of each row over the four lanes that share it, given the highest `bits` of this lane's: those of the
// highest float unless all are negative, which is asked where some may be; then that has the lowest bits.
template <int N> DEVICE void highest_of_bits(const float (&s)[N], int (&bits)[2], bool negative, float (&highest)[2]) {
  if (negative) {
#pragma unroll
    for (int r = 0; r < 2; r++) bits[r] = bits[r] < 0 ? lowest_bits(s, r) : bits[r];
  }
#pragma unroll
  for (int r = 0; r < 2; r++) highest[r] = quad_max(__int_as_float(bits[r]));
}

// The same for maxima of which none is below 0 unless some are `negative`: of scores that are all below it no maximum
// follows any, and one of them is as good as another.  No vote stands between S and its exponentials then.
template <int N> DEVICE void highest_to_follow(const float (&s)[N], bool negative, float (&highest)[2]) {
  int bits[2] = {highest_bits(s, 0), highest_bits(s, 1)};
  highest_of_bits(s, bits, negative, highest);
}

// The maxima follow the highest of S, scaled, where its P is more than the row's limit: true if one of this lane's did.
DEVICE bool follow(float (&row_max)[2], const float (&highest)[2], float scale, const float (&limit)[2]) {
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    moves[r] = ex2(fmaf(highest[r], scale, -row_max[r])) > limit[r];
    // By the instruction of the exponents: of a plain product ptxas makes a worse plan of registers (2%, head_dim 128).
    if (moves[r]) row_max[r] = fmaf(highest[r], scale, 0.f);
  }
  return moves[0] || moves[1];
}

// Row r of S becomes P = 2^(scale * S - row_max); what it adds up to.
template <int N> DEVICE float exponentiate_row(float (&s)[N], int r, float scale, float row_max) {
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) {
    s[i] = ex2(fmaf(s[i], scale, -row_max));
    s[i + 1] = ex2(fmaf(s[i + 1], scale, -row_max));
    even += s[i];
    odd += s[i + 1];
  }
  return even + odd;
}

template <int N> DEVICE void exponentiate_rows(float (&s)[N], float scale, const float (&row_max)[2], float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = exponentiate_row(s, r, scale, row_max[r]);
}

// A factor of 0 clears a row whatever it holds.
template <int N> DEVICE void clear_or_multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] = factor[i / 2 % 2] == 0.f ? 0.f : o[i] * factor[i / 2 % 2];
}

template <int N> DEVICE void multiply_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; i++) o[i] *= factor[i / 2 % 2];
}

// ---------------------------------------------------------------- from the registers of wgmma to rows
// Lane i of four gets word i of each of them, in their order.
DEVICE void transpose_quad(u32 (&word)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if ((j & distance) == 0) {
        u32 &low = word[j], &high = word[j + distance];
        const u32 other = __shfl_xor_sync(~0u, upper ? low : high, distance);
        if (upper) low = other;
        else high = other;
      }
  }
}

// ---------------------------------------------------------------- what is known of a tile
enum TileClass { EMPTY, PARTIAL, FULL };  // no, some, all of its pairs are visible

// ---------------------------------------------------------------- plan
constexpr int WARPGROUPS = 2, TILE_Q = 64 * WARPGROUPS, TILE_KV = 128;  // rows of q and o, and of k and v, in a tile
constexpr int V_HEAD_DIM = 128;  // columns of v and o
constexpr int FIRST_KEYS = 64;  // of a tile: a warpgroup that sees no others multiplies by these alone
constexpr int QK_COLUMNS = 128, V_COLUMNS = 128;  // of q and k, and of v and o, in a product: whole steps of 16
constexpr int STAGES = 2, Q_STAGES = 2;  // tiles of k and of v, and of q, in shared memory
constexpr int WORK_STAGES = 4;  // tiles of queries known
constexpr int THREADS = 128 + 128 * WARPGROUPS;
constexpr float SHARE = 0.0625f;  // of what a row has added up: a key with more moves its maximum, and O is rescaled
constexpr float MOST = 0x1p64f;  // P that moves it in any case
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

typedef u16 bf16;

struct Params {
  bf16* o;
  float* lse;
  int* counters;
  const int* cu_seqlens_q;
  const int* kv_lengths;
  const int* q_offsets;
  const int* page_table;
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
  int l2_heads;
  int q_rows;
  int q_offset;
  int q_start;
  int pages;
  int page_size;
  int page_rows;
  int k_head_boxes;
  int v_head_boxes;
  float scale;
};
static_assert(sizeof(Params) == 160, "what the host packs");

// Tiles as TMA writes and wgmma reads them: boxes of 64 columns, rows of 128 bytes, swizzled.
typedef bf16 QTile[(QK_COLUMNS + 63) / 64][64][64];  // the rows of one warpgroup

typedef bf16 KTile[TILE_KV / 8][QK_COLUMNS / 64][8][64];  // whole rows, eight by eight

typedef bf16 VTile[TILE_KV / 8][V_COLUMNS / 64][8][64];  // whole rows, eight by eight

struct QorO { QTile q; };

// A tile of queries, and whether they see any key; q_tile < 0: there is none left.
struct alignas(16) Work { int q_tile, h, b, visible, queries, q_offset, q_len, kv_len, q_start; };

// A tile of keys, whether the mask hides some of it, and whether it is the last.
struct alignas(16) Step { int tile, masked, last; };

struct alignas(8) Tail { int stage, rows; };  // a tile of V, and how many of its rows are keys; stage < 0: none is left

struct alignas(1024) Shared {
  QorO q_or_o[Q_STAGES][WARPGROUPS];
  KTile k[STAGES];
  VTile v[STAGES];
  Work work[WORK_STAGES];
  Step next[2], step[STAGES];  // what to load next, what k holds
  Pipe<2> next_pipe;
  Pipe<WORK_STAGES> work_pipe;
  Pipe<Q_STAGES> q_pipe[WARPGROUPS];
  Pipe<STAGES> k_pipe, v_pipe;
  Tail tail;
  Pipe<1> tail_pipe;
};
static_assert(sizeof(Shared) == 197632, "what the plan counted");

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

// No query of these sees a key behind this one.
DEVICE int last_key(const Rows& rows, const Params& p) {
  return rows.q_last;
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

// Brings to L2 the page table, a line for each lane of a warp, first the entries of the first keys.
DEVICE void prefetch_pages(const Params& p) {
  constexpr int ENTRIES = 128 / sizeof(int);  // in a line of L2
  const int lane = threadIdx.x % 32, line = (blockIdx.x * 32 + lane) / p.batch, b = (blockIdx.x * 32 + lane) % p.batch;
  const int entries = quotient_by(p.kv_len - 1, p.by_page_size) + 1;
  if (line * ENTRIES < entries) prefetch_l2(p.page_table + b * p.table_row + line * ENTRIES);
}

// Brings to L2 what a block waits for before its first copy, while it sets out: a line for each lane of a warp.
DEVICE void prefetch_lengths(const Params& p) {
  constexpr int ENTRIES = 128 / sizeof(int);  // in a line of L2
  const int first = threadIdx.x % 32 * ENTRIES;
  if (first >= p.batch) return;
  prefetch_l2(p.cu_seqlens_q + first);
  if (p.kv_lengths != nullptr) prefetch_l2(p.kv_lengths + first);
  if (p.q_offsets != nullptr) prefetch_l2(p.q_offsets + first);
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

// The problem of a tile's sequence.
DEVICE Params of_work(Params p, const Work& work) {
  p.q_offset = work.q_offset;
  p.q_len = work.q_len;
  p.kv_len = work.kv_len;
  return p;
}

// ---------------------------------------------------------------- scheduler: one warp that hands out tiles
struct Scheduler {
  Shared& shared;
  const Params& p;
  Ring<2> next_ring = {};
  Ring<WORK_STAGES> work_ring = {};

  DEVICE void send(const Work& work) {
    if (threadIdx.x == 0) {
      await_empty(shared.work_pipe, work_ring);
      shared.work[work_ring.stage()] = work;
      mbarrier_arrive(shared.work_pipe.full[work_ring.stage()]);
    }
    work_ring.passed++;
  }

  DEVICE void send_step(const Step& step) {
    if (threadIdx.x == 0) {
      await_empty(shared.next_pipe, next_ring);
      shared.next[next_ring.stage()] = step;
      mbarrier_arrive(shared.next_pipe.full[next_ring.stage()]);
    }
    next_ring.passed++;
  }

  // The tile with what its sequence has; it is visible if there is any query and any key.
  DEVICE Work with_lengths(const Work& work) {
    const Params own = of_sequence(p, work.b, work.q_tile * TILE_Q);
    const int queries = own.q_len - own.q_offset;
    return {work.q_tile, work.h, work.b, own.kv_len > 0, queries, own.q_offset, own.q_len, own.kv_len, own.q_start};
  }

  // Of a tile that the mask hides some of: 1, and above it two bits for each warpgroup, whether its queries see none of
  // the first keys, and none of the others.
  DEVICE int masked_for_warpgroups(Rows rows, int tile, const Params& p) {
    renew_range(rows.q_first, rows.q_last);  // no register keeps what follows from them
    const int first = tile * TILE_KV, others = first + FIRST_KEYS;
    int masked = 1;
#pragma unroll
    for (int w = 0; w < WARPGROUPS; w++) {
      const int q_first = rows.q_first + w * 64, q_last = rows.q_first + (w * 64 + 63);
      const int last = last_key({rows.b, rows.h, q_first, min(q_last, rows.q_last)}, p);
      masked |= ((last < first) | (last < others) << 1) << (2 * w + 1);
    }
    return masked;
  }

  // The tiles of keys that a tile of queries sees, from the last to the first: 32 at a time, each judged by one lane.
  DEVICE void send_all(Work work) {
    const Params p = of_work(this->p, work);
    const int q_first = p.q_offset + work.q_tile * TILE_Q;
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
        step = {top - i, masked >> i & 1 ? masked_for_warpgroups(rows, top - i, p) : 0, 0};
      }
      top -= 32;
    }
    step.last = 1;
    work.visible = step.tile >= 0;
    if (work.visible) send_step(step);
    else send(work);
  }

  // Heads that share keys and values are neighbours.
  DEVICE Work locate(int index) {
    const int head = index % p.heads;
    const Place at = find_queries(index / p.heads, TILE_Q, p);
    if (at.b < 0) return {-1, 0, 0, 0};
    return with_lengths({at.tile, head % p.heads, at.b, 1});
  }

  // The next one by a counter, or where each block has but one by its own number: then nobody counts.
  DEVICE void run() {
    do {
      int index = blockIdx.x;
      if (p.counters != nullptr) {
        if (threadIdx.x == 0) index = atomicAdd(&p.counters[0], 1);
        index = __shfl_sync(~0u, index, 0);
      }
      const Work work = locate(index);
      if (work.q_tile < 0) break;
      send_all(work);
    } while (p.counters != nullptr);
    send(Work{-1, 0, 0, 0});
    // The last block leaves the counters as it found them, for the next launch.
    if (p.counters != nullptr && threadIdx.x == 0 &&
        atomicAdd(&p.counters[1], 1) == gridDim.x - 1) p.counters[0] = p.counters[1] = 0;
  }
};

// ---------------------------------------------------------------- loader: one warp that copies tiles to consumers
struct Loader {
  Shared& shared;
  const TensorMap &map_q, &map_k, &map_v;
  const Params& p;
  Ring<WORK_STAGES> work_ring = {};
  Ring<2> next_ring = {};
  Ring<Q_STAGES> q_ring = {};
  Ring<STAGES> k_ring = {}, v_ring = {};
  Ring<1> tail_ring = {};

  DEVICE Work receive() {
    await_full(shared.work_pipe, work_ring);
    const Work work = shared.work[work_ring.stage()];
    __syncwarp();
    release(shared.work_pipe, work_ring);
    work_ring.passed++;
    return work;
  }

  DEVICE void load_q(const Work& work) {
    const int first = work.q_start + work.q_tile * TILE_Q;
#pragma unroll 1
    for (int w = 0; w < WARPGROUPS; w++) {
      u64& full = shared.q_pipe[w].full[q_ring.stage()];
      await_empty(shared.q_pipe[w], q_ring);
      if (threadIdx.x % 32 != 0) continue;
      mbarrier_arrive_expect_tx(full, sizeof(QTile));
#pragma unroll
      for (int d = 0; d < QK_COLUMNS; d += 64)
        tma_load_4d(shared.q_or_o[q_ring.stage()][w].q[d / 64], map_q, full, d, first + w * 64, work.h, 0);
    }
    q_ring.passed++;
  }

  // The rows of a tile that this lane copies, from `first` on: they are of one page and lie there from `row` on.
  struct Box { int first, page, row; };

  DEVICE Box box_of_lane(int tile, const Work& work) {
    const int first = threadIdx.x % 32 * p.page_rows;
    if (first >= TILE_KV) return {TILE_KV, -1, 0};
    const InPage at = find_key(tile * TILE_KV + first, work.kv_len, p.page_table + work.b * p.table_row, p);
    return {first, at.page, at.row};
  }

  // Into the stage that `full` is of, which is empty.
  DEVICE void copy_k(u64& full, const Box& box, int kv_head) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, sizeof(KTile));
    __syncwarp();
    if (box.first < TILE_KV)
      tma_load_5d(shared.k[k_ring.stage()][box.first / 8], map_k, full, 0, 0, kv_head * p.k_head_boxes, box.row / 8,
          box.page);
    k_ring.passed++;
  }

  // Where the bytes of a tile of V count: before its consumers the cleaner has one with rows that are no keys.
  DEVICE u64& full_of_v(const Work& work, int tile) {
    const int keys = work.kv_len - tile * TILE_KV;
    if (keys >= TILE_KV) return shared.v_pipe.full[v_ring.stage()];
    await_empty(shared.tail_pipe, tail_ring);
    if (threadIdx.x % 32 == 0) shared.tail = {v_ring.stage(), keys};
    tail_ring.passed++;
    return shared.tail_pipe.full[0];
  }

  DEVICE void end_tails() {
    await_empty(shared.tail_pipe, tail_ring);
    if (threadIdx.x % 32 == 0) shared.tail = {-1, 0};
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.tail_pipe.full[0]);
  }

  DEVICE void load_v(int tile, int kv_head, const Work& work) {
    const Box box = box_of_lane(tile, work);
    u64& full = full_of_v(work, tile);
    await_empty(shared.v_pipe, v_ring);
    if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, sizeof(VTile));
    __syncwarp();
    if (box.first < TILE_KV)
      tma_load_5d(shared.v[v_ring.stage()][box.first / 8], map_v, full, 0, 0, kv_head * p.v_head_boxes, box.row / 8,
          box.page);
    v_ring.passed++;
  }

  DEVICE Step next() {
    await_full(shared.next_pipe, next_ring);
    const Step step = shared.next[next_ring.stage()];
    __syncwarp();
    release(shared.next_pipe, next_ring);
    next_ring.passed++;
    return step;
  }

  DEVICE void load_k(const Step& step, int kv_head, const Work& work) {
    const Box box = box_of_lane(step.tile, work);
    u64& full = shared.k_pipe.full[k_ring.stage()];
    await_empty(shared.k_pipe, k_ring);
    if (threadIdx.x % 32 == 0) shared.step[k_ring.stage()] = step;
    copy_k(full, box, kv_head);
  }

  // K one tile ahead of V: the order in which the consumers use them.
  DEVICE void load_tiles(const Work& work, int kv_head) {
    Step step = {};
#pragma unroll 1
    for (int before = -1; !step.last; before = step.tile) {
      step = next();
      load_k(step, kv_head, work);
      if (before < 0) load_q(work);
      else load_v(before, kv_head, work);
    }
    load_v(step.tile, kv_head, work);
  }

  DEVICE void run() {
    while (true) {
      const Work work = receive();
      if (work.q_tile < 0) break;
      if (work.visible) load_tiles(work, work.h / (p.heads / p.kv_heads));
    }
    end_tails();
  }
};

// ---------------------------------------------------------------- cleaner: one warp, for the last tile of V
struct Cleaner {
  Shared& shared;
  Ring<1> tail_ring = {};
  // Rows of V that belong to no key become zero, whatever lies there: P is 0 for them, but 0 times a NaN is none.
  DEVICE void run() {
    while (true) {
      await_full(shared.tail_pipe, tail_ring);
      const Tail tail = shared.tail;
      if (tail.stage < 0) break;
#pragma unroll 1
      for (int row = tail.rows + threadIdx.x % 32 / 8; row < TILE_KV; row += 4)
        for (int d = 0; d < V_COLUMNS; d += 64)
          ((Chunk*)shared.v[tail.stage][row / 8][d / 64][row % 8])[threadIdx.x % 8] = {};
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.v_pipe.full[tail.stage]);
      release(shared.tail_pipe, tail_ring);
      tail_ring.passed++;
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
  const float scale = fmaxf(p.scale * LOG2E, SMALLEST);  // scale 0 times a masked -inf stays -inf
  Ring<WORK_STAGES> work_ring = {};
  Ring<Q_STAGES> q_ring = {};
  Ring<STAGES> k_ring = {}, v_ring = {};
  u32 probabilities[TILE_KV / 4] = {};
  float o[V_COLUMNS / 2] = {};
  RowState state = {};
  float before[2] = {}, added[2] = {};  // the maxima that O and the sums still have, and what a tile adds to the sums
  float limit[2] = {};  // of P, beyond which a row's maximum follows
  bool negative = true;  // whether the maximum of a row of this warp is
  u32 moved = 0;  // lanes whose maxima are not those of O any more
  float factor[2] = {};  // what O of these rows is to be multiplied by, where they moved

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

  // S = Q K^T, on its way
  template <int N> DEVICE void issue_qk(float (&s)[N]) {
    pin(o);
    pin_fragments(probabilities);
    const u64 k = advance_bytes(grouped_matrix_descriptor(shared.k, 16, QK_COLUMNS * 16),
        k_ring.stage() * sizeof(KTile));
    const u64 q =
        advance_bytes(matrix_descriptor(&shared.q_or_o[0][warpgroup], 16), q_ring.stage() * sizeof(shared.q_or_o[0]));
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < QK_COLUMNS; d += 16) {
      const u64 q_part = advance_bytes(q, d / 64 * 64 * 128 + d % 64 * 2);
      const u64 k_part = advance_bytes(k, d / 64 * 1024 + d % 64 * 2);
      if (d == 0) wgmma_qk_first(s, q_part, k_part);
      else wgmma_qk(s, q_part, k_part);
    }
    wgmma_commit_group();
  }

  // O += P V, on its way
  DEVICE void issue_pv() {
    await_full(shared.v_pipe, v_ring);
    const u64 v = advance_bytes(grouped_matrix_descriptor(shared.v, 1024, V_COLUMNS * 16),
        v_ring.stage() * sizeof(VTile));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < TILE_KV; n += 16) wgmma_pv(o, *(u32 (*)[4])&probabilities[n / 4],
        advance_bytes(v, n * V_COLUMNS * 2));
    wgmma_commit_group();
  }

  // S of this K tile, and O of the tile before it, under which the softmax of S will run: both on their way.
  template <int N> DEVICE void issue_products(float (&s)[N]) {
    await_full(shared.k_pipe, k_ring);
    issue_qk(s);
    if (moved) rescale_o();
    issue_pv();
  }

  template <int N> DEVICE void await_scores(float (&s)[N]) {
    wgmma_wait_group<1>();
    pin(s);
  }

  DEVICE void await_pv() {
    wgmma_wait_group<0>();
    pin(o);
    release(shared.v_pipe, v_ring);
    v_ring.passed++;
  }

  // The query and the key of element i of S.
  DEVICE int query(const Work& work, int i) {
    const Params p = of_work(this->p, work);
    return p.q_offset + work.q_tile * TILE_Q + row + i / 2 % 2 * 8;
  }

  DEVICE int key(int tile, int i) {
    return tile * TILE_KV + column + i / 4 * 8 + i % 2;
  }

  // S becomes -inf where the mask hides the key.
  template <int N> DEVICE void apply_mask(float (&s)[N], const Work work, int tile) {
    const Params p = of_work(this->p, work);
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!keep(work.b, work.h, query(work, i), key(tile, i), p)) s[i] = MINUS_INFINITY;
  }

  // S becomes -inf beyond the last key: in the first tile of a schedule, if anywhere.
  template <int N> DEVICE void cut(float (&s)[N], const Work& work, int tile) {
    const int columns = work.kv_len - tile * TILE_KV;
    if (columns >= 2 * N) return;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (column + i / 4 * 8 + i % 2 >= columns) s[i] = MINUS_INFINITY;
  }

  // The sums grow by what this tile adds.
  DEVICE void accumulate() {
    state.sum[0] += added[0];
    state.sum[1] += added[1];
  }

  // The sums follow the maxima, and O will when the next S is on its way.
  DEVICE void rescale() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      factor[r] = ex2(before[r] - state.row_max[r]);
      state.sum[r] *= factor[r];
    }
  }

  // O follows.
  DEVICE void rescale_o() { multiply_rows(o, factor); }

  // O += P V for the last tile of keys, by itself, on its way
  DEVICE void issue_last_pv() {
    pin(o);
    pin_fragments(probabilities);
    if (moved) rescale_o();
    issue_pv();
  }

  // P beyond which a row's maximum follows a key; found under the product, as it takes shuffles.
  DEVICE void find_limits() {
#pragma unroll
    for (int r = 0; r < 2; r++) limit[r] = lag_limit(state.sum[r], SHARE, MOST);
    negative = __any_sync(~0u, fminf(state.row_max[0], state.row_max[1]) < 0.f);
  }

  // S becomes P; the maxima follow its highest scores.  Lane 0 or 1 releases K, by a bit that depends on the maxima:
  // ptxas moves the wait for O up to the release, so at least the maxima are found while the product runs.
  template <int N> DEVICE void follow_and_exponentiate(float (&s)[N], const float (&highest)[2]) {
    before[0] = state.row_max[0];
    before[1] = state.row_max[1];
    moved = __ballot_sync(~0u, follow(state.row_max, highest, scale, limit));
    release(shared.k_pipe, k_ring, moved & 1);
    k_ring.passed++;
    exponentiate_rows(s, scale, state.row_max, added);
  }

  // Of the first tile of a schedule.
  template <int N> DEVICE void softmax(float (&s)[N]) {
    float highest[2];
    highest_by_floats(s, highest);
    follow_and_exponentiate(s, highest);
  }

  // The layout of an accumulator is that of an A operand.
  template <int N> DEVICE void round(const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) probabilities[i] = cvt_bf16x2(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = N / 2; i < TILE_KV / 4; i++) probabilities[i] = 0;
  }

  // S becomes P, and P what the next product takes, when that of the tile before has come.
  DEVICE void make_probabilities(S& s, const float (&highest)[2]) {
    follow_and_exponentiate(s, highest);
    await_pv();
    round(s);
  }

  // Score, mask and softmax of the first tile of a schedule; true if it is the last too.
  template <int N> DEVICE bool begin(float (&s)[N], Ring<WORK_STAGES> at) {
    const Step step = shared.step[k_ring.stage()];
    if (step.masked) apply_mask(s, work_at(at), step.tile);
    cut(s, work_at(at), step.tile);
    state = nothing_seen();
    limit[0] = limit[1] = MOST;
    softmax(s);
    accumulate();
    moved = 0;  // O is empty
    return step.last;
  }

  // Awaits the first tile of a schedule.
  DEVICE Step first_step() {
    await_full(shared.k_pipe, k_ring);
    return shared.step[k_ring.stage()];
  }

  // Whether this warpgroup's queries see more of a tile than its first keys.
  DEVICE bool sees_more(const Step& step) { return !(step.masked >> (2 * warpgroup + 2) & 1); }

  // P of the first tile of a schedule, of all its keys or of the first alone; true if it is the last too.
  template <int N> DEVICE bool begin_alone(Ring<WORK_STAGES> at) {
    float s[N];
    issue_qk(s);
    wgmma_wait_group<0>();
    pin(s);
    const bool last = begin(s, at);
    round(s);
    return last;
  }

  // The same beside the last product of the tile of queries before.
  template <int N> DEVICE bool begin_beside(Ring<WORK_STAGES> at) {
    float s[N];
    issue_products(s);
    await_scores(s);
    const bool last = begin(s, at);
    await_pv();
    round(s);
    return last;
  }

  DEVICE void run() {
    bool last;
#pragma unroll 1
    while (true) {
      work_ring = await_visible(work_ring);
      if (work_at(work_ring).q_tile < 0) return;
      await_full(shared.q_pipe[warpgroup], q_ring);
      last = sees_more(first_step()) ? begin_alone<TILE_KV / 2>(work_ring) : begin_alone<FIRST_KEYS / 2>(work_ring);
      bool more = true;
      while (more) {
#pragma unroll
        for (int i = 0; i < V_COLUMNS / 2; i++) o[i] = 0.f;
#pragma unroll 1
        while (!last) {
          S s;
          issue_products(s);
          const Step step = shared.step[k_ring.stage()];
          last = step.last;
          find_limits();
          await_scores(s);
          // Most tiles come to one branch here: none of their scores is hidden, and no maximum so far is negative.
          float highest[2];
          if (step.masked | negative) {
            if (step.masked) apply_mask(s, work_at(work_ring), step.tile);
            highest_by_floats(s, highest);
          } else {
            highest_to_follow(s, false, highest);
          }
          make_probabilities(s, highest);
          if (moved) rescale();
          accumulate();
        }
        release(shared.q_pipe[warpgroup], q_ring);
        q_ring.passed++;

        // The last product of this tile runs beside the first of the next, if that sees a key.  No look beyond it: this
        // tile has its stage until O is stored.
        const RowState done = state;
        const Ring<WORK_STAGES> next = {work_ring.passed + 1};
        const Work coming = await_work(next);
        more = coming.q_tile >= 0 && coming.visible;
        if (more) {
          await_full(shared.q_pipe[warpgroup], q_ring);
          last = sees_more(first_step()) ? begin_beside<TILE_KV / 2>(next) : begin_beside<FIRST_KEYS / 2>(next);
        } else {
          issue_last_pv();
          await_pv();
        }
        store(done);
        work_ring = next;
      }
    }
  }

  DEVICE bf16* output(const Work& work,
      int q) { return p.o + work.b * p.o_batch + work.h * p.o_head + (work.q_start + q) * p.o_row; }

  DEVICE void store_lse(const Work& work, int q, float lse) {
    if (threadIdx.x % 4 == 0) p.lse[(i64)work.h * p.q_rows + work.q_start + q] = lse;
  }

  // Whether a row of the tensor is no query of the sequence.
  DEVICE bool beyond(const Work& work, int q) { return q >= work.queries; }

  // o = 0 and lse = -inf.
  DEVICE void store_nothing(const Work work) {
    const int q = work.q_tile * TILE_Q + row, column = threadIdx.x % 4 * 8;
#pragma unroll 1
    for (int r = 0; r < 16; r += 8) {
      if (q + r < work.queries) store_lse(work, q + r, MINUS_INFINITY);
#pragma unroll 1
      for (int d = 0; d < V_HEAD_DIM; d += 32)
        if (q + r < work.queries && d + column < V_HEAD_DIM) *(Chunk*)(output(work, q + r) + d + column) = {};
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
      float sum = quad_sum(done.sum[r]);
      if (beyond(work, q + 8 * r)) sum = 0.f;
      const float of_keys = lse_of(done.row_max[r], sum);  // of any sum: a branch would part the two rows
      lse[r] = sum == 0.f ? MINUS_INFINITY : of_keys;
      factor[r] = sum == 0.f ? 0.f : rcp(sum);
    }
    clear_or_multiply_rows(o, factor);
    // The four lanes of a row transpose 4 x 4 words, so that each writes 16 bytes and they 64 in a row.
    const int lane = threadIdx.x % 4;
    bf16* const out = output(work, q) + lane * 8;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int d = 0; d < V_COLUMNS; d += 32) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = d / 2 + 4 * j + 2 * r;
          word[j] = i < V_COLUMNS / 2 ? cvt_bf16x2(o[i], o[i + 1]) : 0;
        }
        transpose_quad(word);
        if (q + 8 * r < work.queries && d + lane * 8 < V_HEAD_DIM)
          *(Chunk*)(out + 8 * r * p.o_row + d) = {{word[0], word[1], word[2], word[3]}};
      }
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (q + 8 * r < work.queries) store_lse(work, q + 8 * r, lse[r]);
  }
};

// ---------------------------------------------------------------- kernel: FlashAttention-3 (Shah et al. 2024)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                  const __grid_constant__ TensorMap map_v, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  if (threadIdx.x / 32 == 1) prefetch_lengths(p);
  if (threadIdx.x == 0) {
    for (int w = 0; w < WARPGROUPS; w++) init(shared.q_pipe[w], 4);
    init(shared.k_pipe, 4 * WARPGROUPS);
    init(shared.v_pipe, 4 * WARPGROUPS);
    init(shared.work_pipe, 4 * WARPGROUPS + 1);
    init(shared.next_pipe, 1);
    init(shared.tail_pipe, 1);
    fence_mbarrier_init();
  }
  if (threadIdx.x == 32) {
    prefetch_tensor_map(map_q);
    prefetch_tensor_map(map_k);
    prefetch_tensor_map(map_v);
  }
  __syncthreads();
  if (threadIdx.x / 32 == 1) prefetch_pages(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) Scheduler{shared, p}.run();
    else if (threadIdx.x / 32 == 1) Loader{shared, map_q, map_k, map_v, p}.run();
    if (threadIdx.x >= 96) Cleaner{shared}.run();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer{shared, p, warpgroup - 1}.run();
  }
}
