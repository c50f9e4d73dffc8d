"""The check of every GPU test: random input, poisoned outputs, judged against float64 by the tolerance rule."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tolerance import POOL, Verdict, baseline, judge, judge_lse, reference

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.planning.arch import ARCHS, of_device
from flashgen.planning.problem import Problem
from flashgen.runtime import kernel

DEVICE = "cuda"

#: Every pipeline that some architecture has.
PIPELINES = sorted({pipeline for arch in ARCHS.values() for pipeline in arch.pipelines})

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Memory that torch allocates in here is NaN until something writes it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(64, device=DEVICE).isnan().all(), "torch no longer fills uninitialised memory"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: fg.Variant, **named: object):
    """(o, lse) of attention() into poisoned memory."""
    with poison():
        return fg.attention(q, k, v, variant, return_lse=True, **named)


def random_inputs(problem: Problem, seed: int, std: float = 1.0) -> Tensors:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    p, dtype = problem, getattr(torch, problem.dtype)
    shapes = (
        (p.batch, p.heads, p.q_len, p.head_dim),
        (p.batch, p.kv_heads, p.kv_len, p.head_dim),
        (p.batch, p.kv_heads, p.kv_len, p.v_head_dim),
    )
    return tuple((std * torch.randn(s, device=DEVICE, generator=generator)).to(dtype) for s in shapes)


def example_tensors(variant: fg.Variant, problem: Problem, seed: int) -> dict[str, torch.Tensor]:
    """The captured tensors that a spec makes for a problem, in their declared types."""
    rng = np.random.default_rng(seed)
    return {
        t.name: torch.as_tensor(np.asarray(t.example(problem, rng))).to(DEVICE, getattr(torch, t.dtype))
        for t in variant.tensors
    }


def case_of(variant: fg.Variant, problem: Problem, params: Mapping, captured: Mapping[str, torch.Tensor]) -> Case:
    arrays = {
        name: (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t).cpu().numpy()
        for name, t in captured.items()
    }
    return Case(sizes=problem.sizes(), params=variant.values(params), tensors=arrays)


def check(
    variant: fg.Variant,
    *,
    q_len: int,
    kv_len: int | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: str = "bfloat16",
    scale: float | None = None,
    params: Mapping[str, int | float] | None = None,
    captured: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    std: float = 1.0,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> None:
    """Run and judge one problem; few elements are drawn again until the pool is large enough to judge.

    `view` makes of each of q, k and v the strided view that the kernel is given.
    """
    problem = Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads or heads,
        q_len=q_len,
        kv_len=q_len if kv_len is None else kv_len,
        head_dim=head_dim,
        v_head_dim=v_head_dim or head_dim,
        dtype=dtype,
    )
    bound, params = variant.bind(), params or {}
    factor = head_dim**-0.5 if scale is None else scale
    pools: tuple[list, ...] = ([], [], [], [], [])
    elements = batch * heads * q_len * problem.v_head_dim
    for draw in range(-(-POOL // elements)):
        q, k, v = random_inputs(problem, seed + draw, std)
        tensors = example_tensors(bound, problem, seed + draw) if captured is None else captured
        case = case_of(bound, problem, params, tensors)
        o, lse = call(view(q), view(k), view(v), variant, scale=scale, **params, **tensors)
        ref, ref_lse = reference(bound, case, q, k, v, scale=factor)
        base, _ = baseline(bound, case, q, k, v, scale=factor)
        for pool, tensor in zip(pools, (o, base, ref, lse, ref_lse), strict=True):
            pool.append(tensor.flatten())
    o, base, ref, lse, ref_lse = map(torch.cat, pools)
    about = f"{variant.name} {problem} scale {scale} {params} seed {seed}"
    settle(judge(o, base, ref, dtype), judge_lse(lse, ref_lse), about)


def settle(verdict: Verdict, lse_reasons: tuple[str, ...], about: str) -> None:
    wrong = (*verdict.reasons, *lse_reasons)
    assert not wrong, f"{about}\n  " + "\n  ".join(wrong) + f"\n  {verdict}"


def on(variant: fg.Variant, pipeline: str) -> fg.Variant:
    """The variant on a pipeline of its own choice; skips the test where this GPU's architecture lacks it."""
    here = of_device(*torch.cuda.get_device_capability()).pipelines if torch.cuda.is_available() else ("ampere",)
    if pipeline not in here:
        pytest.skip(f"this GPU has no pipeline {pipeline}")
    return dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline=pipeline))


def compile_together(plans) -> None:
    """Build kernels side by side, so that the tests that follow do not wait for one after the other."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(kernel.load, dict.fromkeys(plans)))


def menus(variants, dtypes, dims) -> Iterator:
    """Every plan that calls on this GPU may choose for variants x dtypes x (head_dim, v_head_dim)."""
    from flashgen.ops.stages import default_arch
    from flashgen.planning.planner import menu

    for variant in variants:
        for dtype in dtypes:
            for head_dim, v_head_dim in dims:
                bound = variant.bind()
                yield from menu(bound, default_arch(bound), dtype, head_dim, v_head_dim).forms
