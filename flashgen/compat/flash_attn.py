"""The functions of the package flash_attn (its second version), served by flashgen.

Tensors are [batch, seqlen, heads, head_dim] and read where they lie.  A causal mask ends at the last query and the last
key, and windows count from there too.  A row that sees nothing gives 0, and -inf as its lse.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.analysis.tanh import LEAST_CAP
from flashgen.errors import LaunchError
from flashgen.integrations.backends import note
from flashgen.lang.declare import param, tensor
from flashgen.lang.functions import absolute, kv_len, q_len, tanh
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant, variant
from flashgen.ops import float8
from flashgen.ops.attention import attention, attention_varlen
from flashgen.ops.layouts import check_layout, stacked
from flashgen.ops.values import SYMBOLS, no_flag, no_number, no_tensor, whole

FULL = load_spec("full")
CAUSAL = load_spec("causal_bottom_right")

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q [batch, q_len, heads, head_dim] over k and v [batch, kv_len, kv_heads, head_dim].

    With p = q + kv_len - q_len a query sees the keys from p - window_size[0] to p + window_size[1], where -1 sets no
    end; `causal` ends them at p.  The score is softcap * tanh(score / softcap) where a softcap is given, less
    alibi_slopes ([heads] or [batch, heads], float32) times |p - k|.  The result is [batch, q_len, heads, head_dim],
    with `return_attn_probs` (result, lse [batch, heads, q_len], an empty tensor), but not beside dropout.

    Raises LaunchError and PlanError as flashgen.attention does.
    """
    _no_probabilities(return_attn_probs, dropout_p)
    o, lse = _attend(
        *("flash_attn_func", q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes),
        dropout=dropout_p,
        deterministic=deterministic,
    )
    return (o, lse, q.new_empty(0)) if return_attn_probs else o


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *others: Any, **named: Any) -> Result:
    """`flash_attn_func` of k and v in one tensor [batch, kv_len, 2, kv_heads, head_dim], then its other arguments."""
    k, v = _apart("kv", kv, 2)
    return flash_attn_func(q, k, v, *others, **named)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *others: Any, **named: Any) -> Result:
    """`flash_attn_func` of q, k and v in one [batch, seqlen, 3, heads, head_dim], its other arguments after it."""
    q, k, v = _apart("qkv", qkv, 3)
    return flash_attn_func(q, k, v, *others, **named)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention of q over the first `cache_seqlens` keys of a cache: [batch] in int32, or a number; else over all.

    Arguments otherwise as `flash_attn_func` has them, where kv_len is the number of those keys.  With a `block_table`
    (int32 [batch, blocks]) caches are [blocks, block_size, kv_heads, head_dim], and a row of the table names those of a
    sequence in order; nothing else of table and caches is read.  The result, or with `return_softmax_lse` (result,
    lse).  What is not there yet is refused by name: writing k and v into the cache, rotary embeddings, caches by index
    and padding on the left.  `num_splits` is `attention`'s `kv_splits`, and 0 leaves it to flashgen.
    """
    missing = {
        "k": (k, "write it into the cache before the call, as k_cache[:, n : n + new] = k"),
        "v": (v, "write it into the cache before the call, as v_cache[:, n : n + new] = v"),
        "rotary_cos": (rotary_cos, "rotate q and k before the call"),
        "rotary_sin": (rotary_sin, "rotate q and k before the call"),
        "cache_batch_idx": (cache_batch_idx, "k_cache[cache_batch_idx], a copy"),
        "cache_leftpad": (cache_leftpad, "padding on the right, with cache_seqlens"),
    }
    for name, (given, cure) in missing.items():
        if given is not None:
            raise LaunchError(f"flash_attn_with_kvcache has no {name} in flashgen yet\n  nearest: {cure}")
    _check("flash_attn_with_kvcache", (q,), "batch", "seqlen", "heads", "head_dim", of="q")
    rest: dict[str, Any] = {"kv_splits": num_splits or None}
    if cache_seqlens is not None:
        rest["kv_lengths"] = _lengths(cache_seqlens, q, k_cache, paged=block_table is not None)
    if block_table is not None:
        name = "flash_attn_with_kvcache"
        _check(name, (k_cache, v_cache), "blocks", "block_size", "heads", "head_dim", of="kv")
        rule, named = rule_of(causal, window_size, softcap, alibi_slopes)
        rest |= {"page_table": int32("block_table", block_table), **named}
        o, lse = attention(q.transpose(1, 2), k_cache, v_cache, rule, scale=softmax_scale, return_lse=True, **rest)
        note(name)
        return (o.transpose(1, 2), lse) if return_softmax_lse else o.transpose(1, 2)
    o, lse = _attend(
        *("flash_attn_with_kvcache", q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, alibi_slopes),
        **rest,
    )
    return (o, lse) if return_softmax_lse else o


def _lengths(given: Any, q: torch.Tensor, k_cache: Any, *, paged: bool) -> Any:
    """The keys of each sequence, of one number for all; LaunchError where a cache has no room for it."""
    if not isinstance(given, (int, torch.SymInt, numbers.Integral)):
        return int32("cache_seqlens", given)
    _check_shape("k_cache", "k_cache", k_cache)
    count, room = whole(given), None if paged or not isinstance(k_cache, torch.Tensor) else k_cache.shape[1]
    if count < 0 or (room is not None and count > room):
        raise LaunchError(
            f"cache_seqlens is {count}: it is 0 to {'the keys of a cache' if room is None else room}\n"
            f"  nearest: cache_seqlens={0 if count < 0 else room}"
        )
    return torch.full((q.shape[0],), count, dtype=torch.int32, device=q.device)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """`flash_attn_func` of sequences that lie behind each other: q [total_q, heads, head_dim], k and v [total_k,
    kv_heads, head_dim]; rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 are those of sequence b, int32 [batch + 1].

    With a `block_table` k and v are caches in pages, as `flash_attn_with_kvcache` has them, and cu_seqlens_k says how
    many keys each sequence has there.  The result is [total_q, heads, head_dim], with `return_attn_probs` (result, lse
    [heads, total_q], an empty tensor).
    """
    name = "flash_attn_varlen_func"
    _no_probabilities(return_attn_probs, dropout_p)
    rule, named = rule_of(causal, window_size, softcap, alibi_slopes)
    if block_table is None:
        _check(name, (q, k, v), "rows", "heads", "head_dim")
        keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    else:
        _check(name, (q,), "rows", "heads", "head_dim", of="q")
        _check(name, (k, v), "blocks", "block_size", "heads", "head_dim", of="kv")
        if not isinstance(cu_seqlens_k, torch.Tensor):
            raise LaunchError(no_tensor("cu_seqlens_k", cu_seqlens_k))
        check_layout("cu_seqlens_k", "cu_seqlens_k", cu_seqlens_k, name, nested="torch.cat(cu_seqlens_k.unbind())")
        most = bounded(max_seqlen_k, block_table, k)
        keys = {"page_table": block_table, "kv_lengths": cu_seqlens_k.diff(), "max_seqlen_k": most}
    o, lse = attention_varlen(
        q,
        k,
        v,
        rule,
        cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        **keys,
        scale=softmax_scale,
        return_lse=True,
        dropout=dropout_p,
        deterministic=deterministic,
        **named,
    )
    note(name)
    return (o, lse, q.new_empty(0)) if return_attn_probs else o


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *others: Any, **named: Any) -> Result:
    """`flash_attn_varlen_func` of k and v in one tensor [total_k, 2, kv_heads, head_dim], then its other arguments."""
    k, v = _apart("kv", kv, 2, "rows")
    return flash_attn_varlen_func(q, k, v, *others, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *others: Any, **named: Any
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one [total, 3, heads, head_dim], its other arguments after it."""
    q, k, v = _apart("qkv", qkv, 3, "rows")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *others, **named)


