"""attention() on a CPU: right results, and what each wrong call is told before anything runs."""

import math
import multiprocessing
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import FlashgenError, LaunchError
from flashgen.lang import variant as variants
from flashgen.lang.variant import of_token
from flashgen.ops import forward, records
from flashgen.ops.attention import attention
from flashgen.ops.call import DTYPES

window = fg.param("window", default=8, min=1, max=1000)
slope = fg.param("slope", default=0.5)
block = fg.constant("block", default=4, min=1)
doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32", min=0, max=99, sorted=True, example=lambda p, rng: None)
bias = fg.tensor("bias", dims=("heads", 5), dtype="float32", example=lambda p, rng: None)

full = fg.variant()


@fg.variant
def windowed(b, h, q, k):
    return (k <= q) & (q - k < window)


@fg.variant
def documents(b, h, q, k):
    return doc[b, k] == doc[b, fg.minimum(q, doc.size(1) - 1)]


@fg.variant
def blocks(b, h, q, k):
    return q // block == k // block


@fg.variant(score=lambda s, b, h, q, k: s - slope * fg.abs(q - k) + bias[h, (q + k) % 5])
def biased(b, h, q, k):
    return fg.q_len + k > q


def tensors(dtype=torch.float32, *, batch=2, heads=4, kv_heads=2, q_len=9, kv_len=11, dim=16, v_dim=24, seed=0):
    random = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    return make(batch, heads, q_len, dim), make(batch, kv_heads, kv_len, dim), make(batch, kv_heads, kv_len, v_dim)


def expected(q, k, v, scale=None, score=None, keep=None):
    """(o, lse) in float64, straight from the definition."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = (torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None])
    s = s if score is None else score(s, *at)
    s = s if keep is None else s.masked_fill(~keep(*at), -math.inf)
    return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1)


TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 3e-2, torch.float32: 5e-6, torch.float64: 1e-12}


def check(got, wanted, dtype):
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Right calls


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [7, 16, 64])
def test_dtypes_and_head_dims(dtype, dim):
    q, k, v = tensors(dtype, dim=dim)
    o, lse = attention(q, k, v, windowed, window=5, return_lse=True)
    assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert o.shape == (2, 4, 9, 24) and lse.shape == (2, 4, 9)
    check((o, lse), expected(q, k, v, keep=lambda i, j: (j <= i) & (i - j < 5)), dtype)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    scale=st.sampled_from([None, 1.0, 0.0, -0.25, 3, 1e-3]),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3)]),
    size=st.integers(1, 12),
    seed=st.integers(0, 1 << 20),
)
def test_scales_lengths_and_groups(scale, lengths, heads, size, seed):
    shape = dict(zip(("q_len", "kv_len", "heads", "kv_heads"), (*lengths, *heads), strict=True))
    q, k, v = tensors(torch.float64, seed=seed, **shape)
    got = attention(q, k, v, blocks, scale=scale, block=size, return_lse=True)
    check(got, expected(q, k, v, scale, keep=lambda i, j: i // size == j // size), torch.float64)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_numbers_of_numpy_are_numbers(kind):
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    wanted = fg.attention(q, k, v, full, scale=0.5, dropout=0.25, seed=1)
    found = fg.attention(q, k, v, full, scale=kind(0.5), dropout=kind(0.25), seed=np.int64(1))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("scale", [None, 0.5, -0.5])
def test_scores_see_the_scaled_product(scale):
    """A negative scale flips the score's argument, never its meaning."""
    q, k, v = tensors(torch.float64)
    table = torch.randn(4, 5)
    got = attention(q, k, v, biased, scale=scale, slope=0.25, bias=table, return_lse=True)

    def score(s, i, j):
        return s - 0.25 * (i - j).abs() + table.double()[:, (i + j) % 5][None]

    check(got, expected(q, k, v, scale, score, lambda i, j: 9 + j > i), torch.float64)


@pytest.mark.parametrize("batches", [1, 2])
def test_captured_tensors_broadcast(batches):
    q, k, v = tensors(torch.float64)
    ids = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [3] * 2], dtype=torch.int32)[:batches]
    o = attention(q, k, v, documents, doc=ids)
    for b in range(2):
        row = ids[min(b, batches - 1)]
        part = [t[b : b + 1] for t in (q, k, v)]
        wanted, _ = expected(*part, keep=lambda i, j, row=row: row[j] == row[i.clamp(max=10)])
        torch.testing.assert_close(o[b : b + 1], wanted)


