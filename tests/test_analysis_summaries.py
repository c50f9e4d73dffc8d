"""What only data tell: which parts of a mask are summarised, what is found, and that nobody evaluates pairs for it."""

import dataclasses

import numpy as np
import pytest
import variant_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codegen_variant_code import scheduled

import flashgen as fg
from flashgen.analysis import counts, tiles
from flashgen.analysis.facts import analyse
from flashgen.analysis.summaries import MOST, Group
from flashgen.analysis.tiles import EMPTY, FULL, PARTIAL, Case
from flashgen.codegen.printer import Formula
from flashgen.planning import order, planner, summaries, traffic
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem
from flashgen.runtime import tiles as walk
from flashgen.runtime.tiles_backward import count_backward

position = fg.tensor("position", dims=("kv",), dtype="int32")
bounded = fg.tensor("bounded", dims=("kv",), dtype="int32", min=0, max=1 << 20)
kind = fg.tensor("kind", dims=("kv",), dtype="int32")
large = fg.tensor("large", dims=("batch", "kv"), dtype="int64")
flag = fg.tensor("flag", dims=("batch", "kv"), dtype="bool")
height = fg.tensor("height", dims=("heads", "kv"), dtype="float32")
table = fg.tensor("table", dims=(None,), dtype="int32")
in_order = fg.tensor("in_order", dims=("kv",), dtype="int32", sorted=True)
pairs = fg.tensor("pairs", dims=(None, None), dtype="bool")
levels = fg.tensor("levels", dims=("batch", None, None), dtype="float32")

TILE = Tile(q=16, kv=16)


