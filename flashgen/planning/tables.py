"""A prediction for a person: tables of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.analysis import facts as analysis
from flashgen.planning import limits
from flashgen.planning.arch import ARCHS, Arch
from flashgen.planning.integers import shown
from flashgen.planning.menu import Rejected
from flashgen.planning.plan import KernelPlan, Part

if TYPE_CHECKING:
    from flashgen.analysis.counts import Loss
    from flashgen.planning.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a title, one string for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def of(prediction: Prediction) -> tuple[Table, ...]:
    """The prediction for a person: what was chosen, why it fits, what it moves, how long it takes, what lost."""
    plan, arch, tiles = prediction.plan, ARCHS[prediction.plan.arch], prediction.tiles
    measured = prediction.measured
    visited = tiles.partial + tiles.full
    return (
        Table(
            title="plan",
            columns=("", ""),
            rows=(
                ("variant", plan.variant.name),
                ("arch", f"{plan.arch} ({arch.card})"),
                ("pipeline", f"{plan.pipeline} {plan.pass_name}"),
                *((f"instead of {fallback.pipeline}", str(fallback)) for fallback in plan.fallbacks),
                ("tile", f"{plan.tile.q} queries x {plan.tile.kv} keys, {shown(plan)}"),
                *([("sequences", _said_of_sequences(prediction))] if prediction.sequences else []),
                *([("packed", _packing(prediction))] if plan.packed and not prediction.sequences else []),
                *([("kv splits", f"{prediction.splits}: {prediction.why_splits}")] if prediction.why_splits else []),
                *([("summaries", "; ".join(map(str, plan.summaries)))] if plan.summaries else []),
                ("warps", plan.program.text()),
                *([("8 bits", plan.said_of_8_bits)] if plan.float8 else []),
                *([("launch", str(plan.launches))] if plan.launches.early else []),
                ("blocks per SM", str(plan.blocks_per_sm)),
                ("chosen by", f"measured times ({measured.record})" if measured else "predicted times"),
                *([("menu covers", measured.covers)] if measured else []),
                *([("other sizes", "; ".join(map(_shape, prediction.others)))] if prediction.others else []),
                *(("judged whole", note) for note in analysis.analyse(plan.variant).notes()),
            ),
        ),
        _sum("shared memory", plan.smem, arch.smem_per_block, "bytes"),
        _sum("registers per thread (estimate)", plan.registers, _most_registers(plan, arch), "registers"),
        Table(
            title="tiles",
            columns=("total", "empty", "partial", "full", "useful"),
            rows=((*map(str, (tiles.total, tiles.empty, tiles.partial, tiles.full)), _share(prediction)),),
        ),
        *([_losses(tiles.loss)] if tiles.loss is not None and not tiles.loss.exact else []),
        Table(
            title="HBM traffic",
            columns=("", "read", "written"),
            rows=(
                *((entry, *moved.text()) for entry, moved in prediction.kernels),
                ("this plan", *prediction.hbm.text()),
                ("compulsory", *prediction.compulsory.text()),
                ("standard attention", *prediction.standard.text()),
                ("lower bound, both", _counted(prediction.lower_bound_bytes, decimal), ""),
            ),
        ),
        *([_workspaces(prediction.workspaces)] if prediction.workspaces else []),
        Table(
            title=f"time on {arch.card}, {visited} tiles visited",
            columns=("unit", "ms", ""),
            rows=tuple(
                (name, f"{ms:.4g}", "decides" if name == prediction.times.bound else "")
                for name, ms in prediction.times.as_json().items()
            ),
        ),
        *([] if measured else [_pace_table(prediction)]),
        *([_rejections("too large", found)] if (found := limits.of(plan)) else []),
        _rejections("rejected", prediction.rejected),
    )


def _shape(plan: KernelPlan) -> str:
    """A plan by what tells it from the others of its menu."""
    form = ", heads packed" if plan.packed else ""
    if plan.backward is not None:
        form += "" if plan.backward.dq_in_main_kernel else ", dq in kernels of its own"
        form += ", blocks take tiles of keys" if plan.backward.persistent else ""
    return f"{plan.tile}, {shown(plan)}{form}"


def _said_of_sequences(prediction: Prediction) -> str:
    """How they lie, and how long they are."""
    rows, keys = ([getattr(own, name) for own in prediction.sequences] for name in ("q_rows", "kv_len"))
    lengths = (_spread(x, *what) for x, *what in ((rows, "query", "queries"), (keys, "key", "keys")))
    pages = f"; {prediction.pages} pages of {prediction.page_size} rows" if prediction.page_size else ""
    return f"{prediction.plan.layout.name}: {len(prediction.sequences)} of {'; '.join(lengths)}{pages}"


def _spread(lengths: Sequence[int], one: str, many: str) -> str:
    """The least and the largest, and their sum."""
    least, most = min(lengths), max(lengths)
    span = str(most) if least == most else f"{least} to {most}"
    return f"{span} {one if most == 1 else many}, {sum(lengths)} in all"


def _packing(prediction: Prediction) -> str:
    """What a tile of packed heads holds, and what that saves."""
    plan, problem = prediction.plan, prediction.problem
    pack, queries = plan.pack(problem.group), plan.tile_queries(problem.group)
    alone = -(-problem.q_len // plan.tile.q) * problem.heads * problem.batch
    tiles = -(-problem.q_len // queries) * problem.heads * problem.batch // pack
    held = f"{queries} queries of {f'{pack} heads that share keys' if pack > 1 else 'one head'}"
    return f"a tile holds {held}: {tiles} tiles of queries, where one head a tile makes {alone}"


def _pace_table(prediction: Prediction) -> Table:
    """The pace for a person: in clocks for a thousand scores."""
    plan, pace = prediction.plan, prediction.pace
    sharing = "1 block" if plan.blocks_per_sm == 1 else f"{plan.blocks_per_sm} blocks"
    return Table(
        title="pace, which orders the candidates: an SM's clocks for 1000 scores",
        columns=("unit", "clocks", ""),
        rows=(
            *((unit, f"{1e3 * clocks:.4g}", "") for unit, clocks in pace.clocks),
            ("together", f"{1e3 * pace.together:.4g}", f"with {sharing}: {pace.ms:.4g} ms for the tiles visited"),
        ),
    )


def _losses(loss: Loss) -> Table:
    """What is not known of tiles before they are visited costs."""
    return Table(
        title="beside a block mask, made by evaluating every pair",
        columns=("tiles", "here", "block mask", "ratio"),
        rows=(
            ("visited", str(loss.visited), str(loss.seen), f"{loss.visits:.2f}"),
            ("masked pair by pair", str(loss.masked), str(loss.cut), f"{loss.masks:.2f}"),
        ),
    )


def _workspaces(parts: tuple[Part, ...]) -> Table:
    """Memory beside inputs and results."""
    terms = tuple((part.name, decimal(part.amount), part.why) for part in parts)
    return Table(
        title="workspaces", columns=("", "bytes", ""), rows=(*terms, ("sum", decimal(sum(p.amount for p in parts)), ""))
    )


def _sum(title: str, parts: tuple[Part, ...], limit: int, unit: str) -> Table:
    """The terms of a sum, the sum and its limit."""
    terms = tuple((part.name, str(part.amount), part.why) for part in parts)
    total = ("sum", str(sum(part.amount for part in parts)), f"of {limit} {unit}")
    return Table(title=title, columns=("", unit, ""), rows=(*terms, total))


def _most_registers(plan: KernelPlan, arch: Arch) -> int:
    """What a thread that computes may hold."""
    return plan.program.consumer_registers or arch.registers_per_thread


def _rejections(title: str, rows: Iterable[Rejected]) -> Table:
    return Table(
        title=title,
        columns=("tile", "stages", "warps", "reason"),
        rows=tuple((str(r.tile), str(r.stages), str(r.warps), r.reason) for r in rows),
    )


def _share(prediction: Prediction) -> str:
    """Useful FLOPs of all."""
    flops = prediction.flops
    return _counted(prediction.flops_useful, lambda useful: f"{useful / flops:.1%}" if flops else "nothing to do")


def _counted(count: int | None, said: Callable[[int], str]) -> str:
    """A number that only a count of the visible pairs gives."""
    return "not counted" if count is None else said(count)


def decimal(count: int) -> str:
    """Bytes of traffic in the largest decimal unit that leaves a number of at least 1, as bandwidths are given."""
    power = min(4, int(math.log10(count) // 3)) if count else 0
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
