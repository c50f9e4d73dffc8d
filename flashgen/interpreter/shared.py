"""Shared memory of a block: bytes, bounds, alignment, bank conflicts, and the shadow that finds races."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.interpreter.errors import Misaligned, OutOfBounds
from flashgen.interpreter.registers import LANES, Group, Mask, spread

if TYPE_CHECKING:
    from flashgen.interpreter.races import Races, Shadow

#: Address of a block's first byte: the first KiB belongs to the system, as on Hopper.
BASE = 1024
#: shared::cluster addresses of block `rank` start at (rank + 1) << CLUSTER_SHIFT; below it, the block's own.
CLUSTER_SHIFT = 24
_BANKS = 32


@dataclass(frozen=True, slots=True)
class Pattern:
    """Relative addresses of one warp-wide access: extent, what they forbid, and how the banks take it."""

    low: int
    high: int
    bits: int
    wavefronts: int
    ideal: int
    granules: np.ndarray
    rows: np.ndarray
    lanes: np.ndarray


class SharedMemory:
    """`data` is indexed by shared address; `granule` is the unit of the shadow, at most the narrowest access."""

    def __init__(self, size: int, granule: int, races: Races | None, first_row: int) -> None:
        self.size = size
        self.end = BASE + size
        self.granule = granule
        self.data = np.full(-(-self.end // 16) * 16, 0xFF, np.uint8)
        self.views = {1: self.data, **{n: self.data.view(f"u{n}") for n in (2, 4, 8)}}
        self.rows16 = self.data.view(np.uint32).reshape(-1, 4)
        self.races = races
        self.first_row = first_row
        self.shadow: Shadow | None = races.shadow(-(-self.end // granule)) if races else None
        self.patterns: dict[tuple[Any, ...], Pattern] = {}

    def check(self, low: int, high: int, width: int, what: str = "access") -> None:
        """Bytes low..high-1 are this block's, and `low` is a multiple of `width`."""
        if low < BASE or high > self.end:
            raise OutOfBounds(
                f"shared memory {what} of bytes {low - BASE}..{high - BASE - 1}: the block has {self.size} bytes"
            )
        if low % width:
            raise Misaligned(f"shared memory {what} at byte {low - BASE} is not a multiple of {width}")

    def access(self, group: Group, address: np.ndarray, m: Mask, width: int) -> tuple[np.ndarray, Pattern]:
        """Check one access of `width` bytes per lane.  Returns usable addresses (idle lanes repeat an active one)."""
        address = spread(address, (group.n, LANES))
        if m is True:
            base = int(address[0, 0])
        else:
            base = int(address[m][0])
            address = np.where(m, address, base)
        relative = address - base
        key = (width, base & 3 if width < 4 else 0, relative.tobytes(), None if m is True else m.tobytes())
        pattern = self.patterns.get(key)
        if pattern is None:
            pattern = self.patterns[key] = self._pattern(relative, m, width, base)
        if base + pattern.low < BASE or base + pattern.high + width > self.end or (base | pattern.bits) & width - 1:
            self._refuse(address, width)
        return address, pattern

    def _refuse(self, address: np.ndarray, width: int) -> None:
        for a in address.reshape(-1):
            self.check(int(a), int(a) + width, width)

    def _pattern(self, relative: np.ndarray, m: Mask, width: int, base: int) -> Pattern:
        active = np.ones(relative.shape, bool) if m is True else m
        rows, lanes = np.nonzero(active)
        offsets = relative[active].astype(np.int64)
        wavefronts, ideal = bank_wavefronts(relative + (base & 3), active, width)
        per = max(1, width // self.granule)
        first = offsets // self.granule
        granules = (first[:, None] + np.arange(per)).reshape(-1)
        return Pattern(
            int(offsets.min()),
            int(offsets.max()),
            int(np.bitwise_or.reduce(offsets)),
            wavefronts,
            ideal,
            granules,
            np.repeat(rows, per),
            np.repeat(lanes, per).astype(np.int8),
        )

    # ------------------------------------------------------------ shadow
    def note_read(self, group: Group, address: np.ndarray, pattern: Pattern, m: Mask) -> None:
        if self.races is not None:
            base = int(address[0, 0]) if m is True else int(address[m][0])
            rows = pattern.rows + (group.a + self.first_row)
            self.races.read(self.shadow, pattern.granules + base // self.granule, rows, pattern.lanes)

    def note_write(self, group: Group, address: np.ndarray, pattern: Pattern, m: Mask, line: int) -> None:
        if self.races is not None:
            base = int(address[0, 0]) if m is True else int(address[m][0])
            rows = pattern.rows + (group.a + self.first_row)
            self.races.write(self.shadow, pattern.granules + base // self.granule, rows, pattern.lanes, line)

    def note_atomic(self, group: Group, address: np.ndarray, pattern: Pattern, m: Mask, line: int) -> None:
        if self.races is not None:
            base = int(address[0, 0]) if m is True else int(address[m][0])
            rows = pattern.rows + (group.a + self.first_row)
            self.races.atomic_update(self.shadow, pattern.granules + base // self.granule, rows, line)

    def elements(self, chunks: np.ndarray, places: np.ndarray, unit: int) -> np.ndarray:
        """Granules of the elements at `places` of what 16-byte `chunks` hold one after another; `unit` bytes each."""
        at = places * unit
        first = chunks[at >> 4] + (at & 15)
        return np.unique((first[:, None] + np.arange(0, unit, self.granule)) // self.granule)

    def span(self, start: int, count: int) -> np.ndarray:
        """Granules of bytes start..start+count-1."""
        return np.arange(start // self.granule, -(-(start + count) // self.granule))


def bank_wavefronts(address: np.ndarray, active: np.ndarray, width: int) -> tuple[int, int]:
    """(wavefronts that the banks need, wavefronts without a conflict) of one access by each warp.

    32 banks of 4 bytes; 8-byte accesses go by half warps, 16-byte ones by quarter warps; lanes that read one word
    share it.
    """
    lanes = min(LANES, LANES * 4 // width)
    words = max(1, width // 4)
    phases = address.reshape(-1, lanes)
    on = active.reshape(-1, lanes)
    total = ideal = 0
    for phase, lit in zip(phases, on, strict=True):
        if lit.any():
            word = np.unique((phase[lit][:, None] // 4 + np.arange(words)).reshape(-1))
            total += int(np.bincount(word % _BANKS).max())
            ideal += 1
    return total, ideal
