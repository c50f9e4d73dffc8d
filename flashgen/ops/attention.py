"""attention(): one call on torch tensors, eager, under autograd, or traced into a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.ops import autograd, float8, library, nested, splits
from flashgen.ops.call import Call
from flashgen.ops.dropout import drawn
from flashgen.ops.forward import run
from flashgen.ops.layouts import check_layout
from flashgen.ops.out import IN_A_TRANSFORM, WITH_GRADIENTS
from flashgen.ops.pages import heads_first
from flashgen.ops.sequences import (
    BOUNDS,
    PAGED,
    VARLEN,
    hand_over,
    in_pages,
    joined,
    names_of,
    position,
    refuse_gradients,
)
from flashgen.ops.sinks import with_given_sink
from flashgen.ops.tracing import any_autocast, any_requires_grad, autocast, functionalized, sharded, traced, transformed
from flashgen.ops.values import no_flag, no_tensor, of_numpy, whole
from flashgen.tuples import new

#: What a call is told inside of torch.func.functionalize.
FUNCTIONALIZED = (
    "torch.func.functionalize has no rule for functions with a gradient of their own, and attention is one\n"
    "  nearest: the call outside of it, or make_fx or torch.compile without it: there a call is one op that changes no"
    " tensor"
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
    deterministic: bool = False,
    q_offset: int | str | torch.Tensor | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    kv_splits: int | None = None,
    invariant: bool = False,
    page_table: torch.Tensor | None = None,
    page_layout: str | None = None,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    accuracy: str | None = None,
    out_dtype: torch.dtype | None = None,
    **named: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(mask(score(scale * q k^T))) v of a variant; with `return_lse` (o, lse).

    q is [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len,
    v_head_dim], of one dtype and on one device; heads is a multiple of kv_heads, and query head h reads key head
    h // (heads // kv_heads).  On a GPU float16 or bfloat16, head dims 16 to 256 in steps of 8, the last dimension
    contiguous and rows on multiples of 16 bytes; on a CPU float32 and float64 too, and any head dim.  Under
    torch.autocast q, k and v are cast to its dtype, as those of PyTorch's own attention are.  `scale` is any
    finite number and 1 / sqrt(head_dim) unless given.  `named` are the variant's parameters, constants, captured
    tensors and sink; those that it gives itself (`from_flex`) need not be passed, and a variant without a sink takes a
    `sink` [heads] or [batch, heads] too.

    o has q's dtype and is [batch, heads, q_len, v_head_dim], laid out as [batch, q_len, heads, v_head_dim] where q is;
    lse is the natural logarithm of the sum of exponentials, [batch, heads, q_len] in float32 (float64 for float64).  A
    row that attends to nothing gives 0 and lse -inf.  A sink (`fg.sink`) is one exponential more of that sum: lse has
    it, and is the sink where a row attends to nothing else.  Runs on torch's current stream, may be captured into a
    CUDA graph, and repeated calls give the same bits.  On a GPU, without dropout, the bits of a row are its own: they
    depend on no other row, batch, head or length, and on no choice between kernels of one pipeline; but for calls whose
    keys are split.

    `kv_splits` is the number of blocks that divide the keys of a tile of queries, whose parts a second kernel
    combines: 1 for one block that visits all, and then the bits of a row are its own; None where flashgen chooses,
    which splits keys where a sequence has few queries and many keys and the GPU would idle (`flashgen plan` says why).
    The bits then depend on that number, and on the queries beside a row.  With `invariant` keys are cut at positions
    that are multiples of a leaf (1,024), and leaves are folded in one order, by a block that visits all or as parts:
    the bits of a row are then its own in every call with it, however few or many queries, whatever chunk, batch,
    layout or pages.  They are not those of calls without it.  Where each leaf is a part, as for few queries, all are
    in memory at once: 4 v_head_dim + 8 bytes for each row and leaf.

    `q_offset` says where queries sit that attend to a cache: at this position and those behind it, at one for each
    sequence (int32 [batch], read on the device), or with "end" so that the last one sits beside the last key.  A spec's
    q is that position, and q_len one past the last: masks, scores and captured tensors indexed by q mean what they
    mean where all of the sequence's queries are given, and o has the same bits.  `q_lengths` and `kv_lengths` (int32
    [batch], read on the device) say how many queries and keys of its rows each sequence has, q_len and kv_len to a
    spec.  What lies beyond changes nothing, whatever it holds, and o is 0 and lse -inf there.  A dimension "q" of a
    captured tensor has at least as many positions as the host knows of; others are clamped.  On a GPU lengths count
    from 0 to what a tensor has, and a position below 0 as 0; FLASHGEN_CHECK=1 in the environment refuses others, for
    which the host waits.  Names that the variant declares are its own.

    With a `page_table` k and v are caches in pages, [pages, page_size, kv_heads, head_dim | v_head_dim], or
    [pages, kv_heads, page_size, ...] where `page_layout` is "hpd" (unless given "phd"), in memory as they lie: views of
    one tensor too.  Row b of the table (int32 [batch, entries], rows any distance apart, read on the device) names the
    pages of sequence b in the order of positions, and `kv_lengths` says how many keys they hold, all that they have
    room for unless given.  Other entries, other pages and other rows change nothing, whatever they hold.  A dimension
    "kv" of a captured tensor is entries * page_size long.  On a GPU an entry that is no page reads as zeros.  Pages of
    a multiple of 8 rows are loaded by TMA on Hopper; others by pipeline ampere, which is logged.  Without gradients.
    o is written to `out` where that is given, a tensor of o's shape, dtype and device that shares no memory with the
    inputs; it is refused where a gradient is wanted.  q, k and v may be jagged nested tensors [batch, heads, rows,
    head_dim] (torch.nested, layout torch.jagged): they are served as those of `attention_varlen`, and o, lse and
    gradients are nested as q is.

    k and v may be of 8 bits, float8_e4m3fn or float8_e5m2, beside q of 16, whose dtype o has, or float8_e4m3fn; head
    dims are steps of 16, on Hopper from 64 on beside q of 8 bits.  Elsewhere, and beside q of 16, they are widened in
    the kernel, and P has 16 bits.  An element times its descale is its value: `k_descale`, `v_descale`, and of 8-bit
    queries `q_descale` are float32 and positive, of [1], [batch, heads] or [batch, heads, blocks] (that of q may have
    the heads of k); a block is a power of two of rows from 128 on, of which so many cover the tensor.  Of 8-bit queries
    o is bfloat16, or float16 by `out_dtype`; `accuracy` says how P is made: "exact", "default" or "fast".
    `flashgen.quantize` makes such tensors.  In 8 bits there is no gradient, no dropout, no graph of torch.compile and
    no leaf.  Descales of pages are those of the sequences that have them.

    With `dropout` each probability is dropped by that chance and the others grow by 1 / (1 - dropout); lse is that of
    none dropped.  What is dropped follows from torch's generator of the device (torch.manual_seed repeats it), or from
    `seed`, from a pair's own batch, head, query and key, and from the number of heads: not from tiles, pipelines and
    lengths.

    Differentiable in q, k, v, lse, the sink and the captured float tensors that the score reads, once; the backward
    recomputes the probabilities from lse.  Its reruns may differ in the last bits, as dq is summed in any order, unless
    `deterministic` (or torch.use_deterministic_algorithms) asks for a slower sum in one order.  A gradient of o whose
    rows a kernel cannot load (an expanded one, as that of a sum) is copied.

    Raises LaunchError and PlanError before anything runs: what was asked, the limit, the nearest thing that works.
    Where the GPU's best pipeline has no kernel for a call, or cannot address its tensors, the logger "flashgen" warns,
    once for each such kernel.
    Source: Dao 2023, "FlashAttention-2", Algorithms 1 and 2.
    """
    if type(q) is not torch.Tensor and getattr(q, "is_nested", False) and nested.is_jagged(k, v):
        refused: dict[str, Any] = {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "page_table": page_table}
        hand_over(variant, named, refused)
        refused |= {"out": out, "page_layout": page_layout}
        options: dict[str, object] = {"scale": scale, "dropout": dropout, "seed": seed, "deterministic": deterministic}
        options |= {"q_offset": q_offset, "kv_splits": kv_splits, "invariant": invariant}
        options |= zip(float8.ARGUMENTS, (q_descale, k_descale, v_descale, accuracy, out_dtype), strict=True)
        return _nested(q, k, v, variant, return_lse, refused, {**options, **named})
    if q_offset is not None or q_lengths is not None or kv_lengths is not None:
        named = joined(variant, named, q_offset=q_offset, q_lengths=q_lengths, kv_lengths=kv_lengths)
    named = splits.joined(named, kv_splits, invariant)
    named = float8.joined(named, q_descale, k_descale, v_descale, accuracy, out_dtype)
    if page_table is not None or page_layout is not None:
        named = joined(variant, named, page_table=page_table)
        if not isinstance(variant, Variant) or PAGED[-1] in names_of(variant):
            k, v = heads_first(k, v, page_layout, page_table)
    return _attend(q, k, v, variant, scale, return_lse, dropout, seed, deterministic, named, out)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
    deterministic: bool = False,
    q_offset: int | str | torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_layout: str | None = None,
    kv_splits: int | None = None,
    invariant: bool = False,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    accuracy: str | None = None,
    out_dtype: torch.dtype | None = None,
    **named: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` of sequences that lie behind each other: o, and with `return_lse` (o, lse).

    q is [total_q, heads, head_dim], k [total_k, kv_heads, head_dim], v [total_k, kv_heads, v_head_dim].  The queries of
    sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, its keys those of cu_seqlens_k (that of q unless
    given): int32 [sequences + 1], read on the device.  No sequence is longer than `max_seqlen_q` and `max_seqlen_k`,
    whole numbers from above; it may have no row at all.  To a spec b is the sequence, q and k are positions in it, and
    q_len and kv_len its own; a dimension "kv" of a captured tensor is `max_seqlen_k`, and one "q" any that positions
    reach.  What one sequence holds changes no other.  Everything else is as in `attention`, `q_offset`, `kv_splits`
    and `invariant` too.

    With a `page_table` and a `page_layout`, as `attention` has them, k and v are the pages of a cache, and `kv_lengths`
    (int32 [sequences]) says how many keys each sequence has there, in place of cu_seqlens_k: so one call serves
    sequences of which some read a prompt and others decode.  `max_seqlen_k` is what a row of the table has room for
    unless given.

    In 8 bits `q_descale`, `k_descale` and `v_descale` are of [1], [sequences, heads] or [sequences, heads, blocks]: of
    blocks so many cover `max_seqlen_q` or `max_seqlen_k`, from the first row of each sequence on.

    o is [total_q, heads, v_head_dim], lse [heads, total_q]: the rows of a head lie side by side, as kernels write them.
    Rows of no sequence are not written on a GPU, and have gradients of 0.  Raises LaunchError and PlanError before
    anything runs; where FLASHGEN_CHECK=1 is in the environment, and on a CPU always, for cumulative lengths that
    decrease, leave the tensor or pass their bounds too.
    """
    meant: dict[str, Any] = {"q_offset": q_offset, "kv_lengths": kv_lengths, "page_table": page_table}
    hand_over(variant, named, meant)
    q_offset, kv_lengths, page_table = meant["q_offset"], meant["kv_lengths"], meant["page_table"]
    paged, max_seqlen_q = page_table is not None, whole(max_seqlen_q)
    given = (("q", q),) if paged else (("q", q), ("k", k), ("v", v))
    for name, x in (*given, *((("out", out),) if out is not None else ())):
        if not isinstance(x, torch.Tensor):
            raise LaunchError(no_tensor(name, x))
        if x.is_nested or x.layout != torch.strided or x.dim() != 3:
            _refuse_rows(name, x)
    k, v = heads_first(k, v, page_layout, page_table)
    if paged:
        own = in_pages(cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table, max_seqlen_q)
    else:
        # PyTorch 2.6 compiles no union of dicts.
        own = {**dict.fromkeys(VARLEN[:2], cu_seqlens_q), **dict.fromkeys(BOUNDS, max_seqlen_q)}
        if cu_seqlens_k is not None:
            own[VARLEN[1]] = cu_seqlens_k
        if kv_lengths is not None:
            named["kv_lengths"] = kv_lengths  # refused further on
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    if max_seqlen_k is not None:
        own[BOUNDS[1]] = whole(max_seqlen_k)
    if q_offset is not None:
        own[VARLEN[2]] = position(q_offset)
    own = splits.joined(own, kv_splits, invariant)
    own = float8.joined(own, q_descale, k_descale, v_descale, accuracy, out_dtype)
    q = q.transpose(0, 1).unsqueeze(0)
    to = None if out is None else out.transpose(0, 1).unsqueeze(0)
    found = _attend(q, k, v, variant, scale, return_lse, dropout, seed, deterministic, {**named, **own}, to)
    if out is not None:
        return (out, found[1][0]) if isinstance(found, tuple) else out
    if isinstance(found, tuple):
        return found[0].squeeze(0).transpose(0, 1), found[1].squeeze(0)
    return found.squeeze(0).transpose(0, 1)


def _refuse_rows(name: str, x: torch.Tensor) -> NoReturn:
    """Raise LaunchError for a tensor that attention_varlen does not take."""
    if x.is_nested:
        cure = "a dense out, or none" if name == "out" else "attention() of q, k and v with layout=torch.jagged"
        raise LaunchError(
            f"{name} is nested: attention_varlen takes [rows, heads, head_dim], sequences behind each other\n"
            f"  nearest: {cure}"
        )
    check_layout(name, name, x)
    raise LaunchError(
        f"{name} has {x.dim()} dimensions {list(x.shape)}: attention_varlen takes [rows, heads, head_dim]\n"
        "  nearest: attention() for [batch, heads, seqlen, head_dim]"
    )


def _nested(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    return_lse: bool,
    refused: Mapping[str, object],
    given: dict[str, Any],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The call of jagged nested tensors: their rows lie behind each other."""
    nested.refuse_beside(name for name, value in refused.items() if value is not None)
    nested.check_together(k, v)
    of_q, of_k, of_v = (nested.apart(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    found = attention_varlen(
        *(of_q.rows, of_k.rows, of_v.rows),
        *(variant, of_q.starts, of_k.starts),
        max_seqlen_q=of_q.longest,
        max_seqlen_k=of_k.longest,
        return_lse=return_lse,
        **given,
    )
    if isinstance(found, tuple):
        return nested.like(found[0], q), nested.like(found[1].transpose(0, 1), q)
    return nested.like(found, q)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    return_lse: bool,
    dropout: float,
    seed: int | None,
    deterministic: bool,
    named: dict[str, object],
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The call, by whoever runs it."""
    compiling = torch.compiler.is_compiling()
    wrong = None if return_lse is False else no_flag("return_lse", return_lse)
    if wrong is not None and not compiling:
        raise LaunchError(wrong)
    if "sink" in named and named["sink"] is None:
        named = {name: value for name, value in named.items() if name != "sink"}
    if isinstance(variant, Variant) and variant.given:
        variant, named = variant.bare, {**_given(variant), **named}
    if not compiling:  # to dynamo NumPy's numbers are tensors
        seed = seed if seed is None else whole(seed)
        if type(scale) is not float or type(dropout) is not float:
            scale, dropout = of_numpy(scale), of_numpy(dropout)
    tensors = isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor)  # others are refused further on
    if tensors and wrong is not None:
        return torch.ops.flashgen.refuse(q, v, wrong)  # as the graph runs
    if tensors and (k.dtype in float8.DTYPES or q.dtype in float8.DTYPES):
        call = Call(variant, scale, named, deterministic=deterministic)
        if not compiling:
            return _eight_bits(q, k, v, call, return_lse, dropout, seed, out)
        from flashgen.ops import untraced

        return untraced.run(_eight_bits, q, k, v, call, return_lse, dropout, seed, out)
    if compiling or any_autocast():
        q, k, v = autocast(q, k, v)
    under_transform = not compiling and transformed()
    if under_transform and functionalized():
        raise LaunchError(FUNCTIONALIZED)
    if compiling or (not under_transform and traced(q, k, v)):
        call = Call(variant, scale, named, deterministic=deterministic)
        if sharded(q, k, v):
            if out is not None:
                raise LaunchError("out is given beside DTensors\n  nearest: the result, which is a DTensor as q is")
            from flashgen.ops import shards

            o, lse = shards.attend(q, k, v, call, dropout, seed)
            return (o, lse) if return_lse else o
        if out is not None:
            o, lse = library.through_op_into(out, q, k, v, call, dropout, seed)
        else:
            o, lse = library.through_op(q, k, v, call, dropout, seed)
        return (o, lse) if return_lse else o
    if deterministic is not False and (wrong := no_flag("deterministic", deterministic)):
        raise LaunchError(wrong)
    call = new(Call, (with_given_sink(variant, named), scale, named, drawn(dropout, seed, q), deterministic))
    if out is not None:
        return _into(out, q, k, v, call, return_lse, under_transform)
    if under_transform or (torch.is_grad_enabled() and any_requires_grad(q, k, v, *named.values())):
        if not under_transform:
            refuse_gradients(variant, named)
        o, lse = autograd.attention(q, k, v, call)
        return (o, lse) if return_lse else o
    return run(q, k, v, call, return_lse)


def _into(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, return_lse: bool, transform: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """An eager call whose result has its place."""
    if transform:
        raise LaunchError(IN_A_TRANSFORM)
    if torch.is_grad_enabled() and any_requires_grad(q, k, v, *call.named.values()):
        raise LaunchError(WITH_GRADIENTS)
    return run(q, k, v, call, return_lse, out)


def _eight_bits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    return_lse: bool,
    dropout: float,
    seed: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call on tensors of 8 bits, which no graph and no gradient sees; LaunchError for what none may ask for."""
    variant, named = call.variant, call.named
    if call.deterministic is not False and (wrong := no_flag("deterministic", call.deterministic)):
        raise LaunchError(wrong)
    if sharded(q, k, v):
        raise LaunchError(float8.SHARDED)
    if transformed() or traced(q, k, v):
        raise LaunchError(float8.IN_GRAPHS)
    if out is not None:
        raise LaunchError(float8.INTO)
    if torch.is_grad_enabled() and any_requires_grad(q, k, v, *named.values()):
        raise LaunchError(float8.WITH_GRADIENTS)
    if dropout != 0:
        raise LaunchError(float8.WITH_DROPOUT)
    drawn(dropout, seed, q)  # refuses a seed that is none
    if q.dtype not in float8.DTYPES and any_autocast():
        (q,) = autocast(q)
    return run(q, k, v, Call(with_given_sink(variant, named), call.scale, named), return_lse)


def _given(variant: Variant) -> dict[str, object]:
    """What a variant gives to calls; a tensor of no dimension as a view of one element, which keeps its gradient."""
    return {name: x.view(1) if isinstance(x, torch.Tensor) and not x.dim() else x for name, x in variant.given.items()}
