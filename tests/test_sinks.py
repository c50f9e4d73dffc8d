"""Learned sinks: a logit per head that joins each row's softmax, against gpt-oss's written-out form."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from emulated_gpu import install
from ptx_attention import replace, work
from ptx_backward import Backward, check

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.analysis.formula import formula
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.errors import LaunchError, PlanError, SpecError
from flashgen.lang.load import load_spec
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.ops.sinks import with_given_sink
from flashgen.planning import planner
from flashgen.planning.problem import Problem
from flashgen.planning.profile import profile
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic import predict
from flashgen.runtime import nvrtc, tiles
from flashgen.runtime.philox import Dropout, keep
from flashgen.runtime.tiles_backward import count_backward

#: No sink, and those that are far above and far below every score.
EXTREME = (0.5, -math.inf, 1e4, -1e4)


def extreme(problem, rng):
    return np.resize(np.array(EXTREME, np.float32), problem.heads)


sink = fg.sink("sink", example=extreme)


@fg.variant(sink=sink)
def holes(b, h, q, k):
    """Rows that see nothing: every third, and whole tiles of them."""
    return (k <= q) & (q % 3 > 0) & (q < 128)


causal = fg.variant(lambda b, h, q, k: k <= q, name="causal")


def written_out(q, k, v, sinks, *, scale=None, visible=None, score=lambda s: s, kept=None):
    """transformers' `eager_attention_forward` of gpt-oss: the sinks are a column that is dropped behind the softmax.

    lse is that of all columns; a row that has nothing gives 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights = score((q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT))
    if visible is not None:
        weights = weights.masked_fill(~visible, -math.inf)
    column = sinks.to(q.dtype).expand(*sinks.shape[:-1], q.shape[1]).unsqueeze(-1).unsqueeze(-1)
    combined = torch.cat([weights, column.expand(*q.shape[:3], 1)], -1)
    most = combined.amax(-1, keepdim=True)
    p = torch.softmax(combined - torch.where(most == -math.inf, 0.0, most), -1)[..., :-1].nan_to_num()
    p = p if kept is None else torch.where(kept, p, 0.0)
    return p @ v, combined.logsumexp(-1)


def triangle(q_len, kv_len):
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril()


def inputs(q_len=33, kv_len=47, heads=4, kv_heads=2, batch=2, dim=16, dtype=torch.float64):
    random = torch.Generator().manual_seed(q_len)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def both(variant, sinks, qkv, *, named=None, **reference):
    """Ours and the written-out form: o, lse, and the gradients of q, k, v and the sinks by both."""
    found = []
    weights = torch.randn(*qkv[0].shape, dtype=torch.float64), torch.randn(*qkv[0].shape[:3], dtype=torch.float64)
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
        if ours:
            results = fg.attention(*leaves[:3], variant, return_lse=True, sink=leaves[3], **(named or {}))
        else:
            results = written_out(*leaves, **reference)
        found.append((*results, *torch.autograd.grad(results, leaves, weights)))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What a spec says


def test_a_sink_belongs_to_a_variant_and_not_to_its_pairs():
    (declared,) = holes.tensors
    assert holes.sink == declared and holes.pair_tensors == () and holes.roots == (holes.mask, holes.sink_node)
    assert not holes.uses("h") and not profile(holes).uses_head
    with_sink = causal.with_sink(sink)
    assert with_sink != causal and with_sink.digest() != causal.digest() and causal.sink is None
    assert profile(load_spec("gpt_oss").bind()).band, "what a measured record knows of a window holds with a sink too"


def test_what_is_made_of_a_variant_has_its_sink():
    window = fg.variant(lambda b, h, q, k: q - k < 8)
    capped = fg.variant(score=lambda s, b, h, q, k: 5.0 * fg.tanh(s / 5.0))
    node = holes.sink_node
    for made in (holes & window, window & holes, holes | window, ~holes, holes.then(capped), capped.then(holes)):
        assert made.sink_node is node
    assert (holes & causal.with_sink(sink)).sink_node is node
    assert holes.bind().sink_node is node and holes.with_flipped_score().sink_node is node
    bare = causal.with_sink(fg.sink())
    assert pickle.loads(pickle.dumps(bare)) == bare
    assert formula(bare).text().splitlines()[-1] == "sink  = sink[h]"


