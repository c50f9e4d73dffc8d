"""One instruction under translation: what an op builder may ask, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.errors import UnknownInstruction
from flashgen.interpreter.parser import Entry, Imm, Instruction, Mem, Reg, Sym, Vec
from flashgen.interpreter.registers import (
    BANK_DTYPES,
    ConstantSlot,
    Mask,
    RegisterSlot,
    Slots,
    SlotSpec,
    SpecialSlot,
    is_special,
)

#: Executes one instruction for a group: slots of its registers, and the lanes that take part.
Closure = Callable[[Slots, Mask], None]


class May:
    """What a builder returns for an instruction after which its warps may have to wait."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[[Slots, Mask], Any]) -> None:
        self.run = run


@dataclass(slots=True)
class Footprint:
    """Registers that one instruction reads and writes.

    `exchanged` is the register that lanes read from each other, and the function that says from which lane each does.
    """

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    exchanged: tuple[str, Callable[[Slots], np.ndarray]] | None = None

    @property
    def used(self) -> set[str]:
        """Registers of which any lane is read."""
        return self.reads | ({self.exchanged[0]} if self.exchanged else set())


class Translator:
    """Owns the slots of one kernel."""

    def __init__(self, entry: Entry, symbols: dict[str, tuple[str, int]]) -> None:
        self.entry = entry
        self.symbols = symbols
        self.specs: list[SlotSpec] = []
        self.known: dict[SlotSpec, int] = {}
        self.registers: dict[str, tuple[int, int]] = {}
        self.counts = dict.fromkeys(BANK_DTYPES, 0)
        self.granule = 16
        self.wgmma: dict[str, int] = {}  # registers that wgmma touches -> their index in a block's in-flight table
        self.constants: dict[str, bool] = {}  # predicates set from constants in inline assembly, until set again

    def slot(self, spec: SlotSpec) -> int:
        known = self.known.get(spec)
        if known is None:
            self.specs.append(spec)
            known = self.known[spec] = len(self.specs)  # slot 0 is the group
        return known

    def place(self, reg: Reg) -> tuple[int, int]:
        """(bank, index) of a register."""
        if reg.name not in self.registers:
            width = 1 if reg.type == "pred" else 8 * types.size(reg.type)
            width = max(width, 16) if width > 1 else 1
            self.registers[reg.name] = (width, self.counts[width])
            self.counts[width] += 1
        return self.registers[reg.name]

    def constant(self, value: np.generic) -> int:
        # A ConstantSlot hashes by value, and 1.0 == 1: keep dtypes apart by their bits.
        key = ConstantSlot(_Exact(value))
        if key not in self.known:
            self.specs.append(ConstantSlot(value))
            self.known[key] = len(self.specs)
        return self.known[key]


class _Exact:
    """A constant compared by dtype and bits."""

    __slots__ = ("key",)

    def __init__(self, value: np.generic) -> None:
        self.key = (value.dtype, value.tobytes())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Exact) and self.key == other.key


