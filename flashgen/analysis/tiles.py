"""Tiles of a mask in Python: their classes, the schedule of a Q tile, and counts for plans, pictures and tests.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np

from flashgen.analysis import zones
from flashgen.analysis.abstract import Judge
from flashgen.analysis.facts import Facts, Term
from flashgen.analysis.floorsum import Band, band_tiles
from flashgen.analysis.zones import Bounds
from flashgen.lang import ops, ranges
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import Node
from flashgen.lang.ranges import Range, Truth

EMPTY, PARTIAL, FULL = 0, 1, 2

#: Visible pairs of a mask that is not exact are counted one by one in PARTIAL tiles, up to this many elements of them.
MAX_COUNTED = 1 << 26

#: Unions of more zones than this are counted tile by tile, not by inclusion and exclusion.
_MAX_UNION = 8
_CHUNK = 1 << 20  # elements of a NumPy temporary
_SQUARE = 32  # tiles of a side that are judged as one first


class Tiling(Protocol):
    """Anything that says how many queries and keys a tile has."""

    @property
    def q(self) -> int: ...

    @property
    def kv(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What evaluating an expression needs: `sizes` (batch, heads, kv_heads, q_len, kv_len), the value of each
    parameter, and each captured tensor as a NumPy array (float16 and bfloat16 as any float type)."""

    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    tensors: Mapping[str, np.ndarray]

    def evaluate(self, root: Node, *, b, h, q=None, k=None, live=None) -> np.ndarray:
        """The value of a mask or of a part of it at positions that broadcast (see `lang.evaluate`)."""
        return evaluate(root, b=b, h=h, q=q, k=k, sizes=self.sizes, params=self.params, tensors=self.tensors, live=live)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCounts:
    """Tiles of a problem by class, and the in-bounds parts of those visited (PARTIAL or FULL); all summed over batch
    and query heads.

    `visited_rows`: queries of Q tiles that visit a KV tile; `visited_columns`: keys, over visited tiles;
    `visited_elements`: pairs of visited tiles; `visible`: pairs that the mask keeps, None where only reading more than
    MAX_COUNTED pairs of partial tiles one by one would tell.
    """

    total: int = 0
    empty: int = 0
    partial: int = 0
    full: int = 0
    visited_rows: int = 0
    visited_columns: int = 0
    visited_elements: int = 0
    visible: int | None = 0

    @property
    def visited(self) -> int:
        return self.partial + self.full


# ---------------------------------------------------------------------------------------------------------------------
# Classes of given tiles


class _Known(NamedTuple):
    """A term whose bounds and uniform conditions are evaluated; arrays broadcast with the positions asked for."""

    bounds: Bounds
    holds: np.ndarray
    others: tuple[Node, ...]


def _known(terms: tuple[Term, ...], case: Case, b, h) -> list[_Known]:
    def value(n: Node) -> np.ndarray:
        return case.evaluate(n, b=b, h=h)

    return [_Known(zones.evaluate(t.zone, value), _every(map(value, t.uniform)), t.others) for t in terms]


def _every(conditions: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.logical_and, conditions, np.True_)


def judge(case: Case, b, h, q: tuple, k: tuple) -> Judge:
    """Abstract values over tiles: b and h are points, q and k (first, last) pairs, all arrays that broadcast."""
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
        return ops.bounds(n)

    return Judge(leaf)


def loaded(load: Node, indices: tuple[Range, ...], array: np.ndarray) -> Range | Truth:
    """The abstract value of a captured load, by the rule at the head of this module."""
    declared = ranges.stored(load.attr)
    if array.size == 0:
        return declared
    first = [np.clip(i.lo, 0, size - 1) for i, size in zip(indices, array.shape, strict=True)]
    last = [np.clip(i.hi, 0, size - 1) for i, size in zip(indices, array.shape, strict=True)]
    points = [np.equal(lo, hi) for lo, hi in zip(first, last, strict=True)]
    leading = _every(points[:-1])
    known = leading if load.attr.sorted else leading & points[-1]
    if not known.any():
        return declared
    lo = array[tuple(first)]
    hi = array[(*first[:-1], last[-1])] if load.attr.sorted else lo
    if isinstance(declared, Truth):
        single = leading & points[-1]
        return Truth(np.where(single, lo, True), np.where(single, np.logical_not(lo), True))
    if declared.is_float:
        lo, hi = lo.astype(np.float64), hi.astype(np.float64)
        nan = np.isnan(lo) | np.isnan(hi)
        return ranges.floats(
            np.where(known, lo, declared.lo), np.where(known, hi, declared.hi), np.where(known, nan, declared.nan)
        )
    return ranges.ints(np.where(known, lo, declared.lo), np.where(known, hi, declared.hi))


