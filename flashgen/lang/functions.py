"""The functions of `fg` that work on traced values, and the problem's sizes as traced values."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.lang import build, source
from flashgen.lang.expr import CLAMP, DType, node
from flashgen.lang.proxies import Expr, Operand, apply, loop, node_of, power, refused


def where(condition: Operand, x: Operand, y: Operand) -> Expr:
    """`x` where `condition` holds, else `y`; both are evaluated."""
    return apply("where", condition, x, y)


def minimum(x: Operand, y: Operand) -> Expr:
    """The smaller of two numbers."""
    return apply("minimum", x, y)


def maximum(x: Operand, y: Operand) -> Expr:
    """The larger of two numbers."""
    return apply("maximum", x, y)


def clamp(x: Operand, low: Operand | None, high: Operand | None) -> Expr:
    """`x` kept inside `low` .. `high`; a bound may be None."""
    if low is None and high is None:
        raise refused("fg.clamp needs a lower or an upper bound")
    if low is not None:
        x = apply("maximum", x, low, attr=CLAMP)
    return x if high is None else apply("minimum", x, high, attr=CLAMP)


def absolute(x: Operand) -> Expr:
    """The distance of `x` from 0."""
    return apply("abs", x)


def exp(x: Operand) -> Expr:
    """e to the power `x`."""
    return apply("exp", x)


def exp2(x: Operand) -> Expr:
    """2 to the power `x`."""
    return apply("exp2", x)


def log(x: Operand) -> Expr:
    """The natural logarithm."""
    return apply("log", x)


def log2(x: Operand) -> Expr:
    """The logarithm to base 2."""
    return apply("log2", x)


def log1p(x: Operand) -> Expr:
    """log(1 + `x`), accurate where `x` is near 0."""
    return apply("log1p", x)


def pow(x: Operand, c: int | float) -> Expr:
    """`x` to the power `c`, a Python number; of integers an integer where `c` is whole and not negative."""
    return power(x, c)


def sin(x: Operand) -> Expr:
    """The sine of `x` in radians."""
    return apply("sin", x)


def cos(x: Operand) -> Expr:
    """The cosine of `x` in radians."""
    return apply("cos", x)


def erf(x: Operand) -> Expr:
    """The error function."""
    return apply("erf", x)


def tanh(x: Operand) -> Expr:
    """The hyperbolic tangent."""
    return apply("tanh", x)


def sigmoid(x: Operand) -> Expr:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def sqrt(x: Operand) -> Expr:
    """The square root."""
    return apply("sqrt", x)


def rsqrt(x: Operand) -> Expr:
    """1 / sqrt(x)."""
    return apply("rsqrt", x)


def floor(x: Operand) -> Expr:
    """The largest whole number not above `x`, as float32."""
    return apply("floor", x)


def any(n: Operand, condition: Callable[[Expr], Operand]) -> Expr:
    """Whether `condition(i)` holds for some i in 0 .. n - 1; False where there is none.

    It stays a loop in the kernel, which ends with the first i that does.  n must be known to be at most 1,024.
    """
    return loop("any", n, condition)


def sum(n: Operand, value: Callable[[Expr], Operand]) -> Expr:
    """The sum of `value(i)` for i in 0 .. n - 1, in that order; 0 where there is none.

    It stays a loop in the kernel.  n must be known to be at most 1,024.
    """
    return loop("sum", n, value)


def int32(x: Operand) -> Expr:
    """`x` as a 32-bit integer; a float loses its fraction and saturates, a condition becomes 0 or 1."""
    return Expr(build.cast(node_of(x), DType.INT32, where=source.caller()))


def int64(x: Operand) -> Expr:
    """`x` as a 64-bit integer."""
    return Expr(build.cast(node_of(x), DType.INT64, where=source.caller()))


def float32(x: Operand) -> Expr:
    """`x` as a float; a condition becomes 0.0 or 1.0."""
    return Expr(build.cast(node_of(x), DType.FLOAT32, where=source.caller()))


batch = Expr(node("problem", DType.INT32, (), "batch"))
heads = Expr(node("problem", DType.INT32, (), "heads"))
kv_heads = Expr(node("problem", DType.INT32, (), "kv_heads"))
q_len = Expr(node("problem", DType.INT32, (), "q_len"))
kv_len = Expr(node("problem", DType.INT32, (), "kv_len"))
