"""Matrix fragments and cp.async in the PTX interpreter, through small CUDA kernels."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import launch

from flashgen.interpreter import errors
from flashgen.interpreter.ops.convert import bf16_bits, bf16_value

HEAD = """
typedef unsigned u32; typedef unsigned short u16;
#define DEVICE __device__ __forceinline__
DEVICE u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
"""

FILL = "for (int i = t; i < 64 * 8; i += blockDim.x) ((u32*)s)[i] = ((const u32*)in)[i]; __syncthreads();"


def bits(rng, *shape):
    return rng.integers(0, 1 << 16, shape).astype(np.uint16)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, seed):
    regs = ", ".join(f"%{i}" for i in range(count))
    for trans in ("", ".trans"):
        source = (
            HEAD
            + f"""extern "C" __global__ void k(u32* out, const u16* in) {{
          __shared__ __align__(16) u16 s[64][16];
          int t = threadIdx.x, lane = t % 32;
          {FILL}
          u32 r[4] = {{}};
          asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%{count}];"
            : {", ".join(f'"=r"(r[{i}])' for i in range(count))} : "r"(at(&s[t / 32 * 32 + lane][8])));
          for (int i = 0; i < 4; i++) out[t * 4 + i] = r[i]; }}"""
        )
        data = bits(np.random.default_rng(1), 64, 16)
        out = np.zeros((64, 4, 2), np.uint16)
        launch(source, {"out": out, "in": data}, block=64, seed=seed)
        for thread in range(64):
            warp, lane = divmod(thread, 32)
            for i in range(count):
                block = data[warp * 32 + 8 * i : warp * 32 + 8 * i + 8, 8:]
                block = block.T if trans else block
                np.testing.assert_array_equal(out[thread, i], block[lane // 4, 2 * (lane % 4) :][:2])
        assert (out[:, count:] == 0).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed):
    trans = ".trans" if transposed else ""
    source = (
        HEAD
        + f"""extern "C" __global__ void k(u32* out, const u16* in) {{
      __shared__ __align__(16) u16 s[64][16], d[64][16];
      int t = threadIdx.x, lane = t % 32;
      {FILL}
      u32 r[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(&s[t][0])));
      asm volatile("stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%0], {{%1, %2, %3, %4}};"
        :: "r"(at(&d[t][8])), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
      __syncthreads();
      for (int i = 0; i < 4; i++) out[t * 4 + i] = ((u32*)&d[t][8])[i]; }}"""
    )
    data = bits(np.random.default_rng(1), 64, 16)
    out = np.zeros((64, 8), np.uint16)
    launch(source, {"out": out, "in": data}, block=64, arch="sm_90a")
    np.testing.assert_array_equal(out, data[:, :8])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma(kind):
    """D = A B + C with the fragments as the PTX ISA draws them, two warps at once."""
    source = (
        HEAD
        + f"""extern "C" __global__ void k(float* out, const u16* a, const u16* b) {{
      int t = threadIdx.x, lane = t % 32, g = lane / 4, c = lane % 4 * 2;
      a += t / 32 * 256; b += t / 32 * 128; out += t / 32 * 128;
      u32 x[4], y[2];
      for (int i = 0; i < 4; i++) x[i] = *(const u32*)(a + (g + i % 2 * 8) * 16 + c + i / 2 * 8);
      for (int i = 0; i < 2; i++) y[i] = b[(c + 8 * i) * 8 + g] | (u32)b[(c + 8 * i + 1) * 8 + g] << 16;
      float d[4] = {{1.f, 2.f, 3.f, 4.f}};
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
      for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * 8 + c + i % 2] = d[i]; }}"""
    )
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float32), rng.standard_normal((2, 16, 8)).astype(np.float32)
    store = bf16_bits if kind == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    load = bf16_value if kind == "bf16" else lambda x: x.view(np.float16).astype(np.float32)
    out = np.zeros((2, 16, 8), np.float32)
    launch(source, {"out": out, "a": store(a), "b": store(b)}, block=64)
    c = np.tile([1.0, 2.0], 4) + np.repeat([0, 2], 8)[:, None]
    expected = load(store(a)).astype(np.float64) @ load(store(b)).astype(np.float64) + c
    np.testing.assert_array_equal(out, expected.astype(np.float32))


def test_a_warp_must_be_whole():
    source = (
        HEAD
        + """extern "C" __global__ void k(u32* out, const u16* in) {
      __shared__ __align__(16) u16 s[64][16];
      int t = threadIdx.x; """
        + FILL
        + """
      if (t < 16) {
        u32 r;
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(&s[t][0])));
        out[t] = r; } }"""
    )
    with pytest.raises(errors.Diverged, match="ldmatrix was reached by a part of its warp"):
        launch(source, {"out": np.zeros(32, np.uint32), "in": np.zeros((64, 16), np.uint16)})


# ---------------------------------------------------------------- cp.async
COPY = (
    HEAD
    + """
