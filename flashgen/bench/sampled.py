"""Sampled rows of a result beside float64: of problems too large, or too irregular, to compute twice."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.runtime.reference import judge, online_softmax, softmax

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Some queries [rows, head_dim] of one head, its keys and values [keys, ...], and which pairs are visible [rows,
    keys] (None: all)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visible: torch.Tensor | None = None


def wrong(found: Iterable[torch.Tensor], samples: Sequence[Sample], scale: float) -> list[str]:
    """What the tolerance rule says of o [rows, v_head_dim] of each sample, taken together."""
    import torch

    right, exact, given = [], [], []
    for sample, o in zip(samples, found, strict=True):
        dtype = sample.q.dtype
        right.append(_attend(sample, scale, torch.float64, softmax).flatten())
        online = functools.partial(online_softmax, dtype=dtype)
        exact.append(_attend(sample, scale, torch.float32, online).to(dtype).flatten())
        given.append(o.to(sample.q.device).flatten())
    name = str(samples[0].q.dtype).removeprefix("torch.")
    return list(judge(torch.cat(given), torch.cat(exact), torch.cat(right), name).reasons)


def _attend(sample: Sample, scale: float, precision: torch.dtype, weigh: functools.partial | object) -> torch.Tensor:
    import torch

    q, k, v = (x.to(precision) for x in (sample.q, sample.k, sample.v))
    s = scale * (q @ k.mT)
    if sample.visible is not None:
        s = torch.where(sample.visible, s, -torch.inf)
    return weigh(s)[0] @ v
