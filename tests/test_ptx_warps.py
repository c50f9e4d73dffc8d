"""Warps in the PTX interpreter: divergence, shuffles, votes, barriers, atomics, and the order of warps."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import launch

from flashgen.interpreter import errors

SEEDS = (None, 0, 1)


def run(source, *arrays, block=32, out=np.int32, count=None, **options):
    result = np.zeros(count or block, out)
    named = {"out": result, **{f"in{n}": array for n, array in enumerate(arrays)}}
    report = launch(source, named, block=block, **options)
    return result, report


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_of_different_length_meet_again(seed):
    source = """extern "C" __global__ void k(int* out) {
      int t = threadIdx.x, sum = 0;
      for (int i = 0; i < t % 7; i++) { if ((i ^ t) & 1) sum += i; else sum -= 1; }
      sum += __shfl_xor_sync(~0u, sum, 1);      // all lanes are here again
      out[t] = sum; }"""
    got, _ = run(source, block=96, seed=seed)

    def alone(t):
        return sum(i if (i ^ t) & 1 else -1 for i in range(t % 7))

    assert got.tolist() == [alone(t) + alone(t ^ 1) for t in range(96)]


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles(seed):
    source = """extern "C" __global__ void k(int* out) {
      int t = threadIdx.x, lane = t % 32;
      out[t] = __shfl_sync(~0u, 10 * t, 5);
      out[t + 64] = __shfl_up_sync(~0u, t, 3);
      out[t + 128] = __shfl_down_sync(~0u, t, 4, 8);
      out[t + 192] = __shfl_xor_sync(~0u, t, 6);
      out[t + 256] = __shfl_sync(~0u, t, lane / 2 + 1, 16); }"""
    got, _ = run(source, block=64, count=320, seed=seed)
    got = got.reshape(5, 2, 32)
    lane = np.arange(32)
    for w in range(2):
        base = 32 * w
        assert (got[0, w] == 10 * (base + 5)).all()
        np.testing.assert_array_equal(got[1, w], base + np.where(lane >= 3, lane - 3, lane))
        np.testing.assert_array_equal(got[2, w], base + np.where(lane % 8 + 4 < 8, lane + 4, lane))
        np.testing.assert_array_equal(got[3, w], base + (lane ^ 6))
        np.testing.assert_array_equal(got[4, w], base + lane // 16 * 16 + (lane // 2 + 1) % 16)


@pytest.mark.parametrize("seed", SEEDS)
def test_votes_and_reductions(seed):
    source = """extern "C" __global__ void k(int* out) {
      int t = threadIdx.x;
      out[t] = __ballot_sync(~0u, t % 3 == 0);
      out[t + 32] = __any_sync(~0u, t == 77) * 2 + __all_sync(~0u, t < 32);
      out[t + 64] = __reduce_add_sync(~0u, t);
      out[t + 96] = __reduce_max_sync(~0u, (t * 7) % 32);
      out[t + 128] = __activemask();
      if (t < 8) out[t + 160] = __ballot_sync(0xff, t & 1); }"""
    got, _ = run(source, count=192, seed=seed)
    got = got.reshape(6, 32)
    assert (got[0].view(np.uint32) == sum(1 << t for t in range(0, 32, 3))).all()
    assert (got[1] == 1).all()
    assert (got[2] == 31 * 16).all()
    assert (got[3] == 31).all()
    assert (got[4].view(np.uint32) == 0xFFFFFFFF).all()
    assert (got[5][:8] == 0xAA).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_block_barriers_order_shared_memory(seed):
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int a[128];
      int t = threadIdx.x;
      for (int i = 0; i < 4; i++) {
        a[t] = t * (i + 1);
        __syncthreads();
        out[t] += a[127 - t];
        __syncthreads();
      }
      int odd = __syncthreads_count(t % 2), both = __syncthreads_or(t == 5) + 2 * __syncthreads_and(t < 127);
      out[t] += 1000000 * odd + 100000 * both; }"""
    got, report = run(source, block=128, seed=seed)
    assert got.tolist() == [10 * (127 - t) + 64 * 1000000 + 100000 for t in range(128)]
    assert report.conflicts == []


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_between_producers_and_consumers(seed):
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int a[32];
      int t = threadIdx.x;
      if (t < 32) for (int i = 0; i < 3; i++) {
        if (i > 0) asm volatile("bar.sync 2, 64;" ::: "memory");
        a[t] = t + 100 * i;
        asm volatile("bar.arrive 1, 64;" ::: "memory");
      } else for (int i = 0; i < 3; i++) {
        asm volatile("bar.sync 1, 64;" ::: "memory");
        out[t - 32] += a[t - 32];
        if (i < 2) asm volatile("bar.arrive 2, 64;" ::: "memory");
      } }"""
    got, _ = run(source, block=64, count=32, seed=seed)
    assert got.tolist() == [3 * t + 300 for t in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_count_every_thread_of_every_block(seed):
    source = """extern "C" __global__ void k(unsigned* out, float* total) {
      __shared__ unsigned n;
      if (threadIdx.x == 0) n = 0;
      __syncthreads();
      unsigned mine = atomicAdd(&n, 1u);
      atomicAdd(total, 0.5f);
      atomicMax(out + 1, blockIdx.x * 64 + mine);
      atomicCAS(out + 2, 0u, 7u);
      __syncthreads();
      if (threadIdx.x == 0) atomicAdd(out, n); }"""
    total = np.zeros(1, np.float32)
    out = np.zeros(3, np.uint32)
    launch(source, {"out": out, "total": total}, grid=3, block=64, seed=seed, writable="out total")
    assert out.tolist() == [192, 191, 7]
    assert total[0] == 96


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_wait_for_each_other_make_progress(seed):
    source = """extern "C" __global__ void k(volatile int* out) {
      if (blockIdx.x == 0) { while (out[1] == 0) {} out[0] = 5; }
      else if (threadIdx.x == 0) { out[1] = 1; } }"""
    out = np.zeros(2, np.int32)
    launch(source, {"out": out}, grid=2, seed=seed)
    assert out.tolist() == [5, 1]


def test_special_registers():
    source = """extern "C" __global__ void k(int* out) {
      int warp, lane; asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      int i = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      out[i * 64 + t] = ((i * 2 + warp) * 32 + lane) * 10 + threadIdx.y; }"""
    got, _ = run(source, block=(8, 4, 2), count=64 * 6, grid=(1, 2, 3))
    assert got.tolist() == [10 * n + n % 64 // 8 % 4 for n in range(384)]


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_left_take_no_further_part(seed):
    source = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x >= 40) return;
      out[threadIdx.x] = __popc(__activemask()); }"""
    got, _ = run(source, block=64, seed=seed)
    assert got.tolist() == [32] * 32 + [8] * 8 + [0] * 24


