"""The Hopper forward where heads that share keys share tiles: planned where it pays, and right on the interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from ptx_attention import replace, work
from test_ptx_attention import check

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.bench.cells import FORWARD
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.members import QUERIES
from flashgen.planning.problem import Problem
from flashgen.planning.profile import profile
from flashgen.planning.traffic import predict
from flashgen.runtime import nvrtc, sass, tiles

SMS = 132


def few(q_len, group, **shape):
    """A packed kernel on few queries of heads that share keys."""
    shape = {"heads": 2 * group, "kv_heads": 2, "kv_len": 150, **shape}
    spec = shape.pop("spec", "causal_bottom_right")
    return work(spec, "hopper", packed=True, q_len=q_len, **shape)


# ---------------------------------------------------------------- the kernel
@pytest.mark.sampled("1-2-shape0", "40-4-shape6", "2-128-shape8", "70-3-shape9")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_len", "group", "shape"),
    [
        (1, 2, {}),
        (1, 4, {"q_stages": 2}),
        (3, 6, {"batch": 2}),
        (3, 8, {"q_stages": 2, "batch": 2}),
        (16, 4, {"head_dim": 128}),
        (16, 8, {"dtype": "float16", "head_dim": 72, "v_head_dim": 40}),
        (40, 4, {"q_stages": 2}),
        (40, 8, {"q_stages": 2, "head_dim": 40}),
        (2, 128, {"kv_heads": 1, "heads": 128}),
        (70, 3, {}),
        (30, 8, {"tile": (192, 64)}),
    ],
)
def test_few_queries(q_len, group, shape):
    w = few(q_len, group, **shape)
    assert w.plan.pack(w.problem.group) == {2: 2, 4: 4, 6: 2, 8: 8, 128: 64, 3: 1}[group]
    report = check(w).report
    predicted = predict(w.plan, w.problem, w.case)
    assert report.bytes(buffer="k") == predicted.tiles.visited_columns * w.problem.head_dim * 2


@pytest.mark.sampled("2-full", "2-sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_stages", "spec"),
    [
        (q_stages, spec)
        for q_stages in (1, 2)
        for spec in ("full", "sliding_window", "document", "softcap", "blocks", "packed_softcap")
    ],
)
def test_variants(spec, q_stages):
    check(few(40, 4, spec=spec, q_stages=q_stages, kv_len=200 if spec == "full" else 130))


@pytest.mark.slow
def test_heads_that_share_keys_load_them_once():
    shape = {"q_len": 4, "heads": 16, "kv_heads": 2, "kv_len": 150}
    packed, alone = (work("full", "hopper", packed=x, **shape) for x in (True, False))
    keys = [w.run().report.bytes(buffer="k") for w in (packed, alone)]
    assert keys == [2 * 150 * 64 * 2, 16 * 150 * 64 * 2]
    of_packs, of_heads = (predict(w.plan, w.problem, w.case).tiles for w in (packed, alone))
    assert (of_packs.total, of_heads.total) == (2 * 3, 16 * 3)
    assert of_packs.visible == of_heads.visible and of_packs.visited_elements == of_heads.visited_elements


@pytest.mark.slow
def test_rows_that_see_nothing():
    w = few(40, 4, spec="causal_bottom_right", kv_len=10, q_stages=2)
    result = w.run()
    assert w.wrong(result) == ()
    assert not result.o[:, :, :30].any() and (result.lse[:, :, :30] == -np.inf).all()
    nothing = few(40, 4, kv_len=0).run()
    assert not nothing.o.any() and (nothing.lse == -np.inf).all()


@pytest.mark.sampled("0")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_the_same_bits(seed):
    w = few(40, 4, q_stages=1 + seed % 2, batch=2)
    lockstep, result = w.run(), w.run(seed=seed)
    np.testing.assert_array_equal(result.o, lockstep.o)
    np.testing.assert_array_equal(result.lse, lockstep.lse)


WRONG = "a wrong result"
MUTATIONS = {
    "the query of a row taken for its head": (
        replace("(line & (1 << p.pack_log2) - 1)", "(line >> 6 - p.pack_log2)"),
        {WRONG, errors.Race, errors.OutOfBounds},
    ),
    "a mask of rows as if they were queries": (
        replace("(work.q_tile * TILE_Q + row + i / 2 % 2 * 8) >> p.pack_log2", "work.q_tile * TILE_Q + row"),
        {WRONG},
    ),
    "the second warpgroup at the first one's queries": (replace("first + w * step", "first"), {WRONG}),
    "the heads of the next pack": (replace("map_q, full, d, work.h,", "map_q, full, d, work.h + 1,"), {WRONG}),
    "a tile of as many queries as rows": (
        replace("q_first = work.q_tile * (TILE_Q >> p.pack_log2)", "q_first = work.q_tile * TILE_Q"),
        {WRONG},
    ),
    "packs counted as heads": (
        replace("all = p.q_tiles * p.packs * p.batch", "all = p.q_tiles * p.heads * p.batch"),
        {WRONG, errors.Race, errors.OutOfBounds, errors.Trap},
    ),
    "rows beyond the last query stored": (
        replace("line + 8 * r < lines()", "true", 2),
        {errors.OutOfBounds, errors.Race, WRONG},
    ),
}


@pytest.mark.sampled("the query of a row taken for its head")
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    edit, allowed = MUTATIONS[name]
    w = few(45, 4, spec="sliding_window", q_stages=1)
    try:
        noticed = WRONG if w.wrong(w.run(edit, step_limit=4_000_000)) else None
    except errors.Trap as trap:
        noticed = type(trap)
    assert noticed == WRONG in allowed or (noticed and any(issubclass(noticed, x) for x in allowed if x != WRONG))


# ---------------------------------------------------------------- the plan
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("spec", ["full", "causal_bottom_right", "sliding_window", "document", "chunked", "butterfly"])
@pytest.mark.parametrize(("q_len", "group"), [(1, 8), (3, 6), (40, 4), (150, 2), (0, 4)])
def test_the_walk_moves_what_is_predicted(spec, q_len, group):
    w, variant = few(7, group, batch=2, spec=spec), load_spec(spec).bind()
    problem = w.problem._replace(q_len=q_len)
    case = dataclasses.replace(w.case, sizes=problem.sizes())
    plan = dataclasses.replace(w.plan, variant=variant)
    case = dataclasses.replace(case, params=variant.values({}))
    p = {"head_dim": 64, "v_head_dim": 64, "dtype": "bfloat16"}
    walked, predicted = tiles.count(plan, analyse(variant), case, **p), predict(plan, problem, case)
    assert (walked.read_bytes, walked.write_bytes) == (predicted.hbm.read_bytes, predicted.hbm.write_bytes)
    for name in ("total", "empty", "partial", "full", "visible"):
        assert getattr(walked, name) == getattr(predicted.tiles, name)
    assert walked.elements == predicted.tiles.visited_elements
    q, k, v = (x.double().numpy() for x in w.qkv)
    q = np.resize(q, (2, problem.heads, q_len, 64))
    single = dataclasses.replace(plan, rows=QUERIES)
    both = [tiles.walk(x, analyse(variant), case, q, k, v, scale=0.125, dtype="float64") for x in (plan, single)]
    np.testing.assert_allclose(both[0].o, both[1].o, atol=1e-12)
    np.testing.assert_allclose(both[0].lse, both[1].lse, atol=1e-12)
    assert both[0].traffic.k <= both[1].traffic.k


def chosen(spec, head_dim, batch, heads, kv_heads, q_len, kv_len, dtype="bfloat16"):
    menu = planner.menu(load_spec(spec).bind(), "sm_90a", dtype, head_dim)
    dims = {"head_dim": head_dim, "v_head_dim": head_dim, "dtype": dtype}
    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    return planner.choose(menu, Problem(**shape, **dims), SMS)


#: A menu whose tiles leave no registers to pack heads, at the head dims of the tests here.
UNPACKED = {("document", 256)}


@pytest.mark.parametrize("spec", ["full", "causal_bottom_right", "sliding_window", "document"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_few_queries_of_many_heads_are_packed(spec, head_dim, kv_heads, q_len):
    rows = q_len * 32 // kv_heads
    if (spec, head_dim) in UNPACKED and rows > 64:
        pytest.skip("queries of two rows leave registers for fewer keys in a tile, whose sums have other bits")
    plan = chosen(spec, head_dim, 16, 32, kv_heads, q_len, 8192)
    assert plan.packed and plan.tile.q == (64 if rows <= 64 else 128)
    assert plan.pack(32 // kv_heads) == 32 // kv_heads


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("full", (16, 32, 32, 1, 8192)),  # no heads share keys
        ("alibi", (16, 32, 8, 1, 8192)),  # the score tells heads apart
        ("causal_bottom_right", (1, 32, 8, 1, 8192)),  # an SM for each head
        ("full", (16, 32, 8, 384, 8192)),  # tiles are full, of 128 and of 192 queries
        ("full", (16, 33, 11, 1, 8192)),  # 3 is no power of two
    ],
)
def test_nothing_is_packed_where_that_saves_no_tiles(spec, shape):
    assert not chosen(spec, 128, *shape).packed


def test_no_benchmark_cell_of_equal_lengths_is_packed():
    for cell in FORWARD["hopper"]:
        p = cell.problem
        menu = planner.menu(cell.variant().bind(), "sm_90a", p.dtype, p.head_dim, p.v_head_dim)
        assert planner.choose(menu, p, SMS).packed == (p.q_len < p.kv_len)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("spec", ["full", "causal", "document", "softcap", "relative_bias"])
def test_a_menu_has_at_most_one_packed_form_and_a_command_names_it(spec, head_dim):
    variant = load_spec(spec).bind()
    menu = planner.menu(variant, "sm_90a", "bfloat16", head_dim)
    beside = tuple(dict.fromkeys(plan for plan in (menu.small, menu.packed, *menu.few) if plan is not None))
    if profile(variant).uses_head:
        assert menu.packed is None and menu.few == (menu.small,) and menu.forms == (*menu.plans, *beside)
        with pytest.raises(PlanError, match="tells heads apart, which then share no tile\n  nearest: packed=False"):
            planner.menu(variant, "sm_90a", "bfloat16", head_dim, packed=True)
        return
    plan = menu.packed
    assert (plan is None) == ((spec, head_dim) in UNPACKED)
    if plan is None:
        assert menu.forms == (*menu.plans, *beside)
        return
    assert plan.order_of_sums == menu.plans[0].order_of_sums
    assert menu.forms == (*menu.plans, *beside) and not any(p.packed for p in menu.plans)
    tile = (plan.tile.q, plan.tile.kv)
    for fixed in ({}, {"tile": tile, "stages": plan.stages, "q_stages": plan.q_stages}):
        assert planner.menu(variant, "sm_90a", "bfloat16", head_dim, packed=True, **fixed).plans == (plan,)
    assert emit(plan).partition("\n\n")[0].endswith("--packed")


def test_what_packs_no_heads_says_so():
    full = load_spec("full")
    with pytest.raises(PlanError, match="nearest: packed=False"):
        fg.plan(full, arch="sm_90a", packed=True, dropout=True)
    (reason,) = fg.supports(full, arch="sm_90a", packed=True, backward=True)
    assert "packed is of a forward" in reason.limit


def test_a_tile_without_registers_for_two_queries_is_not_packed():
    """With fewer keys it would be: the bits of its rows would show it."""
    asked = (load_spec("log_distance").bind(), "sm_90a", "bfloat16", 256)
    found = planner.menu(*asked)
    alone = found.plans[0]
    assert found.packed is None
    with pytest.raises(PlanError, match="registers to pack heads"):
        planner.menu(*asked, tile=(alone.tile.q, alone.tile.kv), packed=True)


def test_a_plan_says_what_a_tile_holds():
    w = work("full", "hopper", packed=True, q_len=5, heads=8, kv_heads=2)
    table = dict(predict(w.plan, w.problem, w.case).tables()[0].rows)
    held = "a tile holds 32 queries of 4 heads that share keys"
    assert table["packed"] == f"{held}: 2 tiles of queries, where one head a tile makes 8"
    assert predict(w.plan, w.problem, w.case).as_json()["pack"] == 4


@pytest.mark.sampled("full-64")
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "head_dim"), [("full", 64), ("causal_bottom_right", 128), ("softcap", 256)])
def test_packed_kernels_pass_the_gates(spec, head_dim):
    plan = planner.menu(load_spec(spec).bind(), "sm_90a", "bfloat16", head_dim).packed
    assert sass.check(plan, nvrtc.compile(emit(plan), "sm_90a")) == ()


def test_one_text_serves_every_group():
    w = few(5, 4)
    two = dataclasses.replace(w, problem=w.problem._replace(heads=4))
    assert w.plan.pack(two.problem.group) == 2 and emit(w.plan) == w.source
