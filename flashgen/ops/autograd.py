"""attention() under autograd, eager: o and lse on the way forth, and the gradients of its inputs on the way back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from flashgen.errors import LaunchError
from flashgen.ops import library
from flashgen.ops.backward import SECOND, Given, with_gradient
from flashgen.ops.call import Call
from flashgen.ops.forward import run
from flashgen.ops.mapped import Dim, mapped, over_batch
from flashgen.ops.tracing import traced, transformed, vectorized

#: What forward-mode AD is told.
FORWARD_MODE = (
    "flashgen differentiates attention in reverse mode: it carries no tangents, as torch.func.jvp, jacfwd, hessian and"
    " torch.autograd.forward_ad ask for\n"
    "  nearest: backward(), torch.func.grad or torch.func.vjp, or attention in plain PyTorch for tangents"
)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one eager call, differentiable; arguments, results and errors as in `ops.attention.attention`."""
    call, tensors = call.apart()
    return _applied(call, tuple(tensors), q, k, v, *tensors.values())


def _applied(call: Call, names: tuple[str, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    function = _Transformed if transformed() else _Attention
    return function.apply(call, names, *inputs)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, names: tuple[str, ...], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, *captured = inputs
        o, lse = run(q, k, v, call.joined(names, captured))
        _keep(ctx, call, names, q, k, v, o, lse, *captured)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if do is None and dlse is None:
            return (None,) * (2 + len(needed))
        call, names = ctx.call, ctx.names
        wanted = with_gradient(call.variant, names, needed[3:]) if names else ()
        if vectorized(do) or vectorized(dlse):
            found = _vectorized(call, names, wanted, do, dlse, *ctx.saved_tensors)
        else:
            found = _differentiated(call, names, wanted, do, dlse, *ctx.saved_tensors)
        by_name = dict(zip(wanted, found[3:], strict=True))
        gradients = (*found[:3], *[by_name.get(name) for name in names])
        return None, None, *[g if wants else None for g, wants in zip(gradients, needed, strict=True)]

    @staticmethod
    def jvp(ctx: object, *_: object) -> NoReturn:
        raise LaunchError(FORWARD_MODE)


def _keep(ctx: Any, call: Call, names: tuple[str, ...], *tensors: torch.Tensor) -> None:
    ctx.call, ctx.names = call, names
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


class _Transformed(_Attention):
    """The same for the transforms of torch.func, which want the context set up apart: that costs an eager call more."""

    @staticmethod
    def forward(  # type: ignore[override]
        call: Call, names: tuple[str, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *captured: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return library.attend(q, k, v, call.joined(names, captured))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        call, names, q, k, v, *captured = inputs
        _keep(ctx, call, names, q, k, v, *output, *captured)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, names: tuple[str, ...], *inputs: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        dims = in_dims[2:]
        axes = over_batch(call, names, inputs, dims)
        return mapped(info.batch_size, inputs, dims, axes, functools.partial(_applied_or_traced, call, names))


def _applied_or_traced(call: Call, names: tuple[str, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) below a transform, where there may be another one, a tracer, autograd or nothing."""
    q, k, v, *captured = inputs
    if not transformed() and traced(q, k, v):
        return library.attend(q, k, v, call.joined(names, captured))
    return _applied(call, names, *inputs)


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own where it may be differentiated: that says what is wrong."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, names: tuple[str, ...], wanted: tuple[str, ...], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        return _gradients(call, names, wanted, *tensors)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        raise LaunchError(SECOND)

    @staticmethod
    def jvp(ctx: object, *_: object) -> NoReturn:
        raise LaunchError(SECOND)


class _TransformedGradients(_Gradients):
    @staticmethod
    def forward(  # type: ignore[override]
        call: Call, names: tuple[str, ...], wanted: tuple[str, ...], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        return _gradients(call, names, wanted, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        call: Call,
        names: tuple[str, ...],
        wanted: tuple[str, ...],
        *tensors: Any,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        return _mapped_gradients(info.batch_size, in_dims[3:], call, names, wanted, *tensors)


def _differentiated(
    call: Call, names: tuple[str, ...], wanted: tuple[str, ...], *tensors: Any
) -> tuple[torch.Tensor, ...]:
    given = call, names, wanted, *tensors
    if transformed():
        return _TransformedGradients.apply(*given)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():  # create_graph
        return _Gradients.apply(*given)  # type: ignore[no-untyped-call]
    return _gradients(*given)


def _mapped_gradients(
    n: int, dims: Sequence[Dim], call: Call, names: tuple[str, ...], wanted: tuple[str, ...], *tensors: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    axes = over_batch(call, names, tensors, dims, wanted)
    by_name = {} if axes is None else dict(zip(names, axes[len(axes) - len(names) :], strict=True))
    last = [axis for name in wanted if (axis := by_name.get(name)) is not None]
    return mapped(n, tensors, dims, axes, functools.partial(_differentiated, call, names, wanted), last)


def _vectorized(
    call: Call, names: tuple[str, ...], wanted: tuple[str, ...], do: Any, dlse: Any, *others: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients from gradients that stand for many: unwrapped, mapped and wrapped again."""
    torch._C._vmapmode_increment_nesting()
    level = torch._C._vmapmode_decrement_nesting()
    apart = [torch._remove_batch_dim(x, level, 1, 0) if vectorized(x) else x for x in (do, dlse)]
    dims = [0 if vectorized(x) else None for x in (do, dlse)]
    n = next(x.shape[0] for x, dim in zip(apart, dims, strict=True) if dim == 0)
    found, at = _mapped_gradients(n, (*dims, *[None] * len(others)), call, names, wanted, *apart, *others)
    return tuple(torch._add_batch_dim(x, axis, level) for x, axis in zip(found, at, strict=True))


def _gradients(call: Call, names: tuple[str, ...], wanted: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:
    count = len(Given._fields)
    return library.differentiate(Given(*tensors[:count]), call.joined(names, tensors[count:]), wanted)
