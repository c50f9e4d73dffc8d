"""What the PTX interpreter computes is what the GPU computes, from the same emitted text."""

import dataclasses

import numpy as np
import pytest
import torch
from gpu_checks import PIPELINES, call, case_of, example_tensors, on, random_inputs

import flashgen as fg
from flashgen.interpreter.simulate import simulate
from flashgen.planning.problem import Problem

pytestmark = pytest.mark.gpu

SPECS = ("full", "causal_bottom_right", "sliding_window", "document", "alibi", "softcap", "blocks", "relative_bias")
TILES = {"ampere": (64, 64), "hopper": (128, 64)}
FRACTION_BITS = {"float16": 10, "bfloat16": 7}


def ulps(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Distance in units of the last place of the larger value; what is below the tensor's RMS counts as that.

    A sum that cancels has the error of its terms, which no unit of the small result measures (soft-capped scores in
    float16: 0.4% of the elements differ by more than 2 units of their own last place, by up to 600 near 0).
    """
    magnitude = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.sqrt(np.mean(np.square(b))))
    return np.abs(a - b) / 2.0 ** (np.floor(np.log2(magnitude)) - FRACTION_BITS[dtype])


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16")])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_interpreter_agrees_with_the_gpu(pipeline, name, head_dim, dtype):
    variant = on(fg.load_spec(name), pipeline)
    variant = dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, tile=TILES[pipeline]))
    problem = Problem(
        batch=1, heads=4, kv_heads=2, q_len=150, kv_len=211, head_dim=head_dim, v_head_dim=head_dim, dtype=dtype
    )
    bound = variant.bind()
    plan = fg.plan(
        variant,
        batch=1,
        heads=4,
        kv_heads=2,
        seqlen=150,
        kv_seqlen=211,
        head_dim=head_dim,
        dtype=dtype,
        pipeline=pipeline,
    )
    captured = example_tensors(bound, problem, 0)
    case = case_of(bound, problem, {}, captured)
    q, k, v = random_inputs(problem, 0)
    o, lse = call(q, k, v, variant, **captured)
    simulated = simulate(plan, case, *(x.float().cpu().numpy() for x in (q, k, v)), scale=head_dim**-0.5)
    distance = ulps(simulated.o, o.float().cpu().numpy(), dtype)
    assert np.quantile(distance, 0.999) <= 2, (distance.max(), np.mean(distance > 2))
    np.testing.assert_allclose(simulated.lse, lse.cpu().numpy(), rtol=0, atol=1e-5)
    assert torch.isfinite(o).all()
