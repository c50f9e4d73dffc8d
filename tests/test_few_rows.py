"""Tiles of decoding, most of whose rows are no queries: a warp takes no exponentials of eight rows that are none."""

import pytest
from ptx_attention import replace, work
from split import differing, split_work

import flashgen as fg
from flashgen.planning.members import FoldedLeaves

#: Four heads share keys, so a tile of 64 rows holds 16 queries.
SHAPE = {"heads": 4, "kv_heads": 1, "kv_len": 200, "batch": 1, "packed": True, "tile": (64, 64)}

#: Queries of one tile with four rows, all eight upper ones of the first warp, some lower ones, three warps, all rows,
#: and of two tiles.
QUERIES = (1, 2, 3, 11, 16, 17)


def test_which_plans_look():
    decode, prompt = {"seqlen": 1, "kv_seqlen": 8192}, {"seqlen": 8192, "kv_seqlen": 8192}
    of = {"head_dim": 128, "arch": "sm_90a", "heads": 32, "kv_heads": 8}
    assert fg.plan("full", **of, **decode).few_rows
    assert fg.plan("causal", **of, seqlen=1, kv_seqlen=1024, invariant=True).few_rows
    assert not any(fg.plan("causal", **of, **prompt, invariant=leaves).few_rows for leaves in (False, True))
    assert not fg.plan("full", **of | {"arch": "sm_80"}, **decode).few_rows


@pytest.mark.sampled("3", "17")
@pytest.mark.slow
@pytest.mark.parametrize("q_len", QUERIES)
def test_rows_have_the_bits_that_two_warpgroups_give_them(q_len):
    few = work("causal_bottom_right", "hopper", **SHAPE, q_len=q_len)
    wide = work("causal_bottom_right", "hopper", **SHAPE | {"tile": (128, 64)}, q_len=q_len)
    assert few.plan.few_rows and not wide.plan.few_rows
    found = few.run()
    assert few.wrong(found) == () and differing(found, wide.run()) == 0


@pytest.mark.sampled("leaves-2")
@pytest.mark.slow
@pytest.mark.parametrize("q_len", QUERIES)
@pytest.mark.parametrize("form", ["split", "leaves"])
def test_with_keys_that_are_split(form, q_len):
    keys = {} if form == "split" else {"keys": FoldedLeaves(keys=128).in_parts}
    w = split_work("causal_bottom_right", "hopper", **keys, **SHAPE, q_len=q_len)
    assert w.plan.few_rows and w.wrong(w.run(kv_splits=2)) == ()


@pytest.mark.slow
def test_a_warp_that_leaves_out_queries_is_noticed():
    w = work("causal_bottom_right", "hopper", **SHAPE, q_len=3)
    edit = replace("row + 8 <", "row + 16 <")
    assert w.wrong(w.run(edit)) != ()
