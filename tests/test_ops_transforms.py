"""attention() under what looks into torch's calls: torch.func, forward-mode AD, make_fx, FakeTensors, kinds of tensor.

Each gives the right result or says, by an error of flashgen's, what it was asked and what works.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen as fg
from flashgen.errors import FlashgenError, LaunchError
from flashgen.ops import autograd, library
from flashgen.ops.backward import Given

window = fg.param("window", default=8, min=1)
table = fg.tensor("table", dims=("heads", 5), dtype="float32", example=lambda p, rng: None)
offset = fg.tensor("offset", dims=("kv",), dtype="int32", example=lambda p, rng: None)

full = fg.variant()
# Equal variants share a token, and with it the line that errors name: names as no other module of tests has.
windowed = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name="windowed")
biased = fg.variant(score=lambda s, b, h, q, k: s + table[h, (q + k) % 5], name="learned")
shifted = fg.variant(lambda b, h, q, k: k + offset[k] <= q, name="shifted")


def tensors(q_len=6, kv_len=7, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shapes = (2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 5)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def bias():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def banded(q, k, v):
    return fg.attention(q, k, v, windowed, window=3, scale=-0.5)


def learned(q, k, v, rows):
    return fg.attention(q, k, v, biased, table=rows)


def loss(q, k, v, rows):
    o, lse = fg.attention(q, k, v, biased, table=rows, return_lse=True)
    return o.square().sum() + lse.sum()


def gradients(f, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(f(*inputs), inputs)


# -- torch.func and forward mode


def test_reverse_mode_of_torch_func():
    inputs = (*tensors(), bias())
    want = gradients(loss, *inputs)
    for mine, right in zip(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs), want, strict=True):
        assert torch.equal(mine, right)
    o, pull = torch.func.vjp(banded, *inputs[:3])
    assert torch.equal(o, banded(*inputs[:3]))
    upstream = torch.ones_like(o)
    for mine, right in zip(pull(upstream), gradients(lambda *x: banded(*x).sum(), *inputs[:3]), strict=True):
        assert torch.equal(mine, right)


def test_dropout_under_torch_func_is_the_one_drawn():
    q, k, v = tensors()

    def dropped(q):
        return fg.attention(q, k, v, full, dropout=0.5).square().sum()

    torch.manual_seed(3)
    mine = torch.func.grad(dropped)(q)
    torch.manual_seed(3)
    assert torch.equal(mine, gradients(dropped, q)[0])


def under_jvp(q, k, v):
    torch.func.jvp(banded, (q, k, v), (q, k, v))


def under_jacfwd(q, k, v):
    torch.func.jacfwd(lambda q: banded(q, k, v))(q)


def under_hessian(q, k, v):
    torch.func.hessian(lambda q: banded(q, k, v).sum())(q)


def with_a_dual(q, k, v):
    with forward_ad.dual_level():
        banded(q, forward_ad.make_dual(k, k), v)


def with_a_dual_that_wants_a_gradient(q, k, v):
    with forward_ad.dual_level():
        banded(q, k, forward_ad.make_dual(v, v).requires_grad_())


def with_a_dual_and_no_grad(q, k, v):
    with torch.no_grad(), forward_ad.dual_level():
        banded(forward_ad.make_dual(q, q), k, v)


def with_a_captured_dual(q, k, v):
    with forward_ad.dual_level():
        learned(q, k, v, forward_ad.make_dual(bias(), bias()))


@pytest.mark.parametrize(
    "call",
    [
        *(under_jvp, under_jacfwd, under_hessian, with_a_dual, with_a_dual_that_wants_a_gradient),
        *(with_a_dual_and_no_grad, with_a_captured_dual),
    ],
)
def test_tangents_are_refused_and_never_dropped(call):
    with pytest.raises(LaunchError, match=r"in reverse mode: it carries no tangents(?s:.*)nearest: backward\(\)"):
        call(*tensors())


def test_a_level_without_tangents_is_no_hindrance():
    inputs = tensors()
    with forward_ad.dual_level():
        assert torch.equal(banded(*inputs), banded(*tensors()))
        for mine, right in zip(
            gradients(lambda *x: banded(*x).sum(), *inputs),
            gradients(lambda *x: banded(*x).sum(), *inputs),
            strict=True,
        ):
            assert torch.equal(mine, right)


lengths = fg.tensor("lengths", dims=("batch",), dtype="int64")
padded = fg.variant(lambda b, h, q, k: k < lengths[b], name="padded")
of_batches = {
    "reads b": fg.variant(lambda b, h, q, k: k <= q + b, name="staggered"),
    "reads another batch": fg.variant(lambda b, h, q, k: k < lengths[0], name="first_padded"),
    "counts batches": fg.variant(lambda b, h, q, k: k + 1 < q + fg.batch, name="counted"),
}


@pytest.fixture
def calls(monkeypatch):
    """The shapes of q of the forwards and backwards that ran, of batches that are not one element's."""
    seen = []

    def watched(run):
        def watching(first, *others):
            q = first.q if isinstance(first, Given) else first
            seen.append(q.shape[0])
            return run(first, *others)

        return watching

    for module, name in ((library, "run"), (autograd, "run"), (library, "run_backward")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return seen


def stacked(x):
    return torch.stack([x, x.flip(0), x * 2])


def test_vmap_joins_the_batch(calls):
    q, k, v = tensors()
    qs, vs = stacked(q), stacked(v).movedim(0, 1)
    got = torch.func.vmap(banded, in_dims=(0, None, 1))(qs, k, vs)
    assert calls == [6]
    for i, mine in enumerate(got):
        torch.testing.assert_close(mine, banded(qs[i], k, vs[:, i]), rtol=0, atol=0)
    twice = torch.func.vmap(torch.func.vmap(banded, in_dims=(None, 0, None)), in_dims=(0, None, None))
    assert torch.equal(twice(qs, stacked(k), v)[2, 1], banded(qs[2], stacked(k)[1], v))
    assert torch.func.vmap(banded, in_dims=(0, None, None))(qs[:0], k, v).shape == (0, 2, 4, 6, 5)


def test_vmap_of_captured_tensors(calls):
    q, k, v = tensors()
    ends = torch.tensor([[3, 7], [1, 2]])
    rows = stacked(bias())
    call = torch.func.vmap(lambda q, ends: fg.attention(q, k, v, padded, lengths=ends))
    assert torch.equal(call(stacked(q)[:2], ends)[1], fg.attention(q.flip(0), k, v, padded, lengths=ends[1]))
    shared = torch.func.vmap(lambda q: fg.attention(q, k, v, padded, lengths=ends[0, :1]))
    assert torch.equal(shared(stacked(q))[0], fg.attention(q, k, v, padded, lengths=ends[0, :1]))
    assert calls == [4, 6]
    calls.clear()
    got = torch.func.vmap(learned, in_dims=(None, None, None, 0))(q, k, v, rows)
    assert calls == [2] * 3, "a table of each element's own is read by no larger batch"
    for mine, row in zip(got, rows, strict=True):
        assert torch.equal(mine, learned(q, k, v, row))


@pytest.mark.parametrize("what", of_batches)
def test_vmap_of_what_knows_its_batch_calls_for_each(what, calls):
    q, k, v = tensors()
    named = {"lengths": torch.tensor([2, 5])} if what == "reads another batch" else {}
    got = torch.func.vmap(lambda q: fg.attention(q, k, v, of_batches[what], **named))(stacked(q))
    assert calls == [2] * 3
    for mine, one in zip(got, stacked(q), strict=True):
        assert torch.equal(mine, fg.attention(one, k, v, of_batches[what], **named))


def test_gradients_of_each_element(calls):
    """vmap of grad: one backward where no gradient is a sum over the batch."""
    q, k, v = tensors()
    qs, rows = stacked(q), bias()
    got = torch.func.vmap(torch.func.grad(lambda q: banded(q, k, v).square().sum()))(qs)
    assert calls == [6, 6]
    for mine, one in zip(got, qs, strict=True):
        torch.testing.assert_close(mine, gradients(lambda q: banded(q, k, v).square().sum(), one)[0])
    calls.clear()
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 3)), in_dims=(0, None, None, None))(qs, k, v, rows)
    assert calls == [6, *[2] * 3]
    for *mine, one in zip(*got, qs, strict=True):
        want = gradients(loss, one, k, v, rows)
        torch.testing.assert_close(mine, [want[0], want[3]])


