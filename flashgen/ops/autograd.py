"""attention() under autograd, eager: o and lse on the way forth, and the gradients of its inputs on the way back."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flashgen.errors import LaunchError
from flashgen.ops import library
from flashgen.ops.backward import SECOND, Given, with_gradient
from flashgen.ops.call import Call
from flashgen.ops.forward import run
from flashgen.ops.tracing import transformed

#: What forward-mode AD is told.
FORWARD_MODE = (
    "flashgen differentiates attention in reverse mode: it carries no tangents, as torch.func.jvp, jacfwd, hessian and"
    " torch.autograd.forward_ad ask for\n"
    "  nearest: backward(), torch.func.grad or torch.func.vjp, or attention in plain PyTorch for tangents"
)

#: What torch.func.vmap is told.
BATCHED = (
    "flashgen's attention is not mapped by torch.func.vmap (which jacrev and hessian map gradients with)\n"
    "  nearest: a call on more of its own batch or heads, as q.flatten(0, 1), or a loop"
)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one eager call, differentiable; arguments, results and errors as in `ops.attention.attention`."""
    call, tensors = call.apart()
    function = _Transformed if transformed() else _Attention
    return function.apply(call, tuple(tensors), q, k, v, *tensors.values())  # type: ignore[no-untyped-call]


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
        given = call, names, wanted, do, dlse, *ctx.saved_tensors
        if transformed():
            found = _TransformedGradients.apply(*given)  # type: ignore[no-untyped-call]
        elif torch.is_grad_enabled():  # create_graph
            found = _Gradients.apply(*given)  # type: ignore[no-untyped-call]
        else:
            found = _gradients(*given)
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
    def vmap(info: object, in_dims: object, *_: object) -> NoReturn:
        raise LaunchError(BATCHED)


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
    def vmap(info: object, in_dims: object, *_: object) -> NoReturn:
        raise LaunchError(BATCHED)


def _gradients(call: Call, names: tuple[str, ...], wanted: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:
    count = len(Given._fields)
    return library.differentiate(Given(*tensors[:count]), call.joined(names, tensors[count:]), wanted)
