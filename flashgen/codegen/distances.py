"""What the templates of pipeline hopper's forward write of the distance of query and key as a float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.codegen.printer import DISTANCES

#: The positions of an element of S, and how far they are from those of element 0.
_POSITIONS = {"q": "query(work, {i})", "k": "key(tile, {i})"}
_OFFSETS = {"q": "i / 2 % 2 * 8", "k": "(i / 4 * 8 + i % 2)"}

_ORDERS = {name: order for order, name in DISTANCES.items()}


@dataclass(frozen=True, slots=True)
class DistanceCode:
    """Fragments of CUDA where a score function is given distances, by their `names` (those of DISTANCES).

    One is converted for a thread and a tile, and the others are that and a constant: exact, as positions stay below
    2^24.  For each score an integer would be added and converted, at half of the rate.  On an H200 `alibi` took 0.93 to
    0.98 of the time.  Rows of packed heads (`packed`) are no constants apart.
    """

    names: tuple[str, ...]
    packed: bool

    @property
    def first(self) -> str:
        """Before the scores of a tile: those of its first element."""
        lines = (f"    const float {name} = {_difference(name, _POSITIONS, 0)};\n" for name in self.names)
        return "" if self.packed else "".join(lines)

    @property
    def element(self) -> str:
        """What the score function is given for element i of S."""
        return "".join(f"{self._of_element(name)}, " for name in self.names)

    def _of_element(self, name: str) -> str:
        return _difference(name, _POSITIONS, "i") if self.packed else f"{name} + {_difference(name, _OFFSETS)}"


def _difference(name: str, of: Mapping[str, str], i: int | str = "") -> str:
    """The difference that a name stands for, as a float, of what q and k have there."""
    minuend, subtrahend = (of[position].format(i=i) for position in _ORDERS[name])
    return f"float({minuend} - {subtrahend})"
