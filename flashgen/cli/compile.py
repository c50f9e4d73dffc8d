"""`flashgen compile`: a plan to a cubin, with what ptxas made of it and how long each step takes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashgen.cli import options
from flashgen.cli.console import err, seconds, size, tabulate, write, write_json
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import resolve

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.cache import Entry


@options.shared
def command(
    spec: Spec,
    request: Request,
    which: Pass,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compile even where the disk cache has the kernel.")] = False,
    output: options.output("Also write the cubin to this file.") = None,
    as_json: options.as_json(
        "kernel (variant, pass, pipeline, arch, dtype, head_dim, v_head_dim, tile, stages, threads, smem_bytes),"
        " resources (registers, spill_stores, spill_loads, stack_bytes, smem_static), cubin_bytes, cached, seconds"
        " (imports, context, emit, nvrtc, hit; null: there is none)"
    ) = False,
) -> None:
    """Compile a kernel to a cubin: registers, spills, shared memory, size, and the time of each step."""
    imports, context = _prepare()
    with err.status("compiling"), _cache(fresh):
        resolved = resolve(spec, request, which, data=False)
        first, built = _build(resolved.plan)
        again, found = _build(resolved.plan)
    plan, r, steps = resolved.plan, first.resources, first.about["seconds"]
    hit = (built if first.hit else found) if again.hit else None
    if output is not None:
        write(output, first.cubin)
    if as_json:
        write_json(
            {
                "kernel": options.described(plan),
                "resources": dataclasses.asdict(r),
                "cubin_bytes": len(first.cubin),
                "cached": first.hit,
                "seconds": {"imports": imports, "context": context, **steps, "hit": hit},
            }
        )
        return
    table = Table(title=escape(str(resolved)), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row(
        "kernel",
        f"{plan.pipeline} {plan.pass_name}, {plan.arch}, tile {plan.tile.q} x {plan.tile.kv},"
        f" {plan.stages} stages, {plan.threads} threads",
    )
    table.add_row("registers", f"{r.registers} per thread (the plan estimates {plan.registers_estimate})")
    table.add_row("spills", f"{r.spill_stores} bytes stored, {r.spill_loads} loaded, stack {r.stack_bytes}")
    table.add_row("shared memory", f"{size(plan.smem_bytes)} dynamic, {size(r.smem_static)} static")
    table.add_row("cubin", size(len(first.cubin)))
    table.add_row("imports", seconds(imports))
    table.add_row("context creation", "none: no GPU" if context is None else seconds(context))
    cold = seconds(steps["emit"] + steps["nvrtc"])
    parts = f"emit {seconds(steps['emit'])}, NVRTC {seconds(steps['nvrtc'])}"
    table.add_row("emit + compile", f"{cold} ({parts})" + (", when it was compiled" if first.hit else ""))
    table.add_row("index hit", "none: there is no cache that can be written" if hit is None else seconds(hit))
    tabulate(table)


def _prepare() -> tuple[float, float | None]:
    """Seconds that the imports and the loading of NVRTC take, and that a GPU's context takes (None: no GPU)."""
    start = time.perf_counter()
    from flashgen import codegen, planning  # noqa: F401
    from flashgen.runtime import driver, kernel, libnvrtc  # noqa: F401

    libnvrtc.library()
    if not driver.gpus():
        return time.perf_counter() - start, None
    import torch

    imports, start = time.perf_counter() - start, time.perf_counter()
    torch.cuda.init()
    torch.cuda.synchronize()
    return imports, time.perf_counter() - start


def _build(plan: KernelPlan) -> tuple[Entry, float]:
    from flashgen.runtime.kernel import build

    start = time.perf_counter()
    entry = build(plan)
    return entry, time.perf_counter() - start


@contextmanager
def _cache(fresh: bool) -> Iterator[None]:
    """The user's cache, or an empty one for as long as this lasts."""
    if not fresh:
        yield
        return
    before = os.environ.get("FLASHGEN_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLASHGEN_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["FLASHGEN_CACHE_DIR"]
            if before is not None:
                os.environ["FLASHGEN_CACHE_DIR"] = before
