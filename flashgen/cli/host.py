"""`flashgen bench host`: what the host does before the GPU works, beside its peers, measured and recorded."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from flashgen.bench import cold, host, record
from flashgen.bench.host import Row
from flashgen.cli.console import err, progress, seconds, tabulate
from flashgen.cli.measuring import conclude, matching


def measure(*, cells: str, rounds: int, peers: tuple[str, ...], folder: Path, seed: int, as_json: bool) -> None:
    """Time repeated calls, a plan, an import and a first call; without a GPU what needs none.  Exit 1 where a result
    is wrong."""
    import torch

    chosen = matching(host.CELLS, cells)
    gpu, compiled = torch.cuda.is_available(), cold.bytecode()
    # What a machine without a GPU says never takes the place of what one with a GPU said.
    path = folder / ("host.json" if gpu else "host_without_gpu.json")
    asked = f"flashgen bench host --rounds {rounds} --peers {','.join(peers)} --seed {seed}"
    protocol = {
        "rounds": f"at least {rounds}, in whole turns of the contenders' order; of fresh processes {rounds}, of first"
        f" calls {min(rounds, host.FIRST_CALLS)}",
        "timed": f"{host.CALLS} calls on an empty queue, until the last returns to the host; SDPA's backend is"
        " chosen beforehand; Python's collector rests",
        host.ALLOCATION: "the allocation of o, a part of each call of flashgen",
        host.REPEATED: "the same call again, beside one that differs from the one before it",
        "ratio": "median of per-round (peer time / flashgen time), low, high",
        "unit": "microseconds",
        "import_limit": host.IMPORT_LIMIT,
        "bytecode": "compiled beforehand, as pip leaves it" if compiled else "compiled by each process",
    }
    rows: list[Row] = []
    if gpu:
        err.print(f"{len(chosen)} cells; all of host take about {host.MINUTES} minutes on an H200", markup=False)
    with progress() as bar:
        task = bar.add_task("fresh processes", total=1 + gpu * (1 + len(chosen)))

        def keep(more: Iterable[Row]) -> None:
            """Each row is told when it is there; a run that is cut off leaves what it has."""
            for row in more:
                rows.append(row)
                told = [row.as_json() for row in rows]
                command = asked + (f" --cells '{cells}'" if cells else "")
                record.write(path, command=command, protocol=protocol, cells=told)
                bar.console.print(_line(row))
            bar.advance(task)

        keep(host.processes(rounds))
        if gpu:
            keep([host.first_call(rounds)])
        for cell in chosen if gpu else ():
            bar.update(task, description=str(cell))
            calls = host.calls(cell, rounds=rounds, names=peers, seed=seed)
            keep(itertools.chain(calls, host.changes(cell, rounds=rounds, seed=seed)))
    if not as_json:
        tabulate(_table(rows, peers if gpu else ()))
    wrong = (f"{row.what}, {row.where}: {reason}" for row in rows for reason in row.reasons)
    notes = [] if gpu else ["there is no GPU that PyTorch can use: calls were not measured"]
    conclude(path, [row.as_json() for row in rows], wrong, notes, as_json)


def _table(rows: list[Row], peers: tuple[str, ...]) -> Table:
    """Host time by contender, median and spread; an import above its limit in red."""
    table = Table(title="host time: median \\[low, high] over rounds")
    own = [name for name in host.OWN[1:] if any(name in row.us for row in rows)]
    names = ("flashgen", *own, *peers)
    for column in ("what", "where", *names):
        table.add_column(column, no_wrap=True, justify="right" if column in names else "left")
    for row in rows:
        cells = [_spread(row.us[name]) if name in row.us else "-" for name in names]
        if row.what == host.OF_PROCESS[0]:
            limit = f" of {seconds(1e-6 * host.IMPORT_LIMIT)}"
            late = statistics.median(row.us["flashgen"]) > host.IMPORT_LIMIT
            cells[0] = f"[bold red]{cells[0]}{limit}[/]" if late else cells[0] + limit
        table.add_row(row.what, row.where, *cells)
    return table


def _line(row: Row) -> str:
    """A row in one line, by contender."""
    return f"{row.what}, {row.where}: " + ", ".join(f"{name} {_spread(us)}" for name, us in row.us.items())


def _spread(us: tuple[float, ...]) -> str:
    low, middle, high = (seconds(1e-6 * x) for x in (min(us), statistics.median(us), max(us)))
    return f"{middle} \\[{low}, {high}]"
