"""Hopper's instructions in the PTX interpreter: mbarriers, bulk copies, tensor maps, wgmma, clusters, setmaxnreg."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ptx_kernels import launch

from flashgen.interpreter import BadLaunch, Memory, errors
from flashgen.interpreter.memory import BASE, GLOBALS_BYTES
from flashgen.interpreter.ops.convert import bf16_bits, bf16_value
from flashgen.interpreter.tensormap import BFLOAT16, FLOAT32, TensorMap

HEAD = """
typedef unsigned u32; typedef unsigned short u16; typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
struct alignas(64) TensorMap { u64 opaque[16]; };
DEVICE u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void init(u64& b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(&b)), "r"(n) : "memory");
}
DEVICE void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void arrive(u64& b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&b)) : "memory"); }
DEVICE void expect(u64& b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(&b)), "r"(n) : "memory");
}
DEVICE bool try_wait(u64& b, u32 phase) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
    : "=r"(done) : "r"(at(&b)), "r"(phase) : "memory");
  return done;
}
DEVICE void wait(u64& b, u32 phase) { while (!try_wait(b, phase)) {} }
DEVICE void load_2d(void* to, const TensorMap& map, u64& b, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%3, %4}], [%2];"
    :: "r"(at(to)), "l"(&map), "r"(at(&b)), "r"(c0), "r"(c1) : "memory");
}
DEVICE void load_bulk(void* to, const void* from, int n, u64& b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(at(to)), "l"(from), "r"(n), "r"(at(&b)) : "memory");
}
DEVICE void store_2d(const TensorMap& map, const void* from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
    :: "l"(&map), "r"(at(from)), "r"(c0), "r"(c1) : "memory");
}
DEVICE void store_bulk(void* to, const void* from, int n) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
    :: "l"(to), "r"(at(from)), "r"(n) : "memory");
}
DEVICE void arrive(u64& b, int n) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(at(&b)), "r"(n) : "memory");
}
DEVICE void load_now(void* to, const void* from, int n, u64& b) { expect(b, n); load_bulk(to, from, n, b); }
DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void wait_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""

FIRST = BASE + GLOBALS_BYTES  # address of the first buffer of a launch


def hopper(source, arrays, *values, **options):
    return launch(HEAD + source, arrays, *values, arch="sm_90a", **options)


def map_2d(address, rows, columns, box, *, swizzle=0, dtype=BFLOAT16, fill=0):
    size = {BFLOAT16: 2, FLOAT32: 4}[dtype]
    return TensorMap.encode_tiled(
        dtype, 2, address, (columns, rows), (columns * size,), box, (1, 1), 0, swizzle, 0, fill
    ).to_bytes()


