"""`flashgen bench data`: accuracy and speed beside the peers on inputs as trained models have them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashgen.cli.console import progress, tabulate, times_faster
from flashgen.cli.measuring import conclude, matching, need_gpu
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.bench.data import Result

#: Queries and keys, unless told otherwise, and draws.
SEQLEN, DRAWS = 8192, 16


def measure(
    *,
    backward: bool,
    inputs: str,
    cells: str,
    seqlen: int,
    pipeline: str | None,
    rounds: int,
    draws: int,
    peers: tuple[str, ...],
    peer_files: Sequence[tuple[str, str]],
    folder: Path,
    seed: int,
    as_json: bool,
    bar: float,
) -> None:
    """Draw, check and time the cells; exit 1 where a result is wrong."""
    from flashgen.bench import data, record
    from flashgen.bench.inputs import INPUTS
    from flashgen.bench.peers import functions
    from flashgen.planning.planner import PIPELINES

    wanted = [name for name in inputs.split(",") if name] or list(INPUTS)
    if unknown := [name for name in wanted if name not in INPUTS]:
        raise PlanError(f"there is no input {unknown[0]!r}\n  nearest: {', '.join(INPUTS)}")
    if pipeline not in (None, *PIPELINES):
        raise PlanError(f"there is no pipeline {pipeline!r}\n  nearest: {', '.join(PIPELINES)}")
    whole = [cell for cell in data.table(seqlen) if cell.input in wanted]
    chosen = matching(whole, cells)
    of, entry, optional = (data.backward, "backward", ()) if backward else (data.forward, "peer", (data.LSE_ENTRY,))
    files = {name: functions(Path(file), entry, *optional) for name, file in peer_files}
    need_gpu()
    name = "_".join(["data", *(["backward"] if backward else []), *([pipeline] if pipeline else [])])
    path = folder / f"{name}.json"
    options = {"--inputs": inputs, "--cells": cells, "--pipeline": pipeline}
    asked_for = [
        f"flashgen bench data{' --backward' if backward else ''} --draws {draws} --rounds {rounds}",
        f"--seqlen {seqlen} --peers {','.join(peers)} --seed {seed}",
        *(f"{option} '{value}'" for option, value in options.items() if value),
        *(f"--peer-file {name}=..." for name in files),
    ]
    protocol = {
        "inputs": {name: INPUTS[name].doc for name in wanted},
        "errors": "against float64, of heads of each draw: rms is RMS error / RMS over all draws; largest and tail (the"
        " 99.99th percentile) are medians over the draws; of lse in nats",
        data.EXACT: "the same algorithm with an exact running max: P and the results rounded, all else in float32",
        "times_error": "flashgen's error / that of another",
        "over_bars": f"above {data.BARS} times the better of {', '.join(data.BEST)}; lse above"
        f" {data.LSE_BAR} times {data.EXACT}",
        "reasons": "what the tolerance rule says of flashgen beside the exact algorithm",
        "rounds": f"at least {rounds}, in whole turns of the contenders' order",
        "ratio": "median of per-round (peer time / flashgen time), low, high",
        "bar": bar,
    }
    results: list[Result] = []
    with progress() as shown:
        task = shown.add_task("measuring", total=len(chosen))
        for shape, group in itertools.groupby(chosen, key=lambda one: one.cell):
            shown.update(task, description=str(shape))
            asked = {"rounds": rounds, "draws": draws, "names": peers, "files": files, "seed": seed}
            for result in data.measure(list(group), of, pipeline, **asked):
                results.append(result)
                shown.advance(task)
            # A run that is cut off leaves what it has.
            told = [result.as_json() for result in results]
            record.write(path, command=" ".join(asked_for), protocol=protocol, cells=told)
    if not as_json:
        tabulate(table(results, [*peers, *files], bar, backward=backward))
    wrong = (f"{result.cell}: {reason}" for result in results for reason in result.reasons)
    conclude(path, told, wrong, (), as_json)


def table(results: list[Result], peers: list[str], bar: float, *, backward: bool) -> Table:
    """Errors of flashgen as times those of the exact algorithm and of each peer, and how many times faster than each;
    what is above a bar of errors, or below that of speed, in red."""
    from flashgen.bench.data import EXACT

    title = "backward" if backward else "forward"
    shown = Table(
        title=f"{title}: RMS error over RMS; flashgen's error as times that of each (RMS / largest / 99.99%; of lse the"
        " largest); times faster than each peer \\[low, high over rounds]"
    )
    for column in ("cell", "of"):
        shown.add_column(column, no_wrap=True)
    for column in ("RMS", *(f"error / {name}" for name in (EXACT, *peers)), *(f"vs {name}" for name in peers)):
        shown.add_column(Text(column), justify="right", no_wrap=True)  # names of peers are a user's
    speeds: dict[str, list[float]] = {}
    for result in results:
        for place, (what, by) in enumerate(result.errors.items()):
            row = [str(result.cell) if place == 0 else "", what, f"{by['flashgen'].rms:.3g}"]
            over = result.over_bars(what)
            for name in (EXACT, *peers):
                ratio = result.beside(what, name)
                if ratio is None:
                    row.append("-")
                    continue
                measures = ("largest",) if what == "lse" else ("rms", "largest", "tail")
                row.append(" / ".join(_marked(getattr(ratio, m), over.get(m)) for m in measures))
            for name in peers if place == 0 else ():
                if name not in result.timings.rounds:
                    row.append("-")
                    continue
                ratio = result.faster(name)
                speeds.setdefault(name, []).append(ratio.median)
                row.append(times_faster(ratio, bar))
            if place == 0 and result.reasons:
                row[2] += " [bold red]wrong[/]"
            shown.add_row(*row)
    means = (f"{statistics.geometric_mean(speeds[name]):.3f}" if name in speeds else "-" for name in peers)
    shown.add_row("geometric mean", "", "", *[""] * (1 + len(peers)), *means, style="bold")
    return shown


def _marked(ratio: float, over: float | None) -> str:
    """A ratio, red where it is the one that a bar forbids."""
    return f"[red]{ratio:.2f}[/]" if ratio == over else f"{ratio:.2f}"
