"""Gradients of sequences with lengths of their own by pipeline hopper: right, untouched by neighbours, as alone."""

import dataclasses

import numpy as np
import pytest
from padded import batch
from ptx_attention import replace
from test_padded import LENGTHS, check_gradients
from test_varlen import LENGTHS as JOINED

from flashgen.codegen import emit
from flashgen.interpreter.errors import StepLimit, Trap
from flashgen.lang.load import load_spec
from flashgen.planning.layout import Padded, Varlen
from flashgen.planning.planner import backward_menu
from flashgen.runtime.philox import Dropout

PADDED = {"q_offset": "end", **LENGTHS}
VARLEN = {"layout": Varlen(), **JOINED, "poisoned": 2}
LAYOUTS = {"padded": PADDED, "varlen": VARLEN}


def check(spec, given, **options):
    """A spec's gradients by the kernels of pipeline hopper beside the walk's."""
    options = {"pipeline": "hopper", **options}
    return check_gradients(batch(spec, "ampere", **given), **options)


@pytest.mark.sampled("padded-False")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gradients(layout, deterministic):
    check("causal", LAYOUTS[layout], deterministic=deterministic)


@pytest.mark.sampled("blocks-varlen-True")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(
    "spec",
    ("full", "blocks", "document", "softcap", "relative_bias", "butterfly", "padding", "prefix_lm"),
)
def test_every_kind_of_spec(spec, layout, deterministic):
    check(spec, LAYOUTS[layout], deterministic=deterministic)


@pytest.mark.sampled("padded")
@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_tiles_behind_a_sequence_are_not_visited(layout):
    """A mask of keys alone says nothing of queries: the sequence says where they end, on either pipeline."""
    for pipeline in ("ampere", "hopper"):
        check("padding", LAYOUTS[layout], pipeline=pipeline)


@pytest.mark.slow
def test_what_keys_say_is_not_read_where_there_is_none():
    """The first sequence has no key: its tensor begins where the memory does, and nothing before it is read."""
    check("key_padding", {"q_lengths": (40, 33), "kv_lengths": (0, 70), "q_len": 40, "kv_len": 70})
    check("key_padding", {"layout": Varlen(), "q_lengths": (0, 13), "kv_lengths": (70, 40), "q_len": 13, "kv_len": 70})


@pytest.mark.nightly(sibling="test_gradients")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("causal", {**VARLEN, "head_dim": 192, "v_head_dim": 128, "tile": (64, 32)}),
        ("full", {**PADDED, "head_dim": 256, "tile": (64, 32)}),
        ("softcap", {**VARLEN, "head_dim": 72, "v_head_dim": 40}),
        ("full", {**VARLEN, "heads": 4, "kv_heads": 2, "dtype": "float16"}),
        ("causal", {**VARLEN, "dropout": Dropout(p=0.3, seed=1, offset=0)}),
        ("full", {"q_lengths": (0, 70), "kv_lengths": (63, 0)}),
        ("full", {"layout": Varlen(), "q_lengths": (33, 0, 70), "kv_lengths": (70, 10, 0), "poisoned": 1}),
        ("causal", {"layout": Varlen(), "q_lengths": (1, 2) * 18, "kv_lengths": (3, 4) * 18, "beyond": 1.0}),
        (
            "causal",
            {"layout": Varlen(), "q_lengths": (256,), "kv_lengths": (256,), "q_len": 256, "kv_len": 256, "beyond": 1.0},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}={v}" for k, v in x.items() if k != "layout"),
)
def test_shapes(spec, shape, deterministic):
    check(spec, shape, deterministic=deterministic)


@pytest.mark.sampled(deterministic=(True,))
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors(deterministic):
    check("alibi", VARLEN, gradients=("slopes",), deterministic=deterministic)
    check("relative_bias", {"q_offset": (5, 90)}, gradients=("table",), deterministic=deterministic)


@pytest.mark.nightly(sibling="test_gradients")
@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_any_order_of_warps(layout):
    for seed in range(2):
        check("causal", LAYOUTS[layout], seed=seed, deterministic=True)


def poisoned(w, b):
    """The same batch, whose sequence b is NaN throughout; and its rows of q and of k."""
    own = w.sequences[b]
    q, k, v = (x.copy() for x in w.qkv)
    q[0, :, own.queries] = k[0, :, own.keys] = v[0, :, own.keys] = np.nan
    return dataclasses.replace(w, qkv=(q, k, v)), own


@pytest.mark.sampled("False")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_neighbour_of_nothing_but_nan_changes_no_bit(deterministic):
    """Of one order of sums, bit by bit; else as close as sums in another order are."""
    lengths = {"q_lengths": (33, 70, 20), "kv_lengths": (70, 90, 33), "beyond": 1.0}
    w = batch("causal", "ampere", layout=Varlen(), **lengths)
    beside, own = poisoned(w, 1)
    options = {"pipeline": "hopper", "deterministic": deterministic}
    (want, _), (got, _) = w.backward(**options), beside.backward(**options)
    rows = {"dq": own.queries, "dk": own.keys, "dv": own.keys}
    for name, span in rows.items():
        one, other = (np.delete(getattr(x, name), np.r_[span], axis=2) for x in (want, got))
        assert not np.isnan(other).any()
        np.testing.assert_allclose(one, other, rtol=0 if deterministic else 1e-2, atol=0 if deterministic else 1e-2)


