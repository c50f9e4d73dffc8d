"""The range rules of device/range.cuh are those of `lang.ranges`: on thousands of ranges, and on elements inside them.

Every rule runs on the PTX interpreter, a lane for each pair of ranges, and is compared with Python's.  Both must hold
what the op gives for elements drawn from the ranges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest

from flashgen import interpreter
from flashgen.codegen import device
from flashgen.lang import ranges
from flashgen.lang.expr import DType
from flashgen.lang.ops import OPS
from flashgen.lang.proxies import MAX_EXPONENT
from flashgen.lang.ranges import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, Range, Truth
from flashgen.resources import folder
from flashgen.runtime import nvrtc

INT, WIDE, FLOAT, BOOL = DType.INT32, DType.INT64, DType.FLOAT32, DType.BOOL
COUNT = 2048
ELEMENTS = 6  # drawn from each range, its ends among them

#: How operands reach a lane, and how it leaves its result.
LOADED = {
    INT: "Range<int>{{int(lo{0}[i]), int(hi{0}[i])}}",
    WIDE: "Range<i64>{{lo{0}[i], hi{0}[i]}}",
    FLOAT: "FloatRange{{__longlong_as_double(lo{0}[i]), __longlong_as_double(hi{0}[i]), nan{0}[i] != 0}}",
    BOOL: "Truth{{lo{0}[i] != 0, hi{0}[i] != 0}}",
}
STORED = {
    INT: "lo[i] = found.lo; hi[i] = found.hi;",
    WIDE: "lo[i] = found.lo; hi[i] = found.hi;",
    FLOAT: "lo[i] = __double_as_longlong(found.lo); hi[i] = __double_as_longlong(found.hi); nan[i] = found.nan;",
    BOOL: "lo[i] = found.may_true; hi[i] = found.may_false;",
}


@dataclass(frozen=True)
class Rule:
    """A function of range.cuh and the op that it is a rule of."""

    function: str
    op: str
    operands: tuple[DType, ...]
    result: DType

    @property
    def kernel(self) -> str:
        return re.sub(r"\W+", "_", "_".join((self.function, "of", *(dtype.value for dtype in self.operands))))


def _rules():
    comparisons, extremes = ("lt", "le", "gt", "ge", "eq", "ne"), ("minimum", "maximum")
    checked = ("add", "sub", "mul", "shift_left", "floor_div")
    for T in (INT, WIDE):
        suffix = "_i64" if T is WIDE else ""
        yield from (Rule(f"range_{name}", name, (T, T), BOOL) for name in comparisons)
        yield from (Rule(f"range_{name}{suffix}", name, (T, T), T) for name in checked)
        yield from (Rule(f"range_{name}{suffix}", name, (T,), T) for name in ("neg", "abs"))
        yield from (Rule(f"range_{name}", name, (T, T), T) for name in (*extremes, "shift_right", "mod"))
        yield from (Rule(f"range_{name}", name, (T, T), T) for name in ("bit_and", "bit_or", "bit_xor"))
        yield Rule("range_bit_not", "bit_not", (T,), T)
        yield Rule("range_where", "where", (BOOL, T, T), T)
    for name in ("mod_positive", "mod_negative"):
        yield from (Rule(f"range_{name}", "mod", (T, T), T) for T in (INT, WIDE))
    yield Rule("range_floor_div", "floor_div", (WIDE, WIDE), WIDE)
    yield from (
        Rule(f"range_{name}", name, (BOOL, BOOL), BOOL) for name in ("logical_and", "logical_or", "logical_xor")
    )
    yield from (Rule(f"range_{name}_bool", name, (BOOL, BOOL), BOOL) for name in ("eq", "ne"))
    yield Rule("range_logical_not", "logical_not", (BOOL,), BOOL)
    yield Rule("range_where_bool", "where", (BOOL, BOOL, BOOL), BOOL)
    yield from (Rule(f"range_{name}_f32", name, (FLOAT, FLOAT), BOOL) for name in comparisons)
    yield from (
        Rule(f"range_{name}_f32", name, (FLOAT, FLOAT), FLOAT)
        for name in (*extremes, "add", "sub", "mul", "div", "pow")
    )
    of_one = ("neg", "abs", "floor", *(name for name in APPROXIMATE if OPS[name].arity == 1))
    yield from (Rule(f"range_{name}_f32", name, (FLOAT,), FLOAT) for name in of_one)
    yield Rule("range_where_f32", "where", (BOOL, FLOAT, FLOAT), FLOAT)
    yield Rule("range_cast_int", "cast", (WIDE,), INT)
    yield Rule("range_cast_i64", "cast", (WIDE,), WIDE)
    yield Rule("range_cast<i64>", "cast", (INT,), WIDE)
    yield Rule("range_cast_f32", "cast", (WIDE,), FLOAT)
    yield Rule("range_cast_bool", "cast", (BOOL,), INT)
    yield from (Rule(f"range_truncate<{name}>", "cast", (FLOAT,), T) for name, T in (("int", INT), ("i64", WIDE)))


#: Functions of the special unit: the kernel widens its own estimate of them, Python the exact value.
APPROXIMATE = ("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "erf", "sin", "cos", "pow")
RULES = tuple(_rules())
SHARED = {"range_no_wider", "range_of_bits", "range_of_wave"}  # parts of other rules
OTHERS = {"range_clamp_index"}  # of captured loads


def test_every_rule_of_the_kernel_is_compared_here():
    text = (folder("templates") / "device" / "range.cuh").read_text()
    written = set(re.findall(r"DEVICE [\w<>]+ (range_\w+)\(", text))
    assert written == {rule.function.partition("<")[0] for rule in RULES} | SHARED | OTHERS
    ruled = {rule.op for rule in RULES}
    assert ruled == set(OPS)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


def _kernel(rule: Rule) -> str:
    operands = range(len(rule.operands))
    inputs = "".join(f"const i64* lo{n}, const i64* hi{n}, const i64* nan{n}, " for n in operands)
    values = ", ".join(LOADED[dtype].format(n) for n, dtype in enumerate(rule.operands))
    return f"""extern "C" __global__ void {rule.kernel}({inputs}i64* lo, i64* hi, i64* nan) {{
  const int i = blockIdx.x * 256 + threadIdx.x;
  const auto found = {rule.function}({values});
  {STORED[rule.result]}
}}
"""


def _value_kernel(name: str) -> str:
    operands = range(OPS[name].arity)
    value = OPS[name].cuda(FLOAT).format(*(f"x{n}[i]" for n in operands))
    inputs = "".join(f"const float* x{n}, " for n in operands)
    return f"""extern "C" __global__ void value_of_{name}({inputs}float* y) {{
  const int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = {value};
}}
"""


@lru_cache(maxsize=1)
def module() -> interpreter.Module:
    text = "\n".join((*map(_kernel, RULES), *map(_value_kernel, APPROXIMATE)))
    return interpreter.load(
        nvrtc.ptx(device.used_by("DEVICE u32 u64 " + text) + "\n\n" + text, "sm_80"), target="sm_80"
    )


def _bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    return np.ascontiguousarray(x, np.float64).view(np.int64) if dtype.is_float else np.ascontiguousarray(x, np.int64)


def in_the_kernel(rule: Rule, operands: list[Range | Truth]) -> Range | Truth:
    """What the kernel's rule gives, a lane for each element."""
    memory, pointers = interpreter.Memory(), []
    for n, (a, dtype) in enumerate(zip(operands, rule.operands, strict=True)):
        parts = (a.may_true, a.may_false, a.may_true) if isinstance(a, Truth) else (a.lo, a.hi, a.nan)
        for part, kind in zip(parts, (dtype, dtype, BOOL), strict=True):
            array = _bits(np.broadcast_to(part, COUNT), kind)
            pointers.append(memory.add(f"in{n}_{len(pointers)}", array))
    lo, hi, nan = out = [np.zeros(COUNT, np.int64) for _ in range(3)]
    pointers += [memory.add(f"out{n}", array, writable=True) for n, array in enumerate(out)]
    arguments = [int(p).to_bytes(8, "little") for p in pointers]
    module().launch(rule.kernel, COUNT // 256, 256, 0, arguments, memory)
    if rule.result is BOOL:
        return Truth(lo != 0, hi != 0)
    if rule.result.is_float:
        return Range(lo.view(np.float64), hi.view(np.float64), nan != 0)
    return Range(lo, hi)


def values_in_the_kernel(name: str, *operands: np.ndarray) -> np.ndarray:
    """What the kernel's approximate function gives."""
    memory, y = interpreter.Memory(), np.zeros(operands[0].shape, np.float32)
    pointers = [memory.add(f"x{n}", x.astype(np.float32)) for n, x in enumerate(operands)]
    pointers.append(memory.add("y", y, writable=True))
    arguments = [int(p).to_bytes(8, "little") for p in pointers]
    module().launch(f"value_of_{name}", y.size // 256, 256, 0, arguments, memory)
    return y


# ---------------------------------------------------------------------------------------------------------------------
# Ranges, and elements of them


def _integers(rng: np.random.Generator, dtype: DType) -> np.ndarray:
    low, high = (INT32_MIN, INT32_MAX) if dtype is INT else (INT64_MIN, INT64_MAX)
    small = rng.integers(-9, 10, COUNT)
    any_size = rng.integers(low, high, COUNT, endpoint=True) >> rng.integers(0, 31 if dtype is INT else 63, COUNT)
    near_ends = np.where(rng.random(COUNT) < 0.5, low + np.abs(small), high - np.abs(small))
    powers = np.clip((np.int64(1) << rng.integers(0, 31 if dtype is INT else 63, COUNT)) + small // 4, low, high)
    powers = np.where(rng.random(COUNT) < 0.5, powers, -powers)
    return np.choose(rng.integers(0, 5, COUNT), [small, any_size, near_ends, powers, np.full(COUNT, low)])


def _floats(rng: np.random.Generator) -> np.ndarray:
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-40, -1e-40, 2.0**-126, -(2.0**-126), 2.0**-149, 3.4028235e38]
    special += [-3.4028235e38, 88.7, -87.4, 127.9, -126.5, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63), 0.1, 2147483500.0]
    ordinary = rng.normal(0, 4, COUNT) * 10.0 ** rng.choice([0, 0, 0, 1, -3, 12, -30], COUNT)
    drawn = np.where(rng.random(COUNT) < 0.4, rng.choice(special, COUNT), ordinary)
    return drawn.astype(np.float32).astype(np.float64)


def _range(rng: np.random.Generator, dtype: DType) -> Range | Truth:
    if dtype is BOOL:
        possible = rng.integers(1, 4, COUNT)
        return Truth(possible % 2 == 1, possible >= 2)
    if dtype.is_float:
        a, b = _floats(rng), _floats(rng)
        b = np.where(rng.random(COUNT) < 0.2, a, b)
        swapped = (a > b) | ((a == b) & np.signbit(b) & ~np.signbit(a))
        return Range(np.where(swapped, b, a), np.where(swapped, a, b), rng.random(COUNT) < 0.2)
    a, b = _integers(rng, dtype), _integers(rng, dtype)
    _, high = (INT32_MIN, INT32_MAX) if dtype is INT else (INT64_MIN, INT64_MAX)
    kind, width = rng.random(COUNT), rng.integers(0, 40, COUNT)
    b = np.where(kind < 0.2, a, np.where(kind < 0.5, a + np.minimum(width, high - np.maximum(a, 0)), b))
    return ranges.ints(np.minimum(a, b), np.maximum(a, b))


def _operands(rng: np.random.Generator, rule: Rule) -> list[Range | Truth]:
    found = [_range(rng, dtype) for dtype in rule.operands]
    if rule.op.startswith("shift"):
        lo, hi = (rng.integers(0, 32 if rule.operands[0] is INT else 64, COUNT) for _ in range(2))
        found[1] = ranges.ints(np.minimum(lo, hi), np.maximum(lo, hi))
    elif rule.op in ("mod", "floor_div"):
        lo, hi = found[1].lo, found[1].hi
        if rule.function.endswith("_positive"):
            lo, hi = np.maximum(lo, 1), np.maximum(hi, 1)
        elif rule.function.endswith("_negative"):
            lo, hi = np.minimum(lo, -1), np.minimum(hi, -1)
        found[1] = ranges.ints(lo, hi)
    elif rule.op == "pow":
        found[1] = Range(
            *(np.clip(end, -MAX_EXPONENT, MAX_EXPONENT) for end in (found[1].lo, found[1].hi)), found[1].nan
        )
    return found


def _elements(rng: np.random.Generator, a: Range | Truth, dtype: DType) -> np.ndarray:
    """Some values of each range, as [ELEMENTS, COUNT]: its ends, what stands next to them, and others."""
    if isinstance(a, Truth):
        value = rng.random((ELEMENTS, COUNT)) < 0.5
        return np.where(a.may_true & a.may_false, value, a.may_true)
    if dtype.is_float:
        picked = [a.lo, a.hi]
        for _ in range(ELEMENTS - 2):
            with np.errstate(all="ignore"):
                inside = a.lo + (a.hi - a.lo) * rng.random(COUNT)
            inside = np.where(np.isfinite(inside), inside, np.where(rng.random(COUNT) < 0.5, a.lo, 0.0))
            picked.append(np.clip(inside.astype(np.float32).astype(np.float64), a.lo, a.hi))
        picked = np.stack(picked)
        return np.where(a.nan & (rng.random(picked.shape) < 0.3), np.nan, picked)
    picked = [a.lo, a.hi, np.clip(a.lo + (a.lo < a.hi), a.lo, a.hi), np.clip(rng.integers(-2, 3, COUNT), a.lo, a.hi)]
    picked += [rng.integers(a.lo, a.hi, endpoint=True) for _ in range(ELEMENTS - 4)]
    return np.stack(picked)


def _results(rule: Rule, elements: list[np.ndarray], float_dtype: type) -> np.ndarray:
    values = [x.astype(float_dtype) if d.is_float else x for x, d in zip(elements, rule.operands, strict=True)]
    with np.errstate(all="ignore"):
        if rule.op == "cast":
            return OPS["cast"].python(*values, rule.result, float_dtype)
        return np.asarray(OPS[rule.op].python(*values))


def _holds(found: Range | Truth, values: np.ndarray) -> np.ndarray:
    if isinstance(found, Truth):
        return np.where(values, found.may_true, found.may_false)
    return np.where(np.isnan(values), found.nan, (found.lo <= values) & (values <= found.hi))


def _described(rule: Rule, operands: list[Range | Truth], at: int, *found: Range | Truth) -> str:
    def one(a):
        if isinstance(a, Truth):
            return f"{{{np.broadcast_to(a.may_true, COUNT)[at]}, {np.broadcast_to(a.may_false, COUNT)[at]}}}"
        nan = " or NaN" if np.broadcast_to(a.nan, COUNT)[at] else ""
        return f"[{np.broadcast_to(a.lo, COUNT)[at]!r}, {np.broadcast_to(a.hi, COUNT)[at]!r}]{nan}"

    return f"{rule.function}({', '.join(map(one, operands))}): {', '.join(map(one, found))}"


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kernel)
def test_the_kernel_judges_as_python_does_and_both_hold_what_happens(rule):
    rng = np.random.default_rng(12)
    operands = _operands(rng, rule)
    expected = OPS[rule.op].abstract(*operands, *((rule.result,) if rule.op == "cast" else ()))
    found = in_the_kernel(rule, operands)
    asked = np.ones(COUNT, np.bool_)
    if rule.result is INT:  # 32-bit rules run where the result is proven to fit
        asked &= (expected.lo >= INT32_MIN) & (expected.hi <= INT32_MAX)
    by_zero = np.zeros(COUNT, np.bool_)
    if rule.op in ("mod", "floor_div"):
        by_zero = operands[1].contains(0)
    if rule.function == "range_floor_div":
        asked &= ~by_zero & ~(operands[0].contains(INT64_MIN) & operands[1].contains(-1))
    assert asked.mean() > 0.1
    elements = [_elements(rng, a, dtype) for a, dtype in zip(operands, rule.operands, strict=True)]
    defined = asked & (elements[1] != 0) if rule.op in ("mod", "floor_div") else asked
    for float_dtype in (np.float32, np.float64):
        values = _results(rule, elements, float_dtype)
        _check_holds(rule, operands, expected, values, defined)
        if rule.op not in APPROXIMATE:
            _check_holds(rule, operands, found, values, defined)
    if rule.op in APPROXIMATE:
        _check_holds(rule, operands, found, values_in_the_kernel(rule.op, *elements), defined)
        for end in (end for operand in operands for end in (operand.lo, operand.hi)):
            asked &= ~((np.abs(end) < 2.0**-126) & (end != 0))  # flushed
        same = _close(found.lo, expected.lo) & _close(found.hi, expected.hi) & (found.nan == expected.nan)
    elif isinstance(expected, Truth):
        same = (found.may_true == expected.may_true) & (found.may_false == expected.may_false)
    elif rule.result is INT and rule.op.startswith("bit_"):  # 32 bits know more than 64 of where the sign varies
        same = (found.lo >= expected.lo) & (found.hi <= expected.hi)
    else:
        same = (found.lo == expected.lo) & (found.hi == expected.hi) & (found.nan == expected.nan)
    differ = ~same & asked & ~by_zero  # emitted code divides by what is known not to be 0: the kernel looks no closer
    if differ.any():
        at = int(differ.argmax())
        raise AssertionError(f"{_described(rule, operands, at, found, expected)}: the kernel's and Python's")


def _check_holds(rule: Rule, operands: list[Range | Truth], found: Range | Truth, values: np.ndarray, asked) -> None:
    wrong = (~_holds(found, values) & asked).any(0)
    if wrong.any():
        at = int(wrong.argmax())
        raise AssertionError(f"{_described(rule, operands, at, found)} misses one of {values[:, at]}")


def _close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Within the two margins of an estimate; beyond float32's range infinity will do."""
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= 2.0**-12 * np.abs(b) + 2.0**-15
    return (a == b) | near | ((np.abs(a) > 3e38) & (np.abs(b) > 3e38) & (np.sign(a) == np.sign(b)))
