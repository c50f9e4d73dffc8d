"""The one table of operations: a row holds an op's types, NumPy meaning, CUDA text, abstract rule and derivative.

Adding an operation is adding a row.  `apply` makes nodes: it types, promotes, checks and folds integer constants.

CUDA text uses C++ operators, the built-in functions that NVRTC knows without a header (min, max, abs, fminf, fmaxf,
fabsf, floorf) and these helpers, which emitted code gets from templates/device/math.cuh:

    floor_div(a, b)  floor_mod(a, b)    int and long long; floor semantics for either sign
    ex2(x)  lg2(x)                      ex2.approx and lg2.approx
    tanh_f32(x)  sigmoid_f32(x)         from ex2; within 2^-18 of the true value and inside [-1, 1], [0, 1]
    sqrt_f32(x)  rsqrt_f32(x)           relative error below 2^-20
    LOG2E  LN2                          log2(e) and its inverse, float

`/` here is IEEE division, as masks print it; in a score the printer writes x * rcp(y), within 2 ulp.
`{0}`, `{1}`, `{2}` stand for operands that are in parentheses where they need them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import ranges
from flashgen.lang.expr import DType, Node, const, node, walk
from flashgen.lang.ranges import Abstract

BOOL, INT32, INT64, FLOAT32 = DType.BOOL, DType.INT32, DType.INT64, DType.FLOAT32

DTypes = tuple[DType, ...]
Operand = Node | bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    accepts     what operands of these types are cast to before the op sees them; SpecError where there is no meaning
    result      the op's type, from the types that `accepts` returned
    python      NumPy function; ints arrive as int64 arrays, floats in the evaluator's dtype (cast: also the target)
    cuda        the op's CUDA text, by the op's result type
    abstract    rule on ranges.Range and ranges.Truth (cast: also the target)
    derivative  partial derivatives by operand as nodes, None for none; torch's subgradients
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
    derivative: Callable[[tuple[Node, ...], Node], tuple[Node | None, ...]]


# ---------------------------------------------------------------------------------------------------------------------
# Type rules


def _names(dtypes: DTypes) -> str:
    return " and ".join(dtype.value for dtype in dtypes)


def _common(dtypes: DTypes) -> DTypes:
    widest = FLOAT32 if FLOAT32 in dtypes else INT64 if INT64 in dtypes else INT32
    return (widest,) * len(dtypes)


def _numbers(spelling: str, dtypes: DTypes) -> DTypes:
    if BOOL in dtypes:
        raise SpecError(
            f"`{spelling}` got {_names(dtypes)}: a condition is not a number here; "
            "write fg.where(condition, 1, 0) or fg.int32(condition)"
        )
    return _common(dtypes)


def _floats(spelling: str, dtypes: DTypes) -> DTypes:
    _numbers(spelling, dtypes)
    return (FLOAT32,) * len(dtypes)


def _ints(spelling: str, dtypes: DTypes) -> DTypes:
    if FLOAT32 in dtypes:
        cure = {"x // y": "fg.floor(x / y)", "x % y": "x - y * fg.floor(x / y)"}.get(spelling, "fg.int32(x)")
        raise SpecError(f"`{spelling}` works on integers and got {_names(dtypes)}; write {cure}")
    return _numbers(spelling, dtypes)


def _shifts(spelling: str, dtypes: DTypes) -> DTypes:
    _ints(spelling, dtypes)
    return dtypes


def _bools(spelling: str, dtypes: DTypes) -> DTypes:
    if any(dtype is not BOOL for dtype in dtypes):
        raise SpecError(
            f"`{spelling}` combines conditions and got {_names(dtypes)}; "
            "put parentheses round each comparison: (k <= q) & (q - k < w)"
        )
    return dtypes


def _alike(spelling: str, dtypes: DTypes) -> DTypes:
    return dtypes if set(dtypes) == {BOOL} else _numbers(spelling, dtypes)


def _choice(spelling: str, dtypes: DTypes) -> DTypes:
    if dtypes[0] is not BOOL:
        raise SpecError(f"the condition of fg.where is {dtypes[0].value}: compare it, as in fg.where(x != 0, a, b)")
    return (BOOL, *_alike(spelling, dtypes[1:]))


def _any(spelling: str, dtypes: DTypes) -> DTypes:
    return dtypes


def _always(dtype: DType) -> Callable[[DTypes], DType]:
    return lambda dtypes: dtype


def _first(dtypes: DTypes) -> DType:
    return dtypes[0]


def _last(dtypes: DTypes) -> DType:
    return dtypes[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Text, abstract and derivative rules that several rows share


def _text(text: str, *, float32: str | None = None) -> Callable[[DType], str]:
    return lambda dtype: float32 if float32 and dtype is FLOAT32 else text


def _flat(operands: tuple[Node, ...], out: Node) -> tuple[Node | None, ...]:
    """The derivative of what has none, or is constant almost everywhere."""
    return (None,) * len(operands)


def _of_floats(rule: Callable[..., tuple[Node | None, ...]]) -> Callable[..., tuple[Node | None, ...]]:
    """A derivative rule for the float form of an op that also works on integers."""
    return lambda operands, out: rule(operands, out) if out.dtype.is_float else _flat(operands, out)


def _unary(rule: Callable[[Node, Node], Node]) -> Callable[..., tuple[Node | None, ...]]:
    return lambda operands, out: (rule(operands[0], out),)


def _extremum(wins: str) -> Callable[..., tuple[Node | None, ...]]:
    """torch.minimum and maximum share a tie half and half; torch.clamp (attr "clamp") gives it to its first operand."""

    def rule(operands: tuple[Node, ...], out: Node) -> tuple[Node | None, ...]:
        a, b = operands
        first, tie = apply(wins, a, b), apply("eq", a, b)
        shares = (1.0, 0.0) if out.attr == CLAMP else (0.5, 0.5)
        return (
            apply("where", first, 1.0, apply("where", tie, shares[0], 0.0)),
            apply("where", first, 0.0, apply("where", tie, shares[1], 1.0)),
        )

    return _of_floats(rule)


def _sign(x: Node) -> Node:
    return apply("where", apply("gt", x, 0.0), 1.0, apply("where", apply("lt", x, 0.0), -1.0, 0.0))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


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


#: The attribute of a minimum or maximum that fg.clamp made: at the edge its derivative is that of torch.clamp.
CLAMP = "clamp"

_CASTS = {INT32: "int({0})", INT64: "(long long)({0})", FLOAT32: "float({0})"}


def _rows() -> list[Op]:
    rows: list[Op] = []

    def row(name: str, spelling: str, doc: str, group: str, **columns: object) -> None:
        arity = columns.pop("arity", 2)
        columns.setdefault("derivative", _flat)
        rows.append(Op(name=name, arity=arity, group=group, spelling=spelling, doc=doc, **columns))

    for name, sign, python, accepts in (
        ("eq", "==", np.equal, _alike),
        ("ne", "!=", np.not_equal, _alike),
        ("lt", "<", np.less, _numbers),
        ("le", "<=", np.less_equal, _numbers),
        ("gt", ">", np.greater, _numbers),
        ("ge", ">=", np.greater_equal, _numbers),
    ):
        row(
            name,
            f"x {sign} y",
            "numbers or conditions, to a condition" if accepts is _alike else "numbers, to a condition",
            "comparison",
            accepts=accepts,
            result=_always(BOOL),
            python=python,
            cuda=_text(f"{{0}} {sign} {{1}}"),
            abstract=getattr(ranges, name),
        )

    for name, sign, cuda, python, meaning in (
        ("logical_and", "&", "&&", np.logical_and, "both conditions"),
        ("logical_or", "|", "||", np.logical_or, "either condition"),
        ("logical_xor", "^", "!=", np.logical_xor, "exactly one of two conditions"),
    ):
        row(
            name,
            f"x {sign} y",
            f"{meaning}; put parentheses round comparisons",
            "condition",
            accepts=_bools,
            result=_always(BOOL),
            python=python,
            cuda=_text(f"{{0}} {cuda} {{1}}"),
            abstract=getattr(ranges, name),
        )
    row(
        "logical_not",
        "~x",
        "the opposite of a condition",
        "condition",
        arity=1,
        accepts=_bools,
        result=_always(BOOL),
        python=np.logical_not,
        cuda=_text("!{0}"),
        abstract=ranges.logical_not,
    )

    for name, sign, python in (
        ("bit_and", "&", np.bitwise_and),
        ("bit_or", "|", np.bitwise_or),
        ("bit_xor", "^", np.bitwise_xor),
    ):
        row(
            name,
            f"x {sign} y",
            "integers, bit by bit in two's complement",
            "bits",
            accepts=_ints,
            result=_first,
            python=python,
            cuda=_text(f"{{0}} {sign} {{1}}"),
            abstract=getattr(ranges, name),
        )
    row(
        "bit_not",
        "~x",
        "-x - 1 for an integer",
        "bits",
        arity=1,
        accepts=_ints,
        result=_first,
        python=np.invert,
        cuda=_text("~{0}"),
        abstract=ranges.bit_not,
    )
    row(
        "shift_left",
        "x << y",
        "x times 2 to the power y, which must be known to lie in 0..31 (int64: 0..63)",
        "bits",
        accepts=_shifts,
        result=_first,
        python=np.left_shift,
        cuda=_text("{0} << {1}"),
        abstract=ranges.shift_left,
    )
    row(
        "shift_right",
        "x >> y",
        "x over 2 to the power y, rounded down; y must be known to lie in 0..31 (int64: 0..63)",
        "bits",
        accepts=_shifts,
        result=_first,
        python=np.right_shift,
        cuda=_text("{0} >> {1}"),
        abstract=ranges.shift_right,
    )

    one, minus_one = const(1.0), const(-1.0)
    for name, sign, python, derivative in (
        ("add", "+", np.add, lambda operands, out: (one, one)),
        ("sub", "-", np.subtract, lambda operands, out: (one, minus_one)),
        ("mul", "*", np.multiply, lambda operands, out: (operands[1], operands[0])),
    ):
        row(
            name,
            f"x {sign} y",
            "exact on integers; float32 as soon as one operand is",
            "arithmetic",
            accepts=_numbers,
            result=_first,
            python=python,
            cuda=_text(f"{{0}} {sign} {{1}}"),
            abstract=getattr(ranges, name),
            derivative=_of_floats(derivative),
        )
    row(
        "neg",
        "-x",
        "the negative",
        "arithmetic",
        arity=1,
        accepts=_numbers,
        result=_first,
        python=np.negative,
        cuda=_text("-{0}"),
        abstract=ranges.neg,
        derivative=_of_floats(lambda operands, out: (minus_one,)),
    )
    row(
        "div",
        "x / y",
        "the quotient, always float32; to 2 ulp in a score, exactly rounded in a mask",
        "arithmetic",
        accepts=_floats,
        result=_first,
        python=np.true_divide,
        cuda=_text("{0} / {1}"),
        abstract=ranges.div,
        derivative=lambda operands, out: (
            apply("div", 1.0, operands[1]),
            apply("div", apply("neg", out), operands[1]),
        ),
    )
    row(
        "floor_div",
        "x // y",
        "integers, rounded down as in Python; y must be known not to be 0",
        "arithmetic",
        accepts=_ints,
        result=_first,
        python=np.floor_divide,
        cuda=_text("floor_div({0}, {1})"),
        abstract=ranges.floor_div,
    )
    row(
        "mod",
        "x % y",
        "integers, with the sign of y as in Python; y must be known not to be 0",
        "arithmetic",
        accepts=_ints,
        result=_first,
        python=np.mod,
        cuda=_text("floor_mod({0}, {1})"),
        abstract=ranges.mod,
    )

    row(
        "where",
        "fg.where(c, x, y)",
        "x where c holds, else y; both are evaluated",
        "choice",
        arity=3,
        accepts=_choice,
        result=_last,
        python=np.where,
        cuda=_text("{0} ? {1} : {2}"),
        abstract=ranges.where,
        derivative=_of_floats(
            lambda operands, out: (
                None,
                apply("where", operands[0], 1.0, 0.0),
                apply("where", operands[0], 0.0, 1.0),
            )
        ),
    )
    row(
        "minimum",
        "fg.minimum(x, y)",
        "the smaller; a NaN beside a number gives the number",
        "choice",
        accepts=_numbers,
        result=_first,
        python=np.fmin,
        cuda=_text("min({0}, {1})", float32="fminf({0}, {1})"),
        abstract=ranges.minimum,
        derivative=_extremum("lt"),
    )
    row(
        "maximum",
        "fg.maximum(x, y)",
        "the larger; a NaN beside a number gives the number",
        "choice",
        accepts=_numbers,
        result=_first,
        python=np.fmax,
        cuda=_text("max({0}, {1})", float32="fmaxf({0}, {1})"),
        abstract=ranges.maximum,
        derivative=_extremum("gt"),
    )
    row(
        "abs",
        "abs(x); fg.abs(x)",
        "the distance from 0",
        "choice",
        arity=1,
        accepts=_numbers,
        result=_first,
        python=np.absolute,
        cuda=_text("abs({0})", float32="fabsf({0})"),
        abstract=ranges.absolute,
        derivative=_of_floats(_unary(lambda x, out: _sign(x))),
    )

    ln2 = math.log(2.0)
    for name, python, cuda, doc, derivative in (
        ("exp", np.exp, "ex2({0} * LOG2E)", "e to the power x", lambda x, out: out),
        ("exp2", np.exp2, "ex2({0})", "2 to the power x", lambda x, out: apply("mul", out, ln2)),
        ("log", np.log, "lg2({0}) * LN2", "natural logarithm", lambda x, out: apply("div", 1.0, x)),
        ("log2", np.log2, "lg2({0})", "logarithm to base 2", lambda x, out: apply("div", 1 / ln2, x)),
        (
            "tanh",
            np.tanh,
            "tanh_f32({0})",
            "hyperbolic tangent",
            lambda x, out: apply("sub", 1.0, apply("mul", out, out)),
        ),
        (
            "sigmoid",
            _sigmoid,
            "sigmoid_f32({0})",
            "1 / (1 + exp(-x))",
            lambda x, out: apply("mul", out, apply("sub", 1.0, out)),
        ),
        ("sqrt", np.sqrt, "sqrt_f32({0})", "square root", lambda x, out: apply("div", 0.5, out)),
        (
            "rsqrt",
            _rsqrt,
            "rsqrt_f32({0})",
            "1 / sqrt(x)",
            lambda x, out: apply("mul", -0.5, apply("mul", out, apply("mul", out, out))),
        ),
    ):
        row(
            name,
            f"fg.{name}(x)",
            doc,
            "function",
            arity=1,
            accepts=_floats,
            result=_first,
            python=python,
            cuda=_text(cuda),
            abstract=getattr(ranges, name),
            derivative=_unary(derivative),
        )
    row(
        "floor",
        "fg.floor(x)",
        "the largest whole number not above x, still float32",
        "function",
        arity=1,
        accepts=_floats,
        result=_first,
        python=np.floor,
        cuda=_text("floorf({0})"),
        abstract=ranges.floor,
    )
    row(
        "cast",
        "fg.int32(x); fg.int64(x); fg.float32(x)",
        "a float becomes an integer by dropping its fraction, saturating; an int64 wraps to int32;"
        " a condition becomes 0 or 1",
        "function",
        arity=1,
        accepts=_any,
        result=_first,  # `apply` takes the target from its caller
        python=_cast,
        cuda=_CASTS.__getitem__,
        abstract=ranges.cast,
    )
    return rows


OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _rows()})


# ---------------------------------------------------------------------------------------------------------------------
# Making nodes


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
        return _int_const(value, INT32)
    if math.isnan(value):
        raise SpecError("a NaN constant: nothing can be compared with it; use -math.inf for a score that hides")
    return const(float(value))


def rebuild(root: Node, replace: Callable[[Node], Node | None]) -> Node:
    """The DAG with nodes replaced where `replace` gives one; what lies above them is typed and folded again."""
    done: dict[Node, Node] = {}
    for n in walk((root,)):
        new = replace(n)
        if new is None:
            operands = tuple(done[o] for o in n.operands)
            if operands == n.operands:
                new = n
            elif n.op == "cast":
                new = cast(operands[0], n.dtype, where=n.where)
            elif n.op in OPS:
                new = apply(n.op, *operands, attr=n.attr, where=n.where)
            else:
                new = node(n.op, n.dtype, operands, n.attr, n.where)
        done[n] = new
    return done[root]


def _as(n: Node, dtype: DType, where: SourceLine | None) -> Node:
    if n.dtype is dtype:
        return n
    if n.op == "const" and not n.dtype.is_float:
        if dtype.is_float:
            if abs(n.attr) < 1 << 53:  # beyond, float64 would round once and float32 again
                return const(float(n.attr))
        elif dtype is INT32:
            return const((n.attr - ranges.INT32_MIN) % (1 << 32) + ranges.INT32_MIN)
        else:
            return const(int(n.attr), dtype)
    return node("cast", dtype, (n,), None, where)


def _int_const(value: int, dtype: DType) -> Node:
    if not ranges.INT64_MIN <= value <= ranges.INT64_MAX:
        raise SpecError(f"the integer {value} does not fit in 64 bits")
    fits = ranges.INT32_MIN <= value <= ranges.INT32_MAX
    return const(value, dtype if fits else INT64)


def _fold(op: Op, nodes: tuple[Node, ...]) -> Node:
    """The op on known integers and conditions, by its own NumPy function on exact Python integers."""
    values = [np.asarray(n.attr, np.bool_ if n.dtype is BOOL else object) for n in nodes]
    value = np.asarray(op.python(*values)).item()
    dtype = op.result(tuple(n.dtype for n in nodes))
    return const(bool(value)) if dtype is BOOL else _int_const(int(value), dtype)


# ---------------------------------------------------------------------------------------------------------------------
# What declarations alone say about a value


def abstract(n: Node, *operands: Abstract) -> Abstract:
    """The abstract value of an op's node from those of its operands."""
    rule = OPS[n.op].abstract
    return rule(*operands, n.dtype) if n.op == "cast" else rule(*operands)


