"""A PTX interpreter in NumPy: the very kernel that NVRTC compiles, executed and checked on a CPU.

`load(text)` gives a Module; `module.launch(entry, grid, block, smem_bytes, params, memory)` runs a kernel on the NumPy
buffers of a Memory and returns a Report of what it did.  What a GPU would hide raises a Trap.
"""

from flashgen.interpreter.counters import Report
from flashgen.interpreter.errors import (
    BadLaunch,
    PtxError,
    PtxSyntaxError,
    StepLimit,
    Trap,
    UnknownInstruction,
    WrongTarget,
)
from flashgen.interpreter.machine import Module, load
from flashgen.interpreter.memory import Memory

__all__ = [
    "BadLaunch",
    "Memory",
    "Module",
    "PtxError",
    "PtxSyntaxError",
    "Report",
    "StepLimit",
    "Trap",
    "UnknownInstruction",
    "WrongTarget",
    "load",
]
