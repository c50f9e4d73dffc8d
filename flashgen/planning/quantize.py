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

#: Bytes of an element that is quantised: it has 16 bits.
ELEMENT_BYTES = 2

#: Bytes of an element of cos and of sin, by the dtypes that they may have.
ANGLE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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
class Angles:
    """How cos and sin of a rotary embedding are given: their `dtype`; whether columns side by side turn together
    (`interleaved`) or those of two halves; whether both of a pair have their angle, which is one (`repeated`)."""

    dtype: str
    interleaved: bool = False
    repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turned:
    """Columns that turn together, by angles of a dtype.

    `angles` elements of cos and of sin are side by side beside a chunk, one for `columns_per_angle` columns.
    """

    dtype: str
    angles: ClassVar[int] = 8
    columns_per_angle: ClassVar[int] = 1

    @property
    def words(self) -> int:
        """32-bit words that hold them."""
        return self.angles * ANGLE_BYTES[self.dtype] // 4

    @property
    def alignment(self) -> int:
        """Of what is loaded together, in bytes."""
        return min(16, 4 * self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesInLane(_Turned):
    """Columns c and c + head_dim / 2, which a lane has both."""

    template: ClassVar[str] = "quantize/rope_halves_in_lane.cu.j2"

    def __str__(self) -> str:
        return f"halves, {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesAcrossLanes(_Turned):
    """Columns c and c + head_dim / 2, of which a lane loads the other and their angles once more, from L1."""

    template: ClassVar[str] = "quantize/rope_halves_across_lanes.cu.j2"

    def __str__(self) -> str:
        return f"halves, {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(_Turned):
    """Columns side by side."""

    template: ClassVar[str] = "quantize/rope_pairs.cu.j2"
    angles: ClassVar[int] = 4
    columns_per_angle: ClassVar[int] = 2
    repeated: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"pairs, {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedPairs(Pairs):
    """Columns side by side, each with an angle of its own, which is that of the other."""

    angles: ClassVar[int] = 8
    columns_per_angle: ClassVar[int] = 1
    repeated: ClassVar[bool] = True


Rope = HalvesInLane | HalvesAcrossLanes | Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan:
    """One kernel that quantises, decided; it knows no length.

    rope           which columns turn by angles first, if any do
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
    rope: Rope | None = None
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


def _rope(given: Angles | None, head_dim: int, lanes: int) -> Rope | None:
    """How columns turn, in a kernel whose lanes have every so manieth chunk of a row."""
    if given is None:
        return None
    if given.interleaved:
        return RepeatedPairs(dtype=given.dtype) if given.repeated else Pairs(dtype=given.dtype)
    in_lane = head_dim // 16 % lanes == 0  # chunks of half a row
    return HalvesInLane(dtype=given.dtype) if in_lane else HalvesAcrossLanes(dtype=given.dtype)


def plan(
    arch: str,
    dtype: str,
    head_dim: int,
    *,
    block: int | None,
    rotated: bool,
    centred: bool,
    angles: Angles | None = None,
) -> QuantizePlan:
    """The kernel for one tensor; `block` rows share a scale, all of a head where it is None; rows turn by `angles`.

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
        rope=_rope(angles, head_dim, lanes),
        scale=OwnScale() if block == ROWS else SharedScale(),
        conversion=ByInstruction() if digits >= CONVERTS_SINCE else ByBits(),
        launches=launches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that a launch moves if L2 held nothing."""

    read_bytes: int
    write_bytes: int


def moved(plan: QuantizePlan, *, batch: int, heads: int, length: int, scales: int) -> Moved:
    """What quantising [batch, heads, length, head_dim] with so many scales of a head moves: each pass reads the rows,
    and for each head their cos and sin; the last writes codes and descales.  A mean and peaks are few: not counted."""
    rows, passes = batch * heads * length, len(plan.scale.entries)
    angles = 2 * (plan.head_dim // 2) * ANGLE_BYTES[plan.rope.dtype] if plan.rope else 0
    angles *= 2 if isinstance(plan.rope, RepeatedPairs) else 1
    return Moved(
        read_bytes=passes * rows * (plan.head_dim * ELEMENT_BYTES + angles),
        write_bytes=rows * plan.head_dim + batch * heads * scales * 4,
    )
