"""Abstract values: what a set of positions lets an expression be.

A `Range` is a closed interval of integers or floats, a `Truth` says which of true and false a condition may take.  Both
hold NumPy arrays and broadcast, so that one pass judges many tiles.  Every rule is sound: whatever the concrete
operation gives for operands inside their ranges lies inside the result.  Integer rules keep single points exact; float
rules round their bounds outward to float32, which covers float32 and float64 evaluation, fused multiply-adds and
flushed denormals, and the approximate functions widen by more than the hardware's error.

Integers are exact as in int64; a result that may leave int64 is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flashgen.lang.expr import TENSOR_DTYPES, DType, Tensor

#: Lengths, batches and heads stay below this, so that index arithmetic in int32 and positions in float32 are exact.
MAX_LENGTH = 1 << 24

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

#: Integer bounds whose float64 estimate passes this may have left int64.
_INT64_SAFE = float(1 << 62)
_WAVES = 2.0**24  # sine and cosine of anything larger may be any of their values
_TINY = 2.0**-126  # smallest normal float32: anything nearer to zero may be flushed


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """`lo <= x <= hi`, both ends included; int64 arrays, or float64 arrays of float32 values where `nan` may join."""

    lo: np.ndarray
    hi: np.ndarray
    nan: np.ndarray = field(default_factory=lambda: np.False_)

    @property
    def is_float(self) -> bool:
        return self.lo.dtype.kind == "f"

    @property
    def single(self) -> np.ndarray:
        """True where exactly one value is possible."""
        return (self.lo == self.hi) & ~self.nan

    def contains(self, value: int | float) -> np.ndarray:
        return (self.lo <= value) & (self.hi >= value)


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Which of the two truth values are possible."""

    may_true: np.ndarray
    may_false: np.ndarray

    @property
    def never(self) -> np.ndarray:
        return ~self.may_true


Abstract = Range | Truth


def ints(lo: object, hi: object | None = None) -> Range:
    """The integers from `lo` to `hi` (`hi` left out: `lo` alone)."""
    lo = np.asarray(lo, np.int64)
    return Range(lo, lo if hi is None else np.asarray(hi, np.int64))


def floats(lo: object, hi: object | None = None, nan: object = False) -> Range:
    """The floats from `lo` to `hi`, rounded outward to float32."""
    lo = np.asarray(lo, np.float64)
    return _outward(lo, lo if hi is None else np.asarray(hi, np.float64), np.asarray(nan))


def truth(value: object) -> Truth:
    """The truth of a known condition."""
    value = np.asarray(value, np.bool_)
    return Truth(value, ~value)


def constant(value: bool | int | float, dtype: DType) -> Abstract:
    """A single value of the given type."""
    if dtype is DType.BOOL:
        return truth(value)
    return ints(value) if dtype.is_int else floats(value)


def unknown(dtype: DType) -> Abstract:
    """Everything a type can hold."""
    if dtype is DType.BOOL:
        return Truth(np.True_, np.True_)
    if dtype is DType.INT32:
        return ints(INT32_MIN, INT32_MAX)
    if dtype is DType.INT64:
        return ints(INT64_MIN, INT64_MAX)
    return floats(-np.inf, np.inf, True)


def stored(tensor: Tensor) -> Abstract:
    """What an element of a captured tensor may be, from its declared bounds and its stored type."""
    dtype = TENSOR_DTYPES[tensor.dtype]
    if dtype is DType.BOOL:
        return unknown(dtype)
    if dtype.is_float:
        low = -np.inf if tensor.min is None else tensor.min
        high = np.inf if tensor.max is None else tensor.max
        ordered = tensor.sorted or (tensor.min is not None and tensor.max is not None)
        return floats(low, high, not ordered)  # one bound alone is kept by a NaN in one way of comparing with it
    info = np.iinfo(tensor.dtype)
    return ints(info.min if tensor.min is None else tensor.min, info.max if tensor.max is None else tensor.max)


def hull(a: Abstract, b: Abstract) -> Abstract:
    """The smallest value that holds both."""
    if isinstance(a, Truth):
        return Truth(a.may_true | b.may_true, a.may_false | b.may_false)
    return Range(np.minimum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.nan | b.nan)


# ---------------------------------------------------------------------------------------------------------------------
# Conditions


