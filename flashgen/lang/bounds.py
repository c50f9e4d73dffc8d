"""What declarations alone say about a value: its bounds for any problem, parameter and captured data."""

from __future__ import annotations

import weakref

from flashgen.lang import ranges
from flashgen.lang.expr import DType, Node, walk
from flashgen.lang.loops import LOOPS, at_once
from flashgen.lang.ops import OPS
from flashgen.lang.ranges import Abstract


def abstract(n: Node, *operands: Abstract) -> Abstract:
    """The abstract value of an op's or a loop's node from those of its operands."""
    if n.op in LOOPS:
        return at_once(n.op, *operands)
    rule = OPS[n.op].abstract
    return rule(*operands, n.dtype) if n.op == "cast" else rule(*operands)


_bounds: weakref.WeakKeyDictionary[Node, Abstract] = weakref.WeakKeyDictionary()


def bounds(root: Node) -> Abstract:
    """What a node may be for any problem, parameter and captured data that its declarations allow."""
    for n in walk((root,), into=lambda n: n not in _bounds):
        if n not in _bounds:
            _bounds[n] = _bound(n)
    return _bounds[root]


def _bound(n: Node) -> Abstract:
    if n.op in ("const", "constant", "param"):
        if n.op == "const":
            return ranges.constant(n.attr, n.dtype)
        return declared(n)
    if n.op == "index":
        return ranges.ints(0, ranges.MAX_LENGTH - 1)
    if n.op == "problem":  # where a tile exists, none of them is 0
        return ranges.ints(1, ranges.MAX_LENGTH - 1)
    if n.op == "size":
        return ranges.ints(1, ranges.INT32_MAX)
    if n.op == "load":
        return ranges.stored(n.attr)
    if n.op == "loop_index":
        return ranges.ints(0, n.attr.most - 1)
    if n.op == "score":
        return ranges.unknown(DType.FLOAT32)
    if n.op == "floor_div" and [(o.op, o.attr) for o in n.operands] == [("problem", "heads"), ("problem", "kv_heads")]:
        return ranges.ints(1, ranges.MAX_LENGTH - 1)  # heads are a multiple of kv_heads
    return abstract(n, *(_bounds[o] for o in n.operands))


def declared(n: Node) -> Abstract:
    """The bounds that a parameter or constant was declared with."""
    whole = ranges.unknown(n.dtype)
    low = whole.lo if n.attr.min is None else n.attr.min
    high = whole.hi if n.attr.max is None else n.attr.max
    return ranges.floats(low, high) if n.dtype.is_float else ranges.ints(low, high)
