"""What the tests of the backward share: plans, inputs, the walk of a forward and its backward, and the verdict."""

import dataclasses

import torch
from tolerance import judge

from flashgen.analysis.derivative import differentiable_of
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.planning import planner
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem
from flashgen.runtime import tiles
from flashgen.runtime.captured import examples
from flashgen.runtime.gradients import baseline_gradients, reference_gradients
from flashgen.runtime.tiles_backward import walk_backward


def problem_of(**given):
    given = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 100, "kv_len": 117, "head_dim": 32, **given}
    given.setdefault("v_head_dim", given["head_dim"])
    return Problem(**given)


def case_of(variant, problem, seed=0, **params):
    return Case(sizes=problem.sizes(), params=variant.values(params), tensors=examples(variant, problem, seed))


def plan_of(variant, problem, tile=(32, 16), **options):
    """A plan of a backward with a small tile; the walk asks for its tile and its yes or no alone."""
    options.setdefault("gradients", differentiable_of(variant))
    dims = problem.head_dim, problem.v_head_dim
    found = planner.backward_menu(variant, "sm_80", "bfloat16", *dims, **options).plans[0]
    backward = found.backward
    if backward.by_query is not None:  # whose tiles of queries are its own
        backward = dataclasses.replace(backward, by_query=dataclasses.replace(backward.by_query, tile_q=tile[0] + 16))
    return dataclasses.replace(found, tile=Tile(q=tile[0], kv=tile[1]), backward=backward)


def inputs(problem, seed=0):
    """q, k, v and do in the problem's dtype, dlse in that of lse."""
    g = torch.Generator().manual_seed(seed)
    p, dtype = problem, getattr(torch, problem.dtype)
    rows, keys = (p.batch, p.heads, p.q_len), (p.batch, p.kv_heads, p.kv_len)
    shapes = (*rows, p.head_dim), (*keys, p.head_dim), (*keys, p.v_head_dim), (*rows, p.v_head_dim), rows
    *qkvo, dlse = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return *(x.to(dtype) for x in qkvo), dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def array(x):
    return (x if x.dtype == torch.float64 else x.float()).numpy()


def walk(variant, problem, case, qkv, do, *, dlse=None, scale=None, dropout=None, plan=None):
    """(dq, dk, dv, captured, traffic) of the backward of the walk's own forward; results in the problem's dtype."""
    plan = plan_of(variant, problem, dropout=dropout is not None) if plan is None else plan
    dtype, facts = getattr(torch, problem.dtype), analyse(variant)
    options = {
        "scale": problem.head_dim**-0.5 if scale is None else scale,
        "dtype": problem.dtype,
        "dropout": dropout,
    }
    arrays = [array(x) for x in qkv]
    o, lse, _ = tiles.walk(plan, facts, case, *arrays, **options)
    o = array(torch.from_numpy(o).to(dtype))
    dlse = None if dlse is None else dlse.numpy()
    found = walk_backward(plan, facts, case, *arrays, o, lse, array(do), dlse=dlse, **options)
    return found._replace(**{name: torch.from_numpy(getattr(found, name)).to(dtype) for name in ("dq", "dk", "dv")})


def check(variant, problem, case, *, seed=0, dlse=True, scale=None, dropout=None, plan=None):
    """Intervals every gradient of the walk against float64 by the tolerance rule."""
    q, k, v, do, d_lse = inputs(problem, seed)
    options = {"scale": scale, "dropout": dropout, "dlse": d_lse if dlse else None}
    got = walk(variant, problem, case, (q, k, v), do, plan=plan, **options)
    options["scale"] = problem.head_dim**-0.5 if scale is None else scale
    ref = reference_gradients(variant, case, q, k, v, do, **options)
    base = baseline_gradients(variant, case, q, k, v, do, **options)
    for name in ("dq", "dk", "dv"):
        if problem.dtype == "float64":  # which the rule would hold to the reference's own rounding
            limit = 1e-12 * max(1.0, float(getattr(ref, name).abs().max()))
            torch.testing.assert_close(getattr(got, name), getattr(ref, name), rtol=0, atol=limit)
            continue
        verdict = judge(getattr(got, name), getattr(base, name), getattr(ref, name), problem.dtype)
        assert verdict.ok, (name, verdict)
    for name, gradient in got.captured.items():
        wrong = judge_captured(torch.from_numpy(gradient), base.captured[name], ref.captured[name])
        assert not wrong, f"{name}: {wrong}"
    return got


def judge_captured(gradient, base, ref):
    """What is wrong with the gradient of a captured tensor (None: nothing).  It may have few elements, each a sum over
    very many pairs: too few for the rule, so its largest error stays within 4x that of same-precision PyTorch."""
    if gradient.dtype == torch.float64:
        limit = 1e-12 * max(1.0, float(ref.abs().max()))
    else:
        limit = 4 * float((base.double() - ref).abs().max()) + 2.0**-20 * float(ref.abs().max())
    error = float((gradient.double() - ref).abs().max())
    return None if error <= limit else f"largest error {error:.3g} exceeds {limit:.3g}"
