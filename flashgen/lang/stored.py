"""What captured tensors hold: numbers as their stored type rounds them, and what their declarations promise."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import numpy as np

from flashgen.lang import float8
from flashgen.lang.expr import TENSOR_DTYPES, Tensor

#: The largest finite number of each stored float type.
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120, "float32": 2.0**128 - 2.0**104}


def rounded(p: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as a type of 8 or 16 bits would hold them, to nearest even; wider types keep them as they are."""
    if dtype.startswith("float8"):
        return float8.rounded(p, dtype)
    if dtype == "float16":
        return p.astype(np.float16).astype(p.dtype)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(p).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # A NaN's payload would overflow into infinity: keep it as it is.
        return np.where(np.isnan(p), p, (rounded & np.uint32(0xFFFF0000)).view(np.float32))
    return p


def exceeds(value: float, dtype: str) -> bool:
    """Whether a number is finite and larger than a stored float type holds."""
    return LARGEST[dtype] < abs(value) < math.inf


def held(value: float, dtype: str) -> float:
    """A float that is infinite or no larger than LARGEST, as a stored float type holds it."""
    return float(rounded(np.full(1, value, np.float32), dtype)[0])


def broken_promise(declared: Tensor, array: np.ndarray) -> str | None:
    """What a declaration promises of a captured tensor's values and they do not hold; None: they hold everything.

    Tiles are judged by these promises, and a kernel relies on them unchecked.  Each is about every element, so a NaN
    breaks it.
    """
    return f"is declared with {' and with '.join(broken)}" if (broken := list(_broken(declared, array))) else None


def _broken(declared: Tensor, array: np.ndarray) -> Iterator[str]:
    if not array.size:
        return
    for promise, value, worst, keeps in (
        ("min", declared.min, np.argmin, operator.ge),
        ("max", declared.max, np.argmax, operator.le),
    ):
        if value is not None:
            at = _position(worst(array), array)  # of a NaN, where there is one
            if not keeps(array[at].item(), value):
                yield f"{promise}={_shown(value)} and holds {_shown(array[at])} at {list(at)}"
    if declared.sorted:
        if TENSOR_DTYPES[declared.dtype].is_float and (at := _first(np.isnan(array))) is not None:
            yield f"sorted=True and holds nan at {list(at)}"
        elif (at := _first(array[..., 1:] < array[..., :-1])) is not None:
            *row, i = at
            before, after = array[(*row, i)], array[(*row, i + 1)]
            yield f"sorted=True and decreases at {[*row, i + 1]}, from {_shown(before)} to {_shown(after)}"


def _first(wrong: np.ndarray) -> tuple[int, ...] | None:
    """The position of the first element that is wrong."""
    return _position(wrong.argmax(), wrong) if wrong.any() else None


def _position(flat: int, array: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(flat, array.shape)))


def _shown(value: object) -> str:
    """A number in words: a float without the digits that only its rounding added."""
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}" if math.isfinite(value) and not float(value).is_integer() else str(value)
    return str(value)
