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
