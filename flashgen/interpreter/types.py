"""PTX scalar types as NumPy dtypes, and immediates in them."""

from __future__ import annotations

import numpy as np

#: PTX type -> NumPy dtype.  bf16 and 8-bit floats have none of their own: their bits travel.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "pred": np.bool_,
        "b8": np.uint8,
        "u8": np.uint8,
        "s8": np.int8,
        "b16": np.uint16,
        "u16": np.uint16,
        "s16": np.int16,
        "f16": np.float16,
        "bf16": np.uint16,
        "e4m3": np.uint8,
        "e5m2": np.uint8,
        "e4m3x2": np.uint16,
        "e5m2x2": np.uint16,
        "b32": np.uint32,
        "u32": np.uint32,
        "s32": np.int32,
        "f32": np.float32,
        "u16x2": np.uint32,
        "f16x2": np.uint32,
        "bf16x2": np.uint32,
        "b64": np.uint64,
        "u64": np.uint64,
        "s64": np.int64,
        "f64": np.float64,
    }.items()
}

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
SIGNED = frozenset({"s8", "s16", "s32", "s64"})
INTEGERS = frozenset({"s16", "s32", "s64", "u16", "u32", "u64"})


def size(ptx_type: str) -> int:
    """Bytes of one element of a PTX type."""
    return DTYPES[ptx_type].itemsize


def bits_of(dtype: np.dtype) -> np.dtype:
    """The unsigned dtype of the same width."""
    return np.dtype(f"u{dtype.itemsize}")


def constant(value: int | float, kind: str, dtype: np.dtype) -> np.generic:
    """An immediate as a NumPy scalar.

    `kind` is "int" (a value), "f32" or "f64" (a bit pattern, written 0f... or 0d...).
    """
    if dtype == np.bool_:
        return np.bool_(value)
    if kind == "int":
        if dtype.kind == "f":
            return dtype.type(value)
        return (np.uint64(int(value) & (1 << 64) - 1)).astype(bits_of(dtype)).view(dtype)
    pattern = np.uint32(value).view(np.float32) if kind == "f32" else np.uint64(value).view(np.float64)
    if dtype.kind == "f":
        return dtype.type(pattern)
    return pattern.view(bits_of(pattern.dtype)).astype(dtype)
