"""`flashgen.quantize`: q, k and v in 8 bits, eagerly, as an op, or of nested tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashgen.errors import LaunchError, shown
from flashgen.ops import float8, nested, own_rows, quantize_library
from flashgen.ops import rope as ropes
from flashgen.ops.quantize_eager import Asked, Quantized, run
from flashgen.ops.tracing import of_torch_func, sharded, traced
from flashgen.ops.values import whole

#: What a call is told inside of a transform of torch.func.
IN_A_TRANSFORM = (
    "transforms of torch.func (vmap, grad, jvp) do not hold quantize, as they do not hold attention in 8 bits\n"
    "  nearest: the call outside of them, or attention of q, k and v of 16 bits"
)


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block: int | None = None,
    hadamard: bool = True,
    smooth_k: bool | torch.Tensor = False,
    seed: int | None = None,
    cos: ropes.Given = None,
    sin: ropes.Given = None,
    interleaved: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
) -> Quantized:
    """q, k and v in 8 bits (e4m3): each scaled so that its peak is 448, rounded to nearest even.

    q is [batch, heads, q_len, head_dim], k and v [batch, kv_heads, kv_len, ...], of bfloat16 or float16, on a GPU or a
    CPU, which give the same bits; head dims 16 to 256 in steps of 16.  `block` rows of a head share a scale, a power
    of two from 128 on; where they are more, or (None) all of a head, rows are read twice, the second time from L2
    where it holds a head.  One kernel has q, k and v; values of another head_dim have one of their own.

    With `hadamard` q and k are rotated alike, which leaves scores as they are and spreads outliers: signs that `seed`
    draws, then a Walsh-Hadamard transform over head_dim, in blocks of the largest powers of two where it is none
    (96 = 64 + 32).  Keys that join a cache later need the same seed; unless given it is 0.  With `smooth_k` keys lose
    their mean over kv_len, or that which is given ([batch, kv_heads, head_dim], the `k_mean` of an earlier call): o
    does not change where the score is scale * (q . k) plus what does not depend on it, and `corrected_lse` gives lse.
    A sink does not move with the scores: call without it, then multiply o by sigmoid(corrected lse - sink).

    With `cos` and `sin` q and k are turned first, in float32, as a rotary embedding turns them: column c with column
    c + head_dim / 2 (`rotate_half`), or `interleaved` columns 2 c and 2 c + 1.  They are [seqlen, head_dim / 2], or
    [seqlen, head_dim] where both columns of a pair have their angle, which is one; or [batch, seqlen, ...]; float32,
    bfloat16 or float16, a row for each row of q and k.  Where these sit elsewhere each is a pair, of q and of k, None
    for what does not turn: `cos=(cos_q, None)` beside keys that did.  A mean that `smooth_k` finds is that of turned
    keys, of which it makes a copy in float32.

    With `cu_seqlens_q` and `max_seqlen_q` sequences lie behind each other, as `attention_varlen` takes them: q is
    [total_q, heads, head_dim], k and v [total_k, kv_heads, ...].  `cu_seqlens_k` and `max_seqlen_k` are those of q
    unless given; cumulative lengths are read on the device, and bounds are from above.  Each sequence is what it is
    alone: blocks, the mean of keys and the positions of cos and sin count from its first row.  So cos and sin are
    [positions, ...] or [sequences, positions, ...], of `max_seqlen_q` and `max_seqlen_k` positions or more.  Descales
    are [sequences, heads] or [sequences, heads, blocks], of which so many cover the bound; those of blocks without a
    row are as of zeros.  q, k and v may be jagged nested tensors, as those of `attention`: so are the codes then.

    With `q_lengths` and `kv_lengths` (int32 [batch], read on the device) rows beyond count for no scale and no mean,
    whatever they hold.  Codes of rows that are no sequence's are 0 on a CPU, and not written on a GPU.

    The peak is that of finite values.  A NaN stays one, an infinity becomes one; in a rotated row all elements
    of its block do.
    No gradient flows.  Raises LaunchError and PlanError before anything runs.
    Source: Shah et al. 2024, "FlashAttention-3", section 3.3 (incoherent processing); Zhang et al. 2024,
    "SageAttention", section 4.2 (smoothing); Su et al. 2021, "RoFormer", section 3.2.2 (rotary embedding).
    """
    block, seed = whole(block), whole(seed)
    _check_options(block, hadamard, seed)
    bounds = whole(max_seqlen_q), whole(max_seqlen_k)
    named = own_rows.given(cu_seqlens_q, cu_seqlens_k, *bounds, q_lengths, kv_lengths)
    asked = Asked(block, hadamard, smooth_k, seed, cos, sin, interleaved, named)
    if nested.is_jagged(q, k, v):
        if torch.compiler.is_compiling():
            from flashgen.ops import untraced

            return untraced.run(_nested, q, k, v, asked)
        return _nested(q, k, v, asked)
    own_rows.check_together(named)
    if torch.compiler.is_compiling() or (isinstance(q, torch.Tensor) and traced(q, k, v)):
        if sharded(q, k, v):
            raise LaunchError(float8.SHARDED)
        return quantize_library.through_op(q, k, v, asked)
    if of_torch_func():
        raise LaunchError(IN_A_TRANSFORM)
    return run(q, k, v, asked)


def _nested(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Asked) -> Quantized:
    """The call of jagged nested tensors: their rows lie behind each other."""
    nested.refuse_beside(asked.named)
    nested.check_together(k, v)
    of_q, of_k, of_v = (nested.apart(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    starts = {"cu_seqlens_q": of_q.starts, "cu_seqlens_k": of_k.starts}
    bounds = {"max_seqlen_q": of_q.longest, "max_seqlen_k": of_k.longest}
    found = run(of_q.rows, of_k.rows, of_v.rows, asked._replace(named={**starts, **bounds}))
    return replace(found, q=nested.like(found.q, q), k=nested.like(found.k, k), v=nested.like(found.v, v))


def _check_options(block: object, hadamard: object, seed: object) -> None:
    if not isinstance(hadamard, bool):
        raise LaunchError(f"hadamard is {shown(hadamard)}: it is True or False")
    for option, value in (("seed", seed), ("block", block)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise LaunchError(f"{option} is {shown(value)}: it is an int")
    if isinstance(seed, int) and seed < 0:
        raise LaunchError(f"seed is {seed}: it is a number from 0 on\n  nearest: seed=0")
    if seed is not None and not hadamard:
        raise LaunchError(f"seed is {seed} and hadamard False: it draws the signs of a rotation\n  nearest: no seed")
