"""Calls in 8 bits: of what quantize() makes, on an emulated GPU, and what is refused beside them."""

import dataclasses

import pytest
import torch
from emulated_gpu import install
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import flashgen as fg
from flashgen.errors import FlashgenError
from flashgen.lang.load import load_spec
from flashgen.ops.float8 import dequantised

CAUSAL = load_spec("causal")


def drawn(q_len=300, kv_len=300, dim=64, batch=2, heads=4, kv_heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    return [torch.randn(shape, generator=g).bfloat16() for shape in shapes]


def off(found, right):
    return float((found.double() - right).norm() / right.norm())


def wide(x):
    """What codes and scales stand for."""
    return [dequantised(*pair, torch.float64) for pair in zip((x.q, x.k, x.v), x.descales.values(), strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_casts_queries_beside_8_bit_keys_alone(dtype):
    q, k, v = drawn(q_len=9, kv_len=20)
    x = fg.quantize(q, k, v)
    of_keys = {"k_descale": x.k_descale, "v_descale": x.v_descale}
    want = fg.attention(q.half(), x.k, x.v, CAUSAL, **of_keys)
    for call in (fg.attention, torch.compile(fg.attention, backend="eager")):
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(call(q.to(dtype), x.k, x.v, CAUSAL, **of_keys), want)
            assert call(x.q, x.k, x.v, CAUSAL, **x.descales).dtype == torch.bfloat16
    with pytest.raises(FlashgenError, match=r"q is float32, .*\n  nearest: q.bfloat16"):
        fg.attention(q.float(), x.k, x.v, CAUSAL, **of_keys)


# ---------------------------------------------------------------- what quantize() makes
@pytest.mark.parametrize("block", [None, 128, 256])
@pytest.mark.parametrize(("hadamard", "smooth_k"), [(False, False), (True, True)])
def test_attention_takes_what_quantize_makes(block, hadamard, smooth_k):
    """Against float64 of what codes and scales stand for, and of what was quantised."""
    q, k, v = drawn()
    k = k + 4 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    x = fg.quantize(q, k, v, block=block, hadamard=hadamard, smooth_k=smooth_k)
    o, lse = fg.attention(x.q, x.k, x.v, CAUSAL, **x.descales, accuracy="exact", return_lse=True)
    right, right_lse = fg.attention(*wide(x), CAUSAL, return_lse=True)
    assert o.dtype == torch.bfloat16 and off(o, right) < 0.03
    assert float((lse - right_lse).abs().max()) < 2e-5
    given, given_lse = fg.attention(*(x.double() for x in (q, k, v)), CAUSAL, return_lse=True)
    assert off(o, given) < (0.06 if smooth_k else 0.12)  # keys have a mean
    assert float((x.corrected_lse(lse, q) - given_lse).abs().mean()) < 0.1


# ---------------------------------------------------------------- on an emulated GPU
def on_gpu(gpu, x, variant, **options):
    q, k, v = (gpu.put(t) for t in (x.q, x.k, x.v))
    descales = {name: gpu.put(t) for name, t in x.descales.items()}
    named = {name: gpu.put(t) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    return fg.attention(q, k, v, variant, **descales, **named)


@pytest.mark.slow
def test_descales_and_summaries_do_not_meet(monkeypatch):
    """A mask by data has summaries, which a kernel of the call writes: each pointer reaches its own tensor."""
    gpu = install(monkeypatch, (9, 0))
    x = fg.quantize(*drawn(q_len=150, kv_len=150, heads=1, kv_heads=1), block=128)
    flags = torch.rand(2, 150, generator=torch.Generator().manual_seed(3)) < 0.5
    flags[1, 64:] = False
    seen = fg.tensor("seen", dims=("batch", "kv"), dtype="bool")
    hidden = fg.variant(lambda b, h, q, k: seen[b, k] & (k <= q), name="hidden")
    o = on_gpu(gpu, x, hidden, seen=flags)
    ((plan, *_), *_) = gpu.launches
    assert plan.summaries and plan.float8
    assert off(o, fg.attention(*wide(x), hidden, seen=flags)) < 0.04


@pytest.mark.slow
def test_another_length_and_form_have_their_own_launch(monkeypatch):
    """Blocks of scales follow the length, and kernels the form, of calls that are alike in all else."""
    gpu = install(monkeypatch, (9, 0))
    for length, block, accuracy in ((100, 128, "fast"), (260, 256, "exact"), (260, 128, "exact")):
        x = fg.quantize(*drawn(q_len=length, kv_len=length, batch=1, heads=1, kv_heads=1), block=block)
        x.k_descale.mul_(torch.linspace(1, 4, x.k_descale.shape[2]))
        o = on_gpu(gpu, x, CAUSAL, accuracy=accuracy)
        assert off(o, fg.attention(*wide(x), CAUSAL)) < 0.04
    assert [plan.float8.accuracy for plan, *_ in gpu.launches] == ["fast", "exact", "exact"]


def paged(x, page_size, table):
    """A tensor [batch, heads, rows, columns] as a cache [pages, page_size, heads, columns]."""
    batch, heads, _, columns = x.shape
    pages = x.view(torch.uint8).view(batch, heads, -1, page_size, columns).permute(0, 2, 3, 1, 4)
    cache = torch.empty((table.numel(), page_size, heads, columns), dtype=torch.uint8)
    cache[table.flatten().long()] = pages.flatten(0, 1)
    return cache.view(x.dtype)


NIGHT = pytest.mark.nightly(sibling="test_lengths_pages_and_split_keys_have_their_own_pointers")


@pytest.mark.sampled("1-None-None")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "page_size", "block"),
    [
        (3, 32, 128),
        (1, 16, None),
        pytest.param(3, None, 128, marks=NIGHT),
        (1, None, None),
    ],
)
def test_lengths_pages_and_split_keys_have_their_own_pointers(splits, page_size, block, monkeypatch):
    """Each pointer of a call reaches its own tensor: descales, lengths, pages, parts.  The walk agrees."""
    gpu = install(monkeypatch, (9, 0))
    x = fg.quantize(*drawn(q_len=3, kv_len=320, heads=8), block=block)
    lengths = torch.tensor([320, 140], dtype=torch.int32)
    given = {"kv_lengths": lengths, "q_offset": "end"}
    right = fg.attention(*wide(x), CAUSAL, **given)
    given["kv_splits"] = splits
    if page_size is not None:
        given["page_table"] = torch.randperm(640 // page_size).to(torch.int32).view(2, -1)
        k, v = (paged(of, page_size, given["page_table"]) for of in (x.k, x.v))
        x = dataclasses.replace(x, k=k, v=v)
    o = on_gpu(gpu, x, CAUSAL, **given)
    ((plan, *_), *_) = gpu.launches
    assert plan.packed and plan.keys.split == (splits > 1) and plan.layout.paged == (page_size is not None)
    assert off(o, right) < 0.04
    assert off(fg.attention(x.q, x.k, x.v, CAUSAL, **x.descales, **given), right) < 0.04


# ---------------------------------------------------------------- what is refused
X = fg.quantize(*drawn(q_len=40, kv_len=40))
TABLE = torch.zeros(2, 3, dtype=torch.int32)


def attend(x=X, **options):
    return fg.attention(x.q, x.k, x.v, CAUSAL, **{**x.descales, **options})


@pytest.fixture
def nothing_runs(monkeypatch):
    """Whatever would compute fails."""
    for where in ("flashgen.ops.forward._walk", "flashgen.ops.forward._recorded"):
        monkeypatch.setattr(where, None)


@pytest.mark.parametrize(
    ("options", "said", "nearest"),
    [
        ({"out": torch.empty(2, 4, 40, 64).bfloat16()}, "out= is not there in 8 bits", "out.copy_"),
        ({"dropout": 0.1}, "dropout is not there in 8 bits", "dropout=0.0"),
        ({"q_descale": X.q_descale.clone().requires_grad_()}, "a gradient is wanted", "torch.no_grad()"),
        ({"seed": -1}, "seed", "nearest"),
        ({"deterministic": 1}, "deterministic", "True or False"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refused(nothing_runs, options, said, nearest):
    with pytest.raises(FlashgenError) as refused:
        attend(**options)
    assert said in str(refused.value) and nearest in str(refused.value)


def test_nested_tensors_of_other_widths_and_in_pages_are_refused(nothing_runs):
    starts = torch.tensor([0, 15, 40])
    of_32_bits = [
        torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1).float(), starts).transpose(1, 2)
        for x in (X.q, X.k, X.v)
    ]
    for name, value in {**X.descales, "accuracy": "exact"}.items():
        with pytest.raises(FlashgenError, match=f"{name} is of 8-bit tensors, and q is float32"):
            fg.attention(*of_32_bits, CAUSAL, **{name: value})
    with pytest.raises(FlashgenError, match="page_table was given beside nested tensors"):
        fg.attention(*of_32_bits, CAUSAL, page_table=TABLE)


def test_dtensors_are_refused(nothing_runs, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in (X.q, X.k, X.v)]
        with pytest.raises(FlashgenError, match="DTensors are not served in 8 bits"):
            fg.attention(*whole, CAUSAL, **X.descales)
        of_16_bits = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in drawn(q_len=4, kv_len=4)]
        with pytest.raises(FlashgenError, match="DTensors are not served in 8 bits"):
            fg.quantize(*of_16_bits)
    finally:
        torch.distributed.destroy_process_group()


def test_graphs_are_refused(nothing_runs):
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(q, k, v):
        return fg.attention(q, k, v, CAUSAL, **X.descales)

    with pytest.raises(FlashgenError, match=r"graphs .* do not hold attention in 8 bits"):
        make_fx(call)(X.q, X.k, X.v)
    with pytest.raises(Exception, match="disable"):  # the graph breaks there, and the whole is asked for
        torch.compile(call, backend="eager", fullgraph=True)(X.q, X.k, X.v)
