"""Which plan of a menu serves a call: a few integer divisions, as no length is in a menu."""

from __future__ import annotations

from flashgen.lang.ranges import MAX_LENGTH
from flashgen.planning.arch import ARCHS
from flashgen.planning.menu import Menu
from flashgen.planning.once import Remembered, once
from flashgen.planning.pipelines.protocol import Predictor
from flashgen.planning.pipelines.table import packings, pipeline_of
from flashgen.planning.plan import KernelPlan
from flashgen.planning.problem import Problem

#: Queries and keys by which lengths are counted where a plan is chosen: sides of tiles are multiples of it.
STEP = 16

#: Heads are packed where that is predicted to be faster by this factor: the model knows rows of tiles alone.
PACKING_GAIN = 1.1


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
