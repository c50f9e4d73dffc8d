"""Derivatives of score functions: against finite differences in float64, against SymPy, and at torch's subgradients."""

import math

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import drawn, seeded

import flashgen as fg
from flashgen.analysis.derivative import SCORE, derive
from flashgen.analysis.formula import symbolic
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import const, walk
from flashgen.lang.load import shipped

cap = fg.param("cap", default=3.0, min=0.5)
bias = fg.tensor("bias", dims=("heads", None), dtype="float32")
PARAMS = {"cap": 2.5}
TENSORS = {"bias": np.random.default_rng(3).normal(size=(2, 4))}
BIAS = float(TENSORS["bias"][1, 2])
PLACE = {"b": 0, "h": 1, "q": 9, "k": 2}


def score(function):
    return fg.variant(score=function).score_node


def floats(source, depth):
    """A function of (s, b, h, q, k) that gives a float expression, tame over a few units of s."""
    if depth == 0 or source.integer(0, 4) == 0:
        number = source.integer(-6, 6) / 4
        leaves = [
            lambda s, b, h, q, k: s,
            lambda s, b, h, q, k: s,
            lambda s, b, h, q, k: s + number,
            lambda s, b, h, q, k: bias[h, k] * s,
            lambda s, b, h, q, k: cap,
            lambda s, b, h, q, k: fg.float32(q - k),
        ]
        return source.pick(leaves)
    left, right = floats(source, depth - 1), floats(source, depth - 1)
    joined = source.pick(
        [
            lambda x, y: x + y,
            lambda x, y: x - y,
            lambda x, y: x * y,
            lambda x, y: x / (1.5 + y * y),
            lambda x, y: -x,
            lambda x, y: fg.minimum(x, y),
            lambda x, y: fg.maximum(x, y),
            lambda x, y: fg.clamp(x, -0.7, 1.3),
            lambda x, y: fg.abs(x),
            lambda x, y: fg.where(x < y, x, y * 2.0),
            lambda x, y: fg.tanh(x) * y,
            lambda x, y: fg.sigmoid(x),
            lambda x, y: fg.exp(fg.tanh(x)),
            lambda x, y: fg.exp2(fg.sigmoid(x)),
            lambda x, y: fg.log(1.25 + x * x),
            lambda x, y: fg.log2(1.25 + fg.abs(x)),
            lambda x, y: fg.erf(x) * y,
            lambda x, y: fg.sin(x * y) + fg.cos(x - y),
            lambda x, y: fg.log1p(0.5 + x * x),
            lambda x, y: fg.pow(1.5 + x * x, 1.7) + fg.pow(x, 3) - fg.pow(1.5 + y * y, -2),
            lambda x, y: fg.sqrt(1.5 + x * x),
            lambda x, y: fg.rsqrt(1.5 + fg.abs(y)),
            lambda x, y: fg.floor(x) + y,
        ]
    )
    return lambda s, b, h, q, k: joined(left(s, b, h, q, k), right(s, b, h, q, k))


def value(root, s):
    found = evaluate(root, **PLACE, s=s, sizes={}, params=PARAMS, tensors=TENSORS, float_dtype=np.float64)
    return np.broadcast_to(found, np.shape(s))


def slope(root, s):
    found = derive(root)
    return np.zeros_like(s) if found is None else value(found, s)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_finite_differences(data):
    root = score(floats(drawn(data), 4))
    s = np.random.default_rng(0).normal(size=64) * 2
    step = 1e-6
    ahead, behind = (value(root, s + step) - value(root, s)) / step, (value(root, s) - value(root, s - step)) / step
    size = 1 + np.abs(ahead) + np.abs(value(root, s))
    smooth = np.abs(ahead - behind) < 1e-3 * size  # elsewhere there is an edge nearby
    smooth &= np.abs(ahead) * step < 1e-3  # a staircase that climbs many steps at once looks smooth
    assert np.all(np.abs(slope(root, s) - (ahead + behind) / 2)[smooth] < 1e-3 * size[smooth])


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_sympy(seed):
    root = score(floats(seeded(seed), 3))
    s = sympy.Symbol("s", real=True)
    known = {"cap": PARAMS["cap"], **PLACE}
    expression = symbolic(root)
    expression = expression.subs({x: known[x.name] for x in expression.free_symbols if x.name in known})
    expression = expression.replace(lambda x: isinstance(x, sympy.Indexed), lambda x: BIAS)
    expected = expression.diff(s).replace(sympy.Derivative, lambda *_: 0)  # of a floor
    for at in (-1.37, 0.218, 2.641):
        assert slope(root, np.array(at)) == pytest.approx(float(expected.subs(s, at).doit()), rel=1e-9, abs=1e-9)


