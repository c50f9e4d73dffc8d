"""The parts of a tile that a mask's cells cut it into, as loops of the function that judges it."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.cells import Cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that a tile is judged by: where the mask may jump, for a person, the loops over them, and the rows, and
    first and last key, of one."""

    where: str
    loops: tuple[str, ...]
    rows: str
    keys: str

    @property
    def margin(self) -> str:
        """Of what stands inside the loops."""
        return "  " * (len(self.loops) - 1)


def parts_of(cut: Cells) -> Parts:
    """The parts that the cells of a mask cut tiles into."""

    def last(at: str, cell: int, end: str) -> str:
        return f"min({at} / {cell} * {cell} + {cell - 1}, {end})"

    def loop(at: str, cell: int, first: str, end: str) -> str:
        return f"for (int {at} = {first}; {at} <= {end}; {at} = ({at} / {cell} + 1) * {cell})"

    where, loops, rows, keys = [], [], "rows", "k_first, k_last"
    if cut.q is not None:
        where.append(f"{cut.q} queries")
        loops.append(loop("q", cut.q, "rows.q_first", "rows.q_last"))
        rows = f"{{rows.b, rows.h, q, {last('q', cut.q, 'rows.q_last')}}}"
    if cut.k is not None:
        where.append(f"{cut.k} keys")
        loops.append(loop("k", cut.k, "k_first", "k_last"))
        keys = f"k, {last('k', cut.k, 'k_last')}"
    return Parts(where=" and of ".join(where), loops=tuple(loops), rows=rows, keys=keys)
