"""Where a tile of queries ends: queries of the next one come under its keys, or O is stored before that begins."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_attention import replace, work

from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.layout import DENSE, Paged, Varlen
from flashgen.planning.members import EndsBeforeNext, EndsBesideNext
from flashgen.planning.problem import Problem


def several(spec="full", **shape):
    """Three tiles of queries for each of two heads, which one block computes."""
    return work(spec, "hopper", **{"q_len": 300, "kv_len": 150, **shape})


def run(w, edit=None, **options):
    return w.run(edit, sms=1, step_limit=4_000_000, **options)


def same(found, expected):
    return np.array_equal(found.o, expected.o) and np.array_equal(found.lse, expected.lse)


IN_TURN = replace("        load_q_ahead();\n", "")
AWAIT_PV, STORE = "      await_pv();\n", "      store(state);\n"


@pytest.mark.slow
def test_when_queries_come_changes_no_bit():
    w = several(q_stages=2)
    assert w.plan.loads_q_ahead
    found = run(w)
    assert w.wrong(found) == ()
    assert same(run(w, IN_TURN), found)
    assert same(run(w, seed=0), found) and same(run(w, seed=1), found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [{"kv_len": 40}, {"q_len": 100, "batch": 3}, {"q_len": 40, "heads": 4, "packed": True, "head_dim": 128}],
    ids=["one tile of keys", "one tile of queries", "heads that share keys"],
)
def test_queries_ahead_of_problems_of_any_shape(shape):
    w = several(q_stages=2, **shape)
    assert w.plan.loads_q_ahead and w.wrong(run(w, seed=2)) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        replace("    load_q(next);\n    q_ahead = true;\n", "    load_q(next);\n"),
        replace("    if (!q_ahead) load_q(work);\n    q_ahead = false;\n", "    if (!q_ahead) load_q(work);\n"),
        replace("    load_q(next);\n", "    load_q({next.q_tile, next.h, next.b - 1, next.visible});\n"),
    ],
    ids=["queries that come twice", "queries that never come", "queries of another sequence"],
)
def test_queries_ahead_are_needed_once(edit):
    w = several(q_stages=2, batch=2, q_len=100)
    try:
        found = run(w, edit)
    except errors.Trap:
        return
    assert w.wrong(found) != ()


@pytest.mark.parametrize(
    ("spec", "layout", "ahead"),
    [
        ("full", DENSE, True),
        ("softcap", DENSE, True),
        ("causal", DENSE, False),  # tiles come from a counter
        ("full", Varlen(), False),
        ("full", Paged(), False),
    ],
    ids=str,
)
def test_whose_queries_come_ahead(spec, layout, ahead):
    plan = planner.menu(load_spec(spec).bind(), "sm_90a", "bfloat16", 128, 128, layout=layout).plans[0]
    assert plan.q_stages == 2 and plan.loads_q_ahead is ahead


def ending(w, ends):
    """The same work where tiles of queries end so."""
    return w.with_members(ends=ends)


@pytest.mark.sampled("1-causal", "2-full")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal", "sliding_window", "softcap"])
@pytest.mark.parametrize("q_stages", [1, 2])
def test_where_a_tile_ends_changes_no_bit(spec, q_stages):
    w = several(spec, q_stages=q_stages)
    before, beside = (run(ending(w, ends), seed=3) for ends in (EndsBeforeNext(), EndsBesideNext()))
    assert w.wrong(before) == () and same(before, beside)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "noticed"),
    [
        (replace(AWAIT_PV + STORE, STORE + AWAIT_PV), errors.NotComplete),
        (replace("      release(shared.q_pipe[warpgroup], q_ring);\n", ""), errors.Deadlock),
    ],
    ids=["O before its last product", "queries that are kept"],
)
def test_what_ends_a_tile_is_needed(edit, noticed):
    w = several(q_stages=1)
    assert w.plan.specialized.ends == EndsBeforeNext()
    with pytest.raises(noticed):
        run(w, edit)


@pytest.mark.parametrize(
    ("spec", "head_dim", "q_len", "before"),
    [
        ("causal", 64, 512, True),
        ("causal", 64, 4096, False),
        ("full", 64, 512, False),
        ("causal", 128, 512, False),
        ("full", 256, 512, True),
        ("causal", 256, 8192, True),
    ],
)
def test_where_tiles_of_the_menu_end(spec, head_dim, q_len, before):
    shape = {"batch": 16384 // q_len, "heads": 16, "kv_heads": 16, "q_len": q_len, "kv_len": q_len}
    problem = Problem(**shape, head_dim=head_dim, v_head_dim=head_dim, dtype="bfloat16")
    menu = planner.menu(load_spec(spec).bind(), "sm_90a", "bfloat16", head_dim, head_dim)
    plan = planner.choose(menu, problem, sms=132)
    assert (plan.specialized.ends == EndsBeforeNext()) is before
