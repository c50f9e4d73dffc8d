"""Summaries: what of a mask only its values tell, bounded over each tile by the least and the greatest of them.

A part of a condition that a query alone decides, or a key alone, and that reads elements in an order that nothing
promises, or mixes the bits of the position, has no bounds but those of its values.  They are found in O(length), once a
call: over each tile of queries, or of keys.  A condition on a tile is then judged by these (see `tiles`), never by its
pairs.

So is an element of a table that both select, each by a quotient: over each tile, in O(elements) of the table.

Where a summary of keys is of integers, its values over a tile are two groups: those up to the middle of their range,
and those above.  The tile is judged by both: a cache that goes round has a tile of its oldest and its newest positions,
and none in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from flashgen.analysis.cells import cornered, quotient
from flashgen.analysis.linear import FITS, LENGTH, Algebra, Linear, expression
from flashgen.lang.build import apply, rebuild
from flashgen.lang.expr import DType, Node, depends_on, digest, loop_indices, positions_of, walk

#: Parts of one mask that are summarised at most; of more, the others are bounded by what is declared.
MOST = 8

_MIXES = ("bit_or", "bit_xor")

_COMPARISONS = ("le", "lt", "eq", "ne", "ge", "gt")

#: Ops that keep the order of one operand, or turn it round, where the other is the same throughout the tile: what is
#: known of the least and greatest value of the operand is then known of theirs.
_MONOTONE = ("add", "sub", "neg", "minimum", "maximum", "logical_not", "le", "lt", "ge", "gt")


class Group(IntEnum):
    """Values over a tile: those up to the middle of their range, and those above; both where all are equal."""

    LOW = 0
    HIGH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A part of a mask whose values are bounded tile by tile: of queries ("q"), of keys ("k"), or of both ("qk"): then
    it changes at multiples of `steps` queries, and keys.

    `name` tells it from the mask's others; `grouped`: its values are two groups.
    """

    name: str
    value: Node
    side: Literal["q", "k", "qk"]
    steps: tuple[int, int] = (1, 1)
    grouped: bool = False

    @property
    def by_batch(self) -> bool:
        return depends_on(self.value, "b")

    @property
    def by_head(self) -> bool:
        return depends_on(self.value, "h")

    @property
    def pairs(self) -> bool:
        """Whether it is a condition that has an element for each pair."""
        return self.side == "qk" and self.steps == (1, 1) and self.value.dtype is DType.BOOL

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the captured tensors that it reads."""
        return tuple(dict.fromkeys(n.attr.name for n in walk([self.value]) if n.op == "load"))


def unknown(load: Node) -> bool:
    """Whether a tile meets many elements that nothing orders."""
    moving = [depends_on(o, "q", "k") for o in load.operands]
    in_order = load.attr.sorted and load.dtype is not DType.BOOL and not any(moving[:-1])
    return any(moving) and not in_order and not cornered(load)


def summaries(conditions: Iterable[Node], *, groups: bool) -> tuple[Summary, ...]:
    """The largest parts of conditions (`separated`) that one position decides and no order bounds, each once; with
    `groups` the first of integers by key has groups."""
    found: dict[Node, str] = {}
    stack, seen = list(conditions)[::-1], set()
    while stack:
        n = stack.pop()
        if n in seen or not _holds_loose(n):
            continue
        seen.add(n)
        side = positions_of(n) & {"q", "k"}
        if len(side) == 1 and not loop_indices(n):
            found[_core(n)] = min(side)
        elif _table(n) is not None:
            found[n] = "qk"
        else:
            stack.extend(reversed(n.operands))
    chosen = list(found.items())[:MOST]
    first = next((n for n, side in chosen if groups and side == "k" and n.dtype.is_int), None)
    return tuple(
        Summary(name=name, value=n, side=side, steps=_table(n) or (1, 1), grouped=n is first)
        for name, (n, side) in zip(_names(chosen), chosen, strict=True)
    )


def _holds_loose(n: Node) -> bool:
    return any(map(_loose, walk([n])))


def _loose(n: Node) -> bool:
    """Whether ranges of operands say little of a value: an element of many, or bits of one position put together, of
    which a range forgets which go with which."""
    if n.op == "load":
        return unknown(n)
    mixed = n.op in _MIXES and all(depends_on(o, "q", "k") for o in n.operands)
    return mixed and len(positions_of(n) & {"q", "k"}) == 1


def _table(n: Node) -> tuple[int, int] | None:
    """The positions at whose multiples an element that queries and keys select changes; None: it is none of a table by
    quotients, and a tile might read elements again that others read."""
    if n.op != "load" or loop_indices(n):
        return None
    moving = [quotient(o) for o in n.operands if depends_on(o, "q", "k")]
    if None in moving or sorted(position for position, _ in moving) != ["k", "q"]:
        return None
    return dict(moving)["q"], dict(moving)["k"]


def _core(n: Node) -> Node:
    """What a part is a monotone function of."""
    while n.op in _MONOTONE:
        moving = [o for o in n.operands if depends_on(o, "q", "k")]
        if len(moving) != 1 or not _holds_loose(moving[0]) or (n.op in _COMPARISONS and moving[0].dtype is DType.BOOL):
            return n
        n = moving[0]
    return n


def _names(chosen: Iterable[tuple[Node, str]]) -> Iterator[str]:
    """A name of its own for each: of the first tensor that it reads, and of its position."""
    taken: dict[str, int] = {}
    for n, side in chosen:
        read = (m.attr.name for m in walk([n]) if m.op == "load" and unknown(m))
        stem = f"{next(read, 'bits')}_{side}"
        number = taken[stem] = taken.get(stem, 0) + 1
        yield stem if number == 1 else f"{stem}_{number}"


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons


def separated(condition: Node, algebra: Algebra) -> Node:
    """The condition with comparisons of ints written so that what one position decides stands together, where that is
    more than a captured element: `q <= k + position[q]` as `q - position[q] <= k`.  What one position decides is equal
    or not: never both, which would be summarised twice."""
    if not _holds_loose(condition):
        return condition

    def regrouped(n: Node) -> Node | None:
        if n.op not in _COMPARISONS or n.operands[0].dtype is DType.BOOL or not _holds_loose(n):
            return None
        if n.op == "ne" and len(positions_of(n) & {"q", "k"}) == 1:
            return apply("logical_not", apply("eq", *n.operands))
        return _regrouped(n, algebra) if n.operands[0].dtype.is_int else None

    return rebuild(condition, regrouped)


def _regrouped(comparison: Node, algebra: Algebra) -> Node | None:
    left, right = comparison.operands
    form = algebra.form(left) - algebra.form(right)
    sides: dict[frozenset[str], Linear] = {}
    for n, c in form.terms.items():
        side = positions_of(n) & {"q", "k"}
        sides[side] = sides.get(side, Linear()) + Linear({n: c})
    together = [part for side, part in sides.items() if len(side) == 1 and len(part.terms) > 1 and _of_values(part)]
    whole = sum(abs(c) * algebra.largest(n) for n, c in form.terms.items()) + abs(form.constant)
    if not together or any(loop_indices(n) for n in form.terms) or whole > FITS:
        return None
    lhs, rhs = Linear(), Linear({}, -form.constant)
    parts: list[tuple[bool, Node]] = []  # whether it stands on the left
    for side, part in sides.items():
        if len(side) == 1:
            part = _in_order(part)
            positive = next(iter(part.terms.values())) > 0
            parts.append((positive, expression(part if positive else -part)))
        else:
            for n, c in part.terms.items():
                lhs, rhs = (lhs + Linear({n: c}), rhs) if c > 0 else (lhs, rhs + Linear({n: -c}))
    return apply(comparison.op, _sum(parts, True, lhs), _sum(parts, False, rhs))


def _in_order(form: Linear) -> Linear:
    """The same in an order that no comparison chooses: the position itself first."""
    return Linear(dict(sorted(form.terms.items(), key=lambda pair: (pair[0] not in LENGTH, digest([pair[0]])))))


def _of_values(form: Linear) -> bool:
    return any(map(_holds_loose, form.terms))


def _sum(parts: list[tuple[bool, Node]], left: bool, rest: Linear) -> Node:
    nodes = [n for on_left, n in parts if on_left == left]
    if not nodes:
        return expression(rest)
    total = nodes[0]
    for n in nodes[1:]:
        total = apply("add", total, n)
    if rest.terms:
        return apply("add", total, expression(rest))
    c = rest.constant
    return total if not c else apply("add", total, c) if c > 0 else apply("sub", total, -c)
