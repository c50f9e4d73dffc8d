"""The typer application: the verbs in the order in which a person meets them."""

from __future__ import annotations

import typer

from flashgen.cli import bench, build, cold, compile, counters, emit, golden, plan, report, run, show, simulate, tune

app = typer.Typer(
    name="flashgen",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Describe an attention variant in a few lines of Python; get its plan, its CUDA, and a checked result.\n\n"
        "A spec is a Python file and runs with your rights: read a spec that is not yours before you use it."
    ),
)
for verb in (plan, show, emit, compile, build, run, simulate, bench, cold, counters, report, tune, golden):
    app.command(name=verb.__name__.rsplit(".", 1)[-1])(verb.command)
