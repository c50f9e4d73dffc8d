"""attention() under torch.compile(fullgraph=True): wrong calls are told what eager ones are, and numbers may change."""

import math

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import flashgen as fg
from flashgen.errors import FlashgenError

window = fg.param("window", default=8, min=1)
slope = fg.param("slope", default=0.5)
gain = fg.param("gain", default=1.0)
block = fg.constant("block", default=4, min=1)
table = fg.tensor("table", dims=("heads", 5), dtype="float32", example=lambda p, rng: None)

full = fg.variant()
windowed = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name="windowed")
sloped = fg.variant(score=lambda s, b, h, q, k: gain * s - slope * fg.abs(q - k), name="sloped")
blocks = fg.variant(lambda b, h, q, k: q // block == k // block, name="blocks")
biased = fg.variant(score=lambda s, b, h, q, k: s + table[h, (q + k) % 5], name="biased")


def tensors(q_len=6, kv_len=7, batch=3):
    random = torch.Generator().manual_seed(q_len)
    shapes = (batch, 4, q_len, 16), (batch, 2, kv_len, 16), (batch, 2, kv_len, 24)
    return [torch.randn(shape, generator=random) for shape in shapes]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def error_of(call, *arguments):
    with pytest.raises(FlashgenError) as caught:
        call(*arguments)
    return str(caught.value)


# -- wrong calls

#: (variant, what is given, what both are told)
WRONG = [
    (windowed, {"window": True}, "parameter 'window' of 'windowed' is int32 and got True"),
    (windowed, {"window": 0}, "the least it may be is 1"),
    (windowed, {"window": 2.5}, "give a whole number"),
    (windowed, {"window": 1 << 40}, "does not fit into -2^31 to 2^31 - 1"),
    (windowed, {"widow": 4}, "no parameter 'widow' (did you mean 'window'?)"),
    (sloped, {"slope": math.nan}, "parameter 'slope' of 'sloped' got NaN"),
    (sloped, {"slope": False}, "parameter 'slope' of 'sloped' is float32 and got False"),
    (blocks, {"block": True}, "constant 'block' of 'blocks' is int32 and got True"),
    (biased, {}, "needs the captured tensor 'table'"),
    (biased, {"table": 0.5}, "captured tensor 'table' of 'biased' got a float, not a torch.Tensor"),
    (biased, {"table": torch.zeros(3, 5)}, "is [3, 5] and declared [heads, 5]"),
    (full, {"scale": True}, "scale is a bool and must be a number"),
    (full, {"scale": "1"}, "scale is a str and must be a number"),
    (full, {"scale": math.nan}, "scale is nan: it must be finite in float32"),
    (full, {"scale": torch.tensor(1.0)}, "scale is a Tensor and must be a number (scale.item()"),
    (full, {"scale": np.ones(2)}, "scale is a ndarray and must be a number"),
    (full, {"dropout": 1.5}, "dropout is 1.5: the probability"),
    (full, {"dropout": True}, "dropout is a bool and must be a number"),
    (full, {"dropout": False}, "dropout is a bool and must be a number"),
    (full, {"dropout": "0.1"}, "dropout is a str and must be a number"),
    (full, {"dropout": None}, "dropout is a NoneType and must be a number"),
    (full, {"dropout": 0.5, "seed": -1}, "seed is -1: it is an unsigned 64-bit number"),
    (full, {"dropout": 0.5, "seed": True}, "seed is a bool and must be an integer"),
    (full, {"dropout": 0.5, "seed": 1.0}, "seed is a float and must be an integer"),
    (full, {"dropout": 0.5, "seed": 1 << 64}, "seed is 18446744073709551616: it is an unsigned 64-bit number"),
    (full, {"dropout": 0.5, "seed": 1 << 200}, "seed is 2^200 or more: it is an unsigned 64-bit number"),
    (full, {"seed": -1}, "seed is -1"),
    (full, {"deterministic": 1}, "deterministic is a int and must be True or False"),
    (full, {"return_lse": 1}, "return_lse is a int and must be True or False"),
    ("causal", {}, "fourth argument is a variant and got a str: load it with flashgen.load_spec('causal')"),
]


@pytest.mark.sampled(
    "does not fit into -2^31 to 2^31 - 1",
    "parameter 'slope' of 'sloped' got NaN",
    "parameter 'slope' of 'sloped' is float32 and got False",
    "needs the captured tensor 'table'",
    "is [3, 5] and declared [heads, 5]",
    "dropout is a bool and must be a number1",
    "dropout is a NoneType and must be a number",
    "seed is -1: it is an unsigned 64-bit number",
    "seed is a bool and must be an integer",
    "seed is 2^200 or more: it is an unsigned 64-bit number",
)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "given", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_wrong_call_is_told_what_an_eager_one_is(variant, given, message):
    def call(q, k, v):
        return fg.attention(q, k, v, variant, **given)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = error_of(call, *tensors())
    assert message in eager
    assert error_of(compiled, *tensors()) == eager


@pytest.mark.sampled(
    "variant3-given3-'window' of 'windowed' is 1000000000000000000000000000000 and does not fit",
    "variant4-given4-'window' of 'windowed' is 2^4000 or more and does not fit into 64 bits",
)
@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        (windowed, {"window": "4"}, "'window' of 'windowed' is a str: parameters are numbers and captured tensors"),
        (windowed, {"window": None}, "'window' of 'windowed' is a NoneType: parameters are numbers"),
        (windowed, {"window": 1j}, "'window' of 'windowed' is a complex: parameters are numbers"),
        (windowed, {"window": 10**30}, "'window' of 'windowed' is 1000000000000000000000000000000 and does not fit"),
        (windowed, {"window": 1 << 4000}, "'window' of 'windowed' is 2^4000 or more and does not fit into 64 bits"),
        (full, {"scale": 1 << 4000}, "scale is 2^4000 or more and does not fit into 64 bits"),
        (biased, {"table": None}, "'table' of 'biased' is a NoneType: parameters are numbers and captured tensors"),
    ],
)
def test_what_a_graph_cannot_hold_is_said_too(variant, given, message):
    compiled = torch.compile(lambda *x: fg.attention(*x, variant, **given), fullgraph=True, backend="aot_eager")
    assert error_of(compiled, *tensors()).startswith(message)


