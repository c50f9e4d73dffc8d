"""Named barriers of a block (bar, barrier) and the barrier of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen.interpreter.block import Block, Cluster
from flashgen.interpreter.build import Build, Closure, May
from flashgen.interpreter.errors import BarrierMisuse
from flashgen.interpreter.races import Clocks
from flashgen.interpreter.registers import LANES, Group, Mask, Slots

SUSPENDING = ("bar.sync", "bar.red", "barrier.sync", "barrier.cta.sync", "bar.cta.sync", "barrier.cluster.wait")


@dataclass(slots=True)
class Barrier:
    """One of a block's 16 barriers: who has arrived in the current generation, out of how many threads."""

    number: int
    generation: int = 0
    expected: int | None = None
    arrived: int = 0
    rows: list[int] = field(default_factory=list)
    open_count: bool = False  # used without a thread count: it expects every warp that still runs
    clocks: Clocks | None = None
    done: Clocks | None = None
    votes: list[bool] = field(default_factory=list)
    result: tuple[int, bool, bool] = (0, False, True)


@dataclass(slots=True)
class AtBarrier:
    """Warps that wait for their generation of a barrier to end: `places` maps a warp to (barrier, generation)."""

    block: Block
    places: dict[int, tuple[Barrier, int]]
    then: Callable[[int, Barrier], None] | None = None

    def poll(self, group: Group, m: Mask) -> Mask | bool:
        ready = []
        races = self.block.cluster.races
        for row in group.warps_of(m):
            barrier, generation = self.places[row]
            if barrier.generation > generation:
                ready.append(row)
                if races is not None:
                    races.acquire(row + self.block.first_row, barrier.done)
                if self.then is not None:
                    self.then(row, barrier)
        return group.lanes_of(ready, m)

    def describe(self) -> str:
        seen = {id(b): b for b, generation in self.places.values() if b.generation == generation}
        return " or ".join(
            f"named barrier {b.number} ({b.arrived} of {b.expected} threads have arrived)" for b in seen.values()
        )


def _barriers(block: Block) -> dict[int, Barrier]:
    return block.keep("barriers", dict)


def _everyone(block: Block) -> int:
    """Threads of warps that still run (a bar.sync without a count)."""
    return LANES * int(block.alive.any(1).sum())


def arrive(group: Group, row: int, number: int, threads: int | None, votes: Any = ()) -> tuple[Barrier, int]:
    """One warp arrives; returns the barrier and the generation that the arrival belongs to."""
    block = group.block
    if not 0 <= number < 16:
        raise BarrierMisuse(f"barrier {number}: a block has barriers 0..15")
    if threads is not None and (threads <= 0 or threads % LANES):
        raise BarrierMisuse(f"barrier {number} with {threads} threads: the count must be a multiple of {LANES}")
    barrier = _barriers(block).setdefault(number, Barrier(number))
    expected = threads if threads is not None else _everyone(block)
    if barrier.arrived and threads is not None and barrier.expected != expected:
        raise BarrierMisuse(
            f"barrier {number} is used with {expected} threads while others wait at it with {barrier.expected}"
        )
    if row in barrier.rows:
        raise BarrierMisuse(f"warp {row} arrives twice at barrier {number} before the others have arrived")
    generation = barrier.generation
    barrier.expected = expected
    barrier.open_count = threads is None
    barrier.arrived += LANES
    barrier.rows.append(row)
    barrier.votes.extend(bool(v) for v in votes)
    races = block.cluster.races
    if races is not None:
        if barrier.clocks is None:
            barrier.clocks = races.clocks()
        races.release(row + block.first_row, barrier.clocks)
    _maybe_open(block, barrier)
    return barrier, generation


def _maybe_open(block: Block, barrier: Barrier) -> None:
    if barrier.expected is None or barrier.arrived < barrier.expected:
        return
    if barrier.arrived > barrier.expected:
        raise BarrierMisuse(
            f"{barrier.arrived} threads arrived at barrier {barrier.number}, which expects {barrier.expected}"
        )
    barrier.generation += 1
    barrier.done = barrier.clocks
    barrier.clocks = None
    barrier.result = (sum(barrier.votes), any(barrier.votes), all(barrier.votes))
    barrier.arrived, barrier.expected, barrier.rows, barrier.votes = 0, None, [], []
    block.cluster.events += 1


def leaving(block: Block, row: int) -> None:
    """A warp left: a barrier without a count expects fewer threads."""
    for barrier in _barriers(block).values():
        if barrier.arrived and barrier.open_count:
            barrier.expected = max(barrier.arrived, _everyone(block))
            _maybe_open(block, barrier)
    _maybe_open_cluster(block.cluster)


def _form(b: Build, operands: tuple[int, ...]) -> tuple[int, int | None]:
    """Slots of the barrier number and of the thread count."""
    b.drop("aligned", "cta")
    b.done(operands)
    number = b.read(b.operands[0], "u32")
    threads = b.read(b.operands[1], "u32") if len(b.operands) > 1 else None
    return number, threads


def _of_warp(group: Group, value: Any, m: Mask, row: int, what: str) -> int:
    """A value that must be the same in all lanes of a warp."""
    if np.ndim(value) == 0:
        return int(value)
    values = value[row - group.a]
    if m is not True:
        values = values[m[row - group.a]]
    if (values != values[0]).any():
        raise BarrierMisuse(f"lanes of warp {row} name different {what}")
    return int(values[0])


