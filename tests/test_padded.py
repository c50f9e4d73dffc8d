"""Sequences with lengths and positions of their own: each has the bits that it has alone, whatever lies beyond it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from padded import batch
from ptx_attention import replace

import flashgen as fg
from flashgen.analysis.tiles import EMPTY, FULL, grid, schedule, schedule_queries, true_grid
from flashgen.codegen import emit
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec, shipped
from flashgen.planning.layout import Dense, Padded, Varlen
from flashgen.planning.plan import Tile
from flashgen.planning.planner import backward_menu, menu
from flashgen.runtime import tiles
from flashgen.runtime.philox import Dropout
from flashgen.runtime.tiles import Sequence

PIPELINES = ("ampere", "hopper")
ROOT = Path(__file__).parents[1]

#: One sequence ends inside a tile of queries and one of keys, the other fills its keys.
LENGTHS = {"q_lengths": (100, 33), "kv_lengths": (130, 150)}


def check(w, **options):
    result = w.run(**options)
    assert w.wrong(result) == []
    assert result.report.conflicts == []
    return result


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_lengths_and_the_end_of_a_cache(pipeline):
    check(batch("causal", pipeline, q_offset="end", **LENGTHS))


@pytest.mark.sampled("ampere-padding")
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_spec(pipeline, spec):
    check(batch(spec, pipeline, q_offset="end", **LENGTHS))


@pytest.mark.sampled("hopper-full")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "document"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_positions_of_each_sequence(pipeline, spec):
    check(batch(spec, pipeline, q_offset=(5, 90), q_len=70, kv_len=150))


@pytest.mark.sampled(
    "ampere-causal-{'kv_lengths': (63, 0), 'q_lengths': (0, 70)}",
    "ampere-causal-{'kv_lengths': (64, 128), 'q_lengths': (64, 65)}",
    "ampere-causal-{'kv_lengths': (60, 211), 'head_dim': 72, 'v_head_dim': 40, 'beyond': inf}",
    "hopper-causal-{'q_offset': 37}",
    "hopper-causal-{'kv_lengths': (63, 0), 'q_lengths': (0, 70)}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"q_offset": 37},
        {"q_offset": 64, "q_len": 1, "kv_len": 65},
        {"kv_lengths": (63, 0), "q_lengths": (0, 70)},
        {"kv_lengths": (64, 128), "q_lengths": (64, 65)},
        {"kv_lengths": (1, 129), "q_lengths": (64, 100), "q_stages": 2, "head_dim": 128},
        {"kv_lengths": (20, 129, 211, 7), "q_offset": "end", "q_len": 7, "heads": 4, "dtype": "float16"},
        {"kv_lengths": (60, 211), "head_dim": 72, "v_head_dim": 40, "beyond": np.inf},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ("full", "causal", "softcap", "blocks"))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_shapes(pipeline, spec, shape):
    if spec == "softcap" and shape.get("head_dim") == 128:
        shape = {**shape, "tile": (128, 64)}
    check(batch(spec, pipeline, **shape))


@pytest.mark.sampled("full")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal", "relative_bias"])
def test_packed_heads(spec):
    if spec == "relative_bias":
        spec = fg.variant(score=lambda s, b, h, q, k: s + fg.float32(q % 7))
    check(batch(spec, "hopper", packed=True, q_offset="end", heads=4, kv_heads=1, **LENGTHS))


@pytest.mark.sampled("hopper-0")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_any_order_of_warps(pipeline, seed):
    check(batch("causal", pipeline, q_offset="end", q_stages=2, **LENGTHS), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_dropout_is_by_position(pipeline):
    dropout = Dropout(p=0.3, seed=5, offset=0)
    w = batch("causal", pipeline, q_offset=(40,), q_len=60, kv_len=100, dropout=dropout)
    found, elsewhere = w.run().o, walked(w, (Sequence(0, 60, 100, 0),)).o
    np.testing.assert_allclose(found, walked(w).o, atol=0.05)
    assert abs(found - elsewhere).max() > 0.1


def walked(w, sequences=None):
    """What the walk on a CPU makes of a batch, or of other sequences in its tensors."""
    own = tuple(x.walked(0 if w.plan.layout.joined else b) for b, x in enumerate(w.sequences))
    options = {"scale": w.scale, "dtype": w.problem.dtype, "dropout": w.dropout, "sequences": sequences or own}
    return tiles.walk(w.plan, w.facts, w.case, *w.qkv, **options)


@pytest.mark.sampled("causal_bottom_right")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal_bottom_right", "alibi", "blocks"])
def test_the_walk_and_its_bytes(spec):
    """The CPU's walk reads what the kernel of pipeline ampere reads, and gives what it gives."""
    w = batch(spec, "ampere", q_offset="end", **LENGTHS)
    result, found = w.run(), walked(w)
    np.testing.assert_allclose(result.o, found.o, atol=0.04)
    np.testing.assert_allclose(result.lse, found.lse, atol=1e-4)
    for name in ("q", "k", "v", "o", "lse"):
        assert result.report.bytes(buffer=name) == getattr(found.traffic, name), name


