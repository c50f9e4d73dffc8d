"""Why a plan has no larger tile and no more stages: the sums that pass a limit."""

from __future__ import annotations

from flashgen.planning.menu import Rejected
from flashgen.planning.pipelines.table import forwards
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.request import Fixed, KernelRequest


def of(plan: KernelPlan) -> tuple[Rejected, ...]:
    """Why a forward's tile and stages are no larger: the least with more keys, more stages or more queries that does
    not fit, each with the sum that passes a limit; what fits and is only slower is in the menu's `rejected`."""
    if plan.backward is not None or plan.dropout:
        return ()
    pipeline, request, tile = forwards(plan)[plan.pipeline], KernelRequest.of_plan(plan), plan.tile
    step, of_stages = pipeline.KEY_STEP, pipeline.INTEGERS["stages"].values
    larger = (
        [(Tile(q=tile.q, kv=kv), plan.stages) for kv in range(tile.kv + step, 2 * tile.kv + 1, step)],
        [(tile, stages) for stages in of_stages if stages > plan.stages],
        [(Tile(q=q, kv=tile.kv), plan.stages) for q in pipeline.QUERIES if q > tile.q],
    )
    found = []
    for direction in larger:
        for one, stages in direction:
            reasons: list[Rejected] = []
            for c in pipeline.candidates(Fixed(tile=one, stages=stages)):  # of its forms the first needs least
                if (reason := pipeline.does_not_fit_reason(c, request)) is None:
                    break
                reasons.append(Rejected(tile=one, stages=stages, warps=c.warps, reason=reason))
            else:
                found.append(reasons[0])
                break
    return tuple(found)
