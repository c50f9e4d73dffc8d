"""Candidates -> must fit -> ranked: the menu of kernels for a variant, and which of them serves a call.

No length enters the menu; a call picks an entry with a few integer divisions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.errors import PlanError
from flashgen.lang.variant import Variant
from flashgen.planning import ampere
from flashgen.planning import arch as archs
from flashgen.planning.ampere import Candidate
from flashgen.planning.arch import Arch
from flashgen.planning.plan import KernelPlan, Role, Tile
from flashgen.planning.problem import Problem

DTYPES = ("float16", "bfloat16")

#: A menu never has more entries.
MAX_PLANS = 4


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
class Menu:
    """At most four plans for (variant, arch, dtype, head dims), the one for long sequences first.

    `paces[i][n - 1]` is the time in seconds that a multiprocessor needs for one score while n blocks of plans[i] share
    it.
    """

    plans: tuple[KernelPlan, ...]
    paces: tuple[tuple[float, ...], ...]
    rejected: tuple[Rejected, ...]


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
) -> Menu:
    """The kernels that serve `variant` (constants bound) at any length, ranked by predicted time.

    `tile` (query rows, key rows) and `stages` fix what the planner would choose; so do the variant's pins where the
    call says nothing.  What is fixed is checked, never changed.  Raises PlanError with the limit and the nearest thing
    that works.  The result is memoised.
    """
    return _menu(variant, arch, dtype, head_dim, v_head_dim or head_dim, pipeline, tile, stages)


def choose(menu: Menu, problem: Problem, sms: int) -> KernelPlan:
    """The entry of the menu with the least predicted time for `problem` on `sms` multiprocessors.

    O(1): blocks are counted, not scheduled, and the mask is not looked at.  A short problem takes a smaller tile_q, so
    that there are blocks for every multiprocessor.
    """
    if len(menu.plans) == 1 or problem.empty:
        return menu.plans[0]
    times = [_busiest(plan, paces, problem, sms) for plan, paces in zip(menu.plans, menu.paces, strict=True)]
    return menu.plans[times.index(min(times))]


def _busiest(plan: KernelPlan, paces: Sequence[float], problem: Problem, sms: int) -> float:
    """Seconds of the multiprocessor with most blocks, if every block visits every key."""
    blocks = -(-problem.q_len // plan.tile.q) * problem.heads * problem.batch
    waves, rest = divmod(-(-blocks // sms), len(paces))
    scores = plan.tile.q * max(1, -(-problem.kv_len // plan.tile.kv)) * plan.tile.kv
    return scores * (waves * len(paces) * paces[-1] + (rest * paces[rest - 1] if rest else 0.0))


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
) -> Menu:
    arch = archs.find(arch_name)
    request = _Request(variant=variant, arch=arch, dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim)
    pins = variant.pins
    if pins.arch is not None and archs.find(pins.arch) is not arch:
        pinned = archs.find(pins.arch).name
        raise PlanError(f"{variant.name!r} is pinned to {pinned}\n  asked: {arch.name}\n  nearest: {pinned}")
    archs.pipeline(arch, pipeline or pins.pipeline)  # one pipeline so far: ampere
    _check_dtype(request)
    _check_head_dims(request)
    fixed = tile or pins.tile
    tile_pin = _check_tile(request, fixed) if fixed else None
    stages_pin = _check_stages(request, stages or pins.stages)

    plans, rejected = _fitting(request, tile_pin, stages_pin)
    if tile_pin and not plans:
        raise PlanError(_does_not_fit(request, tile_pin, stages_pin, rejected))
    chosen, slower = _select(request, plans)
    paces = tuple(tuple(ampere.pace(p, arch, n) for n in range(1, p.blocks_per_sm + 1)) for p in chosen)
    return Menu(plans=tuple(chosen), paces=paces, rejected=(*rejected, *slower))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    variant: Variant
    arch: Arch
    dtype: str
    head_dim: int
    v_head_dim: int

    def __str__(self) -> str:
        dims = f"head_dim {self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f", v_head_dim {self.v_head_dim}"
        return f"{self.variant.name!r} ({dims}, {self.dtype})"


def _fitting(request: _Request, tile: Tile | None, stages: int | None) -> tuple[list[KernelPlan], list[Rejected]]:
    """Every candidate as a plan, or rejected with the limit it passes."""
    arch, plans, rejected = request.arch, [], {}
    d, dv = ampere.padded(request.head_dim), ampere.padded(request.v_head_dim)
    for c in ampere.candidates(tile, stages):
        smem, registers = ampere.smem(c, d, dv), ampere.registers(c, d, dv, request.variant)
        smem_bytes, needed = (sum(part.amount for part in parts) for parts in (smem, registers))
        reason = ampere.refusal(c, arch, smem_bytes, needed)
        if reason is not None:
            # Q in registers needs more of them: the candidate's own reason is the one without.
            rejected.setdefault((c.tile, c.stages, c.warps), reason)
            continue
        blocks = ampere.blocks_per_sm(c, arch, smem_bytes, needed)
        plans.append(
            KernelPlan(
                variant=request.variant,
                pass_name="forward",
                pipeline=ampere.NAME,
                arch=arch.name,
                dtype=request.dtype,
                head_dim=request.head_dim,
                v_head_dim=request.v_head_dim,
                padded_head_dim=d,
                padded_v_head_dim=dv,
                tile=c.tile,
                stages=c.stages,
                roles=(Role(name="compute", warps=c.warps),),
                q_in_registers=c.q_in_registers,
                blocks_per_sm=blocks,
                smem=smem,
                registers=(*registers, ampere.ahead(c, arch, needed, blocks)),
            )
        )
    fits = {(plan.tile, plan.stages, plan.warps) for plan in plans}
    return plans, [
        Rejected(tile=t, stages=s, warps=w, reason=reason)
        for (t, s, w), reason in rejected.items()
        if (t, s, w) not in fits
    ]


def _select(request: _Request, plans: list[KernelPlan]) -> tuple[list[KernelPlan], list[Rejected]]:
    """The fastest plan for each tile_q up to the overall fastest's, which stands first; the others with their pace."""
    best: dict[tuple, tuple] = {}  # one form (Q in registers or not) for each tile, stages and warps
    for plan in plans:
        pace = ampere.pace(plan, request.arch, plan.blocks_per_sm)
        key = (plan.tile, plan.stages, plan.warps)
        # Equal paces: less shared memory, then fewer registers; a total order, so that the menu never varies.
        rank = (pace, plan.smem_bytes, plan.registers_estimate, -plan.tile.q, -plan.tile.kv, plan.warps)
        if key not in best or rank < best[key][0]:
            best[key] = (rank, plan)
    ranked = [(rank[0], plan) for rank, plan in sorted(best.values(), key=lambda entry: entry[0])]
    chosen: list[KernelPlan] = []
    slower: list[Rejected] = []
    for pace, plan in ranked:
        if not chosen or (
            plan.tile.q < chosen[0].tile.q and plan.tile.q not in {p.tile.q for p in chosen} and len(chosen) < MAX_PLANS
        ):
            chosen.append(plan)
            continue
        ahead = next((p for p in chosen if p.tile.q == plan.tile.q), chosen[0])
        rival = ampere.pace(ahead, request.arch, ahead.blocks_per_sm)
        reason = f"predicted {pace / rival:.2f}x the time of {ahead.tile.q} x {ahead.tile.kv}, {ahead.stages} stages"
        slower.append(Rejected(tile=plan.tile, stages=plan.stages, warps=plan.warps, reason=reason))
    return chosen, slower


