"""`flashgen report`: what the records of the benchmarks say, as a table and as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from flashgen.cli.console import err, out
from flashgen.cli.suite import SUITES
from flashgen.errors import FlashgenError


def command(
    folder: Annotated[Path, typer.Argument(help="Where flashgen bench wrote.")] = Path("generated/bench"),
    draw: Annotated[bool, typer.Option("--draw", help="Curves over the seqlen, as SVG beside the records.")] = False,
) -> None:
    """Print how many times faster than its peers flashgen was measured; `--draw` makes the pictures."""
    from flashgen.bench import report

    records = list(report.read(folder))
    suites = any(path for name in SUITES for path in folder.glob(f"{name}*.json"))
    if not records and not suites:
        raise FlashgenError(f"{folder} has no record of flashgen bench\n  nearest: flashgen bench hopper, on a GPU")
    if records:
        out.print(Markdown(report.markdown(records)))
    if any(folder.glob("data*.json")):
        out.print(Markdown(report.on_data(folder)))
    if suites:
        out.print(Markdown(report.of_suites(folder, SUITES)))
    for record in records if draw else ():
        path = folder / f"{record.stem}.svg"
        report.draw(record, path)
        err.print(f"wrote {path}", markup=False)
