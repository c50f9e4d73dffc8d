"""Integer arithmetic, bits, comparisons and predicates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.ops import floats
from flashgen.interpreter.parser import Imm, Not, Pair, Reg, Sink
from flashgen.interpreter.registers import Mask, Slots


def ufunc2(b: Build, ufunc: np.ufunc, kind: str) -> Closure:
    """d = ufunc(a, b) on registers of one type."""
    d, x, y = b.write(b.operands[0], kind), b.read(b.operands[1], kind), b.read(b.operands[2], kind)

    def run(V: Slots, m: Mask) -> None:
        ufunc(V[x], V[y], out=V[d], where=m)

    return run


def ufunc1(b: Build, ufunc: np.ufunc, kind: str) -> Closure:
    d, x = b.write(b.operands[0], kind), b.read(b.operands[1], kind)

    def run(V: Slots, m: Mask) -> None:
        ufunc(V[x], out=V[d], where=m)

    return run


def assign(b: Build, kind: str, value: Callable[[Slots], np.ndarray]) -> Closure:
    """d = value(slots), for results that no single ufunc gives."""
    d = b.write(b.operands[0], kind)

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], value(V), where=m, casting="unsafe")

    return run


def _arithmetic(ufunc: np.ufunc, on_floats: Callable[[Build, str], Closure]) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        if kind in types.FLOATS or kind in ("f16x2", "bf16x2"):
            return on_floats(b, kind)
        if kind not in types.INTEGERS:
            raise b.unknown(f"type {kind}")
        if kind == "s32" and b.take("sat"):
            b.done(3)
            x, y = b.read(b.operands[1], kind), b.read(b.operands[2], kind)
            return assign(b, kind, lambda V: np.clip(ufunc(V[x], V[y], dtype=np.int64), -(1 << 31), (1 << 31) - 1))
        b.done(3)
        return ufunc2(b, ufunc, kind)

    return build


def _high(x: np.ndarray, y: np.ndarray, kind: str) -> np.ndarray:
    """The upper half of a product."""
    if kind in ("s16", "u16"):
        return np.multiply(x, y, dtype=np.int64) >> 16
    if kind == "s32":
        return np.multiply(x, y, dtype=np.int64) >> 32
    if kind == "u32":
        return np.multiply(x, y, dtype=np.uint64) >> np.uint64(32)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, c = np.asarray(x).astype(np.uint64), np.asarray(y).astype(np.uint64)
    a0, a1, c0, c1 = a & low, a >> shift, c & low, c >> shift
    middle = a1 * c0 + (a0 * c0 >> shift)
    high = a1 * c1 + (middle >> shift) + ((a0 * c1 + (middle & low)) >> shift)
    if kind == "s64":
        high = high - np.where(np.asarray(x) < 0, c, 0) - np.where(np.asarray(y) < 0, a, 0)
    return high


_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def mul(b: Build) -> Closure:
    kind = b.type()
    if kind in types.FLOATS or kind in ("f16x2", "bf16x2"):
        return floats.binary(b, kind, np.multiply)
    if kind not in types.INTEGERS:
        raise b.unknown(f"type {kind}")
    half = b.take("lo", "hi", "wide")
    b.done(3)
    if half == "lo":
        return ufunc2(b, np.multiply, kind)
    x, y = b.read(b.operands[1], kind), b.read(b.operands[2], kind)
    if half == "hi":
        return assign(b, kind, lambda V: _high(V[x], V[y], kind))
    if half != "wide" or kind not in _WIDE:
        raise b.unknown("a product without .lo, .hi or .wide")
    d, dtype = b.write(b.operands[0], _WIDE[kind]), types.DTYPES[_WIDE[kind]]

    def run(V: Slots, m: Mask) -> None:
        np.multiply(V[x], V[y], out=V[d], where=m, dtype=dtype)

    return run


def mad(b: Build) -> Closure:
    kind = b.type()
    if kind in types.FLOATS:
        return floats.fma_of(b, kind)
    half = b.take("lo", "hi", "wide")
    b.done(4)
    if kind not in types.INTEGERS:
        raise b.unknown(f"type {kind}")
    out = _WIDE[kind] if half == "wide" else kind
    x, y, z = b.read(b.operands[1], kind), b.read(b.operands[2], kind), b.read(b.operands[3], out)
    dtype = types.DTYPES[out]
    if half == "hi":
        return assign(b, out, lambda V: _high(V[x], V[y], kind).astype(dtype) + V[z])
    if half not in ("lo", "wide"):
        raise b.unknown("a product without .lo, .hi or .wide")
    return assign(b, out, lambda V: np.multiply(V[x], V[y], dtype=dtype) + V[z])


def _divide(x: np.ndarray, y: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Quotient (toward zero) and remainder; a division by zero gives all ones, as NVIDIA's GPUs do."""
    x, y = np.broadcast_arrays(x, y)
    zero = y == 0
    safe = np.where(zero, y.dtype.type(1), y)
    if kind in types.SIGNED:
        unsigned = types.bits_of(x.dtype)
        a, c = np.abs(x).view(unsigned), np.abs(safe).view(unsigned)
        quotient, rest = a // c, a % c
        quotient = np.where((x < 0) != (safe < 0), -quotient.view(x.dtype), quotient.view(x.dtype))
        rest = np.where(x < 0, -rest.view(x.dtype), rest.view(x.dtype))
    else:
        quotient, rest = x // safe, x % safe
    ones = np.array(-1).astype(x.dtype)
    return np.where(zero, ones, quotient), np.where(zero, x, rest)


