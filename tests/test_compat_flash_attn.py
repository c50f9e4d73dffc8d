"""flashgen.compat.flash_attn against a written-out form of what the package's functions compute."""

import itertools
import math
import re

import pytest
import torch
from caches import cached
from emulated_gpu import install
from torch._dynamo.utils import counters

import flashgen
from flashgen.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    rule_of,
)
from flashgen.errors import FlashgenError
from flashgen.planning.profile import profile

WINDOWS = ((-1, -1), (2, -1), (-1, 1), (3, 2), (0, 0))


def tensors(q_len=5, kv_len=8, heads=4, kv_heads=2, dim=16, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shapes = (2, q_len, heads, dim), (2, kv_len, kv_heads, dim), (2, kv_len, kv_heads, dim)
    return [torch.randn(shape, generator=random, dtype=dtype, requires_grad=True) for shape in shapes]


def written_out(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, scale=None, lengths=None):
    """(result, lse): the first `lengths` keys of each batch, whose last is the last query's own."""
    q_len, kv_len, heads = q.shape[1], k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    ends = torch.full((len(q),), kv_len) if lengths is None else lengths
    columns = torch.arange(kv_len)
    far = columns - (torch.arange(q_len)[:, None] + ends[:, None, None, None] - q_len)  # [batch, 1, q_len, kv_len]
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes[:, :, None, None] * far.abs()
    left, right = window_size
    seen = columns < ends[:, None, None, None]
    if causal or right >= 0:
        seen = seen & (far <= (0 if causal else right))
    if left >= 0:
        seen = seen & (-far <= left)
    lse = s.masked_fill(~seen, -math.inf).logsumexp(-1)
    p = torch.exp(s.masked_fill(~seen, -math.inf) - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def compare(q, k, v, **options):
    o, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    right, right_lse = written_out(q, k, v, **{"scale" if n == "softmax_scale" else n: x for n, x in options.items()})
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)
    assert o.is_contiguous() and nothing.numel() == 0
    assert torch.equal(flash_attn_func(q, k, v, **options), o)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "window", "softcap", "slopes"),
    list(itertools.product((False, True), WINDOWS, (0.0, 2.5), (None, 1, 2))),
)
def test_every_combination(causal, window, softcap, slopes):
    alibi = None if slopes is None else torch.rand((2, 4)[2 - slopes :], generator=torch.Generator().manual_seed(1))
    compare(*tensors(), causal=causal, window_size=window, softcap=softcap, alibi_slopes=alibi)


@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 5), (1, 9), (7, 7), (3, 1)])
def test_lengths_that_differ(q_len, kv_len):
    """Causal is bottom-right: with more queries than keys the first see nothing."""
    compare(*tensors(q_len, kv_len), causal=True, softmax_scale=-0.3)
    compare(*tensors(q_len, kv_len), window_size=(2, 1))


def test_arguments_by_position():
    q, k, v = tensors()
    slopes = torch.rand(4)
    o = flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 0), 2.0, slopes, True, False)
    right, _ = written_out(q, k, v, True, (3, 0), 2.0, slopes, 0.3)
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)


def test_packed_tensors():
    q, k, v = (x.detach() for x in tensors(6, 6, kv_heads=4))
    right = flash_attn_func(q, k, v, causal=True)
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), right)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, None, True), right)
    flash_attn_qkvpacked_func(qkv).sum().backward()
    assert qkv.grad.shape == qkv.shape and qkv.grad[:, :, 2].any()
    for call in (flash_attn_qkvpacked_func, flash_attn_kvpacked_func):
        with pytest.raises(FlashgenError, match=r"kv is \[2, 6, 4, 4, 16\]: it is \[batch, seqlen, [23], heads"):
            call(*(q,) * (call is flash_attn_kvpacked_func), torch.zeros(2, 6, 4, 4, 16))


def test_dropout_and_determinism():
    q, k, v = tensors()
    torch.manual_seed(2)
    first = flash_attn_func(q, k, v, dropout_p=0.5, deterministic=True)
    torch.manual_seed(2)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    right = flashgen.attention(*turned, flashgen.load_spec("full"), dropout=0.5, deterministic=True)
    assert torch.equal(first, right.transpose(1, 2))
    with pytest.raises(FlashgenError, match="deterministic is a int"):
        flash_attn_func(q, k, v, deterministic=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 1)}, {"softcap": 2.0, "alibi_slopes": torch.ones(4) / 3}])
def test_a_cache_that_is_filled_in_part(causal, options):
    q, k, v = (x.detach() for x in tensors(2, 9))
    for name, x in (("k", k), ("v", v)):
        x[0, 4:] = 1e4 if name == "k" else math.nan  # what lies behind the end is not looked at
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    o, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal, return_softmax_lse=True, **options)
    right, right_lse = written_out(q, k, v.nan_to_num(), causal, lengths=lengths, **options)
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)
    one = flash_attn_with_kvcache(q, k, v, cache_seqlens=4, causal=causal, **options)
    assert torch.equal(one[0], o[0])
    split = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal, num_splits=2, **options)
    torch.testing.assert_close(split, o)
    whole = flash_attn_with_kvcache(q, k, v.nan_to_num(), causal=causal, **options)
    assert torch.equal(whole, flash_attn_func(q, k, v.nan_to_num(), causal=causal, **options))


