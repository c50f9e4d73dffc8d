"""Scores that float32 does not tell from their neighbours: masks that add a large number, as many models make them."""

import dataclasses

import numpy as np
import ptx_backward
import pytest
from ptx_attention import replace, work

import flashgen as fg


def added(large, *, row=None):
    """Causal attention by a bias of `large` for keys behind a query; of all keys for one `row`."""

    def example(problem, rng):
        q, k = np.arange(problem.q_len)[:, None], np.arange(problem.kv_len)
        return np.where((k > q) | (q == row), np.float32(large), np.float32(0))

    bias = fg.tensor("bias", dims=("q", "kv"), dtype="float32", example=example)
    return fg.variant(score=lambda s, b, h, q, k: s + bias[q, k], name="added")


@fg.variant(score=lambda s, b, h, q, k: fg.where(k <= q, s, -1e10))
def chosen(b, h, q, k):
    return k < 1000


@pytest.mark.slow
@pytest.mark.sampled("hopper-bfloat16--10000000000.0", "ampere-float16--1000000000.0")
@pytest.mark.parametrize("large", [-1e9, -1e10, -1e30, 1e10])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_rows_that_a_large_bias_hides_in_their_first_tiles(pipeline, dtype, large):
    """Tiles are walked from the last key on: what the bias hides is visited first.  One row has it everywhere."""
    w = work(added(large, row=7), pipeline, dtype=dtype)
    assert w.wrong(w.run()) == ()


@pytest.mark.sampled("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_a_score_that_is_large_by_itself(pipeline):
    w = work(chosen, pipeline)
    assert w.wrong(w.run()) == ()


@pytest.mark.slow
@pytest.mark.sampled("hopper-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_a_score_function_keeps_rows_of_products_that_are_large(pipeline, dtype):
    """As docs/limits.md says: without one the scaled maximum is rounded, and products are not."""
    by_function, without = (
        dataclasses.replace(work(variant, pipeline, dtype=dtype, q_len=40), scale=1e10)
        for variant in (fg.variant(score=lambda s, b, h, q, k: s), fg.variant())
    )
    assert by_function.wrong(by_function.run()) == ()
    assert without.wrong(without.run())


@pytest.mark.sampled("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_scores_are_rounded_before_maxima_are_subtracted(pipeline):
    """The other way, what is left of two large numbers is the rounding of one of them."""
    w = work(added(-1e10), pipeline)
    fused = {
        "hopper": replace("ex2(fmaf(s[i], scale, -row_max))", "ex2(fmaf(s[i] * LN2, LOG2E, -row_max))"),
        "ampere": replace("ex2(fmaf(a, scale, -subtracted(r)))", "ex2(fmaf(a * LN2, LOG2E, -subtracted(r)))"),
    }
    assert w.wrong(w.run(fused[pipeline]))


@pytest.mark.sampled("-1000000000.0-hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
@pytest.mark.parametrize("large", [-1e9, -1e10])
def test_gradients_of_rows_with_large_scores(pipeline, large):
    """Right for the rows that see a key, whatever others hold."""
    ptx_backward.check(ptx_backward.Backward(added(large), pipeline=pipeline, q_len=70, kv_len=83))


@pytest.mark.sampled("ampere")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_gradients_of_a_row_of_large_scores_are_no_more_than_those_of_one_key(pipeline):
    """Its lse is all that a backward knows, and rounds off the number of keys: each counts as the only one, at most."""
    w = ptx_backward.Backward(added(-1e10, row=7), pipeline=pipeline, q_len=70, kv_len=83)
    result = w.run()
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(getattr(result, name)).all()
    assert np.abs(result.dv).max() < 100
    unbounded = w.run(replace("min.NaN.f32 %0, %0, 0f00000000;", "mov.f32 %0, %0;"))
    assert not np.abs(unbounded.dv).max() < 100
