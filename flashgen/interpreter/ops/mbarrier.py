"""mbarrier: arrivals and bytes of a phase, and who may go on when it completes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.interpreter.block import Block
from flashgen.interpreter.build import Build, Closure, May
from flashgen.interpreter.errors import BarrierMisuse, Misaligned
from flashgen.interpreter.ops.remote import remote_block
from flashgen.interpreter.parser import Sink
from flashgen.interpreter.races import Clocks
from flashgen.interpreter.registers import LANES, Group, Mask, Slots
from flashgen.interpreter.shared import BASE

SUSPENDING = ("mbarrier.try_wait",)
_SCOPES = ("release", "acquire", "relaxed", "cta", "cluster")
_MAX_TX = (1 << 20) - 1
_MAX_COUNT = (1 << 20) - 1


@dataclass(slots=True)
class MBarrier:
    """One mbarrier object; `phase` counts completed phases, `tx` the bytes announced and not yet landed."""

    address: int
    count: int
    pending: int
    tx: int = 0
    phase: int = 0
    agent: int = 0
    init: tuple[int, int] = (0, 0)  # (row, time) of its init
    clocks: Clocks | None = None
    done: Clocks | None = None

    def __str__(self) -> str:
        return f"mbarrier at byte {self.address - BASE}"


def table(block: Block) -> dict[int, MBarrier]:
    return block.keep("mbarriers", dict)


def find(block: Block, address: int, row: int, what: str) -> tuple[Block, MBarrier]:
    """(owner, barrier) at a shared::cluster address, which must have been initialised in a way that `row` knows of."""
    owner, own = remote_block(block, address)
    barrier = table(owner).get(own)
    if barrier is None:
        raise BarrierMisuse(f"{what} on byte {own - BASE} of shared memory, where no mbarrier was initialised")
    races = block.cluster.races
    if races is not None and races.generic[row, barrier.init[0]] < barrier.init[1]:
        raise BarrierMisuse(f"{what} on {barrier} by {races.name(row)}, which its init does not happen before")
    return owner, barrier


def complete(owner: Block, barrier: MBarrier) -> None:
    """End the phase if nothing is outstanding."""
    if barrier.pending == 0 and barrier.tx == 0:
        barrier.phase += 1
        barrier.pending = barrier.count
        if barrier.clocks is not None:
            barrier.done = barrier.clocks.copy()
            barrier.done.generic[barrier.agent] = barrier.done.proxy[barrier.agent] = barrier.phase
        owner.cluster.events += 1


def arrive(owner: Block, barrier: MBarrier, row: int, count: int) -> int:
    """`count` arrivals by warp `row`; returns the phase they belong to."""
    if count > barrier.pending:
        raise BarrierMisuse(f"{count} arrivals at {barrier}, which expects {barrier.pending} more in this phase")
    phase = barrier.phase
    barrier.pending -= count
    races = owner.cluster.races
    if races is not None:
        races.release(row, barrier.clocks)
    complete(owner, barrier)
    return phase


def expect(barrier: MBarrier, size: int) -> None:
    barrier.tx += size
    if not -_MAX_TX <= barrier.tx <= _MAX_TX:
        raise BarrierMisuse(f"{barrier} expects {barrier.tx} bytes: the count goes to {_MAX_TX}")


def landed(owner: Block, barrier: MBarrier, size: int) -> None:
    """complete_tx: `size` bytes have arrived."""
    barrier.tx -= size
    if barrier.tx < -_MAX_TX:
        raise BarrierMisuse(f"{-barrier.tx} bytes landed on {barrier} that nobody announced")
    complete(owner, barrier)


def lanes_of(group: Group, m: Mask) -> Iterator[tuple[int, int]]:
    """(row within the group, lane) of each lane that takes part."""
    lanes = np.ones((group.n, LANES), bool) if m is True else m
    for row, lane in np.argwhere(lanes):
        yield int(row), int(lane)


def value_at(V: Slots, slot: int, row: int, lane: int) -> int:
    value = V[slot]
    return int(value if np.ndim(value) == 0 else value[row, lane])


def _address(b: Build, operand: Any) -> Callable[[Slots, int, int], int]:
    slot, offset = b.address(operand)

    def at(V: Slots, row: int, lane: int) -> int:
        address = value_at(V, slot, row, lane) + offset
        if address % 8:
            raise Misaligned(f"an mbarrier at byte {address - BASE} of shared memory: it needs a multiple of 8")
        return address

    return at


def _shared_only(b: Build) -> None:
    if b.type() != "b64":
        raise b.unknown("an mbarrier of another type")
    if not b.take("shared", "shared::cta", "shared::cluster"):
        raise b.unknown("a generic address")


def init(b: Build) -> Closure:
    _shared_only(b)
    b.done(2)
    at, count = _address(b, b.operands[0]), b.read(b.operands[1], "u32")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        races = block.cluster.races
        for row, lane in lanes_of(group, m):
            address, arrivals = at(V, row, lane), value_at(V, count, row, lane)
            block.shared.check(address, address + 8, 8, "mbarrier")
            if not 1 <= arrivals <= _MAX_COUNT:
                raise BarrierMisuse(f"an mbarrier that expects {arrivals} arrivals: 1..{_MAX_COUNT} are possible")
            if address in table(block):
                raise BarrierMisuse(f"{table(block)[address]} is initialised twice")
            barrier = MBarrier(address, arrivals, arrivals)
            if races is not None:
                barrier.agent = races.new_barrier()
                own = group.a + row + block.first_row
                barrier.init = own, int(races.generic[own, own])
                barrier.clocks = races.clocks()
            table(block)[address] = barrier

    return run


def invalidate(b: Build) -> Closure:
    _shared_only(b)
    b.done(1)
    at = _address(b, b.operands[0])

    def run(V: Slots, m: Mask) -> None:
        for row, lane in lanes_of(V[0], m):
            block = V[0].block
            find(block, at(V, row, lane), V[0].a + row + block.first_row, "mbarrier.inval")
            del table(block)[at(V, row, lane)]

    return run


def _arrival(b: Build, bytes_too: bool) -> Closure:
    """mbarrier.arrive{.expect_tx} state|_, [a]{, count or bytes}."""
    _shared_only(b)
    b.drop(*_SCOPES)
    b.done((2, 3))
    state = None if isinstance(b.operands[0], Sink) else b.write(b.operands[0], "b64")
    at = _address(b, b.operands[1])
    number = b.read(b.operands[2], "u32") if len(b.operands) == 3 else None
    if bytes_too and number is None:
        raise b.unknown("expect_tx without a number of bytes")
    what = b.instruction.opcode

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        block = group.block
        for row, lane in lanes_of(group, m):
            own = group.a + row + block.first_row
            owner, barrier = find(block, at(V, row, lane), own, what)
            amount = 1 if number is None else value_at(V, number, row, lane)
            if bytes_too:
                expect(barrier, amount)
            phase = arrive(owner, barrier, own, 1 if bytes_too else amount)
            if state is not None:
                V[state][row, lane] = phase

    return run


def expect_only(b: Build) -> Closure:
    """mbarrier.expect_tx [a], bytes."""
    _shared_only(b)
    b.drop(*_SCOPES)
    b.done(2)
    at, number = _address(b, b.operands[0]), b.read(b.operands[1], "u32")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        for row, lane in lanes_of(group, m):
            own = group.a + row + group.block.first_row
            _, barrier = find(group.block, at(V, row, lane), own, "mbarrier.expect_tx")
            expect(barrier, value_at(V, number, row, lane))

    return run


@dataclass(slots=True)
class AtMBarrier:
    """Lanes that wait for a phase: `waits` has (barrier, parity or phase, lanes) of each; lanes are [warps, 32] of the
    block."""

    block: Block
    waits: list[tuple[MBarrier, int, np.ndarray]]
    parity: bool
    slot: int

    def poll(self, group: Group, m: Mask) -> Mask | bool:
        over = [wait for wait in self.waits if passed(wait[0], wait[1], self.parity)]
        ready = np.zeros((group.n, LANES), bool)
        for _, _, lanes in over:
            ready |= lanes[group.a : group.b]
        if m is not True:
            ready &= m
        if not ready.any():
            return False
        group.slots[self.slot][ready] = True
        races = self.block.cluster.races
        for barrier, _, lanes in over:
            if races is not None and barrier.done is not None:
                for row in np.flatnonzero((ready & lanes[group.a : group.b]).any(1)):
                    races.acquire(group.a + int(row) + self.block.first_row, barrier.done)
        everyone = True if m is True else m
        return True if (ready == everyone).all() else ready

    def describe(self) -> str:
        seen = {}
        for barrier, phase, _ in self.waits:
            word = f"parity {phase}" if self.parity else f"phase {phase}"
            seen[id(barrier), phase] = (
                f"{word} of {barrier} (in phase {barrier.phase}: {barrier.pending} of {barrier.count} arrivals and"
                f" {barrier.tx} bytes outstanding)"
            )
        return " or ".join(seen.values())


def passed(barrier: MBarrier, phase: int, parity: bool) -> bool:
    """Whether a wait for the phase of this parity (or with this number) succeeds."""
    return (barrier.phase & 1) != (phase & 1) if parity else barrier.phase > phase


def _wait(b: Build, blocking: bool) -> Any:
    """mbarrier.{try,test}_wait{.parity} p, [a], phase{, time hint}."""
    _shared_only(b)
    b.drop(*_SCOPES)
    parity = bool(b.take("parity"))
    b.done((3, 4))
    p = b.write(b.operands[0], "pred")
    at, (address, _) = _address(b, b.operands[1]), b.address(b.operands[1])
    phase = b.read(b.operands[2], "u32" if parity else "b64")
    what = b.instruction.opcode

    def run(V: Slots, m: Mask) -> AtMBarrier | None:
        group = V[0]
        block = group.block
        shape = group.n, LANES
        lanes = np.ones(shape, bool) if m is True else m
        addresses, phases = (np.broadcast_to(V[slot], shape) for slot in (address, phase))
        waits: dict[tuple[int, int], tuple[MBarrier, int, np.ndarray]] = {}
        for row in np.flatnonzero(lanes.any(1)):
            warp, apart = group.a + int(row), lanes[row]
            while apart.any():  # as a rule all lanes of a warp wait for one phase of one mbarrier
                lane = int(apart.argmax())
                _, barrier = find(block, at(V, row, lane), warp + block.first_row, what)
                number = int(phases[row, lane])
                same = (addresses[row] == addresses[row, lane]) & (phases[row] == number)
                of = id(barrier), number
                if of not in waits:
                    waits[of] = barrier, number, np.zeros((block.warps, LANES), bool)
                waits[of][2][warp] |= apart & same
                apart = apart & ~same
        np.copyto(V[p], False, where=m)
        wait = AtMBarrier(block, list(waits.values()), parity, p)
        rng = block.launch.rng
        if blocking and not (rng is not None and rng.random() < 0.2):
            return wait
        if wait.poll(group, m) is not True:  # test_wait, or by a seed a try_wait that gives up at once
            block.cluster.polled()
        return None

    if not blocking:
        return lambda V, m: run(V, m) and None
    return May(run)


TABLE: dict[str, Callable[[Build], Any]] = {
    "mbarrier.init": init,
    "mbarrier.inval": invalidate,
    "mbarrier.arrive": lambda b: _arrival(b, False),
    "mbarrier.arrive.expect_tx": lambda b: _arrival(b, True),
    "mbarrier.expect_tx": expect_only,
    "mbarrier.try_wait": lambda b: _wait(b, True),
    "mbarrier.test_wait": lambda b: _wait(b, False),
}
