"""Tiles of a mask in Python: their classes and the schedule of a Q tile; `counts` sums them up for plans.

This is one of two back ends over the same `Facts`; the other is emitted CUDA, which classifies in the kernel.  Both
follow these rules.

Runs.  A visible term gives a Q tile one run of keys: the zone's key span over the tile's in-bounds queries
(`zones.key_span`, clipped to [0, kv_len)), none where a uniform condition fails.  The schedule of a Q tile is the KV
tiles that some run touches, in descending order, less those classified EMPTY.

Classes.  A term is possible in a tile, over its in-bounds elements, when its zone meets the rectangle, its uniform
conditions hold, and each of its other conditions may be true by the abstract rules of `lang.ranges`.

Captured loads, under abstract evaluation.  Each index range is clamped into [0, size - 1] of its dimension.  Then:
1. if every index is a single point, the value is the element itself;
2. else, if the tensor is declared sorted and every index but the last is a single point, the value lies between the
   element at the last index's lower end and the one at its upper end;
3. else the value is what the declaration allows: min and max, or everything the stored type holds.
A NaN element makes the value anything.  The choice is made tile by tile.

Loops are judged round by round: the index is a single point, and what it selects is read as above.  Rounds that a tile
may have or not, because their number is a range, may change what is found or not.

Few elements.  Where `cells.cornered` says that indices may have few values over a tile, rules 1 and 2 take an index of
two values as well as one of a single value: the value then lies in the smallest range that holds those at all ends.

Summaries.  A part of the mask that has one (see `summaries`) lies between its least and its greatest value over the
tile's queries, or keys; a NaN among them makes it anything, and a condition may be what it is for some of them.

Groups.  Where a summary has groups of values each is judged as if the tile's keys had no others.  The tile is EMPTY if
both are, FULL if both are.

Parts.  A PARTIAL tile is judged again by its parts where the mask has `cells`: it is cut at multiples of them.  It is
EMPTY if all parts are, FULL if all parts are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from flashgen.analysis import zones
from flashgen.analysis.abstract import Intervals
from flashgen.analysis.cells import Cells, cornered
from flashgen.analysis.facts import Facts, Term
from flashgen.analysis.summaries import Group, Summary
from flashgen.analysis.zones import Bounds
from flashgen.lang import ranges
from flashgen.lang.bounds import bounds
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import DType, Node, depends_on
from flashgen.lang.ranges import Range, Truth

EMPTY, PARTIAL, FULL = 0, 1, 2


class Tiling(Protocol):
    """Anything that says how many queries and keys a tile has."""

    @property
    def q(self) -> int: ...

    @property
    def kv(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What evaluating an expression needs: `sizes` (batch, heads, kv_heads, q_len, kv_len), the value of each
    parameter, and each captured tensor as a NumPy array (float16 and bfloat16 as any float type).  Queries sit at
    `q_offset` to q_len - 1, and tiles of them are counted from there.

    `found` keeps what summaries are made of.
    """

    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    tensors: Mapping[str, np.ndarray]
    q_offset: int = 0
    found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def evaluate(self, root: Node, *, b: Any, h: Any, q: Any = None, k: Any = None, live: Any = None) -> np.ndarray:
        """The value of a mask or of a part of it at positions that broadcast (see `lang.evaluate`)."""
        return evaluate(root, b=b, h=h, q=q, k=k, sizes=self.sizes, params=self.params, tensors=self.tensors, live=live)


# ---------------------------------------------------------------------------------------------------------------------
# Classes of given tiles


class Known(NamedTuple):
    """A term whose bounds and uniform conditions are evaluated; arrays broadcast with the positions asked for."""

    bounds: Bounds
    holds: np.ndarray
    others: tuple[Node, ...]


def known_terms(terms: tuple[Term, ...], case: Case, b: Any, h: Any) -> list[Known]:
    def value(n: Node) -> np.ndarray:
        return case.evaluate(n, b=b, h=h)

    return [Known(zones.evaluate(t.zone, value), _every(map(value, t.uniform)), t.others) for t in terms]


def _every(conditions: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.logical_and, conditions, np.True_)


