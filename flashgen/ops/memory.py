"""Memory of results and workspaces on a GPU, allocated as the graphs of torch.compile allocate theirs.

`empty_strided(shape, strides, dtype)` takes plain tuples and gives what torch.empty_strided gives on torch's current
GPU, in half the host's time: torch's dispatcher is not asked, and nothing that listens to it watches a call that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

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

#: Bytes from the counters of a launch in a CUDA graph to those of the next, and how many are allocated together.
_PLACE, _PLACES = 32, 1 << 12

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
        found = _lasting(index, ROWS_START + 4 * ROWS, zero=False)
        found[: COUNTERS.amount // 4].zero_()  # on the stream that reads it
        _of_streams[index, stream] = found
        with _lock:  # graphs that are captured later have counters then
            if len(free := _of_graphs.setdefault(index, [])) < _PLACES // 2:
                free += _free_counters(index)
    return found


def of_graph(index: int) -> torch.Tensor:
    """Counters that one launch in a CUDA graph has to itself, 0 between its replays.

    They are never given back, as nothing tells when a graph is: 32 bytes a launch.  While a graph is captured nothing
    may be allocated and cleared: where none are left a kernel clears some before each replay, which takes 1 us more on
    an H200.
    """
    numbers = COUNTERS.amount // 4
    with _lock:
        if free := _of_graphs.get(index):
            kept, first = free.pop()
            return kept[first : first + numbers]
    return empty_strided((numbers,), (1,), torch.int32).zero_()


def _free_counters(index: int) -> list[tuple[torch.Tensor, int]]:
    """Where counters of so many launches lie, which are 0 and stay allocated: a tensor, and from which element on."""
    _kept.append(_lasting(index, _PLACE * _PLACES, zero=True))
    return [(_kept[-1], first) for first in range(0, _PLACE * _PLACES // 4, _PLACE // 4)]


def _lasting(index: int, size: int, *, zero: bool) -> torch.Tensor:
    """So many bytes on GPU `index`, allocated by a thread of its own: torch may be told to give what this thread
    allocates out of the pool of a CUDA graph (torch.compile does while it warms one up), where nothing may last.  With
    `zero` they are 0 for whichever stream reads them."""

    def allocate() -> torch.Tensor:
        if torch._C._cuda_getDevice() != index:  # a new thread begins with GPU 0
            torch.cuda.set_device(index)
        if not zero:
            return empty_strided((size // 4,), (1,), torch.int32)
        with _aside():
            return empty_strided((size // 4,), (1,), torch.int32).zero_()

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(allocate).result()


@contextmanager
def _aside() -> Iterator[None]:
    """A stream of its own, whose work has ended at the end."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


_lock = Lock()
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_of_graphs: dict[int, list[tuple[torch.Tensor, int]]] = {}
_kept: list[torch.Tensor] = []
