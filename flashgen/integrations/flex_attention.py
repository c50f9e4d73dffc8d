"""flex_attention(): the call of torch.nn.attention.flex_attention, answered by attention()."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as torchs
from torch.utils._python_dispatch import _disable_current_modes

from flashgen.errors import LaunchError, shown
from flashgen.frontends.captures import Captures
from flashgen.frontends.flex import from_flex
from flashgen.lang.variant import Variant
from flashgen.locks import Lock
from flashgen.ops import float8
from flashgen.ops.attention import attention
from flashgen.ops.call import check_device
from flashgen.ops.tracing import watched
from flashgen.ops.values import no_flag

#: What a block of a layout is: not listed, listed, listed as full.
_EMPTY, _LISTED, _FULL = 0, 1, 2

#: Blocks of this size on both sides are torch's way to say that there are none.
_NO_BLOCKS = 1 << 30

#: Pairs that mask_mod is asked about at a time, and in all, to show that blocks follow from it.
_PAIRS_AT_A_TIME, _MOST_PAIRS = 1 << 24, 1 << 32

#: kernel_options that promise or allow something, and change no result here.
_PROMISES = ("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS")

_TILES = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """PyTorch's flex_attention, by `attention`: query is [batch, heads, q_len, head_dim], key and value [batch or 1,
    kv_heads, kv_len, head_dim]; kv_heads is heads unless `enable_gqa`.

    `score_mod` and the mask_mod of `block_mask` are traced as `from_flex` does.  A pair is visible where its block is
    listed, and is a full block or mask_mod holds.  Where blocks say no more than mask_mod, as those of
    create_block_mask do, they are left out: to show that, mask_mod is asked about every pair, once for each BlockMask
    and each content of the tensors that it reads.

    Returns o; with `return_lse` (o, lse), with `return_aux` (o, AuxOutput).  torch.compile breaks its graph at this
    call; `attention` of a variant that was made outside stays in the graph.  Raises LaunchError for block masks of
    other lengths or without a mask_mod, for kernel_options that choose tiles or backends, and for max_scores.
    """
    if torch.compiler.is_compiling():
        from flashgen.frontends.eager import apart

        return apart(
            functools.partial(flex_attention, return_aux=return_aux),
            *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options),
        )
    _check_options(kernel_options)
    _check_results(return_lse, return_aux)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            raise LaunchError(f"{name} is no tensor of [batch, heads, seqlen, head_dim]")
        check_device(name, tensor)
    float8.refuse_at("flex_attention", query=query, key=key, value=value)
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if wrong := no_flag(name, flag):
            raise LaunchError(wrong)
    _check_heads(query.shape[1], key.shape[1], enable_gqa)
    batch = query.shape[0]
    if batch != key.shape[0] == value.shape[0] == 1 and block_mask is not None:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    mask_mod = None if block_mask is None else _mask_of(block_mask, query, key)
    variant = _variant(mask_mod, score_mod)
    lse_wanted = return_lse or (return_aux is not None and return_aux.lse)
    if not lse_wanted:
        o = attention(query, key, value, variant, scale=scale)
        return o if return_aux is None else (o, torchs.AuxOutput())
    o, lse = attention(query, key, value, variant, scale=scale, return_lse=True)
    return (o, lse) if return_aux is None else (o, torchs.AuxOutput(lse=lse))


def _variant(mask_mod: Callable[..., Any] | None, score_mod: Callable[..., Any] | None) -> Variant:
    return from_flex(None if mask_mod is torchs.noop_mask else mask_mod, score_mod)


def _check_options(options: Mapping[str, Any] | None) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise LaunchError(f"kernel_options is a {type(options).__name__}: it is a dict, or None")
    for name in options or ():
        if not isinstance(name, str):
            raise LaunchError(
                f"kernel_options has the key {shown(name)}, a {type(name).__name__}: keys are names of options\n"
                f"  nearest: leave it out: {', '.join(_PROMISES)} are understood"
            )
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain in _PROMISES:
            continue
        if plain in _TILES:
            cure = "flashgen's planner chooses tiles, stages and warps; fg.variant(tile=, stages=) pins them in a spec"
        elif plain == "BACKEND":
            cure = "flashgen is the backend; torch's own are called by torch.nn.attention.flex_attention"
        else:
            cure = f"leave it out: {', '.join(_PROMISES)} are understood"
        raise LaunchError(f"kernel_options has {name!r}, which flashgen's kernels do not have\n  nearest: {cure}")


def _check_results(return_lse: bool, return_aux: Any) -> None:
    if return_aux is None:
        return
    if return_lse:
        raise LaunchError("return_lse and return_aux are both given\n  nearest: return_aux=AuxRequest(lse=True)")
    if not hasattr(torchs, "AuxOutput"):
        raise LaunchError("return_aux needs PyTorch 2.9 or later\n  nearest: return_lse=True")
    if not isinstance(return_aux, torchs.AuxRequest):
        raise LaunchError(f"return_aux is a {type(return_aux).__name__}\n  nearest: return_aux=AuxRequest(lse=True)")
    if return_aux.max_scores:
        raise LaunchError(
            "return_aux asks for max_scores, which flashgen's kernels do not keep exactly\n"
            "  nearest: return_aux=AuxRequest(lse=True)"
        )


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if not enable_gqa and heads != kv_heads:
        raise LaunchError(
            f"query has {heads} heads and key {kv_heads}: without enable_gqa they have as many\n"
            "  nearest: enable_gqa=True"
        )
    if enable_gqa and heads % max(kv_heads, 1):
        raise LaunchError(f"query has {heads} heads, no multiple of the {kv_heads} of key and value")


# ---------------------------------------------------------------------------------------------------------------------
# Block masks


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What was found of a BlockMask, while its tensors hold what they held.

    seen     its tensors and those that mask_mod reads, and the number of writes to each
    key      what mask_mod read
    layout   what each block is: [batch or 1, heads or 1, blocks of queries, blocks of keys]
    follows  whether mask_mod says all that the blocks say
    """

    seen: tuple[tuple[weakref.ref[torch.Tensor], int], ...]
    key: object
    layout: torch.Tensor
    follows: bool

    def holds(self, tensors: list[torch.Tensor], key: object) -> bool:
        return self.key == key and all(
            ref() is x and count == x._version for x, (ref, count) in zip(tensors, self.seen, strict=True)
        )


