"""Emitted kernels against float64: every shipped spec, head dims, lengths, strides, groups, scales and wide inputs."""

import math

import pytest
import torch
from gpu_checks import (
    DEVICE,
    PIPELINES,
    call,
    check,
    compile_together,
    example_tensors,
    menus,
    on,
    random_inputs,
    settle,
)
from tolerance import baseline, judge, judge_lse, reference

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.lang.load import shipped
from flashgen.planning.problem import Problem

pytestmark = pytest.mark.gpu

BOTH = ("float16", "bfloat16")
SPECS = sorted(shipped())

full = fg.variant()
window = fg.param("window", default=37, min=1)


@fg.variant
def causal(b, h, q, k):
    return k <= q


@fg.variant
def bottom_right(b, h, q, k):
    return (k <= q + fg.kv_len - fg.q_len) & (q + fg.kv_len - fg.q_len - k < window)


@fg.variant(score=lambda s, b, h, q, k: 2 * s - 0.25 * abs(q - k))
def decaying(b, h, q, k):
    return (q + k) % 3 != 0


capped = fg.variant(score=lambda s, b, h, q, k: 4 * fg.tanh(s / 4) + 0.5, name="capped")


@pytest.fixture(scope="module", params=PIPELINES)
def specs(request):
    loaded = {name: on(fg.load_spec(name), request.param) for name in SPECS}
    compile_together(menus(loaded.values(), BOTH, [(64, 64), (128, 128)]))
    return loaded


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("head_dim, heads, kv_heads", [(64, 4, 4), (128, 8, 1)])
def test_shipped_specs(specs, name, dtype, head_dim, heads, kv_heads):
    for length in (1, 200, 777):
        check(specs[name], q_len=length, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=length)


@pytest.mark.parametrize("name", SPECS)
def test_shipped_specs_on_long_sequences(specs, name):
    check(specs[name], q_len=2500, heads=2, batch=1, seed=5)


HEAD_DIMS = list(range(16, 257, 8))
V_HEAD_DIMS = {dim: (dim, 64, 256, 24)[i % 4] for i, dim in enumerate(HEAD_DIMS)}


@pytest.fixture(scope="module", params=PIPELINES)
def piped_causal(request):
    piped = on(causal, request.param)
    compile_together(menus([piped], BOTH[1:], V_HEAD_DIMS.items()))
    return piped


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(piped_causal, head_dim):
    check(piped_causal, q_len=300, head_dim=head_dim, v_head_dim=V_HEAD_DIMS[head_dim], seed=head_dim)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("head_dim, v_head_dim", [(256, 256), (192, 128), (40, 104), (16, 16)])
def test_head_dims_with_a_score(pipeline, dtype, head_dim, v_head_dim):
    check(on(decaying, pipeline), q_len=211, kv_len=190, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("variant", [full, bottom_right, decaying], ids=lambda v: v.name)
def test_lengths(variant, pipeline):
    variant = on(variant, pipeline)
    plans = list(menus([variant], ["bfloat16"], [(64, 64)]))
    compile_together(plans)
    sides = {side for plan in plans for side in (plan.tile.q, plan.tile.kv)}
    lengths = sorted({1, 2, 3, 61, 127, 521, *(side + off for side in sides for off in (-1, 0, 1))})
    for i, q_len in enumerate(lengths):
        for j, kv_len in enumerate(lengths):
            if (i + 2 * j) % 3 == 0 or min(q_len, kv_len) < 4:
                check(variant, q_len=q_len, kv_len=kv_len, kv_heads=2, seed=i * 100 + j)


@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)])
def test_empty_problems(shape):
    batch, heads, q_len, kv_len = shape
    problem = Problem(batch=batch, heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, head_dim=64, v_head_dim=32)
    o, lse = call(*random_inputs(problem, 0), causal)
    assert o.shape == (batch, heads, q_len, 32) and lse.shape == (batch, heads, q_len)
    assert (o == 0).all() and (lse == -math.inf).all()


def test_rows_that_see_nothing_are_written():
    nothing = fg.variant(lambda b, h, q, k: (k < q - 200) & (q != 333), name="late")
    problem = Problem(batch=1, heads=2, kv_heads=2, q_len=500, kv_len=300, head_dim=64, v_head_dim=64)
    o, lse = call(*random_inputs(problem, 0), nothing)
    blind = torch.arange(500, device=DEVICE) <= 200
    blind[333] = True
    assert (o[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all()
    assert (lse[:, :, ~blind] > -math.inf).all()
    check(nothing, q_len=500, kv_len=300)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 4), (8, 1), (6, 2), (5, 5), (7, 1)])
def test_groups(heads, kv_heads, pipeline):
    check(on(causal, pipeline), q_len=257, heads=heads, kv_heads=kv_heads)


