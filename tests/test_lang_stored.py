"""What captured tensors hold: rounding to the stored type, and the check of what their declarations promise."""

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen.lang.expr import Tensor
from flashgen.lang.ranges import stored
from flashgen.lang.stored import LARGEST, broken_promise, held

NAN, INF = float("nan"), float("inf")


def broken(values, dtype="float32", **promises):
    declared = Tensor(name="t", dims=(None,), dtype=dtype, **promises)
    return broken_promise(declared, np.array(values, None if dtype.startswith("int") else np.float32))


@pytest.mark.parametrize(
    ("promises", "values", "said"),
    [
        ({"sorted": True}, [5, NAN, 1, 2], "sorted=True and holds nan at [1]"),
        ({"sorted": True}, [NAN], "sorted=True and holds nan at [0]"),
        ({"sorted": True}, [[1, 2], [3, NAN]], "sorted=True and holds nan at [1, 1]"),
        ({"sorted": True}, [[1, 2], [3, 2.5]], "sorted=True and decreases at [1, 1], from 3.0 to 2.5"),
        ({"min": 0.0}, [NAN, -5, 2, 3], "min=0.0 and holds nan at [0]"),
        ({"min": 0.0}, [2, -1, -5, 2], "min=0.0 and holds -5.0 at [2]"),
        ({"min": 0.0}, [2, -5, 2, NAN], "min=0.0 and holds nan at [3]"),
        ({"max": 0.0}, [-1, NAN], "max=0.0 and holds nan at [1]"),
        ({"max": INF}, [NAN], "max=inf and holds nan at [0]"),
        ({"min": 1.0, "max": 2.0}, [0, 3], "min=1.0 and holds 0.0 at [0] and with max=2.0 and holds 3.0 at [1]"),
    ],
)
def test_a_promise_is_about_every_element(promises, values, said):
    assert broken(values, **promises) == f"is declared with {said}"


def test_promises_that_are_kept():
    assert broken([], min=1.0, sorted=True) is None
    assert broken([NAN, 2.0]) is None
    assert broken([-INF, 1, 1, INF], sorted=True, min=-INF, max=INF) is None
    assert broken([[3, 4], [1, 2]], "int32", sorted=True, min=1, max=4) is None
    ends = [-(1 << 63), (1 << 63) - 1]
    assert broken(ends, "int64", sorted=True, min=ends[0], max=ends[1]) is None
    assert broken(ends, "int64", min=ends[0] + 1) == f"is declared with min={ends[0] + 1} and holds {ends[0]} at [0]"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bound", [0.1, -0.1, 1 / 3, 1e-3, 1.0001, 65503.0])
def test_a_bound_is_that_of_the_stored_type(dtype, bound):
    """The element nearest to `min` keeps it, whichever way it was rounded, and so does the one nearest to `max`."""
    t = fg.tensor("t", dims=("kv",), dtype=dtype, min=bound, max=bound)
    declared = fg.variant(lambda b, h, q, k: t[k] > 0.5).bind().tensors[0]
    element = torch.tensor([bound]).to(getattr(torch, dtype))
    for array in (element.float().numpy(), *([element.numpy()] if dtype != "bfloat16" else [])):
        assert broken_promise(declared, array) is None
        known = stored(declared)
        assert known.lo <= float(array[0]) <= known.hi
        below = np.nextafter(array, array.dtype.type(-np.inf))
        if array.dtype.name == dtype:
            assert "min=" in broken_promise(declared, below)


def test_the_largest_of_each_type():
    for dtype, largest in LARGEST.items():
        assert torch.finfo(getattr(torch, dtype)).max == largest == held(largest, dtype)
