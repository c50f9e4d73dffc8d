"""attention(): one call on torch tensors, eager, under autograd, or traced into a graph."""

from __future__ import annotations

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.ops import autograd, library
from flashgen.ops.call import Call
from flashgen.ops.dropout import drawn
from flashgen.ops.forward import run
from flashgen.ops.sinks import with_given_sink
from flashgen.ops.tracing import any_autocast, autocast, traced, transformed
from flashgen.ops.values import no_flag


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
    depend on no other row, batch, head or length, and on no choice between kernels of one pipeline.

    With `dropout` each probability is dropped by that chance and the others grow by 1 / (1 - dropout); lse is that of
    none dropped.  What is dropped follows from torch's generator of the device (torch.manual_seed repeats it), or from
    `seed`, and from a pair's own batch, head, query and key: not from tiles, pipelines or other heads and lengths.

    Differentiable in q, k, v, lse, the sink and the captured float tensors that the score reads, once; the backward
    recomputes the probabilities from lse.  Its reruns may differ in the last bits, as dq is summed in any order, unless
    `deterministic` (or torch.use_deterministic_algorithms) asks for a slower sum in one order.  A gradient of o whose
    rows a kernel cannot load (an expanded one, as that of a sum) is copied.

    Raises LaunchError and PlanError before anything runs: what was asked, the limit, the nearest thing that works.
    Where the GPU's best pipeline has no kernel for a call, or cannot address its tensors, the logger "flashgen" warns,
    once for each such kernel.
    Source: Dao 2023, "FlashAttention-2", Algorithms 1 and 2.
    """
    if "sink" in named and named["sink"] is None:
        named = {name: value for name, value in named.items() if name != "sink"}
    if isinstance(variant, Variant) and variant.given:
        variant, named = variant.bare, {**_given(variant), **named}
    compiling = torch.compiler.is_compiling()
    if compiling or any_autocast():
        q, k, v = autocast(q, k, v)
    under_transform = not compiling and transformed()
    if compiling or (not under_transform and traced(q, k, v)):
        call = Call(variant, scale, named, deterministic=deterministic)
        o, lse = library.through_op(q, k, v, call, dropout, seed)
        return (o, lse) if return_lse else o
    if deterministic is not False and (wrong := no_flag("deterministic", deterministic)):
        raise LaunchError(wrong)
    call = Call(with_given_sink(variant, named), scale, named, drawn(dropout, seed, q), deterministic)
    if under_transform or (torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v, *named.values())):
        o, lse = autograd.attention(q, k, v, call)
        return (o, lse) if return_lse else o
    return run(q, k, v, call, return_lse)


def _given(variant: Variant) -> dict[str, object]:
    """What a variant gives to calls; a tensor of no dimension as a view of one element, which keeps its gradient."""
    return {name: x.view(1) if isinstance(x, torch.Tensor) and not x.dim() else x for name, x in variant.given.items()}
