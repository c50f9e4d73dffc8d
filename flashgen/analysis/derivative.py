"""Derivatives of score functions: reverse mode over the DAG, one rule an op (the `derivative` column of the op table).

Subgradients are torch's: 1 at the edge of a clamp, half each at a tie of minimum or maximum, 0 for abs at 0.  Unlike
torch, a branch that a `where` does not take contributes exactly 0, though its own derivative be infinite or NaN there.
"""

from __future__ import annotations

from flashgen.lang.build import apply
from flashgen.lang.expr import DType, Node, const, node, walk
from flashgen.lang.ops import OPS

#: The incoming score.
SCORE = node("score", DType.FLOAT32)

_ZERO = const(0.0)


def derive(root: Node, wrt: Node = SCORE) -> Node | None:
    """The derivative of a float32 expression with respect to one of its float32 nodes: the score, or a captured load.

    None where the expression does not depend on it, or not in a way that has a derivative.  Subexpressions that the
    expression shares stay shared, and the derivative shares them with it.
    """
    order = list(walk([root]))
    depends: set[Node] = set()
    for n in order:
        if n is wrt or (n.dtype.is_float and any(o in depends for o in n.operands)):
            depends.add(n)
    if root not in depends:
        return None
    adjoints: dict[Node, Node] = {root: const(1.0)}
    for n in reversed(order):
        if n is wrt or n not in depends or n not in adjoints:
            continue
        for operand, partial in zip(n.operands, OPS[n.op].derivative(n.operands, n), strict=True):
            if partial is None or operand not in depends:
                continue
            flow = _times(adjoints[n], partial)
            adjoints[operand] = _plus(adjoints.get(operand, _ZERO), flow)
    return adjoints.get(wrt)


def loads(root: Node, name: str) -> tuple[Node, ...]:
    """The places where an expression reads a captured tensor."""
    return tuple(n for n in walk([root]) if n.op == "load" and n.attr.name == name)


def differentiable(root: Node | None) -> tuple[str, ...]:
    """The names of the captured float tensors that an expression has a derivative with respect to, sorted."""
    if root is None:
        return ()
    floats = {n.attr.name for n in walk([root]) if n.op == "load" and n.dtype.is_float}
    return tuple(sorted(f for f in floats if any(derive(root, wrt=n) is not None for n in loads(root, f))))


def _times(flow: Node, partial: Node) -> Node:
    """The chain rule's product; a choice with a 0 stays a choice, so that nothing is multiplied into it."""
    pairs = ((flow, partial), (partial, flow))
    for a, b in pairs:
        if a.op == "const" and a.attr in (0, 1):
            return b if a.attr else _ZERO
    for a, b in pairs:
        if _chooses_zero(a):
            condition, chosen, otherwise = a.operands
            return _choice(condition, _times(chosen, b), _times(otherwise, b))
    for a, b in pairs:
        if a.op == "const" and a.attr == -1:
            return apply("neg", b)
    return apply("mul", flow, partial)


def _plus(known: Node, flow: Node) -> Node:
    """The sum of two flows; of choices by one condition, with a 0, a choice too."""
    if _ZERO in (known, flow):
        return flow if known is _ZERO else known
    if _chooses_zero(known) and _chooses_zero(flow) and known.operands[0] is flow.operands[0]:
        condition, *chosen = known.operands
        return _choice(condition, *(_plus(a, b) for a, b in zip(chosen, flow.operands[1:], strict=True)))
    return apply("add", known, flow)


def _choice(condition: Node, chosen: Node, otherwise: Node) -> Node:
    return chosen if chosen is otherwise else apply("where", condition, chosen, otherwise)


def _chooses_zero(n: Node) -> bool:
    return n.op == "where" and any(o is _ZERO or _chooses_zero(o) for o in n.operands[1:])
