"""Pipeline hopper, forward: who hands out tiles, who loads them, and what a row of one is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# ---------------------------------------------------------------------------------------------------------------------
# Who hands out tiles of queries.  A block `foresees` its next one where it is not taken from a counter late.  Where
# keys are split, a tile is found by quotients by `divisors`, if it has them: a short call waits for it.

#: Tiles of keys that are many for a tile of queries: the next one is then taken from the counter in time.
MANY_TILES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScheduler:
    """A counter in memory, long tiles first: the last ones, or where they are `ordered` as a kernel before it has put
    them, by what data hide."""

    template: ClassVar[str] = "hopper/forward_dynamic_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    divisors: ClassVar[tuple[str, ...]] = ()
    foresees: ClassVar[bool] = False
    in_time: ClassVar[bool] = False

    ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticScheduler:
    """Each block has its share."""

    template: ClassVar[str] = "hopper/forward_static_scheduler.cu.j2"
    dynamic: ClassVar[bool] = False
    divisors: ClassVar[tuple[str, ...]] = ("q_tiles", "heads", "batch")
    foresees: ClassVar[bool] = True
    in_time: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InTimeScheduler:
    """Each block has its share of tiles that see few keys; others come from a counter in memory, in time: when the
    loader has come to the last keys of the one before.

    Where memory decides, SMs are served unevenly, and a block that is late would keep tiles that others could begin.
    Of one warpgroup, decoding on three H200s, of the time that equal shares took: 256 tiles of 8,192 keys 0.99 to 1.00,
    512 of 4,096 0.987 to 1.00, 1,024 of 2,048 0.993 to 1.01; 64 sequences of 256 to 64k keys, each by one block, 0.66.
    Few keys took 1.04 to 1.12 from a counter.
    """

    template: ClassVar[str] = "hopper/forward_in_time_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    divisors: ClassVar[tuple[str, ...]] = ("q_tiles", "heads", "batch")
    foresees: ClassVar[bool] = True  # where they see few keys
    in_time: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceScheduler:
    """A counter in memory; of a tile's number it finds the sequence in the cumulative lengths."""

    template: ClassVar[str] = "hopper/forward_sequence_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    divisors: ClassVar[tuple[str, ...]] = ("splits", "heads")
    foresees: ClassVar[bool] = False

    in_time: bool = False  # as above


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScheduler:
    """A counter in memory; of a number it finds the sequence by the parts of its keys: those that have a tile."""

    template: ClassVar[str] = "hopper/forward_part_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    divisors: ClassVar[tuple[str, ...]] = ("q_tiles", "heads")
    foresees: ClassVar[bool] = False

    in_time: bool = False


Scheduler = DynamicScheduler | StaticScheduler | InTimeScheduler | SequenceScheduler | PartScheduler

# ---------------------------------------------------------------------------------------------------------------------
# What a warpgroup does with the first tile of keys that its block visits


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTileWhole:
    """It multiplies by all of it, as by any other."""

    alone: ClassVar[str] = "hopper/forward_first_alone.cu.j2"
    beside: ClassVar[str] = "hopper/forward_first_beside.cu.j2"
    next_leaf: ClassVar[str] = "hopper/forward_next_leaf.cu.j2"
    keys: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTileAsSeen:
    """It multiplies by the first `keys` alone where its 64 queries see no others, and passes tiles that they see none
    of, if there may be any (`passes`): on the diagonal, queries of the first warpgroups see half of a tile, or none.

    What is left out are probabilities of 0: no bit of a result changes.
    """

    alone: ClassVar[str] = "hopper/forward_first_seen_alone.cu.j2"
    beside: ClassVar[str] = "hopper/forward_first_seen_beside.cu.j2"
    next_leaf: ClassVar[str] = "hopper/forward_next_leaf_seen.cu.j2"
    keys: int
    passes: bool

    @property
    def step(self) -> str:
        """The template of how it comes to the first tile."""
        return f"hopper/forward_first_step{'_passing' if self.passes else ''}.cu.j2"


FirstTile = FirstTileWhole | FirstTileAsSeen

#: What any mask may have.
FIRST_TILE_WHOLE = FirstTileWhole()

# ---------------------------------------------------------------------------------------------------------------------
# Where a tile of queries ends, of consumers whose products overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsBesideNext:
    """Its last product runs beside the first of the next tile; then O is stored."""

    run: ClassVar[str] = "hopper/forward_run_across_tiles.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsBeforeNext:
    """O is stored while the queries of the next tile come.

    Where shared memory has the queries of one tile alone, those of the next come 2,000 clocks after the last product,
    and to store O takes 2,500 (head_dim 256): 512 tokens took 0.94 to 0.96 of the time on an H200, 4,096 0.99.  Of
    causal tiles of queries that see few keys it is faster too.
    """

    run: ClassVar[str] = "hopper/forward_run_tile_after_tile.cu.j2"


TileEnd = EndsBesideNext | EndsBeforeNext

#: What most tiles with room for the next one's queries have.
ENDS_BESIDE_NEXT = EndsBesideNext()

# ---------------------------------------------------------------------------------------------------------------------
# Who loads what the scheduler hands out

_SCHEDULER, _LOADER = "hopper/forward_scheduler.cu.j2", "hopper/forward_loader.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendsToLoader:
    """A warp of its own, which the scheduler's is ahead of."""

    template: ClassVar[str] = "hopper/forward_send_to_loader.cu.j2"
    parts: ClassVar[tuple[str, ...]] = (_SCHEDULER, _LOADER)
    loads: ClassVar[bool] = False
    told: ClassVar[str] = ""  # in the names of the loader's templates
    run: ClassVar[str] = "Loader{shared, map_q, map_k, map_v, p}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendsAndLoads:
    """The scheduler's warp: one more turns V over."""

    template: ClassVar[str] = "hopper/forward_send_and_load.cu.j2"
    parts: ClassVar[tuple[str, ...]] = (_LOADER, _SCHEDULER)
    loads: ClassVar[bool] = True
    told: ClassVar[str] = "told_"
    run: ClassVar[str] = "Scheduler{shared, p, {shared, map_q, map_k, map_v, p}}"


Sender = SendsToLoader | SendsAndLoads

#: What 16 bits have.
SENDS_TO_LOADER = SendsToLoader()

# ---------------------------------------------------------------------------------------------------------------------
# What a row of a tile is


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """A row of a tile is a query of one head."""

    template: ClassVar[str] = "hopper/forward_rows_of_queries.cu.j2"
    scale: ClassVar[str] = "hopper/forward_scale_of_tile.cu.j2"  # of 8 bits
    packed: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQueries:
    """A row of a tile is a query of one of several heads that share keys."""

    template: ClassVar[str] = "hopper/forward_rows_of_packs.cu.j2"
    scale: ClassVar[str] = "hopper/forward_scales_of_rows.cu.j2"
    packed: ClassVar[bool] = True


Rows = Queries | PackedQueries
QUERIES = Queries()
PACKED = PackedQueries()
