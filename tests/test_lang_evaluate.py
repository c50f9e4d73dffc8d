"""Evaluation against plain Python: random expressions, captured tensors, and indices that go astray."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import CapturedIndexError
from flashgen.lang.bounds import bounds
from flashgen.lang.evaluate import check_positions, evaluate
from flashgen.lang.expr import DType

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 7}
Q, K = np.ogrid[0:5, 0:7]


def traced(function, **kwargs):
    """The mask of a function of positions, evaluated on the q x k grid of one batch and head."""
    variant = fg.variant(function)
    params, tensors = kwargs.get("params", {}), kwargs.get("tensors", {})
    value = evaluate(
        variant.mask,
        b=0,
        h=3,
        q=Q,
        k=K,
        sizes=SIZES,
        params=variant.values(params),
        tensors=tensors,
        live=kwargs.get("live"),
    )
    return np.broadcast_to(value, (5, 7))


def plainly(function):
    return np.array([[bool(function(0, 3, q, k)) for k in range(7)] for q in range(5)])


# ---------------------------------------------------------------------------------------------------------------------
# Random expressions: the same text read once with traced values and once with Python's integers

numbers = st.one_of(st.sampled_from(["q", "k", "h", "n"]), st.integers(-9, 9).map(lambda i: f"({i})"))


def grow(children):
    def binary(signs):
        return st.builds(lambda a, sign, b: f"({a} {sign} {b})", children, st.sampled_from(signs), children)

    return st.one_of(
        binary(["+", "-", "*", "&", "|", "^"]),
        st.builds(
            lambda a, sign, b: f"({a} {sign} {b})",
            children,
            st.sampled_from(["//", "%"]),
            st.integers(-9, 9).filter(bool),
        ),
        st.builds(lambda a, sign, n: f"({a} {sign} {n})", children, st.sampled_from(["<<", ">>"]), st.integers(0, 3)),
        st.builds(lambda a, b: f"({a} // (abs({b}) + 1))", children, children),
        st.builds(lambda sign, a: f"({sign}{a})", st.sampled_from(["-", "+", "~"]), children),
        st.builds(lambda f, a, b: f"{f}({a}, {b})", st.sampled_from(["minimum", "maximum"]), children, children),
        st.builds(
            lambda a, sign, b, x, y: f"where({a} {sign} {b}, {x}, {y})",
            children,
            st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
            children,
            children,
            children,
        ),
    )


integers = st.recursive(numbers, grow, max_leaves=12)
conditions = st.recursive(
    st.builds(
        lambda a, sign, b: f"({a} {sign} {b})", integers, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), integers
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, sign, b: f"({a} {sign} {b})", inner, st.sampled_from(["&", "|", "^"]), inner),
        inner.map(lambda a: f"negate({a})"),
    ),
    max_leaves=4,
)

TRACED = {
    "minimum": fg.minimum,
    "maximum": fg.maximum,
    "where": fg.where,
    "negate": lambda c: not c if isinstance(c, bool) else ~c,
}
PLAIN = {"minimum": min, "maximum": max, "where": lambda c, x, y: x if c else y, "negate": operator.not_}


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(conditions, st.integers(-20, 20))
def test_a_random_mask_means_what_python_computes_and_stays_in_its_declared_bounds(text, n):
    param = fg.param("n", default=0, min=-20, max=20)
    variant = fg.variant(lambda b, h, q, k: eval(text, {**TRACED, "q": q, "k": k, "h": h, "n": param}))
    expected = plainly(lambda b, h, q, k: eval(text, {**PLAIN, "q": q, "k": k, "h": h, "n": n}))
    if variant.mask is None:
        assert expected.all()
        return
    got = evaluate(variant.mask, b=0, h=3, q=Q, k=K, sizes=SIZES, params={"n": n}, tensors={})
    assert np.array_equal(np.broadcast_to(got, (5, 7)), expected)
    known = bounds(variant.mask)
    assert known.may_true if expected.any() else known.may_false
    assert known.may_false if not expected.all() else known.may_true


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def score(function, s, float_dtype, **params):
    variant = fg.variant(score=function)
    return evaluate(
        variant.score_node,
        b=0,
        h=0,
        q=Q,
        k=K,
        s=s,
        sizes=SIZES,
        params=variant.values(params),
        tensors={},
        float_dtype=float_dtype,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_stay_in_the_asked_precision(dtype):
    s = np.linspace(-4, 4, 35).reshape(5, 7).astype(np.float16)
    cap = fg.param("cap", default=2.0)
    got = score(lambda s, b, h, q, k: cap * fg.tanh(s / cap) + 0.1 * (q - k) - fg.exp2(-0.5 * q), s, dtype)
    wide = s.astype(dtype)
    expected = dtype(2) * np.tanh(wide / dtype(2)) + dtype(0.1) * (Q - K).astype(dtype)
    assert got.dtype == dtype
    assert np.array_equal(got, expected - np.exp2(dtype(-0.5) * Q.astype(dtype)))


def test_functions_are_numpys():
    x = np.linspace(0.1, 3, 35).reshape(5, 7)
    for name in ("exp", "exp2", "log", "log2", "log1p", "sin", "cos", "tanh", "sqrt", "floor"):
        got = score(lambda s, b, h, q, k, name=name: getattr(fg, name)(s), x, np.float64)
        assert np.allclose(got, getattr(np, name)(x), rtol=1e-15)
    assert np.allclose(score(lambda s, b, h, q, k: fg.sigmoid(-s), x, np.float64), 1 / (1 + np.exp(x)))
    assert np.allclose(score(lambda s, b, h, q, k: fg.rsqrt(s), x, np.float64), x**-0.5)
    assert np.allclose(score(lambda s, b, h, q, k: fg.erf(s), x, np.float64), np.vectorize(math.erf)(x))
    assert np.allclose(score(lambda s, b, h, q, k: fg.clamp(s, 0.5, 1), x, np.float64), np.clip(x, 0.5, 1))
    assert np.allclose(score(lambda s, b, h, q, k: fg.clamp(s, None, 1), x, np.float64), np.minimum(x, 1))


@pytest.mark.parametrize("c", [0, 1, 2, 3, 7, 64, -1, -3, 2.0, 0.5, -0.5, 1.7, -2.25, 0.0])
def test_powers_are_numpys_and_products_where_they_can_be(c):
    x = np.linspace(0.5, 1.5, 35).reshape(5, 7)
    assert np.allclose(score(lambda s, b, h, q, k: fg.pow(s, c), x, np.float64), x**c, rtol=1e-13)
    assert np.allclose(score(lambda s, b, h, q, k: s**c, x, np.float64), x**c, rtol=1e-13)
    if c == int(c):
        assert np.allclose(score(lambda s, b, h, q, k: fg.pow(-s, c), x, np.float64), (-x) ** float(c), rtol=1e-13)
    else:
        assert np.isnan(score(lambda s, b, h, q, k: fg.pow(-s, c), x, np.float64)).all()


def test_a_power_of_an_integer_is_one_where_the_exponent_is_whole_and_not_negative():
    assert np.array_equal(traced(lambda b, h, q, k: (q - k) ** 2 <= 4), (Q - K) ** 2 <= 4)
    kinds = [fg.variant(lambda b, h, q, k, c=c: (q - k) ** c == k).mask.operands[0].dtype for c in (2, 0, 2.0, -1, 0.5)]
    assert [kind.value for kind in kinds] == ["int32", "int32", "float32", "float32", "float32"]


def test_a_negative_index_counts_from_the_end():
    t = fg.tensor("t", dims=("batch", "kv"), dtype="int32")
    u = fg.tensor("u", dims=(3, None), dtype="int32")
    tensors = {"t": np.arange(14, dtype=np.int32).reshape(2, 7), "u": np.arange(12, dtype=np.int32).reshape(3, 4)}
    got = traced(lambda b, h, q, k: k + q <= t[b, -1] + u[-2, -4] - t[b][-7], tensors=tensors)
    assert np.array_equal(got, np.broadcast_to(K + Q <= 6 + 4 - 0, (5, 7)))


def test_overflow_and_infinity_are_quiet():
    with np.errstate(all="raise"):
        got = score(
            lambda s, b, h, q, k: fg.where(k <= q, fg.exp(s * 1e30), -float("inf")), np.ones((5, 7)), np.float32
        )
    assert np.array_equal(got, np.where(K <= Q, np.inf, -np.inf))


def test_casts():
    ones = np.full((5, 7), -2.75)
    assert (score(lambda s, b, h, q, k: fg.int32(s), ones, np.float64) == -2).all(), "toward zero"
    assert (score(lambda s, b, h, q, k: fg.int64(s) // 2, ones, np.float64) == -1).all()
    assert (score(lambda s, b, h, q, k: fg.float32(k <= q) + fg.int32(k > q), ones, np.float64) == 1).all()


def test_problem_sizes():
    got = traced(lambda b, h, q, k: k <= q + fg.kv_len - fg.q_len)
    assert np.array_equal(got, K <= Q + 2)
    assert traced(lambda b, h, q, k: h // (fg.heads // fg.kv_heads) == fg.batch - 1).all()


def test_a_missing_position_is_named():
    variant = fg.variant(lambda b, h, q, k: k <= q)
    with pytest.raises(TypeError, match="needs q"):
        evaluate(variant.mask, k=K, sizes=SIZES, params={}, tensors={})


# ---------------------------------------------------------------------------------------------------------------------
# Captured tensors


def test_nested_and_stepwise_indexing():
    doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32")
    table = fg.tensor("table", dims=(None,), dtype="bool")
    doc_of = np.array([[0, 0, 1, 1, 2, 2, 2], [0] * 7], np.int32)
    flags = np.array([True, False, True])
    tensors = {"doc": doc_of, "table": flags}
    expected = (doc_of[0][:5, None] == doc_of[0][None, :]) & flags[doc_of[0][:5, None]]
    for rule in (
        lambda b, h, q, k: (doc[b, q] == doc[b, k]) & table[doc[b, q]],
        lambda b, h, q, k: (doc[b][q] == doc[b][k]) & table[doc[b][q]],
    ):
        assert np.array_equal(traced(rule, tensors=tensors), expected)


def test_sizes_of_captured_tensors():
    edges = fg.tensor("edges", dims=(None, 3), dtype="int32")
    assert traced(lambda b, h, q, k: edges.size(0) == 4, tensors={"edges": np.zeros((4, 3), np.int32)}).all()
    assert edges.size(1).node.attr == edges.size(-1).node.attr == 3


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int64", "float16", "float32", "bool"])
def test_stored_types(dtype):
    t = fg.tensor("t", dims=("kv",), dtype=dtype)
    array = np.array([0, 1, 2, 3, 0, 1, 2]).astype(dtype)
    got = traced(lambda b, h, q, k: t[k] if dtype == "bool" else t[k] > 1, tensors={"t": array})
    assert np.array_equal(got, np.broadcast_to(array if dtype == "bool" else array > 1, (5, 7)))


def test_a_named_dimension_of_size_one_broadcasts_and_a_number_does_not():
    bias = fg.tensor("bias", dims=("batch", "heads", "q", "kv"), dtype="float32")
    flat = np.arange(7, dtype=np.float32).reshape(1, 1, 1, 7)
    got = traced(lambda b, h, q, k: bias[b + 1, h, q, k] > 3, tensors={"bias": flat})
    assert np.array_equal(got, np.broadcast_to(K > 3, (5, 7)))
    row = fg.tensor("row", dims=(None,), dtype="int32")
    with pytest.raises(IndexError, match="tensor 'row': index 1 is outside dimension 0 of size 1"):
        traced(lambda b, h, q, k: row[k] > 3, tensors={"row": np.zeros(1, np.int32)})


@pytest.mark.parametrize(("shift", "wrong"), [(3, 7), (-1, -1)])
def test_an_index_outside_its_dimension_is_named(shift, wrong):
    t = fg.tensor("t", dims=("kv",), dtype="int32")
    with pytest.raises(IndexError, match=rf"tensor 't': index {wrong} is outside dimension 0 of size 7.*fg\.clamp"):
        traced(lambda b, h, q, k: t[q + shift] == 0, tensors={"t": np.zeros(7, np.int32)})


def test_only_live_positions_must_stay_inside():
    t = fg.tensor("t", dims=("kv",), dtype="int32")
    array = np.array([5, 0, 0, 0, 0, 0, 9], np.int32)
    got = traced(lambda b, h, q, k: t[q - k] == 5, tensors={"t": array}, live=K <= Q)
    assert np.array_equal(got, K >= Q), "others read the nearest element"
    with pytest.raises(IndexError, match="index -1 "):
        traced(lambda b, h, q, k: t[q - k] == 5, tensors={"t": array}, live=K <= Q + 1)


def test_integers_are_int64():
    variant = fg.variant(lambda b, h, q, k: (q * 65536) * 65536 > 0)
    got = evaluate(variant.mask, b=0, h=0, q=np.array([0, 1]), k=0, sizes=SIZES, params={}, tensors={})
    assert got.tolist() == [False, True]
    assert variant.mask.operands[0].dtype is DType.INT32


def test_positions_beyond_a_captured_tensor_are_found_without_evaluating():
    ids = fg.tensor("ids", dims=("batch", "kv"), dtype="int32")
    sizes = {"batch": 2, "heads": 3, "q_len": 9, "kv_len": 5}

    def check(mask, *shape, **changed):
        check_positions(fg.variant(mask).mask, {**sizes, **changed}, {"ids": np.zeros(shape, np.int32)})

    check(lambda b, h, q, k: ids[b, k] == 0, 2, 5)
    with pytest.raises(CapturedIndexError, match="tensor 'ids': index 5 is outside dimension 1 of size 5") as caught:
        check(lambda b, h, q, k: ids[b, q] == ids[b, k], 2, 5)
    assert f"at {__file__}:" in str(caught.value) and "ids[b, q] == ids[b, k], 2, 5)" in str(caught.value)
    with pytest.raises(IndexError, match="index 2 is outside dimension 0 of size 2"):
        check(lambda b, h, q, k: ids[h, k] == 0, 2, 5)
    check(lambda b, h, q, k: ids[b, q] == 0, 1, 1)  # sizes of 1 broadcast
    check(lambda b, h, q, k: ids[b, fg.minimum(q, 4)] == 0, 2, 5)
    check(lambda b, h, q, k: ids[b, q] == 0, 2, 5, kv_len=0)  # no pair, no read
