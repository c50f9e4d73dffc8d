"""What a traced PyTorch function sees instead of tensors: values by their index, with torch's types.

An `Array` has a shape, a torch dtype and, by its index, elements of the language.  Most have no dimension: a position,
the score, an element of a captured tensor.  Rows of captured tensors have some, and are never in memory: who reduces
them asks for their elements.
"""

from __future__ import annotations

import math
import sys
import types
import typing
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import torch

from flashgen.errors import SpecError
from flashgen.lang import functions as fg
from flashgen.lang.bounds import bounds
from flashgen.lang.expr import TENSOR_DTYPES, DType
from flashgen.lang.proxies import Expr, node_of, refused
from flashgen.lang.ranges import Range

Index: TypeAlias = "tuple[int | Expr, ...]"

#: torch's dtypes whose elements the language has.
ELEMENTS = {getattr(torch, name): dtype for name, dtype in TENSOR_DTYPES.items()}

#: Integers of fewer than 32 bits: torch's arithmetic on them wraps, and the language's does not.
NARROW = (torch.uint8, torch.int8, torch.int16)


class Tracer(Protocol):
    """Who traces: what functions of torch are given, and what captured tensors become."""

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def lifted(self, tensor: torch.Tensor) -> Array: ...

    def sized(self, names: frozenset[str]) -> None: ...


#: Who traces now.
tracing: ContextVar[Tracer] = ContextVar("tracing")


def _call(name: str, *args: Any) -> Any:
    """torch's function, method, operator or attribute of that name, by who traces now."""
    tracer = tracing.get(None)
    if tracer is None:
        raise _ended()
    return tracer.call(name, args, {})


def _ended() -> SpecError:
    return refused("a traced value was used when its function had ended: a mask or score keeps nothing")


class Array:
    """Elements by their index.

    at       the element of an index, of the language's type for `dtype`
    extents  the sizes; reading one of a captured tensor makes the trace hold for tensors of that shape only
    weak     a Python number: it takes the type of what it meets
    known    its value, where that is a number while the function is traced
    of       captured tensors whose shapes `extents` and `known` came from
    sizes    where they can be read at run time: the sizes as expressions
    """

    __slots__ = ("_extents", "at", "dtype", "known", "of", "sizes", "weak")
    __array_ufunc__ = None  # NumPy's numbers leave operators to this class

    def __init__(
        self,
        at: Callable[[Index], Expr],
        extents: Sequence[int],
        dtype: torch.dtype,
        *,
        weak: bool = False,
        known: bool | int | float | None = None,
        of: frozenset[str] = frozenset(),
        sizes: tuple[Expr, ...] | None = None,
    ) -> None:
        self._extents, self.dtype, self.weak, self.known, self.of = tuple(extents), dtype, weak, known, of
        self.sizes = sizes
        if self._extents:
            self.at = at
        else:
            element = at(())
            self.at = lambda index: element

    def __hash__(self) -> int:
        raise refused(
            "a traced value is no key of a dict and in no set: capture a table as a tensor, or write"
            " (x == a) | (x == b)"
        )

    @property
    def rank(self) -> int:
        return len(self._extents)

    @property
    def extents(self) -> tuple[int, ...]:
        if self._extents:
            self.fixed()
        return self._extents

    @property
    def element(self) -> Expr:
        """The only one; SpecError where there are more."""
        if math.prod(self.extents) != 1:
            raise refused(
                f"this is a row of shape {list(self._extents)}, and one number is asked for: reduce it, as in .any(-1)"
            )
        return self.at((0,) * self.rank)

    def fixed(self) -> None:
        """The trace holds for the shapes that this came from."""
        if self.of:
            tracing.get().sized(self.of)

    def __repr__(self) -> str:
        return f"<traced {str(self.dtype).removeprefix('torch.')}{list(self._extents) or ''}>"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What functions that are traced are told by `isinstance`: of a Python number its type."""
        if not self.weak or _is_ours(sys._getframe(1)):
            return Array
        return bool if self.dtype is torch.bool else float if self.dtype.is_floating_point else int

    def __str__(self) -> str:
        return repr(self) if _is_ours(sys._getframe(1)) else self._text(str)

    def __format__(self, form: str) -> str:
        return format(repr(self), form) if _is_ours(sys._getframe(1)) else self._text(lambda x: format(x, form))

    def _text(self, of: Callable[[Any], str]) -> str:
        if not self.weak:
            return of(repr(self))
        if self.known is None:
            raise refused(
                "the text of a parameter, whose value comes when the kernel runs: compute with the number itself, or"
                " leave its name out of `names`"
            )
        self.fixed()
        return of(self.known)

    # What asks for a value while the function is traced
    def __bool__(self) -> bool:
        return bool(self._number(Expr.__bool__))

    def __index__(self) -> int:
        return self._number(Expr.__index__).__index__()

    def __int__(self) -> int:
        return int(self._number(Expr.__int__))

    def __float__(self) -> float:
        return float(self._number(Expr.__float__))

    def _number(self, otherwise: Callable[[Expr], object]) -> Any:
        if self.known is not None:
            self.fixed()
            return self.known
        try:
            otherwise(Expr(node_of(self.element)))
        except SpecError as error:
            raise _in_torch(error) from None

    def __len__(self) -> int:
        if not self.rank:
            raise refused("a traced value is one number: it has no length")
        return self.extents[0]

    def __iter__(self) -> Any:
        if not self.rank:
            raise refused("a traced value is one number: it cannot be looped over or unpacked")
        return (_call("getitem", self, i) for i in range(self.extents[0]))

    def __contains__(self, item: object) -> NoReturn:
        raise refused("`in` cannot be traced: write (x == y).any()")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise refused(
            "NumPy needs a value and this is a traced one: use torch's functions, and index torch.from_numpy(array)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and torch ask for protocols that are not there
            raise AttributeError(name)
        return _call("getattr", self, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        # torch's functions come by the tracer's mode; this makes torch take such an argument at all.
        raise _ended()


def _is_ours(frame: types.FrameType) -> bool:
    """Whether code of flashgen's, or of what it is made with, is asking."""
    return (frame.f_globals.get("__name__") or "").split(".")[0] in ("flashgen", "torch", "numpy")


