"""The highest score of a row in Hopper's softmax: found among integers, it is that of the floats; below 0 it is any of
them where no maximum is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashgen.codegen import device
from flashgen.planning.members import HighestAsFloat, HighestAsInteger, HighestBySigns, MaskedTilesApart, TilesAlike
from tests.ptx_attention import replace, work
from tests.ptx_kernels import launch

#: Each lane has 2 rows of COLUMNS / 2 elements; row and column as wgmma lays S out (`hopper_softmax.cuh`).
COLUMNS = 48

BY_SIGNS = HighestBySigns.find

KERNEL = """
extern "C" __global__ void k(const float* scores, float* out) {
  float s[COLUMNS];
  for (int i = 0; i < COLUMNS; i++) s[i] = scores[threadIdx.x * COLUMNS + i];
  float highest[2];
  FIND;
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
    """The kernel that finds highest scores by this call."""
    return whole(KERNEL.replace("COLUMNS", str(COLUMNS)).replace("FIND", find))


def whole(text: str) -> str:
    """A kernel behind the device functions that it uses."""
    return device.used_by("DEVICE u32 u64 " + text) + "\n\n" + text


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("find", [HighestAsInteger.find, HighestAsFloat.find, BY_SIGNS.replace("negative", "true")])
def test_the_highest_of_rows(find, name):
    scores = INPUTS[name](np.random.default_rng()).astype(np.float32)
    out = np.full(64, np.nan, np.float32)
    launch(source(find), {"scores": scores, "out": out}, arch="sm_90a")
    rows = scores.reshape(8, 4, COLUMNS // 4, 2, 2)  # quads, lanes of a quad, blocks of 8 columns, rows, elements
    expected = np.repeat(rows.max(axis=(1, 2, 4))[:, None], 4, axis=1)
    np.testing.assert_array_equal(out.reshape(8, 4, 2), expected)


@pytest.mark.parametrize("name", INPUTS)
def test_below_zero_any_score_will_do_where_no_maximum_is(name):
    scores = INPUTS[name](np.random.default_rng()).astype(np.float32)
    out = np.full(64, np.nan, np.float32)
    launch(source(BY_SIGNS.replace("negative", "false")), {"scores": scores, "out": out}, arch="sm_90a")
    rows = scores.reshape(8, 4, COLUMNS // 4, 2, 2)
    expected = np.repeat(rows.max(axis=(1, 2, 4))[:, None], 4, axis=1)
    found = out.reshape(8, 4, 2)
    np.testing.assert_array_equal(found[expected >= 0], expected[expected >= 0])
    assert np.all(found[expected < 0] <= expected[expected < 0])


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
extern "C" __global__ void k(const float* highest, float* out) {
  RowState state = nothing_seen();
  for (int i = 0; i < 2; i++) {
    const float both[2] = {highest[threadIdx.x], highest[threadIdx.x] + i};
    follow_beyond(state.row_max, both, 2.f, 6.f, 8.f, 8.5f);
    out[(threadIdx.x * 2 + i) * 2] = state.row_max[0];
    out[(threadIdx.x * 2 + i) * 2 + 1] = state.row_max[1];
  }
}
"""


def test_the_first_keys_of_a_row_leave_headroom_whenever_they_come():
    """P of the highest score is 2^6 then: one that is four times as high stays below 2^8.5."""
    highest, out = np.linspace(-5, 5, 32).astype(np.float32), np.full(128, np.nan, np.float32)
    launch(whole(FOLLOW), {"highest": highest, "out": out}, arch="sm_90a")
    first, second = out.reshape(32, 2, 2).transpose(1, 0, 2)
    np.testing.assert_allclose(first, np.stack([2 * highest - 6] * 2, 1), rtol=1e-6)
    np.testing.assert_array_equal(second, first)


#: Two tiles of queries by three of keys.
SHAPE = {"q_len": 200, "kv_len": 300, "head_dim": 128, "heads": 1, "kv_heads": 1, "tile": (128, 128)}

#: Wide enough for tiles of which the mask hides nothing.
SHAPES, PARAMS = {"sliding_window": {"q_len": 384, "kv_len": 384}}, {"sliding_window": {"window": 280}}


def falling(spec, **shape):
    """Every score is negative, and the first tiles that are visited, which are the last, have the lowest."""
    w = work(spec, "hopper", **{**SHAPE, **SHAPES.get(spec, {}), **shape})
    case = dataclasses.replace(w.case, params={**w.case.params, **PARAMS.get(spec, {})})
    q, k, v = w.qkv
    growth = torch.linspace(1, 30, k.shape[2], dtype=torch.float64)[:, None]
    return dataclasses.replace(w, case=case, qkv=(q.abs(), (-k.double().abs() * growth).to(k.dtype), v))


def run(w, edit=None):
    return w.run(edit, sms=1, step_limit=8_000_000)


@pytest.mark.sampled("bfloat16-alibi")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal", "sliding_window", "alibi"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bits_are_those_of_a_kernel_that_always_finds_the_highest(dtype, spec):
    w = falling(spec, dtype=dtype)
    chosen = w.plan.specialized
    assert isinstance(chosen.highest, HighestBySigns) and isinstance(chosen.full_tiles, MaskedTilesApart)
    found = run(w)
    assert w.wrong(found) == ()
    always = w.with_members(highest=HighestAsInteger(), full_tiles=TilesAlike())
    assert always.source != w.source
    expected = run(always)
    assert np.array_equal(found.o, expected.o) and np.array_equal(found.lse, expected.lse)


@pytest.mark.sampled("causal")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "causal"])
def test_maxima_below_zero_are_looked_for(spec):
    signs = "    negative = __any_sync(~0u, fminf(state.row_max[0], state.row_max[1]) < 0.f);\n"
    w = falling(spec)
    assert w.wrong(run(w, replace(signs, "    negative = false;\n")))