_found: weakref.WeakKeyDictionary[Any, _Blocks] = weakref.WeakKeyDictionary()
_lock = Lock()


def _mask_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Callable[..., Any]:
    """The mask_mod that says what a BlockMask says; LaunchError where it is none of this problem."""
    if not isinstance(block_mask, torchs.BlockMask):
        raise LaunchError(
            f"block_mask is a {type(block_mask).__name__}, and no BlockMask\n"
            "  nearest: create_block_mask(mask_mod, B, H, q_len, kv_len), or attention with from_flex(mask_mod)"
        )
    mask_mod = block_mask.mask_mod
    if mask_mod is getattr(torchs, "_sliced_mask_mod_error", None):
        raise LaunchError(
            "block_mask was sliced, and has no mask_mod any more\n"
            "  nearest: a block mask of its own for the part, or set its mask_mod to that of the whole, shifted, and"
            " then pass block_mask._adjust(q_len, kv_len) of the part's lengths"
        )
    rows, columns = block_mask.BLOCK_SIZE
    if rows == columns == _NO_BLOCKS:
        return mask_mod
    _check_lengths(block_mask, query, key)
    batch, heads = query.shape[:2]
    blocks = _blocks_of(block_mask, mask_mod, batch, heads)
    if blocks.follows:
        return mask_mod
    block = _reader(blocks.layout, rows, columns)
    return _listed(block) if mask_mod is torchs.noop_mask else _masked(block, mask_mod)