def test_what_is_no_sink_is_refused_at_its_line():
    def error(make):
        with pytest.raises(SpecError) as caught:
            make()
        return str(caught.value)

    assert "a variant's sink is what fg.sink(" in error(lambda: fg.variant(sink=0.5))
    assert "a variant's sink is what fg.sink(" in error(lambda: causal.with_sink(fg.tensor("t", ("heads",), "float32")))
    assert "dims are ('heads',) or ('batch', 'heads')" in error(lambda: fg.sink("t", dims=("heads", "q")))
    assert "a logit is float32, float16 or bfloat16" in error(lambda: fg.sink("t", dtype="int32"))
    assert "has the sink 'sink' already" in error(lambda: holes.with_sink(sink))
    assert "have different sinks" in error(lambda: holes & causal.with_sink(fg.sink("other")))
    assert "a row has it beside its keys" in error(lambda: fg.variant(score=lambda s, b, h, q, k: s + sink[h]))
    table = fg.tensor("sink", ("heads",), "float32")
    reads = fg.variant(score=lambda s, b, h, q, k: s + table[h])
    assert "is the name of the sink and of a captured tensor" in error(lambda: reads.with_sink(fg.sink()))


# ---------------------------------------------------------------------------------------------------------------------
# On a CPU, in float64


