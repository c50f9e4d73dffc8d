"""The Hopper forward on the interpreter where it does without maxima, takes turns, or has nothing to do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_attention import replace, work
from tiers import thinned

from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.members import TrackedRowMax
from flashgen.runtime import nvrtc, sass

#: Two tiles of queries by four tiles of keys.
SHAPE = {"q_len": 150, "kv_len": 250, "heads": 2, "kv_heads": 1, "q_stages": 2}


#: Two tiles of queries of three warpgroups by seven of keys: some of them whole under a mask.
CLIMB = {"q_len": 256, "kv_len": 440, "heads": 2, "kv_heads": 1, "q_stages": 2, "tile": (192, 64)}

#: float16 looks at the maxima of no tile but the first and those that a mask hides some of.
without_watch = replace("constexpr int WARMUP_TILES = 6", "constexpr int WARMUP_TILES = 1")


def climbing(w, factor):
    """The same work with keys that grow towards the first, which is visited last: scores jump from tile to tile."""
    q, k, v = w.qkv
    growth = torch.linspace(2 * factor, 0.1 * factor, k.shape[2], dtype=torch.float64)[:, None]
    return dataclasses.replace(w, qkv=(q, (k.double() * growth).to(k.dtype), v))


def counted(result, opcode):
    """Instructions of a run whose name starts like this."""
    return sum(count for name, count in result.report.instructions.items() if name.startswith(opcode))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "factor", "again"),
    [
        ("bfloat16", 64, 2, False),  # its range is that of float32
        ("bfloat16", 64, 40, True),
        ("bfloat16", 128, 40, True),
        ("float16", 96, 8, False),  # P follows in registers, but for what is infinite
        ("float16", 96, 80, True),
    ],
)
def test_scores_that_jump_move_the_offsets(spec, dtype, head_dim, factor, again):
    w = climbing(work(spec, "hopper", dtype=dtype, head_dim=head_dim, **CLIMB), factor)
    assert w.plan.specialized.softmax.without_row_max
    result = w.run(without_watch if dtype == "float16" else None)
    assert w.wrong(result) == ()
    # S is computed once more by the warps that need it.
    assert (counted(result, "mma.") > 0) == again


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 8, 40])
def test_short_float16_has_less_room(factor):
    w = climbing(work("full", "hopper", dtype="float16", **SHAPE), factor)
    assert w.plan.specialized.softmax.limit == 64
    result = w.run()
    assert w.wrong(result) == ()
    assert counted(result, "mma.") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit", ["      rescale();\n      settle();\n    }\n    release", "    multiply_rows(s, factor);\n"]
)
def test_what_follows_large_probabilities_of_float16(edit):
    """O and the sums where S is computed again; P where it follows itself."""
    w = climbing(work("full", "hopper", dtype="float16", head_dim=96, **CLIMB), 80 if "release" in edit else 8)
    kept = "      settle();\n    }\n    release" if "release" in edit else ""
    broken = replace(edit, kept)
    assert w.wrong(w.run(lambda source: broken(without_watch(source))))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 128)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 440), (440, 256), (300, 300)])
def test_a_window_hides_whole_tiles_of_some_rows(dtype, head_dim, q_len, kv_len):
    shape = {**CLIMB, "q_len": q_len, "kv_len": kv_len}
    w = work("sliding_window", "hopper", dtype=dtype, head_dim=head_dim, **shape)
    w = climbing(dataclasses.replace(w, case=dataclasses.replace(w.case, params={"window": 230})), 8)
    assert w.plan.specialized.softmax.without_row_max
    assert w.wrong(w.run(without_watch if dtype == "float16" else None)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_query_that_is_no_number_ends(dtype):
    w = work("causal", "hopper", dtype=dtype, head_dim=96, **CLIMB)
    q, k, v = (x.clone() for x in w.qkv)
    q[:, :, 7] = torch.nan
    result = dataclasses.replace(w, qkv=(q, k, v)).run()
    assert np.isnan(result.o[:, :, 7]).all()
    rest = np.delete(np.arange(q.shape[2]), 7)
    assert np.array_equal(result.o[:, :, rest], w.run().o[:, :, rest])


def test_without_the_guard_scores_that_jump_overflow():
    w = climbing(work("full", "hopper", dtype="float16", **SHAPE), 40)
    result = w.run(replace("constexpr float SUM_LIMIT = 64.0f", "constexpr float SUM_LIMIT = 1e38f"))
    assert w.wrong(result)


def test_the_guard_needs_the_offsets_to_follow():
    w = climbing(work("full", "hopper", dtype="float16", **SHAPE), 40)
    assert w.wrong(w.run(replace("      rescale();\n", "")))


def test_what_keeps_its_maxima():
    """Scores, masks that are no band, wide heads, of float16 short ones under a mask, and tiles for few keys."""
    for spec in ("alibi", "softcap", "document", "sink_window"):
        assert work(spec, "hopper").plan.specialized.softmax == TrackedRowMax()
    assert work("causal", "hopper", head_dim=136).plan.specialized.softmax == TrackedRowMax()
    assert work("causal", "hopper", dtype="float16").plan.specialized.softmax == TrackedRowMax()
    assert work("causal", "hopper", head_dim=96).plan.specialized.softmax == TrackedRowMax()
    assert work("causal", "hopper", head_dim=112).plan.specialized.softmax.without_row_max
    assert work("causal", "hopper", tile=(192, 64), q_stages=2).plan.specialized.softmax.without_row_max


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "near"), [(30.0, True), (0.5, False)])
def test_tanh_of_what_is_small_takes_no_special_unit(cap, near):
    w = work("softcap", "hopper", dtype="float16")
    w = dataclasses.replace(w, case=dataclasses.replace(w.case, params={"cap": cap}))
    result = w.run()
    assert w.wrong(result) == ()
    specials = sum(n for opcode, n in result.report.instructions.items() if opcode.startswith(("ex2", "rcp")))
    exponentials = 2 * (2 * 128) * (4 * 64) // 32  # of warps: 2 heads, 2 tiles of queries, 4 of keys
    assert (specials < 1.5 * exponentials) == near


@pytest.mark.slow
def test_where_one_argument_of_tanh_is_large_all_are_computed_in_full():
    w = work("softcap", "hopper")
    q, k, v = w.qkv
    k[..., 100, :] *= 40  # one key's scores pass 0.75 of the cap
    w = dataclasses.replace(w, qkv=(q, k, v))
    assert w.wrong(w.run()) == ()
    limit = "constexpr float SMALL_TANH = 0.75f"
    assert w.wrong(w.run(replace(limit, "constexpr float SMALL_TANH = 1e9f")))


TURNS = {
    "no turn is awaited": replace("take_turn() { bar_sync(1 + warpgroup, 256); }", "take_turn() {}"),
    "the first turn is nobody's": replace("if (warpgroup == WARPGROUPS - 1) pass_turn();", ""),
    "a turn passed to itself": replace("warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1", "warpgroup"),
}


def three_warpgroups():
    return work("alibi", "hopper", tile=(192, 64), q_len=200, kv_len=230, q_stages=2)


def test_three_warpgroups_take_turns():
    w = three_warpgroups()
    assert w.plan.specialized.ping_pong
    assert w.wrong(w.run()) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", TURNS)
def test_turns_that_are_not_kept_are_noticed(name):
    with pytest.raises(errors.Trap):
        three_warpgroups().run(TURNS[name], step_limit=2_000_000)


def test_a_block_that_asks_for_more_registers_than_there_are_waits_forever():
    w = three_warpgroups()
    with pytest.raises(errors.Deadlock):
        w.run(replace("CONSUMER_REGISTERS = 160", "CONSUMER_REGISTERS = 168"))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal", "sliding_window"])
def test_queries_without_any_key(spec):
    w = work(spec, "hopper", q_len=140, kv_len=0, q_stages=2)
    result = w.run()
    assert not result.o.any() and (result.lse == -np.inf).all()
    assert result.report.bytes(buffer="q") == 0


def test_queries_behind_their_window_see_nothing_and_load_nothing():
    w = work("sliding_window", "hopper", q_len=400, kv_len=60, q_stages=2)
    result = w.run()
    assert w.wrong(result) == ()
    assert not result.o[:, :, 128:].any() and (result.lse[:, :, 128:] == -np.inf).all()
    assert result.report.bytes(buffer="q") == 2 * 128 * 64 * 2  # the first tile of two heads


#: Menus of the Hopper forward; CI compiles the first three.
MENUS = (
    ("full", 64, "float16"),
    ("document", 64, "bfloat16"),
    ("causal", 192, "bfloat16"),
    ("causal", 64, "bfloat16"),
    ("causal", 40, "bfloat16"),
    ("full", 96, "bfloat16"),
    ("full", 256, "bfloat16"),
    ("alibi", 256, "float16"),
    ("relative_bias", 256, "bfloat16"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "head_dim", "dtype"),
    thinned(MENUS, kept=MENUS[:3], sibling="test_every_kernel_of_a_menu_passes_the_gates"),
)
def test_every_kernel_of_a_menu_passes_the_gates(spec, head_dim, dtype):
    for plan in planner.menu(load_spec(spec).bind(), "sm_90a", dtype, head_dim, pipeline="hopper").plans:
        assert sass.check(plan, nvrtc.compile(emit(plan), "sm_90a")) == ()
