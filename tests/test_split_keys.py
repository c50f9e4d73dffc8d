"""Keys that are split among blocks: emitted kernels executed, their combination bit by bit, the walk, the choice."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from cli import flashgen
from padded import batch
from ptx_attention import replace
from split import IN_TURNS, differing, split_batch, split_work

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.errors import PlanError
from flashgen.interpreter import simulate
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import division, planner, split_keys
from flashgen.planning.arch import ARCHS
from flashgen.planning.layout import Padded, Varlen
from flashgen.planning.members import ALL_KEYS, FoldedLeaves, Leaves, SplitKeys
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic import predict
from flashgen.planning.traffic_sequences import OwnLengths
from flashgen.runtime import tiles

PIPELINES = ("ampere", "hopper")

OWN_AT_NIGHT = pytest.mark.nightly(sibling="test_lengths_of_their_own")
JOINED_AT_NIGHT = pytest.mark.nightly(sibling="test_sequences_that_lie_behind_each_other")

#: Packed heads in tiles of 64 rows.
ONE_WARPGROUP = {"packed": True, "tile": (64, 64)}

#: Few queries and six tiles of keys, the last of them not full.
SHAPE = {"q_len": 5, "kv_len": 350}


def check(w, splits, **options):
    """Right against float64, the walk's numbers, and bytes as predicted and as counted."""
    result = w.run(kv_splits=splits, **options)
    assert not np.isnan(result.o).any() and w.wrong(result) == ()
    assert all(report.conflicts == [] for report in result.reports.values())
    p, dims = w.problem, {"head_dim": w.problem.head_dim, "v_head_dim": w.problem.v_head_dim, "dtype": w.problem.dtype}
    counted = tiles.count(w.plan, w.facts, w.case, **dims, kv_splits=splits)
    walked = tiles.walk(
        *(w.plan, w.facts, w.case, *(x.float().numpy() for x in w.qkv)),
        **{"scale": w.scale, "dtype": p.dtype, "kv_splits": splits},
    )
    assert walked.traffic == counted
    np.testing.assert_allclose(walked.lse, result.lse, atol=w.lse_error())
    predicted = predict(w.plan, p, w.case, splits=splits)
    assert (predicted.hbm.read_bytes, predicted.hbm.write_bytes) == (counted.read_bytes, counted.write_bytes)
    combining = split_keys.entry(w.plan, split_keys.rows(w.plan, p), splits)
    assert [entry for entry, _ in predicted.kernels][-2:] == ["attention_forward", combining]
    visits, combines = (result.reports[entry] for entry in ("attention_forward", combining))
    for name in ("q", "k", "v"):
        assert visits.bytes(buffer=name) == getattr(counted, name), name
    for name in ("o", "lse"):
        assert combines.bytes("st", buffer=name) == getattr(counted, name), name
    for report, kind, moved in ((visits, "st", counted.parts), (combines, "ld", counted.parts_read)):
        assert sum(report.bytes(kind, buffer=name) for name in ("part_o", "part_rows")) == moved
    return result


# ---------------------------------------------------------------- kernels
@pytest.mark.slow
@pytest.mark.sampled("ampere-3", "ampere-9", "hopper-3")
@pytest.mark.parametrize("splits", [1, 3, 9])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_numbers_of_blocks(pipeline, splits):
    check(split_work("causal_bottom_right", pipeline, **SHAPE), splits)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [5, 40])
