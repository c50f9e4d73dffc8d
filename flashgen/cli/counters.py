"""`flashgen counters`: the predicted traffic beside what the GPU's counters saw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from flashgen.cli import options
from flashgen.cli.console import err, tabulate
from flashgen.errors import LaunchError, PlanError


def command(
    pipeline: Annotated[str, typer.Argument(help="ampere or hopper: whose kernels are counted.")],
    cells: Annotated[str, typer.Option(help="Only cells whose name contains this, e.g. 'd128 causal'.")] = "",
    backward: Annotated[bool, typer.Option("--backward", help="The kernels of the backward.")] = False,
    folder: Annotated[Path, typer.Option(help="Where raw results go.", callback=options.results)] = Path(
        "generated/bench"
    ),
) -> None:
    """Count the bytes that kernels move on this GPU (with Nsight Compute's ncu) beside the predicted ones."""
    import torch

    from flashgen.bench import counters, record
    from flashgen.bench.cells import FORWARD

    if pipeline not in FORWARD:
        raise PlanError(f"there is no pipeline {pipeline!r}\n  nearest: {', '.join(FORWARD)}")
    chosen = [cell for cell in counters.CELLS if cells in str(cell)]
    if not chosen:
        raise PlanError(f"no cell's name contains {cells!r}\n  cells: {', '.join(map(str, counters.CELLS))}")
    if not torch.cuda.is_available():
        raise LaunchError("counters are a GPU's, and there is none that PyTorch can use")
    with err.status("profiling"):
        counted = counters.count(chosen, pipeline, backward=backward)
    tabulate(_table(counted))
    done = "backward" if backward else "forward"
    path = folder / f"counters_{done}_{pipeline}.json"
    asked = [f"flashgen counters {pipeline}", *(["--backward"] if backward else [])]
    record.write(
        path,
        command=" ".join([*asked, *([f"--cells '{cells}'"] if cells else [])]),
        protocol={"caches": "cold", "read_ratio": "bytes SMs read from L2 / predicted hbm.read_bytes"},
        cells=[one.as_json() for one in counted],
    )
    err.print(f"wrote {path}", markup=False)


def _table(counted: list) -> Table:
    table = Table(title="MB between SMs and L2, predicted and counted; compulsory, and read from DRAM")
    table.add_column("cell", no_wrap=True)
    table.add_column("tile", no_wrap=True)
    for name in ("read", "counted", "ratio", "written", "counted", "ratio", "compulsory", "DRAM read"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in counted:
        numbers = (
            *(one.predicted.read_bytes, one.l2.read_bytes, one.read_ratio),
            *(one.predicted.write_bytes, one.l2.write_bytes, one.write_ratio),
            *(one.compulsory.read_bytes, one.dram.read_bytes),
        )
        cells = (f"{x:.4f}" if isinstance(x, float) else f"{x / 1e6:,.1f}" for x in numbers)
        table.add_row(str(one.cell), one.tile, *cells)
    return table
