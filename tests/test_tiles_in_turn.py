"""Blocks of a backward that have tiles of keys one after another: executed, in any order, and what they wait for."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_attention import replace
from test_ptx_backward import STEPS, Backward

from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.backward import clear_distance
from flashgen.planning.members import OneTile, TilesInTurn

#: Five tiles of keys for two blocks, the last of them in part.
SHAPE = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 300, "kv_len": 600, "head_dim": 64}


def backward(**shape):
    found = Backward("full", pipeline="hopper", **{**SHAPE, **shape})
    assert found.plan.backward.tiles == TilesInTurn()
    return found


@pytest.mark.parametrize("seed", [None, 0])
def test_gradients(seed):
    b = backward()
    result = b.run(sms=2, seed=seed)
    assert b.wrong(result) == []
    assert result.reports["attention_backward"].conflicts == []


def test_as_many_blocks_as_tiles():
    """Each has one, and the gradients of keys have the bits of any other number of blocks."""
    b = backward(q_len=130, kv_len=260)
    few, many = (b.run(sms=sms) for sms in (2, 8))
    assert np.array_equal(few.dk, many.dk) and np.array_equal(few.dv, many.dv)


def test_many_heads_for_few_blocks():
    """Whatever a simulation is asked to clear ahead: none of them may wait for another."""
    b = backward(batch=2, heads=4, kv_heads=4, q_len=64, kv_len=256)
    result = b.run(sms=3, seed=1)
    assert b.wrong(result) == []


@pytest.mark.parametrize(
    "edit, trapped",
    [
        (replace("      mbarrier_wait(shared.keys_done, done % 2);\n", ""), (errors.Race, errors.BarrierMisuse)),
        (
            replace(
                "      if (thread_index() % 32 == 0) mbarrier_arrive(shared.keys_done);\n      store", "      store"
            ),
            (errors.Deadlock,),
        ),
        (
            replace("        mbarrier_wait(shared.k_full, shared.turn % 2);\n", ""),
            (errors.NotComplete, errors.Uninitialised),
        ),
        (replace(" dv[i] = 0.f;\n", " dv[i] += 0.f;\n"), ()),
    ],
    ids=[
        "keys that are overwritten",
        "keys that nobody gives back",
        "keys that are not there yet",
        "sums of other keys",
    ],
)
def test_what_it_waits_for(edit, trapped):
    b = backward(q_len=130, kv_len=260)
    try:
        result = b.run(edit, sms=1, seed=0, step_limit=STEPS)
    except errors.Trap as trap:
        assert isinstance(trap, trapped)
    else:
        assert not trapped and b.wrong(result) != []


def test_no_block_waits_for_one_that_may_not_have_started():
    """Kernels of two streams may hold SMs that the other's blocks need: sums of dq are cleared before."""
    b = backward()
    assert clear_distance(b.plan, b.forward.problem, sms=132) == b.forward.problem.kv_heads * b.forward.problem.batch


def test_who_has_tiles_in_turn():
    """Those that keep nothing of their keys but themselves, where every tile takes as long."""
    for spec, options, expected in (
        ("causal", {}, OneTile()),
        ("full", {}, TilesInTurn()),
        ("full", {"deterministic": True}, OneTile()),
        ("document", {}, OneTile()),
        ("alibi", {"gradients": ("slopes",)}, OneTile()),
    ):
        plans = planner.backward_menu(load_spec(spec), "sm_90a", "bfloat16", 128, **options).plans
        assert {plan.backward.tiles for plan in plans} == {expected}, (spec, options)
