"""`flashgen golden`: the emitted CUDA of every shipped spec, kept in `generated/` so that a change to it is seen."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli import options
from flashgen.cli.console import err, out, write

#: The architectures whose kernels are kept.
ARCHS = ("sm_80",)


def command(
    check: Annotated[bool, typer.Option("--check", help="Compare and write nothing; exit 1 on a difference.")] = False,
    folder: Annotated[Path, typer.Option(help="The folder that holds them.")] = Path("generated"),
) -> None:
    """Refresh the golden CUDA of the shipped specs."""
    differing = []
    for name, text in goldens():
        path = folder / name
        old = path.read_text() if path.exists() else ""
        if old == text:
            continue
        differing.append(path)
        if check:
            lines = difflib.unified_diff(old.splitlines(), text.splitlines(), str(path), "emitted now", lineterm="")
            out.print("\n".join(lines), markup=False)
        else:
            write(path, text)
    if not differing:
        err.print("the golden CUDA is what is emitted now")
    elif check:
        err.print(f"{len(differing)} of the golden files differ; refresh them with: flashgen golden")
        raise typer.Exit(1)


def goldens() -> Iterator[tuple[Path, str]]:
    """(path in the folder, text) of every shipped spec and architecture: bfloat16, head_dim 128 or the spec's largest.

    The text depends on no length, so none is chosen: it is the menu's first plan, the one for long sequences.
    """
    from flashgen.codegen import emit
    from flashgen.lang.load import load_spec, shipped
    from flashgen.planning.planner import menu

    for name, path in shipped().items():
        variant = load_spec(path).bind()
        for arch in ARCHS:
            dtype, head_dim = options.default_dtype(variant), options.default_head_dim(variant)
            plan = menu(variant, arch, dtype, head_dim, head_dim).plans[0]
            yield Path(arch) / f"{name}_{plan.pass_name}.cu", emit(plan)
