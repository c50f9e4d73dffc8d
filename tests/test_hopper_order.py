"""Blocks take tiles of queries in an order that a kernel before finds, where data say how much each sees: interpreted,
against tiles that are counted here."""

import dataclasses

import numpy as np
import ptx_attention
import pytest

import flashgen as fg
from flashgen.analysis import tiles
from flashgen.planning import order, planner
from flashgen.planning.members import DynamicScheduler
from flashgen.planning.traffic import predict

flag = fg.tensor(
    "flag", dims=("batch", "kv"), dtype="bool", example=lambda p, rng: rng.random((p.batch, p.kv_len)) < 0.004
)
of_head = fg.tensor(
    "of_head", dims=("heads", "kv"), dtype="bool", example=lambda p, rng: rng.random((p.heads, p.kv_len)) < 0.004
)
position = fg.tensor(
    "position",
    dims=("kv",),
    dtype="int32",
    example=lambda p, rng: (64 * rng.permutation(-(-p.kv_len // 64))[:, None] + np.arange(64)).ravel()[: p.kv_len],
)

MASKS = {
    "flags": lambda b, h, q, k: (abs(q - k) <= 20) | flag[b, q] | flag[b, k],
    "of each head": lambda b, h, q, k: (abs(q - k) <= 20) | of_head[h, k],
    "of each head and sequence": lambda b, h, q, k: of_head[h, k] & (k <= q) | flag[b, q] & (q < 200),
    "permuted": lambda b, h, q, k: position[k] <= position[q],
}


def work(name):
    variant = fg.variant(MASKS[name], name=name.replace(" ", "_"))
    return ptx_attention.work(variant, "hopper", batch=2, heads=2, kv_heads=1, q_len=420, kv_len=420, tile=(64, 64))


def seen(made, b, h):
    """How many tiles of keys each tile of queries sees."""
    plan, problem = made.plan, made.problem
    count = -(-problem.q_len // plan.tile.q)
    return [len(tiles.schedule(made.facts, made.case, plan.tile, tile, b, h)) for tile in range(count)]


@pytest.mark.slow
@pytest.mark.sampled("of each head and sequence")
@pytest.mark.parametrize("name", MASKS)
def test_tiles_that_see_most_come_first(monkeypatch, name):
    monkeypatch.setattr(order, "LEAST_TILES", 1)
    made = work(name)
    result = made.run(track=("order",))
    assert made.wrong(result) == () and not any(report.conflicts for report in result.reports.values())
    assert list(result.reports) == ["attention_summaries", "attention_order", "attention_forward"]
    by_batch, by_head = order.of_each(made.plan)
    assert (by_batch, by_head) == ("flag" in str(made.variant.tensors), "of_head" in str(made.variant.tensors))
    places = [(b, h) for b in range(2 if by_batch else 1) for h in range(2 if by_head else 1)]
    found = result.workspaces["order"].view(np.int32).reshape(len(places), 2, -1)
    for (b, h), (_, taken) in zip(places, found, strict=True):
        counts = seen(made, b, h)
        assert sorted(taken) == list(range(len(counts)))
        assert [counts[tile] for tile in taken] == sorted(counts, reverse=True)
    monkeypatch.setattr(order, "wanted", lambda plan, *_: plan.ordered)  # as a GPU of fewer SMs would
    predicted = dict(predict(made.plan, made.problem, made.case).kernels)["attention_order"]
    report = result.reports["attention_order"]
    assert 4 * len(report.touched["order"]) == predicted.write_bytes


@pytest.mark.slow
def test_without_an_order_the_last_tiles_come_first():
    made = work("flags")
    result = made.run()
    assert made.wrong(result) == () and list(result.reports) == ["attention_summaries", "attention_forward"]


def test_who_has_an_order():
    def scheduler(mask, **options):
        return planner.menu(fg.variant(mask), "sm_90a", "bfloat16", 64, **options).plans[0].specialized.scheduler

    assert scheduler(MASKS["flags"]) == DynamicScheduler(ordered=True)
    assert scheduler(lambda b, h, q, k: k <= q) == DynamicScheduler(ordered=False), "no data decide"
    plan = planner.menu(fg.variant(MASKS["flags"]), "sm_90a", "bfloat16", 64).plans[0]
    assert plan.ordered and "attention_order(" in fg.emit(plan)
    static = dataclasses.replace(plan.specialized, scheduler=DynamicScheduler())
    text = fg.emit(dataclasses.replace(plan, specialized=static))
    assert "attention_order" not in text and "p.order" not in text


@pytest.mark.parametrize("tiles, kv_tiles, found", [(132, 10_000, False), (133, 256, True), (1056, 31, False)])
def test_small_calls_have_none(tiles, kv_tiles, found):
    plan = planner.menu(fg.variant(MASKS["flags"]), "sm_90a", "bfloat16", 64).plans[0]
    assert order.wanted(plan, tiles, kv_tiles, 132) == found