_bounds: weakref.WeakKeyDictionary[Node, Abstract] = weakref.WeakKeyDictionary()


def bounds(root: Node) -> Abstract:
    """What a node may be for any problem, parameter and captured data that its declarations allow."""
    for n in walk((root,)):
        if n not in _bounds:
            _bounds[n] = _bound(n)
    return _bounds[root]


def _bound(n: Node) -> Abstract:
    if n.op in ("const", "constant", "param"):
        if n.op == "const":
            return ranges.constant(n.attr, n.dtype)
        return declared(n)
    if n.op == "index":
        return ranges.ints(0, ranges.MAX_LENGTH - 1 if n.attr in ("q", "k") else ranges.INT32_MAX)
    if n.op == "problem":  # where a tile exists, none of them is 0
        return ranges.ints(1, ranges.MAX_LENGTH - 1 if n.attr in ("q_len", "kv_len") else ranges.INT32_MAX)
    if n.op == "size":
        return ranges.ints(1, ranges.INT32_MAX)
    if n.op == "load":
        return ranges.stored(n.attr)
    if n.op == "score":
        return ranges.unknown(FLOAT32)
    if n.op == "floor_div" and [(o.op, o.attr) for o in n.operands] == [("problem", "heads"), ("problem", "kv_heads")]:
        return ranges.ints(1, ranges.INT32_MAX)  # heads are a multiple of kv_heads
    return abstract(n, *(_bounds[o] for o in n.operands))


