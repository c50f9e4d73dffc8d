"""How the masks of pipeline hopper's forward are applied to the elements of a tile."""

from __future__ import annotations

from flashgen.planning.members import (
    Mask,
    MaskAsBits,
    MaskByElement,
    MaskByLookups,
    MaskByTile,
    MaskByWarpgroup,
    MaskFromBits,
    MaskInWords,
    MaskWithinBounds,
)
from flashgen.planning.pipelines.hopper.candidate import ROWS, Candidate
from flashgen.planning.plan import Tile
from flashgen.planning.request import KernelRequest
from flashgen.planning.summaries import keeps_bits

#: Ops of a mask from which on it is asked for a few elements at a time: those with fewer do not spill.  What an element
#: that is read for each key costs beyond one, and where query and key select it: a tree of drafts behind a cache, at
#: head_dim 128, spilled 24 bytes with 13.
BITS_OPS, READ_OPS, PAIR_READ_OPS = 14, 2, 1

#: Bytes that a mask may look up of a query and a key: they lie in registers under a product.
LOOKUP_BYTES = 16


def form(c: Candidate, request: KernelRequest) -> Mask:
    """How elements are masked: by many ops a few at a time, a bit each."""
    asked = request.profile
    if _uniform(c, request):
        return MaskByTile()
    if asked.uniform(Tile(q=request.layout.starts(ROWS), kv=c.tile.kv)):
        return MaskByWarpgroup()
    if not request.layout.own and keeps_bits(asked.facts, c.tile, "k"):
        return MaskFromBits()
    own_and_lighter = request.layout.own and lighter(c, request)
    if asked.judged and asked.word_lookups and not own_and_lighter:
        return MaskInWords()
    ops = asked.mask_ops + READ_OPS * asked.mask_reads_by_key + PAIR_READ_OPS * asked.mask_reads_pairs
    if asked.judged and (ops >= BITS_OPS or own_and_lighter):
        return MaskAsBits()
    # By elements of 16 bytes or less, as many as registers hold.
    item = sum(n.dtype.itemsize for n in asked.lookups)
    if 0 < item <= LOOKUP_BYTES and asked.judged:
        return MaskByLookups()
    # Of `dilated` at head_dim 128 an element takes 1 instruction for 2.5 so.
    return MaskWithinBounds() if not request.layout.own and asked.bounded(c.tile) else MaskByElement()


def lighter(c: Candidate, request: KernelRequest) -> bool:
    """Whether a mask takes fewer registers where sequences start at tiles: it is the same there, or read from bits."""
    asked = request.profile
    return asked.uniform(Tile(q=ROWS, kv=c.tile.kv)) or keeps_bits(asked.facts, c.tile, "k")


def cuts(c: Candidate, request: KernelRequest) -> bool:
    """Whether tiles are judged by their parts."""
    return request.profile.cuts(Tile(q=request.layout.starts(c.tile.q), kv=c.tile.kv))


def _uniform(c: Candidate, request: KernelRequest) -> bool:
    """Whether the mask is the same all over a tile."""
    return request.profile.uniform(Tile(q=request.layout.starts(c.tile.q), kv=c.tile.kv))
