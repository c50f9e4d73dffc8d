"""Candidates -> must fit -> ranked: the menu of kernels for a variant.

Candidates are those of a pipeline (`pipelines/table.py`); `ranking.py` drops what does not fit and orders the rest by
predicted time, unless a record has measured times (`measured.py`); `refusals.py` says why there is no such kernel.  No
length enters the menu: `choice.py` picks an entry for a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flashgen.errors import PlanError
from flashgen.lang.variant import Variant
from flashgen.planning import arch as archs
from flashgen.planning import measured, ranking, refusals
from flashgen.planning.choice import choose as choose
from flashgen.planning.menu import Measured as Measured
from flashgen.planning.menu import Menu as Menu
from flashgen.planning.menu import Rejected as Rejected
from flashgen.planning.pipelines.protocol import Pipeline
from flashgen.planning.pipelines.table import BACKWARDS, forwards, packings, pipelines
from flashgen.planning.pipelines.table import FLOAT8 as FLOAT8
from flashgen.planning.pipelines.table import PIPELINES as PIPELINES
from flashgen.planning.pipelines.table import others as others
from flashgen.planning.pipelines.table import pipeline_of as pipeline_of
from flashgen.planning.plan import Fallback, KernelPlan, Tile
from flashgen.planning.request import KernelRequest


def menu(variant: Variant, arch: str, dtype: str, head_dim: int, v_head_dim: int | None = None, **options: Any) -> Menu:
    """`menu_of` a forward, with the options of `KernelRequest.of`."""
    return menu_of(KernelRequest.of(variant, arch, dtype, head_dim, v_head_dim, **options))


def backward_menu(
    variant: Variant, arch: str, dtype: str, head_dim: int, v_head_dim: int | None = None, **options: Any
) -> Menu:
    """`menu_of` a backward, with the options of `KernelRequest.of`."""
    return menu_of(KernelRequest.of(variant, arch, dtype, head_dim, v_head_dim, backward=True, **options))


@functools.lru_cache(maxsize=4096)
def menu_of(request: KernelRequest) -> Menu:
    """The kernels that serve a request at any length, ranked by predicted time.

    They come from the pipeline that is fixed, or from the best one of the architecture that has what is asked for; of a
    backward, which takes the outputs of any pipeline's forward, not from a better one than the variant pins.  Where
    nothing is fixed, `fallbacks` say why not from a better one.  What is fixed is checked, never changed.  Raises
    PlanError with the limit and the nearest thing that works.  The result is memoised.
    """
    pipeline, fallbacks = _pipeline(request)
    refusals.check(pipeline, request)
    found = _menu_of(pipeline, request)
    if request.pass_name == "backward":
        return replace(found, small=_for_short(request, found)).instead_of(*fallbacks)
    packed = _packed(pipeline, request, found.plans)
    if not request.packed:
        small, few = _of_few_rows(pipeline, request, found)
        return replace(found, packed=packed, small=small, few=few).instead_of(*fallbacks)
    if packed is None:
        raise PlanError(_no_packing(pipeline, request))
    return replace(
        found,
        plans=(packed,),
        seconds_per_score=(ranking.seconds(pipeline, packed, request),),
        packed=packed,
        measured=None,
    ).instead_of(*fallbacks)


def _pipeline(request: KernelRequest) -> tuple[Pipeline[Any], tuple[Fallback, ...]]:
    """The pipeline that is fixed, or the best one of the architecture, that has such kernels; and the better ones that
    have not."""
    arch, name, known = request.arch, request.fixed.pipeline, pipelines(request)
    if name is not None:
        chosen = known[archs.pipeline(arch, name)]
        if reason := chosen.unsupported_reason(request):
            raise PlanError(refusals.lacking(request, chosen, reason))
        return chosen, ()
    pinned = archs.pipeline(arch, request.variant.pins.pipeline)
    fallbacks: list[Fallback] = []
    for candidate in arch.pipelines:
        if arch.pipelines.index(candidate) < arch.pipelines.index(pinned):
            reason = f"{request.variant.name!r} is pinned to pipeline {pinned}"
            fallbacks.append(Fallback(pipeline=candidate, reason=reason, nearest="no such pin", pinned=True))
        elif reason := known[candidate].unsupported_reason(request):
            nearest = ", or ".join(refusals.served(known[candidate], request)) or "no single change"
            fallbacks.append(Fallback(pipeline=candidate, reason=reason, nearest=nearest))
        else:
            return known[candidate], tuple(fallbacks)
    reasons = (f"pipeline {f.pipeline}: {f.reason}" for f in fallbacks)
    nearest = f"\n  nearest: {fallbacks[0].nearest}" if request.float8 else ""
    lines = "\n  ".join(reasons)
    raise PlanError(f"no {request.pass_name} of {request.variant.name!r} as asked for\n  {lines}{nearest}")


def _packed(pipeline: Pipeline[Any], request: KernelRequest, menu: Sequence[KernelPlan]) -> KernelPlan | None:
    """The packed form of a menu's first plan with the least rows that tiles may have, so that the fewest are empty;
    where it has none, of the best such candidate."""
    packing = packings(request)[pipeline.NAME]
    if packing.cannot_pack(request):
        return None
    tile, least = request.fixed.tile, min(forwards(request)[pipeline.NAME].QUERIES)

    def forms(plans: Iterable[KernelPlan]) -> list[KernelPlan]:
        few = [plan for plan in plans if tile is not None or plan.tile.q == least]
        few = [plan for plan in few if plan.order_of_sums == menu[0].order_of_sums]
        return [plan for plan in few if packing.packed(plan) is not None]

    few = forms(menu)
    if not few and (fitting := forms(ranking.fitting(pipeline, request)[0])):
        few = [timed.plan for timed in ranking.select(pipeline, request, fitting)[0]]
    return packing.packed(few[0]) if few else None


def _of_few_rows(
    pipeline: Pipeline[Any], request: KernelRequest, found: Menu
) -> tuple[KernelPlan | None, tuple[KernelPlan, ...]]:
    """`small` and `few` of a menu: plans that add up as its others do.  None where a tile or a form is fixed, and where
    the pipeline has no such tiles."""
    if request.fixed.tile or request.fixed.integers():
        return None, ()
    forward = forwards(request)[pipeline.NAME]

    def forms(queries: int) -> tuple[KernelPlan, KernelPlan] | None:
        """What is planned where such a tile is asked for, and of it for few queries, packed where heads can be."""
        tile = Tile(q=queries, kv=found.plans[0].tile.kv)
        asked = request.fixing(tile=tile)
        fitting = ranking.fitting(pipeline, asked)[0]
        if not fitting:
            return None
        kept = _kept(found, tile, None)
        plans = kept.plans if kept else [timed.plan for timed in ranking.select(pipeline, asked, fitting)[0]]
        if plans[0].order_of_sums != found.plans[0].order_of_sums:
            return None
        lean = _of_fewest_stages(plans[0], fitting, forward.FEW_BYTES)
        return lean, _packed(pipeline, asked, [lean]) or lean

    # Problems that are short of blocks have single heads, whose keys one block visits.
    alone = None if request.keys.split or request.layout.joined else forward.SMALL_QUERIES
    made = {queries: forms(queries) for queries in {*forward.FEW_QUERIES, *([alone] if alone else [])}}
    few = [of for queries in forward.FEW_QUERIES if (of := made[queries]) is not None]
    small = made[alone] if alone else None
    return small and small[0], tuple(of_few for _, of_few in few)


def _of_fewest_stages(plan: KernelPlan, fitting: Iterable[KernelPlan], enough: int | None) -> KernelPlan:
    """The plan with as few stages as hold enough bytes of keys and values, where the pipeline knows how many are."""

    def held(one: KernelPlan) -> int:
        return sum(part.amount for part in one.smem if part.name in ("k", "v"))

    like = [one for one in fitting if (one.tile, one.q_stages, one.warps) == (plan.tile, plan.q_stages, plan.warps)]
    able = [one for one in like if enough is not None and enough <= held(one) <= held(plan)]
    return min(able, key=held, default=plan)


def _for_short(request: KernelRequest, found: Menu) -> KernelPlan | None:
    """The form of a backward's first plan for short sequences.  None where a tile or a form is fixed."""
    if request.fixed.tile or request.fixed.integers():
        return None
    return BACKWARDS[found.plans[0].pipeline].for_short(found.plans[0], request)