def test_layout_of_o_follows_q():
    q, k, v = tensors()
    assert attention(q, k, v, full).is_contiguous()
    rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    o = attention(rows_first, k, v, full)
    assert o.transpose(1, 2).is_contiguous() and o.shape == (2, 4, 9, 24)
    torch.testing.assert_close(o, attention(q, k, v, full))
    packed = torch.randn(2, 9, 3, 4, 16)  # q, k and v of one projection: [batch, seqlen, 3, heads, head_dim]
    assert attention(*(t.transpose(1, 2) for t in packed.unbind(2)), full).transpose(1, 2).is_contiguous()


def test_strided_views_are_read_as_they_are():
    q, k, v = tensors(heads=4, kv_heads=4, v_dim=16)
    wide = torch.randn(2, 4, 22, 32)
    o = attention(q, wide[:, :, ::2, 8:24], v, full)
    torch.testing.assert_close(o, attention(q, wide[:, :, ::2, 8:24].contiguous(), v, full))
    shared = v[:, :1].expand(-1, 4, -1, -1)
    torch.testing.assert_close(attention(q, k, shared, full), attention(q, k, shared.contiguous(), full))


@pytest.mark.parametrize(
    "shape", [{"batch": 0}, {"heads": 0, "kv_heads": 0}, {"q_len": 0}, {"kv_len": 0}, {"q_len": 0, "kv_len": 0}]
)
def test_empty_problems(shape, monkeypatch):
    monkeypatch.setattr(forward, "_walk", None)
    q, k, v = tensors(**shape)
    o, lse = attention(q, k, v, full, return_lse=True)
    assert o.shape == (*q.shape[:3], 24) and lse.shape == q.shape[:3]
    assert (o == 0).all() and (lse == -math.inf).all()


def test_empty_captured_tensor_of_an_empty_problem():
    q, k, v = tensors(kv_len=0)
    assert (attention(q, k, v, documents, doc=torch.zeros(2, 0, dtype=torch.int32)) == 0).all()


def test_rows_that_attend_to_nothing():
    q, k, v = tensors(q_len=9, kv_len=3)
    o, lse = attention(q, k, v, windowed, window=2, return_lse=True)
    assert (o[:, :, 4:] == 0).all() and (lse[:, :, 4:] == -math.inf).all()
    assert (lse[:, :, :4] > -math.inf).all()


class Position:
    """A whole number of somebody's own."""

    def __index__(self):
        return 3


@pytest.mark.parametrize("whole", [np.int64(3), np.uint8(3), np.array(3), Position()], ids=lambda x: type(x).__name__)
def test_whole_numbers_of_any_type(whole):
    q, k, v = tensors()
    for options in ({"kv_splits": 3}, {"q_offset": 3}, {"dropout": 0.5, "seed": 3}):
        asked = {name: whole if value == 3 else value for name, value in options.items()}
        assert torch.equal(fg.attention(q, k, v, windowed, **asked), fg.attention(q, k, v, windowed, **options))
    rows, starts = (x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 3], dtype=torch.int32)
    q, k, v = (x[:3] for x in rows)
    found = [fg.attention_varlen(q, k, v, full, starts, max_seqlen_q=n, max_seqlen_k=n) for n in (3, whole)]
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"kv_splits": np.True_}, {"kv_splits": np.ones(2)}, {"q_offset": np.float32(3)}])
def test_what_is_no_whole_number(options):
    with pytest.raises(FlashgenError, match=f"{next(iter(options))} is "):
        fg.attention(*tensors(), full, **options)


def test_lse_comes_only_when_asked():
    q, k, v = tensors()
    assert isinstance(attention(q, k, v, full), torch.Tensor)
    assert torch.equal(attention(q, k, v, full), attention(q, k, v, full, return_lse=True)[0])


def test_only_leaves_float32_to_check_it_with():
    pinned = fg.variant(head_dims=(16,), dtypes=("bfloat16",), only=True)
    check((attention(*tensors(), pinned),), expected(*tensors())[:1], torch.float32)
    with pytest.raises(FlashgenError, match="declared for head_dim 16 only"):
        attention(*tensors(dim=32), pinned)
    with pytest.raises(FlashgenError, match=r"head_dim 7.*\n.*nearest: head_dim 16"):
        attention(*tensors(dim=7), pinned)
    with pytest.raises(FlashgenError, match="declared for dtype bfloat16 only"):
        attention(*tensors(torch.float16), pinned)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.slow