@pytest.mark.parametrize(
    "sinks",
    [(0.3, -1.2, 2.0, 0.0), (0.7,), ((0.1, 0.2, 0.3, 0.4), (-1.0, -2.0, 3.0, 5.0)), ((1.5,), (-0.5,)), EXTREME],
    ids=["head", "one", "batch", "batch_one", "extreme"],
)
def test_o_lse_and_gradients_are_those_of_the_written_out_form(sinks):
    qkv = inputs()
    ours, right = both(causal, torch.tensor(sinks), qkv, visible=triangle(33, 47))
    for mine, other in zip(ours[:-1], right[:-1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[-1], right[-1], rtol=1e-6, atol=1e-6)  # rounded to the float32 of the sinks


def test_the_gradient_of_a_sink_is_what_it_takes_of_delta():
    """-sum over rows of e^(sink - lse) * delta, with delta = rowsum(do * o) - dlse."""
    qkv, sinks = inputs(), torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    o, lse = written_out(*qkv, sinks)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    (right,) = torch.autograd.grad((o, lse), [sinks], (do, dlse))
    delta = (do * o).sum(-1) - dlse
    torch.testing.assert_close(-(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2)), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_neither_scale_nor_score_touches_a_sink(scale):
    capped = causal.then(lambda s, b, h, q, k: 2.0 * fg.tanh(s / 2.0))
    options = {"scale": scale, "visible": triangle(33, 47), "score": lambda s: 2.0 * torch.tanh(s / 2.0)}
    ours, right = both(capped, torch.tensor([0.3, -1.2, 2.0, 0.0]), inputs(), named={"scale": scale}, **options)
    for mine, other in zip(ours[:-1], right[:-1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[-1], right[-1], rtol=1e-6, atol=1e-6)


def test_dropout_does_not_drop_a_sink():
    qkv, dropout = inputs(), Dropout(p=0.4, seed=3, offset=0)
    *at, keys = np.ogrid[:2, :4, :33, :47]
    kept = torch.from_numpy(keep(dropout, **dict(zip("bhqk", (*at, keys.ravel()), strict=True)), heads=4))
    options = {"visible": triangle(33, 47), "kept": kept}
    ours, right = both(causal, torch.tensor([0.3, 1.2, 2.0, 0.0]), qkv, named={"dropout": 0.4, "seed": 3}, **options)
    factor = dropout.scale
    torch.testing.assert_close(ours[0], factor * right[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1], right[1], rtol=1e-12, atol=1e-12)


def test_rows_without_a_key_have_their_sink_alone():
    sinks = torch.tensor([0.5, -math.inf, 1e4, -1e4], requires_grad=True)
    q, k, v = inputs(batch=1)
    for variant, keys in ((holes, (k, v)), (causal, (k[:, :, :0], v[:, :, :0]))):
        o, lse = fg.attention(q, *keys, variant, return_lse=True, sink=sinks)
        assert not o[:, :, 0].any() and torch.equal(lse[0, :, 0], sinks.detach().double())
        (found,) = torch.autograd.grad(lse[:, :, 0].sum(), [sinks])
        assert found.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_one_of_two_parts_has_the_sink():
    q, k, v = inputs(dtype=torch.float32)
    sinks, everything = torch.tensor([0.3, -1.2, 2.0, 0.0]), fg.variant()
    first = fg.attention(q, k[:, :, :20], v[:, :, :20], everything, sink=sinks, return_lse=True)
    rest = fg.attention(q, k[:, :, 20:], v[:, :, 20:], everything, return_lse=True)
    right = fg.attention(q, k, v, everything, sink=sinks, return_lse=True)
    for mine, other in zip(fg.merge(*first, *rest), right, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_call_gives_a_sink_to_a_variant_without_one():
    q, k, v = inputs(dtype=torch.float32)
    sinks = torch.tensor([0.3, -1.2, 2.0, 0.0])
    alone = fg.attention(q, k, v, causal)
    assert torch.equal(fg.attention(q, k, v, causal, sink=None), alone)
    assert torch.equal(fg.attention(q, k, v, causal, sink=torch.full((4,), -math.inf)), alone)
    given, declared = (fg.attention(q, k, v, v_, sink=sinks) for v_ in (causal, causal.with_sink(sink)))
    assert torch.equal(given, declared) and not torch.equal(given, alone)
    number = fg.param("sink", default=3, min=0)  # a name that is the variant's own
    first = fg.variant(lambda b, h, q, k: (k <= q) & (k < number), name="first")
    assert torch.equal(fg.attention(q, k, v, first, sink=47), alone)


@pytest.mark.parametrize(
    ("variant", "given", "told"),
    [
        (causal, 0.5, "sink is a float, not a torch.Tensor"),
        (causal, torch.zeros(4, dtype=torch.float64), "nearest: sink.float()"),
        (causal, torch.zeros(2, 4, 1), "sink has 3 dimensions: it is [heads] or [batch, heads]"),
        (causal, torch.zeros(3), "dimension 0 must be heads = 4 (or 1: it broadcasts)"),
        (causal.with_sink(fg.sink("own")), torch.zeros(4), "nearest: own=... in its place"),
        (holes, None, "needs the sink 'sink', float32 [heads]"),
    ],
)
def test_wrong_sinks_are_refused(variant, given, told):
    with pytest.raises((LaunchError, PlanError)) as caught:
        fg.attention(*inputs(dtype=torch.float32), variant, sink=given)
    assert told in str(caught.value)


@pytest.mark.slow
def test_a_compiled_call_has_its_sink_and_its_gradient():
    q, k, v = inputs(dtype=torch.float32)
    compiled = torch.compile(
        lambda q, k, v, s: fg.attention(q, k, v, causal, sink=s), fullgraph=True, backend="aot_eager"
    )
    found = []
    for call in (compiled, lambda q, k, v, s: fg.attention(q, k, v, causal, sink=s)):
        sinks = torch.tensor([0.3, -1.2, 2.0, 0.0], requires_grad=True)
        o = call(q, k, v, sinks)
        o.square().sum().backward()
        found.append((o.detach(), sinks.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------------------
# Kernels

SHAPE = {"heads": 4, "kv_heads": 2, "q_len": 170, "kv_len": 200}
FORWARDS = {
    "ampere": {"pipeline": "ampere"},
    "ampere_float16": {"pipeline": "ampere", "dtype": "float16", "head_dim": 32, "v_head_dim": 64},
    "hopper": {"pipeline": "hopper"},
    "hopper_float16": {"pipeline": "hopper", "dtype": "float16", "head_dim": 40},
    "hopper_packed": {"pipeline": "hopper", "packed": True},
    "hopper_packed_alone": {"pipeline": "hopper", "packed": True, "kv_heads": 1},
}


@pytest.mark.sampled("hopper_packed_alone")
@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARDS)
def test_forwards(name):
    w = work(holes, **(SHAPE | FORWARDS[name]))
    result = w.run()
    assert w.wrong(result) == () and result.report.conflicts == []
    np.testing.assert_allclose(result.lse[0, :, 0], EXTREME, rtol=1e-6)
    np.testing.assert_allclose(result.lse[0, :, 130], EXTREME, rtol=1e-6)  # of a tile that no key is visited for
    assert not result.o[0, 2].any()  # what is left beside a sink of 1e4


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["ampere", "hopper"])
def test_a_sink_beside_scores_that_move_the_maximum_late(pipeline):
    """Rows whose maximum lags, and grows from tile to tile, beside sinks about as large."""
    rising = fg.variant(score=lambda s, b, h, q, k: s + 0.02 * fg.float32(fg.kv_len - k), sink=sink, name="rising")
    w = work(rising, pipeline, heads=4, kv_heads=2, q_len=70, kv_len=300)
    case = dataclasses.replace(w.case, tensors={"sink": np.array([0.0, 4.0, 8.0, 12.0], np.float32)})
    w = dataclasses.replace(w, case=case)
    assert w.wrong(w.run()) == ()


MUTATIONS = {
    "ampere": {
        "o does not follow": replace("    scale_rows(o[m], factor);\n  }\n}\n\n// o =", "  }\n}\n\n// o ="),
        "the sink four times": replace("0.25f * ex2", "1.f * ex2"),
        "no sink where a row sees nothing": replace(
            "  const float before = row_max;\n",
            "  const float before = row_max;\n  if (before == MINUS_INFINITY) return 1.f;\n",
            1,
        ),
        "to base e": replace("sink(rows.b, rows.h, p) * LOG2E", "sink(rows.b, rows.h, p)"),
        "-inf is a sink": replace(
            "  if (sink == MINUS_INFINITY) return 1.f;  // none; and -inf - -inf would be NaN\n", ""
        ),
    },
    "hopper": {
        "o does not follow": replace(
            "factor[r] = sum == 0.f ? 0.f : followed * rcp(sum)", "factor[r] = sum == 0.f ? 0.f : rcp(sum)"
        ),
        "the sink of another head": replace("sink(work.b, work.h, p) * LOG2E", "sink(work.b, 0, p) * LOG2E"),
        "rows that see nothing without it": replace(
            "store_lse(work, q + r, sink(work.b, work.h, p))", "store_lse(work, q + r, MINUS_INFINITY)"
        ),
    },
}


@pytest.mark.sampled("ampere--inf is a sink", "hopper-rows that see nothing without it")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), [(p, name) for p in MUTATIONS for name in MUTATIONS[p]])
def test_a_mistake_is_noticed(pipeline, name):
    w = work(holes, pipeline, **SHAPE)
    result = w.run(MUTATIONS[pipeline][name])
    assert w.wrong(result)


BACKWARDS = {
    "ampere": {},
    "ampere_in_one_order": {"deterministic": True, "head_dim": 32},
    "hopper": {"pipeline": "hopper", "gradients": ("sink",), "kv_len": 100},
    "hopper_128_in_one_order": {
        **{"pipeline": "hopper", "gradients": ("sink",), "head_dim": 128, "deterministic": True, "dtype": "float16"}
    },
    "hopper_256": {"pipeline": "hopper", "gradients": ("sink",), "head_dim": 256, "q_len": 70},
}


@pytest.mark.sampled("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(BACKWARDS))
def test_backwards(name):
    b = Backward(holes, **(SHAPE | BACKWARDS[name]))
    result = check(b)
    p = b.forward.problem
    report, rows = result.reports["attention_backward_sink"], 4 * p.batch * p.heads * p.q_len
    assert report.bytes(buffer="delta") == report.bytes(buffer="lse_log2") == rows
    assert report.bytes(buffer="grad_sink") == 4 * p.heads
    np.testing.assert_array_equal(b.run(seed=1).captured["sink"], result.captured["sink"])


@pytest.mark.slow
def test_a_backward_with_dropout_and_a_bias_that_has_a_gradient_too():
    slopes = fg.tensor("slopes", ("heads",), "float32", example=lambda p, rng: rng.normal(0, 0.1, p.heads))
    biased = causal.then(lambda s, b, h, q, k: s - slopes[h] * fg.float32(q - k))
    per_batch = fg.sink("sink", dims=("batch", "heads"), example=lambda p, rng: rng.normal(0, 2, (p.batch, 1)))
    dropout, shape = Dropout(p=0.3, seed=5, offset=1), {"batch": 2, "q_len": 70, "kv_len": 90, "heads": 2}
    asked = {"pipeline": "hopper", "gradients": ("sink", "slopes"), "deterministic": True, "dropout": dropout}
    b = Backward(biased.with_sink(per_batch), **shape, **asked)
    result = b.run()
    assert b.wrong(result) == [] and result.captured["sink"].shape == (2, 1) and result.captured["slopes"].shape == (2,)
    assert list(result.reports)[:3] == [f"attention_backward_{name}" for name in ("clear", "prepare", "sink")]


@pytest.fixture(scope="module")
def backward():
    b = Backward(causal.with_sink(sink), heads=4, kv_heads=2, q_len=33, kv_len=33, head_dim=32)
    assert b.wrong(b.run()) == []
    return b


@pytest.mark.sampled("sum -= ex2(-sum += ex2(")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "      const float sink_log2 = sink(b, h, p) * LOG2E;",
            "      const float sink_log2 = sink(0, 0, p) * LOG2E;",
        ),
        ("sum -= ex2(", "sum += ex2("),
        ("if (index_of_sink(b, h, p) != element) continue;", ""),
        ("ex2(sink_log2 - p.lse_log2[first + row]) * p.delta", "p.delta"),
    ],
)
def test_a_mistake_in_the_gradient_is_noticed(backward, old, new):
    assert backward.fails(replace(old, new))


