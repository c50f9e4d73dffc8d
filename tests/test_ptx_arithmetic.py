"""The PTX interpreter's arithmetic against exact rational numbers, Python integers and torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_kernels import instruction

from flashgen.interpreter import UnknownInstruction

_INT32 = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-9, 9), st.sampled_from([-(2**31), 2**31 - 1]))
_INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9))


def _ints(strategy, dtype, size=32):
    return st.lists(strategy, min_size=size, max_size=size).map(lambda xs: np.array(xs, dtype))


def _random_floats(rng, count):
    """Bit patterns of every kind: subnormals, near-equal exponents, infinities and NaNs."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    near = (rng.integers(110, 140, count).astype(np.uint32) << 23) | (bits & 0x807FFFFF)
    return np.where(rng.random(count) < 0.3, bits, near).astype(np.uint32).view(np.float32)


def _nearest(x: Fraction) -> np.float32:
    """A rational number to the nearest float32, ties to even, by integer arithmetic."""
    if x == 0:
        return np.float32(0)
    sign, x = (-1, -x) if x < 0 else (1, x)
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length() - 24, -149)
    while True:
        scaled = x / Fraction(2) ** exponent
        if scaled >= 1 << 24:
            exponent += 1
        elif scaled < 1 << 23 and exponent > -149:
            exponent -= 1
        else:
            break
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    twice = 2 * rest - scaled.denominator
    whole += twice > 0 or (twice == 0 and whole % 2 == 1)
    value = sign * whole * 2.0**exponent if whole * Fraction(2) ** exponent < Fraction(2) ** 128 else sign * np.inf
    return np.float32(value)


