"""`flashgen emit`: the CUDA of a plan, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli import options
from flashgen.cli.console import err, out, write
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import resolve


@options.shared
def command(
    spec: Spec,
    request: Request,
    which: Pass,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
) -> None:
    """Emit a kernel: one self-contained CUDA file on stdout."""
    from flashgen.codegen import emit

    with err.status("emitting"):
        resolved = resolve(spec, request, which, data=False)
        text = emit(resolved.plan, resolved.facts)
    if output is not None:
        write(output, text)
    elif out.is_terminal:
        from rich.syntax import Syntax

        out.print(Syntax(text, "cuda", background_color="default"))
    else:
        typer.echo(text, nl=False)
