"""`flashgen bench`: kernels, harder data, the host's part, or a suite beside peers, checked and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.bench.protocol import MIN_ROUNDS
from flashgen.cli import options, suite
from flashgen.errors import PlanError

#: A bar of 1.00 holds at this much of it: what two runs of one kernel differ by.
BAR = 0.99

#: What is no pipeline: the host's part of a call, of a plan, of an import.
HOST = "host"

#: The other one: both passes on inputs as trained models have them.
DATA = "data"


#: Those whose kernels are measured.
PIPELINES = ("ampere", "hopper")

#: Options that not every benchmark takes, and those that do.
OF_SOME = {
    "--backward": (*PIPELINES, DATA, *suite.SUITES),
    "--peer-file": (*PIPELINES, DATA, *suite.SUITES),
    "--inputs": (DATA,),
    "--draws": (DATA,),
    "--seqlen": (DATA,),
    "--pipeline": (DATA,),
    "--dropout": PIPELINES,
    "--against": PIPELINES,
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
    dropout: Annotated[
        float, typer.Option(min=0, max=0.99, help="ampere, hopper: the chance of dropping a probability.")
    ] = 0.0,
    against: Annotated[
        Path | None,
        typer.Option(help="ampere, hopper: another checkout, whose kernels are timed in the same rounds."),
    ] = None,
    part: Annotated[str, typer.Option(help="A suite's parts, e.g. decode,pages; commas between.")] = "",
    budget: Annotated[
        float | None,
        typer.Option(
            min=1, help="A suite: begin no row, peer or round after so many seconds; the record says what was left."
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where raw results go.", callback=options.results)] = Path(
        "generated/bench"
    ),
    seed: options.Seed = 0,
    as_json: options.as_json("path, cells (as the record holds them)") = False,
) -> None:
    """Time kernels, calls or the host's part of both beside their peers on this GPU; exit 1 where a result is wrong."""
    from flashgen.bench.peers import SDPA
    from flashgen.cli import data, host, kernels

    if pipeline not in (known := (*PIPELINES, HOST, DATA, *suite.SUITES)):
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
    asked |= {"--dropout": dropout, "--against": against}
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
    kernels.measure(pipeline, **common, backward=backward, dropout=dropout, against=against, peer_files=given, bar=BAR)