def _in_torch(error: SpecError) -> SpecError:
    """An error of the language that speaks to those who write PyTorch."""
    text = str(error).split("\n  at ")[0]
    for ours, torchs in (("fg.int32(x)", "x.int()"), ("fg.float32(x)", "x.float()"), ("fg.", "torch.")):
        text = text.replace(ours, torchs)
    return SpecError(text.replace("while a spec is read", "while it is traced"), where=error.where)


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Array, *others: Any) -> Any:
        return _call(name, self, *others)

    call.__name__ = name
    return call


#: Python's operators that have a second form, for the operand on the right.
BINARY = tuple("add sub mul truediv floordiv mod pow and or xor lshift rshift matmul divmod".split())  # noqa: SIM905

for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "getitem", "setitem", "round"),
    *(f"{side}{name}" for name in BINARY for side in ("", "r")),
):
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))

# ---------------------------------------------------------------------------------------------------------------------
# Making them


def lift(x: Any) -> Array:
    """A number, a tensor or an Array as an Array; SpecError for anything else."""
    if isinstance(x, Array):
        return x
    if isinstance(x, torch.Tensor):
        return tracing.get().lifted(x)
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, (bool, int, float)):
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float32
        return Array(lambda index: Expr(node_of(x)), (), dtype, weak=True, known=x)
    kind = "nothing (a missing `return`?)" if x is None else f"a {type(x).__name__}"
    raise refused(f"{kind} cannot be part of a mask or score: numbers and tensors can")


def scalar(element: Expr, dtype: torch.dtype) -> Array:
    """One element."""
    return Array(lambda index: element, (), dtype)


def constant(value: bool | int | float, dtype: torch.dtype) -> Array:
    """A number of a type."""
    return Array(lambda index: cast(Expr(node_of(value)), dtype), (), dtype, known=value)


def filled(value: Any, extents: Sequence[int], dtype: torch.dtype | None = None) -> Array:
    """One number everywhere."""
    x = lift(value)
    dtype = x.dtype if dtype is None else of_language(dtype)
    element = cast(x.element, dtype)
    return Array(lambda index: element, extents, dtype, known=None if extents else known_as(x.known, dtype), of=x.of)


def known_as(value: bool | int | float | None, dtype: torch.dtype) -> bool | int | float | None:
    """What a number becomes in a dtype; None where that does not hold it."""
    if value is None or dtype.is_floating_point:
        return value
    if dtype is torch.bool:
        return bool(value)
    info = torch.iinfo(dtype)
    return int(value) if info.min <= value <= info.max else None


