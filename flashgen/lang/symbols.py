"""Declared symbols: parameters, constants and captured tensors, in words, and the values they may be given."""

from __future__ import annotations

import numbers

from flashgen.errors import PlanError, shown
from flashgen.lang.expr import Constant, DType, Node, Param, Tensor
from flashgen.lang.stored import LARGEST, exceeds

Symbol = Param | Constant | Tensor


def symbol_of(n: Node) -> Symbol | None:
    """What a node reads that a spec declared."""
    if n.op in ("param", "constant", "load"):
        return n.attr
    return n.attr[0] if n.op == "size" else None


def summary(symbol: Symbol) -> str:
    """A declaration in words."""
    if isinstance(symbol, Tensor):
        return f"a captured tensor of {symbol.dtype}, {symbol.dims}"
    kind = "parameter" if isinstance(symbol, Param) else "constant"
    return f"the {symbol.dtype.value} {kind} (default {symbol.default}{allowed(symbol)})"


def allowed(symbol: Param | Constant) -> str:
    """Its bounds in words, behind a comma; nothing where it has none."""
    low, high = symbol.min, symbol.max
    if low is None and high is None:
        return ""
    if high is None:
        return f", at least {low}"
    return f", at most {high}" if low is None else f", in [{low}, {high}]"


def line_of(n: Node) -> str:
    """Where a node was written, in parentheses."""
    return f" (line {n.where.line} of {n.where.path})" if n.where else ""


def checked(variant_name: str, kind: str, symbol: Param | Constant, value: object) -> int | float:
    """A value for a parameter or constant, as a Python number; PlanError for a wrong type or one outside its bounds."""

    def title() -> str:
        return f"{kind} {symbol.name!r} of {variant_name!r}"

    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        cure = f"\n  nearest: {symbol.name}={symbol.name}.item()" if type(value).__name__ == "Tensor" else ""
        raise PlanError(f"{title()} is {symbol.dtype.value} and got {value!r}{cure}")
    if symbol.dtype.is_float:
        if value != value:
            raise PlanError(f"{title()} got NaN")
        if exceeds(value, "float32"):
            raise PlanError(
                f"{title()} is float32: {shown(value)} does not fit, and the largest is {LARGEST['float32']:.6g}"
            )
        number = float(value)
    else:
        whole = value.denominator == 1 if isinstance(value, numbers.Rational) else float(value).is_integer()
        if not whole:
            raise PlanError(f"{title()} is {symbol.dtype.value} and got {value!r}: give a whole number")
        number = int(value)
        bits = 32 if symbol.dtype is DType.INT32 else 64
        if not -(1 << bits - 1) <= number < 1 << bits - 1:
            limits = f"-2^{bits - 1} to 2^{bits - 1} - 1"
            raise PlanError(f"{title()} is {symbol.dtype.value}: {shown(number)} does not fit into {limits}")
    if symbol.min is not None and number < symbol.min:
        raise PlanError(f"{title()} is {number}: the least it may be is {symbol.min}")
    if symbol.max is not None and number > symbol.max:
        raise PlanError(f"{title()} is {number}: the most it may be is {symbol.max}")
    return number
