"""The one table of operations: a row holds an op's types, NumPy meaning, CUDA text, abstract rule and derivative.

Adding an operation is adding a row here, its rule on abstract values in `ranges` and, where it has one, its derivative
in `derivative_rules`, both under its name.  `build` makes nodes.

CUDA text uses C++ operators, the built-in functions that NVRTC knows without a header (min, max, abs, fminf, fmaxf,
fabsf, floorf) and these helpers, which emitted code gets from templates/device/math.cuh:

    i64                                 long long
    floor_div(a, b)  floor_mod(a, b)    int and i64; floor semantics for either sign
    ex2(x)  lg2(x)                      ex2.approx and lg2.approx
    tanh_f32(x)  sigmoid_f32(x)         from ex2; within 2^-18 of the true value, in [-1, 1], [0, 1]; tanh of itself
    sqrt_f32(x)  rsqrt_f32(x)           relative error below 2^-20
    erf_f32(x)                          within 2^-20 of the true value
    log1p_f32(x)                        relative error below 2^-19
    sin_f32(x)  cos_f32(x)              within 2^-20 of the true value where |x| <= 2^24
    pow_f32(x, y)                       for x >= 0, relative error below 2^-15 + |y| 2^-22
    LOG2E  LN2                          log2(e) and its inverse, float

`/` here is IEEE division, as masks print it; in a score the printer writes x * rcp(y), within 2 ulp.
`{0}`, `{1}`, `{2}` stand for operands that are in parentheses where they need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from flashgen.lang import ranges
from flashgen.lang.derivative_rules import RULES, Rule, flat
from flashgen.lang.expr import DType
from flashgen.lang.ranges import Abstract
from flashgen.lang.type_rules import (
    BOOL,
    FLOAT32,
    INT32,
    INT64,
    DTypes,
    alike,
    always,
    anything,
    bools,
    choice,
    first,
    floats,
    ints,
    last,
    numbers,
    shifts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    accepts     what operands of these types are cast to before the op sees them; SpecError where there is no meaning
    result      the op's type, from the types that `accepts` returned
    python      NumPy function; ints arrive as int64 arrays, floats in the evaluator's dtype (cast: also the target)
    cuda        the op's CUDA text, by the op's result type
    abstract    rule on ranges.Range and ranges.Truth (cast: also the target)
    derivative  partial derivatives by operand as nodes, which `build.apply` makes, None for none; torch's subgradients
    """

    name: str
    arity: int
    group: str
    spelling: str
    doc: str
    accepts: Callable[[str, DTypes], DTypes]
    result: Callable[[DTypes], DType]
    python: Callable[..., np.ndarray]
    cuda: Callable[[DType], str]
    abstract: Callable[..., Abstract]
    derivative: Rule


def _text(text: str, *, float32: str | None = None) -> Callable[[DType], str]:
    return lambda dtype: float32 if float32 and dtype is FLOAT32 else text


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


def _power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(np.less(x, 0), np.nan, np.power(np.abs(x), y)).astype(np.result_type(x, y))


