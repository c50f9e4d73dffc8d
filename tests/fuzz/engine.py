"""Trying cases by the thousand: what each judge said, a failure's one-line repro, and its smallest form.

The choices of case i of a seed are bytes made from both, which hypothesis reads (`fuzz_one_input`); a case that fails
is shrunk by hypothesis from there.
"""

from __future__ import annotations

import linecache
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from flashgen.errors import CapturedIndexError, LaunchError, PlanError, SpecError

from .choices import Choices
from .grammar import Case

#: What a case may end in without being wrong: the language, the planner or a call refuses it.
REFUSALS = (SpecError, PlanError, LaunchError, CapturedIndexError)

#: More than any case reads.
ENTROPY = 1 << 14

#: Cases that a process tries before it reports.
CHUNK = 10

HELD, REFUSED, UNDECIDED, FAILED = "held", "refused", "undecided", "failed"


class Wrong(AssertionError):
    """A judge found that the compiler and the evaluator disagree."""


class Undecided(Exception):
    """Float arithmetic of a kernel's precision does not say what is right."""


@dataclass(frozen=True)
class Judge:
    """One way to look at a case: `draw` makes it, `check` raises Wrong (or anything else) where something is wrong."""

    name: str
    draw: Callable[[Choices], Case]
    check: Callable[[Case], None]


@dataclass(frozen=True)
class Failure:
    """A case that failed: `repro` runs it again, `kind` is the error without its numbers."""

    repro: str
    kind: str
    error: str
    report: str

    def __str__(self) -> str:
        return f"{self.repro}\n{self.error}\n\n{self.report}"


@dataclass
class Tally:
    """How cases ended, and the first failure of each kind."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return self.outcomes.total()

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.reasons += other.reasons
        self.failures = other.failures | self.failures

    def __str__(self) -> str:
        share = {name: f"{n} {name}" for name, n in self.outcomes.items()}
        rate = self.tried / self.seconds if self.seconds else 0.0
        return f"seed {self.seed}: {self.tried} tried, {', '.join(share.values())}, {rate:.1f} a second"


def kind_of(error: BaseException) -> str:
    """What an error says, without the numbers of a case: its first line, or what a compiler says."""
    lines = str(error).splitlines() or [""]
    said = next((line.partition("error:")[2] for line in lines if "error:" in line), lines[0])
    words = "".join("#" if c.isdigit() else c for c in said).strip()
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = f"{at.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{at.tb_lineno}" if at is not None else ""
    return f"{type(error).__name__} {words[:80]} {'' if isinstance(error, Wrong) else place}".strip()


class _Trial:
    """A judge as a function of hypothesis' data; it remembers what the last case was and how it ended."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.outcome = self.reason = ""
        self.case: Case | None = None
        self.failed: tuple[Case, Exception] | None = None
        self.deadline = float("inf")
        self.kind: str | None = None
        self.known: set[str] = set()
        # One function that draws and one that shrinks what the first left in the database.
        self.one = self._test().hypothesis.fuzz_one_input

    def _test(self) -> Callable[[], None]:
        self.database = getattr(self, "database", InMemoryExampleDatabase())

        @settings(
            database=self.database,
            phases=(Phase.reuse, Phase.shrink),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(st.data())
        def test(data):
            self.run(Choices(data))

        return test

    def run(self, choices: Choices) -> None:
        self.case = case = self.judge.draw(choices)
        late = time.monotonic() > self.deadline  # of shrinking: only what is known to fail fails
        if late and case.report() not in self.known:
            return
        try:
            self.judge.check(case)
            self.outcome, self.reason = HELD, ""
        except REFUSALS as error:
            self.outcome, self.reason = REFUSED, kind_of(error)
        except Undecided as error:
            self.outcome, self.reason = UNDECIDED, str(error)
        except Exception as error:
            if self.kind is not None and kind_of(error) != self.kind:
                return  # shrinking ends at what it began with
            self.outcome, self.reason = FAILED, kind_of(error)
            self.failed = case, error
            self.known.add(case.report())
            raise

    def smallest(self, seconds: float) -> tuple[Case, Exception]:
        """The case that failed last, shrunk for at most so long."""
        self.deadline, self.kind = time.monotonic() + seconds, kind_of(self.failed[1])
        try:
            self._test()()
        except Exception:
            pass  # which is the failure that `failed` holds
        finally:
            self.deadline, self.kind = float("inf"), None
        return self.failed


def entropy(judge: str, seed: int, index: int) -> bytes:
    return random.Random(f"{judge} {seed} {index}").randbytes(ENTROPY)


def try_one(judge: Judge, seed: int, index: int, *, shrink: float = 0.0) -> Tally:
    """One case of a seed; `shrink`: seconds to make a failure smaller."""
    trial, tally, error = _Trial(judge), Tally(seed), None
    try:
        trial.one(entropy(judge.name, seed, index))
    except Exception as raised:
        error = raised
    tally.outcomes[trial.outcome or UNDECIDED] += 1
    if trial.outcome in (REFUSED, UNDECIDED):
        tally.reasons[trial.reason] += 1
    if error is not None:
        if trial.failed is None:
            raise error  # of the generator itself
        kind = kind_of(trial.failed[1])
        case, found = trial.smallest(shrink) if shrink else trial.failed
        repro = f"python -m tests.fuzz {judge.name} --seed {seed} --case {index}"
        text = f"{type(found).__name__}: {found}"[:4000]
        tally.failures[kind] = Failure(repro, kind, text, case.report())
    linecache.clearcache()
    return tally


def _chunk(name: str, seed: int, first: int, count: int) -> Tally:
    from .judges import JUDGES

    tally = Tally(seed)
    for index in range(first, first + count):
        tally.add(try_one(JUDGES[name], seed, index))
    return tally


def search(
    judge: Judge,
    seed: int,
    *,
    count: int,
    seconds: float = float("inf"),
    jobs: int = 1,
    first: int = 0,
    on_progress: Callable[[Tally], None] = lambda tally: None,
    go_on: bool = False,
) -> Tally:
    """Try `count` cases, or as many as the seconds allow; stops at the first failure unless told to `go_on`."""
    start, tally = time.monotonic(), Tally(seed)

    def enough() -> bool:
        tally.seconds = time.monotonic() - start
        return tally.seconds > seconds or bool(tally.failures and not go_on)

    for part in _parts(judge, seed, first, count, jobs, enough):
        tally.add(part)
        tally.seconds = time.monotonic() - start
        on_progress(tally)
        if enough():
            break
    return tally


def _parts(judge, seed, first, count, jobs, enough) -> Iterator[Tally]:
    if jobs == 1:
        for index in range(first, first + count):
            yield try_one(judge, seed, index)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        chunks = iter(range(first, first + count, CHUNK))
        running = set()
        while True:
            while len(running) < 2 * jobs and not enough() and (at := next(chunks, None)) is not None:
                running.add(pool.submit(_chunk, judge.name, seed, at, min(CHUNK, first + count - at)))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