#: Bounds of lengths that two sequences have; the keys of the first are all alike.
TWO = {"layout": Varlen(), "q_len": 140, "kv_len": 200, "beyond": 0.5}


def alone(w, b):
    """Sequence b as a batch of its own, with the same values in its rows."""
    own = w.sequences[b]
    single = batch("causal", "ampere", **TWO, q_lengths=(own.q_rows,), kv_lengths=(own.kv_len,))
    qkv = tuple(x[:, :, span] for x, span in zip(w.qkv, (own.queries, own.keys, own.keys), strict=True))
    return dataclasses.replace(single, qkv=qkv)


@pytest.mark.slow
def test_one_order_of_sums_gives_each_sequence_the_bits_that_it_has_alone():
    w = batch("causal", "ampere", **TWO, q_lengths=(33, 140), kv_lengths=(70, 200))
    rng = np.random.default_rng(3)
    do, dlse = (rng.standard_normal(shape, np.float32) for shape in (w.qkv[0].shape, w.qkv[0].shape[:3]))
    together, _ = w.backward(pipeline="hopper", deterministic=True, given=(do, dlse))
    for b, own in enumerate(w.sequences):
        given = do[:, :, own.queries], dlse[:, :, own.queries]
        single, _ = alone(w, b).backward(pipeline="hopper", deterministic=True, given=given)
        assert np.array_equal(together.dq[:, :, own.queries], single.dq)
        assert np.array_equal(together.dk[:, :, own.keys], single.dk)
        assert np.array_equal(together.dv[:, :, own.keys], single.dv)


MUTATIONS = [
    ("padded", "clear_rows(shared.q[stage], queries_here(step));", ""),
    ("padded", "clear_rows(shared.d_o[stage], queries_here(step));", ""),
    ("varlen", "clear_rows(shared.k, keys_here());", ""),
    ("varlen", "clear_rows(shared.v, keys_here());", ""),
    ("varlen", "fence_proxy_async();\n    __syncwarp();\n    if (thread", "__syncwarp();\n    if (thread"),
    ("varlen", "mbarrier_wait(shared.landed, cleared++ % 2);", ""),
    ("varlen", "d, p.k_start + keys.k_first", "d, keys.k_first"),
    ("varlen", "d, p.q_start + step.tile", "d, step.tile"),
    ("varlen", "first_tile(p.q_start, keys.b)", "0"),
    ("varlen", "row <= rows.q_last", "true"),
    ("padded", "p.kv_tiles = (p.kv_len + TILE_KV - 1) / TILE_KV;", ""),
    ("padded", "<= shared.sequence.last_row", "<= keys.k_last"),
    ("padded", "{p.q_offset + step.tile * TILE_Q", "{step.tile * TILE_Q"),
]


#: Sequences whose ends lie inside tiles; of those behind each other one has no query, and its keys are NaN.
ENDS = {
    "varlen": {"layout": Varlen(), "q_lengths": (20, 0, 33), "kv_lengths": (40, 70, 33), "poisoned": 1},
    "padded": {"q_offset": "end", "q_lengths": (20, 33), "kv_lengths": (40, 150), "q_len": 33, "kv_len": 300},
}


@pytest.mark.nightly(sibling="test_a_neighbour_of_nothing_but_nan_changes_no_bit")
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "old", "new"), MUTATIONS, ids=[old for _, old, _ in MUTATIONS])
def test_every_step_counts(layout, old, new):
    w = batch("full" if "kv_tiles" in old else "causal", "ampere", **ENDS[layout])
    options = {"deterministic": True, "step_limit": 2_000_000}
    with pytest.raises((AssertionError, StepLimit, Trap)):
        check_gradients(w, pipeline="hopper", edit=replace(old, new), **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("spec", ["causal", "relative_bias"])
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
def test_the_planner_takes_pipeline_hopper(layout, spec, head_dim, deterministic):
    variant = load_spec(spec).bind()
    plan = backward_menu(variant, "sm_90a", "bfloat16", head_dim, layout=layout, deterministic=deterministic).plans[0]
    assert plan.pipeline == "hopper" and plan.fallbacks == ()
    assert "sequence" in emit(plan)


@pytest.mark.sampled("padded-hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["ampere", "hopper"])
@pytest.mark.parametrize(
    "given",
    [
        {"layout": Varlen(), "q_lengths": (33, 0, 70), "kv_lengths": (70, 10, 0), "poisoned": 1},
        {"q_lengths": (70, 30), "kv_lengths": (63, 0)},
    ],
    ids=["varlen", "padded"],
)
def test_gradients_of_a_sink(given, pipeline):
    """A sequence without keys has the sink alone: its lse moves with it."""
    found = check("gpt_oss", given, pipeline=pipeline, gradients=("sink",))
    assert abs(found.captured["sink"]).min() > 0.1
