"""What kernel templates write where keys are split among blocks, and where a block visits all."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.members import Keys, Leaves


@dataclass(frozen=True, slots=True)
class KeyCode:
    """Fragments of CUDA by the keys that a block visits: where they are `split` in `turns`, part i of `p.splits` visits
    tile i of those that its queries see, from the last to the first, and every `p.splits`-th behind it; where they are
    `leaves`, those of leaf i."""

    keys: Keys
    tile_kv: int

    @property
    def split(self) -> bool:
        return self.keys.split

    @property
    def turns(self) -> bool:
        return self.keys.turns

    @property
    def leaves(self) -> bool:
        return isinstance(self.keys, Leaves)

    @property
    def leaf_tiles(self) -> int:
        """Tiles of a leaf."""
        return self.keys.keys // self.tile_kv if isinstance(self.keys, Leaves) else 0

    # -- the kernel that combines parts

    @property
    def combined(self) -> str:
        """The template that adds them up."""
        return f"combine_{'leaves' if self.leaves else 'in_turns'}.cu.j2"

    # -- which tiles

    def first(self, work: str) -> str:
        """The first tile that may be visited."""
        return f"{work}.part * LEAF_TILES" if self.leaves else "0"

    def top(self, tiles: str, work: str) -> str:
        """One behind the last tile that may be visited, of so many."""
        return f"min({tiles}, ({work}.part + 1) * LEAF_TILES)" if self.leaves else tiles

    @property
    def apart(self) -> str:
        """Keys from the last that one part may see to the last of the next."""
        return "LEAF_TILES * TILE_KV" if self.leaves else "TILE_KV"

    @property
    def times(self) -> str:
        """What stands behind a number of tiles of queries, to make it one of tiles to work on."""
        return " * p.splits" if self.split else ""

    # -- pipeline ampere

    def walk(self, visited: str) -> str:
        """Which template has `next_step`: past the tiles of others a warp looks at 32 at once."""
        return "classified" if self.turns and visited == "runs" else visited

    @property
    def declared(self) -> str:
        """The parameter of `next_step` behind `tile`: tiles that others visit before, or the first of a leaf."""
        return ", int first" if self.leaves else ", int others" if self.split else ""

    @property
    def others(self) -> str:
        """Its argument."""
        return f", {self.first('rows')}" if self.leaves else ", p.splits - 1" if self.split else ""

    @property
    def others_first(self) -> str:
        """And before the first tile."""
        return self.others if self.leaves else ", rows.part" if self.split else ""

    @property
    def every_tile(self) -> str:
        """The tile behind `tile` where all are visited."""
        return "tile > first ? tile - 1 : -1" if self.leaves else f"tile - 1{' - others' if self.split else ''}"

    @property
    def lowest(self) -> str:
        """The last tile that `next_step` may find."""
        return "first" if self.leaves else "0"

    @property
    def in_reach(self) -> str:
        """What a lane that looks at the tile `lane` before asks beside."""
        alone = " && previous_tile(tile - lane, rows, p) == tile - lane"
        return " - first" if self.leaves else alone if self.split else ""

    # -- pipeline hopper

    def start(self, last: str, work: str) -> str:
        """The first tile that is visited, of the last tile of keys."""
        if self.leaves:
            return f"min({last}, {work}.part * LEAF_TILES + LEAF_TILES - 1)"
        return f"{last} - {work}.part" if self.split else last

    @property
    def step(self) -> str:
        """Tiles from one that is visited to the next."""
        return "p.splits" if self.turns else "1"

    @property
    def on(self) -> str:
        """How a loop over tiles of keys goes on."""
        return "tile -= p.splits" if self.turns else "tile--"

    @property
    def and_part(self) -> str:
        """What stands behind `visible` in a `Work`."""
        return ", part" if self.split else ""
