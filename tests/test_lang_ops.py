"""The op table: every column filled and the columns checked against each other; types, promotion, folding."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import SpecError
from flashgen.lang import build, ops, ranges
from flashgen.lang.bounds import bounds
from flashgen.lang.build import apply, cast
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import CLAMP, LEAVES, DType, Param, const, node
from flashgen.lang.ops import OPS
from flashgen.lang.ranges import INT32_MAX, INT64_MAX

BOOL, INT32, INT64, FLOAT32 = DType.BOOL, DType.INT32, DType.INT64, DType.FLOAT32


def variable(name: str, dtype: DType, **bounds):
    return node("param", dtype, (), Param(name=name, dtype=dtype, default=None, **bounds))


def value(root, float_dtype=np.float64, **params):
    return evaluate(root, sizes={}, params=params, tensors={}, float_dtype=float_dtype)


X, Y = variable("x", FLOAT32), variable("y", FLOAT32)
M, N, NONZERO, COUNT = (
    variable("i", INT32),
    variable("j", INT32),
    variable("nonzero", INT32, min=1),
    variable("count", INT32, min=0, max=31),
)
P, Q = apply("lt", X, 0.0), apply("lt", Y, 0.0)


def operands(name: str):
    """Typical operand nodes of an op, once for each kind of value that it takes."""
    if name.startswith("logical_"):
        return [(P, Q)[: OPS[name].arity]]
    if name in ("floor_div", "mod"):
        return [(M, NONZERO)]
    if name.startswith("shift"):
        return [(M, COUNT)]
    if name.startswith("bit_"):
        return [(M, N)[: OPS[name].arity]]
    if name == "pow":
        return [(X, const(1.7))]
    if name == "where":
        return [(P, X, Y), (P, M, N), (P, Q, P)]
    if OPS[name].group == "function" or name == "div":
        return [(X, Y)[: OPS[name].arity]]
    return [(X, Y)[: OPS[name].arity], (M, N)[: OPS[name].arity]]


# ---------------------------------------------------------------------------------------------------------------------
# The table


@pytest.mark.parametrize("name", OPS)
def test_a_row_has_every_column(name):
    op = OPS[name]
    assert op.name == name and name not in (*LEAVES, "load")
    assert op.doc and op.spelling and op.group
    for column in fields(op):
        if column.name in ("accepts", "result", "python", "cuda", "abstract", "derivative"):
            assert callable(getattr(op, column.name)), column.name


def test_every_abstract_rule_takes_as_many_operands_as_the_op():
    for op in OPS.values():
        expected = op.arity + (op.name == "cast")
        assert len(inspect.signature(op.abstract).parameters) == expected, op.name


#: What the operators and helpers of the CUDA text mean, on Python numbers.
CUDA = {
    "i64": int,
    "floor_div": lambda a, b: a // b,
    "floor_mod": lambda a, b: a % b,
    "ex2": lambda x: 2.0**x,
    "lg2": math.log2,
    "tanh_f32": math.tanh,
    "sigmoid_f32": lambda x: 1 / (1 + math.exp(-x)),
    "sqrt_f32": math.sqrt,
    "rsqrt_f32": lambda x: 1 / math.sqrt(x),
    "erf_f32": math.erf,
    "log1p_f32": math.log1p,
    "sin_f32": math.sin,
    "cos_f32": math.cos,
    "pow_f32": lambda x, y: x**y,
    "LOG2E": math.log2(math.e),
    "LN2": math.log(2),
    "min": min,
    "max": max,
    "abs": abs,
    "fminf": min,
    "fmaxf": max,
    "fabsf": abs,
    "floorf": math.floor,
}


def run_cuda(text: str, *values):
    """The value of a row's CUDA text."""
    text = text.format(*(f"({v!r})" for v in values))
    if " ? " in text:
        condition, rest = text.split(" ? ")
        yes, no = rest.split(" : ")
        text = f"{yes} if {condition} else {no}"
    text = text.replace("&&", "and").replace("||", "or").replace("(long long)", "int")
    if text.startswith("!("):
        text = "not " + text[1:]
    return eval(text, {**CUDA, "__builtins__": {"int": int, "float": float}})


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_cuda_text_means_what_numpy_computes(name, data):
    positive = name in ("log", "log2", "log1p", "pow", "sqrt", "rsqrt")
    floats = st.floats(0.0625, 50.0) if positive else st.floats(-50.0, 50.0).filter(lambda x: abs(x) > 1e-3)
    drawn = {BOOL: st.booleans(), INT32: st.integers(-99, 99), FLOAT32: floats}
    cases = [(X,), (M,)] if name == "cast" else operands(name)
    for nodes in cases:
        values = [data.draw(drawn[n.dtype]) for n in nodes]
        if name in ("floor_div", "mod"):
            values[1] = values[1] or 7
        if name.startswith("shift"):
            values[1] %= 32
        arrays = [np.asarray(v) for v in values]
        if name == "cast":
            for target in (INT32, INT64, FLOAT32):
                result = OPS[name].python(arrays[0], target, np.float64)
                assert result == run_cuda(OPS[name].cuda(target), *values)
            continue
        text = OPS[name].cuda(apply(name, *nodes).dtype)
        assert math.isclose(OPS[name].python(*arrays), run_cuda(text, *values), rel_tol=1e-9, abs_tol=1e-12)


