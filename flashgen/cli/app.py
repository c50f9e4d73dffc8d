"""The typer application: the verbs in the order in which a person meets them."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

import flashgen
from flashgen.cli import bench, build, cold, compile, counters, emit, golden, plan, report, run, show, simulate, tune
from flashgen.errors import CompileError
from flashgen.runtime import nvrtc

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


def _version(asked: bool) -> None:
    """The versions that a report of a fault needs, on one line."""
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    try:
        compiler = f"NVRTC {nvrtc.version()}"
    except CompileError:
        compiler = "no NVRTC"
    parts = f"Python {platform.python_version()}", installed("torch"), compiler, installed("cuda-bindings")
    typer.echo(f"flashgen {flashgen.__version__} ({', '.join(parts)})")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Versions of flashgen and of what it stands on."
        ),
    ] = False,
) -> None:
    """What stands before a verb."""


for verb in (plan, show, emit, compile, build, run, simulate, bench, cold, counters, report, tune, golden):
    app.command(name=verb.__name__.rsplit(".", 1)[-1])(verb.command)