@pytest.fixture(scope="module")
def packing():
    """Variants whose heads are packed where there are few queries."""
    names = ("full", "causal_bottom_right", "sliding_window", "document", "softcap")
    loaded = {name: on(fg.load_spec(name), "hopper") for name in names} | {"window": on(bottom_right, "hopper")}
    compile_together(p for p in menus(loaded.values(), BOTH, [(64, 64), (128, 128)]) if p.packed)
    return loaded


#: Where a menu has kernels of one head dim alone that pack heads: kernels of a menu share their tile of keys.
PACKED_AT = {"document": 64, "softcap": 128}


@pytest.mark.parametrize("name", ["full", "causal_bottom_right", "sliding_window", "window", "document", "softcap"])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (8, 2), (12, 2), (16, 2)])
@pytest.mark.parametrize("q_len", [1, 3, 16, 40])
def test_few_queries_of_heads_that_share_keys(packing, name, heads, kv_heads, q_len):
    variant, dtype = packing[name], BOTH[q_len % 2]
    dims = {"head_dim": PACKED_AT.get(name, 128 if heads == 8 else 64), "dtype": dtype}
    shape = {"batch": 480 // heads, "heads": heads, "kv_heads": kv_heads}
    plan = fg.plan(variant, **shape, **dims, seqlen=q_len, kv_seqlen=1500)
    # Rows of two heads that need a tile of two warpgroups leave no fewer tiles than those of each in one of its own.
    assert plan.packed or (q_len * plan.pack(heads // kv_heads) > 32 and plan.tile.q == 64)
    check(variant, q_len=q_len, kv_len=1500, **shape, **dims, seed=q_len)
    problem = Problem(**shape, **dims, v_head_dim=dims["head_dim"], q_len=q_len, kv_len=1500)
    tensors = random_inputs(problem, 1)
    named = example_tensors(variant.bind(), problem, 1)
    first, again = (call(*tensors, variant, **named) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("variant", [full, capped], ids=lambda v: v.name)
@pytest.mark.parametrize("scale", [0.0, -0.125, 1.0, -2.0, 0.01, 7])
def test_scales(variant, scale, dtype, pipeline):
    check(on(variant, pipeline), q_len=130, kv_len=140, scale=scale, dtype=dtype)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("dtype", BOTH)
def test_weights_that_are_nearly_equal(dtype, pipeline):
    # All of P lies within half an ulp below 1 and is rounded the same way, up, while its sum is not rounded: a relative
    # bias of up to that half ulp, which every kernel with a 16-bit P has and the rule for the bias does not allow.
    problem_of = Problem(batch=2, heads=4, kv_heads=4, q_len=130, kv_len=140, head_dim=64, v_head_dim=64, dtype=dtype)
    q, k, v = random_inputs(problem_of, 0)
    case = Case(sizes=problem_of.sizes(), params={}, tensors={})
    o, lse = call(q, k, v, on(full, pipeline), scale=1e-4)
    ref, ref_lse = reference(full, case, q, k, v, scale=1e-4)
    base, _ = baseline(full, case, q, k, v, scale=1e-4)
    verdict = judge(o, base, ref, dtype)
    assert verdict.max_error <= verdict.max_limit
    assert verdict.rms_error <= verdict.rms_limit
    half_ulp = 2.0**-9 if dtype == "bfloat16" else 2.0**-12
    assert verdict.bias <= half_ulp * float(ref.abs().mean()) + verdict.bias_limit
    assert not judge_lse(lse, ref_lse)


def test_large_scores_do_not_overflow():
    """In float16 of a standard deviation of 288: where they are in the thousands, float32 rounds them by as much as
    float16 rounds P, and the order of a product's sums decides the error."""
    check(full, q_len=300, std=6.0, scale=1.0, dtype="float16")
    check(full, q_len=300, std=12.0, scale=-1.0)


def test_a_score_of_minus_infinity_is_masked():
    hard = fg.variant(score=lambda s, b, h, q, k: fg.where(k % 2 == 0, -math.inf, s), name="hard")
    check(hard, q_len=150)
    whole_tiles = fg.variant(score=lambda s, b, h, q, k: fg.where(k < 200, -math.inf, s), name="late_keys")
    check(whole_tiles, q_len=300)
    all_of_it = fg.variant(score=lambda s, b, h, q, k: fg.where(q < 100, -math.inf, s), name="blind_rows")
    check(all_of_it, q_len=300)


# ---------------------------------------------------------------------------------------------------------------------
# Strides


def rows_first(t):
    """[batch, heads, length, dim] as a view of [batch, length, heads, dim]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def padded(t):
    """A view into memory that is NaN wherever the view is not: before, behind, between rows and beside columns."""
    batch, heads, length, dim = t.shape
    room = torch.full((batch + 1, heads + 1, length + 9, dim + 24), math.nan, dtype=t.dtype, device=t.device)
    view = room[1:, :-1, 5:-4, 16:-8]
    view.copy_(t)
    return view


def packed(t):
    """Every third row of a wider projection."""
    batch, heads, length, dim = t.shape
    room = torch.full((batch, length, 3, heads, dim), math.nan, dtype=t.dtype, device=t.device)
    room[:, :, 1] = t.transpose(1, 2)
    return room[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("view", [rows_first, padded, packed])
@pytest.mark.parametrize("variant, head_dim", [(causal, 64), (decaying, 64), (full, 72), (causal, 128), (full, 256)])
def test_views_are_read_as_they_are(view, variant, head_dim, pipeline):
    check(on(variant, pipeline), q_len=203, kv_len=190, kv_heads=2, head_dim=head_dim, view=view)


@pytest.mark.parametrize("view", [rows_first, padded, packed])
def test_views_of_packed_heads(packing, view):
    check(packing["causal_bottom_right"], q_len=7, kv_len=300, batch=40, heads=8, kv_heads=2, view=view)


def test_output_layout_follows_q():
    problem = Problem(batch=2, heads=4, kv_heads=4, q_len=100, kv_len=100, head_dim=64, v_head_dim=64)
    q, k, v = random_inputs(problem, 0)
    o, _ = call(q, k, v, causal)
    turned, _ = call(rows_first(q), k, v, causal)
    assert o.is_contiguous() and turned.transpose(1, 2).is_contiguous()
    assert torch.equal(o, turned)


def test_expanded_tensors():
    """Stride 0 over batch and heads: one key sequence for all."""
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=150, kv_len=150, head_dim=64, v_head_dim=64)
    many = [t.expand(3, 4, -1, -1) for t in random_inputs(problem, 0)]
    o, lse = call(*many, causal)
    assert torch.equal(o, o[:1, :1].expand_as(o)) and torch.equal(lse, lse[:1, :1].expand_as(lse))
    part(causal, many, o, lse, (slice(0, 1), slice(0, 1)))


# ---------------------------------------------------------------------------------------------------------------------
# Wide inputs


def test_more_than_65535_heads_over_the_batch():
    check(causal, q_len=20, batch=300, heads=256, kv_heads=128, head_dim=16)


def part(variant, tensors, o, lse, at, dtype="bfloat16"):
    """Intervals one slice of batches and heads of a call that is too large to judge whole."""
    q, k, v = (t[at] for t in tensors)
    sizes = {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "q_len": q.shape[2],
        "kv_len": k.shape[2],
    }
    case = Case(sizes=sizes, params={}, tensors={})
    ref, ref_lse = reference(variant, case, q, k, v, scale=q.shape[-1] ** -0.5)
    base, _ = baseline(variant, case, q, k, v, scale=q.shape[-1] ** -0.5)
    settle(judge(o[at], base, ref, dtype), judge_lse(lse[at], ref_lse), f"{variant.name} at {at}")


@pytest.mark.parametrize("side", ["q", "kv"])
def test_more_than_two_to_the_31_elements(side, most_of_the_memory):
    batch, heads, long, short, dim = 9, 16, 1 << 17, 33, 128
    lengths = (long, short) if side == "q" else (short, long)
    assert batch * heads * long * dim > 1 << 31
    shape = dict(batch=batch, heads=heads, kv_heads=heads, head_dim=dim, v_head_dim=dim)
    dtype, generator = torch.bfloat16, torch.Generator(DEVICE).manual_seed(0)
    problem = Problem(q_len=lengths[0], kv_len=lengths[1], **shape)
    sizes = (problem.q_len, problem.kv_len, problem.kv_len)
    q, k, v = (
        torch.empty((batch, heads, n, dim), dtype=dtype, device=DEVICE).normal_(generator=generator) for n in sizes
    )
    o, lse = call(q, k, v, full)
    for b, h in ((0, 0), (4, 7), (batch - 1, heads - 1)):
        part(full, (q, k, v), o, lse, (slice(b, b + 1), slice(h, h + 1)))


def test_strides_beyond_two_to_the_31(most_of_the_memory):
    """A few rows, far apart: only 64-bit offsets reach them."""
    problem = Problem(batch=2, heads=2, kv_heads=2, q_len=130, kv_len=130, head_dim=64, v_head_dim=64)
    q, k, v = random_inputs(problem, 3)
    elements = (1 << 31) + (1 << 28)
    room = torch.empty(3 * elements, dtype=torch.bfloat16, device=DEVICE)

    def far(t, which, strides):
        view = room[which * elements : (which + 1) * elements].as_strided(t.shape, (*strides, 1), which * elements)
        return view.copy_(t)

    views = [  # the last of 130 rows of two batches lies beyond 2^31 elements
        far(q, 0, ((1 << 30) + 128, 64, 1 << 23)),
        far(k, 1, (64, 128, 1 << 24)),
        far(v, 2, (1 << 31, 64, 1 << 20)),
    ]
    assert all(view.stride(0) + 129 * view.stride(2) > 1 << 31 for view in views)
    o, lse = call(*views, causal)
    wanted, wanted_lse = call(q, k, v, causal)
    assert torch.equal(o, wanted) and torch.equal(lse, wanted_lse)
