"""64-bit arithmetic means what it says, where NVRTC 13.0 narrows a difference of ints and ptxas errs in a shift."""

from functools import lru_cache

import numpy as np
import pytest

import flashgen as fg
from flashgen import interpreter
from flashgen.analysis import widths
from flashgen.codegen import device, emit
from flashgen.codegen.printer import Formula, Printer, RangePrinter
from flashgen.lang.build import apply, cast
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import DType, Param, const, node
from flashgen.planning import planner
from flashgen.runtime import nvrtc, sass

INT, WIDE, FLOAT = DType.INT32, DType.INT64, DType.FLOAT32
Q, K = (node("index", INT, (), position) for position in "qk")
FAR, W = (node("param", INT, (), Param(name=name, dtype=INT, default=None)) for name in ("far", "w"))

QUERIES, KEYS = 32, 16

#: Around what is computed: each lane has a query, or a fragment's four, and every key comes once.
LOOPS = {
    "up": "const int q = lane; for (int k = 0; k < p.keys; k++)",
    "down": "const int q = lane; for (int k = p.keys - 1; k >= 0; k--)",
    "fragments": """\
for (int first = 0; first < p.keys; first += 16)
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int q = lane / 4, k = first + 8 * (j / 4) + 2 * (lane % 4) + j % 2; q < QUERIES; q += 8)""",
}


def far_from(x, far=FAR):
    return apply("sub", x, far)


def times(c, x):
    return apply("mul", const(c) if isinstance(c, int) else c, x)


DISTANCE = apply("sub", Q, K)
APART = far_from(DISTANCE)
EIGHT = times(8, APART)
EXPRESSIONS = {
    "eight": EIGHT,
    "five": times(5, APART),
    "minus_eight": times(-8, APART),
    "shifted": apply("shift_left", APART, const(3)),
    "w": times(8, times(W, APART)),
    "two_products": times(8, apply("sub", times(W, DISTANCE), times(W, FAR))),
    "eights": apply("sub", times(8, DISTANCE), times(8, FAR)),
    "far_first": times(8, apply("sub", far_from(Q), K)),
    "far_last": times(8, apply("sub", K, apply("add", Q, FAR))),
    "sum_of_three": times(8, apply("sub", apply("sub", apply("add", Q, K), FAR), W)),
    "casts": times(8, apply("sub", cast(DISTANCE, WIDE), cast(FAR, WIDE))),
    "key": times(8, far_from(K)),
    "beside_a_constant": times(8, apply("sub", DISTANCE, const(-(2**31)))),
    "of_itself": apply("add", EIGHT, DISTANCE),
    "remainder": apply("mod", EIGHT, const(24)),
    "quotient": apply("mod", apply("floor_div", EIGHT, const(3)), const(7)),
    "sign": apply("where", apply("gt", EIGHT, const(0)), Q, K),
    "maximum": apply("maximum", EIGHT, times(-8, FAR)),
    "float": cast(EIGHT, FLOAT),
    "cut": times(8, cast(apply("add", cast(DISTANCE, WIDE), const(2**31)), INT)),
    "cut_key": cast(cast(apply("add", cast(K, WIDE), const(2**31 - 8)), INT), WIDE),
}
FARS = (-(2**31), -(2**31) + 20)


