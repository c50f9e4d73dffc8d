"""When O follows a maximum that moved: at once, or under the next product with K. No bit depends on it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_attention import replace, work

from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.members import RESCALE_BEHIND_P, RescaleBehindP, RescaleBesideS

#: Three tiles of queries, which one block computes, by three of keys.
SHAPE = {"q_len": 300, "kv_len": 300, "head_dim": 128, "heads": 1, "kv_heads": 1, "tile": (128, 128)}


def climbing(spec="causal", **shape):
    """Keys grow towards the first, which is visited last: scores jump from tile to tile, the last of them too."""
    w = work(spec, "hopper", **{**SHAPE, **shape})
    q, k, v = w.qkv
    growth = torch.linspace(30, 1, k.shape[2], dtype=torch.float64)[:, None]
    return dataclasses.replace(w, qkv=(q, (k.double() * growth).to(k.dtype), v))


def run(w, edit=None):
    return w.run(edit, sms=1, step_limit=8_000_000)


@pytest.mark.sampled("bfloat16-causal-2")
@pytest.mark.slow
@pytest.mark.parametrize("q_stages", [1, 2])
@pytest.mark.parametrize("spec", ["full", "causal"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_o_that_follows_beside_s_has_the_bits_of_one_that_follows_at_once(dtype, spec, q_stages):
    w = climbing(spec, dtype=dtype, q_stages=q_stages)
    assert isinstance(w.plan.specialized.rescale, RescaleBesideS)
    found = run(w)
    assert w.wrong(found) == ()
    at_once = w.with_members(rescale=RESCALE_BEHIND_P)
    assert at_once.source != w.source
    expected = run(at_once)
    assert np.array_equal(found.o, expected.o) and np.array_equal(found.lse, expected.lse)


@pytest.mark.sampled("in a step")
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "    issue_qk(s);\n    if (moved) rescale_o();\n",
        "    pin_fragments(probabilities);\n    if (moved) rescale_o();\n",
        "          if (moved) rescale();\n",
    ],
    ids=["in a step", "behind the last keys", "the sums"],
)
def test_o_and_the_sums_follow(line):
    w = climbing("full")
    assert w.wrong(run(w, replace(line, line.replace("if (moved)", "if (false)"))))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [
        (64, "bfloat16", RescaleBehindP),
        (96, "bfloat16", RescaleBehindP),
        (128, "bfloat16", RescaleBesideS),
        (128, "float16", RescaleBesideS),
        (256, "bfloat16", RescaleBehindP),
        (128, "float8_e4m3fn", RescaleBehindP),
    ],
)
def test_which_kernels_have_it(head_dim, dtype, expected):
    menu = planner.menu(load_spec("causal").bind(), "sm_90a", dtype, head_dim, head_dim, pipeline="hopper")
    wide = [plan for plan in menu.plans if plan.specialized.warpgroups == 2]
    assert wide and all(isinstance(plan.specialized.rescale, expected) for plan in wide)
