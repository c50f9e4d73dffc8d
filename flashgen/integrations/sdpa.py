"""scaled_dot_product_attention(): PyTorch's call, by flashgen's kernels."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import LaunchError
from flashgen.integrations.backends import note
from flashgen.lang.declare import tensor
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant, variant
from flashgen.ops.attention import attention

NAME = "scaled_dot_product_attention"

FULL = load_spec("full")
CAUSAL = load_spec("causal")


def _masked(dtype: str) -> Variant:
    """Attention under PyTorch's attn_mask of that dtype: what may be seen, or what is added to the score."""
    mask = tensor("attn_mask", ("batch", "heads", "q", "kv"), dtype)
    if dtype == "bool":
        return variant(lambda b, h, q, k: mask[b, h, q, k], name="attn_mask")
    return variant(score=lambda s, b, h, q, k: s + mask[b, h, q, k], name="attn_bias")


#: By dtype of the mask.
MASKED = {
    torch.bool: _masked("bool"),
    torch.float16: _masked("float16"),
    torch.bfloat16: _masked("bfloat16"),
    torch.float32: _masked("float32"),
}


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
    float32 that is added to the score, with its gradient.  It is read where it lies.  `is_causal` counts positions from
    the first query and the first key.  A row that sees nothing gives 0.  Several dimensions before the heads are made
    one, with a copy where memory does not allow a view.

    Raises LaunchError and PlanError as `attention` does: nothing else serves what flashgen lacks.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise LaunchError(f"{name} is a {type(x).__name__}, not a torch.Tensor")
        if x.is_nested:
            raise LaunchError(
                f"{name} is nested: flashgen takes dense tensors\n  nearest: {name}.to_padded_tensor(0.0)"
            )
        if x.dim() < 2:
            raise LaunchError(f"{name} is {list(x.shape)}: it is [..., seqlen, head_dim]")
    lead = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four(x, lead) for x in (query, key, value))
    if not enable_gqa:
        q, k, v = _alike(q, k, v)
    named: dict[str, Any] = {}
    if attn_mask is None:
        rule = CAUSAL if is_causal else FULL
    else:
        if is_causal:
            raise LaunchError(
                "attn_mask and is_causal are given: PyTorch takes one of them\n"
                "  nearest: attn_mask & torch.ones_like(attn_mask).tril(), or a variant of both"
            )
        rule = _rule(attn_mask)
        named["attn_mask"] = _mask(attn_mask, lead, (q.shape[1], q.shape[2], k.shape[2]))
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


def _four(x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """x as [batch, heads, seqlen, head_dim]."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    x = x.expand(*lead, *x.shape[-3:])
    if len(lead) == 1:
        return x
    return x.flatten(0, -4) if lead else x.unsqueeze(0)


def _alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads that broadcast as PyTorch's do where groups are not asked for; one key head is a group of all."""
    heads = max(x.shape[1] for x in (q, k, v))
    if any(x.shape[1] not in (1, heads) for x in (q, k, v)):
        raise LaunchError(
            f"query has {q.shape[1]} heads, key {k.shape[1]} and value {v.shape[1]}: without groups they are alike\n"
            "  nearest: enable_gqa=True, where key and value have as many and they divide those of query"
        )
    shared = heads if k.shape[1] != v.shape[1] else k.shape[1]
    return q.expand(-1, heads, -1, -1), k.expand(-1, shared, -1, -1), v.expand(-1, shared, -1, -1)


def _rule(mask: torch.Tensor) -> Variant:
    if not isinstance(mask, torch.Tensor):
        raise LaunchError(f"attn_mask is a {type(mask).__name__}, not a torch.Tensor")
    if mask.dtype not in MASKED:
        name = str(mask.dtype).removeprefix("torch.")
        raise LaunchError(
            f"attn_mask is {name}: it is bool, or float16, bfloat16 or float32 that is added to the score\n"
            f"  nearest: attn_mask.{'bool' if not mask.dtype.is_floating_point else 'float'}()"
        )
    return MASKED[mask.dtype]


def _mask(mask: torch.Tensor, lead: tuple[int, ...], last: tuple[int, int, int]) -> torch.Tensor:
    """The mask as [batch, heads, q_len, kv_len], each of them its own or 1."""
    whole = (*lead, *last)
    missing = len(whole) - mask.dim()
    fits = missing >= 0 and all(m in (1, n) for m, n in zip(mask.shape, whole[missing:], strict=True))
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
