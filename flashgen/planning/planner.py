"""Candidates -> must fit -> ranked: the menu of kernels for a variant, and which of them serves a call.

No length enters the menu; a call picks an entry with a few integer divisions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import NamedTuple

from flashgen.errors import PlanError
from flashgen.lang.variant import Variant
from flashgen.planning import ampere, ampere_backward, hopper, hopper_backward, records
from flashgen.planning import arch as archs
from flashgen.planning.arch import Arch
from flashgen.planning.backward import Form
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.problem import Problem, check_dtype
from flashgen.planning.records import Shape, Timed

DTYPES = ("float16", "bfloat16")

#: Pipeline -> the module that knows its candidates, what they cost, and how long they take.
PIPELINES = {ampere.NAME: ampere, hopper.NAME: hopper}

#: The same for backwards.
BACKWARDS = {ampere_backward.NAME: ampere_backward, hopper_backward.NAME: hopper_backward}

#: A menu never has more entries.
MAX_PLANS = 4

#: A measured plan is in the menu where it makes the shapes faster by this much in the mean.
USEFUL = 0.005

#: Heads are packed where that is predicted to be faster by this factor: the model knows rows of tiles alone.
PACKING_GAIN = 1.1

#: Predicted times this close are equal; more rows per block, which move fewer bytes, are then preferred.
NEAR = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that is not in the menu, and why."""

    tile: Tile
    stages: int
    warps: int
    reason: str

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The record that a menu was taken from: `ms[i][j]` is what plan i of the menu took on shape j, and `least[j]` what
    the fastest of all `candidates` took there."""

    record: str
    shapes: tuple[Shape, ...]
    ms: tuple[tuple[float, ...], ...]
    least: tuple[float, ...]
    candidates: int

    @property
    def losses(self) -> tuple[float, ...]:
        """By how much the menu's fastest plan is slower than the fastest candidate, on each shape: 0.01 is 1%."""
        return tuple(
            min(column) / least - 1 for column, least in zip(zip(*self.ms, strict=True), self.least, strict=True)
        )

    @property
    def covers(self) -> str:
        """How near the menu comes to the fastest candidate, for a person."""
        within = f"within {max(self.losses):.2%} of the fastest of {self.candidates} candidates"
        return f"{len(self.shapes)} shapes, each {within}"

    def best(self, problem: Problem) -> int:
        """The fastest plan on the measured shape that is most like the problem, by lengths and number of heads."""

        def unlike(shape: Shape) -> float:
            pairs = (
                (shape.q_len, problem.q_len),
                (shape.kv_len, problem.kv_len),
                (shape.batch * shape.heads, problem.batch * problem.heads),
            )
            return sum(abs(math.log2(max(1, theirs) / max(1, ours))) for theirs, ours in pairs)

        j = min(range(len(self.shapes)), key=lambda j: unlike(self.shapes[j]))
        return min(range(len(self.ms)), key=lambda i: self.ms[i][j])


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """At most four plans for (variant, arch, dtype, head dims), the one for long sequences first.

    `seconds_per_score[i][n - 1]` is the time in seconds that an SM needs for one score while n blocks of plans[i] share
    it.  Beside them stands `packed`, for few queries of heads that share keys; None where there is no such form.
    """

    plans: tuple[KernelPlan, ...]
    seconds_per_score: tuple[tuple[float, ...], ...]
    rejected: tuple[Rejected, ...]
    packed: KernelPlan | None = None
    measured: Measured | None = None  # None: the order is predicted
    passed_over: str | None = None  # why the architecture's best pipeline does not serve this

    @property
    def forms(self) -> tuple[KernelPlan, ...]:
        """Every plan that a call may pick."""
        return self.plans if self.packed in (None, *self.plans) else (*self.plans, self.packed)

    @property
    def record(self) -> str | None:
        """The record that decided, or None where the model did."""
        return self.measured.record if self.measured else None