@pytest.mark.slow
def test_wrong_tensors():
    q, k, v = tensors()
    wrong = [
        ((q[0], k, v), "q has 3 dimensions"),
        ((q, k, v[None]), "v has 5 dimensions"),
        ((q, k[..., :8].contiguous(), v), "q has head_dim 16 and k head_dim 8"),
        ((q, k.double(), v), "q is float32 and k float64: they share a dtype"),
        ((q.mT.contiguous().mT, k, v), "q's last dimension is not contiguous"),
        ((q, k[:, :, :3], v), "k has kv_len 3 and v 7"),
        ((q.int(), k.int(), v.int()), "q, k and v are int32"),
    ]
    for given, message in wrong:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: fg.attention(*x, full), fullgraph=True, backend="aot_eager")
        eager = error_of(lambda *x: fg.attention(*x, full), *given)
        assert eager.startswith(message) and error_of(compiled, *given) == eager


@pytest.mark.slow
def test_seeds_that_change_are_checked():
    q, k, v = tensors()
    compiled = torch.compile(
        lambda seed: fg.attention(q, k, v, full, dropout=0.5, seed=seed), fullgraph=True, backend="aot_eager"
    )
    for seed in (1, 2, (1 << 63) - 1):
        assert torch.equal(compiled(seed), fg.attention(q, k, v, full, dropout=0.5, seed=seed))
    assert error_of(compiled, -1).startswith("seed is -1: it is an unsigned")


@pytest.mark.sampled("grad")
@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, lambda f: lambda q: torch.func.jvp(f, (q,), (q,))]
)
def test_transforms_inside_a_graph_are_refused(transform):
    q, k, v = tensors()

    def loss(q):
        return fg.attention(q, k, v, full).sum()

    compiled = torch.compile(transform(loss), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"LaunchError\(.*not for transforms of torch.func"):
        compiled(q[None] if transform is torch.func.vmap else q)


