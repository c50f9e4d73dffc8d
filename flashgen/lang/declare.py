"""What a spec declares: parameters, constants and captured tensors."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence

import numpy as np

from flashgen.lang import source
from flashgen.lang.expr import DIMS, TENSOR_DTYPES, Constant, DType, Param, Tensor, node
from flashgen.lang.proxies import Captured, Expr, refused
from flashgen.lang.spellings import declaration, is_array
from flashgen.lang.stored import LARGEST, exceeds, held

#: Names that attention(), plan(), supports() or the language already uses.
RESERVED = frozenset(
    {"q", "k", "v", "variant", "scale", "return_lse", "s", "b", "h", "o", "lse", "dlse", "out", "dropout", "dropout_p"}
    | {"seed", "deterministic", "page_layout", "causal", "is_causal", "enable_gqa"}
    | {"q_descale", "k_descale", "v_descale", "k_dtype", "v_dtype", "out_dtype", "accuracy"}
    | {"batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"}
    | {"seqlen", "kv_seqlen", "v_head_dim", "dtype", "arch", "pipeline", "tile", "stages", "backward", "gradients"}
    | {"packed", "q_stages", "kv_splits", "invariant"}
    | {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
)

#: Names of plan()'s options alone, which no constant may have; captured tensors and parameters may.
OF_PLANS = frozenset({"layout", "page_size"})

#: The largest size of a captured tensor's dimension.
MAX_SIZE = 2**31 - 1


def param(
    name: str,
    default: float | bool | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
    dtype: object = None,
    doc: str = "",
) -> Expr:
    """A runtime scalar, passed by name at the call; a new value compiles nothing.

    It is an int or a float by `dtype` (int, float, "int32", "int64", "float32"), else by its default and bounds.  A
    parameter without a default must be passed.  `min` and `max` are inclusive.
    """
    return _scalar("param", Param, name, default, min, max, dtype, doc)


def constant(
    name: str,
    default: float | bool,
    *,
    min: float | None = None,
    max: float | None = None,
    dtype: object = None,
    doc: str = "",
) -> Expr:
    """A named number folded at compile time; a call that overrides it compiles another kernel."""
    if default is None:
        raise refused(f"constant {name!r} needs a default; a value given at the call is an fg.param")
    return _scalar("constant", Constant, name, default, min, max, dtype, doc)


def tensor(
    name: str,
    dims: Sequence[str | int | None],
    dtype: str | None = None,
    *,
    example: Callable | None = None,
    min: float | None = None,
    max: float | None = None,
    sorted: bool = False,
    doc: str = "",
) -> Captured:
    """A captured tensor, read as `t[b, k]`.

    `dims` are "batch", "heads", "kv_heads", "q", "kv" (such a dimension may also have size 1 at the call, which
    broadcasts), a number, or None for any size.  `min` and `max` bound its values and `sorted=True` promises that they
    never decrease along the last dimension; both let whole tiles be skipped.  They are promises about every element,
    which a NaN breaks: no kernel checks them, and where one is broken a tile may be skipped or kept wrongly.
    `example(problem, rng)` makes a NumPy array of that shape for `run`, `plan` and `show`.
    """
    _check_name(name)
    if is_array(dims):
        raise refused(
            f"tensor {name!r} is declared by its shape and type, and passed at the call: write {name} ="
            f" {declaration(name, dims)}"
        )
    if isinstance(dims, str) or not isinstance(dims, (tuple, list)):
        raise refused(f'tensor {name!r}: dims is a tuple, as in dims=("batch", "kv"), and got {dims!r}')
    if not dims:
        raise refused(f"tensor {name!r} has no dimension: a single number is an fg.param")
    for dim in dims:
        fixed = isinstance(dim, int) and not isinstance(dim, bool) and 1 <= dim <= MAX_SIZE
        if not (dim is None or fixed or (isinstance(dim, str) and dim in DIMS)):
            hint = source.nearest(dim, DIMS) if isinstance(dim, str) else ""
            raise refused(
                f"tensor {name!r}: dims are {', '.join(DIMS)}, numbers from 1 to 2^31 - 1 or None,"
                f" and got {dim!r}{hint}"
            )
    if dtype is None:
        raise refused(f"tensor {name!r} needs a dtype, one of {', '.join(TENSOR_DTYPES)}")
    dtype = _dtype_name(dtype)
    if dtype not in TENSOR_DTYPES:
        raise refused(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(TENSOR_DTYPES)}")
    element = TENSOR_DTYPES[dtype]
    if element is DType.BOOL and (min is not None or max is not None or sorted):
        raise refused(f"tensor {name!r} holds conditions: it has no min, max or order")
    if not isinstance(sorted, (bool, np.bool_)):
        raise refused(f"tensor {name!r}: sorted is True or False and got {sorted!r}")
    _check_doc(name, doc)
    if example is not None and not callable(example):
        raise refused(f"tensor {name!r}: example is a function (problem, rng) that makes an array, not {example!r}")
    low, high = (_element_bound(name, which, value, dtype) for which, value in (("min", min), ("max", max)))
    _check_order(name, low, high)
    declared = Tensor(
        name=name,
        dims=tuple(dims),
        dtype=dtype,
        min=low,
        max=high,
        sorted=bool(sorted),
        example=example,
        doc=doc,
    )
    return Captured(declared, (), source.caller())


def _scalar(
    op: str,
    kind: type,
    name: str,
    default: float | bool | None,
    low: float | None,
    high: float | None,
    dtype: object,
    doc: str,
) -> Expr:
    _check_name(name, RESERVED | OF_PLANS if kind is Constant else RESERVED)
    _check_doc(name, doc)
    given = [value for value in (default, low, high) if value is not None]
    for value in given:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise refused(f"{op} {name!r} is an int or a float and got {value!r}")
        if value != value:
            raise refused(f"{op} {name!r} got NaN")
    if dtype is not None:
        chosen = {"int": DType.INT32, "float": DType.FLOAT32}.get(_dtype_name(dtype))
        if chosen is None and _dtype_name(dtype) in ("int32", "int64", "float32"):
            chosen = DType(_dtype_name(dtype))
        if chosen is None:
            raise refused(f"{op} {name!r}: dtype is int, float, 'int32', 'int64' or 'float32', not {dtype!r}")
    elif not given:
        raise refused(f"{op} {name!r} needs a default, a bound or dtype=int or float to know its type")
    else:
        chosen = DType.FLOAT32 if any(isinstance(v, (float, np.floating)) for v in given) else DType.INT32
    default, low, high = (
        _bound(name, which, value, chosen) for which, value in (("default", default), ("min", low), ("max", high))
    )
    _check_order(name, low, high)
    if default is not None and ((low is not None and default < low) or (high is not None and default > high)):
        bounds = [f"{which}={value}" for which, value in (("min", low), ("max", high)) if value is not None]
        raise refused(f"{op} {name!r}: the default {default} is outside {' and '.join(bounds)}")
    declared = kind(name=name, dtype=chosen, default=default, min=low, max=high, doc=doc)
    return Expr(node(op, chosen, (), declared, source.caller()))


def _bound(name: str, which: str, value: object, dtype: DType, stored: str = "float32") -> int | float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise refused(f"{name!r}: {which}={value!r} is not a number")
    if value != value:
        raise refused(f"{name!r}: {which} is NaN, and nothing compares with it")
    if dtype.is_float:
        if exceeds(value, stored):
            largest = f"the largest is {LARGEST[stored]:.6g}, and math.inf bounds nothing"
            raise refused(f"{name!r} is {stored}: {which}={value} does not fit; {largest}")
        return float(value)
    if not (isinstance(value, (int, np.integer)) or float(value).is_integer()):
        raise refused(f"{name!r} is {dtype.value}: {which}={value} is not a whole number")
    bits = 32 if dtype is DType.INT32 else 64
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise refused(f"{name!r} is {dtype.value}: {which}={value} does not fit into -2^{bits - 1} to 2^{bits - 1} - 1")
    return int(value)


def _element_bound(name: str, which: str, value: object, dtype: str) -> int | float | None:
    """A bound of a captured tensor's elements, as its stored type holds it: what is compared with them."""
    bound = _bound(name, which, value, TENSOR_DTYPES[dtype], stored=dtype)
    if bound is None or isinstance(bound, float):
        return bound if bound is None else held(bound, dtype)
    info = np.iinfo(dtype)
    if not info.min <= bound <= info.max:
        raise refused(f"tensor {name!r}: {which}={bound} is outside {dtype}")
    return bound


def _check_order(name: str, low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise refused(f"{name!r}: min={low} is above max={high}")


def _check_name(name: object, taken: frozenset[str] = RESERVED) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise refused(f"{name!r} is not a Python name: it is passed as a keyword at the call")
    if not name.isascii():
        raise refused(f"the name {name!r} is not ASCII, and CUDA takes no other: write it in a-z, 0-9 and _")
    if name.startswith("_"):
        raise refused(f"the name {name!r} starts with an underscore: choose {name.lstrip('_') or 'another'!r}")
    if name in taken:
        raise refused(f"the name {name!r} belongs to the call or to the language: choose another")


def _check_doc(name: str, doc: object) -> None:
    if not isinstance(doc, str):
        raise refused(f"{name!r}: doc is a text and got {doc!r}")


def _dtype_name(dtype: object) -> str:
    if isinstance(dtype, type) and not issubclass(dtype, np.generic):
        return dtype.__name__
    return str(np.dtype(dtype)) if isinstance(dtype, (type, np.dtype)) else str(dtype).removeprefix("torch.")