def test_shuffles_with_a_missing_lane_trap():
    source = """extern "C" __global__ void k(int* out) {
      int t = threadIdx.x;
      if (t < 16) out[t] = __shfl_xor_sync(~0u, t, 1); }"""
    with pytest.raises(
        errors.Diverged, match=r"shfl.sync in warp 0 names lanes 0xffffffff, but lanes 0x0000ffff"
    ) as trap:
        run(source)
    assert "in block (0, 0, 0), warps 0..0" in str(trap.value)
    assert trap.value.line > 0


def test_a_barrier_in_a_diverged_branch_traps():
    source = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x < 16) { __syncthreads(); out[0] = 1; } else out[1] = 2; }"""
    with pytest.raises(errors.Diverged, match="a block barrier was reached by a part of its warp"):
        run(source)


def test_barriers_that_never_open_are_a_deadlock():
    source = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x < 32) asm volatile("bar.sync 3, 96;" ::: "memory");
      else asm volatile("bar.sync 4, 64;" ::: "memory");
      out[0] = 1; }"""
    with pytest.raises(errors.Deadlock) as trap:
        run(source, block=64)
    text = str(trap.value)
    assert "warps 0..0 wait for named barrier 3 (32 of 96 threads have arrived)" in text
    assert "warps 1..1 wait for named barrier 4 (32 of 64 threads have arrived)" in text
    assert "PTX line" in text


