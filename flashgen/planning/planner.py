"""Candidates -> must fit -> ranked: the menu of kernels for a variant, and which of them serves a call.

No length enters the menu; a call picks an entry with a few integer divisions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple, TypeVar

from flashgen.errors import PlanError
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.lang.variant import Variant
from flashgen.planning import arch as archs
from flashgen.planning import records, visits
from flashgen.planning.arch import ARCHS
from flashgen.planning.float8 import E4M3
from flashgen.planning.integers import INTEGERS
from flashgen.planning.menu import Measured as Measured
from flashgen.planning.menu import Menu as Menu
from flashgen.planning.menu import Rejected as Rejected
from flashgen.planning.once import Remembered, once
from flashgen.planning.pipelines.ampere import backward as ampere_backward
from flashgen.planning.pipelines.ampere import float8 as ampere_float8
from flashgen.planning.pipelines.ampere import forward as ampere
from flashgen.planning.pipelines.hopper import backward as hopper_backward
from flashgen.planning.pipelines.hopper import float8 as hopper_float8
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.pipelines.protocol import BackwardPipeline, ForwardPipeline, Packing, Pipeline, Predictor
from flashgen.planning.pipelines.shared import total
from flashgen.planning.plan import Fallback, KernelPlan, Tile
from flashgen.planning.problem import Problem, check_dtype
from flashgen.planning.records import Timed
from flashgen.planning.request import Fixed, KernelRequest

DTYPES = ("float16", "bfloat16", E4M3)

#: Forwards and backwards by the name of their pipeline, forwards of keys and values of 8 bits, and what packs heads, of
#: 16 bits and of 8.
PIPELINES: Mapping[str, ForwardPipeline[Any]] = {ampere.NAME: ampere, hopper.NAME: hopper}
FLOAT8: Mapping[str, ForwardPipeline[Any]] = {ampere.NAME: ampere_float8, hopper.NAME: hopper_float8}
BACKWARDS: Mapping[str, BackwardPipeline[Any]] = {
    ampere_backward.NAME: ampere_backward,
    hopper_backward.NAME: hopper_backward,
}
PACKINGS: Mapping[str, Packing] = {ampere.NAME: ampere, hopper.NAME: hopper}
PACKINGS_FLOAT8: Mapping[str, Packing] = {ampere.NAME: ampere_float8, hopper.NAME: hopper_float8}

T = TypeVar("T")

#: A menu never has more entries.
MAX_PLANS = 4

#: A measured plan is in the menu where it makes the shapes faster by this much in the mean.
USEFUL = 0.005

#: Heads are packed where that is predicted to be faster by this factor: the model knows rows of tiles alone.
PACKING_GAIN = 1.1

#: Predicted times this close are equal; more rows per block, which move fewer bytes, are then preferred.
NEAR = 1.03

#: How much more or less than another tile one must visit for a reason to say so.
VISIBLE = 0.005


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
    _check(pipeline, request)
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
        seconds_per_score=(_seconds(pipeline, packed, request),),
        packed=packed,
        measured=None,
    ).instead_of(*fallbacks)


def pipeline_of(plan: KernelPlan) -> Pipeline[Any]:
    """The pipeline that a plan comes from, and that knows its clocks, seconds per score and predicted seconds."""
    return pipelines(plan)[plan.pipeline]


def pipelines(of: KernelPlan | KernelRequest) -> Mapping[str, Pipeline[Any]]:
    """Those of a pass and a width of elements, by name."""
    return forwards(of) if of.pass_name == "forward" else BACKWARDS


def forwards(of: KernelPlan | KernelRequest) -> Mapping[str, ForwardPipeline[Any]]:
    """The forwards for a width of elements, by name."""
    return PIPELINES if of.float8 is None else FLOAT8


def packings(of: KernelPlan | KernelRequest) -> Mapping[str, Packing]:
    """The pipelines that put rows of heads that share keys into one tile, of its dtype."""
    return PACKINGS if of.float8 is None else PACKINGS_FLOAT8


#: Queries and keys by which lengths are counted where a plan is chosen: sides of tiles are multiples of it.
STEP = 16


def choose(menu: Menu, problem: Problem, sms: int) -> KernelPlan:
    """The entry of the menu with the least predicted time for `problem` on `sms` SMs.

    O(1): blocks are counted, not scheduled, and the mask is not looked at.  A short problem takes a smaller tile (of
    queries; in a backward, of keys), so that there are blocks for every SM; few queries of heads that share
    keys take the packed form.
    """
    batch, heads, kv_heads, q_len, kv_len, _, _, _, _ = problem
    if not (batch and heads and q_len):
        return menu.plans[0]
    group, few = heads // kv_heads, None
    if menu.few:
        reaches = _reaches(menu)
        reach = reaches.get(group) or reaches.keep(group, _reach(menu, group))
        for most, plan in reach:
            if q_len <= most:  # the least tile which holds the queries of all heads that share keys
                few = plan
                break
    if few is not None and few.keys.split:  # blocks for every SM come from the keys
        return few
    known, at = _chosen(menu), (batch, heads, kv_heads, -(-q_len // STEP), -(-kv_len // STEP), sms)
    plan = known.get(at) or known.keep(at, _of_single_heads(menu, _in_steps(problem), sms))
    packed = few if few is not None and few.packed else menu.packed
    if packed is None or group % 2:  # packs are powers of two
        return plan
    gain = packings(plan)[packed.pipeline].packing_gain(packed, plan, _pace, problem, sms)
    return packed if gain >= PACKING_GAIN else plan


@once
def _reaches(menu: Menu) -> Remembered[int, tuple[tuple[int, KernelPlan], ...]]:
    """What `_reach` has found of a menu, by the number of heads that share keys."""
    return Remembered()


def _reach(menu: Menu, group: int) -> tuple[tuple[int, KernelPlan], ...]:
    """The most queries that each plan for few of them holds, of all heads that share keys, and the plan."""
    pack = menu.few[-1].pack(group)
    return tuple((plan.tile.q // pack, plan) for plan in menu.few)


@once
def _pace(plan: KernelPlan) -> tuple[float, ...]:
    """Seconds for each score, of a plan beside a menu."""
    return pipeline_of(plan).seconds_per_score(plan, ARCHS[plan.arch])


@once
def _predictor(plan: KernelPlan) -> Predictor:
    """That of a plan beside a menu."""
    return pipeline_of(plan).predictor(plan, _pace(plan))


@once
def _predictors(menu: Menu) -> tuple[Predictor, ...]:
    """Those of a menu's plans."""
    pipeline, pairs = pipeline_of(menu.plans[0]), zip(menu.plans, menu.seconds_per_score, strict=True)
    return tuple(pipeline.predictor(plan, seconds_per_score) for plan, seconds_per_score in pairs)