def test_compiled_calls_go_through_the_op():
    ids = torch.zeros(2, 11, dtype=torch.int32)

    def model(q, k, v, width):
        o = attention(q * 2, k, v, windowed, window=width)
        o = o + attention(q, k, v, biased, slope=0.25, bias=torch.ones(4, 5))
        return o + attention(q, k, v, documents, doc=ids)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed, width in ((0, 3), (1, 4), (2, 5)):
        inputs = tensors(seed=seed)
        torch.testing.assert_close(compiled(*inputs, width), model(*inputs, width), rtol=0, atol=0)


def test_compiled_output_has_the_eager_layout():
    q, k, v = tensors(torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    compiled = torch.compile(lambda *a: attention(*a, full, return_lse=True), fullgraph=True, backend="aot_eager")
    for mine, eager in zip(compiled(q, k, v), attention(q, k, v, full, return_lse=True), strict=True):
        assert torch.equal(mine, eager) and mine.stride() == eager.stride() and mine.dtype == eager.dtype


@pytest.mark.slow
def test_the_op_is_well_formed():
    q, k, v = tensors()
    arguments = (q, k, v, windowed.token, [], [], ["window"], [4], [], [], None, False)
    torch.library.opcheck(torch.ops.flashgen.attention.default, arguments)
    with pytest.raises(LaunchError, match="token 'unknown', which no variant of this process has"):
        torch.ops.flashgen.attention(q, k, v, "unknown", [], [], [], [], [], [], None, False)


def test_variants_that_differ_have_different_tokens():
    @fg.variant
    def windowed_too(b, h, q, k):
        return (k <= q) & (q - k <= window)

    wide = fg.param("window", default=5, min=1)
    other = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < wide), name="windowed")
    assert len({windowed.token, windowed_too.token, other.token}) == 3, "a default is part of a variant"
    same = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name=windowed.name, doc=windowed.doc)
    assert same == windowed and same.token == windowed.token and of_token(same.token) == windowed
    assert of_token("nonsense") is None


def test_tables_of_variants_are_bounded_and_graphs_keep_theirs(monkeypatch):
    q, k, v = tensors()
    monkeypatch.setattr(variants, "_by_token", {})
    monkeypatch.setattr(variants, "MAX_TOKENS", 3)
    monkeypatch.setattr(records, "_calls", {})
    monkeypatch.setattr(records, "MAX_VARIANTS", 2)
    kept = fg.variant(lambda b, h, q, k: q - k < 6_000_000)
    compiled = torch.compile(lambda *a: attention(*a, kept), fullgraph=True, backend="aot_eager")
    before = compiled(q, k, v)
    for i in range(5):
        assert torch.equal(attention(q, k, v, fg.variant(lambda b, h, q, k, i=i: q - k < 6_000_001 + i)), before)
    assert len(records._calls) == 2 and len(variants._by_token) == 3 and of_token(kept.token) is kept
    assert torch.equal(compiled(q, k, v), before)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong calls


def refused(message, *arguments, **named):
    with pytest.raises(FlashgenError, match=message) as caught:
        attention(*arguments, **named)
    return str(caught.value)


def test_the_variant_is_a_variant():
    q, k, v = tensors()
    refused(r"got a str: load it with flashgen.load_spec\('causal'\)", q, k, v, "causal")
    said = (
        r"fourth argument is a variant and got a function\n  nearest: flashgen.from_flex of .* or fg.variant of a mask"
    )
    refused(said, q, k, v, lambda b, h, i, j: i <= j)


def test_inputs_are_tensors_of_rank_four():
    q, k, v = tensors()
    refused("q is a list, not a torch.Tensor", [1], k, v, full)
    refused("k is a ndarray, not a torch.Tensor", q, k.numpy(), v, full)
    text = refused(r"q has 3 dimensions \[4, 9, 16\]: q, k and v are \[batch, heads, seqlen", q[0], k, v, full)
    assert "nearest: q.unsqueeze(0)" in text
    refused(r"v has 2 dimensions \[11, 24\]", q, k, v[0, 0], full)
    refused(r"v has 5 dimensions", q, k, v[None], full)
    refused(r"k is sparse_coo: attention takes dense tensors", q, k.to_sparse(), v, full)


def test_devices():
    q, k, v = tensors()
    refused("k is on meta: attention runs on NVIDIA GPUs", q, k.to("meta"), v, full)


def test_dtypes_agree():
    q, k, v = tensors()
    text = refused("q is float32 and k float16: they share a dtype", q, k.half(), v, full)
    assert "nearest: k.to(torch.float32)" in text
    refused("q is float32 and v float64", q, k, v.double(), full)
    refused("q, k and v are int32: attention takes float16 and bfloat16", *(t.int() for t in (q, k, v)), full)


