"""Tile classes, schedules and counts against the mask evaluated at every pair."""

import numpy as np
import pytest
from effort import effort
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nested_masks import MASKS
from random_masks import drawn, random_case, random_mask, seeded

import flashgen as fg
from flashgen.analysis import counts, tiles
from flashgen.analysis.counts import TileCounts
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import EMPTY, FULL, PARTIAL, Case
from flashgen.lang.load import shipped
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem

w = fg.param("w", default=4, min=1)


def places(case):
    return [(b, h) for b in range(case.sizes["batch"]) for h in range(case.sizes["heads"])]


def case_of(q_len, kv_len, batch=1, heads=1, tensors=None, **params):
    sizes = {"batch": batch, "heads": heads, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}
    return Case(sizes=sizes, params=params, tensors=tensors or {})


def check(variant, case, tile):
    """Everything that Python says about the tiles of a problem, against brute force; returns whether it was exact."""
    facts = analyse(variant)
    q_len, kv_len = case.sizes["q_len"], case.sizes["kv_len"]
    counted = dict.fromkeys(TileCounts.__slots__, 0)
    exact = True
    for b, h in places(case):
        judged, true = tiles.grid(facts, case, tile, b, h), tiles.true_grid(facts, case, tile, b, h)
        assert np.all((judged == true) | (judged == PARTIAL)), f"not sound:\n{judged}\n{true}"
        exact &= bool(np.all(judged == true))
        kept = case.evaluate(variant.mask, b=b, h=h, q=np.arange(q_len)[:, None], k=np.arange(kv_len))
        counted["visible"] += int(np.broadcast_to(kept, (q_len, kv_len)).sum())
        for i, row in enumerate(judged):
            schedule = tiles.schedule(facts, case, tile, i, b, h)
            assert schedule == [(j, row[j]) for j in reversed(range(len(row))) if row[j] != EMPTY]
            rows = min(tile.q, q_len - i * tile.q)
            columns = sum(min(tile.kv, kv_len - j * tile.kv) for j, _ in schedule)
            counted["visited_rows"] += rows * bool(schedule)
            counted["visited_columns"] += columns
            counted["visited_elements"] += rows * columns
            counted["unseen"] += int(((row == PARTIAL) & (true[i] == EMPTY)).sum())
            counted["uncut"] += int(((row == PARTIAL) & (true[i] == FULL)).sum())
            for cls, name in ((EMPTY, "empty"), (PARTIAL, "partial"), (FULL, "full")):
                counted[name] += int((row == cls).sum())
            counted["total"] += len(row)
    assert counts.count(facts, case, tile) == TileCounts(**counted)
    assert exact or not facts.exact
    return exact


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_masks(data):
    variant = random_mask(drawn(data))
    assume(variant is not None)
    check(variant, *random_case(drawn(data)))


