"""cp.async: copies from global to shared memory that land when their group is waited for (or before, by a seed)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.interpreter.block import Block
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.errors import UnfinishedCopy
from flashgen.interpreter.groups import Queue
from flashgen.interpreter.memory import Reader
from flashgen.interpreter.ops.loads import note_granule
from flashgen.interpreter.ops.remote import local_address
from flashgen.interpreter.registers import LANES, Mask, Slots


@dataclass(slots=True)
class Copy:
    """One instruction's copies: addresses and bytes per lane, [n, 32], of the warps from `a` on."""

    a: int
    target: np.ndarray
    source: np.ndarray
    count: np.ndarray
    lanes: np.ndarray
    width: int


def _queues(block: Block) -> list[Queue[Copy]]:
    return block.keep("cp.async", lambda: [Queue() for _ in range(block.warps)])


def copy(b: Build) -> Closure:
    """cp.async.{ca,cg}.shared.global [dst], [src], cp-size{, src-size}."""
    b.drop("ca", "cg", "L2::64B", "L2::128B", "L2::256B")
    b.take("shared", "shared::cta")
    if not b.take("global"):
        raise b.unknown("this form")
    b.done((3, 4))
    target, target_offset = b.address(b.operands[0])
    source, source_offset = b.address(b.operands[1])
    width = b.immediate(b.operands[2])
    size = b.read(b.operands[3], "u32") if len(b.operands) == 4 else b.translator.constant(np.uint32(width))
    if width not in (4, 8, 16):
        raise b.unknown(f"a copy of {width} bytes")
    note_granule(b, "shared", width)
    instruction = b.instruction

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        shape = (group.n, LANES)
        to = np.broadcast_to(np.asarray(V[target]).astype(np.int64) + target_offset, shape)
        to, pattern = block.shared.access(group, local_address(block, to, m), m, width)
        block.launch.report.note_shared(instruction, len(group.warps_of(m)), pattern.wavefronts, pattern.ideal)
        count = np.broadcast_to(V[size], shape)
        lanes = np.ones(shape, bool) if m is True else m.copy()
        some = lanes & (count > 0)
        memory = block.launch.memory
        at = np.zeros(shape, np.int64)
        if some.any():
            where = np.broadcast_to(np.asarray(V[source]).astype(np.int64) + source_offset, shape)
            whole = some & (count >= width)
            at = np.where(some, where, 0)
            if whole.any():
                by, of = Reader(block=block.number), True if whole.all() else whole
                at = np.where(whole, memory.access(where, of, width, "cp.async", by=by), at)
            for row, lane in np.argwhere(some & ~whole):
                one = np.array([[where[row, lane]]], np.int64)
                at[row, lane] = memory.part(int(one[0, 0]), int(count[row, lane]), width, "cp.async")
        entry = Copy(group.a, to.copy(), at, np.minimum(count, width), lanes, width)
        queues = _queues(block)
        races = block.cluster.races
        for row in group.warps_of(m):
            queues[row].open.append(entry)
        if races is not None:
            shared = block.shared
            base = int(to[0, 0]) if m is True else int(to[m][0])
            where = pattern.granules + base // shared.granule
            rows = pattern.rows + (group.a + block.first_row)
            races.check_write(shared.shadow, where, rows)
            group_number = np.array([queue.committed + 1 for queue in queues])[pattern.rows + group.a]
            shared.shadow.written[where] = (races.cp_async + rows) << races.SHIFT | group_number
            shared.shadow.line[where] = instruction.line

    return run


def commit(b: Build) -> Closure:
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        rng = group.block.launch.rng
        for row in group.warps_of(m):
            queue = _queues(group.block)[row]
            queue.commit()
            if rng is not None and rng.random() < 0.3:  # land early: the data are there, though nobody may rely on it
                _land(group.block, {id(c): c for g in queue.groups for c in g}, {row})

    return run


def _land(block: Block, copies: dict[int, Copy], warps: set[int]) -> None:
    shared, memory = block.shared, block.launch.memory
    for entry in copies.values():
        rows = np.array([row - entry.a for row in sorted(warps) if 0 <= row - entry.a < entry.target.shape[0]])
        lanes = entry.lanes[rows]
        to, at, count = entry.target[rows][lanes], entry.source[rows][lanes], entry.count[rows][lanes]
        whole = count == entry.width
        _move(shared, memory, to[whole], at[whole], entry.width)
        for t, a, c in zip(to[~whole], at[~whole], count[~whole], strict=True):
            shared.data[t : t + entry.width] = 0
            shared.data[t : t + c] = memory.data[a : a + c]


def _move(shared: Any, memory: Any, to: np.ndarray, at: np.ndarray, width: int) -> None:
    if width == 16:
        shared.rows16[to >> 4] = memory.rows16[at >> 4]
    else:
        shared.views[width][to // width] = memory.views[width][at // width]


def _wait(V: Slots, m: Mask, keep: int, also_open: bool) -> None:
    """Land all but the newest `keep` committed groups of each warp."""
    group = V[0]
    block = group.block
    races = block.cluster.races
    queues = _queues(block)
    todo: dict[int, tuple[Copy, set[int]]] = {}
    for row in group.warps_of(m):
        queue = queues[row]
        if also_open:
            queue.commit()
        for entries in queue.leave(keep):
            for entry in entries:
                todo.setdefault(id(entry), (entry, set()))[1].add(row)
        if races is not None:
            races.finish(row + block.first_row, races.cp_async + row + block.first_row, queue.left)
    for entry, warps in todo.values():
        _land(block, {0: entry}, warps)


def wait_group(b: Build) -> Closure:
    b.done(1)
    keep = b.immediate(b.operands[0])
    return lambda V, m: _wait(V, m, keep, False)


def wait_all(b: Build) -> Closure:
    b.done(0)
    return lambda V, m: _wait(V, m, 0, True)


def leaving(block: Block, row: int) -> None:
    """A warp left: no copy that would still write anything may be open."""
    if "cp.async" not in block.state:
        return
    queue = _queues(block)[row]
    if any(entry.lanes[row - entry.a].any() for entries in (*queue.groups, queue.open) for entry in entries):
        raise UnfinishedCopy(f"warp {row} leaves while its cp.async copies are not waited for")


TABLE: dict[str, Callable[[Build], Closure]] = {
    "cp.async": copy,
    "cp.async.commit_group": commit,
    "cp.async.wait_group": wait_group,
    "cp.async.wait_all": wait_all,
}
