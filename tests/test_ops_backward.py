"""Gradients through attention() on a CPU: gradcheck in float64, every dtype, dropout, torch.compile, and refusals."""

import math

import numpy as np
import pytest
import torch
from backward_checks import case_of, judge_captured, problem_of
from tolerance import judge
from torch.autograd import gradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import flashgen as fg
from flashgen.analysis.derivative import differentiable
from flashgen.errors import FlashgenError, LaunchError
from flashgen.lang.load import load_spec, shipped
from flashgen.ops import dropout as drawing
from flashgen.ops.backward import in_order
from flashgen.planning import planner
from flashgen.runtime.gradients import baseline_gradients, reference_gradients
from flashgen.runtime.philox import Dropout

SPECS = sorted(shipped())

bias = fg.tensor("bias", dims=("heads", "q"), dtype="float32")
gain = fg.param("gain", default=0.5)


scored = fg.variant(lambda b, h, q, k: k <= q + 2).score(
    lambda s, b, h, q, k: fg.tanh(s) * gain + bias[h, q] * s - bias[h, q]
)
plain = fg.variant(lambda b, h, q, k: (k <= q + 1) & (k >= q - 4))


def tensors(batch=1, heads=2, kv_heads=1, q_len=5, kv_len=6, dim=4, v_dim=3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    keys = (batch, kv_heads, kv_len)
    shapes = (batch, heads, q_len, dim), (*keys, dim), (*keys, v_dim)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def captured(heads=2, q_len=5, dtype=torch.float32):
    return torch.randn(heads, q_len, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()


# -- gradcheck


@pytest.mark.sampled("-0.6-False")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scale", [None, -0.6, 0.0])
def test_gradcheck_of_o_and_lse(scale, deterministic):
    q, k, v = tensors()
    options = {"scale": scale, "deterministic": deterministic, "return_lse": True}
    assert gradcheck(lambda *t: fg.attention(*t, plain, **options), (q, k, v))


@pytest.mark.sampled("softcap")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECS if load_spec(name).score_node is not None])
def test_gradcheck_of_every_score(name):
    """Each alone and with the masks that the specs give it; captured tensors are float32 and checked below."""
    variant = load_spec(name)
    problem = problem_of(batch=1, heads=2, kv_heads=1, q_len=5, kv_len=6, head_dim=4, v_head_dim=3)
    case = case_of(variant.bind(), problem)
    named = {n: torch.as_tensor(x) for n, x in case.tensors.items()}
    assert gradcheck(lambda *t: fg.attention(*t, variant, return_lse=True, **named, **case.params), tensors())


@pytest.mark.slow
def test_gradcheck_with_dropout():
    q, k, v = tensors()
    assert gradcheck(lambda *t: fg.attention(*t, plain, dropout=0.4, seed=3, return_lse=True), (q, k, v))


@pytest.mark.slow
def test_gradcheck_of_views():
    """Strided inputs and outputs: rows of all heads side by side, a slice of a packed tensor, an expanded batch."""
    packed = torch.randn(2, 5, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda t: fg.attention(*t.permute(2, 0, 3, 1, 4), plain), (packed,))
    q, k, v = tensors()
    assert gradcheck(
        lambda q, k, v: fg.attention(
            q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), plain
        ).sum(0),
        (q, k, v),
    )


