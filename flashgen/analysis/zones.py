"""Zones: sets of (query, key) pairs bounded in q, in k and in d = q - k, and exact integer arithmetic on them.

A band, a prefix of the keys, a rectangle and each of their intersections is one zone; a union of bands and prefixes is
a few.  A zone is a system of difference constraints over (q, k), whose feasibility is decided exactly in integers by
its cycles (Dill 1989, "Timing assumptions and verification of finite-state concurrent systems"; Cormen et al.,
"Introduction to Algorithms", difference constraints): with three bounded quantities these are six comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from flashgen.lang.build import apply, cast
from flashgen.lang.expr import DType, Node

#: Bounds are clamped to +-REACH once evaluated.  Lengths stay below 2^24, so no meaning is lost, and sums of two bounds
#: and a position fit an int32 in a kernel.
REACH = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """Inclusive bounds on q, k and d = q - k: int expressions free of q and k.  Several bounds of a kind all hold."""

    q_lo: tuple[Node, ...] = ()
    q_hi: tuple[Node, ...] = ()
    k_lo: tuple[Node, ...] = ()
    k_hi: tuple[Node, ...] = ()
    d_lo: tuple[Node, ...] = ()
    d_hi: tuple[Node, ...] = ()

    def nodes(self) -> Iterator[Node]:
        """Every bound, lower before upper, of q, then k, then d."""
        for kind in fields(self):
            yield from getattr(self, kind.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A zone whose bounds are known: int64 arrays (or ints) that broadcast against each other."""

    q_lo: np.ndarray | int = -REACH
    q_hi: np.ndarray | int = REACH
    k_lo: np.ndarray | int = -REACH
    k_hi: np.ndarray | int = REACH
    d_lo: np.ndarray | int = -REACH
    d_hi: np.ndarray | int = REACH

    def __and__(self, other: Bounds) -> Bounds:
        """The pairs in both."""
        return Bounds(
            q_lo=np.maximum(self.q_lo, other.q_lo),
            q_hi=np.minimum(self.q_hi, other.q_hi),
            k_lo=np.maximum(self.k_lo, other.k_lo),
            k_hi=np.minimum(self.k_hi, other.k_hi),
            d_lo=np.maximum(self.d_lo, other.d_lo),
            d_hi=np.minimum(self.d_hi, other.d_hi),
        )

    def within(self, q0: Any, q1: Any, k0: Any, k1: Any) -> Bounds:
        """The pairs of this zone in the rectangle [q0, q1] x [k0, k1]."""
        return self & Bounds(q_lo=q0, q_hi=q1, k_lo=k0, k_hi=k1)

    def reshape(self, *shape: int) -> Bounds:
        """The same bounds, each that is an array in this shape."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return Bounds(**{n: a.reshape(shape) if np.ndim(a) else a for n, a in arrays.items()})


def clamped(n: Node, limit: int = REACH) -> Node:
    """An int node clamped to +-limit."""
    inside = apply("minimum", apply("maximum", n, -limit), limit)
    return cast(inside, DType.INT32) if limit <= REACH else inside


def clamped_operand(n: Node) -> Node | None:
    """What a node clamps to +-REACH; None where it is nothing that `clamped` made."""
    if n.op == "cast" and n.dtype is DType.INT32 and n.operands[0].op == "minimum":
        below = n.operands[0].operands[0]
        if below.op == "maximum" and clamped(below.operands[0]) is n:
            return below.operands[0]
    return None


def evaluate(zone: Zone, value: Callable[[Node], np.ndarray | int]) -> Bounds:
    """The zone's bounds as numbers, each clamped to +-REACH; `value` evaluates one bound."""
    found = {}
    for kind in fields(zone):
        nodes = getattr(zone, kind.name)
        if not nodes:
            continue
        tightest = np.maximum if kind.name.endswith("lo") else np.minimum
        numbers = [np.clip(value(n), -REACH, REACH) for n in nodes]
        found[kind.name] = numbers[0] if len(numbers) == 1 else tightest.reduce(np.broadcast_arrays(*numbers))
    return replace(Bounds(), **found)


def nonempty(z: Bounds) -> np.ndarray:
    """Whether any pair lies in the zone: exact, elementwise."""
    d_lo = np.maximum(z.d_lo, np.subtract(z.q_lo, z.k_hi))
    d_hi = np.minimum(z.d_hi, np.subtract(z.q_hi, z.k_lo))
    return (np.less_equal(z.q_lo, z.q_hi)) & (np.less_equal(z.k_lo, z.k_hi)) & (d_lo <= d_hi)


def key_span(z: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """The first and last key of any pair in the zone; first > last where the zone is empty.

    The zone is convex and its constraint matrix totally unimodular, so every key between the two has a pair.
    """
    lo = np.maximum(z.k_lo, np.subtract(z.q_lo, z.d_hi))
    hi = np.minimum(z.k_hi, np.subtract(z.q_hi, z.d_lo))
    return lo, np.where(nonempty(z), hi, lo - 1)


def query_span(z: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """The first and last query of any pair in the zone; first > last where the zone is empty."""
    lo = np.maximum(z.q_lo, np.add(z.k_lo, z.d_lo))
    hi = np.minimum(z.q_hi, np.add(z.k_hi, z.d_hi))
    return lo, np.where(nonempty(z), hi, lo - 1)


def pairs(z: Bounds) -> np.ndarray:
    """How many pairs the zone holds, in closed form; q and k must be bounded (see `Bounds.within`)."""
    queries = np.maximum(0, np.subtract(z.q_hi, z.q_lo) + 1)
    keys = np.maximum(0, np.subtract(z.k_hi, z.k_lo) + 1)

    def up_to(d: Any) -> Any:
        """Pairs of the rectangle with q - k <= d: row i of it keeps clip(a - i, 0, keys) keys."""
        a = np.subtract(z.k_hi, z.q_lo) + 1 + d
        return _triangle(a) - _triangle(a - keys) - _triangle(a - queries) + _triangle(a - keys - queries)

    return np.where(np.less_equal(z.d_lo, z.d_hi), up_to(z.d_hi) - up_to(np.subtract(z.d_lo, 1)), 0)


def _triangle(n: np.ndarray) -> np.ndarray:
    """1 + 2 + ... + n, and 0 for negative n."""
    n = np.maximum(np.asarray(n, np.int64), 0)
    return n * (n + 1) // 2
