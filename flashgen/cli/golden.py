"""`flashgen golden`: the emitted CUDA of every shipped spec, kept in `generated/` so that a change to it is seen."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.console import err, out
from flashgen.errors import PlanError


def command(
    check: Annotated[bool, typer.Option("--check", help="Compare and write nothing; exit 1 on a difference.")] = False,
    folder: Annotated[Path, typer.Option(help="The folder that holds them.")] = Path("generated"),
) -> None:
    """Refresh the golden CUDA of the shipped specs."""
    from flashgen.codegen.golden import refresh, stale

    if not check:
        with err.status("emitting"):
            changed = refresh(folder)
        for path in changed:
            err.print(f"{'wrote' if path.exists() else 'removed'} {path}", markup=False)
    elif not folder.is_dir():
        raise PlanError(
            f"there is no folder {folder} here to compare with\n"
            "  nearest: a checkout of flashgen, or --folder with one that `flashgen golden --folder` wrote"
        )
    else:
        with err.status("emitting"):
            changed = stale(folder)
        for path, text in changed.items():
            old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            sides = (old.splitlines(), (text or "").splitlines())
            lines = difflib.unified_diff(*sides, str(path), "emitted now", lineterm="")
            out.print("\n".join(lines), markup=False)
    if not changed:
        err.print("the golden CUDA is what is emitted now")
    elif check:
        err.print(f"{len(changed)} of the golden files differ; refresh them with: flashgen golden")
        raise typer.Exit(1)
