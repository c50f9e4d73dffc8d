"""What the templates of pipeline hopper's forward write of q - k as a float."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DistanceCode:
    """Fragments of CUDA where a score function is `given` the distance.

    One is converted for a thread and a tile, and the others are that and a constant: exact up to 2^24.  For each score
    an integer would be added and converted, at half of the rate.  On an H200 `alibi` took 0.93 to 0.98 of the time.
    Rows of packed heads (`packed`) are no constants apart.
    """

    given: bool
    packed: bool

    @property
    def first(self) -> str:
        """Before the scores of a tile."""
        if not self.given or self.packed:
            return ""
        return "    const float first = float(query(work, 0) - key(tile, 0));  // q - k\n"

    @property
    def element(self) -> str:
        """What the score function is given for element i of S."""
        if not self.given:
            return ""
        if self.packed:
            return "float(query(work, i) - key(tile, i)), "
        return "first + float(i / 2 % 2 * 8 - i / 4 * 8 - i % 2), "
