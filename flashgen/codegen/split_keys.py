"""What kernel templates write where keys are split among blocks, and where a block visits all."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.members import Keys


@dataclass(frozen=True, slots=True)
class KeyCode:
    """Fragments of CUDA by the keys that a block visits: where they are `split`, part i of `p.splits` visits tile i of
    those that its queries see, from the last to the first, and every `p.splits`-th behind it."""

    keys: Keys

    @property
    def split(self) -> bool:
        return self.keys.split

    @property
    def times(self) -> str:
        """What stands behind a number of tiles of queries, to make it one of tiles to work on."""
        return " * p.splits" if self.split else ""

    # -- pipeline ampere

    def walk(self, visited: str) -> str:
        """Which template has `next_step`: past the tiles of others a warp looks at 32 at once."""
        return "classified" if self.split and visited == "runs" else visited

    @property
    def declared(self) -> str:
        """The parameter of `next_step` behind `tile`: tiles that others visit before."""
        return ", int others" if self.split else ""

    @property
    def others(self) -> str:
        """Its argument."""
        return ", p.splits - 1" if self.split else ""

    @property
    def others_first(self) -> str:
        """And before the first tile."""
        return ", rows.part" if self.split else ""

    # -- pipeline hopper

    def behind(self, work: str) -> str:
        """What is subtracted from the last tile of keys to get the first that is visited."""
        return f" - {work}.part" if self.split else ""

    @property
    def step(self) -> str:
        """Tiles from one that is visited to the next."""
        return "p.splits" if self.split else "1"

    @property
    def on(self) -> str:
        """How a loop over tiles of keys goes on."""
        return "tile -= p.splits" if self.split else "tile--"

    @property
    def and_part(self) -> str:
        """What stands behind `visible` in a `Work`."""
        return ", part" if self.split else ""
