"""The typed expression DAG that masks and score functions are traced into.

Nodes are frozen and hash-consed: two structurally equal nodes are one object, so identity is equality and shared
subexpressions stay shared.  Nothing is rewritten but integer constants; float expressions keep the order written.
"""

from __future__ import annotations

import enum
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flashgen.errors import SourceLine
from flashgen.locks import Lock


class DType(enum.Enum):
    """The type of a node; `itemsize` in bytes."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        return {DType.BOOL: 1, DType.INT64: 8}.get(self, 4)

    @property
    def is_int(self) -> bool:
        return self in (DType.INT32, DType.INT64)

    @property
    def is_float(self) -> bool:
        return self is DType.FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A runtime scalar, passed by name at the call: a new value compiles nothing.  `min` and `max` are inclusive."""

    name: str
    dtype: DType
    default: int | float | None
    min: int | float | None = None
    max: int | float | None = None
    doc: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A named number folded at compile time; a call may override it and then compiles another kernel."""

    name: str
    dtype: DType
    default: int | float
    min: int | float | None = None
    max: int | float | None = None
    doc: str = ""


#: The names a captured tensor's dimension may have, beside a plain number.
DIMS = ("batch", "heads", "kv_heads", "q", "kv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A captured tensor: `dims` are names of DIMS, numbers, or None for any size.

    `min` and `max` bound its values; `sorted` promises that values never decrease along the last dimension, which lets
    the tile analysis bound a run of them by its two ends.  `example(problem, rng)` makes a NumPy array for `run`,
    `plan` and `show`.
    """

    name: str
    dims: tuple[str | int | None, ...]
    dtype: str  # of TENSOR_DTYPES
    min: int | float | None = None
    max: int | float | None = None
    sorted: bool = False
    example: object = field(default=None, compare=False, hash=False)
    doc: str = ""


#: Stored type of a captured tensor -> the type an element has in an expression.
TENSOR_DTYPES = {
    "bool": DType.BOOL,
    "uint8": DType.INT32,
    "int8": DType.INT32,
    "int16": DType.INT32,
    "int32": DType.INT32,
    "int64": DType.INT64,
    "float16": DType.FLOAT32,
    "bfloat16": DType.FLOAT32,
    "float32": DType.FLOAT32,
}


@dataclass(frozen=True, slots=True)
class LoopIndex:
    """The index of a loop of at most `most` rounds; a loop's level is above those of the loops in its body."""

    level: int
    most: int

    @property
    def name(self) -> str:
        """The index as people write it; one whose loop is not made yet has a number."""
        return "ijlmno"[self.level] if 0 <= self.level < 6 else f"i{abs(self.level)}"


#: Leaves.  Every other `op` but the loops (`flashgen.lang.loops`: any, sum) is a row of `flashgen.lang.ops.OPS`.
#:   const    attr = the Python value            index    attr = "b" | "h" | "q" | "k"
#:   score    the incoming score s               problem  attr = "q_len" | "kv_len" | "heads" | "kv_heads" | "batch"
#:   param    attr = Param                       constant attr = Constant (gone after Variant.bind)
#:   size     attr = (Tensor, dimension)         load     attr = Tensor, operands = one index a dimension
#:   loop_index   attr = LoopIndex               any, sum   attr = LoopIndex, operands = rounds, body
LEAVES = ("const", "index", "score", "problem", "param", "constant", "size", "loop_index")

#: The attribute of a minimum or maximum that fg.clamp made: at the edge its derivative is that of torch.clamp.
#: One that folds a row has a tuple: of how many parts its first operand is made, and of how many each part is, as its
#: second operand is.  Its derivative shares a tie among all elements of the row.
CLAMP = "clamp"

#: How deep the repr of an expression goes: written out, a shared one can be of any length.
SHOWN = 4

#: The nodes that live, by what they are: one that no expression holds any more is forgotten.
_interned: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
_interning = Lock()


class Node:
    """One operation; made by `node(...)` only.  `where` is the user's line and not part of the identity."""

    __slots__ = ("__weakref__", "attr", "dtype", "op", "operands", "where")

    op: str
    dtype: DType
    operands: tuple[Node, ...]
    attr: Any  # see above
    where: SourceLine | None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("expression nodes are frozen")

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __reduce__(self) -> Any:
        """Pickled as rows, operands by their number: a deep expression does not recurse, a shared one stays shared."""
        number: dict[Node, int] = {}
        rows = []
        for n in walk([self]):
            rows.append((n.op, n.dtype, tuple(number[o] for o in n.operands), n.attr, n.where))
            number[n] = len(number)
        return _of_rows, (rows,)

    def __repr__(self) -> str:
        return _shown(self, SHOWN)


def _of_rows(rows: Iterable[tuple]) -> Node:
    made: list[Node] = []
    for op, dtype, operands, attr, where in rows:
        made.append(node(op, dtype, (made[i] for i in operands), attr, where))
    return made[-1]


def _shown(n: Node, depth: int) -> str:
    if not depth:
        return "..."
    own = [repr(n.attr)] if n.attr is not None else []
    return f"{n.op}({', '.join([*own, *(_shown(o, depth - 1) for o in n.operands)])})"


