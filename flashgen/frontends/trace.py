"""Tracing of PyTorch functions of positions: a mode catches torch's functions, and tensors become captured ones."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashgen.errors import SpecError
from flashgen.frontends.arrays import ELEMENTS, Array, lift, scalar, tracing
from flashgen.frontends.operations import operation, unsupported
from flashgen.frontends.rows import table
from flashgen.lang import declare, source
from flashgen.lang.proxies import Expr, refused

#: Arguments of torch's functions that people may name, in their order.
_NAMED = ("condition", "input", "self", "other", "exponent")

#: Functions of no traced value whose results differ from call to call.
_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "dropout", "empty", "poisson", "exponential")

#: Namespaces of operators that are torch's own, and one that people give tanh in hardware.
_NAMESPACES = ("aten", "prims", "approx")

#: Questions about where a tensor lies, whose answers no walk over what a function reads has.
_PLACES = ("data_ptr", "storage_offset", "is_contiguous")

#: Those and others about tensors whose answers no element decides, and printing.
_QUESTIONS = (*_PLACES, "__hash__", "__repr__", "__format__", "is_floating_point")


class Tracer(TorchFunctionMode):
    """One trace of one or more functions.

    names   what captured tensors are called, by their identity
    read    the captured tensors that were met, by name
    fixed   the names of those whose shapes were read: the trace holds for these shapes, which are declared where they
            were known to be read before
    unseen  whether a tensor was met that `names` does not have
    asked   whether the function asked where a tensor lies
    met     what operations were given, by its identity
    differentiated  whether what is traced has a gradient
    """

    def __init__(self, captured: Sequence[tuple[str, torch.Tensor]], fixed: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in captured}
        self.read: dict[str, torch.Tensor] = {}
        self.fixed: set[str] = set()
        self.met: set[int] = set()
        self._declared = frozenset(fixed)
        self.unseen = self.asked = self.differentiated = False
        self._arrays: dict[int, Array] = {}
        self._made: dict[int, torch.Tensor] = {}  # by the functions themselves, of plain numbers

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", str(function))
        if name == "__get__":
            return self.call("getattr", (args[0], function.__self__.__name__), {})
        met = list(_tensors((args, kwargs)))
        if all(id(x) in self._made for x in met):
            return self._run(name, function, args, kwargs)
        namespace = (
            getattr(function, "namespace", None) or str(getattr(function, "_qualified_op_name", "aten")).split(":")[0]
        )
        if namespace not in _NAMESPACES:
            raise refused(f"the operator {function} is nobody's but its library's: write it in torch's functions")
        return self.call(name, args, kwargs)

    def _run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of plain numbers: what it makes is known."""
        if name.startswith(_RANDOM):
            raise refused(unsupported(name))
        if name == "_set_grad_enabled" and not args[0] and self.differentiated:
            raise refused("torch.no_grad in a score_mod: detach tensors before the function captures them")
        made = function(*args, **kwargs)
        for x in _tensors(made):
            self._made[id(x)] = x
        return made

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """torch's function, method, operator or attribute of that name, on traced values."""
        self.met.update(id(x) for x in _tensors((args, kwargs)))
        with torch._C.DisableTorchFunction():  # what is asked of tensors here is no part of the function
            return self._called(name, args, kwargs)

    def _called(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "getattr":
            return self._attribute(*args)
        if name == "size":
            return _size(lift(args[0]), *args[1:], **kwargs)
        if name in _COUNTS:
            return _COUNTS[name](lift(args[0]))
        if name in _QUESTIONS:
            if isinstance(args[0], Array):
                return args[0].dtype.is_floating_point
            self.asked |= name in _PLACES
            return getattr(args[0], name)(*args[1:], **kwargs)
        function = operation(name)
        if function is None:
            raise refused(unsupported(name))
        positional = [*args, *(kwargs.pop(key) for key in _NAMED if key in kwargs)]
        try:
            inspect.signature(function).bind(*positional, **kwargs)
        except TypeError as error:
            raise refused(f"torch's {name.strip('_')!r} with these arguments cannot be traced: {error}") from None
        return function(*positional, **kwargs)

    def lifted(self, tensor: torch.Tensor) -> Array:
        """A tensor as an Array: what the function made itself by its numbers, any other as a captured tensor."""
        if id(tensor) in self._made:
            return table(tensor)
        if id(tensor) not in self._arrays:
            self._arrays[id(tensor)] = self._captured(tensor)
        return self._arrays[id(tensor)]

    def _captured(self, tensor: torch.Tensor) -> Array:
        name = self.names.get(id(tensor))
        if name is None:
            self.unseen = True
            name = next(n for i in range(len(self.names) + 1) if (n := f"found_{i + 1}") not in self.names.values())
            self.names[id(tensor)] = name
        if tensor.dtype not in ELEMENTS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            nearest = f"{name}.float()" if tensor.dtype.is_floating_point else f"{name}.long()"
            if tensor.dtype.is_complex:
                wide = ".float()" if tensor.dtype is torch.complex128 else ""
                nearest = f"{name}.real{wide} or {name}.imag{wide}"
            raise refused(f"the captured tensor {name!r} is {dtype}, which no kernel reads: capture {nearest}")
        self.read[name] = tensor
        # A dimension of no elements is never read, and the language declares none.
        dims = tuple(n or None for n in tensor.shape) if name in self._declared else (None,) * tensor.dim()
        declared = declare.tensor(name, dims or (1,), str(tensor.dtype).removeprefix("torch."))
        of = frozenset({name})
        if not tensor.dim():
            return Array(lambda index: declared[0], (), tensor.dtype)
        sizes = tuple(declared.size(dim) for dim in range(tensor.dim()))
        return Array(lambda index: declared[tuple(index)], tensor.shape, tensor.dtype, of=of, sizes=sizes)

    def sized(self, names: frozenset[str]) -> None:
        self.fixed |= names

    @property
    def sizes_met(self) -> bool:
        """Whether every shape that was read is declared."""
        return self.fixed <= self._declared

    def _attribute(self, x: Any, name: str) -> Any:
        if name == "device":
            return torch.device("cpu") if isinstance(x, Array) else x.device
        a = lift(x)
        if name == "shape":
            return tuple(_size(a, i) for i in range(a.rank))
        if name in ("dtype", "ndim"):
            return a.dtype if name == "dtype" else a.rank
        if name in ("T", "mT"):
            return self.call("transpose" if name == "mT" else "t", (a, -2, -1) if name == "mT" else (a,), {})
        if name in _METHODS or operation(name) is not None:
            return lambda *args, **kwargs: self.call(name, (a, *args), kwargs)
        raise refused(unsupported(name))


def _size(a: Array, dim: Any = None) -> Any:
    if dim is None:
        return tuple(_size(a, i) for i in range(a.rank))
    at = int(dim)
    if not -a.rank <= at < a.rank:
        raise refused(f"dimension {at} of a tensor of {a.rank} dimensions")
    if a.sizes is None:
        return a.extents[at]
    size = a.sizes[at]
    return Array(lambda index: size, (), torch.int64, weak=True, known=a._extents[at], of=a.of)


def _elements(a: Array) -> int:
    count = 1
    for size in a.extents:
        count *= size
    return count


_COUNTS: dict[str, Callable[[Array], Any]] = {
    "dim": lambda a: a.rank,
    "ndimension": lambda a: a.rank,
    "numel": _elements,
    "nelement": _elements,
    "__len__": len,
}
_METHODS = (*_COUNTS, "size", "is_floating_point")


def _tensors(x: Any) -> Iterator[Any]:
    """Tensors and Arrays in arguments."""
    if isinstance(x, (torch.Tensor, Array)):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from _tensors(item)


# ---------------------------------------------------------------------------------------------------------------------


def traced(tracer: Tracer, function: Callable[..., Any], kind: str, positions: Mapping[str, Expr]) -> Array:
    """What a mask_mod or a score_mod makes of positions (and the score), as one element.

    Raises SpecError at the function's line for what cannot be traced.
    """
    try:
        inspect.signature(function).bind(*positions)
    except TypeError:
        raise SpecError(
            f"the {kind} {title(function)} takes {inspect.signature(function)}; it is called with"
            f" ({', '.join(positions)})",
            where=_defined(function),
        ) from None
    except ValueError:  # a function of C says nothing
        pass
    arrays = [scalar(at, torch.float32 if name == "score" else torch.int32) for name, at in positions.items()]
    tracer.differentiated = kind == "score_mod"
    token = tracing.set(tracer)
    try:
        with tracer:
            result = function(*arrays)
        if not isinstance(result, (Array, torch.Tensor, bool, int, float)):
            got = "nothing (a missing `return`?)" if result is None else f"a {type(result).__name__}"
            raise SpecError(f"the {kind} {title(function)} returned {got}", where=_defined(function))
        made = lift(result)
        if kind == "mask_mod" and made.dtype is not torch.bool:
            got = str(made.dtype).removeprefix("torch.")
            raise SpecError(
                f"the mask_mod {title(function)} returned {got}: compare it, as in x != 0", where=_defined(function)
            )
        if made.rank and math.prod(made.extents) != 1:
            raise SpecError(
                f"the {kind} {title(function)} returned a row of shape {list(made.extents)}: reduce it, as in .any(-1)",
                where=_defined(function),
            )
        return scalar(made.element, made.dtype)
    except SpecError:
        raise
    except Exception as error:
        told, asked = source.as_spec_error(error), _control_flow(error.__traceback__)
        raise (SpecError(unsupported(asked), where=told.where) if asked else told) from error
    finally:
        tracing.reset(token)


def _control_flow(trace: types.TracebackType | None) -> str | None:
    """torch's function of control flow in which an error came up: these ask no mode before they look at arguments."""
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch._higher_order_ops."):
            return trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return None


def title(function: Any) -> str:
    """What a function is called."""
    if isinstance(function, partial):
        return title(function.func)
    return repr(getattr(function, "__name__", type(function).__name__))


def _defined(function: Any) -> Any:
    function = function.func if isinstance(function, partial) else function
    function = function if isinstance(function, (types.FunctionType, types.MethodType)) else type(function).__call__
    code = getattr(function, "__code__", None)
    return source.definition(code) if code else source.caller()
