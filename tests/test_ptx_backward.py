"""Emitted backward passes executed by the PTX interpreter: gradients, bytes, bank conflicts, any order, mutations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ptx_attention import replace
from ptx_backward import DROPOUT, SOME, SPECS, Backward, check

import flashgen as fg
from flashgen.interpreter import errors


@pytest.mark.slow
@pytest.mark.sampled("<lambda>1")
@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: fg.maximum(-5.0, fg.log(s)) + 0.5 * s,
        lambda s, b, h, q, k: fg.minimum(0.0 - fg.log(s), 2.0 - s),
    ],
)
def test_a_nan_beside_a_number_gets_no_gradient(score):
    """Half of the scores have no logarithm."""
    check(Backward(fg.variant(score=score), q_len=33, kv_len=40, head_dim=32))


@pytest.mark.sampled("gpt_oss", "tree")
@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_every_spec(spec):
    check(Backward(spec))


@pytest.mark.sampled("full")
@pytest.mark.slow
@pytest.mark.parametrize("spec", SOME)
def test_head_dim_128_in_float16_with_four_heads_over_two(spec):
    check(Backward(spec, head_dim=128, dtype="float16", heads=4, kv_heads=2, q_len=71, kv_len=101))


#: Backwards whose dS is found in different ways: where the score has a slope and where it has none, of P in registers
#: and of P of another warpgroup, by the block of a key and by that of a query.
PRECISE = {
    "hopper_score": {"spec": "softcap", "pipeline": "hopper", "head_dim": 64},
    "hopper_score_128": {"spec": "softcap", "pipeline": "hopper", "head_dim": 128},
    "hopper_plain": {"spec": "causal", "pipeline": "hopper", "head_dim": 128},
    "hopper_wide": {"spec": "causal", "pipeline": "hopper", "head_dim": 256},
    "hopper_wide_score": {"spec": "softcap", "pipeline": "hopper", "head_dim": 256},
    "ampere_own_keys": {"spec": "causal", "tile": (64, 128), "head_dim": 64},
    "ampere_shared_keys": {"spec": "causal", "tile": (64, 128), "head_dim": 128},
    "ampere_by_query": {"spec": "causal", "deterministic": True, "head_dim": 64},
    "ampere_score": {"spec": "softcap", "head_dim": 64},
}


PEAKED = "test_peaked_inputs_have_the_gradients_of_an_exact_softmax"


@pytest.mark.sampled("hopper_score-std4-bfloat16", "ampere_by_query-std4-bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [("std4", "bfloat16"), pytest.param("outliers", "float16", marks=pytest.mark.nightly(sibling=PEAKED))],
)
@pytest.mark.parametrize("name", PRECISE)
def test_peaked_inputs_have_the_gradients_of_an_exact_softmax(name, inputs, dtype):
    b = Backward(**PRECISE[name], inputs=inputs, dtype=dtype, q_len=140, kv_len=140)
    assert b.wrong(b.run()) == []


ROUND_S = """    for (int i = 0; i < TILE_Q / 2; i += 2) {
      const u32 pair = cvt_bf16x2(s[i], s[i + 1]);
      s[i] = from_bf16(pair);
      s[i + 1] = from_bf16(pair >> 16);
    }
