"""flashgen.scaled_dot_product_attention against PyTorch's own, by its math backend."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulated_gpu import install
from graphs import graphs_of_floats
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashgen
from flashgen import scaled_dot_product_attention
from flashgen.errors import FlashgenError
from flashgen.integrations import sdpa

#: Shapes of query, key and value.
SHAPES = {
    "square": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "short and wide": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "one query": ((2, 4, 1, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "groups": ((2, 4, 7, 8), (2, 2, 5, 8), (2, 2, 5, 6)),
    "2-D": ((5, 8), (7, 8), (7, 6)),
    "3-D": ((4, 5, 8), (4, 7, 8), (4, 7, 6)),
    "5-D": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
    "broadcast": ((2, 4, 5, 8), (1, 1, 7, 8), (4, 7, 6)),
    "one query head": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
}
MASKS = (None, "causal", "bool", "float", "learned")


def tensors(shapes, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=dtype, requires_grad=True) for shape in shapes]


def mask_of(kind, shape):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if kind == "bool":
        return mask > -0.2
    return mask.requires_grad_() if kind == "learned" else mask


def compare(call, theirs, inputs, *, rtol=1e-5, atol=1e-6):
    """Results and gradients of both, as far as float32 sums let them be equal."""
    inputs = [x for x in inputs if x is not None and x.requires_grad]
    mine = call()
    with sdpa_kernel(SDPBackend.MATH):
        right = theirs()
    assert mine.shape == right.shape and mine.dtype == right.dtype
    torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)
    found = torch.autograd.grad(mine.square().sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(right.square().sum(), inputs), rtol=20 * rtol, atol=20 * atol)


def both(shapes, mask=None, **options):
    q, k, v = tensors(shapes)
    arguments = (q, k, v, mask)
    compare(
        lambda: scaled_dot_product_attention(*arguments, **options),
        lambda: F.scaled_dot_product_attention(*arguments, **options),
        arguments,
    )


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("what", "kind", "scale"), list(itertools.product(SHAPES, MASKS, (None, -0.3))))
def test_every_combination(what, kind, scale):
    shapes = SHAPES[what]
    if kind in (None, "causal"):
        return both(shapes, is_causal=kind == "causal", scale=scale, enable_gqa=what == "groups")
    whole = (*torch.broadcast_shapes(*(s[:-2] for s in shapes if what != "groups"), shapes[0][:-2]), shapes[0][-2])
    both(shapes, mask_of(kind, (*whole, shapes[1][-2])), scale=scale, enable_gqa=what == "groups")


@pytest.mark.parametrize(
    ("shape", "kind"),
    list(
        itertools.product(
            [
                (5, 7),
                (1, 7),
                (5, 1),
                (7,),
                (),
                (4, 5, 7),
                (1, 5, 7),
                (2, 1, 5, 7),
                (2, 1, 1, 7),
                (1, 4, 1, 1),
                (1, 1, 1, 1),
            ],
            ("bool", "learned"),
        )
    ),
)
def test_masks_broadcast(shape, kind):
    both(SHAPES["short and wide"], mask_of(kind, shape))


@pytest.mark.parametrize("shape", [(2, 1, 4, 5, 7), (3, 1, 1, 7), (1, 1, 1, 5, 1), (5, 7)])
def test_masks_of_several_leading_dimensions(shape):
    both(SHAPES["5-D"], mask_of("learned", shape))


def test_strided_masks_are_read_where_they_lie():
    mask = torch.randn(7, 5).t()
    both(SHAPES["short and wide"], mask)
    both(SHAPES["short and wide"], mask.expand(2, 4, 5, 7))
    both(SHAPES["short and wide"], torch.randn(2, 4, 5, 14)[..., ::2] > 0)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing(kind):
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) > 0.5
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(5, 7).masked_fill(~mask, -math.inf)
    q, k, v = tensors(SHAPES["short and wide"])
    o = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(o[:, :, 2], torch.zeros_like(o[:, :, 2]))
    both(SHAPES["short and wide"], mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_mask", [torch.bool, torch.float32, "query's"])
def test_dtypes(dtype, of_mask):
    q, k, v = tensors(SHAPES["short and wide"], dtype)
    mask = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).to(dtype if of_mask == "query's" else of_mask)
    error = (16 if dtype is torch.float32 else 4) * torch.finfo(dtype).eps  # of sums; of p and o, each rounded
    whole = mask if of_mask is torch.bool else mask.float()
    compare(
        lambda: scaled_dot_product_attention(q, k, v, mask),
        lambda: F.scaled_dot_product_attention(*(x.float() for x in (q, k, v)), whole).to(dtype),
        (q, k, v),
        rtol=error,
        atol=error,
    )


def test_nothing_to_attend_and_nobody_who_does():
    for q_len, kv_len, batch in ((0, 4, 2), (4, 0, 2), (4, 4, 0)):
        q, k = torch.randn(batch, 2, q_len, 8), torch.randn(batch, 2, kv_len, 8)
        assert torch.equal(scaled_dot_product_attention(q, k, k), torch.zeros(batch, 2, q_len, 8))


@pytest.mark.parametrize("key_heads, value_heads", [(0, 0), (1, 1), (1, 0), (0, 1)])
def test_no_query_heads_beside_a_key_head_that_broadcasts(key_heads, value_heads):
    q, k, v = (torch.randn(2, heads, 4, 8, requires_grad=True) for heads in (0, key_heads, value_heads))
    o = scaled_dot_product_attention(q, k, v)
    assert o.shape == torch.nn.functional.scaled_dot_product_attention(q, k, v).shape == (2, 0, 4, 8)
    assert not any(gradient.any() for gradient in torch.autograd.grad(o.sum(), (q, k, v)))


def test_dropout_is_torch_s_generator_s():
    q, k, v = tensors(SHAPES["square"])
    torch.manual_seed(5)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(scaled_dot_product_attention(q, k, v, None, 0.5), first)
    assert not torch.equal(first, scaled_dot_product_attention(q, k, v))


def test_arguments_by_position_as_pytorch_takes_them():
    q, k, v = tensors(SHAPES["groups"])
    mine = scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.2, enable_gqa=True)
    with sdpa_kernel(SDPBackend.MATH):
        right = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(mine, right)


SQUARE = [torch.zeros(SHAPES["square"][0]) for _ in range(3)]
WRONG = [
    ((*SQUARE, torch.zeros(3, 6)), {}, "attn_mask is [3, 6]: it broadcasts to [2, 4, 6, 6]"),
    ((*SQUARE, torch.zeros(1, 2, 4, 6, 6)), {}, "attn_mask is [1, 2, 4, 6, 6]: it broadcasts to"),
    ((*SQUARE, torch.zeros(2, 3, 6, 6) > 0), {}, "attn_mask is [2, 3, 6, 6]"),
    ((*SQUARE, torch.zeros(6, 6, dtype=torch.float64)), {}, "attn_mask is float64"),
    ((*SQUARE, torch.zeros(6, 6, dtype=torch.int64)), {}, "nearest: attn_mask.bool()"),
    ((*SQUARE, [[True]]), {}, "attn_mask is a list"),
    ((*SQUARE, torch.zeros(6, 6)), {"is_causal": True}, "attn_mask and is_causal are given"),
    ((*SQUARE,), {"dropout_p": 1.5}, "dropout is 1.5"),
    ((*SQUARE,), {"scale": math.nan}, "scale is nan"),
    ((torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 8)), {}, "nearest: enable_gqa=True"),
    ((torch.zeros(2, 4, 6, 8), torch.zeros(3, 4, 6, 8), torch.zeros(2, 4, 6, 8)), {}, "these do not broadcast"),
    ((torch.zeros(8), torch.zeros(6, 8), torch.zeros(6, 8)), {}, "query is [8]: it is [..., seqlen, head_dim]"),
    ((None, *SQUARE[1:]), {}, "query is a NoneType"),
    ((SQUARE[0], SQUARE[1].half(), SQUARE[2]), {}, "q is float32 and k float16"),
    (
        (SQUARE[0].to_sparse(), *SQUARE[1:]),
        {},
        "query is sparse_coo: flashgen takes dense tensors\n  nearest: query.to_d",
    ),
    ((*SQUARE[:2], SQUARE[2].to_mkldnn()), {}, "value is _mkldnn: flashgen takes dense tensors"),
    ((*SQUARE, torch.ones(6, 6).to_sparse()), {}, "attn_mask is sparse_coo: flashgen takes dense tensors"),
    (
        (*SQUARE,),
        {"is_causal": np.True_},
        f"is_causal is a numpy.{np.bool_.__name__} and must be True or False\n  near",
    ),
    ((*SQUARE, torch.zeros(6, 6, device="meta")), {}, "'attn_mask' of 'attn_bias' is on meta and q on cpu"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_calls(arguments, options, message):
    with pytest.raises(FlashgenError, match=re.escape(message)):
        scaled_dot_product_attention(*arguments, **options)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(6, 6), (5, 9), (9, 5)])
def test_causal_biases_mean_what_they_say(make, lengths, compiled):
    """Their memory is not initialised: what they are stands in their attributes."""
    q_len, kv_len = lengths
    q, k, v = tensors(((2, 4, q_len, 8), (2, 4, kv_len, 8), (2, 4, kv_len, 6)))
    call = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="eager") if compiled else None
    bias = make(q_len, kv_len)
    shift = kv_len - q_len if make is causal_lower_right else 0
    mask = torch.ones(lengths, dtype=torch.bool).tril(shift)
    compare(
        lambda: (call or scaled_dot_product_attention)(q, k, v, bias, 0.0, False, 0.3),
        lambda: F.scaled_dot_product_attention(q, k, v, mask, scale=0.3),
        (q, k, v),
    )


def test_causal_biases_of_other_lengths_are_refused():
    with pytest.raises(
        FlashgenError, match=r"CausalBias of 6 .* 7 keys, .* have 6 and 6\n  nearest: causal_lower_right\(6, 6"
    ):
        scaled_dot_product_attention(*SQUARE, causal_lower_right(6, 7))
    with pytest.raises(FlashgenError, match="attn_mask is a CausalBias and is_causal is given"):
        scaled_dot_product_attention(*SQUARE, causal_upper_left(6, 6), is_causal=True)


class Plain(torch.Tensor):
    pass


class OfItsOwn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs)


def test_masks_whose_class_means_something_of_its_own_are_refused():
    mask = torch.rand(6, 6) > 0.3
    with pytest.raises(
        FlashgenError, match=r"attn_mask is a OfItsOwn, .*\n  nearest: attn_mask.as_subclass\(torch.Tensor"
    ):
        scaled_dot_product_attention(*SQUARE, mask.as_subclass(OfItsOwn))
    right = scaled_dot_product_attention(*SQUARE, mask)
    for served in (mask.as_subclass(Plain), torch.nn.Parameter(mask, requires_grad=False), torch.nn.Buffer(mask)):
        assert torch.equal(scaled_dot_product_attention(*SQUARE, served), right)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 1, 7), (1, 7)])
def test_a_mask_beside_is_causal_is_told_the_mask_of_both(kind, shape):
    q, k, v = tensors(SHAPES["short and wide"])
    attn_mask = mask_of(kind, shape)
    with pytest.raises(FlashgenError, match="attn_mask and is_causal are given") as refused:
        scaled_dot_product_attention(q, k, v, attn_mask, is_causal=True)
    advice = str(refused.value).split("is_causal=False with ")[1].removesuffix(", or a variant of both")
    both = eval(advice, {"torch": torch, "math": math, "attn_mask": attn_mask})
    causal = torch.ones(5, 7, dtype=torch.bool).tril()
    right = attn_mask & causal if kind == "bool" else attn_mask + torch.zeros(5, 7).masked_fill(~causal, -math.inf)
    found = scaled_dot_product_attention(q, k, v, both)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, right))


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.zeros(2, 3, 8)], layout=torch.jagged)
    with pytest.raises(FlashgenError, match="query is nested: flashgen takes dense tensors") as refused:
        scaled_dot_product_attention(nested, nested, nested)
    parts = [torch.randn(3, 4, 16), torch.randn(7, 4, 16)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    advice = str(refused.value).split("nearest: ")[1].split(", or 'causal'")[0]
    found = eval(advice, {"flashgen": flashgen, "query": jagged, "key": jagged, "value": jagged})
    for one, part in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(one, scaled_dot_product_attention(*(part.transpose(0, 1),) * 3))
    with pytest.raises(FlashgenError, match="attn_mask is nested: flashgen takes dense tensors"):
        scaled_dot_product_attention(*SQUARE, torch.nested.nested_tensor([torch.zeros(6, 6)]))


@pytest.mark.parametrize("shapes", ["square", "2-D", "5-D", "broadcast"])
def test_rows_that_do_not_lie_side_by_side_are_copied(shapes):
    leaves = tensors(SHAPES[shapes])
    for lay in (lambda x: x.mT.contiguous().mT, lambda x: x.repeat_interleave(2, -1)[..., ::2], lambda x: x[..., :1]):
        given = [lay(x) for x in leaves]
        for which in ((0,), (1, 2), (0, 1, 2)):
            q, k, v = (x if i in which else x.contiguous() for i, x in enumerate(given))
            compare(
                lambda given=(q, k, v): scaled_dot_product_attention(*given),
                lambda given=(q, k, v): F.scaled_dot_product_attention(*given),
                leaves,
            )


def test_the_last_backend():
    scaled_dot_product_attention(*SQUARE)
    assert flashgen.last_backend().name == "flashgen"
    assert flashgen.last_backend().call == "scaled_dot_product_attention"
    assert flashgen.last_backend().reason is None


@pytest.mark.slow
def test_one_graph_serves_lengths_scales_and_masks():
    expected = graphs_of_floats()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 2, 9, 14):
        q, k, v = (torch.randn(n + 1, 4, m, 16) for m in (n, 2 * n + 1, 2 * n + 1))
        given = (q, k, v, torch.rand(n, 2 * n + 1) > 0.3)
        assert torch.equal(compiled(*given, scale=1 / n), scaled_dot_product_attention(*given, scale=1 / n))
    assert counters["stats"]["unique_graphs"] == expected <= 2


#: Calls of q, k, v and a tensor whose sizes a graph knows when it is made, as a module's buffer.
FIXED = {
    "mask": ((5, 7), scaled_dot_product_attention),
    "expanded mask": (
        (5, 7),
        lambda q, k, v, x: scaled_dot_product_attention(q, k, v, x[None, None].expand(2, 4, -1, -1)),
    ),
    "keys": ((2, 4, 7, 8), lambda q, k, v, x: scaled_dot_product_attention(q, x, v)),
    "queries": ((2, 4, 5, 8), lambda q, k, v, x: scaled_dot_product_attention(x, k, v)),
}


@pytest.mark.parametrize("fixed", FIXED)
def test_sizes_that_are_fixed_beside_others_that_are_not(fixed):
    shape, call = FIXED[fixed]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("fixed", torch.randn(shape, generator=torch.Generator().manual_seed(1)))

        def forward(self, *tensors):
            return call(*tensors, self.fixed)

    torch._dynamo.reset()
    model, given = Model(), [x.detach().float() for x in tensors(((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)))]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(*given), model(*given))


@pytest.mark.sampled("float-capability0")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_on_a_gpu(monkeypatch, capability, kind):
    """A mask of one head for all, whose rows end where no kernel's tile does."""
    gpu = install(monkeypatch, capability)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 32, generator=random).bfloat16() for n in (37, 70, 70))
    mask = mask_of(kind, (2, 1, 37, 70))
    mine = scaled_dot_product_attention(*map(gpu.put, (q, k, v, mask)))
    right = F.scaled_dot_product_attention(*(x.float() for x in (q, k, v)), mask)
    torch.testing.assert_close(mine.as_subclass(torch.Tensor).float(), right, rtol=0.03, atol=0.03)
    assert len(gpu.launches) == (2 if kind == "bool" else 1)  # extremes of the mask by tile, first


