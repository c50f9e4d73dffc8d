"""Ways to time the contenders of a row: eager calls, CUDA graphs, CUDA graphs beside an empty L2, and the host's part.

Each makes a call ready (which may fail, as not every library can be captured), and times calls that are ready in
rounds, as `bench.protocol` has them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.bench import host, protocol
from flashgen.bench.protocol import Timings, in_time, rotation

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

#: Bytes that are written to empty an L2 of any GPU; the host is done with a launch before they are.
FLUSHED_BYTES = 1 << 28

#: Calls of one slot beside an empty L2: at least, at most, and milliseconds between.
FEWEST, MOST, SLOT_MS = 5, 25, 8.0


class Timer(Protocol):
    """A way to time; `doc` says what one number is."""

    @property
    def doc(self) -> str: ...

    def around(self) -> AbstractContextManager:
        """Where contenders are made, made ready and timed."""

    def ready(self, call: Call) -> Call:
        """The call as it is timed.  Raises what the call raises there."""

    def time(self, calls: Mapping[str, Call], *, rounds: int, until: float | None = None) -> Timings:
        """Milliseconds of one call, by contender and round; no round but the first begins after `until`, a moment of
        time.monotonic()."""


@dataclass(frozen=True, slots=True)
class Eager:
    """Calls behind each other, the host's part of them where the GPU waits for that."""

    slot_ms: float = 12.0

    @property
    def doc(self) -> str:
        return "calls behind each other, between two CUDA events"

    def around(self) -> AbstractContextManager:
        return nullcontext()

    def ready(self, call: Call) -> Call:
        return call

    def time(self, calls: Mapping[str, Call], *, rounds: int, until: float | None = None) -> Timings:
        return protocol.interleave(calls, rounds=rounds, slot_ms=self.slot_ms, until=until)


@dataclass(frozen=True, slots=True)
class Graph:
    """CUDA graphs of several calls each: the GPU's part alone."""

    calls: int = 10

    @property
    def doc(self) -> str:
        return f"CUDA graphs of {self.calls} calls each, behind each other, between two CUDA events"

    def around(self) -> AbstractContextManager:
        return aside()

    def ready(self, call: Call) -> Call:
        return captured(call, self.calls).replay

    def time(self, calls: Mapping[str, Call], *, rounds: int, until: float | None = None) -> Timings:
        found = protocol.interleave(calls, rounds=rounds, until=until)
        return Timings(rounds={name: tuple(ms / self.calls for ms in each) for name, each in found.rounds.items()})


@dataclass(frozen=True, slots=True)
class Cold:
    """A CUDA graph of one call, whose tensors are not in L2: as a step of decoding finds its cache."""

    @property
    def doc(self) -> str:
        return (
            f"CUDA graphs of one call each, between two CUDA events, behind a write of {FLUSHED_BYTES >> 20} MiB that"
            f" empties L2; the median of up to {MOST} calls"
        )

    def around(self) -> AbstractContextManager:
        return aside()

    def ready(self, call: Call) -> Call:
        return captured(call, 1).replay

    def time(self, calls: Mapping[str, Call], *, rounds: int, until: float | None = None) -> Timings:
        import torch

        flushed = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
        names = list(calls)
        repeats: dict[str, int] = {}
        for name, call in calls.items():
            alone = statistics.median(_cold(call, flushed, FEWEST))
            repeats[name] = max(FEWEST, min(MOST, round(SLOT_MS / max(alone, 1e-3))))
        times: dict[str, list[float]] = {name: [] for name in names}
        for index in in_time(rounds, until):
            for name in rotation(names, index):
                times[name].append(statistics.median(_cold(calls[name], flushed, repeats[name])))
        return Timings(rounds={name: tuple(values) for name, values in times.items()})


@dataclass(frozen=True, slots=True)
class Host:
    """What a call takes of the host, its queue empty before the first of `calls`."""

    calls: int = host.CALLS
    warm: int = host.WARM_CALLS

    @property
    def doc(self) -> str:
        return f"the host's part of {self.calls} calls on an empty queue, until the last returns"

    def around(self) -> AbstractContextManager:
        return nullcontext()

    def ready(self, call: Call) -> Call:
        return call

    def time(self, calls: Mapping[str, Call], *, rounds: int, until: float | None = None) -> Timings:
        import torch

        contenders = {
            name: call if isinstance(call, host.Contender) else host.Contender(call=call)
            for name, call in calls.items()
        }
        slot = functools.partial(host.slot, calls=self.calls, warm=self.warm)
        us = host.interleave(contenders, torch.cuda.synchronize, rounds=rounds, slot=slot, until=until)
        return Timings(rounds={name: tuple(1e-3 * x for x in values) for name, values in us.items()})


def aside() -> AbstractContextManager:
    """A stream of its own: a backward runs on the stream of its forward, and the default one is never captured."""
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def captured(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """So many calls in one graph, captured on the current stream."""
    import torch

    for _ in range(2):  # what first calls make is not the graph's
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            call()
    return graph


def _cold(call: Call, flushed: Any, repeats: int) -> list[float]:
    """Milliseconds of each of so many calls, each behind a write that empties L2."""
    import torch

    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in spans:
        flushed.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]
