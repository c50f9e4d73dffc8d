"""Sums of floors, and with them the tiles of a band counted in a number of steps that grows with the log of a length.

Where a band meets no edge of the problem, Q tile i visits floor((i * tile_q + a) / tile_kv) - floor((i * tile_q + b) /
tile_kv) + 1 KV tiles.  `floor_sum` adds such a term over a run of Q tiles by Euclid's algorithm; `band_tiles` cuts the
Q tiles into the few runs over which neither end of the span changes between band and edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a * i + b) / m) over i = 0 ... n - 1, for m > 0, in O(log m) steps.

    Each step counts the same lattice points by the other axis, which swaps a and m as Euclid's algorithm does (Graham,
    Knuth, Patashnik, "Concrete Mathematics", section 3.5).
    """
    total = 0
    while n > 0:
        whole_a, a = divmod(a, m)
        whole_b, b = divmod(b, m)
        total += whole_a * (n * (n - 1) // 2) + whole_b * n
        n, b = divmod(a * n + b, m)
        a, m = m, a
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The pairs with q in [q_lo, q_hi], k in [k_lo, k_hi] and q - k in [d_lo, d_hi]; plain ints."""

    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int
    d_lo: int
    d_hi: int

    @property
    def empty(self) -> bool:
        widest = min(self.d_hi, self.q_hi - self.k_lo) - max(self.d_lo, self.q_lo - self.k_hi)
        return min(widest, self.q_hi - self.q_lo, self.k_hi - self.k_lo) < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BandTiles:
    """Tiles of a band, in-bounds parts only: `rows` of Q tiles with a visited KV tile, `columns` and `elements` summed
    over visited tiles."""

    visited: int = 0
    full: int = 0
    rows: int = 0
    columns: int = 0
    elements: int = 0


def band_tiles(band: Band, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> BandTiles:
    """Counts the tiles that a band (inside [0, q_len) x [0, kv_len)) touches and those that lie inside it."""
    if band.empty:
        return BandTiles()
    # Every query between these two has a key, so every Q tile between theirs has a run of KV tiles.
    q_first = max(band.q_lo, band.k_lo + band.d_lo)
    q_last = min(band.q_hi, band.k_hi + band.d_hi)
    first, last = q_first // tile_q, q_last // tile_q
    tiles = -(-kv_len // tile_kv)
    missing = tiles * tile_kv - kv_len  # keys that the last KV tile lacks

    def rows_of(i: int) -> int:
        return min(tile_q, q_len - i * tile_q)

    visited = columns = elements = 0
    for i in {first, last}:
        k_first = max(band.k_lo, max(q_first, i * tile_q) - band.d_hi) // tile_kv
        k_last = min(band.k_hi, min(q_last, i * tile_q + tile_q - 1) - band.d_lo) // tile_kv
        keys = (k_last - k_first + 1) * tile_kv - missing * (k_last == tiles - 1)
        visited += k_last - k_first + 1
        columns += keys
        elements += keys * rows_of(i)
    if (inner := last - first - 1) > 0:
        up = tile_q - 1 - band.d_lo  # the last key of Q tile i is min(k_hi, i * tile_q + up)
        bounded = _clip((band.k_hi - up) // tile_q, first, last - 1) - first  # ... and not k_hi in so many of them
        ends = _floors(first + 1, bounded, tile_kv, tile_q, up) + (inner - bounded) * (band.k_hi // tile_kv)
        down = -band.d_hi  # the first key is max(k_lo, i * tile_q + down)
        held = _clip((band.k_lo - down) // tile_q, first, last - 1) - first
        starts = held * (band.k_lo // tile_kv) + _floors(first + 1 + held, inner - held, tile_kv, tile_q, down)
        edge = (tiles - 1) * tile_kv
        at_edge = last - _clip(-((up - edge) // tile_q), first + 1, last) if band.k_hi >= edge else 0
        visited += ends - starts + inner
        keys = (ends - starts + inner) * tile_kv - missing * at_edge
        columns += keys
        elements += keys * tile_q
    rows = (last - first) * tile_q + rows_of(last)
    return BandTiles(
        visited=visited,
        full=_full_tiles(band, q_len, kv_len, tile_q, tile_kv),
        rows=rows,
        columns=columns,
        elements=elements,
    )


def _full_tiles(band: Band, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> int:
    """Tiles all of whose pairs lie in the band."""
    tiles = -(-kv_len // tile_kv)
    # KV tiles [from_tile(first key), to_tile(last key)) lie inside a run of keys; the last tile may be short.
    edge = tiles if band.k_hi == kv_len - 1 else (band.k_hi + 1) // tile_kv
    start = -(-band.k_lo // tile_kv)

    def inside(q0: int, q1: int) -> int:
        """KV tiles whole inside the keys that queries q0 and q1 both see."""
        k_last = q0 - band.d_lo
        end = edge if k_last >= band.k_hi else (k_last + 1) // tile_kv
        return max(0, end - max(start, -((band.d_hi - q1) // tile_kv)))

    total = 0
    short = q_len - q_len % tile_q  # the first query of a Q tile that is cut short, if one is
    if short < q_len and band.q_lo <= short and band.q_hi == q_len - 1:
        total += inside(short, q_len - 1)
    first = -(-band.q_lo // tile_q)
    last = max((band.q_hi + 1) // tile_q, first) - 1
    # Q tile i has keys up to i * tile_q - d_lo (before `turn`, the edge from there on) and from i * tile_q + down.
    down = tile_q - 1 - band.d_hi
    turn = _clip(-((-band.k_hi - band.d_lo) // tile_q), first, last + 1)
    leave = _clip((band.k_lo - down) // tile_q + 1, first, last + 1)
    cuts = sorted((first, turn, leave, last + 1))
    for i, j in pairwise(cuts):
        if i >= j:
            continue
        if i >= turn and i < leave:  # edge to edge
            total += (j - i) * max(0, edge - start)
        elif i >= turn:  # the start moves: it stays below the edge up to some Q tile
            j = _clip((edge * tile_kv - down) // tile_q + 1, i, j)
            total += (j - i) * edge - _floors(i, j - i, tile_kv, tile_q, down + tile_kv - 1)
        elif i < leave:  # the end moves: it stays above the start from some Q tile on
            i = _clip(-((1 - band.d_lo - start * tile_kv) // tile_q), i, j)
            total += _floors(i, j - i, tile_kv, tile_q, 1 - band.d_lo) - (j - i) * start
        elif band.d_hi - band.d_lo + 2 - tile_q >= tile_kv:  # both move: all or none of the Q tiles have such tiles
            total += _floors(i, j - i, tile_kv, tile_q, 1 - band.d_lo)
            total -= _floors(i, j - i, tile_kv, tile_q, down + tile_kv - 1)
    return total


def _floors(first: int, n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a * i + b) / m) over n values of i from `first`."""
    return floor_sum(n, m, a, a * first + b)


def _clip(value: int, lo: int, hi: int) -> int:
    return max(lo, min(value, hi))
