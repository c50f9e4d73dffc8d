"""The highest score of a row in Hopper's softmax: found among integers, it is that of the floats."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.codegen import device
from flashgen.planning.members import HighestAsFloat, HighestAsInteger
from tests.ptx_kernels import launch

#: Each lane has 2 rows of COLUMNS / 2 elements; row and column as wgmma lays S out (`hopper_softmax.cuh`).
COLUMNS = 48

KERNEL = """
extern "C" __global__ void k(const float* scores, float* out) {
  float s[COLUMNS];
  for (int i = 0; i < COLUMNS; i++) s[i] = scores[threadIdx.x * COLUMNS + i];
  float highest[2];
  FIND(s, highest);
  out[threadIdx.x * 2] = highest[0];
  out[threadIdx.x * 2 + 1] = highest[1];
}
"""

INPUTS = {
    "both signs": lambda draw: draw.standard_normal(32 * COLUMNS),
    "negative": lambda draw: -np.exp(draw.standard_normal(32 * COLUMNS)),
    "positive": lambda draw: np.exp(draw.standard_normal(32 * COLUMNS)),
    "few positive": lambda draw: draw.standard_normal(32 * COLUMNS) - 2.5,
    "zeros of both signs": lambda draw: draw.choice([-0.0, 0.0, -1.0], 32 * COLUMNS),
    "hidden": lambda draw: np.where(draw.random(32 * COLUMNS) < 0.9, -np.inf, draw.standard_normal(32 * COLUMNS)),
    "all hidden": lambda draw: np.full(32 * COLUMNS, -np.inf),
    "subnormal and infinite": lambda draw: draw.choice([1e-40, -1e-40, -np.inf, np.inf], 32 * COLUMNS),
}


def source(find: str) -> str:
    text = KERNEL.replace("COLUMNS", str(COLUMNS)).replace("FIND", find)
    return device.used_by("DEVICE u32 u64 " + text) + "\n\n" + text


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("find", [member.find for member in (HighestAsInteger, HighestAsFloat)])
def test_the_highest_of_rows(find, name):
    scores = INPUTS[name](np.random.default_rng()).astype(np.float32)
    out = np.full(64, np.nan, np.float32)
    launch(source(find), {"scores": scores, "out": out}, arch="sm_90a")
    rows = scores.reshape(8, 4, COLUMNS // 4, 2, 2)  # quads, lanes of a quad, blocks of 8 columns, rows, elements
    expected = np.repeat(rows.max(axis=(1, 2, 4))[:, None], 4, axis=1)
    np.testing.assert_array_equal(out.reshape(8, 4, 2), expected)


def test_a_row_with_a_nan_leaves_others_alone():
    scores = np.random.default_rng().standard_normal((8, 4, COLUMNS // 4, 2, 2)).astype(np.float32)
    scores[3, 1, 2, 0, 1] = np.nan
    out = np.full(64, 7, np.float32)
    launch(source(HighestAsInteger.find), {"scores": scores.reshape(-1), "out": out}, arch="sm_90a")
    expected = np.repeat(np.nanmax(scores, axis=(1, 2, 4))[:, None], 4, axis=1)
    found = out.reshape(8, 4, 2)
    found[3, :, 0], expected[3, :, 0] = 0, 0
    np.testing.assert_array_equal(found, expected)


def test_the_first_look_alone_would_be_wrong():
    """Without the second one the highest of negative scores is the lowest."""
    text = source(HighestAsInteger.find)
    broken = text.replace("bits[r] < 0 ? lowest_bits(s, r) : bits[r]", "bits[r]")
    assert broken != text
    scores = -np.exp(np.random.default_rng().standard_normal(32 * COLUMNS)).astype(np.float32)
    out = np.full(64, np.nan, np.float32)
    launch(broken, {"scores": scores, "out": out}, arch="sm_90a")
    rows = scores.reshape(8, 4, COLUMNS // 4, 2, 2)
    assert not np.array_equal(out.reshape(8, 4, 2)[:, 0], rows.max(axis=(1, 2, 4)))


FOLLOW = """
extern "C" __global__ void k(const float* found, const float* before, const float* limits, float* rows, float* factors,
                             float* said) {
  float row_max[2], limit[2], highest[2], factor[2];
  for (int r = 0; r < 2; r++) {
    highest[r] = found[threadIdx.x * 2 + r];
    row_max[r] = before[threadIdx.x * 2 + r];
    limit[r] = limits[threadIdx.x * 2 + r];
  }
  said[threadIdx.x] = follow(row_max, highest, 0.25f, limit, factor);
  for (int r = 0; r < 2; r++) {
    rows[threadIdx.x * 2 + r] = row_max[r];
    factors[threadIdx.x * 2 + r] = factor[r];
  }
}
"""


def follow(found, before, limits):
    """(maxima afterwards, factors, what each lane says) of 64 rows, two a lane."""
    given = {"found": found, "before": before, "limits": limits}
    made = {"rows": np.zeros(64), "factors": np.zeros(64), "said": np.zeros(32)}
    given, made = ({name: x.astype(np.float32) for name, x in some.items()} for some in (given, made))
    text = device.used_by("DEVICE u32 u64 " + FOLLOW) + "\n\n" + FOLLOW
    launch(text, given | made, arch="sm_90a", writable=" ".join(made))
    return made["rows"], made["factors"], made["said"]


def test_a_row_follows_a_key_beyond_its_limit_and_is_multiplied_by_what_that_takes():
    """As far as the new maximum is above the old one, both rounded: o and lse then say of one maximum."""
    rng = np.random.default_rng()
    before, limits = (rng.normal(0, 40, 64).astype(np.float32), np.exp2(rng.integers(0, 20, 64)).astype(np.float32))
    away = np.where(rng.random(64) < 0.5, rng.uniform(0.01, 9, 64), rng.uniform(-9, -0.01, 64))
    found = (4 * (before + np.log2(limits) + away)).astype(np.float32)
    rows, factors, said = follow(found, before, limits)
    moves = away > 0
    np.testing.assert_array_equal(rows, np.where(moves, found * np.float32(0.25), before))
    np.testing.assert_allclose(factors, np.exp2((before - rows).astype(np.float64)), rtol=2e-7)
    assert (factors[~moves] == 1).all()
    np.testing.assert_array_equal(said, moves.reshape(32, 2).any(axis=1))


def test_what_a_row_follows_at_the_edges():
    """The first key clears O, a row whose keys are all hidden has seen nothing still, and a NaN moves nothing."""
    nothing = np.float32(-3e38)
    cases = [  # found, before, limit; maximum, factor
        (8.0, nothing, 2.0**64, 2.0, 0.0),
        (-8.0, nothing, 2.0**15, -2.0, 0.0),
        (-np.inf, nothing, 2.0**64, nothing, 1.0),
        (-np.inf, 5.0, 1.0, 5.0, 1.0),
        (np.nan, 5.0, 1.0, 5.0, 1.0),
        (20.0, 5.0, 1.0, 5.0, 1.0),  # as high as the maximum
        (4 * 69.0, 5.0, 2.0**64, 5.0, 1.0),  # just within
        (4 * 1000.0, 5.0, 2.0**64, 1000.0, 0.0),
    ]
    found, before, limits, rows, factors = np.array(cases * 8, np.float32).T
    got = follow(found, before, limits)
    np.testing.assert_array_equal(got[0], rows)
    np.testing.assert_array_equal(got[1], factors)
