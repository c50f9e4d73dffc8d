"""The plan's sum of a Hopper backward's shared memory is what C++ lays out, whatever the mask looks up."""

from contextlib import suppress
from itertools import product

import pytest

import flashgen as fg
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.planning import planner
from flashgen.planning.pipelines.hopper import backward as hopper_backward
from flashgen.runtime import nvrtc

doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32")
number = fg.tensor("number", dims=("batch", "kv"), dtype="int64")
real = fg.tensor("real", dims=("batch", "kv"), dtype="bool")
bias = fg.tensor("bias", dims=("heads", "kv"), dtype="float32")

HEAD_DIMS = (64, 96, 128, 192, 256)

MASKS = {
    "causal": lambda b, h, q, k: k <= q,
    "bool": lambda b, h, q, k: (k <= q) & real[b, k],
    "two_bools": lambda b, h, q, k: real[b, q] & real[b, k],
    "document": lambda b, h, q, k: (k <= q) & (doc[b, q] == doc[b, k]),
    "padded": lambda b, h, q, k: (k <= q) & (doc[b, q] == doc[b, k]) & real[b, k],
    "padded_both": lambda b, h, q, k: (doc[b, q] == doc[b, k]) & real[b, k] & real[b, q],
    "wide": lambda b, h, q, k: real[b, k] & (number[b, q] == number[b, k]),
    "all": lambda b, h, q, k: real[b, k] & (number[b, q] == number[b, k]) & (doc[b, q] <= doc[b, k]) & real[b, q],
    "nothing_hidden": lambda b, h, q, k: (q - k <= 8) | (q - k > 8) | (doc[b, q] > doc[b, k]),
}


def plans(variant, gradients):
    """What the planner accepts of every head dim, tile, number of stages and option."""
    for head_dim, tile, stages, deterministic in product(HEAD_DIMS, hopper_backward.TILES, (2, 3), (False, True)):
        options = {"tile": (tile.q, tile.kv), "stages": stages, "deterministic": deterministic, "gradients": gradients}
        with suppress(PlanError):
            yield planner.backward_menu(variant, "sm_90a", "bfloat16", head_dim, pipeline="hopper", **options).plans[0]


@pytest.mark.sampled("nothing_hidden-0")
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", list(MASKS))
def test_shared_is_what_the_plan_counted(name, turn):
    mask = fg.variant(MASKS[name], name=name)
    score = mask.score(lambda s, b, h, q, k: s + bias[h, k])
    found = [*plans(mask, ()), *plans(score, ("bias",))]
    assert {plan.deterministic for plan in found} == {False, True}
    assert {plan.head_dim for plan in found} >= {64, 96}
    for plan in found[turn::3]:
        declarations, proven, _ = emit(plan).partition(', "what the plan counted");\n\n//')
        assert proven
        nvrtc.ptx(declarations + ', "what the plan counted");', "sm_90a")


@pytest.mark.sampled("96")
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_documents_with_padding_compile(head_dim):
    plan = planner.backward_menu(fg.variant(MASKS["padded"]), "sm_90a", "float16", head_dim, pipeline="hopper").plans[0]
    nvrtc.ptx(emit(plan), "sm_90a")
