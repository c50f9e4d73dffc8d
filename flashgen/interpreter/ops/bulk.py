"""cp.async.bulk and cp.reduce.async.bulk, plain and through tensor maps."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen.interpreter.block import Block, Cluster
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.errors import Misaligned, MissingFence, OutOfBounds, Trap, UnfinishedCopy
from flashgen.interpreter.groups import Queue
from flashgen.interpreter.memory import BASE as GLOBAL_BASE
from flashgen.interpreter.ops import mbarrier
from flashgen.interpreter.ops.convert import bf16_bits, bf16_value
from flashgen.interpreter.ops.loads import note_granule
from flashgen.interpreter.ops.mbarrier import lanes_of, value_at
from flashgen.interpreter.ops.remote import remote_block
from flashgen.interpreter.parser import Mem
from flashgen.interpreter.registers import Mask, Slots
from flashgen.interpreter.spaces import split
from flashgen.interpreter.tensormap import SWIZZLE_BITS, TensorMap, swizzled

_DIMS = {"1d": 1, "2d": 2, "3d": 3, "4d": 4, "5d": 5}


# ---------------------------------------------------------------- boxes of tensor maps
@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a box that lie inside the tensor: global offsets (from the arena's start) and places in the box."""

    offsets: np.ndarray
    places: np.ndarray


def box_of(tensor: TensorMap, coords: tuple[int, ...]) -> Box:
    offset = np.array(tensor.address - GLOBAL_BASE, np.int64)
    inside = np.array(True)
    place = np.array(0, np.int64)
    step = 1
    strides = (tensor.itemsize, *tensor.strides)
    for n, (start, extent, size, stride) in enumerate(zip(coords, tensor.box, tensor.dims, strides, strict=True)):
        at = start + np.arange(extent, dtype=np.int64)
        shape = (-1, *[1] * n)
        offset = offset + (at * stride).reshape(shape)
        inside = inside & ((at >= 0) & (at < size)).reshape(shape)
        place = place + (np.arange(extent) * step).reshape(shape)
        step *= extent
    inside = np.broadcast_to(inside, place.shape)
    return Box(np.broadcast_to(offset, place.shape)[inside], place[inside])


@functools.lru_cache(maxsize=64)
def _decode(data: bytes) -> TensorMap:
    return TensorMap.from_bytes(data)


def tensor_map(block: Block, address: int) -> TensorMap:
    """The tensor map at a generic address: a kernel parameter or a buffer."""
    space, at = split(address)
    if space == "param":
        if at % 64 or at + 128 > block.launch.params.size:
            raise Misaligned(f"a tensor map at byte {at} of the parameters: it needs 128 bytes aligned to 64")
        return _decode(block.launch.params[at : at + 128].tobytes())
    if space != "global":
        raise OutOfBounds(f"a tensor map in {space} memory")
    return _decode(block.launch.memory.data[at - GLOBAL_BASE : at - GLOBAL_BASE + 128].tobytes())


