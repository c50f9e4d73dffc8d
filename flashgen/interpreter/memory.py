"""Global memory: named NumPy buffers at made-up device addresses, every access checked and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from flashgen.interpreter.errors import BadLaunch, Misaligned, NotComplete, OutOfBounds, Race, ReadOnly
from flashgen.interpreter.order import GRANULE, WORD, Order
from flashgen.interpreter.registers import LANES, Mask, spread

#: Address of the first buffer: above 4 GiB, so that a pointer cut to 32 bits is out of bounds.
BASE = 0x7_0000_0000
#: Module-scope variables lie below the first buffer.
GLOBALS_BYTES = 1 << 16
_GAP = 4096
_ALIGN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer of a Memory; `address` is what a kernel is given."""

    name: str
    address: int
    array: np.ndarray
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who counts on it that what is read is what was written last: a block, by ld.global.nc (`constant`), by an
    instruction that is ordered with other atomics (`atomic`)."""

    block: int
    constant: bool = False
    atomic: bool = False


class Early:
    """What a kernel does before the kernel before it on the stream has ended, as accesses to global memory: it writes
    nothing, and what it reads the other does not write any more; nothing at all behind kernels that are not known."""

    def __init__(self, size: int, *, known: bool) -> None:
        self.known = known
        self.read = np.zeros(size, bool)

    def check(self, active: np.ndarray, width: int, kind: str, write: bool, memory: Memory) -> None:
        """An access by the kernel that has not waited."""
        at = memory.describe(int(active[0]))
        if write:
            raise NotComplete(f"global {kind} into {at} before griddepcontrol.wait: the kernel before may still use it")
        if not self.known:
            raise NotComplete(f"global {kind} of {at} before griddepcontrol.wait: the kernel before may still write it")
        for shift in range(width):
            self.read[active + shift] = True

    def check_before(self, active: np.ndarray, width: int, kind: str, memory: Memory) -> None:
        """A write by the kernel before."""
        for shift in range(width):
            read = self.read[active + shift]
            if read.any():
                at = memory.describe(int(active[int(read.argmax())]))
                raise NotComplete(f"global {kind} into {at}: the kernel behind has read it before griddepcontrol.wait")


@dataclass(slots=True)
class Account:
    """What one kernel did: bytes by buffer and kind, addresses of buffers that are tracked, which buffers it wrote, who
    wrote a byte."""

    traffic: Counter[tuple[str, str]]
    touched: dict[str, np.ndarray]
    writer: np.ndarray
    written: set[int] = field(default_factory=set)
    order: Order | None = None  # what its blocks know of each other's writes, where that is looked at
    early: Early | None = None  # what it does before it has waited
    behind: Early | None = None  # what the kernel behind has done so far


class Memory:
    """Buffers of launches.  `add` returns the device address; writable arrays are updated when the launches end."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.named: list[Buffer] = []
        self.next = BASE + GLOBALS_BYTES
        self.data = np.zeros(0, np.uint8)
        self.owner = np.zeros(0, np.int16)
        self.views: dict[int, np.ndarray] = {}
        self.track: frozenset[str] = frozenset()
        self.account = self.new_account()

    def new_account(self) -> Account:
        """That of a kernel which has done nothing."""
        touched = {name: np.zeros(0, np.int64) for name in self.track}
        return Account(Counter(), touched, np.zeros(self.data.size, np.int32))

    def add(self, name: str, array: np.ndarray, *, writable: bool = False) -> int:
        """Place a C-contiguous array.  Raises BadLaunch for a name used twice or another memory order."""
        if any(buffer.name == name for buffer in self.buffers):
            raise BadLaunch(f"two buffers are named {name!r}")
        if not array.flags.c_contiguous:
            raise BadLaunch(f"buffer {name!r} is not C-contiguous: give its storage")
        address = self.next
        self.buffers.append(Buffer(name=name, address=address, array=array, writable=writable))
        self.next = -(-(address + max(array.nbytes, 1) + _GAP) // _ALIGN) * _ALIGN
        return address

    def place(self, variables: list[tuple[str, int, bytes]]) -> None:
        """Copy the arrays, and a module's variables (name, address, bytes), into one arena: the start of launches."""
        size = -(-(self.next - BASE) // 16) * 16
        self.data = np.zeros(size, np.uint8)
        self.owner = np.full(size, -1, np.int16)
        self.views = {1: self.data, **{n: self.data.view(f"u{n}") for n in (2, 4, 8)}}
        self.rows16 = self.data.view(np.uint32).reshape(-1, 4)
        self.named = [
            *self.buffers,
            *(
                Buffer(name=name, address=address, array=np.frombuffer(value, np.uint8), writable=True)
                for name, address, value in variables
            ),
        ]
        for n, buffer in enumerate(self.named):
            at = buffer.address - BASE
            raw = np.ascontiguousarray(buffer.array).reshape(-1).view(np.uint8)
            self.data[at : at + raw.size] = raw
            self.owner[at : at + raw.size] = n

    def take_back(self) -> None:
        """Copy the arena back into the writable arrays, at the end of launches."""
        for buffer in self.buffers:
            if buffer.writable and buffer.array.nbytes:
                at = buffer.address - BASE
                raw = self.data[at : at + buffer.array.nbytes]
                buffer.array.reshape(-1).view(np.uint8)[:] = raw

    # ------------------------------------------------------------ access by lanes
    def access(
        self, address: np.ndarray, m: Mask, width: int, kind: str, *, write: bool = False, by: Reader | None = None
    ) -> np.ndarray:
        """Check and count an access of `width` bytes per lane, which counts on an order of writes where it says who
        reads.  Returns arena offsets (idle lanes: an active one's)."""
        address = spread(address, np.broadcast_shapes(address.shape, (1, LANES)) if m is True else m.shape)
        offset = address.astype(np.int64) - BASE
        if m is not True:
            active = offset[m]
            offset = np.where(m, offset, active[0])
        else:
            active = offset.reshape(-1)
        self.check(active, width, kind, write, by)
        return offset

    def part(self, address: int, count: int, width: int, kind: str) -> int:
        """Check and count `count` bytes at a device address that is a multiple of `width`; returns the arena offset."""
        if address % width:
            raise Misaligned(f"global {kind} of {width} bytes at {address:#x} is not aligned")
        self.check_bytes(np.arange(address - BASE, address - BASE + count), kind)
        return address - BASE

    def check_bytes(self, offsets: np.ndarray, kind: str, *, write: bool = False) -> None:
        """Check and count single bytes."""
        self.check(offsets, 1, kind, write)

    def check(self, active: np.ndarray, width: int, kind: str, write: bool, by: Reader | None = None) -> None:
        """Check and count accesses of `width` bytes at arena offsets `active` (one dimension)."""
        if active.size == 0:
            return
        if int(active.min()) < 0 or int(active.max()) + width > self.data.size:
            bad = (active < 0) | (active + width > self.data.size)
            raise OutOfBounds(f"global {kind} at {int(active[bad][0]) + BASE:#x}: no buffer is there")
        if int(np.bitwise_or.reduce(active)) & (width & -width) - 1:
            bad = active % (width & -width) != 0
            raise Misaligned(f"global {kind} of {width} bytes at {int(active[bad][0]) + BASE:#x} is not aligned")
        owner = self.owner[active]
        if (owner != self.owner[active + width - 1]).any() or (owner < 0).any():
            bad = (owner < 0) | (owner != self.owner[active + width - 1])
            raise OutOfBounds(f"global {kind} of {width} bytes at {self.describe(int(active[bad][0]))}")
        first = int(owner[0])
        if (owner == first).all():
            self._count(first, kind, active, width, write, by)
        else:
            for n in np.unique(owner):
                self._count(int(n), kind, active[owner == n], width, write, by)
        if self.account.early is not None:
            self.account.early.check(active, width, kind, write, self)
        if write and self.account.behind is not None:
            self.account.behind.check_before(active, width, kind, self)

    def _count(self, n: int, kind: str, active: np.ndarray, width: int, write: bool, by: Reader | None) -> None:
        buffer = self.named[n]
        if write and not buffer.writable:
            raise ReadOnly(f"global {kind} into {buffer.name}, which the kernel may only read")
        if by is not None and n in self.account.written:
            self._check_order(active, width, kind, by)
        if write:
            self.account.written.add(n)
        self.account.traffic[buffer.name, kind] += active.size * width
        if buffer.name in self.track:
            at = np.unique((active + BASE - buffer.address) // width * width)
            self.account.touched[buffer.name] = np.union1d(self.account.touched[buffer.name], at)

    def _check_order(self, active: np.ndarray, width: int, kind: str, by: Reader) -> None:
        """What is read was written by the block itself, or it knows of the write."""
        order, writer = self.account.order, self.account.writer
        if order is None:
            return
        for shift in range(0, width, min(width, WORD)):
            at = active + shift
            if by.constant and (changed := (writer[at] != 0) | (order.updater[at] != 0)).any():
                place = self.describe(int(at[int(changed.argmax())]))
                raise Race(f"global {kind} by ld.global.nc of {place}, which the kernel writes")
            found = order.unknown(by.block, at, writer[at], atomics=not by.atomic)
            if found is not None:
                place, other = self.describe(found[0]), found[1]
                raise Race(
                    f"global {kind} by block {by.block} of {place}, which block {other} wrote: it has acquired nothing"
                    f" that block {other} released afterwards"
                )

    def own(self, offsets: np.ndarray, width: int, block: int) -> None:
        """Block number `block` writes (not atomically): no other block may write the same bytes in this launch."""
        writer, order = self.account.writer, self.account.order
        for shift in range(0, width, GRANULE if width > 1 else 1):
            at = offsets + shift
            before = writer[at]
            clash = (before != 0) & (before != block + 1)
            if clash.any():
                i = int(clash.argmax())
                raise Race(f"blocks {int(before[i]) - 1} and {block} both write {self.describe(int(offsets[i]))}")
            writer[at] = block + 1
            if order is not None:
                order.store(block, at)

    def describe(self, offset: int) -> str:
        """Where an arena offset lies, in words."""
        address = offset + BASE
        below = [b for b in self.named if b.address <= address]
        if not below:
            return f"{address:#x}, before every buffer"
        buffer = max(below, key=lambda b: b.address)
        at = address - buffer.address
        size = buffer.array.nbytes
        return f"byte {at} of {buffer.name} ({size} bytes)" + (", past its end" if at >= size else "")