def test_subgradients_are_those_of_torch():
    edges = np.array([-1.0, 0.0, 1.0, 2.0])
    cases = {
        "clamp": (lambda s: fg.clamp(s, -1.0, 2.0), lambda s: torch.clamp(s, -1.0, 2.0)),
        "abs": (fg.abs, torch.abs),
        "minimum": (lambda s: fg.minimum(s, 1.0), lambda s: torch.minimum(s, torch.ones_like(s))),
        "maximum": (lambda s: fg.maximum(0.0 * s, s), lambda s: torch.maximum(0.0 * s, s)),
        "where": (lambda s: fg.where(s <= 1.0, s * s, 3.0 * s), lambda s: torch.where(s <= 1.0, s * s, 3.0 * s)),
        "floor": (lambda s: fg.floor(s) * s, lambda s: torch.floor(s) * s),
    }
    for name, (ours, theirs) in cases.items():
        x = torch.tensor(edges, requires_grad=True)
        theirs(x).sum().backward()
        root = score(lambda s, b, h, q, k, ours=ours: ours(s))
        assert slope(root, edges).tolist() == x.grad.tolist(), name


def test_a_branch_that_is_not_taken_adds_nothing():
    """Even where its own derivative is infinite: torch gives NaN here."""
    root = score(lambda s, b, h, q, k: fg.where(s > 0.0, fg.sqrt(s) * s, s))
    assert slope(root, np.array([-4.0, 0.0, 4.0])).tolist() == [1.0, 1.0, 3.0]
    masked = score(lambda s, b, h, q, k: fg.where(k <= q, fg.log(s), 7.0))
    place = PLACE | {"k": 10}
    found = evaluate(derive(masked), **place, s=np.zeros(1), sizes={}, params={}, tensors={}, float_dtype=np.float64)
    assert found.tolist() == [0.0]
    far = score(lambda s, b, h, q, k: fg.where(s > 0.0, s, s * math.inf - s * math.inf - fg.sqrt(s)))
    assert slope(far, np.array([4.0])).tolist() == [1.0]


@pytest.mark.parametrize("extremum", [fg.minimum, fg.maximum])
def test_a_nan_beside_a_number_gets_no_gradient(extremum):
    """The number is the value, so all of the gradient is the number's; of two NaNs the value is one anyway."""
    nan = score(lambda s, b, h, q, k: extremum(fg.log(s), 3.0 * s))
    swapped = score(lambda s, b, h, q, k: extremum(3.0 * s, fg.log(s)))
    constant = score(lambda s, b, h, q, k: extremum(-5.0, fg.log(s)))
    s = np.array([-4.0, -0.5])
    assert slope(nan, s).tolist() == slope(swapped, s).tolist() == [3.0, 3.0]
    assert slope(constant, s).tolist() == [0.0, 0.0]
    clamped = score(lambda s, b, h, q, k: fg.clamp(fg.log(s), -5.0, 5.0))
    assert slope(clamped, s).tolist() == [0.0, 0.0]
    tie = score(lambda s, b, h, q, k: extremum(2.0 * s, 4.0 * s))
    assert slope(tie, np.array([0.0])).tolist() == [3.0]


def test_what_does_not_depend_on_the_score_has_no_derivative():
    assert derive(score(lambda s, b, h, q, k: fg.float32(q - k))) is None
    assert derive(score(lambda s, b, h, q, k: fg.float32(fg.int32(s)))) is None
    assert derive(score(lambda s, b, h, q, k: fg.where(s > 0.0, 1.0, 2.0))) is None
    assert derive(SCORE) is const(1.0)


def test_captured_elements_have_derivatives_too():
    root = score(lambda s, b, h, q, k: s * bias[h, k] + bias[h, k] * bias[h, 3])
    at_k, at_3 = sorted((n for n in walk([root]) if n.op == "load"), key=lambda n: n.operands[1].op, reverse=True)
    assert at_k.operands[1].op == "index"
    assert derive(root, wrt=SCORE) is at_k
    assert derive(root, wrt=at_3) is at_k
    s = np.array([3.0])
    assert value(derive(root, wrt=at_k), s).tolist() == [3.0 + TENSORS["bias"][1, 3]]


def test_shared_subexpressions_stay_shared():
    def squares(s, b, h, q, k):
        for _ in range(100):
            s = fg.tanh(s * s)
        return s

    root = score(squares)
    derivative = derive(root)
    both = set(walk([root, derivative]))
    assert len(both) < 10 * 100
    assert set(walk([root])) - {root} <= set(walk([derivative])) | {root}


def test_shipped_scores():
    """The derivative of every shipped score, by finite differences."""
    s = np.array([-2.3, 0.4, 1.7])
    step = 1e-6
    tested = 0
    for name in shipped():
        variant = fg.load_spec(name).bind()
        if variant.score_node is None:
            continue
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 16, "kv_len": 16}
        rng = np.random.default_rng(1)
        tensors = {}
        for tensor in variant.tensors:
            shape = [{"batch": 1, "heads": 2, "kv_heads": 1, "q": 16, "kv": 16}.get(d, d) or 16 for d in tensor.dims]
            tensors[tensor.name] = rng.integers(0, 2, shape) if "int" in tensor.dtype else rng.normal(size=shape)

        params = variant.values({})

        def at(root, s, sizes=sizes, params=params, tensors=tensors):
            return evaluate(root, **PLACE, s=s, sizes=sizes, params=params, tensors=tensors, float_dtype=np.float64)

        expected = (at(variant.score_node, s + step) - at(variant.score_node, s - step)) / (2 * step)
        assert np.allclose(at(derive(variant.score_node), s), expected, atol=1e-6), name
        tested += 1
    assert tested >= 4
