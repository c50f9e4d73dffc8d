"""Gradients on a GPU: every spec, shape, stride and option against float64, reruns, dropout, memory, training."""

import dataclasses
import statistics

import pytest
import torch
from backward_gpu import backward_menus, check, gradients, problem_of
from gpu_checks import DEVICE, PIPELINES, compile_together, menus, on, poison, random_inputs
from tolerance import baseline, judge, reference

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.errors import LaunchError
from flashgen.lang.load import load_spec, shipped
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.runtime.gradients import reference_gradients
from flashgen.runtime.philox import Dropout

pytestmark = pytest.mark.gpu

SPECS = sorted(shipped())
full, causal, window = (load_spec(name) for name in ("full", "causal", "sliding_window"))
softcap, relative_bias, packed = (load_spec(name) for name in ("softcap", "relative_bias", "packed_softcap"))
DIMS = [(16, 16), (40, 40), (72, 72), (96, 96), (128, 128), (144, 144), (192, 192), (256, 256)]
DIMS += [(64, 128), (128, 72), (192, 128), (136, 256), (256, 64)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Most of what follows, compiled side by side."""
    specs = [load_spec(name) for name in SPECS]
    plans = list(backward_menus(specs, ["bfloat16"], [(64, 64)]))
    plans += menus(specs, ["bfloat16"], [(64, 64)])
    plans += backward_menus(specs, ["float16"], [(128, 128)])
    plans += menus(specs, ["float16"], [(128, 128)])
    plans += backward_menus(specs, ["bfloat16"], [(256, 256)])
    plans += menus(specs, ["bfloat16"], [(256, 256)])
    plans += backward_menus([causal], ["bfloat16"], DIMS)
    plans += menus([causal], ["bfloat16"], DIMS)
    for form in ({"deterministic": True}, {"dropout": True}, {"dropout": True, "deterministic": True}):
        plans += backward_menus([full, causal, relative_bias, packed], ["bfloat16"], [(64, 64)], **form)
    plans += backward_menus([on_ampere(name) for name in SPECS], ["bfloat16"], [(64, 64)])
    compile_together(plans)


@pytest.mark.parametrize("name", SPECS)
def test_every_spec(name):
    check(load_spec(name), q_len=333, kv_heads=2)


def on_ampere(name):
    """A spec whose gradients come from pipeline ampere, where another one would serve the call."""
    variant = load_spec(name)
    return dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline="ampere"))


@pytest.mark.parametrize("name", SPECS)
def test_pipeline_ampere_on_every_architecture(name):
    check(on_ampere(name), q_len=317, kv_heads=2)


@pytest.mark.parametrize("form", [{"deterministic": True}, {"dropout": 0.2}, {"dropout": 0.2, "deterministic": True}])
@pytest.mark.parametrize("name", ["causal", "relative_bias", "packed_softcap"])
def test_forms_of_pipeline_ampere_on_every_architecture(name, form):
    check(on_ampere(name), q_len=317, kv_heads=2, head_dim=128, **form)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_frozen_captured_tensors(dims):
    """Without gradients of their own, scores that read them are served by the best pipeline too."""
    bias = torch.randn(4, 257, device=DEVICE)
    q, k, v = (t.requires_grad_() for t in random_inputs(problem_of(300, head_dim=dims[0]), 0))
    o = fg.attention(q, k, v, relative_bias, table=bias)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    sure = fg.attention(q, k, v, relative_bias, table=bias, deterministic=True)
    for mine, right in zip(got, torch.autograd.grad(sure, (q, k, v), do), strict=True):
        assert (mine.float() - right.float()).abs().max() <= 2**-6 * right.float().abs().max()


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_in_float16_at_head_dim_128(name):
    check(load_spec(name), q_len=520, kv_len=700, head_dim=128, dtype="float16", dlse=False, batch=1)


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_at_head_dim_256(name):
    check(load_spec(name), q_len=333, kv_len=270, kv_heads=2, head_dim=256, batch=1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["full", "causal", "relative_bias", "packed_softcap"])
def test_dropout(name, deterministic):
    check(load_spec(name), q_len=300, kv_heads=2, dropout=0.2, deterministic=deterministic)


@pytest.mark.parametrize("name", ["causal", "packed_softcap"])
def test_dropout_at_head_dim_128(name):
    check(load_spec(name), q_len=700, kv_heads=2, head_dim=128, batch=1, dropout=0.2)


@pytest.mark.parametrize("name", ["full", "causal", "relative_bias", "packed_softcap", "alibi"])
def test_deterministic(name):
    check(load_spec(name), q_len=400, kv_heads=1, deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_in_one_order_of_sums(name, head_dim):
    """Several tiles of keys and of queries, heads that share keys, captured tensors without gradients of their own."""
    shape = {"q_len": 500, "kv_len": 900, "kv_heads": 2, "head_dim": head_dim, "seed": 1}
    check(load_spec(name), frozen=True, deterministic=True, **shape)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims):
    check(causal, q_len=260, kv_len=230, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1])


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 127, 128, 129, 257])
def test_lengths(length):
    check(causal, q_len=length, kv_len=max(length, 70), heads=8, kv_heads=2)
    check(full, q_len=70, kv_len=length, heads=8, kv_heads=2)


@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (5, 5)], ids=str)
def test_heads_that_share_keys(heads):
    check(window, q_len=300, heads=heads[0], kv_heads=heads[1], params={"window": 77})


@pytest.mark.parametrize("spec", ["full", "causal", "softcap"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 40)], ids=str)
def test_more_heads_than_run_at_a_time(spec, dims):
    """Where blocks clear and finish dq for other heads."""
    check(load_spec(spec), q_len=190, kv_len=320, batch=20, heads=16, kv_heads=8, head_dim=dims[0], v_head_dim=dims[1])


@pytest.mark.parametrize(("scale", "length"), [(-0.3, 150), (0.0, 128), (0.5, 150)])
def test_any_scale(scale, length):
    """128 equal weights are powers of two: others are all rounded the same way, a bias that the rule refuses."""
    check(softcap, q_len=length, scale=scale, params={"cap": 5.0})
    check(full, q_len=length, scale=scale)


def rows_first(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(t):
    room = torch.zeros(*t.shape[:-1], 3 * t.shape[-1], dtype=t.dtype, device=t.device)
    room[..., t.shape[-1] : 2 * t.shape[-1]] = t
    return room[..., t.shape[-1] : 2 * t.shape[-1]]


@pytest.mark.parametrize("view", [rows_first, sliced])
def test_views(view):
    check(causal, q_len=203, kv_len=190, kv_heads=2, view=view)


def test_a_gradient_of_o_with_any_strides():
    q, k, v = (t.requires_grad_() for t in random_inputs(problem_of(200), 0))
    o = fg.attention(q, k, v, causal)
    for do in (torch.ones((), dtype=o.dtype, device=DEVICE).expand_as(o), torch.randn_like(o).mT.contiguous().mT):
        got = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        want = torch.autograd.grad(o, (q, k, v), do.contiguous(), retain_graph=True)
        for mine, right in zip(got[1:], want[1:], strict=True):
            assert torch.equal(mine, right)
        torch.testing.assert_close(got[0], want[0])


def test_expanded_inputs_collect_from_every_head():
    q, k, v = random_inputs(problem_of(150, batch=1, heads=1), 0)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    do = torch.randn(3, 4, 150, 64, device=DEVICE, dtype=q.dtype)
    o = fg.attention(*(t.expand(3, 4, -1, -1) for t in leaves), causal)
    got = torch.autograd.grad(o, leaves, do)
    case = Case(sizes={"batch": 3, "heads": 4, "kv_heads": 4, "q_len": 150, "kv_len": 150}, params={}, tensors={})
    wide = [t.detach().expand(3, 4, -1, -1) for t in leaves]
    want = reference_gradients(causal.bind(), case, *wide, do, scale=1 / 8)
    for mine, right in zip(got, want[:3], strict=True):
        right = right.sum((0, 1), keepdim=True)
        assert (mine.double() - right).abs().max() < 0.02 * right.abs().max()


def test_rows_that_see_nothing_add_nothing():
    late = fg.variant(lambda b, h, q, k: k < q - 70, name="late")
    check(late, q_len=200, dlse=False)
    q, k, v = random_inputs(problem_of(200), 0)
    do = torch.randn(2, 4, 200, 64, device=DEVICE).bfloat16()
    dlse = torch.randn(2, 4, 200, device=DEVICE)
    calm, _ = gradients(late, (q, k, v), do, dlse, {}, (), deterministic=True)
    do[:, :, :71], dlse[:, :, :71] = 1e30, float("inf")
    wild, _ = gradients(late, (q, k, v), do, dlse, {}, (), deterministic=True)
    for mine, right in zip(wild, calm, strict=True):
        assert torch.equal(mine, right)
    assert not calm[0][:, :, :71].any()


def test_a_score_of_minus_infinity_adds_nothing():
    hiding = fg.variant(score=lambda s, b, h, q, k: fg.where(k <= q, s, -float("inf")), name="hiding")
    rooted = causal.score(lambda s, b, h, q, k: s + fg.log(fg.float32(q - k) + 1.0))
    tensors = random_inputs(problem_of(200), 0)
    do = torch.randn(2, 4, 200, 64, device=DEVICE).bfloat16()
    got, _ = gradients(hiding, tensors, do, None, {}, (), deterministic=True)
    want, _ = gradients(causal, tensors, do, None, {}, (), deterministic=True)
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=2**-6, atol=2**-6)
    check(rooted, q_len=200)


@pytest.mark.parametrize("shape", [dict(q_len=0), dict(kv_len=0), dict(batch=0)], ids=str)
def test_empty_problems(shape):
    problem = problem_of(**{"q_len": 20, **shape})
    tensors = random_inputs(problem, 0)
    do = torch.zeros(problem.batch, 4, problem.q_len, 64, device=DEVICE).bfloat16()
    found, _ = gradients(causal, tensors, do, None, {}, ())
    assert [x.shape for x in found] == [x.shape for x in tensors] and not any(x.any() for x in found)


# ---------------------------------------------------------------------------------------------------------------------
# Captured tensors


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dims", [("batch", "kv"), ("heads", "q"), ("heads",)], ids=str)
def test_gradients_of_a_bias(dims, head_dim):
    """Summed up for each key, for each query, for each tile."""
    bias = fg.tensor("bias", dims=dims, dtype="float32")

    def score(s, b, h, q, k):
        at = {"batch": b, "heads": h, "kv": k, "q": q}
        return s + bias[tuple(at[d] for d in dims)] * fg.float32(1 + k % 3)

    sizes = {"batch": 2, "heads": 4, "kv": 300, "q": 200}
    captured = {"bias": torch.randn([sizes[d] for d in dims], device=DEVICE)}
    variant = fg.variant(lambda b, h, q, k: k <= q + 100, score, name="biased")
    check(variant, q_len=200, kv_len=300, kv_heads=2, head_dim=head_dim, captured=captured)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dims", [("batch", "heads", "q", "kv"), ("heads", "kv", "q")], ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_element_of_each_pair_is_stored(pipeline, dims, masked, deterministic, dtype, head_dim):
    """In lengths that end inside a tile; a batch of one, where no position selects it."""
    bias = fg.tensor("bias", dims=dims, dtype=dtype)

    def score(s, b, h, q, k):
        at = {"batch": b, "heads": h, "kv": k, "q": q}
        return s + bias[tuple(at[d] for d in dims)]

    sizes = {"batch": 2 if "batch" in dims else 1, "heads": 4, "kv": 301, "q": 203}
    captured = {"bias": torch.randn([sizes[d] for d in dims], device=DEVICE).to(getattr(torch, dtype))}
    variant = on(fg.variant((lambda b, h, q, k: k <= q) if masked else None, score, name="paired"), pipeline)
    shape = {"batch": sizes["batch"], "q_len": 203, "kv_len": 301, "kv_heads": 2, "head_dim": head_dim}
    check(variant, captured=captured, deterministic=deterministic, **shape)


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_tensors_read_at_several_places(deterministic):
    table = fg.tensor("table", dims=("heads", None), dtype="float32")
    other = fg.tensor("other", dims=("batch",), dtype="bfloat16")

    def score(s, b, h, q, k):
        return s * table[h, fg.clamp(q - k, 0, 8)] + table[h, k % 9] * table[h, q % 9] + other[b] * s

    variant = fg.variant(lambda b, h, q, k: k <= q + 3, score, name="several")
    captured = {
        "table": torch.randn(1, 9, device=DEVICE),
        "other": torch.tensor([0.5, -0.25], device=DEVICE).bfloat16(),
    }
    check(variant, q_len=200, kv_heads=2, captured=captured, deterministic=deterministic)


def test_a_captured_gradient_is_bitwise_the_same_when_deterministic():
    problem = problem_of(700, kv_heads=2)
    tensors = random_inputs(problem, 0)
    do = torch.randn(2, 4, 700, 64, device=DEVICE).bfloat16()
    named = {"table": torch.randn(4, 257, device=DEVICE)}
    first = gradients(relative_bias, tensors, do, None, named, ("table",), deterministic=True)
    for _ in range(10):
        again = gradients(relative_bias, tensors, do, None, named, ("table",), deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(again[0], first[0], strict=True))
        assert torch.equal(again[1]["table"], first[1]["table"])


# ---------------------------------------------------------------------------------------------------------------------
# Reruns, streams, graphs, records


def test_deterministic_reruns_give_the_same_bits():
    tensors = random_inputs(problem_of(1000, kv_heads=2), 0)
    do = torch.randn(2, 4, 1000, 64, device=DEVICE).bfloat16()
    first, _ = gradients(causal, tensors, do, None, {}, (), deterministic=True)
    for _ in range(50):
        again, _ = gradients(causal, tensors, do, None, {}, (), deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


def test_dk_and_dv_rerun_the_same_in_any_case():
    tensors = random_inputs(problem_of(1000, kv_heads=2), 0)
    do = torch.randn(2, 4, 1000, 64, device=DEVICE).bfloat16()
    first, _ = gradients(causal, tensors, do, None, {}, ())
    for _ in range(10):
        again, _ = gradients(causal, tensors, do, None, {}, ())
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])
        torch.testing.assert_close(again[0], first[0], rtol=2**-6, atol=2**-8)


def test_torch_may_ask_for_determinism():
    q, k, v = (t.requires_grad_() for t in random_inputs(problem_of(500), 0))
    do = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(fg.attention(q, k, v, causal), (q, k, v), do) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for again in found for x, y in zip(again, found[0], strict=True))


def test_several_streams_and_a_graph():
    tensors = random_inputs(problem_of(500), 0)
    o, lse = fg.attention(*tensors, causal, return_lse=True)
    given, call = Given(torch.randn_like(o), None, *tensors, o, lse), Call(causal, None, {}, deterministic=True)

    def run():
        return run_backward(given, call, ())[:3]

    want = run()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            found.append(run())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for x in captured:
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for got in (*found, captured):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_lse_of_either_pipeline_serves():
    pinned = fg.variant(lambda b, h, q, k: k <= q, name="pinned", pipeline="ampere")
    tensors = random_inputs(problem_of(400, kv_heads=2, head_dim=128), 0)
    do = torch.randn_like(tensors[0])
    one, other = (gradients(x, tensors, do, None, {}, (), deterministic=True)[0] for x in (pinned, causal))
    for mine, right in zip(one, other, strict=True):
        torch.testing.assert_close(mine, right, rtol=2**-5, atol=2**-6)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_of_the_forward(head_dim):
    problem = problem_of(300, kv_heads=2, head_dim=head_dim)
    q, k, v = random_inputs(problem, 0)
    case = Case(sizes=problem.sizes(), params={}, tensors={})
    with poison():
        o, lse = fg.attention(q, k, v, causal, dropout=0.3, seed=11, return_lse=True)
    dropout = Dropout(p=0.3, seed=11)
    ref, ref_lse = reference(causal.bind(), case, q, k, v, scale=head_dim**-0.5, dropout=dropout)
    base, _ = baseline(causal.bind(), case, q, k, v, scale=head_dim**-0.5, dropout=dropout)
    verdict = judge(o, base, ref, "bfloat16")
    assert verdict.ok, verdict
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-4, atol=1e-4)
    plain = fg.attention(q, k, v, causal, return_lse=True)[1]
    torch.testing.assert_close(lse, plain, rtol=1e-4, atol=1e-4)


def test_rate_of_dropout():
    """With values of 1 an output is the kept share of its row, grown."""
    q, k, v = random_inputs(problem_of(1024, heads=8), 0)
    o = fg.attention(torch.zeros_like(q), k, torch.ones_like(v), full, dropout=0.25, seed=5).float()[..., 0]
    n = o.numel() * 1024
    assert abs(o.mean().item() * 0.75 - 0.75) < 5 * (0.25 * 0.75 / n) ** 0.5 + 1e-3
    assert o.std().item() == pytest.approx((0.25 / 0.75 / 1024) ** 0.5, rel=0.1)


def test_torchs_generator_decides_what_is_dropped():
    q, k, v = random_inputs(problem_of(200), 0)
    torch.manual_seed(5)
    first, second = (fg.attention(q, k, v, causal, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(fg.attention(q, k, v, causal, dropout=0.5), first)
    between = torch.rand(4, device=DEVICE)
    torch.manual_seed(5)
    fg.attention(q, k, v, causal, dropout=0.5)
    assert torch.equal(torch.rand(4, device=DEVICE), between), "the generator moved on by the same amount"


def test_a_checkpoint_draws_the_same_mask_again():
    from torch.utils.checkpoint import checkpoint

    leaves = [t.requires_grad_() for t in random_inputs(problem_of(200), 0)]

    def model(*t):
        return fg.attention(*t, causal, dropout=0.5, deterministic=True)

    torch.manual_seed(3)
    plainly = torch.autograd.grad(model(*leaves).float().square().sum(), leaves)
    torch.manual_seed(3)
    o = checkpoint(model, *leaves, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(o.float().square().sum(), leaves), plainly, strict=True):
        assert torch.equal(x, y)


def test_dropout_in_a_graph_needs_a_seed():
    q, k, v = random_inputs(problem_of(200), 0)
    want = fg.attention(q, k, v, causal, dropout=0.5, seed=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fg.attention(q, k, v, causal, dropout=0.5, seed=4)
        with pytest.raises(LaunchError, match="captured into a CUDA graph"):
            fg.attention(q, k, v, causal, dropout=0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile, memory, training


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models(backend):
    def model(q, k, v, table):
        o, lse = fg.attention(q * 2, k, v, relative_bias, table=table, return_lse=True, deterministic=True)
        return (o.float() * o).sum() + lse.sum() + fg.attention(q, k, v, causal, dropout=0.5, seed=3).float().sum()

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(2):
        leaves = [t.requires_grad_() for t in random_inputs(problem_of(200), seed)]
        leaves.append(torch.randn(4, 257, device=DEVICE, requires_grad=True))
        got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, model))
        for mine, right in zip(got, want, strict=True):
            error = (mine.double() - right.double()).abs().max()
            assert error <= 2**-6 * right.abs().max(), (backend, seed, float(error))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_memory_is_linear_in_the_length(pipeline):
    """64k tokens, 8 heads of 64, forward and backward: beside inputs, results and their gradients a float32 dq and two
    floats per row."""
    causal = on(load_spec("causal"), pipeline)
    p = problem_of(1 << 16, batch=1, heads=8)
    q, k, v = (t.requires_grad_() for t in random_inputs(p, 0))
    small = [t[:, :, :256].detach().requires_grad_() for t in (q, k, v)]
    fg.attention(*small, causal).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = fg.attention(q, k, v, causal, return_lse=True)
    do = torch.ones_like(o)
    torch.autograd.backward(o, do)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    rows = 8 << 16
    results = rows * (2 * 64 * 2 + 4) + 3 * rows * 64 * 2  # o, do, lse; dq, dk, dv
    extra = peak - results
    print(f"peak {peak:,} bytes over the inputs, {extra:,} beyond o, lse and gradients")
    assert extra <= rows * (64 * 4 + 2 * 4) + (2 << 20)
    assert lse.isfinite().all() and all(t.grad.isfinite().all() for t in (q, k, v))


def test_a_tiny_transformer_learns():
    torch.manual_seed(0)
    x = torch.randn(4, 64, 64, device=DEVICE)
    target = x.roll(1, dims=1)
    layer = torch.nn.Linear(64, 3 * 64, device=DEVICE)
    out = torch.nn.Linear(64, 64, device=DEVICE)
    table = torch.nn.Parameter(torch.zeros(2, 17, device=DEVICE))
    near = fg.tensor("near", dims=("heads", None), dtype="float32")
    learned = fg.variant(lambda b, h, q, k: k <= q).score(lambda s, b, h, q, k: s + near[h, fg.clamp(q - k, 0, 16)])
    optimiser = torch.optim.Adam([*layer.parameters(), *out.parameters(), table], lr=0.02)
    losses = []
    for _ in range(60):
        q, k, v = (t.bfloat16() for t in layer(x).view(4, 64, 3, 2, 32).permute(2, 0, 3, 1, 4))
        o = fg.attention(q, k, v, learned, near=table, dropout=0.05)
        loss = (out(o.float().transpose(1, 2).flatten(2)) - target)[:, 1:].square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert statistics.mean(losses[-5:]) < 0.5 * statistics.mean(losses[:5]), losses
    assert table[:, 1].min() > 0, "the place before is what there is to learn"


def test_the_walk_on_a_cpu_gives_the_same_gradients():
    problem = problem_of(150, kv_heads=2)
    q, k, v = random_inputs(problem, 0)
    table = torch.randn(4, 257, device=DEVICE)
    do = torch.randn_like(q)
    named, options = {"table": table}, {"dropout": 0.2, "seed": 6}
    got, captured = gradients(relative_bias, (q, k, v), do, None, named, ("table",), **options)
    leaves = [t.cpu().requires_grad_() for t in (q, k, v, table)]
    o = fg.attention(*leaves[:3], relative_bias, table=leaves[3], **options)
    want = torch.autograd.grad(o, leaves, do.cpu())
    for mine, right in zip(got, want[:3], strict=True):
        torch.testing.assert_close(mine.cpu(), right, rtol=2**-5, atol=2**-6)
    assert (captured["table"].cpu() - want[3]).abs().max() < 0.02 * want[3].abs().max()
