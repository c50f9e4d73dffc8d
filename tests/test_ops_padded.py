"""attention() of sequences with lengths and positions of their own: on a CPU, on an emulated GPU, traced, refused."""

import numpy as np
import pytest
import torch
from emulated_gpu import install

import flashgen as fg
from flashgen.errors import CapturedIndexError, LaunchError
from flashgen.ops import forward
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.ops.forward import run
from flashgen.ops.records import calls_of

causal = fg.variant(lambda b, h, q, k: k <= q)
bias = fg.tensor("bias", dims=("q",), dtype="float32")
biased = fg.variant(lambda b, h, q, k: k <= q, score=lambda s, b, h, q, k: s + bias[q] * fg.float32(k))


def draw(batch=2, heads=2, kv_heads=1, q_len=6, kv_len=40, dim=32, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "alike"),
    [({"q_offset": "end"}, True), ({"q_offset": ints(34, 20)}, False), ({"kv_lengths": ints(40, 9)}, False)],
    ids=["at the end", "positions", "lengths"],
)
def test_sequences_are_alike_where_no_tensor_says_otherwise(monkeypatch, given, alike):
    """Then none is longer than the others, and keys are not split for its sake."""
    asked, real = [], forward.divide
    monkeypatch.setattr(forward, "divide", lambda *a, **k: asked.append(k["alike"]) or real(*a, **k))
    fg.attention(*draw(), causal, **given)
    assert asked == [alike]


@pytest.mark.parametrize("offset", [34, "end", ints(34, 34)], ids=["int", "end", "tensor"])
def test_a_cache_on_a_cpu(offset):
    q, k, v = draw()
    whole = torch.randn(2, 2, 40, 32)
    whole[:, :, 34:] = q
    o, lse = fg.attention(whole, k, v, causal, return_lse=True)
    got, got_lse = fg.attention(q, k, v, causal, q_offset=offset, return_lse=True)
    torch.testing.assert_close(got, o[:, :, 34:])
    torch.testing.assert_close(got_lse, lse[:, :, 34:])


def test_captured_tensors_are_read_at_positions():
    q, k, v = draw()
    table = torch.randn(50)
    whole = torch.cat([torch.randn(2, 2, 34, 32), q], dim=2)
    o = fg.attention(whole, k, v, biased, bias=table[:40])
    torch.testing.assert_close(fg.attention(q, k, v, biased, bias=table, q_offset=34), o[:, :, 34:])
    with pytest.raises(LaunchError, match="dimension 0 must be q = 40"):
        fg.attention(q, k, v, biased, bias=table[:39], q_offset=34)
    with pytest.raises(CapturedIndexError, match="index 39 is outside"):
        fg.attention(q, k, v, biased, bias=table[:39], q_offset=ints(34, 34))


def test_padding_holds_anything():
    q, k, v = draw()
    rows, keys = ints(3, 6), ints(17, 40)
    clean = fg.attention(q, k, v, causal, q_offset="end", q_lengths=rows, kv_lengths=keys, return_lse=True)
    q[0, :, 3:] = k[0, :, 17:] = np.nan
    v[0, :, 17:] = np.inf
    o, lse = fg.attention(q, k, v, causal, q_offset="end", q_lengths=rows, kv_lengths=keys, return_lse=True)
    assert torch.equal(o, clean[0]) and torch.equal(lse, clean[1])
    assert not o[0, :, 3:].any() and (lse[0, :, 3:] == -np.inf).all() and o[0, :, :3].all()


def test_a_name_that_the_variant_declares_is_its_own():
    kv_lengths = fg.tensor("kv_lengths", dims=("batch",), dtype="int32")
    own = fg.variant(lambda b, h, q, k: k < kv_lengths[b] - 5)
    q, k, v = draw()
    o = fg.attention(q, k, v, own, kv_lengths=ints(25, 35))
    other = fg.attention(q, k, v, fg.variant(), kv_lengths=ints(20, 30))
    torch.testing.assert_close(o, other)


