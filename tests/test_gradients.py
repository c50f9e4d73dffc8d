"""The references for gradients: autograd against the shortest way to write it, and the baseline against both."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen.analysis.derivative import differentiable
from flashgen.lang.load import load_spec, shipped
from flashgen.runtime import reference
from flashgen.runtime.gradients import baseline_gradients, reference_gradients
from flashgen.runtime.philox import Dropout, keep

B, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 4, 2, 19, 23, 8, 5


def case_of(variant, **given):
    sizes = {"batch": B, "heads": HEADS, "kv_heads": KV_HEADS, "q_len": Q_LEN, "kv_len": KV_LEN}
    tensors = given.pop("tensors", {})
    return SimpleNamespace(sizes=sizes, params=variant.values(given), tensors=tensors)


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (
        (B, HEADS, Q_LEN, DIM),
        (B, KV_HEADS, KV_LEN, DIM),
        (B, KV_HEADS, KV_LEN, V_DIM),
        (B, HEADS, Q_LEN, V_DIM),
        (B, HEADS, Q_LEN),
    )
    q, k, v, do, dlse = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return *(x.to(dtype) for x in (q, k, v, do)), dlse.to(dtype if dtype == torch.float64 else torch.float32)


def by_the_book(q, k, v, do, dlse, scale, keep=None, score=lambda s: s, dropped=None, extra=()):
    """Gradients wrt q, k, v and `extra` of whole-matrix attention."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    s = score(scale * (q @ wide_k.mT))
    sees = torch.ones(Q_LEN, dtype=torch.bool)
    if keep is not None:
        sees = keep.any(-1)
        # A row that sees nothing sees all here, and what comes of it is thrown away.
        s = s.masked_fill(~(keep | ~sees[..., None]), -math.inf)
    p = torch.softmax(s, -1)
    p = p if dropped is None else p * dropped
    o, lse = p @ wide_v, torch.logsumexp(s, -1)
    loss = ((o * do).sum(-1) + lse * dlse) * sees
    return torch.autograd.grad(loss.sum(), [q, k, v, *extra])


ROWS, COLUMNS = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)