def of_language(dtype: torch.dtype) -> torch.dtype:
    """A dtype whose elements the language has; SpecError for another."""
    if dtype not in ELEMENTS:
        name = str(dtype).removeprefix("torch.")
        nearest = "float32" if dtype.is_floating_point else "int64"
        raise refused(f"{name} is no type of a mask or score: the nearest is {nearest}, as in x.to(torch.{nearest})")
    return dtype


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    """An element as the language has it for a dtype."""
    wanted, given = ELEMENTS[dtype], x.node.dtype
    if wanted is given:
        return x
    if wanted is DType.BOOL:
        return x != 0
    return {DType.INT32: fg.int32, DType.INT64: fg.int64, DType.FLOAT32: fg.float32}[wanted](x)


def promoted(*arrays: Array) -> torch.dtype:
    """The dtype of what arithmetic makes of these, as torch has it; a Python number counts by its kind alone, and one
    that 32 bits do not hold as int64, which positions are in torch."""
    strong = [x.dtype for x in arrays if not x.weak]
    weak = [x.dtype for x in arrays if x.weak]
    dtype = strong[0] if strong else weak[0]
    for other in strong[1:]:
        dtype = torch.promote_types(dtype, other)
    for number in weak:
        if _kind(number) > _kind(dtype):
            dtype = torch.promote_types(dtype, number)
    if dtype in _NARROW:
        _check_numbers(dtype, arrays)
    if dtype is torch.int32 and any(x.weak and x.element.node.dtype is DType.INT64 for x in arrays):
        return torch.int64
    return dtype


#: Integers that hold fewer numbers than the language's.
_NARROW = (torch.uint8, torch.int8, torch.int16)


def _check_numbers(dtype: torch.dtype, arrays: tuple[Array, ...]) -> None:
    """Refuse a Python number that these integers do not hold: torch wraps it first, so that -1 is 255 of 8 bits."""
    info = torch.iinfo(dtype)
    for x in arrays:
        if x.weak and isinstance(x.known, int) and not info.min <= x.known <= info.max:
            name = str(dtype).removeprefix("torch.")
            raise refused(
                f"{x.known} beside {name}, which holds {info.min} to {info.max}: torch takes it for"
                f" {(x.known - info.min) % (info.max - info.min + 1) + info.min}; write x.int() to compare it as it is"
            )


def _kind(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point else 1


def pointwise(
    build: Callable[..., Any],
    *arrays: Array,
    dtype: torch.dtype,
    given: torch.dtype | None = None,
    known: Callable[..., Any] | None = None,
) -> Array:
    """`build` applied to elements, which are cast to `given` before; its results are of `dtype`.  `known` computes on
    numbers that are known."""
    extents, weak = broadcast(*arrays), all(x.weak for x in arrays)
    given = None if weak and given is torch.int64 else given  # Python's integers have no width

    def at(index: Index) -> Expr:
        elements = [x.at(_aligned(x, index)) for x in arrays]
        made = build(*(elements if given is None else [cast(x, given) for x in elements]))
        return made if isinstance(made, Expr) else Expr(node_of(made))

    numbers = [x.known for x in arrays]
    value = known(*numbers) if known is not None and None not in numbers and not extents else None
    return Array(at, extents, dtype, weak=weak, known=value, of=frozenset().union(*(x.of for x in arrays)))


def broadcast(*arrays: Array) -> tuple[int, ...]:
    """The shape that these have together."""
    shapes = [x.extents for x in arrays if x.rank]
    if not shapes:
        return ()
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise refused(f"shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast") from None


def _aligned(x: Array, index: Index) -> Index:
    """The index of an element that broadcasts to `index`."""
    own = index[len(index) - x.rank :] if x.rank else ()
    return tuple(0 if size == 1 else i for size, i in zip(x._extents, own, strict=True))


def rearranged(x: Array, extents: Sequence[int], index: Callable[[Index], Index]) -> Array:
    """The elements of x in another order: `index` says which one of x is wanted."""
    return Array(lambda given: x.at(index(given)), extents, x.dtype, of=x.of)


def within(x: Expr) -> Range:
    """What declarations alone say about a number."""
    return typing.cast(Range, bounds(x.node))


def position(i: Any, size: int | Expr) -> int | Expr:
    """An index of a dimension from its beginning: negative ones count from the end."""
    if isinstance(i, int):
        return i if i >= 0 else size + i
    if within(i).lo >= 0:
        return i
    return fg.where(i < 0, fg.minimum(i, -1) + size, i)  # a sum that int32 holds, as i + size by itself would not
