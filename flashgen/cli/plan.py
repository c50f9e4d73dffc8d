"""`flashgen plan`: the kernel that a problem gets, why it fits, and what it is predicted to cost."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashgen.cli import masks, options
from flashgen.cli.console import err, out, tabulate, write_json
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import Lengths, Resolved, resolve
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.planning import tables
    from flashgen.planning.prediction import Prediction

#: Rejected candidates that are shown unless --all asks for the rest.
_SHOWN = 8


@options.shared
def command(
    spec: Spec,
    request: Request,
    which: Pass,
    kv_splits: options.Splits = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: bytes, counts and milliseconds.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every rejected candidate.")] = False,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Traffic and FLOPs as formulas too, for full, causal and banded masks.")
    ] = False,
    q_lengths: Annotated[
        str | None, typer.Option(metavar="N,N", help="With --layout: queries of each sequence, commas between them.")
    ] = None,
    kv_lengths: Annotated[
        str | None, typer.Option(metavar="N,N", help="With --layout: keys of each sequence, commas between them.")
    ] = None,
    q_offset: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="With --layout: the first query's position, or end: the last beside the last key."
        ),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(metavar="N", help="With --layout paged: rows of a page. [dim]default: 16[/]")
    ] = None,
) -> None:
    """Plan a kernel: tile, sums of shared memory and registers, predicted HBM traffic and time."""
    with err.status("planning"):
        lengths = _lengths(which, q_lengths, kv_lengths, q_offset, page_size)
        asked = resolve(spec, request, which, kv_splits=kv_splits, lengths=lengths)
        resolved = _forward(asked, request, which) if which.backward else asked
        prediction = resolved.predict()
        back = asked.predict() if which.backward else None
    advice = _hint(resolved, prediction)
    if as_json:
        found = prediction.as_json(formulas=formulas)
        found |= {"decided": masks.decided(resolved.variant), "hint": advice}
        write_json(found | ({"backward": back.as_json()} if back else {}))
        return
    out.print(Text(str(resolved), style="bold"))
    if back is not None:
        out.print()
        tabulate(rendered(_passes(prediction, back)))
    for shown in filter(None, (prediction, back)):
        if back is not None:
            out.print(f"\n[bold]{shown.plan.pass_name}[/]")
        for table in shown.tables():
            out.print()
            tabulate(rendered(table, _SHOWN if table.title == "rejected" and not every else None))
    if lines := masks.told(resolved.variant):
        out.print("\n[italic]how the mask is decided[/]")
        for line in lines:
            out.print(Text(line))
    if advice is not None:
        out.print(Text(advice))
    if formulas:
        found = prediction.as_json(formulas=True)["formula"]
        out.print("\n[italic]formulas of the forward[/]" if found else "\nno formulas: the mask is no single band")
        for name, text in (found or {}).items():
            out.print(Text(f"{name} = {text}"))


def _lengths(which: Pass, q: str | None, kv: str | None, q_offset: str | None, page_size: int | None) -> Lengths | None:
    """Those of sequences in a layout that has them; PlanError for lengths without one."""
    if which.layout != "dense":
        return Lengths(q=q, kv=kv, q_offset="0" if q_offset is None else q_offset, page_size=page_size)
    if page_size is not None:
        raise PlanError("--page-size is of keys that lie in pages\n  nearest: --page-size with --layout paged")
    for name, given in (("--q-lengths", q), ("--kv-lengths", kv), ("--q-offset", q_offset)):
        if given is not None:
            raise PlanError(f"{name} is of sequences with lengths of their own\n  nearest: {name} with --layout padded")
    return None


def _hint(resolved: Resolved, prediction: Prediction) -> str | None:
    """The one change that would settle more tiles, where what is lost was counted."""
    from flashgen.analysis import ways

    loss = prediction.tiles.loss
    return None if loss is None else ways.cure(resolved.variant, resolved.case, resolved.plan.tile, loss)


def _forward(backward: Resolved, request: Request, which: Pass) -> Resolved:
    """The forward of the problem of a backward: that of a call, whose tile and stages nobody fixed."""
    values = [f"{name}={value!r}" for name, value in backward.case.params.items()]  # constants are bound already
    free = dataclasses.replace(request, tile=None, stages=None, param=values)
    forward = resolve(backward.variant, free, Pass(dropout=which.dropout), data=False)
    return dataclasses.replace(forward, case=backward.case)


def _passes(*predictions: Prediction) -> tables.Table:
    """Which pass runs where."""
    from flashgen.planning.tables import Table

    rows = [
        (p.plan.pass_name, p.plan.pipeline, p.plan.arch, str(p.plan.tile), f"{p.predicted_ms:.4g}") for p in predictions
    ]
    return Table(title="passes", columns=("", "pipeline", "arch", "tile", "predicted ms"), rows=tuple(rows))


def rendered(table: tables.Table, most: int | None = None) -> Table:
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