def parts(mask):
    found = analyse(fg.variant(mask)).summaries
    return [(one.name, Formula().inline(one.value, 100), one.grouped) for one in found]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, k: k <= q, []),
        (lambda b, h, q, k: in_order[q] == in_order[k], []),
        (lambda b, h, q, k: pairs[q % 64, k % 64], []),  # tiles would read elements that others read
        (lambda b, h, q, k: pairs[q + k, k], []),
        (lambda b, h, q, k: pairs[(q + 3) // 8, k], []),
        (lambda b, h, q, k: ~pairs[q // 64, k // 64], []),  # two blocks a side are looked at themselves
        (lambda b, h, q, k: ~pairs[q // 16, k // 16 + 1] & (k <= q), [("pairs_qk", None, False)]),
        (lambda b, h, q, k: pairs[k, q], [("pairs_qk", "pairs[k, q]", False)]),
        (lambda b, h, q, k: position[k] <= q, [("position_k", "position[k]", True)]),
        (lambda b, h, q, k: ~flag[b, k], [("flag_k", "flag[b, k]", False)]),
        (lambda b, h, q, k: flag[b, q] & (k < 7) | flag[b, k], [("flag_q", None, False), ("flag_k", None, False)]),
        # bits of one position, of which a range forgets which go with which
        (lambda b, h, q, k: (k | k >> 1) & 5 <= q ^ k, [("bits_k", None, False)]),
        (lambda b, h, q, k: ((q // 8) ^ (k // 8)) < 4, []),
        # monotone in an element: what is known of the element says as much, and serves other conditions
        (lambda b, h, q, k: (position[k] + 5 <= q) & (q - position[k] < 9), [("position_k", "position[k]", True)]),
        # not monotone: the condition itself
        (lambda b, h, q, k: kind[k] == 3, [("kind_k", "kind[k] == 3", False)]),
        (lambda b, h, q, k: kind[k] % 4 <= q, [("kind_k", "kind[k] % 4", True)]),
        # composed, and with the position itself
        (lambda b, h, q, k: table[kind[k]] <= q, [("kind_k", "table[kind[k]]", True)]),
        (lambda b, h, q, k: k >= q - bounded[q], [("bounded_q", "q - bounded[q]", False)]),
        (lambda b, h, q, k: q - bounded[q] == k - bounded[k], [("bounded_q", None, False), ("bounded_k", None, True)]),
    ],
)
def test_what_is_summarised(mask, expected):
    found = parts(mask)
    assert len(found) == len(expected)
    for got, (name, value, grouped) in zip(found, expected, strict=True):
        assert got == (name, value or got[1], grouped)


def test_both_ways_round_a_comparison_is_written_alike():
    def mask(b, h, q, k):
        return (k >= q - bounded[q]) & (bounded[q] + k - q < 40) & ((q - bounded[q] != k) | (k % 2 == 0))

    assert parts(mask) == [("bounded_q", "q - bounded[q]", False)]


def test_no_more_than_a_few():
    def mask(b, h, q, k):
        found = position[k] <= q
        for i in range(2 * MOST):
            found = found & (kind[k] % (i + 3) <= q)
        return found

    assert len(parts(mask)) == MOST


def case_of(q_len, kv_len, batch=1, heads=1, **tensors):
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads, "q_len": q_len, "kv_len": kv_len}
    return Case(sizes=sizes, params={}, tensors=tensors)


def drawn(variant, rng, sizes):
    """Values with runs, jumps and strays."""
    length = max(sizes["q_len"], sizes["kv_len"])

    def steps(*shape):
        return np.cumsum(rng.integers(-1, 3, (*shape, length)) * (rng.random((*shape, length)) < 0.3), axis=-1)

    tensors = {
        "position": np.roll(np.arange(length), rng.integers(length)),
        "bounded": np.arange(length) % rng.integers(1, length + 1),
        "kind": steps() % 5,
        "large": steps(sizes["batch"]) << 40,
        "flag": rng.random((sizes["batch"], length)) < rng.choice([0.01, 0.5, 0.99]),
        "height": np.where(rng.random((sizes["heads"], length)) < 0.02, np.nan, steps(sizes["heads"])),
        "table": rng.integers(0, length, 5),
    }
    near = np.abs(np.subtract.outer(np.arange(length + 1), np.arange(length + 1) * 2 % length)) < rng.integers(1, 30)
    tensors |= {"pairs": near, "levels": near[None].repeat(sizes["batch"], 0) * 4 + (rng.random(near.shape) < 0.001)}
    dtypes = {"large": np.int64, "flag": bool, "pairs": bool, "height": np.float32, "levels": np.float32}
    return {t.name: tensors[t.name].astype(dtypes.get(t.name, np.int32)) for t in variant.tensors}


MASKS = {
    "rotated": lambda b, h, q, k: (position[k] <= q) & (q - position[k] < 20),
    "restarts": lambda b, h, q, k: (k <= q) & (k >= q - bounded[q]),
    "kinds": lambda b, h, q, k: (kind[q] == kind[k]) | (kind[k] == 0),
    "composed": lambda b, h, q, k: (table[kind[k]] <= q) & (k <= table[kind[q]] + 9),
    "large": lambda b, h, q, k: (large[b, k] >> 40 <= q) & (large[b, q] != large[b, k]),
    "wraps": lambda b, h, q, k: large[b, k] * large[b, k] + large[b, k] <= q,
    "flags": lambda b, h, q, k: (flag[b, q] | flag[b, k]) & (h < 1) | (abs(q - k) < 5),
    "heights": lambda b, h, q, k: (height[h, k] < 4.0) & ~(height[h, q] * 0.5 > 1.5),
    "blocks": lambda b, h, q, k: (kind[k] <= q // 32) & (k // 24 <= q // 24),
    "blocks of queries": lambda b, h, q, k: (position[k] <= q // 32 * 32) & (position[k] + 40 > q // 32),
    "dense": lambda b, h, q, k: pairs[q, k] & (k <= q),
    "table": lambda b, h, q, k: (levels[b, k // 8, q // 5 + 1] < 3) | (k == q),
    "loop": lambda b, h, q, k: fg.any(3, lambda i: kind[k] == i + 1) & (k <= q),
}


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(MASKS)), st.integers(0, 1 << 20), st.integers(1, 80), st.integers(1, 80))
def test_classes_are_sound(name, seed, q_len, kv_len):
    rng, variant = np.random.default_rng(seed), fg.variant(MASKS[name])
    case = case_of(q_len, kv_len, 2, 2)
    case = dataclasses.replace(case, tensors=drawn(variant, rng, case.sizes))
    facts, tile = analyse(variant), Tile(q=int(rng.integers(1, 40)), kv=int(rng.integers(1, 40)))
    for b, h in np.ndindex(2, 2):
        judged, true = tiles.grid(facts, case, tile, b, h), tiles.true_grid(facts, case, tile, b, h)
        assert np.all((judged == true) | (judged == PARTIAL))
        for i in range(len(judged)):
            at = dict(tiles.schedule(facts, case, tile, i, b, h))
            assert [at.get(j, EMPTY) for j in range(judged.shape[1])] == judged[i].tolist()


def emitted(name, tile=TILE, lengths=(75, 91)):
    variant, rng = fg.variant(MASKS[name]), np.random.default_rng(3)
    case = case_of(*lengths, 2, 2)
    case = dataclasses.replace(case, tensors=drawn(variant, rng, case.sizes))
    facts = analyse(variant)
    assert facts.summaries
    visited, *_ = variant_kernel.run(facts, case, tile)
    np.testing.assert_array_equal(visited, scheduled(facts, case, tile))
    return visited


@pytest.mark.sampled("dense", "loop", "restarts", "rotated")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MASKS) - {"flags"}))
def test_emitted_classes_are_those_of_python(name):
    emitted(name)


@pytest.mark.slow
def test_emitted_classes_of_flags_by_batch():
    assert set(np.unique(emitted("flags"))) >= {EMPTY, PARTIAL}


def ends(length, positions):
    """The first and last positions of tiles."""
    first = np.arange(0, length, positions)
    return first, np.minimum(first + positions, length) - 1


#: What bounds a value, as it lies in memory; of a condition whether it may be true, and false.
STORED = {
    "Truth": np.dtype([("hi", bool), ("lo", bool)]),
    "Range<int>": np.dtype([("lo", np.int32), ("hi", np.int32)]),
    "Range<i64>": np.dtype([("lo", np.int64), ("hi", np.int64)]),
    "FloatRange": np.dtype([("lo", np.float64), ("hi", np.float64), ("nan", bool), ("", "V7")]),
}


@pytest.mark.sampled("rotated", "restarts", "wraps", "blocks", "dense", "loop")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("rotated", "flags") else pytest.mark.slow) for name in MASKS]
)
def test_what_a_kernel_finds_is_what_the_values_are(name):
    """Of tiles with more and with fewer positions than a warp has lanes, cut at the length."""
    variant, rng, tile = fg.variant(MASKS[name]), np.random.default_rng(4), Tile(q=48, kv=80)
    case = case_of(109, 91, 2, 2)
    case = dataclasses.replace(case, tensors=drawn(variant, rng, case.sizes))
    facts = analyse(variant)
    _, _, rooms = variant_kernel.prepared(facts, case, tile)
    for one, how in zip(facts.summaries, summaries.tile_summaries(facts, tile), strict=True):
        groups = Group if one.grouped else (Group.LOW,)
        found = rooms[one.name].view(STORED[how.range_type]).reshape(-1, len(groups))
        b, h = np.ogrid[: 2 if one.by_batch else 1, : 2 if one.by_head else 1]
        q, k = ends(case.sizes["q_len"], how.positions), ends(case.sizes["kv_len"], how.keys or how.positions)
        at = {"q": (q, (0, 0)), "k": ((0, 0), k), "qk": (tuple(x[:, None] for x in q), k)}[one.side]
        for i, group in enumerate(groups):
            known = tiles.summarised(one, case, b[..., None, None], h[..., None, None], *at, group)
            if how.range_type == "Truth":
                known = {"hi": known.may_true, "lo": known.may_false}
            else:
                known = {"lo": known.lo, "hi": known.hi, "nan": known.nan}
            for end in [end for end in ("lo", "hi", "nan") if end in found.dtype.names]:
                np.testing.assert_array_equal(found[end][:, i], known[end].ravel())


@pytest.mark.slow
def test_cells_are_summarised_in_parts_that_divide_tiles():
    emitted("blocks", Tile(q=32, kv=32))
    (found,) = summaries.tile_summaries(analyse(fg.variant(MASKS["blocks"])), Tile(q=32, kv=32))
    assert (found.positions, found.grouped) == (16, False)  # cells of 48 keys, and tiles of 32
    (found,) = summaries.tile_summaries(analyse(fg.variant(MASKS["blocks of queries"])), Tile(q=48, kv=32))
    assert (found.positions, found.grouped) == (32, True)


def test_a_tile_without_values_in_between_is_empty_there():
    """Without groups of values the tile in which a cache goes round would be visited by all queries."""
    variant, length = fg.variant(MASKS["rotated"]), 256
    facts, case = analyse(variant), case_of(length, length, position=np.roll(np.arange(length, dtype=np.int32), 100))
    assert counts.loss(tiles.grid(facts, case, TILE), tiles.true_grid(facts, case, TILE)).exact
    whole = dataclasses.replace(facts, summaries=tuple(dataclasses.replace(s, grouped=False) for s in facts.summaries))
    assert not counts.loss(tiles.grid(whole, case, TILE), tiles.true_grid(facts, case, TILE)).exact


def test_a_table_is_read_once_an_element():
    variant, read = fg.variant(lambda b, h, q, k: pairs[q // 16, k // 8]), []

    class Counted(Case):
        def evaluate(self, root, **positions):
            read.append(np.size(positions.get("k", 0)) * np.size(positions.get("q", 0)))
            return super().evaluate(root, **positions)

    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 1024, "kv_len": 1024}
    case = Counted(sizes=sizes, params={}, tensors={"pairs": np.eye(64, 128, dtype=bool)})
    facts = analyse(variant)
    judged = tiles.classify(
        facts, case, b=0, h=0, q0=np.arange(0, 1024, 128)[:, None], q1=np.arange(127, 1024, 128)[:, None], k0=0, k1=127
    )
    assert judged.ravel().tolist() == 2 * [PARTIAL] + 6 * [EMPTY]
    assert sum(read) <= 4 * 64 * 128


def test_elements_are_read_once_each_and_not_once_a_pair():
    variant, read = fg.variant(MASKS["rotated"]), []

    class Counted(Case):
        def evaluate(self, root, **positions):
            read.append(np.size(positions.get("k", 0)) * np.size(positions.get("q", 0)))
            return super().evaluate(root, **positions)

    length = 4096
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": length, "kv_len": length}
    case = Counted(sizes=sizes, params={}, tensors={"position": np.arange(length, dtype=np.int32)})
    tiles.grid(analyse(variant), case, Tile(q=128, kv=128))
    assert sum(read) <= 2 * length


def test_an_element_that_no_pair_needs_may_lie_outside():
    """As in a kernel, the nearest element stands for it; positions that matter still raise."""
    few = fg.tensor("few", dims=(None,), dtype="int32")
    variant = fg.variant(lambda b, h, q, k: (k < 4) & (few[k] <= q))
    case = case_of(8, 8, few=np.zeros(4, np.int32))
    assert tiles.grid(analyse(variant), case, Tile(q=4, kv=4)).tolist() == [[FULL, EMPTY]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Plans


@pytest.mark.sampled("rotated-ampere", "restarts-hopper", "flags-hopper", "heights-hopper", "dense-hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["ampere", "hopper"])
@pytest.mark.parametrize("name", ["rotated", "restarts", "flags", "heights", "blocks", "dense", "table"])
def test_bytes_are_those_of_the_walk(monkeypatch, name, pipeline):
    variant = fg.variant(MASKS[name])
    problem = Problem(batch=2, heads=2, kv_heads=1, q_len=300, kv_len=331, head_dim=64, v_head_dim=64)
    tensors = drawn(variant, np.random.default_rng(1), problem.sizes())
    case, facts = Case(sizes=problem.sizes(), params={}, tensors=tensors), analyse(variant)
    dims = {"head_dim": 64, "v_head_dim": 64, "dtype": "bfloat16"}
    plan = planner.menu(variant, "sm_90a", "bfloat16", 64, pipeline=pipeline).plans[0]
    predicted, counted = traffic.predict(plan, problem, case), walk.count(plan, facts, case, **dims)
    moved = counted.read_bytes, counted.write_bytes
    assert (predicted.hbm.read_bytes, predicted.hbm.write_bytes) == moved
    assert dict(predicted.kernels)["attention_summaries"].write_bytes == counted.summaries > 0
    of_bits = [one.bits_pointer for one in plan.summaries if one.bits is not None]
    names = [*(one.pointer for one in plan.summaries), *of_bits, *(["order"] if plan.ordered else [])]
    assert [part.name for part in predicted.workspaces] == names
    in_parts = name in ("blocks", "table")  # whose tiles are judged by parts: they have no order
    assert plan.ordered == (pipeline == "hopper" and not in_parts)
    if plan.ordered:
        monkeypatch.setattr(order, "wanted", lambda *_: True)
        predicted, counted = traffic.predict(plan, problem, case), walk.count(plan, facts, case, **dims)
        assert (predicted.hbm.read_bytes, predicted.hbm.write_bytes) == (counted.read_bytes, counted.write_bytes)
        assert counted.order == sum(part.amount for part in predicted.workspaces if part.name == "order") > 0
        monkeypatch.undo()
    for deterministic in (False, True):
        menu = planner.backward_menu(variant, "sm_90a", "bfloat16", 64, pipeline=pipeline, deterministic=deterministic)
        plan = menu.plans[0]
        predicted, counted = traffic.predict(plan, problem, case), count_backward(plan, facts, case, **dims)
        by_entry = {entry: (moved.read_bytes, moved.write_bytes) for entry, moved in predicted.kernels}
        assert by_entry == {e: (m.read.total(), m.written.total()) for e, m in counted.kernels.items()}
        assert next(iter(by_entry)) == "attention_summaries"


def test_queries_of_packed_heads_are_not_summarised():
    by_query, by_key = (fg.variant(lambda b, h, q, k, at=at: flag[b, at(q, k)]) for at in (first_of, last_of))
    assert planner.menu(by_key, "sm_90a", "bfloat16", 64).packed is not None
    assert planner.menu(by_query, "sm_90a", "bfloat16", 64).packed is None
    for variant in (by_query, fg.variant(MASKS["dense"])):
        with pytest.raises(fg.PlanError, match="summarised over tiles of queries"):
            planner.menu(variant, "sm_90a", "bfloat16", 64, packed=True)


def first_of(q, k):
    return q


def last_of(q, k):
    return k
