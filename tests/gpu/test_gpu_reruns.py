"""A thousand reruns give the same bits: the forward on every pipeline, and the deterministic backward."""

from collections.abc import Callable

import pytest
import torch
from backward_gpu import problem_of
from gpu_checks import DEVICE, PIPELINES, example_tensors, on, random_inputs

import flashgen as fg
from flashgen.analysis.derivative import differentiable
from flashgen.lang.load import load_spec
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call

pytestmark = pytest.mark.gpu

RERUNS = 1000

#: Without a mask, with a band, with both ends of one, with captured bounds, with scores, with a captured gradient.
SPECS = ("full", "causal", "sliding_window", "document", "softcap", "relative_bias")

#: No multiples of a tile and fewer tiles than SMs; and several waves of tiles.
SHAPES = [
    dict(q_len=777, kv_len=1000, heads=8, kv_heads=2, head_dim=64),
    dict(q_len=777, kv_len=1000, heads=8, kv_heads=2, head_dim=128, dtype="float16"),
    dict(q_len=1100, heads=16, head_dim=128),
    dict(q_len=777, kv_len=1000, heads=8, kv_heads=2, head_dim=192, dtype="float16"),
    dict(q_len=1100, heads=16, head_dim=256),
]

BITS = {2: torch.int16, 4: torch.int32}


def reruns_that_differ(run: Callable[[], tuple[torch.Tensor, ...]]) -> int:
    """How many of RERUNS runs give other bits than the first.

    Now and then another stream takes a changing share of the GPU, so that blocks start in other orders.
    """
    first = [x.view(BITS[x.itemsize]) for x in run()]
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for i in range(RERUNS):
        if i % 4 == 0:
            with torch.cuda.stream(other):
                x[: 128 * (1 + i // 4 % 16)] @ x
        differs = [(mine.view(BITS[mine.itemsize]) != right).any() for mine, right in zip(run(), first, strict=True)]
        count += torch.stack(differs).any()
    return int(count)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_forward(pipeline, name, shape):
    variant, problem = on(load_spec(name), pipeline), problem_of(**shape)
    tensors = random_inputs(problem, 0)
    named = example_tensors(variant, problem, 0)
    assert reruns_that_differ(lambda: fg.attention(*tensors, variant, return_lse=True, **named)) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_deterministic_backward(frozen, pipeline, name, shape):
    variant, problem = on(load_spec(name), pipeline), problem_of(**shape)
    wanted = differentiable(variant.score_node)
    if frozen and not wanted:
        pytest.skip("it captures nothing that has a gradient")
    wanted = () if frozen else wanted
    q, k, v = random_inputs(problem, 0)
    named = example_tensors(variant, problem, 0)
    o, lse = fg.attention(q, k, v, variant, return_lse=True, **named)
    given = Given(torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse)
    call = Call(variant, None, named, deterministic=True)

    def run():
        found = run_backward(given, call, wanted)
        return *found[:3], *found.captured

    assert reruns_that_differ(run) == 0
