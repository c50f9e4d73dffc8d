"""Memory of results and workspaces on a GPU, allocated as the graphs of torch.compile allocate theirs.

`empty_strided(shape, strides, dtype)` takes plain tuples and gives what torch.empty_strided gives on torch's current
GPU, in half the host's time: torch's dispatcher is not asked, and nothing that listens to it watches a call that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._C._dynamo import guards

from flashgen.planning.plan import Part
from flashgen.runtime.launch import COUNTERS

#: Rows whose lse a call that does not return it leaves in the memory of its stream; where there are more it allocates.
ROWS = 1 << 18

#: Workspaces start at multiples of this many bytes of one allocation.
_ROOM = 256

#: Bytes before those rows, which counters have.
ROWS_START = 256

empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
empty_strided = guards._empty_strided_cuda  # type: ignore[attr-defined]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie side by side, the last dimension's first."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def places(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Where each workspace starts in one allocation, in bytes, and how many bytes that has."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += -(-part.amount // _ROOM) * _ROOM
    return starts, end


def of_stream(index: int, stream: int) -> torch.Tensor | None:
    """What launches on one stream of the current GPU share, as they run one after the other: counters, which are 0
    between them, and from ROWS_START on room for the lse of ROWS rows that nobody reads.

    None where the stream is being captured into a CUDA graph, whose replays may run beside anything.
    """
    if stream and torch.cuda.is_current_stream_capturing():  # 0, the default stream, never is
        return None
    found = _of_streams.get((index, stream))
    if found is None:
        found = _lasting(index)
        found[: COUNTERS.amount // 4].zero_()  # on the stream that reads it
        _of_streams[index, stream] = found
    return found


def _lasting(index: int) -> torch.Tensor:
    """Memory of one stream on GPU `index`, allocated by a thread of its own: torch may be told to give what this thread
    allocates out of the pool of a CUDA graph (torch.compile does while it warms one up), where nothing may last."""

    def allocate() -> torch.Tensor:
        if torch._C._cuda_getDevice() != index:  # a new thread begins with GPU 0
            torch.cuda.set_device(index)
        return empty_strided(((ROWS_START + 4 * ROWS) // 4,), (1,), torch.int32)

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(allocate).result()


def counters() -> torch.Tensor:
    """Counters of one launch alone."""
    return empty_strided((COUNTERS.amount // 4,), (1,), torch.int32).zero_()


_of_streams: dict[tuple[int, int], torch.Tensor] = {}
