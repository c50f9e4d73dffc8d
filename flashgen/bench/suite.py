"""A suite: rows that each set a call of flashgen beside others, checked, timed and recorded one after the other.

The first form of a row is its subject.  Others are further forms of flashgen, such as the same call without pages, and
peers.  What a tree or a library refuses is recorded with its reason, and the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.bench.protocol import Ratio, Timings, whole_turns
from flashgen.bench.timers import Call, Timer
from flashgen.errors import FlashgenError

#: Why a peer is absent that was not made any more.
SPENT = "the budget was spent before"

#: Makes a peer's call; None where the peer lacks such a row.  What it raises says why the peer is absent.
Builder = Callable[[], Call | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What contests are made on: a device, a seed, the packages that take part, and functions of peers' files."""

    device: str = "cuda"
    seed: int = 0
    names: tuple[str, ...] = ()
    files: Mapping[str, Mapping[str, Callable]] = field(default_factory=dict)

    def of_files(self, entry: str, *given: object) -> dict[str, Builder]:
        """Builders of the peers whose file has a function of this name."""
        return {
            name: lambda build=functions[entry]: build(*given)
            for name, functions in self.files.items()
            if entry in functions
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contest:
    """A row whose tensors exist.

    forms   calls of flashgen, the subject first
    peers   what makes a peer's call
    wrong   what is wrong with a contender's result (its name, what it gave): an empty list if nothing is
    sums    yardsticks that nobody runs: by name so many times each contender's time
    bytes   that the subject has to read and write; None where that is not the measure
    flops   of the subject; None likewise
    about   what else the record holds
    """

    forms: Mapping[str, Call]
    peers: Mapping[str, Builder] = field(default_factory=dict)
    wrong: Callable[[str, object], Iterable[str]]
    sums: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bytes: int | None = None
    flops: int | None = None
    about: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a suite: `bars` say how many times faster than others the subject must be."""

    part: str
    name: str
    make: Callable[[Ground], Contest]
    timer: Timer
    bars: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Rows of one command.

    doc       what it measures, for a person
    rows      its rows: of the backward where it is given True
    backward  whether it has rows of the backward
    peers     packages that may take part
    entries   functions that a peer's file may have
    minutes   how long a whole run may take on an H200
    """

    name: str
    doc: str
    rows: Callable[[bool], Sequence[Row]]
    backward: bool = False
    peers: tuple[str, ...]
    entries: tuple[str, ...] = ()
    minutes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A row that was measured: timings (None where the subject was refused), what is wrong, and who is absent."""

    row: Row
    subject: str
    timings: Timings | None
    reasons: tuple[str, ...]
    absent: Mapping[str, str]
    bytes: int | None = None
    flops: int | None = None
    about: Mapping[str, object] = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        return [name for name in self.timings.rounds if name != self.subject] if self.timings else []

    def ratio(self, name: str) -> Ratio:
        """How many times faster the subject is than another."""
        return self.timings.ratio(self.subject, name)

    def rate(self) -> tuple[float, str] | None:
        """What the subject reaches, and the unit."""
        if self.timings is None:
            return None
        ms = self.timings.median_ms(self.subject)
        if self.flops is not None:
            return self.flops / ms * 1e-9, "TFLOP/s"
        return None if self.bytes is None else (self.bytes / ms * 1e-9, "TB/s")

    def more_us(self, name: str) -> float:
        """Microseconds that the subject takes more than another: the median over rounds."""
        rounds = self.timings.rounds
        pairs = zip(rounds[self.subject], rounds[name], strict=True)
        return 1e3 * statistics.median(ours - theirs for ours, theirs in pairs)

    def as_json(self) -> dict[str, object]:
        known = {} if self.timings is None else self.timings.rounds
        rate = self.rate()
        return {
            "part": self.row.part,
            "cell": self.row.name,
            "timed": self.row.timer.doc,
            "subject": self.subject,
            "us": {name: round(1e3 * self.timings.median_ms(name), 3) for name in known},
            "ratio": {name: [round(x, 4) for x in dataclasses.astuple(self.ratio(name))] for name in self.others},
            "more_us": {name: round(self.more_us(name), 3) for name in self.others},
            "bars": {name: bar for name, bar in self.row.bars.items() if name in self.others},
            **({} if rate is None else {"rate": round(rate[0], 4), "unit": rate[1]}),
            "reasons": list(self.reasons),
            "absent": dict(self.absent),
            "about": dict(self.about),
            "ms": {name: [round(x, 6) for x in each] for name, each in known.items()},
        }


def measure(row: Row, ground: Ground, *, rounds: int, until: float | None = None) -> Found:
    """Make, check and time one row, and give its memory back.  What fails is recorded: of flashgen as what is wrong,
    unless it is a refusal.  After `until`, a moment of time.monotonic(), no peer is made and no round but the first
    begins."""
    try:
        with row.timer.around():
            return _measured(row, ground, rounds, until)
    except Exception as error:  # a kernel that ended the GPU's context takes all rows with it: each says so
        return _without(row, error)
    finally:
        _give_back(ground.device)


def _give_back(device: str) -> None:
    """What a row held on a GPU: graphs and compiled functions hold tensors in circles."""
    import torch

    if device == "cpu":
        return
    gc.collect()
    with contextlib.suppress(RuntimeError):  # of a context that ended
        torch.cuda.empty_cache()


def _measured(row: Row, ground: Ground, rounds: int, until: float | None) -> Found:
    timer, absent, reasons = row.timer, {}, []
    try:
        contest = row.make(ground)
    except Exception as error:
        return _without(row, error)
    ready: dict[str, Call] = {}
    builders = {name: lambda call=call: call for name, call in contest.forms.items()} | dict(contest.peers)
    for name, build in builders.items():
        if until is not None and time.monotonic() > until and name not in contest.forms:
            absent[name] = SPENT
            continue
        try:
            if (call := build()) is None:
                continue
            reasons += contest.wrong(name, call())
            ready[name] = timer.ready(call)
        except Exception as error:  # what a peer refuses is a fact about the peer, what a tree refuses one about it
            absent[name] = said(error)
            if name in contest.forms and not isinstance(error, FlashgenError):
                reasons.append(f"{name} failed: {absent[name]}")
    subject = next(iter(contest.forms))
    timings = None
    if subject in ready:
        timings = with_sums(timer.time(ready, rounds=whole_turns(rounds, len(ready)), until=until), contest.sums)
    return Found(
        row=row,
        subject=subject,
        timings=timings,
        reasons=tuple(reasons),
        absent=absent,
        bytes=contest.bytes,
        flops=contest.flops,
        about=contest.about,
    )


def _without(row: Row, error: Exception) -> Found:
    """A row that could not be made, or timed."""
    why = said(error)
    reasons = () if isinstance(error, FlashgenError) else (f"it could not be measured: {why}",)
    return Found(row=row, subject="flashgen", timings=None, reasons=reasons, absent={"flashgen": why})


def with_sums(timings: Timings, sums: Mapping[str, Mapping[str, float]]) -> Timings:
    """With yardsticks that are sums over contenders, where all of these were timed."""
    known = timings.rounds
    made = {
        name: tuple(
            sum(times * ms for times, ms in zip(weights.values(), each, strict=True))
            for each in zip(*(known[of] for of in weights), strict=True)
        )
        for name, weights in sums.items()
        if all(of in known for of in weights)
    }
    return Timings(rounds={**known, **made})


def said(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
