"""The CPU walk of a plan: right results, the kernel's order and skipping, and honest counts."""

import functools
import math

import numpy as np
import pytest
import torch
from backward_checks import case_of, problem_of
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import banded
from tolerance import ENOUGH, baseline, judge, judge_lse, reference

import flashgen as fg
from flashgen.analysis import tiles as analysis_tiles
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.bench.inputs import INPUTS, draw
from flashgen.lang.load import load_spec, shipped
from flashgen.lang.stored import rounded
from flashgen.planning.planner import menu
from flashgen.planning.traffic import predict
from flashgen.runtime import tiles
from flashgen.runtime.philox import Dropout

SPECS = sorted(shipped())


def plan_of(variant, problem, tile=None):
    dtype = problem.dtype if problem.dtype in ("float16", "bfloat16") else "bfloat16"
    return menu(variant, "sm_80", dtype, problem.head_dim, problem.v_head_dim, tile=tile).plans[0]


def inputs(problem, seed=0):
    g = torch.Generator().manual_seed(seed)
    p = problem
    keys = (p.batch, p.kv_heads, p.kv_len)
    shapes = (p.batch, p.heads, p.q_len, p.head_dim), (*keys, p.head_dim), (*keys, p.v_head_dim)
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(getattr(torch, p.dtype)) for s in shapes)


def walk(variant, problem, case, qkv, *, scale=None, tile=(32, 16), dropout=None):
    """(o, lse, traffic) with o rounded to the problem's dtype, as a call of attention gives it."""
    precision = torch.float64 if problem.dtype == "float64" else torch.float32
    arrays = (x.to(precision).numpy() for x in qkv)
    scale = problem.head_dim**-0.5 if scale is None else scale
    plan = plan_of(variant, problem, tile)
    facts = analyse(variant)
    o, lse, traffic = tiles.walk(plan, facts, case, *arrays, scale=scale, dtype=problem.dtype, dropout=dropout)
    return torch.from_numpy(o).to(getattr(torch, problem.dtype)), torch.from_numpy(lse), traffic


def check(variant, problem, case, qkv, *, scale=None, tile=(32, 16), dropout=None):
    scale = problem.head_dim**-0.5 if scale is None else scale
    o, lse, _ = walk(variant, problem, case, qkv, scale=scale, tile=tile, dropout=dropout)
    ref, ref_lse = reference(variant, case, *qkv, scale=scale, dropout=dropout)
    base, _ = baseline(variant, case, *qkv, scale=scale, dropout=dropout)
    verdict = judge(o, base, ref, problem.dtype)
    assert verdict.ok, verdict
    assert judge_lse(lse, ref_lse) == ()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_is_right_in_every_dtype(name, dtype):
    variant = load_spec(name).bind()
    problem = problem_of(dtype=dtype)
    assert problem.batch * problem.heads * problem.q_len * problem.v_head_dim >= ENOUGH
    check(variant, problem, case_of(variant, problem), inputs(problem))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_make_a_softmax_peaked(name, dtype):
    variant = load_spec("causal").bind()
    problem = problem_of(dtype=dtype, q_len=300, kv_len=300, head_dim=64)
    check(variant, problem, case_of(variant, problem), draw(problem, 0, name, device="cpu")[:3], tile=(64, 128))


