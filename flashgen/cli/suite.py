"""`flashgen bench SUITE`: rows that set a call beside others, measured and recorded one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from flashgen.cli.console import err, progress, seconds, tabulate, times_faster
from flashgen.cli.measuring import conclude, matching, need_gpu
from flashgen.errors import LaunchError, PlanError

if TYPE_CHECKING:
    from flashgen.bench.suite import Found, Row, Suite

#: The modules of suites, each of which has a SUITE; by the word that asks for it.
SUITES = {name: f"flashgen.bench.{name}" for name in ("serving", "short", "masks", "flex", "sdpa", "models", "fp8")}

#: What each measures, for `--help`, which loads none of them.
WHAT = {
    "serving": "decoding, pages, mixed lengths, trees, sequences behind each other",
    "short": "problems that do not fill a GPU",
    "masks": "masks that data decide, beside FlexAttention",
    "flex": "FlexAttention's call, and what a new mask, length or number costs",
    "sdpa": "PyTorch's call with masks that are tensors, beside its own backends",
    "fp8": "attention in 8 bits, its errors, and quantize",
    "models": "a training step and a prefill of models of transformers",
}


def load(name: str) -> Suite:
    """A suite by its name."""
    return import_module(SUITES[name]).SUITE


def measure(
    name: str,
    *,
    backward: bool,
    parts: Sequence[str],
    cells: str,
    rounds: int,
    budget: float | None,
    peers: Sequence[str] | None,
    peer_files: Sequence[tuple[str, str]],
    folder: Path,
    seed: int,
    as_json: bool,
    slack: float,
) -> None:
    """Measure the chosen rows until the budget of seconds is spent: the row that is at work then ends with the rounds
    that it has; exit 1 where a result is wrong.

    All of the suite's packages take part where `peers` is None.  A bar holds at this much (`slack`) of it.
    """
    from flashgen.bench import record
    from flashgen.bench.suite import Ground
    from flashgen.bench.suite import measure as one

    suite = load(name)
    if unknown := [peer for peer in peers or () if peer not in suite.peers]:
        raise PlanError(f"flashgen bench {name} has no peer {unknown[0]!r}\n  nearest: {', '.join(suite.peers)}")
    if backward and not suite.backward:
        raise PlanError(f"flashgen bench {name} has no --backward\n  nearest: flashgen bench {name}")
    chosen = choose(suite, suite.rows(backward), parts, cells)
    files = {peer: _functions(Path(file), suite.entries) for peer, file in peer_files}
    need_gpu()
    path = folder / f"{'_'.join([name, *(['backward'] if backward else []), *parts])}.json"
    ground = Ground(seed=seed, names=suite.peers if peers is None else tuple(peers), files=files)
    asked = [
        f"flashgen bench {name}{' --backward' if backward else ''} --rounds {rounds} --seed {seed}",
        *([f"--part {','.join(parts)}"] if parts else []),
        *([f"--cells '{cells}'"] if cells else []),
        *([f"--budget {budget:g}"] if budget is not None else []),
        *([f"--peers {','.join(ground.names)}"] if ground.names else []),
        *(f"--peer-file {peer}=..." for peer in files),
    ]
    err.print(f"{len(chosen)} rows; all of {name} take about {suite.minutes:g} minutes on an H200", markup=False)
    found: list[Found] = []
    until = None if budget is None else time.monotonic() + budget
    with progress() as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for row in chosen:
            if until is not None and time.monotonic() > until:
                break
            bar.update(task, description=str(row))
            found.append(one(row, ground, rounds=rounds, until=until))
            bar.console.print(line(found[-1], slack), markup=True)
            bar.advance(task)
            # A run that is cut off leaves what it has.
            told = [each.as_json() for each in found]
            left = [str(row) for row in chosen[len(found) :]]
            record.write(path, command=" ".join(asked), protocol=_protocol(suite, rounds, left), cells=told)
    if not found:
        raise LaunchError(f"a budget of {budget:g} s is no time at all\n  nearest: --budget 60")
    if not as_json:
        tabulate(table(suite, found, slack))
    wrong = (f"{each.row}: {reason}" for each in found for reason in each.reasons)
    notes = [f"{each.row}: without {who}: {why}" for each in found for who, why in each.absent.items()]
    for each in found:
        if each.timings is not None and (had := len(each.timings.rounds[each.subject])) < rounds:
            notes.append(f"{each.row}: {had} of {rounds} rounds, as the budget was spent")
    if left:
        notes.append(f"the budget was spent before {len(left)} rows: {', '.join(left)}")
    conclude(path, told, wrong, notes, as_json, left=left)


def choose(suite: Suite, rows: Sequence[Row], parts: Sequence[str], cells: str) -> list[Row]:
    """The rows of some parts (none: all) whose name contains a text.  Raises PlanError where there is none."""
    known = list(dict.fromkeys(row.part for row in rows))
    if unknown := [part for part in parts if part not in known]:
        raise PlanError(f"flashgen bench {suite.name} has no part {unknown[0]!r}\n  nearest: {', '.join(known)}")
    return matching([row for row in rows if not parts or row.part in parts], cells)


def _functions(path: Path, entries: Sequence[str]) -> Mapping[str, Callable]:
    from flashgen.bench.peers import some

    return some(path, entries)


def _protocol(suite: Suite, rounds: int, left: Sequence[str]) -> dict[str, object]:
    return {
        "measures": suite.doc,
        "rounds": f"at least {rounds}, in whole turns of the contenders' order; fewer where the budget was spent",
        "ratio": "median of per-round (time of another / time of the subject), low, high",
        "more_us": "median of per-round (time of the subject - time of another)",
        "bars": "what the ratio must be at least",
        "reasons": "what is wrong with results, against float64 and between contenders",
        "absent": "who is missing in a row, and why",
        **({"left": list(left)} if left else {}),
    }


def table(suite: Suite, found: Sequence[Found], slack: float) -> Table:
    """Time and rate of each row's subject, and how many times faster it is than each other; below a bar in red."""
    shown = Table(title=f"{suite.name}: time of a call; times faster than others \\[low, high over rounds]")
    for column in ("part", "cell"):
        shown.add_column(column, no_wrap=True)
    for column in ("time", "rate"):
        shown.add_column(column, no_wrap=True, justify="right")
    shown.add_column("times faster than")
    for each in found:
        shown.add_row(each.row.part, each.row.name, *_numbers(each), "\n".join(_beside(each, slack)))
    return shown


def line(found: Found, slack: float) -> str:
    """A row in one line, as it is printed when it is done."""
    when, rate = _numbers(found)
    return f"{found.row}: {' '.join(x for x in (when, rate) if x)}  {', '.join(_beside(found, slack))}"


def _numbers(found: Found) -> tuple[str, str]:
    if found.timings is None:
        return ("[bold red]failed[/]" if found.reasons else "[yellow]refused[/]"), ""
    wrong = " [bold red]wrong[/]" if found.reasons else ""
    rate = found.rate()
    when = seconds(1e-3 * found.timings.median_ms(found.subject))
    return when + wrong, "" if rate is None else f"{rate[0]:.4g} {rate[1]}"


def _beside(found: Found, slack: float) -> list[str]:
    """Each other contender, with the bar where there is one."""
    told = []
    for name in found.others:
        bar = found.row.bars.get(name)
        ratio = times_faster(found.ratio(name), slack * bar if bar else 0.0)
        told.append(f"{escape(name)} {ratio}" + (f" of {bar:g}" if bar else ""))
    return told