def test_more_tiles_than_a_warp_judges_at_once(splits):
    """Parts take turns among the tiles that are seen: those of others are passed across gaps and from warp to warp."""
    gaps = fg.variant(lambda b, h, q, k: (k // 64) % 3 != 1, name="gaps")
    shape = {"heads": 2, "kv_heads": 1, "q_len": 1, "kv_len": 70 * 64 - 9, "packed": True, "tile": (64, 64)}
    check(split_work(gaps, "hopper", **shape), splits)


#: 64 keys of each 192, of which an early query sees fewer.
GAPS = fg.variant(lambda b, h, q, k: ((k // 64) % 3 != 1) & (k < 64 * (120 + q)), name="gaps")


@pytest.mark.sampled("hopper-64-leaves")
@pytest.mark.slow
@pytest.mark.parametrize("keys", [IN_TURNS, FoldedLeaves(keys=128).in_parts], ids=["in turns", "leaves"])
@pytest.mark.parametrize("v_head_dim", [64, 192])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_block_gives_a_row_the_bits_that_a_warp_gives_it(pipeline, keys, v_head_dim, monkeypatch):
    """Of more parts than a block looks at at once; some see nothing, and those of a late query other ones."""
    kv_len, splits = 140 * (64 if keys.turns else keys.keys) - 9, 140
    shape = {"heads": 1, "kv_heads": 1, "q_len": 2, "kv_len": kv_len, "tile": (64, 64), "v_head_dim": v_head_dim}
    w, found = split_work(GAPS, pipeline, keys, **shape), {}
    for few in (split_keys.FEW_ROWS, 0):
        monkeypatch.setattr(split_keys, "FEW_ROWS", few)
        found[few] = w.run(kv_splits=splits)
    by_block, by_warp = found.values()
    assert split_keys.ENTRY_BY_BLOCK in by_block.reports and split_keys.ENTRY in by_warp.reports
    assert w.wrong(by_block) == () and differing(by_block, by_warp) == 0
    assert all(report.conflicts == [] for report in by_block.reports.values())


@pytest.mark.sampled("hopper-64-8")
@pytest.mark.slow
@pytest.mark.parametrize("splits", [4, 8])
@pytest.mark.parametrize("v_head_dim", [64, 192])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_few_parts_give_a_row_the_bits_that_any_number_gives_it(pipeline, v_head_dim, splits, monkeypatch):
    """And parts that no kernel wrote, which a warp loads before it knows, are not added."""
    shape = {"heads": 2, "kv_heads": 1, "q_len": 2, "kv_len": 6 * 64 - 9, "tile": (64, 64), "v_head_dim": v_head_dim}
    w = split_work("causal_bottom_right", pipeline, **shape)
    found = check(w, splits)
    few = splits <= 8 // -(-v_head_dim // 128)
    assert (split_keys.ENTRY_OF_FEW in found.reports) == few and (split_keys.ENTRY in found.reports) != few
    monkeypatch.setattr(split_keys, "entry", lambda plan, rows, splits: split_keys.ENTRY)
    assert differing(found, w.run(kv_splits=splits)) == 0


def test_first_parts_are_read_whether_or_not_they_are_written():
    """Those of a warp that are on its way at once; behind them, and of rows that have a block, what is written."""
    plan = fg.plan("causal", arch="sm_90a", head_dim=128, kv_splits=4)
    wide = fg.plan("causal", arch="sm_90a", head_dim=192, v_head_dim=192, kv_splits=4)
    assert [split_keys.read_anyway(plan, 5000, n) for n in (1, 8, 9, 16, 40)] == [1, 8, 9, 16, 16]
    assert [split_keys.read_anyway(plan, 50, n) for n in (8, 32, 33)] == [8, 16, 0]
    assert [split_keys.read_anyway(wide, 5000, n) for n in (4, 5, 9)] == [4, 5, 8]
    leaves = fg.plan("causal", arch="sm_90a", head_dim=128, invariant=True, seqlen=1, kv_seqlen=8192)
    assert split_keys.read_anyway(leaves, 50, 8) == 0


@pytest.mark.sampled("dims0-3")
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dims", [{}, {"tile": (64, 128), "head_dim": 128, "stages": 3, "q_stages": 2}])
def test_tiles_of_one_warpgroup(dims, splits):
    shape = {"heads": 8, "kv_heads": 2, "q_len": 3, "kv_len": 300, "batch": 2, "packed": True, "tile": (64, 64)}
    check(split_work("causal_bottom_right", "hopper", **{**shape, **dims}), splits)


@pytest.mark.sampled("ampere-gpt_oss", "hopper-sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_spec(pipeline, spec):
    check(split_work(spec, pipeline, q_len=70, kv_len=211), 2)


@pytest.mark.sampled("shape0-7")
@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 7, 40])
@pytest.mark.parametrize("shape", [{"heads": 8, "kv_heads": 2, "q_len": 3}, {"heads": 6, "kv_heads": 2, "q_len": 70}])
def test_packed_heads(shape, splits):
    check(split_work("causal_bottom_right", "hopper", packed=True, kv_len=350, batch=2, **shape), splits)


@pytest.mark.nightly(sibling="test_numbers_of_blocks")
@pytest.mark.parametrize("dims", [(128, 128), (72, 40), (64, 200)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_head_dims_and_dtypes(pipeline, dtype, dims):
    head_dim, v_head_dim = dims
    tile = {"hopper": (128, 64), "ampere": (32, 32)}[pipeline]
    shape = {**SHAPE, "dtype": dtype, "head_dim": head_dim, "v_head_dim": v_head_dim, "tile": tile, "kv_len": 130}
    check(split_work("full", pipeline, **shape), 2)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_window_reads_its_own_keys_alone(pipeline):
    w = split_work("sliding_window", pipeline, q_len=1, kv_len=350)
    w = dataclasses.replace(w, case=dataclasses.replace(w.case, params={"window": 70}))
    result = check(w, 4)
    first_keys = tiles.count(w.plan, w.facts, w.case, head_dim=64, v_head_dim=64, dtype="bfloat16", kv_splits=4)
    assert result.report.bytes(buffer="k") == first_keys.k == 2 * 64 * 64 * 2  # of key 0 alone, by each head


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_blocks_without_a_key(pipeline):
    """Rows that see nothing, and parts that nothing is written to: the workspace holds NaN."""
    w = split_work("causal_bottom_right", pipeline, q_len=70, kv_len=10)
    result = w.run(kv_splits=5)
    assert w.wrong(result) == ()
    assert not result.o[:, :, :60].any() and (result.lse[:, :, :60] == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_parts_without_a_key_of_a_mask_that_hides_nothing(pipeline):
    """Every tile of keys is visited, as where there is no mask: the fourth of four parts has none."""
    hides_nothing = fg.variant(lambda b, h, q, k: abs(q - k) >= 0, name="hides_nothing")
    w = split_work(hides_nothing, pipeline, q_len=5, kv_len=3 * 128 - 7)
    parts = -(-w.problem.kv_len // w.plan.tile.kv) + 1
    assert w.wrong(w.run(kv_splits=parts)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_nan_and_inf_stay(pipeline):
    w = split_work("full", pipeline, **SHAPE)
    q, k, v = (x.clone() for x in w.qkv)
    k[0, 0, 100, 0], v[0, 0, 200, 3] = torch.nan, torch.inf
    bad = dataclasses.replace(w, qkv=(q, k, v)).run(kv_splits=3)
    assert np.isnan(bad.o).all() and np.isnan(bad.lse).all()
    k = w.qkv[1].clone()
    found = dataclasses.replace(w, qkv=(q, k, v)).run(kv_splits=3).o
    assert (found[..., 3] == np.inf).all() and np.isfinite(np.delete(found, 3, axis=-1)).all()


@pytest.mark.nightly(sibling="test_numbers_of_blocks")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_any_order_of_blocks_gives_the_same_bits(pipeline, seed):
    w = split_work("causal_bottom_right", pipeline, **SHAPE)
    lockstep, result = w.run(kv_splits=3), w.run(kv_splits=3, seed=seed)
    np.testing.assert_array_equal(result.o, lockstep.o)
    np.testing.assert_array_equal(result.lse, lockstep.lse)


@pytest.mark.sampled("causal-hopper-shape3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "pipeline", "shape"),
    [
        ("causal", "ampere", {"q_lengths": (5, 2, 3), "kv_lengths": (130, 350, 0)}),
        ("causal", "hopper", {"q_lengths": (5, 2, 0), "kv_lengths": (130, 350, 64), "heads": 8, "packed": True}),
        ("gpt_oss", "hopper", {"q_lengths": (5, 2), "kv_lengths": (40, 350)}),
        ("causal", "hopper", {"q_lengths": (5, 2, 0), "kv_lengths": (130, 350, 64), "heads": 8, **ONE_WARPGROUP}),
        pytest.param("full", "ampere", {"q_lengths": (0, 5), "kv_lengths": (40, 350)}, marks=OWN_AT_NIGHT),
        pytest.param("full", "hopper", {"q_lengths": (0, 5), "kv_lengths": (40, 350)}, marks=OWN_AT_NIGHT),
    ],
)
def test_lengths_of_their_own(spec, pipeline, shape):
    """Ranges follow each sequence's own length; what lies beyond is NaN, and the unsplit kernel's result is near."""
    shape = {"q_offset": "end", **SHAPE, **shape}
    found, whole = split_batch(spec, pipeline, **shape).run(kv_splits=4), batch(spec, pipeline, **shape).run()
    np.testing.assert_allclose(found.o, whole.o, atol=2**-8)
    assert np.array_equal(np.isfinite(found.lse), np.isfinite(whole.lse))
    seen = np.isfinite(whole.lse)
    np.testing.assert_allclose(found.lse[seen], whole.lse[seen], atol=4e-6)


@pytest.mark.sampled("causal-ampere-shape0", "causal-hopper-shape2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "pipeline", "shape"),
    [
        ("causal", "ampere", {}),
        ("causal", "hopper", {"heads": 8, "packed": True}),
        ("causal", "hopper", {"heads": 8, **ONE_WARPGROUP}),
        pytest.param("gpt_oss", "hopper", {}, marks=JOINED_AT_NIGHT),
        ("gpt_oss", "ampere", {}),
        pytest.param("full", "hopper", {}, marks=JOINED_AT_NIGHT),
    ],
)
def test_sequences_that_lie_behind_each_other(spec, pipeline, shape):
    """The keys of one sequence are NaN and inf, which no other row has."""
    lengths = {"q_lengths": (5, 2, 0, 3), "kv_lengths": (130, 350, 40, 0)}
    shape = {"q_offset": "end", "q_len": 5, "kv_len": 350, **lengths, "layout": Varlen(), "poisoned": 2, **shape}
    if spec == "causal":
        shape |= {"kv_lengths": (130, 350, 40, 3)}
    found, whole = split_batch(spec, pipeline, **shape).run(kv_splits=4), batch(spec, pipeline, **shape).run()
    np.testing.assert_allclose(found.o, whole.o, atol=2**-8)
    assert np.array_equal(np.isfinite(found.lse), np.isfinite(whole.lse))
    seen = np.isfinite(whole.lse)
    np.testing.assert_allclose(found.lse[seen], whole.lse[seen], atol=4e-6)


@pytest.mark.sampled("keys1-40", "keys2-3")
@pytest.mark.slow
@pytest.mark.parametrize(("keys", "splits"), [(IN_TURNS, 3), (IN_TURNS, 40), (Leaves(keys=128), 3)])
def test_blocks_whose_rows_are_of_no_sequence_wait_too(keys, splits):
    """Rows of q behind the last sequence: the next launch on the stream counts on what all blocks have awaited."""
    shape = {"q_lengths": (5, 2), "kv_lengths": (130, 350), "q_len": 5, "kv_len": 350, "layout": Varlen()}
    w = split_batch("causal", "hopper", keys, **shape)
    q, k, v = w.qkv
    behind = np.pad(q, ((0, 0), (0, 0), (0, 8), (0, 0)), constant_values=np.nan)
    found, alone = dataclasses.replace(w, qkv=(behind, k, v)).run(kv_splits=splits), w.run(kv_splits=splits)
    np.testing.assert_array_equal(found.o[:, :, : sum(shape["q_lengths"])], alone.o[:, :, : sum(shape["q_lengths"])])


@pytest.mark.slow
def test_the_kernel_that_combines_is_chosen_by_the_rows_of_a_launch():
    """Of padded sequences most rows may be none: predicted is what is launched."""
    shape = {"q_lengths": (128, 1, 1), "kv_lengths": (100, 100, 100), "heads": 3, "q_len": 128, "kv_len": 100}
    w = split_batch("full", "ampere", **shape)
    own = [OwnLengths(q_rows=x.q_rows, kv_len=x.kv_len, q_offset=x.q_offset) for x in w.sequences]
    predicted, result = predict(w.plan, w.problem, w.case, sequences=own, splits=40), w.run(kv_splits=40)
    assert [entry for entry, _ in predicted.kernels] == list(result.reports)
    loaded = sum(result.reports[split_keys.ENTRY].bytes("ld", buffer=name) for name in ("part_o", "part_rows"))
    assert dict(predicted.kernels)[split_keys.ENTRY].read_bytes >= loaded > 0


# ---------------------------------------------------------------- the combination, bit by bit
def folded(part_o, part_rows, splits):
    """What the second kernel makes of parts [rows, splits, columns] and [rows, splits, 2]: row by row, part by part."""
    o = np.zeros((len(part_o), part_o.shape[-1]), np.float32)
    lse = np.full(len(part_o), -np.inf, np.float32)

    def fma(a, b, c):
        return np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))

    for row, (of_row, rows) in enumerate(zip(part_o, part_rows, strict=True)):
        highest, total, sums = np.float32(-np.inf), np.float32(0), np.zeros(o.shape[-1], np.float32)
        for first in range(0, splits, 32):
            group = [i for i in range(first, min(first + 32, splits)) if not rows[i, 1] < 0]
            before = highest
            highest = max([highest, *(rows[i, 0] for i in group if rows[i, 1] > 0)])
            if highest != before:
                factor = np.exp2(before - highest, dtype=np.float32)
                total, sums = np.float32(total * factor), sums * factor
            for i in group:
                weight = np.exp2(rows[i, 0] - highest, dtype=np.float32) if rows[i, 1] > 0 else np.float32(0)
                total = fma(weight, rows[i, 1], total)
                sums = np.array([fma(weight, x, y) for x, y in zip(of_row[i], sums, strict=True)], np.float32)
        if total:
            o[row] = sums * (np.float32(1) / total)
            lse[row] = (highest + np.log2(total, dtype=np.float32)) * np.float32(0.69314718055994530942)
    return o, lse


@pytest.mark.sampled(splits=(3,))
@pytest.mark.slow
@pytest.mark.parametrize("splits", [3, 40])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_parts_are_added_in_their_order(pipeline, splits, monkeypatch):
    kept = {}
    run = simulate._Tensors.run

    def keeping(self, *args, **options):
        workspaces, reports = run(self, *args, **options)
        kept.update(workspaces)
        return workspaces, reports

    monkeypatch.setattr(simulate._Tensors, "run", keeping)
    w = split_work("causal_bottom_right", pipeline, q_len=3, kv_len=3000 if splits > 32 else 350)
    result = w.run(kv_splits=splits)
    part_o, part_rows = kept["part_o"].reshape(6, splits, 64), kept["part_rows"].reshape(6, splits, 2)
    written = ~(part_rows[..., 1] < 0)
    assert not np.isnan(part_o[written]).any() and np.isnan(part_o[~written]).all()
    o, lse = folded(part_o, part_rows, splits)
    bits = torch.from_numpy(o).bfloat16().float().numpy()
    np.testing.assert_array_equal(result.o.reshape(6, 64), bits)
    np.testing.assert_allclose(result.lse.ravel(), lse, rtol=2e-7)


# ---------------------------------------------------------------- mutations
WRONG = "a wrong result"
COMBINE = {
    "a lost part": replace("count = __popc(written)", "count = __popc(written) - 1"),
    "parts that were not written": replace("__popc(written)", "32"),
    "a wrong maximum": replace("fmaxf(before, warp_max(sees ? part.x : MINUS_INFINITY))", "fmaxf(before, part.x)"),
    "sums that follow no maximum": replace("row.sum *= factor;", ""),
    "the parts of the row before": replace("* p.splits + part;", "* p.splits + part - p.splits;"),
    "the sum of one part for all": replace("__shfl_sync(~0u, part.y, start + i)", "part.y"),
}
BY_BLOCK = {
    "a lost part": replace("part < row.count ?", "part < row.count - 1 ?"),
    "the maximum of one warp's parts": replace("if (i == warp) before = row_max;", "if (i != warp) continue;"),
    "sums that follow no maximum": replace("lane > 0 || followed == before", "true"),
    "the weights of the last warp for all": replace("weighed[warp].parts", "weighed[0].parts"),
    "the parts of the first time again": replace("begin + (first + start)", "begin + start"),
}
VISITS = {
    ("ampere", "others skipped once too often"): replace("others > 0 && seen", "others >= 0 && seen"),
    ("ampere", "each block from the first tile"): replace(", rows.part, rows", ", 0, rows"),
    ("ampere", "a part of every tile"): replace("coming[STAGES - 2].tile, p.splits - 1", "coming[STAGES - 2].tile, 0"),
    ("hopper", "the next tile is another's"): replace("rank == quotient_by(", "rank <= 1 + quotient_by("),
    ("hopper", "each part from the first tile"): replace("int others = work.part;", "int others = 0;"),
    ("hopper", "parts in one place"): replace("part_of(work.part,", "part_of(0,"),
}


@pytest.mark.sampled("a lost part", "the parts of the row before")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINE)
def test_a_wrong_combination_is_noticed(name, monkeypatch):
    monkeypatch.setattr(split_keys, "FEW_ROWS", 0)
    w = split_work("causal_bottom_right", "ampere", q_len=5, kv_len=2500 if "follow" in name else 350)
    splits = {"sums that follow no maximum": 40, "parts that were not written": 7}.get(name, 3)  # of six tiles
    assert noticed(w, COMBINE[name], splits)


@pytest.mark.sampled("the maximum of one warp's parts")
@pytest.mark.slow
@pytest.mark.parametrize("name", BY_BLOCK)
def test_a_wrong_combination_by_a_block_is_noticed(name):
    w = split_work("causal_bottom_right", "ampere", q_len=5, kv_len=150 * 64 if "again" in name else 2500)
    assert noticed(w, BY_BLOCK[name], 140 if "again" in name else 40)


@pytest.mark.sampled("ampere-others skipped once too often", "hopper-parts in one place")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), VISITS)
def test_tiles_of_others_are_noticed(pipeline, name):
    assert noticed(split_work("causal_bottom_right", pipeline, **SHAPE), VISITS[pipeline, name], 3)


def noticed(w, edit, splits):
    """Whether a kernel with this change does wrong."""
    try:
        result = w.run(edit, kv_splits=splits)
    except Trap:
        return True
    return bool(w.wrong(result))


@cache
def many_sequences():
    """A batch of more sequences than a warp counts at once, and what it gives."""
    shape = {"q_lengths": (1,) * 40, "kv_lengths": (60, 70, 0, 200) * 10, "q_len": 1, "kv_len": 200, **ONE_WARPGROUP}
    w = split_batch("full", "hopper", heads=2, kv_heads=2, batch=40, **shape)
    return w, w.run(kv_splits=3)


@pytest.mark.sampled("edit2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        replace("if (part == 0) leave_out(work, of_this);", ""),
        replace("leave_out(work, of_this)", "leave_out(work, of_this + 1)"),
        replace("keys_of(p, b).length + TILE_KV - 1) / TILE_KV", "keys_of(p, b).length) / TILE_KV"),
        replace("first += 32;\n    }\n    return {-1", "first += 33;\n    }\n    return {-1"),
    ],
)
def test_parts_without_a_tile_are_noticed(edit):
    """What nobody leaves out is NaN, what is left out is missed."""
    w, right = many_sequences()
    assert np.isfinite(right.o).all() and not right.o[2::4].any()
    try:
        wrong = w.run(edit, kv_splits=3)
    except Trap:
        return
    assert not np.array_equal(wrong.o, right.o)


@pytest.mark.slow
def test_a_wrong_walk_is_noticed(monkeypatch):
    w = split_work("causal_bottom_right", "ampere", **SHAPE)
    right = tiles._Walk._of_blocks

    def less(self, at, rows, schedule):
        return right(self, at, rows, schedule)[:-1]

    monkeypatch.setattr(tiles._Walk, "_of_blocks", less)
    with pytest.raises(AssertionError):
        check(w, 3)


# ---------------------------------------------------------------- the choice
def decode(kv_len, batch=1, heads=32, kv_heads=8, q_len=1):
    return Problem(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=128, v_head_dim=128
    )


def divided(problem, spec="full", arch="sm_90a", **options):
    variant = load_spec(spec)

    def ask(keys):
        return planner.menu_of(KernelRequest.of(variant, arch, "bfloat16", 128, keys=keys))

    return division.divide(ask, problem, ARCHS[arch].sms, **{"params": variant.values({}, complete=False), **options})


@pytest.mark.parametrize(("problem", "blocks"), [(decode(262144, kv_heads=4), 128), (decode(131072), 128)])
def test_few_tiles_of_queries_fill_the_gpu(problem, blocks):
    found = divided(problem)
    assert found.plan.keys.split and found.plan.packed
    tiles_of_queries = problem.heads * problem.batch // found.plan.pack(problem.group)
    assert found.splits * tiles_of_queries == blocks and f"{tiles_of_queries} tiles of queries" in found.why


@pytest.mark.parametrize("kv_len", [2048, 4096])
def test_a_block_has_two_tiles_where_more_parts_cost_more(kv_len):
    """A row's parts are combined 16 at a time."""
    assert divided(decode(kv_len, kv_heads=4)).splits == 16


@pytest.mark.parametrize(
    "problem", [decode(8192, batch=32), decode(2048, batch=128), decode(512), decode(8192, q_len=512)]
)
def test_many_tiles_or_few_keys_are_left_whole(problem):
    found = divided(problem)
    assert found.splits == 1 and found.plan.keys == ALL_KEYS


def test_sequences_that_may_be_longer_than_others_are_split():
    """Where lengths are the device's, a long one would keep one block busy when all others are done."""
    of_own = {"spec": "causal", "layout": Padded()}
    long = divided(decode(65536, batch=64), **of_own)
    assert long.splits == 16 and "at most 32 a block, as one of 64 sequences may be longer" in long.why
    assert divided(decode(8192, batch=32), **of_own).splits == 4  # no part is shorter than 16 tiles
    assert divided(decode(8192, batch=32), **of_own, alike=True).splits == 1
    assert divided(decode(2048, batch=64), **of_own).splits == 1
    assert divided(decode(65536, batch=64), "causal").splits == 1
    assert divided(decode(65536, batch=64), **of_own, kv_splits=3).splits == 3


def test_the_keys_of_a_mask_count():
    at_end = {"layout": Padded()}
    wide = divided(decode(131072), "sliding_window", params={"window": 100_000}, **at_end)
    narrow = divided(decode(131072), "sliding_window", params={"window": 1024}, **at_end)
    assert wide.splits == 16 and "782 tiles of keys each" in wide.why
    assert narrow.splits == 8 and "8 tiles of keys each" in narrow.why
    assert "1024 tiles of keys each" in divided(decode(131072), "padding").why  # data decide


def test_a_number_that_is_given_stays():
    assert divided(decode(300), kv_splits=7).splits == 7
    one = divided(decode(131072), kv_splits=1)
    assert one.splits == 1 and one.plan.keys == ALL_KEYS
    with pytest.raises(PlanError, match=r"kv_splits is 0.*1 to 512\n  nearest: kv_splits=1"):
        divided(decode(300), kv_splits=0)
    many = decode(1 << 20, batch=1 << 10, heads=64, kv_heads=64, q_len=1 << 14)
    with pytest.raises(PlanError, match=r"kv_splits=512 of \d+ tiles of queries.*\n  nearest: kv_splits=255"):
        divided(many, kv_splits=512)
    with pytest.raises(PlanError, match="kv_splits is of a forward"):
        KernelRequest.of(load_spec("full"), "sm_80", "bfloat16", 64, backward=True, keys=SplitKeys())


def test_a_plan_holds_no_number():
    plans = {fg.plan("full", arch="sm_90a", head_dim=128, kv_splits=n) for n in (2, 3, 100)}
    assert len(plans) == 1 and fg.plan("full", arch="sm_90a", head_dim=128, kv_splits=1).keys == ALL_KEYS
    assert fg.supports("full", arch="sm_90a", kv_splits=4) == ()
    assert [r.option for r in fg.supports("full", arch="sm_90a", kv_splits=4000)] == ["kv_splits"]
    shape = {"seqlen": 1, "kv_seqlen": 65536, "heads": 32, "kv_heads": 8, "arch": "sm_90a"}
    assert fg.plan("full", **shape).keys.split and not fg.plan("full", **shape, kv_splits=1).keys.split


def test_prediction_names_parts():
    found = divided(decode(131072))
    case = Case(sizes=decode(131072).sizes(), params={}, tensors={})
    told = predict(found.plan, decode(131072), case, splits=found.splits, why_splits=found.why)
    assert [entry for entry, _ in told.kernels] == ["attention_forward", "attention_combine"]
    assert [part.name for part in told.workspaces] == ["part_o", "part_rows"]
    assert told.as_json()["kv_splits"] == 16
    rows = 32 * 16
    assert (
        sum(part.amount for part in told.workspaces)
        == rows * (128 * 4 + 8)
        == dict(told.kernels)["attention_combine"].read_bytes
    )


# ---------------------------------------------------------------- attention()
@pytest.mark.parametrize("splits", [None, 1, 2, 30])
def test_attention(splits):
    q, k, v = (torch.randn(2, heads, n, 64) for heads, n in ((4, 3), (2, 1300), (2, 1300)))
    o, lse = fg.attention(q, k, v, load_spec("causal"), q_offset="end", return_lse=True, kv_splits=splits)
    whole, whole_lse = fg.attention(q, k, v, load_spec("causal"), q_offset="end", return_lse=True, kv_splits=1)
    torch.testing.assert_close(o, whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse)
    assert (splits == 1) == torch.equal(o, whole)


def test_gradients_follow():
    q, k, v = (torch.randn(1, 2, n, 32, dtype=torch.float64, requires_grad=True) for n in (4, 300, 300))
    grads = [
        torch.autograd.grad(fg.attention(q, k, v, load_spec("full"), kv_splits=n).sum(), (q, k, v)) for n in (1, 5)
    ]
    for whole, parts in zip(*grads, strict=True):
        torch.testing.assert_close(whole, parts)


@pytest.mark.slow
def test_a_graph_holds_the_number():
    q, k, v = (torch.randn(1, 2, n, 32) for n in (4, 300, 300))
    full = load_spec("full")

    def call(q, k, v):
        return fg.attention(q, k, v, full, kv_splits=5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))


def test_the_op_is_in_order():
    q, k, v = (torch.randn(1, 2, n, 32) for n in (4, 300, 300))
    names = ["call.kv_splits"]
    arguments = (q, k, v, load_spec("full").token, [], None, names, [5], [], None, None, False)
    torch.library.opcheck(torch.ops.flashgen.attention.default, arguments)


@pytest.mark.parametrize("wrong", [0, 513, True, 2.0, "4"])
def test_what_is_no_number_is_refused(wrong):
    x = torch.randn(1, 1, 4, 32)
    with pytest.raises(PlanError, match=r"kv_splits is .*: it is a number of blocks"):
        fg.attention(x, x, x, load_spec("full"), kv_splits=wrong)


def test_sequences_behind_each_other():
    q, k, v = (torch.randn(n, 2, 32) for n in (9, 500, 500))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 9], [0, 100, 100, 500])]
    bounds = {"max_seqlen_q": 5, "max_seqlen_k": 400, "q_offset": "end"}
    whole, parts = (fg.attention_varlen(q, k, v, load_spec("causal"), *starts, **bounds, kv_splits=n) for n in (1, 5))
    torch.testing.assert_close(parts, whole, atol=2e-6, rtol=1e-5)
    assert not torch.equal(parts, whole)


@pytest.mark.sampled(verb=("simulate",))
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "simulate"])
def test_command_line(verb):
    words = ["full", "--seqlen", "3", "--kv-seqlen", "300", "--heads", "2", "--head-dim", "64", "--kv-splits", "3"]
    done = subprocess.run([sys.executable, "-m", "flashgen", verb, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "checked" in done.stdout, done.stdout + done.stderr


def test_the_command_in_a_banner_gives_the_kernel_again():
    for words in (["--split-keys"], ["--seqlen", 1, "--kv-seqlen", 65536]):
        text = flashgen("emit", "full", "--arch", "sm_90a", "--head-dim", 64, *words).out
        banner = " ".join(line.removeprefix("//").strip() for line in text.partition("\n\n")[0].splitlines())
        command = banner.partition("made by  flashgen ")[2].split()
        assert "--split-keys" in command and flashgen(*command).out == text
    assert "of a kernel alone" in flashgen("plan", "full", "--split-keys", code=2).err
