"""The Hopper forward on the interpreter where maxima move, warpgroups take turns, or there is nothing to do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_attention import replace, work

import flashgen as fg
from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.runtime import nvrtc, sass

#: Two tiles of queries by four tiles of keys.
SHAPE = {"q_len": 150, "kv_len": 250, "heads": 2, "kv_heads": 1, "q_stages": 2}

#: A tile of queries by three of keys, of which the last is not full.
FEW = {"q_len": 100, "kv_len": 150}

#: Two tiles of queries of three warpgroups by seven of keys: some of them whole under a mask.
CLIMB = {"q_len": 256, "kv_len": 440, "heads": 2, "kv_heads": 1, "q_stages": 2, "tile": (192, 64)}


def climbing(w, factor):
    """The same work with keys that grow towards the first, which is visited last: scores jump from tile to tile."""
    q, k, v = w.qkv
    growth = torch.linspace(2 * factor, 0.1 * factor, k.shape[2], dtype=torch.float64)[:, None]
    return dataclasses.replace(w, qkv=(q, (k.double() * growth).to(k.dtype), v))


@pytest.mark.sampled("float16-64-80-causal")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "factor", "spec"),
    [
        (*inputs, spec)
        for inputs in (("bfloat16", 64, 2), ("bfloat16", 128, 40), ("float16", 96, 8), ("float16", 64, 80))
        for spec in ("full", "causal")
    ],
)
def test_scores_that_jump_move_the_maxima(spec, dtype, head_dim, factor):
    w = climbing(work(spec, "hopper", dtype=dtype, head_dim=head_dim, **CLIMB), factor)
    assert w.wrong(w.run()) == ()


@pytest.mark.sampled("440-256-bfloat16-64")
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 128)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 440), (440, 256), (300, 300)])
def test_a_window_hides_whole_tiles_of_some_rows(dtype, head_dim, q_len, kv_len):
    shape = {**CLIMB, "q_len": q_len, "kv_len": kv_len}
    w = work("sliding_window", "hopper", dtype=dtype, head_dim=head_dim, **shape)
    w = climbing(dataclasses.replace(w, case=dataclasses.replace(w.case, params={"window": 230})), 8)
    assert w.wrong(w.run()) == ()


@pytest.mark.sampled("bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_query_that_is_no_number_ends(dtype):
    w = work("causal", "hopper", dtype=dtype, head_dim=96, **{**CLIMB, "q_len": 200, "kv_len": 200})
    q, k, v = (x.clone() for x in w.qkv)
    q[:, :, 7] = torch.nan
    result = dataclasses.replace(w, qkv=(q, k, v)).run()
    assert np.isnan(result.o[:, :, 7]).all()
    rest = np.delete(np.arange(q.shape[2]), 7)
    assert np.array_equal(result.o[:, :, rest], w.run().o[:, :, rest])


@pytest.mark.slow
def test_maxima_that_stay_overflow():
    w = climbing(work("full", "hopper", dtype="float16", **SHAPE), 40)
    share, most = replace("SHARE = 0.0625f", "SHARE = 1e30f"), replace("MOST = 0x1p15f", "MOST = 0x1p100f")
    assert w.wrong(w.run(lambda source: share(most(source))))


@pytest.mark.slow
def test_o_and_the_sums_follow_the_maxima():
    w = climbing(work("full", "hopper", dtype="float16", **SHAPE), 40)
    assert w.wrong(w.run(replace("        if (moved) rescale();\n", "")))


@pytest.mark.sampled("0.5-False")
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
    w = work("softcap", "hopper", **FEW)
    q, k, v = w.qkv
    k[..., 100, :] *= 40  # one key's scores pass the cap
    w = dataclasses.replace(w, qkv=(q, k, v))
    assert w.wrong(w.run()) == ()
    assert w.wrong(w.run(replace("(bits & 0x40000000) == 0", "true")))


@pytest.mark.sampled("first += TOGETHER-first += 2 * TOGETHER")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("scale = p.param_cap * LOG2E", "scale = LOG2E"),  # the cap is lost
        ("to_argument = 2.f / SMALL_TANH * p.scale", "to_argument = p.scale"),
        ("first += TOGETHER", "first += 2 * TOGETHER"),  # half of the scores stay products
    ],
)
def test_a_soft_cap_is_in_both_factors(right, wrong):
    w = work("softcap", "hopper", **FEW)
    assert w.wrong(w.run()) == () and w.wrong(w.run(replace(right, wrong)))


@pytest.mark.sampled("q_minus_k = float(query(work, 0) - key(tile, 0))-q_minus_k = 0.f")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("q_minus_k = float(query(work, 0) - key(tile, 0))", "q_minus_k = 0.f"),
        ("float(i / 2 % 2 * 8 - (i / 4 * 8 + i % 2))", "float(-(i / 4 * 8 + i % 2))"),
    ],
)
def test_the_distance_of_each_score_is_that_of_the_first_and_a_constant(right, wrong):
    w = work("alibi", "hopper", **FEW)
    assert w.wrong(w.run()) == () and w.wrong(w.run(replace(right, wrong)))


def drawn(problem, rng):
    return rng.normal(size=(problem.heads, problem.kv_len)).astype(np.float32)


q_minus = fg.tensor("q_minus", dims=("heads", "kv"), dtype="float32", example=drawn)
DISTANCES = {
    "both signs of zero": (lambda s, b, h, q, k: s + fg.minimum(1.0 / (k - q), 5.0), {}),
    "in both orders": (lambda s, b, h, q, k: s - 0.01 * (q - k) + fg.where(k > q, 0.02 * (k - q), 0.0), {}),
    "beside an element of that name": (lambda s, b, h, q, k: s - 0.05 * (q - k) + q_minus[h, k], {}),
    "in rows of packed heads": (lambda s, b, h, q, k: s - 0.05 * (q - k), {"kv_heads": 1, "packed": True}),
    "beside a tanh that is large for some": (lambda s, b, h, q, k: 3.0 * fg.tanh(s / 3.0 + 0.1) - 0.05 * (q - k), {}),
}


@pytest.mark.sampled("in both orders", "in rows of packed heads", "beside a tanh that is large for some")
@pytest.mark.slow
@pytest.mark.parametrize("name", DISTANCES)
def test_scores_by_distance(name):
    function, options = DISTANCES[name]
    w = work(fg.variant().score(function).bind(), "hopper", heads=2, q_len=100, kv_len=130, **options)
    assert w.wrong(w.run()) == ()


TURNS = {
    "no turn is awaited": replace("take_turn() { bar_sync(1 + warpgroup, 256); }", "take_turn() {}"),
    "the first turn is nobody's": replace("if (warpgroup == WARPGROUPS - 1) pass_turn();", ""),
    "a turn passed to itself": replace("warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1", "warpgroup"),
}


def three_warpgroups():
    return work("alibi", "hopper", tile=(192, 64), q_len=200, kv_len=230, q_stages=2)


@pytest.mark.slow
def test_three_warpgroups_take_turns():
    w = three_warpgroups()
    assert w.plan.specialized.ping_pong
    assert w.wrong(w.run()) == ()


@pytest.mark.sampled("a turn passed to itself")
@pytest.mark.slow
@pytest.mark.parametrize("name", TURNS)
def test_turns_that_are_not_kept_are_noticed(name):
    with pytest.raises(errors.Trap):
        three_warpgroups().run(TURNS[name], step_limit=2_000_000)


@pytest.mark.slow
def test_a_block_that_asks_for_more_registers_than_there_are_waits_forever():
    w = three_warpgroups()
    with pytest.raises(errors.Deadlock):
        w.run(replace("CONSUMER_REGISTERS = 160", "CONSUMER_REGISTERS = 168"))


#: A mask, all of whose tiles are visited.
HIDES_NOTHING = fg.variant(lambda b, h, q, k: abs(q - k) >= 0, name="hides_nothing")


@pytest.mark.sampled("full", "hides_nothing")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal", "sliding_window", pytest.param(HIDES_NOTHING, id="hides_nothing")])
def test_queries_without_any_key(spec):
    w = work(spec, "hopper", q_len=140, kv_len=0, q_stages=2)
    result = w.run()
    assert not result.o.any() and (result.lse == -np.inf).all()
    assert result.report.bytes(buffer="q") == 0


@pytest.mark.slow
def test_queries_behind_their_window_see_nothing_and_load_nothing():
    w = work("sliding_window", "hopper", q_len=400, kv_len=60, q_stages=2)
    result = w.run()
    assert w.wrong(result) == ()
    assert not result.o[:, :, 128:].any() and (result.lse[:, :, 128:] == -np.inf).all()
    assert result.report.bytes(buffer="q") == 2 * 128 * 64 * 2  # the first tile of two heads


@pytest.mark.slow
def test_tiles_that_see_nothing_behind_one_that_does():
    """More of them than the ring of work has stages: a block that looked past them all would wait for itself."""
    w = work("causal_bottom_right", "hopper", q_len=700, kv_len=100)
    assert w.wrong(w.run()) == ()


#: Menus of the Hopper forward.
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


@pytest.mark.sampled("causal-192-bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "head_dim", "dtype"), MENUS)
def test_every_kernel_of_a_menu_passes_the_gates(spec, head_dim, dtype):
    for plan in planner.menu(load_spec(spec).bind(), "sm_90a", dtype, head_dim, pipeline="hopper").plans:
        assert sass.check(plan, nvrtc.compile(emit(plan), "sm_90a")) == ()


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [40, 130])
def test_bits_have_no_rows_beyond_the_last_query(q_len):
    """A table of no declared size is read within it; the bits that are made of it have as many rows as queries."""
    table = fg.tensor("table", (None, None), "bool", example=lambda problem, rng: rng.random((140, 140)) > 0.4)
    looked_up = fg.variant(lambda b, h, q, k: table[q, k], name="looked_up")
    w = work(looked_up, "hopper", q_len=q_len, kv_len=q_len, q_stages=2)
    assert "bits" in w.source and w.wrong(w.run()) == ()
