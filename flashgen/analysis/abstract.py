"""Expressions evaluated on abstract values: one walk over the DAG by the rules of the op table, for any leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from flashgen.lang import ranges
from flashgen.lang.bounds import abstract, bounds
from flashgen.lang.expr import LoopIndex, Node, depends_on, layer
from flashgen.lang.loops import LOOPS, by_round, index_node
from flashgen.lang.ops import OPS
from flashgen.lang.ranges import Range, Truth


class Intervals:
    """Abstract values of nodes, each found once; `leaf(node, operands)` gives those of leaves and of captured loads.

    by_round   loops are judged round by round, so that what an index selects is one element; else by the range of the
               index
    given      nodes of which something else says what they may be, when they are asked for
    """

    def __init__(
        self,
        leaf: Callable[[Node, tuple[Range | Truth, ...]], Range | Truth],
        *,
        by_round: bool = False,
        given: Mapping[Node, Callable[[], Range | Truth]] = MappingProxyType({}),
    ) -> None:
        self._leaf = leaf
        self._by_round = by_round
        self._given = given
        self._known: dict[Node, Range | Truth] = {}

    def __call__(self, root: Node) -> Range | Truth:
        known = self._known
        stack = [root]
        while stack:
            n = stack[-1]
            if n in known:
                stack.pop()
                continue
            missing = [o for o in self._before(n) if o not in known]
            if missing:
                stack.extend(missing)
                continue
            known[n] = self._value(n)
            stack.pop()
        return known[root]

    def range(self, root: Node) -> Range:
        """The same of a number."""
        found = self(root)
        assert isinstance(found, Range)
        return found

    def _before(self, n: Node) -> Sequence[Node]:
        """What has to be known before a node outside of loops."""
        if n in self._given:
            return ()
        return layer(n.operands) if self._by_round and n.op in LOOPS else n.operands

    def _value(self, n: Node, loops: tuple[LoopIndex, ...] = ()) -> Range | Truth:
        """The value of a node in the innermost of `loops`."""
        if n in self._given:
            return self._given[n]()
        if n.op == "const":
            return ranges.constant(n.attr, n.dtype)
        if self._by_round and n.op in LOOPS:
            return self._looped(n, (*loops, n.attr))
        operands = tuple(self._known[o] for o in n.operands)
        return abstract(n, *operands) if n.op in OPS or n.op in LOOPS else self._leaf(n, operands)

    def _looped(self, n: Node, loops: tuple[LoopIndex, ...]) -> Range | Truth:
        (rounds, body), known, index = n.operands, self._known, index_node(n.attr)
        inside = [m for m in layer([body], loops) if m is not index]

        def in_round(i: int) -> Range | Truth:
            known[index] = ranges.ints(i)
            for m in inside:
                known[m] = self._value(m, loops)
            return known[body]

        found = by_round(n.op, self.range(rounds), in_round, n.dtype)
        for m in (index, *inside):  # another loop may have the same index, and other rounds
            known.pop(m, None)
        return found


def anywhere(n: Node, operands: tuple[Range | Truth, ...]) -> Range | Truth:
    """What a leaf or a captured element may be in any problem that its declarations allow."""
    return bounds(n)


#: Captured floats and parameters are taken to lie within +-ORDINARY where nothing is visible: what is larger, infinite
#: or NaN would show in visible pairs too.
ORDINARY = 2.0**60


def finite_at_zero(score: Node, *, clamped: bool = True) -> bool:
    """Whether a score is a number below infinity where q . k is 0, whatever the position.

    Rows beyond the last query are zeros.  Their P is to be 0, which 2^(score - inf) is of no other score.  Unless these
    rows read what the last query does (`clamped`), captured elements may be anything there: no visible pair has them.
    """

    def leaf(n: Node, operands: tuple[Range | Truth, ...]) -> Range | Truth:
        if n.op == "score":
            return ranges.floats(0.0)
        found = anywhere(n, operands)
        beyond = n.op == "load" and not clamped and depends_on(n, "q")
        if n.dtype.is_float and not beyond:
            return ranges.floats(np.clip(found.lo, -ORDINARY, ORDINARY), np.clip(found.hi, -ORDINARY, ORDINARY))
        return found

    found = Intervals(leaf)(score)
    return bool((found.hi < np.inf) & ~found.nan)
