"""Every op of the language means in CUDA what it means in Python: on numbers, and on the ranges of a tile."""

import numpy as np
import pytest

from flashgen import interpreter
from flashgen.analysis.abstract import Intervals
from flashgen.codegen import device
from flashgen.codegen.printer import Formula, Printer, RangePrinter
from flashgen.lang import ops, ranges
from flashgen.lang.build import apply, cast
from flashgen.lang.expr import DType, Param, const, node, walk
from flashgen.lang.ops import OPS
from flashgen.runtime import nvrtc

INT, WIDE, FLOAT, BOOL = DType.INT32, DType.INT64, DType.FLOAT32, DType.BOOL
CTYPE = {INT: "int", WIDE: "i64", FLOAT: "float", BOOL: "bool"}
NUMPY = {INT: np.int32, WIDE: np.int64, FLOAT: np.float32, BOOL: np.uint8}
Q, K = (node("index", INT, (), position) for position in "qk")

#: Functions that the hardware approximates.
APPROXIMATE = ("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "erf", "sin", "cos", "pow")


def signatures(name):
    """Operand types that an op takes as they are."""
    op = OPS[name]
    for dtype in (INT, WIDE, FLOAT, BOOL):
        dtypes = (BOOL, dtype, dtype) if name == "where" else (dtype,) * op.arity
        if name == "cast":
            yield from ((dtype, to) for to in (INT, WIDE, FLOAT) if to is not dtype)
            continue
        try:
            if op.accepts(op.spelling, dtypes) == dtypes:
                yield dtypes
        except Exception:
            continue


CASES = [(name, dtypes) for name in OPS for dtypes in signatures(name)]


def run(body, inputs, outputs):
    """A kernel of one thread an element, on the interpreter."""
    pointers = [f"const {c}* in{i}" for i, (c, _) in enumerate(inputs)] + [
        f"{c}* out{i}" for i, (c, _) in enumerate(outputs)
    ]
    count = len(inputs[0][1])
    head = f'extern "C" __global__ void run({", ".join(pointers)}) {{\n  const int i = blockIdx.x * 32 + threadIdx.x;\n'
    text = f"{head}{body}}}\n"
    source = device.used_by("DEVICE u32 u64 " + text) + "\n\n" + text
    memory = interpreter.Memory()
    arguments = [memory.add(f"in{i}", a) for i, (_, a) in enumerate(inputs)]
    arguments += [memory.add(f"out{i}", a, writable=True) for i, (_, a) in enumerate(outputs)]
    module = interpreter.load(nvrtc.ptx(source, "sm_80"), target="sm_80")
    module.launch("run", count // 32, 32, 0, [int(a).to_bytes(8, "little") for a in arguments], memory)


def operand(i, dtype):
    bounded = {"min": 1, "max": 31} if i else {}  # as a divisor or a shift count
    return node("param", dtype, (), Param(name=f"x{i}", dtype=dtype, default=None, **bounded if dtype.is_int else {}))


def sample(rng, dtype, i, count):
    if dtype is FLOAT:
        return (
            np.abs(rng.normal(0, 4, count)).astype(np.float32) + 0.01
            if i
            else rng.normal(0, 4, count).astype(np.float32)
        )
    if dtype is BOOL:
        return rng.integers(0, 2, count).astype(np.uint8)
    low, high = (1, 32) if i else (-1000, 1000)
    return rng.integers(low, high, count).astype(NUMPY[dtype])


def test_every_op_has_a_case():
    assert {name for name, _ in CASES} == set(OPS)


def test_tanh_by_polynomials():
    """Both meet at SMALL_TANH, and keep what matters at their ends: digits of tanh near 0, those of 1 - tanh near 1."""
    small = np.linspace(-0.75, 0.75, 1024, dtype=np.float32)
    large = np.copysign(np.geomspace(0.75, 30, 1024), np.arange(1024) % 2 - 0.5).astype(np.float32)
    found = [np.full(1024, np.nan, np.float32) for _ in range(3)]
    calls = "small_tanh(in0[i])", "large_tanh(in1[i])", "small_tanh(8.f * in0[i], 0.125f)"
    body = "".join(f"  out{n}[i] = {call};\n" for n, call in enumerate(calls))
    run(body, [("float", small), ("float", large)], [("float", x) for x in found])
    right = np.tanh(small.astype(np.float64)), np.tanh(large.astype(np.float64))
    rounding = 2.0**-23
    assert np.abs(found[0] - right[0]).max() <= 2.0**-17.4 + rounding
    np.testing.assert_array_equal(found[2], found[0])  # a unit that is a power of two changes no bit
    near = np.abs(small) < 0.01
    np.testing.assert_allclose(found[0][near], right[0][near], rtol=2.0**-21)
    assert np.abs(found[1] - right[1]).max() <= 2.0**-17.7 + rounding
    rest = 1 - np.abs(right[1])
    np.testing.assert_allclose(1 - np.abs(found[1].astype(np.float64)), rest, rtol=2.0**-16, atol=2 * rounding)
    assert (np.sign(found[1]) == np.sign(large)).all()


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_ops_on_numbers(exact):
    rng = np.random.default_rng(3)
    count = 128
    inputs, outputs, lines, checks = [], [], [], []
    for name, dtypes in CASES:
        nodes = [operand(i, dtype) for i, dtype in enumerate(dtypes[: OPS[name].arity])]
        root = cast(nodes[0], dtypes[1]) if name == "cast" else apply(name, *nodes)
        data = [sample(rng, n.dtype, i, count) for i, n in enumerate(nodes)]
        if name in ("log", "log2", "log1p", "pow", "sqrt", "rsqrt"):
            data = [np.abs(a) + np.float32(0.01) for a in data]
        known = {}
        lines.append("  {\n")
        for i, (n, values) in enumerate(zip(nodes, data, strict=True)):
            lines.append(f"    const {CTYPE[n.dtype]} x{i} = in{len(inputs)}[i];\n")
            inputs.append(("unsigned char" if n.dtype is BOOL else CTYPE[n.dtype], values))
            known[n] = type(Printer().leaf(n))(f"x{i}")
        out = np.zeros(count, NUMPY[root.dtype])
        lines.append(f"    out{len(outputs)}[i] = {Printer(exact=exact).one(root, known)};\n  }}\n")
        outputs.append(("unsigned char" if root.dtype is BOOL else CTYPE[root.dtype], out))
        python = [
            a.astype(bool) if n.dtype is BOOL else a.astype(np.int64) if n.dtype.is_int else a
            for n, a in zip(nodes, data, strict=True)
        ]
        expected = ops._cast(python[0], root.dtype) if name == "cast" else OPS[name].python(*python)
        checks.append((name, dtypes, out, expected))
    run("".join(lines), inputs, outputs)
    for name, dtypes, out, expected in checks:
        if name in APPROXIMATE or (name == "div" and not exact):
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5, err_msg=f"{name} {dtypes}")
        else:
            np.testing.assert_array_equal(out, np.asarray(expected).astype(out.dtype), err_msg=f"{name} {dtypes}")


def roots():
    """One expression over q and k for each op and kind of operand, with what it is of."""
    a, b = Q, K
    divisor, count = apply("maximum", apply("bit_and", K, 7), 1), apply("bit_and", K, 7)
    x, y = (apply("mul", cast(n, FLOAT), scale) for n, scale in ((Q, 0.75), (K, -1.5)))
    p, r = apply("lt", Q, K), apply("eq", Q, 3)
    for name, dtypes in CASES:
        kind = dtypes[-1] if name != "cast" else dtypes[0]
        first, second = {INT: (a, b), WIDE: (cast(a, WIDE), cast(b, WIDE)), FLOAT: (x, y), BOOL: (p, r)}[kind]
        if name in ("floor_div", "mod"):
            second = cast(divisor, kind)
        elif name.startswith("shift"):
            second = cast(count, kind)
        elif name == "div":
            second = apply("add", y, 0.25)
        if name == "cast":
            yield cast(first, dtypes[1])
        elif name == "where":
            yield apply(name, p, first, second)
        else:
            yield apply(name, *(first, second)[: OPS[name].arity])
    for sign in (-1, 1):  # divisors of either sign, known and not
        yield apply("mod", a, const(7 * sign))
        yield apply("floor_div", a, const(7 * sign))
        yield apply("mod", a, apply("mul", divisor, const(sign)))
    yield apply("mul", x, y)
    yield apply("div", x, apply("mul", y, y))


@pytest.mark.sampled("int64")
@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_ops_on_ranges(wide):
    rng = np.random.default_rng(5)
    count = 256
    lo = rng.integers(-60, 60, (2, count)) * rng.choice([1, 1, 1, 700], (2, count))
    hi = lo + rng.choice([0, 0, 1, 3, 8, 50], (2, count))
    every = list(dict.fromkeys(roots()))
    leaf = {"q": ranges.ints(lo[0], hi[0]), "k": ranges.ints(lo[1], hi[1])}
    judge = Intervals(lambda n, _: leaf[n.attr])
    ints = {n for n in walk(every) if n.dtype is INT and n.operands and n.op != "cast"}
    printer = RangePrinter(wide=frozenset(ints) if wide else frozenset(), exact=True)
    lines = ["  const Range<int> q = {in0[i], in1[i]}, k = {in2[i], in3[i]};\n"]
    inputs = [("int", ends.astype(np.int32)) for pair in zip(lo, hi, strict=True) for ends in pair]
    outputs, checks = [], []
    for root in every:
        body = printer.body(root)
        lines.append("  {\n" + "".join(f"    {line}\n" for line in body.lines))
        lines.append(f"    const {printer.ctype(root)} found = {body.value};\n")
        members = {"Truth": ("may_true", "may_false"), "FloatRange": ("lo", "hi", "nan")}.get(
            printer.ctype(root), ("lo", "hi")
        )
        expected = judge(root)
        for member in members:
            number = member in ("lo", "hi")
            out = np.zeros(count, (np.float64 if root.dtype is FLOAT else np.int64) if number else np.uint8)
            lines.append(f"    out{len(outputs)}[i] = found.{member};\n")
            outputs.append((("double" if root.dtype is FLOAT else "i64") if number else "unsigned char", out))
            checks.append((root, member, out, np.broadcast_to(getattr(expected, member), (count,))))
        lines.append("  }\n")
    run("".join(lines), inputs, outputs)
    for root, member, out, expected in checks:
        message = f"{member} of {Formula().inline(root, 1000)}"
        if root.dtype is INT and not wide:  # what may leave int32 is computed in 64 bits
            fits = (judge(root).lo >= ranges.INT32_MIN) & (judge(root).hi <= ranges.INT32_MAX)
            out, expected = out[fits], expected[fits]
        if root.op in APPROXIMATE and member != "nan":
            largest = np.finfo(np.float32).max
            out, expected = np.clip(out, -largest, largest), np.clip(expected, -largest, largest)
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5, err_msg=message)
        else:
            np.testing.assert_array_equal(out, expected.astype(out.dtype), err_msg=message)
