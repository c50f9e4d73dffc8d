"""Cells: where the quotients and remainders of a mask jump, and which captured elements a tile meets few of.

A mask of blocks is constant over a cell of (query, key) pairs, or nearly so, and interval evaluation over a whole tile
of several cells forgets which goes with which.  So a tile that stays PARTIAL is judged again by its parts, cut at the
borders of cells (see `tiles`).  Only divisors known when the kernel is made have cells.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flashgen.lang.expr import DType, Node, depends_on, walk
from flashgen.lang.ranges import MAX_LENGTH

#: Cells of fewer queries or keys are judged together: a tile of 128 x 128 has sixteen parts at most.
LEAST = 32

#: A captured element whose index is a quotient by less is one of many that a tile meets; elements at the ends of more
#: indices than this would be too many to read.
FEW, MOST_INDICES = 32, 3

_BITS = ("bit_and", "bit_or", "bit_xor", "bit_not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A mask jumps at multiples of `q` queries and of `k` keys; None: nowhere that is known."""

    q: int | None = None
    k: int | None = None

    def within(self, tile_q: int, tile_kv: int) -> Cells | None:
        """Those that cut tiles of so many queries and keys, which start at multiples of them; None: no tile is cut.

        No position passes a border beyond every length.
        """
        q, k = (
            None if cell is None or cell % size == 0 or cell >= MAX_LENGTH else cell
            for cell, size in ((self.q, tile_q), (self.k, tile_kv))
        )
        return None if q is None and k is None else Cells(q=q, k=k)


class _Steps(NamedTuple):
    """A value that changes nowhere but where `position` + shift passes a multiple of `size`.

    It is (position + shift) // size plus a constant where `plain`, else some function of that, which starts again after
    `period` steps of it (None: nothing is known).
    """

    position: str
    size: int
    shift: int = 0
    plain: bool = True
    period: int | None = None

    @property
    def cell(self) -> int:
        """The positions at whose multiples that is."""
        return math.gcd(self.size, self.shift % self.size)

    def divided(self, by: int) -> _Steps:
        if self.plain:
            return self._replace(size=self.size * by)
        if self.period is None:
            return self
        whole = self.period // by if self.period % by == 0 else None
        return self._replace(size=self.size * math.gcd(by, self.period), period=whole)

    def function(self, period: int | None = None) -> _Steps:
        """Some function of the value."""
        return self._replace(plain=False, period=period)


def cells(conditions: Iterable[Node]) -> Cells | None:
    """The cells of conditions that are judged by interval evaluation; None where they have none."""
    steps: dict[Node, _Steps | None] = {}
    found: dict[str, set[int]] = {"q": set(), "k": set()}
    for n in walk(conditions):
        steps[n] = _steps(n, steps)
        for place, cell in _jumps(n, steps):
            found[place].add(cell)
    q, k = _common(found["q"]), _common(found["k"])
    return None if q is None and k is None else Cells(q=q, k=k)


def _steps(n: Node, known: dict[Node, _Steps | None]) -> _Steps | None:
    """Where an int changes, if it is a function of quotients of one position by constants."""
    if n.op == "index":
        return _Steps(n.attr, 1) if n.attr in "qk" else None
    moving = [known[o] for o in n.operands if depends_on(o, "q", "k")]
    if n.op == "load" or not n.dtype.is_int or not moving or None in moving:
        return None
    first, *others = moving
    if others:
        if any(one.position != first.position for one in others):
            return None
        return _Steps(first.position, math.gcd(*(one.cell for one in moving)), plain=False)
    by = n.operands[-1].attr if n.operands[-1].op == "const" else None
    if n.op == "cast":
        return first
    if by is None:
        return first.function()
    if n.op in ("add", "sub") and first.plain:
        return first._replace(shift=first.shift + (by if n.op == "add" else -by) * first.size)
    if n.op in ("floor_div", "shift_right") and (n.op == "shift_right" or by > 0):
        return first.divided(by if n.op == "floor_div" else 1 << by)
    return first.function(abs(by) if n.op == "mod" and first.plain else None)


