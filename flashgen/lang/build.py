"""Making nodes of operations: types checked, numbers promoted, integer constants folded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import ranges
from flashgen.lang.bounds import bounds
from flashgen.lang.expr import DType, Node, Param, Tensor, const, node, walk
from flashgen.lang.loops import LOOPS, MAX_ROUNDS, closed, index_node, opened
from flashgen.lang.ops import OPS, Op

Operand = Node | bool | int | float


def apply(name: str, *operands: Operand, attr: object = None, where: SourceLine | None = None) -> Node:
    """The node of an op on nodes and Python numbers: types checked, numbers promoted, integer constants folded.

    Raises SpecError where the types have no meaning, a divisor may be 0, or a shift count may leave its type.
    """
    op = OPS[name]
    try:
        nodes = tuple(map(literal, operands))
        dtypes = op.accepts(op.spelling, tuple(n.dtype for n in nodes))
        nodes = tuple(_as(n, dtype, where) for n, dtype in zip(nodes, dtypes, strict=True))
        if name in ("floor_div", "mod"):
            _check_divisor(op, nodes[1])
        elif name in ("shift_left", "shift_right"):
            _check_shift(op, *nodes)
        if all(n.op == "const" and not n.dtype.is_float for n in nodes):
            return _fold(op, nodes)
    except SpecError as error:
        if where is None or error.where is not None:
            raise
        raise SpecError(str(error), where=where) from None
    return node(name, op.result(dtypes), nodes, attr, where)


def cast(x: Operand, dtype: DType, *, where: SourceLine | None = None) -> Node:
    """`x` as another type; nothing where it has that type already."""
    return _as(literal(x), dtype, where)


def literal(value: Operand) -> Node:
    """A Python number as a constant node; a node as it is."""
    if isinstance(value, Node):
        return value
    if isinstance(value, bool):
        return const(value)
    if isinstance(value, int):
        return _int_const(value, DType.INT32)
    if math.isnan(value):
        raise SpecError("a NaN constant: nothing can be compared with it; use -math.inf for a score that hides")
    return const(float(value))


def rebuild(root: Node, given: Callable[[Node], Node | None]) -> Node:
    """The DAG with nodes replaced where `given` gives one; what lies above them is typed and folded again."""
    done: dict[Node, Node] = {}
    for n in walk((opened(root),)):
        new = given(n)
        if new is None:
            operands = tuple(done[o] for o in n.operands)
            if n.op in LOOPS:
                new = loop(n.op, operands[0], index_node(n.attr), operands[1], where=n.where)
            elif operands == n.operands:
                new = n
            elif n.op == "cast":
                new = cast(operands[0], n.dtype, where=n.where)
            elif n.op in OPS:
                new = apply(n.op, *operands, attr=n.attr, where=n.where)
            else:
                new = node(n.op, n.dtype, operands, n.attr, n.where)
        done[n] = new
    return new


def rounds_of(op: str, rounds: Operand, *, where: SourceLine | None = None) -> tuple[Node, int]:
    """The number of rounds of a loop as a node, and the most that it may be.

    Raises SpecError where it is no integer, or not known to be at most MAX_ROUNDS.
    """
    n = literal(rounds)
    if not n.dtype.is_int:
        raise SpecError(f"fg.{op} takes a number of rounds and got {n.dtype.value}; write fg.int32(x)", where=where)
    most = int(bounds(n).hi)
    if most > MAX_ROUNDS:
        cure = _declaring(n, f"max={MAX_ROUNDS}", f"write fg.minimum(n, {MAX_ROUNDS})")
        raise SpecError(
            f"fg.{op} takes at most {MAX_ROUNDS} rounds, and may get {most:,} here; {cure}, or less", where=where
        )
    return n, most


def loop(op: str, rounds: Operand, index: Node, body: Operand, *, where: SourceLine | None = None) -> Node:
    """The loop `op` over a body that reads `index`; what is empty in any case is its constant.

    Raises SpecError where the body's type has no meaning.
    """
    n, most = rounds_of(op, rounds, where=where)
    value = literal(body)
    if op == "any" and value.dtype is not DType.BOOL:
        got = value.dtype.value
        raise SpecError(f"fg.any asks for a condition and got {got}: compare it, as in x != 0", where=where)
    if op == "sum" and value.dtype is DType.BOOL:
        raise SpecError("fg.sum adds numbers and got a condition; write fg.int32(c) to count", where=where)
    if most < 1:
        return const(float(0) if value.dtype.is_float else LOOPS[op].empty, value.dtype)
    return closed(op, n, index, value, most, where)


def _as(n: Node, dtype: DType, where: SourceLine | None) -> Node:
    if n.dtype is dtype:
        return n
    if n.op == "const" and not n.dtype.is_float:
        if dtype.is_float:
            if abs(n.attr) < 1 << 53:  # beyond, float64 would round once and float32 again
                return const(float(n.attr))
        elif dtype is DType.INT32:
            return const((n.attr - ranges.INT32_MIN) % (1 << 32) + ranges.INT32_MIN)
        else:
            return const(int(n.attr), dtype)
    return node("cast", dtype, (n,), None, where)


def _int_const(value: int, dtype: DType) -> Node:
    if not ranges.INT64_MIN <= value <= ranges.INT64_MAX:
        raise SpecError(f"the integer {value} does not fit in 64 bits")
    fits = ranges.INT32_MIN <= value <= ranges.INT32_MAX
    return const(value, dtype if fits else DType.INT64)


def _fold(op: Op, nodes: tuple[Node, ...]) -> Node:
    """The op on known integers and conditions, by its own NumPy function on exact Python integers."""
    values = [np.asarray(n.attr, np.bool_ if n.dtype is DType.BOOL else object) for n in nodes]
    value = np.asarray(op.python(*values)).item()
    dtype = op.result(tuple(n.dtype for n in nodes))
    return const(bool(value)) if dtype is DType.BOOL else _int_const(int(value), dtype)


def _check_divisor(op: Op, divisor: Node) -> None:
    known = bounds(divisor)
    if not known.contains(0) or _of_constants(divisor):
        return
    sign = "//" if op.name == "floor_div" else "%"
    if divisor.op == "const":
        raise SpecError(f"`{sign}` by 0")
    otherwise = _bounding(divisor, lambda r: not r.contains(0), f"write x {sign} fg.maximum(y, 1)")
    cure = _declaring(divisor, "min=1", otherwise)
    raise SpecError(f"the divisor of `{sign}` may be 0 (it lies in {_interval(known)}); {cure}")


def _check_shift(op: Op, value: Node, count: Node) -> None:
    most = 31 if value.dtype is DType.INT32 else 63
    known = bounds(count)
    if (known.lo >= 0 and known.hi <= most) or _of_constants(count):
        return
    sign = "<<" if op.name == "shift_left" else ">>"
    otherwise = _bounding(count, lambda r: bool(r.lo >= 0 and r.hi <= most), f"write x {sign} fg.clamp(y, 0, {most})")
    cure = _declaring(count, f"min=0, max={most}", otherwise)
    raise SpecError(f"the count of `{sign}` may leave 0..{most} (it lies in {_interval(known)}); {cure}")


def _declaring(n: Node, bounds: str, otherwise: str) -> str:
    """The cure that declares bounds for what is declared, else another."""
    if n.op not in ("param", "constant", "load"):
        return otherwise
    return f"declare fg.{'tensor' if n.op == 'load' else n.op}({n.attr.name!r}, ..., {bounds})"


def _of_constants(n: Node) -> bool:
    """Whether a value that is not known yet will be when constants are bound: it is checked then."""
    leaves = {leaf.op for leaf in walk([n]) if not leaf.operands}
    return "constant" in leaves and leaves <= {"const", "constant"}


#: Bounds that may cure a value, the weakest first.
_MINIMA, _MAXIMA = (0, *(1 << i for i in range(11))), tuple(1 << i for i in range(31, 4, -1))


def _bounding(n: Node, cured: Callable[[ranges.Range], bool], otherwise: str) -> str:
    """The one bound of what a value is made of that cures it, beside what is declared; `otherwise` where none does."""
    for leaf in dict.fromkeys(leaf for leaf in walk([n]) if leaf.op in ("param", "load")):
        declared = leaf.attr
        values = [("min", x) for x in _MINIMA if declared.min is None or x > declared.min]
        values += [("max", x) for x in _MAXIMA if declared.max is None or x < declared.max]
        for bound, value in values:
            if not _holds(declared, bound, value):
                continue
            other = node(leaf.op, leaf.dtype, leaf.operands, replace(declared, **{bound: value}), leaf.where)
            try:
                found = rebuild(n, lambda m, leaf=leaf, other=other: other if m is leaf else None)
            except SpecError:
                continue
            if cured(bounds(found)):
                kind = "tensor" if leaf.op == "load" else "param"
                return f"declare fg.{kind}({declared.name!r}, ..., {bound}={value}), or {otherwise}"
    return otherwise


def _holds(declared: Param | Tensor, bound: str, value: int) -> bool:
    """Whether a default, if there is one, and the other bound allow this one."""
    other = declared.max if bound == "min" else declared.min
    beside = [x for x in (getattr(declared, "default", None), other) if x is not None]
    return all(value <= x for x in beside) if bound == "min" else all(value >= x for x in beside)


def _interval(x: ranges.Range) -> str:
    return f"[{x.lo}, {x.hi}]"
