"""`flashgen simulate`: the emitted kernel itself, executed instruction by instruction on the CPU."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashgen.cli import options
from flashgen.cli.console import err, many, out, seconds, share, tabulate, write_json
from flashgen.cli.options import Pass, Request, Spec
from flashgen.cli.resolve import Resolved, resolve
from flashgen.cli.run import room, shapes
from flashgen.runtime.launch import operand_dtype

if TYPE_CHECKING:
    from flashgen.interpreter.counters import Report
    from flashgen.planning.prediction import Bytes
    from flashgen.runtime.philox import Dropout

#: What is executed unless a length is given: two tiles of queries of most plans, and no whole number of tiles.
SEQLEN = 200

#: Rows of the table of instructions.
_MOST = 12


@options.shared
def command(
    spec: Spec,
    request: Request,
    kv_splits: options.Splits = None,
    dropout: options.Chance = 0.0,
    seed: options.Seed = 0,
    late: Annotated[
        bool,
        typer.Option(
            "--late",
            help="Asynchronous copies end as late as the kernel allows, not as --seed draws it.",
        ),
    ] = False,
    as_json: options.as_json(
        "dtype, shape, params, seed, dropout, kernel (as of flashgen compile), traffic (buffer, kind, bytes),"
        " predicted_bytes, instructions (executed, by name), conflicts (line, text, wavefronts too many), steps,"
        " seconds, passed, reasons"
    ) = False,
    step_limit: Annotated[int, typer.Option(min=1, help="Steps after which a kernel counts as endless.")] = 10**8,
) -> None:
    """Execute the kernel on the CPU: check it against float64 and show traffic, bank conflicts, instructions.

    Give a small problem: a tile of a kernel takes tenths of a second. Needs NVRTC and no GPU.
    """
    request = request if request.seqlen is not None else dataclasses.replace(request, seqlen=SEQLEN)
    dropped = options.drops(dropout, seed)
    resolved = resolve(spec, request, Pass(dropout=dropped is not None), seed=seed, kv_splits=kv_splits)
    start = time.perf_counter()
    with err.status("executing"), room(resolved.problem, "cpu"):
        report, reasons = _run(resolved, seed, dropped, None if late else seed, step_limit)
    if as_json:
        write_json(_described(resolved, report, seed, dropout, time.perf_counter() - start, reasons))
        if reasons:
            raise typer.Exit(1)
        return
    tabulate(_traffic(resolved, report))
    tabulate(_instructions(report))
    conflicts = report.conflicts
    accesses = sum(access.count for access in report.shared.values())
    worst = f"{len(conflicts) or 'no'} instructions with bank conflicts"
    out.print(f"shared memory: {many(accesses)} accesses by warps, {worst}")
    for access in conflicts[:_MOST]:
        out.print(f"  line {access.line}: {access.conflicts} wavefronts too many: {access.text}", markup=False)
    out.print(f"executed {many(report.steps)} steps of warps in {seconds(time.perf_counter() - start)}")
    for reason in reasons:
        err.print(f"[bold red]check failed:[/] {reason}")
    if reasons:
        raise typer.Exit(1)
    out.print(f"[green]checked[/] against float64, no trap, seed {seed}")


def _described(
    resolved: Resolved, report: Report, seed: int, dropout: float, taken: float, reasons: tuple[str, ...]
) -> dict[str, object]:
    traffic = sorted(report.traffic.items())
    conflicts = ({"line": c.line, "text": c.text, "wavefronts": c.conflicts} for c in report.conflicts)
    return {
        **options.posed(resolved.problem),
        "params": dict(resolved.case.params),
        "seed": seed,
        "dropout": dropout,
        "kernel": options.described(resolved.plan),
        "traffic": [{"buffer": buffer, "kind": kind, "bytes": int(amount)} for (buffer, kind), amount in traffic],
        "predicted_bytes": _predicted(resolved).total,
        "instructions": {opcode: int(count) for opcode, count in report.instructions.most_common()},
        "conflicts": list(conflicts),
        "steps": report.steps,
        "seconds": taken,
        "passed": not reasons,
        "reasons": list(reasons),
    }


def _run(
    resolved: Resolved, seed: int, dropped: Dropout | None, order: int | None, step_limit: int
) -> tuple[Report, tuple[str, ...]]:
    import torch

    from flashgen.interpreter.simulate import simulate
    from flashgen.runtime.reference import baseline, judge, judge_lse, reference

    p, case, variant = resolved.problem, resolved.case, resolved.variant
    if resolved.plan.float8 is not None:
        return _run_8_bits(resolved, seed, order, step_limit)
    dtype, scale = getattr(torch, p.dtype), 1 / math.sqrt(p.head_dim)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes(p))
    asked = {"scale": scale, "dropout": dropped}
    arrays = (x.float().numpy() for x in (q, k, v))
    options = {"seed": order, "step_limit": step_limit, "kv_splits": resolved.splits}
    done = simulate(resolved.plan, case, *arrays, **asked, **options)
    ref, ref_lse = reference(variant, case, q, k, v, **asked)
    base, _ = baseline(variant, case, q, k, v, **asked)
    verdict = judge(torch.from_numpy(done.o).to(dtype), base, ref, p.dtype)
    return done.report, verdict.reasons + judge_lse(torch.from_numpy(done.lse), ref_lse)


def _run_8_bits(resolved: Resolved, seed: int, order: int | None, step_limit: int) -> tuple[Report, tuple[str, ...]]:
    """The same in 8 bits: of inputs with a descale for each head, beside the algorithm with an exact row max."""
    import torch

    from flashgen.interpreter.simulate import simulate
    from flashgen.runtime import reference_float8
    from flashgen.runtime.reference import judge, judge_lse, reference

    plan, case, variant = resolved.plan, resolved.case, resolved.variant
    scale = 1 / math.sqrt(resolved.problem.head_dim)
    generator = torch.Generator().manual_seed(seed)
    dtypes = (getattr(torch, operand_dtype(plan, name)) for name in "qkv")
    inputs = [
        reference_float8.quantised(torch.randn(shape, generator=generator), dtype)
        for shape, dtype in zip(shapes(resolved.problem), dtypes, strict=True)
    ]
    done = simulate(
        *(plan, case, *(x.codes.float().numpy() for x in inputs)),
        scale=scale,
        descales={name: x.descale.numpy() for name, x in zip("qkv", inputs, strict=True)},
        seed=order,
        step_limit=step_limit,
        kv_splits=resolved.splits,
    )
    out = getattr(torch, plan.out_dtype)
    ref, ref_lse = reference(variant, case, *(x.values for x in inputs), scale=scale)
    base, base_lse = reference_float8.beside(plan, variant, case, inputs, scale=scale)
    verdict = judge(torch.from_numpy(done.o).to(out), base, ref, plan.out_dtype)
    return done.report, verdict.reasons + judge_lse(torch.from_numpy(done.lse), ref_lse, base_lse)


def _predicted(resolved: Resolved) -> Bytes:
    """What the kernel that visits tiles is predicted to move; that of summaries is not reported."""
    prediction = resolved.predict()
    return dict(prediction.kernels).get(f"attention_{resolved.plan.pass_name}", prediction.hbm)


def _traffic(resolved: Resolved, report: Report) -> Table:
    """Bytes of global memory by tensor, executed and predicted."""
    plan = resolved.plan
    table = Table(
        title=escape(f"{resolved}\n{plan.pipeline} on {plan.arch}, tiles of {plan.tile.q} x {plan.tile.kv}"),
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("global memory", style="bold")
    table.add_column("by")
    table.add_column("bytes", justify="right")
    for (buffer, kind), amount in sorted(report.traffic.items()):
        table.add_row(buffer, kind, f"{amount:,}")
    table.add_row("all", "", f"{report.read_bytes + report.write_bytes:,}")
    table.add_row("predicted", "", f"{_predicted(resolved).total:,}")
    return table


def _instructions(report: Report) -> Table:
    total = sum(report.instructions.values())
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("instructions of warps", style="bold")
    table.add_column("executed", justify="right")
    table.add_column("share", justify="right")
    for opcode, count in report.instructions.most_common(_MOST):
        table.add_row(opcode, f"{count:,}", share(count, total))
    table.add_row("all", f"{total:,}", "")
    return table