def _no_packing(pipeline: Pipeline[Any], request: KernelRequest) -> str:
    """Why there is no packed form."""
    tile = request.fixed.tile
    if reason := packings(request)[pipeline.NAME].cannot_pack(request):
        return f"{request.variant.name!r} {reason}\n  nearest: packed=False"
    free = request.fixing(tile=None, stages=None)
    near = _packed(pipeline, free, _free(pipeline, free).plans) if tile else None
    limit = f"{f'tile {tile}' if tile else 'each tile'} of {request} leaves too few registers to pack heads"
    return f"{limit}\n  nearest: {near.tile if near else 'packed=False'}"


def _menu_of(pipeline: Pipeline[Any], request: KernelRequest) -> Menu:
    """The menu of a request that is in order."""
    fixed = request.fixed
    if fixed.tile is None and fixed.stages is None:
        return _free(pipeline, request)
    if fixed.tile and (kept := _kept(_free(pipeline, request), fixed.tile, fixed.stages)):
        return kept
    return _ranked(pipeline, request)


def _free(pipeline: Pipeline[Any], request: KernelRequest) -> Menu:
    """The menu where neither tile nor stages are fixed: from a record where there is one, else by predicted times."""
    free = request.fixing(tile=None, stages=None)
    return measured.menu(pipeline, free) or _ranked(pipeline, free)


def _kept(menu: Menu, tile: Tile, stages: int | None) -> Menu | None:
    """The part of a menu with that tile (and stages): a tile that the planner takes by itself is the same kernel when
    it is asked for.  None where there is none."""

    def asked(one: KernelPlan | Rejected) -> bool:
        return one.tile == tile and stages in (None, one.stages)

    rows = [i for i, plan in enumerate(menu.plans) if asked(plan)]
    if not rows:
        return None
    times = menu.measured
    return Menu(
        plans=tuple(menu.plans[i] for i in rows),
        seconds_per_score=tuple(menu.seconds_per_score[i] for i in rows),
        rejected=tuple(filter(asked, menu.rejected)),
        measured=times and replace(times, ms=tuple(times.ms[i] for i in rows)),
    )


def _ranked(pipeline: Pipeline[Any], request: KernelRequest) -> Menu:
    """The menu of candidates that fit, by predicted time."""
    plans, rejected = ranking.fitting(pipeline, request)
    if not plans:
        raise PlanError(refusals.does_not_fit(pipeline, request, rejected))
    chosen, slower = ranking.select(pipeline, request, plans)
    return Menu(
        plans=tuple(t.plan for t in chosen),
        seconds_per_score=tuple(t.seconds_per_score for t in chosen),
        rejected=(*rejected, *slower),
    )
