"""Scores that read rows of keys, and scores that are large, on a GPU."""

import pytest
import torch

import flashgen as fg

pytestmark = pytest.mark.gpu

of_all = fg.tensor("of_all", dims=("batch", "heads", "q", "kv"), dtype="bfloat16")
of_pairs = fg.tensor("of_pairs", dims=("q", "kv"), dtype="float32")
OF_ALL = fg.variant(score=lambda s, b, h, q, k: s + of_all[b, h, q, k], name="of_all")
OF_PAIRS = fg.variant(score=lambda s, b, h, q, k: s + of_pairs[q, k], name="of_pairs")


def right(q, k, v, bias):
    q, k, v = (x.double() for x in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), v))
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return ((q @ k.mT) * q.shape[-1] ** -0.5 + bias.double()).softmax(-1) @ v


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_len", [1000, 1001, 1024])
def test_rows_of_keys(head_dim, kv_len):
    q = torch.randn(2, 4, 700, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, kv_len, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for variant, bias in (
        (OF_ALL, torch.randn(2, 4, 700, kv_len, device="cuda", dtype=torch.bfloat16)),
        (OF_PAIRS, torch.randn(700, kv_len, device="cuda")),
        (OF_PAIRS, torch.randn(kv_len, 700, device="cuda").mT),
        (OF_PAIRS, torch.randn(700, kv_len + 1, device="cuda")[:, 1:]),
    ):
        o = fg.attention(q, k, v, variant, **{variant.tensors[0].name: bias})
        torch.testing.assert_close(o.double(), right(q, k, v, bias), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("large", [-1e9, -1e10, -1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_bias_hides_keys(dtype, large):
    q, k, v = (torch.randn(1, 2, 900, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.where(torch.ones(900, 900, device="cuda").tril().bool(), 0.0, large)
    causal = fg.load_spec("causal")
    found = fg.attention(q, k, v, OF_PAIRS, of_pairs=bias)
    expected = fg.attention(q, k, v, causal)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    do = torch.randn_like(found)
    pairs = (torch.autograd.grad(o, (q, k, v), do) for o in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
