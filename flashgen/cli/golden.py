"""`flashgen golden`: the emitted CUDA of every shipped spec, kept in `generated/` so that a change to it is seen."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.console import err, out


def command(
    check: Annotated[bool, typer.Option("--check", help="Compare and write nothing; exit 1 on a difference.")] = False,
    root: Annotated[Path, typer.Option(help="The folder that holds `generated`.")] = Path(),
) -> None:
    """Refresh the golden CUDA of the shipped specs."""
    from flashgen.codegen.golden import goldens, refresh

    if not check:
        changed = refresh(root)
        for path in changed:
            err.print(f"wrote {path}")
        if not changed:
            err.print("the golden CUDA is what is emitted now")
        return
    differing = 0
    for golden in goldens():
        path = root / golden.path
        old = path.read_text() if path.exists() else ""
        if old != golden.text:
            differing += 1
            names = str(golden.path), "emitted now"
            lines = difflib.unified_diff(old.splitlines(), golden.text.splitlines(), *names, lineterm="")
            out.print("\n".join(lines), markup=False)
    if differing:
        err.print(f"{differing} of the golden files differ; refresh them with: flashgen golden")
        raise typer.Exit(1)
    err.print("the golden CUDA is what is emitted now")
