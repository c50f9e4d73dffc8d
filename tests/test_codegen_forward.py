"""The emitted forward keeps the semantics of attention at its edges: executed on the PTX interpreter."""

import math
from dataclasses import replace

import numpy as np
import pytest

import flashgen as fg
from flashgen import interpreter
from flashgen.analysis.tiles import Case
from flashgen.interpreter.simulate import execute, loaded, simulate, stored
from flashgen.lang.evaluate import evaluate
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.pipelines.ampere import programs
from flashgen.planning.plan import Part, Tile
from flashgen.planning.problem import Problem
from flashgen.runtime.launch import make_launch


def plan_of(
    variant, *, dtype="bfloat16", head_dim=32, v_head_dim=None, tile=(32, 16), warps=2, stages=2, q_in_registers=True
):
    """A small plan, whatever the planner would choose."""
    v_head_dim = v_head_dim or head_dim
    plan = planner.menu(variant.bind(), "sm_80", dtype, head_dim, v_head_dim, pipeline="ampere").plans[0]
    d, dv = plan.padded_head_dim, plan.padded_v_head_dim
    return replace(
        plan,
        tile=Tile(q=tile[0], kv=tile[1]),
        stages=stages,
        program=programs.forward(warps, stages),
        q_in_registers=q_in_registers,
        blocks_per_sm=1,
        smem=(
            Part(name="q", amount=2 * tile[0] * max(d, dv)),
            Part(name="k", amount=2 * stages * tile[1] * d),
            Part(name="v", amount=2 * stages * tile[1] * dv),
        ),
    )


def inputs(case, plan, seed=0):
    rng = np.random.default_rng(seed)
    b, hq, hk, sq, sk = (case.sizes[n] for n in ("batch", "heads", "kv_heads", "q_len", "kv_len"))
    shapes = (b, hq, sq, plan.head_dim), (b, hk, sk, plan.head_dim), (b, hk, sk, plan.v_head_dim)
    return [loaded(stored(rng.normal(size=shape), plan.dtype), plan.dtype) for shape in shapes]


def case_of(q_len, kv_len, *, batch=1, heads=2, kv_heads=1, **values):
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    return Case(sizes=sizes, params=values, tensors={})


def reference(variant, case, q, k, v, scale):
    """o and lse in float64, with torch's meaning of infinities and NaN."""
    group = case.sizes["heads"] // case.sizes["kv_heads"]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    s = scale * np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k)
    place = dict(zip("bhqk", np.ogrid[tuple(map(slice, s.shape))], strict=True))
    data = {"sizes": case.sizes, "params": case.params, "tensors": case.tensors}
    if variant.score_node is not None:
        s = np.broadcast_to(evaluate(variant.score_node, s=s, **place, **data, float_dtype=np.float64), s.shape)
    if variant.mask is not None:
        s = np.where(evaluate(variant.mask, **place, **data), s, -np.inf)
    with np.errstate(all="ignore"):
        most = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(most == -np.inf, 0, most))
        total = p.sum(-1, keepdims=True)
        o = np.einsum("bhqk,bhkd->bhqd", p / np.where(total == 0, 1, total), v)
        return o, (np.where(most == -np.inf, 0, most) + np.log(total))[..., 0]


def check(variant, case, plan, *, scale=None, seed=None, values=None):
    q, k, v = values or inputs(case, plan)
    scale = plan.head_dim**-0.5 if scale is None else scale
    o, lse, report, *_ = simulate(plan, case, q, k, v, scale=scale, seed=seed)
    expected, expected_lse = reference(plan.variant, case, q, k, v, scale)
    np.testing.assert_allclose(o, expected, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert not report.conflicts
    return o, lse


CAUSAL = load_spec(shipped()["causal"])
FULL = load_spec(shipped()["full"])


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 40), (3, 2), (33, 15), (31, 17), (70, 0), (64, 48)])
def test_any_lengths(q_len, kv_len):
    check(CAUSAL, case_of(q_len, kv_len), plan_of(CAUSAL))


@pytest.mark.sampled("3-2-tile1-False", "4-4-tile2-True")
@pytest.mark.slow
@pytest.mark.parametrize("q_in_registers", [False, True])
@pytest.mark.parametrize(
    ("stages", "warps", "tile"), [(2, 1, (32, 32)), (3, 2, (32, 16)), (4, 4, (64, 16)), (2, 2, (64, 48))]
)
def test_stages_warps_and_tiles(stages, warps, tile, q_in_registers):
    plan = plan_of(CAUSAL, stages=stages, warps=warps, tile=tile, q_in_registers=q_in_registers)
    check(CAUSAL, case_of(70, 130), plan, seed=stages)


