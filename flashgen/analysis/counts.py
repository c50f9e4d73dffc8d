"""Counts of tiles of a whole problem, by class and by what visiting them moves: for plans, pictures and tests.

Masks of one zone are counted by floor sums (`floorsum`), unions of zones by intervals of KV tiles a Q tile; only masks
with other conditions are classified tile by tile, in NumPy blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flashgen.analysis import zones
from flashgen.analysis.facts import Facts
from flashgen.analysis.floorsum import Band, band_tiles
from flashgen.analysis.tiles import (
    EMPTY,
    FULL,
    PARTIAL,
    Case,
    Known,
    Tiling,
    classes_of,
    classify,
    grid,
    known_terms,
    runs,
    runs_of,
    tile_ends,
    tiles_of,
    true_grid,
)
from flashgen.analysis.zones import Bounds

#: Visible pairs of a mask that is not exact are counted one by one in PARTIAL tiles, up to this many elements of them.
MAX_COUNTED = 1 << 26

#: Unions of more zones than this are counted tile by tile, not by inclusion and exclusion.
_MAX_UNION = 8
_CHUNK = 1 << 20  # elements of a NumPy temporary
_SQUARE = 32  # tiles of a side that are judged as one first


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCounts:
    """Tiles of a problem by class, and the in-bounds parts of those visited (PARTIAL or FULL); all summed over batch
    and query heads.

    `visited_rows`: queries of Q tiles that visit a KV tile; `visited_columns`: keys, over visited tiles;
    `visited_elements`: pairs of visited tiles; `visible`: pairs that the mask keeps; `unseen` and `uncut`: PARTIAL
    tiles of which in truth nothing is visible, and nothing hidden.  These three are None where only reading more than
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
    unseen: int | None = 0
    uncut: int | None = 0

    @property
    def visited(self) -> int:
        return self.partial + self.full

    @property
    def loss(self) -> Loss | None:
        """How these tiles compare with those of a block mask; None where that was not counted."""
        if self.unseen is None or self.uncut is None:
            return None
        cut = self.partial - self.unseen - self.uncut
        return Loss(visited=self.visited, seen=self.visited - self.unseen, masked=self.partial, cut=cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Tiles that a kernel visits and masks pair by pair, beside those for which a block mask (made by evaluating every
    pair) would: `seen` have a visible pair, `cut` have a hidden one too."""

    visited: int
    seen: int
    masked: int
    cut: int

    @property
    def visits(self) -> float:
        """Tiles visited for each that has to be; 1 where none has to be and none is."""
        return _ratio(self.visited, self.seen)

    @property
    def masks(self) -> float:
        """Tiles masked pair by pair for each that has to be."""
        return _ratio(self.masked, self.cut)

    @property
    def exact(self) -> bool:
        return self.visited == self.seen and self.masked == self.cut

    def __str__(self) -> str:
        if self.exact:
            return "as a block mask would have it"
        return f"{self.visits:.2f}x the tiles of a block mask visited, {self.masks:.2f}x masked pair by pair"

    def as_json(self) -> dict[str, int]:
        return {"visited": self.visited, "seen": self.seen, "masked": self.masked, "cut": self.cut}


def _ratio(ours: int, needed: int) -> float:
    return ours / needed if needed else math.inf if ours else 1.0


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


def count(facts: Facts, case: Case, tile: Tiling) -> TileCounts:
    """Counts tiles of a whole problem by class."""
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
    return _scaled(found, tiles_of(q_len, tile.q) * tiles_of(kv_len, tile.kv) * len(places.b), places.weight)


def count_keys(facts: Facts, case: Case, tile: Tiling, visited: int) -> KeyCounts:
    """Counts of a problem of which `count` found that many visited tiles.

    In the time of `count` or less: masks of zones alone are counted by intervals, others tile by tile.
    """
    places = _Places.of(facts, case)
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    if not places.weight or not len(places.b) or not q_len or not kv_len:
        return KeyCounts()
    in_last, keys = (_keys_of_zones if facts.exact else _keys_of_classes)(facts, case, tile, places)
    q_tiles = tiles_of(q_len, tile.q)
    rows = tile.q * visited - (q_tiles * tile.q - q_len) * in_last * places.weight
    group = case.sizes["heads"] // case.sizes["kv_heads"]
    return KeyCounts(rows=rows, keys=keys * (places.weight if facts.uses_head else places.weight // group))


def count_parts(facts: Facts, case: Case, tile: Tiling, splits: int) -> int:
    """Queries of Q tiles, over the parts that visit any of their KV tiles where `splits` parts take turns; summed over
    batch and query heads."""

    def of_runs(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return np.minimum(_union(first, last), splits)

    def of_tiles(visited: np.ndarray) -> np.ndarray:
        return np.minimum(visited.sum(axis=2), splits)

    return _count_by_parts(facts, case, tile, of_runs, of_tiles)


def count_leaves(facts: Facts, case: Case, tile: Tiling, leaf_tiles: int) -> int:
    """As `count_parts`, where a part visits the KV tiles of one leaf, so many."""

    def of_runs(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        start = np.floor_divide(first, leaf_tiles)
        return _union(start, np.where(last < first, start - 1, np.floor_divide(last, leaf_tiles)))

    def of_tiles(visited: np.ndarray) -> np.ndarray:
        starts = np.arange(0, visited.shape[2], leaf_tiles)
        return np.logical_or.reduceat(visited, starts, axis=2).sum(axis=2)

    return _count_by_parts(facts, case, tile, of_runs, of_tiles)


def _count_by_parts(
    facts: Facts,
    case: Case,
    tile: Tiling,
    of_runs: Callable[[np.ndarray, np.ndarray], np.ndarray],
    of_tiles: Callable[[np.ndarray], np.ndarray],
) -> int:
    """Queries of Q tiles, each as often as parts visit its KV tiles: by the first and last of the runs of these, or by
    which of them are visited."""
    places = _Places.of(facts, case)
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    if not places.weight or not len(places.b) or not q_len or not kv_len:
        return 0
    rows = np.minimum(tile.q, q_len - np.arange(tiles_of(q_len, tile.q)) * tile.q)
    if facts.exact:
        b, h, q_tiles = places.b[:, None], places.h[:, None], np.arange(len(rows))
        parts = np.broadcast_to(of_runs(*runs(facts, case, tile, q_tiles, b, h)), (len(b), len(rows)))
        return int((rows * parts).sum()) * places.weight
    found = 0
    for block in _blocks(facts, case, tile, places):
        found += int((rows[block.q_tiles] * of_tiles(block.classes != EMPTY)).sum())
    return found * places.weight


def visited_by(facts: Facts, case: Case, tile: Tiling, q_tile: int) -> int:
    """KV tiles in the runs that a Q tile sees of the first batch and head."""
    if not case.sizes["kv_len"]:
        return 0
    return int(_union(*runs(facts, case, tile, q_tile)))


def _keys_of_zones(facts: Facts, case: Case, tile: Tiling, places: _Places) -> tuple[int, int]:
    """KV tiles that the last Q tile visits, over the places; and keys of the KV tiles visited at all."""
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    group = case.sizes["heads"] // case.sizes["kv_heads"] if facts.uses_head else 1
    first, last = runs(facts, case, tile, tiles_of(q_len, tile.q) - 1, places.b, places.h)
    in_last = int(np.broadcast_to(_union(first, last), places.b.shape).sum())
    starts, ends = [], []
    for term in known_terms(facts.visible, case, places.b, places.h):
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
    q_tiles, kv_tiles = tiles_of(q_len, tile.q), tiles_of(kv_len, tile.kv)
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
    unseen: int | None = 0
    uncut: int | None = 0


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
        unseen=None if found.unseen is None else found.unseen * weight,
        uncut=None if found.uncut is None else found.uncut * weight,
    )


def _count_band(facts: Facts, case: Case, tile: Tiling, places: _Places) -> _Sum:
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    (term,) = known_terms(facts.visible, case, places.b, places.h)
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
    q_tiles, kv_tiles = tiles_of(q_len, tile.q), tiles_of(kv_len, tile.kv)
    rows = np.minimum(tile.q, q_len - np.arange(q_tiles) * tile.q)
    found = _Sum()
    step = max(1, _CHUNK // (q_tiles * (len(facts.visible) + len(facts.hidden) + 1)))
    for start in range(0, len(places.b), step):
        b, h = places.b[start : start + step, None], places.h[start : start + step, None]
        first, last = runs(facts, case, tile, np.arange(q_tiles), b, h)
        cut = _union(*runs_of(known_terms(facts.hidden, case, b, h), case, tile, np.arange(q_tiles)))
        visited = np.broadcast_to(_union(first, last), (len(b), q_tiles))
        k_last = np.where(first <= last, np.minimum((last + 1) * tile.kv, kv_len) - 1, first * tile.kv - 1)
        keys = np.broadcast_to(_union(first * tile.kv, k_last), visited.shape)
        found.visited += int(visited.sum())
        found.full += int((kv_tiles - np.broadcast_to(cut, visited.shape)).sum())
        found.rows += int((rows * (visited > 0)).sum())
        found.columns += int(keys.sum())
        found.elements += int((rows * keys).sum())
    if len(facts.visible) <= _MAX_UNION:
        found.visible = _pairs_of_union(known_terms(facts.visible, case, places.b, places.h), q_len, kv_len, places)
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


def _pairs_of_union(terms: list[Known], q_len: int, kv_len: int, places: _Places) -> int:
    """Pairs in some zone, over all places, by inclusion and exclusion; intersections that are empty end a branch."""

    def pairs(zone: Bounds, holds: np.ndarray, rest: list[Known], sign: int) -> int:
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
    q_tiles, kv_tiles = tiles_of(q_len, tile.q), tiles_of(kv_len, tile.kv)
    group = max(1, _CHUNK // (min(_SQUARE, q_tiles) * kv_tiles))
    for place in range(0, len(places.b), group):
        b, h = (x[place : place + group, None, None] for x in (places.b, places.h))
        visible, hidden = known_terms(facts.visible, case, b, h), known_terms(facts.hidden, case, b, h)

        def whole(q: tuple, k: tuple, known: Any = (visible, hidden), b: Any = b, h: Any = h) -> np.ndarray:
            found = classes_of(facts, case, *known, b, h, q, k)
            return np.broadcast_to(found, (len(b), len(q[0]), len(k[0])))

        def classes(q: tuple, k: tuple, b: Any = b, h: Any = h) -> np.ndarray:
            found = classify(facts, case, b=b, h=h, q0=q[0], q1=q[1], k0=k[0], k1=k[1])
            return np.broadcast_to(found, (len(b), len(q[0]), len(k[0])))

        for start in range(0, q_tiles, _SQUARE):
            q_tile = np.arange(start, min(start + _SQUARE, q_tiles))
            first, last = runs_of(visible, case, tile, q_tile[:, None])
            if not (some := first <= last).any():
                continue
            q = tile_ends(q_tile[:, None], tile.q, q_len)
            squares = np.arange(first[some].min() // _SQUARE, last[some].max() // _SQUARE + 1)
            square = whole((q[0][:1], q[1][-1:]), tile_ends(squares, tile.kv * _SQUARE, kv_len))
            kept = (square != EMPTY).any(axis=(0, 1))
            kv_tile = (squares[kept, None] * _SQUARE + np.arange(_SQUARE)).ravel()
            mixed = np.repeat((square != FULL).any(axis=(0, 1))[kept], _SQUARE)[kv_tile < kv_tiles]
            kv_tile = kv_tile[kv_tile < kv_tiles]
            found = np.full((len(b), len(q_tile), len(kv_tile)), FULL, np.int8)
            found[..., mixed] = classes(q, tile_ends(kv_tile[mixed], tile.kv, kv_len))
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
        found.visible = found.unseen = found.uncut = None
    elif to_read:
        kept, pairs = _visible_pairs(facts, case, tile, *map(np.concatenate, zip(*to_read, strict=True)))
        found.visible += int(kept.sum())
        found.unseen, found.uncut = int((kept == 0).sum()), int((kept == pairs).sum())
    return found


def _visible_pairs(
    facts: Facts, case: Case, tile: Tiling, b: Any, h: Any, q_tiles: np.ndarray, kv_tiles: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of each of these tiles that the mask keeps, by evaluating it at each, and all pairs of them."""
    kept, pairs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    step = max(1, _CHUNK // (tile.q * tile.kv))
    for start in range(0, len(q_tiles), step):
        place_b, place_h, q, k = (x[start : start + step, None, None] for x in (b, h, q_tiles, kv_tiles))
        q, k = q * tile.q + np.arange(tile.q)[:, None], k * tile.kv + np.arange(tile.kv)
        inside = (q < case.sizes["q_len"]) & (k < case.sizes["kv_len"])
        found = case.evaluate(facts.variant.mask, b=place_b, h=place_h, q=q, k=k, live=inside)
        kept.append((found & inside).sum(axis=(1, 2)))
        pairs.append(inside.sum(axis=(1, 2)))
    return np.concatenate(kept), np.concatenate(pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def confusion(facts: Facts, case: Case, tile: Tiling) -> np.ndarray:
    """Tiles of the problem by true class (rows) and judged class (columns): int64 [3, 3], by brute force."""
    places = _Places.of(facts, case)
    found = np.zeros((3, 3), np.int64)
    if case.sizes["q_len"] and case.sizes["kv_len"]:
        for b, h in zip(places.b.tolist(), places.h.tolist(), strict=True):
            np.add.at(found, (true_grid(facts, case, tile, b, h), grid(facts, case, tile, b, h)), places.weight)
    return found


def loss(judged: np.ndarray, true: np.ndarray) -> Loss:
    """How judged classes of tiles compare with the true ones of the same tiles."""
    return Loss(
        visited=int((judged != EMPTY).sum()),
        seen=int((true != EMPTY).sum()),
        masked=int((judged == PARTIAL).sum()),
        cut=int((true == PARTIAL).sum()),
    )


def misclassified(facts: Facts, case: Case, tile: Tiling) -> float:
    """The share of tiles that are judged PARTIAL and are not, by brute force; 0 for a problem without tiles."""
    found = confusion(facts, case, tile)
    return float(found.sum() - found.trace()) / max(1, int(found.sum()))
