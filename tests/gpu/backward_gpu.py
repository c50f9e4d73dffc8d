"""The check of every GPU test of gradients: random input, poisoned memory, judged against float64 by the rule."""

import math
from collections.abc import Callable, Mapping

import torch
from gpu_checks import DEVICE, case_of, example_tensors, poison, random_inputs
from tolerance import POOL, judge

import flashgen as fg
from flashgen.analysis.derivative import differentiable
from flashgen.ops.stages import default_arch
from flashgen.planning import planner
from flashgen.planning.problem import Problem
from flashgen.runtime.gradients import baseline_gradients, reference_gradients
from flashgen.runtime.philox import Dropout

#: Draws of a problem whose captured tensors want gradients.  Of two elements the largest error is now 1/8, now 3 times
#: that of same-precision PyTorch (12 draws of the walk's own arithmetic): one draw is too few.
DRAWS = 8


def problem_of(q_len: int, **shape: object) -> Problem:
    given = {"batch": 2, "heads": 4, "kv_len": q_len, "head_dim": 64, "dtype": "bfloat16", **shape}
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("v_head_dim", given["head_dim"])
    return Problem(q_len=q_len, **given)


def gradients(variant, tensors, do, dlse, named, wanted, **options):
    """dq, dk, dv and those of the wanted captured tensors, of a call and a backward into poisoned memory."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    captured = dict(named)
    for name in wanted:
        captured[name] = named[name].detach().requires_grad_()
    with poison():
        o, lse = fg.attention(*leaves, variant, return_lse=True, **captured, **options)
        results, given = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
        found = torch.autograd.grad(results, [*leaves, *(captured[n] for n in wanted)], given)
    return found[:3], dict(zip(wanted, found[3:], strict=True))


def check(
    variant: fg.Variant,
    *,
    q_len: int,
    scale: float | None = None,
    params: Mapping[str, int | float] | None = None,
    captured: Mapping[str, torch.Tensor] | None = None,
    dlse: bool = True,
    dropout: float = 0.0,
    deterministic: bool = False,
    frozen: bool = False,
    seed: int = 0,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    **shape: object,
) -> None:
    """Run and judge the gradients of one problem; few elements are drawn again until there are enough to judge.

    Captured tensors that are `frozen` want none.
    """
    problem, bound, params = problem_of(q_len, **shape), variant.bind(), params or {}
    factor = problem.head_dim**-0.5 if scale is None else scale
    wanted = () if frozen else differentiable(bound.score_node)
    pools: dict[str, list] = {}
    least = min(problem.heads * q_len, problem.kv_heads * problem.kv_len) * problem.batch * problem.head_dim
    of_captured: dict[str, list] = {}
    for draw in range(max(-(-POOL // least), DRAWS if wanted else 1)):
        q, k, v = random_inputs(problem, seed + draw)
        generator = torch.Generator(DEVICE).manual_seed(1000 + seed + draw)
        rows = (problem.batch, problem.heads, q_len)
        do = torch.randn((*rows, problem.v_head_dim), device=DEVICE, generator=generator).to(q.dtype)
        d_lse = torch.randn(rows, device=DEVICE, generator=generator) if dlse else None
        tensors = example_tensors(bound, problem, seed + draw) if captured is None else captured
        options = {"scale": scale, "dropout": dropout, "deterministic": deterministic}
        mine, sums = gradients(
            variant, map(view, (q, k, v)), do, d_lse, {**params, **tensors}, wanted, seed=77 + draw, **options
        )
        dropped = Dropout(p=dropout, seed=77 + draw) if dropout else None
        case = case_of(bound, problem, params, tensors)
        asked = (bound, case, q, k, v, do)
        ref = reference_gradients(*asked, scale=factor, dlse=d_lse, dropout=dropped)
        base = baseline_gradients(*asked, scale=factor, dlse=d_lse, dropout=dropped)
        for name, got, right, same in zip(("dq", "dk", "dv"), mine, ref[:3], base[:3], strict=True):
            pools.setdefault(name, []).append((got.flatten(), same.flatten(), right.flatten()))
        for name, got in sums.items():
            of_captured.setdefault(name, []).append((got, base.captured[name], ref.captured[name]))
    for name, pool in pools.items():
        got, same, right = (torch.cat(x) for x in zip(*pool, strict=True))
        verdict = judge(got, same, right, problem.dtype)
        assert verdict.ok, f"{name} of {variant.name} {problem} {params} seed {seed}\n  {verdict}"
    for name, drawn in of_captured.items():
        settle_captured(*map(torch.stack, zip(*drawn, strict=True)), f"{variant.name} {name} {problem}")


def settle_captured(got: torch.Tensor, same: torch.Tensor, right: torch.Tensor, about: str) -> None:
    """Few elements, each a sum over very many pairs: the largest error of all draws within 4x that of same-precision
    PyTorch."""
    error = float((got.double() - right).abs().max())
    ulp = torch.finfo(got.dtype).eps * float(right.abs().max())
    limit = 4 * float((same.double() - right).abs().max()) + ulp
    assert error <= limit and math.isfinite(error), f"{about}: largest error {error:.3g} exceeds {limit:.3g}"


def backward_menus(variants, dtypes, dims, **form):
    """Every plan of gradients that calls on this GPU may choose for variants x dtypes x (head_dim, v_head_dim)."""
    for variant in variants:
        bound = variant.bind()
        wanted = differentiable(bound.score_node)
        for dtype in dtypes:
            for head_dim, v_head_dim in dims:
                asked = (bound, default_arch(bound), dtype, head_dim, v_head_dim)
                yield from planner.backward_menu(*asked, gradients=wanted, **form).plans