@pytest.mark.parametrize("spec", sorted(shipped()))
def test_tiles_are_judged_by_positions(spec):
    """Tiles from any position on, judged by analysis, are those of the mask at every pair."""
    w = batch(spec, "ampere", q_offset=(37,), q_len=300, kv_len=390)
    sizes = {**w.case.sizes, "q_len": 337}
    case, tile = dataclasses.replace(w.case, sizes=sizes, q_offset=37), Tile(q=64, kv=32)
    found, true = grid(w.facts, case, tile), true_grid(w.facts, case, tile)
    assert (true[found == EMPTY] == EMPTY).all() and (true[found == FULL] == FULL).all()
    whole = true_grid(w.facts, dataclasses.replace(case, q_offset=0), Tile(q=1, kv=32))[37:]
    for row in range(len(found)):
        seen = np.flatnonzero((whole[64 * row : 64 * (row + 1)] != EMPTY).any(axis=0))
        visited = [kv_tile for kv_tile, _ in schedule(w.facts, case, tile, row)]
        assert {*seen} <= {*visited} and visited == sorted(visited, reverse=True)
    pairs = {(q, k) for q in range(5) for k, _ in schedule(w.facts, case, tile, q)}
    assert pairs == {(q, k) for k in range(13) for q, _ in schedule_queries(w.facts, case, tile, k)}


@pytest.mark.parametrize("spec", ["full", "causal", "sliding_window", "relative_bias", "blocks", "softcap"])
@pytest.mark.parametrize(("arch", "pipeline"), [("sm_80", "ampere"), ("sm_90a", "hopper")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_planner_takes_sums_in_the_order_of_dense_kernels(arch, pipeline, spec, head_dim):
    variant = load_spec(spec).bind()
    dense, padded = (menu(variant, arch, "bfloat16", head_dim, layout=layout).plans for layout in (Dense(), Padded()))
    assert [plan.order_of_sums for plan in padded] == [plan.order_of_sums for plan in dense]
    assert padded[0].pipeline == pipeline


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["tests/masks/dense.py", "specs/masks/mixed_kinds.py"])
def test_masks_of_several_reads_have_tiles_that_every_layout_holds(mask, head_dim):
    """Where sequences start anywhere such a mask takes more registers: dense kernels go without the wider tiles too."""
    variant = load_spec(str(ROOT / mask)).bind()
    orders = {
        menu(variant, "sm_90a", "bfloat16", head_dim, layout=layout).plans[0].order_of_sums
        for layout in (Dense(), Padded(), Varlen())
    }
    assert len(orders) == 1


def test_a_kernel_without_sequences_holds_nothing_of_them():
    for arch in ("sm_80", "sm_90a"):
        text = emit(menu(load_spec("causal").bind(), arch, "bfloat16", 128).plans[0])
        assert not any(word in text for word in ("q_offset", "q_lengths", "leaner", "Tail", "q_rows"))


def test_where_pipeline_hopper_has_no_gradients_ampere_stands_in():
    variant = load_spec("causal").bind()
    plan = backward_menu(variant, "sm_90a", "bfloat16", 192, layout=Padded(), dropout=True).plans[0]
    assert plan.pipeline == "ampere"
    assert [str(one.reason) for one in plan.fallbacks] == ["its backward has dropout for head dims up to 128"]


def check_gradients(w, **options):
    found, want = w.backward(**options)
    for name in ("dq", "dk", "dv"):
        got, walk = getattr(found, name), getattr(want, name)
        np.testing.assert_allclose(got, walk, rtol=2**-8, atol=2**-8 * abs(walk).max())
        for b, own in enumerate(() if w.plan.layout.joined else w.sequences):
            assert not got[b, :, own.q_rows if name == "dq" else own.kv_len :].any(), (name, b)
    for name, gradient in want.captured.items():
        np.testing.assert_allclose(found.captured[name], gradient, rtol=1e-3, atol=1e-3 * abs(gradient).max())
    for report in found.reports.values():
        assert report.conflicts == []
    return found


@pytest.mark.sampled("False")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic):
    check_gradients(batch("causal", "ampere", q_offset="end", **LENGTHS), deterministic=deterministic)


