"""attention() under autograd, eager: o and lse on the way forth, and the gradients of its inputs on the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashgen.analysis.derivative import differentiable
from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.ops.attention import run
from flashgen.ops.backward import run_backward
from flashgen.runtime.philox import Dropout

#: What differentiating a gradient is told.
SECOND = (
    "flashgen differentiates attention once: there is no gradient of its gradients\n"
    "  nearest: backward() without create_graph, or attention in plain PyTorch where a second derivative is needed"
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
    return _Attention.apply(call, q, k, v, *tensors.values())


def in_order(deterministic: bool) -> bool:
    """Whether a backward sums in one order: the call's own word, or torch's for the process."""
    return deterministic or (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def with_gradient(variant: Variant, names: tuple[str, ...], needed: tuple[bool, ...]) -> tuple[str, ...]:
    """The captured tensors of a call that want a gradient and have one, sorted."""
    asked = {name for name, wants in zip(names, needed, strict=True) if wants}
    return tuple(name for name in differentiable(variant.score_node) if name in asked)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, q, k, v, *captured):
        o, lse = run(q, k, v, call.variant, call.scale, call.named(captured), call.dropout)
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse, *captured)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        needed = ctx.needs_input_grad[1:]
        if do is None and dlse is None:
            return (None,) * (1 + len(needed))
        wanted = with_gradient(ctx.call.variant, ctx.call.names, needed[3:])
        found = _Gradients.apply(ctx.call, wanted, do, dlse, *ctx.saved_tensors)
        by_name = dict(zip(wanted, found[3:], strict=True))
        gradients = (*found[:3], *(by_name.get(name) for name in ctx.call.names))
        return None, *(g if wants else None for g, wants in zip(gradients, needed, strict=True))


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own, so that differentiating it says what is wrong."""

    @staticmethod
    def forward(ctx, call: Call, wanted: tuple[str, ...], do, dlse, q, k, v, o, lse, *captured):
        found = run_backward(
            do,
            dlse,
            *(q, k, v, o, lse),
            *(call.variant, call.scale, call.named(captured), call.dropout),
            deterministic=in_order(call.deterministic),
            wanted=wanted,
        )
        return *found[:3], *found.captured

    @staticmethod
    def backward(ctx, *_):
        raise LaunchError(SECOND)
