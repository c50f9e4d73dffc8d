"""What a spec's functions see: proxies that build the expression DAG.

A proxy overloads Python's operators.  Whatever needs a value while the spec is traced (`if`, `and`, `in`, a chained
comparison, `int()`, a loop) raises SpecError at the user's line and says what to write instead.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import numpy as np

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import build, loops, ops, source
from flashgen.lang.expr import TENSOR_DTYPES, DType, Node, Tensor, const, node
from flashgen.lang.spellings import declaration, functions, instead, is_array

_PARENTHESES = "put parentheses round each comparison and join them with &: (k <= q) & (q - k < w)"


#: Whole exponents beyond this are no products any more.
MAX_EXPONENT = 64

_EXPONENT = f"a Python number from -{MAX_EXPONENT} to {MAX_EXPONENT}"


#: What an operator or a function of the language takes.
Operand: TypeAlias = "Expr | bool | int | float | np.generic"


class Expr:
    """A traced value: arithmetic and comparisons on it make expressions."""

    __slots__ = ("node",)
    __hash__ = None

    def __init__(self, n: Node) -> None:
        self.node = n

    def __repr__(self) -> str:
        return f"<traced {self.node.dtype.value}>"

    # Comparisons
    def __eq__(self, other: object) -> Expr:
        return apply("eq", self, other)

    def __ne__(self, other: object) -> Expr:
        return apply("ne", self, other)

    def __lt__(self, other: Operand) -> Expr:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return apply("gt", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return apply("ge", self, other)

    # Conditions and bits
    def __and__(self, other: Operand) -> Expr:
        return apply_logical("and", self, other)

    def __rand__(self, other: Operand) -> Expr:
        return apply_logical("and", other, self)

    def __or__(self, other: Operand) -> Expr:
        return apply_logical("or", self, other)

    def __ror__(self, other: Operand) -> Expr:
        return apply_logical("or", other, self)

    def __xor__(self, other: Operand) -> Expr:
        return apply_logical("xor", self, other)

    def __rxor__(self, other: Operand) -> Expr:
        return apply_logical("xor", other, self)

    def __invert__(self) -> Expr:
        return apply("logical_not" if self.node.dtype is DType.BOOL else "bit_not", self)

    def __lshift__(self, other: Operand) -> Expr:
        return apply("shift_left", self, other)

    def __rlshift__(self, other: Operand) -> Expr:
        return apply("shift_left", other, self)

    def __rshift__(self, other: Operand) -> Expr:
        return apply("shift_right", self, other)

    def __rrshift__(self, other: Operand) -> Expr:
        return apply("shift_right", other, self)

    # Arithmetic
    def __add__(self, other: Operand) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return apply("div", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return apply("floor_div", self, other)

    def __rfloordiv__(self, other: Operand) -> Expr:
        return apply("floor_div", other, self)

    def __mod__(self, other: Operand) -> Expr:
        return apply("mod", self, other)

    def __rmod__(self, other: Operand) -> Expr:
        return apply("mod", other, self)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return apply("abs", self)

    def __divmod__(self, other: Operand) -> tuple[Expr, Expr]:
        return self // other, self % other

    def __rdivmod__(self, other: Operand) -> tuple[Expr, Expr]:
        return other // self, other % self

    def __pow__(self, other: int | float) -> Expr:
        return power(self, other)

    # What has no meaning on a traced value
    def __rpow__(self, other: Operand) -> NoReturn:
        raise refused(f"an exponent is {_EXPONENT}; write fg.exp2(x) for 2 ** x, or 1 << x for integers")

    def __matmul__(self, other: Operand) -> NoReturn:
        raise refused("`@` is not in the language: a mask or score works on single elements")

    __rmatmul__ = __matmul__

    def __bool__(self) -> NoReturn:
        raise refused(_cure_for_bool())

    def __int__(self) -> NoReturn:
        raise refused("int() needs a value and this is a traced one; write fg.int32(x)")

    def __float__(self) -> NoReturn:
        raise refused(_cure_for_float())

    def __complex__(self) -> NoReturn:
        raise refused("complex numbers are not in the language")

    def __index__(self) -> NoReturn:
        if (array := source.indexed()) is not None and is_array(array[1]):
            raise refused(_cure_for_array(array[1]))
        raise refused(
            "this needs a Python integer (a list index, range()) and got a traced value;"
            " capture a table with fg.tensor, or loop over a plain Python number"
        )

    def __round__(self, digits: int | None = None) -> NoReturn:
        raise refused("round() is not in the language; write fg.floor(x + 0.5)")

    def __floor__(self) -> NoReturn:
        raise refused("math.floor needs a value; write fg.floor(x)")

    def __ceil__(self) -> NoReturn:
        raise refused("math.ceil needs a value; write -fg.floor(-x)")

    def __trunc__(self) -> NoReturn:
        raise refused("math.trunc needs a value; write fg.int32(x)")

    def __iter__(self) -> NoReturn:
        raise refused("a traced value is one number: it cannot be looped over or unpacked")

    def __len__(self) -> NoReturn:
        raise refused("a traced value is one number: it has no length")

    def __contains__(self, item: object) -> NoReturn:
        raise refused("a traced value is one number: `in` cannot search it; write x == y")

    def __getitem__(self, index: Any) -> NoReturn:
        raise refused("a traced value is one number: only what fg.tensor captures can be indexed")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise refused("a traced value is one number: it cannot be called")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and NumPy ask for protocols that are not there
            raise AttributeError(name)
        raise refused(f"a traced value has no {name!r}{instead(name)}")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        if (array := source.indexed()) is not None and is_array(array[1]):
            raise refused(_cure_for_array(array[1]))
        raise refused("NumPy needs a value and this is a traced one; capture the array with fg.tensor and index it")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: object) -> Expr:
        name = _UFUNCS.get(ufunc.__name__)
        if method == "__call__" and name is not None and not kwargs:
            if name in ("and", "or", "xor"):
                return apply_logical(name, *inputs)
            if name == "invert":
                return ~inputs[0]
            return apply(name, *inputs)
        raise refused(f"np.{ufunc.__name__} cannot be traced{instead(ufunc.__name__)}")

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        captured = next((x for x in args if not isinstance(x, Expr) and is_array(x)), None)
        if name == "__getitem__" and captured is not None:
            raise refused(_cure_for_array(captured))
        cure = "; capture a torch tensor with fg.tensor" if captured is not None else ""
        raise refused(f"torch's {name!r} cannot be traced{instead(name)}{cure}")


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

    def __getitem__(self, index: Any) -> Any:
        name, rank = self.tensor.name, len(self.tensor.dims)
        given = index if isinstance(index, tuple) else (index,)
        if len(self.indices) + len(given) > rank:
            count = len(self.indices) + len(given)
            raise refused(f"tensor {name!r} has {rank} dimension{'s' * (rank != 1)} and got {count} indices")
        indices = self.indices + tuple(self._index(i, dim) for dim, i in enumerate(given, len(self.indices)))
        if len(indices) < rank:
            return Captured(self.tensor, indices, self.where)
        return Expr(node("load", TENSOR_DTYPES[self.tensor.dtype], indices, self._read(), source.caller()))

    def size(self, dim: int) -> Expr:
        """The length of a dimension, at run time."""
        name, rank = self.tensor.name, len(self.tensor.dims)
        if isinstance(dim, Expr) or not isinstance(dim, (int, np.integer)) or not -rank <= dim < rank:
            raise refused(f"tensor {name!r} has dimensions 0..{rank - 1}; .size() got {dim!r}")
        dim = int(dim) % rank
        length = self.tensor.dims[dim]
        if isinstance(length, int):
            return Expr(const(length))
        return Expr(node("size", DType.INT32, (), (self._read(), dim), source.caller()))

    def _read(self) -> Tensor:
        """The declaration as nodes hold it, without the example, which is noted."""
        read = examples_read.get()
        if read is not None and self.tensor.example is not None:
            read[self.tensor.name] = self.tensor.example
        return replace(self.tensor, example=None)

    def _index(self, index: object, dim: int) -> Node:
        name = self.tensor.name
        if index is None or index is Ellipsis or isinstance(index, slice):
            raise refused(f"tensor {name!r} is read one element at a time: every index is a number")
        i = node_of(index)
        if not i.dtype.is_int:
            raise refused(f"an index of tensor {name!r} is {i.dtype.value}; write fg.int32(x)")
        if i.op != "const" or i.attr >= 0:
            return i
        length = self.tensor.dims[dim]
        if isinstance(length, int) and length + i.attr < 0:
            raise refused(f"tensor {name!r} got the index {i.attr}, and its dimension {dim} has size {length}")
        return (self.size(dim) + i.attr).node  # from the end, as in Python

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and NumPy ask for protocols that are not there
            raise AttributeError(name)
        cure = f"write {self.tensor.name}.size(i)" if name in ("shape", "numel", "dim") else self.unindexed()
        raise refused(f"a captured tensor has no {name!r}; {cure}")

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        first = next(x for x in args if isinstance(x, Captured))
        raise refused(f"torch's {name!r} cannot be traced; {first.unindexed()}")

    def __len__(self) -> NoReturn:
        raise refused(f"len() of a captured tensor is not known yet; write {self.tensor.name}.size(0)")

    def __iter__(self) -> NoReturn:
        raise refused(f"tensor {self.tensor.name!r} cannot be looped over: its size is not known yet")

    def __bool__(self) -> NoReturn:
        raise refused(self.unindexed())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: object) -> NoReturn:
        raise refused(self.unindexed())

    def unindexed(self) -> str:
        rank, got = len(self.tensor.dims), len(self.indices)
        example = ", ".join({"batch": "b", "heads": "h", "q": "q", "kv": "k"}.get(d, "i") for d in self.tensor.dims)
        return (
            f"tensor {self.tensor.name!r} has {rank} dimension{'s' * (rank != 1)} and got {got} ind"
            f"{'ex' if got == 1 else 'ices'}; write {self.tensor.name}[{example}]"
        )


def _unindexed_operator(self: Captured, *others: object) -> NoReturn:
    raise refused(self.unindexed())


for _name in vars(Expr):
    if _name.startswith("__") and _name not in vars(Captured) and callable(getattr(Expr, _name)):
        setattr(Captured, _name, _unindexed_operator)

# ---------------------------------------------------------------------------------------------------------------------
# Making nodes of what operators and functions are given

#: The examples of the captured tensors that the function being traced has read.
examples_read: ContextVar[dict[str, Callable] | None] = ContextVar("examples_read", default=None)


def node_of(value: object) -> Node:
    if isinstance(value, Expr):
        return value.node
    if isinstance(value, Captured):
        raise refused(value.unindexed())
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 and value.dtype.kind in "biuf":
        value = value.item()
    if isinstance(value, (bool, int, float)):
        try:
            return build.literal(value)
        except SpecError as error:
            raise refused(str(error)) from None
    raise refused(
        f"{kind_of(value)} cannot be part of a mask or score: numbers and traced values can;"
        " declare arrays with fg.tensor and values that change from call to call with fg.param"
    )


def kind_of(value: object) -> str:
    if value is None:
        return "nothing (a missing `return`?)"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def apply(name: str, *operands: object, attr: object = None) -> Expr:
    return Expr(build.apply(name, *map(node_of, operands), attr=attr, where=source.caller()))


def apply_logical(name: str, a: object, b: object) -> Expr:
    """`&`, `|` and `^` mean conditions on conditions and bits on integers."""
    x, y = node_of(a), node_of(b)
    if (x.dtype is DType.BOOL) is not (y.dtype is DType.BOOL):
        sign, got = {"and": "&", "or": "|", "xor": "^"}[name], f"{x.dtype.value} and {y.dtype.value}"
        if source.compares_operator():
            raise refused(f"`{sign}` got {got}: Python applies it before comparisons; {_PARENTHESES}")
        number = y if x.dtype is DType.BOOL else x
        raise refused(
            f"`{sign}` joins two conditions, or the bits of two integers, and got {got};"
            f" compare the {number.dtype.value} with 0, as in (k <= q) {sign} (x != 0)"
        )
    return apply(f"logical_{name}" if x.dtype is DType.BOOL else f"bit_{name}", a, b)


def power(x: Operand, c: int | float) -> Expr:
    """`x` to the power of a Python number: products where that is whole, else an operation for numbers above 0."""
    if isinstance(c, np.generic):
        c = c.item()
    if isinstance(c, bool) or not isinstance(c, (int, float)) or not abs(c) <= MAX_EXPONENT:
        got = "a traced value" if isinstance(c, (Expr, Captured)) else repr(c)
        raise refused(f"an exponent is {_EXPONENT}, and got {got}; write fg.exp2(y * fg.log2(x)) for x > 0")
    base = Expr(node_of(x))
    if isinstance(c, float) or c < 0:
        ops.OPS["pow"].accepts("fg.pow(x, c)", (base.node.dtype,))  # a condition is no number
        base = Expr(build.cast(base.node, DType.FLOAT32, where=source.caller()))
    if not float(c).is_integer():
        root = {0.5: "sqrt", -0.5: "rsqrt"}.get(c)
        return apply("pow", base, c) if root is None else apply(root, base)
    product, square, left = None, base, abs(int(c))
    while left:
        if left % 2:
            product = square if product is None else product * square
        left //= 2
        square = square * square if left else square
    if product is None:
        return Expr(const(1, base.node.dtype) if base.node.dtype.is_int else const(1.0))
    return 1 / product if c < 0 else product


def loop(op: str, n: Operand, function: Callable[[Expr], Operand]) -> Expr:
    """The loop `op` (see `flashgen.lang.loops`) over what `function` makes of the index."""
    where = source.caller()
    if not callable(function):
        raise refused(
            f"fg.{op} takes a number of rounds and a function of the index, as in fg.{op}(4, lambda i: t[i] == k)"
        )
    rounds, most = build.rounds_of(op, node_of(n), where=where)
    index = loops.fresh(max(most, 1))
    try:
        body = function(Expr(index))
    except TypeError as error:
        raise refused(f"the function of fg.{op} takes the index alone: {error}") from None
    return Expr(build.loop(op, rounds, index, node_of(body), where=where))


def refused(message: str) -> SpecError:
    return SpecError(message, where=source.caller())


def _cure_for_array(array: object) -> str:
    """What to write instead of an array that a traced value indexes."""
    found = source.indexed()
    name = found[0] if found is not None else "t"
    return (
        f"a {type(array).__name__} cannot be indexed by a traced value: declare {name} = {declaration(name, array)},"
        " and pass it by that name at the call"
    )


def _cure_for_float() -> str:
    """What to write instead of the function that asked for a Python float."""
    problem = "this needs a Python float and got a traced value"
    match source.construct():
        case ast.Call(func=ast.Name(id="float")):
            return f"{problem}; write fg.float32(x)"
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return f"{name}() {problem.removeprefix('this ')}{instead(name)}"
        case _:
            return f"{problem}; {functions()}"


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
