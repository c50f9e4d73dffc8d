"""Abstract values hold whatever the concrete operations give: by brute force on small integers, by search elsewhere."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashgen.lang import ranges
from flashgen.lang.expr import DType, Tensor
from flashgen.lang.ops import OPS
from flashgen.lang.ranges import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, Range, Truth

INT_BINARY = ["add", "sub", "mul", "floor_div", "mod", "minimum", "maximum"]
INT_BINARY += ["bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"]
INT_UNARY = ["neg", "abs", "bit_not"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
FLOAT_BINARY = ["add", "sub", "mul", "div", "pow", "minimum", "maximum"]
FLOAT_UNARY = ["neg", "abs", "exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "floor"]
FLOAT_UNARY += ["erf", "sin", "cos"]
LOGICAL = ["logical_and", "logical_or", "logical_xor"]


def span_of(data, values):
    """Two drawn values in order; -0.0 comes before 0.0."""
    return sorted((data.draw(values), data.draw(values)), key=lambda x: (x, math.copysign(1, x)))


def allowed(name: str, x, y):
    """Where a binary integer op is defined."""
    if name in ("floor_div", "mod"):
        return y != 0
    if name in ("shift_left", "shift_right"):
        return (y >= 0) & (y <= 63)
    return np.full(np.broadcast(x, y).shape, True)


def intervals(values):
    return [(a, b) for a, b in itertools.product(values, values) if a <= b]


def test_every_op_is_covered_here():
    covered = {*INT_BINARY, *INT_UNARY, *COMPARISONS, *FLOAT_BINARY, *FLOAT_UNARY, *LOGICAL}
    assert covered | {"logical_not", "where", "cast"} == set(OPS)


@pytest.mark.parametrize("name", INT_BINARY)
def test_integer_ops_hold_every_result_on_small_intervals_and_keep_points_exact(name):
    spans = np.array(intervals(range(-5, 6)))
    values = np.arange(-5, 6)
    pairs = np.array(list(itertools.product(range(len(spans)), repeat=2)))
    a, b = spans[pairs[:, 0]], spans[pairs[:, 1]]
    found = OPS[name].abstract(ranges.ints(a[:, 0], a[:, 1]), ranges.ints(b[:, 0], b[:, 1]))
    x, y = values[:, None], values[None, :]
    defined = allowed(name, x, y)
    result = OPS[name].python(x, np.where(defined, y, 1))
    within = (
        (a[:, 0, None, None] <= x)
        & (x <= a[:, 1, None, None])
        & (b[:, 0, None, None] <= y)
        & (y <= b[:, 1, None, None])
    ) & defined
    lowest = np.where(within, result, INT64_MAX).min((1, 2))
    highest = np.where(within, result, INT64_MIN).max((1, 2))
    assert (found.lo <= lowest).all() and (found.hi >= highest).all()
    points = (a[:, 0] == a[:, 1]) & (b[:, 0] == b[:, 1]) & within.any((1, 2))
    assert points.any()
    assert (found.lo == lowest)[points].all() and (found.hi == highest)[points].all()
    if name in ("add", "sub", "mul", "minimum", "maximum", "floor_div"):
        whole = within.any((1, 2)) & ((b[:, 0] > 0) | (b[:, 1] < 0) if name == "floor_div" else True)
        assert (found.lo == lowest)[whole].all() and (found.hi == highest)[whole].all(), "and no wider than it must be"


@pytest.mark.parametrize("name", INT_UNARY)
def test_unary_integer_ops_are_exact(name):
    spans = np.array(intervals(range(-9, 10)))
    found = OPS[name].abstract(ranges.ints(spans[:, 0], spans[:, 1]))
    for (lo, hi), low, high in zip(spans, found.lo, found.hi, strict=True):
        result = OPS[name].python(np.arange(lo, hi + 1))
        assert (low, high) == (result.min(), result.max())


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_are_exact_on_integers(name):
    for (a, b), (c, d) in itertools.product(intervals(range(-3, 4)), repeat=2):
        found = OPS[name].abstract(ranges.ints(a, b), ranges.ints(c, d))
        result = OPS[name].python(np.arange(a, b + 1)[:, None], np.arange(c, d + 1)[None])
        assert (found.may_true, found.may_false) == (result.any(), (~result).any())


@pytest.mark.parametrize("name", [*LOGICAL, "eq", "ne"])
def test_conditions_are_exact(name):
    for a, b in itertools.product([(True,), (False,), (True, False)], repeat=2):
        found = OPS[name].abstract(truth(a), truth(b))
        result = {bool(OPS[name].python(np.bool_(x), np.bool_(y))) for x, y in itertools.product(a, b)}
        assert (bool(found.may_true), bool(found.may_false)) == (True in result, False in result)


def truth(values) -> Truth:
    return Truth(np.asarray(True in values), np.asarray(False in values))


def test_not_and_where():
    flipped = OPS["logical_not"].abstract(Truth(np.asarray([True, False]), np.asarray([True, True])))
    assert flipped.may_true.tolist() == [True, True] and flipped.may_false.tolist() == [True, False]
    for c, a, b in itertools.product([(True,), (False,), (True, False)], [(0, 1), (5, 5)], [(3, 4), (-2, 9)]):
        found = OPS["where"].abstract(truth(c), ranges.ints(*a), ranges.ints(*b))
        taken = [span for value, span in ((True, a), (False, b)) if value in c]
        assert (found.lo, found.hi) == (min(s[0] for s in taken), max(s[1] for s in taken))
    for c, a, b in itertools.product([(True,), (False,), (True, False)], repeat=3):
        found = OPS["where"].abstract(truth(c), truth(a), truth(b))
        result = {x if condition else y for condition, x, y in itertools.product(c, a, b)}
        assert (bool(found.may_true), bool(found.may_false)) == (True in result, False in result)


EDGES = [0, 1, -1, 31, 63, INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX, 1 << 62, -(1 << 62), (1 << 24) - 1]
WIDE = st.one_of(
    st.sampled_from(EDGES), st.integers(-70, 70), st.integers(INT32_MIN, INT32_MAX), st.integers(INT64_MIN, INT64_MAX)
)


@pytest.mark.sampled("minimum", "maximum", "bit_and", "neg", "abs")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*INT_BINARY, *INT_UNARY])
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_integer_ops_hold_results_anywhere_in_int64(name, data):
    """Where a result leaves int64 it wraps, as the concrete operation does, and the range must still hold it."""
    spans, points = [], []
    for _ in range(OPS[name].arity):
        lo, hi = span_of(data, WIDE)
        spans.append(ranges.ints(lo, hi))
        points.append(np.asarray(data.draw(st.one_of(st.sampled_from([lo, hi]), st.integers(lo, hi))), np.int64))
    if len(points) == 2 and not allowed(name, *points):
        return
    with np.errstate(all="ignore"):
        value = OPS[name].python(*points)
    found = OPS[name].abstract(*spans)
    assert found.lo <= value <= found.hi


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_bit_ops_know_the_common_leading_bits(data):
    """A block-aligned tile inside one block is one point after >> and //, and xor of two blocks is exact."""
    block = 1 << data.draw(st.integers(0, 7))
    i, j = data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 1000))
    q = ranges.ints(i * block, i * block + block - 1)
    k = ranges.ints(j * block, j * block + block - 1)
    different = ranges.bit_xor(ranges.floor_div(q, ranges.ints(block)), ranges.floor_div(k, ranges.ints(block)))
    assert different.lo == different.hi == i ^ j
    high = ranges.bit_xor(q, k)
    assert high.lo == (i ^ j) * block and high.hi == (i ^ j) * block + block - 1
    assert ranges.bit_and(q, ranges.ints(block - 1)).hi <= block - 1


