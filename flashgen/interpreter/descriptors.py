"""Shared-memory matrix descriptors of wgmma: where each 16-byte chunk of an operand lies.

Layouts are those of the PTX ISA ("Asynchronous warpgroup level matrix shared memory layout"), in bytes: an operand of
16-bit elements is made of 8 x 8 core matrices, whose rows are 16-byte chunks of 8 elements along the major dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashgen.interpreter.errors import Trap
from flashgen.interpreter.tensormap import swizzled

#: Swizzle field -> (bytes of a row of the pattern, address bits mixed).
_MODES = {0: (16, 0), 1: (128, 3), 2: (64, 2), 3: (32, 1)}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """start, leading and stride offsets in bytes; the swizzle's row bytes (16: none) and bits."""

    start: int
    leading: int
    stride: int
    row: int
    bits: int

    @classmethod
    def decode(cls, word: int) -> Descriptor:
        """Raises Trap for a base offset, which is not modelled."""
        if word >> 49 & 7:
            raise Trap(f"the matrix descriptor {word:#x} has a base offset: not modelled")
        row, bits = _MODES[word >> 62 & 3]
        return cls((word & 0x3FFF) << 4, (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4, row, bits)

    def k_major(self, rows: int) -> np.ndarray:
        """Chunk addresses [rows, 2] of a [rows, 16] operand whose k elements lie side by side."""
        r, c = np.arange(rows)[:, None], np.arange(2)[None, :]
        along = c * (self.leading if self.row == 16 else 16)
        return swizzled(self.start + r % 8 * self.row + r // 8 * self.stride + along, self.bits)

    def mn_major(self, rows: int) -> np.ndarray:
        """Chunk addresses [rows / 8, 16] of a [rows, 16] operand whose row elements lie side by side."""
        c, k = np.arange(rows // 8)[:, None], np.arange(16)[None, :]
        if self.row == 16:
            return self.start + k % 8 * 16 + k // 8 * self.leading + c * self.stride
        chunks = self.row // 16
        across = c % chunks * 16 + c // chunks * self.leading
        return swizzled(self.start + k % 8 * self.row + k // 8 * self.stride + across, self.bits)