def intervals(facts: Facts, case: Case, b: Any, h: Any, q: tuple, k: tuple, group: Group) -> Intervals:
    """Abstract values over tiles: b and h are points, q and k (first, last) pairs, all arrays that broadcast.

    Of the summary that has groups of values, those of `group`.
    """
    places = {"b": ranges.ints(b), "h": ranges.ints(h), "q": ranges.ints(*q), "k": ranges.ints(*k)}

    def leaf(n: Node, operands: tuple[Range | Truth, ...]) -> Range | Truth:
        if n.op == "index":
            return places[n.attr]
        if n.op == "problem":
            return ranges.ints(case.sizes[n.attr])
        if n.op == "size":
            tensor, dimension = n.attr
            return ranges.ints(case.tensors[tensor.name].shape[dimension])
        if n.op == "param":
            return ranges.constant(case.params[n.attr.name], n.dtype)
        if n.op == "load":
            return loaded(n, operands, case.tensors[n.attr.name])
        return bounds(n)

    given = {one.value: partial(summarised, one, case, b, h, q, k, group) for one in facts.summaries}
    return Intervals(leaf, by_round=True, given=given)


def loaded(load: Node, indices: tuple[Range, ...], array: np.ndarray) -> Range | Truth:
    """The abstract value of a captured load, by the rules at the head of this module."""
    declared = ranges.stored(load.attr)
    if array.size == 0:
        return declared
    first = [np.clip(i.lo, 0, size - 1) for i, size in zip(indices, array.shape, strict=True)]
    last = [np.clip(i.hi, 0, size - 1) for i, size in zip(indices, array.shape, strict=True)]
    corners = cornered(load)
    in_order = load.attr.sorted and not isinstance(declared, Truth)
    two = [corners and depends_on(o, "q", "k") for o in load.operands]  # an index may have two values
    few = [np.less_equal(hi - lo, int(both)) for lo, hi, both in zip(first, last, two, strict=True)]
    known = _every(few[:-1] if in_order else few)
    if not known.any():
        return declared
    ends = [(lo, hi) if both else (lo,) for lo, hi, both in zip(first, last, two, strict=True)]
    runs = [(first[-1], last[-1])] if in_order else [(at, at) for at in ends.pop()]
    ends = ends[: len(first) - 1]
    held = (_between(array[(*at, i)], array[(*at, j)], declared) for i, j in runs for at in product(*ends))
    value = reduce(ranges.hull, held)
    if isinstance(value, Truth):
        return Truth(np.where(known, value.may_true, True), np.where(known, value.may_false, True))
    lo, hi = np.where(known, value.lo, declared.lo), np.where(known, value.hi, declared.hi)
    return Range(lo, hi, np.where(known, value.nan, declared.nan)) if declared.is_float else ranges.ints(lo, hi)


def _between(first: np.ndarray, last: np.ndarray, declared: Range | Truth) -> Range | Truth:
    """What lies between an element and one that is not below it."""
    if isinstance(declared, Truth):
        return Truth(first | last, ~(first & last))
    if not declared.is_float:
        return ranges.ints(first, last)
    first, last = first.astype(np.float64), last.astype(np.float64)
    return ranges.floats(first, last, np.isnan(first) | np.isnan(last))


def summarised(one: Summary, case: Case, b: Any, h: Any, q: tuple, k: tuple, group: Group) -> Range | Truth:
    """What a summarised part may be over tiles as of `intervals`, of a group of its values where it has groups."""
    b, h = (x if used else 0 for x, used in ((b, one.by_batch), (h, one.by_head)))
    if one.side == "qk":
        return _bounded(one, *_of_table(one, case, b, h, q, k))
    places = np.broadcast_arrays(b, h, *(q if one.side == "q" else k))
    shape, length = places[0].shape, case.sizes["q_len" if one.side == "q" else "kv_len"]
    dims = max(case.sizes["batch"], 1), max(case.sizes["heads"], 1), length, length
    codes, where = np.unique(np.ravel_multi_index([x.ravel() for x in places], dims), return_inverse=True)
    known = case.found.setdefault(one.value, {})
    for code, *place in zip(codes.tolist(), *(x.tolist() for x in np.unravel_index(codes, dims)), strict=True):
        if code not in known:
            known[code] = _extremes(_values(one, case, *place[:2]), *place[2:])
    of = group if one.grouped else None
    ends = (np.array([known[code][of][i] for code in codes.tolist()])[where].reshape(shape) for i in range(3))
    return _bounded(one, *ends)


