"""A warpgroup takes the first keys alone of a tile that it sees no others of, and passes those that it sees none of."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from ptx_attention import replace, work

import flashgen as fg
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.members import FIRST_TILE_WHOLE, FirstTileAsSeen
from flashgen.planning.profile import profile

#: Tiles of queries by keys: two warpgroups that share one tile of keys or two, and three that share two or many.
TILES = [(128, 128), (128, 64), (192, 128), (192, 64), (192, 32), (128, 80)]

SPECS = ["causal", "sliding_window", "causal_bottom_right", "sink_window", "prefix_lm", "local_softcap", "alibi"]


def whole(w):
    """The same work where all warpgroups multiply by all of every tile."""
    return w.with_members(first=FIRST_TILE_WHOLE)


def exponentials(result):
    return sum(count for opcode, count in result.report.instructions.items() if opcode.startswith("ex2"))


def diagonal(tile, spec="causal", **shape):
    shape = {"heads": 1, "q_len": 300, "kv_len": 310, "q_stages": 2, **shape}
    return work(spec, "hopper", tile=tile, **shape)


@pytest.mark.sampled("causal-tile4")
@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_left_out_changes_no_bit(spec, tile):
    w = diagonal(tile, spec)
    found = w.run()
    assert w.wrong(found) == ()
    if not w.plan.takes_first_keys:  # three warpgroups have no registers for some
        pytest.skip("this tile is taken whole")
    expected = whole(w).run()
    assert np.array_equal(found.o, expected.o) and np.array_equal(found.lse, expected.lse)
    assert exponentials(found) < exponentials(expected)


FLAGS = fg.tensor(
    "flags", dims=("batch", "kv"), dtype="bool", example=lambda p, rng: rng.random((p.batch, p.kv_len)) < 0.3
)

#: Causal, and judged by what is read.
FLAGGED = fg.variant(lambda b, h, q, k: (k <= q) & (FLAGS[b, k] | (q - k < 40)), name="flagged_or_near")


@pytest.mark.sampled("tile0")
@pytest.mark.slow
@pytest.mark.parametrize("tile", [(128, 64), (128, 128)])
def test_a_mask_in_words(tile):
    w = diagonal(tile, FLAGGED)
    found, expected = w.run(), whole(w).run()
    assert w.plan.takes_first_keys and w.plan.masked_in_words and w.wrong(found) == ()
    assert np.array_equal(found.o, expected.o) and np.array_equal(found.lse, expected.lse)


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [1, 65, 129, 200])
def test_queries_end_within_a_warpgroup(q_len):
    w = diagonal((192, 64), q_len=q_len, kv_len=q_len + 70)
    assert w.wrong(w.run()) == ()


@pytest.mark.slow
def test_heads_that_share_keys_fill_tiles():
    w = diagonal((128, 64), "causal_bottom_right", q_len=70, kv_len=200, heads=4, kv_heads=1, packed=True, head_dim=128)
    assert w.plan.takes_first_keys and w.wrong(w.run()) == ()


@pytest.mark.sampled("a key of the others", "values of passed keys")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "kv_len", "edit"),
    [
        ((128, 128), 101, replace("(last < others)", "(last <= others)")),  # the first 64 queries see 65 keys
        ((128, 64), 101, replace("((last < first) |", "((last <= first) |")),
        ((128, 128), 100, replace("probabilities[i] = 0;", "probabilities[i] = 0x3f803f80;")),
        ((128, 64), 100, replace("    pass_unseen_v();\n", "")),
    ],
    ids=["a key of the others", "a key of the first", "probabilities of hidden keys", "values of passed keys"],
)
def test_each_part_of_it_is_needed(tile, kv_len, edit):
    w = diagonal(tile, "causal_bottom_right", q_len=100, kv_len=kv_len)
    with contextlib.suppress(errors.Trap):
        assert w.wrong(w.run(edit, step_limit=4_000_000)) != ()


@pytest.mark.slow
def test_no_more_tiles_are_passed_than_there_are_stages():
    """Behind them lies V of these, which two stages cannot hold."""
    w = diagonal((192, 32), q_len=384, kv_len=384)
    assert w.plan.stages == 2
    assert w.wrong(w.run()) == ()
    with pytest.raises(errors.Deadlock):
        w.run(replace("unseen < STAGES && ", ""), step_limit=4_000_000)


@pytest.mark.slow
def test_warpgroups_that_pass_a_tile_keep_their_turns():
    w = diagonal((192, 64))
    assert w.plan.specialized.ping_pong
    with pytest.raises(errors.Trap):
        w.run(replace("      take_turn();\n      pass_turn();\n", ""), step_limit=4_000_000)


ENDS = fg.tensor("ends", dims=("batch",), dtype="int32")


@pytest.mark.parametrize(
    ("spec", "ends"),
    [("causal", True), ("sink_window", True), ("full", False), ("document", False), ("global_flags", False)],
)
def test_masks_whose_keys_end_at_the_query(spec, ends):
    assert profile(load_spec(spec).bind()).ends_at_query == ends


def test_no_memory_is_read_for_where_keys_end():
    variant = fg.variant(lambda b, h, q, k: k < ENDS[b] + q, name="read_ends").bind()
    assert not profile(variant).ends_at_query


@pytest.mark.parametrize(("head_dim", "passes"), [(64, True), (128, False), (256, True)])
def test_the_menu_takes_first_keys(head_dim, passes):
    causal, full = (
        planner.menu(load_spec(name).bind(), "sm_90a", "bfloat16", head_dim, head_dim).plans[0]
        for name in ("causal", "full")
    )
    assert causal.specialized.first == FirstTileAsSeen(keys=causal.tile.kv // 2, passes=passes)
    assert not full.takes_first_keys
