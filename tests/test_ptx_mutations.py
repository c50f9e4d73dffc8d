"""Every trap has a mutation of an emitted kernel that fires it; test_ptx_attention.py shows that none fires without.

A mutation is one edit of the emitted CUDA.  What must notice it: a trap, a bank conflict, or the result.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
from ptx_attention import replace, work

from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.request import KernelRequest

RESULT, CONFLICTS = "a wrong result", "bank conflicts"

AMPERE = {
    "wrong swizzle": (
        replace("return &element[row][8 * (chunk ^ row / (8 / GROUP) % GROUP)];", "return &element[row][8 * chunk];"),
        {RESULT, CONFLICTS},
    ),
    "no swizzle on either side": (
        lambda text: replace("* (chunk ^ row / (8 / GROUP) % GROUP)", "* chunk")(
            replace("(address ^ 16 * (chunks % GROUP)) +", "(address + 16 * (chunks % GROUP)) +")(text)
        ),
        {CONFLICTS},
    ),
    "swapped fragment index": (
        replace("(s[m][2 * n], q[d][m], b[0], b[1]);", "(s[m][2 * n], q[d][m], b[1], b[0]);"),
        {RESULT},
    ),
    "p as the B operand has it": (
        replace("(&pair)[4] = p[m][2 * n + i / 2];", "(&pair)[4] = p[m][2 * n + i % 2];"),
        {RESULT},
    ),
    "one key row too many": (
        replace("row < rows && 8 * chunk < COLUMNS", "row <= rows && 8 * chunk < COLUMNS"),
        {errors.OutOfBounds},
    ),
    "one key tile too few": (
        replace("tile = min(tile, k_last / TILE_KV);", "tile = min(tile, k_last / TILE_KV - 1);"),
        {RESULT},
    ),
    "dropped cp.async wait": (
        replace("cp_async_wait_group<STAGES - 2>();", "cp_async_wait_group<STAGES>();"),
        {errors.NotComplete},
    ),
    "dropped commit": (
        replace('asm volatile("cp.async.commit_group;" ::: "memory");', ""),
        {errors.NotComplete, errors.UnfinishedCopy},
    ),
    "dropped block barrier": (
        replace("    __syncthreads();  // every warp's", "    // every warp's"),
        {errors.Race, errors.NotComplete},
    ),
    "dropped warp barrier": (replace("  __syncwarp();\n", ""), {errors.Race}),
    "tail not zeroed": (
        replace(
            "cp_async_16(address, source, row < rows && 8 * chunk < COLUMNS);", "cp_async_16(address, source, true);"
        ),
        {errors.OutOfBounds},
    ),
    "half a tile loaded": (
        replace("step < ROWS; step += STEP", "step < ROWS / 2; step += STEP"),
        {errors.Uninitialised},
    ),
    "misaligned rows": (
        replace("source += first * row_stride + 8 * chunk;", "source += first * row_stride + 8 * chunk + 1;"),
        {errors.Misaligned},
    ),
    "a row of o twice": (
        replace("(p.q_tiles - 1 - block % p.q_tiles) * TILE_Q", "block % p.q_tiles / 2 * TILE_Q"),
        {errors.Race},
    ),
    "a barrier that one warp skips": (
        replace(
            "    __syncthreads();  // every warp's", "    if (threadIdx.x >= 32) __syncthreads();  // every warp's"
        ),
        {errors.Deadlock, errors.BarrierMisuse, errors.Race, errors.NotComplete},
    ),
    "a shuffle that part of the warp skips": (
        replace("x += __shfl_xor_sync(~0u, x, 1);", "if (threadIdx.x % 32 < 30) x += __shfl_xor_sync(~0u, x, 1);"),
        {errors.Diverged},
    ),
}

RELEASE_V = "    release(shared.v_pipe, v_ring);\n"
AWAIT_O = "    wgmma_wait_group<0>();\n    pin(o);\n"

HOPPER = {
    "wrong swizzle": (
        replace("SWIZZLE_128B = 1ull << 62", "SWIZZLE_128B = 2ull << 62"),
        {RESULT, errors.NotComplete},
    ),
    "wrong step of v": (replace("advance_bytes(v, n * 128)", "advance_bytes(v, n * 64)"), {RESULT}),
    "swapped fragment index": (
        replace("(s[2 * i], s[2 * i + 1]);", "(s[2 * i + 1], s[2 * i]);"),
        {RESULT},
    ),
    "one key tile too few": (
        replace("tile = min(tile, k_last / TILE_KV);", "tile = min(tile, k_last / TILE_KV - 1);"),
        {RESULT},
    ),
    "a key row further": (
        replace("map_k, full, d, tile * TILE_KV, kv_head, b);", "map_k, full, d, tile * TILE_KV + 1, kv_head, b);"),
        {RESULT},
    ),
    "wrong mbarrier phase": (
        replace("(pipe.full[at.stage()], at.parity());", "(pipe.full[at.stage()], at.parity() ^ 1);"),
        {errors.NotComplete, errors.Uninitialised},
    ),
    "wrong phase of the empty barriers": (
        replace("at.parity() ^ 1);", "at.parity());"),
        {errors.Deadlock},
    ),
    "missing expect_tx": (
        replace("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "mbarrier.arrive.shared::cta.b64 _, [%0];"),
        {errors.NotComplete},
    ),
    "too few bytes expected": (
        replace("expect_tx(full, sizeof(VTile));", "expect_tx(full, sizeof(VTile) / 2);"),
        {errors.NotComplete, errors.Deadlock},
    ),
    "missing wgmma wait": (replace("    wgmma_wait_group<1>();\n", ""), {errors.NotComplete}),
    "missing wgmma fence": (
        replace('{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }', "{}"),
        {errors.MissingFence},
    ),
    "missing fence of the mbarriers": (replace("    fence_mbarrier_init();\n", ""), {errors.MissingFence}),
    "early release of v": (
        replace(AWAIT_O + RELEASE_V, RELEASE_V + AWAIT_O),
        {errors.Race},
    ),
    "a release too many": (
        replace(AWAIT_O + RELEASE_V, AWAIT_O + RELEASE_V + RELEASE_V),
        {errors.BarrierMisuse, errors.Race, errors.NotComplete, errors.Deadlock},
    ),
    "dropped named barrier": (
        replace("take_turn() { bar_sync(1 + warpgroup, 256); }", "take_turn() {}"),
        {errors.BarrierMisuse},
    ),
    "dropped arrival at a named barrier": (
        replace("if (warpgroup == WARPGROUPS - 1) pass_turn();", ""),
        {errors.Deadlock},
    ),
    "registers beyond the pool": (
        replace("CONSUMER_REGISTERS = 232", "CONSUMER_REGISTERS = 240"),
        {errors.Deadlock},
    ),
    "dropped block barrier": (replace("  __syncthreads();\n", ""), {errors.BarrierMisuse}),
    "unaligned destination": (
        replace("load_4d(shared.v[v_ring.stage()][d / 64],", "load_4d((char*)shared.v[v_ring.stage()][d / 64] + 16,"),
        {errors.Misaligned, errors.OutOfBounds, errors.Race},
    ),
}


# With two stages of Q: O leaves from the room of Q by TMA.
STAGED = {
    "missing proxy fence": (
        replace("    fence_proxy_async();\n    __syncwarp();", "    __syncwarp();"),
        {errors.MissingFence},
    ),
    "dropped barrier before o takes the room of q": (
        replace("    bar_sync(O_BARRIER + warpgroup, 128);\n", ""),
        {errors.Race},
    ),
    "room given back while it is stored": (replace("        bulk_wait_group_read<0>();\n", ""), {errors.Race}),
    "o announced before it is written": (
        lambda text: replace(
            "    const Ring<Q_STAGES> at = {q_ring.passed - 1};\n",
            "    const Ring<Q_STAGES> at = {q_ring.passed - 1};\n    if (threadIdx.x % 32 == 0)"
            " mbarrier_arrive(shared.o_full[at.stage()][warpgroup]);\n",
        )(replace("    if (lane == 0) mbarrier_arrive(shared.o_full[at.stage()][warpgroup]);\n", "")(text)),
        {errors.Uninitialised, errors.Race, errors.MissingFence, errors.NotComplete},
    ),
    "wrong swizzle of o": (
        replace("(d % 64 / 8 + lane / 16) ^ r % 8;", "d % 64 / 8 + lane / 16;"),
        {RESULT, CONFLICTS},
    ),
    "o one row further": (
        replace(
            "d, work.q_tile * TILE_Q + w * 64, work.h, work.b);\n        bulk_commit_group();",
            "d, work.q_tile * TILE_Q + w * 64 + 1, work.h, work.b);\n        bulk_commit_group();",
        ),
        {RESULT, errors.Race},
    ),
}


@lru_cache(maxsize=3)
def subject(pipeline):
    if pipeline == "staged":
        return work("causal_bottom_right", "hopper", q_len=150, kv_len=230, heads=4, kv_heads=2, q_stages=2)
    w = work("causal_bottom_right", pipeline, q_len=150, kv_len=230)
    if pipeline == "hopper":  # with turns, whatever the planner thinks of them at this tile
        specialized = dataclasses.replace(w.plan.specialized, ping_pong=True)
        c = hopper.Candidate(tile=w.plan.tile, stages=w.plan.stages, q_stages=w.plan.q_stages)
        request = KernelRequest.of(w.variant, w.plan.arch, w.plan.dtype, w.plan.head_dim)
        program = hopper.program(c, request, ping_pong=True)
        plan = dataclasses.replace(w.plan, specialized=specialized, program=program)
        w = dataclasses.replace(w, plan=plan, source=emit(plan))
    return w


def noticed(pipeline, edit, seed=None):
    """What notices an edit: the class of a trap, or the names of what is off."""
    w = subject(pipeline)
    try:
        result = w.run(edit, seed=seed, step_limit=2_000_000, sms=1 if pipeline == "staged" else 2)
    except errors.Trap as trap:
        assert trap.line > 0 or isinstance(trap, errors.Deadlock), trap
        return {type(trap)}
    return ({RESULT} if w.wrong(result) else set()) | ({CONFLICTS} if result.report.conflicts else set())


@pytest.mark.sampled(
    "one key row too many",
    "dropped cp.async wait",
    "dropped commit",
    "half a tile loaded",
    "misaligned rows",
    "a barrier that one warp skips",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", AMPERE)
def test_ampere(name):
    edit, expected = AMPERE[name]
    found = noticed("ampere", edit)
    assert found and found <= expected, found


@pytest.mark.sampled(
    "wrong mbarrier phase",
    "missing expect_tx",
    "dropped named barrier",
    "unaligned destination",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER)
def test_hopper(name):
    edit, expected = HOPPER[name]
    found = noticed("hopper", edit)
    assert found and found <= expected, found


@pytest.mark.sampled("dropped barrier before o takes the room of q")
@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_hopper_with_staged_output(name):
    edit, expected = STAGED[name]
    found = noticed("staged", edit)
    assert found and found <= expected, found


@pytest.mark.sampled("ampere", "hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["ampere", "hopper", "staged"])
def test_unchanged_kernels_are_silent(pipeline):
    assert noticed(pipeline, None) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "name"),
    [
        *[("ampere", n) for n in ("dropped cp.async wait", "dropped block barrier", "one key row too many")],
        *[
            ("hopper", n)
            for n in ("wrong mbarrier phase", "missing expect_tx", "early release of v", "missing wgmma wait")
        ],
    ],
)
def test_random_order_notices_too(pipeline, name):
    edit, _ = {"ampere": AMPERE, "hopper": HOPPER}[pipeline][name]
    assert noticed(pipeline, edit, seed=1)
