"""Keys and values of 8 bits that pipeline ampere widens, on a GPU, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_checks import DEVICE
from test_gpu_fp8 import SPECS, VALUES, cached, case_of, descales, draw
from tolerance import judge, judge_lse, reference

import flashgen as fg
from flashgen.lang.load import load_spec
from flashgen.ops.menus import gpu_arch
from flashgen.planning import planner
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.runtime.captured import on_device
from flashgen.runtime.reference_float8 import beside

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E44 = (E4M3, E4M3)


def named(of):
    """Their descales: of queries of 16 bits none."""
    return {name: x for name, x in descales(of).items() if name != "q_descale" or of[0].codes.itemsize == 1}


def over_ampere(variant):
    return dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline="ampere"))


def checked(
    spec, q_len, kv_len, head_dim, *, heads=4, kv_heads=2, v_head_dim=None, of_q=torch.bfloat16, kinds=E44, std=1.0
):
    values, variant = VALUES.get(spec, {}), over_ampere(load_spec(spec))
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    bound, params = variant.bind(**constants), {n: x for n, x in values.items() if n not in constants}
    wide = v_head_dim or head_dim
    shapes = (2, heads, q_len, head_dim), (2, kv_heads, kv_len, head_dim), (2, kv_heads, kv_len, wide)
    of = [
        draw(*shape, dtype=dtype, std=std if i == 0 else 1.0, seed=i)
        for i, (shape, dtype) in enumerate(zip(shapes, (of_q, *kinds), strict=True))
    ]
    names = [str(x.codes.dtype).removeprefix("torch.") for x in of]
    sizes = {"batch": 2, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    problem = Problem(**sizes, head_dim=head_dim, v_head_dim=wide, dtype=names[0], kv_dtype=names[1])
    case, scale = case_of(bound, problem, params), head_dim**-0.5
    given = {**case.params, **on_device(bound, case.tensors, DEVICE), **named(of)}
    o, lse = fg.attention(*(x.codes for x in of), bound, return_lse=True, **given)
    ref, ref_lse = reference(bound, case, *(x.values for x in of), scale=scale)
    kinds_of = {"k_dtype": names[1], "v_dtype": names[2]}
    request = KernelRequest.of(bound, gpu_arch(o), names[0], head_dim, wide, **kinds_of)
    base, base_lse = beside(planner.menu_of(request).plans[0], bound, case, of, scale=scale)
    return judge(o, base, ref, str(o.dtype).removeprefix("torch.")).reasons + judge_lse(lse, ref_lse, base_lse)


@pytest.mark.parametrize("of_q", [torch.bfloat16, torch.float16, E4M3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spec", SPECS)
def test_every_spec(spec, head_dim, of_q):
    assert not checked(spec, 500, 500, head_dim, of_q=of_q)


@pytest.mark.parametrize("kinds", [(E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("of_q", [torch.bfloat16, torch.float16, E4M3])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 80, 96, 112, 144, 160, 192, 224, 256])
def test_every_head_dim(head_dim, of_q, kinds):
    assert not checked("causal", 300, 400, head_dim, of_q=of_q, kinds=kinds)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (128, 64), (192, 128), (64, 256), (256, 16)])
def test_v_of_another_width(head_dim, v_head_dim):
    assert not checked("full", 300, 300, head_dim, v_head_dim=v_head_dim)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 4096), (63, 127), (129, 128), (300, 100), (100, 300)])
@pytest.mark.parametrize("spec", ["full", "causal", "causal_bottom_right"])
def test_lengths(spec, q_len, kv_len):
    assert not checked(spec, q_len, kv_len, 128)


@pytest.mark.parametrize("std", [4.0, 8.0])
def test_peaked_scores(std):
    assert not checked("full", 512, 2048, 128, std=std)


@pytest.mark.parametrize("splits", [None, 1, 3, 40])
@pytest.mark.parametrize("of_q", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_decoding(head_dim, of_q, splits):
    for heads, kv_heads, q_len in ((32, 2, 1), (8, 2, 5), (2, 2, 1), (12, 2, 40)):
        of = [
            draw(2, h, n, head_dim, seed=n + h, dtype=dtype)
            for h, n, dtype in ((heads, q_len, of_q), (kv_heads, 5000, E4M3), (kv_heads, 5000, E4M3))
        ]
        given = {**named(of), "kv_splits": splits}
        o, lse = fg.attention(*(x.codes for x in of), load_spec("full"), **given, return_lse=True)
        q, k, v = (x.values.double() for x in of)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        s = q @ k.mT * head_dim**-0.5
        right = torch.softmax(s, -1) @ v
        assert float((o - right).norm() / right.norm()) < 4e-3
        assert float((lse - s.logsumexp(-1)).abs().max()) < 1e-4
        assert torch.equal(fg.attention(*(x.codes for x in of), load_spec("full"), **given), o)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [None, 12, 16, 256])
@pytest.mark.parametrize(("head_dim", "q_len"), [(128, 1), (64, 70), (192, 3)])
def test_lengths_and_pages(head_dim, q_len, page_size, splits):
    """Each sequence has the bits that it has alone; what lies behind it, or in other pages, is NaN."""
    rows = 2304
    causal, lengths = load_spec("causal"), torch.tensor([rows, 130, 77], dtype=torch.int32, device=DEVICE)
    of = [
        draw(3, h, n, head_dim, seed=n + h, dtype=dtype)
        for h, n, dtype in ((8, q_len, torch.bfloat16), (2, rows, E4M3), (2, rows, E4M3))
    ]
    codes = [x.codes.clone() for x in of]
    for b, n in enumerate(lengths.tolist()):
        for x in codes[1:]:
            x.view(torch.uint8)[b, :, n:] = 0x7F
    given = {"kv_lengths": lengths, "q_offset": "end", "kv_splits": splits, **named(of)}
    padded = fg.attention(*codes, causal, **given, return_lse=True)
    if page_size is not None:
        table = torch.randperm(3 * rows // page_size, device=DEVICE).to(torch.int32).view(3, -1)
        caches = [cached(x, page_size, table) for x in codes[1:]]
        found = fg.attention(codes[0], *caches, causal, **given, page_table=table, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(found, padded, strict=True))
    for b, n in enumerate(lengths.tolist()):
        one = [x[b : b + 1, :, :m].contiguous() for x, m in zip(codes, (q_len, n, n), strict=True)]
        of_one = {name: x[b : b + 1] for name, x in named(of).items()} | {"kv_lengths": lengths[b : b + 1]}
        alone = fg.attention(*one, causal, **of_one, q_offset="end", kv_splits=splits, return_lse=True)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(padded, alone, strict=True))


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_nan_stays_one(name):
    of = [draw(1, h, n, 128, dtype=dtype) for h, n, dtype in ((8, 4, torch.bfloat16), (2, 900, E4M3), (2, 900, E4M3))]
    codes = {n: x.codes.clone() for n, x in zip("qkv", of, strict=True)}
    codes[name].view(torch.uint8)[0, 0, 700, 5] = 0x7F
    codes[name].view(torch.uint8)[0, 1, 7, 5] = 0xFF
    o = fg.attention(*codes.values(), load_spec("full"), **named(of))
    assert (o if name == "k" else o[..., 5]).isnan().all()