@once
def _chosen(menu: Menu) -> Remembered[tuple[int, ...], KernelPlan]:
    """What a menu has for heads that are not packed, by batch, heads, lengths in STEPs and SMs."""
    return Remembered()


def _in_steps(problem: Problem) -> Problem:
    """The same with lengths that are whole STEPs."""
    q_len, kv_len = (min(-(-n // STEP) * STEP, MAX_LENGTH - 1) for n in (problem.q_len, problem.kv_len))
    return problem.of_lengths(q_len, kv_len)


def _of_single_heads(menu: Menu, problem: Problem, sms: int) -> KernelPlan:
    plan, small = _of_long(menu, problem, sms), menu.small
    if small is not None and _predictor(small)(problem, sms) < _predictor(plan)(problem, sms):
        return small
    return plan


def _of_long(menu: Menu, problem: Problem, sms: int) -> KernelPlan:
    if len(menu.plans) == 1:
        return menu.plans[0]
    if menu.measured:
        return menu.plans[menu.measured.best(problem)]
    times = [seconds(problem, sms) for seconds in _predictors(menu)]
    return menu.plans[times.index(min(times))]


def _pipeline(request: KernelRequest) -> tuple[Pipeline[Any], tuple[Fallback, ...]]:
    """The pipeline that is fixed, or the best one of the architecture, that has such kernels; and the better ones that
    have not."""
    arch, name, known = request.arch, request.fixed.pipeline, pipelines(request)
    if name is not None:
        chosen = known[archs.pipeline(arch, name)]
        if reason := chosen.unsupported_reason(request):
            raise PlanError(_lacking(request, chosen, reason))
        return chosen, ()
    pinned = archs.pipeline(arch, request.variant.pins.pipeline)
    fallbacks: list[Fallback] = []
    for candidate in arch.pipelines:
        if arch.pipelines.index(candidate) < arch.pipelines.index(pinned):
            reason = f"{request.variant.name!r} is pinned to pipeline {pinned}"
            fallbacks.append(Fallback(pipeline=candidate, reason=reason, nearest="no such pin", pinned=True))
        elif reason := known[candidate].unsupported_reason(request):
            nearest = ", or ".join(_served(known[candidate], request)) or "no single change"
            fallbacks.append(Fallback(pipeline=candidate, reason=reason, nearest=nearest))
        else:
            return known[candidate], tuple(fallbacks)
    reasons = (f"pipeline {f.pipeline}: {f.reason}" for f in fallbacks)
    nearest = f"\n  nearest: {fallbacks[0].nearest}" if request.float8 else ""
    lines = "\n  ".join(reasons)
    raise PlanError(f"no {request.pass_name} of {request.variant.name!r} as asked for\n  {lines}{nearest}")


def _lacking(request: KernelRequest, pipeline: Pipeline[Any], reason: str) -> str:
    """The message where the pipeline that is fixed has no such kernels."""
    able = [f"pipeline {other.NAME!r}" for other in others(pipeline, request)[:1]]
    works = ", or ".join((*able, *_served(pipeline, request)))
    nearest = f"\n  nearest: {works}" if works else ""
    if request.pass_name == "forward":
        return f"pipeline {pipeline.NAME!r} {reason}{nearest}"
    return f"no backward of {request.variant.name!r} as asked for\n  pipeline {pipeline.NAME}: {reason}{nearest}"


def _served(pipeline: Pipeline[Any], request: KernelRequest) -> list[str]:
    """The single changes to a request by which a pipeline that has no such kernels has them: the largest head dims, or
    one option less."""
    found = [change for change, less in request.less().items() if pipeline.unsupported_reason(less) is None]
    step, widest = pipeline.HEAD_DIM_STEP, min(request.widest - 1, pipeline.MAX_HEAD_DIM)
    for most in range(widest // step * step, pipeline.MIN_HEAD_DIM - 1, -step):
        narrow = replace(request, head_dim=min(request.head_dim, most), v_head_dim=min(request.v_head_dim, most))
        if pipeline.unsupported_reason(narrow) is None:
            dims = ("head_dim",) if request.head_dim == request.v_head_dim else ("head_dim", "v_head_dim")
            changed = [f"{name} {most}" for name in dims if getattr(request, name) > most]
            return [" with ".join(changed), *found]
    return found


def others(pipeline: Pipeline[Any], request: KernelRequest) -> list[Pipeline[Any]]:
    """The architecture's other pipelines that have such kernels."""
    known = pipelines(request)
    others = [known[name] for name in request.arch.pipelines if name != pipeline.NAME]
    return [other for other in others if other.unsupported_reason(request) is None]


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
    if not few and (fitting := forms(_fitting(pipeline, request)[0])):
        few = [timed.plan for timed in _select(pipeline, request, fitting)[0]]
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
        fitting = _fitting(pipeline, asked)[0]
        if not fitting:
            return None
        kept = _kept(found, tile, None)
        plans = kept.plans if kept else [timed.plan for timed in _select(pipeline, asked, fitting)[0]]
        if plans[0].order_of_sums != found.plans[0].order_of_sums:
            return None
        lean = _of_fewest_stages(plans[0], fitting, forward.FEW_BYTES)
        return plans[0], _packed(pipeline, asked, [lean]) or lean

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


def _fitting(pipeline: Pipeline[Any], request: KernelRequest) -> tuple[list[KernelPlan], list[Rejected]]:
    """Every candidate as a plan, or rejected with the limit it passes."""
    plans: list[KernelPlan] = []
    rejected: dict[_Key, str] = {}
    for c in pipeline.candidates(request.fixed):
        if request.keys.turns and not request.fixed.tile and c.tile.q > min(forwards(request)[pipeline.NAME].QUERIES):
            continue  # queries are few
        reason = request.keys.unfit(c.tile.kv) or pipeline.does_not_fit_reason(c, request)
        if reason is None:
            plans.append(pipeline.plan(c, request))
        else:  # of the forms of one candidate the first needs least
            rejected.setdefault((c.tile, c.stages, c.warps), reason)
    fits = {_key(plan) for plan in plans}
    return plans, [
        Rejected(tile=key[0], stages=key[1], warps=key[2], reason=reason)
        for key, reason in rejected.items()
        if key not in fits
    ]


def _free(pipeline: Pipeline[Any], request: KernelRequest) -> Menu:
    """The menu where neither tile nor stages are fixed: from a record where there is one, else by predicted times."""
    free = request.fixing(tile=None, stages=None)
    return _measured(pipeline, free) or _ranked(pipeline, free)


def _kept(menu: Menu, tile: Tile, stages: int | None) -> Menu | None:
    """The part of a menu with that tile (and stages): a tile that the planner takes by itself is the same kernel when
    it is asked for.  None where there is none."""

    def asked(one: KernelPlan | Rejected) -> bool:
        return one.tile == tile and stages in (None, one.stages)

    rows = [i for i, plan in enumerate(menu.plans) if asked(plan)]
    if not rows:
        return None
    measured = menu.measured
    return Menu(
        plans=tuple(menu.plans[i] for i in rows),
        seconds_per_score=tuple(menu.seconds_per_score[i] for i in rows),
        rejected=tuple(filter(asked, menu.rejected)),
        measured=measured and replace(measured, ms=tuple(measured.ms[i] for i in rows)),
    )


def _ranked(pipeline: Pipeline[Any], request: KernelRequest) -> Menu:
    """The menu of candidates that fit, by predicted time."""
    plans, rejected = _fitting(pipeline, request)
    if not plans:
        raise PlanError(_does_not_fit(pipeline, request, rejected))
    chosen, slower = _select(pipeline, request, plans)
    return Menu(
        plans=tuple(t.plan for t in chosen),
        seconds_per_score=tuple(t.seconds_per_score for t in chosen),
        rejected=(*rejected, *slower),
    )


def _measured(pipeline: Pipeline[Any], request: KernelRequest) -> Menu | None:
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
    plans = {t: plan for t in entry.candidates if (plan := _plan_of(forward, request, t))}
    if not plans or len({visits.share(request.variant, plan.tile) for plan in plans.values()}) > 1:
        return None
    # Of forms that one command asks for (of other numbers of blocks, say) the best in the mean.
    named: dict[object, Timed] = {}
    for t in sorted(plans, key=lambda t: math.prod(t.ms)):
        named.setdefault((_key(plans[t]), *plans[t].integers().items()), t)
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
    slower: dict[_Key, Rejected | None] = {_key(plan): None for plan in ways}
    for t in named.values():  # the best in the mean first
        if _key(plans[t]) not in slower:
            slower[_key(plans[t])] = _slower(t, plans[t], chosen, _other_bits(plans[t], ways[0]))
    return Menu(
        plans=tuple(ways),
        seconds_per_score=tuple(_seconds(pipeline, plan, request) for plan in ways),
        rejected=tuple(r for r in slower.values() if r is not None),
        measured=Measured(
            record=entry.name,
            shapes=entry.shapes,
            ms=tuple(t.ms for t in chosen),
            least=tuple(best),
            candidates=len(plans),
        ),
    )


def _plan_of(pipeline: ForwardPipeline[Any], request: KernelRequest, timed: Timed) -> KernelPlan | None:
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


def _other_bits(plan: KernelPlan, menu: KernelPlan) -> str:
    """That speed was not all that was asked."""
    return (
        "" if plan.order_of_sums == menu.order_of_sums else f", whose bits are those of {menu.tile.kv} keys at a time"
    )


def _slower(timed: Timed, plan: KernelPlan, chosen: Sequence[Timed], other: str) -> Rejected:
    """A measured candidate that is not in the menu: how its times compare with those of the menu's fastest plans."""
    ratios = [ours / min(t.ms[j] for t in chosen) for j, ours in enumerate(timed.ms)]
    mean = math.prod(ratios) ** (1 / len(ratios))
    reason = f"measured {mean:.2f}x the menu's time, {min(ratios):.2f}x to {max(ratios):.2f}x by shape{other}"
    return Rejected(tile=plan.tile, stages=plan.stages, warps=plan.warps, reason=reason)


#: Tile, stages and warps.
_Key = tuple[Tile, int, int]


def _key(plan: KernelPlan) -> _Key:
    """What a candidate is called; its forms (Q in registers or not ...) share it."""
    return plan.tile, plan.stages, plan.warps


class _Timed(NamedTuple):
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


def _select(
    pipeline: Pipeline[Any], request: KernelRequest, plans: list[KernelPlan]
) -> tuple[list[_Timed], list[Rejected]]:
    """The plans of the menu, and the others with the plan that beats them.

    First the fastest plan, or one as fast whose blocks own more rows; then the fastest for small problems of each
    smaller number of rows.
    """
    timed = [_Timed(plan, _seconds(pipeline, plan, request)) for plan in plans]
    by_full = sorted(timed, key=lambda t: (t.full(), t.rest()))
    by_mixed = sorted(timed, key=lambda t: (t.mixed(), t.rest()))
    as_fast = [t for t in by_full if t.full() <= NEAR * by_full[0].full()]
    main = max(as_fast, key=lambda t: t.plan.block_rows)  # of equal ones the first, which is the fastest
    smaller: dict[int, _Timed] = {}
    for t in by_mixed:
        if t.plan.block_rows < main.plan.block_rows and t.plan.order_of_sums == main.plan.order_of_sums:
            smaller.setdefault(t.plan.block_rows, t)
    chosen = [main, *smaller.values()][:MAX_PLANS]

    slower: dict[_Key, Rejected | None] = {_key(t.plan): None for t in chosen}
    for t in by_full:
        if _key(t.plan) in slower:
            continue
        ahead = next((c for c in chosen[1:] if c.plan.block_rows == t.plan.block_rows), main)
        ratio = t.full() / main.full() if ahead is main else t.mixed() / ahead.mixed()
        tile, where = ahead.plan.tile, "" if ahead is main else ", where blocks are few"
        reason = f"predicted {ratio:.2f}x the time of {tile.q} x {tile.kv}, {ahead.plan.stages} stages{where}"
        more = visits.share(t.plan.variant, t.plan.tile) / visits.share(t.plan.variant, tile)
        if abs(more - 1) >= VISIBLE:
            reason += f": its tiles visit {more:.2f}x the scores"
        reason += _other_bits(t.plan, main.plan)
        slower[_key(t.plan)] = Rejected(tile=t.plan.tile, stages=t.plan.stages, warps=t.plan.warps, reason=reason)
    return chosen, [r for r in slower.values() if r is not None]


def _seconds(pipeline: Pipeline[Any], plan: KernelPlan, request: KernelRequest) -> tuple[float, ...]:
    """Seconds for each score of a problem that an SM works on, while 1, 2 ... blocks share it: those of tiles that are
    not visited take none."""
    share = visits.share(plan.variant, plan.tile)
    return tuple(share * seconds for seconds in pipeline.seconds_per_score(plan, request.arch))


def _check(pipeline: Pipeline[Any], request: KernelRequest) -> None:
    """Raise PlanError for what no kernel of the pipeline takes, whatever fits."""
    _check_dtype(request)
    _check_head_dims(pipeline, request)
    for name in sorted(request.fixed.integers(), key=lambda name: name == "stages"):  # those of few pipelines first
        _check_integer(pipeline, request, name)
    tile = request.fixed.tile
    if tile is not None and pipeline.nearest_tile((tile.q, tile.kv)) != (tile.q, tile.kv):
        limit = f"tile {tile} of {request}: {pipeline.TILE_RULE}"
        raise PlanError(f"{limit}\n  nearest: {_nearest_tile(pipeline, request)}")


def _check_dtype(request: KernelRequest) -> None:
    check_dtype(request.dtype)
    if request.dtype not in DTYPES:
        raise PlanError(
            f"no kernel for {request}: the tensor cores take 16-bit inputs and accumulate in float32\n"
            f"  dtypes that work: {', '.join(DTYPES)} (float32 and float64 run on a CPU)\n  nearest: bfloat16"
        )
    allowed = request.variant.dtypes
    if request.variant.only and allowed and request.dtype not in allowed:
        raise PlanError(_declared(request, "dtype", request.dtype, allowed, allowed[0]))


def _check_head_dims(pipeline: Pipeline[Any], request: KernelRequest) -> None:
    low, high, step = pipeline.MIN_HEAD_DIM, pipeline.MAX_HEAD_DIM, pipeline.HEAD_DIM_STEP
    for name, value in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
        if value > high:
            raise PlanError(_too_wide(pipeline, request, name))
        if value < low or value % step:
            below, above = max(low, value // step * step), max(low, -(-value // step) * step)
            nearest = f"{below}" if below == above else f"{below} or {above}"
            raise PlanError(
                f"no kernel for {request}: {name} runs from {low} to {high} in steps of {step} (rows of 16 bytes)\n"
                f"  nearest: {name} {nearest}"
            )
    allowed, asked = request.variant.head_dims, request.head_dim
    if request.variant.only and allowed and asked not in allowed:
        raise PlanError(_declared(request, "head_dim", asked, allowed, min(allowed, key=lambda one: abs(one - asked))))


def _declared(request: KernelRequest, name: str, asked: object, allowed: Sequence[object], nearest: object) -> str:
    """The message for what a variant is not declared for, and it is declared for that `only`."""
    return (
        f"{request.variant.name!r} is declared for {name} {', '.join(map(str, allowed))} only\n"
        f"  asked: {name} {asked}\n  nearest: {name} {nearest}"
    )


def _check_integer(pipeline: Pipeline[Any], request: KernelRequest, name: str) -> None:
    """Raise PlanError for a value of an integer that the pipeline has no kernels for, or where it has no such one."""
    row, value = INTEGERS[name], request.fixed.integers()[name]
    allowed = pipeline.INTEGERS.get(name)
    if allowed is None:
        able = [other for other in others(pipeline, request) if name in other.INTEGERS]
        raise PlanError(
            f"{name} {value} for {request}: {row.absent.format(pipeline=pipeline.NAME)}\n"
            f"  nearest: {name}=None{''.join(f', or pipeline {other.NAME!r}' for other in able)}"
        )
    if value not in allowed.values:
        limit = row.limit.format(rule=allowed.rule, low=allowed.values[0], high=allowed.values[-1])
        nearest = row.nearest.format(allowed.nearest(value))
        raise PlanError(f"{row.asked.format(value)} for {request}: {limit}\n  nearest: {nearest}")


def _too_wide(pipeline: Pipeline[Any], request: KernelRequest, name: str) -> str:
    """The message for a head dim above the largest: the sums of the tiles that come closest, where those decide."""
    arch = request.arch
    lines = [f"no tile of {request} fits {arch.name}"]
    for q, kv in pipeline.EXAMPLES:
        c = next(iter(pipeline.candidates(Fixed(tile=Tile(q=q, kv=kv), stages=pipeline.INTEGERS["stages"].values[0]))))
        if (reason := pipeline.does_not_fit_reason(c, request)) is not None:
            lines.append(f"  {c}: {reason}")
    if len(lines) == 1:
        lines.append(f"  pipeline {pipeline.NAME} emits {name} up to {pipeline.MAX_HEAD_DIM}")
    lines.append(f"  nearest: {name} <= {pipeline.MAX_HEAD_DIM} on {arch.name}")
    return "\n".join(lines)


def _does_not_fit(pipeline: Pipeline[Any], request: KernelRequest, rejected: list[Rejected]) -> str:
    """The message where nothing fits that has what is fixed: the least that was tried, and the nearest that fits."""
    tile, arch = request.fixed.tile, request.arch.name
    subject = f"tile {tile} of {request} does not fit" if tile else f"no tile of {request} fits"
    fixed = " and ".join(f"{value} {INTEGERS[name].counts}" for name, value in request.fixed.integers().items())
    lines = [f"{subject} {arch}{f' with {fixed}' if fixed else ''}"]
    least = sorted(rejected, key=lambda r: (r.tile.q * r.tile.kv, r.stages, r.warps))
    lines += [f"  {r}" for r in least[:3]]
    return "\n".join((*lines, f"  nearest: {_nearest_tile(pipeline, request)}"))


def _nearest_tile(pipeline: Pipeline[Any], request: KernelRequest) -> str:
    """The tile that fits and is most like one that does not: on the pipeline's grid, or one the planner tries itself;
    and a pipeline of the architecture that takes the tile as it is.  Without a tile, what fits with other stages."""
    tile, stages = request.fixed.tile, request.fixed.stages
    open_ = request.fixing(**dict.fromkeys(INTEGERS), tile=None)  # nothing is fixed
    if tile is None:
        fits = _fitting(pipeline, open_)[0]
        least = min(fits, key=lambda plan: abs(plan.stages - (stages or plan.stages)), default=None)
        return f"{least.tile} with {least.stages} stages" if least else "a smaller head_dim"

    def distance(plan: KernelPlan) -> tuple[float, int, int]:
        sides = (plan.tile.q, tile.q), (plan.tile.kv, tile.kv)
        ratios = sum(abs(math.log2(ours / max(1, asked))) for ours, asked in sides)
        return (ratios, abs(plan.stages - (stages or plan.stages)), -plan.tile.q * plan.tile.kv)

    q, kv = pipeline.nearest_tile((tile.q, tile.kv))
    plans = _fitting(pipeline, request.fixing(tile=Tile(q=q, kv=kv)))[0]
    plans = plans or _fitting(pipeline, request.fixing(tile=None, stages=None))[0]
    near = min(plans or _fitting(pipeline, open_)[0], key=distance)
    text = f"{near.tile} with {near.stages} stages" if stages or not plans else f"{near.tile}"
    if request.pass_name == "backward":
        return text
    as_it_is = open_.fixing(tile=tile, stages=stages)
    for other in others(pipeline, request):
        if other.nearest_tile((tile.q, tile.kv)) == (tile.q, tile.kv) and _fitting(other, as_it_is)[0]:
            text += f", or pipeline {other.NAME!r}, which takes {tile}"
    return text
