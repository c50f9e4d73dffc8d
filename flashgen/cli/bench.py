"""`flashgen bench`: kernels, harder data, the host's part, or a suite beside peers, checked and recorded."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flashgen.bench.protocol import MIN_ROUNDS
from flashgen.cli import options, suite
from flashgen.cli.console import err, progress, size, tabulate, times_faster, write_json
from flashgen.errors import LaunchError, PlanError

if TYPE_CHECKING:
    from flashgen.bench.contest import Measured

#: A bar of 1.00 holds at this much of it: what two runs of one kernel differ by.
BAR = 0.99

#: What is no pipeline: the host's part of a call, of a plan, of an import.
HOST = "host"

#: The other one: both passes on inputs as trained models have them.
DATA = "data"


#: Options that not every benchmark takes, and those that do.
OF_SOME = {
    "--backward": ("ampere", "hopper", DATA, *suite.SUITES),
    "--peer-file": ("ampere", "hopper", DATA, *suite.SUITES),
    "--inputs": (DATA,),
    "--draws": (DATA,),
    "--seqlen": (DATA,),
    "--pipeline": (DATA,),
    "--part": tuple(suite.SUITES),
    "--budget": tuple(suite.SUITES),
}


def command(
    pipeline: Annotated[
        str,
        typer.Argument(
            help="ampere or hopper: which kernels are measured. host: the host's part of a call, a plan, an import."
            " data: accuracy and speed on inputs as trained models have them. "
            + " ".join(f"{name}: {what}." for name, what in suite.WHAT.items())
        ),
    ],
    backward: Annotated[bool, typer.Option("--backward", help="The gradients, instead of the forward.")] = False,
    cells: Annotated[str, typer.Option(help="Only cells whose name contains this, e.g. 'd128 causal'.")] = "",
    rounds: Annotated[
        int, typer.Option(min=MIN_ROUNDS, help="Rounds, at least; each times every contender.")
    ] = MIN_ROUNDS,
    peers: Annotated[
        str | None,
        typer.Option(help="Packages, commas between. [dim]default: fa2,cudnn,flex; of a suite all that it knows[/]"),
    ] = None,
    peer_file: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE.py, a peer that is no package: its peer(cell, q, k, v), of gradients"
            " backward(cell, q, k, v, do), gives a call."
        ),
    ] = None,
    inputs: Annotated[str, typer.Option(help="data: only these inputs, e.g. normal,std8,sink; commas between.")] = "",
    draws: Annotated[int | None, typer.Option(min=1, help="data: draws of each cell. [dim]default: 16[/]")] = None,
    seqlen: Annotated[
        int | None, typer.Option(min=1, help="data: queries and keys, of batch 2 and 16 heads. [dim]default: 8192[/]")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--pipeline", help="data: which kernels are measured. [dim]default: what the planner takes[/]"),
    ] = None,
    part: Annotated[str, typer.Option(help="A suite's parts, e.g. decode,pages; commas between.")] = "",
    budget: Annotated[
        float | None,
        typer.Option(min=1, help="A suite: begin no row after so many seconds; the record says which were left."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where raw results go.", callback=options.results)] = Path(
        "generated/bench"
    ),
    seed: options.Seed = 0,
    as_json: options.as_json("path, cells (as the record holds them)") = False,
) -> None:
    """Time kernels, calls or the host's part of both beside their peers on this GPU; exit 1 where a result is wrong."""
    import torch

    from flashgen.bench import cells as tables
    from flashgen.bench import record
    from flashgen.bench.peers import SDPA, from_file
    from flashgen.cli import data, host

    if backward:
        from flashgen.bench import backward as bench

        name, table = "backward", tables.BACKWARD
    else:
        from flashgen.bench import forward as bench

        name, table = "forward", tables.FORWARD
    if pipeline not in (known := (*table, HOST, DATA, *suite.SUITES)):
        raise PlanError(f"there is no benchmark of pipeline {pipeline!r}\n  nearest: {', '.join(known)}")
    chosen_peers = None if peers is None else tuple(name for name in peers.split(",") if name)
    names = (*SDPA, "flex") if chosen_peers is None else chosen_peers
    if pipeline not in suite.SUITES and (unknown := [name for name in names if name not in (*SDPA, "flex")]):
        raise PlanError(
            f"there is no peer {unknown[0]!r}\n  nearest: {', '.join(SDPA)}, flex, or --peer-file NAME=FILE"
        )
    given = [options.pair(text, "--peer-file", "NAME=FILE.py") for text in peer_file or ()]
    asked = {"--inputs": inputs, "--draws": draws, "--seqlen": seqlen, "--pipeline": on, "--part": part}
    asked |= {"--budget": budget, "--backward": backward, "--peer-file": peer_file}
    for option, value in asked.items():
        if value and pipeline not in OF_SOME[option]:
            raise PlanError(
                f"flashgen bench {pipeline} takes no {option}: that is of {', '.join(OF_SOME[option])}\n"
                f"  nearest: flashgen bench {OF_SOME[option][0]} {option}"
                + ("" if value is True else f" {value[0] if isinstance(value, list) else value}")
            )
    common = {"cells": cells, "rounds": rounds, "peers": names, "folder": folder, "seed": seed, "as_json": as_json}
    if pipeline == HOST:
        host.measure(**common)
        return
    if pipeline in suite.SUITES:
        parts = [one for one in part.split(",") if one]
        suite.measure(
            pipeline,
            **{**common, "peers": chosen_peers},
            backward=backward,
            parts=parts,
            budget=budget,
            peer_files=given,
            slack=BAR,
        )
        return
    if pipeline == DATA:
        data.measure(
            **common,
            inputs=inputs,
            pipeline=on,
            backward=backward,
            seqlen=seqlen or data.SEQLEN,
            draws=draws or data.DRAWS,
            peer_files=given,
            bar=BAR,
        )
        return
    files = {name: from_file(Path(file), bench.ENTRY) for name, file in given}
    chosen = [cell for cell in table[pipeline] if cells in str(cell)]
    if not chosen:
        raise PlanError(f"no cell's name contains {cells!r}\n  cells: {', '.join(map(str, table[pipeline]))}")
    if not torch.cuda.is_available():
        raise LaunchError("a benchmark needs a GPU that PyTorch can use, and there is none")
    measured: list[Measured] = []
    with progress() as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for cell in chosen:
            bar.update(task, description=str(cell))
            measured.append(bench.measure(cell, pipeline, rounds=rounds, names=names, files=files, seed=seed))
            bar.advance(task)
    if not as_json:
        tabulate(_table(name, measured, [*names, *files]))
    for one in measured:
        for reason in one.reasons:
            err.print(f"{one.cell}: {reason}", markup=False)
    for other in sorted({one.plan.pipeline for one in measured} - {pipeline}):
        err.print(f"pipeline {pipeline} has no {name} for some of these cells: they ran on pipeline {other}")
    path = folder / f"{name}_{pipeline}.json"
    asked = [f"flashgen bench {pipeline}", *(["--backward"] if backward else [])]
    asked += [f"--rounds {rounds} --peers {','.join(names)} --seed {seed}", *([f"--cells '{cells}'"] if cells else [])]
    record.write(
        path,
        command=" ".join([*asked, *(f"--peer-file {name}=..." for name in files)]),
        protocol={
            "rounds": f"at least {rounds}, in whole turns of the contenders' order",
            "timed": bench.TIMED,
            "ratio": "median of per-round (peer time / flashgen time), low, high; of another form of flashgen's own"
            " flashgen time / its time",
            "extra_bytes": "peak of torch's allocator during one call, less its results",
            "bar": BAR,
        },
        cells=[one.as_json() for one in measured],
    )
    err.print(f"wrote {path}")
    if as_json:
        write_json({"path": str(path), "cells": [one.as_json() for one in measured]})
    if any(one.reasons for one in measured):
        raise typer.Exit(1)


def _table(name: str, measured: list[Measured], peers: list[str]) -> Table:
    """TFLOP/s and memory of flashgen, how many times faster it is than each peer (below the bar in red), and the speed
    of its other forms."""
    own = list(dict.fromkeys(form for one in measured for form in one.own))
    title = f"{name}: useful TFLOP/s, memory beyond the results, times faster than each peer \\[low, high over rounds]"
    table = Table(title=title + (f"; speed of {', '.join(own)} beside it" if own else ""))
    table.add_column("cell", no_wrap=True)
    table.add_column("tile", no_wrap=True)
    table.add_column("TFLOP/s", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    ratios: dict[str, list[float]] = {}
    for peer in (*peers, *own):
        table.add_column(peer, justify="right", no_wrap=True)
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
            row.append(times_faster(ratio, 0.0 if peer in own else BAR))
        table.add_row(*row)
    columns = (ratios.get(peer) for peer in (*peers, *own))
    means = (f"{statistics.geometric_mean(r):.3f}" if r else "-" for r in columns)
    table.add_row("geometric mean", "", "", "", *means, style="bold")
    return table
