"""Machine code read back: the instructions of a cubin with their live registers, and what a kernel must keep to.

`check` is what CI asks of every kept kernel: no spill, no stack, no local memory, the instructions that its pipeline
promises, registers within what its launch leaves, and on Hopper within what each warp asked for with setmaxnreg.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import CompileError

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.nvrtc import Compiled

#: What installs the disassembler.
WHEEL = "pip install 'nvidia-cuda-nvdisasm>=13.2,<14'"

#: Opcodes that a pipeline's kernels are made of, by (pipeline, pass).
PROMISED: dict[tuple[str, str], tuple[str, ...]] = {
    ("ampere", "forward"): ("HMMA", "LDGSTS", "LDSM"),
    ("ampere", "backward"): ("HMMA", "LDGSTS", "LDSM"),
    ("hopper", "forward"): ("HGMMA", "UTMALDG", "USETMAXREG"),
    ("hopper", "backward"): ("HGMMA", "UTMALDG", "USETMAXREG"),
}

#: Those of 8-bit forwards, which turn V over.
PROMISED_8_BITS = ("QGMMA", "UTMALDG", "USETMAXREG", "LDSM", "STSM")

#: How far the planner's sum of registers may be from what ptxas uses.
ESTIMATE = 0.12

#: Registers of an SM's partition, which a block's warps share in steps of 8 per thread.
_PARTITION = 16384
_MOST = 255

_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<text>(?P<opcode>[A-Z]\w*).*?)\s*;"
)
_LABEL = re.compile(r"^(?P<label>\.L_x_\d+):")
_KERNEL = re.compile(r"^\.text\.(?P<name>\w+):")
_TARGET = re.compile(r"`\((?P<label>\.L_x_\d+)\)")
_SETMAXREG = re.compile(r"USETMAXREG\.(?P<kind>TRY_ALLOC|DEALLOC)\S*\s+(?:\w+,\s*)?(?P<count>0x[0-9a-f]+|\d+)")
_ENDS = ("EXIT", "BRA", "RET", "BPT.TRAP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: `live` are the registers that hold a value there, those it reads and writes among them."""

    address: int
    text: str
    opcode: str
    guarded: bool
    target: str | None
    live: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A kernel's machine code; `labels` are the places in `instructions` that branches go to."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def count(self, opcode: str) -> int:
        """Instructions of an opcode, whatever their modifiers."""
        return sum(i.opcode == opcode for i in self.instructions)

    def reached(self, start: int) -> set[int]:
        """Places that execution may reach from place `start`."""
        seen: set[int] = set()
        pending = [start]
        while pending:
            at = pending.pop()
            if at in seen or at >= len(self.instructions):
                continue
            seen.add(at)
            i = self.instructions[at]
            if i.target is not None and i.target in self.labels:
                pending.append(self.labels[i.target])
            if i.guarded or not i.text.startswith(_ENDS):
                pending.append(at + 1)
        return seen

    def registers_from(self, start: int) -> int:
        """One more than the highest register in use anywhere that execution reaches from place `start`."""
        return max((r + 1 for at in self.reached(start) for r in self.instructions[at].live), default=0)


