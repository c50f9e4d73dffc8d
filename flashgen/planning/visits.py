"""The share of scores that tiles of one size visit, beside those of another: what a planner that knows no data can say.

Where a mask is made of cells (see `analysis.cells`), a tile is visited for each cell that it holds a part of.  So the
best tiles are those that no border of cells cuts.  What a tile visits beyond a band's or a document's edge is left out:
it differs less, and times that were measured hold it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flashgen.analysis import tiles
from flashgen.analysis.cells import Cells
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.lang.variant import Variant
from flashgen.planning.plan import Tile

#: Queries and keys (more where they would be so few cells) on which a mask that reads no data is looked at.
LENGTH, LEAST_CELLS = 2048, 8

#: Tiles of a side that are looked at: where cells are larger, few are cut.
MOST_TILES = 4096

#: The share of cells that data are taken to show, each whatever the others are.
SHOWN = 0.25


@lru_cache(maxsize=4096)
def share(variant: Variant, tile: Tile) -> float:
    """The share of scores that tiles of this size are expected to visit; 1 where the mask is made of no cells."""
    cells = _cells(variant)
    if cells is None:
        return 1.0
    shown = _shown(variant)
    if shown is not None:
        rows = np.array([shown[first : last + 1].any(axis=0) for first, last in _met(tile.q, cells.q, len(shown))])
        seen = [rows[:, first : last + 1].any(axis=1) for first, last in _met(tile.kv, cells.k, shown.shape[1])]
        return float(np.mean(seen))
    # By how many cells tiles meet, and how often: tiles themselves may be more than memory holds.
    (q, of_q), (k, of_k) = (_counted(last - first + 1) for first, last in map(np.transpose, _repeating(cells, tile)))
    return float(of_q @ (1 - (1 - SHOWN) ** np.multiply.outer(q, k)) @ of_k)


def _cells(variant: Variant) -> Cells | None:
    """The cells of the mask; those longer than every sequence as long as that, as no position passes their border."""
    cells = analyse(variant).cells
    if cells is None:
        return None
    q, k = (side and min(side, MAX_LENGTH) for side in (cells.q, cells.k))
    return Cells(q=q, k=k)


@lru_cache(maxsize=256)
def _shown(variant: Variant) -> np.ndarray | None:
    """Cells of which something is visible, with the parameters' defaults; None where data or a call decides, and where
    nothing is visible."""
    facts, cells = analyse(variant), _cells(variant)
    assert cells is not None
    if variant.pair_tensors or any(param.default is None for param in variant.params):
        return None
    q, k = (cell or LENGTH for cell in (cells.q, cells.k))
    lengths = {"q_len": max(LENGTH, LEAST_CELLS * q), "kv_len": max(LENGTH, LEAST_CELLS * k)}
    case = Case(sizes={"batch": 1, "heads": 1, "kv_heads": 1, **lengths}, params=variant.values({}), tensors={})
    found = tiles.grid(facts, case, Tile(q=q, kv=k)) != tiles.EMPTY
    for axis, cell in enumerate((cells.q, cells.k)):
        found = found if cell else found.any(axis, keepdims=True)  # without cells all is one
    return found if found.any() else None


def _counted(met: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value, and its share of all."""
    values, counts = np.unique(met, return_counts=True)
    return values, counts / counts.sum()


def _met(size: int, cell: int | None, cells: int) -> np.ndarray:
    """The first and last of so many cells that each tile meets, of the first MOST_TILES; without cells all is one."""
    if cell is None:
        return np.zeros((1, 2), np.int64)
    first = np.arange(min(-(-cells * cell // size), MOST_TILES)) * size
    return np.stack([first // cell, np.minimum((first + size - 1) // cell, cells - 1)], axis=1)


def _repeating(cells: Cells, tile: Tile) -> list[np.ndarray]:
    """The cells of queries, and of keys, that tiles meet before a tile and a cell begin together again."""
    sides = ((tile.q, cells.q), (tile.kv, cells.k))
    return [_met(size, cell, np.lcm(size, cell or 1) // (cell or 1)) for size, cell in sides]
