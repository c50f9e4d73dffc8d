"""Zones and band counts: closed forms against counting pairs one by one."""

import numpy as np
import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.analysis import zones
from flashgen.analysis.floorsum import Band, BandTiles, band_tiles, floor_sum
from flashgen.analysis.zones import REACH, Bounds

bounded = settings(deadline=None, max_examples=300)
small = st.integers(-6, 14)


@st.composite
def bounds(draw):
    def low():
        return draw(st.one_of(st.just(-REACH), small))

    def high():
        return draw(st.one_of(st.just(REACH), small))

    return Bounds(q_lo=low(), q_hi=high(), k_lo=low(), k_hi=high(), d_lo=low(), d_hi=high())


def members(z, rows=12, columns=12):
    """The pairs of a zone inside [0, rows) x [0, columns), as a bool array."""
    q, k = np.ogrid[:rows, :columns]
    d = q - k
    inside = (z.q_lo <= q) & (q <= z.q_hi) & (z.k_lo <= k) & (k <= z.k_hi) & (z.d_lo <= d) & (d <= z.d_hi)
    return inside & np.ones((rows, columns), bool)


@pytest.mark.slow
@bounded
@given(bounds())
def test_a_zone_is_judged_spanned_and_counted_exactly(z):
    inside = members(z)
    clipped = z.within(0, 11, 0, 11)
    assert zones.nonempty(clipped) == inside.any()
    assert zones.pairs(clipped) == inside.sum()
    for span, axis in ((zones.key_span, 0), (zones.query_span, 1)):
        first, last = span(clipped)
        assert list(range(first, last + 1)) == np.flatnonzero(inside.any(axis=axis)).tolist()


def test_zones_are_judged_in_one_pass_over_arrays():
    window = np.array([1, 3, 100])
    z = Bounds(d_lo=0, d_hi=window - 1).within(0, 11, 0, 11)
    expected = [members(Bounds(d_lo=0, d_hi=int(n) - 1)).sum() for n in window]
    assert zones.pairs(z).tolist() == expected


@pytest.mark.slow
@bounded
@given(st.integers(0, 20), st.integers(1, 12), st.integers(-20, 20), st.integers(-40, 40))
def test_floor_sum(n, m, a, b):
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


def test_floor_sum_of_more_terms_than_could_be_added():
    n = 10**15
    assert floor_sum(n, 7, 7, 3) == n * (n - 1) // 2
    assert floor_sum(n, 2, 1, 0) == (n // 2) * (n // 2 - 1)


def brute(band, q_len, kv_len, tile_q, tile_kv):
    z = Bounds(**{name: getattr(band, name) for name in Band.__slots__})
    inside = members(z, q_len, kv_len)
    found = {"visited": 0, "full": 0, "rows": 0, "columns": 0, "elements": 0}
    for i in range(0, q_len, tile_q):
        visited_row = False
        for j in range(0, kv_len, tile_kv):
            block = inside[i : i + tile_q, j : j + tile_kv]
            if block.any():
                visited_row = True
                found["visited"] += 1
                found["columns"] += block.shape[1]
                found["elements"] += block.size
            found["full"] += int(block.all())
        found["rows"] += min(tile_q, q_len - i) * visited_row
    return BandTiles(**found)


@pytest.mark.slow
@bounded
@given(bounds(), st.integers(1, 30), st.integers(1, 30), st.integers(1, 7), st.integers(1, 7), st.booleans())
def test_band_tiles_count_as_brute_force_does(z, q_len, kv_len, tile_q, tile_kv, whole):
    box = (0, q_len - 1, 0, kv_len - 1) if whole else (z.q_lo, z.q_hi, z.k_lo, z.k_hi)
    band = Band(
        q_lo=max(0, box[0]),
        q_hi=min(q_len - 1, box[1]),
        k_lo=max(0, box[2]),
        k_hi=min(kv_len - 1, box[3]),
        d_lo=z.d_lo,
        d_hi=z.d_hi,
    )
    assert band_tiles(band, q_len, kv_len, tile_q, tile_kv) == brute(band, q_len, kv_len, tile_q, tile_kv)


@pytest.mark.parametrize("d_hi", [REACH, 4095, 100])
def test_a_band_of_sixteen_million_tokens_takes_no_loop(d_hi):
    n = (1 << 24) - 1

    def count(length):
        band = Band(q_lo=0, q_hi=length - 1, k_lo=0, k_hi=length - 1, d_lo=0, d_hi=d_hi)
        return band_tiles(band, length, length, 128, 64)

    few, many = effort(lambda: count(1 << 14)), effort(lambda: count(n))
    assert many.calls < 1.2 * few.calls and many.peak_bytes < 1 << 16
    found = count(n)
    assert found.rows == n and 0 < found.visited * 64 * 128 < 1.02 * (n + 256) * min(n / 2, d_hi + 256)
