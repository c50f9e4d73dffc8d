"""The menu that a record of measured times gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from flashgen.planning import ranking, records, visits
from flashgen.planning.menu import Measured, Menu, Rejected
from flashgen.planning.pipelines.protocol import ForwardPipeline, Pipeline
from flashgen.planning.pipelines.shared import total
from flashgen.planning.pipelines.table import forwards
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.ranking import MAX_PLANS, Key, key
from flashgen.planning.records import Timed
from flashgen.planning.request import KernelRequest

T = TypeVar("T")

#: A measured plan is in the menu where it makes the shapes faster by this much in the mean.
USEFUL = 0.005


def menu(pipeline: Pipeline[Any], request: KernelRequest) -> Menu | None:
    """The menu that a record gives: the plan that is fastest on the longest shape, then those that help others most.

    None without an entry for the class of the variant, for kernels with options, which were not measured, and where
    cells of the mask cut tiles of one candidate and not those of another: the entry is of one that has none.
    """
    unmeasured = request.dropout or request.keys.name != "all" or request.float8 is not None
    if request.pass_name == "backward" or unmeasured:
        return None
    entry = records.find(pipeline.NAME, request)
    if entry is None:
        return None
    forward = forwards(request)[pipeline.NAME]
    plans = {t: plan for t in entry.candidates if (plan := plan_of(forward, request, t))}
    if not plans or len({visits.share(request.variant, plan.tile) for plan in plans.values()}) > 1:
        return None
    # Of forms that one command asks for (of other numbers of blocks, say) the best in the mean.
    named: dict[object, Timed] = {}
    for t in sorted(plans, key=lambda t: math.prod(t.ms)):
        named.setdefault((key(plans[t]), *plans[t].integers().items()), t)
    plans = {t: plans[t] for t in plans if t in named.values()}
    best = [min(t.ms[j] for t in plans) for j in range(len(entry.shapes))]
    longest = max(range(len(entry.shapes)), key=lambda j: entry.shapes[j].kv_len)
    alike = min(_alike(plans, plans.__getitem__), key=lambda some: _loss(some, best))
    chosen = [min(alike, key=lambda t: t.ms[longest])]
    while len(chosen) < min(MAX_PLANS, len(alike)):
        chosen.append(min((t for t in alike if t not in chosen), key=lambda t: _loss([*chosen, t], best)))
        if _loss(chosen, best) > _loss(chosen[:-1], best) - USEFUL:
            chosen.pop()
            break
    ways = [plans[t] for t in chosen]
    slower: dict[Key, Rejected | None] = {key(plan): None for plan in ways}
    for t in named.values():  # the best in the mean first
        if key(plans[t]) not in slower:
            slower[key(plans[t])] = _slower(t, plans[t], chosen, ranking.other_bits(plans[t], ways[0]))
    return Menu(
        plans=tuple(ways),
        seconds_per_score=tuple(ranking.seconds(pipeline, plan, request) for plan in ways),
        rejected=tuple(r for r in slower.values() if r is not None),
        measured=Measured(
            record=entry.name,
            shapes=entry.shapes,
            ms=tuple(t.ms for t in chosen),
            least=tuple(best),
            candidates=len(plans),
        ),
    )


def plan_of(pipeline: ForwardPipeline[Any], request: KernelRequest, timed: Timed) -> KernelPlan | None:
    """The plan of a measured candidate; None where the pipeline has no such candidate any more, or none that fits.

    The model of registers is not asked: those that spill were not measured, and it rules out some that are faster.
    Fields that a record does not name, because candidates had none then, have their default.
    """
    named = dict(timed.form)
    q, kv = named["tile"]
    for c in pipeline.candidates(replace(request.fixed, tile=Tile(q=q, kv=kv), stages=named["stages"])):
        later = {f.name for f in fields(c) if f.name not in named and getattr(c, f.name) == f.default}
        if records.form({name: value for name, value in asdict(c).items() if name not in later}) == timed.form:
            if total(pipeline.smem(c, request)) > request.arch.smem_per_block:
                return None
            return replace(pipeline.plan(c, request), blocks_per_sm=timed.blocks_per_sm)
    return None


def _alike(candidates: Iterable[T], plan: Callable[[T], KernelPlan]) -> list[list[T]]:
    """The candidates in groups that add up in one order: a menu is of one, so that a row's bits show no choice."""
    groups: dict[object, list[T]] = {}
    for candidate in candidates:
        groups.setdefault(plan(candidate).order_of_sums, []).append(candidate)
    return list(groups.values())


def _loss(chosen: Sequence[Timed], best: Sequence[float]) -> float:
    """The mean over shapes of the fastest chosen candidate's time over the fastest of all, less 1."""
    return sum(min(t.ms[j] for t in chosen) / best[j] - 1 for j in range(len(best))) / len(best)


def _slower(timed: Timed, plan: KernelPlan, chosen: Sequence[Timed], other: str) -> Rejected:
    """A measured candidate that is not in the menu: how its times compare with those of the menu's fastest plans."""
    ratios = [ours / min(t.ms[j] for t in chosen) for j, ours in enumerate(timed.ms)]
    mean = math.prod(ratios) ** (1 / len(ratios))
    reason = f"measured {mean:.2f}x the menu's time, {min(ratios):.2f}x to {max(ratios):.2f}x by shape{other}"
    return Rejected(tile=plan.tile, stages=plan.stages, warps=plan.warps, reason=reason)
