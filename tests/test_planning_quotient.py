"""Quotients by a product and a shift are those of a division."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from flashgen.planning.quotient import divisor

_MOST = (1 << 31) - 1


@given(st.integers(1, _MOST), st.integers(0, _MOST))
@example(1, _MOST)
@example(_MOST, _MOST)
@example((1 << 30) + 1, _MOST)
@example(7, _MOST)
def test_quotients_are_exact(by, n):
    found = divisor(by)
    factor, shift = found & 0xFFFFFFFF, found >> 32
    for k in (n, n // by * by, max(n // by * by - 1, 0)):
        assert k * factor >> shift == k // by
    assert 0 < factor < 1 << 32
    assert factor * _MOST < 1 << 64


def test_quotients_by_small_numbers_are_exact_up_to_the_largest():
    n = np.concatenate([np.arange(5000), _MOST - np.arange(5000)]).astype(np.uint64)
    for by in range(1, 3000):
        found = divisor(by)
        factor, shift = np.uint64(found & 0xFFFFFFFF), np.uint64(found >> 32)
        assert np.array_equal(n * factor >> shift, n // np.uint64(by)), by