@pytest.mark.sampled("head_dims0", "head_dims3")
@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [(16, 16), (24, 40), (72, 16), (16, 72), (80, 112), (96, 96), (256, 64)])
def test_head_dims_without_bank_conflicts(head_dims):
    plan = plan_of(CAUSAL, head_dim=head_dims[0], v_head_dim=head_dims[1], dtype="float16")
    check(CAUSAL, case_of(40, 50, heads=4, kv_heads=2, batch=2), plan)


@pytest.mark.slow
def test_rows_that_see_nothing_are_zero():
    variant = fg.variant(lambda b, h, q, k: (k + 20 <= q) & (q < 40))
    o, lse = check(variant, case_of(60, 60), plan_of(variant))
    assert not o[:, :, :20].any() and not o[:, :, 40:].any()
    assert np.isneginf(lse[:, :, :20]).all() and np.isneginf(lse[:, :, 40:]).all()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 30.0])
def test_scale_may_be_zero_tiny_or_large(scale):
    check(CAUSAL, case_of(40, 40), plan_of(CAUSAL), scale=scale)


@pytest.mark.slow
def test_scores_of_minus_infinity_are_masked():
    variant = fg.variant(score=lambda s, b, h, q, k: fg.where((k % 3 == 0) | (q == 5), -math.inf, s))
    o, lse = check(variant, case_of(40, 50), plan_of(variant))
    assert not o[:, :, 5].any() and np.isneginf(lse[:, :, 5]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("value", "at"), [(np.nan, 3), (np.inf, 3), (np.nan, 45), (np.inf, 45)])
def test_nan_and_infinite_scores_reach_their_rows_only(value, at):
    case, plan = case_of(40, 50), plan_of(FULL)
    q, k, v = inputs(case, plan)
    q[:, :, 7] = 1
    q[:, :, 8:] *= 0.5
    variant = fg.variant(score=lambda s, b, h, q, k: fg.where((q == 7) & (k == at), s + math.inf, s))
    if np.isnan(value):
        variant = variant.then(lambda s, b, h, q, k: s - fg.where((q == 7) & (k == at), math.inf, 0.0))
    o, *_ = simulate(plan_of(variant), case, q, k, v, scale=0.2)
    assert np.isnan(o[:, :, 7]).all()
    assert np.isfinite(np.delete(o, 7, axis=2)).all()


@pytest.mark.slow
def test_the_maximum_may_rise_at_every_tile():
    variant = fg.variant(score=lambda s, b, h, q, k: s - 3.0 * k)  # keys are visited from the last to the first
    check(variant, case_of(33, 200), plan_of(variant))


@pytest.mark.slow
def test_rows_heads_and_batches_may_lie_apart():
    """q, k, v and o as [batch, rows, heads, head_dim] tensors with room behind each row."""
    plan, case = plan_of(CAUSAL, head_dim=24, v_head_dim=16), case_of(37, 45, batch=2, heads=4, kv_heads=2)
    q, k, v = inputs(case, plan)
    memory, addresses, strides, views = interpreter.Memory(), {}, {}, {}
    for name, x in (("q", q), ("k", k), ("v", v), ("o", np.zeros((2, 4, 37, 16), np.float32))):
        b, h, s, d = x.shape
        room = np.full((b, s, h, d + 8), 0x7FC0, np.uint16)  # NaN
        room[..., :d] = np.moveaxis(stored(x, plan.dtype), 1, 2)
        views[name] = room
        addresses[name] = memory.add(name, room, writable=name == "o")
        strides[name] = s * h * (d + 8), d + 8, h * (d + 8)
    lse = np.zeros((2, 4, 37), np.float32)
    addresses["lse"] = memory.add("lse", lse, writable=True)
    problem = Problem(**case.sizes, head_dim=24, v_head_dim=16)
    execute(make_launch(plan, problem, strides=strides, captured={}, scale=0.25, params={}, sms=108), memory, addresses)
    expected, expected_lse = reference(plan.variant, case, q, k, v, 0.25)
    np.testing.assert_allclose(
        np.moveaxis(loaded(views["o"][..., :16], plan.dtype), 1, 2), expected, rtol=2e-2, atol=2e-2
    )
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert (views["o"][..., 16:] == 0x7FC0).all()
