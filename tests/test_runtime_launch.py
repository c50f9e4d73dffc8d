"""What a launch is made of, by hand: what follows from the GPU, and strides that matter to nobody."""

import numpy as np
import pytest
from ptx_attention import work

import flashgen as fg
from flashgen.planning import backward, planner
from flashgen.planning.layout import LAYOUTS, Padded, Varlen
from flashgen.planning.members import FoldedLeaves, SplitKeys
from flashgen.planning.once import Remembered
from flashgen.planning.problem import Problem
from flashgen.runtime import launch
from flashgen.runtime.launch import COUNTERS, Cache, Captured, make_launch
from flashgen.runtime.philox import Dropout

causal = fg.variant(lambda b, h, q, k: k <= q)
SHAPE = {"batch": 2, "heads": 8, "kv_heads": 4, "q_len": 3000, "kv_len": 3000, "head_dim": 128, "v_head_dim": 128}


def made(menu, problem=None, **facts):
    plan = menu(causal, "sm_90a", "bfloat16", 128).plans[0]
    given = {"captured": {}, "scale": 0.125, "params": {}, "sms": 132, **facts}
    strides = {name: (1 << 20, 1 << 15, 128) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")}
    return make_launch(plan, problem or Problem(**SHAPE), strides=strides, **given)


def test_a_forward_on_a_gpu_of_few_sms():
    large, small = made(planner.menu), made(planner.menu, sms=3, l2_kv_heads=2)
    assert (large.grids[0].blocks, small.grids[0].blocks) == (132, 3)
    assert (large.values["l2_heads"], small.values["l2_heads"]) == (16, 4)  # query heads: all of both batches, 2 x 2
    assert large.values["q_tiles"] == small.values["q_tiles"] == -(-3000 // large.plan.tile.q)
    assert large.cleared == (COUNTERS,) and large.workspaces == ()
    alone = made(planner.menu, Problem(**{**SHAPE, "q_len": 500, "kv_len": 500}))
    assert alone.cleared == (), "each block has one tile: nobody counts, and a CUDA graph clears nothing"


@pytest.mark.parametrize("sms", [132, 40, 3])
def test_heads_in_turns_leave_blocks_to_each(sms):
    short = Problem(**{**SHAPE, "batch": 32, "q_len": 512, "kv_len": 512})
    forward, gradients = (made(menu, short, sms=sms) for menu in (planner.menu, planner.backward_menu))
    in_turns = {132: (16, 8), 40: (4, 2), 3: (1, 1)}[sms]
    assert forward.values["l2_heads"] == 2 * in_turns[0]  # query heads
    assert backward.l2_kv_heads(gradients.plan, short, sms) == in_turns[1]
    assert gradients.values["clear_distance"] == backward.clear_distance(gradients.plan, short, sms)


@pytest.mark.parametrize("kv_splits", [1, 2])
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
def test_blocks_with_a_tile_each_count_nothing_beside_lengths_either(layout, kv_splits):
    """16 heads, or 8 of 2 sequences: as many tiles as SMs, and one more."""
    options = {"layout": layout, "keys": SplitKeys()} if kv_splits > 1 else {"layout": layout}
    problem = Problem(**{**SHAPE, "batch": 1 if layout.joined else 2, "heads": 16 if layout.joined else 8, "q_len": 1})

    def menu(*request):
        return planner.menu(*request, **options)

    blocks = 16 * kv_splits
    few, many = (made(menu, problem, sms=sms, kv_splits=kv_splits, rows=(1, 3000)) for sms in (blocks, blocks - 1))
    assert few.cleared == () and many.cleared == (COUNTERS,)
    assert (few.grids[0].blocks, many.grids[0].blocks) == (blocks, blocks - 1)


def test_a_backward_on_a_gpu_of_few_sms():
    large, small = made(planner.backward_menu), made(planner.backward_menu, sms=3, l2_kv_heads=2)
    finish = [launch.grids[-1].blocks for launch in (large, small)]
    assert finish == [min(8 * 132, 8 * 2 * large.values["q_tiles"]), 8 * 3]
    assert large.values["clear_distance"] == backward.clear_distance(large.plan, Problem(**SHAPE)) == 8
    assert small.values["clear_distance"] == 2 + 1  # the heads that share L2, and those that 3 SMs work on
    assert made(planner.backward_menu, clear_distance=100).values["clear_distance"] == 8
    names = {part.name for part in large.workspaces}
    assert names == {"lse_log2", "delta", "dq_sum", "progress"} and names < set(large.pointers)


def test_where_there_is_one_any_stride_will_do():
    """That of a single row may be anything, 0 too, which TMA refuses."""
    one = Problem(**{**SHAPE, "kv_len": 1})
    (k,) = (desc for desc in made(planner.menu, one).maps if desc.tensor == "k")
    assert k.sizes == (128, 1, 4, 2) and k.strides == (256, 2 << 15, 2 << 20)
    nothing = made(planner.menu, Problem(**{**SHAPE, "kv_len": 0}))
    assert all(min(desc.sizes) == 1 or desc.tensor not in "kv" for desc in nothing.maps)


def test_a_launch_is_one_frozen_value():
    launch = made(planner.menu)
    assert launch == made(planner.menu) != made(planner.menu, Problem(**{**SHAPE, "kv_len": 1}))
    with pytest.raises(AttributeError):
        launch.grids = ()
    with pytest.raises(TypeError):
        launch.values["q_tiles"] = 1


@pytest.mark.slow
def test_any_number_of_heads_in_l2_gives_the_same_bits():
    w = work("causal", "hopper", batch=2, heads=3, kv_heads=3, q_len=130, kv_len=40)
    results = [w.run(l2_kv_heads=held, sms=3) for held in (1, 4, 6, None)]
    assert w.wrong(results[0]) == ()
    for other in results[1:]:
        np.testing.assert_array_equal(other.o, results[0].o)


DOCUMENT = fg.tensor("doc", dims=("batch", "kv"), dtype="int32")


@pytest.mark.sampled(
    "<lambda>0-sm_80-menu-options0",
    "<lambda>0-sm_80-menu-options3",
    "<lambda>0-sm_80-backward_menu-options4",
    "<lambda>0-sm_90a-menu-options0",
    "<lambda>0-sm_90a-backward_menu-options1",
    "<lambda>0-sm_90a-backward_menu-options2",
    "<lambda>0-sm_90a-backward_menu-options4",
    "<lambda>1-sm_80-menu-options0",
    "<lambda>1-sm_80-menu-options3",
    "<lambda>1-sm_90a-backward_menu-options1",
    "<lambda>1-sm_90a-backward_menu-options2",
    "<lambda>1-sm_90a-backward_menu-options4",
)
@pytest.mark.parametrize(
    ("menu", "options"),
    [
        (planner.menu, {}),
        (planner.backward_menu, {}),
        (planner.backward_menu, {"deterministic": True}),
        (planner.menu, {"layout": Varlen()}),
        (planner.backward_menu, {"layout": Varlen()}),
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (DOCUMENT[b, q] == DOCUMENT[b, k]) & (k <= q),
        lambda b, h, q, k: DOCUMENT[b, k // 16] > q // 16,  # with a summary of fewer keys than a tile has
    ],
)
def test_launches_of_equal_tiles_share_what_follows_from_these_alone(monkeypatch, menu, options, arch, mask):
    """Grids, workspaces and what is cleared are those that each length has by itself."""
    plan = menu(fg.variant(mask), arch, "bfloat16", 64, **options).plans[0]
    assert plan.summaries or options

    def launches():
        strides = {name: (1 << 20, 1 << 15, 64) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")}
        for q_len, kv_len, batch, rows in (
            *((1, 1, 2, 64), (63, 70, 2, 64), (64, 64, 2, 65), (65, 130, 2, 65), (127, 128, 2, 500), (65, 130, 3, 65)),
            *((300, 64, 2, 600), (257, 64, 2, 600), (257, 1, 2, 600), (4000, 4100, 2, 9000), (4033, 4150, 2, 9000)),
        ):
            problem = Problem(**{**SHAPE, "q_len": q_len, "kv_len": kv_len, "batch": batch})
            doc = Captured(sizes=(batch, kv_len), strides=(kv_len, 1))
            given = {"strides": strides, "captured": {"doc": doc}, "scale": 0.125, "params": {}, "sms": 132}
            for sms in (132, 7):
                in_memory = (rows, rows) if plan.layout.joined else None
                yield make_launch(plan, problem, **{**given, "sms": sms}, rows=in_memory)

    launch._outline(plan).by_tiles.clear()
    shared = [*launches(), *launches()]
    launch._outline(plan).by_tiles.clear()
    monkeypatch.setattr(Remembered, "keep", lambda self, key, found: found)
    assert shared == [*launches(), *launches()]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"dropout": True}, {"keys": SplitKeys()}, {"keys": FoldedLeaves()}])
def test_each_number_has_its_name(arch, layout, options):
    """Names and numbers of a launch are two lists, which every part of a plan makes longer."""
    window = fg.variant(lambda b, h, q, k: (DOCUMENT[b, q] == DOCUMENT[b, k]) & (q - k < fg.param("window", default=9)))
    captured = {"doc": Captured(sizes=(2, 3000), strides=(3000, 1))}
    strides = {name: (1 << 20, 1 << 15, 64) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")}
    given = {"strides": strides, "captured": captured, "scale": 0.125, "params": {"window": 9}, "sms": 132}
    given["rows"] = (6000, 6000) if layout.joined else None
    if "dropout" in options:
        given["dropout"] = Dropout(p=0.5, seed=7)
    cache = Cache(pages=400, page_size=16, table_row=200) if layout.paged else None
    menus = [planner.menu] if layout.paged or "keys" in options else [planner.menu, planner.backward_menu]
    for menu in menus:
        for plan in menu(window, arch, "bfloat16", 64, layout=layout, **options).plans:
            made = make_launch(plan, Problem(**SHAPE), cache=cache, **given)
            assert len(made.values.numbers) == len(made.values)
