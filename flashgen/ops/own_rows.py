"""Rows of sequences with lengths of their own, as quantize() takes them: where they lie, and their means."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from flashgen.errors import LaunchError
from flashgen.ops import sequences
from flashgen.ops.layouts import check_layout
from flashgen.ops.rope import Rope
from flashgen.ops.sequences import BOUNDS, PADDED, VARLEN, Sequences, places
from flashgen.ops.values import no_tensor
from flashgen.planning.problem import Problem
from flashgen.runtime.tiles import Sequence

#: The arguments of quantize() for it: those of attention_varlen(), and those of attention().
JOINED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
LENGTHS = PADDED[:2]

#: Elements of keys that are wide at a time while a mean is found.
WIDE_ELEMENTS = 1 << 24


class Own(NamedTuple):
    """What the sequences of one tensor [batch, heads, rows, head_dim] have of their own.

    `numbers` are where they begin and the last one ends in rows of a batch of one (`joined`), or their lengths, int32,
    or None where all rows are theirs; so many `sequences` have `most` rows at most.  `spans` are known on a CPU: the
    batch, the first row and the number of rows of each.
    """

    joined: bool
    numbers: torch.Tensor | None
    sequences: int
    most: int
    spans: tuple[tuple[int, int, int], ...] | None


def given(
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    q_lengths: object,
    kv_lengths: object,
) -> dict[str, Any]:
    """Those that a call has, by name."""
    values = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_lengths, kv_lengths)
    return {name: x for name, x in zip((*JOINED, *LENGTHS), values, strict=True) if x is not None}


def check_together(named: Mapping[str, Any]) -> None:
    """Raise LaunchError for some that do not go together."""
    if named and JOINED[0] not in named:
        for name in JOINED[1:]:
            if name in named:
                raise LaunchError(
                    f"{name} is given without cu_seqlens_q, which says where sequences begin\n"
                    "  nearest: cu_seqlens_q=torch.tensor([0, length of the first, ...], dtype=torch.int32)"
                )
    elif named:
        for name in LENGTHS:
            if name in named:
                raise LaunchError(
                    f"{name} is of padded sequences, and cu_seqlens_q says that they lie behind each other\n"
                    f"  nearest: {name}=None"
                )


def checked(
    named: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor
) -> tuple[Sequences | None, Own | None, Own | None]:
    """The sequences of q and k [batch, heads, rows, head_dim], and what those of each have, or None where all are of
    one length; LaunchError for what is wrong with them."""
    if not named:
        return None, None, None
    if "cu_seqlens_q" in named:
        starts, most = named["cu_seqlens_q"], named.get("max_seqlen_q")
        values = (starts, named.get("cu_seqlens_k", starts), most, named.get("max_seqlen_k", most))
        own = dict(zip((*VARLEN[:2], *BOUNDS), values, strict=True))
    else:
        own = dict(named)
    rows, columns = (q.shape[2], k.shape[2]), q.shape[3]
    lengths = (0, 0) if "cu_seqlens_q" in named else rows
    problem = Problem(
        batch=q.shape[0],
        heads=1,
        kv_heads=1,
        q_len=lengths[0],
        kv_len=lengths[1],
        head_dim=columns,
        v_head_dim=columns,
    )
    found, problem = sequences.checked(own, problem, q.device, 0, rows)
    assert found is not None  # some are given
    each = None
    if not q.is_cuda or sequences.watched():
        each = sequences.of_batch(found, problem)
    on_cpu = each if not q.is_cuda else None
    joined = found.layout.joined
    bounds = (problem.q_len, problem.kv_len)
    of_q, of_k = (
        Own(joined, numbers, problem.batch, most, None if on_cpu is None else tuple(map(span, on_cpu)))
        for numbers, most, span in zip(found.tensors, bounds, (_queries, _keys), strict=False)
    )
    return found, of_q, of_k


def _queries(of: Sequence) -> tuple[int, int, int]:
    return of.at, of.q_start, of.q_len - of.q_offset


def _keys(of: Sequence) -> tuple[int, int, int]:
    return of.at, of.k_start, of.kv_len


def in_heads(name: str, x: object) -> torch.Tensor:
    """Rows [rows, heads, head_dim] as [1, heads, rows, head_dim]; LaunchError for anything else."""
    if not isinstance(x, torch.Tensor):
        raise LaunchError(no_tensor(name, x))
    check_layout(name, name, x)
    if x.dim() != 3:
        raise LaunchError(
            f"{name} has {x.dim()} dimensions {list(x.shape)}: beside cu_seqlens_q it is [rows, heads, head_dim]\n"
            f"  nearest: quantize without cu_seqlens_q for [batch, heads, seqlen, head_dim]"
        )
    return x.transpose(0, 1).unsqueeze(0)


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, rows, head_dim] as [rows, heads, head_dim]."""
    return x.squeeze(0).transpose(0, 1)


