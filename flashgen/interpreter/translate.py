"""Each instruction becomes one Python closure over slots of registers; runs of them become basic blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen.interpreter import flow, hazards
from flashgen.interpreter.build import Build, Closure, Footprint, May, Translator
from flashgen.interpreter.errors import Trap, UnknownInstruction
from flashgen.interpreter.ops import find_builder
from flashgen.interpreter.parser import Entry, Instruction, Probe
from flashgen.interpreter.registers import DefinedSlot, Mask, RegisterSlot, Slots, SlotSpec


# ---------------------------------------------------------------- what ends a basic block
@dataclass(frozen=True, slots=True)
class Jump:
    target: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Lanes whose predicate holds go to `target`, the others to `other`; `written` says which lanes have it."""

    slot: int
    negated: bool
    target: int
    other: int
    written: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """`ret` or `exit`."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """An instruction that may have to wait: `run` returns a Wait, or None where nothing has to be waited for."""

    run: Callable[[Slots, Mask], Any]
    next: int


End = Jump | Fork | Leave | Suspend


@dataclass(slots=True)
class Code:
    """One basic block: closures, the instruction of each, and its end.

    `meets` says that its first instruction needs the warp together; `members` is the slot that names the lanes.
    """

    ops: list[Closure] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    end: End = field(default_factory=Leave)
    rank: int = 0
    meets: bool = False
    members: int | None = None


@dataclass(slots=True)
class Program:
    """A kernel ready to run: blocks, the slots their closures index, and the sizes of the register banks."""

    entry: Entry
    blocks: list[Code]
    specs: list[SlotSpec]
    counts: dict[int, int]
    defined: int
    local_bytes: int
    granule: int
    wgmma_registers: int


def _guarded(run: Closure, slot: int, negated: bool) -> Closure:
    def guarded(V: Slots, m: Mask) -> None:
        p = ~V[slot] if negated else V[slot].copy()  # the instruction may write its own guard
        if m is not True:
            p &= m
        if p.any():
            run(V, True if p.all() else p)

    return guarded


@dataclass(slots=True)
class _Line:
    """An instruction between parsing and blocks."""

    instruction: Instruction
    run: Closure | May
    footprint: Footprint
    guard: int | None


def translate(entry: Entry, symbols: dict[str, tuple[str, int]]) -> Program:
    """Build the program of one kernel.

    `symbols` maps each variable to (state space, address).  Raises UnknownInstruction with the line.
    """
    translator = Translator(entry, symbols)
    translator.wgmma = hazards.wgmma_registers(entry)
    graph = flow.split(entry)
    lines: list[list[_Line]] = []
    for code in graph.blocks:
        translator.constants = {}
        lines.append([_line(translator, item) for item in code.items])
    codes = [Code() for _ in graph.blocks]
    maybe = flow.maybe_unwritten(
        [[(x.footprint.used, x.footprint.writes, x.guard is not None) for x in code] for code in lines],
        graph,
        set(entry.registers),
    )
    defined = {name: translator.slot(DefinedSlot(n)) for n, name in enumerate(sorted(maybe))}
    for n, (code, block) in enumerate(zip(codes, graph.blocks, strict=True)):
        code.rank = graph.ranks[n]
        if block.items:
            code.meets, members = flow.together(block.items[0])
            if members is not None:
                code.members = Build(translator, block.items[0], ()).read(members, "b32")
        code.end = _end(translator, block.end, n, defined)
        for x in lines[n]:
            run = x.run.run if isinstance(x.run, May) else x.run
            run = hazards.watch_wgmma(run, x.instruction, x.footprint, translator)
            run = hazards.watch_unwritten(run, x.footprint, defined)
            if isinstance(x.run, May):
                if x.guard is not None:
                    raise UnknownInstruction(
                        f"{x.instruction.opcode} under a predicate is not modelled",
                        line=x.instruction.line,
                        text=x.instruction.text,
                    )
                code.end = Suspend(run, n + 1)
            elif x.guard is not None:
                code.ops.append(_guarded(run, x.guard, x.instruction.guard_negated))
            else:
                code.ops.append(run)
            code.instructions.append(x.instruction)
        if block.end_instruction is not None:
            code.instructions.append(block.end_instruction)
    return Program(
        entry=entry,
        blocks=codes,
        specs=translator.specs,
        counts=translator.counts,
        defined=len(defined),
        local_bytes=sum(-(-v.size // 16) * 16 for v in entry.variables if v.space == "local"),
        granule=translator.granule,
        wgmma_registers=len(translator.wgmma),
    )


def _line(translator: Translator, item: Instruction | Probe) -> _Line:
    if isinstance(item, Probe):
        return _probe(translator, item)
    builder, used = find_builder(item)
    if builder is None:
        raise UnknownInstruction(f"opcode {item.opcode!r} is not modelled", line=item.line, text=item.text)
    build = Build(translator, item, item.parts[used:])
    run = builder(build)
    guard = build.guard() if item.guard is not None else None
    for name in build.footprint.writes:
        if build.instruction.parts[0] != "setp":
            translator.constants.pop(name, None)
    return _Line(item, run, build.footprint, guard)


def _probe(translator: Translator, probe: Probe) -> _Line:
    item = Instruction(probe.line, f"// probe: {probe.name}", ("probe",), probe.operands)
    build = Build(translator, item, ())
    slots = [build.read(operand, "s32") for operand in probe.operands]

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        lanes = np.ones((group.n, 32), bool) if m is True else m
        for row in np.flatnonzero(lanes.any(1)):
            lane = int(lanes[row].argmax())
            values = tuple(int(np.broadcast_to(V[s], lanes.shape)[row, lane]) for s in slots)
            group.block.launch.report.probes.append((probe.name, group.block.number, group.a + int(row), values))

    return _Line(item, run, build.footprint, None)


def _end(translator: Translator, end: flow.RawEnd, n: int, defined: dict[str, int]) -> End:
    if end.kind == "leave":
        return Leave()
    if end.kind == "jump":
        return Jump(end.target)
    if end.kind == "fork":
        width, index = translator.place(end.predicate)
        if width != 1:
            raise UnknownInstruction(f"a branch on {end.predicate.name}, which is no predicate, is not modelled")
        slot = translator.slot(RegisterSlot(1, index, np.dtype(np.bool_)))
        return Fork(slot, end.negated, end.target, end.other, defined.get(end.predicate.name))
    return Jump(n + 1)


def attach(error: Trap, code: Code, at: int, where: str) -> None:
    """Tell a trap which instruction of a block raised it."""
    i = code.instructions[min(at, len(code.instructions) - 1)]
    error.locate(where, i.line, i.text)
