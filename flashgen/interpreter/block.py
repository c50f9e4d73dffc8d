"""A block in execution: its registers, shared memory, barriers, and the bundles of lanes that move through the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flashgen.interpreter.hazards import WgmmaRegisters
from flashgen.interpreter.races import Races
from flashgen.interpreter.registers import LANES, Banks, Group, Mask
from flashgen.interpreter.shared import SharedMemory

if TYPE_CHECKING:
    from flashgen.interpreter.machine import Launch

#: Times that sleepers are woken for nothing before their cluster counts as stuck.
IDLE = 1000

#: Failed tests of barriers after which the oldest copy of a cluster lands.
POLLS = 64


class Wait(Protocol):
    """What a bundle waits for."""

    def poll(self, group: Group, m: Mask) -> Mask | bool:
        """Lanes of `m` that may go on: True for all, False for none, else a mask.  Takes effect for those lanes."""

    def describe(self) -> str:
        """For the report of a deadlock."""


@dataclass(slots=True)
class Asleep:
    """What lanes wait for that look at memory again and again: that anything happens, or that nothing else can."""

    cluster: Cluster
    since: int

    def poll(self, group: Group, m: Mask) -> bool:
        return self.cluster.events > self.since

    def describe(self) -> str:
        return "another block"


@dataclass(slots=True, eq=False)
class Bundle:
    """Lanes of warps a..b at one place in the program; `mask` is True or [b - a, 32].

    `unmet` is (mask, place, lanes alive) of when all of its lanes last missed others: nobody looks until one differs.
    """

    a: int
    b: int
    mask: Mask
    pc: int = 0
    wait: Wait | None = None
    seen: int = -1
    turns: int = 0
    unmet: tuple[Mask, int, np.ndarray] | None = None


class Cluster:
    """Blocks that run together, what orders their warps, and the copies that are under way."""

    def __init__(self, launch: Launch, index: tuple[int, int, int], slot: int) -> None:
        self.launch, self.index, self.slot = launch, index, slot
        count = int(np.prod(launch.cluster))
        warps = launch.warps
        self.races = Races(count * warps) if launch.options.check else None
        self.events = 0
        self.in_flight: list[Callable[[], None]] = []
        self.polls = 0
        self.idle, self.woken_at = 0, 0  # how often all had to be woken since anything happened, and when it did
        self.blocks: list[Block] = []
        for rank in range(count):
            inner = (
                rank % launch.cluster[0],
                rank // launch.cluster[0] % launch.cluster[1],
                rank // (launch.cluster[0] * launch.cluster[1]),
            )
            at = tuple(i * c + x for i, c, x in zip(index, launch.cluster, inner, strict=True))
            self.blocks.append(Block(self, rank, inner, at))

    def land(self, n: int) -> None:
        """Let an asynchronous copy take effect."""
        self.in_flight.pop(n)()
        self.events += 1

    def polled(self) -> None:
        """A test of a barrier failed; a warp that goes on testing must see copies land some time."""
        self.polls += 1
        if self.polls % POLLS == 0 and self.in_flight:
            self.land(0)

    def wake(self) -> bool:
        """Let all that sleep go on; whether there were any."""
        asleep = [bundle for block in self.blocks for bundle in block.bundles if type(bundle.wait) is Asleep]
        for bundle in asleep:
            bundle.wait = None
        self.idle = self.idle + 1 if self.events == self.woken_at else 0
        self.woken_at = self.events
        return bool(asleep)

    @property
    def done(self) -> bool:
        return not any(block.bundles for block in self.blocks)


class Block:
    """One thread block."""

    def __init__(self, cluster: Cluster, rank: int, inner: tuple[int, int, int], index: tuple[int, int, int]) -> None:
        launch = cluster.launch
        program = launch.program
        self.launch, self.cluster, self.rank = launch, cluster, rank
        self.index_in_cluster, self.index = inner, index
        self.number = index[0] + launch.grid[0] * (index[1] + launch.grid[1] * index[2])
        self.warps = launch.warps
        self.banks = Banks(program.counts, program.defined, self.warps)
        self.first_row = rank * self.warps
        self.shared = SharedMemory(launch.smem_total, program.granule, cluster.races, self.first_row)
        self.local = np.full((self.warps, LANES, program.local_bytes), 0xFF, np.uint8)
        self.wgmma = WgmmaRegisters(program.wgmma_registers, self.warps)
        self.state: dict[str, Any] = {}  # what op modules keep per block, by their name
        self.groups: dict[tuple[int, int], Group] = {}
        threads = launch.threads
        lanes = np.arange(self.warps * LANES).reshape(self.warps, LANES) < threads
        self.alive = lanes
        full: Mask = True if lanes.all() else lanes
        if launch.rng is None:
            self.bundles = [Bundle(0, self.warps, full)]
        else:
            self.bundles = [
                Bundle(w, w + 1, True if lanes[w].all() else lanes[w : w + 1].copy()) for w in range(self.warps)
            ]

    def group(self, a: int, b: int) -> Group:
        if (a, b) not in self.groups:
            self.groups[a, b] = Group(self, a, b, self.launch.program.specs)
        return self.groups[a, b]

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """State of an op module for this block, made at first use."""
        if name not in self.state:
            self.state[name] = make()
        return self.state[name]

    def rows(self, group: Group) -> np.ndarray:
        """Rows of the race clocks of a group's warps."""
        return group.rows + self.first_row