# ---------------------------------------------------------------- tensor maps
LOAD_BOX = """
extern "C" __global__ void k(u16* out, const u16* in, const __grid_constant__ TensorMap map, int c0, int c1) {
  __shared__ __align__(1024) u16 s[ELEMENTS];
  __shared__ u64 full;
  int t = threadIdx.x;
  if (t == 0) { init(full, 1); init_fence(); expect(full, ELEMENTS * 2); load_2d(s, map, full, c0, c1); }
  __syncthreads();
  wait(full, 0);
  for (int i = t; i < ELEMENTS; i += 32) out[i] = s[i]; }"""


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("corner", [(0, 0), (8, 3), (-8, -2), (56, 30), (200, 0)])
def test_boxes_land_swizzled_and_zero_outside(corner, swizzle, seed):
    rng = np.random.default_rng(0)
    data = rng.integers(1, 1 << 16, (37, 80)).astype(np.uint16)
    columns, rows = {0: 64, 1: 16, 2: 32, 3: 64}[swizzle], 24
    out = np.zeros(rows * columns, np.uint16)
    c0, c1 = corner
    box = map_2d(_second(out), 37, 80, (columns, rows), swizzle=swizzle)
    source = LOAD_BOX.replace("ELEMENTS", str(rows * columns))
    report = hopper(source, {"out": out, "in": data}, box, c0, c1, seed=seed)
    padded = np.zeros((37 + 80, 80 + 400), np.uint16)
    padded[40:77, 100:180] = data
    expected = padded[40 + c1 : 40 + c1 + rows, 100 + c0 : 100 + c0 + columns]
    for row in range(rows):
        for column in range(columns):
            byte = (row * columns + column) * 2
            # Row byte / 128 of the pattern moves 16-byte chunks: 3, 2 or 1 bits of it.
            byte ^= (byte // 128 % (1 << swizzle)) * 16
            assert out[byte // 2] == expected[row, column], (row, column)
    inside = np.zeros_like(padded, bool)
    inside[40:77, 100:180] = True
    inside = inside[40 + c1 : 40 + c1 + rows, 100 + c0 : 100 + c0 + columns]
    assert report.bytes("bulk load") == 2 * inside.sum()


def _second(first: np.ndarray) -> int:
    """Device address of a launch's second buffer."""
    memory = Memory()
    memory.add("first", first)
    return memory.add("second", np.zeros(1))


def test_higher_ranks():
    source = """extern "C" __global__ void k(float* out, const float* in, const __grid_constant__ TensorMap map) {
      __shared__ __align__(128) float s[2 * 3 * 2 * 4];
      __shared__ u64 full;
      int t = threadIdx.x;
      if (t == 0) { init(full, 1); init_fence(); expect(full, sizeof(s));
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
          " [%0], [%1, {%3, %4, %5, %6}], [%2];"
          :: "r"(at(s)), "l"(&map), "r"(at(&full)), "r"(4), "r"(1), "r"(2), "r"(-1) : "memory"); }
      __syncthreads();
      wait(full, 0);
      for (int i = t; i < 48; i += 32) out[i] = s[i]; }"""
    data = np.random.default_rng(0).standard_normal((2, 3, 4, 12)).astype(np.float32)
    out = np.zeros((2, 2, 3, 4), np.float32)
    box = TensorMap.encode_tiled(
        FLOAT32, 4, _second(out), (12, 4, 3, 2), (48, 192, 576), (4, 3, 2, 2), (1,) * 4
    ).to_bytes()
    hopper(source, {"out": out, "in": data}, box)
    padded = np.zeros((3, 4, 4, 12), np.float32)  # one before in dimension 3, one behind in dimension 2
    padded[1:, :3] = data
    np.testing.assert_array_equal(out, padded[0:2, 2:4, 1:4, 4:8])


@pytest.mark.parametrize("reduce", [False, True])
def test_stores_and_reductions_write_what_is_inside(reduce):
    source = """extern "C" __global__ void k(float* out, const __grid_constant__ TensorMap map) {
      __shared__ __align__(1024) float s[8 * 32];
      int t = threadIdx.x;
      for (int i = t; i < 256; i += 32) { int byte = i * 4; s[(byte ^ byte / 128 % 8 * 16) / 4] = i; }
      proxy_fence();
      __syncwarp();
      if (t == 0) { STORE; commit(); wait_done(); } }"""
    store = "store_2d(map, s, 16, 4)"
    if reduce:
        store = """asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
          " [%0, {%2, %3}], [%1];"
          :: "l"(&map), "r"(at(s)), "r"(16), "r"(4) : "memory")"""
    out = np.full((10, 40), 1000, np.float32)
    report = hopper(
        source.replace("STORE", store), {"out": out}, map_2d(FIRST, 10, 40, (32, 8), swizzle=3, dtype=FLOAT32)
    )
    expected = np.full((10, 40), 1000, np.float32)
    block = np.arange(256).reshape(8, 32)[:6, :24]
    expected[4:, 16:] = block + (1000 if reduce else 0)
    np.testing.assert_array_equal(out, expected)
    assert report.traffic["out", "bulk reduce" if reduce else "bulk store"] == 6 * 24 * 4


@pytest.mark.parametrize("columns", [24, 20])
def test_a_store_reads_what_lies_inside_the_tensor_and_that_has_to_be_written(columns):
    source = """extern "C" __global__ void k(float* out, const __grid_constant__ TensorMap map) {
      __shared__ __align__(1024) float s[8 * 32];
      int t = threadIdx.x;
      if (t < COLUMNS)
        for (int row = 0; row < 6; row++) { int byte = (row * 32 + t) * 4; s[(byte ^ row % 8 * 16) / 4] = t; }
      proxy_fence();
      __syncwarp();
      if (t == 0) { store_2d(map, s, 16, 4); commit(); wait_done(); } }"""
    out = np.full((10, 40), 1000, np.float32)
    arguments = {"out": out}, map_2d(FIRST, 10, 40, (32, 8), swizzle=3, dtype=FLOAT32)
    source = source.replace("COLUMNS", str(columns))
    if columns < 24:  # of the box's 32 columns and 8 rows
        with pytest.raises(errors.Uninitialised, match="through the async proxy shared memory that nothing wrote"):
            hopper(source, *arguments)
        return
    hopper(source, *arguments)
    np.testing.assert_array_equal(out[4:, 16:], np.broadcast_to(np.arange(24), (6, 24)))


def test_plain_bulk_copies_and_reductions():
    source = """extern "C" __global__ void k(float* out, const float* in, float* sum) {
      __shared__ __align__(16) float s[64];
      __shared__ u64 full;
      int t = threadIdx.x;
      if (t == 0) { init(full, 1); init_fence(); expect(full, 256); load_bulk(s, in, 256, full); }
      __syncthreads();
      wait(full, 0);
      out[t] = s[t ^ 1];
      __syncwarp();
      s[t] += 1;
      proxy_fence();
      __syncwarp();
      if (t == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
          :: "l"(sum), "r"(at(s)), "r"(256) : "memory");
        commit(); wait_done();
      } }"""
    data = np.arange(64, dtype=np.float32)
    out, total = np.zeros(64, np.float32), np.full(64, 10, np.float32)
    hopper(source, {"out": out, "in": data, "sum": total}, block=32, writable="out sum")
    np.testing.assert_array_equal(out[:32], data[:32].reshape(-1, 2)[:, ::-1].ravel())
    np.testing.assert_array_equal(total, 10 + data + (np.arange(64) < 32))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"address": 8}, "address 0x8 is not a multiple of 16"),
        ({"strides": (24,)}, "must be multiples of 16"),
        ({"box": (64, 300)}, "must lie in 1..256"),
        ({"box": (4, 8)}, "8 bytes wide: not a multiple of 16"),
        ({"box": (128, 8), "swizzle": 3}, "256 bytes wide: its swizzle spans 128"),
        ({"interleave": 1}, "not modelled"),
        ({"rank": 3}, "rank 3 with 2 dimensions"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(arguments, match):
    good = {
        "dtype": BFLOAT16,
        "rank": 2,
        "address": FIRST,
        "dims": (64, 8),
        "strides": (128,),
        "box": (64, 8),
        "element_strides": (1, 1),
    }
    TensorMap.encode_tiled(**good)
    with pytest.raises(BadLaunch, match=match):
        TensorMap.encode_tiled(**good | arguments)


def test_tensor_maps_survive_their_bytes():
    tensor = TensorMap.encode_tiled(BFLOAT16, 3, FIRST, (64, 7, 5), (128, 1024), (32, 2, 1), (1, 1, 1), 0, 2, 3, 1)
    assert TensorMap.from_bytes(tensor.to_bytes()) == tensor
    assert len(tensor.to_bytes()) == 128


# ---------------------------------------------------------------- mbarriers
@pytest.mark.parametrize("seed", [None, *range(6)])
def test_a_ring_of_stages(seed):
    """One warp fills two stages, the other empties them: phases, parities and order."""
    source = """extern "C" __global__ void k(int* out, const int* in) {
      __shared__ __align__(16) int s[2][32];
      __shared__ u64 full[2], empty[2];
      int t = threadIdx.x, lane = t % 32;
      if (t == 0) { for (int i = 0; i < 2; i++) { init(full[i], 1); init(empty[i], 1); } init_fence(); }
      __syncthreads();
      for (int i = 0; i < 7; i++) {
        int stage = i % 2, phase = i / 2 % 2;
        if (t < 32) {
          if (lane == 0) { wait(empty[stage], phase ^ 1); load_now(s[stage], in + 32 * i, 128, full[stage]); }
        } else {
          wait(full[stage], phase);
          out[32 * i + lane] = s[stage][lane ^ 1];
          __syncwarp();
          if (lane == 0) arrive(empty[stage]);
        }
      } }"""
    data = np.arange(224, dtype=np.int32)
    out = np.zeros(224, np.int32)
    hopper(source, {"out": out, "in": data}, block=64, seed=seed)
    np.testing.assert_array_equal(out, data ^ 1)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_phases_by_number_and_barriers_used_anew(seed):
    source = """extern "C" __global__ void k(int* out, const int* in) {
      __shared__ __align__(16) int s[32];
      __shared__ u64 full;
      int t = threadIdx.x;
      if (t == 0) { init(full, 32); init_fence(); }
      __syncthreads();
      for (int i = 0; i < 3; i++) {
        if (t == 0) {
          asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 128;" :: "r"(at(&full)) : "memory");
          load_bulk(s, in + 32 * i, 128, full);
        }
        u64 state; u32 done = 0;
        asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(&full)) : "memory");
        while (!done)
          asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
            : "=r"(done) : "r"(at(&full)), "l"(state) : "memory");
        out[32 * i + t] = s[t];
        __syncwarp();
      }
      if (t == 0) {
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at(&full)) : "memory");
        init(full, 1);
        arrive(full);
        wait(full, 0);
      } }"""
    data = np.arange(96, dtype=np.int32)
    out = np.zeros(96, np.int32)
    hopper(source, {"out": out, "in": data}, seed=seed)
    np.testing.assert_array_equal(out, data)


BARRIER = """extern "C" __global__ void k(int* out, const int* in) {
  __shared__ __align__(16) int s[64];
  __shared__ u64 full;
  int t = threadIdx.x, lane = t % 32;
  BODY }"""
START = "if (t == 0) { init(full, 1); init_fence(); } __syncthreads(); "


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (
            START + "wait(full, 0);",
            errors.Deadlock,
            r"wait for parity 0 of mbarrier at byte \d+ \(in phase 0: 1 of 1 arrivals",
        ),
        (
            START + "if (t == 0) { expect(full, 512); load_bulk(s, in, 256, full); } wait(full, 0);",
            errors.Deadlock,
            "256 bytes outstanding",
        ),
        (
            START + "if (t == 0) { arrive(full); load_bulk(s, in, 256, full); } wait(full, 0); out[t] = s[lane];",
            errors.NotComplete,
            "a bulk copy .*has still to write|without waiting for its mbarrier",
        ),
        (
            START + "if (t == 0) load_now(s, in, 256, full); __syncthreads(); out[t] = s[lane];",
            errors.NotComplete,
            "has still to write|without waiting",
        ),
        (
            START + "s[t] = t; __syncthreads(); out[t] = s[t ^ 32]; if (t == 0) load_now(s, in, 256, full);"
            " wait(full, 0);",
            errors.Race,
            "no barrier orders the write after the read|no barrier between",
        ),
        (
            START + "if (t == 0) arrive(full, 2);",
            errors.BarrierMisuse,
            "2 arrivals at mbarrier .* expects 1 more in this phase",
        ),
        (
            "if (t == 0) init(full, 1); if (t == 32) arrive(full);",
            errors.BarrierMisuse,
            "no mbarrier was initialised|does not happen before",
        ),
        (
            "if (t == 0) init(full, 1); __syncthreads(); if (t == 32) load_now(s, in, 256, full); wait(full, 0);",
            errors.MissingFence,
            "no fence of its init",
        ),
        (START + "if (t == 0) init(full, 1);", errors.BarrierMisuse, "initialised twice"),
        (START + "if (t == 0) load_now(s, in, 250, full); wait(full, 0);", errors.Misaligned, "multiples of 16"),
        (START + "if (t == 0) load_now(s, in, 512, full); wait(full, 0);", errors.OutOfBounds, "shared memory|past"),
    ],
)
def test_misuse_of_mbarriers(body, error, match, seed):
    with pytest.raises(errors.Trap) as found:
        hopper(
            BARRIER.replace("BODY", body),
            {"out": np.zeros(64, np.int32), "in": np.zeros(64, np.int32)},
            block=64,
            seed=seed,
        )
    if seed is None:
        assert isinstance(found.value, error), found.value
        found.match(match)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_generic_writes_need_a_proxy_fence_before_the_async_proxy_reads_them(seed):
    body = """s[t] = t; FENCE __syncthreads();
      if (t == 0) { store_bulk(out, s, 256);
        commit(); wait_read(); }"""
    source = BARRIER.replace("BODY", body)
    out = np.zeros(64, np.int32)
    hopper(source.replace("FENCE", "proxy_fence();"), {"out": out, "in": out}, block=64, seed=seed)
    assert out.tolist() == list(range(64))
    # A fence of the reader, after the barrier, does as well.
    late = source.replace("FENCE", "").replace("if (t == 0) {", "if (t == 0) { proxy_fence();")
    hopper(late, {"out": out, "in": out}, block=64, seed=seed)
    with pytest.raises(errors.MissingFence, match=r"no fence\.proxy\.async between"):
        hopper(source.replace("FENCE", ""), {"out": out, "in": out}, block=64, seed=seed)
    unread = source.replace("FENCE", "proxy_fence();").replace("wait_read();", "")
    with pytest.raises(errors.UnfinishedCopy, match="leaves while its bulk stores"):
        hopper(unread, {"out": out, "in": out}, block=64, seed=seed)
    early = source.replace("FENCE", "proxy_fence();").replace(
        "wait_read(); }", "} __syncthreads(); s[t] = 1; if (t == 0) wait_read();"
    )
    with pytest.raises(errors.Race, match="a bulk store of warp 0 is still reading"):
        hopper(early, {"out": out, "in": out}, block=64, seed=seed)


