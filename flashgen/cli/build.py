"""`flashgen build`: compile a spec ahead of its first call, for every dtype, head dim and architecture asked for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flashgen.cli import options
from flashgen.cli.console import err, out, progress, seconds, size
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.cache import Entry


def command(
    specs: Annotated[
        list[str], typer.Argument(metavar="SPEC...", help="Spec files (Python: they run with your rights), folders of "
                                  "them, or names of shipped ones.", show_default=False)
    ],
    dtypes: Annotated[str | None, typer.Option(help="Comma-separated. [dim]default: the spec's[/]")] = None,
    head_dims: Annotated[str | None, typer.Option(help="Comma-separated. [dim]default: the spec's[/]")] = None,
    archs: Annotated[
        str | None, typer.Option(help="Comma-separated. [dim]default: the GPU's, or the spec's[/]")
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Kernel family. [dim]default: the best of each arch[/]")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A constant of the spec.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilations at once. [dim]default: one a CPU core[/]")
    ] = None,
) -> None:  # fmt: skip
    """Compile ahead into the disk cache: dtypes x head dims x architectures, in a thread pool."""
    plans = [
        plan
        for path in options.spec_files(specs)
        for plan in _plans(path, dtypes, head_dims, archs, pipeline, param)
    ]
    start = time.perf_counter()
    table = Table("kernel", "tile", "registers", "spills", "cubin", "", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for plan, entry in compiled(plans, jobs):
        table.add_row(
            f"{plan.variant.name} {plan.arch} {plan.dtype} {plan.head_dim}",
            f"{plan.tile.q} x {plan.tile.kv}",
            str(entry.resources.registers),
            size(entry.resources.spills),
            size(len(entry.cubin)),
            "cached" if entry.hit else "compiled",
        )
    out.print(table)
    err.print(f"{len(plans)} kernels in {seconds(time.perf_counter() - start)}")


def compiled(plans: Iterable[KernelPlan], jobs: int | None = None) -> list[tuple[KernelPlan, Entry]]:
    """Every plan with its cubin, in the order given; threads compile side by side, as NVRTC releases the GIL."""
    from flashgen.runtime.kernel import build

    plans = tuple(dict.fromkeys(plans))
    with ThreadPoolExecutor(jobs) as pool, progress() as bar:
        task = bar.add_task("compiling", total=len(plans))
        futures = [pool.submit(build, plan) for plan in plans]
        try:
            for future in as_completed(futures):
                future.result()
                bar.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [(plan, future.result()) for plan, future in zip(plans, futures, strict=True)]


def _plans(
    path: Path,
    dtypes: str | None,
    head_dims: str | None,
    archs: str | None,
    pipeline: str | None,
    param: list[str] | None,
) -> Iterator[KernelPlan]:
    from flashgen.lang.load import load_spec
    from flashgen.ops.stages import default_arch
    from flashgen.planning.planner import menu

    variant = options.folded(load_spec(path), param or ())
    for arch in _list(archs) or (default_arch(variant),):
        for dtype in _list(dtypes) or variant.dtypes:
            for head_dim in _numbers(head_dims) or variant.head_dims:
                yield from menu(variant, arch, dtype, head_dim, head_dim, pipeline=pipeline).plans


def _list(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in (text or "").split(","))))


def _numbers(text: str | None) -> tuple[int, ...]:
    words = _list(text)
    if wrong := [word for word in words if not word.isdigit()]:
        raise PlanError(f"--head-dims {text!r}: {wrong[0]!r} is not a number\n  nearest: --head-dims 64,128")
    return tuple(map(int, words))