def _possible(terms: list[_Known], value: Judge, q: tuple, k: tuple) -> np.ndarray:
    found = np.zeros(np.broadcast_shapes(*map(np.shape, (*q, *k))), np.bool_)
    for term in terms:
        possible = zones.nonempty(term.bounds.within(*q, *k)) & term.holds
        for condition in term.others:
            if not possible.any():
                break
            possible = possible & value(condition).may_true
        found = found | possible
    return found


def classify(facts: Facts, case: Case, *, b, h, q0, q1, k0, k1) -> np.ndarray:
    """EMPTY, PARTIAL or FULL (int8) for tiles [q0, q1] x [k0, k1], both ends included and in bounds.

    All arguments are ints or int arrays that broadcast against each other.
    """
    visible, hidden = _known(facts.visible, case, b, h), _known(facts.hidden, case, b, h)
    return _classes(visible, hidden, judge(case, b, h, (q0, q1), (k0, k1)), (q0, q1), (k0, k1))


def _classes(visible: list[_Known], hidden: list[_Known], value: Judge, q: tuple, k: tuple) -> np.ndarray:
    seen = _possible(visible, value, q, k)
    cut = _possible(hidden, value, q, k)
    return np.where(seen, np.where(cut, PARTIAL, FULL), EMPTY).astype(np.int8)


# ---------------------------------------------------------------------------------------------------------------------
# The schedule of a Q tile


def _ends(tile, size: int, length: int) -> tuple:
    """The first and last position of a tile, cut at the length."""
    first = np.multiply(tile, size)
    return first, np.minimum(first + size, length) - 1


def _runs(known: list[_Known], case: Case, tile: Tiling, q_tile) -> tuple[np.ndarray, np.ndarray]:
    if not known:
        return (np.zeros((0, *np.shape(q_tile)), np.int64),) * 2
    q = _ends(q_tile, tile.q, case.sizes["q_len"])
    first, last = [], []
    for term in known:
        lo, hi = zones.key_span(term.bounds.within(*q, 0, case.sizes["kv_len"] - 1))
        first.append(np.floor_divide(lo, tile.kv))
        last.append(np.where((lo <= hi) & term.holds, np.floor_divide(hi, tile.kv), first[-1] - 1))
    ends = np.stack(np.broadcast_arrays(*first, *last))
    return ends[: len(known)], ends[len(known) :]


def runs(facts: Facts, case: Case, tile: Tiling, q_tile, b=0, h=0) -> tuple[np.ndarray, np.ndarray]:
    """First and last KV tile of each visible term's run, with an axis of terms in front; first > last is no run.

    `q_tile`, `b` and `h` are ints or int arrays that broadcast.
    """
    return _runs(_known(facts.visible, case, b, h), case, tile, q_tile)


