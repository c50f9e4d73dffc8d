"""The order of candidates of masks that are made of cells."""

import numpy as np
import pytest

import flashgen as fg
from flashgen.analysis import counts
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.lang.load import load_spec
from flashgen.planning import planner, visits
from flashgen.planning.plan import Tile

layout = fg.tensor("layout", dims=(None, None), dtype="bool")
TILES = [Tile(q=q, kv=kv) for q in (64, 128, 192) for kv in (32, 64, 96, 112, 128)]


@pytest.mark.sampled("64", "128")
@pytest.mark.slow
@pytest.mark.parametrize("block", [32, 64, 100, 128, 384])
def test_the_share_of_random_blocks_is_that_of_a_large_problem(block):
    variant = fg.variant(lambda b, h, q, k: layout[q // block, k // block])
    length = 192 * 112
    blocks = -(-length // block)
    data = {"layout": np.random.default_rng(0).random((blocks, blocks)) < visits.SHOWN}
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": length, "kv_len": length}
    for tile in TILES:
        visited = counts.count(analyse(variant), Case(sizes=sizes, params={}, tensors=data), tile).visited_elements
        assert visits.share(variant, tile) == pytest.approx(visited / length**2, rel=0.05), tile


def test_without_data_cells_are_looked_at():
    band = fg.variant(lambda b, h, q, k: abs(q // 64 - k // 64) <= 6)
    assert visits.share(band, Tile(q=64, kv=64)) == pytest.approx(13 / 32, rel=0.2)
    wide, narrow = visits.share(band, Tile(q=128, kv=128)), visits.share(band, Tile(q=128, kv=64))
    assert narrow <= wide < 1.2 * visits.share(band, Tile(q=64, kv=64)), "neighbours are shown together"


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (lambda b, h, q, k: (k >= fg.kv_len - 128) & (q // 64 % 2 == 0), 1 / 2),
        (lambda b, h, q, k: (q >= fg.q_len - 64) & (k // 64 % 2 == 0), 1 / 2),
        (lambda b, h, q, k: (q >= 4096) & (k // 128 % 4 == 0), 1 / 4),
        (lambda b, h, q, k: (k >= 1024) & (q // 64 % 2 == 0), 1 / 2),
    ],
)
def test_the_side_without_cells_counts_as_a_whole(mask, seen):
    """What is hidden at its beginning may be visible later: no share is 0, by which times would be divided."""
    variant = fg.variant(mask)
    assert visits.share(variant, Tile(q=64, kv=64)) == pytest.approx(seen, rel=0.1)
    assert planner.menu(variant, "sm_90a", "bfloat16", 64).plans


@pytest.mark.parametrize("name", ["full", "causal", "sliding_window", "document", "dilated", "padding"])
def test_masks_without_cells_count_alike(name):
    assert {visits.share(load_spec(name).bind(), tile) for tile in TILES} == {1.0}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_tiles_and_blocks_divide_each_other(block, backward, head_dim, arch):
    variant = load_spec("blocks").bind(block=block)
    menu = (planner.backward_menu if backward else planner.menu)(variant, arch, "bfloat16", head_dim)
    sides = [side for plan in menu.forms for side in (plan.tile.q, plan.tile.kv)]
    assert all(side % block == 0 or block % side == 0 for side in sides), menu.plans


def test_a_reason_says_what_a_tile_visits():
    rejected = planner.menu(load_spec("blocks").bind(), "sm_90a", "bfloat16", 128).rejected
    (reason,) = [str(r) for r in rejected if str(r).startswith("128 x 80, 3 stages")]
    assert "the time of 128 x 128, 2 stages: its tiles visit 1.38x the scores" in reason


def test_cells_of_any_size_are_judged_in_no_more_memory():
    for block in (100_003, 2_000_003, 1 << 30, (1 << 63) - 1):
        variant = fg.variant(lambda b, h, q, k, block=block: layout[q // block, k // block])
        assert visits.share(variant, Tile(q=128, kv=96)) == pytest.approx(visits.SHOWN, rel=0.02)
        assert 0 < visits.share(fg.variant(lambda b, h, q, k, n=block: q // n == k // n), Tile(q=128, kv=96)) <= 1


def test_a_mask_with_the_largest_divisor_is_planned():
    largest = (1 << 63) - 1
    variant = fg.variant(lambda b, h, q, k: layout[q % 7, fg.minimum(k % largest, layout.size(1) - 1)])
    assert planner.menu(variant, "sm_90a", "bfloat16", 64).plans