def test_mod_keeps_what_stays_inside_one_period():
    found = ranges.mod(ranges.ints([64, 64, -3, 5], [127, 128, -1, 9]), ranges.ints(64))
    assert found.lo.tolist() == [0, 0, 61, 5] and found.hi.tolist() == [63, 63, 63, 9]
    negative = ranges.mod(ranges.ints(-10, 10), ranges.ints(-4))
    assert (negative.lo, negative.hi) == (-3, 0)


def test_a_result_that_may_leave_int64_is_unknown():
    found = ranges.mul(ranges.ints(0, INT64_MAX), ranges.ints(0, 3))
    assert (found.lo, found.hi) == (INT64_MIN, INT64_MAX)


FLOATS = st.floats(width=32, allow_nan=False)


def concrete(name, points, dtype):
    with np.errstate(all="ignore"):
        return OPS[name].python(*(np.asarray(p, dtype) for p in points))


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [*FLOAT_BINARY, *FLOAT_UNARY])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_float_ops_hold_results_in_either_precision(name, dtype, data):
    spans, points = [], []
    for _ in range(OPS[name].arity):
        lo, hi = span_of(data, FLOATS)
        spans.append(ranges.floats(lo, hi))
        inside = st.floats(lo, hi, width=32) if np.isfinite([lo, hi]).all() else st.sampled_from([lo, hi])
        points.append(data.draw(st.one_of(st.sampled_from([lo, hi]), inside)))
    value = concrete(name, points, dtype)
    found = OPS[name].abstract(*spans)
    assert found.nan if np.isnan(value) else found.lo <= value <= found.hi


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_a_nan_beside_a_number_gives_the_number(name):
    nan, two = Range(np.float64(5), np.float64(6), np.True_), ranges.floats(2.0)
    for a, b in ((nan, two), (two, nan)):
        found = OPS[name].abstract(a, b)
        assert not found.nan and found.contains(2.0)
    assert OPS[name].abstract(nan, nan).nan


