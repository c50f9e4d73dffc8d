"""The operator that engines of serving call, by the argument names of vLLM's `flash_attn_varlen_func`.

An engine's backend is then a thin class: it writes new keys and values into its cache, as it does today, and hands over
the metadata of its batch as it has it.  Prompts that are read, chunks of them and sequences that decode go in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.compat import flash_attn
from flashgen.errors import LaunchError
from flashgen.integrations.backends import note
from flashgen.ops import float8
from flashgen.ops.attention import attention_varlen

NAME = "vllm.flash_attn_varlen_func"


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    s_aux: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences behind each other over keys in the pages of a cache, or behind each other too.

    q is [total_q, heads, head_dim]; the queries of sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1
    (int32 [sequences + 1]), at most `max_seqlen_q` of them.  With a `block_table` (int32 [sequences, blocks]) k and v
    are [blocks of all, block_size, kv_heads, head_dim], and sequence b has `seqused_k[b]` keys (int32) in the blocks
    that its row names; else they are [total_k, kv_heads, head_dim] and `cu_seqlens_k` says whose rows are whose.  A
    sequence has at most `max_seqlen_k` keys.

    The last query of a sequence sits beside its last key: `causal`, `window_size` (before, after; -1 sets no end),
    `softcap` and `alibi_slopes` count from there, as flashgen.compat.flash_attn.flash_attn_func says.  `s_aux` are the
    learned sinks, a logit for each head.  Returns [total_q, heads, head_dim], with `return_softmax_lse` (that, lse
    [heads, total_q]); `out`, where it is given, is what kernels write, and is returned.  `num_splits` is
    `attention_varlen`'s `kv_splits`, and 0 leaves it to flashgen.  `fa_version` names which of FlashAttention's kernels
    an engine would take: it changes nothing here.

    Raises LaunchError by the argument's name for what is not served: 8-bit inputs and their descales, q_v, metadata of
    another scheduler, context parallelism, probabilities.  Else raises what flashgen.attention_varlen does.
    """
    missing = {
        "q_v": (q_v, "q and k of one head dim"),
        "return_attn_probs": (return_attn_probs or None, "return_softmax_lse=True, for the lse"),
        "scheduler_metadata": (scheduler_metadata, "None: kernels find their tiles themselves"),
        **{
            name: (given, "k and v in bfloat16 or float16, and no descales")
            for name, given in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale))
        },
        "cp_world_size": (
            None if cp_world_size in (None, 1) else cp_world_size,
            "a call for each part, and flashgen.merge",
        ),
        "cp_rank": (cp_rank or None, "cp_rank=0"),
        "cp_tot_seqused_k": (cp_tot_seqused_k, "a call for each part, and flashgen.merge"),
    }
    for name, (asked, cure) in missing.items():
        if asked is not None:
            raise LaunchError(f"{NAME} serves no {name} in flashgen\n  nearest: {cure}")
    float8.refuse_at(NAME, q=q, k=k, v=v)
    window: Any = (-1, -1) if window_size is None else window_size
    rule, named = flash_attn.rule_of(causal, window, softcap, alibi_slopes)
    given: dict[str, Any] = {**named, **_keys(cu_seqlens_k, seqused_k, block_table)}
    found = attention_varlen(
        *(q, k, v, rule, cu_seqlens_q),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k if block_table is None else flash_attn.bounded(max_seqlen_k, block_table, k),
        scale=softmax_scale,
        return_lse=bool(return_softmax_lse),
        dropout=dropout_p,
        deterministic=deterministic,
        sink=s_aux,
        kv_splits=num_splits or None,
        out=out,
        **given,
    )
    note(NAME)
    return found


def _keys(
    cu_seqlens_k: torch.Tensor | None, seqused_k: torch.Tensor | None, block_table: torch.Tensor | None
) -> dict[str, Any]:
    """Where the keys of sequences are, as attention_varlen is told."""
    if block_table is None:
        if seqused_k is not None or cu_seqlens_k is None:
            raise LaunchError(
                f"{NAME} without a block_table has keys behind each other: cu_seqlens_k says whose rows are whose, and"
                " seqused_k is not served\n  nearest: cu_seqlens_k=..., int32 [sequences + 1]"
            )
        return {"cu_seqlens_k": cu_seqlens_k}
    if seqused_k is None or cu_seqlens_k is not None:
        raise LaunchError(
            f"{NAME} with a block_table has keys in blocks: seqused_k says how many, and cu_seqlens_k is not served\n"
            "  nearest: seqused_k=..., int32 [sequences]"
        )
    lengths = flash_attn.int32("seqused_k", seqused_k)
    return {"page_table": block_table, "page_layout": "phd", "kv_lengths": lengths}
