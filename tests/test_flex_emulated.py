"""from_flex on an emulated GPU: the emitted kernel reads what the functions captured."""

import pytest
import torch
from emulated_gpu import install

import flashgen

LENGTH, DIM = 40, 16


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch, (8, 0))


def plain(x):
    return x.as_subclass(torch.Tensor)


def inputs(gpu):
    generator = torch.Generator().manual_seed(0)
    return [gpu.put(torch.randn(1, 2, LENGTH, DIM, generator=generator).to(torch.bfloat16)) for _ in range(3)]


def attention(q, k, v, keep, scores=lambda s: s):
    q, k, v = (plain(x).double() for x in (q, k, v))
    s = scores(q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(~keep, -torch.inf)
    return torch.where(keep.any(-1, keepdim=True), torch.softmax(s, -1), 0) @ v


@pytest.mark.slow
def test_a_kernel_reads_what_a_function_captured(gpu):
    generator = torch.Generator().manual_seed(1)
    ids, marks = (
        torch.randint(0, 3, (LENGTH,), generator=generator),
        torch.randint(0, LENGTH, (12,), generator=generator),
    )
    bias, cap = torch.randn(2, 2 * LENGTH, generator=generator), torch.tensor(1.5)
    on_gpu = [gpu.put(x) for x in (ids, marks, bias, cap)]

    def mods(ids, marks, bias, cap):
        def mask_mod(b, h, q_idx, kv_idx):
            return (ids[q_idx] == ids[-1 - kv_idx]) | (marks == kv_idx).any() | (q_idx == kv_idx)

        def score_mod(score, b, h, q_idx, kv_idx):
            return cap * torch.tanh((score + bias[h, q_idx - kv_idx]) / cap)

        return mask_mod, score_mod

    tensors = inputs(gpu)
    found = flashgen.attention(*tensors, flashgen.from_flex(*mods(*on_gpu)))
    at = torch.arange(LENGTH)
    keep = (ids[:, None] == ids.flip(0)) | torch.isin(at, marks) | (at[:, None] == at)
    wanted = attention(
        *tensors, keep, lambda s: cap * torch.tanh((s + bias[:, at[:, None] - at].double()) / cap.double())
    )
    torch.testing.assert_close(plain(found).double(), wanted, rtol=0.03, atol=0.03)
    assert len(gpu.launches) == 2  # extremes by tile, first
    with torch.no_grad():
        plain(on_gpu[0]).copy_(ids.roll(7))
    flashgen.attention(*tensors, flashgen.from_flex(*mods(*on_gpu)))
    assert len(gpu.plans) == 1 and len(gpu.launches) == 4
