"""attention_varlen(): sequences behind each other, on a CPU, on an emulated GPU, traced, refused."""

import numpy as np
import pytest
import torch
from emulated_gpu import install
from test_ops_padded import biased, causal, gradients, ints

import flashgen as fg
from flashgen.errors import LaunchError
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.ops.forward import run
from flashgen.ops.records import calls_of

#: One sequence has no query, one no key.
Q, K = ints(0, 5, 5, 12, 15), ints(0, 20, 29, 29, 40)


def draw(dtype=torch.float32, heads=2, kv_heads=1, dim=32):
    random = torch.Generator().manual_seed(0)
    shapes = (15, heads, dim), (40, kv_heads, dim), (40, kv_heads, dim)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def alone(q, k, v, variant, b, starts=(Q, K), **named):
    """o and lse of a sequence by attention()."""
    rows, keys = (slice(int(of[b]), int(of[b + 1])) for of in starts)
    of_b = (x[span].transpose(0, 1).unsqueeze(0) for x, span in ((q, rows), (k, keys), (v, keys)))
    o, lse = fg.attention(*of_b, variant, return_lse=True, **named)
    return o[0].transpose(0, 1), lse[0]


@pytest.mark.parametrize("offset", [None, 3, "end", ints(15, 9, 0, 8)], ids=["0", "int", "end", "tensor"])
def test_each_sequence_is_what_it_is_alone(offset):
    q, k, v = draw()
    keys = ints(0, 20, 29, 36, 40) if isinstance(offset, str) else K
    o, lse = fg.attention_varlen(
        q, k, v, causal, Q, keys, max_seqlen_q=7, max_seqlen_k=30, q_offset=offset, return_lse=True
    )
    assert o.shape == (15, 2, 32) and o.is_contiguous() and lse.shape == (2, 15)
    for b in range(4):
        first = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
        want, want_lse = alone(q, k, v, causal, b, (Q, keys), q_offset=first)
        rows = slice(int(Q[b]), int(Q[b + 1]))
        torch.testing.assert_close(o[rows], want)
        torch.testing.assert_close(lse[:, rows], want_lse)


def test_self_attention_and_what_another_sequence_holds():
    q, _, _ = draw()
    k, v = torch.randn(15, 1, 32), torch.randn(15, 1, 32)
    k[5:12], v[5:12] = np.nan, np.inf
    o = fg.attention_varlen(q, k, v, causal, Q, max_seqlen_q=100)
    for b in (0, 3):
        torch.testing.assert_close(o[Q[b] : Q[b + 1]], alone(q, k, v, causal, b, (Q, Q))[0])


def test_a_spec_sees_its_sequence():
    q, k, v = draw()
    scored = fg.variant(score=lambda s, b, h, q, k: s + fg.float32(b + 10 * fg.q_len + 100 * fg.kv_len))
    plain, got = (
        fg.attention_varlen(q, k, v, x, Q, K, max_seqlen_q=7, max_seqlen_k=20, return_lse=True)[1]
        for x in (fg.variant(), scored)
    )
    for b in range(4):
        if b == 2:  # it has no key
            continue
        rows, keys = int(Q[b + 1] - Q[b]), int(K[b + 1] - K[b])
        more = got[:, Q[b] : Q[b + 1]] - plain[:, Q[b] : Q[b + 1]]
        torch.testing.assert_close(more, torch.full_like(more, b + 10 * rows + 100 * keys))


def test_captured_tensors():
    q, k, v = draw()
    table = torch.randn(9)
    o = fg.attention_varlen(q, k, v, biased, Q, K, max_seqlen_q=7, max_seqlen_k=20, bias=table)
    torch.testing.assert_close(o[5:12], torch.zeros(7, 2, 32))
    torch.testing.assert_close(o[:5], alone(q, k, v, biased, 0, bias=table[:5])[0])