#: NumPy has no error function.
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _erf_as_given(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    return _erf(x).astype(x.dtype) if x.size else x


def _cast(x: np.ndarray, dtype: DType, float_dtype: np.dtype = np.float32) -> np.ndarray:
    """Float to int truncates toward zero and saturates, as CUDA's conversions do."""
    x = np.asarray(x)
    if dtype is FLOAT32:
        return x.astype(float_dtype)
    if x.dtype.kind != "f":
        x = x.astype(np.int64)
        return x.astype(np.int32).astype(np.int64) if dtype is INT32 else x
    low, high = (ranges.INT32_MIN, ranges.INT32_MAX) if dtype is INT32 else (ranges.INT64_MIN, ranges.INT64_MAX)
    inside = (x > low) & (x < high)
    whole = np.where(inside, x, 0).astype(np.int64)
    of_nan = 0 if dtype is INT32 else ranges.INT64_MIN
    return np.where(inside, whole, np.where(np.isnan(x), of_nan, np.where(x < 0, low, high)))


def _op(
    name: str,
    spelling: str,
    doc: str,
    group: str,
    *,
    arity: int = 2,
    accepts: Callable[[str, DTypes], DTypes],
    result: Callable[[DTypes], DType],
    python: Callable[..., np.ndarray],
    cuda: str | Callable[[DType], str],
    abstract: Callable[..., Abstract] | None = None,
) -> Op:
    return Op(
        name=name,
        arity=arity,
        group=group,
        spelling=spelling,
        doc=doc,
        accepts=accepts,
        result=result,
        python=python,
        cuda=_text(cuda) if isinstance(cuda, str) else cuda,
        abstract=abstract or getattr(ranges, name),
        derivative=RULES.get(name, flat),
    )


def _comparison(name: str, sign: str, python: Callable, accepts: Callable[[str, DTypes], DTypes]) -> Op:
    return _op(
        name,
        f"x {sign} y",
        "numbers or conditions, to a condition" if accepts is alike else "numbers, to a condition",
        "comparison",
        accepts=accepts,
        result=always(BOOL),
        python=python,
        cuda=f"{{0}} {sign} {{1}}",
    )


def _condition(name: str, sign: str, cuda: str, python: Callable, meaning: str) -> Op:
    return _op(
        name,
        f"x {sign} y",
        f"{meaning}; put parentheses round comparisons",
        "condition",
        accepts=bools,
        result=always(BOOL),
        python=python,
        cuda=f"{{0}} {cuda} {{1}}",
    )


def _bits(name: str, sign: str, python: Callable) -> Op:
    return _op(
        name,
        f"x {sign} y",
        "integers, bit by bit in two's complement",
        "bits",
        accepts=ints,
        result=first,
        python=python,
        cuda=f"{{0}} {sign} {{1}}",
    )


def _sum(name: str, sign: str, python: Callable) -> Op:
    return _op(
        name,
        f"x {sign} y",
        "exact on integers; float32 as soon as one operand is",
        "arithmetic",
        accepts=numbers,
        result=first,
        python=python,
        cuda=f"{{0}} {sign} {{1}}",
    )


def _extremum(name: str, which: str, python: Callable, cuda: str) -> Op:
    return _op(
        name,
        f"fg.{name}(x, y)",
        f"the {which}; a NaN beside a number gives the number",
        "choice",
        accepts=numbers,
        result=first,
        python=python,
        cuda=_text(f"{cuda}({{0}}, {{1}})", float32=f"f{cuda}f({{0}}, {{1}})"),
    )


def _function(name: str, doc: str, python: Callable, cuda: str) -> Op:
    return _op(
        name,
        f"fg.{name}(x)",
        doc,
        "function",
        arity=1,
        accepts=floats,
        result=first,
        python=python,
        cuda=cuda,
    )


_COMPARISONS = (
    _comparison("eq", "==", np.equal, alike),
    _comparison("ne", "!=", np.not_equal, alike),
    _comparison("lt", "<", np.less, numbers),
    _comparison("le", "<=", np.less_equal, numbers),
    _comparison("gt", ">", np.greater, numbers),
    _comparison("ge", ">=", np.greater_equal, numbers),
)

_CONDITIONS = (
    _condition("logical_and", "&", "&&", np.logical_and, "both conditions"),
    _condition("logical_or", "|", "||", np.logical_or, "either condition"),
    _condition("logical_xor", "^", "!=", np.logical_xor, "exactly one of two conditions"),
    _op(
        "logical_not",
        "~x",
        "the opposite of a condition",
        "condition",
        arity=1,
        accepts=bools,
        result=always(BOOL),
        python=np.logical_not,
        cuda="!{0}",
    ),
)

_BITS = (
    _bits("bit_and", "&", np.bitwise_and),
    _bits("bit_or", "|", np.bitwise_or),
    _bits("bit_xor", "^", np.bitwise_xor),
    _op(
        "bit_not",
        "~x",
        "-x - 1 for an integer",
        "bits",
        arity=1,
        accepts=ints,
        result=first,
        python=np.invert,
        cuda="~{0}",
    ),
    _op(
        "shift_left",
        "x << y",
        "x times 2 to the power y, which must be known to lie in 0..31 (int64: 0..63)",
        "bits",
        accepts=shifts,
        result=first,
        python=np.left_shift,
        cuda="{0} << {1}",
    ),
    _op(
        "shift_right",
        "x >> y",
        "x over 2 to the power y, rounded down; y must be known to lie in 0..31 (int64: 0..63)",
        "bits",
        accepts=shifts,
        result=first,
        python=np.right_shift,
        cuda="{0} >> {1}",
    ),
)

_ARITHMETIC = (
    _sum("add", "+", np.add),
    _sum("sub", "-", np.subtract),
    _sum("mul", "*", np.multiply),
    _op(
        "neg",
        "-x",
        "the negative",
        "arithmetic",
        arity=1,
        accepts=numbers,
        result=first,
        python=np.negative,
        cuda="-{0}",
    ),
    _op(
        "div",
        "x / y",
        "the quotient, always float32; to 2 ulp in a score, exactly rounded in a mask",
        "arithmetic",
        accepts=floats,
        result=first,
        python=np.true_divide,
        cuda="{0} / {1}",
    ),
    _op(
        "floor_div",
        "x // y",
        "integers, rounded down as in Python; y must be known not to be 0",
        "arithmetic",
        accepts=ints,
        result=first,
        python=np.floor_divide,
        cuda="floor_div({0}, {1})",
    ),
    _op(
        "mod",
        "x % y",
        "integers, with the sign of y as in Python; y must be known not to be 0",
        "arithmetic",
        accepts=ints,
        result=first,
        python=np.mod,
        cuda="floor_mod({0}, {1})",
    ),
)

_CHOICES = (
    _op(
        "where",
        "fg.where(c, x, y)",
        "x where c holds, else y; both are evaluated",
        "choice",
        arity=3,
        accepts=choice,
        result=last,
        python=np.where,
        cuda="{0} ? {1} : {2}",
    ),
    _extremum("minimum", "smaller", np.fmin, "min"),
    _extremum("maximum", "larger", np.fmax, "max"),
    _op(
        "abs",
        "abs(x); fg.abs(x)",
        "the distance from 0",
        "choice",
        arity=1,
        accepts=numbers,
        result=first,
        python=np.absolute,
        cuda=_text("abs({0})", float32="fabsf({0})"),
        abstract=ranges.absolute,
    ),
)

_FUNCTIONS = (
    _function("exp", "e to the power x", np.exp, "ex2({0} * LOG2E)"),
    _function("exp2", "2 to the power x", np.exp2, "ex2({0})"),
    _function("log", "natural logarithm", np.log, "lg2({0}) * LN2"),
    _function("log2", "logarithm to base 2", np.log2, "lg2({0})"),
    _function("log1p", "log(1 + x), accurate near 0", np.log1p, "log1p_f32({0})"),
    _op(
        "pow",
        "fg.pow(x, c)",
        "x to the power c, a Python number: products for a whole c in -64 .. 64, else NaN below 0",
        "function",
        accepts=floats,
        result=first,
        python=_power,
        cuda="pow_f32({0}, {1})",
        abstract=ranges.power,
    ),
    _function("sin", "sine; within 2^-20 where abs(x) <= 2^24", np.sin, "sin_f32({0})"),
    _function("cos", "cosine; within 2^-20 where abs(x) <= 2^24", np.cos, "cos_f32({0})"),
    _function("erf", "error function, as in GELU", _erf_as_given, "erf_f32({0})"),
    _function("tanh", "hyperbolic tangent", np.tanh, "tanh_f32({0})"),
    _function("sigmoid", "1 / (1 + exp(-x))", _sigmoid, "sigmoid_f32({0})"),
    _function("sqrt", "square root", np.sqrt, "sqrt_f32({0})"),
    _function("rsqrt", "1 / sqrt(x)", _rsqrt, "rsqrt_f32({0})"),
    _function("floor", "the largest whole number not above x, still float32", np.floor, "floorf({0})"),
    _op(
        "cast",
        "fg.int32(x); fg.int64(x); fg.float32(x)",
        "a float becomes an integer by dropping its fraction, saturating; an int64 wraps to int32;"
        " a condition becomes 0 or 1",
        "function",
        arity=1,
        accepts=anything,
        result=first,  # `build.cast` takes the target from its caller
        python=_cast,
        cuda={INT32: "int({0})", INT64: "i64({0})", FLOAT32: "float({0})"}.__getitem__,
    ),
)

_ROWS = (*_COMPARISONS, *_CONDITIONS, *_BITS, *_ARITHMETIC, *_CHOICES, *_FUNCTIONS)

OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _ROWS})
