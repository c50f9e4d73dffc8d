"""How tensors become 8 bits wide: tiles of rows in registers, rotated, scaled by their peak."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

from flashgen.errors import PlanError
from flashgen.planning.arch import KIB, Arch, find
from flashgen.planning.layout import DENSE, Dense, Padded, Varlen
from flashgen.planning.members import Launches

#: Rows of a tile, and of a scale at least.
ROWS = 128

#: Elements that a lane has of a row where lanes are enough for that.
ELEMENTS = 64

#: Lanes that share a row, at most: fewer exchange less, more load more at a time.
LANES = 4

#: Registers of a thread beside those of its elements.
OTHER_REGISTERS = 64

#: Tensors of a launch: q, k and v.
TENSORS = 3

#: Bytes of a chunk, which one instruction moves.
CHUNK_BYTES = 16

#: Threads of a warp.
WARP = 32

#: Bytes of an element that is quantised: it has 16 bits.
ELEMENT_BYTES = 2

#: Bytes of an element of cos and of sin, by the dtypes that they may have.
ANGLE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Bytes that a tile's work takes more where sequences have rows of their own: the first, and how many.
OF_SEQUENCE_BYTES = 8

#: Bytes of what a thread block knows of peaks.
KNOWN_BYTES = 16

#: Head dims that attention in 8 bits has.
HEAD_DIMS = range(16, 257, 16)

#: The first compute capability whose conversions know e4m3.
CONVERTS_SINCE = 89


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScale:
    """Each tile finds its scale and uses it: memory is read once."""

    template: ClassVar[str] = "quantize/own_scale.cu.j2"
    tickets: ClassVar[bool] = False
    work: ClassVar[str] = "Tile"
    work_bytes: ClassVar[int] = 16
    reads: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScale:
    """Several tiles share a scale: all are read, and once more, from L2, when the scale is known.  Tickets hand out
    both, so that no thread block waits for work that none has begun."""

    template: ClassVar[str] = "quantize/shared_scale.cu.j2"
    tickets: ClassVar[bool] = True
    work: ClassVar[str] = "Work"
    work_bytes: ClassVar[int] = 32
    reads: ClassVar[int] = 2


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

    `angles` elements of cos and of sin are side by side beside a chunk, one for `columns_per_angle` columns.  Lanes may
    need what others have (`reads_rows`).
    """

    dtype: str
    angles: ClassVar[int] = 8
    columns_per_angle: ClassVar[int] = 1
    reads_rows: ClassVar[bool] = False

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
    """Columns c and c + head_dim / 2, of which lanes read both from shared memory, and their angles from L1."""

    template: ClassVar[str] = "quantize/rope_halves_across_lanes.cu.j2"
    reads_rows: ClassVar[bool] = True

    @property
    def renewed(self) -> bool:
        """Whether addresses are found anew for each chunk: beside angles of 32 bits one spilled (8 bytes, of rotated
        rows at head_dim 112 and 224, where all of a head share a scale)."""
        return ANGLE_BYTES[self.dtype] == 4

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

    rope           which columns turn by angles first, where a tensor has them
    rows           of a tile
    lanes          that share a row
    rotation       what is rotated, in order, of tensors that are; nothing where it is empty
    centred        whether a tensor may lose a mean
    layout         how sequences lie in tensors, and what each has of its own
    pitch          chunks from row to row of a tile in shared memory
    codes_pitch    bytes from row to row of its codes there
    blocks_per_sm  thread blocks that an SM holds
    """

    arch: str
    dtype: str
    head_dim: int
    rows: int
    lanes: int
    rotation: tuple[Rotated, ...]
    centred: bool
    rope: Rope | None = None
    layout: Dense | Padded | Varlen = DENSE
    scale: OwnScale | SharedScale
    conversion: ByInstruction | ByBits
    pitch: int
    codes_pitch: int
    blocks_per_sm: int
    launches: Launches

    @property
    def threads(self) -> int:
        return self.rows * self.lanes

    @property
    def reads_rows(self) -> bool:
        """Whether rows must stay in shared memory until they have turned."""
        return self.rope is not None and self.rope.reads_rows

    @property
    def smem_bytes(self) -> int:
        """What rows, codes, signs, peaks and work take of shared memory, as C++ lays them out."""
        rows = self.rows * (self.pitch * CHUNK_BYTES + self.codes_pitch)
        signs = 4 * self.head_dim if self.rotation else 0
        peaks = 2 * 4 * self.threads // WARP
        work = self.scale.work_bytes + OF_SEQUENCE_BYTES * self.layout.own
        known = KNOWN_BYTES if self.scale.tickets else 0
        return -(-(rows + signs + peaks + known + 4 * work) // 16) * 16


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


def _lanes(head_dim: int) -> int:
    """As few as have `ELEMENTS` each, of as many as the narrowest part of a rotation has chunks."""
    lanes, most = 1, min(LANES, parts(head_dim)[-1] // 8)
    while head_dim // lanes > ELEMENTS and lanes < most:
        lanes *= 2
    return lanes


def _apart(count: int, lanes: int) -> int:
    """The least number from `count` on that is an odd multiple of `lanes`: rows so far apart start in other banks."""
    return next(n for n in itertools.count(count) if n % (2 * lanes) == lanes)


def _pitches(arch: Arch, head_dim: int, lanes: int) -> tuple[int, int]:
    """Chunks, and bytes of codes, from row to row in shared memory: apart where there is room, else side by side."""
    chunks = head_dim // 8
    apart = _apart(chunks, lanes), 8 * (_apart(chunks // 2, 1) * 2 if lanes == 1 else _apart(chunks, lanes))
    side_by_side = chunks, head_dim
    room = arch.smem_per_block - 2 * KIB  # signs, peaks and tickets
    return apart if ROWS * (apart[0] * CHUNK_BYTES + apart[1]) <= room else side_by_side


def check(head_dim: int, block: int | None) -> None:
    """Raises PlanError for a head_dim or a block that there is no kernel for."""
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


@functools.cache
def plan(
    arch: str,
    dtype: str,
    head_dim: int,
    *,
    block: int | None,
    rotated: bool,
    centred: bool,
    angles: Angles | None = None,
    layout: Dense | Padded | Varlen = DENSE,
) -> QuantizePlan:
    """The kernel for tensors of which some are `rotated`, lose a mean (`centred`), or turn by `angles`; `block` rows
    share a scale, all of a head where it is None; sequences lie as `layout` says.

    Raises PlanError for a head_dim or a block that there is no kernel for.
    """
    of = find(arch)
    check(head_dim, block)
    widths = parts(head_dim)
    lanes = _lanes(head_dim)
    chunks = [width // 8 // lanes for width in widths]
    rotation = tuple(Rotated(columns=width, first=sum(chunks[:i]), count=chunks[i]) for i, width in enumerate(widths))
    pitch, codes_pitch = _pitches(of, head_dim, lanes)
    digits = int("".join(filter(str.isdigit, arch)))
    made = QuantizePlan(
        arch=arch,
        dtype=dtype,
        head_dim=head_dim,
        rows=ROWS,
        lanes=lanes,
        rotation=rotation if rotated else (),
        centred=centred,
        rope=_rope(angles, head_dim, lanes),
        layout=layout,
        scale=OwnScale() if block == ROWS else SharedScale(),
        conversion=ByInstruction() if digits >= CONVERTS_SINCE else ByBits(),
        pitch=pitch,
        codes_pitch=codes_pitch,
        blocks_per_sm=1,
        launches=of.launches,
    )
    registers = made.threads * (head_dim // lanes + OTHER_REGISTERS)
    fit = of.registers_per_sm // registers, of.smem_per_sm // (made.smem_bytes + of.smem_reserved)
    return replace(made, blocks_per_sm=max(1, min(*fit, of.max_warps * WARP // made.threads)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that a tensor moves if L2 held nothing."""

    read_bytes: int
    write_bytes: int


def moved(plan: QuantizePlan, *, batch: int, heads: int, length: int, scales: int) -> Moved:
    """What quantising [batch, heads, length, head_dim] with so many scales of a head moves: rows are read,
    once or twice, and for each head their cos and sin; codes and descales are written.  Means and peaks are few: not
    counted."""
    rows, reads = batch * heads * length, plan.scale.reads
    angles = 2 * (plan.head_dim // 2) * ANGLE_BYTES[plan.rope.dtype] if plan.rope else 0
    angles *= 2 if isinstance(plan.rope, RepeatedPairs) else 1
    return Moved(
        read_bytes=reads * rows * (plan.head_dim * ELEMENT_BYTES + angles),
        write_bytes=rows * plan.head_dim + batch * heads * scales * 4,
    )