@pytest.mark.parametrize(
    "shape",
    [
        dict(q_len=1, kv_len=1, batch=16, heads=8, kv_heads=8),
        dict(q_len=3, kv_len=200, heads=16),
        dict(q_len=257, kv_len=2),
        dict(q_len=97, kv_len=31, heads=8, kv_heads=1),
        dict(head_dim=48, v_head_dim=80),
    ],
    ids=str,
)
def test_shapes(shape):
    variant = load_spec("causal").bind()
    problem = problem_of(**shape)
    check(variant, problem, case_of(variant, problem), inputs(problem))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale):
    variant = load_spec("sliding_window").bind()
    problem = problem_of(dtype="float32")
    check(variant, problem, case_of(variant, problem, window=9), inputs(problem), scale=scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dropout(dtype):
    variant = load_spec("causal").bind()
    problem = problem_of(dtype=dtype)
    case, qkv, dropout = case_of(variant, problem), inputs(problem), Dropout(p=0.3, seed=5, offset=1 << 33)
    for tile in ((32, 16), (64, 64)):  # the mask knows no tiles
        check(variant, problem, case, qkv, dropout=dropout, tile=tile)
    o, lse, _ = walk(variant, problem, case, qkv)
    assert torch.equal(walk(variant, problem, case, qkv, dropout=dropout)[1], lse)
    assert torch.equal(walk(variant, problem, case, qkv, dropout=Dropout(p=0.0, seed=5))[0], o)


@pytest.mark.parametrize("shape", [dict(q_len=0), dict(kv_len=0), dict(batch=0), dict(q_len=0, kv_len=0)], ids=str)
def test_empty_problems(shape):
    variant = load_spec("causal").bind()
    problem = problem_of(**shape)
    o, lse, traffic = walk(variant, problem, case_of(variant, problem), inputs(problem))
    assert o.shape == (problem.batch, problem.heads, problem.q_len, problem.v_head_dim)
    assert (o == 0).all() and (lse == -math.inf).all()
    assert traffic.read_bytes == 0
    assert traffic.write_bytes == lse.numel() * (4 + problem.v_head_dim * 2)


def test_rows_that_see_nothing():
    late = fg.variant(lambda b, h, q, k: k < q - 40)
    problem = problem_of()
    o, lse, traffic = walk(late, problem, case_of(late, problem), inputs(problem))
    assert (o[:, :, :41] == 0).all() and (lse[:, :, :41] == -math.inf).all()
    assert (lse[:, :, 41:] > -math.inf).all()
    # The first Q tile sees nothing, and is not even loaded.
    assert traffic.q == problem.batch * problem.heads * (problem.q_len - 32) * problem.head_dim * 2


def test_a_masked_score_is_never_observed_and_minus_infinity_is_masked():
    causal = fg.variant(lambda b, h, q, k: k <= q)
    spoiled = causal.score(lambda s, b, h, q, k: fg.where(k <= q, s, s * math.inf - s * math.inf))
    hiding = fg.variant(score=lambda s, b, h, q, k: fg.where(k <= q, s, -math.inf))
    problem = problem_of(dtype="float64")
    qkv = inputs(problem)
    want = walk(causal, problem, case_of(causal, problem), qkv)
    for variant in (spoiled, hiding):
        got = walk(variant, problem, case_of(variant, problem), qkv)
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])