# ---------------------------------------------------------------- wgmma
def swizzle_of(byte, mode):
    """Descriptor modes 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes."""
    return byte ^ byte // 128 % {0: 1, 1: 8, 2: 4, 3: 2}[mode] * 16


def k_major(mode, leading, stride):
    """Byte of element (r, k): eight rows side by side, 16, 128, 64 or 32 bytes apart."""
    row = {0: 16, 1: 128, 2: 64, 3: 32}[mode]

    def place(r, k):
        across = leading if mode == 0 else 16
        return swizzle_of(r // 8 * stride + r % 8 * row + k // 8 * across + k % 8 * 2, mode)

    return place


def mn_major(mode, leading, stride):
    """Byte of element (r, k): 8, 64, 32 or 16 rows side by side, eight k's after each other."""
    row = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    wide = row // 2

    def place(r, k):
        if mode == 0:
            return r // 8 * stride + k // 8 * leading + k % 8 * 16 + r % 8 * 2
        return swizzle_of(r // wide * leading + k // 8 * stride + k % 8 * row + r % wide * 2, mode)

    return place


def descriptor(mode, leading, stride, start):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def wgmma_kernel(n, kind, a_trans, b_trans, from_registers):
    count = n // 2
    acc = ", ".join(f"%{i}" for i in range(count))
    if from_registers:
        a_text, inputs, immediates = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}", 4, f"1, 1, {b_trans}"
        a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        a_text, inputs, immediates = f"%{count}", 1, f"1, 1, {a_trans}, {b_trans}"
        a_inputs = '"l"(a_word)'
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""extern "C" __global__ void k(float* out, const u16* a_in, const u16* b_in, const int* a_at,
                                            const int* b_at, const u64* words) {{
      extern __shared__ __align__(1024) unsigned char s[];
      int t = threadIdx.x, lane = t % 32, warp = t / 32;
      for (int i = t; i < 64 * 16; i += 128) *(u16*)(s + a_at[i]) = a_in[i];
      for (int i = t; i < {n} * 16; i += 128) *(u16*)(s + b_at[i]) = b_in[i];
      proxy_fence();
      __syncthreads();
      u64 a_word = words[0] + (at(s) >> 4), b_word = words[1] + (at(s) >> 4);
      u32 a[4];
      for (int i = 0; i < 4; i++)
        a[i] = *(const u32*)(a_in + (16 * warp + lane / 4 + i % 2 * 8) * 16 + lane % 4 * 2 + i / 2 * 8);
      float d[{count}];
      for (int i = 0; i < {count}; i++) d[i] = i;
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        " {{{acc}}}, {a_text}, %{count + inputs}, p, {immediates};}}" : {outputs} : {a_inputs}, "l"(b_word));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      for (int i = 0; i < {count}; i++) asm volatile("" : "+f"(d[i]) :: "memory");
      for (int i = 0; i < {count}; i++)
        out[(16 * warp + lane / 4 + i / 2 % 2 * 8) * {n} + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i]; }}"""


# (leading, stride) in bytes for [64 or 128 rows, 16]: as little as each mode needs, and wider apart.
STRIDES = {
    ("k", 0): [(128, 256), (4096, 128)],
    ("k", 1): [(16, 1024)],
    ("k", 2): [(16, 512), (16, 1024)],
    ("k", 3): [(16, 256)],
    ("mn", 0): [(128, 256), (2048, 128)],
    ("mn", 1): [(2048, 1024), (4096, 1024)],
    ("mn", 2): [(1024, 512)],
    ("mn", 3): [(512, 256)],
}
FORMS = [(major, mode, strides) for (major, mode), each in STRIDES.items() for strides in each]


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wgmma_reads_every_layout(form, from_registers):
    major, mode, (leading, stride) = form
    n, kind = (128, "bf16") if mode != 2 else (64, "f16")
    place = (k_major if major == "k" else mn_major)(mode, leading, stride)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 16)).astype(np.float32), rng.standard_normal((n, 16)).astype(np.float32)
    store = bf16_bits if kind == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    load = bf16_value if kind == "bf16" else lambda x: x.view(np.float16).astype(np.float32)
    a_at = np.array([place(r, k) for r, k in itertools.product(range(64), range(16))], np.int32)
    b_start = 16384
    b_at = np.array([place(r, k) + b_start for r, k in itertools.product(range(n), range(16))], np.int32)
    words = np.array([descriptor(mode, leading, stride, 0), descriptor(mode, leading, stride, b_start)], np.uint64)
    trans = int(major == "mn")
    out = np.zeros((64, n), np.float32)
    hopper(
        wgmma_kernel(n, kind, trans, trans, from_registers),
        {"out": out, "a": store(a), "b": store(b), "a_at": a_at, "b_at": b_at, "words": words},
        block=128,
        smem=65536,
    )
    exact = load(store(a)).astype(np.float64) @ load(store(b)).astype(np.float64).T
    row, column = np.arange(64)[:, None], np.arange(n)[None, :]
    start = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    np.testing.assert_array_equal(out, (exact + start).astype(np.float32))


HAZARD = """extern "C" __global__ void k(float* out, const u16* in) {
  extern __shared__ __align__(1024) unsigned char s[];
  int t = threadIdx.x;
  for (int i = t; i < 4096; i += 128) ((u16*)s)[i] = 0x3f80;
  proxy_fence();
  __syncthreads();
  u64 word = (u64)(at(s) >> 4) | 1ull << 16 | 16ull << 32;
  u32 a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  float d[4] = {1.f, 2.f, 3.f, 4.f};
  for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[i]));
  auto fence = [] { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); };
  auto multiply = [&] {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(word)); };
  auto commit = [] { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); };
  auto wait = [] { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); };
  BODY
  for (int i = 0; i < 4; i++) out[t * 4 + i] = d[i]; }"""
TOUCH_D = 'for (int i = 0; i < 4; i++) asm volatile("add.f32 %0, %0, 0f00000000;" : "+f"(d[i]));'
TOUCH_A = 'for (int i = 0; i < 4; i++) asm volatile("xor.b32 %0, %0, 0;" : "+r"(a[i]));'


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("fence(); multiply(); multiply(); commit(); wait();", None, ""),
        (TOUCH_D + TOUCH_A + "fence(); multiply(); commit(); wait();" + TOUCH_D, None, ""),
        (TOUCH_D + "multiply(); commit(); wait();", errors.MissingFence, r"no wgmma\.fence since"),
        ("fence();" + TOUCH_A + "multiply(); commit(); wait();", errors.MissingFence, r"no wgmma\.fence since"),
        ("fence(); multiply(); commit();" + TOUCH_D + "wait();", errors.NotComplete, "is read while a wgmma"),
        ("fence(); multiply(); commit();" + TOUCH_A + "wait();", errors.NotComplete, "is written while a wgmma that"),
        ("fence(); multiply(); commit(); wait(); fence(); multiply();", errors.NotComplete, "is read while a wgmma"),
        ("if (t < 16) return; fence(); multiply(); commit(); wait();", errors.Diverged, "was reached by a part"),
    ],
)
def test_registers_of_wgmma(body, error, match):
    out = np.zeros(512, np.float32)
    for seed in (None, 0):
        given = {"out": out, "in": np.zeros(8, np.uint16)}
        if error is None:
            hopper(HAZARD.replace("BODY", body), given, block=128, smem=8192, seed=seed)
            assert set(np.unique(out)) <= {16 * n + i for n in (1, 2) for i in (1, 2, 3, 4)}
        else:
            with pytest.raises(error, match=match or None):
                hopper(HAZARD.replace("BODY", body), given, block=128, smem=8192, seed=seed)


# ---------------------------------------------------------------- clusters
def test_clusters_share_memory_barriers_and_copies():
    source = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* out, const int* in) {
      __shared__ __align__(128) int s[64];
      __shared__ u64 full;
      int t = threadIdx.x;
      u32 rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      if (t == 0) { init(full, 2); init_fence(); }
      asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      u32 remote; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at(&full)), "r"(rank ^ 1));
      if (t == 0) {
        expect(full, 256);                                              // both halves land here
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
          " [%0], [%1], %2, [%3], %4;"
          :: "r"(at(s + 32 * rank)), "l"(in + blockIdx.x * 32), "r"(128), "r"(at(&full)), "h"((u16)3) : "memory");
      }
      wait(full, 0);
      out[blockIdx.x * 64 + t] = s[t] + s[t ^ 32];
      asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      u32 there; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(s + t)), "r"(rank ^ 1));
      asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(there), "r"(1000 * rank + t) : "memory");
      asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      out[256 + blockIdx.x * 64 + t] = s[t]; }"""
    data = np.arange(128, dtype=np.int32)
    for seed in (None, 0, 1, 2):
        out = np.zeros(512, np.int32)
        report = hopper(source, {"out": out, "in": data}, grid=4, block=64, seed=seed)
        pairs = data.reshape(2, 2, 32)
        for block in range(4):
            both = pairs[block // 2].sum(0)
            np.testing.assert_array_equal(out[block * 64 : block * 64 + 64], np.tile(both, 2))
            other = 1000 * (1 - block % 2) + np.arange(64)
            np.testing.assert_array_equal(out[256 + block * 64 : 256 + block * 64 + 64], other)
        assert report.traffic["in", "bulk load"] == 4 * 128  # multicast reads memory once


def test_a_remote_write_races_with_a_local_read():
    source = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* out) {
      __shared__ int s[32];
      int t = threadIdx.x;
      u32 rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      s[t] = 0;
      asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      u32 there; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(s + t)), "r"(rank ^ 1));
      if (rank == 0) asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(there), "r"(t) : "memory");
      else out[t] = s[t]; }"""
    for seed in (None, 0, 1):
        with pytest.raises(errors.Race):
            hopper(source, {"out": np.zeros(32, np.int32)}, grid=2, seed=seed)


# ---------------------------------------------------------------- registers
@pytest.mark.parametrize(("consumer", "dies"), [(232, False), (240, True)])
def test_the_pool_of_setmaxnreg(consumer, dies):
    source = f"""extern "C" __global__ void __launch_bounds__(384, 1) k(int* out) {{
      int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
      if (group == 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      else asm volatile("setmaxnreg.inc.sync.aligned.u32 {consumer};");
      out[threadIdx.x] = group; }}"""
    for seed in (None, 0):
        out = np.zeros(384, np.int32)
        if dies:
            with pytest.raises(
                errors.Deadlock, match=r"setmaxnreg 240 .the pool has .* the launch gave 168 to each of 12"
            ):
                hopper(source, {"out": out}, block=384, seed=seed)
        else:
            hopper(source, {"out": out}, block=384, seed=seed)
            assert out.tolist() == [t // 128 for t in range(384)]


def test_setmaxnreg_in_the_wrong_direction():
    source = """extern "C" __global__ void __launch_bounds__(128, 1) k(int* out) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 40;"); out[0] = 1; }"""
    with pytest.raises(errors.BarrierMisuse, match=r"setmaxnreg\.inc 40 in a warp that holds 255"):
        hopper(source, {"out": np.zeros(1, np.int32)}, block=128)
