"""No two operators of emitted text ever join: every op nested in every other, and in all of its places, means in CUDA
what it means in Python."""

import functools
import random
import re

import numpy as np
import pytest
from test_codegen_printer import BOOL, CASES, CTYPE, FLOAT, INT, NUMPY, WIDE, Q, run

from flashgen.analysis import widths
from flashgen.codegen.fold import folded
from flashgen.codegen.printer import Formula, Printer
from flashgen.errors import SpecError
from flashgen.lang import ranges
from flashgen.lang.bounds import bounds
from flashgen.lang.build import apply, cast
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import Param, Tensor, const, node, walk
from flashgen.lang.ops import OPS

LANES = 32

#: Expressions of a kernel: NVRTC takes longer for one with all of them.
AT_ONCE = 300

#: What operators without a space between them would become.
JOINED = re.compile(r"--|\+\+|~~|!!|-=|/\*|\*/|//|<<<|>>>|&&&|\|\|\|")

#: Numbers of leaves, by operand: divisors and shift counts come second; the second set is never negative.
EXTENTS = {"any": ((-99, 99), (1, 3), (-7, 7)), "counts": ((4, 6), (1, 3), (1, 2))}

LITERALS = {
    INT: (5, -5, ranges.INT32_MIN, ranges.INT32_MAX),
    WIDE: (5, -5, ranges.INT64_MIN, ranges.INT64_MAX, 1 << 40),
    FLOAT: (1.5, -1.5, 0.0, -0.0, 1e20, -1e-20, float("inf"), -float("inf")),
    BOOL: (True, False),
}


def leaf(dtype, kind, i):
    name, (lo, hi) = f"{dtype.value}_{kind}{i}", EXTENTS[kind][i]
    if dtype is BOOL:  # there are no parameters that are conditions
        return node("load", BOOL, (Q,), Tensor(name=name, dims=("q",), dtype="bool"))
    known = {"min": lo, "max": hi} if dtype.is_int else {}
    return node("param", dtype, (), Param(name=name, dtype=dtype, default=None, **known))


def made(name, dtypes, operands):
    return cast(operands[0], dtypes[1]) if name == "cast" else apply(name, *operands)


def leaves(name, dtypes, kind):
    return [leaf(dtype, kind, i) for i, dtype in enumerate(dtypes[: OPS[name].arity])]


def fits(root):
    """Whether no value leaves 64 bits, where C++ and Python part."""
    ints = [bounds(n) for n in walk([root]) if n.dtype.is_int and n.operands]
    return all(x.lo > ranges.INT64_MIN and x.hi < ranges.INT64_MAX for x in ints)


def nested():
    """(outer op, place, inner op or literal, expression) of all that the language allows."""
    for kind in EXTENTS:
        inner = {dtype: [(str(v), const(v, dtype)) for v in LITERALS[dtype]] for dtype in LITERALS}
        for name, dtypes in CASES:
            root = made(name, dtypes, leaves(name, dtypes, kind))
            inner[root.dtype].append((name, root))
        for name, dtypes in CASES:
            for place in range(OPS[name].arity):
                for what, operand in inner[dtypes[place]]:
                    operands = leaves(name, dtypes, kind)
                    operands[place] = operand
                    try:
                        root = made(name, dtypes, operands)
                    except SpecError:
                        continue
                    if root.op == name and fits(root):
                        yield name, place, what, root


def deep(rng, dtype, depth):
    """A random expression of that many levels."""
    if depth == 0:
        return leaf(dtype, rng.choice(list(EXTENTS)), rng.randrange(3))
    if rng.random() < 0.1:
        return const(rng.choice(LITERALS[dtype]), dtype)
    while True:
        name, dtypes = rng.choice(CASES)
        try:
            operands = [deep(rng, d, depth - 1) for d in dtypes[: OPS[name].arity]]
            root = made(name, dtypes, operands)
        except SpecError:
            continue
        if root.dtype is dtype and fits(root):
            return root


