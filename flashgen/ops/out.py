"""Memory that a call is given for its result, checked before anything is launched."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashgen.errors import LaunchError
from flashgen.ops.call import check_rows
from flashgen.ops.layouts import check_memory
from flashgen.ops.values import no_tensor

#: What a call is told that wants gradients.
WITH_GRADIENTS = (
    "out= is written in place, and a gradient is wanted, which needs a result of its own\n"
    "  nearest: torch.no_grad(), or no out"
)

#: And one inside of a transform of torch.func.
IN_A_TRANSFORM = (
    "out= is written in place, which no transform of torch.func sees\n  nearest: no out, or the call outside of it"
)


def check(
    out: torch.Tensor,
    shape: tuple[int, ...],
    q: torch.Tensor,
    inputs: Iterable[tuple[str, object]],
    *,
    joined: bool = False,
) -> None:
    """Raise LaunchError unless o of a call can be written there: of this shape [batch, heads, q_len, v_head_dim], q's
    dtype and device, rows that a kernel can write, and memory that none of the inputs shares.  The rows of `joined`
    sequences are said as attention_varlen has them, [rows, heads, v_head_dim]."""
    if not isinstance(out, torch.Tensor):
        raise LaunchError(no_tensor("out", out))
    check_memory("out", "out", out)
    if tuple(out.shape) != shape:
        given, wanted = _as_given(tuple(out.shape), joined), _as_given(shape, joined)
        raise LaunchError(f"out is {given} and o {wanted}\n  nearest: out of shape {wanted}")
    if out.dtype != q.dtype or out.device != q.device:
        raise LaunchError(
            f"out is {out.dtype} on {out.device} and o {q.dtype} on {q.device}\n"
            f"  nearest: torch.empty({_as_given(shape, joined)}, dtype={q.dtype}, device={str(q.device)!r})"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise LaunchError(WITH_GRADIENTS)
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise LaunchError(
            "out is a tensor of torch.inference_mode(), and written in place outside of it\n"
            "  nearest: the call inside of it, or out.clone()"
        )
    check_rows("out", out)
    if _folded(out):
        raise LaunchError(
            f"out has strides {list(out.stride())}: rows of it share memory\n  nearest: out.contiguous(), a copy"
        )
    for name, x in inputs:
        if isinstance(x, torch.Tensor) and _overlap(out, x):
            raise LaunchError(
                f"out and {name} share memory, which kernels read while they write\n  nearest: a new tensor"
            )


def _as_given(shape: tuple[int, ...], joined: bool) -> list[int]:
    """A shape as the call has it."""
    return [shape[2], shape[1], shape[3]] if joined else list(shape)


def _folded(x: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory: a dimension's steps are shorter than what those inside it span."""
    room = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= room:
            return x.numel() > 0
        room += (size - 1) * stride
    return False


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bytes from the first to the last element of one lie among those of another."""
    if one.device != other.device or 0 in (one.numel(), other.numel()):
        return False
    (first, end), (start, stop) = (_span(x) for x in (one, other))
    return first < stop and start < end


def _span(x: torch.Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (steps + 1) * x.itemsize
