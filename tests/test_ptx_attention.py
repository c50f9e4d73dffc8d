"""The kernels that flashgen emits, executed by the PTX interpreter: results, bytes, bank conflicts, visited tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ptx_attention import replace, work
from random_masks import random_case, random_mask, seeded
from tolerance import baseline, judge, judge_lse, reference

import flashgen as fg
from flashgen.analysis.tiles import FULL, PARTIAL, Case, schedule
from flashgen.bench.inputs import draw
from flashgen.codegen import emit
from flashgen.errors import LaunchError
from flashgen.interpreter import StepLimit
from flashgen.lang.load import shipped
from flashgen.planning.planner import menu
from flashgen.planning.traffic import predict
from flashgen.runtime import tiles
from flashgen.runtime.philox import Dropout

SPECS = sorted(shipped())
SOME = ("full", "causal_bottom_right", "sliding_window", "document", "alibi", "softcap", "blocks", "relative_bias")
PIPELINES = ("ampere", "hopper")


def check(w, **options):
    """Right against float64, no trap, no bank conflict, and the bytes of q, k, v, o and lse that the walk counts."""
    result = w.run(**options)
    assert not np.isnan(result.o).any()
    assert w.wrong(result) == ()
    assert result.report.conflicts == []
    p = w.problem
    counted = tiles.count(w.plan, w.facts, w.case, head_dim=p.head_dim, v_head_dim=p.v_head_dim, dtype=p.dtype)
    for name in ("q", "k", "v", "o", "lse"):
        assert result.report.bytes(buffer=name) == getattr(counted, name), name
    return result


@pytest.mark.sampled("ampere-longformer", "ampere-relative_bias", "hopper-document", "hopper-softcap")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "spec"), [(pipeline, spec) for pipeline in PIPELINES for spec in SPECS])
def test_every_spec(pipeline, spec):
    check(work(spec, pipeline))


@pytest.mark.sampled("ampere-softcap", "hopper-document")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "spec"), [(pipeline, spec) for pipeline in PIPELINES for spec in SOME])
def test_head_dim_128_in_float16_with_four_heads_over_two(pipeline, spec):
    check(work(spec, pipeline, head_dim=128, dtype="float16", heads=4, kv_heads=2, q_len=71, kv_len=101, q_stages=2))


@pytest.mark.sampled(
    "ampere-shape0", "ampere-shape1", "ampere-shape2", "ampere-shape3", "ampere-shape4", "hopper-shape7"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "shape"),
    [
        ("ampere", {"head_dim": 16, "v_head_dim": 72}),
        ("ampere", {"head_dim": 96, "v_head_dim": 40, "tile": (64, 32)}),
        ("ampere", {"head_dim": 256, "tile": (64, 32), "q_len": 70, "kv_len": 75}),
        ("ampere", {"q_len": 1, "kv_len": 1, "batch": 2}),
        ("ampere", {"q_len": 64, "kv_len": 128, "stages": 3}),
        ("hopper", {"head_dim": 72, "v_head_dim": 40}),
        ("hopper", {"head_dim": 256, "tile": (128, 64), "q_len": 70, "kv_len": 75}),
        ("hopper", {"q_len": 1, "kv_len": 1, "batch": 2}),
        ("hopper", {"tile": (192, 80), "q_len": 300, "kv_len": 300}),
        ("hopper", {"tile": (192, 48), "q_len": 390, "kv_len": 100, "q_stages": 2}),
    ],
)
def test_shapes(pipeline, shape):
    check(work("causal", pipeline, **shape))


@pytest.mark.sampled("ampere-causal-64", "hopper-causal-64")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "spec", "head_dim"),
    [
        ("ampere", "causal", 64),
        ("ampere", "full", 128),
        ("hopper", "full", 64),
        ("hopper", "causal", 64),
        ("hopper", "softcap", 128),
    ],
)
def test_the_planners_first_choice(pipeline, spec, head_dim):
    """Larger tiles, more stages, and what only they have: turns, a guard against large scores."""
    w = work(spec, pipeline, head_dim=head_dim, q_len=200, kv_len=300)
    plan = menu(w.variant, w.plan.arch, "bfloat16", head_dim, pipeline=pipeline).plans[0]
    w = dataclasses.replace(w, plan=plan, source=emit(plan))
    check(w)
    large = dataclasses.replace(w, qkv=tuple(20 * x for x in w.qkv))
    assert large.wrong(large.run(seed=1)) == ()


@pytest.mark.sampled("ampere-sink-float16", "hopper-own-float16")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["std4", "sink", "own", "outliers"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_inputs_that_make_a_softmax_peaked(pipeline, name, dtype):
    w = work("full", pipeline, dtype=dtype)
    w = dataclasses.replace(w, qkv=draw(w.problem, 0, name, device="cpu")[:3])
    assert w.wrong(w.run()) == ()


@pytest.mark.sampled("ampere-full-shape1", "hopper-full-shape3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "spec", "shape"),
    [
        ("ampere", "causal", {"q_len": 90, "kv_len": 130}),
        ("ampere", "full", {"q_len": 70, "kv_len": 150, "tile": (128, 48)}),
        ("hopper", "causal", {"q_len": 150, "kv_len": 230, "q_stages": 2}),
        ("hopper", "full", {"q_len": 70, "kv_len": 150, "tile": (128, 80)}),
        ("hopper", "alibi", {"q_len": 200, "kv_len": 90, "tile": (192, 48)}),
    ],
)
def test_dropout(pipeline, spec, shape):
    """What is dropped belongs to (batch, head, query, key) alone, so one reference serves all tiles and pipelines."""
    w = work(spec, pipeline, **shape)
    w = dataclasses.replace(w, plan=dataclasses.replace(w.plan, dropout=True))
    w = dataclasses.replace(w, source=emit(w.plan))
    dropout = Dropout(p=0.3, seed=5, offset=7)
    result = w.run(dropout=dropout)
    options = {"scale": w.scale, "dropout": dropout}
    ref, ref_lse = reference(w.variant, w.case, *w.qkv, **options)
    base, _ = baseline(w.variant, w.case, *w.qkv, **options)
    out = torch.from_numpy(result.o).to(w.qkv[0].dtype)
    assert judge(out, base, ref, w.plan.dtype).reasons + judge_lse(torch.from_numpy(result.lse), ref_lse) == ()
    kept = replace(">= p.dropout_threshold", ">= 0")
    assert w.run(kept, dropout=dropout).o.tobytes() != result.o.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_no_keys_at_all(pipeline):
    result = work("full", pipeline, kv_len=0).run()
    assert (result.o == 0).all()
    assert (result.lse == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_scale(pipeline, scale):
    check(dataclasses.replace(work("causal", pipeline, q_len=70, kv_len=70), scale=scale))


def test_the_kernel_moves_the_bytes_that_the_planner_predicts():
    w = work("sliding_window", "ampere")
    predicted, report = predict(w.plan, w.problem, w.case).hbm, w.run().report
    assert (report.read_bytes, report.write_bytes) == (predicted.read_bytes, predicted.write_bytes)


# ---------------------------------------------------------------- the schedule, in the kernel itself
PROBE = {
    "ampere": replace(
        "    const Step step = coming[0];\n",
        "    const Step step = coming[0];\n"
        '    asm volatile("// probe: visit %0 %1 %2 %3 %4" :: "r"(rows.b), "r"(rows.h), "r"(rows.q_first / TILE_Q),'
        ' "r"(step.tile), "r"((int)step.partial));\n',
    ),
}


def visits(w, result):
    """{(b, h, q_tile): [(kv_tile, class), ...]} in the order of the first warp of each block."""
    found = {}
    for name, _, warp, (b, h, q_tile, kv_tile, partial) in result.report.probes:
        if name == "visit" and warp == 0:
            found.setdefault((b, h, q_tile), []).append((kv_tile, PARTIAL if partial else FULL))
    return found


def expected_visits(w):
    p, tile = w.problem, w.plan.tile
    found = {}
    for b, h, q_tile in np.ndindex(p.batch, p.heads, -(-p.q_len // tile.q)):
        listed = schedule(w.facts, w.case, tile, q_tile, b, h)
        if listed:
            found[b, h, q_tile] = [(int(t), int(c)) for t, c in listed]
    return found


@pytest.mark.sampled("sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["sliding_window", "chunked", "document", "butterfly", "longformer"])
def test_the_kernel_visits_the_tiles_that_python_lists(spec):
    w = work(spec, "ampere", tile=(64, 16), kv_len=150)
    assert visits(w, w.run(PROBE["ampere"])) == expected_visits(w)


@pytest.mark.sampled("0", "1")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_masks_visit_the_tiles_that_python_lists(seed):
    source = seeded(100 + seed)
    variant = random_mask(source)
    if variant is None:
        pytest.skip("the language refuses this mask")
    case, _ = random_case(source)
    w = work(variant, "ampere", tile=(32, 16), head_dim=16, case=case, **case.sizes)
    result = w.run(PROBE["ampere"])
    assert visits(w, result) == expected_visits(w)
    assert w.wrong(result) == ()


# ---------------------------------------------------------------- order
NIGHTLY_ORDERS = pytest.mark.nightly(sibling="test_any_order_of_warps_and_copies_gives_the_same_bits")


@pytest.mark.sampled("ampere-more0-1", "hopper-more3-1")
@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=NIGHTLY_ORDERS)], ids=len)
@pytest.mark.parametrize(
    ("pipeline", "more"),
    [("ampere", {"stages": 2}), ("ampere", {"stages": 3}), ("hopper", {"q_stages": 1}), ("hopper", {"q_stages": 2})],
)
def test_any_order_of_warps_and_copies_gives_the_same_bits(pipeline, more, seeds):
    w = work("sliding_window", pipeline, q_len=70, kv_len=140, **more)
    lockstep = w.run()
    for seed in seeds:
        result = w.run(seed=seed)
        np.testing.assert_array_equal(result.o, lockstep.o)
        np.testing.assert_array_equal(result.lse, lockstep.lse)


def test_a_problem_without_output_launches_nothing():
    w = work("full", "ampere", q_len=0)
    with pytest.raises(LaunchError, match="launches no kernel"):
        w.run()


@pytest.mark.sampled("-100000-hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("wrong", [100_000, -100_000])
def test_an_index_past_its_promise_reads_the_nearest_element(pipeline, wrong):
    """A kernel checks no promise about a captured tensor, and reads no memory that is not the tensor's."""
    row = fg.tensor("row", dims=("kv",), dtype="int32", min=0, max=63)
    table = fg.tensor("table", dims=(64,), dtype="float32")

    def score(s, b, h, q, k):
        return s + table[row[k]] + table[row[k] % 64] * table[63 - abs(row[k])]

    variant = fg.variant(score=score)
    tensors = {"row": np.arange(100, dtype=np.int32) % 64, "table": np.arange(64, dtype=np.float32) / 64}
    lengths = {"q_len": 70, "kv_len": 100}
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, **lengths}
    w = work(variant, pipeline, case=Case(sizes=sizes, params={}, tensors=tensors), **lengths)
    assert w.source.count("clamp_index(i0, p.size0_table)") == 1
    check(w)
    direct = fg.variant(score=lambda s, b, h, q, k: s + table[row[k]])
    broken, nearest = (
        work(direct, pipeline, case=Case(sizes=sizes, params={}, tensors={**tensors, "row": rows}), **lengths).run()
        for rows in (np.full(100, wrong, np.int32), np.full(100, 63 if wrong > 0 else 0, np.int32))
    )
    assert np.array_equal(broken.o, nearest.o) and np.array_equal(broken.lse, nearest.lse)
    tensors["row"][:] = wrong
    work(
        variant, pipeline, case=Case(sizes=sizes, params={}, tensors=tensors), **lengths
    ).run()  # past the buffers it would trap


@pytest.mark.slow
def test_step_limit():
    with pytest.raises(StepLimit, match="more than 1000 warp instructions"):
        work("full", "ampere").run(step_limit=1000)
