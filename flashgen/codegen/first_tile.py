"""What the templates of pipeline hopper's forward write where a warpgroup may take the first keys of a tile alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoresCode:
    """Fragments of CUDA by whether S of a thread may be `of_first_keys` alone: functions then take any number of
    elements; and which queries a warpgroup's rows are of."""

    of_first_keys: bool
    packed: bool

    @property
    def template(self) -> str:
        """What stands before a function of S."""
        return "template <int N> " if self.of_first_keys else ""

    @property
    def s(self) -> str:
        """Its parameter."""
        return "float (&s)[N]" if self.of_first_keys else "S& s"

    @property
    def unnamed(self) -> str:
        """The same where it is not used."""
        return "float (&)[N]" if self.of_first_keys else "S&"

    @property
    def elements(self) -> str:
        """How many elements a thread has."""
        return "N" if self.of_first_keys else "TILE_KV / 2"

    @property
    def keys(self) -> str:
        """Of how many keys S is."""
        return "2 * N" if self.of_first_keys else "TILE_KV"

    @property
    def words(self) -> str:
        """Registers of P in 16 bits."""
        return "N / 2" if self.of_first_keys else "TILE_KV / 4"

    def queries(self, rows: str) -> str:
        """How many queries come before that of a row of a tile, as many rows behind its first."""
        return f"({rows} >> p.pack_log2)" if self.packed else rows