def test_what_is_predicted_is_what_the_walk_counts():
    variant = load_spec("gpt_oss").bind()
    problem = Problem(batch=2, heads=4, kv_heads=2, q_len=300, kv_len=300, head_dim=64, v_head_dim=64)
    sinks = np.zeros(problem.heads, np.float32)
    case = Case(sizes=problem.sizes(), params=variant.values({}), tensors={"sink": sinks})
    plain = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 128)).bind()
    asked = "sm_80", "bfloat16", 64
    with_sink, without = (
        predict(planner.menu(x, *asked).plans[0], problem, dataclasses.replace(case, params=x.values({})))
        for x in (variant, plain)
    )
    assert with_sink.plan.tile == without.plan.tile
    assert with_sink.hbm.read_bytes == without.hbm.read_bytes + sinks.nbytes
    counted = tiles.count(with_sink.plan, analyse(variant), case, head_dim=64, v_head_dim=64, dtype="bfloat16")
    assert (counted.read_bytes, counted.write_bytes) == (with_sink.hbm.read_bytes, with_sink.hbm.write_bytes)
    for gradients in ((), ("sink",)):
        plan = planner.backward_menu(variant, *asked, gradients=gradients).plans[0]
        predicted = predict(plan, problem, case)
        walked = count_backward(plan, analyse(variant), case, head_dim=64, v_head_dim=64, dtype="bfloat16")
        assert [entry for entry, _ in predicted.kernels] == list(walked.kernels)
        for entry, moved in predicted.kernels:
            kernel = walked.kernels[entry]
            assert (moved.read_bytes, moved.write_bytes) == (kernel.read.total(), kernel.written.total()), entry
        read = dict(predicted.kernels).get("attention_backward_sink")
        assert read is None or read.read_bytes == 2 * 4 * 2 * 4 * 300 + sinks.nbytes