def _check_dtype(request: _Request) -> None:
    if request.dtype not in DTYPES:
        raise PlanError(
            f"no kernel for {request}: the tensor cores take 16-bit inputs and accumulate in float32\n"
            f"  dtypes that work: {', '.join(DTYPES)} (float32 and float64 run on a CPU)\n  nearest: bfloat16"
        )
    _check_only(request, "dtype", request.dtype, request.variant.dtypes)


def _check_head_dims(request: _Request) -> None:
    for name, value in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
        low, high, step = ampere.MIN_HEAD_DIM, ampere.MAX_HEAD_DIM, ampere.HEAD_DIM_STEP
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


def _check_tile(request: _Request, tile: tuple[int, int]) -> Tile:
    """The tile as asked, or PlanError where mma's shape rules it out."""
    step, high = ampere.MMA_ROWS, ampere.MAX_TILE
    rounded = [min(high, max(step, step * round(n / step))) for n in tile]
    if rounded != list(tile):
        raise PlanError(
            f"tile {tile[0]}x{tile[1]} of {request}: both sides are multiples of {step} (the rows and the depth of one"
            f" mma) up to {high}\n  nearest: {rounded[0]}x{rounded[1]}"
        )
    return Tile(q=tile[0], kv=tile[1])


def _check_stages(request: _Request, stages: int | None) -> int | None:
    if stages is not None and stages not in ampere.STAGES:
        low, high = ampere.STAGES[0], ampere.STAGES[-1]
        raise PlanError(
            f"{stages} stages for {request}: cp.async fills one stage while another is used, so {low} to {high} work\n"
            f"  nearest: {min(high, max(low, stages))} stages"
        )
    return stages


