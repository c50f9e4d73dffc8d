"""Emitted attention kernels on the PTX interpreter: a plan, random input, and what running it gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tolerance import baseline, judge, judge_lse, reference

from flashgen.analysis.facts import Facts, analyse
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.interpreter.simulate import Simulated, simulate
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant
from flashgen.planning.members import SoftCap
from flashgen.planning.pipelines.ampere import forward as ampere
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.plan import KernelPlan
from flashgen.planning.planner import menu
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest

#: Values of parameters and constants small enough for short sequences to have tiles of every class.
VALUES = {
    "sliding_window": {"window": 40},
    "sink_window": {"window": 48},
    "chunked": {"chunk": 64},
    "local_softcap": {"window": 70},
    "prefix_lm": {"prefix": 50},
}

#: An architecture of each pipeline.
ARCH = {"ampere": "sm_80", "hopper": "sm_90a"}

#: A tile and stages for tests: small, so that 150 queries and 211 keys make two or more by three or more tiles.
TILES = {"ampere": (64, 64), "hopper": (128, 64)}


@dataclass(frozen=True)
class Work:
    """A kernel and the data to run it on."""

    plan: KernelPlan
    variant: Variant
    facts: Facts
    problem: Problem
    case: Case
    qkv: tuple[torch.Tensor, ...]
    source: str
    scale: float

    def run(self, edit: Callable[[str], str] | None = None, **options) -> Simulated:
        """The kernel, its CUDA text changed by `edit`."""
        source = edit(self.source) if edit else self.source
        arrays = [x.float().numpy() for x in self.qkv]
        return simulate(self.plan, self.case, *arrays, scale=self.scale, source=source, **options)

    def with_members(self, **members: object) -> Work:
        """The same work by a kernel that has these members of `Specialized`."""
        plan = dataclasses.replace(self.plan, specialized=dataclasses.replace(self.plan.specialized, **members))
        return dataclasses.replace(self, plan=plan, source=emit(plan))

    def wrong(self, result: Simulated) -> tuple[str, ...]:
        """What breaks the tolerance rule, against float64."""
        ref, ref_lse = reference(self.variant, self.case, *self.qkv, scale=self.scale)
        base, _ = baseline(self.variant, self.case, *self.qkv, scale=self.scale)
        o = torch.from_numpy(result.o).to(getattr(torch, self.problem.dtype))
        verdict = judge(o, base, ref, self.problem.dtype)
        return verdict.reasons + judge_lse(torch.from_numpy(result.lse), ref_lse)

    def lse_error(self) -> float:
        """How far lse may be from that of the walk: what float32 rounds, and of a soft cap the 2^-17.4 of its value by
        which `small_tanh` (templates/device/math.cuh) errs, of the largest score."""
        if not isinstance(getattr(self.plan.specialized, "score", None), SoftCap):
            return 4e-6
        q, k, _ = (x.double() for x in self.qkv)
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * self.scale
        return 4e-6 + 2.0**-17.4 * scores.abs().max().item()


def plan_of(
    variant: Variant,
    problem: Problem,
    pipeline: str,
    tile: tuple[int, int] | None = None,
    stages: int = 2,
    q_stages: int = 2,
    packed: bool = False,
) -> KernelPlan:
    """The planner's plan with this tile (by default that of TILES); `q_stages` of pipeline hopper."""
    p, arch = problem, ARCH[pipeline]
    plans = menu(
        variant, arch, p.dtype, p.head_dim, p.v_head_dim, tile=tile or TILES[pipeline], stages=stages, pipeline=pipeline
    ).plans
    if pipeline == "ampere":
        return ampere.packed(plans[0]) if packed else plans[0]
    if plans[0].q_stages == q_stages and not packed:
        return plans[0]
    candidate = hopper.Candidate(tile=plans[0].tile, stages=stages, q_stages=q_stages)
    plan = hopper.plan(candidate, KernelRequest.of(variant, arch, p.dtype, p.head_dim, p.v_head_dim))
    return hopper.packed(plan) if packed else plan


def work(
    spec: str | Variant,
    pipeline: str,
    *,
    tile: tuple[int, int] | None = None,
    stages: int = 2,
    q_stages: int = 2,
    packed: bool = False,
    seed: int = 0,
    case: Case | None = None,
    **shape,
) -> Work:
    """A spec's kernel on random normal input; `shape` overrides 2 heads over 1, 150 queries, 211 keys, head_dim 64.

    `case` has the values of parameters and captured tensors; by default those of VALUES and the examples.
    """
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 211, "head_dim": 64, **shape}
    shape.setdefault("v_head_dim", shape["head_dim"])
    shape.setdefault("dtype", "bfloat16")
    problem = Problem(**shape)
    variant = load_spec(spec) if isinstance(spec, str) else spec
    values = VALUES.get(spec, {}) if isinstance(spec, str) else {}
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    variant = variant.bind(**constants)
    if case is None:
        params = variant.values({name: value for name, value in values.items() if name not in constants})
        tensors = {t.name: np.asarray(t.example(problem, np.random.default_rng(seed))) for t in variant.tensors}
        case = Case(sizes=problem.sizes(), params=params, tensors=tensors)
    p, g = problem, torch.Generator().manual_seed(seed)
    keys = (p.batch, p.kv_heads, p.kv_len)
    shapes = (p.batch, p.heads, p.q_len, p.head_dim), (*keys, p.head_dim), (*keys, p.v_head_dim)
    qkv = tuple(torch.randn(s, generator=g, dtype=torch.float64).to(getattr(torch, p.dtype)) for s in shapes)
    plan = plan_of(variant, problem, pipeline, tile, stages, q_stages, packed)
    return Work(plan, variant, analyse(variant), problem, case, qkv, emit(plan), problem.head_dim**-0.5)


def replace(old: str, new: str, count: int = 1) -> Callable[[str], str]:
    """An edit of emitted text; the text must hold `old` exactly `count` times."""

    def edit(source: str) -> str:
        assert source.count(old) == count, f"{source.count(old)} times: {old!r}"
        return source.replace(old, new)

    return edit
