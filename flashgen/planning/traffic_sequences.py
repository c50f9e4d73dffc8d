"""What a forward costs where sequences have lengths and positions of their own: tiles and bytes, summed over them.

Each sequence is counted by itself, as `planning.traffic` counts one; sequences that no mask can tell apart are counted
once.  Beside them a padded batch writes o and lse in rows that are no query, as kernels do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.analysis import facts as analysis
from flashgen.analysis.counts import MAX_COUNTED, TileCounts
from flashgen.analysis.tiles import EMPTY, FULL, PARTIAL, grid
from flashgen.errors import PlanError
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.planning.layout import AT_END
from flashgen.planning.plan import Tile

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.tiles import Case
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

#: Bytes of an entry of a page table.
TABLE_ENTRY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLengths:
    """How many queries and keys a sequence has, and the position of its first query."""

    q_rows: int
    kv_len: int
    q_offset: int = 0

    @property
    def q_len(self) -> int:
        """One past the last query's position, which is what a spec calls so."""
        return self.q_offset + self.q_rows

    def of(self, problem: Problem) -> Problem:
        """The problem of the sequence alone, of that of a batch."""
        return problem._replace(batch=1, q_len=self.q_rows, kv_len=self.kv_len)


def own_lengths(
    batch: int | None,
    seqlen: int | None,
    kv_seqlen: int | None,
    q: Sequence[int] | None,
    kv: Sequence[int] | None,
    q_offset: int = 0,
) -> tuple[OwnLengths, ...]:
    """Those of a batch; q_offset is a position, or AT_END.

    `q` and `kv` are lengths of each sequence.  Where one of them is None all sequences have `seqlen` queries, or
    `kv_seqlen` keys, else as many as the longest of the other; a batch is of one unless it says how many.  Raises
    PlanError for sizes that are not those of the lengths, for numbers of sequences that differ, for lengths that are
    none, and for queries before position 0.
    """
    for name, lengths, size, most in (("q_lengths", q, "seqlen", seqlen), ("kv_lengths", kv, "kv_seqlen", kv_seqlen)):
        if lengths is None:
            continue
        if not lengths:
            raise PlanError(f"{name} is empty: it has a number for each sequence\n  nearest: {name} of 1 number")
        if most not in (None, max(lengths)):
            raise PlanError(
                f"{size} is {most} and the longest of {name} {max(lengths)}\n  nearest: {size} {max(lengths)}, or none"
            )
        if batch not in (None, len(lengths)):
            raise PlanError(
                f"batch is {batch} and {name} names {len(lengths)} sequences\n  nearest: batch {len(lengths)}, or none"
            )
    count = next((len(x) for x in (q, kv) if x is not None), batch or 1)
    longest = max(q or kv or (0,))
    q_len = longest if seqlen is None else seqlen
    kv_len = q_len if kv_seqlen is None else kv_seqlen
    q, kv = (x if x is not None else (most,) * count for x, most in ((q, q_len), (kv, kv_len)))
    if len(q) != len(kv):
        fewer = min(len(q), len(kv))
        raise PlanError(
            f"q_lengths names {len(q)} sequence{'s' * (len(q) != 1)} and kv_lengths {len(kv)}: one number for each in"
            f" both\n  nearest: {fewer} number{'s' * (fewer != 1)} in both"
        )
    found = []
    for b, (rows, keys) in enumerate(zip(q, kv, strict=True)):
        for name, length in (("q_lengths", rows), ("kv_lengths", keys)):
            if not 0 <= length < MAX_LENGTH:
                nearest = min(max(length, 0), MAX_LENGTH - 1)
                raise PlanError(f"{name} has {length}: lengths are 0 to 2^24 - 1\n  nearest: {nearest}")
        first = keys - rows if q_offset == AT_END else q_offset
        if first < 0:
            raise PlanError(
                f"sequence {b} has {rows} queries and {keys} keys: at the end the first would sit before position 0\n"
                f"  nearest: at most {keys} queries"
            )
        found.append(OwnLengths(q_rows=rows, kv_len=keys, q_offset=first))
    return tuple(found)


class _Grid(NamedTuple):
    """Classes [tiles of queries, tiles of keys] of a sequence and a head; so many sequences and heads share them."""

    own: OwnLengths
    case: Case
    b: int
    h: int
    classes: np.ndarray
    sequences: int
    heads: int


