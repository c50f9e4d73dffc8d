"""`flashgen plan`: the kernel that a problem gets, why it fits, and what it is predicted to cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashgen.cli import options
from flashgen.cli.console import out
from flashgen.cli.options import Request, Resolved, Spec
from flashgen.errors import PlanError

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
    backward: Annotated[
        bool, typer.Option("--backward", help="The kernels of the gradients too, and which pass runs where.")
    ] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Kernels that drop probabilities.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: gradients whose reruns give the same bits.")
    ] = False,
    gradient: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --backward: the gradient of a captured tensor too (repeatable)."),
    ] = None,
) -> None:
    """Plan a kernel: tile, sums of shared memory and registers, predicted HBM traffic and time."""
    for option, given in (("--deterministic", deterministic), ("--gradient", gradient)):
        if given and not backward:
            raise PlanError(f"{option} is of the backward\n  nearest: {option} with --backward")
    resolved = options.resolve(spec, request, dropout=dropout)
    prediction = resolved.predict()
    back = _backward(resolved, dropout, deterministic, gradient or ()) if backward else None
    if as_json:
        found = prediction.as_json(formulas=formulas)
        typer.echo(json.dumps(found | ({"backward": back.as_json()} if back else {}), indent=2))
        return
    out.print(Text(str(resolved), style="bold"))
    if back is not None:
        out.print()
        out.print(rendered(_passes(prediction, back)))
    for shown in filter(None, (prediction, back)):
        if back is not None:
            out.print(f"\n[bold]{shown.plan.pass_name}[/]")
        for table in shown.tables():
            out.print()
            out.print(rendered(table, _SHOWN if table.title == "rejected" and not every else None))
    if formulas:
        found = prediction.as_json(formulas=True)["formula"]
        out.print("\n[italic]formulas of the forward[/]" if found else "\nno formulas: the mask is no single band")
        for name, text in (found or {}).items():
            out.print(Text(f"{name} = {text}"))


def _backward(resolved: Resolved, dropout: bool, deterministic: bool, gradients: Sequence[str]) -> traffic.Prediction:
    """The plan of the gradients of the same problem, and its cost."""
    from flashgen.ops.stages import menu_of, multiprocessors
    from flashgen.planning import planner, traffic

    problem = resolved.problem
    menu = menu_of(
        *(resolved.variant, resolved.plan.arch, problem.dtype, problem.head_dim, problem.v_head_dim),
        backward=True,
        dropout=dropout,
        deterministic=deterministic,
        gradients=gradients,
    )
    chosen = planner.choose(menu, problem, multiprocessors(resolved.plan.arch))
    return traffic.predict(chosen, problem, resolved.case, rejected=menu.rejected, record=menu.record)


def _passes(*predictions: traffic.Prediction) -> traffic.Table:
    """Which pass runs where."""
    from flashgen.planning.traffic import Table

    rows = [
        (p.plan.pass_name, p.plan.pipeline, p.plan.arch, str(p.plan.tile), f"{p.predicted_ms:.4g}") for p in predictions
    ]
    return Table(title="passes", columns=("", "pipeline", "arch", "tile", "predicted ms"), rows=tuple(rows))


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
