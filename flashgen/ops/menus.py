"""Which plans serve a problem where its tensors lie: on a GPU the planner's menu, on a CPU the menu that is walked."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.planning import arch, planner
from flashgen.planning.pipelines.protocol import Pipeline
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.runtime import driver

#: Architecture whose plan the CPU walks where the variant pins none.
CPU_ARCH = "sm_80"


def gpu_menu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, problem: Problem, **options: Any
) -> planner.Menu:
    """The plans for a problem on q's GPU, with the options of `KernelRequest.of`, of its best pipeline that can address
    the tensors; the planner memoises."""
    dims = problem.head_dim, problem.v_head_dim
    request = KernelRequest.of(variant, gpu_arch(q), problem.dtype, *dims, **options)
    menu = planner.menu_of(request)
    serving = planner.pipeline_of(menu.plans[0])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        limit = serving.cannot_address(tensor.shape, tensor.stride(), tensor.itemsize)
        if limit is None:
            continue
        able = next(other for other in planner.others(serving, request) if _addresses(other, q, k, v))
        if request.fixed.pipeline is not None:
            raise LaunchError(
                f"{variant.name!r} is pinned to pipeline {serving.NAME}, whose {serving.COPIES} cannot address {name}:"
                f" {limit}\n  nearest: {name}.contiguous(), a copy, or pipeline {able.NAME}"
            )
        return planner.menu_of(request.fixing(pipeline=able.NAME))
    return menu


def _addresses(pipeline: Pipeline[Any], *tensors: torch.Tensor) -> bool:
    """Whether a pipeline can load all of these."""
    return all(pipeline.cannot_address(x.shape, x.stride(), x.itemsize) is None for x in tensors)


def loadable(x: torch.Tensor) -> bool:
    """Whether every pipeline can load a tensor whose rows are aligned."""
    return all(_addresses(pipeline, x) for pipeline in planner.PIPELINES.values())


def gpu_arch(q: torch.Tensor) -> str:
    """The architecture whose kernels run on q's GPU."""
    return arch.of_device(*driver.gpu(q.device.index).capability).name


def cpu_request(variant: Variant, problem: Problem, **options: Any) -> KernelRequest:
    """What a menu is asked for whose tiles are walked, with the options of `KernelRequest.of`.  Where no kernel takes
    the dtype or the head dims, those of the nearest that one takes: the walk needs its tiles and their order only."""
    name = variant.pins.arch or CPU_ARCH
    best = planner.PIPELINES[arch.find(name).pipelines[0]]
    dtype = problem.dtype if problem.itemsize == 2 else variant.dtypes[-1]
    head_dim, v_head_dim = problem.head_dim, problem.v_head_dim
    if not variant.only or head_dim in variant.head_dims:
        head_dim, v_head_dim = (
            min(max(-(-dim // best.HEAD_DIM_STEP) * best.HEAD_DIM_STEP, best.MIN_HEAD_DIM), best.MAX_HEAD_DIM)
            for dim in (head_dim, v_head_dim)
        )
    return KernelRequest.of(variant, name, dtype, head_dim, v_head_dim, **options)
