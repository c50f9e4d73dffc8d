"""How one tensor becomes 8 bits wide: rows of a block in registers, rotated, scaled by their peak."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from flashgen.errors import PlanError
from flashgen.planning.arch import find
from flashgen.planning.members import Launches

#: Elements of a thread: as float32 they and what works on them fit its registers without spills.
ELEMENTS = 64

#: Rows of a thread block, and of a scale at least.
ROWS = 128

#: Lanes that share a row, at most: fewer exchange less, more load more at a time.
LANES = 4

#: Threads of a warp, which exchange peaks: a thread block has no fewer.
WARP = 32

#: Head dims that attention in 8 bits has.
HEAD_DIMS = range(16, 257, 16)

#: The first compute capability whose conversions know e4m3.
CONVERTS_SINCE = 89


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScale:
    """Each thread block finds its scale and uses it: one pass over memory."""

    template: ClassVar[str] = "quantize/own_scale.cu.j2"
    entries: ClassVar[tuple[str, ...]] = ("quantize",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScale:
    """Several thread blocks share a scale, which a kernel before finds: two passes."""

    template: ClassVar[str] = "quantize/shared_scale.cu.j2"
    entries: ClassVar[tuple[str, ...]] = ("quantize_peaks", "quantize")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByInstruction:
    """The architecture converts to e4m3."""

    template: ClassVar[str] = "quantize/by_instruction.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByBits:
    """It does not: integer arithmetic on the bits of floats does."""

    template: ClassVar[str] = "quantize/by_bits.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """Columns that are rotated together: a power of two of them, in `count` chunks of each lane from `first` on."""

    columns: int
    first: int
    count: int

    @property
    def factor(self) -> float:
        """What makes the transform orthogonal, as float32 has it."""
        return factor(self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan:
    """One kernel that quantises, decided; it knows no length.

    rows           of a thread block
    lanes          that share a row, which have `rows_per_lane` rows each
    rotation       what is rotated, in order; nothing where it is empty
    centred        whether a mean is subtracted first
    """

    arch: str
    dtype: str
    head_dim: int
    rows: int
    lanes: int
    rows_per_lane: int
    rotation: tuple[Rotated, ...]
    centred: bool
    scale: OwnScale | SharedScale
    conversion: ByInstruction | ByBits
    launches: Launches

    @property
    def threads(self) -> int:
        return self.rows // self.rows_per_lane * self.lanes


@functools.cache
def factor(columns: int) -> float:
    """1 / sqrt(columns) of a power of two, rounded to float32."""
    import numpy as np

    return float(np.float32(columns**-0.5))


def parts(head_dim: int) -> tuple[int, ...]:
    """The largest powers of two that a head_dim is the sum of: 96 = 64 + 32."""
    return tuple(1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1)


def plan(arch: str, dtype: str, head_dim: int, *, block: int | None, rotated: bool, centred: bool) -> QuantizePlan:
    """The kernel for one tensor; `block` rows share a scale, all of a head where it is None.

    Raises PlanError for a head_dim or a block that there is no kernel for.
    """
    launches = find(arch).launches
    if head_dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda n: abs(n - head_dim))
        raise PlanError(
            f"head_dim {head_dim} cannot be quantised: 8-bit kernels have 16 to 256, in steps of 16\n"
            f"  nearest: head_dim {nearest}"
        )
    if block is not None and (block < ROWS or block & block - 1):
        nearest = max(ROWS, 1 << max(block, 1).bit_length() - 1)
        raise PlanError(
            f"block={block}: a scale is that of a power of two of rows, {ROWS} or more, or (None) of a head\n"
            f"  nearest: block={nearest}"
        )
    widths = parts(head_dim)
    lanes = min(LANES, widths[-1] // 8)
    chunks = [width // 8 // lanes for width in widths]
    rotation = tuple(Rotated(columns=width, first=sum(chunks[:i]), count=chunks[i]) for i, width in enumerate(widths))
    digits = int("".join(filter(str.isdigit, arch)))
    return QuantizePlan(
        arch=arch,
        dtype=dtype,
        head_dim=head_dim,
        rows=ROWS,
        lanes=lanes,
        rows_per_lane=max(1, min(ELEMENTS // (head_dim // lanes), ROWS * lanes // WARP)),
        rotation=rotation if rotated else (),
        centred=centred,
        scale=OwnScale() if block == ROWS else SharedScale(),
        conversion=ByInstruction() if digits >= CONVERTS_SINCE else ByBits(),
        launches=launches,
    )
