"""What the equalities of a mask say about the conditions beside them."""

from __future__ import annotations

from functools import reduce

from flashgen.errors import SpecError
from flashgen.lang.build import apply, rebuild
from flashgen.lang.expr import Node, positions_of, walk


def chain(root: Node) -> list[Node]:
    """The operands of a chain of & or |, left to right, each once."""
    found, stack, seen = [], [root], set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == root.op:
            stack.extend(reversed(n.operands))
        else:
            found.append(n)
    return found


def substituted(mask: Node) -> Node:
    """The mask, whose conditions beside `x == y` have x in place of y where they speak of both: the starts of
    `(doc[q] == doc[k]) & (q - start[doc[q]] >= k - start[doc[k]])` then cancel.

    One of x and y depends on the query alone, the other on the key.
    """
    nodes = list(walk([mask], into=lambda n: n.op in ("logical_and", "logical_or")))
    users: dict[Node, set[str]] = {n: set() for n in nodes}
    for n in nodes:
        for operand in n.operands if n.op in ("logical_and", "logical_or") else ():
            users[operand].add(n.op)
    done: dict[Node, Node] = {}
    for n in nodes:  # operands first
        if n.op not in ("logical_and", "logical_or"):
            done[n] = n
        elif users[n] != {n.op}:  # else it only continues a chain
            parts = [done[part] for part in chain(n)]
            written = list(parts)
            if n.op == "logical_and":
                parts = _substituted(parts)
            same = parts == written == chain(n)
            done[n] = n if same else reduce(lambda a, b, op=n.op: apply(op, a, b), parts)
    return done[mask]


def _substituted(parts: list[Node]) -> list[Node]:
    for equality in [part for part in parts if part.op == "eq" and part.operands[0].dtype.is_int]:
        x, y = equality.operands
        if {*map(lambda side: positions_of(side) & {"q", "k"}, (x, y))} == {frozenset("q"), frozenset("k")}:
            parts = [part if part is equality else _with(part, y, x) for part in parts]
    return parts


def _with(condition: Node, y: Node, x: Node) -> Node:
    """The condition with x in place of y, if it speaks of both, and has a meaning so."""
    if not {x, y} <= set(walk([condition])):
        return condition
    try:
        return rebuild(condition, lambda n: x if n is y else None)
    except SpecError:  # a divisor of which less is known
        return condition
