"""Which integers need 64 bits: proven from lengths, batches and heads below 2^24 and declared bounds."""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.analysis.abstract import Intervals, anywhere
from flashgen.lang.expr import DType, Node, walk
from flashgen.lang.ranges import INT32_MAX, INT32_MIN


def wide(roots: Iterable[Node]) -> frozenset[Node]:
    """The int32 nodes under `roots` whose value may lie outside int32.

    Emitted code holds such a node, like an int64 node, in 64 bits, and computes an operation in 64 bits where its
    result or an operand is held so.
    """
    value = Intervals(anywhere)
    found = set()
    for n in walk(tuple(roots)):
        if n.dtype is DType.INT32:
            x = value(n)
            if x.lo < INT32_MIN or x.hi > INT32_MAX:
                found.add(n)
    return frozenset(found)
