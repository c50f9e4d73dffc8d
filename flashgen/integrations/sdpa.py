"""scaled_dot_product_attention(): PyTorch's call, by flashgen's kernels."""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any, TypeGuard

import torch
from torch import nn

from flashgen.errors import LaunchError
from flashgen.integrations.backends import note
from flashgen.lang.declare import tensor
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant, variant
from flashgen.ops import float8
from flashgen.ops.attention import attention
from flashgen.ops.layouts import check_layout
from flashgen.ops.values import no_flag

NAME = "scaled_dot_product_attention"

FULL = load_spec("full")
CAUSAL = load_spec("causal")

#: The causal mask whose last query sees the last key: that of PyTorch's flash kernels, and of `causal_lower_right`.
BOTTOM_RIGHT = load_spec("causal_bottom_right")


#: Dimensions of a mask; along the first three it may be the same throughout.
DIMS = ("batch", "heads", "q", "kv")

#: A mask's dtype, and the numbers of the dimensions along which it differs.
Kind = tuple[torch.dtype, tuple[int, ...]]


def _masked(dtype: str, own: tuple[int, ...]) -> Variant:
    """Attention under PyTorch's attn_mask of that dtype: what may be seen, or what is added to the score.

    It is indexed by its own dimensions alone: so heads share tiles of a mask that does not tell them apart, and a table
    is summarised once.  On an H100, 4 sequences of 16 heads and 2,048 tokens at head_dim 64 under one causal table took
    444 us with all four indices, most of them for the summaries of each head, and 134 so.
    """
    mask = tensor("attn_mask", tuple(DIMS[i] for i in own), dtype)

    def element(*position: Any) -> Any:
        return mask[tuple(position[i] for i in own)]

    if dtype == "bool":
        return variant(lambda b, h, q, k: element(b, h, q, k), name="attn_mask")
    return variant(score=lambda s, b, h, q, k: s + element(b, h, q, k), name="attn_bias")


#: All kinds of masks: torch.compile finds them made.
MASKED: dict[Kind, Variant] = {
    (dtype, (*own, 3)): _masked(str(dtype).removeprefix("torch."), (*own, 3))
    for dtype in (torch.bool, torch.float16, torch.bfloat16, torch.float32)
    for number in range(4)
    for own in combinations(range(3), number)
}

#: Their dtypes.
DTYPES = frozenset(dtype for dtype, _ in MASKED)


def kind(mask: torch.Tensor) -> tuple[Kind, torch.Tensor]:
    """Of a mask [batch, heads, q_len, kv_len], each of them its own or 1: what it is, and a view without the dimensions
    along which it is the same, because it has one element there or was expanded.  Each element that was expanded has a
    gradient of its own."""
    own: list[int] = []
    for i in reversed(range(3)):
        if mask.shape[i] == 1 or (mask.shape[i] > 1 and mask.stride(i) == 0 and not mask.requires_grad):
            mask = mask.select(i, 0)
        else:
            own.insert(0, i)
    return (mask.dtype, (*own, 3)), mask


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch.nn.functional.scaled_dot_product_attention computes of these, by flashgen's kernels.

    query is [..., heads, q_len, head_dim], key [..., heads, kv_len, head_dim], value [..., heads, kv_len, v_head_dim];
    the dimensions before the last two broadcast, and with `enable_gqa` heads of key and value serve query heads in
    groups.  attn_mask broadcasts to [..., heads, q_len, kv_len]: bool (True may be seen), or float16, bfloat16 or
    float32 that is added to the score, with its gradient.  It is read where it lies; of PyTorch's CausalBias, which
    lies nowhere, what it says.  `is_causal` counts positions from the first query and the first key.  A row that sees
    nothing gives 0.  Several dimensions before the heads are made one, with a copy where memory does not allow a view;
    query, key and value whose last dimension is not contiguous are copied.

    Raises LaunchError and PlanError as `attention` does: nothing else serves what flashgen lacks.
    """
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if wrong := no_flag(name, flag):
            raise LaunchError(wrong)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise LaunchError(f"{name} is a {type(x).__name__}, not a torch.Tensor")
        _check_layout(name, x)
        if x.dim() < 2:
            raise LaunchError(f"{name} is {list(x.shape)}: it is [..., seqlen, head_dim]")
    float8.refuse_at(NAME, query=query, key=key, value=value)
    lead = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four(_side_by_side(x), lead) for x in (query, key, value))
    if not enable_gqa:
        q, k, v = _alike(q, k, v)
    named: dict[str, Any] = {}
    if attn_mask is None:
        rule = CAUSAL if is_causal else FULL
    else:
        if is_causal_bias(attn_mask):
            rule = _causal(attn_mask, q.shape[2], k.shape[2], is_causal)
        else:
            _check_dtype(attn_mask)
            if is_causal:
                raise _both(attn_mask, q.shape[2], k.shape[2])
            of, named["attn_mask"] = kind(_mask(attn_mask, lead, (q.shape[1], q.shape[2], k.shape[2])))
            rule = MASKED[of]
    o = attention(q, k, v, rule, scale=scale, dropout=dropout_p, **named)
    assert isinstance(o, torch.Tensor)  # no lse was asked for
    note(NAME)
    o = o.reshape(*lead, *o.shape[1:])
    return o if max(query.dim(), key.dim(), value.dim()) > 2 else o.squeeze(0)


def _broadcast(*shapes: torch.Size) -> tuple[int, ...]:
    """The dimensions before the heads, as PyTorch broadcasts them."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        text = ", ".join(map(str, map(list, shapes)))
        raise LaunchError(
            f"query, key and value have {text} before their heads: these do not broadcast\n"
            "  nearest: one batch size for all, or 1"
        ) from None


