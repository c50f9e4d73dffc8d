"""How a tensor lies, which is asked before its shape and strides are."""

from __future__ import annotations

import torch

from flashgen.errors import LaunchError
from flashgen.ops.tracing import watched


def check_layout(
    title: str, name: str, tensor: torch.Tensor, caller: str = "attention", *, nested: str | None = None
) -> None:
    """Raise LaunchError, in the name of `caller`, for a tensor that is nested or sparse, whose shape and strides may
    not be asked for; `nested` is what stands in for one that is."""
    if tensor.is_nested:
        what = f"nested: {caller} takes dense tensors"
        cure = nested or f"{name}.to_padded_tensor(0.0), and a mask of the lengths"
        if nested is None and title in ("q", "k", "v"):
            what = "nested: q, k and v are all nested with layout torch.jagged, or all dense"
            cure = f"layout=torch.jagged for all three, or {cure}"
        raise LaunchError(f"{title} is {what}\n  nearest: {cure}")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise LaunchError(f"{title} is {layout}: {caller} takes dense tensors\n  nearest: {name}.to_dense(), a copy")


def check_memory(
    title: str, name: str, tensor: torch.Tensor, caller: str = "attention", *, nested: str | None = None
) -> None:
    """Raise LaunchError for a tensor whose memory does not hold its elements as they are."""
    check_layout(title, name, tensor, caller, nested=nested)
    what = cure = None
    if tensor.is_quantized:
        dtype = str(tensor.dtype).removeprefix("torch.")
        what, cure = f"quantised ({dtype}): {caller} takes floats", f"{name}.dequantize(), a copy"
    elif tensor.is_neg():
        what, cure = (
            "a view that negates what lies in memory, as x.imag of a conjugate",
            f"{name}.resolve_neg(), a copy",
        )
    elif tensor._is_zerotensor():
        what, cure = "a ZeroTensor, which has no memory", f"torch.zeros_like({name})"
    elif watched(tensor):
        kind = type(tensor).__name__
        what, cure = f"a {kind} beside others that are none: all are, or none is", "one kind of q, k, v and captures"
    if what is not None:
        raise LaunchError(f"{title} is {what}\n  nearest: {cure}")


def stacked(name: str) -> str:
    """What stands in for a nested tensor whose parts have one shape."""
    return f"torch.stack({name}.unbind()), a copy"
