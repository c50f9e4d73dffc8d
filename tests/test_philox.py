"""Dropout's random numbers: Philox as published, and a mask that depends on the place of a pair alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.runtime import reference
from flashgen.runtime.philox import Dropout, keep, philox

#: Random123's known answers for philox4x32 of 10 rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


def mask(dropout, batch=2, heads=3, q=range(40), k=range(50)):
    """[batch, heads, queries, keys]"""
    return keep(
        dropout,
        b=np.arange(batch)[:, None, None, None],
        h=np.arange(heads)[:, None, None],
        q=np.array(q)[:, None],
        k=np.array(k),
        heads=heads,
    )


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_vectors(counter, key, result):
    assert tuple(int(word) for word in philox(words(counter), words(key))) == words(result)


def test_the_counter_layout():
    seed, offset = 0x0123456789ABCDEF, 0x1111222233334444
    dropout = Dropout(p=0.3, seed=seed, offset=offset)
    drawn = philox((5, 7, 2 * 3 + 1, 0x33334444), (0x89ABCDEF, 0x01234567 ^ 0x11112222))
    for word in range(4):
        kept = keep(dropout, b=2, h=1, q=7, k=4 * 5 + word, heads=3)
        assert kept.item() == (int(drawn[word]) >= round(0.3 * 2**32))


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    q0=st.integers(0, 30),
    q1=st.integers(0, 10),
    k0=st.integers(0, 40),
    k1=st.integers(0, 10),
)
def test_a_tile_is_the_whole_mask_cut_out(seed, offset, q0, q1, k0, k1):
    dropout = Dropout(p=0.4, seed=seed, offset=offset)
    whole = mask(dropout)
    np.testing.assert_array_equal(
        mask(dropout, q=range(q0, q0 + q1), k=range(k0, k0 + k1)), whole[:, :, q0 : q0 + q1, k0 : k0 + k1]
    )


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9])
def test_rate(p):
    kept = mask(Dropout(p=p, seed=3, offset=4), batch=4, heads=8, q=range(128), k=range(256))
    n = kept.size
    assert abs(kept.mean() - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / n)
    if p == 0:
        assert kept.all()


def test_rows_columns_heads_batches_seeds_and_offsets_are_independent():
    """Correlations of a million pairs stay within five standard deviations of 0, and no two masks are one."""
    first = mask(Dropout(p=0.5, seed=3, offset=4), batch=4, heads=4, q=range(256), k=range(256)) - 0.5
    neighbours = [
        first[1:] * first[:-1],
        first[:, 1:] * first[:, :-1],
        first[:, :, 1:] * first[:, :, :-1],
        first[..., 1:] * first[..., :-1],
        first[..., 4:] * first[..., :-4],
        first * first.swapaxes(2, 3),
    ]
    for dropout in (Dropout(p=0.5, seed=4, offset=4), Dropout(p=0.5, seed=3, offset=5), Dropout(p=0.5, seed=3 + 2**40)):
        neighbours.append(first * (mask(dropout, batch=4, heads=4, q=range(256), k=range(256)) - 0.5))
    for product in neighbours:
        assert abs(4 * product.mean()) < 5 / math.sqrt(product.size)


def test_pairs_dropped_a_row_are_binomial():
    kept = mask(Dropout(p=0.25, seed=9), batch=2, heads=8, q=range(256), k=range(400)).sum(-1)
    assert kept.std() == pytest.approx(math.sqrt(400 * 0.25 * 0.75), rel=0.05)


def test_the_threshold_fits_a_word():
    assert Dropout(p=0.0, seed=0).threshold == 0
    assert Dropout(p=0.25, seed=0).threshold == 1 << 30
    assert Dropout(p=1 - 2**-40, seed=0).threshold == 2**32 - 1


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**64 - 1), offset=st.integers(0, 2**64 - 1), p=st.floats(0, 0.99))
def test_the_reference_draws_the_same(seed, offset, p):
    """It has an implementation of its own, in PyTorch."""
    dropout = Dropout(p=p, seed=seed, offset=offset)
    b, h, q, k = (torch.arange(n) for n in (2, 3, 40, 50))
    theirs = reference.kept(dropout, b[:, None, None, None], h[:, None, None], q[:, None], k, heads=3)
    np.testing.assert_array_equal(theirs.numpy(), mask(dropout))
