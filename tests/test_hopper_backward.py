"""Backward passes of pipeline hopper executed by the PTX interpreter: gradients, any order, one order, mutations."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest
from ptx_attention import replace
from ptx_backward import DROPOUT, SOME, SPECS, STEPS, Backward, check

import flashgen as fg
from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.runtime.philox import Dropout

ENTRIES = ("attention_backward_prepare", "attention_backward", "attention_backward_finish")


@pytest.mark.sampled("sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize("spec", SOME)
def test_hopper(spec):
    check(Backward(spec, pipeline="hopper", heads=4, kv_heads=2, q_len=131, kv_len=137))


AT_NIGHT = pytest.mark.nightly(sibling="test_hopper_at_other_shapes")


@pytest.mark.sampled("causal-shape3", "softcap-shape9")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("full", {"head_dim": 128, "dtype": "float16", "q_len": 71, "kv_len": 101}),
        ("sliding_window", {"head_dim": 96, "v_head_dim": 40, "q_len": 130}),
        pytest.param("softcap", {"head_dim": 64, "v_head_dim": 128, "q_len": 70, "kv_len": 150}, marks=AT_NIGHT),
        ("causal", {"head_dim": 24, "q_len": 1, "kv_len": 1, "batch": 2}),
        ("causal_bottom_right", {"head_dim": 64, "tile": (64, 128), "q_len": 150, "kv_len": 70}),
        pytest.param("full", {"head_dim": 256, "q_len": 70, "kv_len": 130}, marks=AT_NIGHT),
        ("relative_bias", {"head_dim": 256, "dtype": "float16", "q_len": 131, "kv_len": 70}),
        ("causal", {"head_dim": 192, "v_head_dim": 136, "q_len": 131, "kv_len": 137}),
        pytest.param("document", {"head_dim": 136, "v_head_dim": 40, "q_len": 131, "kv_len": 131}, marks=AT_NIGHT),
        ("softcap", {"head_dim": 64, "v_head_dim": 256, "q_len": 1, "kv_len": 65}),
        ("document", {"head_dim": 128, "q_len": 300, "kv_len": 300}),
        pytest.param(
            *("packed_softcap", {"head_dim": 128, "heads": 4, "kv_heads": 2, "q_len": 700, "kv_len": 700}),
            marks=AT_NIGHT,
        ),
        pytest.param("dilated", {"head_dim": 128, "q_len": 140, "kv_len": 140}, marks=AT_NIGHT),
    ],
)
def test_hopper_at_other_shapes(spec, shape):
    check(Backward(spec, pipeline="hopper", **shape))


@pytest.mark.slow
def test_where_one_argument_of_tanh_is_large_each_has_its_own_way():
    b = Backward("softcap", pipeline="hopper", tile=(128, 128), q_len=70, kv_len=150, large_key=100)
    check(b)
    assert b.fails(replace("(bits & 0x40000000) == 0", "true"))


@pytest.mark.sampled("the slope")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("scale = p.param_cap * LOG2E", "scale = LOG2E"),
        ("to_argument = 2.f / SMALL_TANH * p.scale", "to_argument = p.scale"),
        ("s[i + 1] = odd * fmaf(-s[i + 1], s[i + 1], 1.f)", "s[i + 1] = odd"),
    ],
    ids=["the cap", "the argument", "the slope"],
)
def test_factors_of_a_soft_cap_in_a_backward_are_noticed(right, wrong):
    b = Backward("softcap", pipeline="hopper", q_len=70, kv_len=150, large_key=100)
    assert b.fails(replace(right, wrong))


@pytest.mark.sampled("tile1-64-1")
@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1), range(1, 3)], ids=len)
@pytest.mark.parametrize(("tile", "head_dim"), [((64, 128), 64), ((128, 128), 64), ((64, 64), 144)])
def test_hopper_in_any_order_of_warps_and_copies(tile, head_dim, seeds):
    b = Backward("sliding_window", pipeline="hopper", tile=tile, head_dim=head_dim, q_len=270, kv_len=140)
    lockstep = b.run()
    for seed in seeds:
        result = b.run(seed=seed)
        np.testing.assert_array_equal(result.dk, lockstep.dk)
        np.testing.assert_array_equal(result.dv, lockstep.dv)
        np.testing.assert_allclose(result.dq, lockstep.dq, rtol=2.0**-7, atol=1e-6)  # the order of additions is free


SHOWN = "    __syncwarp();\n    if (thread_index() % 32 == 0) mbarrier_arrive"
HOPPER_MUTATIONS = {
    "dS not awaited": replace("    await_ds();\n    share_ds();", "    share_ds();"),
    "dS not shown to wgmma": replace("    fence_proxy_async();\n" + SHOWN, SHOWN),
    "a stage released too early": replace("{ring.passed - 1}", "{ring.passed}"),
    "d_o not awaited": replace("    mbarrier_wait(shared.d_o_full[ring.stage()], ring.parity());\n", ""),
    "dQ not awaited": replace("    wgmma_wait_group<2>();\n    pin(dq);\n", ""),
    "a turn that is not passed": replace("    pass_turn();\n    await_ds();", "    await_ds();"),
    "one dS for both warpgroups": replace("ds_ring(1).stage()][warpgroup]", "ds_ring(1).stage()][0]"),
}


@pytest.mark.sampled("dQ not awaited")
@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER_MUTATIONS)
def test_hopper_mutations_are_noticed(name):
    b = Backward("causal", pipeline="hopper", tile=(64, 128), q_len=250, kv_len=150)
    try:
        result = b.run(HOPPER_MUTATIONS[name])
    except errors.Trap:
        return
    assert b.wrong(result) or any(r.conflicts for r in result.reports.values())


AWAITS_P = "    mbarrier_wait(shared.p_full, ring.passed % 2);\n"
LEAVES = "    leave_ds();\n    dq_tile = now.index;"
WIDE_MUTATIONS = {
    "P not awaited": replace(AWAITS_P, ""),
    "dS not awaited": replace("    await_ds();\n", "", 3),
    "dS not shown to wgmma": replace("    fence_proxy_async();\n" + SHOWN, SHOWN),
    "dS left too early": lambda text: replace("    share_ds();\n", "    leave_ds();\n    share_ds();\n")(
        replace(LEAVES, "    dq_tile = now.index;")(text)
    ),
    "a stage released too early": replace("{ring.passed - 1}", "{ring.passed}", 2),
    "the rest of dQ not awaited": replace("    wgmma_wait_group<1>();\n    pin(dq_rest);\n", "", 2),
    "the rest of dQ added where the first part was": replace("add_dq(dq_rest, 16 * 64)", "add_dq(dq_rest, 0)", 2),
}


@pytest.mark.sampled("dS not shown to wgmma")
@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE_MUTATIONS)
def test_mutations_over_head_dim_128_are_noticed(name):
    b = Backward("causal", pipeline="hopper", head_dim=136, q_len=250, kv_len=70)
    try:
        result = b.run(WIDE_MUTATIONS[name])
    except errors.Trap:
        return
    assert b.wrong(result) or any(r.conflicts for r in result.reports.values())


@pytest.mark.sampled("sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_hopper_adds_up_dq_in_one_order(spec):
    """Blocks wait for exactly the one that added before, and for none where there is none: all of them end only where
    both schedules, of keys and of queries, visit the same tiles."""
    check(Backward(spec, pipeline="hopper", deterministic=True, seed=1, q_len=300, kv_len=600), step_limit=STEPS)


ONE_ORDER_AT_NIGHT = pytest.mark.nightly(sibling="test_hoppers_one_order_is_the_same_bits")


@pytest.mark.sampled("full-shape0")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("full", {"head_dim": 128, "dtype": "float16", "q_len": 71, "kv_len": 270}),
        pytest.param(
            *("sliding_window", {"heads": 4, "kv_heads": 2, "q_len": 270, "kv_len": 390, "tile": (128, 128)}),
            marks=ONE_ORDER_AT_NIGHT,
        ),
        pytest.param("softcap", {"v_head_dim": 128, "q_len": 70, "kv_len": 300, "batch": 2}, marks=ONE_ORDER_AT_NIGHT),
        pytest.param(
            *("causal", {"tile": (64, 128), "heads": 4, "kv_heads": 1, "q_len": 270, "kv_len": 390}),
            marks=ONE_ORDER_AT_NIGHT,
        ),
        pytest.param("butterfly", {"heads": 2, "kv_heads": 1, "q_len": 600, "kv_len": 500}, marks=ONE_ORDER_AT_NIGHT),
        pytest.param(
            *("document", {"head_dim": 128, "heads": 4, "kv_heads": 2, "q_len": 300, "kv_len": 300}),
            marks=ONE_ORDER_AT_NIGHT,
        ),
        pytest.param(
            "full", {"head_dim": 256, "dtype": "float16", "q_len": 71, "kv_len": 201}, marks=ONE_ORDER_AT_NIGHT
        ),
        ("causal", {"head_dim": 192, "v_head_dim": 128, "heads": 4, "kv_heads": 2, "q_len": 140, "kv_len": 270}),
        pytest.param(
            *("document", {"head_dim": 144, "batch": 2, "q_len": 200, "kv_len": 200}), marks=ONE_ORDER_AT_NIGHT
        ),
        ("document", {"tile": (64, 128), "q_len": 140, "kv_len": 300}),
        pytest.param(
            "softcap", {"head_dim": 16, "v_head_dim": 256, "q_len": 70, "kv_len": 200}, marks=ONE_ORDER_AT_NIGHT
        ),
    ],
)
def test_hoppers_one_order_is_the_same_bits(spec, shape):
    b = Backward(spec, pipeline="hopper", deterministic=True, **shape)
    result = check(b, step_limit=STEPS)
    for seed in (1,):
        again = b.run(seed=seed, step_limit=STEPS)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(again, name), getattr(result, name))
        np.testing.assert_array_equal(again.workspaces["dq_sum"], result.workspaces["dq_sum"])


@pytest.mark.nightly(sibling="test_hoppers_one_order_is_the_same_bits")
@pytest.mark.slow
def test_hoppers_one_order_with_dropout_and_the_gradient_of_a_captured_tensor():
    dropout = Dropout(p=0.3, seed=5, offset=1)
    options = {"deterministic": True, "gradients": ("table",), "dropout": dropout}
    b = Backward("relative_bias", pipeline="hopper", seed=1, q_len=140, kv_len=270, **options)
    result = b.run()
    again = b.run(seed=3)
    assert b.wrong(result) == []
    np.testing.assert_array_equal(again.workspaces["dq_sum"], result.workspaces["dq_sum"])
    np.testing.assert_array_equal(again.captured["table"], result.captured["table"])


AWAITED = "      while (load_acquire(last) != (before < p.kv_tiles ? before + 1 : 0)) {}\n"
HANDED = "      store_release(last, shared.keys.k_first / TILE_KV + 1);\n"
ORDER_MUTATIONS = {
    "the block before not awaited": replace(AWAITED, ""),
    "handed over too early": lambda text: replace(AWAITED, AWAITED + HANDED)(replace(HANDED, "")(text)),
    "consumers do not wait": replace("if (first == 0) mbarrier_wait(", "if (false) mbarrier_wait("),
}


@functools.lru_cache(1)
def in_one_order(head_dim):
    """A backward whose blocks of keys add to dq in turn, and the sums that it leaves."""
    b = Backward("full", pipeline="hopper", head_dim=head_dim, deterministic=True, q_len=70, kv_len=400)
    return b, b.run().workspaces["dq_sum"]


@pytest.mark.sampled("64-the block before not awaited")
@pytest.mark.slow
@pytest.mark.parametrize("name", ORDER_MUTATIONS)
@pytest.mark.parametrize("head_dim", (64, 136))
def test_an_order_that_is_not_kept_is_noticed(head_dim, name):
    b, right = in_one_order(head_dim)
    assert any(not np.array_equal(b.run(ORDER_MUTATIONS[name], seed=i).workspaces["dq_sum"], right) for i in range(4))


@pytest.mark.slow
def test_a_block_that_waits_for_another_than_the_one_before_never_ends():
    """So every test above that ends says that blocks of keys and of queries find the same tiles."""
    b = Backward("causal", pipeline="hopper", deterministic=True, q_len=150, kv_len=140)
    steps = b.run().reports["attention_backward"].steps
    with pytest.raises(errors.StepLimit):
        b.run(replace("int tile = shared.keys.k_first / TILE_KV + 1;", "int tile = 0;"), step_limit=2 * steps)


def read_ahead():
    """A mask that reads by the query and its head, by the key, and by both."""
    level = fg.tensor(
        "level", dims=("heads", "q"), dtype="int64", example=lambda p, r: r.integers(0, 4, (p.heads, p.q_len))
    )
    valid = fg.tensor("valid", dims=("kv",), dtype="bool", example=lambda p, r: r.random(p.kv_len) < 0.7)
    wide = fg.tensor("wide", dims=(2, "kv"), dtype="float32", example=lambda p, r: r.random((2, p.kv_len), np.float32))
    return fg.variant(lambda b, h, q, k: valid[k] & (wide[q % 2, k] < 0.5) | (level[h, q] > 2), name="read_ahead")


@pytest.mark.sampled("64-tile0")
@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "tile"), [(64, (64, 128)), (32, (128, 128))])
def test_hopper_reads_ahead_what_a_query_or_a_key_selects(head_dim, tile):
    b = Backward(read_ahead(), pipeline="hopper", tile=tile, head_dim=head_dim, q_len=133, kv_len=140)
    assert {"look_up_level_q(", "look_up_valid_k("} <= set(re.findall(r"look_up_\w+\(", b.source))
    check(b)
    assert b.wrong(b.run(seed=3)) == []


LOOKUP_MUTATIONS = {
    "one room for lookups": replace("ring.passed % LOOKUP_STAGES][column]", "0][column]"),
    "keys not looked up": replace("    look_up_keys();\n", ""),
    "queries not awaited": replace(
        "    mbarrier_wait(shared.lookups_full[ring.passed % LOOKUP_STAGES], ring.passed / LOOKUP_STAGES % 2);\n", ""
    ),
    "rooms out of step": replace("(shared.sent - 1) % LOOKUP_STAGES", "shared.sent % LOOKUP_STAGES"),
}


@pytest.mark.sampled("rooms out of step")
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUP_MUTATIONS)
def test_mutations_of_lookups_are_noticed(name):
    b = Backward("document", pipeline="hopper", tile=(64, 128), q_len=400, kv_len=400)
    assert b.fails(LOOKUP_MUTATIONS[name])


@functools.lru_cache(1)
def sweeping(spec):
    """Eight heads of keys, each with three blocks, which clear and finish dq for one another."""
    shape = {"head_dim": 80, "batch": 2, "heads": 8, "kv_heads": 4, "q_len": 100, "kv_len": 260}
    return Backward(spec, pipeline="hopper", tile=(64, 128), **shape)


@pytest.mark.sampled("causal-2-0")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(("spec", "clear_distance"), [("full", 1), ("full", 3), ("causal", 2), ("alibi", 5)])
def test_blocks_clear_and_finish_dq_for_other_heads(spec, clear_distance, seed):
    b = sweeping(spec)
    of_head = 2 * 128 * b.plan.dq_sum_columns * 4  # bytes of the sums of two query heads
    result = b.run(seed=seed, clear_distance=clear_distance)
    assert b.wrong(result) == []
    prepare, main, finish = (result.reports[launch] for launch in ENTRIES)
    assert prepare.bytes("st", buffer="dq_sum") == clear_distance * of_head
    assert main.bytes("st", buffer="dq_sum") == (8 - clear_distance) * of_head
    assert main.bytes("ld", buffer="dq_sum") + finish.bytes("ld", buffer="dq_sum") == 8 * of_head
    assert main.bytes("ld", buffer="dq_sum") >= of_head


#: Heads of keys one after another, each cleared by the blocks of the one before it.  With fewer heads between than
#: share L2, blocks wait for what none has cleared: any kernel stands still.
HEAD_BY_HEAD = {"clear_distance": 1, "l2_kv_heads": 1}

CLEARED_LATE = replace("    clear();\n    finish();\n", "    finish();\n    clear();\n")
ADDED = "      mbarrier_wait(shared.added, 0);\n      red_add_release(progress(), 1);\n"
COUNTED = "    if (lane == 0) red_add_release(p.progress + head, 1);\n"
SWEEPING_MUTATIONS = {
    "sums added to before they are cleared": lambda text: replace("    await_count(", "    if (false) await_count(")(
        CLEARED_LATE(text)
    ),
    "sums not counted as cleared": replace(COUNTED, ""),
    "a quarter of a slice cleared": replace("first + share, parts)", "first + share / 4, parts)"),
    "dq finished before all is added": replace("int(load_acquire(p.progress + head)) >= added", "true"),
    "additions not awaited": lambda text: replace(
        "    await_count(", "    red_add_release(progress(), 1);\n    await_count("
    )(replace(ADDED, "")(text)),
    "parts left over by all": replace("int(p.progress[head]) - added)", "int(p.progress[head]))"),
}


@pytest.mark.sampled("sums not counted as cleared")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(SWEEPING_MUTATIONS))
def test_sweeping_mutations_are_noticed(name):
    b = sweeping("alibi")
    assert any(b.fails(SWEEPING_MUTATIONS[name], seed=seed, **HEAD_BY_HEAD) for seed in range(4))


@pytest.mark.sampled("ld.acquire")
@pytest.mark.slow
@pytest.mark.parametrize("word", ["ld.acquire", "red.release"])
def test_sums_that_others_cleared_are_handed_over(word):
    """In the order of time all is right: without these a GPU may add to what was not 0 yet."""
    shape = {"head_dim": 80, "tile": (64, 128), "heads": 3, "kv_heads": 3, "q_len": 40, "kv_len": 70}
    relaxed = word.partition(".")[0] + ".relaxed"
    with pytest.raises(errors.Race, match=r"global red by block 1 of byte \d+ of dq_sum .*, which block 0 wrote"):
        Backward("causal", pipeline="hopper", **shape).run(
            lambda text: text.replace(f"{word}.gpu", f"{relaxed}.gpu"), **HEAD_BY_HEAD
        )


@pytest.mark.nightly(sibling="test_sweeping_mutations_are_noticed")
@pytest.mark.slow
def test_sums_cleared_late_are_awaited():
    b = sweeping("alibi")
    assert b.wrong(b.run(CLEARED_LATE, seed=0, **HEAD_BY_HEAD)) == []


@pytest.mark.sampled("full-shape1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("causal", {"head_dim": 64, "tile": (128, 128), "q_len": 200, "kv_len": 140}),
        ("full", {"head_dim": 128, "dtype": "float16", "q_len": 71, "kv_len": 101}),
        ("packed_softcap", {"head_dim": 128, "heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 150}),
    ],
)
def test_hopper_drops_what_the_forward_dropped(spec, shape):
    check(Backward(spec, pipeline="hopper", dropout=DROPOUT, **shape))


KEY_BIAS = fg.tensor(
    "bias", dims=("batch", "kv"), dtype="float32", example=lambda p, r: r.normal(size=(p.batch, p.kv_len))
)
QUERY_BIAS = fg.tensor(
    "bias", dims=("heads", "q"), dtype="float32", example=lambda p, r: r.normal(size=(p.heads, p.q_len))
)
BY_KEY = fg.variant(score=lambda s, b, h, q, k: s + KEY_BIAS[b, k], name="by_key")
BY_QUERY = fg.variant(lambda b, h, q, k: k <= q, score=lambda s, b, h, q, k: s + QUERY_BIAS[h, q], name="by_query")


@pytest.mark.sampled("relative_bias-table-shape1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "captured", "shape"),
    [
        ("alibi", "slopes", {"head_dim": 128, "heads": 4, "kv_heads": 2, "q_len": 71, "kv_len": 150}),
        ("relative_bias", "table", {"head_dim": 64, "dropout": DROPOUT, "q_len": 71, "kv_len": 101}),
        (BY_KEY, "bias", {"head_dim": 128, "q_len": 71, "kv_len": 150}),
        (BY_QUERY, "bias", {"head_dim": 96, "heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 150}),
    ],
)
def test_hopper_has_gradients_of_captured_tensors(spec, captured, shape):
    b = Backward(spec, pipeline="hopper", gradients=(captured,), **shape)
    assert captured in check(b).captured
    assert b.wrong(b.run(seed=1)) == []


DROPOUT_MUTATIONS = {
    "P of dV not dropped": replace("fmaxf(probability[i], 0.f)", "fabsf(probability[i])"),
    "dP not dropped": replace("probability[i] < 0.f ? 0.f : dp[i]", "false ? 0.f : dp[i]"),
    "neighbours' draws swapped": replace("lane & ~12 | other << 2", "lane & ~12 | (other ^ 1) << 2"),
    "dV not scaled": replace("p.dropout_scale, keys", "1.f, keys"),
}


@pytest.mark.sampled("P of dV not dropped")
@pytest.mark.slow
@pytest.mark.parametrize("name", DROPOUT_MUTATIONS)
def test_mutations_of_dropout_are_noticed(name):
    b = Backward("causal", pipeline="hopper", dropout=DROPOUT, tile=(64, 128), q_len=100, kv_len=100)
    assert b.wrong(b.run(DROPOUT_MUTATIONS[name]))


@pytest.mark.slow
def test_a_dropped_consumer_deadlocks():
    b = Backward("causal", pipeline="hopper", head_dim=80, q_len=70, kv_len=100)
    program = b.plan.program
    dispatch = tuple(tuple(name for name in chain if name != "dq accumulation") for chain in program.dispatch)
    changed = dataclasses.replace(b.plan, program=dataclasses.replace(program, dispatch=dispatch))
    b.plan, b.source = changed, emit(changed)
    with pytest.raises(errors.Deadlock):
        b.run(step_limit=STEPS)
