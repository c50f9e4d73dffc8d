"""cvt: between integers, floats and packed halves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.ops.floats import directed, flush
from flashgen.interpreter.registers import Mask, Slots
from flashgen.lang import float8

#: Pairs of 8-bit floats, by the dtype of each.
_EIGHT = {"e4m3x2": "float8_e4m3fn", "e5m2x2": "float8_e5m2"}

Value = Callable[[np.ndarray], np.ndarray]


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16), to nearest even; NaN stays a NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) -> float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


_ROUND: dict[str, Value] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_TO_INT_RANGE = {
    kind: (-(1 << 8 * types.size(kind) - 1), (1 << 8 * types.size(kind) - 1) - 1)
    if kind in types.SIGNED
    else (0, (1 << 8 * types.size(kind)) - 1)
    for kind in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
}


def _from_float(b: Build, to: str, rounding: str, ftz: bool, sat: bool) -> Value:
    """Float32 or float64 in, `to` out."""
    if to in _TO_INT_RANGE:
        if rounding not in _ROUND:
            raise b.unknown("a float to integer conversion without integer rounding")
        low, high = _TO_INT_RANGE[to]
        dtype = types.DTYPES[to]

        def to_integer(x: np.ndarray) -> np.ndarray:
            value = _ROUND[rounding](np.asarray(flush(x) if ftz else x, np.float64))
            # NaN becomes 0 only from 32 bits or fewer to as many; else the highest bit alone.
            of_nan = low or high // 2 + 1 if "64" in to or x.dtype == np.float64 else 0
            inside = np.where(np.isnan(value), 0.0, value)
            over, under = inside >= float(high), inside <= float(low)
            out = np.where(over | under, 0, inside).astype(np.int64 if low else np.uint64).astype(dtype)
            out = np.where(over, dtype.type(high), np.where(under, dtype.type(low), out))
            return np.where(np.isnan(value), dtype.type(of_nan), out)

        return to_integer
    if rounding in _ROUND:
        return lambda x: _ROUND[rounding](flush(x) if ftz else x)
    if to == "f32":

        def to_float(x: np.ndarray) -> np.ndarray:
            value = np.asarray(x, np.float32)
            if rounding in ("rz", "rm", "rp"):
                value = directed(value, np.asarray(x, np.float64), rounding)
            value = flush(value) if ftz else value
            return np.where(np.isnan(value), 0, np.clip(value, 0, 1)) if sat else value

        return to_float
    if rounding not in ("", "rn"):
        raise b.unknown(f"rounding {rounding}")
    if to == "f64":
        return lambda x: np.asarray(flush(x) if ftz else x, np.float64)
    if to == "f16":
        return lambda x: np.asarray(x).astype(np.float16)
    if to == "bf16":
        return bf16_bits
    raise b.unknown(f"a conversion to {to}")


def convert(b: Build) -> Closure:
    """cvt.d.s and its packed forms."""
    source = b.type()
    to = b.type()
    if to == "f16x2" and source in _EIGHT:
        return _unpack_8_bits(b, _EIGHT[source])
    if to in ("f16x2", "bf16x2"):
        return _pack(b, to, source)
    if to in _EIGHT:
        return _pack_8_bits(b, _EIGHT[to], source)
    ftz, sat = bool(b.take("ftz")), bool(b.take("sat"))
    rounding = b.take("rn", "rz", "rm", "rp", *_ROUND)
    b.done(2)
    x = b.read(b.operands[1], source)
    value: Value
    if source in ("f32", "f64"):
        value = _from_float(b, to, rounding, ftz, sat)
    elif source in ("f16", "bf16"):
        widen: Value = bf16_value if source == "bf16" else lambda v: np.asarray(v).astype(np.float32)
        narrow = _from_float(b, to, rounding, ftz, sat)
        value = lambda v: narrow(widen(v))  # noqa: E731
    elif to in ("f32", "f64"):
        value = _from_integer(to, rounding)
    elif to in types.FLOATS:
        raise b.unknown(f"a conversion from {source} to {to}")
    elif sat:
        low, high = _TO_INT_RANGE[to]
        value = lambda v: np.clip(np.asarray(v).astype(object), low, high)  # noqa: E731
    else:
        value = lambda v: v  # noqa: E731
    if to in types.FLOATS:
        d = b.write(b.operands[0], to)

        def run(V: Slots, m: Mask) -> None:
            np.copyto(V[d], value(V[x]), where=m, casting="unsafe")

        return run
    d, _ = b.wide_write(b.operands[0], to in types.SIGNED)
    dtype = types.DTYPES[to]

    def run_extended(V: Slots, m: Mask) -> None:
        np.copyto(V[d], np.asarray(value(V[x])).astype(dtype), where=m, casting="unsafe")

    return run_extended


def _from_integer(to: str, rounding: str) -> Value:
    if to == "f64" or rounding in ("", "rn"):
        return lambda v: np.asarray(v).astype(types.DTYPES[to])
    return lambda v: directed(np.asarray(v).astype(np.float32), np.asarray(v).astype(np.float64), rounding)


def _pack(b: Build, to: str, source: str) -> Closure:
    """cvt.rn.{f16x2,bf16x2}.f32 d, a, b: a in the upper half."""
    rounding, relu = b.take("rn"), b.take("relu")
    b.done(3)
    if source != "f32" or not rounding:
        raise b.unknown("this packed conversion")
    d, high, low = b.write(b.operands[0], "b32"), b.read(b.operands[1], "f32"), b.read(b.operands[2], "f32")

    def half(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))
        return bf16_bits(x) if to == "bf16x2" else x.astype(np.float16).view(np.uint16)

    def run(V: Slots, m: Mask) -> None:
        word = half(V[high]).astype(np.uint32) << np.uint32(16) | half(V[low])
        np.copyto(V[d], word, where=m)

    return run


def _pack_8_bits(b: Build, to: str, source: str) -> Closure:
    """cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 d, a, b: a in the upper byte of 16 bits."""
    rounding, saturates = b.take("rn"), b.take("satfinite")
    b.done(3)
    if source != "f32" or not rounding or not saturates:
        raise b.unknown("this packed conversion")
    d, high, low = b.write(b.operands[0], "b16"), b.read(b.operands[1], "f32"), b.read(b.operands[2], "f32")

    def run(V: Slots, m: Mask) -> None:
        upper, lower = (float8.codes(np.asarray(V[x]), to).astype(np.uint16) for x in (high, low))
        np.copyto(V[d], upper << np.uint16(8) | lower, where=m)

    return run


def _unpack_8_bits(b: Build, source: str) -> Closure:
    """cvt.rn.f16x2.{e4m3x2,e5m2x2} d, a: float16 holds each element."""
    rounding, relu = b.take("rn"), b.take("relu")
    b.done(2)
    if not rounding or relu:
        raise b.unknown("this packed conversion")
    d, x = b.write(b.operands[0], "b32"), b.read(b.operands[1], "b16")

    def run(V: Slots, m: Mask) -> None:
        two = np.asarray(V[x], np.uint16)
        low, high = (
            float8.values(np.asarray(part, np.uint8), source).astype(np.float16).view(np.uint16).astype(np.uint32)
            for part in (two & np.uint16(0xFF), two >> np.uint16(8))
        )
        np.copyto(V[d], high << np.uint32(16) | low, where=m)

    return run


TABLE: dict[str, Callable[[Build], Closure]] = {"cvt": convert}
