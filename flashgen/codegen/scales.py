"""What kernel templates write of what scores are multiplied by: in 8 bits descales are a part of it."""

from __future__ import annotations

from dataclasses import dataclass

_POWERS = "in the exponent: scores are powers of two"


@dataclass(frozen=True, slots=True)
class ScaleCode:
    """Fragments of CUDA of a forward on pipeline hopper.

    Of 8 bits (`eight`) the scale follows the tile; it is one for each of a thread's rows where these are of several
    heads (`packed`).  Where there is a score function (`scored`) it stands before that, else in the exponent; where
    that is a soft cap, both have a factor, and the cap is in them.  A score may come as a power of two already, of
    products times log2(e) (`in_powers`).
    """

    eight: bool
    packed: bool
    scored: bool
    cap: str | None = None
    in_powers: bool = False

    @property
    def _of_rows(self) -> str:
        """The dimension of what each row has of its own."""
        return "[2]" if self.packed else ""

    @property
    def declared(self) -> str:
        """The members of a consumer."""
        if self.cap is not None:
            why = "of tanh in the exponent, and of a product in its argument, of which 2 is large"
            to_argument = f"2.f / SMALL_TANH * p.scale * rcp({self.cap})"
            return f"const float scale = {self.cap} * LOG2E, to_argument = {to_argument};  // {why}"
        if not self.eight:
            why = "scale 0 times a masked -inf stays -inf"
            of_products = f"fmaxf(p.scale * LOG2E, SMALLEST);  // {why}"
            return f"const float scale = {f'1.f;  // {_POWERS}' if self.scored else of_products}"
        start = "{}" if self.packed else "0.f"
        of_q = "float q_descale[2] = {};  // of the rows of the tile in hand\n  " if self.packed else ""
        if self.scored:
            declared = f"float tile_scale{self._of_rows} = {start};  // of S of the tile in hand"
            return f"{of_q}{declared}\n  const float scale = 1.f;  // {_POWERS}"
        return f"{of_q}float scale{self._of_rows} = {start};  // of S of the tile in hand, in the exponent"

    @property
    def found(self) -> str:
        """What `descale` makes of the scale, of row r where rows have their own."""
        r = "[r]" if self.packed else ""
        if self.scored:
            return f"tile_scale{r} = p.scale * descale;"
        why = "scale 0 times a masked -inf stays -inf"
        return f"scale{r} = fmaxf(p.scale * descale * LOG2E, SMALLEST);  // {why}"

    @property
    def begin(self) -> str:
        """Before the first tile of a schedule."""
        if not self.eight:
            return ""
        return "    find_q_descales(work_at(at));\n" * self.packed + "    find_scale();\n"

    @property
    def send(self) -> str:
        """What the loader tells consumers of the rows of q that it copies."""
        if not self.eight or self.packed:
            return ""
        # Not `first`, which counts the rows of the sequences before, too.
        return "shared.q_descale[q_ring.stage()][w] = q_descale(work, work.q_tile * TILE_Q + w * 64);\n      "

    @property
    def element(self) -> str:
        """Of element i of S before the score function."""
        if not self.eight:
            return "p.scale * LOG2E" if self.in_powers else "p.scale"
        return "tile_scale[i / 2 % 2]" if self.packed else "tile_scale"

    @property
    def to_power(self) -> str:
        """The function that makes a power of two of what the score function gives."""
        return "rounded" if self.in_powers else "to_power_of_two"

    @property
    def row(self) -> str:
        """Of row r in the exponent, of 8 bits."""
        return "scale[r]" if self.packed and not self.scored else "scale"

    @property
    def each(self) -> str:
        """What ends the names of functions that take one for each row."""
        return "_each" if self.packed and not self.scored else ""