def _grids(plan: KernelPlan, problem: Problem, case: Case, sequences: Sequence[OwnLengths]) -> Iterator[_Grid]:
    """Those that a mask may tell apart; heads of one sequence come one after the other."""
    facts, tile = _facts(plan), _tile(plan, problem)
    for (own, b), times in _kinds(facts, sequences):
        sizes = {**case.sizes, "batch": len(sequences), "q_len": own.q_len, "kv_len": own.kv_len}
        mine = replace(case, sizes=sizes, q_offset=own.q_offset)
        for h in range(problem.heads if facts.uses_head else 1):
            if own.q_rows and own.kv_len:
                classes = grid(facts, mine, tile, b, h)
            else:
                classes = np.zeros((-(-own.q_rows // tile.q), -(-own.kv_len // tile.kv)), np.int8)
            yield _Grid(own, mine, b, h, classes, times, 1 if facts.uses_head else problem.heads)


def _facts(plan: KernelPlan) -> Facts:
    """Those of a kernel of sequences with lengths of their own, which has no summaries."""
    return replace(analysis.analyse(plan.variant), summaries=())


def _tile(plan: KernelPlan, problem: Problem) -> Tile:
    """Queries and keys of a tile."""
    return Tile(q=plan.tile_queries(problem.group), kv=plan.tile.kv)


def count(plan: KernelPlan, problem: Problem, case: Case, sequences: Sequence[OwnLengths]) -> TileCounts:
    """The tiles of a forward of these sequences, as `analysis.counts` counts those of a dense problem."""
    facts, pack, tile = _facts(plan), plan.pack(problem.group), _tile(plan, problem)
    found = TileCounts()
    for one in _grids(plan, problem, case, sequences):
        found = _sum(found, _count_one(facts, tile, one), one.sequences * one.heads)
    shared = ("total", "empty", "partial", "full", "visited_columns")
    return replace(found, **{name: getattr(found, name) // pack for name in shared})


def count_parts(plan: KernelPlan, problem: Problem, case: Case, sequences: Sequence[OwnLengths], splits: int) -> int:
    """Queries of tiles, over the parts that visit any of their keys where `splits` parts take turns; summed over
    sequences and query heads."""
    size, found = _tile(plan, problem).q, 0
    for one in _grids(plan, problem, case, sequences):
        parts = np.minimum((one.classes != EMPTY).sum(axis=1), splits)
        found += int((_parts(one.own.q_rows, size) * parts).sum()) * one.sequences * one.heads
    return found


def table_bytes(plan: KernelPlan, problem: Problem, case: Case, sequences: Sequence[OwnLengths], page_size: int) -> int:
    """Bytes of the entries of a page table that lead to visited keys, each once."""
    tile, entries = plan.tile.kv, 0
    for (own, _), grids in groupby(_grids(plan, problem, case, sequences), key=lambda one: (one.own, one.b)):
        of_heads = list(grids)
        read = np.zeros(-(-own.kv_len // page_size), bool)
        visited = np.logical_or.reduce([(one.classes != EMPTY).any(axis=0) for one in of_heads])
        for first in (np.flatnonzero(visited) * tile).tolist():
            last = min(first + tile, own.kv_len) - 1
            read[first // page_size : last // page_size + 1] = True
        entries += int(read.sum()) * of_heads[0].sequences
    return entries * TABLE_ENTRY


def _kinds(facts: Facts, sequences: Sequence[OwnLengths]) -> Iterator[tuple[tuple[OwnLengths, int], int]]:
    """Sequences that differ in what a mask may see, and how often each is there."""
    yield from Counter((own, b if facts.uses_batch else 0) for b, own in enumerate(sequences)).items()


def _count_one(facts: Facts, tile: Tile, one: _Grid) -> TileCounts:
    own, found = one.own, one.classes
    rows, keys = (_parts(length, size) for length, size in ((own.q_rows, tile.q), (own.kv_len, tile.kv)))
    visited, area = found != EMPTY, rows[:, None] * keys
    return TileCounts(
        total=found.size,
        empty=int((found == EMPTY).sum()),
        partial=int((found == PARTIAL).sum()),
        full=int((found == FULL).sum()),
        visited_rows=int(rows[visited.any(axis=1)].sum()),
        visited_columns=int((visited * keys).sum()),
        visited_elements=int(area[visited].sum()),
        visible=_visible(facts, one.case, tile, found, area, one.b, one.h),
        unseen=None,
        uncut=None,
    )


def _parts(length: int, size: int) -> np.ndarray:
    """Rows of each tile that are there."""
    return np.minimum(size, length - np.arange(0, length, size))


def _visible(facts: Facts, case: Case, tile: Tile, found: np.ndarray, area: np.ndarray, b: int, h: int) -> int | None:
    """Pairs that the mask keeps: those of partial tiles one by one, up to MAX_COUNTED of them."""
    pairs = int(area[found == FULL].sum())
    if int(area[found == PARTIAL].sum()) > MAX_COUNTED:
        return None
    mask = facts.variant.mask
    for i, j in np.argwhere(found == PARTIAL):
        assert mask is not None  # it cuts the tile
        q = case.q_offset + i * tile.q + np.arange(min(tile.q, case.sizes["q_len"] - case.q_offset - i * tile.q))
        k = j * tile.kv + np.arange(min(tile.kv, case.sizes["kv_len"] - j * tile.kv))
        kept = case.evaluate(mask, b=b, h=h, q=q[:, None], k=k)
        pairs += int(np.broadcast_to(kept, (len(q), len(k))).sum())
    return pairs


def _sum(one: TileCounts, other: TileCounts, times: int) -> TileCounts:
    """Counts of one and of so many of another; what is not known of either is not known."""
    values: dict[str, Any] = {}
    for f in fields(TileCounts):
        a, b = getattr(one, f.name), getattr(other, f.name)
        values[f.name] = None if a is None or b is None else a + times * b
    return TileCounts(**values)


def inputs(problem: Problem, sequences: Sequence[OwnLengths]) -> int:
    """Bytes of q, k and v that are there."""
    q, keys = sum(own.q_rows for own in sequences), sum(own.kv_len for own in sequences)
    return problem.read_bytes(q * problem.heads, keys * problem.kv_heads)


def written_rows(plan: KernelPlan, problem: Problem, sequences: Sequence[OwnLengths]) -> int:
    """Rows of o and lse that the plan writes: those of a padded batch that are no query too."""
    rows = sum(own.q_rows for own in sequences) if plan.layout.joined else problem.batch * problem.q_len
    return rows * problem.heads