def _check_layout(name: str, x: torch.Tensor) -> None:
    if x.is_nested:
        nearest = (
            "flashgen.attention(query, key, value, flashgen.load_spec('full')), or 'causal', which takes all three with"
            " layout=torch.jagged"
        )
        if name == "attn_mask":
            nearest = f"attn_mask.to_padded_tensor({'-math.inf' if x.is_floating_point() else 'False'})"
        raise LaunchError(f"{name} is nested: flashgen takes dense tensors\n  nearest: {nearest}")
    check_layout(name, name, x, "flashgen")


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x with the elements of a row side by side, as kernels read them: a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _four(x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """x as [batch, heads, seqlen, head_dim]."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    x = x.expand(*lead, *x.shape[-3:])
    if len(lead) == 1:
        return x
    return x.flatten(0, -4) if lead else x.unsqueeze(0)


def _broadcasts(size: int, to: int) -> bool:
    """Whether a dimension of that size does.  Of a size that torch.compile does not know `in` says False, and `==`
    makes it a condition of the graph."""
    return size == 1 or size == to


def _alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads that broadcast as PyTorch's do where groups are not asked for; one key head is a group of all."""
    heads = max(x.shape[1] for x in (q, k, v)) if q.shape[1] else 0
    if not all(_broadcasts(x.shape[1], heads) for x in (q, k, v)):
        raise LaunchError(
            f"query has {q.shape[1]} heads, key {k.shape[1]} and value {v.shape[1]}: without groups they are alike\n"
            "  nearest: enable_gqa=True, where key and value have as many and they divide those of query"
        )
    shared = heads if k.shape[1] != v.shape[1] else k.shape[1]
    return q.expand(-1, heads, -1, -1), k.expand(-1, shared, -1, -1), v.expand(-1, shared, -1, -1)


def _check_dtype(mask: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor):
        raise LaunchError(f"attn_mask is a {type(mask).__name__}, not a torch.Tensor")
    if type(mask) not in (torch.Tensor, nn.Parameter) and not torch.compiler.is_compiling() and _overrides(type(mask)):
        raise LaunchError(
            f"attn_mask is a {type(mask).__name__}, whose class has a meaning of its own for functions of torch:"
            " flashgen reads elements in memory\n  nearest: attn_mask.as_subclass(torch.Tensor), where those are it"
        )
    _check_layout("attn_mask", mask)
    if mask.dtype not in DTYPES:
        name = str(mask.dtype).removeprefix("torch.")
        raise LaunchError(
            f"attn_mask is {name}: it is bool, or float16, bfloat16 or float32 that is added to the score\n"
            f"  nearest: attn_mask.{'bool' if not mask.dtype.is_floating_point else 'float'}()"
        )


def is_causal_bias(mask: object) -> TypeGuard[Any]:
    """Whether a mask is PyTorch's CausalBias: whoever made one has imported its module, which takes a while."""
    biases = sys.modules.get("torch.nn.attention.bias")
    return biases is not None and isinstance(mask, biases.CausalBias)


def _overrides(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors says itself what functions of torch make of them."""
    own = kind.__torch_function__
    inherited = getattr(own, "__func__", None) is torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return not inherited and own is not torch._C._disabled_torch_function_impl


def _causal(bias: Any, q_len: int, kv_len: int, is_causal: bool) -> Variant:
    """What a CausalBias means: it says so in its attributes, and its memory holds nothing."""
    if is_causal:
        raise LaunchError(
            "attn_mask is a CausalBias and is_causal is given: PyTorch takes one of them\n  nearest: attn_mask alone"
        )
    if (bias.seq_len_q, bias.seq_len_kv) != (q_len, kv_len):
        raise LaunchError(
            f"attn_mask is a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys, and query and key have"
            f" {q_len} and {kv_len}\n  nearest: causal_{bias.variant.name.lower()}({q_len}, {kv_len})"
        )
    return BOTTOM_RIGHT if bias.variant.name == "LOWER_RIGHT" and q_len != kv_len else CAUSAL


def _both(mask: torch.Tensor, q_len: int, kv_len: int) -> LaunchError:
    """The refusal of a mask beside is_causal."""
    lower = f"torch.ones({q_len}, {kv_len}, dtype=torch.bool, device={str(mask.device)!r}).tril()"
    one = f"attn_mask & {lower}" if mask.dtype is torch.bool else f"attn_mask.masked_fill(~{lower}, -math.inf)"
    return LaunchError(
        "attn_mask and is_causal are given: PyTorch takes one of them\n"
        f"  nearest: is_causal=False with {one}, or a variant of both"
    )


def _mask(mask: torch.Tensor, lead: tuple[int, ...], last: tuple[int, int, int]) -> torch.Tensor:
    """The mask as [batch, heads, q_len, kv_len], each of them its own or 1."""
    whole = (*lead, *last)
    missing = len(whole) - mask.dim()
    fits = missing >= 0 and all(_broadcasts(m, n) for m, n in zip(mask.shape, whole[missing:], strict=True))
    if not fits:
        raise LaunchError(
            f"attn_mask is {list(mask.shape)}: it broadcasts to {list(whole)}, [..., heads, q_len, kv_len] of query"
            f" and key\n  nearest: attn_mask of {list(last[-2:])}, or of 1 where it is the same for all"
        )
    mask = mask.reshape(*[1] * missing, *mask.shape)
    before = mask.shape[: len(lead)]
    if len(lead) != 1:
        if any(m != 1 for m in before):
            mask = mask.expand(*lead, *mask.shape[len(lead) :]).flatten(0, len(lead) - 1)
        else:
            mask = mask.reshape(1, *mask.shape[len(lead) :])
    return mask