# ---------------------------------------------------------------- float32
def test_fma_rounds_once():
    rng = np.random.default_rng(1)
    a, b, c = (_random_floats(rng, 4096) for _ in range(3))
    # (1 + 2^-12)^2 lies half way between two float32: an addend too small for float64's 53 bits decides.
    a[:512] = b[:512] = 1 + 2.0**-12
    c[:512] = rng.choice([-1, 1], 512) * 2.0 ** rng.integers(-100, -30, 512)
    # Subnormal results.
    a[512:1024] *= np.float32(2.0**-100)
    b[512:1024] = (rng.standard_normal(512) * 2.0**-45).astype(np.float32)
    c[512:1024] = (rng.standard_normal(512) * 2.0**-148).astype(np.float32)
    got = instruction("fma.rn.f32 %o, %a, %b, %c;", np.float32, a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        with np.errstate(all="ignore"):
            special = not np.isfinite([x, y, z]).all()
            expected = x * y + z if special else _nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        assert np.isnan(expected) == np.isnan(result)
        assert np.isnan(expected) or expected == result, (x, y, z)


@pytest.mark.parametrize(("mode", "pick"), [("rm", np.floor), ("rp", np.ceil), ("rz", np.trunc)])
def test_directed_rounding_of_fma_brackets_the_exact_value(mode, pick):
    rng = np.random.default_rng(2)
    a, b, c = (rng.standard_normal(512).astype(np.float32) for _ in range(3))
    got = instruction(f"fma.{mode}.f32 %o, %a, %b, %c;", np.float32, a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        nearest = _nearest(exact)
        candidates = [np.nextafter(nearest, np.float32(-np.inf)), nearest, np.nextafter(nearest, np.float32(np.inf))]
        below = max(f for f in candidates if Fraction(float(f)) <= exact)
        above = min(f for f in candidates if Fraction(float(f)) >= exact)
        expected = {"rm": below, "rp": above, "rz": below if exact > 0 else above}[mode]
        assert result == expected


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("add.f32 %o, %a, %b;", np.add),
        ("sub.rn.f32 %o, %a, %b;", np.subtract),
        ("mul.f32 %o, %a, %b;", np.multiply),
        ("div.rn.f32 %o, %a, %b;", np.divide),
        ("max.f32 %o, %a, %b;", np.fmax),
        ("min.f32 %o, %a, %b;", np.fmin),
        ("max.NaN.f32 %o, %a, %b;", np.maximum),
    ],
)
def test_float_arithmetic_is_ieee(text, reference):
    rng = np.random.default_rng(3)
    a, b = _random_floats(rng, 2048), _random_floats(rng, 2048)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(instruction(text, np.float32, a, b), reference(a, b))


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("ex2", np.exp2),
        ("lg2", np.log2),
        ("rcp", lambda x: 1 / x),
        ("sqrt", np.sqrt),
        ("rsqrt", lambda x: x**-0.5),
        ("tanh", np.tanh),
    ],
)
def test_functions_are_rounded_to_nearest(name, reference):
    x = np.abs(np.random.default_rng(4).standard_normal(512)).astype(np.float32) * 4
    expected = reference(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(instruction(f"{name}.approx.f32 %o, %a;", np.float32, x), expected)


def test_ftz_flushes_subnormals_in_and_out():
    tiny = np.array([2.0**-127, -(2.0**-130), 2.0**-126, 1.5], np.float32)
    got = instruction("mul.ftz.f32 %o, %a, %b;", np.float32, tiny, np.full(4, 1, np.float32))
    np.testing.assert_array_equal(got, np.array([0, -0.0, 2.0**-126, 1.5], np.float32))
    assert np.signbit(got[1])
    below = instruction("ex2.approx.ftz.f32 %o, %a;", np.float32, np.array([-127, -126, 3], np.float32))
    np.testing.assert_array_equal(below, np.array([0, 2.0**-126, 8], np.float32))


@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_float_comparisons_know_nan(name):
    values = np.array([np.nan, -np.inf, -1, -0.0, 0, 1, np.inf], np.float32)
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    got = instruction(f"setp.{name}.f32 %p, %a, %b; selp.u32 %o, 1, 0, %p;", np.uint32, a, b).astype(bool)
    unordered = np.isnan(a) | np.isnan(b)
    table = {"eq": a == b, "ne": (a != b) & ~unordered, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    expected = table.get(name)
    if expected is None:
        expected = {"num": ~unordered, "nan": unordered}.get(name)
    if expected is None:
        expected = table[name[:2]] | unordered
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- integers
def _wrap(value: int, bits: int, signed: bool = True) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> bits - 1 else value


def _truncated(a: int, b: int) -> tuple[int, int]:
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - quotient * b


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(_ints(_INT32, np.int32), _ints(_INT32, np.int32), _ints(_INT32, np.int32))
def test_32_bit_integers(a, b, c):
    triples = [tuple(int(x) for x in row) for row in zip(a, b, c, strict=True)]

    def check(text, expected, dtype=np.int32, bits=32):
        got = instruction(text, dtype, a, b, c)
        assert [int(x) for x in got] == [_wrap(e, bits, np.dtype(dtype).kind == "i") for e in expected], text

    check("add.s32 %o, %a, %b;", [x + y for x, y, _ in triples])
    check("mul.lo.s32 %o, %a, %b;", [x * y for x, y, _ in triples])
    check("mul.hi.s32 %o, %a, %b;", [x * y >> 32 for x, y, _ in triples])
    check("mul.hi.u32 %o, %a, %b;", [(x % 2**32) * (y % 2**32) >> 32 for x, y, _ in triples], np.uint32)
    check("mad.lo.s32 %o, %a, %b, %c;", [x * y + z for x, y, z in triples])
    check("mul.wide.s32 %o, %a, %b;", [x * y for x, y, _ in triples], np.int64, 64)
    check("mul.wide.u32 %o, %a, %b;", [(x % 2**32) * (y % 2**32) for x, y, _ in triples], np.uint64, 64)
    check("min.s32 %o, %a, %b;", [min(x, y) for x, y, _ in triples])
    check("max.u32 %o, %a, %b;", [max(x % 2**32, y % 2**32) for x, y, _ in triples], np.uint32)
    halves = [[max((x >> at) % 2**16, (y >> at) % 2**16) << at for at in (0, 16)] for x, y, _ in triples]
    check("max.u16x2 %o, %a, %b;", [low | high for low, high in halves], np.uint32)
    check("div.s32 %o, %a, %b;", [_truncated(x, y)[0] if y else -1 for x, y, _ in triples])
    check("rem.s32 %o, %a, %b;", [_truncated(x, y)[1] if y else x for x, y, _ in triples])
    check("div.u32 %o, %a, %b;", [x % 2**32 // (y % 2**32) if y else -1 for x, y, _ in triples], np.uint32)
    check("abs.s32 %o, %a;", [abs(x) for x, _, _ in triples])
    check("lop3.b32 %o, %a, %b, %c, 0x96;", [x ^ y ^ z for x, y, z in triples])
    check("popc.b32 %o, %a;", [(x % 2**32).bit_count() for x, _, _ in triples])
    check("clz.b32 %o, %a;", [32 - (x % 2**32).bit_length() for x, _, _ in triples])
    check("brev.b32 %o, %a;", [int(f"{x % 2**32:032b}"[::-1], 2) for x, _, _ in triples])
    check("setp.lt.and.s32 %p, %a, %b, 0x1; selp.u32 %o, 1, 0, %p;", [x < y for x, y, _ in triples])


@settings(deadline=None, max_examples=10)
@given(_ints(_INT64, np.int64), _ints(_INT64, np.int64))
def test_64_bit_integers(a, b):
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]

    def check(text, expected):
        assert [int(x) for x in instruction(text, np.int64, a, b)] == [_wrap(e, 64) for e in expected], text

    check("sub.s64 %o, %a, %b;", [x - y for x, y in pairs])
    check("mul.lo.s64 %o, %a, %b;", [x * y for x, y in pairs])
    check("mul.hi.s64 %o, %a, %b;", [x * y >> 64 for x, y in pairs])
    check("mul.hi.u64 %o, %a, %b;", [(x % 2**64) * (y % 2**64) >> 64 for x, y in pairs])
    check("div.s64 %o, %a, %b;", [_truncated(x, y)[0] if y else -1 for x, y in pairs])
    check("rem.s64 %o, %a, %b;", [_truncated(x, y)[1] if y else x for x, y in pairs])


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(_ints(_INT32, np.int32), _ints(st.integers(0, 80), np.uint32), _ints(st.integers(0, 40), np.uint32))
def test_shifts_and_bit_fields(a, by, count):
    rows = [(int(x), int(y), int(z)) for x, y, z in zip(a, by, count, strict=True)]

    def check(text, expected, dtype=np.int32):
        got = instruction(text, dtype, a, by, count)
        assert [int(x) for x in got] == [_wrap(e, 32, np.dtype(dtype).kind == "i") for e in expected], text

    check("shl.b32 %o, %a, %b;", [x << y if y < 32 else 0 for x, y, _ in rows])
    check("shr.s32 %o, %a, %b;", [x >> min(y, 31) for x, y, _ in rows])
    check("shr.u32 %o, %a, %b;", [(x % 2**32) >> y if y < 32 else 0 for x, y, _ in rows])

    def extract(x, position, length, signed):
        def bit(n):
            return x % 2**32 >> n & 1

        fill = bit(min(position + length - 1, 31)) if signed and length else 0
        return sum((bit(position + i) if i < length and position + i <= 31 else fill) << i for i in range(32))

    check("bfe.u32 %o, %a, %b, %c;", [extract(x, y, z, False) for x, y, z in rows], np.uint32)
    check("bfe.s32 %o, %a, %b, %c;", [extract(x, y, z, True) for x, y, z in rows])

    def insert(x, y, position, length):
        out = y % 2**32
        for i in range(length):
            if position + i <= 31:
                out = out & ~(1 << position + i) | (x >> i & 1) << position + i
        return out

    got = instruction("mov.u32 %t, 0x5a5aa5a5; bfi.b32 %o, %a, %t, %b, %c;", np.uint32, a, by, count)
    assert [int(x) for x in got] == [insert(x, 0x5A5AA5A5, y, z) for x, y, z in rows]
    check(
        "shf.l.wrap.b32 %o, %c, %a, %b;",
        [((x % 2**32) << (y % 32) | z >> 32 - y % 32 if y % 32 else x) for x, y, z in rows],
    )


@settings(deadline=None, max_examples=10)
@given(_ints(_INT32, np.int32), _ints(_INT32, np.int32), _ints(st.integers(0, 0xFFFF), np.uint32))
def test_permuted_bytes(a, b, pick):
    got = instruction("prmt.b32 %o, %a, %b, %c;", np.uint32, a, b, pick)
    for x, y, selector, result in zip(a, b, pick, got, strict=True):
        data = (int(x) % 2**32 | int(y) % 2**32 << 32).to_bytes(8, "little")
        expected = 0
        for n in range(4):
            nibble = int(selector) >> 4 * n & 15
            byte = data[nibble & 7]
            expected |= (0xFF if nibble & 8 and byte & 0x80 else 0 if nibble & 8 else byte) << 8 * n
        assert int(result) == expected


# ---------------------------------------------------------------- conversions
def test_halves_agree_with_torch():
    import torch

    rng = np.random.default_rng(5)
    x = np.concatenate([_random_floats(rng, 2000), np.array([np.nan, np.inf, -np.inf, 65519, 65520, 1e-8], np.float32)])
    y = _random_floats(rng, x.size)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        low = instruction(f"cvt.rn.{name}x2.f32 %o, %a, %b;", np.uint32, y, x) & 0xFFFF
        expected = torch.from_numpy(x).to(dtype).view(torch.uint16).numpy().astype(np.uint32)
        number = ~np.isnan(x)
        np.testing.assert_array_equal(low[number], expected[number])
        back = instruction(f"cvt.f32.{name} %o, %a;", np.float32, low.astype(np.uint16))
        np.testing.assert_array_equal(back[number], torch.from_numpy(x).to(dtype).float().numpy()[number])
        assert np.isnan(back[~number]).all()


def test_float_to_integer_truncates_saturates_and_takes_nan_as_zero_or_in_64_bits_as_the_least():
    x = np.array([1.9, -1.9, 3e9, -3e9, np.nan, np.inf, 2147483520.0, 0.5, 1.5], np.float32)
    got = instruction("cvt.rzi.s32.f32 %o, %a;", np.int32, x)
    np.testing.assert_array_equal(got, [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1, 2147483520, 0, 1])
    got = instruction("cvt.rni.s32.f32 %o, %a;", np.int32, x[-2:])
    np.testing.assert_array_equal(got, [0, 2])
    got = instruction("cvt.rzi.u32.f32 %o, %a;", np.uint32, x)
    np.testing.assert_array_equal(got, [1, 0, 3000000000, 0, 0, 2**32 - 1, 2147483520, 0, 1])
    np.testing.assert_array_equal(instruction("cvt.rmi.f32.f32 %o, %a;", np.float32, x[:2]), [1, -2])
    np.testing.assert_array_equal(instruction("cvt.rzi.s64.f32 %o, %a;", np.int64, x[3:5]), [-3_000_000_000, -(2**63)])
    np.testing.assert_array_equal(instruction("cvt.rzi.u64.f32 %o, %a;", np.uint64, x[3:5]), [0, 2**63])
    y = x[3:5].astype(np.float64)
    np.testing.assert_array_equal(instruction("cvt.rzi.s32.f64 %o, %a;", np.int32, y), [-(2**31), -(2**31)])


def test_integer_to_float_rounds_to_nearest_and_toward_zero():
    x = np.array([16777217, -16777219, 2**31 - 1, 7], np.int32)
    np.testing.assert_array_equal(instruction("cvt.rn.f32.s32 %o, %a;", np.float32, x), x.astype(np.float32))
    toward_zero = instruction("cvt.rz.f32.s32 %o, %a;", np.float32, x)
    np.testing.assert_array_equal(toward_zero, np.array([16777216, -16777218, 2147483520, 7], np.float32))


@pytest.mark.parametrize(
    ("text", "source", "out", "expected"),
    [
        ("cvt.s64.s32 %o, %a;", np.array([-2, 5], np.int32), np.int64, [-2, 5]),
        ("cvt.u64.u32 %o, %a;", np.array([2**32 - 2], np.uint32), np.uint64, [2**32 - 2]),
        ("cvt.u32.u64 %o, %a;", np.array([2**40 + 7], np.uint64), np.uint32, [7]),
        ("cvt.s32.s8 %o, %a;", np.array([0x80FF], np.uint32), np.int32, [-1]),
        ("cvt.u32.u16 %o, %a;", np.array([0x8001], np.uint16), np.uint32, [0x8001]),
        ("cvt.s32.s16 %o, %a;", np.array([0x8001], np.uint16), np.int32, [0x8001 - 0x10000]),
        ("cvt.sat.u8.s32 %t, %a; mov.u32 %o, %t;", np.array([-5, 300, 7], np.int32), np.uint32, [0, 255, 7]),
    ],
)
def test_integer_widths(text, source, out, expected):
    assert instruction(text, out, source).tolist() == expected


def test_pack_and_unpack():
    low, high = np.array([1, 0xFFFF], np.uint16), np.array([2, 0x8000], np.uint16)
    packed = instruction("mov.b32 %o, {%a, %b};", np.uint32, low, high)
    np.testing.assert_array_equal(packed, low | high.astype(np.uint32) << 16)
    wide = instruction("mov.b64 {%t, %u}, %a; add.u32 %o, %t, %u;", np.uint32, np.array([5 | 7 << 32], np.uint64))
    np.testing.assert_array_equal(wide, [12])


def test_signs_classes_and_saturation():
    x = np.array([-2.5, -0.0, 0.25, 3, np.nan, np.inf, 2.0**-130], np.float32)
    y = np.array([1, -1, -1, 1, -1, 1, -1], np.float32)
    np.testing.assert_array_equal(instruction("copysign.f32 %o, %b, %a;", np.float32, x, y), np.copysign(x, y))
    classes = {
        "finite": np.isfinite(x),
        "infinite": np.isinf(x),
        "number": ~np.isnan(x),
        "notanumber": np.isnan(x),
        "normal": np.isfinite(x) & (np.abs(x) >= 2.0**-126),
        "subnormal": (x != 0) & (np.abs(x) < 2.0**-126),
    }
    for name, expected in classes.items():
        got = instruction(f"testp.{name}.f32 %p, %a; selp.u32 %o, 1, 0, %p;", np.uint32, x)
        np.testing.assert_array_equal(got.astype(bool), expected, err_msg=name)
    got = instruction("add.sat.f32 %o, %a, %b;", np.float32, x, np.zeros(7, np.float32))
    np.testing.assert_array_equal(got, np.where(np.isnan(x), 0, np.clip(x, 0, 1)))
    np.testing.assert_array_equal(instruction("fma.rn.sat.f32 %o, %a, %b, %b;", np.float32, x[:4], y[:4]), [0, 0, 0, 1])
    np.testing.assert_array_equal(instruction("neg.f32 %o, %a;", np.float32, x), -x)
    np.testing.assert_array_equal(instruction("abs.ftz.f32 %o, %a;", np.float32, x[5:]), [np.inf, 0])
    np.testing.assert_array_equal(
        instruction("div.full.ftz.f32 %o, %a, %b;", np.float32, x[3:7:3], y[3:7:3]), [3, -0.0]
    )
    big = np.array([2**31 - 1, -(2**31), 5], np.int32)
    np.testing.assert_array_equal(instruction("add.sat.s32 %o, %a, %a;", np.int32, big), [2**31 - 1, -(2**31), 10])
    np.testing.assert_array_equal(instruction("neg.s32 %o, %a;", np.int32, big), [-(2**31) + 1, -(2**31), -5])
    tiny = np.array([2.0**-130, -(2.0**-130)], np.float32)
    flushed = instruction("setp.eq.ftz.f32 %p, %a, 0f00000000; selp.u32 %o, 1, 0, %p;", np.uint32, tiny)
    np.testing.assert_array_equal(flushed, [1, 1])


def test_float64_and_sixteen_bit_floats():
    x = np.array([1.5, -2.25, 1e300, 1 / 3])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(instruction("mul.f64 %o, %a, %a;", np.float64, x), x * x)
        np.testing.assert_array_equal(instruction("cvt.rn.f32.f64 %o, %a;", np.float32, x), x.astype(np.float32))
    toward_zero = instruction("cvt.rz.f32.f64 %o, %a;", np.float32, x[3:])
    assert float(toward_zero[0]) <= 1 / 3 < float(np.nextafter(toward_zero[0], np.float32(1)))
    half = np.array([1.5, -0.1], np.float16)
    np.testing.assert_array_equal(instruction("cvt.f32.f16 %o, %a;", np.float32, half.view(np.uint16)), half)
    single = half.astype(np.float32)
    np.testing.assert_array_equal(instruction("cvt.rn.f16.f32 %o, %a;", np.uint16, single).view(np.float16), half)
    bits = instruction("cvt.rn.bf16.f32 %o, %a;", np.uint16, np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8], np.float32))
    np.testing.assert_array_equal(bits, [0x3F80, 0x3F80, 0x3F82])
    relu = instruction("cvt.rn.relu.bf16x2.f32 %o, %a, %b;", np.uint32, np.float32([-1]), np.float32([2]))
    np.testing.assert_array_equal(relu, [0x00004000])
    np.testing.assert_array_equal(instruction("cvt.rn.f64.s32 %o, %a;", np.float64, np.int32([-7])), [-7.0])


def test_bit_fields_of_64_bits_and_other_bit_operations():
    x = np.array([0x123456789ABCDEF0, (1 << 64) - 1], np.uint64)
    got = instruction("bfe.u64 %o, %a, 20, 40;", np.uint64, x)
    assert [int(v) for v in got] == [int(v) >> 20 & (1 << 40) - 1 for v in x]
    assert instruction("bfi.b64 %o, %a, 0, 8, 60;", np.uint64, x).tolist() == [
        (int(v) & (1 << 60) - 1) << 8 & (1 << 64) - 1 for v in x
    ]
    assert instruction("clz.b64 %o, %a;", np.uint32, x).tolist() == [3, 0]
    word = np.array([0, 1, 0x80000000, 12], np.uint32)
    assert instruction("bfind.u32 %o, %a;", np.uint32, word).tolist() == [2**32 - 1, 0, 31, 3]
    assert instruction("bfind.shiftamt.u32 %o, %a;", np.uint32, word).tolist() == [2**32 - 1, 31, 0, 28]
    assert instruction("bfind.s32 %o, %a;", np.uint32, word).tolist() == [2**32 - 1, 0, 30, 3]
    by = np.array([0, 5, 32, 40], np.uint32)
    rows = [(int(v), int(n)) for v, n in zip(word, by, strict=True)]
    expected = [(v << 32 | 7) >> min(n, 32) & 0xFFFFFFFF for v, n in rows]
    assert instruction("shf.r.clamp.b32 %o, 7, %a, %b;", np.uint32, word, by).tolist() == expected
    assert instruction("not.b32 %o, %a;", np.uint32, word).tolist() == [int(v) ^ 0xFFFFFFFF for v in word]
    wide = instruction("mad.wide.s32 %o, %a, %b, %c;", np.int64, np.int32([-3]), np.int32([2**30]), np.int64([5]))
    assert wide.tolist() == [-3 * 2**30 + 5]
    high = instruction("mad.hi.s32 %o, %a, %b, %c;", np.int32, np.int32([-3]), np.int32([2**30]), np.int32([5]))
    assert high.tolist() == [(-3 * 2**30 >> 32) + 5]


def test_predicates():
    a = np.arange(8, dtype=np.uint32)
    text = """setp.lt.u32 %p|%q, %a, 4; not.pred %q, %q; and.pred %p, %p, %q; mov.pred %q, %p;
              setp.hs.or.u32 %p, %a, 6, !%q; xor.pred %p, %p, %q; selp.u32 %o, 1, 0, %p;"""
    low = a < 4
    expected = ((a >= 6) | ~low) ^ low
    np.testing.assert_array_equal(instruction(text, np.uint32, a).astype(bool), expected)


def test_what_is_not_modelled_is_refused_with_its_line():
    with pytest.raises(UnknownInstruction, match=r"opcode 'dp4a.u32.u32' is not modelled\n  PTX line \d+: dp4a"):
        instruction("dp4a.u32.u32 %o, %a, %a, %a;", np.uint32, np.zeros(1, np.uint32))
    with pytest.raises(UnknownInstruction, match="modifier 'cc'"):
        instruction("add.cc.u32 %o, %a, %a;", np.uint32, np.zeros(1, np.uint32))
    with pytest.raises(UnknownInstruction, match=r"add\.f16"):
        instruction("add.f16 %o, %a, %a;", np.uint16, np.zeros(1, np.uint16))