def _jumps(n: Node, steps: dict[Node, _Steps | None]) -> Iterator[tuple[str, int]]:
    """The cells of a quotient, a remainder or an operation on bits."""
    found = steps[n]
    if found is None:
        return
    if n.op in ("floor_div", "shift_right"):
        yield found.position, found.cell
    elif n.op == "mod" and found.period is not None:
        yield found.position, found._replace(size=found.size * found.period).cell
    elif n.op in _BITS:
        yield found.position, found.cell * -(-LEAST // found.cell)  # a range knows the bits above those that vary


#: Cells tried before one size alone is taken: q // 2 and q // (1 << 30) would try half a billion.
_TRIED = 4096


def _common(sizes: set[int]) -> int | None:
    """The smallest cell from LEAST on that each of these divides, or is divided by; else the smallest of them."""
    sizes = {size for size in sizes if size > 1}
    if not sizes:
        return None
    least = math.gcd(*sizes)
    for cell in range(-(-LEAST // least) * least, max(*sizes, LEAST) + 1, least)[:_TRIED]:
        if all(cell % size == 0 or size % cell == 0 for size in sizes):
            return cell
    return min((size for size in sizes if size >= LEAST), default=-(-LEAST // least) * least)


# ---------------------------------------------------------------------------------------------------------------------
# Captured elements


def few(n: Node) -> bool:
    """Whether an int or condition may have one or two values only over a whole tile: a quotient, an element of a table
    by such an index, a condition.  Where it moves with each query or key, it has as many as the tile."""
    known: dict[Node, bool] = {}
    for m in walk([n]):
        known[m] = _few(m, known)
    return known[n]


def _few(n: Node, known: dict[Node, bool]) -> bool:
    if not depends_on(n, "q", "k") or n.dtype is DType.BOOL:
        return True
    if n.op == "index":
        return False
    if n.op == "load":
        low, high = n.attr.min, n.attr.max
        narrow = n.attr.dtype == "bool" or (low is not None and high is not None and high - low <= 1)
        return narrow or all(known[o] for o in (n.operands[:-1] if n.attr.sorted else n.operands))
    by = n.operands[-1].attr if n.operands[-1].op == "const" else None
    if n.op in ("floor_div", "shift_right") and not depends_on(n.operands[1], "q", "k"):
        return known[n.operands[0]] or by is None or (by if n.op == "floor_div" else 1 << by) >= FEW
    return all(known[o] for o in n.operands) or (n.op == "mod" and by == 2)


def cornered(load: Node) -> bool:
    """Whether a captured element that a tile selects by ranges of indices is looked for at their ends: each range has
    at most two values then, but for the last index of a tensor that is sorted."""
    found = _cornered.get(load)
    if found is None:
        moving = [i for i, o in enumerate(load.operands) if depends_on(o, "q", "k")]
        in_order = load.attr.sorted and load.dtype is not DType.BOOL
        asked = [load.operands[i] for i in moving if not (in_order and i == len(load.operands) - 1)]
        found = _cornered[load] = 0 < len(asked) <= MOST_INDICES and all(map(few, asked))
    return found


_cornered: weakref.WeakKeyDictionary[Node, bool] = weakref.WeakKeyDictionary()


def quotient(n: Node) -> tuple[str, int] | None:
    """The position and the divisor of an int that is a position divided by a constant, which may be 1, but for a
    constant that is added; None: it is none."""
    steps: dict[Node, _Steps | None] = {}
    for m in walk([n]):
        steps[m] = _steps(m, steps)
    found = steps[n]
    if found is None or not found.plain or found.shift % found.size:
        return None
    return found.position, found.size


def single(n: Node, spans: Mapping[str, int]) -> bool:
    """Whether an index is known to have one value over every part of a tile, which lies between two neighbouring
    multiples of so many queries, and keys."""
    steps: dict[Node, _Steps | None] = {}
    known: dict[Node, bool] = {}
    for m in walk([n]):
        steps[m] = found = _steps(m, steps)
        in_cell = found is not None and found.cell % spans[found.position] == 0
        alike = m.op not in ("index", "score") and all(known[o] for o in m.operands)
        known[m] = in_cell or alike or not depends_on(m, "q", "k")
    return known[n]