"""
P_OF_MMA, ROUNDED = "p[m][j][2 * r]", "from_bf16(cvt_bf16x2(p[m][j][2 * r], 0.f))"
P_ROUNDED = {
    "hopper_score": replace("    differentiate_score(s, dp);\n", ROUND_S + "    differentiate_score(s, dp);\n"),
    "hopper_plain": replace("    differentiate(s, dp);\n", ROUND_S + "    differentiate(s, dp);\n"),
    "hopper_wide": replace("    share_p(s);\n", ROUND_S + "    share_p(s);\n"),
    "hopper_wide_score": replace("    share_p(s);\n", ROUND_S + "    share_p(s);\n"),
    "ampere_own_keys": lambda text: replace("p_even = " + P_OF_MMA, "p_even = " + ROUNDED)(
        replace("p_odd = " + P_OF_MMA.replace("r]", "r + 1]"), "p_odd = " + ROUNDED.replace("r]", "r + 1]"))(text)
    ),
}


@pytest.mark.sampled("hopper_plain", "ampere_own_keys")
@pytest.mark.slow
@pytest.mark.parametrize("name", P_ROUNDED)
def test_a_p_that_is_rounded_before_ds_is_noticed(name):
    """dS of a rounded P has 1.2 times the error of dS that is rounded alone."""
    b = Backward(**PRECISE[name], q_len=140, kv_len=140)
    found = b.wrong(b.run(P_ROUNDED[name]))
    assert {reason.partition(":")[0] for reason in found if "RMS" in reason} == {"dq", "dk"}


@pytest.mark.sampled("sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ("full", "sliding_window", "alibi", "relative_bias"))
def test_deterministic(spec):
    b = Backward(spec, deterministic=True, q_len=100, kv_len=130)
    result = check(b)
    again = b.run(seed=5)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(again, name), getattr(result, name))
    for name, gradient in result.captured.items():
        np.testing.assert_array_equal(again.captured[name], gradient)


@pytest.mark.slow
def test_dropout():
    check(Backward("causal", dropout=DROPOUT, q_len=100))


@pytest.mark.sampled("shape2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 96, "v_head_dim": 40},
        {"q_len": 1, "kv_len": 1, "batch": 2},
        {"q_len": 64, "kv_len": 64, "tile": (32, 128)},
        {"q_len": 70, "kv_len": 200, "tile": (128, 32)},
    ],
)
def test_shapes(shape):
    check(Backward("causal_bottom_right", **shape))


@pytest.mark.sampled("1")
@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1), range(1, 5)], ids=len)
def test_any_order_of_warps_and_copies_is_right(seeds):
    b = Backward("sliding_window", q_len=70, kv_len=140)
    lockstep = b.run()
    for seed in seeds:
        result = b.run(seed=seed)
        np.testing.assert_array_equal(result.dk, lockstep.dk)
        np.testing.assert_array_equal(result.dv, lockstep.dv)
        np.testing.assert_allclose(result.dq, lockstep.dq, rtol=2.0**-7, atol=1e-6)  # the order of additions is free


MUTATIONS = {
    "dropped cp.async wait": (
        lambda text: text.replace("cp_async_wait_group<", "cp_async_wait_group<8 + "),
        {errors.NotComplete, errors.UnfinishedCopy},
    ),
    "dropped block barriers": (lambda text: text.replace("__syncthreads();", ""), {errors.Race, errors.NotComplete}),
    "wrong swizzle": (replace("(chunk ^ row / (8 / GROUP) % GROUP)", "chunk"), {errors.Trap, "result"}),
}


@pytest.mark.sampled("dropped block barriers")
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    edit, expected = MUTATIONS[name]
    b = Backward("causal", q_len=150, kv_len=150)
    assert edit(b.source) != b.source
    try:
        result = b.run(edit)
    except errors.Trap as trap:
        found = type(trap)
    else:
        found = "result" if b.wrong(result) or any(r.conflicts for r in result.reports.values()) else None
    assert found in expected or (errors.Trap in expected and isinstance(found, type)), found


BEYOND = {
    "infinite": lambda s, b, h, q, k: fg.where(s == 0, math.inf, s),
    "quotient": lambda s, b, h, q, k: s + 0.001 / s,
    "root": lambda s, b, h, q, k: s + fg.rsqrt(fg.float32(fg.q_len - q)),
}


@pytest.mark.sampled("root-ampere-32", "root-hopper-64")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("score", "pipeline", "head_dim"),
    [(score, *of) for score in BEYOND for of in (("ampere", 32), ("hopper", 64), ("hopper", 192))],
)
def test_what_a_score_is_beyond_the_last_query_reaches_no_gradient(score, pipeline, head_dim):
    check(Backward(fg.variant().score(BEYOND[score]), pipeline=pipeline, head_dim=head_dim, q_len=70, kv_len=75))
