"""merge: attention over two key sets equals attention over their union."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import LaunchError
from flashgen.lang.load import load_spec
from flashgen.ops.attention import attention_varlen
from flashgen.ops.merge import merge


def attend(q, k, v, keep):
    s = (q @ k.transpose(-1, -2)).masked_fill(~keep, -math.inf)
    lse = torch.logsumexp(s, -1)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, lse


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), split=st.integers(0, 9), density=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_two_parts_make_the_whole(seed, split, density):
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, d, generator=random, dtype=torch.float64) for n, d in ((5, 8), (9, 8), (9, 4)))
    keep = torch.rand(2, 3, 5, 9, generator=random) < density
    parts = [attend(q, k[:, :, part], v[:, :, part], keep[..., part]) for part in (slice(split), slice(split, 9))]
    o, lse = merge(*parts[0], *parts[1])
    wanted_o, wanted_lse = attend(q, k, v, keep)
    torch.testing.assert_close(o, wanted_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)


def test_sequences_behind_each_other():
    """Two calls of `attention_varlen`, over the first keys of each sequence and over the others."""
    q, k, v = (torch.randn(n, 2, d, dtype=torch.float64) for n, d in ((7, 16), (14, 16), (14, 32)))
    full, of_q, of_k = load_spec("full"), torch.tensor([0, 3, 7]), torch.tensor([0, 5, 14])
    parts = []
    for rows in ([0, 1, *range(5, 9)], [2, 3, 4, *range(9, 14)]):
        keys = torch.tensor([0, sum(row < 5 for row in rows), len(rows)], dtype=torch.int32)
        bounds = {"max_seqlen_q": 4, "max_seqlen_k": 6}
        parts += attention_varlen(q, k[rows], v[rows], full, of_q.int(), keys, **bounds, return_lse=True)
    wanted = attention_varlen(q, k, v, full, of_q.int(), of_k.int(), max_seqlen_q=4, max_seqlen_k=9, return_lse=True)
    for mine, other in zip(merge(*parts), wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_rows_that_attend_to_nothing():
    o1 = torch.full((1, 1, 2, 4), math.nan)  # never read: its weight is 0
    o2 = torch.ones(1, 1, 2, 4)
    lse2 = torch.tensor([[[0.5, -math.inf]]])
    o, lse = merge(o1, torch.full((1, 1, 2), -math.inf), o2, lse2)
    assert torch.equal(o, torch.tensor([[[[1.0] * 4, [0.0] * 4]]]))
    assert torch.equal(lse, lse2)


def test_what_is_not_read_has_no_part_in_gradients():
    """NaN in a part of weight 0, in rows where the other part has all the weight and where neither has any."""
    nothing = -math.inf
    lse1 = torch.tensor([[[nothing, nothing, 0.5, -2e3]]], requires_grad=True)
    lse2 = torch.tensor([[[0.25, nothing, 0.5, 0.0]]], requires_grad=True)
    o1, o2 = torch.full((1, 1, 4, 2), math.nan), torch.ones(1, 1, 4, 2)
    o1[0, 0, 2], o2[0, 0, 1] = 3.0, math.nan
    o1.requires_grad_(), o2.requires_grad_()
    o, lse = merge(o1, lse1, o2, lse2)
    assert torch.equal(o[0, 0, :, 0], torch.tensor([1.0, 0.0, 2.0, 1.0]))
    (o.sum() + lse[..., [0, 2, 3]].sum()).backward()
    assert torch.equal(o1.grad[0, 0, :, 0], torch.tensor([0.0, 0.0, 0.5, 0.0]))
    assert torch.equal(o2.grad[0, 0, :, 0], torch.tensor([1.0, 0.0, 0.5, 1.0]))
    torch.testing.assert_close(lse1.grad, torch.tensor([[[0.0, 0.0, 0.5 + 2 * 0.5, 0.0]]]))
    torch.testing.assert_close(lse2.grad, torch.tensor([[[1.0, 0.0, 0.5 - 2 * 0.5, 1.0]]]))


def test_far_apart_sums_do_not_overflow():
    o, lse = merge(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), 3e4), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    assert torch.equal(o, torch.zeros(1, 1, 1, 2)) and lse.item() == 3e4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o_keeps_its_dtype_and_is_rounded_once(dtype):
    o1, o2 = torch.full((1, 1, 1, 8), 1.0, dtype=dtype), torch.full((1, 1, 1, 8), 2.0, dtype=dtype)
    o, lse = merge(o1, torch.zeros(1, 1, 1), o2, torch.full((1, 1, 1), math.log(2.0)))
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(o, torch.full_like(o, 5 / 3))


def test_gradients_with_empty_rows():
    o1, o2 = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse1 = torch.tensor([[[0.3, -math.inf, -math.inf]]], dtype=torch.float64, requires_grad=True)
    lse2 = torch.tensor([[[-0.2, 0.7, -math.inf]]], dtype=torch.float64, requires_grad=True)
    o, lse = merge(o1, lse1, o2, lse2)
    (o.sum() + lse[..., :2].sum()).backward()
    for tensor in (o1, o2, lse1, lse2):
        assert torch.isfinite(tensor.grad).all()
    assert torch.equal(o1.grad[..., 1:, :], torch.zeros(1, 1, 2, 2, dtype=torch.float64))
    finite = [t[..., :1, :] if t.dim() == 4 else t[..., :1] for t in (o1, lse1, o2, lse2)]
    torch.autograd.gradcheck(merge, [t.detach().clone().requires_grad_() for t in finite])


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_what_does_not_belong_together():
    strided = torch.nested.nested_tensor([torch.zeros(2, 3, 4)])
    o, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    for arguments, message in [
        ((o, lse, o[..., :2], lse), r"o1 is float32 \[1, 2, 3, 4\] and o2 float32 \[1, 2, 3, 2\]"),
        ((o, lse, o.half(), lse), r"of one dtype"),
        ((o, lse[:, :1], o, lse), r"lse1 is float32 \[1, 1, 3\] beside o1 float32 \[1, 2, 3, 4\]"),
        ((o, lse, o, lse.half()), r"lse2 is float16 .*return_lse=True"),
        ((o, lse, o, lse.double()), r"lse1 is float32 .* and lse2 float64 .*: both have one dtype"),
        ((o, lse, o.to("meta"), lse), r"o1 is on cpu and o2 on meta: move one to the other"),
        (
            (o.int(), lse, o.int(), lse),
            r"o1 and o2 are int32 .*: outputs of attention are float16.*\n  nearest: o1.float",
        ),
        ((o[0, 0], lse[0, 0], o[0, 0], lse[0, 0]), r"both are \[batch, heads, q_len, v_head_dim\], or \[total_q"),
        ((o[0], lse[0], o[0], lse[0]), r"lse1 .* it is \[heads, total_q\] in float32, as attention_varlen"),
        ((o, lse.int(), o, lse), r"lse1 is int32"),
        ((o, lse, None, lse), r"o2 is a NoneType, not a tensor"),
        ((strided, lse, strided, lse), r"o1 is nested with layout torch.strided: .*\n  nearest: layout=torch.jagged"),
        ((o, lse, o, strided), r"lse2 is nested with layout torch.strided"),
        ((o, lse, o.to_sparse(), lse), r"o2 is sparse_coo: .*\n  nearest: o2.to_dense"),
        ((o, lse.to_mkldnn(), o, lse.to_mkldnn()), r"lse1 is _mkldnn: .*\n  nearest: lse1.to_dense"),
    ]:
        with pytest.raises(LaunchError, match=message):
            merge(*arguments)
