"""Which plans serve a problem where its tensors lie: on a GPU the planner's menu, on a CPU the menu that is walked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.planning import arch, planner
from flashgen.planning.float8 import FLOAT8
from flashgen.planning.layout import Layout
from flashgen.planning.pipelines.protocol import Pipeline
from flashgen.planning.plan import Fallback
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.runtime import driver

#: Rows of q, k and v start at a multiple of this many bytes: kernels move 16 at a time.
ALIGNMENT = 16

#: Pages of a multiple of so many rows suit every pipeline.
_PAGE_ROWS = 16

#: Architecture whose plan the CPU walks where the variant pins none.
CPU_ARCH = "sm_80"

#: The same of 8 bits.
CPU_ARCH_8_BITS = "sm_90a"

#: Why a pipeline cannot load a tensor, of each.
_CANNOT_ADDRESS = tuple(pipeline.cannot_address for pipeline in planner.PIPELINES.values())

#: Strides in elements, from 1 to below this, that every pipeline can load.
_ANY = 1 << 32

_log = logging.getLogger("flashgen")

#: What has been logged: requests with the pipeline that does not serve them.  Nothing is logged beyond so many.
_told: dict[tuple[KernelRequest, str], object] = {}
MAX_TOLD = 1024


def gpu_menu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, problem: Problem, **options: Any
) -> planner.Menu:
    """The plans for a problem on q's GPU, with the options of `KernelRequest.of`, of its best pipeline that can load
    the tensors; the planner memoises.  That a better one does not serve is logged, once for a request."""
    dims = problem.head_dim, problem.v_head_dim
    request = KernelRequest.of(variant, gpu_arch(q), problem.dtype, *dims, **options)
    menu = planner.menu_of(request)
    serving = planner.pipeline_of(menu.plans[0])
    for reason, nearest in _limits(serving, request.layout, q, k, v):
        if request.keys.invariant:  # another pipeline has other bits
            raise LaunchError(
                f"{reason}, and invariant=True has the bits of pipeline {serving.NAME}\n  nearest: {nearest}"
            )
        others = planner.others(serving, request)
        able = next((other for other in others if not _limits(other, request.layout, q, k, v)), None)
        if able is None:
            raise LaunchError(f"{reason}\n  nearest: {nearest}")
        if request.fixed.pipeline is not None:
            raise LaunchError(
                f"{variant.name!r} is pinned to pipeline {serving.NAME}, whose {reason}\n"
                f"  nearest: {nearest}, or pipeline {able.NAME}"
            )
        passed = Fallback(pipeline=serving.NAME, reason=f"its {reason}", nearest=nearest)
        menu = planner.menu_of(request.fixing(pipeline=able.NAME)).instead_of(*menu.fallbacks, passed)
        break
    _tell(request, menu)
    return menu


def _tell(request: KernelRequest, menu: planner.Menu) -> None:
    """Log, the first time for a request, which pipelines its kernels stand in for; what the variant pins is no news."""
    for fallback in menu.fallbacks:
        if fallback.pinned or (len(_told) >= MAX_TOLD and (request, fallback.pipeline) not in _told):
            continue
        new = object()  # of threads that meet one stores its own
        if _told.setdefault((request, fallback.pipeline), new) is new:
            _log.warning(
                "the %s of %s runs on pipeline %s instead of %s: %s\n  nearest: %s",
                *(request.pass_name, request, menu.plans[0].pipeline),
                *(fallback.pipeline, fallback.reason, fallback.nearest),
            )


def _limits(
    pipeline: Pipeline[Any], layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[str, str]]:
    """Why a pipeline cannot load all of these, each with the nearest that it can."""
    found = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        in_pages = layout.paged and name != "q"
        if limit := pipeline.cannot_address(x.shape, x.stride(), x.itemsize, in_pages=in_pages):
            found.append((f"{pipeline.COPIES} cannot address {name}: {limit}", f"{name}.contiguous(), a copy"))
    if layout.paged and (limit := pipeline.cannot_page(k.shape[2])):
        fit = max(_PAGE_ROWS, _PAGE_ROWS * round(k.shape[2] / _PAGE_ROWS))
        found.append((f"{pipeline.COPIES} cannot load pages: {limit}", f"pages of {fit} rows"))
    return found


def addressable(shape: Sequence[int], strides: Sequence[int], itemsize: int, *, in_pages: bool = False) -> bool:
    """Whether every pipeline can load a tensor, or a cache, of aligned rows that lies like this, in elements."""
    batch, head, row = strides[:3]
    if not in_pages and 0 < batch < _ANY and 0 < head < _ANY and 0 < row < _ANY:
        return True
    return not any([cannot(shape, strides, itemsize, in_pages=in_pages) for cannot in _CANNOT_ADDRESS])


def loadable(shape: Sequence[int], strides: Sequence[int], itemsize: int, *, in_pages: bool = False) -> bool:
    """Whether every pipeline can load a tensor, or a cache, that lies like this, in elements, and starts at a multiple
    of ALIGNMENT bytes: elements of a row lie side by side, and rows of whatever sizes start at such multiples too."""
    batch, head, row, column = strides
    any_of = batch | head | row  # none is negative
    if column != 1 or any_of * itemsize % ALIGNMENT:
        return False
    if not in_pages and batch and head and row and any_of < _ANY:
        return True
    return addressable(shape, strides, itemsize, in_pages=in_pages)


def gpu_arch(q: torch.Tensor) -> str:
    """The architecture whose kernels run on q's GPU."""
    return arch.of_device(*driver.gpu(q.device.index).capability).name


def cpu_request(variant: Variant, problem: Problem, **options: Any) -> KernelRequest:
    """What a menu is asked for whose tiles are walked, with the options of `KernelRequest.of`.  Where no kernel takes
    the dtype or the head dims, those of the nearest that one takes: the walk needs its tiles and their order only."""
    name = variant.pins.arch or (CPU_ARCH_8_BITS if problem.dtype in FLOAT8 else CPU_ARCH)
    known = planner.FLOAT8 if problem.kv_dtype in FLOAT8 else planner.PIPELINES
    best = known[arch.find(name).pipelines[-1 if problem.wide_queries else 0]]
    dtype = problem.dtype if problem.itemsize <= 2 or problem.kv_dtype in FLOAT8 else variant.dtypes[-1]
    head_dim, v_head_dim = problem.head_dim, problem.v_head_dim
    if not variant.only or head_dim in variant.head_dims:
        head_dim, v_head_dim = (
            min(max(-(-dim // best.HEAD_DIM_STEP) * best.HEAD_DIM_STEP, best.MIN_HEAD_DIM), best.MAX_HEAD_DIM)
            for dim in (head_dim, v_head_dim)
        )
    return KernelRequest.of(variant, name, dtype, head_dim, v_head_dim, **options)
