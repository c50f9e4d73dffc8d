"""The loops of the language: an operation of the table folded over values that an index gives, as `fg.any` folds `|`.

A loop is a node of two operands, the number of rounds and the body; its attribute is the `LoopIndex` that the body
reads.  Whoever walks expressions meets the body as any operand.  Whoever computes values takes a node in the innermost
of the loops whose index it depends on (`expr.layer`), so what no index moves is computed once, before the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from flashgen.lang import ranges
from flashgen.lang.expr import DType, LoopIndex, Node, node, walk
from flashgen.lang.ops import OPS, Op
from flashgen.lang.ranges import Abstract, Range, Truth

#: Rounds that a loop must be known not to pass.
MAX_ROUNDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop: its line of the language table, the name of the op that it folds, and what no round at all gives."""

    spelling: str
    doc: str
    combine: str
    empty: bool | int

    @property
    def op(self) -> Op:
        return OPS[self.combine]


LOOPS: Mapping[str, Loop] = {
    "any": Loop(
        spelling="fg.any(n, lambda i: c)",
        doc=f"whether c holds for some i in 0 .. n - 1; n must be known to be at most {MAX_ROUNDS}",
        combine="logical_or",
        empty=False,
    ),
    "sum": Loop(
        spelling="fg.sum(n, lambda i: x)",
        doc=f"the sum of x for i in 0 .. n - 1, in that order; n must be known to be at most {MAX_ROUNDS}",
        combine="add",
        empty=0,
    ),
}

_fresh = itertools.count(1)


def fresh(most: int) -> Node:
    """An index that no other loop has: of a loop that is not made yet."""
    return index_node(LoopIndex(level=-next(_fresh), most=most))


def index_node(index: LoopIndex) -> Node:
    return node("loop_index", DType.INT32, (), index)


def closed(op: str, rounds: Node, index: Node, body: Node, most: int, where: object = None) -> Node:
    """The loop over a body that reads `index`, at most so often.  Its own index is one level above those of the loops
    inside, so that equal loops are one node and no index hides another."""
    levels = [n.attr.level for n in walk([body]) if n.op in LOOPS]
    own = index_node(LoopIndex(level=1 + max(levels, default=-1), most=most))
    return node(op, body.dtype, (rounds, _renamed(body, index, own)), own.attr, where)


def opened(root: Node) -> Node:
    """The expression with a fresh index in each loop: then whatever is put into a body is not taken for its own."""
    done: dict[Node, Node] = {}
    for n in walk([root]):
        operands = tuple(done[o] for o in n.operands)
        if n.op in LOOPS:
            rounds, body = operands
            own = fresh(n.attr.most)
            done[n] = node(n.op, n.dtype, (rounds, _renamed(body, index_node(n.attr), own)), own.attr, n.where)
        else:
            done[n] = n if operands == n.operands else node(n.op, n.dtype, operands, n.attr, n.where)
    return done[root]


def _renamed(root: Node, old: Node, new: Node) -> Node:
    done: dict[Node, Node] = {old: new}
    for n in walk([root]):
        if n not in done:
            operands = tuple(done[o] for o in n.operands)
            done[n] = n if operands == n.operands else node(n.op, n.dtype, operands, n.attr, n.where)
    return done[root]


# ---------------------------------------------------------------------------------------------------------------------
# Abstract values


def at_once(op: str, rounds: Range, body: Abstract) -> Abstract:
    """The abstract value of a loop from that of its body over all rounds."""
    if isinstance(body, Truth):
        return Truth(body.may_true & (rounds.hi >= 1), body.may_false | (rounds.lo < 1))
    times = ranges.ints(np.maximum(rounds.lo, 0), np.maximum(rounds.hi, 0))
    if not body.is_float:
        return ranges.mul(times, body)
    total = ranges.mul(ranges.cast(times, DType.FLOAT32), body)
    # Each of the additions rounds; infinities of both signs make a NaN.
    margin = times.hi * 2.0**-23
    with np.errstate(all="ignore"):
        lo, hi = total.lo - np.abs(total.lo) * margin, total.hi + np.abs(total.hi) * margin
    return ranges.floats(lo, hi, total.nan | ((total.lo == -np.inf) & (total.hi == np.inf)))


def by_round(op: str, rounds: Range, body: Callable[[int], Abstract], dtype: DType) -> Abstract:
    """The abstract value of a loop from that of its body in each round."""
    loop = LOOPS[op]
    found = ranges.constant(float(loop.empty) if dtype.is_float else loop.empty, dtype)
    for i in range(int(np.max(rounds.hi, initial=0))):
        after = loop.op.abstract(found, body(i))
        found = _picked(i < rounds.lo, after, _picked(i < rounds.hi, ranges.hull(found, after), found))
    return found


def _picked(condition: np.ndarray, a: Abstract, b: Abstract) -> Abstract:
    if isinstance(a, Truth):
        return Truth(*(np.where(condition, getattr(a, part), getattr(b, part)) for part in ("may_true", "may_false")))
    return Range(*(np.where(condition, getattr(a, part), getattr(b, part)) for part in ("lo", "hi", "nan")))
