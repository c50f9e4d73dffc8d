"""Expressions on concrete positions, in NumPy: the meaning that every other back end is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flashgen.errors import CapturedIndexError
from flashgen.lang.expr import DIMS, DType, LoopIndex, Node, layer, walk
from flashgen.lang.loops import LOOPS, index_node
from flashgen.lang.ops import OPS


def evaluate(
    root: Node,
    *,
    b: object = None,
    h: object = None,
    q: object = None,
    k: object = None,
    s: object = None,
    sizes: Mapping[str, int],
    params: Mapping[str, int | float],
    tensors: Mapping[str, np.ndarray],
    float_dtype: type = np.float32,
    live: object = None,
) -> np.ndarray:
    """The value of an expression; integers are int64, floats `float_dtype`.

    `b`, `h`, `q`, `k` are integer arrays that broadcast against each other and the score `s`; `sizes` holds the problem
    sizes by name.  A captured tensor's named dimension of size 1 broadcasts.  Where an index lies outside its dimension
    CapturedIndexError names the tensor, the index and the size; with `live` (bool, broadcastable) only there, and other
    positions read the nearest element, as kernels do.
    """
    positions = {"b": b, "h": h, "q": q, "k": k}
    given = _Given(positions, s, sizes, params, tensors, np.dtype(float_dtype))
    values: dict[Node, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for n in layer((root,)):
            values[n] = _value(n, values, given, live, ())
    return values[root]


class _Given(NamedTuple):
    """What an expression is evaluated on; see `evaluate`."""

    positions: Mapping[str, object]
    s: object
    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    tensors: Mapping[str, np.ndarray]
    float_dtype: np.dtype


def _value(
    n: Node, values: dict[Node, np.ndarray], given: _Given, live: Any, loops: tuple[LoopIndex, ...]
) -> np.ndarray:
    """The value of a node in the innermost of `loops`, of which `values` has what it is made of."""
    match n.op:
        case "const":
            return _typed(n.attr, n.dtype, given.float_dtype)
        case "index":
            if given.positions[n.attr] is None:
                raise TypeError(f"evaluate() needs {n.attr}: the expression reads it")
            return np.asarray(given.positions[n.attr], np.int64)
        case "score":
            if given.s is None:
                raise TypeError("evaluate() needs s: the expression reads it")
            return np.asarray(given.s, given.float_dtype)
        case "problem":
            return np.asarray(given.sizes[n.attr], np.int64)
        case "param":
            return _typed(given.params[n.attr.name], n.dtype, given.float_dtype)
        case "constant":
            return _typed(n.attr.default, n.dtype, given.float_dtype)
        case "size":
            tensor, dim = n.attr
            return np.asarray(given.tensors[tensor.name].shape[dim], np.int64)
        case "load":
            indices = tuple(values[i] for i in n.operands)
            return _load(n, given.tensors[n.attr.name], indices, given.float_dtype, live)
        case "cast":
            return OPS["cast"].python(values[n.operands[0]], n.dtype, given.float_dtype)
    if n.op in LOOPS:
        return _looped(n, values, given, live, (*loops, n.attr))
    return np.asarray(OPS[n.op].python(*(values[o] for o in n.operands)))


def _looped(
    n: Node, values: dict[Node, np.ndarray], given: _Given, live: Any, loops: tuple[LoopIndex, ...]
) -> np.ndarray:
    """A loop, round by round; where a position has had all of its own, no index needs to be in bounds."""
    (rounds, body), loop = n.operands, LOOPS[n.op]
    index, found = index_node(n.attr), _typed(loop.empty, n.dtype, given.float_dtype)
    inside = [m for m in layer([body], loops) if m is not index]
    for i in range(int(np.max(values[rounds], initial=0))):
        runs = i < values[rounds]
        values[index] = np.asarray(i, np.int64)
        for m in inside:
            values[m] = _value(m, values, given, runs if live is None else live & runs, loops)
        found = np.where(runs, loop.op.python(found, values[body]), found)
    return found


def _typed(value: object, dtype: DType, float_dtype: np.dtype) -> np.ndarray:
    return np.asarray(value, float_dtype if dtype.is_float else np.bool_ if dtype is DType.BOOL else np.int64)


def _load(n: Node, array: np.ndarray, indices: tuple[np.ndarray, ...], float_dtype: np.dtype, live: Any) -> np.ndarray:
    tensor = n.attr
    inside = []
    for dim, (name, size, index) in enumerate(zip(tensor.dims, array.shape, indices, strict=True)):
        if size == 1 and name in DIMS:
            index = np.zeros_like(index)
        outside = (index < 0) | (index >= size)
        if live is not None:
            outside = outside & live
        if np.any(outside):
            raise _outside(n, dim, size, np.broadcast_to(index, np.shape(outside))[outside].flat[0])
        inside.append(np.clip(index, 0, size - 1))
    loaded = array[tuple(inside)]
    return _typed(loaded, n.dtype, float_dtype)


def check_positions(root: Node, sizes: Mapping[str, int], tensors: Mapping[str, np.ndarray]) -> None:
    """Raise CapturedIndexError where an expression of every pair of a problem reads a captured tensor at a position
    (b, h, q or k itself) that the tensor does not reach.

    Whoever evaluates a part of the pairs alone would see it there or not.
    """
    extents = {"b": sizes["batch"], "h": sizes["heads"], "q": sizes["q_len"], "k": sizes["kv_len"]}
    if 0 in extents.values():
        return
    for n in walk([root]):
        if n.op == "load":
            shape = tensors[n.attr.name].shape
            for dim, (name, size, index) in enumerate(zip(n.attr.dims, shape, n.operands, strict=True)):
                if index.op == "index" and size < extents[index.attr] and not (size == 1 and name in DIMS):
                    raise _outside(n, dim, size, size)


def _outside(load: Node, dim: int, size: int, index: int) -> CapturedIndexError:
    name = load.attr.name
    at = f"\n  at {load.where}" if load.where else ""
    return CapturedIndexError(
        f"tensor {name!r}: index {index} is outside dimension {dim} of size {size}"
        f"; keep it inside with fg.clamp(i, 0, {name}.size({dim}) - 1), or i.clamp(0, {name}.size({dim}) - 1) where the"
        f" function is written in PyTorch{at}"
    )
