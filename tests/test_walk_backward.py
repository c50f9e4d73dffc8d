"""The CPU walk of a backward: right gradients, the kernels' order and skipping, and honest counts."""

import numpy as np
import pytest
import torch
from backward_checks import case_of, check, inputs, plan_of, problem_of, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import banded
from tolerance import ENOUGH

import flashgen as fg
from flashgen.analysis import tiles as analysis_tiles
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.lang.load import load_spec, shipped
from flashgen.runtime.gradients import reference_gradients
from flashgen.runtime.launch import grids
from flashgen.runtime.philox import Dropout
from flashgen.runtime.tiles_backward import count_backward

SPECS = sorted(shipped())


DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.sampled(every=7)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in SPECS for dtype in DTYPES])
def test_every_spec_is_right_in_every_dtype(name, dtype):
    variant = load_spec(name).bind()
    problem = problem_of(dtype=dtype)
    assert problem.batch * problem.kv_heads * problem.kv_len * problem.v_head_dim >= ENOUGH
    check(variant, problem, case_of(variant, problem))


@pytest.mark.sampled("causal-float64", "softcap-bfloat16", "softcap-float64")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", ["causal", "softcap", "relative_bias", "packed_softcap"])
def test_dropout_and_the_deterministic_walk(name, dtype):
    variant = load_spec(name).bind()
    problem, dropout = problem_of(dtype=dtype), Dropout(p=0.3, seed=5, offset=7)
    case = case_of(variant, problem)
    for deterministic in (False, True):
        plan = plan_of(variant, problem, dropout=True, deterministic=deterministic)
        check(variant, problem, case, dropout=dropout, plan=plan)


@pytest.mark.parametrize(
    "shape",
    [
        dict(q_len=1, kv_len=1, batch=32, heads=8, kv_heads=8),
        dict(q_len=3, kv_len=200, heads=16, batch=4),
        dict(q_len=257, kv_len=31),
        dict(q_len=97, kv_len=61, heads=8, kv_heads=1, batch=3),
        dict(head_dim=48, v_head_dim=80),
    ],
    ids=str,
)
def test_shapes(shape):
    for name in ("causal", "full"):
        variant = load_spec(name).bind()
        problem = problem_of(**shape)
        check(variant, problem, case_of(variant, problem))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale):
    variant = load_spec("softcap").bind()
    problem = problem_of(dtype="float64")
    check(variant, problem, case_of(variant, problem), scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [dict(q_len=0), dict(kv_len=0), dict(batch=0), dict(heads=0, kv_heads=0)], ids=str)
def test_empty_problems(shape):
    variant = load_spec("relative_bias").bind()
    problem = problem_of(**shape)
    case = case_of(variant, problem)
    q, k, v, do, dlse = inputs(problem)
    found = walk(variant, problem, case, (q, k, v), do, dlse=dlse)
    assert (found.dq.shape, found.dk.shape, found.dv.shape) == (q.shape, k.shape, v.shape)
    assert not any(x.any() for x in (found.dq, found.dk, found.dv, found.captured["table"]))
    assert found.traffic.read_bytes == found.traffic.write_bytes == 0


def test_rows_that_see_nothing_add_nothing():
    """Neither through o nor through lse, whatever is in them."""
    table = fg.tensor("table", dims=("q",), dtype="float32", example=lambda p, rng: rng.normal(size=p.q_len))
    late = fg.variant(lambda b, h, q, k: k < q - 40).score(lambda s, b, h, q, k: s * table[q])
    problem = problem_of(dtype="float64")
    case, (q, k, v, do, dlse) = case_of(late, problem), inputs(problem)
    first = slice(0, 41)
    found = walk(late, problem, case, (q, k, v), do, dlse=dlse)
    assert not found.dq[:, :, first].any() and not found.captured["table"][first].any()
    assert found.dq[:, :, 41:].all()
    do[:, :, first], dlse[:, :, first] = 1e30, -1e30
    again = walk(late, problem, case, (q, k, v), do, dlse=dlse)
    for mine, before in zip(again[:3], found[:3], strict=True):
        assert torch.equal(mine, before)


