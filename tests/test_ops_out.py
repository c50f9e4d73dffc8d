"""out=: o is written where the call says, on a CPU, on an emulated GPU, in a graph; or the call is refused."""

import pytest
import torch
from emulated_gpu import install
from test_ops_varlen import K, Q
from test_ops_varlen import draw as draw_rows
from torch.utils.flop_counter import FlopCounterMode

import flashgen as fg
from flashgen.errors import LaunchError
from flashgen.lang.load import load_spec

causal, relative_bias = load_spec("causal"), load_spec("relative_bias")


def draw(dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 40, 32, generator=random).to(dtype) for heads in (4, 2, 2)]


def places(like):
    """Memory for o that lies in other ways than o does: rows of all heads side by side, and columns of something."""
    batch, heads, rows, columns = like.shape
    yield torch.empty_like(like)
    yield like.new_empty(batch, rows, heads, columns).transpose(1, 2)
    yield like.new_empty(batch, heads, rows, 2 * columns)[..., columns:]


def test_o_is_written_there():
    want, want_lse = fg.attention(*draw(), causal, return_lse=True)
    for out in places(want):
        out.fill_(torch.nan)
        o, lse = fg.attention(*draw(), causal, out=out, return_lse=True)
        assert o is out and torch.equal(out, want) and torch.equal(lse, want_lse)
        out.fill_(torch.nan)
        assert fg.attention(*draw(), causal, out=out) is out and torch.equal(out, want)


def test_without_a_key():
    q, k, v = draw()
    out = torch.full_like(q, torch.nan)
    fg.attention(q, k[:, :, :0], v[:, :, :0], causal, out=out)
    assert not out.any()


def test_of_sequences():
    given, bounds = (*draw_rows(), causal, Q, K), {"max_seqlen_q": 7, "max_seqlen_k": 20, "return_lse": True}
    want, want_lse = fg.attention_varlen(*given, **bounds)
    out = torch.full_like(want, torch.nan)
    o, lse = fg.attention_varlen(*given, out=out, **bounds)
    assert o is out and torch.equal(out, want) and torch.equal(lse, want_lse)
    q, k, v = draw()
    lengths = torch.tensor([30, 40], dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    fg.attention(q, k, v, causal, q_lengths=lengths, kv_lengths=lengths, out=out)
    assert torch.equal(out, fg.attention(q, k, v, causal, q_lengths=lengths, kv_lengths=lengths))


def shared(q):
    return q[:, :, :, :]


REFUSED = [
    (shared, "out and q share memory"),
    (lambda q: q[..., :16], r"out is \[2, 4, 40, 16\] and o \[2, 4, 40, 32\]"),
    (lambda q: torch.empty_like(q, dtype=torch.float64), "out is torch.float64 on cpu and o torch.float32"),
    (lambda q: torch.empty(1, 4, 40, 32).expand(2, -1, -1, -1), r"out has strides \[0.*share memory"),
    (
        lambda q: torch.empty(9999).as_strided(q.shape, (4800, 1200, 16, 1)),
        r"out has strides .*, 16, 1\].*share memory",
    ),
    (lambda q: torch.empty(2, 4, 32, 40).transpose(2, 3), "out's last dimension is not contiguous"),
    (lambda q: 3, "out is a"),
    (lambda q: torch.empty_like(q).requires_grad_(), "a gradient is wanted"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(make, message):
    q, k, v = draw()
    with pytest.raises(LaunchError, match=message):
        fg.attention(q, k, v, causal, out=make(q))


def test_where_a_gradient_is_wanted():
    q, k, v = draw()
    out = torch.empty_like(q)
    leaf = q.clone().requires_grad_()
    with pytest.raises(LaunchError, match="a gradient is wanted, which needs a result of its own"):
        fg.attention(leaf, k, v, causal, out=out)
    with torch.no_grad():
        assert torch.equal(fg.attention(leaf, k, v, causal, out=out), fg.attention(q, k, v, causal))


def test_in_a_graph():
    given = draw()
    want, want_lse = fg.attention(*given, causal, return_lse=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, out):
        return fg.attention(q, k, v, causal, out=out, return_lse=True)

    out = torch.full_like(want, torch.nan)
    o, lse = call(*given, out)
    assert torch.equal(out, want) and torch.equal(o, want) and torch.equal(lse, want_lse)


@pytest.mark.sampled("sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_kernels_write_there(capability, monkeypatch):
    tensors = draw(torch.bfloat16)
    want = fg.attention(*tensors, causal)
    gpu = install(monkeypatch, capability)
    q, k, v = map(gpu.put, tensors)
    for place in places(want):
        out = gpu.put(place)
        for _ in range(2):  # a record, and then its use
            assert fg.attention(q, k, v, causal, out=out) is out
            got = out.as_subclass(torch.Tensor).float()
            torch.testing.assert_close(got, want.float(), rtol=0.03, atol=0.03)
    with pytest.raises(LaunchError, match="out and q share memory"):
        fg.attention(q, k, v, causal, out=q)


LEAF, TABLE = torch.zeros(2, 4, 40, 32, requires_grad=True), torch.zeros(4, 17, requires_grad=True)
WRONG = {
    "a gradient is wanted": lambda q, k, v, out: fg.attention(LEAF, k, v, causal, out=out),
    "a gradient is wanted, which": lambda q, k, v, out: fg.attention(q, k, v, relative_bias, table=TABLE, out=out),
    "scale is a str": lambda q, k, v, out: fg.attention(q, k, v, causal, scale="x", out=out),
    "'table' of 'relative_bias' is a list": lambda q, k, v, out: fg.attention(
        q, k, v, relative_bias, table=[], out=out
    ),
    "out is a int": lambda q, k, v, out: fg.attention(q, k, v, causal, out=5),
}


@pytest.mark.sampled("a gradient is wanted-aot_eager", "scale is a str-aot_eager", "out is a int-aot_eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("message", WRONG)
def test_a_compiled_call_that_is_wrong_is_refused(message, backend):
    """By an op that writes: a compiler leaves out one whose results nobody uses."""
    q, k, v = draw()
    out = torch.full_like(q, 7.0)
    with pytest.raises(LaunchError, match=message):
        torch.compile(WRONG[message], fullgraph=True, backend=backend)(q, k, v, out)
    assert (out == 7).all()


def test_what_a_mode_of_the_dispatcher_sees():
    q, k, v = draw()
    leaf, out = torch.ones_like(q, requires_grad=True), torch.ones_like(q)
    used = (leaf * out).sum()
    with FlopCounterMode(display=False):
        with pytest.raises(LaunchError, match="a gradient is wanted"):
            fg.attention(q, k, v, relative_bias, table=TABLE, out=out)
        fg.attention(q, k, v, causal, out=out)
    assert torch.equal(out, fg.attention(q, k, v, causal))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


def test_a_parameter_takes_a_result_where_no_gradient_is_wanted():
    q, k, v = draw()
    out = torch.nn.Parameter(torch.zeros_like(q))
    with torch.no_grad():
        assert torch.equal(fg.attention(q, k, v, causal, out=out), fg.attention(q, k, v, causal))
    with pytest.raises(LaunchError, match="a gradient is wanted"):
        fg.attention(q, k, v, causal, out=out)
    with torch.inference_mode():
        out = torch.empty_like(q)
        assert torch.equal(fg.attention(q, k, v, causal, out=out), fg.attention(q, k, v, causal))
    with pytest.raises(LaunchError, match=r"tensor of torch.inference_mode\(\)"):
        fg.attention(q, k, v, causal, out=out)