@pytest.mark.parametrize("name", COMPARISONS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_float_comparisons_hold_and_a_nan_makes_them_false(name, data):
    spans, points = [], []
    for _ in range(2):
        lo, hi = span_of(data, FLOATS)
        nan = data.draw(st.booleans())
        spans.append(ranges.floats(lo, hi, nan))
        points.append(np.float32(data.draw(st.sampled_from([lo, hi, *([np.nan] if nan else [])]))))
    value = OPS[name].python(*points)
    found = OPS[name].abstract(*spans)
    assert found.may_true if value else found.may_false


@pytest.mark.parametrize("target", [DType.INT32, DType.INT64])
@settings(deadline=None, max_examples=80)
@given(data=st.data())
@example(data=None)
def test_float_to_int_casts_truncate_saturate_and_send_nan_somewhere_known(target, data):
    if data is None:
        span, point = ranges.unknown(DType.FLOAT32), np.float32(np.nan)
    else:
        lo, hi = span_of(data, FLOATS)
        span, point = ranges.floats(lo, hi), np.float32(data.draw(st.sampled_from([lo, hi])))
    value = OPS["cast"].python(point, target, np.float32)
    found = OPS["cast"].abstract(span, target)
    assert found.lo <= value <= found.hi
    if np.isnan(point):
        assert value == (0 if target is DType.INT32 else INT64_MIN)
    elif abs(point) < 2**31:
        assert value == int(point)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_int_casts(data):
    lo, hi = span_of(data, WIDE)
    point = np.asarray(data.draw(st.integers(lo, hi)), np.int64)
    for target in (DType.INT32, DType.INT64, DType.FLOAT32):
        for dtype in (np.float32, np.float64):
            value = OPS["cast"].python(point, target, dtype)
            found = OPS["cast"].abstract(ranges.ints(lo, hi), target)
            assert found.lo <= value <= found.hi
    assert OPS["cast"].python(np.asarray(1 << 31), DType.INT32) == INT32_MIN, "wraps as in CUDA"


def test_conditions_cast_to_numbers():
    both = Truth(np.True_, np.True_)
    assert [int(ranges.cast(both, DType.INT32).lo), int(ranges.cast(both, DType.INT32).hi)] == [0, 1]
    assert ranges.cast(ranges.truth(True), DType.FLOAT32).lo == 1.0


def test_float_bounds_are_rounded_outward_to_float32():
    found = ranges.floats(0.1)
    assert found.lo < 0.1 < found.hi
    assert np.float32(found.lo) == found.lo and np.float32(found.hi) == found.hi
    assert ranges.floats(0.5).single


def test_tiny_results_may_be_flushed_to_zero():
    found = ranges.mul(ranges.floats(1e-30), ranges.floats(1e-15))
    assert found.lo == 0.0


def test_stored_values_follow_their_declaration():
    def element(dtype, **bounds):
        return ranges.stored(Tensor(name="t", dims=(None,), dtype=dtype, **bounds))

    assert (element("uint8").lo, element("uint8").hi) == (0, 255)
    assert (element("int32", min=3).lo, element("int32", min=3, max=9).hi) == (3, 9)
    assert element("int64").hi == INT64_MAX
    assert isinstance(element("bool"), Truth)
    assert element("float16").nan and not element("float32", min=0.0, max=1.0).nan
    assert element("float32", min=0.0).nan and element("float32", max=0.0).nan, "a NaN is not below it, nor above it"
    assert not element("float32", sorted=True).nan


def test_rules_broadcast_over_tiles():
    q = ranges.ints(np.arange(0, 640, 64)[:, None], np.arange(63, 640, 64)[:, None])
    k = ranges.ints(np.arange(0, 640, 32)[None], np.arange(31, 640, 32)[None])
    causal = ranges.le(k, q)
    assert causal.may_true.shape == (10, 20)
    assert causal.may_true[0].tolist() == [True, True] + [False] * 18
    assert causal.may_false[9].tolist() == [False] * 18 + [True] * 2