def test_cuda_text_uses_only_documented_helpers():
    import re

    for op in OPS.values():
        for dtype in (INT32, INT64, FLOAT32):
            for word in re.findall(r"[A-Za-z_]\w*", op.cuda(dtype)):
                assert word in CUDA or word in ("int", "long", "float"), (op.name, word)
    assert all(name in ops.__doc__ for name in CUDA)


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives


@pytest.mark.parametrize("name", OPS)
def test_derivatives_match_finite_differences(name):
    if name == "cast":
        return
    rng = np.random.default_rng(7)
    for nodes in operands(name):
        out = apply(name, *nodes)
        partials = OPS[name].derivative(apply, nodes, out)
        assert len(partials) == len(nodes)
        if not out.dtype.is_float:
            assert set(partials) == {None}
            continue
        for _ in range(20):
            at = {"x": rng.uniform(0.2, 3), "y": rng.uniform(0.2, 3)}
            if name not in ("log", "log2", "log1p", "pow", "sqrt", "rsqrt", "where"):
                at = {key: v * rng.choice([-1, 1]) for key, v in at.items()}
            for operand, partial in zip(nodes, partials, strict=True):
                if operand.op != "param":
                    assert partial is None
                    continue
                moved = operand.attr.name
                step = 1e-6
                high = value(out, **{**at, moved: at[moved] + step})
                low = value(out, **{**at, moved: at[moved] - step})
                exact = 0.0 if partial is None else value(partial, **at)
                assert math.isclose(exact, (high - low) / (2 * step), rel_tol=1e-6, abs_tol=1e-6)


