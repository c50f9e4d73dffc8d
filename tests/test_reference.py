"""The float64 reference, its PyTorch reading of the language, and the rule that judges results by it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.lang.evaluate import evaluate
from flashgen.lang.ops import OPS
from flashgen.runtime import reference as subject
from flashgen.runtime.reference import POOL, baseline, judge, judge_lse, reference

B, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 4, 2, 19, 23, 8, 5


def case_of(variant, **given):
    sizes = {"batch": B, "heads": HEADS, "kv_heads": KV_HEADS, "q_len": Q_LEN, "kv_len": KV_LEN}
    tensors = given.pop("tensors", {})
    return SimpleNamespace(sizes=sizes, params=variant.values(given), tensors=tensors)


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (B, HEADS, Q_LEN, DIM), (B, KV_HEADS, KV_LEN, DIM), (B, KV_HEADS, KV_LEN, V_DIM)
    return tuple(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)


def by_the_book(q, k, v, scale, keep=None, score=lambda s: s):
    """Whole-matrix attention, written the shortest way."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    s = score(scale * (q @ k.mT))
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s, -1)


def test_full_attention():
    q, k, v = inputs()
    full = fg.variant()
    o, lse = reference(full, case_of(full), q, k, v, scale=0.3)
    want_o, want_lse = by_the_book(q, k, v, 0.3)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_mask_score_and_rows_that_see_nothing(scale, monkeypatch):
    monkeypatch.setattr(subject, "_BLOCK", {"cpu": 7 * KV_LEN * B * HEADS})  # blocks of seven queries

    @fg.variant()
    def banded(b, h, q, k):
        return (k <= q - 3) & (k >= h)

    variant = banded.score(lambda s, b, h, q, k: fg.tanh(s) * 2.0 - fg.float32(q - k) * 0.1)
    q, k, v = inputs()
    rows, columns = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
    keep = (columns <= rows - 3) & (columns >= torch.arange(HEADS)[:, None, None])
    want = by_the_book(q, k, v, scale, keep, lambda s: torch.tanh(s) * 2 - (rows - columns) * 0.1)
    o, lse = reference(variant, case_of(variant), q, k, v, scale=scale)
    torch.testing.assert_close(o, want[0])
    torch.testing.assert_close(lse, want[1])
    assert (lse[:, :, :3] == -math.inf).all() and (o[:, :, :3] == 0).all()


def test_a_score_of_minus_infinity_is_masked_and_a_masked_score_is_never_seen():
    causal = fg.variant(lambda b, h, q, k: k <= q)
    hides = fg.variant(score=lambda s, b, h, q, k: fg.where(k <= q, s, -math.inf))
    poisoned = causal.score(lambda s, b, h, q, k: fg.where(k <= q, s, s * math.inf - s * math.inf))
    q, k, v = inputs()
    want = reference(causal, case_of(causal), q, k, v, scale=1.0)
    for variant in (hides, poisoned):
        for got, wanted in zip(reference(variant, case_of(variant), q, k, v, scale=1.0), want, strict=True):
            torch.testing.assert_close(got, wanted)


def test_no_keys_at_all():
    full = fg.variant()
    q, k, v = inputs()
    o, lse = reference(full, case_of(full), q, k[:, :, :0], v[:, :, :0], scale=1.0)
    assert o.shape == (B, HEADS, Q_LEN, V_DIM) and (o == 0).all() and (lse == -math.inf).all()


def test_captured_tensors_parameters_and_sizes():
    bias = fg.tensor("bias", dims=("heads", None), dtype="float32")
    shift = fg.param("shift", default=2)

    @fg.variant()
    def biased(b, h, q, k):
        return k < fg.kv_len - shift

    variant = biased.score(lambda s, b, h, q, k: s + bias[h, fg.clamp(q - k, 0, bias.size(1) - 1)])
    table = np.random.default_rng(0).standard_normal((1, 6)).astype(np.float32)  # one row for every head
    q, k, v = inputs()
    distance = (torch.arange(Q_LEN)[:, None] - torch.arange(KV_LEN)).clamp(0, 5)
    keep = (torch.arange(KV_LEN) < KV_LEN - 4).expand(Q_LEN, KV_LEN)
    want = by_the_book(q, k, v, 1.0, keep, lambda s: s + torch.as_tensor(table)[0].double()[distance])
    got = reference(variant, case_of(variant, shift=4, tensors={"bias": table}), q, k, v, scale=1.0)
    torch.testing.assert_close(got[0], want[0])