def _division(part: int) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        if kind in types.FLOATS and part == 0:
            return floats.division(b, kind)
        b.done(3)
        if kind not in types.INTEGERS:
            raise b.unknown(f"type {kind}")
        x, y = b.read(b.operands[1], kind), b.read(b.operands[2], kind)
        return assign(b, kind, lambda V: _divide(V[x], V[y], kind)[part])

    return build


def _extreme(on_integers: np.ufunc, on_floats: np.ufunc, nan: np.ufunc) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        if kind in types.FLOATS:
            return floats.extreme(b, kind, on_floats, nan)
        b.done(3)
        if kind == "u16x2":
            x, y = b.read(b.operands[1], kind), b.read(b.operands[2], kind)
            return assign(b, kind, lambda V: _of_halves(on_integers, V[x], V[y]))
        if kind not in types.INTEGERS:
            raise b.unknown(f"type {kind}")
        return ufunc2(b, on_integers, kind)

    return build


def _of_halves(ufunc: np.ufunc, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the upper and the lower 16 bits of words, each by itself."""
    upper, lower = np.uint32(0xFFFF0000), np.uint32(0xFFFF)
    return ufunc(x & upper, y & upper) | ufunc(x & lower, y & lower)


def _one(on_integers: np.ufunc, on_floats: Callable[[Build, str], Closure]) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        if kind in types.FLOATS or kind in ("f16x2", "bf16x2"):
            return on_floats(b, kind)
        b.done(2)
        if kind not in types.SIGNED:
            raise b.unknown(f"type {kind}")
        return ufunc1(b, on_integers, kind)

    return build


# ---------------------------------------------------------------- bits
def _bitwise(ufunc: np.ufunc, on_predicates: np.ufunc) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        b.done(3)
        if kind not in ("pred", "b16", "b32", "b64"):
            raise b.unknown(f"type {kind}")
        return ufunc2(b, on_predicates if kind == "pred" else ufunc, kind)

    return build


def bit_not(b: Build) -> Closure:
    kind = b.type()
    b.done(2)
    return ufunc1(b, np.logical_not if kind == "pred" else np.invert, kind)


def _shift(left: bool) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        b.done(3)
        x, by = b.read(b.operands[1], kind), b.read(b.operands[2], "u32")
        dtype = types.DTYPES[kind]
        width = dtype.type(8 * dtype.itemsize)
        ufunc = np.left_shift if left else np.right_shift
        # Amounts of the width and more clear the value (or fill it with its sign): NumPy does so for the width itself.
        return assign(b, kind, lambda V: ufunc(V[x], np.minimum(V[by], np.uint32(width)).astype(dtype)))

    return build


def funnel_shift(b: Build) -> Closure:
    kind = b.type()
    direction, mode = b.take("l", "r"), b.take("wrap", "clamp")
    b.done(4)
    if kind != "b32" or not direction or not mode:
        raise b.unknown("this form")
    low, high, by = (b.read(operand, "b32") for operand in b.operands[1:4])

    def value(V: Slots) -> np.ndarray:
        pair = np.asarray(V[high]).astype(np.uint64) << np.uint64(32) | np.asarray(V[low]).astype(np.uint64)
        amount = np.asarray(V[by]) & 31 if mode == "wrap" else np.minimum(V[by], 32)
        amount = np.asarray(amount).astype(np.uint64)
        if direction == "r":
            return (pair >> amount).astype(np.uint32)
        return ((pair << amount) >> np.uint64(32)).astype(np.uint32)

    return assign(b, "b32", value)


def lop3(b: Build) -> Closure:
    kind = b.type()
    b.done(5)
    if kind != "b32":
        raise b.unknown("a predicate form")
    x, y, z = (b.read(operand, "b32") for operand in b.operands[1:4])
    table = b.immediate(b.operands[4])

    def value(V: Slots) -> np.ndarray:
        out = np.uint32(0)
        for n in range(8):
            if table >> n & 1:
                bits = (V[x] if n & 4 else ~V[x]) & (V[y] if n & 2 else ~V[y]) & (V[z] if n & 1 else ~V[z])
                out = out | bits
        return out

    return assign(b, "b32", value)


def bit_field_insert(b: Build) -> Closure:
    kind = b.type()
    b.done(5)
    if kind not in ("b32", "b64"):
        raise b.unknown(f"type {kind}")
    width = 8 * types.size(kind)
    dtype = types.DTYPES[kind]
    x, y = b.read(b.operands[1], kind), b.read(b.operands[2], kind)
    at, count = b.read(b.operands[3], "u32"), b.read(b.operands[4], "u32")

    def value(V: Slots) -> np.ndarray:
        start = np.asarray(V[at] & np.uint32(0xFF)).astype(np.uint64)
        length = np.asarray(V[count] & np.uint32(0xFF)).astype(np.uint64)
        ones = np.where(length >= width, dtype.type(-1 & (1 << width) - 1), (np.uint64(1) << length) - np.uint64(1))
        field = ones.astype(np.uint64) << start
        return (np.asarray(V[y]) & ~field) | (np.asarray(V[x]).astype(np.uint64) << start & field)

    return assign(b, kind, value)


def bit_field_extract(b: Build) -> Closure:
    kind = b.type()
    b.done(4)
    if kind not in ("u32", "s32", "u64", "s64"):
        raise b.unknown(f"type {kind}")
    width = 8 * types.size(kind)
    x = b.read(b.operands[1], f"u{width}")
    at, count = b.read(b.operands[2], "u32"), b.read(b.operands[3], "u32")

    def value(V: Slots) -> np.ndarray:
        v = np.asarray(V[x]).astype(np.uint64)
        start = (V[at] & np.uint32(0xFF)).astype(np.int64)
        length = (V[count] & np.uint32(0xFF)).astype(np.int64)
        valid = np.minimum(length, np.maximum(0, width - start)).astype(np.uint64)
        ones = ~np.uint64(0) >> np.minimum(np.uint64(64) - valid, np.uint64(63))
        ones = np.where(valid == 0, np.uint64(0), ones)
        field = v >> np.minimum(start, 63).astype(np.uint64) & ones
        if kind in types.SIGNED:
            last = np.minimum(start + length - 1, width - 1)
            sign = (v >> np.maximum(last, 0).astype(np.uint64) & np.uint64(1)).astype(bool) & (length > 0)
            field = np.where(sign, field | ~ones, field)
        return field

    return assign(b, f"u{width}", value)


def _count_bits(value: Callable[[np.ndarray, int], np.ndarray]) -> Callable[[Build], Closure]:
    def build(b: Build) -> Closure:
        kind = b.type()
        b.done(2)
        if kind not in ("b32", "b64"):
            raise b.unknown(f"type {kind}")
        x, width = b.read(b.operands[1], kind), 8 * types.size(kind)
        return assign(b, "u32", lambda V: value(np.asarray(V[x]), width))

    return build


def _leading_zeros(x: np.ndarray, width: int) -> np.ndarray:
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < width:
            x = x | x >> x.dtype.type(shift)
    return width - np.bitwise_count(x).astype(np.int64)


def bit_reverse(b: Build) -> Closure:
    kind = b.type()
    b.done(2)
    x, width = b.read(b.operands[1], kind), 8 * types.size(kind)

    def value(V: Slots) -> np.ndarray:
        v = np.asarray(V[x])
        return sum((v >> v.dtype.type(n) & v.dtype.type(1)) << v.dtype.type(width - 1 - n) for n in range(width))

    return assign(b, kind, value)


def find_leading(b: Build) -> Closure:
    """bfind: the highest bit that differs from the sign; .shiftamt: how far left it could move.  None: all ones."""
    kind = b.type()
    distance = bool(b.take("shiftamt"))
    b.done(2)
    width = 8 * types.size(kind)
    x = b.read(b.operands[1], kind)
    unsigned = types.bits_of(types.DTYPES[kind])

    def value(V: Slots) -> np.ndarray:
        v = np.asarray(V[x])
        zeros = _leading_zeros(np.where(v < 0, ~v, v).astype(unsigned), width)
        return np.where(zeros == width, -1, zeros if distance else width - 1 - zeros)

    return assign(b, "u32", value)


def permute_bytes(b: Build) -> Closure:
    kind = b.type()
    b.done(4)
    if kind != "b32":
        raise b.unknown("a mode")
    x, y, pick = (b.read(operand, "b32") for operand in b.operands[1:4])

    def value(V: Slots) -> np.ndarray:
        pair = np.asarray(V[y]).astype(np.uint64) << np.uint64(32) | np.asarray(V[x]).astype(np.uint64)
        selector = np.asarray(V[pick]).astype(np.uint64)
        out = np.uint64(0)
        for n in range(4):
            nibble = selector >> np.uint64(4 * n) & np.uint64(15)
            byte = pair >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            out = out | np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * n)
        return out

    return assign(b, "b32", value)


# ---------------------------------------------------------------- comparisons and selection
_COMPARE: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE: dict[str, np.ufunc] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(b: Build) -> Closure:
    """setp: `p` or `p|q` = a CMP b, optionally combined with a predicate."""
    kind = b.type()
    combine = b.take(*_COMBINE)
    flush = bool(b.take("ftz"))
    name = b.mods.pop(0) if b.mods else ""
    b.done(4 if combine else 3)
    x, y = b.read(b.operands[1], kind), b.read(b.operands[2], kind)
    if kind in types.FLOATS:
        test = floats.comparison(b, name, kind, flush)
    else:
        name = _UNSIGNED_NAMES.get(name, name)
        if name not in _COMPARE:
            raise b.unknown(f"comparison {name!r}")
        test = _COMPARE[name]
    target = b.operands[0]
    _remember(b, target, name)
    if not combine and not isinstance(target, Pair) and isinstance(test, np.ufunc):
        d = b.write(target, "pred")

        def run(V: Slots, m: Mask) -> None:
            test(V[x], V[y], out=V[d], where=m)

        return run
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    with_, negate = None, False
    if combine:
        operand = b.operands[3]
        negate = isinstance(operand, Not)
        with_ = b.read(operand.reg if isinstance(operand, Not) else operand, "pred")
    join = _COMBINE.get(combine)
    p = None if isinstance(first, Sink) else b.write(first, "pred")
    q = None if isinstance(second, Sink) else b.write(second, "pred")

    def run_combined(V: Slots, m: Mask) -> None:
        result = test(V[x], V[y])
        inverse = np.logical_not(result)
        if join is not None:
            other = np.logical_not(V[with_]) if negate else V[with_]
            result, inverse = join(result, other), join(inverse, other)
        if p is not None:
            np.copyto(V[p], result, where=m)
        if q is not None:
            np.copyto(V[q], inverse, where=m)

    return run_combined


def _remember(b: Build, target: object, name: str) -> None:
    """A predicate that inline assembly sets from two constants is known when the instruction after it is built."""
    constants = b.translator.constants
    if isinstance(target, Reg):
        x, y = b.operands[1], b.operands[2]
        if isinstance(x, Imm) and isinstance(y, Imm) and name in ("eq", "ne") and len(b.operands) == 3:
            constants[target.name] = (x.value == y.value) == (name == "eq")
        else:
            constants.pop(target.name, None)


def select(b: Build) -> Closure:
    """selp: a where the predicate holds, else b."""
    kind = b.type()
    b.done(4)
    x, y, p = b.read(b.operands[1], kind), b.read(b.operands[2], kind), b.read(b.operands[3], "pred")
    d = b.write(b.operands[0], kind)

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], np.where(V[p], V[x], V[y]), where=m)

    return run


TABLE: dict[str, Callable[[Build], Closure]] = {
    "add": _arithmetic(np.add, lambda b, kind: floats.binary(b, kind, np.add)),
    "sub": _arithmetic(np.subtract, lambda b, kind: floats.binary(b, kind, np.subtract)),
    "mul": mul,
    "mad": mad,
    "div": _division(0),
    "rem": _division(1),
    "min": _extreme(np.minimum, np.fmin, np.minimum),
    "max": _extreme(np.maximum, np.fmax, np.maximum),
    "abs": _one(np.abs, lambda b, kind: floats.unary(b, kind, np.abs)),
    "neg": _one(np.negative, lambda b, kind: floats.unary(b, kind, np.negative)),
    "and": _bitwise(np.bitwise_and, np.logical_and),
    "or": _bitwise(np.bitwise_or, np.logical_or),
    "xor": _bitwise(np.bitwise_xor, np.logical_xor),
    "not": bit_not,
    "shl": _shift(True),
    "shr": _shift(False),
    "shf": funnel_shift,
    "lop3": lop3,
    "bfi": bit_field_insert,
    "bfe": bit_field_extract,
    "popc": _count_bits(lambda x, width: np.bitwise_count(x)),
    "clz": _count_bits(_leading_zeros),
    "brev": bit_reverse,
    "bfind": find_leading,
    "prmt": permute_bytes,
    "setp": compare,
    "selp": select,
}
