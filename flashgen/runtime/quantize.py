"""Kernels that quantise: compiled through the disk cache, and what a launch of one takes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.codegen.quantize import emit
from flashgen.planning.quantize import ELEMENT_BYTES, ROWS, QuantizePlan
from flashgen.planning.quotient import divisor
from flashgen.runtime import cache, driver, nvrtc

#: Bytes of heads whose tiles are neighbours where tiles share scales: rows of a few heads lie side by side, and L2
#: holds these heads until they are read again.
GROUP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a tensor: sequences, heads, rows of each, and rows that share a scale (0: all of a head); and of sequences
    behind each other, none of which is longer than `length`, all `rows`."""

    batch: int
    heads: int
    length: int
    block: int
    rows: int | None = None

    @property
    def tiles(self) -> int:
        """Tiles of a head."""
        return -(-self.length // ROWS)

    @property
    def tiles_of_scale(self) -> int:
        """Tiles that share a scale."""
        return self.block // ROWS if self.block else max(1, self.tiles)

    @property
    def scales(self) -> int:
        """Scales of a head: one for all of its rows, if there is any or none, or one for each block."""
        return -(-self.tiles // self.tiles_of_scale) if self.block else 1

    @property
    def slots(self) -> int:
        """Numbers of the tiles that all sequences of a head have: where they lie behind each other, as many as are
        enough however they are divided, which the host does not know."""
        if self.rows is None:
            return self.batch * self.tiles
        return self.rows // ROWS + self.batch if self.rows and self.batch and self.length else 0

    @property
    def all_tiles(self) -> int:
        """Numbers of tiles of all heads."""
        return self.heads * self.slots

    @property
    def peaks(self) -> int:
        """Peaks of tiles: room for those of whole scales, or a place for each number of a tile."""
        whole = self.batch * self.heads * self.scales * self.tiles_of_scale
        return whole if self.rows is None else self.all_tiles

    @property
    def longest(self) -> int:
        """Rows of a sequence at most."""
        return self.length if self.rows is None else min(self.length, self.rows)

    @property
    def blocks(self) -> int:
        """Numbers of the tiles of a head that are neighbours: of a sequence's, or of all that lie behind each other."""
        return self.tiles if self.rows is None else self.slots

    def group(self, plan: QuantizePlan) -> int:
        """Heads whose tiles are neighbours, all of them or a part without remainder."""
        most = max(1, GROUP_BYTES // (self.longest * plan.head_dim * ELEMENT_BYTES))
        return next(n for n in range(min(self.heads, most), 0, -1) if self.heads % n == 0)

    def values(self, plan: QuantizePlan) -> dict[str, int]:
        """What a kernel is told of them."""
        together = self.group(plan) if plan.scale.tickets else self.heads
        return {
            "heads": self.heads,
            "length": self.length,
            "tiles": self.all_tiles,
            "sequences": self.batch,
            "slots": self.slots,
            "rows": self.rows or 0,
            "tiles_of_scale": self.tiles_of_scale,
            "scales": self.scales,
            "group": together,
            "by_batch": divisor(self.heads * self.blocks),
            "by_group": divisor(together * self.blocks),
            "by_heads": divisor(together),
            "by_scale": divisor(self.tiles_of_scale),
        }


def grid(plan: QuantizePlan, sizes: Sequence[Sizes], sms: int) -> int:
    """Thread blocks of a launch on a GPU of so many SMs: those that it holds at a time, each with work."""
    return min(sms * plan.blocks_per_sm, sum(of.all_tiles for of in sizes))


def in_turn(plan: QuantizePlan, sizes: Sequence[Sizes], blocks: int) -> dict[str, int]:
    """Tiles of a launch, and how many peaks are found before the first codes: those of a group, whose scales are known
    then, and a tile for each thread block, as what all work on has not ended."""
    tiles = sum(of.all_tiles for of in sizes)
    lead = max(of.group(plan) * min(-(-of.longest // ROWS), of.tiles_of_scale) for of in sizes) + blocks
    return {"tiles": tiles, "lead": min(tiles, lead)}


@functools.cache
def function(plan: QuantizePlan, device: int) -> driver.Function:
    """The kernel of a plan on a GPU."""

    def make() -> tuple[nvrtc.Compiled, dict[str, object]]:
        compiled = nvrtc.compile(emit(plan), plan.arch, name="quantize")
        return compiled, {"quantize": cache.as_data(plan), "nvrtc": nvrtc.version()}

    cubin = cache.default().fetch(cache.key(plan), make).cubin
    return driver.load(cubin, "quantize", smem_bytes=plan.smem_bytes, device=device)


def launch(plan: QuantizePlan, blocks: int, packed: bytes, *, device: int, stream: int) -> None:
    """Start it on a stream."""
    buffer = ctypes.create_string_buffer(packed, len(packed))
    start = driver.Launcher(function(plan, device), threads=plan.threads, early=plan.launches.early)
    start(stream, blocks, (ctypes.addressof(buffer),))
