"""attention() beside what PyTorch has round its own operators: opcheck, torch.export, autocast, inference mode,
checkpoints; and graphs that serve what changes from call to call."""

import io

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import flashgen as fg
from flashgen.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flashgen.errors import LaunchError
from flashgen.ops import library
from flashgen.ops.call import Call
from flashgen.ops.dropout import dropout_of

window = fg.param("window", default=8, min=1)
slope = fg.param("slope", default=0.5)
table = fg.tensor("table", dims=("heads", 5), dtype="float32", example=lambda p, rng: None)

full = fg.variant()
# Names as no other module of tests has: equal variants share a token.
windowed = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name="windowed_here")
learned = fg.variant(score=lambda s, b, h, q, k: s - slope * fg.abs(q - k) + table[h, (q + k) % 5], name="learned_here")


def tensors(q_len=6, kv_len=7, batch=2, dtype=torch.float32):
    random = torch.Generator().manual_seed(q_len)
    shapes = (batch, 4, q_len, 8), (batch, 2, kv_len, 8), (batch, 2, kv_len, 5)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def rows():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("call", ["attention", "gradients", "lengths", "varlen", "quantize", "sdpa", "flash_attn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torch_jit_is_refused(call):
    lengths = torch.tensor([6], dtype=torch.int32)
    given = torch.randn(1, 4, 6, 64, requires_grad=call == "gradients")
    served = {
        "attention": lambda x: fg.attention(x, x, x, windowed),
        "gradients": lambda x: fg.attention(x, x, x, windowed),
        "lengths": lambda x: fg.attention(x, x, x, windowed, kv_lengths=lengths),
        "varlen": lambda x: fg.attention_varlen(
            *[x[0].transpose(0, 1)] * 3, windowed, torch.tensor([0, 6], dtype=torch.int32), max_seqlen_q=6
        ),
        "quantize": lambda x: fg.quantize(*[x.bfloat16()] * 3).q,
        "sdpa": lambda x: fg.scaled_dot_product_attention(x, x, x),
        "flash_attn": lambda x: flash_attn_func(x, x, x),
    }[call]
    served(given)
    with pytest.raises(LaunchError, match=r"^torch\.jit\.trace holds no call(?s:.*)nearest: torch\.export\.export"):
        torch.jit.trace(served, (given,), check_trace=False)


# -- opcheck


def calls(operator):
    """Arguments of one of flashgen's operators: without and with what may be left out."""
    q, k, v = tensors()
    plain = Call(windowed, None, {"window": 3})
    whole = Call(learned, 0.3, {"table": rows(), "slope": 0.25}, dropout_of(0.3, 5, 7))
    if operator == "draw":
        return [(q, None, False, 3), (q, 5, False, 3), (q, -5, True, 3)]
    if operator in ("refuse", "refuse_into"):
        return []
    if operator == "attention_backward":
        made = []
        for call, wanted in ((plain, []), (whole, ["table"])):
            o, lse = library.attend(q, k, v, call)
            upstream = torch.randn_like(o), torch.randn_like(lse) if wanted else None
            made.append((*upstream, q, k, v, o, lse, *library._arguments(call), wanted))
        return made
    if operator == "attention_into":
        return [(q.new_empty(*q.shape[:3], v.shape[3]), q, k, v, *library._arguments(call)) for call in (plain, whole)]
    if operator == "call_into":
        return [(q.new_empty(*q.shape[:3], v.shape[3]), q, k, v, *library._lists(plain, None), None, False)]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    whole.named["table"].requires_grad_()
    if operator == "call":
        state = torch.tensor([3, 4])
        return [
            (*inputs, *library._lists(plain, None), None, False),
            (*inputs, *library._lists(whole, 0.3), state, False),
        ]
    return [(*inputs, *library._arguments(call)) for call in (plain, whole)]


def test_every_operator_is_checked():
    from flashgen.ops import quantize_library  # noqa: F401 - it defines an operator, which test_quantize_sequences checks

    names = {name.removeprefix("flashgen::") for name in torch._C._dispatch_get_all_op_names() if "flashgen::" in name}
    elsewhere, raising = {"quantize"}, {"refuse", "refuse_into"}
    computing = {"attention", "attention_backward", "attention_into", "call", "call_into", "draw"}
    assert names == computing | raising | elsewhere
    assert {name for name in names - elsewhere if not calls(name)} == raising, "they raise and compute nothing"


@pytest.mark.sampled("call_into", "draw")
@pytest.mark.parametrize("operator", ["attention", "attention_backward", "attention_into", "call", "call_into", "draw"])
def test_operators(operator):
    for arguments in calls(operator):
        torch.library.opcheck(getattr(torch.ops.flashgen, operator).default, arguments)


# -- graphs


def graphs_of(call, changes):
    """How many graphs torch.compile makes for one call after another, each equal to an eager one."""
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for change in changes:
        assert torch.equal(compiled(*change), call(*change))
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_one_graph_for_all_that_changes():
    """Lengths of 2 and more, int and float parameters, scale, and what a captured tensor holds: four values of each."""

    def call(q, k, v, n, x, scale, values):
        o = fg.attention(q, k, v, windowed, window=n, scale=scale)
        return o + fg.attention(q, k, v, learned, slope=x, scale=-scale, table=values)

    lengths = (6, 2, 9, 14)  # torch takes sizes that are equal at first for one size: here none are
    changes = [(*tensors(n, 2 * n + 1, n + 1), i + 3, 0.5 / n, 0.3 * n, rows() * n) for i, n in enumerate(lengths)]
    assert graphs_of(call, changes) == 1


@pytest.mark.slow
def test_one_graph_for_gradients():
    def call(q, k, v, values, x):
        inputs = [y.detach().requires_grad_() for y in (q, k, v, values)]
        o = fg.attention(*inputs[:3], learned, table=inputs[3], slope=x, scale=x)
        return torch.cat([g.flatten() for g in torch.autograd.grad(o.square().sum(), inputs)])

    def compiled_part(q, k, v, values, x):
        return fg.attention(q, k, v, learned, table=values, slope=x, scale=x)

    compiled = torch.compile(compiled_part, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (6, 2, 9, 14):
        given = [x.requires_grad_() for x in (*tensors(n, 2 * n + 1, n + 1), rows())]
        found = torch.autograd.grad(compiled(*given, 1 / n).square().sum(), given)
        assert torch.equal(torch.cat([g.flatten() for g in found]), call(*given, 1 / n))
    assert counters["stats"]["unique_graphs"] == 1


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(rows())

    def forward(self, q, k, v):
        return fg.attention(q, k, v, learned, table=self.rows, scale=0.3, slope=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model(strict):
    model = Model()
    queries, keys = torch.export.Dim("queries", min=2, max=1 << 20), torch.export.Dim("keys", min=2, max=1 << 20)
    exported = torch.export.export(
        model, tuple(tensors()), dynamic_shapes=({2: queries}, {2: keys}, {2: keys}), strict=strict
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for lengths in ((6, 7), (9, 3)):
        assert torch.equal(again(*tensors(*lengths)), model(*tensors(*lengths)))


class Called(torch.nn.Module):
    """A call of q and k, as a module."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k):
        return self.call(q, k, k)


def of_sequences(q, k, v):
    """One sequence, whose bounds are the sizes of its tensors."""
    q, k = (x[0].transpose(0, 1) for x in (q, k))
    starts = [torch.tensor([0, 1], dtype=torch.int32) * x.shape[0] for x in (q, k)]
    return fg.attention_varlen(q, k, k, full, *starts, max_seqlen_q=q.shape[0], max_seqlen_k=k.shape[0])


#: Calls, of which one has no number, and the others numbers that follow from a size.
SIZED = {
    "no number": lambda q, k, v: fg.attention(q, k, v, full),
    "a position": lambda q, k, v: fg.attention(q, k, v, windowed, window=3, q_offset=k.shape[2] - q.shape[2]),
    "a parameter": lambda q, k, v: fg.attention(q, k, v, windowed, window=k.shape[2] // 2),
    "a scale": lambda q, k, v: fg.attention(q, k, v, full, scale=1 / k.shape[2]),
    "a number of blocks": lambda q, k, v: fg.attention(q, k, v, full, kv_splits=k.shape[2] // 8 + 1),
    "bounds of lengths": of_sequences,
    "keys of a cache": lambda q, k, v: flash_attn_with_kvcache(
        *(x.transpose(1, 2) for x in (q, k, v)), cache_seqlens=k.shape[2] - 1
    ),
    "a window": lambda q, k, v: flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), window_size=(k.shape[2] // 3, 0)
    ),
}


@pytest.mark.slow
@pytest.mark.sampled("no number", "a position", "bounds of lengths")
@pytest.mark.parametrize("name", SIZED)
def test_an_exported_call_of_sizes(name):
    """Traced without Dynamo, which hides that a size is no number yet."""
    model = Called(SIZED[name])
    queries, keys = torch.export.Dim("queries", min=2, max=99), torch.export.Dim("keys", min=2, max=99)
    q, k, _ = tensors(5, 9)
    exported = torch.export.export(model, (q, k), dynamic_shapes=({2: queries}, {2: keys}))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for lengths in ((5, 9), (3, 40)):
        q, k, _ = tensors(*lengths)
        assert torch.equal(again(q, k), model(q, k))


@pytest.mark.nightly(sibling="test_an_exported_model")
@pytest.mark.parametrize("captured", [False, True])
def test_a_package_of_aot_inductor(tmp_path, captured):
    model = Model() if captured else Windowed()
    exported = torch.export.export(model, tuple(tensors()))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(package)(*tensors()), model(*tensors()))


class Windowed(torch.nn.Module):
    def forward(self, q, k, v):
        return fg.attention(q, k, v, windowed, window=3)


# -- modes


@pytest.mark.slow
def test_autocast_casts_as_for_pytorch_s_own():
    q, k, v = tensors()
    double = tensors(dtype=torch.float64)
    want = fg.attention(*(x.bfloat16() for x in (q, k, v)), learned, table=rows())
    for call in (fg.attention, torch.compile(fg.attention, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call(q, k.bfloat16(), v, learned, table=rows()), want)
            assert call(*double, full).dtype == torch.float64
        with (
            torch.autocast("cuda", torch.bfloat16)
            if torch.cuda.is_available()
            else torch.autocast("cpu", enabled=False)
        ):
            assert call(q, k, v, full).dtype == torch.float32
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        o = fg.attention(*inputs, full)
    assert [g.dtype for g in torch.autograd.grad(o.float().sum(), inputs)] == [torch.float32] * 3
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(LaunchError, match="k is a str"):
        fg.attention(q, "k", v, full)


def test_inference_mode():
    q, k, v = tensors()
    want = fg.attention(q, k, v, windowed)
    with torch.inference_mode():
        eager = fg.attention(q, k, v, windowed)
        compiled = torch.compile(lambda *x: fg.attention(*x, windowed), fullgraph=True, backend="aot_eager")(q, k, v)
        assert eager.is_inference() and torch.equal(eager, want) and torch.equal(compiled, want)
        inside = [x.clone() for x in (q, k, v)]
    assert torch.equal(fg.attention(*inside, windowed), want)


@pytest.mark.slow
@pytest.mark.parametrize(("compiled", "reentrant"), [(False, False), (False, True), (True, False)])
def test_checkpoints(compiled, reentrant):
    q, k, v = (x.requires_grad_() for x in tensors())

    def layer(q):
        return fg.attention(q, k, v, windowed, window=3, dropout=0.5).sin()

    def model(q):
        return checkpoint(layer, q, use_reentrant=reentrant).square().sum()

    gradients = []
    for call in (lambda q: layer(q).square().sum(), model):
        if call is model and compiled:
            call = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.manual_seed(3)
        q.grad = None
        call(q).backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


# -- several processes, of which one is here


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.rows = torch.nn.Linear(16, 48), torch.nn.Parameter(torch.zeros(2, 5))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return fg.attention(q, k, v, learned, table=self.rows)


def test_fully_sharded_parameters(mesh):
    """FSDP2 frees the memory of parameters between calls, captured tensors' too."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 7, 16)
    found = []
    for shard in (False, True):
        if shard:
            fully_shard(block, mesh=mesh)
        block.zero_grad()
        for _ in range(2):
            o = block(x)
            o.square().sum().backward()
        found.append((o.detach(), *(getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in block.parameters())))
    torch.testing.assert_close(*found)


def test_calls_leave_memory_resizable():
    given = [*tensors(), rows()]
    fg.attention(*given[:3], learned, table=given[3])
    assert all(x.untyped_storage().resizable() for x in given)


@pytest.mark.slow
def test_a_graph_breaks_at_a_call_of_8_bits():
    """And what it computes around that call stays."""
    full, one = fg.variant(), torch.ones(1)
    q, k, v = (torch.randn(1, 2, n, 64).to(torch.float8_e4m3fn) for n in (5, 9, 9))

    def call(factor):
        o = fg.attention(q, k, v, full, q_descale=one, k_descale=one, v_descale=one)
        return o * factor

    two = torch.tensor(2.0)
    assert torch.equal(torch.compile(call, backend="eager")(two), call(two))
