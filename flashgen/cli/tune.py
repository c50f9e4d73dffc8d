"""`flashgen tune`: the candidates measured on this GPU, as a record that the planner reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flashgen.bench.protocol import MIN_ROUNDS
from flashgen.cli import options
from flashgen.cli.console import err, out, progress, write_json
from flashgen.errors import LaunchError, PlanError


@options.shared
def command(
    specs: Annotated[list[str], typer.Argument(help="Spec files, or names of shipped specs.", metavar="SPEC...")],
    arch: Annotated[str | None, typer.Option(help="Architecture of the GPU; it is that of the GPU present.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="Pipeline, else the best of the architecture.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Columns of q and k; may be repeated.  Else those the spec declares.")
    ] = None,
    v_head_dim: Annotated[int | None, typer.Option(help="Columns of v and o, else head_dim.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16; a record serves both.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=MIN_ROUNDS, help="Rounds; each times every candidate once.")] = MIN_ROUNDS,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the record goes, else $FLASHGEN_RECORDS, else ./records.", callback=options.results),
    ] = None,
    as_json: options.as_json("path, entries (as the record holds them)") = False,
) -> None:
    """Measure the candidates that fit on this GPU and write the record that the planner then orders them by."""
    import torch

    from flashgen.bench import tune
    from flashgen.lang.load import load_spec
    from flashgen.planning import arch as archs
    from flashgen.planning import records
    from flashgen.planning.problem import check_dtype

    for name, value in [("--head-dim", d) for d in head_dim or ()] + [("--v-head-dim", v_head_dim)]:
        if value is not None and value <= 0:
            raise PlanError(f"{name} is {value}: it must be positive\n  nearest: {name} 64")
    check_dtype(dtype)
    if arch is not None:
        archs.find(arch)
    if not torch.cuda.is_available():
        raise LaunchError("tuning needs a GPU that PyTorch can use, and there is none")
    present = archs.of_device(*torch.cuda.get_device_capability())
    if arch is not None and archs.find(arch) is not present:
        raise PlanError(
            f"the GPU here is {present.name}, and a record of {arch} is measured on one\n  nearest: {present.name}"
        )
    name = archs.pipeline(present, pipeline)
    folder = folder or Path(os.environ.get(records.VARIABLE) or "records")
    tune.place(folder, present.name, name)  # before the minutes of measuring
    entries = []
    with progress() as bar:
        task = bar.add_task("tuning")
        for spec in specs:
            variant = load_spec(spec).bind()
            for d in head_dim or sorted(variant.head_dims):
                what = f"{variant.name} d{d}"

                def advance(step: str, done: int, total: int, what: str = what) -> None:
                    bar.update(task, description=f"{what}: {step}", completed=done, total=total)

                entry = tune.tune(
                    variant,
                    present.name,
                    name,
                    dtype,
                    d,
                    d if v_head_dim is None else v_head_dim,
                    rounds=rounds,
                    advance=advance,
                )
                entries.append(entry)
                path = tune.write(folder, present.name, name, entry)  # what is measured stays, whatever comes next
    if as_json:
        write_json({"path": str(path), "entries": entries})
        return
    for entry in entries:
        out.print(f"{entry['spec']}, {records.Key(**entry['class'])}", markup=False)
        for c in entry["candidates"]:
            fields = ", ".join(f"{k} {v}" for k, v in c["form"].items() if k != "tile")
            tile, ms = c["form"]["tile"], "  ".join(f"{x:.3f}" for x in c["ms"])
            out.print(f"  {tile['q']}x{tile['kv']}, {fields}, {c['blocks_per_sm']} blocks: {ms} ms", markup=False)
    err.print(f"wrote {path}; the planner reads it where {records.VARIABLE} names its folder", markup=False)
