"""Opcodes by subject: each module has a TABLE from an opcode, or its first parts, to the builder of its closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.interpreter.ops import (
    atomics,
    barriers,
    bulk,
    convert,
    cp_async,
    fences,
    floats,
    griddepcontrol,
    integers,
    loads,
    matrix,
    mbarrier,
    moves,
    setmaxnreg,
    warps,
    wgmma,
)
from flashgen.interpreter.parser import Instruction

TABLE: dict[str, Callable[..., Any]] = {
    opcode: builder
    for module in (
        atomics,
        barriers,
        bulk,
        convert,
        cp_async,
        fences,
        floats,
        griddepcontrol,
        integers,
        loads,
        matrix,
        mbarrier,
        moves,
        setmaxnreg,
        warps,
        wgmma,
    )
    for opcode, builder in module.TABLE.items()
}

#: Opcode prefixes after which a warp may have to wait: they end a basic block.
SUSPENDING: tuple[tuple[str, ...], ...] = tuple(
    tuple(prefix.split("."))
    for prefix in (
        *barriers.SUSPENDING,
        *griddepcontrol.SUSPENDING,
        *mbarrier.SUSPENDING,
        *moves.SUSPENDING,
        *setmaxnreg.SUSPENDING,
    )
)

#: Called with (block, warp) when a warp has left the kernel.
LEAVING = (cp_async.leaving, bulk.leaving, wgmma.leaving, barriers.leaving, griddepcontrol.leaving)


def find_builder(item: Instruction) -> tuple[Callable[..., Any] | None, int]:
    """The builder with the longest matching opcode prefix, and how many parts it matched."""
    for used in range(len(item.parts), 0, -1):
        builder = TABLE.get(".".join(item.parts[:used]))
        if builder is not None:
            return builder, used
    return None, 0