def declared(n: Node) -> Abstract:
    """The bounds that a parameter or constant was declared with."""
    whole = ranges.unknown(n.dtype)
    low = whole.lo if n.attr.min is None else n.attr.min
    high = whole.hi if n.attr.max is None else n.attr.max
    return ranges.floats(low, high) if n.dtype.is_float else ranges.ints(low, high)


def _check_divisor(op: Op, divisor: Node) -> None:
    known = bounds(divisor)
    if not known.contains(0):
        return
    sign = "//" if op.name == "floor_div" else "%"
    if divisor.op == "const":
        raise SpecError(f"`{sign}` by 0")
    if divisor.op in ("param", "constant", "load"):
        kind = {"load": "tensor"}.get(divisor.op, divisor.op)
        cure = f"declare fg.{kind}({divisor.attr.name!r}, ..., min=1)"
    else:
        cure = f"declare min= for what it is made of, or write x {sign} fg.maximum(y, 1)"
    raise SpecError(f"the divisor of `{sign}` may be 0 (it lies in {_interval(known)}); {cure}")


def _check_shift(op: Op, value: Node, count: Node) -> None:
    most = 31 if value.dtype is INT32 else 63
    known = bounds(count)
    if known.lo >= 0 and known.hi <= most:
        return
    sign = "<<" if op.name == "shift_left" else ">>"
    if count.op in ("param", "constant", "load"):
        kind = {"load": "tensor"}.get(count.op, count.op)
        cure = f"declare fg.{kind}({count.attr.name!r}, ..., min=0, max={most})"
    else:
        cure = f"write x {sign} fg.clamp(y, 0, {most})"
    raise SpecError(f"the count of `{sign}` may leave 0..{most} (it lies in {_interval(known)}); {cure}")


def _interval(x: ranges.Range) -> str:
    return f"[{x.lo}, {x.hi}]"
