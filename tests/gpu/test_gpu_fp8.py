"""Forwards of 8 bits on a GPU: every spec against float64, at any length and mean of V, the same bits in every run."""

import numpy as np
import pytest
import torch
from gpu_checks import DEVICE

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.lang.load import load_spec
from flashgen.ops.float8 import dequantised
from flashgen.planning import planner
from flashgen.planning.float8 import WORDS_BY_BITS
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.runtime.captured import on_device
from flashgen.runtime.reference import judge, judge_lse, reference
from flashgen.runtime.reference_float8 import Quantised, alike, baseline, cut_products, quantised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="8 bits are of Hopper"
    ),
]

VALUES = {"sliding_window": {"window": 200}, "chunked": {"chunk": 256}, "prefix_lm": {"prefix": 100}}
SPECS = ["full", "causal", "causal_bottom_right", "sliding_window", "alibi", "softcap", "document", "gpt_oss"]
SPECS += ["prefix_lm", "chunked", "padding", "butterfly"]


def draw(*shape, dtype=torch.float8_e4m3fn, mean=0.0, std=1.0, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return quantised(torch.randn(*shape, device=DEVICE, generator=g) * std + mean, dtype)


def descales(of):
    return {f"{name}_descale": x.descale for name, x in zip("qkv", of, strict=True)}


def case_of(variant, problem, values):
    tensors = {t.name: np.asarray(t.example(problem, np.random.default_rng(0))) for t in variant.tensors}
    return Case(sizes=problem.sizes(), params=variant.values(values), tensors=tensors)


def checked(
    spec, q_len, kv_len, head_dim, *, heads=4, kv_heads=2, v_head_dim=None, dtypes=None, std=1.0, accuracy="default"
):
    values = VALUES.get(spec, {})
    variant = load_spec(spec)
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    bound, params = variant.bind(**constants), {n: x for n, x in values.items() if n not in constants}
    wide = v_head_dim or head_dim
    shapes = (2, heads, q_len, head_dim), (2, kv_heads, kv_len, head_dim), (2, kv_heads, kv_len, wide)
    dtypes = dtypes or (torch.float8_e4m3fn,) * 3
    of = [
        draw(*shape, dtype=dtype, std=std if i == 0 else 1.0, seed=i)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    problem = Problem(
        batch=2,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        v_head_dim=wide,
        dtype="float8_e4m3fn",
    )
    case = case_of(bound, problem, params)
    named = {**case.params, **on_device(bound, case.tensors, DEVICE)}
    o, lse = fg.attention(*(x.codes for x in of), bound, accuracy=accuracy, return_lse=True, **descales(of), **named)
    scale = head_dim**-0.5
    ref, ref_lse = reference(bound, case, *(x.values for x in of), scale=scale)
    kinds = {f"{name}_dtype": str(x.codes.dtype).removeprefix("torch.") for name, x in zip("kv", of[1:], strict=True)}
    request = KernelRequest.of(bound, "sm_90a", problem.dtype, head_dim, wide, accuracy=accuracy, **kinds)
    # Folded where the kernel folds: maxima and roundings of P are then the kernel's.
    base, base_lse = baseline(
        bound, case, *of, scale=scale, out=torch.bfloat16, **alike(planner.menu_of(request).plans[0])
    )
    return judge(o, base, ref, "bfloat16").reasons + judge_lse(lse, ref_lse, base_lse)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("std", [0.004, 1.0, 30.0])
@pytest.mark.parametrize("columns", [32, 128])
def test_products_add_up_as_in_the_baseline(columns, std, dtype):
    """Bit by bit, subnormals too: by cuBLASLt, which adds up in the tensor cores alone where it may."""
    g, one = torch.Generator(DEVICE).manual_seed(0), torch.ones((), device=DEVICE)
    a, b = (torch.randn(256, columns, device=DEVICE, generator=g) * size for size in (std, 1.0))
    a, b = a.to(torch.float8_e4m3fn), (b.exp() * b.sign()).to(dtype)
    found = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
    assert torch.equal(found, cut_products(a.float(), b.float(), dtype))
    assert not torch.equal(found.double(), a.double() @ b.double().t())


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spec", SPECS)
def test_every_spec(spec, head_dim, accuracy):
    assert checked(spec, 700, 700, head_dim, accuracy=accuracy) == ()


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("head_dim", [80, 96, 112, 144, 160, 176, 192])
@pytest.mark.parametrize("spec", ["full", "causal"])
def test_every_head_dim(spec, head_dim, accuracy):
    assert checked(spec, 300, 500, head_dim, accuracy=accuracy) == ()


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (128, 64), (192, 128), (64, 192)])
def test_v_of_another_width(head_dim, v_head_dim):
    assert checked("full", 300, 500, head_dim, v_head_dim=v_head_dim) == ()


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 4096), (63, 127), (129, 128), (300, 100), (100, 300)])
@pytest.mark.parametrize("spec", ["full", "causal", "causal_bottom_right"])
def test_lengths(spec, q_len, kv_len):
    assert checked(spec, q_len, kv_len, 128) == ()


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_heads_that_share_keys(kv_heads):
    assert checked("causal", 400, 400, 128, heads=8, kv_heads=kv_heads) == ()


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("std", [4.0, 8.0])
def test_peaked_scores(std, accuracy):
    assert checked("full", 512, 1024, 128, std=std, accuracy=accuracy) == ()


