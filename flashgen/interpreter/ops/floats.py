"""Floating-point arithmetic.

float32 and float64 round once, as IEEE 754 asks (fma too).  The `.approx` functions are computed to nearest, so they
differ from a GPU's by its own approximation error (2 ulp for ex2 and lg2).  min and max take either zero of a pair
of zeros of two signs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.registers import Mask, Slots

_TINY = np.float32(2.0**-126)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 to zero, sign kept (.ftz)."""
    x = np.asarray(x)
    small = np.abs(x) < _TINY
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def directed(x: np.ndarray, exact: np.ndarray, mode: str) -> np.ndarray:
    """`x` is `exact` rounded to nearest in float32: move it one step where `mode` (rz, rm, rp) rounds another way."""
    back = x.astype(np.float64)
    if mode == "rz":
        wrong = np.abs(back) > np.abs(exact)
        return np.where(wrong, np.nextafter(x, np.float32(0)), x)
    wrong = back > exact if mode == "rm" else back < exact
    toward = np.float32(-np.inf if mode == "rm" else np.inf)
    return np.where(wrong, np.nextafter(x, toward), x)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z in float32, rounded once.

    The product of two float32 is exact in float64; their sum with z rounds to 53 bits, and then to 24.  The second
    rounding is wrong only where the 53-bit sum is exactly half way between two float32 and was itself rounded (or the
    result is subnormal): there the sum is first moved one step toward the exact value.
    """
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    bits = total.view(np.uint64)
    doubtful = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if doubtful.any() or (np.abs(total) < _TINY).any():
        total = _round_to_odd(product, np.broadcast_to(np.asarray(z, np.float64), total.shape), total)
    return total.astype(np.float32)


def _round_to_odd(x: np.ndarray, y: np.ndarray, total: np.ndarray) -> np.ndarray:
    """x + y with its last bit set where it is inexact, so that a later rounding to fewer bits is right."""
    back = total - x
    error = (x - (total - back)) + (y - back)
    odd = total.view(np.uint64) & np.uint64(1)
    inexact = np.isfinite(total) & (error != 0) & (odd == 0)
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, toward), total)


def _rounding(b: Build, kind: str) -> str:
    """The directed rounding asked for, "" for nearest even."""
    mode = b.take("rn", "rz", "rm", "rp")
    if kind not in ("f32", "f64") or (kind == "f64" and mode not in ("", "rn")):
        raise b.unknown(f"arithmetic on {kind} with this rounding")
    return "" if mode == "rn" else mode


def _exact(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 in float64, rounded to odd: rounds to any float32 as the exact value would."""
    product = np.multiply(x, y, dtype=np.float64)
    addend = np.broadcast_to(np.asarray(z, np.float64), product.shape)
    return _round_to_odd(product, addend, product + addend)


