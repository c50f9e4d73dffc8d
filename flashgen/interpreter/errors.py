"""What the interpreter raises: bad PTX, and traps for what a GPU would hide."""

from __future__ import annotations

from flashgen.errors import FlashgenError


def shortened(text: str) -> str:
    """An instruction in one line (a wgmma names up to 128 registers)."""
    return text if len(text) <= 120 else f"{text[:100]} ... {text[-16:]}"


class PtxError(FlashgenError):
    """Base of the interpreter's errors; `line` is the line of the PTX text, 0 where none is known."""

    def __init__(self, message: str, *, line: int = 0, text: str = "") -> None:
        super().__init__(f"{message}\n  PTX line {line}: {shortened(text)}" if line else message)
        self.message = message
        self.line = line
        self.text = text


class PtxSyntaxError(PtxError):
    """Text that does not read as PTX."""


class UnknownInstruction(PtxError):
    """An opcode, modifier or operand form that the interpreter does not model; nothing is guessed."""


class WrongTarget(PtxError):
    """PTX for another target than the one asked for."""


class BadLaunch(PtxError):
    """A launch that a driver would refuse: a missing entry, parameters of another size, too large a block."""


class StepLimit(PtxError):
    """The kernel executed more warp instructions than the limit allows: it may never end."""


class Trap(PtxError):
    """A kernel did what a GPU would hide or hang on; says which block, warp and lane, and at which PTX line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.where = ""

    def locate(self, where: str, line: int, text: str) -> None:
        """Add the place, once: the innermost instruction that was executing."""
        if not self.line:
            self.where, self.line, self.text = where, line, text
            self.args = (f"{self.message}\n  {where}\n  PTX line {line}: {shortened(text)}",)


class OutOfBounds(Trap):
    """An access outside every buffer, outside the block's shared memory, or across two buffers."""


class Misaligned(Trap):
    """An access whose address is not a multiple of its width, or an operand below its required alignment."""


class Uninitialised(Trap):
    """A read of shared memory, local memory or a register that nothing wrote."""


class ReadOnly(Trap):
    """A write to a buffer that the kernel may only read."""


class NotComplete(Trap):
    """A read of what an asynchronous operation is still to write, or a change of what it still reads."""


class MissingFence(Trap):
    """Ordered in time but not between proxies, or registers handed to wgmma without wgmma.fence."""


class Race(Trap):
    """Two accesses to the same bytes, one of them a write, that no barrier orders."""


class Diverged(Trap):
    """An instruction that needs its whole warp was reached by a part of it."""


class BarrierMisuse(Trap):
    """A barrier used before its init, with another count, or with too many arrivals."""


class NotCleared(Trap):
    """A launch left behind what the next one takes for zeros."""


class Deadlock(Trap):
    """No warp can advance; says who waits for what."""


class KernelTrap(Trap):
    """The kernel executed `trap`."""


class UnfinishedCopy(Trap):
    """A warp left the kernel while its asynchronous copies still read or write shared memory."""
