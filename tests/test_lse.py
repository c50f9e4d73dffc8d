"""lse of a row, as both pipelines make it of the row's maximum and its sum."""

import numpy as np
import pytest

from flashgen import interpreter
from flashgen.codegen import device
from flashgen.runtime import nvrtc

KERNEL = """extern "C" __global__ void run(const float* row_max, const float* sum, float* lse) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  lse[i] = lse_of(row_max[i], sum[i]);
}
"""


def lse_of(row_max, sums):
    """By the device function, on the interpreter."""
    row_max, sums = (np.asarray(x, np.float32) for x in (row_max, sums))
    memory, found = interpreter.Memory(), np.zeros_like(sums)
    given = [memory.add("row_max", row_max), memory.add("sum", sums), memory.add("lse", found, writable=True)]
    source = device.used_by("DEVICE u32 u64 " + KERNEL) + "\n\n" + KERNEL
    module = interpreter.load(nvrtc.ptx(source, "sm_80"), target="sm_80")
    module.launch("run", len(sums) // 32, 32, 0, [address.to_bytes(8, "little") for address in given], memory)
    return found


@pytest.mark.parametrize("spread", [0.5, 4.0, 30.0, 3000.0])
def test_it_rounds_once(spread):
    """Half a unit of its last place, and what the logarithm of the sum's significand errs by."""
    rng = np.random.default_rng(0)
    row_max = rng.normal(0, spread, 4096).astype(np.float32)
    sums = np.exp2(rng.uniform(-1, 20, 4096)).astype(np.float32)
    right = row_max.astype(np.float64) * np.log(2) + np.log(sums.astype(np.float64))
    error = np.abs(lse_of(row_max, sums) - right)
    assert (error <= np.spacing(np.abs(right).astype(np.float32)) / 2 + 2.0**-23 + 3e-9 * np.abs(right)).all()


def test_what_is_not_finite():
    """A NaN or an infinity is not hidden, and the sum of one key gives that key's score."""
    inf, nan = np.inf, np.nan
    cases = [(1, inf, inf), (1, nan, nan), (nan, 3, nan), (-inf, inf, inf), (0, 1, 0), (0, 2, np.float32(np.log(2)))]
    cases += [(12.5, 1, np.float32(12.5 * np.log(2)))] * 26
    row_max, sums, right = zip(*cases, strict=True)
    np.testing.assert_array_equal(lse_of(row_max, sums), np.array(right, np.float32))