# -- against float64


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_every_spec(name, dtype):
    variant = load_spec(name)
    problem = problem_of(dtype=dtype, head_dim=64)
    case = case_of(variant.bind(), problem)
    g = torch.Generator().manual_seed(0)
    p, kind = problem, getattr(torch, dtype)
    keys = (p.batch, p.kv_heads, p.kv_len)
    shapes = (p.batch, p.heads, p.q_len, 64), (*keys, 64), (*keys, 64)
    q, k, v = (torch.randn(s, generator=g).to(kind).requires_grad_() for s in shapes)
    do, dlse = torch.randn(q.shape, generator=g).to(kind), torch.randn(q.shape[:3], generator=g)
    floats = differentiable(variant.bind().score_node)
    named = {n: torch.as_tensor(x).requires_grad_(n in floats) for n, x in case.tensors.items()}
    o, lse = fg.attention(q, k, v, variant, return_lse=True, **named)
    torch.autograd.backward([o, torch.where(lse == -math.inf, 0.0, lse)], [do, dlse])
    options = {"scale": 1 / 8, "dlse": dlse}
    inputs = (variant.bind(), case, q.detach(), k.detach(), v.detach(), do)
    ref, base = reference_gradients(*inputs, **options), baseline_gradients(*inputs, **options)
    for mine, same, right in zip((q.grad, k.grad, v.grad), base[:3], ref[:3], strict=True):
        assert mine.dtype == kind
        verdict = judge(mine, same, right, dtype)
        assert verdict.ok, verdict
    for n in floats:
        wrong = judge_captured(named[n].grad, base.captured[n], ref.captured[n])
        assert not wrong, f"{n}: {wrong}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_captured_tensors_have_their_dtype(dtype):
    tilt = fg.tensor("tilt", dims=("heads", "kv"), dtype=dtype)
    variant = fg.variant(score=lambda s, b, h, q, k: s + tilt[h, k])
    q, k, v = tensors()
    table = torch.randn(1, 6).to(getattr(torch, dtype)).requires_grad_()  # one row for every head
    fg.attention(q, k, v, variant, tilt=table).square().sum().backward()
    assert table.grad.shape == (1, 6) and table.grad.dtype == table.dtype
    wide = table.detach().double().requires_grad_()
    group = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = q @ group[0].mT / math.sqrt(4) + wide
    (torch.softmax(s, -1) @ group[1]).square().sum().backward()
    torch.testing.assert_close(table.grad.double(), wide.grad, rtol=2**-6, atol=2**-8)


def test_gradients_of_elements_that_the_score_selects():
    step = fg.tensor("step", dims=(2,), dtype="float32")
    variant = fg.variant(score=lambda s, b, h, q, k: s + step[fg.int32(s > 0)])
    q, k, v = tensors()
    table = torch.randn(2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    fg.attention(q, k, v, variant, step=table).square().sum().backward()
    wide = table.detach().double().requires_grad_()
    group = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = q @ group[0].mT / math.sqrt(4)
    (torch.softmax(s + wide[(s > 0).long()], -1) @ group[1]).square().sum().backward()
    torch.testing.assert_close(table.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_what_wants_no_gradient_gets_none():
    q, k, v = tensors()
    table = captured()
    k.requires_grad_(False)
    o, lse = fg.attention(q, k, v, scored, bias=table, return_lse=True)
    assert o.requires_grad and lse.requires_grad
    o.sum().backward()
    assert k.grad is None and q.grad is not None and v.grad is not None and table.grad is not None
    with torch.no_grad():
        assert not fg.attention(q, k, v, scored, bias=table).requires_grad
    assert not fg.attention(*(t.detach() for t in (q, k, v)), scored, bias=table.detach()).requires_grad


def test_a_tensor_that_only_the_mask_reads_has_no_gradient():
    edge = fg.tensor("edge", dims=("heads",), dtype="float32")
    variant = fg.variant(lambda b, h, q, k: fg.float32(k) <= edge[h])
    q, k, v = tensors()
    limits = torch.tensor([3.5, 4.0], requires_grad=True)
    fg.attention(q, k, v, variant, edge=limits).sum().backward()
    assert limits.grad is None and v.grad is not None


def test_only_lse_or_only_o_in_the_loss():
    q, k, v = tensors()
    o, lse = fg.attention(q, k, v, plain, return_lse=True)
    both = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v), retain_graph=True)
    alone = [torch.autograd.grad(x.sum(), (q, k), retain_graph=True) for x in (o, lse)]
    for i in range(2):
        torch.testing.assert_close(alone[0][i] + alone[1][i], both[i])
    assert not torch.autograd.grad(lse.sum(), v, retain_graph=True, allow_unused=True)[0].any()


@pytest.mark.parametrize("shape", [dict(q_len=0), dict(kv_len=0), dict(batch=0)], ids=str)
def test_empty_problems(shape):
    q, k, v = tensors(**shape)
    table = captured(q_len=q.shape[2])
    o, lse = fg.attention(q, k, v, scored, bias=table, return_lse=True)
    (o.sum() + torch.where(lse == -math.inf, 0.0, lse).sum()).backward()
    for x in (q, k, v, table):
        assert x.grad.shape == x.shape and not x.grad.any()