REFUSED = [
    ({"cu_seqlens_q": ints(0, 5, 3, 12, 15)}, "cu_seqlens_q decreases from 5 to 3 behind sequence 1"),
    ({"cu_seqlens_q": ints(0, 5, 5, 12, 16)}, "goes from 0 to 16: the tensor has rows 0 to 15"),
    ({"cu_seqlens_k": ints(-1, 5, 5, 12, 16)}, "cu_seqlens_k goes from -1"),
    ({"cu_seqlens_k": ints(0, 5)}, "nearest: 5 numbers"),
    ({"cu_seqlens_k": K.long()}, "cu_seqlens_k is int64"),
    ({"cu_seqlens_q": [0, 15]}, "cu_seqlens_q is a list"),
    ({"cu_seqlens_q": ints()}, r"cu_seqlens_q is \[0\]"),
    ({"max_seqlen_q": 6}, "sequence 2 of cu_seqlens_q has 7 rows and max_seqlen_q is 6"),
    ({"max_seqlen_k": -1}, "max_seqlen_k is -1"),
    ({"max_seqlen_q": torch.tensor(7)}, "max_seqlen_q is .*\n  nearest: max_seqlen_q=15, that of all rows"),
    ({"max_seqlen_k": 7.0}, rf"max_seqlen_k is .*\n  nearest: max_seqlen_k={K[-1]}, that of all rows"),
    ({"q_offset": "end"}, "7 queries over 0 keys in sequence 2"),
    ({"q_offset": -3}, "not negative"),
    (
        {"q_lengths": ints(5, 0, 7, 3)},
        "q_lengths is of .*: cu_seqlens_q says how long each is\n  nearest: cu_seqlens_q",
    ),
    ({"kv_lengths": ints(5, 4, 0, 3)}, "kv_lengths is of .*\n  nearest: cu_seqlens_k in its place, and no kv_lengths"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_what_is_refused(given, message):
    given = {"cu_seqlens_q": Q, "cu_seqlens_k": K, "max_seqlen_q": 7, "max_seqlen_k": 20, **given}
    with pytest.raises(LaunchError, match=message) as refused:
        fg.attention_varlen(*draw(), causal, **given)
    assert "nearest" in str(refused.value)


def test_other_shapes_are_refused():
    q, k, v = draw()
    with pytest.raises(LaunchError, match=r"takes \[rows, heads, head_dim\]"):
        fg.attention_varlen(q[None], k, v, causal, Q, K, max_seqlen_q=7)


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_nested_and_sparse_tensors_are_refused():
    q, k, v = draw()
    given = causal, Q, K
    nested = [torch.nested.nested_tensor([torch.zeros(shape)] * 2) for shape in ((5, 32), (4, 5, 32))]
    nested.append(torch.nested.nested_tensor([torch.zeros(5, 4, 32)] * 2, layout=torch.jagged))
    for x in nested:
        for arguments in ((x, x, x), (q, x, v)):
            with pytest.raises(
                LaunchError, match=r" is nested: .*\n  nearest: attention\(\) of q, k and v with layout="
            ):
                fg.attention_varlen(*arguments, *given, max_seqlen_q=7)
        with pytest.raises(LaunchError, match=r"out is nested: .*\n  nearest: a dense out, or none"):
            fg.attention_varlen(q, k, v, *given, max_seqlen_q=7, out=x)
    for x in (v.to_sparse(), v.to_sparse_csr(), v.to_mkldnn()):
        with pytest.raises(LaunchError, match=r"v is .*: attention takes dense tensors\n  nearest: v.to_dense"):
            fg.attention_varlen(q, k, x, *given, max_seqlen_q=7)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_on_a_cpu(deterministic):
    q, k, v = draw()
    q, k, v = torch.cat([q, q[:2]]), torch.cat([k, k[:3]]), torch.cat([v, v[:3]])  # rows of no sequence
    bounds = {"max_seqlen_q": 7, "max_seqlen_k": 20, "return_lse": True, "deterministic": deterministic}

    def joined(*x):
        o, lse = fg.attention_varlen(*x, causal, Q, K, **bounds)
        return o[:15], lse[:, :15]

    def apart(*x):
        o, lse = zip(*(alone(*x, causal, b) for b in range(4)), strict=True)
        return torch.cat(o), torch.cat(lse, dim=1)

    for got, want in zip(gradients(joined, q, k, v), gradients(apart, q, k, v), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sampled("sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_gradients_on_a_gpu(capability, monkeypatch):
    gpu = install(monkeypatch, capability)
    tensors = draw(torch.bfloat16)
    bounds = {"max_seqlen_q": 7, "max_seqlen_k": 20}
    want = gradients(lambda *x: fg.attention_varlen(*x, causal, Q, K, return_lse=True, **bounds), *tensors)
    own = {"cu_seqlens_q": gpu.put(Q), "cu_seqlens_k": gpu.put(K), **bounds}
    call = Call(causal, None, {f"varlen.{name}": x for name, x in own.items()})
    q, k, v = (gpu.put(x.transpose(0, 1).unsqueeze(0)) for x in tensors)
    o, lse = run(q, k, v, call)
    do = gpu.put(o.as_subclass(torch.Tensor).float().cos().bfloat16())
    dlse = gpu.put(lse.as_subclass(torch.Tensor).isfinite().float())
    found = run_backward(Given(do, dlse, q, k, v, o, lse), call, ())
    for mine, other in zip(found[:3], want, strict=True):
        pair = mine.as_subclass(torch.Tensor).float()[0].transpose(0, 1), other.as_subclass(torch.Tensor).float()
        torch.testing.assert_close(*pair, rtol=0.05, atol=0.05)


def test_compiled():
    def call(*x):
        return fg.attention_varlen(*x[:3], causal, *x[3:], max_seqlen_q=7, max_seqlen_k=20, return_lse=True)

    given = (*draw(), Q, K)
    for got, want in zip(torch.compile(call, backend="eager", fullgraph=True)(*given), call(*given), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sampled("sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_records_of_a_gpu(capability, monkeypatch):
    gpu = install(monkeypatch, capability)
    tensors = draw(torch.bfloat16)
    q, k, v = map(gpu.put, tensors)
    bounds = {"max_seqlen_q": 15, "max_seqlen_k": 40}
    for starts in ((Q, K), (ints(0, 1, 2, 3, 15), ints(0, 0, 9, 30, 40))):
        got = fg.attention_varlen(q, k, v, causal, *map(gpu.put, starts), **bounds)
        want = fg.attention_varlen(*tensors, causal, *starts, **bounds)
        torch.testing.assert_close(*(x.as_subclass(torch.Tensor) for x in (got, want)), rtol=0.03, atol=0.03)
    assert len(gpu.plans) == len(calls_of(causal).records) == 1
    wrong = gpu.put(ints(0, 30, 41, 50, 90))  # no address outside of the tensors follows from it
    fg.attention_varlen(q, k, v, causal, wrong, wrong, **bounds)
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    with pytest.raises(LaunchError, match="sequence 0 of cu_seqlens_q has 30 rows and max_seqlen_q is 15"):
        fg.attention_varlen(q, k, v, causal, wrong, wrong, **bounds)


@pytest.mark.parametrize("keys", [1, 0])
def test_rows_of_no_sequence_have_no_sink(keys):
    """Neither where no sequence has a key, and no kernel runs."""
    q, k, v = draw()
    sink, starts = torch.tensor([0.5, -1.0], requires_grad=True), ints(2, 5, 9)
    of_keys = ints(0, 0, 0)
    bounds = {"max_seqlen_q": 8, "max_seqlen_k": 8, "return_lse": True}
    o, lse = fg.attention_varlen(q, k[:keys], v[:keys], causal, starts, of_keys, sink=sink.detach(), **bounds)
    inside = torch.zeros(15, dtype=torch.bool)
    inside[2:9] = True
    assert not o.any() and (lse[:, ~inside] == -torch.inf).all()
    assert torch.equal(lse[:, inside], sink.detach()[:, None].expand(2, 7))
    rows = q.transpose(0, 1)[None].repeat(2, 1, 1, 1)
    none = torch.zeros(2, 1, keys, 32)
    o, lse = fg.attention(
        rows, none, none, causal, q_lengths=ints(4, 0), kv_lengths=ints(0, 0), sink=sink.detach(), return_lse=True
    )
    assert not o.any() and (lse[0, :, 4:] == -torch.inf).all() and (lse[1] == -torch.inf).all()
    assert torch.equal(lse[0, :, :4], sink.detach()[:, None].expand(2, 4))
    if not keys:
        lse = fg.attention(rows, none, none, causal, q_lengths=ints(4, 0), sink=sink, return_lse=True)[1]
        (found,) = torch.autograd.grad(lse[0, :, :6].sum(), sink)
        assert torch.equal(found, torch.tensor([4.0, 4.0]))


@pytest.mark.parametrize("layout", ["joined", "nested"])
def test_names_that_a_variant_declares_are_its_own(layout):
    """Whatever calls mean by them where it does not."""
    q, starts = torch.randn(10, 2, 16, generator=torch.Generator().manual_seed(3)), ints(0, 4, 10)

    def attend(variant, **named):
        if layout == "joined":
            return fg.attention_varlen(q, q, q, variant, starts, max_seqlen_q=10, **named)
        nested = torch.nested.nested_tensor_from_jagged(q, starts.long()).transpose(1, 2)
        return fg.attention(nested, nested, nested, variant, **named).transpose(1, 2).values()

    first = fg.variant(lambda b, h, q, k: k < fg.param("q_offset", default=1))
    wanted = fg.attention(*[q[:4].transpose(0, 1)[None]] * 3, first, q_offset=3)[0].transpose(0, 1)
    torch.testing.assert_close(attend(first, q_offset=3)[:4], wanted)
    for name in ("kv_lengths", "page_table"):
        few = fg.variant(lambda b, h, q, k, name=name: k < fg.tensor(name, ("batch",), "int32")[b])
        one, other = (attend(few, **{name: ints(*values)}) for values in ((1, 2), (3, 2)))
        assert not torch.equal(one, other)


def test_names_of_attention_varlen_are_declared_by_nobody():
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(fg.SpecError, match=f"the name '{name}' belongs to the call"):
            fg.param(name, default=1)


def test_sinks_of_each_sequence_where_nobody_has_a_key_or_a_query():
    q, none = draw()[0][:5], torch.zeros(0, 1, 32)
    sink = torch.tensor([[0.5, -1.0], [2.0, 3.0]], requires_grad=True)
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 0, "return_lse": True}
    _, lse = fg.attention_varlen(q, none, none, causal, ints(0, 2, 5), ints(0, 0, 0), sink=sink, **bounds)
    assert torch.equal(lse, sink[[0, 0, 1, 1, 1]].T)
    (found,) = torch.autograd.grad((lse * torch.arange(5.0)).sum(), sink)
    assert torch.equal(found, torch.tensor([[1.0, 1.0], [9.0, 9.0]]))
    empty = draw()[0][:0]
    keys = draw()[1][:5]
    o = fg.attention_varlen(
        empty, keys, keys, causal, ints(0, 0, 0), ints(0, 2, 5), max_seqlen_q=3, max_seqlen_k=3, sink=sink.detach()
    )
    assert o.shape == (0, 2, 32)


def test_the_default_device_is_not_where_sequences_of_8_bits_lie():
    rows = [x.bfloat16() for x in draw(dim=64)]
    starts = {"cu_seqlens_q": Q, "cu_seqlens_k": K, "max_seqlen_q": 15, "max_seqlen_k": 40}

    def found():
        x = fg.quantize(*rows, **starts, smooth_k=True)
        return fg.attention_varlen(x.q, x.k, x.v, causal, **starts, **x.descales)

    wanted = found()
    with torch.device("meta"):
        assert torch.equal(found(), wanted)