def test_every_operation_has_a_pytorch_function():
    assert set(subject.functions()) == set(OPS)


def test_both_readings_of_casts_agree():
    """An int64 wraps to int32, a float saturates, and NaN is what the conversion of its width makes of it."""
    wide = fg.tensor("wide", dims=(8,), dtype="int64")
    real = fg.tensor("real", dims=(8,), dtype="float32")
    tensors = {
        "wide": np.array([0, 2**31 - 1, 2**31, -(2**31) - 1, 2**32 + 5, 2**63 - 1, -(2**63), -1]),
        "real": np.array([np.nan, np.inf, -np.inf, 2.0**31, 2.0**63, -(2.0**63), 1e30, -2.9], np.float32),
    }
    roots = []

    def score(s, b, h, q, k):
        roots.extend([fg.int32(wide[q]), fg.int64(wide[q]), fg.int32(real[q]), fg.int64(real[q]), fg.int32(q < 3)])
        return s

    fg.variant(score=score)
    evaluator = subject.Evaluator(SimpleNamespace(sizes={}, params={}, tensors=tensors), torch.device("cpu"))
    for precision, float_dtype in ((torch.float32, np.float32), (torch.float64, np.float64)):
        for root in (e.node for e in roots):
            want = evaluate(root, q=np.arange(8), sizes={}, params={}, tensors=tensors, float_dtype=float_dtype)
            got = evaluator(root, precision, {"q": torch.arange(8)}).numpy()
            np.testing.assert_array_equal(got, want, err_msg=repr(root))
    narrowed = evaluator(roots[0].node, torch.float64, {"q": torch.arange(8)})
    assert narrowed.tolist() == [0, 2**31 - 1, -(2**31), 2**31 - 1, 5, -1, 0, -1]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    x=st.lists(st.integers(-100, 100), min_size=4, max_size=4),
    y=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    f=st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4),
)
def test_both_readings_of_the_language_agree(x, y, f):
    """PyTorch's table and NumPy's, over every operation."""
    ints = fg.tensor("ints", dims=(4,), dtype="int32")
    positive = fg.tensor("positive", dims=(4,), dtype="int32", min=1, max=9)
    floats = fg.tensor("floats", dims=(4,), dtype="float32")
    tensors = {
        "ints": np.array(x, np.int32),
        "positive": np.array(y, np.int32),
        "floats": np.array(f, np.float32),
    }

    def expressions(i, n, z):
        yield from (i == n, i != n, i < n, i <= n, i > n, i >= n)
        yield from ((i < n) & (z < 0.5), (i < n) | (z < 0), (i < n) ^ (z < 0))
        yield from (~(i < n), i & n, i | n, i ^ n, ~i, i << n, i >> n, i + n, i - n, i * n, -i, i / n, i // n, i % n)
        yield from (fg.where(i < n, z, 1.0), fg.minimum(i, n), fg.maximum(z, 0.25), abs(i), abs(z))
        yield from (fg.exp(z), fg.exp2(z))
        yield from (fg.log(abs(z) + 1), fg.log2(abs(z) + 1), fg.tanh(z), fg.sigmoid(z), fg.sqrt(abs(z)))
        yield from (fg.erf(z), fg.sin(z), fg.cos(z), fg.log1p(abs(z)), fg.pow(abs(z), 1.7))
        yield from (fg.rsqrt(abs(z) + 1), fg.floor(z), fg.int32(z * 3), fg.float32(i < n), fg.int32(z * 1e30))
        yield from (z + i, z - i, z * i, -z)

    q = np.arange(4)
    roots = []

    def score(s, b, h, q, k):
        roots.extend(expressions(ints[q], positive[q], floats[q]))
        return s

    fg.variant(score=score)
    used = set()
    evaluator = subject.Evaluator(SimpleNamespace(sizes={}, params={}, tensors=tensors), torch.device("cpu"))
    for root in (e.node for e in roots):
        used.add(root.op)
        want = evaluate(root, q=q, sizes={}, params={}, tensors=tensors, float_dtype=np.float64)
        got = evaluator(root, torch.float64, {"q": torch.arange(4)}).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=repr(root))
    assert used == set(OPS)