DEVICE void copy(void* to, const void* from, int size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at(to)), "l"(from), "r"(size) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
"""
)


def copying(body, threads=64, **options):
    source = (
        COPY
        + """extern "C" __global__ void k(uint4* out, const uint4* in) {
      __shared__ __align__(16) uint4 s[256];
      int t = threadIdx.x;
      auto load = [&](int at) { copy(s + at + t, in + at + t, 16); commit(); };
      """
        + body
        + " }"
    )
    data = np.arange(1024, dtype=np.uint32).reshape(256, 4) + 1
    out = np.zeros((256, 4), np.uint32)
    report = launch(source, {"out": out, "in": data}, block=threads, **options)
    return data, out, report


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_groups_land_when_waited_for(seed):
    data, out, report = copying(
        """copy(s + t, in + t, 16); commit();
        copy(s + 64 + t, in + 64 + t, t % 2 ? 16 : 4); commit();
        copy(s + 128 + t, in, 0); commit();
        wait<2>(); out[t] = s[t];
        wait<1>(); out[64 + t] = s[64 + t];
        wait<0>(); __syncthreads(); out[128 + t] = s[128 + (t ^ 33)];""",
        seed=seed,
    )
    expected = data[:192].copy()
    expected[64:128:2, 1:] = 0
    expected[128:] = 0
    np.testing.assert_array_equal(out[:192], expected)
    assert report.traffic["in", "cp.async"] == 64 * 16 + 32 * 16 + 32 * 4


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("load(0); out[t] = s[t];", errors.NotComplete, "cp.async of warp"),
        (
            "load(0); load(64); wait<1>(); out[t] = s[64 + t]; wait<0>();",
            errors.NotComplete,
            "has not waited for group 2",
        ),
        ("load(0); wait<0>(); out[t] = s[t ^ 32];", errors.NotComplete, "no barrier followed"),
        ("copy(s + t, in + t, 16); wait<0>(); out[t] = s[t];", errors.NotComplete, "cp.async of warp"),
        (
            "s[t] = in[t]; __syncthreads(); out[t] = s[t ^ 32]; load(0); wait<0>();",
            errors.Race,
            "no barrier orders the write after the read",
        ),
        ("load(0);", errors.UnfinishedCopy, "leaves while its cp.async copies"),
        ("copy(s + t, (char*)in + 8 + 16 * t, 16);", errors.Misaligned, "global cp.async of 16 bytes"),
        ("copy(s + t, in + 200 + t, 16);", errors.OutOfBounds, "global cp.async of 16 bytes at byte 4096"),
        ("copy(s + 250 + t, in, 16);", errors.OutOfBounds, "shared memory access"),
    ],
)
def test_misuse(body, error, match, seed):
    if "^ 32" in body and seed is not None:
        error, match = errors.Trap, None  # in another order the other warp has not even begun, or is done
    with pytest.raises(error, match=match):
        copying(body, seed=seed)


def test_copies_from_too_far_are_fine_where_nothing_is_read():
    _, out, _ = copying("copy(s + t, in + 1000 + t, 0); commit(); wait<0>(); out[t] = s[t];")
    assert (out[:64] == 0).all()
