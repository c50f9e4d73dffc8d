"""The functions of `fg` that work on traced values, and the problem's sizes as traced values."""

from __future__ import annotations

from flashgen.lang import build, source
from flashgen.lang.expr import CLAMP, DType, node
from flashgen.lang.proxies import Expr, apply, node_of, refused


def where(condition, x, y) -> Expr:
    """`x` where `condition` holds, else `y`; both are evaluated."""
    return apply("where", condition, x, y)


def minimum(x, y) -> Expr:
    """The smaller of two numbers."""
    return apply("minimum", x, y)


def maximum(x, y) -> Expr:
    """The larger of two numbers."""
    return apply("maximum", x, y)


def clamp(x, low, high) -> Expr:
    """`x` kept inside `low` .. `high`; a bound may be None."""
    if low is None and high is None:
        raise refused("fg.clamp needs a lower or an upper bound")
    if low is not None:
        x = apply("maximum", x, low, attr=CLAMP)
    return x if high is None else apply("minimum", x, high, attr=CLAMP)


def absolute(x) -> Expr:
    """The distance of `x` from 0."""
    return apply("abs", x)


def exp(x) -> Expr:
    """e to the power `x`."""
    return apply("exp", x)


def exp2(x) -> Expr:
    """2 to the power `x`."""
    return apply("exp2", x)


def log(x) -> Expr:
    """The natural logarithm."""
    return apply("log", x)


def log2(x) -> Expr:
    """The logarithm to base 2."""
    return apply("log2", x)


def tanh(x) -> Expr:
    """The hyperbolic tangent."""
    return apply("tanh", x)


def sigmoid(x) -> Expr:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def sqrt(x) -> Expr:
    """The square root."""
    return apply("sqrt", x)


def rsqrt(x) -> Expr:
    """1 / sqrt(x)."""
    return apply("rsqrt", x)


def floor(x) -> Expr:
    """The largest whole number not above `x`, as float32."""
    return apply("floor", x)


def int32(x) -> Expr:
    """`x` as a 32-bit integer; a float loses its fraction and saturates, a condition becomes 0 or 1."""
    return Expr(build.cast(node_of(x), DType.INT32, where=source.caller()))


def int64(x) -> Expr:
    """`x` as a 64-bit integer."""
    return Expr(build.cast(node_of(x), DType.INT64, where=source.caller()))


def float32(x) -> Expr:
    """`x` as a float; a condition becomes 0.0 or 1.0."""
    return Expr(build.cast(node_of(x), DType.FLOAT32, where=source.caller()))


batch = Expr(node("problem", DType.INT32, (), "batch"))
heads = Expr(node("problem", DType.INT32, (), "heads"))
kv_heads = Expr(node("problem", DType.INT32, (), "kv_heads"))
q_len = Expr(node("problem", DType.INT32, (), "q_len"))
kv_len = Expr(node("problem", DType.INT32, (), "kv_len"))