def test_p_is_rounded_to_the_16_bit_type_and_nothing_else_is():
    full = fg.variant()
    problem = problem_of(heads=2, kv_heads=2, q_len=32, kv_len=16)
    q, k, v = (x.float().numpy() for x in inputs(problem))
    q, k = np.sign(q), np.sign(k)  # whole scores, the same in every order of summation
    plan, facts, case = plan_of(full, problem, (32, 16)), analyse(full), case_of(full, problem)
    o = {dtype: tiles.walk(plan, facts, case, q, k, v, scale=0.25, dtype=dtype).o for dtype in ("bfloat16", "float32")}
    s = np.float32(0.25) * (q @ k.swapaxes(-1, -2))
    p = np.exp(s - s.max(-1, keepdims=True))
    rounded = torch.from_numpy(p).bfloat16().float().numpy()
    np.testing.assert_allclose(o["bfloat16"], rounded @ v / p.sum(-1, keepdims=True), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(o["float32"], p @ v / p.sum(-1, keepdims=True), rtol=1e-6, atol=1e-6)
    assert np.abs(o["bfloat16"] - o["float32"]).max() > 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_that_of_pytorch(dtype):
    values = np.random.default_rng(0).random(4096).astype(np.float32)
    special = np.array([0, 1, np.nan, np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 2**-20], np.float32)
    for x in (values, special):
        want = torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(rounded(x, dtype), want)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_tiles_do_not_change_results(data):
    """Random lengths, bands, prefixes and tiles against whole rows, in float64."""
    variant, sizes, tile = banded(data.draw)
    problem = problem_of(**sizes, head_dim=16, dtype="float64")
    case = case_of(variant, problem)
    qkv = inputs(problem)
    o, lse, traffic = walk(variant, problem, case, qkv, tile=tile)
    want_o, want_lse = reference(variant, case, *qkv, scale=problem.head_dim**-0.5)
    torch.testing.assert_close(o, want_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    visible = case.evaluate(
        variant.mask,
        b=np.arange(problem.batch)[:, None, None, None],
        h=np.arange(4)[:, None, None],
        q=np.arange(problem.q_len)[:, None],
        k=np.arange(problem.kv_len),
    )
    shape = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
    assert traffic.visible == np.broadcast_to(visible, shape).sum()


# -- the bits of a row


def peaked(problem, tile_kv):
    """Rows that pass what they have seen by every slack, early and late in their walk, beside rows that none passes."""
    q, k, v = inputs(problem)
    for row, key in ((3, 2), (40, tile_kv + 1), (41, 2 * tile_kv), (90, problem.kv_len - 40), (90, 7)):
        k[:, :, key] = 12 * q[:, : problem.kv_heads, row]
    return q, k, v


def whole_and_parts(monkeypatch, change=None):
    """o and lse of a prefill of 150 queries and keys in a batch of two, and of parts of it: (whole, part) pairs."""
    variant = load_spec("causal_bottom_right")
    problem = problem_of(batch=2, heads=4, kv_heads=2, q_len=150, kv_len=150, head_dim=40, dtype="bfloat16")
    q, k, v = peaked(problem, 32)
    if change is not None:
        change(monkeypatch)

    def run(q, k, v, tile):
        here = problem._replace(batch=q.shape[0], q_len=q.shape[2], kv_len=k.shape[2])
        o, lse, _ = walk(variant, here, case_of(variant, here), (q, k, v), tile=tile)
        return np.concatenate([o.float().numpy(), lse.numpy()[..., None]], -1).view(np.int32)

    whole = run(q, k, v, (64, 32))
    for rows in (1, 7, 64, 100):
        yield whole[:, :, -rows:], run(q[:, :, -rows:], k, v, (64, 32))
        yield whole[:, :, :rows], run(q[:, :, :rows], k[:, :, :rows], v[:, :, :rows], (64, 32))
    yield whole[1:], run(q[1:], k[1:], v[1:], (64, 32))
    for tile_q in (16, 32, 128):
        yield whole, run(q, k, v, (tile_q, 32))


def test_the_bits_of_a_row_are_its_own(monkeypatch):
    """Chunks, prefixes, one of a batch and other tiles of queries change no bit of o and lse."""
    for whole, part in whole_and_parts(monkeypatch):
        np.testing.assert_array_equal(whole, part)


def _maxima_of_tiles(monkeypatch):
    add = tiles._Rows.add

    def shared(self, s, v, *rest):
        s = s.copy()
        self.m = np.maximum(self.m, np.where(self.m == -np.inf, -np.inf, self.m.max(-1, keepdims=True)))
        add(self, s, v, *rest)

    monkeypatch.setattr(tiles._Rows, "add", shared)


def _products_of_any_height(monkeypatch):
    monkeypatch.setattr(tiles, "by_rows", lambda a, b: a @ b)


@pytest.mark.parametrize("change", [_maxima_of_tiles, _products_of_any_height])
def test_what_the_bits_of_a_row_hang_on(monkeypatch, change):
    assert any((whole != part).any() for whole, part in whole_and_parts(monkeypatch, change))


# -- what is read and written


def test_empty_tiles_are_never_read():
    """NaN in every key that only EMPTY tiles hold would poison what reads it."""
    window = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 20))
    problem = problem_of(q_len=64, kv_len=64, dtype="float32")
    case, (q, k, v) = case_of(window, problem), inputs(problem)
    clean, _, _ = walk(window, problem, case, (q, k, v))
    late = slice(48, 64)  # the last KV tile of 16: no query of the first Q tile of 32 sees it
    k[:, :, late] = math.nan
    v[:, :, late] = math.nan
    o, _, _ = walk(window, problem, case, (q, k, v))
    torch.testing.assert_close(o[:, :, :32], clean[:, :, :32])
    assert o[:, :, 63].isnan().all()