def eq(a: Abstract, b: Abstract) -> Truth:
    if isinstance(a, Truth):
        return logical_not(logical_xor(a, b))
    meet = (a.lo <= b.hi) & (b.lo <= a.hi)
    return Truth(meet, ~((a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)) | a.nan | b.nan)


def ne(a: Abstract, b: Abstract) -> Truth:
    return logical_not(eq(a, b))


def lt(a: Range, b: Range) -> Truth:
    return Truth(a.lo < b.hi, (a.hi >= b.lo) | a.nan | b.nan)


def le(a: Range, b: Range) -> Truth:
    return Truth(a.lo <= b.hi, (a.hi > b.lo) | a.nan | b.nan)


def gt(a: Range, b: Range) -> Truth:
    return lt(b, a)


def ge(a: Range, b: Range) -> Truth:
    return le(b, a)


def logical_and(a: Truth, b: Truth) -> Truth:
    return Truth(a.may_true & b.may_true, a.may_false | b.may_false)


def logical_or(a: Truth, b: Truth) -> Truth:
    return Truth(a.may_true | b.may_true, a.may_false & b.may_false)


def logical_xor(a: Truth, b: Truth) -> Truth:
    return Truth(
        (a.may_true & b.may_false) | (a.may_false & b.may_true),
        (a.may_true & b.may_true) | (a.may_false & b.may_false),
    )


def logical_not(a: Truth) -> Truth:
    return Truth(a.may_false, a.may_true)


def where(condition: Truth, a: Abstract, b: Abstract) -> Abstract:
    if isinstance(a, Truth):
        return Truth(
            (condition.may_true & a.may_true) | (condition.may_false & b.may_true),
            (condition.may_true & a.may_false) | (condition.may_false & b.may_false),
        )
    both, taken = hull(a, b), condition.may_true
    lo = np.where(condition.may_false, np.where(taken, both.lo, b.lo), a.lo)
    hi = np.where(condition.may_false, np.where(taken, both.hi, b.hi), a.hi)
    return Range(lo, hi, (condition.may_true & a.nan) | (condition.may_false & b.nan))


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic on both kinds of numbers


@np.errstate(all="ignore")
def add(a: Range, b: Range) -> Range:
    if a.is_float:
        opposite = ((a.lo == -np.inf) & (b.hi == np.inf)) | ((a.hi == np.inf) & (b.lo == -np.inf))
        return _outward(a.lo + b.lo, a.hi + b.hi, a.nan | b.nan | opposite)
    return _checked(a.lo + b.lo, a.hi + b.hi, _f(a.lo) + _f(b.lo), _f(a.hi) + _f(b.hi), a.single & b.single)


@np.errstate(all="ignore")
def neg(a: Range) -> Range:
    if a.is_float:
        return Range(-a.hi, -a.lo, a.nan)
    return _checked(-a.hi, -a.lo, -_f(a.hi), -_f(a.lo), a.single)


@np.errstate(all="ignore")
def sub(a: Range, b: Range) -> Range:
    if a.is_float:
        return add(a, neg(b))
    return _checked(a.lo - b.hi, a.hi - b.lo, _f(a.lo) - _f(b.hi), _f(a.hi) - _f(b.lo), a.single & b.single)


@np.errstate(all="ignore")
def mul(a: Range, b: Range) -> Range:
    if a.is_float:
        lo, hi = _corners(lambda x, y: np.nan_to_num(x * y, nan=0.0, posinf=np.inf, neginf=-np.inf), a, b)
        return _outward(lo, hi, a.nan | b.nan | (a.contains(0) & _infinite(b)) | (b.contains(0) & _infinite(a)))
    estimate = _corners(lambda x, y: _f(x) * _f(y), a, b)
    return _checked(*_corners(np.multiply, a, b), *estimate, a.single & b.single)


def minimum(a: Range, b: Range) -> Range:
    """As CUDA's fminf: a NaN beside a number gives the number."""
    picked = Range(np.minimum(a.lo, b.lo), np.minimum(a.hi, b.hi), a.nan & b.nan)
    return _or_the_other(picked, a, b)


def maximum(a: Range, b: Range) -> Range:
    picked = Range(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.nan & b.nan)
    return _or_the_other(picked, a, b)


@np.errstate(all="ignore")
def absolute(a: Range) -> Range:
    zero = a.lo.dtype.type(0)
    lo = np.where(a.lo > 0, a.lo, np.where(a.hi < 0, -a.hi, zero))
    hi = np.maximum(-a.lo, a.hi)
    return Range(lo, hi, a.nan) if a.is_float else _checked(lo, hi, _f(lo), np.maximum(-_f(a.lo), _f(a.hi)), a.single)


