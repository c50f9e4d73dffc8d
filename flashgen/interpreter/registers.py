"""Registers of a block as NumPy banks, and the views that a group of consecutive warps computes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.interpreter.errors import Diverged

if TYPE_CHECKING:
    from flashgen.interpreter.block import Block

LANES = 32

#: A mask of lanes of a group, [warps, 32]; True stands for all of them.
Mask = Any
#: What a group's instructions index: slot 0 is the Group, then register views, constants and special registers.
Slots = list[Any]


@dataclass(frozen=True, slots=True)
class RegisterSlot:
    """A register seen as `dtype`: bank is the width of the register in bits (1 for predicates)."""

    bank: int
    index: int
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class ConstantSlot:
    value: np.generic


@dataclass(frozen=True, slots=True)
class SpecialSlot:
    name: str


@dataclass(frozen=True, slots=True)
class DefinedSlot:
    """Which lanes have written a register that some path may read unwritten."""

    index: int


SlotSpec = RegisterSlot | ConstantSlot | SpecialSlot | DefinedSlot

BANK_DTYPES = {1: np.dtype(np.bool_), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}


def spread(value: np.ndarray | np.generic, shape: tuple[int, ...]) -> np.ndarray:
    """`value` in this shape, as np.broadcast_to has it, which takes microseconds for what has the shape already."""
    return value if value.shape == shape else np.broadcast_to(value, shape)


class Banks:
    """Register storage of one block: bank[width] has shape [registers, warps, 32]."""

    def __init__(self, counts: dict[int, int], defined: int, warps: int) -> None:
        self.bank = {
            width: np.empty((counts.get(width, 0), warps, LANES), dtype) for width, dtype in BANK_DTYPES.items()
        }
        self.defined = np.empty((defined, warps, LANES), np.bool_)

    def clear(self) -> Banks:
        """As a block finds them: nothing is written."""
        self.defined.fill(False)
        for width, array in self.bank.items():
            array.view(np.uint8 if width > 1 else np.bool_).fill(
                0xFF if width > 1 else 0
            )  # NaNs: unwritten registers show
        return self


class Group:
    """Warps a..b of a block that execute together; holds their slots."""

    __slots__ = ("a", "b", "bank32", "bits", "block", "n", "rows", "slots")

    def __init__(self, block: Block, a: int, b: int, specs: list[SlotSpec]) -> None:
        self.block, self.a, self.b, self.n = block, a, b, b - a
        self.rows = np.arange(a, b)
        self.bits = ((1 << self.n) - 1) << a
        self.bank32 = block.banks.bank[32]
        views = {}
        slots: Slots = [self]
        for spec in specs:
            if type(spec) is RegisterSlot:
                key = (spec.bank, spec.dtype)
                if key not in views:
                    bank = block.banks.bank[spec.bank][:, a:b]
                    ratio = bank.dtype.itemsize // spec.dtype.itemsize
                    views[key] = bank if bank.dtype == spec.dtype else bank.view(spec.dtype)[..., ::ratio]
                slots.append(views[key][spec.index])
            elif type(spec) is ConstantSlot:
                slots.append(spec.value)
            elif type(spec) is SpecialSlot:
                slots.append(special(block, self, spec.name))
            else:
                slots.append(block.banks.defined[spec.index, a:b])
        self.slots = slots

    def row_bits(self, m: Mask) -> int:
        """Warps of which any lane is in `m`, as bits over the block's warps."""
        if m is True:
            return self.bits
        bits = 0
        for row in np.flatnonzero(m.any(1)):
            bits |= 1 << int(row)
        return bits << self.a

    def warps_of(self, m: Mask) -> list[int]:
        """Warps of which any lane is in `m`."""
        if m is True:
            return list(range(self.a, self.b))
        return [self.a + int(row) for row in np.flatnonzero(m.any(1))]

    def lanes_of(self, warps: list[int], m: Mask) -> Mask | bool:
        """Lanes of `m` in these warps: True where that is all of them, False where it is none."""
        if not warps:
            return False
        if len(warps) == len(self.warps_of(m)):
            return True
        lanes = np.zeros((self.n, LANES), bool)
        lanes[np.array(warps) - self.a] = True
        return lanes if m is True else lanes & m

    def whole_rows(self, m: Mask, what: str) -> np.ndarray | slice:
        """Rows of the group that take part, each with all its live lanes.  Raises Diverged where a part does."""
        if m is True:
            return slice(None)
        live = self.block.alive[self.a : self.b]
        rows = m.any(1)
        if (m[rows] != live[rows]).any() or not live[rows].all():
            raise Diverged(f"{what} was reached by a part of its warp")
        return slice(None) if rows.all() else np.flatnonzero(rows)

    def thread_ids(self) -> np.ndarray:
        """Linear thread index within the block, [n, 32]."""
        return self.rows[:, None] * LANES + np.arange(LANES)