def test_keys_are_visited_from_the_last_to_the_first(monkeypatch):
    seen = []
    add = tiles._Rows.add

    def record(self, s, v, *rest):
        seen.append(v[0, 0, 0, 0, 0])
        add(self, s, v, *rest)

    monkeypatch.setattr(tiles._Rows, "add", record)
    causal = load_spec("causal").bind()
    problem = problem_of(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64, dtype="float32")
    q, k, v = inputs(problem)
    v[:] = torch.arange(64)[:, None]  # a value says which key it is
    walk(causal, problem, case_of(causal, problem), (q, k, v))
    assert seen == [16, 0, 48, 32, 16, 0]


def differences(variant, problem, case, tile):
    """The walk's own counts beside the planner's formulas."""
    plan = plan_of(variant, problem, tile)
    p = predict(plan, problem, case)
    per_pair = 2 * (problem.head_dim + problem.v_head_dim)
    counted = tiles.count(
        plan, analyse(variant), case, head_dim=problem.head_dim, v_head_dim=problem.v_head_dim, dtype=problem.dtype
    )
    wanted = {
        "read": (counted.read_bytes, p.hbm.read_bytes),
        "write": (counted.write_bytes, p.hbm.write_bytes),
        "flops": (per_pair * counted.elements, p.flops),
        "useful": (per_pair * counted.visible, p.flops_useful),
        **{name: (getattr(counted, name), getattr(p.tiles, name)) for name in ("total", "empty", "partial", "full")},
    }
    return {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}