def test_rows_that_see_nothing():
    late = fg.variant(lambda b, h, q, k: k < q - 3)
    q, k, v = tensors()
    o, lse = fg.attention(q, k, v, late, return_lse=True)
    torch.autograd.backward([o, lse], [torch.full_like(o, 1e9), torch.full_like(lse, 1e9)])
    assert not q.grad[:, :, :4].any() and q.grad[:, :, 4:].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_gradients_are_laid_out_as_their_tensors():
    q, k, v = tensors(kv_heads=2)
    turned = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    a = torch.autograd.grad(fg.attention(turned, k, v, plain).sum(), turned)[0]
    b = torch.autograd.grad(fg.attention(q, k, v, plain).sum(), q)[0]
    torch.testing.assert_close(a, b)
    assert a.transpose(1, 2).is_contiguous() and b.is_contiguous()


def test_upstream_gradients_that_memory_does_not_hold():
    q, k, v = tensors()
    o, lse = fg.attention(q, k, v, plain, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    want = torch.autograd.grad((o, lse), (q, k, v), (-do, -dlse), retain_graph=True)
    got = torch.autograd.grad((o, lse), (q, k, v), (torch._neg_view(do), torch._neg_view(dlse)), retain_graph=True)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    zeros = torch._efficientzerotensor(o.shape, dtype=o.dtype), torch._efficientzerotensor(lse.shape, dtype=lse.dtype)
    assert not any(x.any() for x in torch.autograd.grad((o, lse), (q, k, v), zeros))


def test_deterministic_walks_agree():
    q, k, v = tensors()
    found = []
    for deterministic in (False, True):
        o = fg.attention(q, k, v, plain, deterministic=deterministic)
        found.append(torch.autograd.grad(o.square().sum(), (q, k, v)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.sampled("eager-False", "eager-True", "transformed-True", "compiled-True", "traced-True")
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", ["eager", "transformed", "compiled", "traced"])
def test_every_way_asks_for_the_kernel_that_the_call_asks_for(way, deterministic, monkeypatch):
    requests, menu = [], planner.menu_of
    monkeypatch.setattr(planner, "menu_of", lambda request: requests.append(request) or menu(request))

    def loss(q, k, v):
        return fg.attention(q, k, v, plain, deterministic=deterministic).square().sum()

    inputs = tensors()
    if way == "transformed":
        torch.func.grad(loss)(*inputs)
    elif way == "traced":
        make_fx(torch.func.grad(loss))(*inputs)(*inputs)
    else:
        (torch.compile(loss, backend="aot_eager") if way == "compiled" else loss)(*inputs).backward()
    assert {one.deterministic for one in requests if one.pass_name == "backward"} == {deterministic}


def test_torch_may_ask_for_determinism_too(monkeypatch):
    assert not in_order(False) and in_order(True)
    torch.use_deterministic_algorithms(True)
    try:
        assert in_order(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not in_order(False)
    finally:
        torch.use_deterministic_algorithms(False)


# -- dropout


def test_torchs_generator_decides_what_is_dropped():
    q, k, v = tensors()
    torch.manual_seed(5)
    first, second = (fg.attention(q, k, v, plain, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(fg.attention(q, k, v, plain, dropout=0.5), first)
    assert torch.equal(fg.attention(q, k, v, plain, dropout=0.5), second)


def test_the_generator_is_the_tensors_own_and_not_the_default_devices():
    q, k, v = tensors()
    torch.manual_seed(5)
    want = fg.attention(q, k, v, plain, dropout=0.5)
    torch.manual_seed(5)
    with torch.device("meta"):
        mine = fg.attention(q, k, v, plain, dropout=0.5)
    assert torch.equal(mine, want)


def test_a_seed_decides_what_is_dropped():
    q, k, v = tensors()
    before = torch.get_rng_state()
    one = fg.attention(q, k, v, plain, dropout=0.5, seed=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(fg.attention(q, k, v, plain, dropout=0.5, seed=8), one)
    assert not torch.equal(fg.attention(q, k, v, plain, dropout=0.5, seed=(1 << 64) - 1), one)
    assert torch.equal(fg.attention(q, k, v, plain, dropout=0.0, seed=8), fg.attention(q, k, v, plain))


def test_a_checkpoint_draws_the_same_mask_again():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors()
    torch.manual_seed(3)
    plainly = torch.autograd.grad(fg.attention(q, k, v, plain, dropout=0.5).square().sum(), (q, k, v))
    torch.manual_seed(3)
    o = checkpoint(lambda *t: fg.attention(*t, plain, dropout=0.5), q, k, v, use_reentrant=False)
    again = torch.autograd.grad(o.square().sum(), (q, k, v))
    for x, y in zip(again, plainly, strict=True):
        assert torch.equal(x, y)


def test_a_cuda_generator_moves_on_by_four(monkeypatch):
    """What the launch is given, of a generator whose state is laid out as CUDA's is."""

    class Generator:
        words = torch.tensor([77, 8])

        def get_state(self):
            return self.words.clone().view(torch.uint8)

        def set_state(self, state):
            self.words = state.view(torch.int64).clone()

    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 1)

    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert drawing.drawn(0.25, None, OnGpu()) == Dropout(p=0.25, seed=77, offset=9)
    assert drawing.drawn(0.25, None, OnGpu()) == Dropout(p=0.25, seed=77, offset=13)
    assert drawing.drawn(0.0, None, OnGpu()) is None and generator.words.tolist() == [77, 16]
    assert drawing.drawn(0.25, 3, OnGpu()) == Dropout(p=0.25, seed=3, offset=0)
    generator.words = torch.tensor([-1, 4])
    assert drawing.drawn(0.25, None, OnGpu()).seed == 2**64 - 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match=r"captured into a CUDA graph(?s:.*)nearest: give seed=\.\.\."):
        drawing.drawn(0.25, None, OnGpu())
    assert drawing.drawn(0.25, 3, OnGpu()).seed == 3


# -- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, r"dropout is 1.0: the probability of dropping lies in \[0, 1\)(?s:.*)nearest: dropout=0.99"),
        ({"dropout": -0.1}, r"dropout is -0.1(?s:.*)nearest: dropout=0.0"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"dropout": "0.1"}, "dropout is a str and must be a number"),
        ({"dropout": np.full(2, 0.1)}, "dropout is a ndarray and must be a number"),
        ({"dropout": torch.zeros(2)}, "dropout is a Tensor and must be a number"),
        ({"dropout": None}, "dropout is a NoneType and must be a number"),
        ({"dropout": 10**400}, r"dropout is 2\^1328 or more: the probability"),
        ({"dropout": -(10**5000)}, r"dropout is -2\^16609 or more(?s:.*)nearest: dropout=0.0"),
        ({"dropout": 0.1, "seed": True}, "seed is a bool and must be an integer"),
        ({"dropout": 0.1, "seed": 10**5000}, r"seed is 2\^16609 or more: it is an unsigned 64-bit number"),
        ({"dropout": True}, "dropout is a bool and must be a number"),
        ({"dropout": torch.tensor(0.1)}, r"dropout is a Tensor and must be a number \(dropout.item\(\) reads"),
        ({"dropout": 0.1, "seed": 1.5}, "seed is a float and must be an integer"),
        ({"dropout": 0.1, "seed": -1}, f"seed is -1: it is an unsigned 64-bit number\n  nearest: seed={2**64 - 1}"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616: it is an unsigned 64-bit number\n  nearest: seed=0"),
        ({"deterministic": 1}, "deterministic is a int and must be True or False"),
        ({"return_lse": "no"}, "return_lse is a str and must be True or False"),
        ({"return_lse": None}, "return_lse is a NoneType and must be True or False"),
    ],
)
def test_what_wrong_options_are_told(options, message):
    q, k, v = tensors()
    with pytest.raises(FlashgenError, match=message):
        fg.attention(q, k, v, plain, **options)


def test_a_second_derivative_is_refused():
    q, k, v = tensors()
    o = fg.attention(q, k, v, plain)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(LaunchError, match=r"differentiates attention once(?s:.*)nearest: backward"):
        dq.square().sum().backward()


def test_a_tensor_changed_in_between_is_noticed():
    q, k, v = tensors()
    loss = fg.attention(q, k, v, plain).sum()
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- torch.compile


@pytest.mark.sampled("eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    def model(q, k, v, table, width):
        o, lse = fg.attention(q * 2, k, v, scored, bias=table, gain=width, return_lse=True)
        return (o * o).sum() + lse.sum() + fg.attention(q, k, v, plain, deterministic=True).sum()

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(2):
        q, k, v = tensors(seed=seed)
        table = captured()
        got, want = (torch.autograd.grad(f(q, k, v, table, 0.3), (q, k, v, table)) for f in (compiled, model))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.slow
def test_compiled_dropout():
    q, k, v = tensors()
    model = torch.compile(
        lambda q, k, v: fg.attention(q, k, v, plain, dropout=0.5) - fg.attention(q, k, v, plain, dropout=0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.manual_seed(1)
    first = model(q, k, v)
    assert first.any(), "two calls drop other pairs"
    assert not torch.equal(model(q, k, v), first)
    torch.manual_seed(1)
    again = model(q, k, v)
    assert torch.equal(again, first)
    again.square().sum().backward()
    want = torch.autograd.grad((lambda o: o.square().sum())(_differing(q, k, v, seed=1)), (q, k, v))
    for x, y in zip((q, k, v), want, strict=True):
        torch.testing.assert_close(x.grad, y)


def _differing(q, k, v, seed):
    torch.manual_seed(seed)
    return fg.attention(q, k, v, plain, dropout=0.5) - fg.attention(q, k, v, plain, dropout=0.5)


@pytest.mark.slow
def test_compiled_seed_and_errors():
    q, k, v = tensors()
    model = torch.compile(
        lambda *t: fg.attention(*t, plain, dropout=0.5, seed=(1 << 64) - 2), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(model(q, k, v), fg.attention(q, k, v, plain, dropout=0.5, seed=(1 << 64) - 2))
    wrong = torch.compile(lambda *t: fg.attention(*t, plain, dropout=1.5), fullgraph=True, backend="aot_eager")
    with pytest.raises(LaunchError, match=r"dropout is 1\.5"):
        wrong(q, k, v)


@pytest.mark.slow
def test_the_ops_follow_the_rules_of_torch():
    q, k, v = tensors()
    o, lse = fg.attention(q, k, v, plain, return_lse=True)
    rest = (plain.token, [], [], [], [], [], [], None, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q, k, v, *rest), test_utils=tests)
    saved = [t.detach() for t in (o, lse, q, k, v, o, lse)]
    backward = torch.ops.flashgen.attention_backward.default
    torch.library.opcheck(backward, (*saved, *rest, []), test_utils=("test_schema", "test_faketensor"))


def test_a_tiny_model_learns():
    torch.manual_seed(0)
    x, target = torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    weights = [torch.nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3)]
    table = torch.nn.Parameter(torch.zeros(2, 12))
    optimiser = torch.optim.SGD([*weights, table], lr=0.5)
    losses = []
    for _ in range(30):
        q, k, v = (x @ w for w in weights)
        o = fg.attention(q, k, v, scored, bias=table, dropout=0.1)
        loss = (o - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert table.any()


rounds = fg.constant("rounds", 2, min=0, max=4)
weights = fg.tensor("weights", dims=("heads", 4), dtype="float32")
looping = fg.variant().score(lambda s, b, h, q, k: s + fg.sum(rounds, lambda i: weights[h, i] * fg.float32(k % 4 == i)))


@pytest.mark.parametrize("q_len", [5, 0])
def test_a_tensor_that_a_constant_leaves_out_has_a_gradient_of_zeros(q_len):
    q, k, v = tensors(q_len=q_len)
    w = torch.randn(2, 4, requires_grad=True)
    found = torch.autograd.grad(fg.attention(q, k, v, looping, weights=w, rounds=0).sum(), (q, k, v, w))
    expected = torch.autograd.grad(fg.attention(q, k, v, load_spec("full")).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected, strict=True))
    assert torch.equal(found[3], torch.zeros(2, 4))
    (used,) = torch.autograd.grad(fg.attention(q, k, v, looping, weights=w).sum(), w)
    assert bool(used.any()) == bool(q_len)
