"""Pipelines by name: which modules answer for a pass and a width of elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.planning.pipelines.ampere import backward as ampere_backward
from flashgen.planning.pipelines.ampere import float8 as ampere_float8
from flashgen.planning.pipelines.ampere import forward as ampere
from flashgen.planning.pipelines.hopper import backward as hopper_backward
from flashgen.planning.pipelines.hopper import float8 as hopper_float8
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.pipelines.protocol import BackwardPipeline, ForwardPipeline, Packing, Pipeline
from flashgen.planning.plan import KernelPlan
from flashgen.planning.request import KernelRequest

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


def others(pipeline: Pipeline[Any], request: KernelRequest) -> list[Pipeline[Any]]:
    """The architecture's other pipelines that have such kernels."""
    known = pipelines(request)
    others = [known[name] for name in request.arch.pipelines if name != pipeline.NAME]
    return [other for other in others if other.unsupported_reason(request) is None]
