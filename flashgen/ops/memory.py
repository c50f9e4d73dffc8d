"""Memory of results and workspaces on a GPU, allocated as the graphs of torch.compile allocate theirs.

`empty_strided(shape, strides, dtype)` takes plain tuples and gives what torch.empty_strided gives on torch's current
GPU, in half the host's time: torch's dispatcher is not asked, and nothing that listens to it watches a call that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo import guards

empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
empty_strided = guards._empty_strided_cuda  # type: ignore[attr-defined]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie side by side, the last dimension's first."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
