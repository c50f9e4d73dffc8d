"""How a benchmark measures: rounds that interleave all contenders, and medians of per-round ratios.

A power-limited chip lowers its clock while it works, so a figure of one moment says little about another.  Each round
therefore times every contender once, in an order that rotates from round to round, and only ratios within a round are
compared; clocks are left alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

#: Rounds below this say nothing about their own spread.
MIN_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median over rounds of peer time / own time (above 1: faster than the peer), with its extremes."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds of one call, a round an entry, by contender; contender order as given."""

    rounds: Mapping[str, tuple[float, ...]]

    def median_ms(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def tflops(self, name: str, flops: int) -> float:
        """TFLOP/s of a contender whose call computes so much."""
        return flops / self.median_ms(name) * 1e-9

    def as_json(self, flops: int, ratio: Callable[[str], Ratio]) -> dict[str, object]:
        """What records have of them: TFLOP/s, the ratio of each but flashgen, and every round."""
        return {
            "tflops": {name: round(self.tflops(name, flops), 1) for name in self.rounds},
            "ratio": {name: [round(x, 4) for x in astuple(ratio(name))] for name in self.rounds if name != "flashgen"},
            "ms": {name: [round(x, 5) for x in rounds] for name, rounds in self.rounds.items()},
        }

    def ratio(self, name: str, peer: str) -> Ratio:
        """How many times faster `name` is than `peer`, round by round."""
        ratios = [theirs / ours for ours, theirs in zip(self.rounds[name], self.rounds[peer], strict=True)]
        return Ratio(median=statistics.median(ratios), low=min(ratios), high=max(ratios))


def whole_turns(rounds: int, count: int) -> int:
    """The least number of rounds, not below `rounds`, over which the rotation of so many contenders is balanced."""
    turn = count if count % 2 == 0 else 2 * count
    return -(-rounds // turn) * turn


def rotation(names: Sequence[str], round_index: int) -> list[str]:
    """The order of one round: over as many rounds as contenders (twice as many, if that is odd) each runs in each place
    once and behind each other as often as behind any (Williams 1949).

    Behind a kernel that draws little power one finds a higher clock: up to 10% in what one slot measures.
    """
    count = len(names)
    turn, mirrored = round_index % count, round_index // count % 2 == 1
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    order = [names[(step + turn) % count] for step in zigzag]
    return order[::-1] if mirrored else order


class Elsewhere(Protocol):
    """A contender that is no call of this process: it times a slot of its own when it is asked to."""

    def slot(self, slot_ms: float) -> float:
        """Milliseconds of one call, the mean of so many milliseconds of calls."""


def interleave(
    contenders: Mapping[str, Callable[[], object] | Elsewhere],
    *,
    rounds: int = MIN_ROUNDS,
    slot_ms: float = 12.0,
    until: float | None = None,
) -> Timings:
    """Time every contender in every round on torch's current stream.

    Each slot repeats its call for about `slot_ms` of device time between two CUDA events, after half as many calls that
    are not counted; the events give the mean of the slot.  No round but the first begins after `until`, a moment of
    time.monotonic().  Raises ValueError for fewer rounds than `MIN_ROUNDS`.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"{rounds} rounds are too few: at least {MIN_ROUNDS}")
    names = list(contenders)
    slots = {
        name: functools.partial(one.slot, slot_ms)
        if hasattr(one, "slot")
        else functools.partial(slot, one, _repeats(one, slot_ms))
        for name, one in contenders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in in_time(rounds, until):
        for name in rotation(names, index):
            times[name].append(slots[name]())
    return Timings(rounds={name: tuple(values) for name, values in times.items()})


def in_time(rounds: int, until: float | None) -> Iterator[int]:
    """The rounds, as far as they begin before a moment of time.monotonic(): at least one."""
    for index in range(rounds):
        if index and until is not None and time.monotonic() > until:
            return
        yield index


def slot(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one of so many calls, behind half as many that are not counted."""
    import torch

    for _ in range(max(2, repeats // 2)):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _repeats(call: Callable[[], object], slot_ms: float) -> int:
    """How often to repeat a call to fill a slot: at least 3 times, at most 500."""
    import torch

    for _ in range(2):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        call()
    end.record()
    end.synchronize()
    return max(3, min(500, round(slot_ms / max(start.elapsed_time(end) / 3, 1e-3))))
