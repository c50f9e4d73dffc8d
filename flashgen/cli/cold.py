"""`flashgen cold`: from a spec file to the first result in fresh processes, measured and recorded."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashgen.cli import options
from flashgen.cli.console import err, progress, seconds, tabulate
from flashgen.errors import LaunchError

#: Fewer processes of a kind say nothing about their spread.
MIN_ROUNDS = 3


def command(
    specs: Annotated[list[str], typer.Argument(help="Spec files, or names of shipped specs.", metavar="SPEC...")],
    seqlen: Annotated[int, typer.Option(help="Queries and keys.")] = 4096,
    heads: Annotated[int, typer.Option(help="Query and key heads.")] = 16,
    head_dim: Annotated[int, typer.Option(help="Columns of q, k and v.")] = 128,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=MIN_ROUNDS, help="Processes with each cache.")] = 5,
    folder: Annotated[Path, typer.Option(help="Where raw results go.", callback=options.results)] = Path(
        "generated/bench"
    ),
) -> None:
    """Time from a spec file to its first result on this GPU, in fresh processes, with an empty cache and a warm one."""
    import torch

    from flashgen.bench import record
    from flashgen.bench.cold import CACHES, bytecode, starts
    from flashgen.lang.load import load_spec
    from flashgen.planning.problem import Problem

    for spec in specs:
        load_spec(spec)
    if not torch.cuda.is_available():
        raise LaunchError("a cold start is measured on a GPU that PyTorch can use, and there is none")
    problem = Problem(
        batch=1,
        heads=heads,
        kv_heads=heads,
        q_len=seqlen,
        kv_len=seqlen,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
    )
    compiled = bytecode()
    found = []
    with progress() as bar:
        task = bar.add_task("starting", total=rounds * len(specs) * len(CACHES))
        for start in starts(specs, problem, rounds=rounds):
            found.append(start)
            bar.update(task, advance=1, description=start.spec)
    table = Table(title="from the spec file to the first result: median \\[low, high]")
    for column in ("spec", "cache", "first result", "PyTorch's own first tensors, before that"):
        table.add_column(column)
    rows = []
    for spec in dict.fromkeys(specs):
        for cache in CACHES:
            here = [start for start in found if (start.spec, start.cache) == (spec, cache)]
            result, inputs = ([getattr(start, name) for start in here] for name in ("result", "inputs"))
            table.add_row(Text(spec), cache, _spread(result), _spread(inputs))
            rows.append({"spec": spec, "cache": cache, "result": _rounded(result), "inputs": _rounded(inputs)})
    tabulate(table)
    path = folder / "cold.json"
    asked = f"--seqlen {seqlen} --heads {heads} --head-dim {head_dim} --dtype {dtype} --rounds {rounds}"
    record.write(
        path,
        command=f"flashgen cold {' '.join(specs)} {asked}",
        protocol={
            "processes": rounds,
            "bytecode": "compiled beforehand, as pip leaves it" if compiled else "compiled by each process",
            "from": "after `import torch, flashgen`, torch.cuda.init() and the creation of q, k and v, which `inputs`"
            " gives: PyTorch's context and its first kernels",
            "to": "o is written",
            "unit": "seconds",
        },
        cells=rows,
    )
    err.print(f"wrote {path}", markup=False)


def _spread(values: list[float]) -> str:
    return f"{seconds(statistics.median(values))} \\[{seconds(min(values))}, {seconds(max(values))}]"


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