@pytest.mark.sampled("capability0")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_call_on_an_emulated_gpu_gives_o_lse_and_gradients(monkeypatch, capability):
    gpu = install(monkeypatch, capability)
    qkv = [x.to(torch.bfloat16) for x in inputs(q_len=40, kv_len=50, dim=32)]
    sinks = torch.tensor([0.3, -1.2, 2.0, 0.0])
    on_gpu, put = [gpu.put(x) for x in qkv], gpu.put(sinks)
    o, lse = fg.attention(*on_gpu, causal, return_lse=True, sink=put)
    do, dlse = torch.randn(o.shape).to(torch.bfloat16), torch.randn(lse.shape)
    call = Call(with_given_sink(causal, {"sink": put}), None, {"sink": put})
    found = run_backward(Given(gpu.put(do), gpu.put(dlse), *on_gpu, o, lse), call, ("sink",))
    leaves = [x.double().requires_grad_() for x in (*qkv, sinks)]
    right = written_out(*leaves, visible=triangle(40, 50))
    gradients = torch.autograd.grad(right, leaves, (do.double(), dlse.double()))
    mine = (o, lse, found.dq, found.dk, found.dv, *found.captured)
    for x, other in zip(mine, (*right, *gradients), strict=True):
        torch.testing.assert_close(x.as_subclass(torch.Tensor).double(), other.detach(), rtol=0.05, atol=0.05)


ARCHS = [(arch, head_dim) for arch in ("sm_80", "sm_90a", "sm_120") for head_dim in (64, 128, 256)]


@pytest.mark.sampled("softcap-sm_90a-128")
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim"), ARCHS)
@pytest.mark.parametrize("spec", ["causal", "softcap"])
def test_kernels_with_a_sink_spill_nothing(arch, head_dim, spec):
    variant = load_spec(spec).bind().with_sink(sink)
    for asked in ({}, {"dropout": True}, {"backward": True, "gradients": ("sink",)}):
        plan = planner.menu_of(KernelRequest.of(variant, arch, "bfloat16", head_dim, **asked)).plans[0]
        resources = nvrtc.compile(emit(plan), arch).resources
        assert (resources.spills, resources.stack_bytes) == (0, 0), (plan.tile, asked)


def test_no_sequence_has_a_sink():
    x, none = torch.randn(5, 4, 16, requires_grad=True), torch.zeros(1, dtype=torch.int32)
    sink = torch.zeros(0, 4, requires_grad=True)
    o, lse = fg.attention_varlen(x, x, x, causal, none, max_seqlen_q=3, return_lse=True, sink=sink)
    assert torch.equal(o, torch.zeros_like(o)) and bool((lse == -math.inf).all())
    found = torch.autograd.grad(o.sum() + lse.exp().sum(), (x, sink))
    assert all(torch.equal(g, torch.zeros_like(y)) for g, y in zip(found, (x, sink), strict=True))