def _chunks(start: int, count: int, bits: int) -> np.ndarray:
    """Addresses of the 16-byte chunks of `count` bytes written from `start` with a swizzle."""
    return swizzled(start + 16 * np.arange(count // 16), bits)


# ---------------------------------------------------------------- loads: global to shared, completing on an mbarrier
@dataclass(slots=True)
class Load:
    """One load into one block's shared memory."""

    owner: Block
    barrier: mbarrier.MBarrier
    target: int
    size: int
    bits: int
    fetch: Callable[[], np.ndarray]

    def __call__(self) -> None:
        """Land: bytes into place, then the barrier's count."""
        shared = self.owner.shared
        chunks = _chunks(self.target, self.size, self.bits)
        shared.rows16[chunks >> 4] = self.fetch().view(np.uint32).reshape(-1, 4)
        if shared.races is not None:
            where = shared.span(self.target, self.size)
            shared.shadow.written[where] = self.barrier.agent << shared.races.SHIFT | self.barrier.phase + 1
        mbarrier.landed(self.owner, self.barrier, self.size)


def _begin(
    block: Block, row: int, target: int, barrier: int, size: int, align: int, bits: int, line: int, fetch: Any
) -> None:
    """Warp `row` (of the clocks) issues a load of `size` bytes to a shared::cluster address."""
    owner, own = remote_block(block, target)
    if own % align:
        raise Misaligned(f"a bulk copy to byte {own} of shared memory: it needs a multiple of {align}")
    owner.shared.check(own, own + size, 16, "bulk copy")
    other, bar = mbarrier.find(block, barrier, row, "a bulk copy")
    if other is not owner:
        raise Trap("a bulk copy whose mbarrier is in another block than its destination")
    races = block.cluster.races
    if races is not None:
        if races.proxy[row, bar.init[0]] < bar.init[1]:
            raise MissingFence(f"a bulk copy uses {bar} with no fence of its init for the async proxy")
        races.write_pending(owner.shared.shadow, owner.shared.span(own, size), row, line)
    block.cluster.in_flight.append(Load(owner, bar, own, size, bits, fetch))


def _targets(V: Slots, mask: int | None, row: int, lane: int, target: int, barrier: int) -> list[tuple[int, int]]:
    """(destination, mbarrier) of each block that a load writes to."""
    if mask is None:
        return [(target, barrier)]
    bits = value_at(V, mask, row, lane)
    ranks = [rank for rank in range(16) if bits >> rank & 1]
    low = (1 << 24) - 1
    return [((rank + 1) << 24 | target & low, (rank + 1) << 24 | barrier & low) for rank in ranks]


def _destination(b: Build, operands: int) -> Callable[..., None]:
    """Of a load with so many operands, its mbarrier the last: begins the copy of what `fetch` gives, for the lane of a
    row, into each block that the load names."""
    multicast = bool(b.take("multicast::cluster"))
    hint = bool(b.take("L2::cache_hint"))
    b.done(operands + multicast + hint)
    target, target_offset = b.address(b.operands[0])
    bar, bar_offset = b.address(b.operands[operands - 1])
    mask = b.read(b.operands[operands], "u16") if multicast else None
    note_granule(b, "shared", 16)
    line = b.instruction.line

    def begin(V: Slots, row: int, lane: int, size: int, unit: int, bits: int, fetch: Callable[[], np.ndarray]) -> None:
        group = V[0]
        own = group.a + row + group.block.first_row
        first = value_at(V, target, row, lane) + target_offset
        barrier = value_at(V, bar, row, lane) + bar_offset
        for to, on in _targets(V, mask, row, lane, first, barrier):
            _begin(group.block, own, to, on, size, unit, bits, line, fetch)

    return begin


def _tensor_load(b: Build, rank: int) -> Closure:
    b.drop("tile", "mbarrier::complete_tx::bytes", "global", "shared::cluster", "shared::cta", "cta_group::1")
    begin = _destination(b, 3)
    source = b.operands[1]
    map_slot, map_offset = b.address(source)
    coords = _coords(b, source, rank)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        memory = block.launch.memory
        for row, lane in lanes_of(group, m):
            tensor = tensor_map(block, value_at(V, map_slot, row, lane) + map_offset)
            at = tuple(value_at(V, slot, row, lane) for slot in coords)
            if len(at) != len(tensor.dims):
                raise Trap(f"{len(at)} coordinates for a tensor map of rank {len(tensor.dims)}")
            box = box_of(tensor, at)
            memory.check(box.offsets, tensor.itemsize, "bulk load", False)

            def fetch(tensor: TensorMap = tensor, box: Box = box) -> np.ndarray:
                data = np.zeros(tensor.box_bytes // tensor.itemsize, f"u{tensor.itemsize}")
                if tensor.fill_nan:
                    data[:] = {2: 0x7FFF, 4: 0x7FFFFFFF}[tensor.itemsize]
                data[box.places] = memory.views[tensor.itemsize][box.offsets // tensor.itemsize]
                return data

            begin(V, row, lane, tensor.box_bytes, 128, SWIZZLE_BITS[tensor.swizzle], fetch)

    return run


def _coords(b: Build, operand: Any, rank: int) -> list[int]:
    if not isinstance(operand, Mem) or len(operand.coords) != rank:
        raise b.unknown(f"coordinates other than {rank}")
    return [b.read(item, "s32") for item in operand.coords]


def _plain_load(b: Build) -> Closure:
    b.drop("mbarrier::complete_tx::bytes", "global", "shared::cluster", "shared::cta")
    begin = _destination(b, 4)
    source, source_offset = b.address(b.operands[1])
    count = b.read(b.operands[2], "u32")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        memory = block.launch.memory
        for row, lane in lanes_of(group, m):
            size = value_at(V, count, row, lane)
            start = value_at(V, source, row, lane) + source_offset - GLOBAL_BASE
            _sixteen(start, size)
            memory.check(start + 16 * np.arange(size // 16), 16, "bulk load", False)
            fetch = lambda start=start, size=size: memory.data[start : start + size].copy()  # noqa: E731
            begin(V, row, lane, size, 16, 0, fetch)

    return run


def _sixteen(start: int, size: int) -> None:
    if start % 16 or size % 16 or size <= 0:
        raise Misaligned(f"a bulk copy of {size} bytes: address and size must be positive multiples of 16")


# ---------------------------------------------------------------- stores: shared to global, in bulk groups
@dataclass(slots=True)
class Stores(Queue[Callable[[], Callable[[], None]]]):
    """Bulk stores of one warp, and the lane that issues them.

    A store of `open` and `groups` reads shared memory when it is called, and gives what writes; groups that have been
    read wait in `unwritten`.
    """

    unwritten: deque[list[Callable[[], None]]] = field(default_factory=deque)
    lane: int = -1

    def read(self, keep: int, cluster: Cluster) -> None:
        """All but the newest groups read shared memory; with a seed, they write at any time from then on."""
        for group in self.leave(keep):
            writes = [read() for read in group]
            self.unwritten.append(writes)
            if cluster.launch.rng is not None:
                cluster.in_flight.append(functools.partial(_write, writes))

    def write(self, keep: int, cluster: Cluster) -> None:
        """All but the newest groups are done."""
        self.read(keep, cluster)
        while len(self.unwritten) + len(self.groups) > keep:
            _write(self.unwritten.popleft())


def _write(writes: list[Callable[[], None]]) -> None:
    """What of them is not written yet."""
    while writes:
        writes.pop(0)()


def _queue(block: Block, row: int, lane: int) -> Stores:
    queue = block.keep("bulk", lambda: [Stores() for _ in range(block.warps)])[row]
    if lane != queue.lane:
        if queue.open or queue.groups or queue.unwritten:
            raise Trap("bulk groups of several lanes of one warp are not modelled")
        queue.lane = lane
    return queue


def _store(b: Build, reduce: bool, rank: int) -> Closure:
    """Bulk stores and reductions; rank 0 is the plain form."""
    hint = bool(b.take("L2::cache_hint"))
    kind = b.type() if reduce and not rank else ""
    operation = b.take("add", "min", "max") if reduce else ""
    b.drop("tile", "bulk_group", "global", "shared::cta", "noftz")
    b.done((2 if rank else 3) + hint)
    if (reduce and operation != "add") or kind not in ("", "f32", "f16", "bf16"):
        raise b.unknown(f"the reduction {operation} of {kind}")
    target, target_offset = b.address(b.operands[0])
    coords = _coords(b, b.operands[0], rank) if rank else []
    source, source_offset = b.address(b.operands[1])
    count = None if rank else b.read(b.operands[2], "u32")
    note_granule(b, "shared", 16)
    traffic = "bulk reduce" if reduce else "bulk store"

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        memory, shared = block.launch.memory, block.shared
        for row, lane in lanes_of(group, m):
            start = value_at(V, source, row, lane) + source_offset
            to = value_at(V, target, row, lane) + target_offset
            if rank:
                tensor = tensor_map(block, to)
                box = box_of(tensor, tuple(value_at(V, slot, row, lane) for slot in coords))
                size, bits, unit = tensor.box_bytes, SWIZZLE_BITS[tensor.swizzle], tensor.itemsize
                offsets, places = box.offsets, box.places
                numbers = {7: "f32", 6: "f16", 9: "bf16"}.get(tensor.dtype, "")
                align = 128
            else:
                size, bits, numbers = value_at(V, count, row, lane), 0, kind
                unit = {"f32": 4, "f16": 2, "bf16": 2, "": 16}[numbers]
                _sixteen(to - GLOBAL_BASE, size)
                places = np.arange(size // unit)
                offsets = to - GLOBAL_BASE + unit * places
                align = 16
            if start % align:
                raise Misaligned(f"a bulk store from byte {start} of shared memory: it needs a multiple of {align}")
            shared.check(start, start + size, 16, "bulk store")
            memory.check(offsets, unit, traffic, True)
            if not reduce:
                memory.own(offsets, unit, block.number)
            queue = _queue(block, group.a + row, lane)
            if shared.races is not None:
                own, races = group.a + row + block.first_row, shared.races
                # What lies outside the tensor is not written, whatever the box holds there.
                read_granules = shared.elements(_chunks(start, size, bits), places, unit)
                races.read_async(shared.shadow, read_granules, np.array([own]), races.bulk, queue.committed + 1)

            def read(
                start: int = start,
                size: int = size,
                bits: int = bits,
                unit: int = unit,
                places: np.ndarray = places,
                offsets: np.ndarray = offsets,
                numbers: str = numbers,
            ) -> Callable[[], None]:
                data = np.ascontiguousarray(shared.rows16[_chunks(start, size, bits) >> 4]).reshape(-1)

                def write() -> None:
                    if unit == 16:
                        memory.rows16[offsets >> 4] = data.reshape(-1, 4)[places]
                    elif reduce:
                        _add(memory.data, offsets, data.view(f"u{unit}")[places], numbers)
                    else:
                        memory.views[unit][offsets // unit] = data.view(f"u{unit}")[places]

                return write

            queue.open.append(read)

    return run


def _add(data: np.ndarray, offsets: np.ndarray, values: np.ndarray, kind: str) -> None:
    if kind == "f32":
        data.view(np.float32)[offsets >> 2] += values.view(np.float32)
    elif kind == "f16":
        data.view(np.float16)[offsets >> 1] += values.view(np.float16)
    elif kind == "bf16":
        view = data.view(np.uint16)
        view[offsets >> 1] = bf16_bits(bf16_value(view[offsets >> 1]) + bf16_value(values))
    else:
        raise Trap("a bulk reduction of this element type is not modelled")


def commit(b: Build) -> Closure:
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        for row, lane in lanes_of(V[0], m):
            queue = _queue_of_lane(V[0].block, V[0].a + row, lane)
            if queue is not None:
                queue.commit()

    return run


def _queue_of_lane(block: Block, row: int, lane: int) -> Stores | None:
    """The warp's queue if this lane is the one that fills it (other lanes' groups are empty)."""
    queue = block.keep("bulk", lambda: [Stores() for _ in range(block.warps)])[row]
    return queue if queue.lane == lane else None


def wait(b: Build) -> Closure:
    """cp.async.bulk.wait_group{.read} n.  Writes take effect as late as they may: here without .read, or at the end."""
    only_read = bool(b.take("read"))
    b.done(1)
    keep = b.immediate(b.operands[0])

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        races = block.cluster.races
        for row, lane in lanes_of(group, m):
            queue = _queue_of_lane(block, group.a + row, lane)
            if queue is None:
                continue
            if only_read:
                queue.read(keep, block.cluster)
            else:
                queue.write(keep, block.cluster)
            if races is not None:
                own = group.a + row + block.first_row
                races.finish(own, races.bulk + own, queue.left)

    return run


def leaving(block: Block, row: int) -> None:
    if "bulk" in block.state:
        queue = block.state["bulk"][row]
        if queue.open or any(queue.groups):
            raise UnfinishedCopy(f"warp {row} leaves while its bulk stores still read shared memory")
        queue.write(0, block.cluster)


# ---------------------------------------------------------------- which of them an opcode is
def _tensor(b: Build) -> Closure:
    rank = _DIMS.get(b.take(*_DIMS), 0)
    if not rank or b.take("im2col", "im2col_no_offs"):
        raise b.unknown("this tensor form")
    if "bulk_group" in b.mods:
        return _store(b, False, rank)
    return _tensor_load(b, rank)


def _plain(b: Build) -> Closure:
    if "bulk_group" in b.mods:
        return _store(b, False, 0)
    if "mbarrier::complete_tx::bytes" not in b.mods or "global" not in b.mods:
        raise b.unknown("a copy within shared memory")
    return _plain_load(b)


TABLE: dict[str, Callable[[Build], Closure]] = {
    "cp.async.bulk": _plain,
    "cp.async.bulk.tensor": _tensor,
    "cp.async.bulk.prefetch": lambda b: lambda V, m: None,
    "cp.async.bulk.commit_group": commit,
    "cp.async.bulk.wait_group": wait,
    "cp.reduce.async.bulk": lambda b: _store(b, True, 0),
    "cp.reduce.async.bulk.tensor": lambda b: _store(b, True, _DIMS.get(b.take(*_DIMS), 0)),
}
