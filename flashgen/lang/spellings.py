"""What to write in a spec instead of other libraries' functions and methods."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import flashgen
from flashgen.lang.expr import TENSOR_DTYPES
from flashgen.lang.ops import OPS

_COMBINE = "combine variants instead, as in v & w or v | w"
_SIZES = "a size is fg.q_len, fg.kv_len, fg.heads, fg.kv_heads or fg.batch, and t.size(i) of a captured tensor"
_ONE_NUMBER = "leave it out: a traced value is one number"


def _of(text: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, text)


#: Functions and methods of PyTorch and NumPy whose name is no operation's, or whose arguments are other ones.
_ELSEWHERE = {
    **_of("write fg.clamp(x, low, high), where a bound may be None", "clamp", "clamp_", "clip", "hardtanh"),
    **_of("write fg.maximum(x, low)", "clamp_min"),
    **_of("write fg.minimum(x, high)", "clamp_max"),
    **_of("write fg.maximum(x, 0)", "relu", "relu_"),
    **_of("write x * x", "square"),
    **_of("write fg.pow(x, c), with a number c", "pow", "power", "float_power"),
    **_of("write fg.maximum(x, y)", "max", "amax", "fmax"),
    **_of("write fg.minimum(x, y)", "min", "amin", "fmin"),
    **_of('write x / y, x // y for rounding_mode="floor", or fg.int32(x / y) for "trunc"', "div", "divide"),
    **_of("write x / y", "true_divide"),
    **_of("write x // y", "floor_divide"),
    **_of("write x % y", "remainder"),
    **_of("write x - y * fg.int32(x / y)", "fmod"),
    **_of("write fg.where(c, x, y)", "where"),
    **_of("write fg.where(condition, value, x)", "masked_fill", "masked_fill_"),
    **_of("write fg.float32(x)", "float", "double", "half", "bfloat16"),
    **_of("write fg.int32(x)", "int", "short"),
    **_of("write fg.int64(x)", "long"),
    **_of("write x != 0", "bool"),
    **_of("write fg.float32(x), fg.int32(x), fg.int64(x), or x != 0", "to", "type", "astype", "type_as"),
    **_of(_ONE_NUMBER, "item", "tolist", "detach", "contiguous", "clone", "view", "reshape", "expand", "unsqueeze"),
    **_of(_ONE_NUMBER, "squeeze", "unsqueeze_", "expand_as", "cpu", "cuda", "numpy"),
    **_of(_SIZES, "shape", "size", "numel"),
    **_of("write x & y", "bitwise_and", "logical_and"),
    **_of("write x | y", "bitwise_or", "logical_or"),
    **_of("write x ^ y", "bitwise_xor", "logical_xor"),
    **_of("write ~x", "bitwise_not", "logical_not", "invert"),
    **_of("write x << y", "bitwise_left_shift", "left_shift"),
    **_of("write x >> y", "bitwise_right_shift", "right_shift"),
    **_of("write x + y", "add", "add_"),
    **_of("write x - y", "sub", "subtract"),
    **_of("write x * y", "mul", "multiply"),
    **_of("write -x", "neg", "negative"),
    **_of("write fg.abs(x)", "absolute", "fabs"),
    **_of("write x == y", "eq", "equal"),
    **_of("write x != y", "ne", "not_equal"),
    **_of("write x < y", "lt", "less"),
    **_of("write x <= y", "le", "less_equal"),
    **_of("write x > y", "gt", "greater"),
    **_of("write x >= y", "ge", "greater_equal"),
    **_of("write fg.floor(x + 0.5)", "round", "rint"),
    **_of("write -fg.floor(-x)", "ceil"),
    **_of("write fg.int32(x)", "trunc", "fix"),
    **_of("write fg.where(x > 0, 1, fg.where(x < 0, -1, 0))", "sign", "sgn"),
    **_of(f"torch's and_masks and or_masks ask for it: {_COMBINE}", "new_ones", "new_zeros"),
    **_of(_COMBINE, "and_masks", "or_masks", "noop_mask"),
}


def instead(name: str) -> str:
    """What to write for a function of this name: behind a semicolon."""
    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    if name in OPS:
        return f"; write {OPS[name].spelling.rpartition('; ')[2]}"
    return f"; write fg.{name}(x)" if name in dir(flashgen) else f"; {functions()}"


def functions() -> str:
    """The functions that a traced value can be given to."""
    names = [op.name for op in OPS.values() if re.search(rf"fg\.{op.name}\((x|x, c)\)$", op.spelling)]
    return f"the functions of fg are {', '.join([*names, 'minimum', 'maximum', 'clamp', 'where'])} and casts"


def is_array(value: object) -> bool:
    """Whether something is a tensor or an array of another library."""
    return isinstance(getattr(value, "shape", None), Iterable) and hasattr(value, "dtype")


def declaration(name: str, array: Any) -> str:
    """The line that declares an array as a captured tensor of its shape and type."""
    dtype = str(array.dtype).removeprefix("torch.")
    nearest = {"float64": "float32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
    stored = dtype if dtype in TENSOR_DTYPES else nearest.get(dtype, "float32")
    dims = tuple(int(size) for size in array.shape)
    if not dims:
        return f'fg.param("{name}", dtype={"float" if "float" in stored else "int"})'
    return f'fg.tensor("{name}", dims={dims}, dtype="{stored}")'