def _arrive_all(
    V: Slots, m: Mask, number: int, threads: int | None, votes: Any = None
) -> dict[int, tuple[Barrier, int]]:
    group = V[0]
    group.whole_rows(m, "a block barrier")
    places = {}
    for row in group.warps_of(m):
        which = _of_warp(group, V[number], m, row, "barriers")
        count = None if threads is None else _of_warp(group, V[threads], m, row, "thread counts")
        places[row] = arrive(group, row, which, count, () if votes is None else votes[row - group.a])
    return places


def sync(b: Build) -> May:
    """bar.sync a{, b}: arrive and wait."""
    number, threads = _form(b, (1, 2))

    def run(V: Slots, m: Mask) -> AtBarrier:
        return AtBarrier(V[0].block, _arrive_all(V, m, number, threads))

    return May(run)


def arrive_only(b: Build) -> Closure:
    """bar.arrive a, b: arrive and go on."""
    number, threads = _form(b, (2,))

    def run(V: Slots, m: Mask) -> None:
        _arrive_all(V, m, number, threads)

    return run


def reduce(b: Build) -> May:
    """bar.red.{popc,and,or}: a barrier that also combines a predicate of every thread."""
    kind = b.type()
    which = {"popc": 0, "or": 1, "and": 2}[b.take("popc", "and", "or")]
    b.drop("aligned", "cta")
    b.done((3, 4))
    number = b.read(b.operands[1], "u32")
    threads = b.read(b.operands[2], "u32") if len(b.operands) == 4 else None
    p = b.read(b.operands[-1], "pred")
    d = b.write(b.operands[0], kind)

    def run(V: Slots, m: Mask) -> AtBarrier:
        block = V[0].block

        def then(row: int, barrier: Barrier) -> None:
            block.group(row, row + 1).slots[d][...] = barrier.result[which]

        votes = np.broadcast_to(V[p], (V[0].n, LANES))
        return AtBarrier(block, _arrive_all(V, m, number, threads, votes), then)

    return May(run)


# ---------------------------------------------------------------- clusters
@dataclass(slots=True)
class _ClusterBarrier:
    generation: int = 0
    arrived: set[tuple[int, int]] = field(default_factory=set)
    clocks: Clocks | None = None
    done: Clocks | None = None
    phase_of: dict[tuple[int, int], int] = field(default_factory=dict)


def _of_cluster(cluster: Cluster) -> _ClusterBarrier:
    return cluster.blocks[0].keep("cluster barrier", _ClusterBarrier)


def cluster_arrive(b: Build) -> Closure:
    b.drop("aligned", "release", "relaxed")
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        cluster = group.block.cluster
        barrier = _of_cluster(cluster)
        for row in group.warps_of(m):
            key = (group.block.rank, row)
            if key in barrier.arrived:
                raise BarrierMisuse(f"warp {row} arrives twice at the cluster barrier")
            barrier.arrived.add(key)
            barrier.phase_of[key] = barrier.generation
            if cluster.races is not None:
                if barrier.clocks is None:
                    barrier.clocks = cluster.races.clocks()
                cluster.races.release(row + group.block.first_row, barrier.clocks)
        _maybe_open_cluster(cluster)

    return run


def _maybe_open_cluster(cluster: Cluster) -> None:
    barrier = _of_cluster(cluster)
    alive = {(block.rank, int(row)) for block in cluster.blocks for row in np.flatnonzero(block.alive.any(1))}
    if barrier.arrived and alive <= barrier.arrived:
        barrier.generation += 1
        barrier.arrived = set()
        barrier.done, barrier.clocks = barrier.clocks, None
        cluster.events += 1


@dataclass(slots=True)
class _AtCluster:
    block: Block

    def poll(self, group: Group, m: Mask) -> Mask | bool:
        barrier = _of_cluster(self.block.cluster)
        ready = []
        for row in group.warps_of(m):
            if barrier.phase_of.get((self.block.rank, row), -1) < barrier.generation:
                ready.append(row)
                if self.block.cluster.races is not None and barrier.done is not None:
                    self.block.cluster.races.acquire(row + self.block.first_row, barrier.done)
        return group.lanes_of(ready, m)

    def describe(self) -> str:
        barrier = _of_cluster(self.block.cluster)
        return f"the cluster barrier ({len(barrier.arrived)} warps have arrived)"


def cluster_wait(b: Build) -> May:
    b.drop("aligned", "acquire")
    b.done(0)

    def run(V: Slots, m: Mask) -> Any:
        return _AtCluster(V[0].block)

    return May(run)


TABLE: dict[str, Callable[[Build], Any]] = {
    "bar.sync": sync,
    "bar.cta.sync": sync,
    "barrier.sync": sync,
    "barrier.cta.sync": sync,
    "bar.arrive": arrive_only,
    "bar.cta.arrive": arrive_only,
    "barrier.arrive": arrive_only,
    "barrier.cta.arrive": arrive_only,
    "bar.red": reduce,
    "barrier.cluster.arrive": cluster_arrive,
    "barrier.cluster.wait": cluster_wait,
}
