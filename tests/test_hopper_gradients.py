"""Gradients of captured tensors in the backward of pipeline hopper: what fits there, and that it is right."""

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


by_both = fg.variant(score=lambda s, b, h, q, k: s + of_q[h, q] * of_k[h, k], name="by_both")
near = fg.variant(score=lambda s, b, h, q, k: s + distance(h, q, k), name="near")
CASES = {
    "decaying": (decaying, ("slopes", "table"), 64),
    "by_both": (by_both, ("of_q", "of_k"), 64),
    "near": (near, ("table",), 128),
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
    (fallback,) = plan("near", deterministic=True).fallbacks
    assert fallback.reason.startswith("registers ")


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