# -- the baseline


def test_the_baseline_rounds_to_the_callers_type():
    q, k, v = inputs(torch.bfloat16)
    full = fg.variant()
    o, lse = baseline(full, case_of(full), q, k, v, scale=0.3)
    ref, _ = reference(full, case_of(full), q, k, v, scale=0.3)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    error = (o.double() - ref).abs().max()
    assert 2**-12 < error < 2**-6


def flash_attention(s, v, dtype):
    """FlashAttention's forward, a tile after the other from the last key, as the papers write it; in float64 but P."""
    m, total = torch.full(s.shape[:-1], -math.inf), torch.zeros(s.shape[:-1], dtype=torch.float64)
    o = torch.zeros(*s.shape[:-1], v.shape[-1], dtype=torch.float64)
    for first in reversed(range(0, s.shape[-1], subject.KEYS_AT_A_TIME)):
        tile = slice(first, first + subject.KEYS_AT_A_TIME)
        new = torch.maximum(m, s[..., tile].amax(-1))
        p = torch.exp(s[..., tile] - new[..., None])
        decay = torch.exp(m - new)
        total = total * decay + p.sum(-1)
        o = o * decay[..., None] + p.to(dtype).double() @ v.double()[..., tile, :]
        m = new
    return o / total[..., None], m + torch.log(total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [100, 128, 500])
def test_the_baseline_is_flash_attention_with_an_exact_running_max(dtype, keys):
    g = torch.Generator().manual_seed(0)
    v = torch.randn(4, keys, 32, generator=g).to(dtype)
    for std in (1.0, 8.0):
        s = std * torch.randn(4, 64, keys, generator=g)
        p, lse = subject.online_softmax(s, dtype)
        o, want_lse = flash_attention(s, v, dtype)
        torch.testing.assert_close(p.double() @ v.double(), o, rtol=0, atol=4e-6)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_p_is_rounded_beside_the_largest_score_so_far():
    """A heavy key is exact, which the same P as a share of the row is not; and what came before a larger score was
    rounded beside its own largest, where a float16 of the row's would be subnormal."""
    s = torch.zeros(1, 256)
    s[0, 3] = 5.0
    s[0, 200] = -0.3
    p, lse = subject.online_softmax(s, torch.bfloat16)
    total = torch.exp(lse.double() - 5)
    assert float(p[0, 3] * total) == pytest.approx(1, rel=1e-6)
    assert abs(float((1 / total).bfloat16() * total) - 1) > 1e-4
    s[0, 3] = 15.0
    p, lse = subject.online_softmax(s, torch.float16)
    beside_its_own = float(torch.tensor(math.exp(-0.3)).half())
    assert float(p[0, 200]) == pytest.approx(beside_its_own * math.exp(-float(lse)), rel=2e-6)
    beside_the_rows = float(torch.tensor(math.exp(-15.3)).half()) * math.exp(15)
    assert abs(beside_the_rows / beside_its_own - 1) > 1e-2


def test_rows_that_see_nothing_yet_or_at_all():
    s = torch.full((3, 300), -math.inf)
    s[1, 5], s[2, 290] = 2.0, -3.0
    p, lse = subject.online_softmax(s, torch.bfloat16)
    assert p.sum(-1).tolist() == [0, 1, 1] and lse.tolist() == [-math.inf, 2, -3]
    assert subject.softmax(s)[0].sum(-1).tolist() == [0, 1, 1]


def test_some_pairs_are_their_part_of_the_whole():
    by_head = fg.variant(lambda b, h, q, k: k <= q + 3 * h + b).score(lambda s, b, h, q, k: s + fg.float32(h) * 0.1)
    q, k, v = inputs(torch.float16)
    pairs = subject.Pairs(batches=(1,), kv_heads=(1,))
    for make in (reference, baseline):
        whole = make(by_head, case_of(by_head), q, k, v, scale=0.3)
        part = make(by_head, case_of(by_head), *(pairs.of(x, KV_HEADS) for x in (q, k, v)), scale=0.3, pairs=pairs)
        for one, all_of_it in zip(part, whole, strict=True):
            torch.testing.assert_close(one, pairs.of(all_of_it, KV_HEADS), rtol=1e-6, atol=1e-6)


