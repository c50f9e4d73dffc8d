"""Derivatives of score functions: reverse mode over the DAG, one rule an op (the `derivative` column of the op table).

Subgradients are torch's: 1 at the edge of a clamp, equal shares at a tie of minimum or maximum, 0 for abs at 0.  Unlike
torch, a branch that a `where` does not take contributes exactly 0, though its own derivative be infinite or NaN there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

from flashgen.lang.build import apply, cast, loop, rebuild
from flashgen.lang.expr import DType, LoopIndex, Node, const, loop_indices, node, walk
from flashgen.lang.loops import LOOPS, index_node
from flashgen.lang.ops import OPS
from flashgen.lang.variant import Variant

#: The incoming score.
SCORE = node("score", DType.FLOAT32)

_ZERO = const(0.0)

#: A choice of more choices is multiplied as one value, and not each of its branches for itself.
MAX_OPENED = 8


@lru_cache(maxsize=256)
def derive(root: Node, wrt: Node = SCORE) -> Node | None:
    """The derivative of a float32 expression with respect to one of its float32 nodes: the score, or a captured load.

    None where the expression does not depend on it, or not in a way that has a derivative.  Subexpressions that the
    expression shares stay shared, and the derivative shares them with it.
    """
    return _partials(root, frozenset((wrt,))).get(wrt)


def _partials(root: Node, leaves: frozenset[Node]) -> dict[Node, Node]:
    """The derivatives of an expression by each of these nodes, while the others of them stay as they are; those that
    there are."""
    order = list(walk([root]))
    depends: set[Node] = set()
    for n in order:
        if n in leaves or (n.dtype.is_float and any(o in depends for o in n.operands)):
            depends.add(n)
    if root not in depends:
        return {}
    adjoints: dict[Node, Node] = {root: const(1.0)}
    flows = _Flows()
    for n in reversed(order):
        if n in leaves or n not in depends or n not in adjoints:
            continue
        for operand, partial in _by_operand(n, depends):
            if partial is None or operand not in depends:
                continue
            flow = flows.times(adjoints[n], partial)
            adjoints[operand] = flows.plus(adjoints.get(operand, _ZERO), flow)
    return {n: adjoint for n, adjoint in adjoints.items() if n in leaves}


def _by_operand(n: Node, depends: set[Node]) -> Iterable[tuple[Node, Node | None]]:
    """What a node is made of, each with the derivative by it.

    A sum in a loop is made of what its index does not move: the derivative by that is the sum of the body's.
    """
    if n.op not in LOOPS:
        return zip(n.operands, OPS[n.op].derivative(apply, n.operands, n), strict=True)
    rounds, body = n.operands
    around = loop_indices(n)
    parts = walk([body], into=lambda m: not loop_indices(m) <= around)
    still = frozenset(m for m in parts if loop_indices(m) <= around and m in depends)
    return [(m, _summed(n, rounds, partial)) for m, partial in _partials(body, still).items()]


def _summed(n: Node, rounds: Node, partial: Node) -> Node:
    """The sum of a derivative over the rounds of a loop."""
    if n.attr in loop_indices(partial):
        return loop("sum", rounds, index_node(n.attr), partial)
    times = cast(apply("maximum", rounds, 0), DType.FLOAT32)
    return times if partial is const(1.0) else apply("mul", times, partial)


def loads(root: Node | None, name: str) -> tuple[Node, ...]:
    """The places where an expression reads a captured tensor."""
    return tuple(n for n in walk([root] if root is not None else []) if n.op == "load" and n.attr.name == name)


def differentiable(root: Node | None) -> tuple[str, ...]:
    """The names of the captured float tensors that an expression has a derivative with respect to, sorted."""
    if root is None:
        return ()
    floats = {n.attr.name for n in walk([root]) if n.op == "load" and n.dtype.is_float}
    return tuple(sorted(f for f in floats if any(_reaches(root, n) for n in loads(root, f))))


def differentiable_of(variant: Variant) -> tuple[str, ...]:
    """The names of the captured tensors by which attention has derivatives, sorted: of its score, and its sink."""
    of_sink = () if variant.sink is None else (variant.sink.name,)
    return tuple(sorted((*differentiable(variant.score_node), *of_sink)))


def elements(load: Node) -> int:
    """How many elements a read of a captured tensor is at most for one score: one for each round of its loops."""
    return math.prod(index.most for index in loop_indices(load))


def slopes(root: Node, name: str) -> dict[Node, Node]:
    """Each element of a captured tensor that an expression has a derivative by, with that derivative.

    What the index of a loop selects is an element for each round.
    """
    found: dict[Node, Node] = {}
    for load in loads(root, name):
        for loops, slope in _paths(root, load, frozenset()):
            for element, by_element in _by_round(loops, load, slope):
                found[element] = _Flows().plus(found.get(element, _ZERO), by_element)
    return found


#: The rounds and the index of each loop around a read whose index it depends on, outermost first.
_Loops = tuple[tuple[Node, Node], ...]


def _paths(root: Node, load: Node, opened: frozenset[LoopIndex]) -> Iterator[tuple[_Loops, Node]]:
    """The ways from a captured element to the expression through different loops, each with the derivative in the
    rounds that their indices stand for."""
    left = loop_indices(load) - opened
    if not left:
        slope = _partials(root, frozenset((load,))).get(load)
        yield from () if slope is None else [((), slope)]
        return
    binding = [n for n in walk([root]) if n.op in LOOPS and n.attr in left and load in set(walk(n.operands[1:]))]
    asked = left.union(*map(loop_indices, binding))  # also by the rounds and the bodies of the loops in between
    loops_here = (n for n in walk([root]) if n.op in LOOPS and loop_indices(n) <= opened)
    around = frozenset(n for n in loops_here if n.attr in asked and load in set(walk(n.operands[1:])))
    for n, outer in _partials(root, around).items():
        rounds, body = n.operands
        for loops, inner in _paths(body, load, opened | {n.attr}):
            yield ((rounds, index_node(n.attr)), *loops), _Flows().times(outer, inner)


def _by_round(loops: _Loops, load: Node, slope: Node) -> Iterator[tuple[Node, Node]]:
    """The element and the derivative by it in each round.

    A round that a loop may not have stands for its last one, so that no index leaves its dimension, and adds 0.
    """
    if not loops:
        yield load, slope
        return
    (rounds, index), *inner = loops
    fixed = rounds.op == "const"
    for i in range(rounds.attr if fixed else index.attr.most):
        at = const(i) if fixed else apply("minimum", i, apply("maximum", apply("sub", rounds, 1), 0))

        def in_round(n: Node, at: Node = at) -> Node:
            return rebuild(n, lambda m: at if m is index else None)

        rest = tuple((in_round(times), its_index) for times, its_index in inner)
        for element, by_element in _by_round(rest, in_round(load), in_round(slope)):
            yield element, by_element if fixed else _choice(apply("lt", i, rounds), by_element, _ZERO)


def _reaches(root: Node, wrt: Node) -> bool:
    """Whether an expression has a derivative by a captured element."""
    reached = {wrt}
    for n in walk([root]):
        if not n.dtype.is_float or reached.isdisjoint(n.operands):
            continue
        partials = (None, n) if n.op in LOOPS else OPS[n.op].derivative(apply, n.operands, n)
        if any(partial is not None and o in reached for o, partial in zip(n.operands, partials, strict=True)):
            reached.add(n)
    return root in reached


class _Flows:
    """Products and sums of flows.  A choice with a 0 stays a choice, so that nothing is multiplied into the 0.

    What such a choice is made of is found once, so that both take the same few steps however deep choices nest.
    """

    def __init__(self) -> None:
        self._sizes: dict[Node, int] = {}
        self._zeros: dict[Node, Node] = {}

    def times(self, flow: Node, partial: Node) -> Node:
        """The chain rule's product."""
        pairs = ((flow, partial), (partial, flow))
        for a, b in pairs:
            if a.op == "const" and a.attr in (0, 1):
                return b if a.attr else _ZERO
        for a, b in pairs[::-1]:  # the rules' own choices are the smaller ones
            if 0 < self._size(a) <= MAX_OPENED:
                condition, chosen, otherwise = a.operands
                return _choice(condition, self.times(chosen, b), self.times(otherwise, b))
        for a, b in pairs:
            if a.op == "const" and a.attr == -1:
                return apply("neg", b)
        product = apply("mul", flow, partial)
        for a, b in pairs:
            if self._size(a) and not (b.op == "const" and math.isfinite(b.attr)):
                product = _choice(self._is_zero(a), _ZERO, product)
        return product

    def plus(self, known: Node, flow: Node) -> Node:
        """The sum of two flows; of choices by one condition, with a 0, a choice too."""
        if _ZERO in (known, flow):
            return flow if known is _ZERO else known
        small = all(0 < self._size(n) <= MAX_OPENED for n in (known, flow))
        if small and known.operands[0] is flow.operands[0]:
            condition, *chosen = known.operands
            return _choice(condition, *(self.plus(a, b) for a, b in zip(chosen, flow.operands[1:], strict=True)))
        return apply("add", known, flow)

    def _size(self, root: Node) -> int:
        """How many choices a choice with a 0 is made of, counted up to MAX_OPENED + 1; 0 for anything else."""
        sizes = self._sizes
        for n in walk([root], into=lambda n: n.op == "where" and n not in sizes):
            if n not in sizes:
                below = [sizes[o] for o in n.operands[1:]] if n.op == "where" else []
                some = any(below) or (n.op == "where" and _ZERO in n.operands[1:])
                sizes[n] = min(1 + sum(below), MAX_OPENED + 1) if some else 0
        return sizes[root]

    def _is_zero(self, root: Node) -> Node:
        """The condition that a choice is its 0."""
        zeros = self._zeros
        for n in walk([root], into=lambda n: self._size(n) > 0 and n not in zeros):
            if n not in zeros:
                opened = self._size(n) > 0
                chosen = [zeros[o] for o in n.operands[1:]] if opened else []
                zeros[n] = _choice(n.operands[0], *chosen) if opened else const(n is _ZERO)
        return zeros[root]


def _choice(condition: Node, chosen: Node, otherwise: Node) -> Node:
    return chosen if chosen is otherwise else apply("where", condition, chosen, otherwise)