@pytest.mark.slow
def test_a_masked_score_is_never_observed():
    causal = fg.variant(lambda b, h, q, k: k <= q)
    spoiled = causal.score(lambda s, b, h, q, k: fg.where(k <= q, s, s * float("inf") - s * float("inf")))
    rooted = causal.score(lambda s, b, h, q, k: s + 0.0 * fg.sqrt(fg.float32(q - k)))
    hiding = fg.variant(score=lambda s, b, h, q, k: fg.where(k <= q, s, -float("inf")))
    sinking = fg.variant(score=lambda s, b, h, q, k: s + fg.log(fg.where(k <= q, 1.0, s * 0.0)))
    problem = problem_of(dtype="float64")
    q, k, v, do, dlse = inputs(problem)
    want = walk(causal, problem, case_of(causal, problem), (q, k, v), do, dlse=dlse)
    for variant in (spoiled, rooted, hiding, sinking):
        got = walk(variant, problem, case_of(variant, problem), (q, k, v), do, dlse=dlse)
        for mine, right in zip(got[:3], want[:3], strict=True):
            torch.testing.assert_close(mine, right)


def test_a_score_that_forgets_s_has_no_gradient_in_q_and_k():
    variant = fg.variant(score=lambda s, b, h, q, k: fg.float32(k) * 0.01)
    problem = problem_of(dtype="float64")
    found = check(variant, problem, case_of(variant, problem))
    assert not found.dq.any() and not found.dk.any() and found.dv.any()


@pytest.mark.slow
def test_a_captured_tensor_read_at_several_places():
    """Its elements collect from both reads, through products, of dimensions that broadcast and indices that clamp."""
    table = fg.tensor("table", dims=("heads", None), dtype="float32")
    other = fg.tensor("other", dims=("batch",), dtype="float16")

    def score(s, b, h, q, k):
        return s * table[h, fg.clamp(q - k, 0, 8)] + table[h, k % 9] * table[h, q % 9] + other[b] * s

    variant = fg.variant(lambda b, h, q, k: k <= q + 3, score)
    problem = problem_of(dtype="float64")
    rng = np.random.default_rng(1)
    tensors = {"table": rng.normal(size=(1, 9)).astype(np.float32), "other": np.array([0.5, -2.0], np.float16)}
    case = Case(sizes=problem.sizes(), params={}, tensors=tensors)
    for deterministic in (False, True):
        check(variant, problem, case, plan=plan_of(variant, problem, deterministic=deterministic))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_tiles_do_not_change_results(data):
    """Random lengths, bands, prefixes and tiles against whole rows, in float64."""
    variant, sizes, tile = banded(data.draw)
    problem = problem_of(**sizes, head_dim=16, dtype="float64")
    case = case_of(variant, problem)
    q, k, v, do, dlse = inputs(problem)
    plan = plan_of(variant, problem, tile, deterministic=data.draw(st.booleans()))
    got = walk(variant, problem, case, (q, k, v), do, dlse=dlse, plan=plan)
    want = reference_gradients(variant, case, q, k, v, do, dlse=dlse, scale=problem.head_dim**-0.5)
    for mine, right in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)
    sizes = problem.batch * problem.heads * -(-problem.q_len // tile[0]) * -(-problem.kv_len // tile[1])
    assert got.traffic.total == sizes == got.traffic.empty + got.traffic.partial + got.traffic.full


# -- what is read and written


def test_empty_tiles_are_never_read():
    window = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 20))
    problem = problem_of(q_len=64, kv_len=64, dtype="float32")
    case, (q, k, v, do, dlse) = case_of(window, problem), inputs(problem)
    clean = walk(window, problem, case, (q, k, v), do, dlse=dlse)
    q[:, :, :32], do[:, :, :32] = float("nan"), float("nan")  # none of them sees the last KV tile of 16
    spoiled = walk(window, problem, case, (q, k, v), do, dlse=dlse)
    torch.testing.assert_close(spoiled.dk[:, :, 48:], clean.dk[:, :, 48:])
    assert spoiled.dk[:, :, :16].isnan().all()


