"""`flashgen bench PIPELINE`: forward or backward of a pipeline beside peers, checked and recorded cell by cell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashgen.cli.console import progress, size, tabulate, times_faster
from flashgen.cli.measuring import conclude, matching, need_gpu

if TYPE_CHECKING:
    from flashgen.bench.contest import Measured


def measure(
    pipeline: str,
    *,
    backward: bool,
    dropout: float,
    against: Path | None,
    cells: str,
    rounds: int,
    peers: tuple[str, ...],
    peer_files: Sequence[tuple[str, str]],
    folder: Path,
    seed: int,
    as_json: bool,
    bar: float,
) -> None:
    """Check and time the cells of a pass, with a chance of dropout, beside those of another checkout; exit 1 where a
    result is wrong."""
    from flashgen.bench import cells as tables
    from flashgen.bench import record
    from flashgen.bench.against import BEFORE, check
    from flashgen.bench.peers import from_file

    if backward:
        from flashgen.bench import backward as bench

        name, whole = "backward", tables.BACKWARD[pipeline]
    else:
        from flashgen.bench import forward as bench

        name, whole = "forward", tables.FORWARD[pipeline]
    files = {name: from_file(Path(file), bench.ENTRY) for name, file in peer_files}
    chosen = matching(tables.dropping(whole) if dropout else whole, cells)
    if against is not None:
        check(against)
    need_gpu()
    path = folder / f"{name}_{pipeline}{'_dropout' if dropout else ''}{'_against' if against else ''}.json"
    asked = [f"flashgen bench {pipeline}", *(["--backward"] if backward else [])]
    asked += [f"--dropout {dropout:g}"] if dropout else []
    asked += ["--against ..."] if against is not None else []
    asked += [f"--rounds {rounds} --peers {','.join(peers)} --seed {seed}", *([f"--cells '{cells}'"] if cells else [])]
    protocol = {
        "rounds": f"at least {rounds}, in whole turns of the contenders' order",
        "timed": bench.TIMED,
        "ratio": "median of per-round (peer time / flashgen time), low, high; of another form of flashgen's own"
        " flashgen time / its time",
        "extra_bytes": "peak of torch's allocator during one call, less its results",
        "bar": bar,
    }
    given = {"rounds": rounds, "names": peers, "files": files, "seed": seed, "dropout": dropout, "before": against}
    columns = [*peers, *files, *([BEFORE] if against is not None else [])]
    measured: list[Measured] = []
    with progress() as shown:
        task = shown.add_task("measuring", total=len(chosen))
        for cell in chosen:
            shown.update(task, description=str(cell))
            measured.append(bench.measure(cell, pipeline, **given))
            shown.advance(task)
            # A run that is cut off leaves what it has.
            command = " ".join([*asked, *(f"--peer-file {name}=..." for name in files)])
            told = [one.as_json() for one in measured]
            record.write(path, command=command, protocol=protocol, cells=told)
    if not as_json:
        tabulate(table(name, measured, columns, bar))
    others = sorted({one.plan.pipeline for one in measured} - {pipeline})
    notes = [f"pipeline {pipeline} has no {name} for some of these cells: they ran on pipeline {x}" for x in others]
    conclude(path, told, (f"{one.cell}: {reason}" for one in measured for reason in one.reasons), notes, as_json)


def table(name: str, measured: list[Measured], peers: list[str], bar: float) -> Table:
    """TFLOP/s and memory of flashgen, how many times faster it is than each peer (below the bar in red), and the speed
    of its other forms."""
    own = list(dict.fromkeys(form for one in measured for form in one.own))
    title = f"{name}: useful TFLOP/s, memory beyond the results, times faster than each peer \\[low, high over rounds]"
    shown = Table(title=title + (f"; speed of {', '.join(own)} beside it" if own else ""))
    shown.add_column("cell", no_wrap=True)
    shown.add_column("tile", no_wrap=True)
    shown.add_column("TFLOP/s", justify="right", no_wrap=True)
    shown.add_column("memory", justify="right", no_wrap=True)
    ratios: dict[str, list[float]] = {}
    for peer in (*peers, *own):
        shown.add_column(Text(peer), justify="right", no_wrap=True)  # names of peers are a user's
    for one in measured:
        row = [
            str(one.cell),
            str(one.plan.tile),
            f"{one.tflops('flashgen'):.0f}" + (" [bold red]wrong[/]" if one.reasons else ""),
            size(one.extra["flashgen"]),
        ]
        for peer in (*peers, *own):
            if peer not in one.timings.rounds:
                row.append("-")
                continue
            ratio = one.ratio(peer)
            ratios.setdefault(peer, []).append(ratio.median)
            row.append(times_faster(ratio, 0.0 if peer in own else bar))
        shown.add_row(*row)
    columns = (ratios.get(peer) for peer in (*peers, *own))
    means = (f"{statistics.geometric_mean(r):.3f}" if r else "-" for r in columns)
    shown.add_row("geometric mean", "", "", "", *means, style="bold")
    return shown
