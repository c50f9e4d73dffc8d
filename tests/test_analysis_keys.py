"""Tiles seen from the keys, as a backward visits them, against the grid of all classes."""

import numpy as np
import pytest
from effort import effort
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_masks import drawn, random_case, random_mask, seeded

import flashgen as fg
from flashgen.analysis import counts, tiles
from flashgen.analysis.counts import KeyCounts
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import EMPTY, Case
from flashgen.lang.load import load_spec, shipped
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem


def check(variant, case, tile):
    facts, sizes = analyse(variant), case.sizes
    kv_tiles, group = -(-sizes["kv_len"] // tile.kv), sizes["heads"] // sizes["kv_heads"]
    rows = keys = 0
    for b in range(sizes["batch"]):
        for kv_head in range(sizes["kv_heads"]):
            grids = [tiles.grid(facts, case, tile, b, kv_head * group + member) for member in range(group)]
            for j in range(kv_tiles):
                seen = False
                for member, grid in enumerate(grids):
                    schedule = tiles.schedule_queries(facts, case, tile, j, b, kv_head * group + member)
                    column = grid[:, j]
                    assert schedule == [(i, column[i]) for i in range(len(column)) if column[i] != EMPTY]
                    rows += sum(min(tile.q, sizes["q_len"] - i * tile.q) for i, _ in schedule)
                    seen |= bool(schedule)
                keys += seen * min(tile.kv, sizes["kv_len"] - j * tile.kv)
    visited = counts.count(facts, case, tile).visited
    assert counts.count_keys(facts, case, tile, visited) == KeyCounts(rows=rows, keys=keys)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_masks(data):
    variant = random_mask(drawn(data))
    assume(variant is not None)
    check(variant, *random_case(drawn(data)))


@pytest.mark.sampled("20", "40")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_random_masks_of_a_seed(seed, monkeypatch):
    monkeypatch.setattr(counts, "_SQUARE", 1 + seed // 20 % 4)
    for n in range(seed, seed + 20):
        source = seeded(n)
        variant = random_mask(source)
        if variant is not None:
            check(variant, *random_case(source))


SPREAD = fg.variant(lambda b, h, q, k: (k <= q - 16 * h) & (q - k < 40 + 8 * b) | (k < h), name="spread")
PARITY = fg.variant(lambda b, h, q, k: ((q - k) % 2 == h % 2) & (k // 16 != h) & (k < 50 + b), name="parity")
NOTHING = fg.variant(lambda b, h, q, k: k < 0, name="nothing")


@pytest.mark.sampled(
    "(4, 4)-parity", "(4, 4)-nothing", "(4, 2)-spread", "(4, 2)-nothing", "(4, 1)-nothing", "(6, 2)-nothing"
)
@pytest.mark.slow
@pytest.mark.parametrize("variant", [SPREAD, PARITY, NOTHING], ids=lambda v: v.name)
@pytest.mark.parametrize("shape", [(4, 4), (4, 2), (4, 1), (6, 2)], ids=str)
def test_heads_that_share_keys_see_other_tiles(variant, shape):
    heads, kv_heads = shape
    for q_len, kv_len in ((70, 90), (64, 64), (1, 100), (100, 1)):
        sizes = {"batch": 2, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
        case = Case(sizes=sizes, params={}, tensors={})
        for tile in (Tile(q=16, kv=16), Tile(q=32, kv=16), Tile(q=16, kv=64)):
            check(variant, case, tile)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_spec(name):
    variant = load_spec(name).bind()
    problem = Problem(batch=2, heads=4, kv_heads=2, q_len=333, kv_len=700, head_dim=64, v_head_dim=64)
    tensors = {t.name: np.asarray(t.example(problem, np.random.default_rng(0))) for t in variant.tensors}
    case = Case(sizes=problem.sizes(), params=variant.values({}), tensors=tensors)
    check(variant, case, Tile(q=64, kv=128))


@pytest.mark.parametrize("sizes", [dict(q_len=0), dict(kv_len=0), dict(batch=0)], ids=str)
def test_nothing_to_visit(sizes):
    case = Case(sizes={"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 5, "kv_len": 5, **sizes}, params={}, tensors={})
    facts = analyse(SPREAD)
    assert counts.count_keys(facts, case, Tile(q=16, kv=16), 0) == KeyCounts()
    if sizes.get("q_len") == 0:
        assert tiles.schedule_queries(facts, case, Tile(q=16, kv=16), 0) == []


def test_a_million_tokens_are_counted_at_once():
    facts = analyse(fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 1024)))
    tile = Tile(q=64, kv=128)

    def count(length):
        sizes = {"batch": 1, "heads": 16, "kv_heads": 4, "q_len": length, "kv_len": length}
        case = Case(sizes=sizes, params={}, tensors={})
        return counts.count_keys(facts, case, tile, counts.count(facts, case, tile).visited)

    few, many = effort(lambda: count(1 << 14)), effort(lambda: count(1 << 20))
    assert many.calls < 1.1 * few.calls and many.peak_bytes < 1 << 20
    assert count(1 << 20).keys == 4 << 20
