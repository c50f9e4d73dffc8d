"""What every benchmark's command begins and ends with: which cells, on which GPU, and what is said when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from flashgen.cli.console import err, write_json
from flashgen.errors import LaunchError, PlanError

T = TypeVar("T")


def matching(cells: Sequence[T], text: str) -> list[T]:
    """Those whose name contains a text.  Raises PlanError where there is none."""
    if chosen := [cell for cell in cells if text in str(cell)]:
        return chosen
    raise PlanError(f"no cell's name contains {text!r}\n  cells: {', '.join(map(str, cells))}")


def need_gpu() -> None:
    """Raise LaunchError where PyTorch has no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise LaunchError("a benchmark needs a GPU that PyTorch can use, and there is none")


def conclude(
    path: Path, cells: Sequence[object], wrong: Iterable[str], notes: Iterable[str], as_json: bool, **more: object
) -> None:
    """Say what is wrong and worth a note, where the record is, and what it holds as JSON; exit 1 where anything is
    wrong."""
    wrong = list(wrong)
    for line in (*wrong, *notes):
        err.print(line, markup=False)
    err.print(f"wrote {path}", markup=False)
    if as_json:
        write_json({"path": str(path), "cells": list(cells), **more})
    if wrong:
        raise typer.Exit(1)
