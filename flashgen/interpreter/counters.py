"""What a launch did, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from flashgen.interpreter.parser import Instruction


@dataclass(slots=True)
class Access:
    """Shared-memory accesses of one instruction: how often warps executed it, and the wavefronts they took."""

    line: int
    text: str
    count: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond those that a conflict-free access of the same width needs."""
        return self.wavefronts - self.ideal


@dataclass(slots=True)
class Report:
    """Counts of one launch.

    `traffic` holds bytes of global memory by (buffer, kind), kinds being ld, st, atom, red, cp.async, bulk load, bulk
    store and bulk reduce; only bytes inside the tensors count.  `instructions` counts warp instructions by opcode.
    `probes` lists (name, block number, warp, values) in the order of execution.
    """

    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    touched: dict[str, np.ndarray] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)
    shared: dict[int, Access] = field(default_factory=dict)
    probes: list[tuple[str, int, int, tuple[int, ...]]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0

    def note_shared(self, instruction: Instruction, count: int, wavefronts: int, ideal: int) -> None:
        access = self.shared.get(instruction.line)
        if access is None:
            access = self.shared[instruction.line] = Access(instruction.line, instruction.text)
        access.count += count
        access.wavefronts += wavefronts
        access.ideal += ideal

    def bytes(self, *kinds: str, buffer: str | None = None) -> int:
        """Bytes of global traffic of these kinds (all where none is named), of one buffer or all."""
        return sum(
            amount
            for (name, kind), amount in self.traffic.items()
            if (not kinds or kind in kinds) and (buffer is None or name == buffer)
        )

    @property
    def read_bytes(self) -> int:
        return self.bytes("ld", "cp.async", "bulk load", "atom")

    @property
    def write_bytes(self) -> int:
        return self.bytes("st", "atom", "red", "bulk store", "bulk reduce")

    @property
    def conflicts(self) -> list[Access]:
        """Instructions with bank conflicts, worst first."""
        return sorted((a for a in self.shared.values() if a.conflicts), key=lambda a: -a.conflicts)