@pytest.mark.sampled("20", "40", "160")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_random_masks_of_a_seed(seed, monkeypatch):
    monkeypatch.setattr(counts, "_SQUARE", 1 + seed // 20 % 4)  # small problems have squares too
    for n in range(seed, seed + 20):
        source = seeded(n)
        variant = random_mask(source)
        if variant is not None:
            check(variant, *random_case(source))


@pytest.mark.sampled(every=5)
@pytest.mark.slow
@pytest.mark.parametrize("depth", (3, 12, 40))
@pytest.mark.parametrize("name", MASKS)
def test_nested_masks(name, depth):
    for q_len, kv_len, tile in ((23, 19, Tile(q=4, kv=3)), (64, 90, Tile(q=8, kv=16))):
        check(fg.variant(MASKS[name](depth)), case_of(q_len, kv_len), tile)


@pytest.mark.slow
def test_what_is_too_large_is_named_and_the_rest_still_taken_apart():
    rounds = MASKS["rounds"](16)
    variant = fg.variant(lambda b, h, q, k: rounds(b, h, q, k) & (k <= q))
    facts = analyse(variant)
    assert [term.zone.d_lo != () for term in facts.visible] == [True], "the causal half is a bound"
    (note,) = facts.notes()
    assert "lambda x: x <= 7" in note and "nested_masks.py:" in note and "is too large to take apart" in note
    case, tile = case_of(64, 64), Tile(q=8, kv=8)
    assert counts.count(facts, case, tile).empty >= 28
    check(variant, case, tile)
    assert analyse(fg.variant(MASKS["rounds"](2))).notes() == ()


# ---------------------------------------------------------------------------------------------------------------------
# Masks whose classes are exact


@st.composite
def pieces(draw):
    """A band or a prefix of the keys, as a function of (q, k)."""
    low = draw(st.integers(-12, 12))
    width = draw(st.integers(0, 8))
    return draw(
        st.sampled_from(
            [
                lambda q, k: (q - k >= low) & (q - k <= low + width),
                lambda q, k: k <= q + low,
                lambda q, k: q - k < low,
                lambda q, k: k < width,
                lambda q, k: abs(q - k - low) <= width,
                lambda q, k: (k <= q) & (q - k < w),
            ]
        )
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.lists(pieces(), min_size=1, max_size=3), st.data())
def test_unions_of_three_bands_and_prefixes_are_exact(parts, data):
    def union(b, h, q, k):
        mask = parts[0](q, k)
        for part in parts[1:]:
            mask = mask | part(q, k)
        return mask

    case, tile = random_case(drawn(data))
    variant = fg.variant(union)
    assert analyse(variant).exact
    assert check(variant, case, tile)


LAYOUTS = {
    "chunked": lambda n: lambda b, h, q, k: (k <= q) & (q // n == k // n),
    "butterfly": lambda n: lambda b, h, q, k: ((q // n) ^ (k // n)) & (((q // n) ^ (k // n)) - 1) == 0,
    "blocks": lambda n: lambda b, h, q, k: layout[q // n % 6, k // n % 6],
    "block causal": lambda n: lambda b, h, q, k: k // n <= q // n,
    "every other block": lambda n: lambda b, h, q, k: (q // n - k // n) % 2 == 0,
}
layout = fg.tensor("layout", dims=(None, None), dtype="bool")


@pytest.mark.sampled("blocks")
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@settings(deadline=None, max_examples=25)
@given(tile_q=st.integers(1, 4), tile_kv=st.integers(1, 4), times=st.integers(1, 3), data=st.data())
def test_block_layouts_are_exact_where_blocks_are_multiples_of_tiles(name, tile_q, tile_kv, times, data):
    block = int(np.lcm(tile_q, tile_kv)) * times
    case, _ = random_case(drawn(data))
    assert check(fg.variant(LAYOUTS[name](block)), case, Tile(q=tile_q, kv=tile_kv))


# ---------------------------------------------------------------------------------------------------------------------
# Captured tensors

ids = fg.tensor("ids", dims=("batch", "kv"), dtype="int32", sorted=True)
loose = fg.tensor("loose", dims=("kv",), dtype="int32")
tight = fg.tensor("tight", dims=("kv",), dtype="int32", min=0, max=3)
pairs = fg.tensor("pairs", dims=(None, None), dtype="int32")
heights = fg.tensor("heights", dims=("kv",), dtype="float32", sorted=True)


def grid_of(mask, case, tile):
    return tiles.grid(analyse(fg.variant(mask)), case, tile).tolist()


def test_a_sorted_tensor_is_bounded_by_its_ends():
    documents = np.array([[0, 0, 0, 1, 1, 1, 1, 2]], np.int32)
    case = case_of(8, 8, tensors={"ids": documents})
    found = grid_of(lambda b, h, q, k: ids[b, q] == ids[b, k], case, Tile(q=2, kv=2))
    assert found == [
        [FULL, PARTIAL, EMPTY, EMPTY],
        [PARTIAL, PARTIAL, PARTIAL, PARTIAL],
        [EMPTY, PARTIAL, FULL, PARTIAL],
        [EMPTY, PARTIAL, PARTIAL, PARTIAL],
    ]


def test_an_unsorted_tensor_is_bounded_by_its_elements_of_a_tile():
    values = np.array([3, 0, 1, 2], np.int32)
    case = case_of(4, 4, tensors={"loose": values, "tight": values})
    tile = Tile(q=2, kv=2)
    assert grid_of(lambda b, h, q, k: loose[k] < 4, case, tile) == [[FULL] * 2] * 2
    assert grid_of(lambda b, h, q, k: loose[k] < 3, case, tile) == [[PARTIAL, FULL]] * 2
    assert grid_of(lambda b, h, q, k: tight[k] < 0, case, tile) == [[EMPTY] * 2] * 2
    assert grid_of(lambda b, h, q, k: tight[k] < 3, case, Tile(q=4, kv=1)) == [[EMPTY, FULL, FULL, FULL]]


def test_one_that_both_positions_select_tells_only_its_declared_bounds():
    case, tile = case_of(8, 8, tensors={"pairs": np.zeros((4, 4), np.int32)}), Tile(q=4, kv=4)
    assert grid_of(lambda b, h, q, k: pairs[q % 4, k % 4] < 4, case, tile) == [[PARTIAL] * 2] * 2


def test_a_nan_tells_nothing():
    case = case_of(2, 2, tensors={"heights": np.array([np.nan, 1.0], np.float32)})
    tile = Tile(q=2, kv=1)
    assert grid_of(lambda b, h, q, k: heights[k] < 2.0, case, tile)[0][1] == FULL
    assert grid_of(lambda b, h, q, k: heights[k] < 2.0, case, tile)[0][0] == PARTIAL
    assert grid_of(lambda b, h, q, k: ~(heights[k] < 2.0), case, tile)[0][0] == PARTIAL


def test_indices_are_clamped_as_kernels_clamp_them():
    case = case_of(4, 4, tensors={"tight": np.array([1, 2], np.int32)})
    facts = analyse(fg.variant(lambda b, h, q, k: tight[k] == 2))
    assert tiles.grid(facts, case, Tile(q=4, kv=1)).tolist() == [[EMPTY, FULL, FULL, FULL]]


def test_a_dimension_of_one_serves_every_batch():
    shared = np.array([[0, 0, 1, 1]], np.int32)
    case = case_of(4, 4, batch=3, tensors={"ids": shared})
    variant = fg.variant(lambda b, h, q, k: ids[b, q] == ids[b, k])
    assert check(variant, case, Tile(q=2, kv=2))


# ---------------------------------------------------------------------------------------------------------------------
# Shipped specs

#: The last divides no block: a tile with parts of several blocks is judged by these.
TILES = (Tile(q=128, kv=64), Tile(q=64, kv=128), Tile(q=192, kv=96))


@pytest.mark.parametrize("name", shipped())
def test_no_tile_of_a_shipped_spec_is_misclassified(name):
    variant = fg.load_spec(name).bind()
    problem = Problem(batch=2, heads=2, kv_heads=1, q_len=1000, kv_len=1300, head_dim=64, v_head_dim=64)
    rng = np.random.default_rng(0)
    case = Case(
        sizes=problem.sizes(),
        params=variant.values({}),
        tensors={tensor.name: tensor.example(problem, rng) for tensor in variant.tensors},
    )
    facts = analyse(variant)
    assert [counts.misclassified(facts, case, tile) for tile in TILES] == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------------------------------------------
# Counts of large problems


def test_no_tiles_no_counts():
    facts = analyse(fg.variant(lambda b, h, q, k: k <= q))
    for sizes in ((0, 8), (8, 0)):
        assert counts.count(facts, case_of(*sizes), Tile(q=4, kv=4)) == TileCounts()
    assert counts.count(facts, case_of(8, 8, batch=0), Tile(q=4, kv=4)) == TileCounts()
    assert tiles.schedule(facts, case_of(8, 0), Tile(q=4, kv=4), 0) == []


def test_counts_are_multiplied_where_a_mask_does_not_depend_on_batch_or_head():
    facts = analyse(fg.variant(lambda b, h, q, k: (q - k) % 3 == 0))
    one = counts.count(facts, case_of(20, 30), Tile(q=4, kv=4))
    many = counts.count(facts, case_of(20, 30, batch=5, heads=7), Tile(q=4, kv=4))
    assert many == TileCounts(**{name: 35 * getattr(one, name) for name in TileCounts.__slots__})


MILLION = 1 << 20
LARGE = {
    "full": None,
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (k <= q) & (q - k < w),
    "sink": lambda b, h, q, k: (k <= q) & ((q - k < w) | (k < 4)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_million_tokens_are_counted_at_once(name):
    tile = Tile(q=128, kv=64)

    def count(length):
        facts = analyse(fg.variant(LARGE[name], name=f"{name}_of_{length}"))  # another name: analysed anew
        return counts.count(facts, case_of(length, length, w=4096), tile)

    few, many = effort(lambda: count(1 << 14)), effort(lambda: count(MILLION))
    # A union of bands takes a few numbers a Q tile, in one array; nothing is done by tile.
    assert many.calls < 1.1 * few.calls and many.peak_bytes < 512 * MILLION // tile.q
    found = count(MILLION)
    pairs = {
        "full": MILLION**2,
        "causal": MILLION * (MILLION + 1) // 2,
        "window": 4096 * 4097 // 2 + (MILLION - 4096) * 4096,
    }
    pairs["sink"] = pairs["window"] + sum(min(4, q - 4095) for q in range(4096, 4100)) + 4 * (MILLION - 4100)
    assert found.visible == pairs[name]
    assert found.total == found.empty + found.partial + found.full == MILLION // 128 * MILLION // 64


@pytest.mark.parametrize("name", ["causal", "window", "full"])
def test_floor_sums_agree_with_the_count_by_q_tile(name):
    """A band beside a term that holds nowhere is counted tile by tile."""
    mask = LARGE[name] or (lambda b, h, q, k: k >= 0)
    never = fg.param("never", default=0)
    band = analyse(fg.variant(mask))
    union = analyse(fg.variant(lambda b, h, q, k: mask(b, h, q, k) | ((k < never) & (h > 5))))
    assert (len(band.visible), len(union.visible)) == (1, 1 if name == "full" else 2)
    case = case_of(70_001, 50_003, w=1000, never=0)
    for tile in (Tile(q=128, kv=64), Tile(q=64, kv=176)):
        assert counts.count(band, case, tile) == counts.count(union, case, tile)


@pytest.mark.slow
def test_documents_of_a_million_tokens_are_counted_without_looking_at_every_tile():
    facts, tile = analyse(fg.load_spec("packed_softcap").bind()), Tile(q=128, kv=64)

    def documents(length):
        return np.sort(np.random.default_rng(0).integers(0, 50, (1, length), np.int32), axis=1)

    def count(doc):
        length = doc.shape[1]
        return counts.count(facts, case_of(length, length, tensors={"doc": doc}), tile)

    few, many = (effort(lambda length=n: count(documents(length))) for n in (MILLION // 16, MILLION))
    # 16 times the tokens have 256 times the tiles.
    assert many.calls < 16 * few.calls and many.peak_bytes < 16 << 20
    documents = documents(MILLION)
    found = count(documents)
    lengths = np.unique(documents, return_counts=True)[1]
    assert found.visited_elements > (lengths * (lengths + 1) // 2).sum() > 0.9 * found.full * 128 * 64
    assert found.visible is None  # 40,000 partial tiles of 8,192 pairs


def test_visible_pairs_are_unknown_only_past_a_limit(monkeypatch):
    facts = analyse(fg.variant(lambda b, h, q, k: (q - k) % 3 == 0))
    case, tile = case_of(100, 100), Tile(q=16, kv=16)
    assert counts.count(facts, case, tile).visible == 3334
    monkeypatch.setattr(counts, "MAX_COUNTED", 99 * 100)
    assert counts.count(facts, case, tile).visible is None


def test_a_schedule_visits_a_short_run_only():
    """A window's schedule costs as much for a long sequence as for a short one."""
    facts = analyse(fg.variant(LARGE["window"]))
    schedule = tiles.schedule(facts, case_of(MILLION, MILLION, w=200), Tile(q=128, kv=64), 5000)
    last = (5000 * 128 + 127) // 64
    assert schedule == [(last - i, FULL if i == 2 else PARTIAL) for i in range(6)][: len(schedule)]
    assert [tile for tile, _ in schedule] == list(range(last, (5000 * 128 - 199) // 64 - 1, -1))
