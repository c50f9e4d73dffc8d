"""The candidates of a request that fit, and which of them a menu takes by predicted time."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashgen.planning import visits
from flashgen.planning.menu import Rejected
from flashgen.planning.pipelines.protocol import Pipeline
from flashgen.planning.pipelines.table import forwards
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.request import KernelRequest

#: A menu never has more entries.
MAX_PLANS = 4

#: Predicted times this close are equal; more rows per block, which move fewer bytes, are then preferred.
NEAR = 1.03

#: How much more or less than another tile one must visit for a reason to say so.
VISIBLE = 0.005

#: Tile, stages and warps.
Key = tuple[Tile, int, int]


def key(plan: KernelPlan) -> Key:
    """What a candidate is called; its forms (Q in registers or not ...) share it."""
    return plan.tile, plan.stages, plan.warps


def fitting(pipeline: Pipeline[Any], request: KernelRequest) -> tuple[list[KernelPlan], list[Rejected]]:
    """Every candidate as a plan, or rejected with the limit it passes."""
    plans: list[KernelPlan] = []
    rejected: dict[Key, str] = {}
    for c in pipeline.candidates(request.fixed):
        if request.keys.turns and not request.fixed.tile and c.tile.q > min(forwards(request)[pipeline.NAME].QUERIES):
            continue  # queries are few
        reason = request.keys.unfit(c.tile.kv) or pipeline.does_not_fit_reason(c, request)
        if reason is None:
            plans.append(pipeline.plan(c, request))
        else:  # of the forms of one candidate the first needs least
            rejected.setdefault((c.tile, c.stages, c.warps), reason)
    fits = {key(plan) for plan in plans}
    return plans, [
        Rejected(tile=tile, stages=stages, warps=warps, reason=reason)
        for (tile, stages, warps), reason in rejected.items()
        if (tile, stages, warps) not in fits
    ]


class Predicted(NamedTuple):
    """A plan that fits, with its seconds per score."""

    plan: KernelPlan
    seconds_per_score: tuple[float, ...]

    def full(self) -> float:
        """Seconds for a score on an SM that holds as many blocks as it can."""
        return self.seconds_per_score[-1]

    def mixed(self) -> float:
        """The same, where half of the time one block is alone: of problems too small to fill the GPU."""
        return (self.seconds_per_score[0] + self.seconds_per_score[-1]) / 2

    def rest(self) -> tuple[int, ...]:
        """Makes an order by time total, so that a menu never varies."""
        plan = self.plan
        return plan.smem_bytes, plan.registers_estimate, -plan.tile.q, -plan.tile.kv, plan.warps


def select(
    pipeline: Pipeline[Any], request: KernelRequest, plans: list[KernelPlan]
) -> tuple[list[Predicted], list[Rejected]]:
    """The plans of the menu, and the others with the plan that beats them.

    First the fastest plan, or one as fast whose blocks own more rows; then the fastest for small problems of each
    smaller number of rows.
    """
    timed = [Predicted(plan, seconds(pipeline, plan, request)) for plan in plans]
    by_full = sorted(timed, key=lambda t: (t.full(), t.rest()))
    by_mixed = sorted(timed, key=lambda t: (t.mixed(), t.rest()))
    as_fast = [t for t in by_full if t.full() <= NEAR * by_full[0].full()]
    main = max(as_fast, key=lambda t: t.plan.block_rows)  # of equal ones the first, which is the fastest
    smaller: dict[int, Predicted] = {}
    for t in by_mixed:
        if t.plan.block_rows < main.plan.block_rows and t.plan.order_of_sums == main.plan.order_of_sums:
            smaller.setdefault(t.plan.block_rows, t)
    chosen = [main, *smaller.values()][:MAX_PLANS]

    slower: dict[Key, Rejected | None] = {key(t.plan): None for t in chosen}
    for t in by_full:
        if key(t.plan) in slower:
            continue
        ahead = next((c for c in chosen[1:] if c.plan.block_rows == t.plan.block_rows), main)
        ratio = t.full() / main.full() if ahead is main else t.mixed() / ahead.mixed()
        tile, where = ahead.plan.tile, "" if ahead is main else ", where blocks are few"
        reason = f"predicted {ratio:.2f}x the time of {tile.q} x {tile.kv}, {ahead.plan.stages} stages{where}"
        more = visits.share(t.plan.variant, t.plan.tile) / visits.share(t.plan.variant, tile)
        if abs(more - 1) >= VISIBLE:
            reason += f": its tiles visit {more:.2f}x the scores"
        reason += other_bits(t.plan, main.plan)
        slower[key(t.plan)] = Rejected(tile=t.plan.tile, stages=t.plan.stages, warps=t.plan.warps, reason=reason)
    return chosen, [r for r in slower.values() if r is not None]


def seconds(pipeline: Pipeline[Any], plan: KernelPlan, request: KernelRequest) -> tuple[float, ...]:
    """Seconds for each score of a problem that an SM works on, while 1, 2 ... blocks share it: those of tiles that are
    not visited take none."""
    share = visits.share(plan.variant, plan.tile)
    return tuple(share * alone for alone in pipeline.seconds_per_score(plan, request.arch))


def other_bits(plan: KernelPlan, menu: KernelPlan) -> str:
    """That speed was not all that was asked."""
    return (
        "" if plan.order_of_sums == menu.order_of_sums else f", whose bits are those of {menu.tile.kv} keys at a time"
    )
