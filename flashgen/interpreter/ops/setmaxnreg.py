"""setmaxnreg: warps give registers back to the block's pool and take them from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.interpreter.block import Block
from flashgen.interpreter.build import Build, May
from flashgen.interpreter.errors import BarrierMisuse
from flashgen.interpreter.registers import Group, Mask, Slots

SUSPENDING = ("setmaxnreg",)


@dataclass(slots=True)
class Pool:
    """Registers a thread of each warp holds, and those that nobody holds (counted a thread of a warp)."""

    held: np.ndarray
    free: int = 0


def pool(block: Block) -> Pool:
    return block.keep("registers", lambda: Pool(np.full(block.warps, block.launch.registers)))


@dataclass(slots=True)
class ForRegisters:
    block: Block
    wanted: int

    def poll(self, group: Group, m: Mask) -> Mask | bool:
        have = pool(self.block)
        ready = []
        for row in group.warps_of(m):
            more = self.wanted - int(have.held[row])
            if more <= have.free:
                have.free -= more
                have.held[row] = self.wanted
                ready.append(row)
        return group.lanes_of(ready, m)

    def describe(self) -> str:
        have = pool(self.block)
        return (
            f"setmaxnreg {self.wanted} (the pool has {have.free} a thread of one warp left; the launch gave"
            f" {self.block.launch.registers} to each of {self.block.warps} warps)"
        )


def set_registers(b: Build) -> May:
    """setmaxnreg.{inc,dec}.sync.aligned.u32 n."""
    b.type()
    direction = b.take("inc", "dec")
    b.drop("sync", "aligned")
    b.done(1)
    wanted = b.immediate(b.operands[0])
    if not direction or wanted % 8 or not 24 <= wanted <= 256:
        raise b.unknown(f"a count of {wanted} registers (a multiple of 8 from 24 to 256)")

    def run(V: Slots, m: Mask) -> Any:
        group = V[0]
        group.whole_rows(m, "setmaxnreg")
        have = pool(group.block)
        for row in group.warps_of(m):
            before = int(have.held[row])
            if (direction == "dec") != (wanted <= before) and wanted != before:
                raise BarrierMisuse(f"setmaxnreg.{direction} {wanted} in a warp that holds {before}")
            if direction == "dec":
                have.held[row] = wanted
                have.free += before - wanted
        group.block.cluster.events += 1
        return ForRegisters(group.block, wanted) if direction == "inc" else None

    return May(run)


TABLE: dict[str, Callable[[Build], May]] = {"setmaxnreg": set_registers}