turned = fg.tensor("turned", dims=("heads", "batch"), dtype="float32")
lifted = fg.variant(score=lambda s, b, h, q, k: s + turned[h, b] * k, name="lifted")


@pytest.mark.slow
def test_a_captured_tensor_whose_batch_comes_later(calls):
    q, k, v = tensors()

    def loss(q, values):
        return fg.attention(q, k, v, lifted, turned=values).square().sum()

    one_call, three = [6, 6], [2] * 6
    forms = ((3, 4, 2), 0, one_call), ((4, 3, 2), 1, one_call), ((4, 1, 3), 2, three), ((4, 2), None, one_call)
    for shape, dim, ran in forms:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        calls.clear()
        found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, dim))(stacked(q), values)
        assert calls == ran
        for i, one in enumerate(stacked(q)):
            want = gradients(loss, one, values if dim is None else values.select(dim, i))
            torch.testing.assert_close([x[i] for x in found], list(want))

    def rows(values):
        return fg.attention(q[:, :, :1], k, v, lifted, turned=values)

    values = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))
    want = torch.autograd.functional.jacobian(rows, values)
    torch.testing.assert_close(torch.autograd.functional.jacobian(rows, values, vectorize=True), want)


def test_jacobians():
    inputs = [x[:1, :, :2] for x in tensors()]
    of_q = lambda q: banded(q, *inputs[1:])  # noqa: E731
    want = torch.autograd.functional.jacobian(of_q, inputs[0])
    torch.testing.assert_close(torch.func.jacrev(of_q)(inputs[0]), want)
    torch.testing.assert_close(torch.autograd.functional.jacobian(of_q, inputs[0], vectorize=True), want)
    both = lambda *x: loss(*x)[None] * torch.ones(2)  # noqa: E731
    found = torch.autograd.functional.jacobian(both, (*inputs, bias()), vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(both, (*inputs, bias())))