@pytest.mark.parametrize("p", [None, 0.4])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_mask_score_captured_tensor_dropout_and_lse(scale, p, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK", {"cpu": 7 * KV_LEN * B * HEADS})  # blocks of seven queries
    table = fg.tensor("table", dims=("heads", None), dtype="float32")

    @fg.variant()
    def banded(b, h, q, k):
        return (k <= q - 3) & (k >= h)

    variant = banded.score(lambda s, b, h, q, k: fg.tanh(s) * 2.0 + table[h, q] * fg.sqrt(fg.float32(q - k)))
    array = np.random.default_rng(0).standard_normal((HEADS, Q_LEN)).astype(np.float32)
    q, k, v, do, dlse = inputs()
    bias = torch.tensor(array, dtype=torch.float64, requires_grad=True)
    mask = (COLUMNS <= ROWS - 3) & (torch.arange(HEADS)[:, None, None] <= COLUMNS)
    dropout, dropped = None, None
    if p is not None:
        dropout = Dropout(p=p, seed=7, offset=9)
        b, h = np.arange(B)[:, None, None, None], np.arange(HEADS)[:, None, None]
        kept = torch.from_numpy(keep(dropout, b=b, h=h, q=ROWS.numpy(), k=COLUMNS.numpy(), heads=HEADS))
        dropped = kept.double() / (1 - p)
    want = by_the_book(
        q,
        k,
        v,
        do,
        dlse,
        scale,
        mask,
        lambda s: torch.tanh(s) * 2 + bias[:, :, None] * (ROWS - COLUMNS).clamp(min=0).double().sqrt(),
        dropped,
        [bias],
    )
    case = case_of(variant, tensors={"table": array})
    for gradients in (reference_gradients, baseline_gradients):
        got = gradients(variant, case, q, k, v, do, scale=scale, dlse=dlse, dropout=dropout)
        for mine, right in zip((got.dq, got.dk, got.dv, got.captured["table"]), want, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def test_without_mask_score_or_lse():
    full = fg.variant()
    q, k, v, do, dlse = inputs()
    want = by_the_book(q, k, v, do, 0 * dlse, 0.3)
    for gradients in (reference_gradients, baseline_gradients):
        got = gradients(full, case_of(full), q, k, v, do, scale=0.3)
        for mine, right in zip(got[:3], want, strict=True):
            torch.testing.assert_close(mine, right)
        assert got.captured == {}


def test_no_keys_no_gradient():
    full = fg.variant()
    q, k, v, do, _ = inputs()
    for gradients in (reference_gradients, baseline_gradients):
        got = gradients(full, case_of(full), q, k[:, :, :0], v[:, :, :0], do, scale=0.3)
        assert (got.dq == 0).all() and got.dk.shape == (B, KV_HEADS, 0, DIM)


def test_a_masked_score_is_never_observed():
    causal = fg.variant(lambda b, h, q, k: k <= q)
    spoiled = causal.score(lambda s, b, h, q, k: s + fg.sqrt(fg.float32(q - k)) * s)  # NaN above the diagonal
    hiding = fg.variant(score=lambda s, b, h, q, k: fg.where(k <= q, s, -math.inf))
    q, k, v, do, dlse = inputs()
    for gradients in (reference_gradients, baseline_gradients):
        got = gradients(spoiled, case_of(spoiled), q, k, v, do, scale=0.3, dlse=dlse)
        assert all(x.isfinite().all() for x in got[:3])
        got, want = (gradients(x, case_of(x), q, k, v, do, scale=0.3, dlse=dlse) for x in (hiding, causal))
        for mine, right in zip(got[:3], want[:3], strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_baseline_rounds_about_as_its_dtype_does(dtype):
    full = fg.variant()
    q, k, v, do, dlse = inputs(dtype)
    want = reference_gradients(full, case_of(full), q, k, v, do, scale=0.3, dlse=dlse)
    got = baseline_gradients(full, case_of(full), q, k, v, do, scale=0.3, dlse=dlse)
    eps = torch.finfo(dtype).eps
    for mine, right in zip(got[:3], want[:3], strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
        assert eps / 16 < error < 2 * eps


def test_which_captured_tensors_have_a_gradient():
    first, second, third = (fg.tensor(name, dims=(None,), dtype="float32") for name in ("first", "second", "third"))
    counts = fg.tensor("counts", dims=(None,), dtype="int32")
    variant = fg.variant(lambda b, h, q, k: third[q] > 0.0).score(
        lambda s, b, h, q, k: s * first[k] + fg.where(second[q] > 0.0, 1.0, 2.0) + fg.float32(counts[k])
    )
    assert differentiable(variant.score_node) == ("first",)
    assert differentiable(None) == ()
    found = {name: differentiable(load_spec(name).bind().score_node) for name in shipped()}
    found = {name: names for name, names in found.items() if names}
    assert found == {"alibi": ("slopes",), "relative_bias": ("table",)}


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_some_pairs_are_their_part_of_the_whole(p):
    """Batch and head count as in the whole problem: in the mask, in the score, in captured tensors, in dropout."""
    table = fg.tensor("table", dims=("heads", None), dtype="float32")
    variant = fg.variant(
        lambda b, h, q, k: (k + h) % (b + 2) != 0,
        score=lambda s, b, h, q, k: s * table[h, k % 5] + b,
        name="by_pair",
    )
    g = torch.Generator().manual_seed(1)
    case = case_of(variant, tensors={"table": torch.randn(HEADS, 5, generator=g).numpy()})
    q, k, v, do, dlse = inputs()
    pairs = reference.Pairs(batches=(1,), kv_heads=(1,))
    dropout = Dropout(p=p, seed=3) if p else None
    for gradients in (reference_gradients, baseline_gradients):
        whole = gradients(variant, case, q, k, v, do, scale=0.3, dlse=dlse, dropout=dropout)
        parts = [pairs.of(x, KV_HEADS) for x in (q, k, v, do)]
        assert parts[0].shape[:2] == (1, HEADS // KV_HEADS)
        some = gradients(variant, case, *parts, scale=0.3, dlse=pairs.of(dlse, KV_HEADS), dropout=dropout, pairs=pairs)
        for found, right in zip(some[:3], whole[:3], strict=True):
            torch.testing.assert_close(found, pairs.of(right, KV_HEADS), rtol=0, atol=1e-12)
        assert not some.captured["table"][:2].any()
