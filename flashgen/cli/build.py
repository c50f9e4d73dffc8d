"""`flashgen build`: compile a spec ahead of its first call, for every dtype, head dim and architecture asked for."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashgen.cli import options
from flashgen.cli.console import complain, err, progress, seconds, size, tabulate, write_json
from flashgen.cli.options import Pass
from flashgen.cli.resolve import folded
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.cache import Entry


@options.shared
def command(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC...",
            help="Spec files (Python: they run with your rights), folders of them, or names of shipped ones.",
            show_default=False,
        ),
    ],
    which: Pass,
    dtypes: Annotated[str | None, typer.Option(help="Comma-separated. [dim]default: the spec's[/]")] = None,
    head_dims: Annotated[str | None, typer.Option(help="Comma-separated. [dim]default: the spec's[/]")] = None,
    v_head_dims: Annotated[
        str | None,
        typer.Option(help="Columns of v, comma-separated, each beside each head dim. [dim]default: the head dim[/]"),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of k and v, of 8 bits, beside each of --dtypes. [dim]default: that of q[/]"),
    ] = None,
    archs: Annotated[
        str | None, typer.Option(help="Comma-separated. [dim]default: the GPU's, or the spec's[/]")
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Kernel family. [dim]default: the best of each arch[/]")] = None,
    tile: Annotated[
        str | None, typer.Option(metavar="QxKV", help="The one tile to compile. [dim]default: those that calls use[/]")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="The one number of stages to compile. [dim]default: those that calls use[/]")
    ] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A constant of the spec.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilations at once. [dim]default: one a CPU core[/]")
    ] = None,
    as_json: options.as_json(
        "kernels, each with kernel and resources (as of flashgen compile), cubin_bytes, cached"
    ) = False,
) -> None:
    """Compile ahead into the disk cache: dtypes x head dims x architectures, in a thread pool."""
    from flashgen.lang.load import load_spec
    from flashgen.ops.stages import default_arch
    from flashgen.planning.planner import menu_of
    from flashgen.planning.request import KernelRequest

    asked_of = which.asked(kv_dtype)
    passes = [{"pipeline": pipeline, "tile": options.tile_shape(tile), "stages": stages, **asked_of}]
    if which.backward:  # beside the forward of the same calls, whose tile and stages nobody fixed
        passes.insert(0, {"pipeline": pipeline, "dropout": which.dropout, "layout": asked_of["layout"]})
    plans = []
    for path in options.spec_files(specs):
        variant = folded(load_spec(path), param or ())
        shapes = itertools.product(
            _list("--archs", archs) or (default_arch(variant),),
            _list("--dtypes", dtypes) or variant.dtypes,
            _numbers("--head-dims", head_dims) or variant.head_dims,
            _numbers("--v-head-dims", v_head_dims) or (None,),
        )
        asked = [KernelRequest.of(variant, *shape, **options) for shape in shapes for options in passes]
        plans += [plan for request in asked for plan in menu_of(request).forms]
    start = time.perf_counter()
    table = Table("kernel", "tile", "registers", "spills", "cubin", "", box=None, padding=(0, 2, 0, 0))
    entries = compiled(plans, jobs)
    say_what_is_lost([entry for _, entry in entries])
    if as_json:
        write_json({"kernels": [_described(plan, entry) for plan, entry in entries]})
        return
    for plan, entry in entries:
        dims = f"{plan.head_dim}" if plan.v_head_dim == plan.head_dim else f"{plan.head_dim},{plan.v_head_dim}"
        table.add_row(
            Text(f"{plan.variant.name} {plan.arch} {plan.dtype} {dims} {plan.pass_name}"),
            f"{plan.tile.q} x {plan.tile.kv}",
            str(entry.resources.registers),
            size(entry.resources.spills),
            size(len(entry.cubin)),
            "cached" if entry.hit else "compiled",
        )
    tabulate(table)
    err.print(f"{len(entries)} kernels in {seconds(time.perf_counter() - start)}")


def say_what_is_lost(entries: list[Entry]) -> None:
    """A warning on stderr where the cache has not kept all of them: its limit is lower, or it keeps nothing."""
    from flashgen.runtime import cache

    into = cache.default()
    lost = sum(not into.keeps(str(entry.about["key"])) for entry in entries)
    if lost:
        complain(
            f"{lost} of {len(entries)} kernels are not kept: they have {size(sum(len(e.cubin) for e in entries))}, and"
            f" the cache {into.folder} holds {size(into.limit)}\n  each process compiles them again; set"
            " FLASHGEN_CACHE_BYTES to more, or FLASHGEN_CACHE_DIR to a folder that can be written"
        )


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


def _described(plan: KernelPlan, entry: Entry) -> dict[str, object]:
    return {
        "kernel": options.described(plan),
        "resources": dataclasses.asdict(entry.resources),
        "cubin_bytes": len(entry.cubin),
        "cached": entry.hit,
    }


def _list(option: str, text: str | None) -> tuple[str, ...]:
    """The words of a comma-separated option; none where it is not given."""
    if text is None:
        return ()
    words = tuple(word.strip() for word in text.split(","))
    if "" in words:
        raise PlanError(f"{option} {text!r} has a place between commas with nothing in it\n  nearest: leave it out")
    return words


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    words = _list(option, text)
    if wrong := [word for word in words if re.fullmatch("0*[1-9][0-9]{0,8}", word) is None]:
        raise PlanError(f"{option} {text!r}: {wrong[0]!r} is not a positive number\n  nearest: {option} 64,128")
    return tuple(map(int, words))
