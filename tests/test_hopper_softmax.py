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


#: A look at a tile as `forward_p_lagging` takes it: what lanes have highest, whether rows are looked at, and then.
LOOK = """
extern "C" __global__ void k(const float* scores, const float* before, const float* reaches, float* lanes, float* rows,
                             float* looked) {
  float s[COLUMNS], row_max[2], reach[2], highest[2];
  for (int i = 0; i < COLUMNS; i++) s[i] = scores[threadIdx.x * COLUMNS + i];
  for (int r = 0; r < 2; r++) {
    row_max[r] = before[threadIdx.x * 2 + r];
    reach[r] = reaches[threadIdx.x * 2 + r];
  }
  const int found[2] = {highest_or_zero(s, 0), highest_or_zero(s, 1)};
  const u32 called = __ballot_sync(~0u, may_follow(found, row_max, 0.25f, reach));
  SETTLE(s, found, highest);
  if (called) looked[threadIdx.x] = follow(highest, row_max, 0.25f, reach);
  else looked[threadIdx.x] = 2.f;
  for (int r = 0; r < 2; r++) {
    lanes[threadIdx.x * 2 + r] = highest[r];
    rows[threadIdx.x * 2 + r] = row_max[r];
  }
}
"""


def look(settle, scores, before, reaches):
    """(highest of lanes, maxima of rows afterwards, what each lane says of moves; None: not looked at)."""
    text = LOOK.replace("COLUMNS", str(COLUMNS)).replace("SETTLE", settle)
    text = device.used_by("DEVICE u32 u64 " + text) + "\n\n" + text
    lanes, rows, looked = np.zeros(64, np.float32), np.zeros(64, np.float32), np.zeros(32, np.float32)
    given = {"scores": scores, "before": before, "reaches": reaches}
    written = {"lanes": lanes, "rows": rows, "looked": looked}
    launch(text, given | written, arch="sm_90a", writable=" ".join(written))
    return lanes, rows, None if looked[0] == 2 else looked


@pytest.mark.parametrize("name", [name for name in INPUTS if not name.startswith("subnormal")])
@pytest.mark.parametrize("settle", [member.settle for member in (HighestAsInteger, HighestAsFloat)])
def test_a_row_follows_what_is_out_of_its_own_reach(settle, name):
    """Whatever the other rows of the warp do, and whether scores are above 0 or not."""
    rng = np.random.default_rng()
    scores = INPUTS[name](rng).astype(np.float32)
    of_lanes = scores.reshape(32, COLUMNS // 4, 2, 2).max(axis=(1, 3))
    of_rows = np.repeat(of_lanes.reshape(8, 4, 2).max(axis=1)[:, None], 4, axis=1).reshape(64)
    finite = np.where(np.isinf(of_rows), 0, of_rows)
    for gap in (-1.0, 1.0, 0.0):  # all rows follow, none does, some do
        spread = np.repeat(rng.normal(0, 1 if gap == 0 else 0.25, (8, 1, 2)), 4, axis=1).reshape(64)
        reaches = np.repeat(rng.integers(0, 3, (8, 1, 2)), 4, axis=1).reshape(64).astype(np.float32)
        before = (finite * 0.25 + gap + spread * 0.5 - reaches).astype(np.float32)
        out = of_rows.astype(np.float64) * 0.25 - before > reaches
        lanes, rows, looked = look(settle, scores, before, reaches)
        np.testing.assert_array_equal(lanes.reshape(32, 2), of_lanes)
        assert looked is not None or not out.any()
        np.testing.assert_array_equal(rows, np.where(out, of_rows * np.float32(0.25), before))
        if looked is not None:
            np.testing.assert_array_equal(looked, out.reshape(32, 2).any(axis=1))


def test_rows_within_reach_are_not_looked_at():
    scores = np.random.default_rng().standard_normal(32 * COLUMNS).astype(np.float32)
    before, reaches = np.full(64, 2, np.float32), np.zeros(64, np.float32)
    assert look(HighestAsInteger.settle, scores, before, reaches)[2] is None
    scores[5] = 9
    assert look(HighestAsInteger.settle, scores, before, reaches)[2] is not None


@pytest.mark.parametrize(("total", "reach"), [(0, 0), (1, 0), (16, 0), (64, 2), (2.0**40, 15), (np.inf, 15)])
def test_how_far_a_row_reaches(total, reach):
    """A sixteenth of what its four lanes have added up; 1 at least."""
    kernel = """
extern "C" __global__ void k(const float* sums, float* out) {
  out[threadIdx.x] = lag_reach(sums[threadIdx.x], -4.f, 15.f);
}
"""
    sums, out = np.full(32, total / 4, np.float32), np.zeros(32, np.float32)
    launch(device.used_by("DEVICE u32 u64 " + kernel) + "\n\n" + kernel, {"sums": sums, "out": out}, arch="sm_90a")
    np.testing.assert_array_equal(out, np.float32(reach))