def test_lengths_that_a_cache_has_no_room_for_are_refused():
    q, k, v = (x.detach() for x in tensors(2, 9))
    for wrong, nearest in ((100, 9), (-5, 0)):
        with pytest.raises(FlashgenError, match=f"(?s)cache_seqlens is {wrong}.*nearest: cache_seqlens={nearest}"):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=wrong, causal=True)
        with pytest.raises(FlashgenError, match="lengths are 0 to"):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([9, wrong], dtype=torch.int32), causal=True)
    with pytest.raises(FlashgenError, match=r"cache_seqlens is int64.*\n  nearest: cache_seqlens.to\(torch.int32\)"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([4, 5]))
    with pytest.raises(FlashgenError, match=r"cache_seqlens is a list, not a torch\.Tensor"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=[4, 5])


@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (9, 0), "softcap": 3.0, "alibi_slopes": torch.rand(4)}],
    ids=["plain", "window, softcap and slopes"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_caches_in_blocks(causal, options):
    """What blocks hold, in any order, gives what a cache in rows gives; one sequence has fewer keys than queries."""
    cache = cached((40, 3), 16, kv_heads=2, dim=16, dtype=torch.float64)
    q, k, v = (x.detach() for x in tensors(kv_len=40))
    for b, n in enumerate((40, 3)):
        k[b, :n], v[b, :n] = cache.keys[b].transpose(0, 1), cache.values[b].transpose(0, 1)
    options = {"causal": causal, **options}
    given = {"block_table": cache.table, "cache_seqlens": cache.lengths, **options}
    o, lse = flash_attn_with_kvcache(q, cache.k, cache.v, return_softmax_lse=True, **given)
    right, right_lse = written_out(q, k, v, lengths=cache.lengths, **options)
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)
    starts, ends = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([0, 40, 43], dtype=torch.int32)
    rows = torch.cat([q[0], q[1, 4:]])
    joined = flash_attn_varlen_func(rows, cache.k, cache.v, starts, ends, 5, 40, block_table=cache.table, **options)
    torch.testing.assert_close(joined[:5], right[0], rtol=1e-5, atol=1e-6)
    last, _ = written_out(q[:, 4:], k, v, lengths=cache.lengths, **options)
    torch.testing.assert_close(joined[5:], last[1], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        FlashgenError, match=r"^flash_attn_with_kvcache: k is \[10, 2, 16\]: it is \[blocks, block_size"
    ):
        flash_attn_with_kvcache(q, torch.zeros(10, 2, 16), cache.v, block_table=cache.table)


X = torch.zeros(2, 5, 4, 16)
LACKS = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"), X)


@pytest.mark.parametrize("name", LACKS)
def test_what_serving_lacks_is_refused_by_name(name):
    with pytest.raises(FlashgenError, match=f"^flash_attn_with_kvcache has no {name} in flashgen yet\n  nearest: "):
        flash_attn_with_kvcache(X, X, X, **{name: LACKS[name]})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (2, 0), "softcap": 2.5},
        {"window_size": (1, 2), "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    ],
)
def test_sequences_behind_each_other(options):
    """Each as it is alone, one of them without a query and one without a key."""
    lengths, of_keys = (5, 0, 3, 9), (8, 4, 0, 11)
    starts, key_starts = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths, of_keys))
    random = torch.Generator().manual_seed(0)
    shapes = (sum(lengths), 4, 16), (sum(of_keys), 2, 16), (sum(of_keys), 2, 16)
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes)
    bounds = starts, key_starts, max(lengths), max(of_keys)
    o, lse, _ = flash_attn_varlen_func(q, k, v, *bounds, return_attn_probs=True, **options)
    assert lse.shape == (4, sum(lengths)) and o.shape == q.shape
    alone, alone_lse = [], []
    for b in range(len(lengths)):
        rows, keys = (slice(int(x[b]), int(x[b + 1])) for x in (starts, key_starts))
        found = written_out(q[None, rows], k[None, keys], v[None, keys], **options)
        alone.append(found[0][0])
        alone_lse.append(found[1][0])
    right = torch.cat(alone)
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.cat(alone_lse, -1), rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    packed = flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *bounds, **options)
    assert torch.equal(packed, o)


def test_sequences_of_one_packed_tensor():
    qkv = torch.randn(14, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 5, 14], dtype=torch.int32)
    o = flash_attn_varlen_qkvpacked_func(qkv, starts, 9, causal=True)
    right = flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 9, 9, causal=True)
    assert torch.equal(o, right)
    with pytest.raises(FlashgenError, match=r"qkv is \[14, 4, 16\]: it is \[rows, 3, heads, head_dim\]"):
        flash_attn_varlen_qkvpacked_func(qkv[:, 0], starts, 9)
    with pytest.raises(FlashgenError, match=r"^flash_attn_varlen_func: q is .*: it is \[rows, heads, head_dim"):
        flash_attn_varlen_func(qkv, qkv, qkv, starts, starts, 9, 9)


