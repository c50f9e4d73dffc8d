"""A candidate of pipeline hopper's forward: a tile in rows of warpgroups, and its stages."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.plan import Tile

#: Query rows of a warpgroup (wgmma's m), and the depth of one wgmma, to which head dims and tile_kv are padded.
ROWS, DEPTH = 64, 16

#: Columns of a box that TMA copies: 128 bytes, the widest swizzle.  A narrower row is padded with zeros.
BOX = 64

#: Consumer warpgroups that share an SM; and one alone, for problems that are short of blocks.
WARPGROUPS, ALONE = (2, 3), 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tile and stages to be judged; `q_stages` tiles of queries in shared memory."""

    tile: Tile
    stages: int
    q_stages: int

    @property
    def warpgroups(self) -> int:
        return self.tile.q // ROWS

    @property
    def warps(self) -> int:
        return 4 * (1 + self.warpgroups)

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps"


def padded(head_dim: int) -> int:
    """Columns of a product: head_dim rounded up to the depth of one wgmma."""
    return -(-head_dim // DEPTH) * DEPTH


def boxed(head_dim: int) -> int:
    """Columns in shared memory: head_dim rounded up to whole boxes."""
    return -(-head_dim // BOX) * BOX