@pytest.mark.slow
def test_make_fx_of_vmap():
    q, k, v = tensors()
    mapped = torch.func.vmap(banded, in_dims=(0, None, None))
    traced = make_fx(mapped, tracing_mode="symbolic")(stacked(q), k, v)
    assert torch.ops.flashgen.attention.default in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(stacked(q)[:2], k, v), mapped(stacked(q)[:2], k, v))


def test_dropout_under_vmap_is_drawn_once():
    q, k, v = tensors()

    def dropped(q, seed=None):
        return fg.attention(q, k, v, full, dropout=0.5, seed=seed)

    def mapped(function, randomness="error"):
        return torch.func.vmap(function, randomness=randomness)(torch.stack([q, q]))

    for randomness in ("error", "different"):
        refused('once, for all elements alike\n.*randomness="same"', lambda r=randomness: mapped(dropped, r))

    for got in (mapped(dropped, "same"), mapped(lambda q: dropped(q, seed=3))):
        assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], dropped(q, seed=3))


def test_functionalize_is_refused():
    q, k, v = tensors()
    functionalized = torch.func.functionalize(banded)
    for call in (functionalized, torch.func.grad(lambda *x: functionalized(*x).sum()), make_fx(functionalized)):
        refused(r"^torch.func.functionalize has no rule .*\n  nearest: .* make_fx", lambda f=call: f(q, k, v))