REFUSED = [
    ({"q_offset": -1}, "positions are not negative"),
    ({"q_offset": "start"}, "an int32 tensor"),
    ({"q_offset": True}, "an int32 tensor"),
    ({"q_offset": 1 << 24}, r"nearest: q_offset=16777209"),
    ({"q_offset": ints(3)}, "nearest: 2 numbers"),
    ({"q_offset": ints(3, -1)}, r"q_offset\[1\] is -1"),
    ({"q_offset": ints(3, 1 << 24)}, r"nearest: q_offset\[1\] = 16777209"),
    ({"kv_lengths": ints(41, 3)}, r"kv_lengths\[0\] is 41: lengths are 0 to kv_len = 40"),
    ({"kv_lengths": torch.tensor([3, 3])}, r"int64: it is an int32 tensor \[batch\]"),
    ({"kv_lengths": [3, 3]}, "is a list"),
    ({"kv_lengths": ints(1, 2, 3, 4)[::2]}, "lie side by side"),
    ({"q_lengths": ints(7, 0)}, r"q_lengths\[0\] is 7"),
    ({"q_lengths": torch.ones(2, dtype=torch.int32, device="meta")}, "is on meta"),
    ({"q_offset": "end", "kv_lengths": ints(40, 5)}, "6 queries over 5 keys in sequence 1"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_what_is_refused(given, message):
    with pytest.raises(LaunchError, match=message) as refused:
        fg.attention(*draw(), causal, **given)
    assert "nearest" in str(refused.value)


def test_more_queries_than_keys_have_no_end():
    with pytest.raises(LaunchError, match="at most 5 queries"):
        fg.attention(*draw(kv_len=5), causal, q_offset="end")


def gradients(run, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, lse = run(*inputs)
    (o.sin().sum() + lse[lse.isfinite()].sum()).backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_on_a_cpu(deterministic):
    q, k, v = draw()
    rows, keys = (3, 6), (17, 40)
    named = {"q_offset": "end", "q_lengths": ints(*rows), "kv_lengths": ints(*keys), "deterministic": deterministic}
    q[0, :, 3:] = k[0, :, 17:] = np.nan
    v[0, :, 17:] = np.inf

    def alone(q, k, v):
        def one(b):
            first = torch.zeros(1, 2, keys[b] - rows[b], 32)
            whole = torch.cat([first, q[b : b + 1, :, : rows[b]]], dim=2)
            of_b = (x[b : b + 1, :, : keys[b]] for x in (k, v))
            o, lse = fg.attention(whole, *of_b, causal, return_lse=True)
            return o[:, :, first.shape[2] :].flatten(), lse[:, :, first.shape[2] :].flatten()

        return (torch.cat(parts) for parts in zip(*map(one, range(2)), strict=True))

    got = gradients(lambda *x: fg.attention(*x, causal, return_lse=True, **named), q, k, v)
    for mine, want in zip(got, gradients(alone, q, k, v), strict=True):
        torch.testing.assert_close(mine, want)


@pytest.mark.sampled("sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_gradients_on_a_gpu(capability, monkeypatch):
    gpu = install(monkeypatch, capability)
    tensors = draw(dtype=torch.bfloat16)
    keys = ints(17, 40)
    want = gradients(lambda *x: fg.attention(*x, causal, return_lse=True, q_offset="end", kv_lengths=keys), *tensors)
    call = Call(causal, None, {"q_offset": -1, "kv_lengths": gpu.put(keys)})
    q, k, v = map(gpu.put, tensors)
    o, lse = run(q, k, v, call)
    do = gpu.put(o.as_subclass(torch.Tensor).float().cos().bfloat16())
    found = run_backward(Given(do, gpu.put(torch.ones(lse.shape)), q, k, v, o, lse), call, ())
    for mine, other in zip(found[:3], want, strict=True):
        pair = (x.as_subclass(torch.Tensor).float() for x in (mine, other))
        torch.testing.assert_close(*pair, rtol=0.05, atol=0.05)


def test_compiled():
    q, k, v = draw()
    keys = ints(17, 40)
    run = torch.compile(lambda *x: fg.attention(*x[:3], causal, q_offset="end", kv_lengths=x[3]), backend="eager")
    torch.testing.assert_close(run(q, k, v, keys), fg.attention(q, k, v, causal, q_offset="end", kv_lengths=keys))


@pytest.mark.sampled("sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_records_of_a_gpu(capability, monkeypatch):
    """One record and one kernel serve any lengths and positions; checks of values are asked for."""
    gpu = install(monkeypatch, capability)
    dtype = torch.bfloat16
    q, k, v = (gpu.put(x) for x in draw(dtype=dtype))

    def same(o, **given):
        want = fg.attention(*draw(dtype=dtype), causal, **given)
        torch.testing.assert_close(*(x.as_subclass(torch.Tensor) for x in (o, want)), rtol=0.03, atol=0.03)

    for offset in (34, 20):
        same(fg.attention(q, k, v, causal, q_offset=offset), q_offset=offset)
    assert len(gpu.plans) == len(calls_of(causal).records) == 1
    for keys in (ints(17, 40), ints(8, 9)):
        same(fg.attention(q, k, v, causal, q_offset="end", kv_lengths=gpu.put(keys)), q_offset="end", kv_lengths=keys)
    same(fg.attention(q, k, v, causal, q_offset=gpu.put(ints(1, 9))), q_offset=ints(1, 9))
    assert len(gpu.plans) == 1 and len(calls_of(causal).records) == 3
    with pytest.raises(LaunchError, match="positions stay below"):
        fg.attention(q, k, v, causal, q_offset=1 << 24)
    long = gpu.put(ints(41, 3))
    assert fg.attention(q, k, v, causal, kv_lengths=long).isfinite().all()
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    with pytest.raises(LaunchError, match=r"kv_lengths\[0\] is 41"):
        fg.attention(q, k, v, causal, kv_lengths=long)


@pytest.mark.slow
def test_positions_beyond_a_captured_tensor_are_clamped_on_a_gpu(monkeypatch):
    gpu = install(monkeypatch, (8, 0))
    q, k, v = (gpu.put(x) for x in draw(dtype=torch.bfloat16))
    table = gpu.put(torch.ones(38))
    assert fg.attention(q, k, v, biased, bias=table, q_offset=gpu.put(ints(34, 34))).isfinite().all()
    fg.attention(q, k, v, biased, bias=table, q_offset=32)
    with pytest.raises(LaunchError, match="bias has 38 positions"):
        fg.attention(q, k, v, biased, bias=table, q_offset=33)
