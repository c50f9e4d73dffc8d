"""Derivative rules of operations: from the operands and the op's own node, the partial by each operand.

A partial is a node, or None where there is none.  At edges and ties the rules are those of torch's subgradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from flashgen.lang.expr import CLAMP, Node, const

Partials = tuple[Node | None, ...]

#: Makes the node of an op by its name: `build.apply`, which needs the table of operations, and the table these rules.
Apply = Callable[..., Node]
Rule = Callable[[Apply, tuple[Node, ...], Node], Partials]

_ONE, _MINUS_ONE, _LN2 = const(1.0), const(-1.0), math.log(2.0)


def flat(apply: Apply, operands: tuple[Node, ...], out: Node) -> Partials:
    """Of what has none, or is constant almost everywhere."""
    return (None,) * len(operands)


def _of_floats(rule: Rule) -> Rule:
    """Of the float form of an op that also works on integers."""
    return lambda apply, operands, out: (rule if out.dtype.is_float else flat)(apply, operands, out)


def _unary(rule: Callable[[Apply, Node, Node], Node]) -> Rule:
    return lambda apply, operands, out: (rule(apply, operands[0], out),)


def _extremum(apply: Apply, operands: tuple[Node, ...], out: Node) -> Partials:
    """torch.minimum and maximum share a tie half and half; torch.clamp (attr CLAMP) gives it to its first operand; of a
    row (attr a tuple) each element that is the result has as much.

    What equals the result was chosen: beside a NaN the number, which no comparison of the operands would say.
    """
    first, second = (apply("eq", out, operand) for operand in operands)
    if out.attr == CLAMP:
        return apply("where", first, 1.0, 0.0), apply("where", first, 0.0, 1.0)
    left, right = _shares(apply, operands, out)
    return (
        apply("where", first, apply("where", second, left, 1.0), 0.0),
        apply("where", second, apply("where", first, right, 1.0), 0.0),
    )


def _shares(apply: Apply, operands: tuple[Node, ...], out: Node) -> tuple[Node, Node]:
    """What each of two operands has of a tie: as many parts as elements of a row, where it stands for those."""
    among = out.attr or (1,)
    left, right = _ties(apply, operands[0], out.op, among), _ties(apply, operands[1], out.op, among[1:])
    if left is right:
        return const(0.5), const(0.5)
    total = apply("add", left, right)
    return apply("div", left, total), apply("div", right, total)


@lru_cache(maxsize=1024)
def _ties(apply: Apply, n: Node, op: str, among: tuple[int, ...]) -> Node:
    """How many elements are equal to what `op` makes of a row: of `among[0]` parts, which are rows of the rest."""
    while among[:1] == (1,):
        among = among[1:]
    if not among or (n.op, n.attr) != (op, (among[0] - 1, *among[1:])):
        return _ONE
    parts = ((n.operands[0], n.attr), (n.operands[1], among[1:]))
    counted = (apply("where", apply("eq", n, part), _ties(apply, part, op, rest), 0.0) for part, rest in parts)
    return apply("add", *counted)


def _quotient(apply: Apply, operands: tuple[Node, ...], out: Node) -> Partials:
    return apply("div", 1.0, operands[1]), apply("div", apply("neg", out), operands[1])


def _choice(apply: Apply, operands: tuple[Node, ...], out: Node) -> Partials:
    return None, apply("where", operands[0], 1.0, 0.0), apply("where", operands[0], 0.0, 1.0)


def _sign(apply: Apply, x: Node, out: Node) -> Node:
    return apply("where", apply("gt", x, 0.0), 1.0, apply("where", apply("lt", x, 0.0), -1.0, 0.0))


def _power(apply: Apply, operands: tuple[Node, ...], out: Node) -> Partials:
    x, c = operands
    return apply("mul", c, apply("pow", x, apply("sub", c, 1.0))), None


def _of_erf(apply: Apply, x: Node, out: Node) -> Node:
    return apply("mul", 2 / math.sqrt(math.pi), apply("exp", apply("neg", apply("mul", x, x))))


def _of_tanh(apply: Apply, x: Node, out: Node) -> Node:
    return apply("sub", 1.0, apply("mul", out, out))


def _of_sigmoid(apply: Apply, x: Node, out: Node) -> Node:
    return apply("mul", out, apply("sub", 1.0, out))


def _of_rsqrt(apply: Apply, x: Node, out: Node) -> Node:
    return apply("mul", -0.5, apply("mul", out, apply("mul", out, out)))


#: The ops that have one; every other op is `flat`.
RULES: dict[str, Rule] = {
    "add": _of_floats(lambda apply, operands, out: (_ONE, _ONE)),
    "sub": _of_floats(lambda apply, operands, out: (_ONE, _MINUS_ONE)),
    "mul": _of_floats(lambda apply, operands, out: (operands[1], operands[0])),
    "neg": _of_floats(lambda apply, operands, out: (_MINUS_ONE,)),
    "div": _quotient,
    "where": _of_floats(_choice),
    "minimum": _of_floats(_extremum),
    "maximum": _of_floats(_extremum),
    "abs": _of_floats(_unary(_sign)),
    "exp": _unary(lambda apply, x, out: out),
    "exp2": _unary(lambda apply, x, out: apply("mul", out, _LN2)),
    "log": _unary(lambda apply, x, out: apply("div", 1.0, x)),
    "log2": _unary(lambda apply, x, out: apply("div", 1 / _LN2, x)),
    "log1p": _unary(lambda apply, x, out: apply("div", 1.0, apply("add", 1.0, x))),
    "pow": _power,
    "sin": _unary(lambda apply, x, out: apply("cos", x)),
    "cos": _unary(lambda apply, x, out: apply("neg", apply("sin", x))),
    "erf": _unary(_of_erf),
    "tanh": _unary(_of_tanh),
    "sigmoid": _unary(_of_sigmoid),
    "sqrt": _unary(lambda apply, x, out: apply("div", 0.5, out)),
    "rsqrt": _unary(_of_rsqrt),
}