def test_shapes_agree():
    q, k, v = tensors()
    text = refused("q has batch 2 and k batch 1: they have one batch size", q, k[:1], v, full)
    assert "nearest: k.expand(2, -1, -1, -1), no copy" in text
    refused("q has head_dim 16 and k head_dim 8: the product", q, k[..., :8].contiguous(), v, full)
    refused("k has kv_heads 2 and v 1: k and v share their kv_heads", q, k, v[:, :1], full)
    refused("k has kv_len 11 and v 10: k and v share their kv_len", q, k, v[:, :, :10], full)
    refused(r"4 heads cannot share 3 kv_heads.*kv_heads that work: 1, 2, 4", *tensors(kv_heads=3), full)
    refused("v_head_dim is 0: it must be positive", *tensors(v_dim=0), full)


def test_lengths_have_a_bound():
    q = torch.zeros(1, 1, 1, 8).expand(1, 1, 1 << 24, 8)
    refused(r"seqlen \(q_len\) is 16777216: lengths stay below 2\^24\n  nearest: 16777215", q, q, q, full)


def test_the_last_dimension_is_contiguous():
    q, k, v = tensors(heads=2, q_len=16, dim=16)
    text = refused(r"q's last dimension is not contiguous \(strides \[512, 256, 1, 16\]\)", q.mT, k, v, full)
    assert "nearest: q.contiguous(), a copy" in text


def test_scales():
    q, k, v = tensors()
    for scale in (math.nan, math.inf, -math.inf, 1e39):
        text = refused(re.escape(f"scale is {scale}: it must be finite"), q, k, v, full, scale=scale)
        assert "nearest: 1 / sqrt(head_dim) = 0.25" in text
    refused(r"scale is 2\^1328 or more: it must be finite", q, k, v, full, scale=10**400)
    refused(r"scale is -2\^16609 or more: it must be finite", q, k, v, full, scale=-(10**5000))
    refused("scale is a ndarray and must be a number", q, k, v, full, scale=np.ones(2))
    refused("scale is a complex and must be a number", q, k, v, full, scale=1j)
    refused("scale is a Tensor and must be a number", q, k, v, full, scale=torch.ones(3))
    refused("scale is a str and must be a number", q, k, v, full, scale="1")
    refused("scale is a bool and must be a number", q, k, v, full, scale=True)
    refused(r"scale is a Tensor and must be a number \(scale.item\(\)", q, k, v, full, scale=torch.tensor(1.0))


def test_parameters():
    q, k, v = tensors()
    refused("'windowed' has no parameter 'widow'.*window.*it takes window", q, k, v, windowed, widow=4)
    refused("'full' has no parameter 'window'.*it takes nothing", q, k, v, full, window=4)
    for value in (True, "4", None, np.ones(2), torch.ones(2), 1j, [4]):
        refused("parameter 'window' of 'windowed' is int32 and got", q, k, v, windowed, window=value)
        refused("parameter 'slope' of 'biased' is float32 and got", q, k, v, biased, slope=value, bias=torch.ones(4, 5))
    for value, shown in ((10**400, r"2\^1328 or more"), (-(10**5000), r"-2\^16609 or more")):
        refused(rf"is int32: {shown} does not fit into -2\^31", q, k, v, windowed, window=value)
        refused(rf"is float32: {shown} does not fit", q, k, v, biased, slope=value, bias=torch.ones(4, 5))
    refused("parameter 'window' of 'windowed' is 0: the least it may be is 1", q, k, v, windowed, window=0)
    refused("parameter 'window' of 'windowed' is 1001: the most it may be is 1000", q, k, v, windowed, window=1001)
    refused("parameter 'window' of 'windowed' is int32 and got 2.5", q, k, v, windowed, window=2.5)
    said = r"is int32 and got tensor\(4\)\n  nearest: window=window.item\(\)"
    refused(said, q, k, v, windowed, window=torch.tensor(4))
    refused("constant 'block' of 'blocks' is 0: the least it may be is 1", q, k, v, blocks, block=0)
    refused("constant 'block' of 'blocks' is int32 and got", q, k, v, blocks, block=[4])
    required = fg.param("reach", dtype="int32")
    needy = fg.variant(lambda b, h, q, k: q - k < required, name="needy")
    refused("'needy' needs the parameter 'reach'", q, k, v, needy)