def schedule(facts: Facts, case: Case, tile: Tiling, q_tile: int, b: int = 0, h: int = 0) -> list[tuple[int, int]]:
    """The KV tiles that a Q tile visits, in the order it visits them (descending), each with PARTIAL or FULL."""
    if case.sizes["kv_len"] == 0:
        return []
    first, last = runs(facts, case, tile, q_tile, b, h)
    touched = [np.arange(i, j + 1) for i, j in zip(first.ravel(), last.ravel(), strict=True) if i <= j]
    if not touched:
        return []
    kv_tiles = np.unique(np.concatenate(touched))[::-1]
    q0, q1 = _ends(q_tile, tile.q, case.sizes["q_len"])
    k0, k1 = _ends(kv_tiles, tile.kv, case.sizes["kv_len"])
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
    if case.sizes["q_len"] == 0:
        return []
    keys = _ends(kv_tile, tile.kv, case.sizes["kv_len"])
    touched = []
    for term in _known(facts.visible, case, b, h):
        first, last = zones.query_span(term.bounds.within(0, case.sizes["q_len"] - 1, *keys))
        if term.holds and first <= last:
            touched.append(np.arange(first // tile.q, last // tile.q + 1))
    if not touched:
        return []
    q_tiles = np.unique(np.concatenate(touched))
    q0, q1 = _ends(q_tiles, tile.q, case.sizes["q_len"])
    classes = np.broadcast_to(classify(facts, case, b=b, h=h, q0=q0, q1=q1, k0=keys[0], k1=keys[1]), q_tiles.shape)
    kept = classes != EMPTY
    return list(zip(q_tiles[kept].tolist(), classes[kept].tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """The (batch, head) pairs over which the mask differs, flat, and how many pairs of the problem each stands for."""

    b: np.ndarray
    h: np.ndarray
    weight: int

    @classmethod
    def of(cls, facts: Facts, case: Case) -> _Places:
        batch, heads = case.sizes["batch"], case.sizes["heads"]
        b, h = np.meshgrid(
            np.arange(batch if facts.uses_batch else min(batch, 1)),
            np.arange(heads if facts.uses_head else min(heads, 1)),
            indexing="ij",
        )
        weight = (1 if facts.uses_batch else batch) * (1 if facts.uses_head else heads)
        return cls(b=b.ravel(), h=h.ravel(), weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCounts:
    """The in-bounds parts of visited tiles as a backward moves them, whose outer loop runs over keys.

    `rows`: queries, over visited tiles, summed over batch and query heads; `keys`: keys of the KV tiles that any query
    of the heads that share them visits, summed over batch and key/value heads.
    """

    rows: int = 0
    keys: int = 0


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def count(facts: Facts, case: Case, tile: Tiling) -> TileCounts:
    """Counts tiles of a whole problem.

    Masks of one zone are counted by floor sums (`floorsum`), unions of zones by intervals of KV tiles a Q tile; only
    masks with other conditions are classified tile by tile, in NumPy blocks.
    """
    places = _Places.of(facts, case)
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    if not places.weight or not len(places.b) or not q_len or not kv_len:
        return TileCounts()
    if not facts.exact:
        found = _count_classes(facts, case, tile, places)
    elif len(facts.visible) == 1:
        found = _count_band(facts, case, tile, places)
    else:
        found = _count_unions(facts, case, tile, places)
    return _scaled(found, _tiles(q_len, tile.q) * _tiles(kv_len, tile.kv) * len(places.b), places.weight)


def count_keys(facts: Facts, case: Case, tile: Tiling, visited: int) -> KeyCounts:
    """Counts of a problem of which `count` found that many visited tiles.

    In the time of `count` or less: masks of zones alone are counted by intervals, others tile by tile.
    """
    places = _Places.of(facts, case)
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    if not places.weight or not len(places.b) or not q_len or not kv_len:
        return KeyCounts()
    in_last, keys = (_keys_of_zones if facts.exact else _keys_of_classes)(facts, case, tile, places)
    q_tiles = _tiles(q_len, tile.q)
    rows = tile.q * visited - (q_tiles * tile.q - q_len) * in_last * places.weight
    group = case.sizes["heads"] // case.sizes["kv_heads"]
    return KeyCounts(rows=rows, keys=keys * (places.weight if facts.uses_head else places.weight // group))


def _keys_of_zones(facts: Facts, case: Case, tile: Tiling, places: _Places) -> tuple[int, int]:
    """KV tiles that the last Q tile visits, over the places; and keys of the KV tiles visited at all."""
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    group = case.sizes["heads"] // case.sizes["kv_heads"] if facts.uses_head else 1
    first, last = runs(facts, case, tile, _tiles(q_len, tile.q) - 1, places.b, places.h)
    in_last = int(np.broadcast_to(_union(first, last), places.b.shape).sum())
    starts, ends = [], []
    for term in _known(facts.visible, case, places.b, places.h):
        lo, hi = zones.key_span(term.bounds.within(0, q_len - 1, 0, kv_len - 1))
        start = np.floor_divide(lo, tile.kv) * tile.kv
        end = np.minimum((np.floor_divide(hi, tile.kv) + 1) * tile.kv, kv_len) - 1
        end = np.where((lo <= hi) & term.holds, end, start - 1)
        for found, x in ((starts, start), (ends, end)):  # of each of the heads that share keys
            found += list(np.broadcast_to(x, places.b.shape).reshape(-1, group).T)
    return in_last, int(_union(np.stack(starts), np.stack(ends)).sum()) if starts else 0


def _keys_of_classes(facts: Facts, case: Case, tile: Tiling, places: _Places) -> tuple[int, int]:
    """As `_keys_of_zones`, for any mask."""
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    q_tiles, kv_tiles = _tiles(q_len, tile.q), _tiles(kv_len, tile.kv)
    shared_by = case.sizes["heads"] // case.sizes["kv_heads"] if facts.uses_head else 1
    heads = case.sizes["heads"] if facts.uses_head else 1
    seen = np.zeros((int(places.b.max()) + 1, heads // shared_by, kv_tiles), np.bool_)
    in_last = 0
    for block in _blocks(facts, case, tile, places):
        visited = block.classes != EMPTY
        in_last += int(visited[:, block.q_tiles == q_tiles - 1].sum())
        at = block.b.ravel()[:, None], block.h.ravel()[:, None] // shared_by, block.kv_tiles
        np.logical_or.at(seen, at, visited.any(axis=1))
    keys = np.minimum(tile.kv, kv_len - np.arange(kv_tiles) * tile.kv)
    return in_last, int((seen * keys).sum())


@dataclass(slots=True, kw_only=True)
class _Sum:
    """Counts in the making, over the places."""

    visited: int = 0
    full: int = 0
    rows: int = 0
    columns: int = 0
    elements: int = 0
    visible: int | None = 0


def _scaled(found: _Sum, total: int, weight: int) -> TileCounts:
    return TileCounts(
        total=total * weight,
        empty=(total - found.visited) * weight,
        partial=(found.visited - found.full) * weight,
        full=found.full * weight,
        visited_rows=found.rows * weight,
        visited_columns=found.columns * weight,
        visited_elements=found.elements * weight,
        visible=None if found.visible is None else found.visible * weight,
    )


def _count_band(facts: Facts, case: Case, tile: Tiling, places: _Places) -> _Sum:
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    (term,) = _known(facts.visible, case, places.b, places.h)
    inside = term.bounds.within(0, q_len - 1, 0, kv_len - 1)
    columns = (inside.q_lo, inside.q_hi, inside.k_lo, inside.k_hi, inside.d_lo, inside.d_hi, term.holds)
    rows = np.stack(np.broadcast_arrays(*columns, places.b)[:-1], axis=-1)
    found = _Sum()
    distinct, times = np.unique(rows, axis=0, return_counts=True)
    for (q_lo, q_hi, k_lo, k_hi, d_lo, d_hi, holds), n in zip(distinct.tolist(), times.tolist(), strict=True):
        if not holds:
            continue
        band = Band(q_lo=q_lo, q_hi=q_hi, k_lo=k_lo, k_hi=k_hi, d_lo=d_lo, d_hi=d_hi)
        tiles = band_tiles(band, q_len, kv_len, tile.q, tile.kv)
        found.visited += n * tiles.visited
        found.full += n * tiles.full
        found.rows += n * tiles.rows
        found.columns += n * tiles.columns
        found.elements += n * tiles.elements
    found.visible = _pairs_of_union([term], q_len, kv_len, places)
    return found


def _count_unions(facts: Facts, case: Case, tile: Tiling, places: _Places) -> _Sum:
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    q_tiles, kv_tiles = _tiles(q_len, tile.q), _tiles(kv_len, tile.kv)
    rows = np.minimum(tile.q, q_len - np.arange(q_tiles) * tile.q)
    found = _Sum()
    step = max(1, _CHUNK // (q_tiles * (len(facts.visible) + len(facts.hidden) + 1)))
    for start in range(0, len(places.b), step):
        b, h = places.b[start : start + step, None], places.h[start : start + step, None]
        first, last = runs(facts, case, tile, np.arange(q_tiles), b, h)
        cut = _union(*_runs(_known(facts.hidden, case, b, h), case, tile, np.arange(q_tiles)))
        visited = np.broadcast_to(_union(first, last), (len(b), q_tiles))
        k_last = np.where(first <= last, np.minimum((last + 1) * tile.kv, kv_len) - 1, first * tile.kv - 1)
        keys = np.broadcast_to(_union(first * tile.kv, k_last), visited.shape)
        found.visited += int(visited.sum())
        found.full += int((kv_tiles - np.broadcast_to(cut, visited.shape)).sum())
        found.rows += int((rows * (visited > 0)).sum())
        found.columns += int(keys.sum())
        found.elements += int((rows * keys).sum())
    if len(facts.visible) <= _MAX_UNION:
        found.visible = _pairs_of_union(_known(facts.visible, case, places.b, places.h), q_len, kv_len, places)
    else:
        found.visible = _count_classes(facts, case, tile, places).visible
    return found


def _union(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """How many integers lie in some interval [first, last]; intervals along the leading axis, empty where first >
    last."""
    far = np.iinfo(np.int64).max // 2
    some = first <= last
    order = np.argsort(np.where(some, first, far), axis=0)
    first = np.take_along_axis(np.where(some, first, far), order, axis=0)
    last = np.take_along_axis(np.where(some, last, -1), order, axis=0)
    reach = np.maximum.accumulate(last, axis=0)
    before = np.concatenate([np.full_like(reach[:1], -1), reach[:-1]])
    return np.maximum(0, last - np.maximum(first, before + 1) + 1).sum(axis=0)


def _pairs_of_union(terms: list[_Known], q_len: int, kv_len: int, places: _Places) -> int:
    """Pairs in some zone, over all places, by inclusion and exclusion; intersections that are empty end a branch."""

    def pairs(zone: Bounds, holds: np.ndarray, rest: list[_Known], sign: int) -> int:
        total = 0
        for i, term in enumerate(rest):
            both, hold = zone & term.bounds, holds & term.holds
            inside = np.broadcast_to(np.where(hold, zones.pairs(both), 0), places.b.shape)
            if inside.any():
                total += sign * int(inside.sum()) + pairs(both, hold, rest[i + 1 :], -sign)
        return total

    return pairs(Bounds().within(0, q_len - 1, 0, kv_len - 1), np.True_, terms, 1)


class _Block(NamedTuple):
    """Classes of the tiles [places, Q tiles, KV tiles]; tiles in no block are EMPTY."""

    b: np.ndarray
    h: np.ndarray
    q_tiles: np.ndarray
    kv_tiles: np.ndarray
    classes: np.ndarray


def _blocks(facts: Facts, case: Case, tile: Tiling, places: _Places) -> Iterator[_Block]:
    """Every tile that may be visited, classified, in blocks of bounded size.

    A square of _SQUARE x _SQUARE tiles is judged as one tile first, and its tiles only where it is PARTIAL: what the
    rules know of a rectangle they know of its parts.
    """
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    q_tiles, kv_tiles = _tiles(q_len, tile.q), _tiles(kv_len, tile.kv)
    group = max(1, _CHUNK // (min(_SQUARE, q_tiles) * kv_tiles))
    for place in range(0, len(places.b), group):
        b, h = (x[place : place + group, None, None] for x in (places.b, places.h))
        visible, hidden = _known(facts.visible, case, b, h), _known(facts.hidden, case, b, h)

        def classes(q: tuple, k: tuple, known=(visible, hidden), b=b, h=h) -> np.ndarray:
            found = _classes(*known, judge(case, b, h, q, k), q, k)
            return np.broadcast_to(found, (len(b), len(q[0]), len(k[0])))

        for start in range(0, q_tiles, _SQUARE):
            q_tile = np.arange(start, min(start + _SQUARE, q_tiles))
            first, last = _runs(visible, case, tile, q_tile[:, None])
            if not (some := first <= last).any():
                continue
            q = _ends(q_tile[:, None], tile.q, q_len)
            squares = np.arange(first[some].min() // _SQUARE, last[some].max() // _SQUARE + 1)
            square = classes((q[0][:1], q[1][-1:]), _ends(squares, tile.kv * _SQUARE, kv_len))
            kept = (square != EMPTY).any(axis=(0, 1))
            kv_tile = (squares[kept, None] * _SQUARE + np.arange(_SQUARE)).ravel()
            mixed = np.repeat((square != FULL).any(axis=(0, 1))[kept], _SQUARE)[kv_tile < kv_tiles]
            kv_tile = kv_tile[kv_tile < kv_tiles]
            found = np.full((len(b), len(q_tile), len(kv_tile)), FULL, np.int8)
            found[..., mixed] = classes(q, _ends(kv_tile[mixed], tile.kv, kv_len))
            yield _Block(b, h, q_tile, kv_tile, found)


def _count_classes(facts: Facts, case: Case, tile: Tiling, places: _Places) -> _Sum:
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    found = _Sum()
    to_read: list[tuple[np.ndarray, ...]] = []
    budget = MAX_COUNTED
    for block in _blocks(facts, case, tile, places):
        rows = np.minimum(tile.q, q_len - block.q_tiles * tile.q)[:, None]
        keys = np.minimum(tile.kv, kv_len - block.kv_tiles * tile.kv)
        visited, full, partial = (block.classes != EMPTY), (block.classes == FULL), (block.classes == PARTIAL)
        found.visited += int(visited.sum())
        found.full += int(full.sum())
        found.rows += int((rows[:, 0] * visited.any(axis=2)).sum())
        found.columns += int((visited * keys).sum())
        found.elements += int((visited * (rows * keys)).sum())
        budget -= int((partial * (rows * keys)).sum())
        if budget >= 0:
            found.visible += int((full * (rows * keys)).sum())
            place, row, column = np.nonzero(partial)
            to_read.append((block.b.ravel()[place], block.h.ravel()[place], block.q_tiles[row], block.kv_tiles[column]))
    if budget < 0:
        found.visible = None
    elif to_read:
        found.visible += _visible_pairs(facts, case, tile, *map(np.concatenate, zip(*to_read, strict=True)))
    return found


def _visible_pairs(facts: Facts, case: Case, tile: Tiling, b, h, q_tiles: np.ndarray, kv_tiles: np.ndarray) -> int:
    """Pairs that the mask keeps in these tiles, by evaluating it at each."""
    total = 0
    step = max(1, _CHUNK // (tile.q * tile.kv))
    for start in range(0, len(q_tiles), step):
        place_b, place_h, q, k = (x[start : start + step, None, None] for x in (b, h, q_tiles, kv_tiles))
        q, k = q * tile.q + np.arange(tile.q)[:, None], k * tile.kv + np.arange(tile.kv)
        inside = (q < case.sizes["q_len"]) & (k < case.sizes["kv_len"])
        kept = case.evaluate(facts.variant.mask, b=place_b, h=place_h, q=q, k=k, live=inside)
        total += int((kept & inside).sum())
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and checks


def grid(facts: Facts, case: Case, tile: Tiling, b: int = 0, h: int = 0) -> np.ndarray:
    """Classes of all tiles of one (batch, head): int8 [Q tiles, KV tiles]."""
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    q = _ends(np.arange(_tiles(q_len, tile.q))[:, None], tile.q, q_len)
    k = _ends(np.arange(_tiles(kv_len, tile.kv)), tile.kv, kv_len)
    classes = classify(facts, case, b=b, h=h, q0=q[0], q1=q[1], k0=k[0], k1=k[1])
    return np.broadcast_to(classes, (len(q[0]), len(k[0])))


def true_grid(facts: Facts, case: Case, tile: Tiling, b: int = 0, h: int = 0) -> np.ndarray:
    """As `grid`, by evaluating the mask at every pair: O(q_len * kv_len), for tests and small pictures."""
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    edges = np.arange(0, kv_len, tile.kv)
    found = np.empty((_tiles(q_len, tile.q), len(edges)), np.int8)
    for row in range(len(found)):
        q = np.arange(row * tile.q, min((row + 1) * tile.q, q_len))[:, None]
        kept = np.ones((len(q), kv_len), np.bool_)
        if facts.variant.mask is not None:
            kept &= case.evaluate(facts.variant.mask, b=b, h=h, q=q, k=np.arange(kv_len))
        columns = kept.sum(axis=0)
        seen = np.add.reduceat(columns, edges)
        area = len(q) * np.minimum(tile.kv, kv_len - edges)
        found[row] = np.where(seen == 0, EMPTY, np.where(seen == area, FULL, PARTIAL))
    return found


def confusion(facts: Facts, case: Case, tile: Tiling) -> np.ndarray:
    """Tiles of the problem by true class (rows) and judged class (columns): int64 [3, 3], by brute force."""
    places = _Places.of(facts, case)
    found = np.zeros((3, 3), np.int64)
    if case.sizes["q_len"] and case.sizes["kv_len"]:
        for b, h in zip(places.b.tolist(), places.h.tolist(), strict=True):
            np.add.at(found, (true_grid(facts, case, tile, b, h), grid(facts, case, tile, b, h)), places.weight)
    return found


def misclassified(facts: Facts, case: Case, tile: Tiling) -> float:
    """The share of tiles that are judged PARTIAL and are not, by brute force; 0 for a problem without tiles."""
    found = confusion(facts, case, tile)
    return float(found.sum() - found.trace()) / max(1, int(found.sum()))