# ---------------------------------------------------------------------------------------------------------------------
# Integers


@np.errstate(all="ignore")
def floor_div(a: Range, b: Range) -> Range:
    """Floor division; a divisor that may be 0 is judged by its other values."""
    parts = [(present, *_corners(np.floor_divide, a, part)) for present, part in (_above_zero(b), _below_zero(b))]
    lo, hi = _join(parts)
    wraps = a.contains(INT64_MIN) & b.contains(-1) & ~(a.single & b.single)
    undefined = wraps | ((b.lo == 0) & (b.hi == 0))
    return ints(np.where(undefined, INT64_MIN, lo), np.where(undefined, INT64_MAX, hi))


@np.errstate(all="ignore")
def mod(a: Range, b: Range) -> Range:
    """The remainder of floor division has the sign of the divisor; one that may be 0 is judged by its other values."""
    has_positive, positive = _above_zero(b)
    has_negative, negative = _below_zero(b)
    up, down = _mod_positive(a, positive), _mod_negative(a, negative)
    lo, hi = _join([(has_positive, up.lo, up.hi), (has_negative, down.lo, down.hi)])
    undefined = (b.lo == 0) & (b.hi == 0)
    return ints(np.where(undefined, INT64_MIN, lo), np.where(undefined, INT64_MAX, hi))


def _mod_positive(a: Range, b: Range) -> Range:
    small = (a.lo >= 0) & (a.hi < b.lo)
    lo = np.where(small, a.lo, 0)
    limit = np.where(a.lo >= 0, np.minimum(a.hi, b.hi - 1), b.hi - 1)
    return _one_quotient(a, b, lo, np.where(small, a.hi, limit))


def _mod_negative(a: Range, b: Range) -> Range:
    small = (a.hi <= 0) & (a.lo > b.hi)
    hi = np.where(small, a.hi, 0)
    limit = np.where(a.hi <= 0, np.maximum(a.lo, b.lo + 1), b.lo + 1)
    return _one_quotient(a, b, np.where(small, a.lo, limit), hi)


def _one_quotient(a: Range, b: Range, lo: np.ndarray, hi: np.ndarray) -> Range:
    """The remainders lo .. hi, less where all of `a` has one quotient by a single divisor: there they follow `a`."""
    one = (b.lo == b.hi) & (np.floor_divide(a.lo, b.lo) == np.floor_divide(a.hi, b.lo))
    return ints(np.where(one, np.mod(a.lo, b.lo), lo), np.where(one, np.mod(a.hi, b.lo), hi))


@np.errstate(all="ignore")
def shift_left(a: Range, n: Range) -> Range:
    """a * 2**n for n in 0..63."""
    estimate = _corners(lambda x, y: _f(x) * np.exp2(_f(y)), a, n)
    shifted = _corners(np.left_shift, a, _clip(n, 0, 63))
    allowed = (n.lo >= 0) & (n.hi <= 63)
    result = _checked(*shifted, *estimate, a.single & n.single & allowed)
    return ints(np.where(allowed, result.lo, INT64_MIN), np.where(allowed, result.hi, INT64_MAX))


def shift_right(a: Range, n: Range) -> Range:
    """floor(a / 2**n) for n in 0..63."""
    lo, hi = _corners(np.right_shift, a, _clip(n, 0, 63))
    allowed = (n.lo >= 0) & (n.hi <= 63)
    return ints(np.where(allowed, lo, INT64_MIN), np.where(allowed, hi, INT64_MAX))


def bit_not(a: Range) -> Range:
    return ints(~a.hi, ~a.lo)


def bit_and(a: Range, b: Range) -> Range:
    ones = _ones(a) & _ones(b)
    result = _from_bits(ones, ~(_zeros(a) | _zeros(b)))
    hi = np.where(a.lo >= 0, np.minimum(result.hi, a.hi), result.hi)
    hi = np.where(b.lo >= 0, np.minimum(hi, b.hi), hi)
    lo = np.where((a.lo >= 0) | (b.lo >= 0), np.maximum(result.lo, 0), result.lo)
    return _no_wider(lo, hi, a, b)


def bit_or(a: Range, b: Range) -> Range:
    return bit_not(bit_and(bit_not(a), bit_not(b)))