def test_captured_tensors():
    q, k, v = tensors()
    ids = torch.zeros(2, 11, dtype=torch.int32)
    refused(r"'documents' needs the captured tensor 'doc', int32 \[batch, kv\]", q, k, v, documents)
    refused("captured tensor 'doc' of 'documents' got a int, not a torch.Tensor", q, k, v, documents, doc=3)
    text = refused("got a ndarray", q, k, v, documents, doc=np.zeros((2, 11), np.int32))
    assert "nearest: torch.from_numpy(doc)" in text
    text = refused("is int64 and declared int32", q, k, v, documents, doc=ids.long())
    assert "nearest: doc.to(torch.int32)" in text
    text = refused("is on meta and q on cpu", q, k, v, documents, doc=ids.to("meta"))
    assert "nearest: doc.to('cpu')" in text
    refused(r"has 1 dimensions \[11\] and is declared \[batch, kv\]", q, k, v, documents, doc=ids[0])
    text = refused(
        r"is \[2, 9\] and declared \[batch, kv\]: dimension 1 must be kv = 11", *(q, k, v, documents), doc=ids[:, :9]
    )
    assert "(or 1: it broadcasts)" in text
    refused(r"is \[3, 11\]", q, k, v, documents, doc=ids[:1].expand(3, 11))
    refused(r"dimension 1 must be 5$", q, k, v, biased, bias=torch.zeros(4, 1))
    anything = fg.tensor("anything", dims=(None,), dtype="int32", example=lambda p, rng: None)
    empty = fg.variant(lambda b, h, q, k: anything[0] > 0, name="empty")
    refused("dimension 0 is empty", q, k, v, empty, anything=torch.zeros(0, dtype=torch.int32))
    refused("is sparse_coo: attention takes dense tensors", q, k, v, documents, doc=ids.to_sparse())


def test_promises_of_captured_tensors_are_checked_on_a_cpu():
    q, k, v = tensors()
    ids = torch.arange(11, dtype=torch.int32).expand(2, 11)
    refused("declared with min=0 and holds -1", q, k, v, documents, doc=ids - 1)
    refused("declared with max=99 and holds 110", q, k, v, documents, doc=ids + 100)
    refused("declared with sorted=True and decreases", q, k, v, documents, doc=ids.flip(1))
    times = fg.tensor("times", dims=("kv",), dtype="float32", sorted=True)
    recent = fg.variant(lambda b, h, q, k: times[k] <= 2.0, name="recent")
    values = torch.arange(11.0)
    values[3] = torch.nan
    refused(r"'times' of 'recent' is declared with sorted=True and holds nan at \[3\]", q, k, v, recent, times=values)


def test_an_index_outside_its_dimension():
    reads = fg.variant(lambda b, h, q, k: doc[b, k + 1] > 5, name="reads")
    q, k, v = tensors()
    ids = torch.arange(11, dtype=torch.int32)[None]
    with pytest.raises(IndexError, match="tensor 'doc': index 11 is outside dimension 1 of size 11"):
        attention(q, k, v, reads, doc=ids)


def test_messages_name_no_internals():
    """Each refusal is what was asked, the limit and what works; no traceback of another library."""
    q, k, v = tensors()
    for wrong in ((q[0], k, v), (q, k.half(), v), (q, k[..., :8], v)):
        with pytest.raises(FlashgenError) as caught:
            attention(*wrong, full)
        assert caught.value.__cause__ is None and not re.search(r"\b_\w+", str(caught.value))


class Holder(torch.nn.Module):
    """A module as people write them: its variant is an attribute."""

    def __init__(self):
        super().__init__()
        self.variant, self.table = fg.load_spec("relative_bias"), torch.nn.Parameter(torch.ones(2, 5))

    def forward(self, q):
        return fg.attention(q, q, q, self.variant, table=self.table)


def in_a_process(module, q, done):
    done.put(module(q).detach().numpy())


@pytest.mark.slow
def test_a_module_that_holds_a_variant_is_saved_and_sent(tmp_path):
    module, q = Holder(), torch.randn(1, 2, 3, 16)
    torch.save(module, tmp_path / "module.pt")
    assert torch.equal(torch.load(tmp_path / "module.pt", weights_only=False)(q), module(q))
    processes = multiprocessing.get_context("spawn")
    done = processes.Queue()
    process = processes.Process(target=in_a_process, args=(module, q, done))
    process.start()
    try:
        assert np.array_equal(done.get(timeout=120), module(q).detach().numpy())
    finally:
        process.join()