def _fma_directed(mode: str) -> Callable[..., np.ndarray]:
    def compute(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        total = _exact(x, y, z)
        return directed(total.astype(np.float32), total, mode)

    return compute


_BINARY_AS_FMA: dict[np.ufunc, Callable[..., tuple]] = {
    np.add: lambda x, y: (x, np.float32(1), y),
    np.subtract: lambda x, y: (x, np.float32(1), -np.asarray(y)),
    np.multiply: lambda x, y: (x, y, np.float32(0)),
}


def halves(b: Build, terms: int, compute: Callable[..., np.ndarray]) -> Closure:
    """Arithmetic on both float16 of a word: what `compute` gives in float64 rounds as the exact value would."""
    rounding = b.take("rn", "rz", "rm", "rp")
    b.done(1 + terms)
    if rounding not in ("", "rn"):
        raise b.unknown(f"arithmetic on f16x2 with rounding {rounding}")
    d = b.write(b.operands[0], "b32")
    words = [b.read(operand, "b32") for operand in b.operands[1:]]

    def run(V: Slots, m: Mask) -> None:
        found = np.uint32(0)
        for shift in (np.uint32(0), np.uint32(16)):
            parts = [(np.asarray(V[x], np.uint32) >> shift).astype(np.uint16).view(np.float16) for x in words]
            half = compute(*(part.astype(np.float64) for part in parts)).astype(np.float16)
            found = found | half.view(np.uint16).astype(np.uint32) << shift
        np.copyto(V[d], found, where=m)

    return run


def binary(b: Build, kind: str, ufunc: np.ufunc) -> Closure:
    if kind == "f16x2":
        return halves(b, 2, ufunc)
    mode = _rounding(b, kind)
    if mode:
        terms, exact = _BINARY_AS_FMA[ufunc], _fma_directed(mode)
        return _plain(b, kind, lambda x, y: exact(*terms(x, y)))
    return _plain(b, kind, ufunc)


def _plain(b: Build, kind: str, compute: Callable[..., np.ndarray]) -> Closure:
    ftz, sat = b.take("ftz"), b.take("sat")
    b.done(3)
    d, x, y = b.write(b.operands[0], kind), b.read(b.operands[1], kind), b.read(b.operands[2], kind)
    if not ftz and not sat and isinstance(compute, np.ufunc):

        def run(V: Slots, m: Mask) -> None:
            compute(V[x], V[y], out=V[d], where=m)

        return run

    def run_special(V: Slots, m: Mask) -> None:
        value = flush(compute(flush(V[x]), flush(V[y]))) if ftz else compute(V[x], V[y])
        np.copyto(V[d], _saturate(value) if sat else value, where=m)

    return run_special


def _saturate(x: np.ndarray) -> np.ndarray:
    """To [0, 1]; NaN becomes 0."""
    return np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(np.asarray(x).dtype)


def fma_of(b: Build, kind: str) -> Closure:
    if kind == "f16x2":
        return halves(b, 3, lambda x, y, z: _round_to_odd(x * y, z, x * y + z))
    mode = _rounding(b, kind)
    compute = _fma_directed(mode) if mode else fma
    ftz, sat = b.take("ftz"), b.take("sat")
    b.done(4)
    if kind != "f32":
        raise b.unknown("fma in float64")
    d = b.write(b.operands[0], kind)
    x, y, z = (b.read(operand, kind) for operand in b.operands[1:4])

    def run(V: Slots, m: Mask) -> None:
        value = flush(compute(flush(V[x]), flush(V[y]), flush(V[z]))) if ftz else compute(V[x], V[y], V[z])
        np.copyto(V[d], _saturate(value) if sat else value, where=m)

    return run


def fma_builder(b: Build) -> Closure:
    return fma_of(b, b.type())


def unary(b: Build, kind: str, ufunc: np.ufunc) -> Closure:
    ftz = b.take("ftz")
    b.done(2)
    if kind not in ("f32", "f64"):
        raise b.unknown(f"arithmetic on {kind}")
    d, x = b.write(b.operands[0], kind), b.read(b.operands[1], kind)

    def run(V: Slots, m: Mask) -> None:
        ufunc(flush(V[x]) if ftz else V[x], out=V[d], where=m)

    return run


def extreme(b: Build, kind: str, ufunc: np.ufunc, nan: np.ufunc) -> Closure:
    """min and max: a NaN loses, unless .NaN asks that it wins."""
    pick = nan if b.take("NaN") else ufunc
    ftz = b.take("ftz")
    if kind not in ("f32", "f64"):
        raise b.unknown(f"type {kind}")
    b.done((3, 4))
    d = b.write(b.operands[0], kind)
    x, *others = (b.read(operand, kind) for operand in b.operands[1:])

    def run(V: Slots, m: Mask) -> None:
        value = V[x]
        for other in others:
            value = pick(value, V[other])
        np.copyto(V[d], flush(value) if ftz else value, where=m)

    def run_plain(V: Slots, m: Mask) -> None:
        pick(V[x], V[others[0]], out=V[d], where=m)

    return run if ftz or len(others) > 1 else run_plain


def division(b: Build, kind: str) -> Closure:
    b.drop("rn", "approx", "full")
    ftz = b.take("ftz")
    b.done(3)
    d, x, y = b.write(b.operands[0], kind), b.read(b.operands[1], kind), b.read(b.operands[2], kind)

    def run(V: Slots, m: Mask) -> None:
        value = np.divide(flush(V[x]), flush(V[y])) if ftz else np.divide(V[x], V[y])
        np.copyto(V[d], flush(value) if ftz else value, where=m)

    return run


def _function(compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[Build], Closure]:
    """A function of one float, computed in float64 and rounded."""

    def build(b: Build) -> Closure:
        kind = b.type()
        b.drop("rn", "approx")
        ftz = b.take("ftz")
        b.done(2)
        if kind not in ("f32", "f64"):
            raise b.unknown(f"type {kind}")
        d, x, dtype = b.write(b.operands[0], kind), b.read(b.operands[1], kind), types.DTYPES[kind]

        def run(V: Slots, m: Mask) -> None:
            value = compute(np.asarray(flush(V[x]) if ftz else V[x], np.float64)).astype(dtype)
            np.copyto(V[d], flush(value) if ftz else value, where=m)

        return run

    return build


def _unordered(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.isnan(x) | np.isnan(y)


_ORDERED: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda x, y: np.less(x, y) | np.greater(x, y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda x, y: np.equal(x, y) | _unordered(x, y),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~np.greater_equal(x, y),
    "leu": lambda x, y: ~np.greater(x, y),
    "gtu": lambda x, y: ~np.less_equal(x, y),
    "geu": lambda x, y: ~np.less(x, y),
    "num": lambda x, y: ~_unordered(x, y),
    "nan": _unordered,
}


def comparison(b: Build, name: str, kind: str, ftz: bool) -> Callable[..., np.ndarray]:
    """The test of a floating-point setp."""
    if name not in _ORDERED or kind not in ("f32", "f64"):
        raise b.unknown(f"comparison {name!r} of {kind}")
    test = _ORDERED[name]
    return (lambda x, y: test(flush(x), flush(y))) if ftz else test


def test_class(b: Build) -> Closure:
    kind = b.type()
    which = b.mods.pop(0) if b.mods else ""
    b.done(2)
    table = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= _TINY),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < _TINY),
    }
    if which not in table or kind != "f32":
        raise b.unknown(f"test {which!r}")
    d, x, test = b.write(b.operands[0], "pred"), b.read(b.operands[1], kind), table[which]

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], test(V[x]), where=m)

    return run


def copy_sign(b: Build) -> Closure:
    """copysign d, a, b: the magnitude of b with the sign of a."""
    kind = b.type()
    b.done(3)
    d, x, y = b.write(b.operands[0], kind), b.read(b.operands[1], kind), b.read(b.operands[2], kind)

    def run(V: Slots, m: Mask) -> None:
        np.copysign(V[y], V[x], out=V[d], where=m)

    return run


TABLE: dict[str, Callable[[Build], Closure]] = {
    "fma": fma_builder,
    "ex2": _function(np.exp2),
    "lg2": _function(np.log2),
    "rcp": _function(lambda x: 1.0 / x),
    "sqrt": _function(np.sqrt),
    "rsqrt": _function(lambda x: 1.0 / np.sqrt(x)),
    "tanh": _function(np.tanh),
    "sin": _function(np.sin),
    "cos": _function(np.cos),
    "testp": test_class,
    "copysign": copy_sign,
}
