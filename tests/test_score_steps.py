"""Scores that jump, that are nearly straight, and that read a tensor twice: kernels against float64, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_attention import ARCH, work

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.planning.planner import menu
from flashgen.runtime import nvrtc

PIPELINES = tuple(ARCH)

#: Of these, times its rounded reciprocal, each is less than 1.
DIVISORS = (41.0, 47.0, 55.0)

#: Steps of a distance: each is a quotient that must not be a little less than a whole number.
STEPS = {
    "floor": lambda x, y: fg.floor(x / y),
    "integer": lambda x, y: fg.float32(fg.int32(x / y)),
    "condition": lambda x, y: fg.where(x / y >= 1.0, 1.0, 0.0) + fg.where(x / y == 2.0, 1.0, 0.0),
    "remainder": lambda x, y: x - fg.floor(x / y) * y,
}


@pytest.mark.sampled("ampere-floor", "hopper-remainder")
@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_step_of_a_quotient_is_taken_where_it_is(pipeline, step):
    def score(s, b, h, q, k):
        x = fg.float32(q - k)
        return s + sum(STEPS[step](x, divisor) for divisor in DIVISORS)

    w = work(fg.variant(score=score, name=step), pipeline)
    assert w.wrong(w.run()) == ()


@pytest.mark.sampled("ampere-1000000.0-False", "hopper-1000000.0-True")
@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("cap", [30.0, 1e4, 1e6, 1e7])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_soft_cap_far_above_all_scores_changes_none(pipeline, cap, beside):
    bound = fg.param("cap", default=30.0, min=1e-3)

    def score(s, b, h, q, k):
        return bound * fg.tanh(s / bound) + (0.01 * fg.float32(k - q) if beside else 0.0)

    variant = fg.variant(score=score, name="capped")
    shape = {"q_len": 60, "kv_len": 80}
    sizes = work(variant, pipeline, **shape).case.sizes
    w = work(variant, pipeline, case=Case(sizes=sizes, params={"cap": cap}, tensors={}), **shape)
    found = w.run()
    assert w.wrong(found) == ()
    assert not np.isnan(found.o).any()


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_score_reads_a_tensor_at_a_pair_and_beside_it(pipeline):
    """Elements that a score is given, and that it reads itself, have names of their own."""
    bias = fg.tensor("bias", dims=("q", "kv"), dtype="float32")

    def score(s, b, h, q, k):
        return s + bias[q, k] + bias[q, fg.maximum(k - 1, 0)] + bias[q, fg.maximum(k - 2, 0)]

    variant = fg.variant(score=score, name="beside").bind()
    plan = menu(variant, ARCH[pipeline], "bfloat16", 64).plans[0]
    assert nvrtc.compile(emit(plan), plan.arch).cubin
