"""What a spec's functions see: proxies that build the expression DAG, and the functions and declarations of `fg`.

A proxy overloads Python's operators.  Whatever needs a value while the spec is traced (`if`, `and`, `in`, a chained
comparison, `int()`, a loop) raises SpecError at the user's line and says what to write instead.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import ops, source
from flashgen.lang.expr import DIMS, TENSOR_DTYPES, Constant, DType, Node, Param, Tensor, const, node

#: Names that a call of attention, or the language, already uses.
RESERVED = frozenset(
    {"q", "k", "v", "variant", "scale", "return_lse", "s", "b", "h", "o", "lse", "dlse", "out", "dropout", "dropout_p"}
    | {"seed", "deterministic", "causal", "is_causal", "enable_gqa"}
    | {"batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"}
)

_PARENTHESES = "put parentheses round each comparison and join them with &: (k <= q) & (q - k < w)"


class Expr:
    """A traced value: arithmetic and comparisons on it make expressions."""

    __slots__ = ("node",)
    __hash__ = None

    def __init__(self, n: Node) -> None:
        self.node = n

    def __repr__(self) -> str:
        return f"<traced {self.node.dtype.value}>"

    # Comparisons
    def __eq__(self, other):
        return _apply("eq", self, other)

    def __ne__(self, other):
        return _apply("ne", self, other)

    def __lt__(self, other):
        return _apply("lt", self, other)

    def __le__(self, other):
        return _apply("le", self, other)

    def __gt__(self, other):
        return _apply("gt", self, other)

    def __ge__(self, other):
        return _apply("ge", self, other)

    # Conditions and bits
    def __and__(self, other):
        return _apply_logical("and", self, other)

    def __rand__(self, other):
        return _apply_logical("and", other, self)

    def __or__(self, other):
        return _apply_logical("or", self, other)

    def __ror__(self, other):
        return _apply_logical("or", other, self)

    def __xor__(self, other):
        return _apply_logical("xor", self, other)

    def __rxor__(self, other):
        return _apply_logical("xor", other, self)

    def __invert__(self):
        return _apply("logical_not" if self.node.dtype is DType.BOOL else "bit_not", self)

    def __lshift__(self, other):
        return _apply("shift_left", self, other)

    def __rlshift__(self, other):
        return _apply("shift_left", other, self)

    def __rshift__(self, other):
        return _apply("shift_right", self, other)

    def __rrshift__(self, other):
        return _apply("shift_right", other, self)

    # Arithmetic
    def __add__(self, other):
        return _apply("add", self, other)

    def __radd__(self, other):
        return _apply("add", other, self)

    def __sub__(self, other):
        return _apply("sub", self, other)

    def __rsub__(self, other):
        return _apply("sub", other, self)

    def __mul__(self, other):
        return _apply("mul", self, other)

    def __rmul__(self, other):
        return _apply("mul", other, self)

    def __truediv__(self, other):
        return _apply("div", self, other)

    def __rtruediv__(self, other):
        return _apply("div", other, self)

    def __floordiv__(self, other):
        return _apply("floor_div", self, other)

    def __rfloordiv__(self, other):
        return _apply("floor_div", other, self)

    def __mod__(self, other):
        return _apply("mod", self, other)

    def __rmod__(self, other):
        return _apply("mod", other, self)

    def __neg__(self):
        return _apply("neg", self)

    def __pos__(self):
        return self

    def __abs__(self):
        return _apply("abs", self)

    def __divmod__(self, other):
        return self // other, self % other

    def __rdivmod__(self, other):
        return other // self, other % self

    # What has no meaning on a traced value
    def __pow__(self, other):
        raise _refuse("`**` is not in the language; write x * x for a square, or fg.exp2(y * fg.log2(x))")

    def __rpow__(self, other):
        raise _refuse("`**` is not in the language; write fg.exp2(x) for 2 ** x, or 1 << x for integers")

    def __matmul__(self, other):
        raise _refuse("`@` is not in the language: a mask or score works on single elements")

    __rmatmul__ = __matmul__

    def __bool__(self):
        raise _refuse(_cure_for_bool())

    def __int__(self):
        raise _refuse("int() needs a value and this is a traced one; write fg.int32(x)")

    def __float__(self):
        raise _refuse("this needs a Python float and got a traced value; write fg.exp(x) for math.exp(x)")

    def __complex__(self):
        raise _refuse("complex numbers are not in the language")

    def __index__(self):
        raise _refuse(
            "this needs a Python integer (a list index, range()) and got a traced value;"
            " capture a table with fg.tensor, or loop over a plain Python number"
        )

    def __round__(self, digits=None):
        raise _refuse("round() is not in the language; write fg.floor(x + 0.5)")

    def __floor__(self):
        raise _refuse("math.floor needs a value; write fg.floor(x)")

    def __ceil__(self):
        raise _refuse("math.ceil needs a value; write -fg.floor(-x)")

    def __trunc__(self):
        raise _refuse("math.trunc needs a value; write fg.int32(x)")

    def __iter__(self):
        raise _refuse("a traced value is one number: it cannot be looped over or unpacked")

    def __len__(self):
        raise _refuse("a traced value is one number: it has no length")

    def __contains__(self, item):
        raise _refuse("a traced value is one number: `in` cannot search it; write x == y")

    def __getitem__(self, index):
        raise _refuse("a traced value is one number: only what fg.tensor captures can be indexed")

    def __call__(self, *args, **kwargs):
        raise _refuse("a traced value is one number: it cannot be called")

    def __array__(self, *args, **kwargs):
        raise _refuse("NumPy needs a value and this is a traced one; capture the array with fg.tensor and index it")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        name = _UFUNCS.get(ufunc.__name__)
        if method == "__call__" and name is not None and not kwargs:
            if name in ("and", "or", "xor"):
                return _apply_logical(name, *inputs)
            if name == "invert":
                return ~inputs[0]
            return _apply(name, *inputs)
        raise _refuse(f"np.{ufunc.__name__} cannot be traced{_instead(ufunc.__name__)}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        raise _refuse(f"torch's {name!r} cannot be traced{_instead(name)}; capture a torch tensor with fg.tensor")


#: NumPy's names of what Python's operators on a NumPy scalar call.
_UFUNCS = {
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "invert": "invert",
    "left_shift": "shift_left",
    "right_shift": "shift_right",
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "floor_divide": "floor_div",
    "remainder": "mod",
    "negative": "neg",
    "absolute": "abs",
}


class Captured:
    """A captured tensor, indexed at once (`t[b, k]`) or step by step (`t[b][k]`)."""

    __slots__ = ("indices", "tensor", "where")
    __hash__ = None

    def __init__(self, tensor: Tensor, indices: tuple[Node, ...] = (), where: SourceLine | None = None) -> None:
        self.tensor, self.indices, self.where = tensor, indices, where

    def __repr__(self) -> str:
        return f"<captured {self.tensor.name}, {len(self.indices)} of {len(self.tensor.dims)} indices>"

    def __getitem__(self, index):
        name, rank = self.tensor.name, len(self.tensor.dims)
        given = index if isinstance(index, tuple) else (index,)
        indices = self.indices + tuple(self._index(i) for i in given)
        if len(indices) > rank:
            raise _refuse(f"tensor {name!r} has {rank} dimension{'s' * (rank != 1)} and got {len(indices)} indices")
        if len(indices) < rank:
            return Captured(self.tensor, indices, self.where)
        self._is_read()
        return Expr(node("load", TENSOR_DTYPES[self.tensor.dtype], indices, self.tensor, source.caller()))

    def size(self, dim: int) -> Expr:
        """The length of a dimension, at run time."""
        name, rank = self.tensor.name, len(self.tensor.dims)
        if isinstance(dim, Expr) or not isinstance(dim, (int, np.integer)) or not -rank <= dim < rank:
            raise _refuse(f"tensor {name!r} has dimensions 0..{rank - 1}; .size() got {dim!r}")
        dim = int(dim) % rank
        length = self.tensor.dims[dim]
        if isinstance(length, int):
            return Expr(const(length))
        self._is_read()
        return Expr(node("size", DType.INT32, (), (self.tensor, dim), source.caller()))

    def _is_read(self) -> None:
        examples = _examples.get()
        if examples is not None and self.tensor.example is not None:
            examples[self.tensor.name] = self.tensor.example

    def _index(self, index: object) -> Node:
        name = self.tensor.name
        if index is None or index is Ellipsis or isinstance(index, slice):
            raise _refuse(f"tensor {name!r} is read one element at a time: every index is a number")
        i = _node(index)
        if not i.dtype.is_int:
            raise _refuse(f"an index of tensor {name!r} is {i.dtype.value}; write fg.int32(x)")
        if i.op == "const" and i.attr < 0:
            raise _refuse(f"tensor {name!r} got the index {i.attr}: write {name}.size(i) - {-i.attr}")
        return i

    def __len__(self):
        raise _refuse(f"len() of a captured tensor is not known yet; write {self.tensor.name}.size(0)")

    def __iter__(self):
        raise _refuse(f"tensor {self.tensor.name!r} cannot be looped over: its size is not known yet")

    def __bool__(self):
        raise _refuse(self._unindexed())

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        raise _refuse(self._unindexed())

    def _unindexed(self) -> str:
        rank, got = len(self.tensor.dims), len(self.indices)
        example = ", ".join({"batch": "b", "heads": "h", "q": "q", "kv": "k"}.get(d, "i") for d in self.tensor.dims)
        return (
            f"tensor {self.tensor.name!r} has {rank} dimension{'s' * (rank != 1)} and got {got} ind"
            f"{'ex' if got == 1 else 'ices'}; write {self.tensor.name}[{example}]"
        )


def _unindexed_operator(self, *others):
    raise _refuse(self._unindexed())


for _name in vars(Expr):
    if _name.startswith("__") and _name not in vars(Captured) and callable(getattr(Expr, _name)):
        setattr(Captured, _name, _unindexed_operator)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of the language


def where(condition, x, y) -> Expr:
    """`x` where `condition` holds, else `y`; both are evaluated."""
    return _apply("where", condition, x, y)


def minimum(x, y) -> Expr:
    """The smaller of two numbers."""
    return _apply("minimum", x, y)


def maximum(x, y) -> Expr:
    """The larger of two numbers."""
    return _apply("maximum", x, y)


def clamp(x, low, high) -> Expr:
    """`x` kept inside `low` .. `high`; a bound may be None."""
    if low is None and high is None:
        raise _refuse("fg.clamp needs a lower or an upper bound")
    if low is not None:
        x = _apply("maximum", x, low, attr=ops.CLAMP)
    return x if high is None else _apply("minimum", x, high, attr=ops.CLAMP)


def absolute(x) -> Expr:
    """The distance of `x` from 0."""
    return _apply("abs", x)


def exp(x) -> Expr:
    """e to the power `x`."""
    return _apply("exp", x)


def exp2(x) -> Expr:
    """2 to the power `x`."""
    return _apply("exp2", x)


def log(x) -> Expr:
    """The natural logarithm."""
    return _apply("log", x)


def log2(x) -> Expr:
    """The logarithm to base 2."""
    return _apply("log2", x)


def tanh(x) -> Expr:
    """The hyperbolic tangent."""
    return _apply("tanh", x)


def sigmoid(x) -> Expr:
    """1 / (1 + exp(-x))."""
    return _apply("sigmoid", x)


def sqrt(x) -> Expr:
    """The square root."""
    return _apply("sqrt", x)


def rsqrt(x) -> Expr:
    """1 / sqrt(x)."""
    return _apply("rsqrt", x)


def floor(x) -> Expr:
    """The largest whole number not above `x`, as float32."""
    return _apply("floor", x)


def int32(x) -> Expr:
    """`x` as a 32-bit integer; a float loses its fraction and saturates, a condition becomes 0 or 1."""
    return Expr(ops.cast(_node(x), DType.INT32, where=source.caller()))


def int64(x) -> Expr:
    """`x` as a 64-bit integer."""
    return Expr(ops.cast(_node(x), DType.INT64, where=source.caller()))


def float32(x) -> Expr:
    """`x` as a float; a condition becomes 0.0 or 1.0."""
    return Expr(ops.cast(_node(x), DType.FLOAT32, where=source.caller()))


batch = Expr(node("problem", DType.INT32, (), "batch"))
heads = Expr(node("problem", DType.INT32, (), "heads"))
kv_heads = Expr(node("problem", DType.INT32, (), "kv_heads"))
q_len = Expr(node("problem", DType.INT32, (), "q_len"))
kv_len = Expr(node("problem", DType.INT32, (), "kv_len"))


# ---------------------------------------------------------------------------------------------------------------------
# Declarations


def param(name: str, default=None, *, min=None, max=None, dtype=None, doc: str = "") -> Expr:
    """A runtime scalar, passed by name at the call; a new value compiles nothing.

    It is an int or a float by `dtype` (int, float, "int32", "int64", "float32"), else by its default and bounds.  A
    parameter without a default must be passed.  `min` and `max` are inclusive.
    """
    return _scalar("param", Param, name, default, min, max, dtype, doc)


def constant(name: str, default, *, min=None, max=None, dtype=None, doc: str = "") -> Expr:
    """A named number folded at compile time; a call that overrides it compiles another kernel."""
    if default is None:
        raise _refuse(f"constant {name!r} needs a default; a value given at the call is an fg.param")
    return _scalar("constant", Constant, name, default, min, max, dtype, doc)


def tensor(
    name: str,
    dims,
    dtype: str,
    *,
    example: Callable | None = None,
    min=None,
    max=None,
    sorted: bool = False,
    doc: str = "",
) -> Captured:
    """A captured tensor, read as `t[b, k]`.

    `dims` are "batch", "heads", "kv_heads", "q", "kv" (such a dimension may also have size 1 at the call, which
    broadcasts), a number, or None for any size.  `min` and `max` bound its values and `sorted=True` promises that they
    never decrease along the last dimension; both let whole tiles be skipped.  They are promises: no kernel checks them,
    and where one is broken a tile may be skipped or kept wrongly.  `example(problem, rng)` makes a NumPy array of that
    shape for `run`, `plan` and `show`.
    """
    _check_name(name)
    if isinstance(dims, str) or not isinstance(dims, (tuple, list)):
        raise _refuse(f'tensor {name!r}: dims is a tuple, as in dims=("batch", "kv"), and got {dims!r}')
    if not dims:
        raise _refuse(f"tensor {name!r} has no dimension: a single number is an fg.param")
    for dim in dims:
        fixed = isinstance(dim, int) and not isinstance(dim, bool) and dim >= 1
        if not (dim is None or fixed or (isinstance(dim, str) and dim in DIMS)):
            hint = source.nearest(dim, DIMS) if isinstance(dim, str) else ""
            raise _refuse(
                f"tensor {name!r}: dims are {', '.join(DIMS)}, positive numbers or None, and got {dim!r}{hint}"
            )
    dtype = _dtype_name(dtype)
    if dtype not in TENSOR_DTYPES:
        raise _refuse(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(TENSOR_DTYPES)}")
    element = TENSOR_DTYPES[dtype]
    if element is DType.BOOL and (min is not None or max is not None or sorted):
        raise _refuse(f"tensor {name!r} holds conditions: it has no min, max or order")
    if example is not None and not callable(example):
        raise _refuse(f"tensor {name!r}: example is a function (problem, rng) that makes an array, not {example!r}")
    low, high = (_bound(name, which, value, element) for which, value in (("min", min), ("max", max)))
    if element.is_int:
        info = np.iinfo(dtype)
        for which, value in (("min", low), ("max", high)):
            if value is not None and not info.min <= value <= info.max:
                raise _refuse(f"tensor {name!r}: {which}={value} is outside {dtype}")
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


def _scalar(op: str, kind: type, name: str, default, low, high, dtype, doc: str) -> Expr:
    _check_name(name)
    given = [value for value in (default, low, high) if value is not None]
    for value in given:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise _refuse(f"{op} {name!r} is an int or a float and got {value!r}")
        if value != value:
            raise _refuse(f"{op} {name!r} got NaN")
    if dtype is not None:
        chosen = {"int": DType.INT32, "float": DType.FLOAT32}.get(_dtype_name(dtype))
        if chosen is None and _dtype_name(dtype) in ("int32", "int64", "float32"):
            chosen = DType(_dtype_name(dtype))
        if chosen is None:
            raise _refuse(f"{op} {name!r}: dtype is int, float, 'int32', 'int64' or 'float32', not {dtype!r}")
    elif not given:
        raise _refuse(f"{op} {name!r} needs a default, a bound or dtype=int or float to know its type")
    else:
        chosen = DType.FLOAT32 if any(isinstance(v, (float, np.floating)) for v in given) else DType.INT32
    default, low, high = (
        _bound(name, which, value, chosen) for which, value in (("default", default), ("min", low), ("max", high))
    )
    _check_order(name, low, high)
    if default is not None and ((low is not None and default < low) or (high is not None and default > high)):
        raise _refuse(f"{op} {name!r}: the default {default} is outside [{low}, {high}]")
    declared = kind(name=name, dtype=chosen, default=default, min=low, max=high, doc=doc)
    return Expr(node(op, chosen, (), declared, source.caller()))


def _bound(name: str, which: str, value, dtype: DType) -> int | float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _refuse(f"{name!r}: {which}={value!r} is not a number")
    if dtype.is_float:
        return float(value)
    if not (isinstance(value, (int, np.integer)) or float(value).is_integer()):
        raise _refuse(f"{name!r} is {dtype.value}: {which}={value} is not a whole number")
    bits = 32 if dtype is DType.INT32 else 64
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise _refuse(f"{name!r} is {dtype.value}: {which}={value} does not fit")
    return int(value)


def _check_order(name: str, low, high) -> None:
    if low is not None and high is not None and low > high:
        raise _refuse(f"{name!r}: min={low} is above max={high}")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise _refuse(f"{name!r} is not a Python name: it is passed as a keyword at the call")
    if not name.isascii():
        raise _refuse(f"the name {name!r} is not ASCII, and CUDA takes no other: write it in a-z, 0-9 and _")
    if name.startswith("_"):
        raise _refuse(f"the name {name!r} starts with an underscore: choose {name.lstrip('_') or 'another'!r}")
    if name in RESERVED:
        raise _refuse(f"the name {name!r} belongs to the call or to the language: choose another")


def _dtype_name(dtype: object) -> str:
    if isinstance(dtype, type) and not issubclass(dtype, np.generic):
        return dtype.__name__
    return str(np.dtype(dtype)) if isinstance(dtype, (type, np.dtype)) else str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# Tracing


class Traced(NamedTuple):
    """An expression, and the examples of the captured tensors it reads.

    Equal expressions are one node, however their tensors' examples differ, so the examples travel beside the nodes.
    """

    node: Node | None
    examples: dict[str, Callable]


_examples: ContextVar[dict[str, Callable] | None] = ContextVar("examples", default=None)


def trace_mask(function: Callable) -> Traced:
    """The mask that `function(b, h, q, k)` computes; None where it always holds."""
    result, examples = _call(function, "mask", "b h q k")
    if isinstance(result, (bool, np.bool_)):
        return Traced(None if result else const(False), examples)
    if not isinstance(result, Expr):
        raise SpecError(f"the mask {_title(function)} returned {_kind(result)}{_MASK_CURE}", where=_defined(function))
    if result.node.dtype is not DType.BOOL:
        raise SpecError(
            f"the mask {_title(function)} returned {result.node.dtype.value}: compare it, as in x != 0",
            where=_defined(function),
        )
    return Traced(None if result.node is const(True) else result.node, examples)


def trace_score(function: Callable, incoming: Node | None = None) -> Traced:
    """The score that `function(s, b, h, q, k)` computes from `incoming` (None: s itself)."""
    result, examples = _call(function, "score", "s b h q k", incoming)
    if not isinstance(result, (Expr, int, float, np.integer, np.floating)) or isinstance(result, bool):
        raise SpecError(
            f"the score function {_title(function)} returned {_kind(result)}; return the new score, as in s + 1.0",
            where=_defined(function),
        )
    value = _node(result)
    if value.dtype is DType.BOOL:
        raise SpecError(
            f"the score function {_title(function)} returned a condition; a condition that hides belongs in the mask,"
            " or write fg.where(condition, s, -math.inf)",
            where=_defined(function),
        )
    return Traced(ops.cast(value, DType.FLOAT32), examples)


SCORE = node("score", DType.FLOAT32)

_MASK_CURE = ": return a condition, as in `return k <= q`"
_INDICES = {name: node("index", DType.INT32, (), name) for name in "bhqk"}


def _call(
    function: Callable, kind: str, arguments: str, incoming: Node | None = None
) -> tuple[object, dict[str, Callable]]:
    import inspect

    if not callable(function):
        raise _refuse(f"a {kind} is a function ({', '.join(arguments.split())}), not {_kind(function)}")
    names = arguments.split()
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        raise SpecError(
            f"the {kind} function {_title(function)} takes {inspect.signature(function)};"
            f" it is called with ({', '.join(names)})",
            where=_defined(function),
        ) from None
    proxies = [Expr((incoming or SCORE) if name == "s" else _INDICES[name]) for name in names]
    token = _examples.set({})
    try:
        return function(*proxies), _examples.get()
    except SpecError:
        raise
    except Exception as error:
        raise source.as_spec_error(error) from error
    finally:
        _examples.reset(token)


def _title(function: Callable) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def _kind(value: object) -> str:
    if value is None:
        return "nothing (a missing `return`?)"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _defined(function: Callable) -> SourceLine | None:
    code = getattr(function, "__code__", None)
    return source.definition(code) if code else source.caller()


def _node(value: object) -> Node:
    if isinstance(value, Expr):
        return value.node
    if isinstance(value, Captured):
        raise _refuse(value._unindexed())
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 and value.dtype.kind in "biuf":
        value = value.item()
    if isinstance(value, (bool, int, float)):
        try:
            return ops.literal(value)
        except SpecError as error:
            raise _refuse(str(error)) from None
    raise _refuse(
        f"{_kind(value)} cannot be part of a mask or score: numbers and traced values can;"
        " declare arrays with fg.tensor and values that change from call to call with fg.param"
    )


def _apply(name: str, *operands: object, attr: object = None) -> Expr:
    return Expr(ops.apply(name, *map(_node, operands), attr=attr, where=source.caller()))


def _apply_logical(name: str, a: object, b: object) -> Expr:
    """`&`, `|` and `^` mean conditions on conditions and bits on integers."""
    x, y = _node(a), _node(b)
    if (x.dtype is DType.BOOL) is not (y.dtype is DType.BOOL):
        sign = {"and": "&", "or": "|", "xor": "^"}[name]
        raise _refuse(
            f"`{sign}` got {x.dtype.value} and {y.dtype.value}: Python applies it before comparisons; {_PARENTHESES}"
        )
    return _apply(f"logical_{name}" if x.dtype is DType.BOOL else f"bit_{name}", a, b)


def _refuse(message: str) -> SpecError:
    return SpecError(message, where=source.caller())


def _instead(name: str) -> str:
    import flashgen

    return f"; write fg.{name}" if name in dir(flashgen) else ""


_BUILTINS = {
    "min": "write fg.minimum(x, y)",
    "max": "write fg.maximum(x, y)",
    "any": "join conditions with |",
    "all": "join conditions with &",
    "sorted": "sorting is not in the language",
    "bool": "compare it, as in x != 0",
}


def _cure_for_bool() -> str:
    """What to write instead of the construct that asked for a truth value."""
    problem = "a traced value is neither true nor false while a spec is read"
    match source.construct():
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return f"{problem}: `in` cannot be traced; write (x == a) | (x == b)"
        case ast.Compare():
            return f"{problem}: a chained comparison (a < b < c) asks for one; {_PARENTHESES}"
        case ast.BoolOp(op=ast.And()):
            return f"{problem}: `and` asks for one; write (k <= q) & (q - k < w)"
        case ast.BoolOp():
            return f"{problem}: `or` asks for one; write (k <= q) | (k < w)"
        case ast.UnaryOp():
            return f"{problem}: `not` asks for one; write ~(k <= q)"
        case ast.If() | ast.IfExp():
            return f"{problem}: `if` asks for one; write fg.where(condition, x, y), or join conditions with & and |"
        case ast.While():
            return f"{problem}: `while` asks for one; loop over plain Python numbers"
        case ast.Assert():
            return f"{problem}: `assert` asks for one; declare min= and max= instead"
        case ast.Call(func=ast.Name(id=name)) if name in _BUILTINS:
            return f"{problem}: {name}() asks for one; {_BUILTINS[name]}"
        case _:
            return (
                f"{problem}: `if`, `and`, `or`, `not`, `in` and chained comparisons cannot be traced;"
                " write fg.where, & | ~, and parentheses round each comparison"
            )
