"""Kernels whose keys are split among blocks, on the PTX interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
from padded import Batch, batch
from paged import PagedBatch, in_pages
from ptx_attention import Work, work

from flashgen.codegen import emit
from flashgen.interpreter.simulate import Simulated
from flashgen.lang.variant import Variant
from flashgen.planning.members import Keys, SplitKeys
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.plan import KernelPlan
from flashgen.planning.request import Forward, KernelRequest

#: Blocks take turns over tiles.
IN_TURNS = SplitKeys()


def split(plan: KernelPlan, keys: Keys = IN_TURNS) -> KernelPlan:
    """The same tile and integers with keys that are split."""
    asked = Forward(dropout=plan.dropout, keys=keys)
    request = dataclasses.replace(KernelRequest.of_plan(plan), asked=asked)
    if plan.pipeline == "hopper":
        found = hopper.plan(hopper.Candidate(tile=plan.tile, stages=plan.stages, q_stages=plan.q_stages), request)
        found = hopper.packed(found) if plan.packed else found
        assert found is not None
        return found
    return dataclasses.replace(plan, keys=keys)


def split_work(spec: str | Variant, pipeline: str, keys: Keys = IN_TURNS, **shape) -> Work:
    """`work` with keys that are split."""
    found = work(spec, pipeline, **shape)
    plan = split(found.plan, keys)
    return dataclasses.replace(found, plan=plan, source=emit(plan))


def split_batch(spec: str | Variant, pipeline: str, keys: Keys = IN_TURNS, **shape) -> Batch:
    """`batch` with keys that are split."""
    found = batch(spec, pipeline, **shape)
    return dataclasses.replace(found, plan=split(found.plan, keys))


def split_pages(spec: str | Variant, pipeline: str, page_size: int, keys: Keys = IN_TURNS, **shape) -> PagedBatch:
    """`in_pages` of a `batch` with keys that are split."""
    found = in_pages(batch(spec, pipeline, **shape), page_size)
    return dataclasses.replace(found, plan=split(found.plan, keys))


def differing(one: Simulated, other: Simulated) -> int:
    """Bits of o and lse that differ, signs of zeros too."""
    return sum(
        int((np.ascontiguousarray(x).view(np.uint32) != np.ascontiguousarray(y).view(np.uint32)).sum())
        for x, y in ((one.o, other.o), (one.lse, other.lse))
    )