@lru_cache
def module(arch):
    """Kernels for each expression: its values in each loop, and its ranges over a query and each key."""
    kernels = []
    head = "(const __grid_constant__ Params p, {}* out) {{\n  const int lane = threadIdx.x;\n  "
    for name, root in EXPRESSIONS.items():
        numbers, over = (printer(wide=widths.wide([root]), exact=True) for printer in (Printer, RangePrinter))
        for loop, around in LOOPS.items():
            body = numbers.body(root)
            lines = "\n    ".join((*body.lines, f"out[q * KEYS + k] = {body.value};"))
            start = f'extern "C" __global__ void {name}_{loop}' + head.format(numbers.ctype(root))
            kernels.append(f"{start}{around} {{\n    {lines}\n  }}\n}}\n")
        body = over.body(root)
        lines = "\n    ".join((*body.lines, f"const auto found = {body.value};"))
        start = f'extern "C" __global__ void {name}_range' + head.format("i64" if root.dtype.is_int else "double")
        kernels.append(f"""{start}for (int key = 0; key < p.keys; key++) {{
    const Range<int> q = {{lane, lane}}, k = {{key, key}};
    {lines}
    out[2 * (lane * KEYS + key)] = found.lo;
    out[2 * (lane * KEYS + key) + 1] = found.hi;
  }}
}}
""")
    text = f"constexpr int QUERIES = {QUERIES}, KEYS = {KEYS};\nstruct Params {{ int keys, param_far, param_w; }};\n\n"
    text += "\n".join(kernels)
    return interpreter.load(nvrtc.ptx(device.used_by("DEVICE i64 u32 u64 " + text) + "\n\n" + text, arch), target=arch)


def launched(arch, kernel, far, shape, dtype):
    memory, out = interpreter.Memory(), np.zeros(shape, dtype)
    params = np.array([KEYS, far, 3], np.int32).tobytes()
    address = memory.add("out", out, writable=True)
    module(arch).launch(kernel, 1, 32, 0, [params, int(address).to_bytes(8, "little")], memory)
    return out


def expected(name, far):
    q, k = np.ogrid[:QUERIES, :KEYS]
    value = evaluate(EXPRESSIONS[name], q=q, k=k, params={"far": far, "w": 3}, sizes={}, tensors={})
    return np.broadcast_to(value, (QUERIES, KEYS))


def dtype_of(name):
    root = EXPRESSIONS[name]
    wide = root.dtype is WIDE or root in widths.wide([root])
    return np.float32 if root.dtype is FLOAT else np.int64 if wide else np.int32


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_numbers(name, arch):
    for loop in LOOPS:
        for far in FARS:
            found = launched(arch, f"{name}_{loop}", far, (QUERIES, KEYS), dtype_of(name))
            np.testing.assert_array_equal(found, expected(name, far), err_msg=f"{name} {loop} {far}")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_ranges_hold_every_number(name, arch):
    for far in FARS:
        dtype = np.float64 if dtype_of(name) is np.float32 else np.int64
        found = launched(arch, f"{name}_range", far, (QUERIES, KEYS, 2), dtype)
        assert (found[..., 0] <= expected(name, far)).all(), f"{name} {far}"
        assert (found[..., 1] >= expected(name, far)).all(), f"{name} {far}"


def test_comments_do_not_speak_of_it():
    assert "opaque" not in str(Formula().inline(EXPRESSIONS["casts"], 1000))


LARGE = fg.param("large", default=1, dtype="int64")

SCALED = {
    "shifted": lambda b, h, q, k: fg.minimum(q % 1073741825, LARGE << 31) > q - k,
    "multiplied": lambda b, h, q, k: fg.minimum(q % 1073741825, LARGE * 2147483648) > q - k,
    "of_positions": lambda b, h, q, k: fg.minimum(LARGE, fg.int64(q - k) << 31) > q - 5,
}


@pytest.mark.sampled("of_positions-sm_90a-forward")
@pytest.mark.slow
@pytest.mark.parametrize("menu", [planner.menu, planner.backward_menu], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name in SCALED for arch in ("sm_80", "sm_90a")])
def test_a_shift_by_31_is_no_product_with_minus_2_to_31(name, arch, menu):
    """What ptxas 13.0 makes of it is seen in machine code alone: the interpreter runs PTX."""
    plan = menu(fg.variant(SCALED[name], name=name).bind(), arch, "bfloat16", 64).plans[0]
    for code in sass.disassemble(nvrtc.compile(emit(plan), arch).cubin).values():
        assert not [one.text for one in code.instructions if one.opcode == "IMAD" and "-0x80000000" in one.text]