def test_queries_are_visited_head_by_head_from_the_first_on(monkeypatch):
    asked = []
    schedule = analysis_tiles.schedule_queries
    monkeypatch.setattr(analysis_tiles, "schedule_queries", lambda *a: asked.append(a[3]) or schedule(*a))
    causal = load_spec("causal").bind()
    problem = problem_of(batch=1, heads=2, kv_heads=1, q_len=64, kv_len=64, dtype="float32")
    q, k, v, do, _ = inputs(problem)
    found = walk(causal, problem, case_of(causal, problem), (q, k, v), do)
    assert asked == [0, 0, 1, 1, 2, 2, 3, 3]  # each KV tile for each head of the group
    assert (found.traffic.partial, found.traffic.full, found.traffic.empty) == (2 * 4, 2 * 2, 2 * 2)


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_counting_alone_counts_what_the_walk_moves(name, deterministic):
    variant = load_spec(name).bind()
    problem = problem_of(head_dim=16, v_head_dim=24)
    case, (q, k, v, do, dlse) = case_of(variant, problem), inputs(problem)
    plan = plan_of(variant, problem, deterministic=deterministic)
    moved = walk(variant, problem, case, (q, k, v), do, dlse=dlse, plan=plan).traffic
    counted = count_backward(plan, analyse(variant), case, head_dim=16, v_head_dim=24, dtype="bfloat16", dlse=True)
    assert counted == moved


def test_full_attention_moves_what_the_algorithm_does():
    full = load_spec("full").bind()
    problem = problem_of(batch=1, heads=8, kv_heads=2, q_len=256, kv_len=192, head_dim=64)
    shape = dict(head_dim=64, v_head_dim=64, dtype="bfloat16")
    facts, case = analyse(full), case_of(full, problem)
    plan = plan_of(full, problem, (64, 32))
    found = count_backward(plan, facts, case, **shape).kernels
    rows, kv_tiles = 8 * 256, 192 // 32
    assert found["attention_backward_prepare"].read == {"o": rows * 128, "do": rows * 128, "lse": rows * 4}
    assert found["attention_backward_prepare"].written == {"lse": rows * 4, "delta": rows * 4, "dq": rows * 64 * 4}
    assert found["attention_backward"].read == {
        "k": 2 * 192 * 128,
        "v": 2 * 192 * 128,  # once, whatever the group
        "q": kv_tiles * rows * 128,
        "do": kv_tiles * rows * 128,
        "lse": kv_tiles * rows * 4,
        "delta": kv_tiles * rows * 4,
        "dq": kv_tiles * rows * 64 * 4,
    }
    keys = 2 * 192 * 128
    assert found["attention_backward"].written == {"dq": kv_tiles * rows * 64 * 4, "dk": keys, "dv": keys}
    assert found["attention_backward_finish"].read == {"dq": rows * 64 * 4}
    assert found["attention_backward_finish"].written == {"dq": rows * 128}
    assert list(found) == [grid.entry for grid in grids(plan, problem, sms=132)]
    plan = plan_of(full, problem, (64, 32), deterministic=True)
    alone = count_backward(plan, facts, case, **shape).kernels
    assert list(alone) == [grid.entry for grid in grids(plan, problem, sms=132)]
    assert alone["attention_backward_dq"].read == {
        "q": rows * 128,
        "do": rows * 128,
        "lse": rows * 4,
        "delta": rows * 4,
        "k": 8 * 4 * 192 * 128,
        "v": 8 * 4 * 192 * 128,  # once per tile of 80 queries and query head
    }
    moved = alone["attention_backward"], alone["attention_backward_prepare"]
    assert not any("dq" in entry for kernel in moved for entry in (kernel.read, kernel.written))


def test_an_index_outside_a_captured_tensor_is_an_error():
    table = fg.tensor("table", dims=(None,), dtype="float32", example=lambda problem, rng: np.zeros(12))
    variant = fg.variant(score=lambda s, b, h, q, k: s + table[q])
    problem = problem_of(q_len=20, kv_len=20)
    q, k, v, do, _ = inputs(problem)
    with pytest.raises(IndexError, match=r"'table': index 12 is outside dimension 0 of size 12"):
        walk(variant, problem, case_of(variant, problem), (q, k, v), do)