# -- graphs


def graphs_of(call, changes, *, dynamic, backend="aot_eager"):
    """How many graphs are made for one call after another; each result is that of an eager call."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for change in changes:
        torch.testing.assert_close(compiled(*change), call(*change), rtol=0, atol=0)
    return counters["stats"]["unique_graphs"]


CHANGES = {
    "an int": (lambda x: lambda n: fg.attention(*x, windowed, window=n), (3, 4, 5, 6)),
    "a float": (lambda x: lambda n: fg.attention(*x, sloped, slope=n), (0.3, -0.4, 0.5, 1e-3)),
    "two floats": (lambda x: lambda n: fg.attention(*x, sloped, slope=n, gain=2 * n), (0.3, -0.4, 0.5, 1e-3)),
    "scale": (lambda x: lambda n: fg.attention(*x, sloped, scale=n), (0.3, 0.4, -0.5, 0.1)),
    "dropout": (lambda x: lambda n: fg.attention(*x, full, dropout=n, seed=5), (0.3, 0.4, 0.5, 0.1)),
    "seed": (lambda x: lambda n: fg.attention(*x, full, dropout=0.5, seed=n), (3, 4, 5, 6)),
}


@pytest.mark.sampled("a float-eager", "dropout-aot_eager", "seed-eager")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", CHANGES)
def test_four_values_of_a_number(what, backend):
    make, values = CHANGES[what]
    changes = [(value,) for value in values]
    call = make(tensors())
    assert graphs_of(call, changes, dynamic=True, backend=backend) == 1
    assert graphs_of(call, changes, dynamic=None, backend=backend) == 2, "the first value alone is taken for fixed"


@pytest.mark.slow
def test_four_lengths():
    def call(q, k, v):
        return fg.attention(q, k, v, windowed, window=3)

    # torch takes sizes that are equal at first for one size: here none are.
    changes = [tensors(q_len=n, kv_len=2 * n + 1, batch=n + 1) for n in (5, 2, 9, 14)]
    assert graphs_of(call, changes, dynamic=True) == 1
    assert graphs_of(call, changes, dynamic=None) == 2


@pytest.mark.slow
def test_gradients_where_floats_change():
    def gradients(call, slope):
        inputs = [x.requires_grad_() for x in tensors()]
        return torch.autograd.grad(call(*inputs, slope).square().sum(), inputs)

    def call(q, k, v, slope):
        return fg.attention(q, k, v, sloped, slope=slope, scale=slope / 2, dropout=slope / 4, seed=3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for value in (0.3, 0.4, 0.5, 0.6):
        for mine, right in zip(gradients(compiled, value), gradients(call, value), strict=True):
            assert torch.equal(mine, right)
    assert counters["stats"]["unique_graphs"] == 2


def test_floats_that_do_not_change_stay_numbers_of_the_graph():
    """A scalar on the CPU keeps torch.compile from CUDA graphs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    q, k, v = tensors()
    torch.compile(
        lambda q: fg.attention(q, k, v, sloped, slope=0.25, scale=0.5),
        fullgraph=True,
        backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=keep),
    )(q)
    (call,) = [node for node in graphs[0].graph.nodes if node.target is torch.ops.flashgen.attention.default]
    assert list(call.args[6:10]) == [["slope", "scale"], [0.25, 0.5], [], None]


@pytest.mark.slow
def test_the_default_device_is_not_where_numbers_lie():
    q, k, v = tensors()
    compiled = torch.compile(
        lambda slope: fg.attention(q, k, v, sloped, slope=slope, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    for slope in (0.25, 0.5, 0.75):
        with torch.device("meta"):
            torch.manual_seed(7)
            mine = compiled(slope)
            torch.manual_seed(7)
            assert torch.equal(mine, fg.attention(q, k, v, sloped, slope=slope, dropout=0.5))