# -- the rule


def drawn(n=4096, seed=0):
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(n, generator=g, dtype=torch.float64)
    noise = torch.randn(n, generator=g, dtype=torch.float64) * 1e-2
    return ref, noise


def test_a_result_as_good_as_the_baseline_passes():
    ref, noise = drawn()
    verdict = judge(ref - noise, ref + noise, ref, "bfloat16")
    assert verdict.ok and verdict.elements == 4096
    assert verdict.max_error == pytest.approx(verdict.baseline_max_error)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda ref, noise: ref + 3 * noise, "RMS error"),
        (lambda ref, noise: ref + noise + torch.eye(1, len(ref)).flatten() * 0.5, "largest error"),
        (lambda ref, noise: ref * (1 - 5e-3), "signed bias"),
        (lambda ref, noise: ref + noise + torch.eye(1, len(ref)).flatten() * math.nan, "nan"),
    ],
)
def test_what_breaks_the_rule_is_named(spoil, reason):
    ref, noise = drawn()
    verdict = judge(spoil(ref, noise), ref + noise, ref, "bfloat16")
    assert not verdict.ok
    assert any(reason in text for text in verdict.reasons), verdict.reasons


def tail_off(ref, noise):
    """The largest errors, one in 200, times 1.5: less than twice the largest, and little of the RMS."""
    rare = noise.abs() > noise.abs().quantile(0.995)
    return ref + torch.where(rare, 1.3 * noise, noise)


def test_the_tail_is_judged_where_there_are_elements_enough():
    for n, said in ((POOL, True), (POOL - 1, False)):
        ref, noise = drawn(n)
        verdict = judge(tail_off(ref, noise), ref + noise, ref, "bfloat16")
        assert [reason.split(" 0.")[0] for reason in verdict.reasons] == ["99.9th percentile of the error"] * said


def test_what_chance_makes_of_few_elements_is_allowed():
    cases = ((POOL, 1.04, True), (POOL, 1.06, False), (POOL - 1, 1.06, True), (1024, 1.15, True), (1024, 1.2, False))
    for n, factor, ok in cases:
        ref, noise = drawn(n)
        assert judge(ref - factor * noise, ref + noise, ref, "bfloat16").ok == ok


def test_an_exact_baseline_leaves_a_few_ties():
    ref = torch.full((4096,), 1.5, dtype=torch.float64)
    for ties, ok in ((1, True), (2, False)):
        out = ref.clone()
        out[:ties] += 2**-8  # half an ulp
        assert judge(out, ref, ref, "bfloat16").ok == ok
    out = ref.clone()
    out[0] += 2**-7
    assert any("largest error" in reason for reason in judge(out, ref, ref, "bfloat16").reasons)


def test_a_bias_may_be_the_baselines():
    """Rows that attend to one key round its values alike, and a mean over them is no mean over many."""
    ref, noise = drawn(POOL)
    alike = noise[:8].abs().repeat_interleave(POOL // 8) * ref.sign()
    for factor, ok in ((1, True), (1.04, True), (1.06, False)):
        reasons = judge(ref + factor * alike, ref + alike, ref, "bfloat16").reasons
        assert any("signed bias" in reason for reason in reasons) != ok
    assert any("signed bias" in r for r in judge(ref + alike, ref + 2 * noise, ref, "bfloat16").reasons)


def test_nothing_to_judge_passes():
    empty = torch.zeros(0, dtype=torch.float64)
    assert judge(empty, empty, empty, "bfloat16").ok


def test_lse_rule():
    ref = torch.tensor([0.5, 20.0, -math.inf], dtype=torch.float64)
    assert judge_lse(ref.float(), ref) == ()
    assert "off by" in judge_lse(ref.float() + 0.01, ref)[0]
    assert "1 rows" in judge_lse(torch.tensor([0.5, 20.0, 0.0]), ref)[0]
    assert "off by" in judge_lse(torch.tensor([0.5, math.nan, -math.inf]), ref)[0]