@pytest.mark.sampled(
    "causal", "causal_bottom_right", "full", "relative_bias", "sink_window", "sliding_window", "softcap"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_the_planner_and_the_walk_count_the_same(name):
    """Neither calls the other."""
    variant = load_spec(name).bind()
    for shape in (
        dict(q_len=1000, kv_len=1000, head_dim=64),
        dict(q_len=1, kv_len=77, dtype="float16"),
        dict(q_len=130, kv_len=513, heads=6, kv_heads=2, head_dim=64, v_head_dim=96),
        dict(q_len=65, kv_len=640, dtype="float32"),
        dict(q_len=0, kv_len=5),
        dict(q_len=33, kv_len=0),
    ):
        problem = problem_of(**shape)
        case = case_of(variant, problem)
        for tile in ((64, 64), (128, 32), (16, 64)):
            assert differences(variant, problem, case, tile) == {}, (shape, tile)


@pytest.mark.slow
def test_more_queries_than_keys_are_counted_the_same():
    for name in ("full", "causal", "causal_bottom_right", "sink_window", "longformer", "alibi"):
        variant = load_spec(name).bind()
        problem = problem_of(q_len=513, kv_len=130, head_dim=64)
        assert differences(variant, problem, case_of(variant, problem), (64, 64)) == {}, name


@pytest.mark.parametrize("name", SPECS)
def test_counting_alone_counts_what_the_walk_moves(name):
    variant = load_spec(name).bind()
    problem = problem_of(head_dim=16, v_head_dim=24)
    case = case_of(variant, problem)
    _, _, moved = walk(variant, problem, case, inputs(problem))
    counted = tiles.count(
        plan_of(variant, problem, (32, 16)), analyse(variant), case, head_dim=16, v_head_dim=24, dtype="bfloat16"
    )
    assert counted == moved


def test_full_attention_moves_what_the_papers_count():
    full = load_spec("full").bind()
    problem = problem_of(batch=1, heads=8, kv_heads=2, q_len=256, kv_len=192, head_dim=64)
    counted = tiles.count(
        plan_of(full, problem, (64, 32)),
        analyse(full),
        case_of(full, problem),
        head_dim=64,
        v_head_dim=64,
        dtype="bfloat16",
    )
    assert counted.q == counted.o == 8 * 256 * 64 * 2
    assert counted.k == counted.v == 8 * (256 // 64) * 192 * 64 * 2  # once a Q tile and query head
    assert counted.lse == 8 * 256 * 4
    assert (counted.total, counted.empty, counted.partial, counted.full) == (8 * 4 * 6, 0, 0, 8 * 4 * 6)


def test_the_schedule_is_the_analysis_own(monkeypatch):
    """The walk asks for a schedule and follows it; it enumerates nothing itself."""
    causal = load_spec("causal").bind()
    problem = problem_of(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64)
    monkeypatch.setattr(analysis_tiles, "schedule", lambda *args: [(1, analysis_tiles.FULL)])
    counted = tiles.count(
        plan_of(causal, problem, (32, 16)),
        analyse(causal),
        case_of(causal, problem),
        head_dim=32,
        v_head_dim=32,
        dtype="bfloat16",
    )
    assert (counted.full, counted.partial, counted.k) == (2, 0, 2 * 16 * 32 * 2)


def test_an_index_outside_a_captured_tensor_is_an_error():
    doc = fg.tensor("doc", dims=(None,), dtype="int32")
    variant = fg.variant(lambda b, h, q, k: doc[q] == doc[k])
    problem = problem_of(q_len=20, kv_len=20)
    case = Case(sizes=problem.sizes(), params={}, tensors={"doc": np.zeros(12, np.int32)})
    with pytest.raises(IndexError, match=r"'doc': index 12 is outside dimension 0 of size 12"):
        walk(variant, problem, case, inputs(problem))


def test_a_captured_read_at_a_masked_position_is_no_error():
    bias = fg.tensor("bias", dims=(None,), dtype="float32")
    variant = fg.variant(lambda b, h, q, k: k < 12).score(lambda s, b, h, q, k: s + bias[k])
    problem = problem_of(q_len=20, kv_len=20)
    case = Case(sizes=problem.sizes(), params={}, tensors={"bias": np.ones(12, np.float32)})
    check(variant, problem, case, inputs(problem))


def test_a_walk_takes_heads_together_and_no_row_alone():
    causal = load_spec("causal").bind()

    def calls(heads):
        problem = problem_of(batch=1, heads=heads, kv_heads=heads, q_len=512, kv_len=512, head_dim=128)
        run = functools.partial(walk, causal, problem, case_of(causal, problem), inputs(problem), tile=(128, 128))
        assert run()[2].partial + run()[2].full == 10 * heads
        return effort(run).calls

    assert calls(2) == calls(8) < 10 * 2 * 128


@pytest.mark.slow
def test_counting_a_long_problem_looks_at_what_is_visited():
    window = load_spec("sliding_window").bind()
    calls = []
    for length in (1 << 12, 1 << 14):
        problem = problem_of(batch=1, heads=8, kv_heads=8, q_len=length, kv_len=length, head_dim=128)
        case = case_of(window, problem)
        assert differences(window, problem, case, None) == {}
        calls.append(effort(lambda problem=problem, case=case: differences(window, problem, case, None)).calls)
    # Four times the tokens have four times the tiles that a window visits, and 16 times the tiles.
    assert calls[1] < 5 * calls[0]