def test_subgradients_are_those_of_torch():
    import torch

    def torch_gradients(function, *values):
        leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
        function(*leaves).backward()
        return [leaf.grad.item() for leaf in leaves]

    def ours(name, x, y, attr=None):
        nodes = (X, Y)[: OPS[name].arity]
        out = apply(name, *nodes, attr=attr)
        return [float(value(p, x=x, y=y)) for p in OPS[name].derivative(apply, nodes, out)]

    assert ours("abs", 0.0, 0.0) == torch_gradients(torch.abs, 0.0) == [0.0]
    for a, b in itertools.product((-1.0, 0.0, 2.0), repeat=2):
        assert ours("maximum", a, b) == torch_gradients(torch.maximum, a, b)
        assert ours("minimum", a, b) == torch_gradients(torch.minimum, a, b)
        assert ours("maximum", a, b, CLAMP) == torch_gradients(lambda x, low: torch.clamp(x, min=low), a, b)
        assert ours("minimum", a, b, CLAMP) == torch_gradients(lambda x, high: torch.clamp(x, max=high), a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Types


def test_operands_are_promoted_by_casts():
    assert apply("add", M, X) is apply("add", node("cast", FLOAT32, (M,)), X)
    wide = variable("wide", INT64)
    assert apply("add", M, wide).dtype is INT64
    assert apply("div", M, N).dtype is FLOAT32, "/ is never an integer"
    assert apply("exp", M).operands[0].op == "cast"
    assert apply("shift_right", wide, COUNT).dtype is INT64 and apply("shift_right", M, COUNT).dtype is INT32


def test_python_numbers_take_the_type_of_what_they_meet():
    assert apply("mul", X, 2).operands[1] is const(2.0)
    assert apply("eq", variable("wide", INT64), 3).operands[1] is const(3, INT64)
    assert apply("lt", M, 0.5).operands[0].op == "cast"


def test_a_cast_to_the_same_type_is_nothing():
    assert cast(M, INT32) is M
    assert cast(cast(M, INT64), INT64).op == "cast"


@pytest.mark.parametrize(
    ("name", "nodes", "cure"),
    [
        ("add", (P, M), "fg.where(condition, 1, 0)"),
        ("lt", (P, Q), "fg.where(condition, 1, 0)"),
        ("exp", (P,), "fg.where(condition, 1, 0)"),
        ("eq", (P, M), "fg.int32(condition)"),
        ("floor_div", (X, M), "fg.floor(x / y)"),
        ("mod", (X, 2.0), "x - y * fg.floor(x / y)"),
        ("bit_and", (X, M), "fg.int32(x)"),
        ("shift_left", (X, 1), "fg.int32(x)"),
        ("logical_and", (P, M), "parentheses"),
        ("where", (M, X, Y), "fg.where(x != 0, a, b)"),
        ("where", (P, Q, M), "fg.where(condition, 1, 0)"),
    ],
)
def test_operands_without_a_meaning_are_refused_with_the_cure(name, nodes, cure):
    with pytest.raises(SpecError) as caught:
        apply(name, *nodes)
    assert cure in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Folding


def test_integer_constants_fold_and_floats_do_not():
    assert apply("floor_div", const(-7), const(2)) is const(-4)
    assert apply("mod", -7, 3) is const(2)
    assert apply("lt", 1, 2) is const(True)
    assert apply("logical_not", True) is const(False)
    assert apply("where", True, 3, 4) is const(3)
    assert apply("maximum", 3, 9) is const(9) and apply("abs", -4) is const(4)
    for written in (apply("add", 1.0, 2.0), apply("add", M, 0), apply("mul", X, 1.0), apply("logical_and", P, True)):
        assert written.op != "const" and len(written.operands) == 2, "nothing else is rewritten"


def test_folding_is_exact_beyond_32_bits_and_refuses_beyond_64():
    assert apply("mul", 1 << 20, 1 << 20) is const(1 << 40, INT64)
    assert apply("add", INT32_MAX, 1).dtype is INT64
    with pytest.raises(SpecError, match="64 bits"):
        apply("add", INT64_MAX, 1)


@settings(deadline=None, max_examples=200)
@given(st.integers(-(1 << 30), 1 << 30), st.integers(-(1 << 30), 1 << 30), st.sampled_from(sorted(OPS)))
def test_folding_agrees_with_evaluation(a, b, name):
    op = OPS[name]
    if op.group not in ("bits", "arithmetic", "comparison", "choice") or name in ("div", "where"):
        return
    if name in ("floor_div", "mod"):
        b = b or 1
    if name.startswith("shift"):
        a, b = a % 1000, b % 32
    folded = apply(name, *(a, b)[: op.arity])
    assert folded.op == "const"
    assert folded.attr == op.python(*(np.asarray(v, np.int64) for v in (a, b)[: op.arity]))


def test_casts_of_constants_fold_where_they_are_exact():
    assert cast(const(3), FLOAT32) is const(3.0)
    assert cast(const(True), INT32) is const(1)
    assert cast(const((1 << 32) + 5, INT64), INT32) is const(5), "wraps as in CUDA"
    assert cast(const(2.5), INT32).op == "cast", "a float is left as written"
    assert cast(const((1 << 60) + 1, INT64), FLOAT32).op == "cast"


def test_nan_is_refused_and_infinity_is_not():
    with pytest.raises(SpecError, match="NaN"):
        apply("add", X, math.nan)
    assert apply("add", X, -math.inf).operands[1].attr == -math.inf


def test_signed_zeros_and_types_keep_constants_apart():
    assert const(0.0) is not const(-0.0) and const(0) is not const(False) and const(1) is not const(1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Divisors and shift counts


@pytest.mark.parametrize("name", ["floor_div", "mod"])
def test_a_divisor_that_may_be_zero_is_refused_with_what_to_declare(name):
    with pytest.raises(SpecError, match=r"may be 0 .*declare fg\.param\('j', \.\.\., min=1\)"):
        apply(name, M, N)
    with pytest.raises(SpecError, match="by 0"):
        apply(name, M, 0)
    with pytest.raises(SpecError, match=r"fg\.maximum\(y, 1\)"):
        apply(name, M, apply("sub", NONZERO, 1))
    apply(name, M, apply("maximum", N, 1))
    apply(name, M, apply("add", apply("mul", NONZERO, NONZERO), 1))
    apply(name, M, apply("sub", -1, COUNT))


def test_problem_sizes_are_known_not_to_be_zero():
    size = {name: node("problem", INT32, (), name) for name in ("batch", "heads", "kv_heads", "q_len", "kv_len")}
    for divisor in size.values():
        apply("mod", M, divisor)
    group = apply("floor_div", size["heads"], size["kv_heads"])
    assert bounds(group).lo == 1
    apply("floor_div", node("index", INT32, (), "h"), group)
    with pytest.raises(SpecError, match="may be 0"):
        apply("floor_div", M, apply("floor_div", size["kv_heads"], size["heads"]))


def test_a_shift_count_must_be_known_to_fit():
    with pytest.raises(SpecError, match=r"may leave 0\.\.31 .*declare fg\.param\('j', \.\.\., min=0, max=31\)"):
        apply("shift_right", M, N)
    with pytest.raises(SpecError, match=r"fg\.clamp\(y, 0, 31\)"):
        apply("shift_left", M, apply("add", COUNT, 1))
    apply("shift_left", cast(M, INT64), apply("add", COUNT, 1))
    apply("shift_left", 1, apply("mod", N, 32))


# ---------------------------------------------------------------------------------------------------------------------
# Rebuilding


def test_rebuild_replaces_folds_and_keeps_the_rest():
    q, k = node("index", INT32, (), "q"), node("index", INT32, (), "k")
    mask = apply("eq", apply("floor_div", q, NONZERO), apply("floor_div", k, NONZERO))
    four = build.rebuild(mask, lambda n: const(4) if n is NONZERO else None)
    assert four is apply("eq", apply("floor_div", q, 4), apply("floor_div", k, 4))
    assert build.rebuild(mask, lambda n: None) is mask
    edge = apply("maximum", X, 0.0, attr=CLAMP)
    assert build.rebuild(edge, lambda n: Y if n is X else None) is apply("maximum", Y, 0.0, attr=CLAMP)


def test_bounds_hold_what_evaluation_gives():
    q = node("index", INT32, (), "q")
    root = apply("mod", apply("mul", q, NONZERO), apply("add", COUNT, 3))
    found = bounds(root)
    assert (found.lo, found.hi) == (0, 33)
    assert isinstance(bounds(apply("lt", q, -1)), ranges.Truth)
    assert not bounds(apply("lt", q, 0)).may_true
