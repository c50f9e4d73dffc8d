"""griddepcontrol: kernels that start before the one before them on their stream has ended, and wait for its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.interpreter.block import Block
from flashgen.interpreter.build import Build, Closure, May
from flashgen.interpreter.errors import NotComplete
from flashgen.interpreter.registers import Group, Mask, Slots

SUSPENDING = ("griddepcontrol.wait",)


class ForKernelBefore:
    """What lanes wait for that may not see yet what the kernel before wrote."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def poll(self, group: Group, m: Mask) -> bool:
        return self.block.launch.alone

    def describe(self) -> str:
        return "the end of the kernel before"


def wait(b: Build) -> May:
    b.done(0)

    def run(V: Slots, m: Mask) -> ForKernelBefore:
        block = V[0].block
        block.state["waited"] = True  # at the latest when it goes on
        return ForKernelBefore(block)

    return May(run)


def launch_dependents(b: Build) -> Closure:
    """Those may then read what this kernel may: not before it has waited itself."""
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        block = V[0].block
        if block.launch.early and "waited" not in block.state:
            raise NotComplete(
                "griddepcontrol.launch_dependents before griddepcontrol.wait: the kernel behind may then start while"
                " the one before still writes what both read"
            )

    return run


def leaving(block: Block, row: int) -> None:
    """Of a kernel that started early each block waits, so that its end is also the end of all kernels before."""
    if block.launch.early and "waited" not in block.state and not block.alive.any():
        raise NotComplete(
            "the block ends without griddepcontrol.wait: the kernel behind would not wait for those before this one"
        )


TABLE: dict[str, Callable[[Build], Any]] = {
    "griddepcontrol.wait": wait,
    "griddepcontrol.launch_dependents": launch_dependents,
}
