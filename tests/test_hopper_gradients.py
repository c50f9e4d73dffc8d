"""Gradients of captured tensors in the backward of pipeline hopper: what fits there, and that it is right."""

import numpy as np
import ptx_backward
import pytest

import flashgen as fg
from flashgen.lang.load import load_spec
from flashgen.planning import planner


def normal(*dims):
    def example(problem, rng):
        return rng.standard_normal([n if isinstance(n, int) else getattr(problem, n) for n in dims], "float32")

    return example


slopes = fg.tensor("slopes", dims=("heads",), dtype="float32", example=normal("heads"))
of_q = fg.tensor("of_q", dims=("heads", "q"), dtype="float32", example=normal("heads", "q_len"))
of_k = fg.tensor("of_k", dims=("heads", "kv"), dtype="float32", example=normal("heads", "kv_len"))
table = fg.tensor("table", dims=("heads", 65), dtype="float32", example=normal("heads", 65))


def distance(h, q, k):
    return table[h, fg.clamp(k - q, -32, 32) + 32]


@fg.variant(score=lambda s, b, h, q, k: s + slopes[h] * fg.float32(q - k) / 64 + distance(h, q, k))
def decaying(b, h, q, k):
    return k <= q


bucket = fg.tensor(
    "bucket",
    dims=(513,),
    dtype="int32",
    min=0,
    max=15,
    example=lambda p, r: np.minimum(np.log2(np.abs(np.arange(-256, 257)) + 1) * 2, 15).astype("int32"),
)
of_bucket = fg.tensor("of_bucket", dims=(16, "heads"), dtype="float32", example=normal(16, "heads"))
straight = fg.tensor("straight", dims=("heads", 513), dtype="float32", example=normal("heads", 513))
pairs = fg.tensor("pairs", dims=("q", "kv"), dtype="float32", example=normal("q_len", "kv_len"))


@fg.variant(score=lambda s, b, h, q, k: s + of_bucket[bucket[k - q + 256], h] * straight[h, q - k + 256])
def bucketed(b, h, q, k):
    return abs(q - k) < 200


by_pair = fg.variant(score=lambda s, b, h, q, k: s + pairs[q, k], name="by_pair")
by_both = fg.variant(score=lambda s, b, h, q, k: s + of_q[h, q] * of_k[h, k], name="by_both")
near = fg.variant(score=lambda s, b, h, q, k: s + distance(h, q, k), name="near")
CASES = {
    "decaying": (decaying, ("slopes", "table"), 64),
    "by_both": (by_both, ("of_q", "of_k"), 64),
    "near": (near, ("table",), 128),
    "bucketed": (bucketed, ("of_bucket", "straight"), 64),
    "by_pair": (by_pair, ("pairs",), 128),
    "masked": (load_spec("document") & near, ("table",), 128),
}


def plan(name, **options):
    variant, gradients, head_dim = CASES[name]
    return planner.backward_menu(variant.bind(), "sm_90a", "bfloat16", head_dim, gradients=gradients, **options)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_captured_tensors_are_served(name):
    menu = plan(name)
    assert menu.plans[0].pipeline == "hopper" and menu.fallbacks == ()


def test_sums_in_one_order_take_more_registers():
    (fallback,) = plan("by_pair", deterministic=True).fallbacks
    assert fallback.reason.startswith("registers ")
    assert plan("near", deterministic=True).fallbacks == ()


@pytest.mark.sampled(name=("decaying",))
@pytest.mark.slow
@pytest.mark.parametrize("name", tuple(CASES))
def test_gradients_of_captured_tensors_are_right(name):
    """Beside float64, in the interpreter."""
    variant, gradients, head_dim = CASES[name]
    work = ptx_backward.Backward(
        variant, pipeline="hopper", head_dim=head_dim, q_len=130, kv_len=150, heads=1, gradients=gradients
    )
    assert work.plan.pipeline == "hopper"
    ptx_backward.check(work)
