"""A mask, written so that what each pair computes is little: the same for every pair of positions.

`(q - k) % 4 == 1` asks for a remainder for each pair.  `q % 4 == (k + 1) % 4` says the same: a thread finds the left
side once for each of its queries and the right side once for each of its keys.  Of `dilated`, 11.6 instructions for
each score become 3.6.  Of a power of two the last bits are the remainder, which the compiler finds once for all keys
that lie so many apart: of a `%` it does not, as it has to be told that no position is negative (2.6 instructions and
1.1).

`q - position[k] < 512` has a difference of 64 bits, since nothing is known of an element.  `q - 512 < position[k]` has
none.  Of a cache that goes round, 11.8 instructions become 8.3.
"""

from __future__ import annotations

from collections.abc import Set

from flashgen.analysis.abstract import Intervals, anywhere
from flashgen.analysis.linear import Algebra, expression
from flashgen.lang.build import apply, rebuild
from flashgen.lang.expr import Node, depends_on, positions_of, walk

#: Sums of numbers within this stay in 32 bits.
_FITS = 1 << 30

_COMPARISONS = ("le", "lt", "eq", "ne", "ge", "gt")


def cheaper(mask: Node, wide: Set[Node]) -> Node:
    """The mask; `wide` are the ints of 32 bits whose values may leave them."""
    algebra = Algebra()

    def given(n: Node) -> Node | None:
        if n.op not in _COMPARISONS or not n.operands[0].dtype.is_int:
            return None
        return _remainders(n, wide) or _alone(n, wide, algebra)

    return rebuild(mask, given)


def _remainders(n: Node, wide: Set[Node]) -> Node | None:
    """An equation with the remainder of a difference between what a query decides and what a key decides: with the
    remainders of both."""
    if n.op not in ("eq", "ne") or n.operands[0].op != "mod" or n.operands[1].op != "const":
        return None
    difference, by = n.operands[0].operands
    rest, least = n.operands[1].attr, Intervals(anywhere).range(by).lo
    # Of a divisor that a call gives, only 0 is known to be a remainder.
    if difference.op != "sub" or depends_on(by, "q", "k") or not (0 <= rest < least if rest else least > 0):
        return None
    if by in wide or by.dtype.itemsize > 4 or rest >= _FITS:
        return None
    sides = [positions_of(o) & {"q", "k"} for o in difference.operands]
    if sorted(map(sorted, sides)) != [["k"], ["q"]] or not all(_small(o, wide) for o in difference.operands):
        return None
    left, right = difference.operands
    return apply(n.op, _remainder(left, by), _remainder(apply("add", right, rest) if rest else right, by))


def _remainder(n: Node, by: Node) -> Node:
    """That of a division, whatever the sign: of one by a power of two the last bits."""
    if by.op == "const" and by.attr & (by.attr - 1) == 0:
        return apply("bit_and", n, by.attr - 1)
    return apply("mod", n, by)


def _small(n: Node, wide: Set[Node]) -> bool:
    known = Intervals(anywhere).range(n)
    return n not in wide and n.dtype.itemsize <= 4 and bool(known.lo > -_FITS and known.hi < _FITS)


def _alone(n: Node, wide: Set[Node], algebra: Algebra) -> Node | None:
    """A comparison in 64 bits, with the one term that needs them on a side of its own, where it needs none."""
    if wide.isdisjoint(n.operands) or any(o.dtype.itemsize > 4 for o in n.operands):
        return None
    left, right = map(algebra.form, n.operands)
    form = left - right
    sizes = {t: abs(c) * algebra.largest(t) for t, c in form.terms.items()}
    large = [t for t, size in sizes.items() if size > _FITS]
    if len(large) != 1 or any(t in wide or t.dtype.itemsize > 4 for t in sizes):
        return None
    (term,) = large
    sign, rest = form.terms[term], form.without(large)
    if abs(sign) != 1 or sum(sizes.values()) - sizes[term] + abs(form.constant) > _FITS:
        return None
    return apply(n.op, term, expression(-rest)) if sign > 0 else apply(n.op, expression(rest), term)


def divides(mask: Node) -> bool:
    """Whether quotients or remainders are taken."""
    return any(n.op in ("floor_div", "mod") for n in walk([mask]))