def test_who_looks_for_what_never_comes_is_told_from_who_waits_for_its_warp():
    source = """extern "C" __global__ void k(volatile int* out) {
      if (threadIdx.x == 0) while (out[0] == 0) asm volatile("nanosleep.u32 20;");
      __syncwarp();
      out[1] = 1; }"""
    with pytest.raises(errors.Deadlock) as trap:
        run(source)
    text = str(trap.value)
    assert "warps 0..0 (1 lanes) wait for another block" in text
    assert "warps 0..0 (31 lanes) wait for the other lanes of their warp" in text


def test_barrier_counts_must_agree():
    source = """extern "C" __global__ void k(int* out) {
      if (threadIdx.x < 32) asm volatile("bar.sync 3, 96;" ::: "memory");
      else asm volatile("bar.sync 3, 64;" ::: "memory"); }"""
    with pytest.raises(errors.BarrierMisuse, match=r"used with (64|96) threads while others wait at it with"):
        run(source, block=64)


def test_trap_instruction():
    with pytest.raises(errors.KernelTrap, match="executed trap"):
        run("""extern "C" __global__ void k(int* out) { if (threadIdx.x == 3) __trap(); out[0] = 1; }""")


def test_elect_and_instructions_that_only_advise():
    source = """extern "C" __global__ void k(unsigned* out) {
      unsigned t = threadIdx.x, leader, first; unsigned long long policy, c0, c1;
      asm volatile("{.reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p;}" : "=r"(leader), "=r"(first));
      asm volatile("mov.u64 %0, %%clock64;" : "=l"(c0));
      asm volatile("prefetch.global.L2 [%0];" :: "l"(out));
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("nanosleep.u32 20; membar.gl; fence.acq_rel.gpu; griddepcontrol.wait;");
      asm volatile("mov.u64 %0, %%clock64;" : "=l"(c1));
      out[t] = 100 * leader + first + 10 * (c1 >= c0); }""".replace("b64 %0, 1.0;", "b64 %0;")
    got, _ = run(source, block=64, out=np.uint32, arch="sm_90a")
    assert got.tolist() == [11 if t % 32 == 0 else 10 for t in range(64)]


def test_atomics_give_back_what_was_there():
    source = """extern "C" __global__ void k(int* out, unsigned* n) {
      int t = threadIdx.x;
      out[t] = atomicInc(n, 9u);
      out[32 + t] = atomicExch((int*)n + 1, t);
      out[64 + t] = atomicMin((int*)n + 2, 20 - t);
      out[96 + t] = atomicDec(n + 3, 5u);
      out[128 + t] = atomicXor(n + 4, 1u << t);
      out[160 + t] = atomicCAS((int*)n + 5, t, t + 1); }"""
    n = np.array([0, -1, 7, 3, 0, 0], np.int32).view(np.uint32)
    out = np.zeros(192, np.int32)
    launch(source, {"out": out, "n": n}, writable="out n")
    out = out.reshape(6, 32)
    assert out[0].tolist() == [t % 10 for t in range(32)]
    assert out[1].tolist() == [-1, *range(31)]
    assert out[2].tolist() == [7] * 14 + [20 - t + 1 for t in range(14, 32)]
    assert out[3].tolist() == [(3 - t) % 6 for t in range(32)]
    assert out[4].view(np.uint32).tolist() == [(1 << t) - 1 for t in range(32)]
    assert out[5].tolist() == list(range(32))
    assert n.tolist() == [2, 31, 2**32 - 11, (3 - 32) % 6, 2**32 - 1, 32]


def test_an_atomic_and_a_plain_read_race():
    source = """extern "C" __global__ void k(int* out) {
      __shared__ int n;
      if (threadIdx.x == 0) n = 0;
      __syncthreads();
      if (threadIdx.x < 32) atomicAdd(&n, 1); else out[threadIdx.x] = n; }"""
    for seed in SEEDS:
        with pytest.raises(errors.Race):
            run(source, block=64, seed=seed)