WRONG = [
    ((X[0], X, X), {}, "flash_attn_func: q is [5, 4, 16]: it is [batch, seqlen, heads, head_dim]"),
    ((X, X, None), {}, "flash_attn_func: v is NoneType"),
    ((X, X, X), {"window_size": 4}, "window_size is (keys before, keys after), -1 for no end, and got 4"),
    ((X, X, X), {"window_size": (1.5, 0)}, "parameter 'left' of 'flash_attn' is int32 and got 1.5"),
    ((X, X, X), {"window_size": (None, 3)}, "window_size is (keys before, keys after), numbers, -1 for no end"),
    ((X, X, X), {"causal": None}, "causal is a NoneType and must be True or False"),
    ((X, X, X), {"causal": torch.tensor(True)}, "causal is a Tensor and must be True or False"),
    ((X, X, X), {"softcap": torch.tensor(2.0)}, "softcap is a Tensor and must be a number (softcap.item() reads"),
    ((X, X, X), {"alibi_slopes": [0.5]}, "alibi_slopes is a list, not a torch.Tensor"),
    ((X, X, X), {"softcap": -1.0}, "softcap is -1.0: it is positive, or 0 for none"),
    ((X, X, X), {"alibi_slopes": X}, "alibi_slopes is [2, 5, 4, 16]: it is [heads] or [batch, heads]"),
    ((X, X, X), {"alibi_slopes": X[0, 0, :, 0].half()}, "'alibi_slopes' of 'flash_attn' is float16"),
    ((X, X, X), {"alibi_slopes": torch.zeros(3)}, "is [3] and declared [heads]"),
    ((X, X, X), {"dropout_p": 0.5, "return_attn_probs": True}, "return_attn_probs beside dropout asks for the matrix"),
    ((X, X.half(), X), {}, "q is float32 and k float16"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_calls(arguments, options, message):
    with pytest.raises(FlashgenError, match=re.escape(message)):
        flash_attn_func(*arguments, **options)


def test_tables_and_bounds_that_are_none():
    starts, table = torch.tensor([0, 5, 10], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)

    def call(*given, block_table=table):
        rows = X.flatten(0, 1)
        return flash_attn_varlen_func(rows, X, X, starts, *given, block_table=block_table)

    for given, table_given, message in (
        ((starts, 5, 5), [[0], [0]], "block_table is a list, not a torch.Tensor"),
        ((None, 5, 5), table, "cu_seqlens_k is a NoneType, not a torch.Tensor"),
        ((starts, 5, torch.tensor(5)), table, "max_seqlen_k is tensor"),
    ):
        with pytest.raises(FlashgenError, match=message):
            call(*given, block_table=table_given)
    assert torch.equal(call(starts, 5, None), call(starts, 5, 5))  # as many as a row of the table has room for


def test_what_ran():
    flash_attn_func(X, X, X)
    assert flashgen.last_backend().call == "flash_attn_func" and flashgen.last_backend().name == "flashgen"


@pytest.mark.slow
def test_one_graph_for_lengths_windows_caps_and_slopes():
    torch._dynamo.reset()
    counters.clear()

    def call(q, k, v, n, slopes):
        return flash_attn_func(q, k, v, causal=True, window_size=(n, n), softcap=n + 0.5, alibi_slopes=slopes)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 2, 9, 14):
        given = (*(torch.randn(n + 1, m, 4, 16) for m in (n, 2 * n + 1, 2 * n + 1)), n, torch.rand(4))
        assert torch.equal(compiled(*given), call(*given))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.sampled("capability0")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_on_a_gpu(monkeypatch, capability):
    """Packed q, k and v are read where they lie, and the cache's lengths in the kernel."""
    gpu = install(monkeypatch, capability)
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, 40, 3, 2, 32, generator=random).bfloat16()
    q, k, v = qkv.float().unbind(2)
    o = flash_attn_qkvpacked_func(gpu.put(qkv), causal=True, window_size=(20, 0))
    right, _ = written_out(q, k, v, True, (20, 0))
    torch.testing.assert_close(o.as_subclass(torch.Tensor).float(), right, rtol=0.03, atol=0.03)
    lengths = torch.tensor([33], dtype=torch.int32)
    given = (gpu.put(x.bfloat16()) for x in (q[:, :3], k, v))
    o = flash_attn_with_kvcache(*given, cache_seqlens=gpu.put(lengths), causal=True)
    right, _ = written_out(q[:, :3], k, v, True, lengths=lengths)
    torch.testing.assert_close(o.as_subclass(torch.Tensor).float(), right, rtol=0.03, atol=0.03)
    assert len(gpu.launches) == 2


def test_a_soft_cap_is_known_to_be_positive():
    """So that Hopper's forward makes it of two factors."""
    capped, _ = rule_of(True, (-1, -1), 30.0, None)
    assert profile(capped.bind()).soft_capped