def _reader(layout: torch.Tensor, rows: int, columns: int) -> Callable[..., Any]:
    """What the block of a pair is."""
    of_batch, of_heads = (size > 1 for size in layout.shape[:2])
    layout = layout.reshape([size for size in layout.shape[:2] if size > 1] + list(layout.shape[2:]))

    def block(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return layout[(b,) * of_batch + (h,) * of_heads + (q_idx // rows, kv_idx // columns)]

    return block


def _listed(block: Callable[..., Any]) -> Callable[..., Any]:
    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return block(b, h, q_idx, kv_idx) != _EMPTY

    return listed


def _masked(block: Callable[..., Any], mask_mod: Callable[..., Any]) -> Callable[..., Any]:
    def masked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = block(b, h, q_idx, kv_idx)
        return (kind == _FULL) | ((kind == _LISTED) & mask_mod(b, h, q_idx, kv_idx))

    return masked


def _check_lengths(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    q_len, kv_len = query.shape[2], key.shape[2]
    of_mask = tuple(block_mask.shape[-2:])
    if of_mask != (q_len, kv_len):
        raise LaunchError(
            f"block_mask is of q_len {of_mask[0]} and kv_len {of_mask[1]}, and the call of {q_len} and {kv_len}\n"
            f"  nearest: create_block_mask(mask_mod, B, H, {q_len}, {kv_len})"
        )
    rows, given = -(-q_len // block_mask.BLOCK_SIZE[0]), block_mask.kv_num_blocks.shape[-1]
    if rows != given:
        raise LaunchError(
            f"block_mask has {given} rows of blocks, and q_len {q_len} has {rows}: it was sliced\n"
            "  nearest: a block mask of its own for these queries"
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise LaunchError(
            f"query is on {query.device} and block_mask on {block_mask.kv_num_blocks.device}\n"
            f"  nearest: block_mask.to({str(query.device)!r})"
        )
    for axis, word, size in ((-3, "batch", query.shape[0]), (-2, "heads", query.shape[1])):
        own = block_mask.kv_num_blocks.shape[axis] if block_mask.kv_num_blocks.dim() >= -axis else 1
        if own not in (1, size):
            raise LaunchError(f"block_mask has {word} {own}, and query {size}\n  nearest: {word} 1, which broadcasts")


def _blocks_of(block_mask: Any, mask_mod: Callable[..., Any], batch: int, heads: int) -> _Blocks:
    """What is known of a BlockMask; found out where it is not, or where its tensors or mask_mod's changed since."""
    captures = Captures([mask_mod])
    pairs = _pairs(block_mask)
    tensors = [x for listed, _ in pairs for x in listed] + [x for _, x in captures.tensors]
    key = (captures.key, tuple(captures.numbers), batch, heads, len(tensors))
    tracked = captures.settled and not any(x.is_inference() for x in tensors)
    known = _found.get(block_mask)
    if known is not None and tracked and known.holds(tensors, key):
        return known
    if any(map(watched, tensors)):
        return _Blocks((), key, _layout(block_mask, pairs), False)  # FakeTensors have no content to ask about
    with _disable_current_modes():  # those of make_fx and FakeTensors, to which an answer would be no bool
        layout = _layout(block_mask, pairs)
        if layout.is_cuda and torch.cuda.is_current_stream_capturing():
            return _Blocks((), key, layout, False)  # nothing is asked while a CUDA graph is captured
        follows = tracked and _follows(block_mask, mask_mod, layout, batch, heads)
    if not tracked:
        return _Blocks((), key, layout, follows)
    blocks = _Blocks(tuple((weakref.ref(x), x._version) for x in tensors), key, layout, follows)
    with _lock:
        _found[block_mask] = blocks
    return blocks


def _pairs(block_mask: Any) -> list[tuple[tuple[torch.Tensor, torch.Tensor], int]]:
    """The lists of blocks, and what those in them are."""
    pairs = [((block_mask.kv_num_blocks, block_mask.kv_indices), _LISTED)]
    if block_mask.full_kv_num_blocks is not None:
        pairs.append(((block_mask.full_kv_num_blocks, block_mask.full_kv_indices), _FULL))
    return pairs


def _layout(block_mask: Any, pairs: list[tuple[tuple[torch.Tensor, torch.Tensor], int]]) -> torch.Tensor:
    columns = -(-block_mask.shape[-1] // block_mask.BLOCK_SIZE[1])
    (counts, _), _ = pairs[0]
    shape = (1,) * (3 - counts.dim()) + tuple(counts.shape)
    layout = torch.zeros((*shape, columns + 1), dtype=torch.int8, device=counts.device)
    for (counts, indices), kind in pairs:
        place = torch.arange(indices.shape[-1], device=indices.device)
        listed = torch.where(place < counts.unsqueeze(-1), indices, columns).clamp(max=columns)
        # What is not listed goes behind the end.  Of no elements a size is not for torch to find out.
        layout.scatter_(-1, listed.reshape(*shape, indices.shape[-1]).long(), kind)
    return layout[..., :columns]


def _follows(block_mask: Any, mask_mod: Callable[..., Any], layout: torch.Tensor, batch: int, heads: int) -> bool:
    """Whether mask_mod holds for every pair of a full block, and for none of a block that is not listed."""
    if mask_mod is torchs.noop_mask:
        return bool((layout != _EMPTY).all())
    read = from_flex(mask_mod)
    batch, heads = (
        max(of_layout, n if read.uses(position) else 1)
        for of_layout, n, position in zip(layout.shape, (batch, heads), "bh", strict=False)
    )
    (rows, columns), (q_len, kv_len) = block_mask.BLOCK_SIZE, block_mask.shape[-2:]
    if batch * heads * q_len * kv_len > _MOST_PAIRS:
        return False
    wrong = torch.zeros((), dtype=torch.bool, device=layout.device)
    at_a_time = max(1, _PAIRS_AT_A_TIME // max(1, batch * heads * kv_len * rows))
    for first in range(0, layout.shape[2], at_a_time):
        of_rows = layout[:, :, first : first + at_a_time]
        start, stop = first * rows, min((first + at_a_time) * rows, q_len)
        try:
            visible = torchs.create_mask(
                _shifted(mask_mod, start), batch, heads, stop - start, kv_len, device=str(layout.device)
            )
        except Exception:  # torch cannot map it: the blocks stay
            return False
        kinds = of_rows.repeat_interleave(rows, 2)[:, :, : stop - start].repeat_interleave(columns, 3)[..., :kv_len]
        wrong |= ((kinds == _EMPTY) & visible).any() | ((kinds == _FULL) & ~visible).any()
    return not bool(wrong)


def _shifted(mask_mod: Callable[..., Any], start: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + start, kv_idx)