def _too_wide(request: _Request, name: str) -> str:
    """The message for a head dim above the largest: the sums of the tiles that come closest, where those decide."""
    d, dv = ampere.padded(request.head_dim), ampere.padded(request.v_head_dim)
    lines = [f"no tile of {request} fits {request.arch.name}"]
    for c in _least(list(ampere.candidates(None, ampere.STAGES[0]))):
        parts = ampere.smem(c, d, dv), ampere.registers(c, d, dv, request.variant)
        reason = ampere.refusal(c, request.arch, *(sum(part.amount for part in terms) for terms in parts))
        if reason is not None:
            lines.append(f"  {c}: {reason}")
    if len(lines) == 1:
        lines.append(f"  pipeline {ampere.NAME} emits {name} up to {ampere.MAX_HEAD_DIM}")
    lines.append(f"  nearest: {name} <= {ampere.MAX_HEAD_DIM} on {request.arch.name}")
    return "\n".join(lines)


def _least(found: list[Candidate]) -> list[Candidate]:
    """A large, a middle and the smallest tile: enough to see why none fits."""
    wanted = {(128, 64), (64, 64), (32, 16)}
    first: dict[tuple[int, int], Candidate] = {}
    for c in found:
        if (c.tile.q, c.tile.kv) in wanted:
            first.setdefault((c.tile.q, c.tile.kv), c)
    return list(first.values())


def _does_not_fit(request: _Request, tile: Tile, stages: int | None, rejected: list[Rejected]) -> str:
    """The message for a fixed tile; the planner's own tiles always have one that fits."""
    lines = [f"tile {tile} of {request} does not fit {request.arch.name}"]
    if stages:
        lines[0] += f" with {stages} stages"
    lines += [f"  {r}" for r in sorted(rejected, key=lambda r: (r.stages, r.warps))[:3]]

    def distance(plan: KernelPlan) -> tuple:
        ratios = abs(math.log2(plan.tile.q / tile.q)) + abs(math.log2(plan.tile.kv / tile.kv))
        return (ratios, abs(plan.stages - (stages or plan.stages)), -plan.tile.q * plan.tile.kv)

    near = min(_fitting(request, None, None)[0], key=distance)
    return "\n".join((*lines, f"  nearest: {near.tile} with {near.stages} stages"))
