"""Random specs on a GPU, forward and backward, against the evaluator of `tests/fuzz`; `python -m tests.fuzz gpu`."""

import os

import pytest
import torch
from fuzz.engine import search, try_one
from fuzz.judges import JUDGES

import flashgen as fg

pytestmark = pytest.mark.gpu

SEED = int(os.environ["FLASHGEN_FUZZ_SEED"])


def test_random_specs():
    """As many processes as help: each generates, compiles and judges by itself."""
    tally = search(JUDGES["gpu"], SEED, count=240, jobs=min(12, os.cpu_count() or 1))
    print(tally)
    for failure in tally.failures.values():
        small = try_one(JUDGES["gpu"], SEED, int(failure.repro.rsplit(" ", 1)[1]), shrink=60.0)
        pytest.fail(str(next(iter(small.failures.values()), failure)), pytrace=False)
    assert tally.outcomes["held"] >= 0.6 * tally.tried, (tally, tally.reasons)


def test_a_64_bit_shift_by_31():
    """ptxas 13.0 makes a product with -2^31 of it, unless it is kept from that: every key but the first was hidden."""
    large = fg.param("large", dtype="int64")
    variant = fg.variant(lambda b, h, q, k: fg.minimum(q % 1073741825, large << 31) > q - k)
    q, k, v = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for n in (300, 64, 64))
    o = fg.attention(q, k, v, variant, large=2147483649)
    right = fg.attention(q, k[:, :, 1:], v[:, :, 1:], fg.variant())
    torch.testing.assert_close(o, right, rtol=2**-6, atol=2**-7)
