"""Masks as people bring them from other code: tiles beside those of a block mask, and the same in emitted CUDA."""

import numpy as np
import ported
import pytest
import variant_kernel
from test_codegen_variant_code import scheduled

from flashgen.analysis import counts, tiles
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import PARTIAL
from flashgen.planning.plan import Tile

#: Tiles of kernels, and one that no cell of these masks divides.
TILES = (Tile(q=128, kv=128), Tile(q=128, kv=64), Tile(q=192, kv=64), Tile(q=128, kv=96), Tile(q=64, kv=112))

#: Masks of which only data could tell more: flags, tables and positions whose order nothing promises.
BY_DATA = ("gist_flags", "global_flags", "key_padding", "restarts", "rotated")

#: What a tile of these costs nevertheless: (tiles visited, tiles masked) for each that a block mask has.
LOSSES = {"morton": (1.9, 2.1)}


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", ported.FILES)
def test_tiles_are_those_of_a_block_mask(name, tile):
    facts, case = analyse(ported.variant(name)), ported.case(name)
    judged, true = tiles.grid(facts, case, tile), tiles.true_grid(facts, case, tile)
    assert np.all((judged == true) | (judged == PARTIAL)), "not sound"
    found = counts.loss(judged, true)
    assert counts.count(facts, case, tile).loss == found
    if name in BY_DATA:
        assert not found.exact, "now that it is exact, take it off the list"
    else:
        visits, masks = LOSSES.get(name, (1.05, 1.05))
        assert found.visits <= visits and found.masks <= masks, str(found)


@pytest.mark.parametrize("name", ported.FILES)
def test_emitted_classes_are_those_of_python(name):
    facts = analyse(ported.variant(name))
    for seqlen, tile in ((200, Tile(q=64, kv=48)), (333, Tile(q=96, kv=112))):
        case = ported.case(name, seqlen, q_len=seqlen, kv_len=seqlen, batch=2, heads=2)
        visited, *_ = variant_kernel.run(facts, case, tile)
        np.testing.assert_array_equal(visited, scheduled(facts, case, tile))