@pytest.mark.parametrize(
    ("shape", "own"),
    [((5, 7), (2, 3)), ((2, 1, 1, 7), (0, 3)), ((1, 4, 5, 7), (1, 2, 3)), ((2, 4, 5, 7), (0, 1, 2, 3)), ((7,), (3,))],
)
def test_a_mask_is_read_by_its_own_dimensions(shape, own):
    """Also where it was expanded: what a table says of all heads is read and summarised once."""
    mask = torch.rand(shape) > 0.5
    for given in (mask.reshape((1,) * (4 - len(shape)) + shape), mask.expand(2, 4, 5, 7)):
        kind, read = sdpa.kind(given)
        assert kind == (torch.bool, own) and list(read.shape) == [(2, 4, 5, 7)[i] for i in own]
    both(SHAPES["short and wide"], mask.expand(2, 4, 5, 7))
    learned = mask_of("learned", shape)
    q, k, v = tensors(SHAPES["short and wide"])
    compare(
        lambda: scaled_dot_product_attention(q, k, v, learned.expand(2, 4, 5, 7)),
        lambda: F.scaled_dot_product_attention(q, k, v, learned.expand(2, 4, 5, 7)),
        (q, k, v, learned),
    )


@pytest.mark.parametrize("by", ["backward", "transform"])
def test_each_element_of_an_expanded_mask_has_its_gradient(by):
    """What one element in memory stands for is many elements of the mask that was given."""
    q, k, v = tensors(SHAPES["square"])
    mask = torch.randn(q.shape[2], k.shape[2]).expand(*q.shape[:2], -1, -1)

    def gradient(attend):
        if by == "transform":
            return torch.func.grad(lambda given: attend(q, k, v, given).square().sum())(mask)
        given = mask.detach().requires_grad_()
        return torch.autograd.grad(attend(q, k, v, given).square().sum(), given)[0]

    found, wanted = gradient(scaled_dot_product_attention), gradient(F.scaled_dot_product_attention)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("flag", ["no", [0], torch.tensor(False), 1])
@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_flags_are_flags(name, flag):
    with pytest.raises(FlashgenError, match=f"^{name} is a {type(flag).__name__} and must be True or False"):
        scaled_dot_product_attention(*tensors(SHAPES["square"]), **{name: flag})