@pytest.mark.sampled(
    "blocks-{'kv_lengths': (64, 0), 'q_lengths': (0, 64)}",
    "softcap-{'kv_lengths': (1, 128), 'q_lengths': (64, 1), 'heads': 4, 'kv_heads': 2}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"q_offset": (5, 90)},
        {"kv_lengths": (64, 0), "q_lengths": (0, 64)},
        {"kv_lengths": (1, 128), "q_lengths": (64, 1), "heads": 4, "kv_heads": 2},
        {"q_offset": "end", "kv_lengths": (130, 211), "head_dim": 72, "v_head_dim": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ("full", "blocks", "softcap", "relative_bias"))
def test_gradients_of_shapes(spec, shape):
    check_gradients(batch(spec, "ampere", **shape))


@pytest.mark.sampled("slopes in one order")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape", "options"),
    [
        ("causal", {"q_offset": "end", "dropout": Dropout(p=0.3, seed=1, offset=0), **LENGTHS}, {}),
        ("alibi", {"q_offset": "end", **LENGTHS}, {"gradients": ("slopes",)}),
        ("alibi", {"q_offset": "end", **LENGTHS}, {"gradients": ("slopes",), "deterministic": True}),
        ("relative_bias", {"q_offset": (5, 90)}, {"gradients": ("table",)}),
    ],
    ids=["dropout", "slopes", "slopes in one order", "a table"],
)
def test_gradients_with_options(spec, shape, options):
    check_gradients(batch(spec, "ampere", **shape), **options)


@pytest.mark.sampled("(q_first - p.q_offset) / TILE_Q-q_first / TILE_Q")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p.q_offset + step.tile * TILE_Q + query", "step.tile * TILE_Q + query"),
        ("mine.k_last = min(mine.k_first + TILE_KV, all.kv_len) - 1;", ""),
        ("load_tile<THREADS, V_HEAD_DIM>(shared.d_o[stage], d_o, p.d_o_row, p.q_len - p.q_offset - first", None),
        ("(q_first - p.q_offset) / TILE_Q", "q_first / TILE_Q"),
    ],
)
def test_every_step_of_the_backward_counts(old, new):
    new = old.replace("p.q_len - p.q_offset", "p.q_rows") if new is None else new
    with pytest.raises((AssertionError, Trap)):
        w = batch("causal", "ampere", q_offset=(37, 60), q_lengths=(33, 100), kv_lengths=(160, 130), kv_len=160)
        check_gradients(w, edit=replace(old, new))


MUTATIONS = [
    ("ampere", "p.q_len = p.q_offset + queries.length;", "p.q_len = p.q_offset + p.q_rows;"),
    ("ampere", "return {0, own_length(p.kv_lengths, b, p.kv_len)};", "return {0, p.kv_len};"),
    ("ampere", "store_beyond(rows, p);", ""),
    ("ampere", "? keys.length - queries.length : p.q_offset", "? 0 : p.q_offset"),
    ("hopper", "rows[i] = {};", ";"),
    ("hopper", "clear_or_multiply_rows(o, factor);", "multiply_rows(o, factor);"),
    ("hopper", "if (beyond(work, q + 8 * r)) sum = 0.f;", ""),
    ("hopper", "p.q_offset = work.q_offset;", ""),
    ("hopper", "const int columns = work.kv_len - tile * TILE_KV;", "const int columns = p.kv_len - tile * TILE_KV;"),
]


@pytest.mark.sampled("return {0, own_length(p.kv_lengths, b, p.kv_len)};", "store_beyond(rows, p);")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "old", "new"), MUTATIONS, ids=[old for _, old, _ in MUTATIONS])
def test_every_step_counts(pipeline, old, new):
    lengths = {"q_lengths": (100, 33), "kv_lengths": (130, 150)}
    spec = "full" if "columns" in old or "rows[i]" in old else "causal"
    w = batch(spec, pipeline, q_offset="end", tile=(64, 64) if pipeline == "ampere" else None, **lengths)
    try:
        wrong = w.wrong(w.run(edit=replace(old, new)))
    except Trap as trap:
        wrong = [type(trap).__name__]
    assert wrong
