"""flashgen::quantize, the torch.library op that torch.compile and other tracers see; eager calls go around it."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import LaunchError
from flashgen.ops import own_rows
from flashgen.ops import quantize_eager as eager
from flashgen.ops.rope import Rope, of_each
from flashgen.ops.sequences import Sequences
from flashgen.ops.values import no_tensor, too_long
from flashgen.planning.layout import Padded, Varlen
from flashgen.runtime.quantize import Sizes

#: A call's arguments; a mean of keys is given, or found (`smooth_k`).  The last result is the mean that was found, and
#: empty where none was.
_QUANTIZE = (
    "quantize(Tensor q, Tensor k, Tensor v, SymInt? block, int? seed, bool smooth_k, Tensor? mean, Tensor? cos_q,"
    " Tensor? sin_q, Tensor? cos_k, Tensor? sin_k, bool interleaved, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? q_lengths, Tensor? kv_lengths) -> (Tensor q, Tensor k,"
    " Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor k_mean)"
)

_library = torch.library.Library("flashgen", "FRAGMENT")
_library.define(_QUANTIZE)


def through_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: eager.Asked) -> eager.Quantized:
    """What a traced call gives.  What is wrong with tensors is said when the graph runs; raises LaunchError for what no
    graph can hold."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise LaunchError(no_tensor(name, x))
    seed, smooth_k, named = asked.drawn_by, asked.smooth_k, asked.named
    if wrong := too_long("seed", seed):
        raise LaunchError(f"{wrong}: no graph holds it\n  nearest: a seed below 2^63")
    (cos_q, cos_k), (sin_q, sin_k) = of_each("cos", asked.cos), of_each("sin", asked.sin)
    given = smooth_k.detach() if isinstance(smooth_k, torch.Tensor) else None
    *codes, q_descale, k_descale, v_descale, mean = torch.ops.flashgen.quantize(
        *(x.detach() for x in (q, k, v)),
        *(asked.block, seed, smooth_k is True, given),
        *(cos_q, sin_q, cos_k, sin_k, asked.interleaved),
        *(named.get(name) for name in (*own_rows.JOINED, *own_rows.LENGTHS)),
    )
    turned = None
    if isinstance(cos_q, torch.Tensor) and isinstance(sin_q, torch.Tensor):
        cos_q, sin_q = (x.detach().unsqueeze(0) if x.dim() == 2 else x.detach() for x in (cos_q, sin_q))
        turned = Rope(cos=cos_q, sin=sin_q, interleaved=asked.interleaved)
    return eager.Quantized(
        q=codes[0],
        k=codes[1],
        v=codes[2],
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        k_mean=mean if smooth_k is True else None if given is None else given.float(),
        seed=seed,
        rope=turned,
        sequences=_sequences(q, k, named),
    )


def _sequences(q: torch.Tensor, k: torch.Tensor, named: Any) -> Sequences | None:
    """Those of a call, unchecked."""
    if not named:
        return None
    starts = named.get("cu_seqlens_q")
    if starts is None:
        return Sequences(Padded(), (named.get("q_lengths"), named.get("kv_lengths"), None), 0, (q.shape[2], k.shape[2]))
    return Sequences(Varlen(), (starts, named.get("cu_seqlens_k", starts), None), 0, (q.shape[0], k.shape[0]))


def _asked(*arguments: Any) -> eager.Asked:
    """What the arguments behind q, k and v ask for."""
    block, seed, found, mean, cos_q, sin_q, cos_k, sin_k, interleaved, *own = arguments
    turns = any(x is not None for x in (cos_q, sin_q, cos_k, sin_k))
    return eager.Asked(
        block,
        seed is not None,
        found if mean is None else mean,
        seed,
        (cos_q, cos_k) if turns else None,
        (sin_q, sin_k) if turns else None,
        interleaved,
        own_rows.given(*own),
    )


def _quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    asked = _asked(*arguments)
    found = eager.run(q, k, v, asked)
    mean = found.k_mean if asked.smooth_k is True and found.k_mean is not None else q.new_empty(0, dtype=torch.float32)
    return *(found.q, found.k, found.v), *found.descales.values(), mean


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """What has the shapes of these results."""
    asked = _asked(*arguments)
    named, block = asked.named, asked.block
    codes = [torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in (q, k, v)]
    descales = []
    of_q = named.get("cu_seqlens_q")
    for x, which in ((q, "q"), (k, "k"), (v, "k")):
        if of_q is None:
            batch, heads, most = x.shape[0], x.shape[1], x.shape[2]
        else:
            starts, heads = named.get(f"cu_seqlens_{which}", of_q), x.shape[1]
            batch, most = starts.shape[0] - 1, named.get(f"max_seqlen_{which}", named.get("max_seqlen_q"))
        scales = () if block is None else (Sizes(batch=batch, heads=heads, length=most, block=block).scales,)
        descales.append(x.new_empty((batch, heads, *scales), dtype=torch.float32))
    shape = (descales[1].shape[0], k.shape[1], k.shape[-1]) if asked.smooth_k is True else (0,)
    return *codes, *descales, k.new_empty(shape, dtype=torch.float32)


torch.library.register_kernel("flashgen::quantize", ("cpu", "cuda"), _quantize, lib=_library)
torch.library.register_fake("flashgen::quantize", _shapes, lib=_library)
