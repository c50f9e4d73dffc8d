"""Watches on registers: those that some path reads unwritten, and those that wgmma still reads or writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.interpreter.errors import MissingFence, NotComplete, Uninitialised
from flashgen.interpreter.parser import Entry, Instruction, Reg, Vec
from flashgen.interpreter.registers import Mask, Slots

if TYPE_CHECKING:
    from flashgen.interpreter.build import Closure, Footprint, Translator


def watch_unwritten(run: Closure, footprint: Footprint, defined: dict[str, int]) -> Closure:
    """Check lanes of the registers in `defined` (name -> DefinedSlot) before a read, mark them after a write."""
    reads = [(defined[name], name) for name in sorted(footprint.reads & defined.keys())]
    writes = [defined[name] for name in sorted(footprint.writes & defined.keys())]
    exchanged = defined.get(footprint.exchanged[0]) if footprint.exchanged else None
    if not reads and not writes and exchanged is None:
        return run

    def watched(V: Slots, m: Mask) -> object:
        if exchanged is not None:
            read = np.take_along_axis(V[exchanged], footprint.exchanged[1](V), 1)
            if not (read if m is True else read[m]).all():
                raise Uninitialised(f"register {footprint.exchanged[0]} is read in a lane where nothing wrote it")
        for slot, name in reads:
            if not (V[slot] if m is True else V[slot][m]).all():
                raise Uninitialised(f"register {name.split('@')[0]} is read before anything wrote it")
        result = run(V, m)
        for slot in writes:
            np.copyto(V[slot], True, where=m)
        return result

    return watched


def wgmma_registers(entry: Entry) -> dict[str, int]:
    """Registers that any wgmma of the kernel accumulates into or reads fragments from, numbered."""
    found: dict[str, int] = {}
    for item in entry.body:
        if isinstance(item, Instruction) and item.parts[:2] == ("wgmma", "mma_async"):
            for operand in item.operands:
                for reg in operand.items if isinstance(operand, Vec) else ():
                    if isinstance(reg, Reg):
                        found.setdefault(reg.name, len(found))
    return found


class WgmmaRegisters:
    """Per register of `wgmma_registers`: which warps have it in flight or touched it since their last fence.

    Each entry is a set of warps as bits.  `writing`: an accumulator whose product is not waited for; `reading`: a
    fragment of A likewise; `touched`: accessed by another instruction since the warp's last wgmma.fence.
    """

    __slots__ = ("reading", "shapes", "touched", "writing")

    def __init__(self, count: int, warps: int) -> None:
        self.writing = [0] * count
        self.reading = [0] * count
        self.shapes: dict[int, int] = {}  # width of the product that last accumulated into a register
        self.touched = [(1 << warps) - 1] * count


def watch_wgmma(run: Closure, instruction: Instruction, footprint: Footprint, translator: Translator) -> Closure:
    """Trap on accumulators read or written before their wait, and on fragments of A changed before it.

    A plain mov does not count as a use that needs a fence: NVVM puts copies of operands anywhere, between fence and
    wgmma too, and ptxas moves them where they belong.
    """
    if instruction.parts[:2] == ("wgmma", "mma_async"):
        return run
    number = translator.wgmma
    reads = [(number[name], name) for name in sorted(footprint.used & number.keys())]
    writes = [(number[name], name) for name in sorted(footprint.writes & number.keys())]
    if not reads and not writes:
        return run
    touches = instruction.parts[0] != "mov"

    def watched(V: Slots, m: Mask) -> object:
        group = V[0]
        state, bits = group.block.wgmma, group.bits
        if m is not True:
            bits = group.row_bits(m)
        for n, name in reads:
            if state.writing[n] & bits:
                raise NotComplete(f"register {name} is read while a wgmma that writes it is not waited for")
            if touches:
                state.touched[n] |= bits
        for n, name in writes:
            if (state.writing[n] | state.reading[n]) & bits:
                raise NotComplete(f"register {name} is written while a wgmma that uses it is not waited for")
            if touches:
                state.touched[n] |= bits
        return run(V, m)

    return watched


def check_fence(state: WgmmaRegisters, numbers: tuple[int, ...], bits: int) -> None:
    """A wgmma is about to use registers: none may have been touched since the warps' last wgmma.fence."""
    for n in numbers:
        if state.touched[n] & bits:
            raise MissingFence("registers of this wgmma were used by other instructions with no wgmma.fence since")
