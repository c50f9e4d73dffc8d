"""Attention over two key sets from the attention over each."""

from __future__ import annotations

import torch

from flashgen.errors import LaunchError
from flashgen.ops.layouts import check_layout

#: What attention() gives.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def merge(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of attention over the union of two disjoint key sets, from the (o, lse) of each.

    o1 and o2 are [batch, heads, q_len, v_head_dim] of one float dtype, lse1 and lse2 [batch, heads, q_len] natural logs
    (float32 or float64; -inf: a row that attends to nothing, whose o is not read); of `attention_varlen`
    [total_q, heads, v_head_dim] and [heads, total_q].  o keeps the dtype of o1 and is rounded once; where both rows
    attend to nothing it is 0 and lse is -inf.  A sink is in the lse of each call that is given it: one of the two is.
    Differentiable.  Raises LaunchError for tensors that do not belong together.  Source: Rabe and Staats 2021,
    "Self-attention Does Not Need O(n^2) Memory", section 2; the rescaling of the two partial sums is the online softmax
    of Milakov and Gimelshein 2018.
    """
    _check(o1, lse1, o2, lse2)
    nothing = float("-inf")
    most = torch.maximum(lse1, lse2).detach()
    most = most.masked_fill(most == nothing, 0.0)  # -inf - -inf would be NaN
    w1, w2 = torch.exp(lse1 - most), torch.exp(lse2 - most)
    total = w1 + w2
    none = total == 0
    total = total.masked_fill(none, 1.0)
    lse = (most + torch.log(total)).masked_fill(none, nothing)

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return (x.mT if o1.dim() == 3 else x).unsqueeze(-1)

    def part(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        read = o.masked_fill(of_rows(weight == 0), 0.0)  # before the product, whose gradient reads o too
        return read.to(lse.dtype) * of_rows(weight / total)

    return (part(o1, w1) + part(o2, w2)).to(o1.dtype), lse


def _check(o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> None:
    named = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(f"merge: {name} is a {type(tensor).__name__}, not a tensor")
        if tensor.is_nested and tensor.layout == torch.strided:
            raise LaunchError(
                f"merge: {name} is nested with layout torch.strided: all four are dense, or nested with layout"
                " torch.jagged\n  nearest: layout=torch.jagged, of which attention gives such o and lse"
            )
        if not tensor.is_nested:
            check_layout(f"merge: {name}", name, tensor)
        if tensor.device != o1.device:
            raise LaunchError(f"merge: o1 is on {o1.device} and {name} on {tensor.device}: move one to the other")
    if o1.shape != o2.shape or o1.dtype != o2.dtype or o1.dim() not in (3, 4):
        raise LaunchError(
            f"merge: o1 is {_text(o1)} and o2 {_text(o2)}: both are [batch, heads, q_len, v_head_dim], or"
            " [total_q, heads, v_head_dim] of attention_varlen, of one dtype"
        )
    if o1.dtype not in _DTYPES:
        raise LaunchError(
            f"merge: o1 and o2 are {_text(o1)}: outputs of attention are {', '.join(map(_name, _DTYPES))}\n"
            "  nearest: o1.float() and o2.float()"
        )
    behind = o1.dim() == 3  # sequences lie behind each other
    shape = o1.shape[1::-1] if behind else o1.shape[:-1]
    call, sizes = ("attention_varlen", "[heads, total_q]") if behind else ("attention", "[batch, heads, q_len]")
    for name in ("lse1", "lse2"):
        lse = named[name]
        if lse.shape != shape or lse.dtype not in (torch.float32, torch.float64):
            raise LaunchError(
                f"merge: {name} is {_text(lse)} beside o1 {_text(o1)}: it is {sizes} in float32, as"
                f" {call}(..., return_lse=True) gives it"
            )
    if lse1.dtype != lse2.dtype:
        raise LaunchError(f"merge: lse1 is {_text(lse1)} and lse2 {_text(lse2)}: both have one dtype")


def _text(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
