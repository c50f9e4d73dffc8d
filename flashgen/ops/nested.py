"""Jagged nested tensors as sequences behind each other, which they are in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from flashgen.errors import LaunchError

#: The dimension of [batch, heads, rows, head_dim] that differs from sequence to sequence.
ROWS = 2


class Jagged(NamedTuple):
    """Rows [rows, heads, head_dim] of all sequences, where each begins (int32 [sequences + 1]), and a bound of their
    lengths: that which the tensor keeps, else the number of all rows, as the host waits for no other."""

    rows: torch.Tensor
    starts: torch.Tensor
    longest: int


def is_jagged(*tensors: object) -> bool:
    """Whether all of these are nested tensors of layout torch.jagged."""
    return all(isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged for x in tensors)


def apart(name: str, nested: Any) -> Jagged:
    """What a jagged nested tensor [batch, heads, rows, head_dim] holds; LaunchError for one that lies otherwise."""
    if not hasattr(torch.nested, "nested_tensor_from_jagged"):
        raise LaunchError(
            f"{name} is nested, and torch {torch.__version__} makes no jagged tensors of their rows\n"
            "  nearest: torch 2.5 or newer, or attention_varlen"
        )
    if nested.dim() != 4 or nested._ragged_idx != ROWS:
        raise LaunchError(
            f"{name} is nested with {nested.dim()} dimensions, and sequences differ in number {nested._ragged_idx}:"
            " jagged q, k and v are [batch, heads, rows, head_dim], and differ in rows\n"
            f"  nearest: {name}.transpose(1, 2) of [batch, rows, heads, head_dim]"
        )
    if nested.lengths() is not None:
        raise LaunchError(
            f"{name} is nested with holes between its sequences, whose rows lie behind each other\n"
            f"  nearest: {name}.transpose(1, 2).contiguous().transpose(1, 2), a copy, or attention with q_lengths and"
            " kv_lengths"
        )
    rows = nested.values().transpose(0, 1)
    longest = getattr(nested, "_maybe_max_seqlen", None)
    return Jagged(rows, nested.offsets().to(torch.int32), rows.shape[0] if longest is None else longest)


def check_together(k: Any, v: Any) -> None:
    """Raise LaunchError where keys and values are not of the same sequences."""
    if k.shape[ROWS] != v.shape[ROWS]:
        raise LaunchError(
            "k and v are nested tensors with offsets of their own: a sequence has as many values as keys\n"
            "  nearest: torch.nested.nested_tensor_from_jagged(rows of v, k.offsets())"
        )


def refuse_beside(names: Iterable[str]) -> None:
    """Raise LaunchError for arguments, of these names, that calls of nested tensors do not have."""
    for name in names:
        raise LaunchError(f"{name} was given beside nested tensors, whose calls have none\n  nearest: no {name}")


def like(rows: torch.Tensor, nested: Any) -> torch.Tensor:
    """Rows [rows, heads, ...] as a nested tensor [batch, heads, rows, ...] of the sequences of another."""
    bounds = {"min_seqlen": nested._maybe_min_seqlen, "max_seqlen": nested._maybe_max_seqlen}
    found = torch.nested.nested_tensor_from_jagged(rows, nested.offsets(), **bounds)
    return found.transpose(1, 2)