def _bounded(one: Summary, lo: np.ndarray, hi: np.ndarray, nan: np.ndarray) -> Range | Truth:
    if one.value.dtype is DType.BOOL:
        return Truth(hi, ~lo)
    return ranges.floats(lo, hi, nan) if one.value.dtype.is_float else ranges.ints(lo, hi)


def _of_table(one: Summary, case: Case, b: Any, h: Any, q: tuple, k: tuple) -> Iterator[np.ndarray]:
    """The ends of an element that queries and keys select, and whether it may be NaN, in tiles."""
    places = np.broadcast_arrays(b, h, *q, *k)
    known = case.found.setdefault(one.value, {})
    tiles, where = np.unique(np.stack([x.ravel() for x in places]), axis=1, return_inverse=True)
    for tile in map(tuple, tiles.T.tolist()):
        if tile not in known:
            *rows, k_first, k_last = tile
            lo, hi = (x[k_first // one.steps[1] : k_last // one.steps[1] + 1] for x in _rows_of_table(one, case, *rows))
            nan = bool(np.isnan(lo).any())
            known[tile] = (-np.inf, np.inf, True) if nan else (lo.min(), hi.max(), False)
    found = [known[tile] for tile in map(tuple, tiles.T.tolist())]
    return (np.array([ends[i] for ends in found])[where.reshape(-1)].reshape(places[0].shape) for i in range(3))


def _rows_of_table(one: Summary, case: Case, b: int, h: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest element of queries from first to last, for each step of keys."""
    key = (one.value, b, h, first, last)
    if key not in case.found:
        q = np.minimum(np.arange(first, last + one.steps[0], one.steps[0]), last)[:, None]
        k = np.arange(0, case.sizes["kv_len"], one.steps[1])
        values = np.broadcast_to(case.evaluate(one.value, b=b, h=h, q=q, k=k, live=False), (len(q), len(k)))
        case.found[key] = values.min(axis=0), values.max(axis=0)
    return case.found[key]


def _values(one: Summary, case: Case, b: int, h: int) -> np.ndarray:
    """A summarised part at each query, or key.  Positions that no visible pair has may select elements outside."""
    key = (one.value, b, h)
    if key not in case.found:
        at = np.arange(case.sizes["q_len" if one.side == "q" else "kv_len"])
        values = case.evaluate(one.value, b=b, h=h, **{one.side: at}, live=False)
        case.found[key] = np.broadcast_to(values, at.shape)
    return case.found[key]


def _extremes(values: np.ndarray, first: int, last: int) -> dict[Group | None, tuple[Any, Any, bool]]:
    """The least and greatest of values from first to last, and whether one is NaN: of all, and of both groups."""
    found = values[first : last + 1]
    if found.dtype.kind != "i":
        nan = bool(np.isnan(found).any())
        return {None: (-np.inf, np.inf, True) if nan else (found.min(), found.max(), False)}
    lo, hi = int(found.min()), int(found.max())
    low = found <= lo + (hi - lo) // 2
    below, above = int(found[low].max()), hi if low.all() else int(found[~low].min())
    return {None: (lo, hi, False), Group.LOW: (lo, below, False), Group.HIGH: (above, hi, False)}


def _possible(terms: list[Known], value: Intervals, q: tuple, k: tuple) -> np.ndarray:
    found = np.zeros(np.broadcast_shapes(*map(np.shape, (*q, *k))), np.bool_)
    for term in terms:
        possible = zones.nonempty(term.bounds.within(*q, *k)) & term.holds
        for condition in term.others:
            if not possible.any():
                break
            possible = possible & value(condition).may_true
        found = found | possible
    return found


def classify(facts: Facts, case: Case, *, b: Any, h: Any, q0: Any, q1: Any, k0: Any, k1: Any) -> np.ndarray:
    """EMPTY, PARTIAL or FULL (int8) for tiles [q0, q1] x [k0, k1], both ends included and in bounds.

    All arguments are ints or int arrays that broadcast against each other.
    """
    found = _classified(facts, case, b, h, (q0, q1), (k0, k1))
    if facts.cells is None or not (found == PARTIAL).any():
        return found
    found, *places = map(np.array, np.broadcast_arrays(found, b, h, q0, q1, k0, k1))
    unsettled = found == PARTIAL
    found[unsettled] = _by_parts(facts, case, facts.cells, *(x[unsettled] for x in places))
    return found


def _classified(facts: Facts, case: Case, b: Any, h: Any, q: tuple, k: tuple) -> np.ndarray:
    """The same of tiles that are judged whole."""
    visible, hidden = known_terms(facts.visible, case, b, h), known_terms(facts.hidden, case, b, h)
    return classes_of(facts, case, visible, hidden, b, h, q, k)


def classes_of(
    facts: Facts, case: Case, visible: list[Known], hidden: list[Known], b: Any, h: Any, q: tuple, k: tuple
) -> np.ndarray:
    """The same, of terms that are known."""
    seen, cut = np.False_, np.False_
    for group in facts.groups:
        value = intervals(facts, case, b, h, q, k, group)
        visibly = _possible(visible, value, q, k)
        seen, cut = seen | visibly, cut | _possible(hidden, value, q, k) | ~visibly
    return np.where(seen, np.where(cut, PARTIAL, FULL), EMPTY).astype(np.int8)


def _by_parts(facts: Facts, case: Case, cells: Cells, b: Any, h: Any, q0: Any, q1: Any, k0: Any, k1: Any) -> np.ndarray:
    """The classes of tiles (flat arrays) by those of their parts."""
    seen, cut = np.zeros(len(q0), np.bool_), np.zeros(len(q0), np.bool_)
    for q_first, q_last in _parts(q0, q1, cells.q):
        for k_first, k_last in _parts(k0, k1, cells.k):
            left = (q_first <= q_last) & (k_first <= k_last) & ~(seen & cut)
            if not left.any():
                continue
            places, ends = (b[left], h[left]), ((q_first[left], q_last[left]), (k_first[left], k_last[left]))
            found = _classified(facts, case, *places, *ends)
            seen[left] |= found != EMPTY
            cut[left] |= found != FULL
    return np.where(seen, np.where(cut, PARTIAL, FULL), EMPTY).astype(np.int8)


def _parts(first: np.ndarray, last: np.ndarray, cell: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The parts of runs that multiples of a cell cut, the first of each, then the second ...: where a run has fewer
    first > last."""
    if cell is None:
        yield first, last
        return
    start = first // cell * cell
    for i in range(int((last // cell - first // cell).max()) + 1):
        yield np.maximum(first, start + i * cell), np.minimum(last, start + (i + 1) * cell - 1)


# ---------------------------------------------------------------------------------------------------------------------
# The schedule of a Q tile


def tiles_of(length: int, size: int) -> int:
    """How many tiles of that size cover a length."""
    return -(-length // size)


def tile_ends(tile: Any, size: int, length: int) -> tuple:
    """The first and last position of a tile, cut at the length."""
    first = np.multiply(tile, size)
    return first, np.minimum(first + size, length) - 1


def query_ends(q_tile: Any, size: int, case: Case) -> tuple:
    """The positions of the first and last query of a tile."""
    first, last = tile_ends(q_tile, size, case.sizes["q_len"] - case.q_offset)
    return first + case.q_offset, last + case.q_offset


def runs_of(known: list[Known], case: Case, tile: Tiling, q_tile: Any) -> tuple[np.ndarray, np.ndarray]:
    if not known:
        return (np.zeros((0, *np.shape(q_tile)), np.int64),) * 2
    q = query_ends(q_tile, tile.q, case)
    first, last = [], []
    for term in known:
        lo, hi = zones.key_span(term.bounds.within(*q, 0, case.sizes["kv_len"] - 1))
        first.append(np.floor_divide(lo, tile.kv))
        last.append(np.where((lo <= hi) & term.holds, np.floor_divide(hi, tile.kv), first[-1] - 1))
    ends = np.stack(np.broadcast_arrays(*first, *last))
    return ends[: len(known)], ends[len(known) :]


def runs(facts: Facts, case: Case, tile: Tiling, q_tile: Any, b: Any = 0, h: Any = 0) -> tuple[np.ndarray, np.ndarray]:
    """First and last KV tile of each visible term's run, with an axis of terms in front; first > last is no run.

    `q_tile`, `b` and `h` are ints or int arrays that broadcast.
    """
    return runs_of(known_terms(facts.visible, case, b, h), case, tile, q_tile)


def schedule(facts: Facts, case: Case, tile: Tiling, q_tile: int, b: int = 0, h: int = 0) -> list[tuple[int, int]]:
    """The KV tiles that a Q tile visits, in the order it visits them (descending), each with PARTIAL or FULL."""
    if case.sizes["kv_len"] == 0:
        return []
    first, last = runs(facts, case, tile, q_tile, b, h)
    touched = [np.arange(i, j + 1) for i, j in zip(first.ravel(), last.ravel(), strict=True) if i <= j]
    if not touched:
        return []
    kv_tiles = np.unique(np.concatenate(touched))[::-1]
    q0, q1 = query_ends(q_tile, tile.q, case)
    k0, k1 = tile_ends(kv_tiles, tile.kv, case.sizes["kv_len"])
    classes = classify(facts, case, b=b, h=h, q0=q0, q1=q1, k0=k0, k1=k1)
    kept = classes != EMPTY
    return list(zip(kv_tiles[kept].tolist(), classes[kept].tolist(), strict=True))


def schedule_queries(
    facts: Facts, case: Case, tile: Tiling, kv_tile: int, b: int = 0, h: int = 0
) -> list[tuple[int, int]]:
    """The Q tiles of a head that visit a KV tile, in the order in which a backward visits them (ascending), each with
    PARTIAL or FULL: the same tiles as those of every `schedule`.

    Their runs are those of `zones.query_span`.
    """
    if case.sizes["q_len"] == case.q_offset:
        return []
    keys = tile_ends(kv_tile, tile.kv, case.sizes["kv_len"])
    touched = []
    for term in known_terms(facts.visible, case, b, h):
        first, last = zones.query_span(term.bounds.within(case.q_offset, case.sizes["q_len"] - 1, *keys))
        if term.holds and first <= last:
            touched.append(np.arange((first - case.q_offset) // tile.q, (last - case.q_offset) // tile.q + 1))
    if not touched:
        return []
    q_tiles = np.unique(np.concatenate(touched))
    q0, q1 = query_ends(q_tiles, tile.q, case)
    classes = np.broadcast_to(classify(facts, case, b=b, h=h, q0=q0, q1=q1, k0=keys[0], k1=keys[1]), q_tiles.shape)
    kept = classes != EMPTY
    return list(zip(q_tiles[kept].tolist(), classes[kept].tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def grid(facts: Facts, case: Case, tile: Tiling, b: int = 0, h: int = 0) -> np.ndarray:
    """Classes of all tiles of one (batch, head): int8 [Q tiles, KV tiles]."""
    rows, kv_len = case.sizes["q_len"] - case.q_offset, case.sizes["kv_len"]
    q = query_ends(np.arange(tiles_of(rows, tile.q))[:, None], tile.q, case)
    k = tile_ends(np.arange(tiles_of(kv_len, tile.kv)), tile.kv, kv_len)
    classes = classify(facts, case, b=b, h=h, q0=q[0], q1=q[1], k0=k[0], k1=k[1])
    return np.broadcast_to(classes, (len(q[0]), len(k[0])))


def true_grid(facts: Facts, case: Case, tile: Tiling, b: int = 0, h: int = 0) -> np.ndarray:
    """As `grid`, by evaluating the mask at every pair: O(q_len * kv_len), for tests and small pictures."""
    kv_len = case.sizes["kv_len"]
    edges = np.arange(0, kv_len, tile.kv)
    found = np.empty((tiles_of(case.sizes["q_len"] - case.q_offset, tile.q), len(edges)), np.int8)
    for row in range(len(found)):
        first, last = query_ends(row, tile.q, case)
        q = np.arange(first, last + 1)[:, None]
        kept = np.ones((len(q), kv_len), np.bool_)
        if facts.variant.mask is not None:
            kept &= case.evaluate(facts.variant.mask, b=b, h=h, q=q, k=np.arange(kv_len))
        columns = kept.sum(axis=0)
        seen = np.add.reduceat(columns, edges)
        area = len(q) * np.minimum(tile.kv, kv_len - edges)
        found[row] = np.where(seen == 0, EMPTY, np.where(seen == area, FULL, PARTIAL))
    return found
