"""Sequences behind each other in one tensor: each has the bits that it has alone, whatever its neighbours hold."""

import numpy as np
import pytest
from padded import batch
from ptx_attention import replace
from test_padded import check_gradients, walked

from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec, shipped
from flashgen.planning.layout import DENSE, Varlen
from flashgen.planning.planner import backward_menu, menu
from flashgen.runtime.philox import Dropout

PIPELINES = ("ampere", "hopper")

#: A sequence has no query, one ends with a tile, and the keys of the second are NaN.
LENGTHS = {"q_lengths": (100, 33, 0, 64), "kv_lengths": (130, 33, 20, 64), "poisoned": 1}

#: More sequences than a warp counts at once, of few rows each.
MANY = {"q_lengths": tuple(i % 3 for i in range(34)), "kv_lengths": tuple(i % 5 for i in range(34)), "head_dim": 32}


def check(w, **options):
    result = w.run(**options)
    assert w.wrong(result) == []
    assert result.report.conflicts == []
    return result


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_sequences_of_many_lengths(pipeline):
    check(batch("causal", pipeline, layout=Varlen(), **LENGTHS))


@pytest.mark.sampled("hopper-document")
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_spec(pipeline, spec):
    check(batch(spec, pipeline, layout=Varlen(), **LENGTHS))


@pytest.mark.sampled("ampere-causal-four heads", "hopper-full-more than a warp counts")
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"q_lengths": (64, 70, 33), "kv_lengths": (130, 0, 211), "beyond": np.inf},
        {"q_lengths": (33, 100), "kv_lengths": (70, 150), "q_offset": "end", "poisoned": 1, "q_stages": 2},
        {"q_lengths": (1, 3, 1), "kv_lengths": (70, 150, 1), "q_offset": (69, 5, 0), "heads": 4, "dtype": "float16"},
        {"q_lengths": (64, 65), "kv_lengths": (64, 129), "head_dim": 72, "v_head_dim": 40},
        {**MANY, "poisoned": 32},
        {"q_lengths": tuple(i % 3 for i in range(70)), "kv_lengths": tuple(i % 5 for i in range(70)), "poisoned": 68},
    ],
    ids=["three", "from the end", "four heads", "other head dims", "more than a warp counts", "more than two count"],
)
@pytest.mark.parametrize(
    ("pipeline", "spec"), [(pipeline, spec) for pipeline in PIPELINES for spec in ("full", "causal")]
)
def test_shapes(pipeline, spec, shape):
    check(batch(spec, pipeline, layout=Varlen(), **shape))


@pytest.mark.sampled("full")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal"])
def test_packed_heads(spec):
    check(batch(spec, "hopper", layout=Varlen(), packed=True, heads=4, kv_heads=1, **LENGTHS))


@pytest.mark.sampled("hopper-1")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_dropout_and_any_order_of_warps(pipeline, seed):
    dropout = Dropout(p=0.3, seed=5, offset=0)
    lengths = {**LENGTHS, "poisoned": 2}
    w = batch("causal", pipeline, layout=Varlen(), dropout=dropout, **lengths)
    np.testing.assert_allclose(w.run(seed=seed).o, walked(w).o, atol=0.05)


@pytest.mark.slow
def test_the_walk_and_its_bytes():
    """The CPU's walk reads what the kernel of pipeline ampere reads, and gives what it gives."""
    w = batch("causal", "ampere", layout=Varlen(), **{**LENGTHS, "poisoned": 2})
    result, found = w.run(), walked(w)
    np.testing.assert_allclose(result.o, found.o, atol=0.04)
    np.testing.assert_allclose(result.lse, found.lse, atol=1e-4)
    for name in ("q", "k", "v", "o", "lse"):
        assert result.report.bytes(buffer=name) == getattr(found.traffic, name), name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_plans(arch):
    """Sums are taken in the order of dense kernels, by the pipeline that they are of."""
    for spec in ("full", "causal", "relative_bias", "softcap"):
        variant = load_spec(spec).bind()
        dense, joined = (menu(variant, arch, "bfloat16", 128, layout=layout).plans for layout in (DENSE, Varlen()))
        assert [plan.order_of_sums for plan in joined] == [plan.order_of_sums for plan in dense]
        assert joined[0].pipeline == dense[0].pipeline
        backward = backward_menu(variant, arch, "bfloat16", 128, layout=Varlen()).plans[0]
        assert backward.pipeline == dense[0].pipeline


@pytest.mark.sampled("False")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic):
    w = batch("causal", "ampere", layout=Varlen(), **{**LENGTHS, "poisoned": 2})
    check_gradients(w, deterministic=deterministic)


@pytest.mark.sampled(every=5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"q_lengths": (33, 0, 70), "kv_lengths": (70, 10, 0), "poisoned": 1},
        {"q_lengths": (33, 70), "kv_lengths": (70, 100), "q_offset": "end", "heads": 4, "kv_heads": 2, "beyond": 1.0},
        {**MANY, "beyond": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("spec", "deterministic"), [(spec, deterministic) for spec in ("full", "blocks") for deterministic in (False, True)]
)
def test_gradients_of_shapes(spec, deterministic, shape):
    check_gradients(batch(spec, "ampere", layout=Varlen(), **shape), deterministic=deterministic)


@pytest.mark.sampled("dropout")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dropout", "options"),
    [
        ("causal", Dropout(p=0.3, seed=1, offset=0), {}),
        ("alibi", None, {"gradients": ("slopes",)}),
        ("alibi", None, {"gradients": ("slopes",), "deterministic": True}),
    ],
    ids=["dropout", "slopes", "slopes in one order"],
)
def test_gradients_with_options(spec, dropout, options):
    shape = {**LENGTHS, "poisoned": 2, "dropout": dropout}
    check_gradients(batch(spec, "ampere", layout=Varlen(), **shape), **options)


MUTATIONS = [
    ("ampere", "number -= __shfl_sync(~0u, end, 31);", ""),
    ("ampere", "p.k += p.k_start * p.k_row;", ""),
    ("ampere", "p.lse += p.q_start - p.q_offset;", ""),
    ("ampere", "__shfl_sync(~0u, end, of) - 1 - number", "number"),
    ("hopper", "if (keys >= TILE_KV) return", "if (keys >= TILE_KV || work.kv_len == p.kv_len) return"),
    ("hopper", "const int first = work.q_start + work.q_tile", "const int first = work.q_tile"),
    ("hopper", "rows[i] = {};", ";"),
]


@pytest.mark.sampled("p.lse += p.q_start - p.q_offset;", "const int first = work.q_start + work.q_tile")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "old", "new"), MUTATIONS, ids=[old for _, old, _ in MUTATIONS])
def test_every_step_counts(pipeline, old, new):
    many = {"q_lengths": tuple(i % 3 for i in range(35)), "kv_lengths": (1,) * 35, "poisoned": 34}
    lengths = many if "number -=" in old else {**LENGTHS, "kv_lengths": (211, 33, 20, 64), "poisoned": 1}
    w = batch("full", pipeline, layout=Varlen(), **lengths)
    try:
        wrong = w.wrong(w.run(edit=replace(old, new)))
    except Trap as trap:
        wrong = [type(trap).__name__]
    assert wrong
