"""Tiles of queries in an order that a kernel finds, and masks in words: against calls without an order, and float64."""

import math

import pytest
import torch
from gpu_checks import DEVICE

import flashgen
from flashgen.planning import order
from flashgen.planning.members import MaskInWords

pytestmark = pytest.mark.gpu

LENGTH, HEADS = 2048, 8  # 128 tiles of queries a sequence: one has an order with others alone, on 132 SMs


def flags(flag, _):
    return lambda b, h, q, k: (abs(q - k) <= 100) | flag[b, q] | flag[b, k]


def of_heads(flag, _):
    return lambda b, h, q, k: (k <= q) & (flag[b, (k + h) % LENGTH] | (q - k < 64))


def permuted(_, position):
    return lambda b, h, q, k: position[k] <= position[q]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("of", [flags, of_heads, permuted])
def test_an_order_changes_no_bit(monkeypatch, of, head_dim):
    monkeypatch.setattr(order, "LEAST_TILES", 1)
    generator = torch.Generator(DEVICE).manual_seed(head_dim)
    q, k, v = (
        torch.randn(2, HEADS, LENGTH, head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    flag = torch.rand(2, LENGTH, device=DEVICE, generator=generator) < 0.003
    position = torch.randperm(LENGTH, device=DEVICE, generator=generator).int()
    variant = flashgen.from_flex(of(flag, position))
    together = flashgen.attention(q, k, v, variant)
    places = torch.arange(LENGTH, device=DEVICE)
    rows = torch.randint(LENGTH, (50,), device=DEVICE, generator=generator)
    for b in range(2):
        alone = flashgen.attention(
            *(x[b : b + 1] for x in (q, k, v)), flashgen.from_flex(of(flag[b : b + 1], position)), kv_splits=1
        )
        assert torch.equal(together[b : b + 1], alone)
        for h in (0, HEADS - 1):
            keep = of(flag, position)(b, h, rows[:, None], places)
            s = (q[b, h, rows].double() @ k[b, h].double().T / math.sqrt(head_dim)).masked_fill(~keep, -torch.inf)
            wanted = torch.where(keep.any(-1, keepdim=True), s.softmax(-1), 0.0) @ v[b, h].double()
            torch.testing.assert_close(together[b, h, rows].double(), wanted, rtol=0.02, atol=0.02)


def test_its_plan_has_words_and_an_order():
    flag = torch.zeros(2, 64, dtype=torch.bool, device=DEVICE)
    plan = flashgen.plan(flashgen.from_flex(flags(flag, None)), batch=2, heads=8, seqlen=2048, arch="sm_90a")
    assert plan.ordered and isinstance(plan.specialized.mask, MaskInWords)