def bit_xor(a: Range, b: Range) -> Range:
    ones = (_ones(a) & _zeros(b)) | (_zeros(a) & _ones(b))
    zeros = (_ones(a) & _ones(b)) | (_zeros(a) & _zeros(b))
    result = _from_bits(ones, ~zeros)
    return _no_wider(result.lo, result.hi, a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Floats


@np.errstate(all="ignore")
def div(a: Range, b: Range) -> Range:
    lo, hi = _corners(lambda x, y: np.nan_to_num(x / y, nan=0.0, posinf=np.inf, neginf=-np.inf), a, b)
    by_zero = b.contains(0)
    nan = a.nan | b.nan | (by_zero & a.contains(0)) | (_infinite(a) & _infinite(b))
    return _outward(np.where(by_zero, -np.inf, lo), np.where(by_zero, np.inf, hi), nan)


def floor(a: Range) -> Range:
    return Range(np.floor(a.lo), np.floor(a.hi), a.nan)


@np.errstate(all="ignore")
def exp(a: Range) -> Range:
    return _approximate(np.exp(a.lo), np.exp(a.hi), a.nan, relative=2.0**-15, low=0.0)


@np.errstate(all="ignore")
def exp2(a: Range) -> Range:
    return _approximate(np.exp2(a.lo), np.exp2(a.hi), a.nan, relative=2.0**-15, low=0.0)


@np.errstate(all="ignore")
def log(a: Range) -> Range:
    lo, hi = np.log(np.maximum(a.lo, 0)), np.log(np.maximum(a.hi, 0))
    return _approximate(np.where(a.lo < _TINY, -np.inf, lo), hi, a.nan | (a.lo < 0), absolute=2.0**-18)


@np.errstate(all="ignore")
def log2(a: Range) -> Range:
    lo, hi = np.log2(np.maximum(a.lo, 0)), np.log2(np.maximum(a.hi, 0))
    return _approximate(np.where(a.lo < _TINY, -np.inf, lo), hi, a.nan | (a.lo < 0), absolute=2.0**-18)


@np.errstate(all="ignore")
def log1p(a: Range) -> Range:
    lo, hi = np.log1p(np.maximum(a.lo, -1)), np.log1p(np.maximum(a.hi, -1))
    return _approximate(lo, hi, a.nan | (a.lo < -1), relative=2.0**-17)


@np.errstate(all="ignore")
def power(a: Range, b: Range) -> Range:
    """x ** y for x >= 0, which is monotone in each; NaN below, and where a kernel multiplies 0 by an infinity."""
    base = Range(np.where(a.lo < _TINY, 0.0, a.lo), np.maximum(a.hi, 0.0))
    lo, hi = _corners(np.power, base, b)
    nan = (
        a.nan | b.nan | (a.lo < 0) | (b.contains(0) & ((a.lo < _TINY) | _infinite(a))) | (a.contains(1) & _infinite(b))
    )
    size = np.maximum(np.abs(b.lo), np.abs(b.hi))
    return _approximate(lo, hi, nan, relative=np.minimum(2.0**-14 + size * 2.0**-21, 1.0), low=0.0)


@np.errstate(all="ignore")
def sin(a: Range) -> Range:
    return _wave(a, np.sin, 0.25)


@np.errstate(all="ignore")
def cos(a: Range) -> Range:
    return _wave(a, np.cos, 0.0)


def _wave(a: Range, function: Callable[[np.ndarray], np.ndarray], crest: float) -> Range:
    """A sine whose crests are whole turns and `crest` from 0.  A crest that may lie in the range is taken to."""
    lo, hi = np.minimum(function(a.lo), function(a.hi)), np.maximum(function(a.lo), function(a.hi))
    first, last = a.lo / (2 * np.pi), a.hi / (2 * np.pi)
    slack = 2.0**-20
    far = ~((a.lo >= -_WAVES) & (a.hi <= _WAVES))
    crests = far | (np.floor(last - crest + slack) >= np.ceil(first - crest - slack))
    troughs = far | (np.floor(last - crest - 0.5 + slack) >= np.ceil(first - crest - 0.5 - slack))
    margin = 2.0**-18
    lo, hi = np.where(troughs, -1.0, lo) - margin, np.where(crests, 1.0, hi) + margin
    return _outward(lo, hi, a.nan | _infinite(a))


def erf(a: Range) -> Range:
    lo, hi = (np.vectorize(math.erf, otypes=[np.float64])(end) for end in (a.lo, a.hi))
    return _approximate(lo, hi, a.nan, absolute=2.0**-18, low=-1.0, high=1.0)


def tanh(a: Range) -> Range:
    return _approximate(np.tanh(a.lo), np.tanh(a.hi), a.nan, absolute=2.0**-18, low=-1.0, high=1.0)


@np.errstate(all="ignore")
def sigmoid(a: Range) -> Range:
    lo, hi = 1 / (1 + np.exp(-a.lo)), 1 / (1 + np.exp(-a.hi))
    return _approximate(lo, hi, a.nan, absolute=2.0**-18, low=0.0, high=1.0)


@np.errstate(all="ignore")
def sqrt(a: Range) -> Range:
    lo, hi = np.sqrt(np.maximum(a.lo, 0)), np.sqrt(np.maximum(a.hi, 0))
    return _approximate(np.where(a.lo < _TINY, 0.0, lo), hi, a.nan | (a.lo < 0), low=0.0)


@np.errstate(all="ignore")
def rsqrt(a: Range) -> Range:
    lo, hi = 1 / np.sqrt(np.maximum(a.hi, 0)), 1 / np.sqrt(np.maximum(a.lo, 0))
    lo = np.where((a.lo <= 0) & (a.hi > -_TINY), -np.inf, lo)  # 1 / sqrt(-0.0) is -inf
    hi = np.where(a.lo < _TINY, np.inf, hi)
    return _approximate(lo, hi, a.nan | (a.lo < 0))


# ---------------------------------------------------------------------------------------------------------------------
# Casts


@np.errstate(all="ignore")
def cast(a: Abstract, dtype: DType) -> Abstract:
    """The value of a cast: float to int truncates toward zero and saturates (NaN: 0, as int64 its minimum); an int64
    that int32 does not hold is unknown, unless it is a single one: that wraps."""
    if isinstance(a, Truth):
        a = ints(np.where(a.may_false, 0, 1), np.where(a.may_true, 1, 0))
    if dtype.is_float:
        return a if a.is_float else floats(_f(a.lo), _f(a.hi))
    low, high = (INT32_MIN, INT32_MAX) if dtype is DType.INT32 else (INT64_MIN, INT64_MAX)
    if not a.is_float:
        known = ((a.lo >= low) & (a.hi <= high)) | a.single
        lo, hi = (x.astype(np.int32).astype(np.int64) if dtype is DType.INT32 else x for x in (a.lo, a.hi))
        return ints(np.where(known, lo, low), np.where(known, hi, high))
    lo, hi = _saturate(np.trunc(a.lo), low, high), _saturate(np.trunc(a.hi), low, high)
    of_nan = 0 if dtype is DType.INT32 else INT64_MIN
    return ints(np.where(a.nan, np.minimum(lo, of_nan), lo), np.where(a.nan, np.maximum(hi, of_nan), hi))


def _saturate(x: np.ndarray, low: int, high: int) -> np.ndarray:
    inside = (x > low) & (x < high)
    return np.where(inside, np.where(inside, x, 0).astype(np.int64), np.where(x <= low, low, high))


# ---------------------------------------------------------------------------------------------------------------------
# Shared by the rules


def _f(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _corners(f: Callable[[np.ndarray, np.ndarray], np.ndarray], a: Range, b: Range) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a function that is monotone in each argument."""
    w, x, y, z = f(a.lo, b.lo), f(a.lo, b.hi), f(a.hi, b.lo), f(a.hi, b.hi)
    return np.minimum(np.minimum(w, x), np.minimum(y, z)), np.maximum(np.maximum(w, x), np.maximum(y, z))


def _checked(lo: np.ndarray, hi: np.ndarray, low: np.ndarray, high: np.ndarray, single: np.ndarray) -> Range:
    """Bounds computed in int64, unknown where their float64 estimates may have left it; single points just wrap."""
    left = ((low < -_INT64_SAFE) | (high > _INT64_SAFE)) & ~single
    return ints(np.where(left, INT64_MIN, lo), np.where(left, INT64_MAX, hi))


def _clip(a: Range, low: int, high: int) -> Range:
    return Range(np.clip(a.lo, low, high), np.clip(a.hi, low, high))


def _above_zero(b: Range) -> tuple[np.ndarray, Range]:
    present = b.hi >= 1
    return present, ints(np.where(present, np.maximum(b.lo, 1), 1), np.where(present, b.hi, 1))


def _below_zero(b: Range) -> tuple[np.ndarray, Range]:
    present = b.lo <= -1
    return present, ints(np.where(present, b.lo, -1), np.where(present, np.minimum(b.hi, -1), -1))


def _join(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The hull of the parts that are present."""
    (in_a, lo_a, hi_a), (in_b, lo_b, hi_b) = parts
    lo = np.where(in_a & in_b, np.minimum(lo_a, lo_b), np.where(in_a, lo_a, lo_b))
    hi = np.where(in_a & in_b, np.maximum(hi_a, hi_b), np.where(in_a, hi_a, hi_b))
    return lo, hi


def _varying(a: Range) -> np.ndarray:
    """Mask of the low bits that are not common to every value of the range."""
    return _smeared(a.lo ^ a.hi)


def _smeared(x: np.ndarray) -> np.ndarray:
    """Every bit from the highest one of x down."""
    x = x.astype(np.uint64)
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> np.uint64(shift))
    return x.astype(np.int64)


def _no_wider(lo: np.ndarray, hi: np.ndarray, a: Range, b: Range) -> Range:
    """lo .. hi cut to what the magnitude bits of a and b can reach: a bit operation needs no more than they have."""
    used = _smeared(_magnitude(a.lo) | _magnitude(a.hi) | _magnitude(b.lo) | _magnitude(b.hi))
    return ints(np.maximum(lo, ~used), np.minimum(hi, used))


def _magnitude(x: np.ndarray) -> np.ndarray:
    """The bits of x that differ from its sign."""
    return x ^ (x >> 63)


def _ones(a: Range) -> np.ndarray:
    return a.lo & ~_varying(a)


def _zeros(a: Range) -> np.ndarray:
    return ~a.lo & ~_varying(a)


def _from_bits(ones: np.ndarray, not_zeros: np.ndarray) -> Range:
    """All values with these bits set and no bit outside `not_zeros`; a sign that varies reaches both ways."""
    signed = (not_zeros < 0) & (ones >= 0)
    return ints(np.where(signed, ones | INT64_MIN, ones), np.where(signed, not_zeros & INT64_MAX, not_zeros))


def _infinite(a: Range) -> np.ndarray:
    return (a.lo == -np.inf) | (a.hi == np.inf)


def _or_the_other(picked: Range, a: Range, b: Range) -> Range:
    """Where one side may be NaN, the other side's value comes through."""
    lo, hi = picked.lo, picked.hi
    lo = np.where(a.nan, np.minimum(lo, b.lo), np.where(b.nan, np.minimum(lo, a.lo), lo))
    hi = np.where(a.nan, np.maximum(hi, b.hi), np.where(b.nan, np.maximum(hi, a.hi), hi))
    lo = np.where(a.nan & b.nan, np.minimum(a.lo, b.lo), lo)
    hi = np.where(a.nan & b.nan, np.maximum(a.hi, b.hi), hi)
    return Range(lo, hi, picked.nan)


@np.errstate(all="ignore")
def _outward(lo: np.ndarray, hi: np.ndarray, nan: np.ndarray) -> Range:
    """Bounds moved outward to float32 values; a NaN bound says nothing is known."""
    lo, hi = np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi)
    low, high = lo.astype(np.float32), hi.astype(np.float32)
    low = np.where(low.astype(np.float64) > lo, np.nextafter(low, np.float32(-np.inf)), low)
    high = np.where(high.astype(np.float64) < hi, np.nextafter(high, np.float32(np.inf)), high)
    low = np.where((low > 0) & (low < _TINY), np.float32(0), low)
    high = np.where((high < 0) & (high > -_TINY), np.float32(0), high)
    return Range(low.astype(np.float64), high.astype(np.float64), np.asarray(nan))


@np.errstate(all="ignore")
def _approximate(
    lo: np.ndarray,
    hi: np.ndarray,
    nan: np.ndarray,
    *,
    relative: float = 2.0**-20,
    absolute: float = 0.0,
    low: float = -np.inf,
    high: float = np.inf,
) -> Range:
    """Bounds widened by an approximation's error and kept inside the function's codomain."""
    margin = absolute + 2.0**-120
    lo = np.where(np.isfinite(lo), lo - relative * np.abs(lo) - margin, lo)
    hi = np.where(np.isfinite(hi), hi + relative * np.abs(hi) + margin, hi)
    return _outward(np.clip(lo, low, high), np.clip(hi, low, high), nan)
