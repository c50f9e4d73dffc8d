"""Type rules of operations: what their operands are cast to, and the type of their result."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.errors import SpecError
from flashgen.lang.expr import DType

BOOL, INT32, INT64, FLOAT32 = DType.BOOL, DType.INT32, DType.INT64, DType.FLOAT32

DTypes = tuple[DType, ...]


def names(dtypes: DTypes) -> str:
    return " and ".join(dtype.value for dtype in dtypes)


def common(dtypes: DTypes) -> DTypes:
    widest = FLOAT32 if FLOAT32 in dtypes else INT64 if INT64 in dtypes else INT32
    return (widest,) * len(dtypes)


def numbers(spelling: str, dtypes: DTypes) -> DTypes:
    if BOOL in dtypes:
        raise SpecError(
            f"`{spelling}` got {names(dtypes)}: a condition is not a number here; "
            "write fg.where(condition, 1, 0) or fg.int32(condition)"
        )
    return common(dtypes)


def floats(spelling: str, dtypes: DTypes) -> DTypes:
    numbers(spelling, dtypes)
    return (FLOAT32,) * len(dtypes)


def ints(spelling: str, dtypes: DTypes) -> DTypes:
    if FLOAT32 in dtypes:
        cure = {"x // y": "fg.floor(x / y)", "x % y": "x - y * fg.floor(x / y)"}.get(spelling, "fg.int32(x)")
        raise SpecError(f"`{spelling}` works on integers and got {names(dtypes)}; write {cure}")
    return numbers(spelling, dtypes)


def shifts(spelling: str, dtypes: DTypes) -> DTypes:
    ints(spelling, dtypes)
    return dtypes


def bools(spelling: str, dtypes: DTypes) -> DTypes:
    if any(dtype is not BOOL for dtype in dtypes):
        raise SpecError(
            f"`{spelling}` combines conditions and got {names(dtypes)}; "
            "put parentheses round each comparison: (k <= q) & (q - k < w)"
        )
    return dtypes


def alike(spelling: str, dtypes: DTypes) -> DTypes:
    return dtypes if set(dtypes) == {BOOL} else numbers(spelling, dtypes)


def choice(spelling: str, dtypes: DTypes) -> DTypes:
    if dtypes[0] is not BOOL:
        raise SpecError(f"the condition of fg.where is {dtypes[0].value}: compare it, as in fg.where(x != 0, a, b)")
    return (BOOL, *alike(spelling, dtypes[1:]))


def anything(spelling: str, dtypes: DTypes) -> DTypes:
    return dtypes


def always(dtype: DType) -> Callable[[DTypes], DType]:
    return lambda dtypes: dtype


def first(dtypes: DTypes) -> DType:
    return dtypes[0]


def last(dtypes: DTypes) -> DType:
    return dtypes[-1]