def test_e5m2_keys_and_values():
    assert checked("full", 300, 500, 128, dtypes=(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2)) == ()


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_is_flat_in_length(head_dim, mean, accuracy):
    """Relative error of o at 2k and 64k keys, of the mean that V has: no more at length, and its length is kept."""
    kept = []
    for keys in (2048, 16384, 65536):
        q, k = draw(1, 1, 256, head_dim), draw(1, 1, keys, head_dim, seed=1)
        v = draw(1, 1, keys, head_dim, mean=mean, seed=2)
        o = fg.attention(
            *(x.codes for x in (q, k, v)), load_spec("full"), accuracy=accuracy, **descales((q, k, v))
        ).double()
        s = (q.values.double() @ k.values.double().mT) * head_dim**-0.5
        right = torch.softmax(s, -1) @ v.values.double()
        kept.append(float((o * right).sum() / (right * right).sum()))
    assert all(abs(x - 1) < 0.003 for x in kept), kept


def test_blocks_of_descales():
    heads, rows = 4, 1000
    of = [draw(2, heads, rows, 128, seed=i) for i in range(3)]
    blocks = [torch.rand(2, heads, 8, device=DEVICE) + 0.5 for _ in of]
    given = {f"{name}_descale": x * 0.01 for name, x in zip("qkv", blocks, strict=True)}
    factors = [(b * 0.01).repeat_interleave(128, 2)[:, :, :rows, None] for b in blocks]
    q, k, v = (x.codes.double() * factor for x, factor in zip(of, factors, strict=True))
    right = torch.softmax(q @ k.mT * 128**-0.5, -1) @ v
    o = fg.attention(*(x.codes for x in of), load_spec("full"), **given).double()
    assert float((o - right).norm() / right.norm()) < 0.03


def test_reruns_and_batches_have_the_same_bits():
    of = [draw(3, 4, 900, 128, seed=i) for i in range(3)]
    first = fg.attention(*(x.codes for x in of), load_spec("causal"), **descales(of))
    for _ in range(200):
        assert torch.equal(fg.attention(*(x.codes for x in of), load_spec("causal"), **descales(of)), first)
    one = [Quantised(x.codes[1:2], x.descale[1:2]) for x in of]
    assert torch.equal(fg.attention(*(x.codes for x in one), load_spec("causal"), **descales(one)), first[1:2])


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("block", [None, 128, 256])
def test_what_quantize_makes(block, accuracy):
    """Against float64 of what codes and scales stand for; other lengths have blocks of their own."""
    for length in (1000, 700):
        g = torch.Generator(DEVICE).manual_seed(length)
        q, k, v = (torch.randn(2, heads, length, 128, device=DEVICE, generator=g).bfloat16() for heads in (4, 2, 2))
        x = fg.quantize(q, k, v, block=block, smooth_k=True)
        o = fg.attention(x.q, x.k, x.v, load_spec("causal"), accuracy=accuracy, **x.descales).cpu().double()
        wide = [
            dequantised(*pair, torch.float64).cpu() for pair in zip((x.q, x.k, x.v), x.descales.values(), strict=True)
        ]
        right = fg.attention(*wide, load_spec("causal"))
        assert float((o - right).norm() / right.norm()) < 0.04


def test_float16_results():
    of = [draw(1, 2, 300, 64, seed=i) for i in range(3)]
    o = fg.attention(*(x.codes for x in of), load_spec("full"), out_dtype=torch.float16, **descales(of))
    wide = fg.attention(*(x.codes for x in of), load_spec("full"), **descales(of))
    assert o.dtype == torch.float16 and float((o.float() - wide.float()).abs().max()) < 0.02


