"""Conditions of a mask that are judged in turn: one at a time, over a tile that lies in shared memory.

Where consumers have all registers but a few, the warp that judges tiles cannot keep several conditions at once.  What a
condition may be is two bits, and all else is read anew for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.analysis.conditions import conditions
from flashgen.codegen.device import identifiers

if TYPE_CHECKING:
    from flashgen.analysis.cells import Cells
    from flashgen.analysis.facts import Facts
    from flashgen.codegen.printer import RangePrinter
    from flashgen.lang.expr import Node
    from flashgen.planning.plan import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The bodies of a function that says of each condition what it may be, by its number.

    `grouped`: it is told a group of values.  `parts` are how many a tile has at most, and `part` the statements that
    give the positions of one by its number; 0 and none where a tile has no parts.
    """

    bodies: tuple[tuple[str, ...], ...]
    grouped: bool
    parts: int
    part: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many conditions there are."""
        return len(self.bodies)

    @property
    def group(self) -> tuple[str, str]:
        """The parameter and the argument beside the others."""
        return ("Group group, ", "group, ") if self.grouped else ("", "")

    def positions(self, used: frozenset[str]) -> list[str]:
        """Declarations of what is used of a tile's positions, and of what its conditions may be."""
        found = [f"const u32 found = conditions(at, {self.group[1]}p);"] if "found" in used else []
        return [*_positions(used), *found]


def truths(facts: Facts) -> dict[Node, str]:
    """How each condition is read where all have been judged."""
    return {n: f"truth_in(found, {i})" for i, n in enumerate(conditions(facts))}


def turns(facts: Facts, printer: RangePrinter, cut: Cells | None, tile: Tile) -> Turns:
    """The code for the conditions of a mask; `cut` are the cells of a tile's parts."""
    bodies = []
    for n in conditions(facts):
        body = printer.body(n)
        lines = (*body.lines, f"return {body.value};")
        bodies.append((*_positions(identifiers("\n".join(lines))), *lines))
    grouped = any("group" in identifiers("\n".join(body)) for body in bodies)
    parts, part = (0, ()) if cut is None else _parts(cut, tile)
    return Turns(bodies=tuple(bodies), grouped=grouped, parts=parts, part=part)


def _parts(cut: Cells, tile: Tile) -> tuple[int, tuple[str, ...]]:
    """How many parts a tile has at most, and the statements that give the positions of one; some may be empty."""
    count, lines, empty = 1, [], []
    for at, cell, positions in (("k", cut.k, tile.kv), ("q", cut.q, tile.q)):
        if cell is None:
            continue
        along = positions // cell if positions % cell == 0 else (positions - 2) // cell + 2
        number = "at.part" if count == 1 else f"at.part / {count}"
        if at == "k" and cut.q is not None and along > 1:
            number = f"at.part % {along}"
        lines.append(f"const int {at} = (at.tile_{at}_first / {cell} + {number}) * {cell};")
        lines.append(f"at.{at}_first = max(at.tile_{at}_first, {at});")
        lines.append(f"at.{at}_last = min(at.tile_{at}_last, {at} + {cell - 1});")
        empty.append(f"at.{at}_first > at.{at}_last")
        count *= along
    return count, (*lines, f"if ({' || '.join(empty)}) continue;")


def _positions(used: frozenset[str]) -> list[str]:
    """Declarations of what is used of a tile's positions, and of ranges of them."""
    lines = [f"const int {name} = at.{name};" for name in "bh" if name in used]
    return [*lines, *(f"const Range<int> {x} = {{at.{x}_first, at.{x}_last}};" for x in "qk" if x in used)]
