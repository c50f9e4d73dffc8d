"""`flashgen plan`: the kernel that a problem gets, why it fits, and what it is predicted to cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flashgen.cli import options
from flashgen.cli.console import many, out, seconds, share, size
from flashgen.cli.options import Request, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.planning.plan import KernelPlan, Part

_BOUND = {"tensor": "the tensor cores", "exponential": "the exponentials", "l2": "the L2 cache", "dram": "the HBM"}

#: Rejected candidates that the table shows; --json has them all.
_SHOWN = 6


@options.shared
def command(
    spec: Spec,
    request: Request,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: bytes, counts and milliseconds.")] = False,
) -> None:
    """Plan a kernel: tile, sums of shared memory and registers, predicted HBM traffic and time."""
    resolved = options.resolve(spec, request)
    prediction = resolved.predict()
    if as_json:
        typer.echo(json.dumps(prediction.as_json(), indent=2))
        return
    out.print(render(resolved.plan, prediction.as_json(), str(resolved)))


def render(plan: KernelPlan, predicted: dict[str, Any], title: str) -> Table:
    """The plan as a table of two columns."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows(plan, predicted):
        table.add_row(name, text)
    return table


def rows(plan: KernelPlan, predicted: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the table; `predicted` has the fields of `Prediction.as_json`."""
    hbm, tiles = predicted["hbm"], predicted["tiles"]
    moved = total(hbm)
    visited = tiles["partial"] + tiles["full"]
    lines = [
        ("kernel", f"{plan.pipeline} {plan.pass_name}, {plan.arch}, {plan.dtype}, head_dim {dims(plan)}"),
        ("tile", f"{plan.tile.q} queries x {plan.tile.kv} keys, {plan.stages} stages, "
                 + ", ".join(f"{role.warps} {role.name} warps" for role in plan.roles)),
        ("shared memory", added(plan.smem, plan.smem_bytes, size)),
        ("registers", added(plan.registers, plan.registers_estimate, str) + " a thread (estimate)"),
        ("HBM traffic", f"{size(moved)} (read {size(hbm['read_bytes'])}, write {size(hbm['write_bytes'])})"),
        ("  compulsory", against(moved, total(predicted["compulsory"]))),
        ("  standard", against(moved, total(predicted["standard"]))),
        ("  lower bound", size(predicted["lower_bound_bytes"])),
        ("tiles", f"{tiles['total']:,}: {tiles['empty']:,} empty, {tiles['partial']:,} partial, {tiles['full']:,} full"
                  f" ({share(visited, tiles['total'])} visited)"),
        ("FLOPs", f"{many(predicted['flops'])}, {share(predicted['flops_useful'], predicted['flops'])} of them useful"),
        ("predicted", predicted_time(predicted)),
    ]  # fmt: skip
    rejected = predicted["rejected"]
    for i, entry in enumerate(rejected[:_SHOWN]):
        tile = entry["tile"]
        lines.append(("rejected" if i == 0 else "", f"{tile['q']} x {tile['kv']}: {entry['reason']}"))
    if len(rejected) > _SHOWN:
        lines.append(("", f"and {len(rejected) - _SHOWN} more (--json)"))
    return lines


def dims(plan: KernelPlan) -> str:
    return str(plan.head_dim) if plan.head_dim == plan.v_head_dim else f"{plan.head_dim}, v_head_dim {plan.v_head_dim}"


def added(parts: Sequence[Part], amount: int, unit: Any) -> str:
    """A sum with its terms: 96 KiB = q 32 KiB + k 32 KiB + v 32 KiB."""
    return f"{unit(amount)} = " + " + ".join(f"{part.name} {unit(part.amount)}" for part in parts)


def total(moved: dict[str, int]) -> int:
    return moved["read_bytes"] + moved["write_bytes"]


def against(moved: int, other: int) -> str:
    return size(other) + (f" (this plan moves {moved / other:.3g}x)" if other else "")


def predicted_time(predicted: dict[str, Any]) -> str:
    """The time, and which of its bounds is the longest."""
    return f"{seconds(predicted['predicted_ms'] / 1e3)}, bound by {_BOUND[predicted['bound']]}"