def test_rows_without_a_key():
    of = [draw(1, 2, rows, 64, seed=i) for i, rows in enumerate((200, 50, 50))]
    o, lse = fg.attention(*(x.codes for x in of), load_spec("causal_bottom_right"), return_lse=True, **descales(of))
    assert not o[:, :, :150].any() and bool((lse[:, :, :150] == -torch.inf).all())
    assert bool(lse[:, :, 150:].isfinite().all())


def test_descales_are_looked_at_when_asked_for(monkeypatch):
    of = [draw(1, 2, 300, 64, seed=i) for i in range(3)]
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    with pytest.raises(fg.FlashgenError, match="positive and finite"):
        given = {**descales(of), "v_descale": torch.zeros(1, device=DEVICE)}
        fg.attention(*(x.codes for x in of), load_spec("full"), **given)


# ---------------------------------------------------------------- decoding
def cached(x, page_size, table):
    """[batch, heads, rows, columns] of codes as a cache [pages, page_size, heads, columns], other pages NaN."""
    _, heads, _, columns = x.shape
    pages = (
        x.view(torch.uint8).unflatten(2, (-1, page_size)).permute(0, 2, 3, 1, 4).reshape(-1, page_size, heads, columns)
    )
    cache = torch.full((table.numel() + 3, page_size, heads, columns), 0x7F, dtype=torch.uint8, device=DEVICE)
    cache[table.flatten().long()] = pages
    return cache.view(x.dtype)


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("splits", [None, 1, 3, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_decoding(head_dim, splits, accuracy):
    """Few queries of heads that share keys, or of one that does not: against float64."""
    for heads, kv_heads, q_len in ((32, 2, 1), (8, 2, 5), (2, 2, 1)):
        of = [draw(2, h, n, head_dim, seed=n + h) for h, n in ((heads, q_len), (kv_heads, 5000), (kv_heads, 5000))]
        o, lse = fg.attention(
            *(x.codes for x in of),
            load_spec("full"),
            **descales(of),
            accuracy=accuracy,
            kv_splits=splits,
            return_lse=True,
        )
        q, k, v = (x.values.double() for x in of)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        s = q @ k.mT * head_dim**-0.5
        right = torch.softmax(s, -1) @ v
        assert float((o - right).norm() / right.norm()) < 0.04
        assert float((lse - s.logsumexp(-1)).abs().max()) < (1e-3 if accuracy == "exact" else 0.02)
        again = fg.attention(
            *(x.codes for x in of), load_spec("full"), **descales(of), accuracy=accuracy, kv_splits=splits
        )
        assert torch.equal(again, o)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [None, 16, 64, 256])
@pytest.mark.parametrize(("head_dim", "q_len"), [(128, 1), (64, 70), (192, 3)])
def test_lengths_and_pages(head_dim, q_len, page_size, splits):
    """Each sequence has the bits that it has alone; what lies behind it, or in other pages, is NaN.  P is exact: which
    words are made by bits depends on a row's place in its tile."""
    causal, lengths = load_spec("causal"), torch.tensor([2048, 130, 77], dtype=torch.int32, device=DEVICE)
    of = [draw(3, h, n, head_dim, seed=n + h) for h, n in ((8, q_len), (2, 2048), (2, 2048))]
    codes = [x.codes.clone() for x in of]
    for b, n in enumerate(lengths.tolist()):
        for x in codes[1:]:
            x.view(torch.uint8)[b, :, n:] = 0x7F
    given = {"kv_lengths": lengths, "q_offset": "end", "kv_splits": splits, "accuracy": "exact", **descales(of)}
    padded = fg.attention(*codes, causal, **given, return_lse=True)
    if page_size is not None:
        table = torch.randperm(3 * 2048 // page_size, device=DEVICE).to(torch.int32).view(3, -1)
        caches = [cached(x, page_size, table) for x in codes[1:]]
        found = fg.attention(codes[0], *caches, causal, **given, page_table=table, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(found, padded, strict=True))
    for b, n in enumerate(lengths.tolist()):
        one = [x[b : b + 1, :, :rows].contiguous() for x, rows in zip(codes, (q_len, n, n), strict=True)]
        of_one = {name: x[b : b + 1] for name, x in descales(of).items()}
        alone = fg.attention(
            *one, load_spec("causal_bottom_right"), **of_one, kv_splits=splits, accuracy="exact", return_lse=True
        )
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(padded, alone, strict=True))
