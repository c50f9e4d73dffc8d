"""Scores that come as powers of two at no cost: where log2(e) joins factors that a whole tile shares."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashgen.lang.expr import DType, Node, const, node, positions_of, walk

LOG2E = math.log2(math.e)


def in_powers(score: Node) -> Node | None:
    """log2(e) times a score, of products that have been multiplied by it before: that are added to, or chosen among,
    numbers and what a tile shares.  None where a multiplication for each score is left, as of a bias by pair."""
    known: dict[Node, Node | None] = {}
    scored: set[Node] = set()  # what has a score in it
    for n in walk([score]):
        if n.op == "score" or not scored.isdisjoint(n.operands):
            scored.add(n)
        known[n] = _times(n, known, scored)
    return known[score]


def _times(n: Node, known: Mapping[Node, Node | None], scored: set[Node]) -> Node | None:
    """log2(e) times a node, whose operands' are known."""
    if n.op == "score":
        return n
    if not n.dtype.is_float:
        return None
    if n.op == "const":
        return const(float(n.attr) * LOG2E, DType.FLOAT32)
    if _shared(n):
        return node("mul", DType.FLOAT32, (n, const(LOG2E, DType.FLOAT32)))
    match n.op, n.operands:
        case ("mul", (a, b)) if n not in scored:
            if _shared(a):
                return _of(n, [known[a], b])
            return _of(n, [a, known[b]]) if _shared(b) else None
        case ("add" | "sub" | "neg", operands):
            return _of(n, [known[o] for o in operands])
        case ("where", (condition, *rest)) if condition not in scored:
            return _of(n, [condition, *(known[o] for o in rest)])
    return None


def _shared(n: Node) -> bool:
    """Whether a node is the same for all scores of a tile."""
    return not positions_of(n) & {"q", "k"}


def _of(n: Node, operands: list[Node | None]) -> Node | None:
    """The same op of these."""
    found = [o for o in operands if o is not None]
    return node(n.op, n.dtype, found, n.attr, n.where) if len(found) == len(operands) else None