def test_a_gradient_of_a_gradient_is_refused_under_torch_func():
    q, k, v = tensors()
    inner = torch.func.grad(lambda q: banded(q, k, v).square().sum())
    with pytest.raises(LaunchError, match="differentiates attention once"):
        torch.func.grad(lambda q: inner(q).sum())(q)


# -- tracers


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_holds_the_call_and_not_its_result(mode):
    inputs = (*tensors(), bias())
    traced = make_fx(learned, tracing_mode=mode)(*inputs)
    assert torch.ops.flashgen.attention.default in [node.target for node in traced.graph.nodes]
    others = [x + 1 for x in inputs]
    assert torch.equal(traced(*others), learned(*others))
    if mode == "symbolic":
        longer = (*tensors(q_len=9, kv_len=11), bias())
        assert torch.equal(traced(*longer), learned(*longer))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_of_gradients(mode):
    inputs = (*tensors(), bias())
    others = [x / 2 for x in inputs]
    want = gradients(loss, *others)
    for function in (torch.func.grad(loss, argnums=(0, 1, 2, 3)), lambda *x: gradients(loss, *x)):
        traced = make_fx(function, tracing_mode=mode)(*inputs)
        assert torch.ops.flashgen.attention_backward.default in [node.target for node in traced.graph.nodes]
        for mine, right in zip(traced(*others), want, strict=True):
            assert torch.equal(mine, right)