def check(roots, *, exact):
    """Run the expressions and compare them with NumPy; approximate ones may differ where a comparison is close."""
    rng = np.random.default_rng(7)
    params, tensors, inputs, members, readers = {}, {}, [], [], []
    for n in dict.fromkeys(n for n in walk(roots) if n.op in ("param", "load")):
        name, element = n.attr.name, f"in{len(inputs)}[i]"
        if n.dtype is BOOL:
            tensors[name] = rng.random(LANES) < 0.5
            inputs.append(("unsigned char", tensors[name].astype(np.uint8)))
            readers.append(f"#define read_{name}(at, p) ({element} != 0)\n")
            continue
        values = rng.integers(n.attr.min, n.attr.max + 1, LANES) if n.dtype.is_int else rng.normal(0, 4, LANES)
        params[name] = values.astype(NUMPY[n.dtype])
        inputs.append((CTYPE[n.dtype], params[name]))
        members.append((f"{CTYPE[n.dtype]} param_{name};", element))
    printer = Printer(wide=widths.wide(roots), exact=exact)
    declared, values = (" ".join(member for member, _ in members), ", ".join(value for _, value in members))
    lines = ["  const int q = i;\n", f"  struct {{ {declared} }} p = {{{values}}};\n", *readers]
    texts = []
    for number, root in enumerate(roots):
        body = printer.body(root)
        texts.append("\n".join([*body.lines, str(body.value)]))
        out = 1 if root.dtype.is_float else 0
        lines += ["  {\n", *(f"    {line}\n" for line in body.lines)]
        lines.append(f"    out{out}[{number * LANES} + i] = {body.value};\n  }}\n")
    for text in texts:
        assert not JOINED.search(text), text
    wholes, floats = np.zeros(len(roots) * LANES, np.int64), np.zeros(len(roots) * LANES, np.float32)
    run(folded("".join(lines)), inputs, [("i64", wholes), ("float", floats)])
    wrong = []
    for number, root in enumerate(roots):
        at = slice(number * LANES, (number + 1) * LANES)
        expected = np.broadcast_to(
            evaluate(root, sizes={}, params=params, tensors=tensors, q=np.arange(LANES)), (LANES,)
        )
        if root.dtype.is_float:
            scale = np.abs(expected[np.isfinite(expected)]).max(initial=1)
            same = np.isclose(floats[at], expected, rtol=1e-4, atol=1e-4 * min(scale, 100), equal_nan=True)
        else:
            same = wholes[at] == expected.astype(np.int64)
        rounded = any(n.dtype.is_float for n in walk([root]))
        if root.op in ("sin", "cos") and "1e+20" in texts[number]:
            same = np.abs(floats[at]) <= 1  # of what is beyond 2^24 no more is promised
        if np.mean(same) < (0.85 if rounded else 1):
            wrong.append(f"{Formula().inline(root, 1_000)}: {texts[number]}")
    assert not wrong, "\n".join(wrong)


@functools.cache
def pairs():
    return list(nested())


def test_every_pair_is_nested():
    """What is missing the language refuses: a divisor that may be 0, a count that may leave its type."""
    results = {(name, dtypes): made(name, dtypes, leaves(name, dtypes, "any")).dtype for name, dtypes in CASES}
    wanted = {
        (outer, place, inner)
        for outer, dtypes in CASES
        for place in range(OPS[outer].arity)
        for (inner, _), result in results.items()
        if result is dtypes[place]
    }
    found = {(outer, place, inner) for outer, place, inner, _ in pairs()}
    zero = ("mod", "bit_and", "bit_xor", "shift_right", "cast")
    divisors = {(outer, 1, inner) for outer in ("floor_div", "mod") for inner in zero}
    counts = {(f"shift_{way}", 1, i) for way in ("left", "right") for i in ("neg", "bit_not", "cast", "shift_left")}
    assert wanted - found <= divisors | counts
    assert len(pairs()) > 3000


@pytest.mark.sampled("True")
@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_every_pair_means_what_python_means(exact):
    roots = list(dict.fromkeys(root for *_, root in pairs()))
    if exact:  # what is printed as otherwise has been seen
        roots = [root for root in roots if Printer(exact=True).body(root) != Printer().body(root)]
    for first in range(0, len(roots), AT_ONCE):
        check(roots[first : first + AT_ONCE], exact=exact)


@pytest.mark.sampled("0-True")
@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("turn", [0, 1])
def test_deep_expressions_mean_what_python_means(turn, exact):
    rng = random.Random(11)
    check([deep(rng, rng.choice([INT, WIDE, FLOAT, BOOL]), 4) for _ in range(80)][turn::2], exact=exact)
