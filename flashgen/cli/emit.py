"""`flashgen emit`: the CUDA of a plan, as text."""

from __future__ import annotations

import typer

from flashgen.cli import options
from flashgen.cli.console import err, out, write, write_json
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import resolve


@options.shared
def command(
    spec: Spec,
    request: Request,
    which: Pass,
    output: options.output("Write to this file instead.") = None,
    as_json: options.as_json("kernel (as of flashgen compile), cuda") = False,
) -> None:
    """Emit a kernel: one self-contained CUDA file on stdout."""
    from flashgen.codegen import emit

    with err.status("emitting"):
        resolved = resolve(spec, request, which, data=False)
        text = emit(resolved.plan, resolved.facts)
    if output is not None:
        write(output, text)
    if as_json:
        write_json({"kernel": options.described(resolved.plan), "cuda": text})
    elif output is not None:
        return
    elif out.is_terminal:
        from rich.syntax import Syntax

        out.print(Syntax(text, "cuda", background_color="default"))
    else:
        typer.echo(text, nl=False)
