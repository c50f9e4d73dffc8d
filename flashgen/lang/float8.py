"""Floats of 8 bits in NumPy: e4m3 (largest 448, no infinity) and e5m2 (largest 57,344), by PyTorch's names."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

#: Bits of the mantissa, what is added to the exponent, and the code of the largest number.
_FORMS = {"float8_e4m3fn": (3, 7, 0x7E), "float8_e5m2": (2, 15, 0x7B)}

_NAN = 0x7F


@lru_cache
def _values(dtype: str) -> np.ndarray:
    """The number that each code from 0 to the largest stands for, ascending."""
    mantissa, bias, last = _FORMS[dtype]
    codes = np.arange(last + 1)
    exponent, fraction = codes >> mantissa, (codes & (1 << mantissa) - 1) / (1 << mantissa)
    return np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))


@lru_cache
def _decoded(dtype: str) -> np.ndarray:
    """float32 values of all 256 codes."""
    finite = _values(dtype)
    half = np.full(128, np.nan)
    half[: len(finite)] = finite
    if dtype == "float8_e5m2":
        half[len(finite)] = np.inf
    return np.concatenate([half, -half]).astype(np.float32)


def values(codes: np.ndarray, dtype: str) -> np.ndarray:
    """What 8-bit codes stand for, as float32."""
    return _decoded(dtype)[np.asarray(codes, np.uint8)]


def codes(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as 8-bit codes: to nearest even, the largest number for what lies beyond, a NaN for a NaN."""
    numbers = _values(dtype)
    between = (numbers[1:] + numbers[:-1]) / 2
    x = np.asarray(x)
    size = np.abs(x).astype(np.float64)
    found = np.searchsorted(between, size, side="left")
    halfway = between[np.minimum(found, len(between) - 1)] == size
    found = found + (halfway & (found % 2 == 1))
    return np.where(np.isnan(x), _NAN, found | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as an 8-bit type holds them, in the precision that they have."""
    return values(codes(x, dtype), dtype).astype(x.dtype)


def by_bits(logarithms: np.ndarray, bias: float) -> np.ndarray:
    """About 2 to the power of these, as e4m3 (8 (x + 7) rounded to a whole number is nearly its code), in the precision
    that they have; `bias` is added to the code."""
    with np.errstate(invalid="ignore"):
        code = np.clip(np.rint(8 * (logarithms + 7) + bias), 0, 0x7E)
    found = values(np.where(np.isnan(code), _NAN, code).astype(np.uint8), "float8_e4m3fn")
    return found.astype(logarithms.dtype)


def word_of(rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which of eight words of P in a register of Hopper a row and a key of a tile belong to."""
    return (2 * (keys // 16) + rows // 8 % 2) % 8


def taken_by_bits(rows: np.ndarray, keys: np.ndarray, words: int) -> np.ndarray:
    """Whether P of a row and a key of a tile is made by bits, where `words` of each eight are."""
    return word_of(rows, keys) * 5 % 8 < words