class Build:
    """One instruction under translation: builders take its modifiers and ask for slots of its operands."""

    def __init__(self, translator: Translator, instruction: Instruction, mods: tuple[str, ...]) -> None:
        self.translator = translator
        self.instruction = instruction
        self.operands = instruction.operands
        self.mods = list(mods)
        self.footprint = Footprint()

    # ------------------------------------------------------------ modifiers
    def unknown(self, what: str) -> UnknownInstruction:
        i = self.instruction
        return UnknownInstruction(f"{i.opcode}: {what} is not modelled", line=i.line, text=i.text)

    def take(self, *options: str) -> str:
        """Remove and return the first of `options` among the modifiers; "" where none is there."""
        for option in options:
            if option in self.mods:
                self.mods.remove(option)
                return option
        return ""

    def drop(self, *options: str) -> None:
        """Remove modifiers that change nothing here."""
        self.mods = [mod for mod in self.mods if mod not in options]

    def type(self) -> str:
        """Remove and return the last modifier, which must be a type."""
        if not self.mods or self.mods[-1] not in types.DTYPES:
            raise self.unknown(f"the type {self.mods[-1] if self.mods else '(none)'!r}")
        return self.mods.pop()

    def done(self, operands: int | tuple[int, ...] = ()) -> None:
        """Every modifier was understood, and the number of operands is one of these."""
        if self.mods:
            raise self.unknown(f"modifier {'.'.join(self.mods)!r}")
        allowed = (operands,) if isinstance(operands, int) else operands
        if allowed and len(self.operands) not in allowed:
            raise self.unknown(f"a form with {len(self.operands)} operands")

    # ------------------------------------------------------------ operands
    def read(self, operand: Any, kind: str) -> int:
        """The slot of a source operand seen as PTX type `kind`."""
        t, dtype = self.translator, types.DTYPES[kind]
        if isinstance(operand, Imm):
            return t.constant(types.constant(operand.value, operand.kind, dtype))
        if isinstance(operand, Sym):
            if operand.name not in t.symbols:
                raise self.unknown(f"the symbol {operand.name}")
            return t.constant(dtype.type(t.symbols[operand.name][1] + operand.offset))
        if not isinstance(operand, Reg):
            raise self.unknown(f"the operand {operand}")
        if not operand.type:
            if not is_special(operand.name) or dtype.itemsize != 4:
                raise self.unknown(f"special register {operand.name} as {kind}")
            return t.slot(SpecialSlot(operand.name))
        self.footprint.reads.add(operand.name)
        return self._register(operand, dtype)

    def write(self, operand: Any, kind: str) -> int:
        """The slot of a destination register; its width must be that of `kind`."""
        if not isinstance(operand, Reg) or not operand.type:
            raise self.unknown(f"the destination {operand}")
        self.footprint.writes.add(operand.name)
        return self._register(operand, types.DTYPES[kind], exact=True)

    def _register(self, reg: Reg, dtype: np.dtype, exact: bool = False) -> int:
        width, index = self.translator.place(reg)
        wanted = 1 if dtype == np.bool_ else 8 * dtype.itemsize
        if (width == 1) != (wanted == 1) or width < wanted or (exact and width != wanted):
            raise self.unknown(f"register {reg.name} (.{reg.type}) as {dtype}")
        return self.translator.slot(RegisterSlot(width, index, dtype))

    def wide_write(self, operand: Any, signed: bool) -> tuple[int, np.dtype]:
        """A destination at the register's own width, for results that are extended to it."""
        if not isinstance(operand, Reg) or not operand.type:
            raise self.unknown(f"the destination {operand}")
        width, index = self.translator.place(operand)
        self.footprint.writes.add(operand.name)
        dtype = np.dtype(f"{'i' if signed else 'u'}{width // 8}")
        return self.translator.slot(RegisterSlot(width, index, dtype)), dtype

    def words(self, operand: Any, *, write: bool = False) -> np.ndarray:
        """Indices in the 32-bit bank of a braced list of registers."""
        items = operand.items if isinstance(operand, Vec) else (operand,)
        out = []
        for item in items:
            if not isinstance(item, Reg) or not item.type or self.translator.place(item)[0] != 32:
                raise self.unknown(f"the operand {item} in a list of 32-bit registers")
            (self.footprint.writes if write else self.footprint.reads).add(item.name)
            out.append(self.translator.place(item)[1])
        return np.array(out)

    def address(self, operand: Any, default: str = "u64") -> tuple[int, int]:
        """(slot, offset) of a bracketed address; 32-bit registers are read unsigned."""
        if not isinstance(operand, Mem):
            raise self.unknown(f"the address {operand}")
        if isinstance(operand.base, Reg):
            kind = "u32" if self.translator.place(operand.base)[0] == 32 else "u64"
            return self.read(operand.base, kind), operand.offset
        return self.read(operand.base, default), operand.offset

    def immediate(self, operand: Any) -> int:
        if not isinstance(operand, Imm):
            raise self.unknown(f"an operand that is no immediate ({operand})")
        return operand.value

    def guard(self) -> int:
        reg = self.instruction.guard
        self.footprint.reads.add(reg.name)
        return self._register(reg, types.DTYPES["pred"])
