"""What no kernel of a pipeline takes, said with the limit and the nearest thing that works."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashgen.errors import PlanError
from flashgen.planning import ranking
from flashgen.planning.float8 import E4M3
from flashgen.planning.integers import INTEGERS
from flashgen.planning.menu import Rejected
from flashgen.planning.pipelines.protocol import Pipeline
from flashgen.planning.pipelines.table import others
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.problem import check_dtype
from flashgen.planning.request import Fixed, KernelRequest

DTYPES = ("float16", "bfloat16", E4M3)


def check(pipeline: Pipeline[Any], request: KernelRequest) -> None:
    """Raise PlanError for what no kernel of the pipeline takes, whatever fits."""
    _check_dtype(request)
    _check_head_dims(pipeline, request)
    for name in sorted(request.fixed.integers(), key=lambda name: name == "stages"):  # those of few pipelines first
        _check_integer(pipeline, request, name)
    tile = request.fixed.tile
    if tile is not None and pipeline.nearest_tile((tile.q, tile.kv)) != (tile.q, tile.kv):
        limit = f"tile {tile} of {request}: {pipeline.TILE_RULE}"
        raise PlanError(f"{limit}\n  nearest: {nearest_tile(pipeline, request)}")


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


def lacking(request: KernelRequest, pipeline: Pipeline[Any], reason: str) -> str:
    """The message where the pipeline that is fixed has no such kernels."""
    able = [f"pipeline {other.NAME!r}" for other in others(pipeline, request)[:1]]
    works = ", or ".join((*able, *served(pipeline, request)))
    nearest = f"\n  nearest: {works}" if works else ""
    if request.pass_name == "forward":
        return f"pipeline {pipeline.NAME!r} {reason}{nearest}"
    return f"no backward of {request.variant.name!r} as asked for\n  pipeline {pipeline.NAME}: {reason}{nearest}"


def served(pipeline: Pipeline[Any], request: KernelRequest) -> list[str]:
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


def does_not_fit(pipeline: Pipeline[Any], request: KernelRequest, rejected: list[Rejected]) -> str:
    """The message where nothing fits that has what is fixed: the least that was tried, and the nearest that fits."""
    tile, arch = request.fixed.tile, request.arch.name
    subject = f"tile {tile} of {request} does not fit" if tile else f"no tile of {request} fits"
    fixed = " and ".join(f"{value} {INTEGERS[name].counts}" for name, value in request.fixed.integers().items())
    lines = [f"{subject} {arch}{f' with {fixed}' if fixed else ''}"]
    least = sorted(rejected, key=lambda r: (r.tile.q * r.tile.kv, r.stages, r.warps))
    lines += [f"  {r}" for r in least[:3]]
    return "\n".join((*lines, f"  nearest: {nearest_tile(pipeline, request)}"))


def nearest_tile(pipeline: Pipeline[Any], request: KernelRequest) -> str:
    """The tile that fits and is most like one that does not: on the pipeline's grid, or one the planner tries itself;
    and a pipeline of the architecture that takes the tile as it is.  Without a tile, what fits with other stages."""
    tile, stages = request.fixed.tile, request.fixed.stages
    open_ = request.fixing(**dict.fromkeys(INTEGERS), tile=None)  # nothing is fixed
    if tile is None:
        fits = ranking.fitting(pipeline, open_)[0]
        least = min(fits, key=lambda plan: abs(plan.stages - (stages or plan.stages)), default=None)
        return f"{least.tile} with {least.stages} stages" if least else "a smaller head_dim"

    def distance(plan: KernelPlan) -> tuple[float, int, int]:
        sides = (plan.tile.q, tile.q), (plan.tile.kv, tile.kv)
        ratios = sum(abs(math.log2(ours / max(1, asked))) for ours, asked in sides)
        return (ratios, abs(plan.stages - (stages or plan.stages)), -plan.tile.q * plan.tile.kv)

    q, kv = pipeline.nearest_tile((tile.q, tile.kv))
    plans = ranking.fitting(pipeline, request.fixing(tile=Tile(q=q, kv=kv)))[0]
    plans = plans or ranking.fitting(pipeline, request.fixing(tile=None, stages=None))[0]
    near = min(plans or ranking.fitting(pipeline, open_)[0], key=distance)
    text = f"{near.tile} with {near.stages} stages" if stages or not plans else f"{near.tile}"
    if request.pass_name == "backward":
        return text
    as_it_is = open_.fixing(tile=tile, stages=stages)
    for other in others(pipeline, request):
        if other.nearest_tile((tile.q, tile.kv)) == (tile.q, tile.kv) and ranking.fitting(other, as_it_is)[0]:
            text += f", or pipeline {other.NAME!r}, which takes {tile}"
    return text
