"""Random specs against float64.  A failure is repeated by its test id: the number in it is the seed of everything."""

import pytest
import torch
from gpu_checks import DEVICE, check
from random_masks import random_mask, seeded

import flashgen as fg
from flashgen.errors import SpecError

pytestmark = pytest.mark.gpu

gain = fg.param("gain", default=0.5)
bias = fg.tensor("bias", dims=("heads", None), dtype="float32")
rate = fg.tensor("rate", dims=("batch", "heads"), dtype="bfloat16")


def random_score(source):
    """A score function of the grammar: scaled, shifted, capped, gated, read from captured tensors."""
    number = source.integer(1, 9)
    parts = [
        lambda s, b, h, q, k: s * gain,
        lambda s, b, h, q, k: s - gain * abs(q - k) / number,
        lambda s, b, h, q, k: number * fg.tanh(s / number),
        lambda s, b, h, q, k: fg.where((q + k) % (number + 1) == 0, s - 2.0, s),
        lambda s, b, h, q, k: s + bias[h, fg.clamp(q - k + 8, 0, 16)],
        lambda s, b, h, q, k: s + rate[b, h] * fg.sigmoid(s),
        lambda s, b, h, q, k: fg.maximum(s, -number * 0.5) + fg.log(1.0 + abs(k - q) * 0.125),
        lambda s, b, h, q, k: -s,
    ]
    chosen = [source.pick(parts) for _ in range(source.integer(1, 2))]

    def score(s, b, h, q, k):
        for apply in chosen:
            s = apply(s, b, h, q, k)
        return s

    return score


def random_spec(seed):
    """(variant, its captured tensors, parameters and shape), all drawn from a seed; None where the language refuses."""
    source = seeded(seed)
    variant = random_mask(source)
    if variant is None:
        return None
    if source.integer(0, 1):
        try:
            variant = variant.score(random_score(source))
        except SpecError:
            return None
    batch, kv_heads = source.integer(1, 3), source.pick([1, 2])
    heads = kv_heads * source.pick([1, 2, 3])
    kv_len = source.pick([5, 64, 129, 250, 511])
    q_len = source.integer(1, kv_len)
    random = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=random)

    every = {
        "ids": integers(0, 6, source.pick([1, batch]), kv_len).sort(1).values.int(),
        "mess": integers(0, 3, batch, kv_len).int(),
        "layout": torch.rand(source.integer(1, 140), source.integer(1, 140), generator=random) < 0.4,
        "lengths": integers(-2, kv_len + 2, batch),
        "reach": integers(0, 5, kv_len).int(),
        "tilt": torch.randn(heads, generator=random),
        "slopes": torch.randn(heads, generator=random),
        "bias": torch.randn(source.pick([1, heads]), 17, generator=random),
        "rate": torch.randn(batch, heads, generator=random).bfloat16(),
    }
    numbers = {
        "w": source.integer(1, 300),
        "c": source.integer(1, 40),
        "x": source.integer(-9, 300),
        "f": float(source.integer(-30, 90)),
        "gain": source.integer(-8, 8) / 8,
    }
    shape = {
        **{"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len},
        **{"head_dim": source.pick([32, 64, 80, 128]), "dtype": source.pick(["float16", "bfloat16"])},
    }
    captured = {t.name: every[t.name].to(DEVICE) for t in variant.tensors}
    return variant, captured, {p.name: numbers[p.name] for p in variant.params}, shape


@pytest.mark.parametrize("seed", range(60))
def test_random_spec(seed):
    drawn = random_spec(seed)
    if drawn is None:
        pytest.skip("the language refuses what this seed draws")
    variant, captured, params, shape = drawn
    check(variant, captured=captured, params=params, seed=seed, **shape)
    print(variant.mask, variant.score_node)