def _no_probabilities(asked: bool, dropout: float) -> None:
    if asked and dropout != 0:
        raise LaunchError(
            "return_attn_probs beside dropout asks for the matrix of probabilities, which no kernel writes\n"
            "  nearest: return_attn_probs=True without dropout, for the lse"
        )


def _check(name: str, tensors: Sequence[torch.Tensor], *dimensions: str, of: str = "qkv") -> None:
    for what, x in zip(of, tensors, strict=True):
        _check_shape(f"{name}: {what}", what, x)
        if not isinstance(x, torch.Tensor) or x.dim() != len(dimensions):
            shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise LaunchError(f"{name}: {what} is {shape}: it is [{', '.join(dimensions)}]")
        float8.refuse_at(name, **{what: x})


def _check_shape(title: str, name: str, x: object) -> None:
    """Raise LaunchError for a nested tensor that has no shape; a jagged one has."""
    if isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.strided:
        check_layout(title, name, x, "flash_attn", nested="flash_attn_varlen_func, of sequences behind each other")


def _apart(name: str, packed: torch.Tensor, count: int, *rows: str) -> tuple[torch.Tensor, ...]:
    rows = rows or ("batch", "seqlen")
    _check_shape(name, name, packed)
    if not isinstance(packed, torch.Tensor) or packed.dim() != len(rows) + 3 or packed.shape[len(rows)] != count:
        shape = list(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise LaunchError(f"{name} is {shape}: it is [{', '.join(rows)}, {count}, heads, head_dim]")
    return packed.unbind(len(rows))


def _attend(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [batch, q_len, heads, head_dim] and its lse."""
    _check(name, (q, k, v), "batch", "seqlen", "heads", "head_dim")
    rule, named = rule_of(causal, window, softcap, slopes)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = attention(q, k, v, rule, scale=scale, return_lse=True, **options, **named)
    note(name)
    return o.transpose(1, 2), lse


def _check_dense(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise LaunchError(no_tensor(name, x))
    check_layout(name, name, x, nested=stacked(name))


def int32(name: str, x: Any) -> torch.Tensor:
    """A tensor of lengths or of page numbers; LaunchError, by the name that its function has for it, for anything
    else."""
    _check_dense(name, x)
    if x.dtype != torch.int32:
        dtype = str(x.dtype).removeprefix("torch.")
        raise LaunchError(f"{name} is {dtype}: it is a tensor of int32\n  nearest: {name}.to(torch.int32)")
    return x


def bounded(most: Any, block_table: Any, k: Any) -> Any:
    """The most keys of a sequence: no more than a row of its table has room for.  What is neither is refused further
    on."""
    int32("block_table", block_table)
    _check_dense("k", k)
    if not isinstance(most, int) or block_table.dim() != 2 or k.dim() != 4:
        return most
    return min(most, block_table.shape[1] * k.shape[1])


def _real(x: object) -> bool:
    return isinstance(x, (*SYMBOLS, int, float, numbers.Real))


def rule_of(
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: torch.Tensor | None,
) -> tuple[Variant, Mapping[str, Any]]:
    """The variant of a call, and its parameters and captured tensors."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise LaunchError(f"window_size is (keys before, keys after), -1 for no end, and got {window!r}")
    if not all(map(_real, window)):
        raise LaunchError(f"window_size is (keys before, keys after), numbers, -1 for no end, and got {window!r}")
    if isinstance(causal, torch.Tensor) or causal not in (False, True):
        raise LaunchError(str(no_flag("causal", causal)))
    if not _real(softcap):
        raise LaunchError(str(no_number("softcap", softcap)))
    if softcap < 0:
        raise LaunchError(f"softcap is {softcap}: it is positive, or 0 for none")
    left, right = window
    named: dict[str, Any] = {}
    if left >= 0:
        named["left"] = left
    if right >= 0 and not causal:
        named["right"] = right
    capped = softcap != 0
    if capped:
        named["softcap"] = softcap
    rank = 0
    if slopes is not None:
        if not isinstance(slopes, torch.Tensor):
            raise LaunchError(no_tensor("alibi_slopes", slopes))
        named["alibi_slopes"], rank = slopes, slopes.dim()
        if rank not in (1, 2):
            raise LaunchError(f"alibi_slopes is {list(slopes.shape)}: it is [heads] or [batch, heads]")
    return _VARIANTS[causal, left >= 0, right >= 0, capped, rank], named


def _variant(causal: bool, left: bool, right: bool, softcap: bool, slopes: int) -> Variant:
    """The variant of such calls; `slopes` is the rank of alibi_slopes, 0 for none."""
    before, after = param("left", dtype=int, min=0), param("right", dtype=int, min=0)
    cap = param("softcap", dtype=float, min=LEAST_CAP)
    slope = tensor("alibi_slopes", ("batch", "heads")[2 - slopes :] if slopes else ("heads",), "float32")

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        place = q + kv_len - q_len
        seen: Any = True
        if causal or right:
            seen = (k <= (place if causal else place + after)) & seen
        if left:
            seen = (place - k <= before) & seen
        return seen

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if softcap:
            s = cap * tanh(s / cap)
        if slopes:
            s = s - (slope[h] if slopes == 1 else slope[b, h]) * absolute(q + kv_len - q_len - k)
        return s

    if not (left or right or softcap or slopes):
        return CAUSAL if causal else FULL
    made = variant(mask, name="flash_attn")
    return made.score(score) if softcap or slopes else made


_FLAGS = (False, True)

#: Made ahead: none can be made while torch.compile traces.
_VARIANTS = {form: _variant(*form) for form in itertools.product(_FLAGS, _FLAGS, _FLAGS, _FLAGS, range(3))}
