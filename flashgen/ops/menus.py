"""Which plans serve a problem where its tensors lie: on a GPU the planner's menu, on a CPU the menu that is walked."""

from __future__ import annotations

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.planning import arch, planner
from flashgen.planning.ampere import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from flashgen.planning.problem import Problem
from flashgen.runtime import driver, kernel

#: Architecture whose plan the CPU walks where the variant pins none.
CPU_ARCH = "sm_80"


def gpu_menu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, problem: Problem, *, dropout: bool
) -> planner.Menu:
    """The plans for a problem on q's GPU, of its best pipeline that can address the tensors; the planner memoises."""
    asked = (variant, gpu_arch(q), problem.dtype, problem.head_dim, problem.v_head_dim)
    menu = planner.menu(*asked, dropout=dropout)
    if menu.plans[0].specialized is None:
        return menu
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refusal = kernel.tma_unsupported_reason(tensor.shape, tensor.stride(), tensor.itemsize)
        if refusal is not None and variant.pins.pipeline is not None:
            raise LaunchError(
                f"{variant.name!r} is pinned to pipeline {variant.pins.pipeline}, whose TMA cannot address {name}:"
                f" {refusal}\n  nearest: {name}.contiguous(), a copy, or pipeline ampere"
            )
        if refusal is not None:
            return planner.menu(*asked, pipeline="ampere", dropout=dropout)
    return menu


def gpu_arch(q: torch.Tensor) -> str:
    """The architecture whose kernels run on q's GPU."""
    return arch.of_device(*driver.gpu(q.device.index).capability).name


def cpu_request(variant: Variant, problem: Problem) -> tuple[Variant, str, str, int, int]:
    """What a menu is asked for whose tiles are walked.  Where no kernel takes the dtype or the head dims, those of the
    nearest that one takes: the walk needs its tiles and their order only."""
    dtype = problem.dtype if problem.itemsize == 2 else variant.dtypes[-1]
    dims = problem.head_dim, problem.v_head_dim
    if not variant.only or problem.head_dim in variant.head_dims:
        dims = tuple(min(max(-(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, MIN_HEAD_DIM), MAX_HEAD_DIM) for dim in dims)
    return variant, variant.pins.arch or CPU_ARCH, dtype, *dims
