"""Every pair of options with masks and scores of each kind: what the planner accepts spills nothing.

Nothing is chosen here that a call can not ask for: options of a pass at most two at a time away from their defaults, on
both pipelines, `full`, `causal` and `alibi` at head_dim 64, 128 and 256 in both dtypes.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.layout import LAYOUTS
from flashgen.planning.members import FoldedLeaves, Leaves, SplitKeys
from flashgen.planning.pipelines import table
from flashgen.planning.request import KernelRequest
from flashgen.runtime import nvrtc

#: What a call asks for in each pass, beside the integers of its pipeline; packing, where a pipeline has it.
FORWARD = {"dropout": (True,), "packed": (True,)}
BACKWARD = {"dropout": (True,), "deterministic": (True,), "gradients": (("slopes",),)}

SPECS, HEAD_DIMS, DTYPES = ("full", "causal", "alibi"), (64, 128, 256), ("bfloat16", "float16")
GRID = [
    (pipeline, backward, spec, head_dim, dtype)
    for pipeline in ("ampere", "hopper")
    for backward in (False, True)
    for spec in SPECS
    for head_dim in HEAD_DIMS
    for dtype in DTYPES
]

#: What serving asks for: which keys a block visits, beside another layout or an option.
KEYS = {"split": SplitKeys(), "leaves": FoldedLeaves(), "leaves in parts": Leaves()}
BESIDE = {
    **{name: {"layout": layout} for name, layout in LAYOUTS.items()},
    **{name: {name: True} for name in ("dropout", "packed")},
}
SERVED = list(itertools.product(("ampere", "hopper"), ("causal", "alibi"), HEAD_DIMS, KEYS, BESIDE))


@cache
def pairs(pipeline: str, backward: bool, spec: str) -> list[dict[str, object]]:
    """No option, each alone, and each two together."""
    of = (table.BACKWARDS if backward else table.PIPELINES)[pipeline]
    offered: dict[str, tuple[object, ...]] = dict(BACKWARD if backward else FORWARD)
    if of.NAME not in table.PACKINGS:
        offered.pop("packed", None)
    if spec != "alibi":
        offered.pop("gradients", None)
    offered |= {name: allowed.values for name, allowed in of.INTEGERS.items()}
    one = [{}, *({name: value} for name, values in offered.items() for value in values)]
    return one + [a | b for a, b in itertools.combinations(one[1:], 2) if not a.keys() & b.keys()]


def requests(pipeline: str, backward: bool, spec: str, head_dim: int, dtype: str) -> list[KernelRequest]:
    variant = load_spec(shipped()[spec]).bind()
    return [
        KernelRequest.of(variant, "sm_90a", dtype, head_dim, pipeline=pipeline, backward=backward, **options)
        for options in pairs(pipeline, backward, spec)
    ]


def forms(request: KernelRequest) -> tuple:
    """Plans of the request; none if it is refused, with what was asked, the limit and the nearest thing that works."""
    try:
        return planner.menu_of(request).forms
    except PlanError as error:
        assert "nearest: " in str(error)
        return ()


@pytest.mark.sampled("hopper-False-causal-128-bfloat16-True-0")
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("pipeline", "backward", "spec", "head_dim", "dtype"), GRID)
def test_what_is_accepted_spills_nothing(pipeline, backward, spec, head_dim, dtype, dropout, turn):
    """Pairs with dropout and pairs without have no kernel in common; of either's a quarter is compiled in turn."""
    kernels = {
        emit(plan): (request.asked, request.fixed, plan.tile)
        for request in requests(pipeline, backward, spec, head_dim, dtype)
        for plan in (forms(request) if request.dropout == dropout else ())
    }
    for text, asked in list(kernels.items())[turn::4]:
        resources = nvrtc.compile(text, "sm_90a").resources
        assert (resources.spills, resources.stack_bytes) == (0, 0), asked


def served(pipeline: str, spec: str, head_dim: int, keys: str, beside: str) -> KernelRequest:
    variant, asked = load_spec(shipped()[spec]).bind(), {"keys": KEYS[keys], **BESIDE[beside]}
    return KernelRequest.of(variant, "sm_90a", "bfloat16", head_dim, pipeline=pipeline, **asked)


@pytest.mark.sampled("hopper-causal-128-split-paged-0")
@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(("pipeline", "spec", "head_dim", "keys", "beside"), SERVED)
def test_what_is_served_of_a_part_of_the_keys_spills_nothing(pipeline, spec, head_dim, keys, beside, turn):
    request = served(pipeline, spec, head_dim, keys, beside)
    for plan in forms(request)[turn::2]:
        assert (plan.keys.invariant, plan.layout) == (request.keys.invariant, request.layout)
        assert nvrtc.compile(emit(plan), "sm_90a").resources.spills == 0, (request.asked, plan.tile)


@pytest.mark.slow
def test_layouts_are_served_beside_each_choice_of_keys():
    """Only what an option refuses in any layout is refused: dropout beside leaves, say, and packs of ampere."""
    for pipeline, keys, layout in itertools.product(("ampere", "hopper"), KEYS, LAYOUTS):
        assert forms(served(pipeline, "causal", 128, keys, layout)), (pipeline, keys, layout)


@pytest.mark.slow
def test_four_fifths_of_pairs_are_accepted():
    cells = [cell for i, cell in enumerate(GRID) if i % 8 in (0, 5)]  # every second, of each one dtype, in turns
    asked = [request for cell in cells for request in requests(*cell)]
    accepted = sum(bool(forms(request)) for request in asked)
    assert accepted >= 0.8 * len(asked), f"{accepted} of {len(asked)}"
