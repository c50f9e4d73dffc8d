"""Every kernel: when it starts, beside the one before it on its stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn:
    """It starts when the one before it has ended."""

    early: ClassVar[bool] = False
    calls: ClassVar[tuple[str, ...]] = ()  # functions of the device library that it calls first

    def __str__(self) -> str:
        return "in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapping:
    """Its blocks start while those of the one before leave, and wait for its end before they touch memory (programmatic
    dependent launch); the one behind starts likewise."""

    early: ClassVar[bool] = True
    calls: ClassVar[tuple[str, ...]] = ("griddepcontrol_wait", "griddepcontrol_launch_dependents")

    def __str__(self) -> str:
        return "overlapping: each kernel of a call starts while the one before it on the stream ends, and waits for it"


Launches = InTurn | Overlapping

#: What kernels do where the architecture has no other way.
IN_TURN = InTurn()
