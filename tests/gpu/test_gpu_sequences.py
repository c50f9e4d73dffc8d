"""Sequences with lengths and positions of their own: the bits of each alone, no wait, and a graph that is replayed."""

import pytest
import torch
from gpu_checks import DEVICE

import flashgen as fg
from flashgen.lang.load import load_spec

pytestmark = pytest.mark.gpu

#: Queries and keys of sequences; the last has a whole number of tiles.
ROWS, KEYS = (700, 1, 0, 333, 512), (1900, 1, 40, 1023, 2048)

SPECS = {
    "full": {},
    "causal": {},
    "sliding_window": {"window": 300},
    "softcap": {"cap": 20.0},
    "alibi": {"slopes": torch.linspace(0.01, 0.5, 8)},
}


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def draw(dtype, head_dim):
    torch.manual_seed(0)
    shapes = ((max(ROWS), 8), (max(KEYS), 2), (max(KEYS), 2))
    return [torch.randn(len(ROWS), heads, rows, head_dim, device=DEVICE, dtype=dtype) for rows, heads in shapes]


def given(spec):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in SPECS[spec].items()}


def alone(b, q, k, v, variant, **named):
    """The rows of a sequence by dense kernels, behind other queries before them."""
    before = torch.randn(1, q.shape[1], KEYS[b] - ROWS[b], q.shape[3], device=DEVICE, dtype=q.dtype)
    whole = torch.cat([before, q[b : b + 1, :, : ROWS[b]]], dim=2)
    o, lse = fg.attention(whole, *(x[b : b + 1, :, : KEYS[b]] for x in (k, v)), variant, return_lse=True, **named)
    return o[0, :, before.shape[2] :], lse[0, :, before.shape[2] :]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", sorted(SPECS))
def test_each_sequence_has_the_bits_that_it_has_alone(spec, dtype, head_dim):
    variant, named = load_spec(spec), given(spec)
    q, k, v = draw(dtype, head_dim)
    for b in range(len(ROWS)):
        q[b, :, ROWS[b] :] = k[b, :, KEYS[b] :] = torch.nan
        v[b, :, KEYS[b] :] = torch.inf
    lengths = {"q_lengths": ints(ROWS), "kv_lengths": ints(KEYS)}
    o, lse = fg.attention(q, k, v, variant, q_offset="end", return_lse=True, **lengths, **named)
    joined = [
        torch.cat([x[b, :, :n] for b, n in enumerate(of)], dim=1).transpose(0, 1).contiguous()
        for x, of in ((q, ROWS), (k, KEYS), (v, KEYS))
    ]
    starts = [ints([sum(of[:b]) for b in range(len(of) + 1)]) for of in (ROWS, KEYS)]
    bounds = {"max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS)}
    varlen, varlen_lse = fg.attention_varlen(
        *joined, variant, *starts, **bounds, q_offset="end", return_lse=True, **named
    )
    for b, rows in enumerate(ROWS):
        assert not o[b, :, rows:].any() and (lse[b, :, rows:] == -torch.inf).all()
        if rows == 0:
            continue
        want, want_lse = alone(b, q, k, v, variant, **named)
        assert torch.equal(o[b, :, :rows], want) and torch.equal(lse[b, :, :rows], want_lse)
        span = slice(sum(ROWS[:b]), sum(ROWS[: b + 1]))
        assert torch.equal(varlen[span].transpose(0, 1), want) and torch.equal(varlen_lse[:, span], want_lse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic):
    variant = load_spec("causal")
    inputs = [x.requires_grad_() for x in draw(torch.bfloat16, 64)]
    lengths = {"q_lengths": ints(ROWS), "kv_lengths": ints(KEYS), "deterministic": deterministic}
    o = fg.attention(*inputs, variant, q_offset="end", **lengths)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, inputs, do)
    for b, rows in enumerate(ROWS):
        if rows == 0:
            continue
        q, k, v = (x[b : b + 1].detach().requires_grad_() for x in inputs)
        mine = fg.attention(q[:, :, :rows], k[:, :, : KEYS[b]], v[:, :, : KEYS[b]], variant, q_offset="end")
        want = torch.autograd.grad(mine, (q, k, v), do[b : b + 1, :, :rows])
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one[b], other[0], rtol=0.02, atol=0.02)


def test_no_call_waits_and_a_graph_takes_other_lengths():
    variant, (q, k, v) = load_spec("causal"), draw(torch.bfloat16, 128)
    keys = ints(KEYS)

    def call():
        return fg.attention(q[:, :, :1], k, v, variant, q_offset="end", kv_lengths=keys)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for lengths in (KEYS, (5, 2048, 700, 1, 129)):
        keys.copy_(ints(lengths))
        graph.replay()
        assert torch.equal(o, call())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("spec", ["full", "causal", "softcap"])
def test_gradients_of_joined_sequences_are_those_of_each_alone(spec, head_dim, deterministic):
    """A neighbour of nothing but NaN changes none; with one order of sums they have the bits of each alone."""
    variant, named = load_spec(spec), given(spec)
    q, k, v = draw(torch.bfloat16, head_dim)
    joined = [
        torch.cat([x[b, :, :n] for b, n in enumerate(of)], dim=1).transpose(0, 1).contiguous()
        for x, of in ((q, ROWS), (k, KEYS), (v, KEYS))
    ]
    starts = [[sum(of[:b]) for b in range(len(of) + 1)] for of in (ROWS, KEYS)]
    for x, of in zip(joined, (starts[0], starts[1], starts[1]), strict=True):
        x[of[3] : of[4]] = torch.nan
    leaves = [x.requires_grad_() for x in joined]
    bounds = {"max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS), "deterministic": deterministic}
    o = fg.attention_varlen(*leaves, variant, *map(ints, starts), q_offset="end", **bounds, **named)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, leaves, do)
    for b in (0, 1, 4):
        spans = [slice(of[b], of[b + 1]) for of in (starts[0], starts[1], starts[1])]
        mine = [x.detach()[span].requires_grad_() for x, span in zip(leaves, spans, strict=True)]
        own = [ints([0, of[b + 1] - of[b]]) for of in starts]
        alone_o = fg.attention_varlen(*mine, variant, *own, q_offset="end", **bounds, **named)
        want = torch.autograd.grad(alone_o, mine, do[spans[0]])
        for one, span, other in zip(got, spans, want, strict=True):
            if deterministic:
                assert torch.equal(one[span], other)
            else:
                torch.testing.assert_close(one[span], other, rtol=0.02, atol=0.02)


def test_out_and_jagged_tensors():
    variant, (q, k, v) = load_spec("causal"), draw(torch.bfloat16, 128)
    want = fg.attention(q, k, v, variant)
    out = torch.full_like(want, torch.nan)
    assert fg.attention(q, k, v, variant, out=out) is out and torch.equal(out, want)
    starts = torch.tensor([0, 700, 701, 1201], device=DEVICE)
    rows = [torch.randn(1201, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    nested = [torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2) for x in rows]
    o = fg.attention(*nested, variant)
    joined = fg.attention_varlen(*rows, variant, ints([0, 700, 701, 1201]), max_seqlen_q=1201)
    assert torch.equal(o.values().transpose(0, 1), joined)
