"""What scores take tanh of."""

from __future__ import annotations

from flashgen.lang.expr import Node, depends_on, loop_indices, walk
from flashgen.lang.loops import LOOPS
from flashgen.lang.ops import OPS

#: A cap is known to be positive if it cannot be less: its reciprocal, times any scale, is far from infinite.
LEAST_CAP = 1e-30


def takes_long(n: Node) -> bool:
    """Whether an op of a score is a loop, a function of the special unit, or a captured element for each key."""
    if n.op == "load":
        return depends_on(n, "k")
    return n.op in LOOPS or (n.op in OPS and OPS[n.op].group == "function" and n.op != "cast")


def lone_tanh(score: Node) -> Node | None:
    """The score's tanh; None without one, with several, or with one of something that takes long."""
    taken = [n for n in walk([score]) if n.op == "tanh"]
    if len(taken) != 1 or loop_indices(taken[0]):
        return None
    return None if any(n.op == "load" or takes_long(n) for n in walk(taken[0].operands)) else taken[0]


def caps_score(n: Node, tanh: Node) -> bool:
    """Whether a node is c * tanh(s / c)."""
    by = tanh.operands[0]
    if n.op != "mul" or by.op != "div":
        return False
    score, cap = by.operands
    return score.op == "score" and n.operands in ((cap, tanh), (tanh, cap))


def soft_cap(score: Node | None) -> Node | None:
    """The c of a score that is c * tanh(s / c), if it is one for the whole call and known to be positive."""
    if score is None or score.op != "mul":
        return None
    found = (n.operands[0].operands[1] for n in score.operands if n.op == "tanh" and caps_score(score, n))
    return next((cap for cap in found if _least(cap) >= LEAST_CAP), None)


def _least(cap: Node) -> float:
    """The least value of a number or a parameter."""
    if cap.op == "const":
        return float(cap.attr)
    return cap.attr.min if cap.op == "param" and cap.attr.min is not None else float("-inf")
