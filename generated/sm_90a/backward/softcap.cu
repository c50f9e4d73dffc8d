// softcap: attention backward
// Soft-capped scores, as in Gemma 2: tanh keeps them within -cap .. cap.
//
// score    cap * tanh(s / cap)
// plan     hopper on sm_90a, bfloat16, head_dim 128
// tile     64 queries x 128 keys, 2 stages
// roles    1 loader, 2 dq accumulation, 1 idle warp of 24 registers per thread; 8 consumer warps of 240
// launch   overlapping: each kernel of a call starts while the one before it on the stream ends, and waits for it
// shared   k 32768 + v 32768 + q 32768 + d_o 32768 + ds 32768 + lse, delta 1024 + control 1024 = 165888 bytes
// made by  flashgen emit softcap --arch sm_90a --pipeline hopper --dtype bfloat16 --head-dim 128 --tile 64x128
//          --stages 2 --backward

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

// Of the four threads that share rows of an accumulator.  Opaque, so that offsets from it stay in instructions.
DEVICE int quad_lane() { int i; asm volatile("mov.u32 %0, %%tid.x;\n\tand.b32 %0, %0, 3;" : "=r"(i)); return i; }

// ---------------------------------------------------------------- addresses of shared memory, as PTX takes them
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---------------------------------------------------------------- red: additions in global memory
DEVICE void red_add_v4_f32(float* sum, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(sum), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
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

// The same without waiting.
DEVICE bool mbarrier_test_wait(u64& barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
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

// `bytes` that lie side by side, to shared memory; they count on `barrier`.
DEVICE void bulk_load(void* shared, const void* global, u64& barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}

// ---------------------------------------------------------------- setmaxnreg: registers change hands
template <int REGISTERS> DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

template <int REGISTERS> DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// ---------------------------------------------------------------- named barriers: 16 a block, 0 is __syncthreads
DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
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

// s = k q^T over the first 16 columns, or dp = v d_o^T: what s held is not read.
DEVICE void wgmma_scores_first(float (&d)[32], u64 a, u64 b) {
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

// s += k q^T over 16 columns.
DEVICE void wgmma_scores(float (&d)[32], u64 a, u64 b) {
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

// dq = ds k over the first 16 keys: what dq held is not read.
DEVICE void wgmma_dq_first(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 1;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
        "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
        "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
        "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
      : "l"(a), "l"(b));
}

// dq += ds k over 16 keys.
DEVICE void wgmma_dq(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
}

// d += p^T d_o or ds^T q over 16 queries.
DEVICE void wgmma_gradient(float (&d)[64], const u32 (&a)[4], u64 b) {
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

// Up to which arguments tanh is a polynomial.
constexpr float SMALL_TANH = 0.75f;

// tanh(unit * x) of what is at most SMALL_TANH, within 2^-17.4 and without the special unit: x times a polynomial in
// x^2, whose error is least (Remez) but for the first term, as c * tanh(s / c) is s for large c.  With a term more, for
// what is at most 1, a soft cap took 1.05 of the time on an H200.
DEVICE float small_tanh(float x, float unit = 1.f) {
  const float y = x * x, a = unit * unit * unit, b = unit * unit * a, c = unit * unit * b;
  return x * fmaf(fmaf(fmaf(c * -0.035236404f, y, b * 0.12732511f), y, a * -0.33272402f), y, unit);
}

// The same of what is more, within 2^-17.7, and 1 - |tanh| to 2^-16.2 of itself: that is 2 w / (1 + w), of which the
// special unit would give a reciprocal, too, with w = e^(-2 |unit * x|).
DEVICE float large_tanh(float x, float unit = 1.f) {
  const float w = ex2(-2.f * unit * LOG2E * fabsf(x));
  return copysignf(fmaf(fmaf(fmaf(fmaf(1.3233721f, w, -1.9139405f), w, 1.996299f), w, -1.9999744f), w, 1.f), x);
}

// Two floats rounded to nearest, the first in the low half.
DEVICE u32 cvt_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// A stored element as a float.
DEVICE float from_bf16(u16 x) { return __int_as_float(x << 16); }

// ---------------------------------------------------------------- progress: words by which blocks wait for each other
DEVICE u32 load_acquire(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Who sees the sum sees too what this thread, and those that it met at a barrier, wrote before.
DEVICE void red_add_release(u32* counter, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(x) : "memory");
}

DEVICE u32 atom_add(u32* counter, u32 x) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

DEVICE void red_max(u32* counter, u32 x) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" :: "l"(counter), "r"(x) : "memory");
}

DEVICE void nanosleep(u32 duration) { asm volatile("nanosleep.u32 %0;" :: "r"(duration)); }

DEVICE void await_count(const u32* counter, u32 count) {
  while (load_acquire(counter) < count) nanosleep(100);
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
// S becomes tanh(unit * factor * S), each score by its own argument; where none of so many of the warp's is large, by a
// polynomial.  Of floats only those from 2 on have the upper bit of the exponent: an instruction (LOP3) looks at two.
template <int TOGETHER, int N> DEVICE void take_tanh(float (&s)[N], float factor) {
  constexpr float unit = SMALL_TANH / 2.f;
#pragma unroll
  for (int first = 0; first < N; first += TOGETHER) {
    u32 bits = 0;
#pragma unroll
    for (int i = first; i < first + TOGETHER && i < N; i++) {
      s[i] *= factor;
      bits |= __float_as_uint(s[i]);
    }
    if (__all_sync(~0u, (bits & 0x40000000) == 0)) {
#pragma unroll
      for (int i = first; i < first + TOGETHER && i < N; i++) s[i] = small_tanh(s[i], unit);
    } else {
#pragma unroll
      for (int i = first; i < first + TOGETHER && i < N; i++)
        s[i] = if_small(s[i], 0x1.fffffep0f, small_tanh(s[i], unit), large_tanh(s[i], unit));
    }
  }
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

// Four 8 x 8 blocks, each transposed, two side by side above two: lane l gives the row l % 8 of block l / 8.
DEVICE void stmatrix_x4_trans(void* row, u32 left, u32 right, u32 left_below, u32 right_below) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(left), "r"(right), "r"(left_below), "r"(right_below) : "memory");
}

// ---------------------------------------------------------------- plan
constexpr int TILE_Q = 64, TILE_KV = 128;  // rows of q and o, and of k and v, in a tile
constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128;  // columns of q and k, and of v and o
constexpr int QK_COLUMNS = 128, V_COLUMNS = 128;  // the same in a product: whole steps of 16
constexpr int DQ_COLUMNS = 64, DQ_SUM_COLUMNS = 128;  // of dq in a warpgroup's product, and in memory
constexpr int STAGES = 2;  // tiles of q and d_o in shared memory
constexpr int THREADS = 384, WARPS = 8;  // of a block, and of those that multiply
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int DQ_ACCUMULATOR_WARPS = 2;  // warps of the producer warpgroup that work on the sums of dq
constexpr int ROW_THREADS = 256;  // of a block that works on rows alone

typedef u16 bf16;

struct Params {
  const bf16* o;
  const bf16* d_o;
  const float* lse;
  const float* dlse;
  float* lse_log2;
  float* delta;
  float* dq_sum;
  u32* progress;
  bf16* dq;
  bf16* dk;
  bf16* dv;
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
  int clear_distance;
  float scale;
  float param_cap;
};
static_assert(sizeof(Params) == 248, "what the host packs");

struct Rows { int b, h, q_first, q_last; };  // the queries of one tile, clipped to the problem

// ---------------------------------------------------------------- dq: sums in memory, which blocks add to in any order
// They lie as wgmma leaves them, part after part of a tile, tile after tile of a head: a part is what one warp adds,
// 16 rows by DQ_COLUMNS, for each 16 x 8 block the four floats of a lane, lane by lane.
constexpr int PART = 16 * DQ_COLUMNS, PARTS = ROW_THREADS / 32;  // floats of a part, parts of a tile
static_assert(PARTS * PART == TILE_Q * DQ_SUM_COLUMNS, "a warp per part");

DEVICE int parts_of_head(const Params& p) { return p.heads / p.kv_heads * p.q_tiles * PARTS; }

// What `progress` of a head of keys counts: slices of its sum that are cleared, then its blocks that have added all of
// theirs, then its parts that are taken.  Behind those of all heads stands the first head of which parts may be left.
DEVICE int slices_of_head(const Params& p) { return DQ_ACCUMULATOR_WARPS * p.kv_tiles; }

DEVICE int added_of_head(const Params& p) { return (DQ_ACCUMULATOR_WARPS + 1) * p.kv_tiles; }

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
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
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
  // The main kernel clears the sums of all but the first heads of keys, and counts what it did.
  const i64 counter = (i64)blockIdx.x * ROW_THREADS + threadIdx.x;
  if (counter <= p.kv_heads * p.batch) p.progress[counter] = counter < p.clear_distance ? slices_of_head(p) : 0;
  if (blockIdx.x / p.q_tiles / (p.heads / p.kv_heads) >= p.clear_distance) return;
  float4* dq_sum = (float4*)(p.dq_sum + tile_of_block() * (TILE_Q * DQ_SUM_COLUMNS));
  for (int i = threadIdx.x; i < TILE_Q * DQ_SUM_COLUMNS / 4; i += ROW_THREADS)
    dq_sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// ---------------------------------------------------------------- dq, after the products
// One warp makes rows of dq of a part of the sums: dq = scale * sum.  `dq` is this lane's row, if that is `inside`.
// The four lanes of a row of two blocks transpose their words, so that each writes 16 bytes.
DEVICE void finish_rows(i64 part, int warp, bf16* dq, bool inside, const Params& p) {
  constexpr int AT_ONCE = 1;  // warps that do it beside products have few registers
  const int lane = thread_index() % 32;
  const float4* sum = (const float4*)(p.dq_sum + part * PART) + lane;
#pragma unroll 1
  for (int first = 0; first < DQ_COLUMNS; first += 16 * AT_ONCE) {
    float4 left[AT_ONCE], right[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (first + 16 * j < DQ_COLUMNS) {
        left[j] = sum[(first + 16 * j) * 4];
        right[j] = sum[(first + 16 * j) * 4 + 32];
      }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + 16 * j;
      const int column = warp / 4 * DQ_COLUMNS + i + lane % 4 / 2 * 8;
      const float4 l = left[j], r = right[j];
      u32 word[4] = {
          cvt_bf16x2(p.scale * l.x, p.scale * l.y), cvt_bf16x2(p.scale * l.z, p.scale * l.w),
          cvt_bf16x2(p.scale * r.x, p.scale * r.y), cvt_bf16x2(p.scale * r.z, p.scale * r.w)};
      transpose_quad(word);
      if (i < DQ_COLUMNS && inside && column < HEAD_DIM)
        *(Chunk*)(dq + column) = {{word[0], word[1], word[2], word[3]}};
    }
  }
}

// Which of a tile's rows is this lane's.
DEVICE int row_of_lane(int warp) {
  const int lane = thread_index() % 32;
  return warp % 4 * 16 + lane % 2 * 8 + lane / 4;
}

DEVICE void finish_part(int part, const Params& p) {
  const int tile = part / PARTS, warp = part % PARTS, head = tile / p.q_tiles;
  const int row = tile % p.q_tiles * TILE_Q + row_of_lane(warp);
  bf16* dq = p.dq + head / p.heads * p.dq_batch + head % p.heads * p.dq_head + row * p.dq_row;
  finish_rows(part, warp, dq, row < p.q_len, p);
}

// After the products: the parts that nobody took.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
attention_backward_finish(const __grid_constant__ Params p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int first = blockIdx.x * PARTS + threadIdx.x / 32;
  const int heads = p.kv_heads * p.batch, parts = parts_of_head(p), added = added_of_head(p);
#pragma unroll 1
  for (int part = p.progress[heads] * parts + first; part < heads * parts; part += gridDim.x * PARTS) {
    const int head = part / parts;
    if (part - head * parts >= int(p.progress[head]) - added) finish_part(part, p);
  }
}

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

// The keys of this block.
DEVICE Keys keys_of_block(const Params& p) {
  const int head = blockIdx.x / p.kv_tiles, k_first = blockIdx.x % p.kv_tiles * TILE_KV;
  const int kv_head = head % p.kv_heads, heads = p.heads / p.kv_heads, k_last = min(k_first + TILE_KV, p.kv_len) - 1;
  return {head / p.kv_heads, kv_head, kv_head * heads, (kv_head + 1) * heads, k_first, k_last};
}

// ---------------------------------------------------------------- shared memory
// Tiles as TMA writes and wgmma reads them: boxes of 64 columns, rows of 128 bytes, swizzled.
typedef bf16 QTile[(QK_COLUMNS + 63) / 64][TILE_Q][64];

typedef bf16 OTile[(V_COLUMNS + 63) / 64][TILE_Q][64];

typedef bf16 KTile[(QK_COLUMNS + 63) / 64][TILE_KV][64];

typedef bf16 VTile[(V_COLUMNS + 63) / 64][TILE_KV][64];

typedef bf16 ScoreTile[TILE_KV / 64][TILE_Q][64];  // a row per query, a box per warpgroup

// A tile of queries (negative: there is none), its index among all, whether it is to be masked, and whether it is the
// last.
struct alignas(16) SharedStep { int head, tile, index; bool masked, last; };

struct alignas(1024) Shared {
  KTile k;
  VTile v;
  QTile q[STAGES];
  OTile d_o[STAGES];
  ScoreTile ds[2];
  float lse[STAGES][TILE_Q], delta[STAGES][TILE_Q];
  SharedStep step[STAGES];
  Keys keys;
  Pipe<STAGES> pipe;  // full: of q, lse and the step; empty: of all
  u64 d_o_full[STAGES], k_full, v_full, ds_full[2];
  u64 ending, added;  // the last tile of queries is being loaded; all of dq is added
};
static_assert(sizeof(Shared) == 165888, "what the plan counted");

// ---------------------------------------------------------------- loader: one thread that copies tiles to consumers
struct Loader {
  Shared& shared;
  const TensorMap &map_q, &map_k, &map_v, &map_d_o;
  const Params& p;
  Ring<STAGES> ring = {};
  Step coming = next_step({shared.keys.first_head, -1, false}, shared.keys, p);  // what to load next

  DEVICE SharedStep next() {
    const Step now = coming;
    coming = next_step(coming, shared.keys, p);
    return {now.head, now.tile, 0, now.masked, !is_left(coming, shared.keys)};
  }

  DEVICE void load_k(const Keys& keys) {
    u64& full = shared.k_full;
    mbarrier_arrive_expect_tx(full, sizeof(KTile));
#pragma unroll
    for (int d = 0; d < QK_COLUMNS; d += 64)
      tma_load_4d(shared.k[d / 64], map_k, full, d, keys.k_first, keys.kv_head, keys.b);
  }

  DEVICE void load_v(const Keys& keys) {
    u64& full = shared.v_full;
    mbarrier_arrive_expect_tx(full, sizeof(VTile));
#pragma unroll
    for (int d = 0; d < V_COLUMNS; d += 64)
      tma_load_4d(shared.v[d / 64], map_v, full, d, keys.k_first, keys.kv_head, keys.b);
  }

  DEVICE void load_q(const SharedStep& step, int b) {
    const int stage = ring.stage();
    u64& full = shared.pipe.full[stage];
    mbarrier_arrive_expect_tx(full, sizeof(QTile) + sizeof(shared.lse[0]));
#pragma unroll
    for (int d = 0; d < QK_COLUMNS; d += 64)
      tma_load_4d(shared.q[stage][d / 64], map_q, full, d, step.tile * TILE_Q, step.head, b);
  }

  DEVICE void load_d_o(const SharedStep& step, int b) {
    const int stage = ring.stage();
    u64& full = shared.d_o_full[stage];
    mbarrier_arrive_expect_tx(full, sizeof(OTile) + sizeof(shared.delta[0]));
#pragma unroll
    for (int d = 0; d < V_COLUMNS; d += 64)
      tma_load_4d(shared.d_o[stage][d / 64], map_d_o, full, d, step.tile * TILE_Q, step.head, b);
  }

  // What the kernel before this one has found for each row; its bytes count on the barriers of q and d_o.
  DEVICE void load_rows(const SharedStep& step) {
    const int stage = ring.stage();
    const i64 row = i64(step.index) * TILE_Q;  // its first, in workspaces
    bulk_load(shared.lse[stage], p.lse_log2 + row, shared.pipe.full[stage], sizeof(shared.lse[0]));
    bulk_load(shared.delta[stage], p.delta + row, shared.d_o_full[stage], sizeof(shared.delta[0]));
  }

  // Once: k, v and the first q and d_o, which no kernel of the call writes, may be on their way before.
  DEVICE void wait_for_rows() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }

  // The next stage gets what a step needs.
  DEVICE void load(const SharedStep& step) {
    const Keys& keys = shared.keys;
    shared.step[ring.stage()] = step;
    if (step.last) mbarrier_arrive(shared.ending);
    if (ring.passed == 0) load_k(keys);
    load_q(step, keys.b);
    if (ring.passed == 0) load_v(keys);
    load_d_o(step, keys.b);
    if (ring.passed == 0) wait_for_rows();
    load_rows(step);
  }

  DEVICE void run() {
    const Keys& keys = shared.keys;
    SharedStep step = {};
#pragma unroll 1
    while (!step.last) {
      step = next();
      step.index = (keys.b * p.heads + step.head) * p.q_tiles + step.tile;
      await_empty(shared.pipe, ring);
      load(step);
      ring.passed++;
    }
  }
};

// ---------------------------------------------------------------- dq accumulator: warps that clear and finish sums
// Under the products memory has time: blocks clear the sums of heads to come, and finish those of heads that are done.
struct DqAccumulator {
  Shared& shared;
  const Params& p;

  // Of this block's own head.
  DEVICE u32* progress() { return p.progress + shared.keys.b * p.kv_heads + shared.keys.kv_head; }

  // Blocks start in order, and earlier ones have cleared what this one will add to.
  DEVICE void await_cleared() {
    await_count(progress(), slices_of_head(p));
    mbarrier_arrive(shared.v_full);
  }

  // This warp's slice of the sum of a head to come.
  DEVICE void clear() {
    const int head = blockIdx.x / p.kv_tiles + p.clear_distance, lane = thread_index() % 32;
    if (head >= p.kv_heads * p.batch) return;
    const int parts = parts_of_head(p), share = (parts + slices_of_head(p) - 1) / slices_of_head(p);
    const int first = (blockIdx.x % p.kv_tiles * DQ_ACCUMULATOR_WARPS + thread_index() / 32 % DQ_ACCUMULATOR_WARPS) *
        share;
    const int end = min(first + share, parts);
#pragma unroll 1
    for (int part = first; part < end; part++) {
      float4* sum = (float4*)(p.dq_sum + (i64(head) * parts + part) * PART) + lane;
#pragma unroll
      for (int i = 0; i < PART / 4; i += 32) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    __syncwarp();
    if (lane == 0) red_add_release(p.progress + head, 1);
  }

  // A part whose sum is complete, for this warp alone; negative: there is none yet.
  DEVICE int take_part(int& head, bool& complete) {
    const int heads = p.kv_heads * p.batch, parts = parts_of_head(p), added = added_of_head(p);
    while (head < heads) {
      complete = complete || int(load_acquire(p.progress + head)) >= added;
      if (!complete) return -1;
      const int part = int(atom_add(p.progress + head, 1)) - added;
      if (part < parts) return head * parts + part;
      red_max(p.progress + heads, ++head);
      complete = false;
    }
    return -1;
  }

  // Parts one by one until the last tile of queries comes, so that no block takes longer for it.
  DEVICE void finish() {
    const int lane = thread_index() % 32;
    int head = load_acquire(p.progress + p.kv_heads * p.batch);
    bool complete = false;
#pragma unroll 1
    while (true) {
      int part = 0;
      if (lane == 0) part = mbarrier_test_wait(shared.ending, 0) ? OVER : take_part(head, complete);
      part = __shfl_sync(~0u, part, 0);
      __syncwarp();
      if (part == OVER) return;
      if (part < 0) nanosleep(500);
      else finish_part(part, p);
    }
  }

  DEVICE void run() {
    if (thread_index() == 64) await_cleared();
    __syncwarp();
    clear();
    finish();
    if (thread_index() == 64) {
      mbarrier_wait(shared.added, 0);
      red_add_release(progress(), 1);
    }
  }

  static constexpr int OVER = -2;
};

// ---------------------------------------------------------------- consumers: a warpgroup owns 64 keys of the tile
// Accumulators: element 4 j + 2 r + e is row 16 w + l / 4 + 8 r of a warpgroup (warp w, lane l), column
// 8 j + 2 (l % 4) + e.  P, dP and dS are transposed: a row a key, a column a query.
typedef float S[TILE_Q / 2];

// The same, rounded: the A operand of a product.
typedef u32 Operand[TILE_Q / 4];

typedef float DQ[DQ_COLUMNS / 2];

struct Consumer {
  Shared& shared;
  const Params& p;
  const int warpgroup;
  Ring<STAGES> ring = {};
  int dq_tile = -1;  // the tile of queries that waits for its dQ, among all; negative: there is none
  Operand probabilities = {}, ds = {};
  float dk[QK_COLUMNS / 2] = {}, dv[V_COLUMNS / 2] = {};

  // S^T = K Q^T or dP^T = V dO^T, on its way
  template <int COLUMNS> DEVICE void issue_scores(S& s, const void* keys, const void* queries) {
    const u64 a = advance_bytes(matrix_descriptor(keys, 16), warpgroup * 64 * 128), b = matrix_descriptor(queries, 16);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < COLUMNS; d += 16) {
      const u64 a_part = advance_bytes(a, d / 64 * TILE_KV * 128 + d % 64 * 2);
      const u64 b_part = advance_bytes(b, d / 64 * TILE_Q * 128 + d % 64 * 2);
      if (d == 0) wgmma_scores_first(s, a_part, b_part);
      else wgmma_scores(s, a_part, b_part);
    }
    wgmma_commit_group();
  }

  // dV += P^T dO or dK += dS^T Q, on its way
  template <int N> DEVICE void issue_gradient(float (&d)[N], Operand& a, const void* queries) {
    const u64 b = matrix_descriptor(queries, TILE_Q * 128);
    pin_fragments(a);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < TILE_Q; n += 16) wgmma_gradient(d, *(u32 (*)[4])&a[n / 4], advance_bytes(b, n * 128));
    wgmma_commit_group();
  }

  DEVICE void issue_dp(S& dp) {
    if (ring.passed == 0) mbarrier_wait(shared.v_full, 0);
    mbarrier_wait(shared.d_o_full[ring.stage()], ring.parity());
    issue_scores<V_COLUMNS>(dp, shared.v, shared.d_o[ring.stage()]);
  }

  // dQ = dS K, on its way: this warpgroup's half of the columns
  DEVICE void issue_dq(DQ& dq) {
    const int first = warpgroup * DQ_COLUMNS;
    const u64 a = matrix_descriptor(shared.ds[ds_ring().stage()], 16);
    const u64 b = advance_bytes(matrix_descriptor(shared.k, TILE_KV * 128),
        first / 64 * TILE_KV * 128 + first % 64 * 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_KV; k += 16) {
      const u64 a_part = advance_bytes(a, k / 64 * TILE_Q * 128 + k % 64 * 2), b_part = advance_bytes(b, k * 128);
      if (k == 0) wgmma_dq_first(dq, a_part, b_part);
      else wgmma_dq(dq, a_part, b_part);
    }
    wgmma_commit_group();
  }

  // dS whose product with K is next, or so many steps later
  DEVICE Ring<2> ds_ring(u32 later = 0) const { return {ring.passed + later}; }

  DEVICE void await_ds() { mbarrier_wait(shared.ds_full[ds_ring().stage()], ds_ring().parity()); }

  // A part of dQ, `first` floats into what this warp has of a tile, to where it is added up.
  template <int N> DEVICE void add_dq(float (&dq)[N], int first = 0) {
    if (dq_tile < 0) return;
    const int thread = thread_index();
    float* sum = p.dq_sum + i64(dq_tile) * (TILE_Q * DQ_SUM_COLUMNS) + (thread / 32 - 4) * (16 * DQ_COLUMNS) + first;
    sum += thread % 32 * 4;
#pragma unroll
    for (int j = 0; j < N / 4; j++) red_add_v4_f32(sum + j * 128, *(float (*)[4])&dq[4 * j]);
  }

  // Where element 0 of this thread lies.
  struct Position { int q, k; };

  DEVICE Position position_of(const SharedStep& step) {
    const int thread = thread_index();
    return {step.tile * TILE_Q + thread % 4 * 2, shared.keys.k_first + thread / 32 * 16 - 64 + thread % 32 / 4};
  }

  // Whether element i has a key.
  DEVICE bool is_visible(int i, const Position& first, const SharedStep& step) {
    const bool is_key = first.k + i / 2 % 2 * 8 <= shared.keys.k_last;
    return is_key;
  }

  // With t = tanh(x / cap) for x = scale * K Q^T, where cap * t is the score: P = e^(cap * t - lse), rounded, and S
  // becomes P d score / dx = P (1 - t^2).
  DEVICE void to_probabilities(S& s, const SharedStep& step) {
    // of tanh in the exponent, and of a product in its argument, of which 2 is large
    const float scale = p.param_cap * LOG2E, to_argument = 2.f / SMALL_TANH * p.scale * rcp(p.param_cap);
    take_tanh<32>(s, to_argument);
    const float2* lse = (const float2*)shared.lse[ring.stage()] + quad_lane();
#pragma unroll
    for (int j = 0; j < TILE_Q / 8; j++) {
      const float2 row_lse = lse[4 * j];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int i = 4 * j + 2 * r;
        const float even = ex2(fmaf(s[i], scale, -row_lse.x));
        const float odd = ex2(fmaf(s[i + 1], scale, -row_lse.y));
        s[i] = even * fmaf(-s[i], s[i], 1.f);
        s[i + 1] = odd * fmaf(-s[i + 1], s[i + 1], 1.f);
        probabilities[2 * j + r] = cvt_bf16x2(even, odd);
      }
    }
    if (step.masked) mask_probabilities(s, step);
  }

  // dS = P (dP - delta) d score / dx, rounded, with P d score / dx in `weight`.
  DEVICE void differentiate_score(const S& weight, const S& dp) {
    const float2* delta = (const float2*)shared.delta[ring.stage()] + quad_lane();
#pragma unroll
    for (int j = 0; j < TILE_Q / 8; j++) {
      const float2 row_delta = delta[4 * j];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int i = 4 * j + 2 * r;
        ds[i / 2] = cvt_bf16x2(weight[i] * (dp[i] - row_delta.x), weight[i + 1] * (dp[i + 1] - row_delta.y));
      }
    }
  }

  // P and what is in S become 0 where no key is.
  DEVICE void mask_probabilities(S& s, const SharedStep& step) {
    const Position first = position_of(step);
#pragma unroll
    for (int i = 0; i < TILE_Q / 2; i++) {
      const bool visible = is_visible(i, first, step);
      probabilities[i / 2] &= visible ? ~0u : i % 2 == 0 ? 0xFFFF0000u : 0xFFFFu;
      s[i] = visible ? s[i] : 0.f;
    }
  }

  // dS to shared memory, a row a query: all warps had announced what is multiplied next, so none reads what was here.
  DEVICE void share_ds() {
    const int thread = thread_index(), lane = thread % 32, row = lane / 16 * 8 + lane % 8;
    const int chunk = (thread / 32 % 4 * 2 + lane / 8 % 2) ^ lane % 8;
    auto& to = shared.ds[ds_ring(1).stage()][warpgroup];
#pragma unroll
    for (int j = 0; j < TILE_Q / 8; j += 2)
      stmatrix_x4_trans(&to[8 * j + row][chunk * 8], ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);
  }

  // This warp's part of dS is written, and its product that reads the dS before is complete.
  DEVICE void announce_ds(Ring<2> to) {
    fence_proxy_async();
    __syncwarp();
    if (thread_index() % 32 == 0) mbarrier_arrive(shared.ds_full[to.stage()]);
  }

  // All that this warp adds to dq is on its way.
  DEVICE void announce_added() {
    __syncwarp();
    if (thread_index() % 32 == 0) mbarrier_arrive(shared.added);
  }

  // One warpgroup computes P and dS while the other's products run: a tenth faster on an H200 than as they come.
  DEVICE void take_turn() { bar_sync(1 + warpgroup, 256); }

  DEVICE void pass_turn() { bar_arrive(2 - warpgroup, 256); }

  // One tile of queries; true if it is the last.  dQ is of the tile before, whose dS both warpgroups have written; it
  // leaves under dV and dK of this one, and dK is complete in the next step.
  DEVICE bool step() {
    S s, dp;
    DQ dq;
    const int stage = ring.stage();
    await_full(shared.pipe, ring);
    issue_scores<QK_COLUMNS>(s, shared.k, shared.q[stage]);
    const SharedStep now = shared.step[stage];
    wgmma_wait_group<1>();
    pin(dk);
    pin_fragments(ds);
    if (ring.passed > 0) release(shared.pipe, Ring<STAGES>{ring.passed - 1});
    wgmma_wait_group<0>();
    pin(s);
    take_turn();
    to_probabilities(s, now);
    issue_dp(dp);
    wgmma_wait_group<0>();
    pin(dp);
    differentiate_score(s, dp);
    pass_turn();
    await_ds();
    share_ds();
    issue_dq(dq);
    issue_gradient(dv, probabilities, shared.d_o[stage]);
    issue_gradient(dk, ds, shared.q[stage]);
    wgmma_wait_group<2>();
    pin(dq);
    announce_ds(ds_ring(1));
    add_dq(dq);
    dq_tile = now.index;
    wgmma_wait_group<1>();
    pin(dv);
    pin_fragments(probabilities);
    ring.passed++;
    return now.last;
  }

  // There is no step before the first: its dS is 0.
  DEVICE void share_no_ds() {
    auto& none = *(Chunk (*)[TILE_Q * 8])&shared.ds[ds_ring().stage()][warpgroup];
    for (int i = thread_index() % 128; i < TILE_Q * 8; i += 128) none[i] = {};
    announce_ds(ds_ring());
  }

  // All tiles of queries of one tile of keys, and dQ of the last of them.
  DEVICE void visit_all(DQ& dq) {
    if (warpgroup == 1) pass_turn();
    bool last = false;
#pragma unroll 1
    while (!last) last = step();
    if (warpgroup == 0) take_turn();
    wgmma_wait_group<0>();
    pin(dk);
    await_ds();
    issue_dq(dq);
    wgmma_wait_group<0>();
    pin(dq);
  }

  // Rows of dk or dv.  The four lanes of a row transpose 4 x 4 words, so that each writes 16 bytes and they 64 in a
  // row.
  template <int WIDTH, int N>
  DEVICE void store(bf16* out, i64 row_stride, const float (&d)[N], float factor, const Keys& keys) {
    const int thread = thread_index(), lane = thread % 4, row = thread / 32 * 16 - 64 + thread % 32 / 4;
    out += row * row_stride + lane * 8;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int column = 0; column < 2 * N; column += 32) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = column / 2 + 4 * j + 2 * r;
          word[j] = i < N ? cvt_bf16x2(d[i] * factor, d[i + 1] * factor) : 0;
        }
        transpose_quad(word);
        if (keys.k_first + row + 8 * r <= keys.k_last && column + lane * 8 < WIDTH)
          *(Chunk*)(out + 8 * r * row_stride + column) = {{word[0], word[1], word[2], word[3]}};
      }
  }

  template <int N> DEVICE void store_dv(const float (&d)[N], const Keys& keys) {
    store<V_HEAD_DIM>(p.dv + keys.b * p.dv_batch + keys.kv_head * p.dv_head + keys.k_first * p.dv_row, p.dv_row, d, 1.f,
        keys);
  }

  template <int N> DEVICE void store_dk(const float (&d)[N], const Keys& keys) {
    store<HEAD_DIM>(p.dk + keys.b * p.dk_batch + keys.kv_head * p.dk_head + keys.k_first * p.dk_row, p.dk_row, d,
        p.scale, keys);
  }

  DEVICE void run() {
    share_no_ds();
    {
      mbarrier_wait(shared.k_full, 0);
      DQ dq;
      visit_all(dq);
      add_dq(dq);
    }
    const Keys keys = shared.keys;
    store_dv(dv, keys);
    announce_added();
    store_dk(dk, keys);
  }
};

