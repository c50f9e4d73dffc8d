"""Memory in the PTX interpreter: every state space, what is counted, and what traps."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import launch

from flashgen.interpreter import BadLaunch, Memory, errors


def test_widths_and_vectors():
    source = """extern "C" __global__ void k(uint4* out, const uint4* in, const unsigned char* bytes,
                                           const short* shorts) {
      int t = threadIdx.x;
      uint4 x = in[t];
      __shared__ uint4 s[32];
      s[t ^ 1] = x;
      __syncthreads();
      uint4 y = s[t];
      y.x += bytes[t]; y.y += shorts[t];
      out[t] = y; }"""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 1 << 31, (32, 4)).astype(np.uint32)
    small, shorts = rng.integers(0, 256, 32).astype(np.uint8), rng.integers(-9, 9, 32).astype(np.int16)
    out = np.zeros((32, 4), np.uint32)
    report = launch(source, {"out": out, "in": data, "bytes": small, "shorts": shorts})
    expected = data[np.arange(32) ^ 1].copy()
    expected[:, 0] += small
    expected[:, 1] += shorts.astype(np.uint32)
    np.testing.assert_array_equal(out, expected)
    assert report.bytes("ld", buffer="in") == 512
    assert report.bytes("ld", buffer="bytes") == 32
    assert report.bytes("ld", buffer="shorts") == 64
    assert (report.read_bytes, report.write_bytes) == (608, 512)


def test_local_memory_and_generic_pointers():
    source = """extern "C" __global__ void k(int* out, const int* in) {
      __shared__ int s[32];
      int stack[8];
      int t = threadIdx.x;
      for (int i = 0; i < 8; i++) stack[(i + t) % 8] = in[i];
      s[t] = 100;
      __syncthreads();
      int* p = t % 3 ? stack + t % 8 : s + t;     // one load, two state spaces: by lanes apart
      int sum = 0;
      if (t % 3) sum = *p; else sum = *p;
      out[t] = sum + stack[in[t % 8] % 8]; }"""
    values = np.arange(10, 18, dtype=np.int32)
    out = np.zeros(32, np.int32)
    launch(source, {"out": out, "in": values})
    stack = [[int(values[(i - t) % 8]) for i in range(8)] for t in range(32)]
    assert out.tolist() == [(stack[t][t % 8] if t % 3 else 100) + stack[t][int(values[t % 8]) % 8] for t in range(32)]


def test_bank_conflicts():
    source = """extern "C" __global__ void k(float* out, int step) {
      __shared__ float s[1024];
      for (int i = threadIdx.x; i < 1024; i += 32) s[i] = i;
      __syncwarp();
      out[threadIdx.x] = s[threadIdx.x * step % 1024]; }"""
    for step, wavefronts in ((1, 1), (2, 2), (8, 8), (32, 32), (33, 1), (0, 1)):
        report = launch(source, {"out": np.zeros(32, np.float32)}, step)
        (read,) = [a for a in report.shared.values() if a.text.startswith("ld.shared")]
        assert (read.count, read.wavefronts, read.ideal) == (1, wavefronts, 1), step
        assert len(report.conflicts) == (wavefronts > 1)


def test_wide_accesses_go_by_quarter_warps():
    source = """extern "C" __global__ void k(float4* out, int step) {
      __shared__ float4 s[256];
      for (int i = threadIdx.x; i < 256; i += 32) s[i] = make_float4(i, 0, 0, 0);
      __syncwarp();
      out[threadIdx.x] = s[threadIdx.x * step % 256]; }"""
    for step, wavefronts in ((1, 4), (2, 8), (8, 32)):
        report = launch(source, {"out": np.zeros((32, 4), np.float32)}, step)
        (read,) = [a for a in report.shared.values() if a.text.startswith("ld.shared")]
        assert (read.wavefronts, read.ideal) == (wavefronts, 4), step


# ---------------------------------------------------------------- traps
def trap(source, error, match, arrays=None, **options):
    with pytest.raises(error, match=match) as found:
        launch(source, arrays or {"out": np.zeros(64, np.int32), "in": np.zeros(8, np.int32)}, **options)
    assert found.value.line > 0
    assert "in block" in str(found.value)


KERNEL = 'extern "C" __global__ void k(int* out, const int* in) {{ int t = threadIdx.x; {} }}'


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        ("out[t] = in[t];", errors.OutOfBounds, r"global ld of 4 bytes at byte 32 of in \(32 bytes\), past its end"),
        ("out[t * 3] = 1;", errors.OutOfBounds, r"global st of 4 bytes at byte 264 of out \(256 bytes\), past"),
        ("out[t - 1] = 1;", errors.OutOfBounds, "global st of 4 bytes at"),
        ("out[t] = *(int*)(unsigned)(unsigned long long)in;", errors.OutOfBounds, "no buffer is there"),
        ("out[t] = *(int*)((char*)in + 2);", errors.Misaligned, "global ld of 4 bytes at .* is not aligned"),
        ("out[t] = 1; ((int*)in)[0] = 2;", errors.ReadOnly, "global st into in, which the kernel may only read"),
        (
            "__shared__ int s[32]; s[t] = 1; __syncwarp(); out[t] = s[t + 1];",
            errors.OutOfBounds,
            "shared memory access of bytes 128..131: the block has 128 bytes",
        ),
        (
            "__shared__ int s[64]; s[t] = 1; out[t] = *(int*)((char*)s + 2);",
            errors.Misaligned,
            "shared memory access at byte 2 is not a multiple of 4",
        ),
        (
            "__shared__ int s[64]; s[t] = 1; __syncwarp(); out[t] = s[t + 32];",
            errors.Uninitialised,
            "warp 0 reads shared memory that nothing wrote",
        ),
        ("int x[4]; x[t % 2] = 1; out[t] = x[t % 4];", errors.Uninitialised, "local memory is read before"),
        (
            'int x; asm volatile("{.reg .b32 y; mov.b32 %0, y;}" : "=r"(x)); out[t] = x;',
            errors.Uninitialised,
            "register y is read before anything wrote it",
        ),
    ],
)
def test_bad_accesses(code, error, match):
    for seed in (None, 3):
        trap(KERNEL.format(code), error, match, seed=seed)


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        ("s[t] = t; out[t] = s[t ^ 32];", errors.Race, "reads shared memory that warp . wrote .*no barrier between"),
        (
            "if (t < 32) s[t] = t; __syncthreads(); if (t >= 32) out[t] = s[t - 32]; if (t < 32) s[t] = 1;",
            errors.Race,
            "warp 0 writes shared memory that warp 1 read: no barrier orders the write after the read",
        ),
        ("s[t % 32] = t; __syncthreads(); out[t] = s[t % 32];", errors.Race, "write.* shared memory"),
        (
            "s[t] = t; out[t] = s[t ^ 1];",
            errors.Race,
            "lane 1 reads shared memory that lane 0 of its warp wrote|"
            "lane 0 reads shared memory that lane 1 of its warp wrote",
        ),
    ],
)
def test_shared_memory_races(code, error, match):
    for seed in (None, 0, 1):
        try:
            launch(
                KERNEL.format("__shared__ int s[64]; " + code),
                {"out": np.zeros(64, np.int32), "in": np.zeros(8, np.int32)},
                block=64,
                seed=seed,
            )
        except errors.Trap as found:
            # Another order of the same race reports it from the other side: reads before writes.
            assert isinstance(found, error | errors.Uninitialised), found
        else:
            pytest.fail(f"no trap with seed {seed}")
    trap(KERNEL.format("__shared__ int s[64]; " + code), error, match, block=64)


def test_fixed_races_are_none():
    code = """__shared__ int s[64];
      s[t] = t; __syncwarp(); out[t] = s[t ^ 1]; __syncthreads(); s[t ^ 32] = 1; s[t ^ 32] += 1;"""
    for seed in (None, *range(5)):
        launch(KERNEL.format(code), {"out": np.zeros(64, np.int32), "in": np.zeros(8, np.int32)}, block=64, seed=seed)


def test_two_blocks_that_write_the_same_bytes():
    trap(KERNEL.format("out[t] = blockIdx.x;"), errors.Race, "blocks 0 and 1 both write byte 0 of out", grid=2)


def test_race_checks_can_be_left_out():
    source = KERNEL.format("__shared__ int s[64]; s[t] = t; out[t] = s[t ^ 32];")
    out = np.zeros(64, np.int32)
    launch(source, {"out": out, "in": np.zeros(8, np.int32)}, block=64, check=False)
    assert out.tolist() == [t ^ 32 for t in range(64)]


def test_buffers_are_named_once_and_contiguous():
    memory = Memory()
    memory.add("a", np.zeros(4))
    with pytest.raises(BadLaunch, match="two buffers are named 'a'"):
        memory.add("a", np.zeros(4))
    with pytest.raises(BadLaunch, match="'b' is not C-contiguous"):
        memory.add("b", np.zeros((4, 4)).T)


#: Two blocks: block 0 leaves data and says so by a word, for which block 1 waits before it reads them.
HANDED_OVER = """extern "C" __global__ void k(int* out, int* data, unsigned* word) {{
  if (blockIdx.x == 0) {{
    {write};
    {say};
  }} else {{
    unsigned seen = 0;
    do {{ {look}; }} while (seen == 0);
    {after};
    {read};
  }} }}"""

RIGHT = {
    "write": "data[threadIdx.x] = 7; __syncwarp()",
    "say": 'if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(word) : "memory")',
    "look": 'asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory")',
    "after": "__syncwarp()",
    "read": "out[threadIdx.x] = data[threadIdx.x]",
}

RELAXED = {
    "say": 'if (threadIdx.x == 0) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(word) : "memory")',
    "look": 'asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory")',
}

FENCED = {**RELAXED, "write": RIGHT["write"] + "; __threadfence()", "after": "__threadfence(); __syncwarp()"}


def hand_over(change, **options):
    out = np.zeros(32, np.int32)
    source = HANDED_OVER.format(**{**RIGHT, **change})
    arrays = {"out": out, "data": np.zeros(32, np.int32), "word": np.zeros(1, np.uint32)}
    launch(source, arrays, grid=2, writable="out data word", **options)
    return out.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"say": 'if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(word) : "memory")'},
        {
            "write": 'asm volatile("red.relaxed.gpu.global.add.s32 [%0], 7;" :: "l"(data + threadIdx.x) : "memory");'
            " __syncwarp()"
        },
        {"look": 'asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 0;" : "=r"(seen) : "l"(word) : "memory")'},
        {"read": "out[threadIdx.x] = atomicAdd(data + threadIdx.x, 1)"},
        FENCED,
    ],
)
def test_what_a_block_hands_over(change):
    for seed in (None, 0, 1):
        assert hand_over(change, seed=seed) == [7] * 32


@pytest.mark.parametrize(
    "change, match",
    [
        ({"say": RELAXED["say"]}, "ld by block 1 of byte 0 of data .* which block 0 wrote: it has acquired nothing"),
        ({"look": RELAXED["look"]}, "ld by block 1 of byte 0 of data"),
        ({**FENCED, "write": RIGHT["write"]}, "ld by block 1 of byte 0 of data"),
        ({**FENCED, "after": RIGHT["after"]}, "ld by block 1 of byte 0 of data"),
        ({"say": RIGHT["say"].replace(".gpu", ".cta")}, "ld by block 1 of byte 0 of data"),
        ({"look": RIGHT["look"].replace(".gpu", ".cta")}, "ld by block 1 of byte 0 of data"),
        ({"say": RIGHT["say"] + "; data[31] = 8"}, "ld by block 1 of byte 124 of data"),
        ({"look": RELAXED["look"], "read": "atomicAdd(data + threadIdx.x, 1)"}, "atom by block 1 of byte 0 of data"),
        ({"read": "out[threadIdx.x] = __ldg(data + threadIdx.x)"}, "by ld.global.nc of byte 0 of data"),
    ],
)
def test_what_a_block_cannot_know_of(change, match):
    """Values that happen to be right are none: on a GPU they may not be."""
    with pytest.raises(errors.Race, match=match):
        hand_over(change)