def _tid(axis: int) -> Callable[[Block, Group], Any]:
    def value(block: Block, group: Group) -> Any:
        t, (x, y, _) = group.thread_ids(), block.launch.block
        return (t % x, t // x % y, t // (x * y))[axis]

    return value


def _axis(read: Callable[[Block], tuple[int, int, int]], axis: int) -> Callable[[Block, Group], Any]:
    return lambda block, group: read(block)[axis]


def _lanemask(kind: str) -> Callable[[Block, Group], Any]:
    lane = np.arange(LANES, dtype=np.uint64)
    one = np.uint64(1)
    below = (one << lane) - one
    table = {
        "eq": one << lane,
        "lt": below,
        "le": below | one << lane,
        "gt": ~(below | one << lane),
        "ge": ~below,
    }
    bits = (table[kind] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return lambda block, group: np.broadcast_to(bits, (group.n, LANES))


_VECTORS: dict[str, Callable[[Block], tuple[int, int, int]]] = {
    "ntid": lambda block: block.launch.block,
    "ctaid": lambda block: block.index,
    "nctaid": lambda block: block.launch.grid,
    "cluster_ctaid": lambda block: block.index_in_cluster,
    "cluster_nctaid": lambda block: block.launch.cluster,
    "clusterid": lambda block: block.cluster.index,
    "nclusterid": lambda block: block.launch.clusters,
}
_SPECIAL: dict[str, Callable[[Block, Group], Any]] = {
    **{f"%tid.{a}": _tid(n) for n, a in enumerate("xyz")},
    **{f"%{name}.{a}": _axis(read, n) for name, read in _VECTORS.items() for n, a in enumerate("xyz")},
    **{f"%lanemask_{kind}": _lanemask(kind) for kind in ("eq", "lt", "le", "gt", "ge")},
    "%laneid": lambda block, group: np.broadcast_to(np.arange(LANES), (group.n, LANES)),
    "%warpid": lambda block, group: np.broadcast_to(group.rows[:, None], (group.n, LANES)),
    "%nwarpid": lambda block, group: block.warps,
    "%cluster_ctarank": lambda block, group: block.rank,
    "%cluster_nctarank": lambda block, group: len(block.cluster.blocks),
    "%smid": lambda block, group: block.cluster.slot,
    "%nsmid": lambda block, group: block.launch.options.resident,
    "%dynamic_smem_size": lambda block, group: block.launch.smem_bytes,
}

#: Special registers whose value changes while a kernel runs.
CLOCKS = frozenset({"%clock", "%clock64", "%globaltimer", "%clock_hi", "%globaltimer_lo"})


def is_special(name: str) -> bool:
    return name in _SPECIAL


def special(block: Block, group: Group, name: str) -> Any:
    """The value of a special register: a scalar or [n, 32], uint32."""
    return np.asarray(_SPECIAL[name](block, group)).astype(np.uint32)[()]