def menu(
    variant: Variant,
    arch: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    pipeline: str | None = None,
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    q_stages: int | None = None,
    dropout: bool = False,
    packed: bool = False,
) -> Menu:
    """The forward kernels that serve `variant` (constants bound) at any length, ranked by predicted time.

    `tile` (query rows, key rows), `stages` (of keys) and `q_stages` (of queries: pipeline hopper) fix what the planner
    would choose; so do the variant's pins where the call says nothing.  What is fixed is checked, never changed.  With
    `dropout` they drop probabilities, and come from the best pipeline that can; with `packed` there is the form alone
    that packs heads.  Raises PlanError with the limit and the nearest thing that works.  The result is memoised.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return _menu(variant, arch, dtype, head_dim, v_head_dim, pipeline, tile, stages, q_stages, dropout, packed, None)


def backward_menu(
    variant: Variant,
    arch: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    pipeline: str | None = None,
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    deterministic: bool = False,
    dropout: bool = False,
    gradients: tuple[str, ...] = (),
) -> Menu:
    """The backward kernels that serve `variant` (constants bound) at any length, ranked by predicted time.

    They take the outputs of any pipeline's forward, and come from the best pipeline, not better than the one that the
    variant pins, that has what is asked for (`Menu.passed_over` says why that is not the architecture's best); the
    variant's pins of tile and stages are the forward's.  `gradients` names captured tensors whose gradients are asked
    for.  Raises PlanError as `menu` does.
    """
    form = Form(deterministic=deterministic, dropout=dropout, gradients=gradients)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return _menu(variant, arch, dtype, head_dim, v_head_dim, pipeline, tile, stages, None, dropout, False, form)


def pipeline_of(plan: KernelPlan) -> ModuleType:
    """The module that a plan comes from, and that knows its clocks, seconds per score and predicted seconds."""
    return (PIPELINES if plan.backward is None else BACKWARDS)[plan.pipeline]


def limits(plan: KernelPlan) -> tuple[Rejected, ...]:
    """Why a forward's tile and stages are no larger: the least with more keys, more stages or more queries that does
    not fit, each with the sum that passes a limit; what fits and is only slower is in the menu's `rejected`."""
    if plan.backward is not None or plan.dropout:
        return ()
    pipeline, arch, tile = pipeline_of(plan), archs.find(plan.arch), plan.tile
    step = pipeline.KEY_STEP
    larger = (
        [(Tile(q=tile.q, kv=kv), plan.stages) for kv in range(tile.kv + step, 2 * tile.kv + 1, step)],
        [(tile, stages) for stages in pipeline.STAGES if stages > plan.stages],
        [(Tile(q=q, kv=tile.kv), plan.stages) for q in pipeline.QUERIES if q > tile.q],
    )
    found = []
    for direction in larger:
        for one, stages in direction:
            reasons = []
            for c in pipeline.candidates(one, stages):  # of its forms the first needs least
                if (
                    reason := pipeline.does_not_fit_reason(c, plan.variant, arch, plan.head_dim, plan.v_head_dim)
                ) is None:
                    break
                reasons.append(Rejected(tile=one, stages=stages, warps=c.warps, reason=reason))
            else:
                found.append(reasons[0])
                break
    return tuple(found)


def choose(menu: Menu, problem: Problem, sms: int) -> KernelPlan:
    """The entry of the menu with the least predicted time for `problem` on `sms` SMs.

    O(1): blocks are counted, not scheduled, and the mask is not looked at.  A short problem takes a smaller tile (of
    queries; in a backward, of keys), so that there are blocks for every SM; few queries of heads that share
    keys take the packed form.
    """
    plan = _of_single_heads(menu, problem, sms)
    if menu.packed is None or menu.packed.pack(problem.group) == 1 or problem.empty:
        return plan
    gain = hopper.packing_gain(menu.packed, plan, problem, sms)
    return menu.packed if gain >= PACKING_GAIN else plan


def _of_single_heads(menu: Menu, problem: Problem, sms: int) -> KernelPlan:
    if len(menu.plans) == 1 or problem.empty:
        return menu.plans[0]
    if menu.measured:
        return menu.plans[menu.measured.best(problem)]
    pipeline = pipeline_of(menu.plans[0])
    times = [
        pipeline.predicted_seconds(plan, seconds_per_score, problem, sms)
        for plan, seconds_per_score in zip(menu.plans, menu.seconds_per_score, strict=True)
    ]
    return menu.plans[times.index(min(times))]


@functools.lru_cache(maxsize=4096)
def _menu(
    variant: Variant,
    arch_name: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    pipeline: str | None,
    tile: tuple[int, int] | None,
    stages: int | None,
    q_stages: int | None,
    dropout: bool,
    packed: bool,
    form: Form | None,
) -> Menu:
    arch = archs.find(arch_name)
    pins = variant.pins
    if pins.arch is not None and archs.find(pins.arch) is not arch:
        pinned = archs.find(pins.arch).name
        raise PlanError(f"{variant.name!r} is pinned to {pinned}\n  asked: {arch.name}\n  nearest: {pinned}")
    dims, passed_over = (head_dim, v_head_dim), None
    if form is None:
        module = _pipeline(arch, _given(pipeline, pins.pipeline), dropout)
    else:
        module, passed_over = _backward(arch, pipeline, variant, *dims, form, tile, stages)
    request = _Request(
        variant=variant,
        arch=arch,
        pipeline=module,
        dtype=dtype,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_stages=q_stages,
        options={"form": form} if form is not None else {"dropout": True} if dropout else {},
    )
    _check_dtype(request)
    _check_head_dims(request)
    _check_q_stages(request)
    fixed, fixed_stages = tile, stages
    if form is None:
        fixed, fixed_stages = _given(tile, pins.tile), _given(stages, pins.stages)
    stages_pin = _check_stages(request, fixed_stages)
    tile_pin = None if fixed is None else _check_tile(request, fixed, stages_pin)

    found = replace(_menu_of(request, tile_pin, stages_pin), passed_over=passed_over)
    form_packed = _packed(request, found, tile_pin, stages_pin)
    if not packed:
        return replace(found, packed=form_packed)
    if form_packed is None:
        raise PlanError(_no_packing(request, tile_pin))
    seconds_per_score = (request.pipeline.seconds_per_score(form_packed, arch),)
    return replace(found, plans=(form_packed,), seconds_per_score=seconds_per_score, packed=form_packed, measured=None)


def _given(asked: object, pinned: object) -> object:
    """What a call fixes, else the variant's pin; None stands for nothing, and nothing else does."""
    return pinned if asked is None else asked


def _packed(request: _Request, found: Menu, tile: Tile | None, stages: int | None) -> KernelPlan | None:
    """The packed form of a menu's first plan with the least rows that tiles may have, so that the fewest are empty;
    where it has none and no tile is fixed, of the best such candidate."""
    if request.pipeline is not hopper or hopper.tells_heads_apart(request.variant):
        return None

    def able(plans: Sequence[KernelPlan]) -> list[KernelPlan]:
        few = [plan for plan in plans if tile is not None or plan.tile.q == min(hopper.QUERIES)]
        return [plan for plan in few if hopper.packed(plan) is not None]

    few = able(found.plans)
    if not few and tile is None and (fitting := able(_fitting(request, None, stages)[0])):
        few = [timed.plan for timed in _select(request, fitting)[0]]
    return hopper.packed(few[0]) if few else None


def _no_packing(request: _Request, tile: Tile | None) -> str:
    """Why there is no packed form."""
    if request.pipeline is not hopper:
        able = f"pipeline {hopper.NAME!r}" if hopper.NAME in request.arch.pipelines else "arch sm_90a"
        nearest = "packed=False" if request.options else able
        return f"pipeline {request.pipeline.NAME!r} packs no heads into one tile\n  nearest: {nearest}"
    if hopper.tells_heads_apart(request.variant):
        return f"{request.variant.name!r} tells heads apart, which then share no tile\n  nearest: packed=False"
    free = _packed(request, _free(request), None, None) if tile else None
    limit = (
        f"{f'tile {tile}' if tile else 'each tile'} of {request} leaves too few of a consumer's registers to pack heads"
    )
    return f"{limit}\n  nearest: {free.tile if free else 'packed=False'}"


def _menu_of(request: _Request, tile: Tile | None, stages: int | None) -> Menu:
    """The menu of a request that is in order."""
    if tile is None and stages is None:
        return _free(request)
    if tile and (kept := _kept(_free(request), tile, stages)):
        return kept
    return _ranked(request, tile, stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    variant: Variant
    arch: Arch
    pipeline: ModuleType
    dtype: str
    head_dim: int
    v_head_dim: int
    q_stages: int | None  # tiles of queries in shared memory, where that is fixed
    options: dict[str, object]  # of the pipeline's own

    def candidates(self, tile: Tile | None, stages: int | None) -> Iterator:
        """The pipeline's candidates that have what is fixed."""
        return (
            c for c in self.pipeline.candidates(tile, stages) if self.q_stages is None or c.q_stages == self.q_stages
        )

    @property
    def others(self) -> list[ModuleType]:
        """The architecture's other pipelines that emit such a forward."""
        if "form" in self.options:
            return []
        known = [PIPELINES[name] for name in self.arch.pipelines]
        return [p for p in known if p is not self.pipeline and (p.DROPOUT or "dropout" not in self.options)]

    def __str__(self) -> str:
        dims = f"head_dim {self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f", v_head_dim {self.v_head_dim}"
        return f"{self.variant.name!r} ({dims}, {self.dtype})"


def _pipeline(arch: Arch, name: str | None, dropout: bool) -> ModuleType:
    """The pipeline asked for, or the best one of `arch`, that can drop probabilities where that is asked for."""
    chosen = PIPELINES[archs.pipeline(arch, name)]
    if chosen.DROPOUT or not dropout:
        return chosen
    able = next(PIPELINES[other] for other in arch.pipelines if PIPELINES[other].DROPOUT)
    if name is not None:
        raise PlanError(f"pipeline {name!r} has no dropout\n  nearest: pipeline {able.NAME!r}")
    return able


def _backward(
    arch: Arch,
    name: str | None,
    variant: Variant,
    head_dim: int,
    v_head_dim: int,
    form: Form,
    tile: tuple[int, int] | None,
    stages: int | None,
) -> tuple[ModuleType, str | None]:
    """The pipeline asked for, or the best one of `arch`, from the pinned one on, that has this backward; and why a
    better one has not."""
    reasons, pinned = [], archs.pipeline(arch, variant.pins.pipeline)
    for candidate in arch.pipelines if name is None else (archs.pipeline(arch, name),):
        module = BACKWARDS[candidate]
        if name is None and arch.pipelines.index(candidate) < arch.pipelines.index(pinned):
            reason = f"{variant.name!r} is pinned to pipeline {pinned}"
        else:
            reason = module.unsupported_reason(variant, arch, head_dim, v_head_dim, form, tile, stages)
        if reason is None:
            return module, "; ".join(reasons) or None
        reasons.append(f"pipeline {candidate}: {reason}")
    nearest = f"nearest: pipeline {ampere.NAME!r}"
    raise PlanError(f"no backward of {variant.name!r} as asked for\n  {reasons[0]}\n  {nearest}")


def _fitting(request: _Request, tile: Tile | None, stages: int | None) -> tuple[list[KernelPlan], list[Rejected]]:
    """Every candidate as a plan, or rejected with the limit it passes."""
    plans, rejected = [], {}
    variant, arch, dims = request.variant, request.arch, (request.head_dim, request.v_head_dim)
    for c in request.candidates(tile, stages):
        reason = request.pipeline.does_not_fit_reason(c, variant, arch, *dims, **request.options)
        if reason is None:
            plans.append(request.pipeline.plan(c, variant, arch, request.dtype, *dims, **request.options))
        else:  # of the forms of one candidate the first needs least
            rejected.setdefault((c.tile, c.stages, c.warps), reason)
    fits = {_key(plan) for plan in plans}
    return plans, [
        Rejected(tile=key[0], stages=key[1], warps=key[2], reason=reason)
        for key, reason in rejected.items()
        if key not in fits
    ]


def _free(request: _Request) -> Menu:
    """The menu where nothing is fixed: from a record where there is one, else by predicted times."""
    return _measured(request) or _ranked(request, None, None)


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


def _ranked(request: _Request, tile: Tile | None, stages: int | None) -> Menu:
    """The menu of candidates that fit, by predicted time."""
    plans, rejected = _fitting(request, tile, stages)
    if not plans:
        raise PlanError(_does_not_fit(request, tile, stages, rejected))
    chosen, slower = _select(request, plans)
    return Menu(
        plans=tuple(t.plan for t in chosen),
        seconds_per_score=tuple(t.seconds_per_score for t in chosen),
        rejected=(*rejected, *slower),
    )


def _measured(request: _Request) -> Menu | None:
    """The menu that a record gives: the plan that is fastest on the longest shape, then those that help others most.

    None without an entry for the class of the variant, and for kernels with options, which were not measured.
    """
    variant, arch, dims = request.variant, request.arch, (request.head_dim, request.v_head_dim)
    if request.options:
        return None
    entry = records.find(arch.name, request.pipeline.NAME, "forward", variant, *dims)
    plans = {t: plan for t in entry.candidates if (plan := _plan_of(request, t))} if entry else {}
    if not plans:
        return None
    # Of forms that one command asks for (of other numbers of blocks, say) the best in the mean.
    named: dict[tuple, Timed] = {}
    for t in sorted(plans, key=lambda t: math.prod(t.ms)):
        named.setdefault((_key(plans[t]), plans[t].q_stages), t)
    plans = {t: plans[t] for t in plans if t in named.values()}
    best = [min(t.ms[j] for t in plans) for j in range(len(entry.shapes))]
    longest = max(range(len(entry.shapes)), key=lambda j: entry.shapes[j].kv_len)
    chosen = [min(plans, key=lambda t: t.ms[longest])]
    while len(chosen) < min(MAX_PLANS, len(plans)):
        chosen.append(min((t for t in plans if t not in chosen), key=lambda t: _loss([*chosen, t], best)))
        if _loss(chosen, best) > _loss(chosen[:-1], best) - USEFUL:
            chosen.pop()
            break
    ways = [plans[t] for t in chosen]
    slower = {_key(plan): None for plan in ways}
    for t in named.values():  # the best in the mean first
        if _key(plans[t]) not in slower:
            slower[_key(plans[t])] = _slower(t, plans[t], chosen)
    return Menu(
        plans=tuple(ways),
        seconds_per_score=tuple(request.pipeline.seconds_per_score(plan, arch) for plan in ways),
        rejected=tuple(r for r in slower.values() if r is not None),
        measured=Measured(
            record=entry.name,
            shapes=entry.shapes,
            ms=tuple(t.ms for t in chosen),
            least=tuple(best),
            candidates=len(plans),
        ),
    )


def _plan_of(request: _Request, timed: Timed) -> KernelPlan | None:
    """The plan of a measured candidate; None where the pipeline has no such candidate any more, or none that fits."""
    fields = dict(timed.form)
    dims = request.head_dim, request.v_head_dim
    for c in request.candidates(Tile(q=fields["tile"][0], kv=fields["tile"][1]), fields["stages"]):
        if records.form(asdict(c)) == timed.form:
            if sum(part.amount for part in request.pipeline.smem(c, *dims)) > request.arch.smem_per_block:
                return None
            plan = request.pipeline.plan(c, request.variant, request.arch, request.dtype, *dims)
            return replace(plan, blocks_per_sm=timed.blocks_per_sm)
    return None


def _loss(chosen: Sequence[Timed], best: Sequence[float]) -> float:
    """The mean over shapes of the fastest chosen candidate's time over the fastest of all, less 1."""
    return sum(min(t.ms[j] for t in chosen) / best[j] - 1 for j in range(len(best))) / len(best)


def _slower(timed: Timed, plan: KernelPlan, chosen: Sequence[Timed]) -> Rejected:
    """A measured candidate that is not in the menu: how its times compare with those of the menu's fastest plans."""
    ratios = [ours / min(t.ms[j] for t in chosen) for j, ours in enumerate(timed.ms)]
    mean = math.prod(ratios) ** (1 / len(ratios))
    reason = f"measured {mean:.2f}x the menu's time, {min(ratios):.2f}x to {max(ratios):.2f}x by shape"
    return Rejected(tile=plan.tile, stages=plan.stages, warps=plan.warps, reason=reason)


def _key(plan: KernelPlan) -> tuple[Tile, int, int]:
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

    def rest(self) -> tuple:
        """Makes an order by time total, so that a menu never varies."""
        plan = self.plan
        return plan.smem_bytes, plan.registers_estimate, -plan.tile.q, -plan.tile.kv, plan.warps


def _select(request: _Request, plans: list[KernelPlan]) -> tuple[list[_Timed], list[Rejected]]:
    """The plans of the menu, and the others with the plan that beats them.

    First the fastest plan, or one as fast whose blocks own more rows; then the fastest for small problems of each
    smaller number of rows.
    """
    timed = [_Timed(plan, request.pipeline.seconds_per_score(plan, request.arch)) for plan in plans]
    by_full = sorted(timed, key=lambda t: (t.full(), t.rest()))
    by_mixed = sorted(timed, key=lambda t: (t.mixed(), t.rest()))
    as_fast = [t for t in by_full if t.full() <= NEAR * by_full[0].full()]
    main = max(as_fast, key=lambda t: t.plan.block_rows)  # of equal ones the first, which is the fastest
    smaller: dict[int, _Timed] = {}
    for t in by_mixed:
        if t.plan.block_rows < main.plan.block_rows:
            smaller.setdefault(t.plan.block_rows, t)
    chosen = [main, *smaller.values()][:MAX_PLANS]

    slower = {_key(t.plan): None for t in chosen}
    for t in by_full:
        if _key(t.plan) in slower:
            continue
        ahead = next((c for c in chosen[1:] if c.plan.block_rows == t.plan.block_rows), main)
        ratio = t.full() / main.full() if ahead is main else t.mixed() / ahead.mixed()
        tile, where = ahead.plan.tile, "" if ahead is main else ", where blocks are few"
        reason = f"predicted {ratio:.2f}x the time of {tile.q} x {tile.kv}, {ahead.plan.stages} stages{where}"
        slower[_key(t.plan)] = Rejected(tile=t.plan.tile, stages=t.plan.stages, warps=t.plan.warps, reason=reason)
    return chosen, [r for r in slower.values() if r is not None]


def _check_dtype(request: _Request) -> None:
    check_dtype(request.dtype)
    if request.dtype not in DTYPES:
        raise PlanError(
            f"no kernel for {request}: the tensor cores take 16-bit inputs and accumulate in float32\n"
            f"  dtypes that work: {', '.join(DTYPES)} (float32 and float64 run on a CPU)\n  nearest: bfloat16"
        )
    _check_only(request, "dtype", request.dtype, request.variant.dtypes)


def _check_head_dims(request: _Request) -> None:
    pipeline = request.pipeline
    low, high, step = pipeline.MIN_HEAD_DIM, pipeline.MAX_HEAD_DIM, pipeline.HEAD_DIM_STEP
    for name, value in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
        if value > high:
            raise PlanError(_too_wide(request, name))
        if value < low or value % step:
            below, above = max(low, value // step * step), max(low, -(-value // step) * step)
            nearest = f"{below}" if below == above else f"{below} or {above}"
            raise PlanError(
                f"no kernel for {request}: {name} runs from {low} to {high} in steps of {step} (rows of 16 bytes)\n"
                f"  nearest: {name} {nearest}"
            )
    _check_only(request, "head_dim", request.head_dim, request.variant.head_dims)


def _check_only(request: _Request, name: str, value: object, allowed: tuple) -> None:
    if request.variant.only and allowed and value not in allowed:
        raise PlanError(
            f"{request.variant.name!r} is declared for {name} {', '.join(map(str, allowed))} only\n"
            f"  asked: {name} {value}\n  nearest: {name} {_nearest(value, allowed)}"
        )


def _nearest(value: object, allowed: tuple) -> object:
    return min(allowed, key=lambda a: abs(a - value)) if isinstance(value, int) else allowed[0]


def _check_tile(request: _Request, tile: tuple[int, int], stages: int | None) -> Tile:
    """The tile as asked, or PlanError where the pipeline's instructions rule it out."""
    asked = Tile(q=tile[0], kv=tile[1])
    if request.pipeline.nearest_tile(tile) != (asked.q, asked.kv):
        limit = f"tile {asked} of {request}: {request.pipeline.TILE_RULE}"
        raise PlanError(f"{limit}\n  nearest: {_nearest_tile(request, asked, stages)}")
    return asked


def _check_stages(request: _Request, stages: int | None) -> int | None:
    allowed = request.pipeline.STAGES
    if stages is not None and stages not in allowed:
        low, high = allowed[0], allowed[-1]
        raise PlanError(
            f"{stages} stages for {request}: {request.pipeline.STAGES_RULE}, so {low} to {high} work\n"
            f"  nearest: {min(high, max(low, stages))} stages"
        )
    return stages


def _check_q_stages(request: _Request) -> None:
    asked, pipeline = request.q_stages, request.pipeline
    if asked is None or (pipeline is hopper and asked in hopper.Q_STAGES):
        return
    if pipeline is hopper:
        low, high = hopper.Q_STAGES
        raise PlanError(
            f"{asked} tiles of queries in shared memory for {request}: while one is worked on, one more is loaded\n"
            f"  nearest: q_stages={min(high, max(low, asked))}"
        )
    able = "" if request.options else f", or pipeline {hopper.NAME!r}" * (hopper.NAME in request.arch.pipelines)
    raise PlanError(
        f"q_stages {asked} for {request}: blocks of pipeline {pipeline.NAME!r} load their one tile of queries once\n"
        f"  nearest: q_stages=None{able}"
    )


def _too_wide(request: _Request, name: str) -> str:
    """The message for a head dim above the largest: the sums of the tiles that come closest, where those decide."""
    pipeline, arch = request.pipeline, request.arch
    lines = [f"no tile of {request} fits {arch.name}"]
    for q, kv in pipeline.EXAMPLES:
        c = next(iter(pipeline.candidates(Tile(q=q, kv=kv), pipeline.STAGES[0])))
        dims = request.head_dim, request.v_head_dim
        reason = pipeline.does_not_fit_reason(c, request.variant, arch, *dims, **request.options)
        if reason is not None:
            lines.append(f"  {c}: {reason}")
    if len(lines) == 1:
        lines.append(f"  pipeline {pipeline.NAME} emits {name} up to {pipeline.MAX_HEAD_DIM}")
    lines.append(f"  nearest: {name} <= {pipeline.MAX_HEAD_DIM} on {arch.name}")
    return "\n".join(lines)


def _does_not_fit(request: _Request, tile: Tile | None, stages: int | None, rejected: list[Rejected]) -> str:
    """The message where nothing fits that has what is fixed: the least that was tried, and the nearest that fits."""
    subject = f"tile {tile} of {request} does not fit" if tile else f"no tile of {request} fits"
    asked = (stages, "stages"), (request.q_stages, "tiles of queries")
    fixed = " and ".join(f"{number} {what}" for number, what in asked if number)
    lines = [f"{subject} {request.arch.name}{f' with {fixed}' if fixed else ''}"]
    least = sorted(rejected, key=lambda r: (r.tile.q * r.tile.kv, r.stages, r.warps))
    lines += [f"  {r}" for r in least[:3]]
    return "\n".join((*lines, f"  nearest: {_nearest_tile(request, tile, stages)}"))


def _nearest_tile(request: _Request, tile: Tile | None, stages: int | None) -> str:
    """The tile that fits and is most like one that does not: on the pipeline's grid, or one the planner tries itself;
    and a pipeline of the architecture that takes the tile as it is.  Without a tile, what fits with other stages."""
    free = replace(request, q_stages=None)
    if tile is None:
        fits = _fitting(free, None, None)[0]
        near = min(fits, key=lambda plan: abs(plan.stages - (stages or plan.stages)), default=None)
        return f"{near.tile} with {near.stages} stages" if near else "a smaller head_dim"

    def distance(plan: KernelPlan) -> tuple:
        sides = (plan.tile.q, tile.q), (plan.tile.kv, tile.kv)
        ratios = sum(abs(math.log2(ours / max(1, asked))) for ours, asked in sides)
        return (ratios, abs(plan.stages - (stages or plan.stages)), -plan.tile.q * plan.tile.kv)

    q, kv = request.pipeline.nearest_tile((tile.q, tile.kv))
    plans = _fitting(request, Tile(q=q, kv=kv), stages)[0] or _fitting(request, None, None)[0]
    near = min(plans or _fitting(free, None, None)[0], key=distance)
    text = f"{near.tile} with {near.stages} stages" if stages or not plans else f"{near.tile}"
    others = [other for other in request.others if other.nearest_tile((tile.q, tile.kv)) == (tile.q, tile.kv)]
    able = [other for other in others if _fitting(replace(free, pipeline=other), tile, stages)[0]]
    return text + "".join(f", or pipeline {other.NAME!r}, which takes {tile}" for other in able)