def mean(k: torch.Tensor, own: Own, rope: Rope | None) -> torch.Tensor:
    """The mean of each sequence's keys [batch, kv_heads, rows, head_dim], turned by `rope` first, in float32
    [sequences, kv_heads, head_dim]: summed in float64, so that no order of sums shows; 0 where there is no key."""
    if own.spans is not None:
        found = torch.zeros((own.sequences, k.shape[1], k.shape[3]), dtype=torch.float32, device=k.device)
        for b, span in enumerate(own.spans):
            rows = alone(k, span)
            if rows.shape[2]:
                rows = rows if rope is None else rope.of(b, rows.shape[2]).turned(rows)
                found[b] = rows.mean(2, dtype=torch.float64)[0]
        return found
    return _mean_of_joined(k, own, rope) if own.joined else _mean_of_padded(k, own, rope)


def _mean_of_padded(k: torch.Tensor, own: Own, rope: Rope | None) -> torch.Tensor:
    """The same of keys that lie in batches, on a GPU: nobody waits for lengths."""
    k = k if rope is None else rope.turned(k)
    if own.numbers is None:
        return k.mean(2, dtype=torch.float64).float().contiguous()
    lengths = own.numbers.clamp(0, k.shape[2])[:, None]
    beyond = torch.arange(k.shape[2], device=k.device) >= lengths
    total = k.masked_fill(beyond[:, None, :, None], 0).sum(2, dtype=torch.float64)
    return (total / lengths.clamp(min=1)[..., None]).float()


def _mean_of_joined(k: torch.Tensor, own: Own, rope: Rope | None) -> torch.Tensor:
    """The same of keys behind each other: each row joins the sum of its sequence, or one that nobody reads."""
    _, heads, rows, columns = k.shape
    assert own.numbers is not None  # joined sequences have them
    sums = torch.zeros((own.sequences + 1, heads, columns), dtype=torch.float64, device=k.device)
    if own.sequences and rows:
        number, position, within = places(own.numbers, rows)
        to = number.masked_fill(~within, own.sequences)
        for part in _parts(rows, max(1, WIDE_ELEMENTS // (heads * columns))):
            some = k[:, :, part]
            some = some if rope is None else rope.at(number[part], position[part]).turned(some)
            sums.index_add_(0, to[part], in_rows(some).double())
    lengths = own.numbers.diff().clamp(min=1)
    return (sums[: own.sequences] / lengths[:, None, None]).float()


def _parts(rows: int, most: int) -> Iterator[slice]:
    """All rows, so many at a time."""
    for first, end in itertools.pairwise((*range(0, rows, most), rows)):
        yield slice(first, end)


def with_mean(
    lse: torch.Tensor, q: torch.Tensor, mean: torch.Tensor, found: Sequences | None, rope: Rope | None, scale: float
) -> torch.Tensor:
    """lse [batch, heads, q_len] of keys that lost their mean as it is of all: more by scale * q . mean, where queries
    are some sequence's."""
    joined = found is not None and found.layout.joined
    group = q.shape[1] // mean.shape[1]
    if found is None or not joined:
        q = q if rope is None else rope.turned(q)
        more = (q.float() @ mean.repeat_interleave(group, dim=1).unsqueeze(-1)).squeeze(-1)
    else:
        starts = found.tensors[0]
        assert starts is not None
        if starts.shape[0] == 1:
            return lse
        number, position, _ = places(starts, q.shape[2])
        q = q if rope is None else rope.at(number, position).turned(q)
        of_keys = q[0].float().unflatten(0, (mean.shape[1], group))
        more = torch.einsum("kgrc,rkc->kgr", of_keys, mean[number]).flatten(0, 1)[None]
    corrected = lse + scale * more
    beyond = sequences.beyond(found, q.shape[2])
    return corrected if beyond is None else torch.where(beyond, lse, corrected)


def alone(x: torch.Tensor, span: tuple[int, int, int]) -> torch.Tensor:
    """The rows of one sequence of x [batch, heads, rows, ...]."""
    batch, first, count = span
    return x[batch : batch + 1, :, first : first + count]
