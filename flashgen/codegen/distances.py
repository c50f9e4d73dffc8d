"""What the templates of pipeline hopper's forward write of the distance of query and key as a float."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DistanceCode:
    """Fragments of CUDA where a score function is given distances, by their `names` (`DISTANCES` of the printer).

    One is converted for a thread and a tile, and the others are that and a constant: exact, as positions stay below
    2^24.  For each score an integer would be added and converted, at half of the rate.  On an H200 `alibi` took 0.93 to
    0.98 of the time.  Rows of packed heads (`packed`) are no constants apart.
    """

    names: tuple[str, ...]
    packed: bool

    @property
    def first(self) -> str:
        """Before the scores of a tile: those of its first element."""
        lines = (f"    const float {name} = float({_difference(name, '0')});\n" for name in self.names)
        return "" if self.packed else "".join(lines)

    @property
    def element(self) -> str:
        """What the score function is given for element i of S."""
        return "".join(f"{self._of_element(name)}, " for name in self.names)

    def _of_element(self, name: str) -> str:
        if self.packed:
            return f"float({_difference(name, 'i')})"
        query, key = "i / 2 % 2 * 8", "i / 4 * 8 + i % 2"
        return f"{name} + float({query} - ({key}))" if _by_query(name) else f"{name} + float({key} - {query})"


def _by_query(name: str) -> bool:
    """Whether a distance grows with the query."""
    return name.startswith("q")


def _difference(name: str, i: str) -> str:
    """Of the positions of element i."""
    query, key = f"query(work, {i})", f"key(tile, {i})"
    return f"{query} - {key}" if _by_query(name) else f"{key} - {query}"