// ---------------------------------------------------------------- kernel: the backward of FlashAttention-3 (2024)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_d_o,
                   const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  if (threadIdx.x == 0) {
    shared.keys = keys_of_block(p);
    init(shared.pipe, WARPS);
    mbarrier_init(shared.k_full, 1);
    mbarrier_init(shared.v_full, 2);  // v is here, and dq may be added
    mbarrier_init(shared.ending, 1);
    mbarrier_init(shared.added, WARPS);
    for (int stage = 0; stage < STAGES; stage++) mbarrier_init(shared.d_o_full[stage], 1);
    for (int i = 0; i < 2; i++) mbarrier_init(shared.ds_full[i], WARPS);
    fence_mbarrier_init();
  }
  if (threadIdx.x == 32) {
    prefetch_tensor_map(map_q);
    prefetch_tensor_map(map_k);
    prefetch_tensor_map(map_v);
    prefetch_tensor_map(map_d_o);
  }
  __syncthreads();
  if (threadIdx.x >= 32 && threadIdx.x / 32 != 1) {  // the loader waits when it has to
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x >= 64) DqAccumulator{shared, p}.run();
    else if (threadIdx.x == 32) Loader{shared, map_q, map_k, map_v, map_d_o, p}.run();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer{shared, p, warpgroup - 1}.run();
  }
}