def node(
    op: str,
    dtype: DType,
    operands: Iterable[Node] = (),
    attr: Any = None,
    where: SourceLine | None = None,
) -> Node:
    """The one node with this operation, type, operands and attribute."""
    operands = tuple(operands)
    # bool, int and float constants of equal value are different constants; so are 0.0 and -0.0.
    key = (op, dtype, operands, (type(attr), repr(attr)) if isinstance(attr, (bool, int, float)) else attr)
    found = _interned.get(key)
    if found is not None:
        return found
    made = object.__new__(Node)
    fields = {"op": op, "dtype": dtype, "operands": operands, "attr": attr, "where": where}
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    with _interning:  # two threads agree on one
        return _interned.setdefault(key, made)


def const(value: bool | int | float, dtype: DType | None = None) -> Node:
    """A constant; its type follows Python's unless given."""
    if dtype is None:
        dtype = DType.BOOL if isinstance(value, bool) else DType.FLOAT32 if isinstance(value, float) else DType.INT32
    return node("const", dtype, (), value)


def walk(roots: Iterable[Node], into: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """Every node under `roots` once, operands before users, in an order that depends on structure alone; of a node that
    `into` refuses, not what is under it."""
    done: set[Node] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            n, expanded = stack.pop()
            if n in done:
                continue
            if expanded:
                done.add(n)
                yield n
            else:
                stack.append((n, True))
                if into is not None and not into(n):
                    continue
                stack.extend((operand, False) for operand in reversed(n.operands))


def depends_on(root: Node, *positions: str) -> bool:
    """Whether a node reads one of the positions b, h, q, k."""
    return not positions_of(root).isdisjoint(positions)


_T = TypeVar("_T")


def _from_below(
    known: weakref.WeakKeyDictionary[Node, frozenset[_T]],
    root: Node,
    own: Callable[[Node, frozenset[_T]], frozenset[_T]],
) -> frozenset[_T]:
    """What `own` makes of each node and of what its operands have together, kept in `known`: that of one."""
    found = known.get(root)
    if found is None:
        for n in walk([root], into=lambda n: n not in known):
            if n not in known:
                known[n] = own(n, frozenset().union(*(known[o] for o in n.operands)))
        found = known[root]
    return found


_positions: weakref.WeakKeyDictionary[Node, frozenset[str]] = weakref.WeakKeyDictionary()


def positions_of(root: Node) -> frozenset[str]:
    """The positions that a node's value depends on; the score is one of all four."""
    return _from_below(_positions, root, _with_positions)


def _with_positions(n: Node, below: frozenset[str]) -> frozenset[str]:
    return below.union({n.attr} if n.op == "index" else "bhqk" if n.op == "score" else ())


_loop_indices: weakref.WeakKeyDictionary[Node, frozenset[LoopIndex]] = weakref.WeakKeyDictionary()


def loop_indices(root: Node) -> frozenset[LoopIndex]:
    """The indices of loops around a node that its value depends on."""
    return _from_below(_loop_indices, root, _with_loops)


def _with_loops(n: Node, below: frozenset[LoopIndex]) -> frozenset[LoopIndex]:
    own = {n.attr} if isinstance(n.attr, LoopIndex) else ()
    return below.union(own) if n.op == "loop_index" else below.difference(own)


def layer(roots: Iterable[Node], loops: tuple[LoopIndex, ...] = ()) -> list[Node]:
    """The nodes that are computed in the innermost of these nested loops, operands first; without any, outside."""
    around = frozenset(loops)
    inner = around - frozenset(loops[:-1])
    return [n for n in walk(roots) if (read := loop_indices(n)) <= around and inner <= read]


def reads_by(root: Node | None, *positions: str, known: Collection[Node] = ()) -> bool:
    """Whether an expression reads an element of a captured tensor that one of the positions b, h, q, k selects, beside
    the elements that are known; no expression reads none."""
    loads = (n for n in walk([root] if root is not None else []) if n.op == "load" and n not in known)
    return any(depends_on(n, *positions) for n in loads)


def serialize(roots: Iterable[Node]) -> str:
    """The DAG as text, a node per line: equal text means equal meaning, in every process."""
    number: dict[Node, int] = {}
    lines = []
    roots = tuple(roots)
    for n in walk(roots):
        number[n] = len(number)
        operands = " ".join(str(number[o]) for o in n.operands)
        lines.append(f"{number[n]} {n.op}:{n.dtype.value} ({operands}) {_attr_text(n.attr)}")
    lines.append("roots " + " ".join(str(number[r]) for r in roots))
    return "\n".join(lines)


def digest(roots: Iterable[Node]) -> str:
    """sha256 of `serialize`."""
    return hashlib.sha256(serialize(roots).encode()).hexdigest()


def _attr_text(attr: object) -> str:
    if isinstance(attr, Tensor):  # `example` makes data and means nothing to a kernel
        return f"Tensor({attr.name},{attr.dims},{attr.dtype},{attr.min},{attr.max},{attr.sorted})"
    if isinstance(attr, Param):  # nor do a default and a docstring
        return f"Param({attr.name},{attr.min},{attr.max})"
    if isinstance(attr, tuple):
        return "(" + ",".join(map(_attr_text, attr)) + ")"
    return repr(attr)
