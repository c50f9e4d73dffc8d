"""`flashgen plan`: the kernel that a problem gets, why it fits, and what it is predicted to cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashgen.cli import options
from flashgen.cli.console import out
from flashgen.cli.options import Request, Spec

if TYPE_CHECKING:
    from flashgen.planning import traffic

#: Rejected candidates that are shown unless --all asks for the rest.
_SHOWN = 8


@options.shared
def command(
    spec: Spec,
    request: Request,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: bytes, counts and milliseconds.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every rejected candidate.")] = False,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Traffic and FLOPs as formulas too, for full, causal and banded masks.")
    ] = False,
) -> None:
    """Plan a kernel: tile, sums of shared memory and registers, predicted HBM traffic and time."""
    resolved = options.resolve(spec, request)
    prediction = resolved.predict()
    if as_json:
        typer.echo(json.dumps(prediction.as_json(formulas=formulas), indent=2))
        return
    out.print(Text(str(resolved), style="bold"))
    for table in prediction.tables():
        out.print()
        out.print(rendered(table, _SHOWN if table.title == "rejected" and not every else None))
    if formulas:
        found = prediction.as_json(formulas=True)["formula"]
        out.print("\n[italic]formulas[/]" if found else "\nno formulas: the mask is no single band")
        for name, text in (found or {}).items():
            out.print(Text(f"{name} = {text}"))


def rendered(table: traffic.Table, most: int | None = None) -> Table:
    """A table of the plan as one of the terminal, of at most `most` rows; numbers to the right."""
    named = any(table.columns)
    shown = Table(title=table.title, title_justify="left", show_header=named, box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(table.columns):
        numbers = named and i > 0 and all(row[i][:1].isdigit() or not row[i] for row in table.rows)
        shown.add_column(name, justify="right" if numbers else "left", no_wrap=i == 0)
    for row in table.rows[:most]:
        shown.add_row(*map(Text, row))
    if most is not None and len(table.rows) > most:
        shown.caption, shown.caption_justify = f"and {len(table.rows) - most} more (--all)", "left"
    return shown