def nvdisasm() -> str:
    """Path of the disassembler: of the NVIDIA wheel, else on PATH.  Raises CompileError with what installs it."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("nvdisasm")
    except ImportError:
        found = None
    found = found or shutil.which("nvdisasm")
    if found is None:
        raise CompileError(f"no nvdisasm to read machine code with\n  nearest: {WHEEL}")
    return found


def disassemble(cubin: bytes) -> dict[str, Code]:
    """The kernels of a cubin by name.  Raises CompileError where nvdisasm is missing or refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        ran = subprocess.run([nvdisasm(), "-c", "-plr", str(path)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CompileError(f"nvdisasm cannot read the cubin: {ran.stderr.strip()}", log=ran.stderr)
    return parse(ran.stdout)


def parse(listing: str) -> dict[str, Code]:
    """The output of `nvdisasm -c -plr`: code on the left, a column a live register on the right."""
    kernels: dict[str, Code] = {}
    name, columns = "", {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        code, _, ranges = line.partition("// |")
        if re.search(r"#\s+0\s", ranges):
            columns = _columns(ranges)
        if match := _KERNEL.match(code):
            name, instructions, labels = match["name"], [], {}
            kernels[name] = Code(name=name, instructions=(), labels=labels)
        elif match := _LABEL.match(code):
            labels[match["label"]] = len(instructions)
        elif name and (match := _LINE.match(code)):
            target = _TARGET.search(match["text"])
            live = frozenset(
                columns[at] for at, mark in enumerate(_general(ranges)) if mark in "^v:x" and at in columns
            )
            instructions.append(
                Instruction(
                    address=int(match["address"], 16),
                    text=match["text"],
                    opcode=match["opcode"],
                    guarded=match["guard"] is not None,
                    target=target["label"] if target else None,
                    live=live,
                )
            )
            kernels[name] = Code(name=name, instructions=tuple(instructions), labels=labels)
    return kernels


def _general(ranges: str) -> str:
    """The part of a line about general registers (predicates and uniform registers follow after a bar)."""
    return ranges.partition("|")[0]


def _columns(header: str) -> dict[int, int]:
    """Character position -> register, from the line that numbers the columns."""
    general = _general(header)
    return {at: int(match[0]) for match in re.finditer(r"\d+", general) for at in range(match.start(), match.end())}


def check(plan: KernelPlan, compiled: Compiled) -> tuple[str, ...]:
    """What a compiled plan breaks; empty: nothing."""
    resources, reasons = compiled.resources, []
    if resources.spills or resources.stack_bytes:
        reasons.append(f"{resources.spills} bytes of spills and {resources.stack_bytes} of stack")
    reasons += [f"ptxas: {line.strip()}" for line in compiled.performance_losses]
    codes = disassemble(compiled.cubin)
    local = sum(code.count("LDL") + code.count("STL") for code in codes.values())
    if local:
        reasons.append(f"{local} accesses to local memory")
    main = codes.get(f"attention_{plan.pass_name}")
    if main is None:
        return (*reasons, f"no kernel attention_{plan.pass_name}, but {', '.join(codes) or 'none'}")
    in_8_bits = plan.float8 is not None and plan.pipeline == "hopper"  # `ampere` widens them
    promised = PROMISED_8_BITS if in_8_bits else PROMISED[plan.pipeline, plan.pass_name]
    # Where one warpgroup consumes alone no registers change hands.
    unneeded = () if plan.program.specialised else ("USETMAXREG",)
    missing = [opcode for opcode in promised if not main.count(opcode) and opcode not in unneeded]
    if missing:
        reasons.append(f"no {', '.join(missing)} in {main.name}")
    if plan.program.specialised:
        reasons += _within_roles(plan, main)
    else:
        reasons += _within_launch(plan, resources.registers)
    return tuple(reasons)


def budget(threads: int, blocks: int) -> int:
    """Registers a thread may have where `blocks` of so many threads share an SM."""
    warps = -(-blocks * -(-threads // 32) // 4)
    return min(_MOST, _PARTITION // (32 * warps) // 8 * 8)


def _within_launch(plan: KernelPlan, used: int) -> list[str]:
    reasons, limit = [], budget(plan.threads, plan.blocks_per_sm)
    if used > limit:
        reasons.append(f"{used} registers: {plan.blocks_per_sm} blocks of {plan.threads} threads leave {limit}")
    off = abs(plan.registers_estimate / used - 1)
    if off > ESTIMATE:
        reasons.append(f"{used} registers where the plan estimates {plan.registers_estimate}: {off:.0%} off")
    return reasons


def _within_roles(plan: KernelPlan, code: Code) -> list[str]:
    """Each warp's registers after its setmaxnreg, over all it may execute from there on."""
    reasons, seen = [], {"TRY_ALLOC": 0, "DEALLOC": 0}
    wanted = {"TRY_ALLOC": plan.program.consumer_registers, "DEALLOC": plan.program.producer_registers}
    for at, i in enumerate(code.instructions):
        if match := _SETMAXREG.match(i.text):
            kind, count = match["kind"], int(match["count"], 0)
            seen[kind] += 1
            used = code.registers_from(at)
            if count != wanted[kind]:
                reasons.append(f"setmaxnreg {count} where the plan has {wanted[kind]}")
            if used > count:
                reasons.append(f"{used} registers in use after setmaxnreg {count} at {i.address:#x}")
    if 0 in seen.values():
        reasons.append(f"setmaxnreg is missing: {seen['DEALLOC']} dec, {seen['TRY_ALLOC']} inc")
    return reasons