def test_make_fx_draws_dropout_anew():
    q, k, v = tensors()
    traced = make_fx(lambda *x: fg.attention(*x, full, dropout=0.5))(q, k, v)
    torch.manual_seed(4)
    first, second = traced(q, k, v), traced(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(fg.attention(q, k, v, full, dropout=0.5), first)


def test_fake_tensors_have_the_shapes_of_results():
    q, k, v = tensors(dtype=torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        inside = fg.attention(*fakes, windowed, dropout=0.25, return_lse=True)
    outside = fg.attention(*fakes, windowed, return_lse=True)
    for found in (inside, outside):
        for fake, real in zip(found, fg.attention(q, k, v, windowed, return_lse=True), strict=True):
            assert isinstance(fake, FakeTensor)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_modes_and_kinds_of_tensor_see_the_op():
    inputs = tensors()
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(function)
            return function(*arguments, **(options or {}))

    with Watch():
        assert torch.equal(banded(*inputs), banded(*tensors()))
    assert torch.ops.flashgen.attention.default in seen
    both = banded(*(TwoTensor(x, x + 1) for x in inputs))
    assert torch.equal(both.a, banded(*inputs)) and torch.equal(both.b, banded(*(x + 1 for x in inputs)))


def test_parameters_and_plain_subclasses_are_tensors():
    class Own(torch.Tensor):
        pass

    q, k, v = tensors()
    want = banded(q, k, v)
    assert torch.equal(banded(torch.nn.Parameter(q), k, v), want)
    assert torch.equal(banded(q.as_subclass(Own), k, v).as_subclass(torch.Tensor), want)


# -- tensors that do not hold their elements as they are


def refused(message, call):
    with pytest.raises(FlashgenError, match=message):
        call()


def test_negated_views():
    q, k, v = tensors()
    negated = torch.complex(q, q).conj().imag
    assert negated.is_neg()
    for name, given in (("q", (negated, k, v)), ("k", (q, torch._neg_view(k), v)), ("v", (q, k, torch._neg_view(v)))):
        refused(
            rf"^{name} is a view that negates .*\n  nearest: {name}.resolve_neg\(\), a copy", lambda x=given: banded(*x)
        )
    refused(
        r"captured tensor 'table' of 'learned' is a view that negates .*\n  nearest: table.resolve_neg\(\)",
        lambda: learned(q, k, v, torch._neg_view(bias())),
    )
    assert torch.equal(banded(negated.resolve_neg(), k, v), banded(-q, k, v))


def test_negated_views_of_8_bits():
    """Kernels read what lies in memory: a descale of the other sign, or what is quantised."""
    q, k, v = tensors()
    narrow, one = [x.to(torch.float8_e4m3fn) for x in (q, k, v)], torch.ones(1)
    descales = {"q_descale": one, "k_descale": torch._neg_view(-one), "v_descale": one}
    refused(
        r"^k_descale is a view that negates .*\n  nearest: k_descale.resolve_neg\(\), a copy",
        lambda: fg.attention(*narrow, fg.load_spec("full"), **descales),
    )
    wide = q, k, v = [x.bfloat16() for x in (q, k, v)]
    refused(r"^v is a view that negates", lambda: fg.quantize(q, k, torch._neg_view(v)))
    refused(r"^smooth_k is a view that negates", lambda: fg.quantize(*wide, smooth_k=torch._neg_view(k.mean(2))))


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes and old kinds of tensor
def test_tensors_without_memory_of_their_own():
    q, k, v = tensors(dtype=torch.float32)
    zero = torch._efficientzerotensor(q.shape)
    refused(r"^q is a ZeroTensor, which has no memory\n  nearest: torch.zeros_like\(q\)", lambda: banded(zero, k, v))
    quantised = torch.quantize_per_tensor(k, 0.1, 0, torch.quint8)
    refused(r"^k is quantised \(quint8\)(?s:.*)nearest: k.dequantize\(\)", lambda: banded(q, quantised, v))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(list(v), layout=layout)
        refused(
            r"^v is nested: .* all dense\n  nearest: layout=torch.jagged for all three, or v.to_padded_tensor",
            lambda n=nested: banded(q, k, n),
        )
        refused("^q is nested", lambda n=nested: banded(n, n, n))
    for sparse in (q.to_sparse(), q.flatten(0, 2).to_sparse_csr()):
        layout = str(sparse.layout).removeprefix("torch.")
        refused(
            rf"^q is {layout}: attention takes dense(?s:.*)nearest: q.to_dense\(\)", lambda s=sparse: banded(s, k, v)
        )
    refused("^q is on meta: attention runs on NVIDIA GPUs", lambda: banded(*(x.to("meta") for x in (q, k, v))))
    refused("^q, k and v are complex64", lambda: banded(*(x.to(torch.complex64) for x in (q, k, v))))


def test_a_fake_among_real_tensors():
    q, k, v = tensors()
    with FakeTensorMode() as mode:
        rows, places = mode.from_tensor(bias()), mode.from_tensor(torch.zeros(7, dtype=torch.int32))
    refused("captured tensor 'table' of 'learned' is a FakeTensor beside others", lambda: learned(q, k, v, rows))
    refused("'offset' of 'shifted' is a FakeTensor", lambda: fg.attention(q, k, v, shifted, offset=places))


def test_no_element_is_mapped_where_each_would_be_a_call():
    q, lengths = torch.randn(3, 2, 2, 9, 16), torch.tensor([3, 4], dtype=torch.int32)

    def attend(q):
        return fg.attention(q, q, q, full, kv_lengths=lengths)

    for function in (attend, torch.func.grad(lambda q: attend(q).sum())):
        assert torch.func.vmap(function)(q[:0]).shape == (0, 2, 2, 9, 16)
        assert torch.func.vmap(function)(q).shape == q.shape


def test_a_place_for_o_is_refused_inside_of_a_transform():
    q, out = torch.randn(3, 2, 2, 9, 16), torch.empty(2, 2, 9, 16)
    with torch.no_grad():
        refused(
            "out= is written in place, which no transform",
            lambda: torch.func.vmap(lambda q: fg.attention(q, q, q, full, out=out))(q),
        )
