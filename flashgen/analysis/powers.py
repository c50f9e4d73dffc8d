"""Scores that come as powers of two at no cost: where log2(e) joins factors that a whole tile shares."""

from __future__ import annotations

import math

from flashgen.lang.expr import DType, Node, const, node, positions_of, walk

LOG2E = math.log2(math.e)


def in_powers(score: Node) -> Node | None:
    """log2(e) times a score, of products that have been multiplied by it before: that are added to, or chosen among,
    numbers and what a tile shares.  None where a multiplication for each score is left, as of a bias by pair."""
    if score.op == "score":
        return score
    if not any(n.op == "score" for n in walk([score])):
        return _times(score)
    match score.op, score.operands:
        case ("add" | "sub" | "neg", operands):
            return _of(score, [in_powers(o) for o in operands])
        case ("where", (condition, *rest)) if not any(n.op == "score" for n in walk([condition])):
            return _of(score, [condition, *map(in_powers, rest)])
    return None


def _times(n: Node) -> Node | None:
    """log2(e) times what has no score in it."""
    if n.op == "const":
        return const(float(n.attr) * LOG2E, DType.FLOAT32)
    if not positions_of(n) & {"q", "k"}:
        return node("mul", DType.FLOAT32, (n, const(LOG2E, DType.FLOAT32)))
    match n.op, n.operands:
        case ("mul", (a, b)):
            found = _times(a) if not positions_of(a) & {"q", "k"} else None
            if found is not None:
                return _of(n, [found, b])
            found = _times(b) if not positions_of(b) & {"q", "k"} else None
            return found and _of(n, [a, found])
        case ("add" | "sub" | "neg", operands):
            return _of(n, [_times(o) for o in operands])
        case ("where", (condition, *rest)):
            return _of(n, [condition, *map(_times, rest)])
    return None


def _of(n: Node, operands: list[Node | None]) -> Node | None:
    """The same op of these."""
    found = [o for o in operands if o is not None]
    return node(n.op, n.dtype, found, n.attr, n.where) if len(found) == len(operands) else None
