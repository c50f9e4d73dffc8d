"""Masks as people bring them from other code: tiles beside those of a block mask, and the same in emitted CUDA."""

import dataclasses

import numpy as np
import ported
import ptx_attention
import ptx_backward
import pytest
import test_ptx_attention
import variant_kernel
from test_codegen_variant_code import scheduled

import flashgen as fg
from flashgen.analysis import counts, tiles
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import PARTIAL
from flashgen.codegen import emit
from flashgen.planning import planner
from flashgen.planning.members import MaskAsBits
from flashgen.planning.plan import Tile
from flashgen.runtime import nvrtc

#: Tiles of kernels, and one that no cell of these masks divides.
TILES = (
    Tile(q=128, kv=128),
    Tile(q=128, kv=96),
    *(pytest.param(Tile(q=q, kv=kv), marks=pytest.mark.slow) for q, kv in ((128, 64), (192, 64), (64, 112))),
)

#: Masks of which only values tell more: flags, tables and positions whose order nothing promises, bits put together.
BY_VALUES = ("dense", "gist_flags", "global_flags", "key_padding", "morton", "restarts", "rotated", "small_blocks")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", ported.FILES)
def test_tiles_are_those_of_a_block_mask(name, tile):
    facts, case = analyse(ported.variant(name)), ported.case(name)
    judged, true = tiles.grid(facts, case, tile), tiles.true_grid(facts, case, tile)
    assert np.all((judged == true) | (judged == PARTIAL)), "not sound"
    found = counts.loss(judged, true)
    assert counts.count(facts, case, tile).loss == found
    assert found.visits <= 1.05 and found.masks <= 1.05, str(found)
    assert bool(facts.summaries) == (name in BY_VALUES)


#: One of each way in which classes are found: parts of one side and of both, elements at the ends of two indices and
#: of one, an equality, a score; summaries of conditions, of queries, and in groups.
SOME = (
    *("flamingo", "bigbird", "paged_blocks", "mixed_kinds", "document_offsets", "score_window"),
    *("global_flags", "restarts", "rotated", "dense", "small_blocks"),
)


@pytest.mark.sampled("natten", "zigzag", "dilated_causal")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(ported.FILES))
def test_emitted_classes_are_those_of_python(name):
    facts, case = analyse(ported.variant(name)), ported.case(name, 233, q_len=233, kv_len=233, batch=2, heads=2)
    tile = Tile(q=96, kv=112)
    visited, *_ = variant_kernel.run(facts, case, tile)
    np.testing.assert_array_equal(visited, scheduled(facts, case, tile))


@pytest.mark.slow
def test_emitted_classes_by_parts():
    test_emitted_classes_are_those_of_python("top_blocks")


@pytest.mark.slow
def test_emitted_classes_by_elements_at_the_ends_of_indices():
    test_emitted_classes_are_those_of_python("paged_blocks")


@pytest.mark.sampled("rotated-hopper")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "pipeline"), [(name, pipeline) for name in SOME for pipeline in ("ampere", "hopper")])
def test_kernels_move_what_the_walk_counts(name, pipeline):
    """Forward and backward, right against float64."""
    test_ptx_attention.check(ptx_attention.work(ported.variant(name), pipeline, q_len=211, kv_len=211))
    ptx_backward.check(ptx_backward.Backward(ported.variant(name), pipeline=pipeline, q_len=211, kv_len=211))


#: Masks that many ops judge, or few: whether their conditions are judged in turn.
IN_TURN = {
    **dict.fromkeys(("bigbird", "longnet", "mixed_kinds", "morton", "natten", "remainders"), True),
    **dict.fromkeys(("small_blocks", "streaming_blocks", "tiles_2d", "tree"), True),
    **dict.fromkeys(("top_blocks", "flamingo", "frames", "global_flags"), False),
}


@pytest.mark.sampled("top_blocks")
@pytest.mark.slow
@pytest.mark.parametrize("name", tuple(IN_TURN))
def test_judging_tiles_spills_nothing(name):
    """It has 24 registers per thread beside consumers that have all others."""
    plan = planner.backward_menu(ported.variant(name), "sm_90a", "bfloat16", 128).plans[0]
    assert plan.pipeline == "hopper" and plan.program.producer_registers == 24
    assert plan.backward.judged_in_turn == IN_TURN[name]
    assert nvrtc.compile(emit(plan), plan.arch).resources.spills == 0


#: Parts of both sides, summaries, elements that nothing in shared memory holds, and lookups.
@pytest.mark.sampled(name=("morton",))
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ("morton", "bigbird", "tiles_2d", "mixed_kinds", "streaming_blocks", "tree", "natten", "small_blocks"),
)
def test_conditions_judged_in_turn(name):
    """Of the backward at head_dim 128, right against float64."""
    work = ptx_backward.Backward(ported.variant(name), pipeline="hopper", head_dim=128, q_len=201, kv_len=233, heads=1)
    assert work.plan.backward.judged_in_turn
    ptx_backward.check(work)


#: Of the forward: what is read by query and key together, and many ops.
@pytest.mark.sampled(name=("tree",))
@pytest.mark.slow
@pytest.mark.parametrize("name", ("tree", "streaming_blocks", "morton"))
def test_a_forward_asks_by_bits(name):
    work = ptx_attention.work(ported.variant(name), "hopper", q_len=211, kv_len=211)
    assert work.plan.specialized.mask == MaskAsBits()
    test_ptx_attention.check(work)
    assert nvrtc.compile(work.source, work.plan.arch).resources.spills == 0


layout = fg.tensor(
    "layout", dims=(None, None), dtype="bool", example=lambda p, rng: (rng.random((5, 5)) < 0.3) | np.eye(5, dtype=bool)
)
blocks_of_48 = fg.variant(lambda b, h, q, k: layout[q // 48, k // 48], name="blocks_of_48")


@pytest.mark.sampled("restarts")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["global_flags", "restarts", None])
def test_a_dq_by_itself_judges_its_own_tiles(name):
    """By parts, and by summaries of what divides the tiles of both kernels."""
    variant = blocks_of_48 if name is None else ported.variant(name)
    ptx_backward.check(ptx_backward.Backward(variant, deterministic=True))


@pytest.mark.slow
def test_packed_heads_share_summaries_of_keys():
    work = ptx_attention.work(ported.variant("key_padding"), "hopper", packed=True, heads=4, kv_heads=1)
    test_ptx_attention.check(work)


@pytest.mark.slow
def test_packed_heads_judge_fewer_queries():
    work = ptx_attention.work(blocks_of_48, "hopper", packed=True, heads=4, kv_heads=1)
    test_ptx_attention.check(work)


@pytest.mark.slow
def test_without_parts_a_kernel_masks_more_than_python_says():
    """The mutation that the tests above must notice."""
    facts, case = analyse(ported.variant("frames")), ported.case("frames", 500)
    tile = Tile(q=128, kv=128)
    whole, *_ = variant_kernel.run(dataclasses.replace(facts, cells=None), case, tile)
    assert (whole == PARTIAL).sum() > (scheduled(facts, case, tile) == PARTIAL).sum()
