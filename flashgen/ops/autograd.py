"""attention() under autograd, eager: o and lse on the way forth, and the gradients of its inputs on the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.ops import library
from flashgen.ops.backward import SECOND, with_gradient
from flashgen.ops.forward import run
from flashgen.ops.tracing import transformed
from flashgen.runtime.philox import Dropout

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a call holds beside its tensors; `names` are those of the captured ones."""

    variant: Variant
    scale: float | None
    dropout: Dropout | None
    deterministic: bool
    names: tuple[str, ...]
    numbers: Mapping[str, object]

    def named(self, captured: tuple[torch.Tensor, ...]) -> dict[str, object]:
        return {**self.numbers, **dict(zip(self.names, captured, strict=True))}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    named: Mapping[str, object],
    dropout: Dropout | None,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one eager call, differentiable; arguments, results and errors as in `ops.attention.attention`."""
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    call = Call(
        variant=variant,
        scale=scale,
        dropout=dropout,
        deterministic=deterministic,
        names=tuple(tensors),
        numbers={name: x for name, x in named.items() if name not in tensors},
    )
    function = _Transformed if transformed() else _Attention
    return function.apply(call, q, k, v, *tensors.values())


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, q, k, v, *captured):
        o, lse = run(q, k, v, call.variant, call.scale, call.named(captured), call.dropout)
        _keep(ctx, call, q, k, v, o, lse, *captured)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        needed = ctx.needs_input_grad[1:]
        if do is None and dlse is None:
            return (None,) * (1 + len(needed))
        wanted = with_gradient(ctx.call.variant, ctx.call.names, needed[3:])
        function = _TransformedGradients if transformed() else _Gradients
        found = function.apply(ctx.call, wanted, do, dlse, *ctx.saved_tensors)
        by_name = dict(zip(wanted, found[3:], strict=True))
        gradients = (*found[:3], *(by_name.get(name) for name in ctx.call.names))
        return None, *(g if wants else None for g, wants in zip(gradients, needed, strict=True))

    @staticmethod
    def jvp(ctx, *_):
        raise LaunchError(FORWARD_MODE)


def _keep(ctx, call: Call, *tensors: torch.Tensor) -> None:
    ctx.call = call
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


class _Transformed(_Attention):
    """The same for the transforms of torch.func, which want the context set up apart: that costs an eager call more."""

    @staticmethod
    def forward(call: Call, q, k, v, *captured):
        return library.attend(q, k, v, call.variant, call.scale, call.named(captured), call.dropout)

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, q, k, v, *captured = inputs
        _keep(ctx, call, q, k, v, *output, *captured)

    @staticmethod
    def vmap(info, in_dims, *_):
        raise LaunchError(BATCHED)


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own, so that differentiating it says what is wrong."""

    @staticmethod
    def forward(ctx, call: Call, wanted: tuple[str, ...], do, dlse, q, k, v, o, lse, *captured):
        return _gradients(call, wanted, do, dlse, q, k, v, o, lse, *captured)

    @staticmethod
    def backward(ctx, *_):
        raise LaunchError(SECOND)

    @staticmethod
    def jvp(ctx, *_):
        raise LaunchError(SECOND)


class _TransformedGradients(_Gradients):
    @staticmethod
    def forward(call: Call, wanted: tuple[str, ...], do, dlse, q, k, v, o, lse, *captured):
        return _gradients(call, wanted, do, dlse, q, k, v, o, lse, *captured)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, *_):
        raise LaunchError(BATCHED)


def _gradients(call: Call, wanted: tuple[str, ...], do, dlse, q, k, v, o, lse, *captured):
    given = (do, dlse, q, k, v, o, lse, call.variant, call.scale, call.named(captured), call.dropout)
    return library.differentiate(*given, deterministic=call.deterministic, wanted=wanted)
