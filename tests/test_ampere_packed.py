"""The Ampere forward where heads that share keys share tiles: right on the interpreter, in all layouts, and planned."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from eight_bits import eight
from emulated_gpu import install
from padded import batch
from ptx_attention import replace, work
from split import split_pages
from test_float8_varlen import joined
from test_ptx_attention import check
from test_split_pages import SHAPE
from test_split_pages import check as check_pages

import flashgen as fg
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.float8 import E4M3
from flashgen.planning.layout import DENSE, Padded, Paged, Varlen
from flashgen.planning.members import SplitKeys
from flashgen.planning.problem import Problem
from flashgen.planning.traffic import predict
from flashgen.runtime import nvrtc

AT_NIGHT = pytest.mark.nightly(sibling="test_few_queries")


def few(q_len, group, **shape):
    """A packed kernel of 16 bits on few queries of heads that share keys."""
    shape = {"heads": 2 * group, "kv_heads": 2, "kv_len": 150, "tile": (16, 64), **shape}
    return work(shape.pop("spec", "causal_bottom_right"), "ampere", packed=True, q_len=q_len, **shape)


@pytest.mark.slow
@pytest.mark.sampled("1-4-{}")
@pytest.mark.parametrize(
    ("q_len", "group", "shape"),
    [
        (1, 4, {}),
        (3, 6, {"tile": (32, 64)}),
        (5, 32, {"heads": 32, "kv_heads": 1}),
        (9, 8, {"spec": "gpt_oss", "tile": (64, 32), "batch": 2, "dtype": "float16"}),
        pytest.param(1, 2, {"head_dim": 40, "v_head_dim": 72, "batch": 2}, marks=AT_NIGHT),
        pytest.param(40, 4, {"head_dim": 128, "tile": (32, 32), "stages": 3}, marks=AT_NIGHT),
        pytest.param(70, 3, {}, marks=AT_NIGHT),
        pytest.param(7, 8, {"spec": "sliding_window"}, marks=AT_NIGHT),
        pytest.param(7, 8, {"spec": "document"}, marks=AT_NIGHT),
        pytest.param(7, 8, {"spec": "softcap"}, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_few_queries(q_len, group, shape):
    w = few(q_len, group, **shape)
    assert w.plan.pack(w.problem.group) == min(group & -group, w.plan.tile.q)
    report = check(w).report
    predicted = predict(w.plan, w.problem, w.case)
    assert report.bytes(buffer="k") == predicted.tiles.visited_columns * w.problem.head_dim * 2


def few_of_8_bits(q_len, group, **shape):
    """The same over keys of 8 bits."""
    shape = {"heads": 2 * group, "kv_heads": 2, "kv_len": 150, "head_dim": 64, "of_q": "bfloat16", **shape}
    options = {"packed": True, "pipeline": "ampere", **shape.pop("options", {})}
    return eight(shape.pop("spec", "causal_bottom_right"), q_len=q_len, options=options, **{"tile": (16, 64), **shape})


@pytest.mark.slow
@pytest.mark.sampled("1-4-{}")
@pytest.mark.parametrize(
    ("q_len", "group", "shape"),
    [
        (1, 4, {}),
        (3, 8, {"of_q": E4M3, "arch": "sm_80", "tile": (32, 32), "batch": 2}),
        pytest.param(9, 8, {"spec": "softcap", "of_q": E4M3, "arch": "sm_89", "tile": (64, 32)}, marks=AT_NIGHT),
        pytest.param(3, 8, {"of_q": "float16", "arch": "sm_80", "head_dim": 128}, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_few_queries_over_keys_of_8_bits(q_len, group, shape):
    w = few_of_8_bits(q_len, group, **shape)
    found = w.run()
    assert w.plan.packed and w.wrong(found) == ()
    predicted = predict(w.plan, w.problem, w.case)
    assert found.report.bytes(buffer="k") == predicted.tiles.visited_columns * w.problem.head_dim


@pytest.mark.slow
def test_a_row_of_q_has_its_own_range():
    """Rows of bfloat16 as large and as small as they come: in float16 by themselves they would be infinite and 0."""
    w = few_of_8_bits(4, 4, kv_len=100)
    q = w.qkv[0].codes.float() * (2.0 ** torch.tensor([-100.0, 0.0, 98.0, 102.0]))[:, None]
    q = q * torch.where(torch.arange(64) == 5, 2.0**-20, 1.0)  # and a column that is small in each
    small = 2.0**-100 * w.qkv[1].descale
    k = w.qkv[1]._replace(descale=small)
    w = dataclasses.replace(w, qkv=(w.qkv[0]._replace(codes=q.bfloat16()), k, w.qkv[2]))
    w = dataclasses.replace(w, descales={**w.descales, "k": small.numpy()})
    assert w.wrong(w.run()) == ()


@pytest.mark.slow
@pytest.mark.parametrize("of_q", ["bfloat16", pytest.param(E4M3, marks=AT_NIGHT)])
def test_keys_that_are_split(of_q):
    w = few_of_8_bits(3, 4, kv_len=300, of_q=of_q, options={"keys": SplitKeys()})
    found = w.run(kv_splits=3)
    assert w.plan.packed and w.wrong(found) == ()
    predicted = predict(w.plan, w.problem, w.case, splits=3)
    read = sum(found.report.bytes(buffer=name) for name in ("q", "k", "v"))
    parts = sum(found.report.bytes("st", buffer=name) for name in ("part_o", "part_rows"))
    assert predicted.hbm.read_bytes == read + parts


# ---------------------------------------------------------------- sequences with lengths of their own
LENGTHS = {"q_lengths": (20, 3, 0), "kv_lengths": (130, 70, 40), "q_len": 20, "kv_len": 150}
PACKED = {"heads": 4, "kv_heads": 1, "packed": True, "tile": (32, 64)}
PACKED_KEYS = {"keys": SplitKeys(), "packed": True}


@pytest.mark.slow
@pytest.mark.sampled("varlen")
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
def test_each_sequence_has_the_bits_that_it_has_alone(layout):
    w = batch("causal", "ampere", layout=layout, **LENGTHS, **PACKED)
    result = w.run()
    assert w.plan.packed and w.wrong(result) == [] and result.report.conflicts == []


@pytest.mark.slow
@pytest.mark.sampled("varlen")
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
def test_pages_that_are_split(layout):
    first = (125, 348, 0, 0, 0)
    shape = {**SHAPE, "heads": 8, "kv_heads": 2, "packed": True, "tile": (16, 64)}
    check_pages(split_pages("causal", "ampere", 16, q_offset=first, layout=layout, **shape), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "splits", "shape"),
    [
        (PACKED_KEYS, 3, {"tile": (16, 64), "queries": (5, 1, 0, 2), "keys": (350, 131, 0, 20), "poisoned": 3}),
        pytest.param({}, 1, {"heads": 2, "tile": (32, 64), "spec": "causal"}, marks=AT_NIGHT),
        pytest.param(
            *({"packed": True}, 1),
            {"tile": (64, 32), "blocks": True, "queries": (140, 70, 3), "keys": (150, 200, 33)},
            marks=AT_NIGHT,
        ),
        pytest.param(
            *({"packed": True}, 1),
            {"tile": (64, 32), "page_size": 16, "queries": (70, 33, 2), "keys": (150, 33, 0), "poisoned": None},
            marks=AT_NIGHT,
        ),
    ],
    ids=str,
)
def test_sequences_behind_each_other_over_keys_of_8_bits(options, splits, shape):
    w = joined(shape.pop("spec", "full"), options, arch="sm_80", **{"heads": 4, **shape})
    assert w.w.plan.pipeline == "ampere" and w.wrong(w.run(kv_splits=splits), kv_splits=splits) == []


@pytest.mark.slow
def test_a_call_of_sequences_behind_each_other(monkeypatch):
    """Queries of 16 bits over keys of 8, each beside itself alone in float64."""
    gpu, g = install(monkeypatch, (9, 0)), torch.Generator().manual_seed(0)
    starts, keys = [torch.tensor(x, dtype=torch.int32) for x in ((0, 3, 4), (0, 40, 110))]
    q = torch.randn(4, 8, 64, generator=g).bfloat16()
    k, v = (torch.randn(110, 2, 64, generator=g).to(torch.float8_e4m3fn) for _ in "kv")
    one, causal = torch.full((2, 2), 0.5), load_spec("causal")
    given = {"max_seqlen_q": 3, "max_seqlen_k": 70, "q_offset": "end"}
    descales = {name: gpu.put(one) for name in ("k_descale", "v_descale")}
    o = fg.attention_varlen(*map(gpu.put, (q, k, v)), causal, *map(gpu.put, (starts, keys)), **given, **descales)
    right = fg.attention_varlen(q.double(), k.double() / 2, v.double() / 2, causal, starts, keys, **given)
    assert gpu.launches[0][0].pipeline == "ampere" and float((o.double() - right).norm() / right.norm()) < 5e-3


# ---------------------------------------------------------------- mutations
MUTATIONS = {
    "the query of a row taken for its head": (
        replace("(row & (1 << p.pack_log2) - 1) * p.o_head", "(row >> 2) * p.o_head"),
        {},
    ),
    "a mask of rows as if they were queries": (
        replace("rows.q_first + (row0 + 16 * m + i / 2 * 8 >> p.pack_log2)", "rows.q_first + row0"),
        {},
    ),
    "the heads of the next pack": (
        replace("head % p.packs << p.pack_log2", "head % p.packs"),
        {"group": 8, "tile": (16, 64), "kv_heads": 2},
    ),
    "rows of one head loaded": (replace("(row & (1 << log2) - 1) * head_stride", "0 * head_stride"), {}),
    "lse of rows behind each other": (replace("lse[(row & (1 << p.pack_log2) - 1) * p.q_len + (row", "lse[(row"), {}),
    "the sink of the first head": (
        replace("rows.h + ((row0 + 16 * m + 8 * r) & (1 << p.pack_log2) - 1)", "rows.h"),
        {"spec": "gpt_oss"},
    ),
}


@pytest.mark.slow
@pytest.mark.sampled("the heads of the next pack")
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_is_seen(name):
    edit, shape = MUTATIONS[name]
    shape = {"kv_len": 70, **shape}
    w = few(5, shape.pop("group", 4), **shape)
    with contextlib.suppress(errors.Trap):
        assert w.wrong(w.run(edit))


# ---------------------------------------------------------------- the plan
FP8 = {"k_dtype": E4M3, "v_dtype": E4M3}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "rows"),
    [(32, 8, 1, 16), (32, 8, 5, 32), (32, 8, 16, 64), (32, 1, 1, 32), (8, 8, 1, 16)],
)
@pytest.mark.parametrize(("arch", "dtype", "kinds"), [("sm_90a", "bfloat16", FP8), ("sm_80", "bfloat16", {})])
def test_the_least_tile_that_holds_the_rows(arch, dtype, kinds, heads, kv_heads, q_len, rows):
    asked = (load_spec("causal").bind(), arch, dtype, 128)
    problem = {"batch": 4, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": 8192}
    of_keys = {"kv_dtype": E4M3} if kinds else {}
    p = Problem(**problem, **of_keys, head_dim=128, v_head_dim=128, dtype=dtype)
    for layout in (DENSE, Paged()):
        menu = planner.menu(*asked, keys=SplitKeys(), layout=layout, **kinds)
        plan = planner.choose(menu, p, 132)
        assert plan.packed and plan.tile.q == rows and plan.pack(heads // kv_heads) == heads // kv_heads
        assert plan.order_of_sums == menu.plans[0].order_of_sums
        assert emit(plan).partition("\n\n")[0].endswith("--packed --split-keys")


def test_full_tiles_of_queries_are_not_packed():
    menu = planner.menu(load_spec("causal").bind(), "sm_90a", "bfloat16", 128, **FP8)
    dims = {"head_dim": 128, "v_head_dim": 128, "dtype": "bfloat16", "kv_dtype": E4M3}
    for q_len, packed in ((2048, False), (1, True)):
        p = Problem(batch=64, heads=32, kv_heads=8, q_len=q_len, kv_len=2048, **dims)
        assert planner.choose(menu, p, 132).packed == packed


def test_what_packs_no_heads_says_so():
    asked = ("sm_80", "bfloat16", 64)
    with pytest.raises(PlanError, match="tells heads apart, which then share no tile\n  nearest: packed=False"):
        planner.menu(load_spec("alibi").bind(), *asked, packed=True)
    with pytest.raises(PlanError, match="drops probabilities of each head by itself"):
        planner.menu(load_spec("full").bind(), *asked, packed=True, dropout=True)


@pytest.mark.sampled("sm_80-bfloat16-kinds1-64-dense")
@pytest.mark.parametrize("layout", [DENSE, Paged()], ids=["dense", "in pages"])
@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=AT_NIGHT)])
@pytest.mark.parametrize(
    ("arch", "dtype", "kinds"), [("sm_90a", "bfloat16", FP8), ("sm_80", "bfloat16", {}), ("sm_80", E4M3, FP8)]
)
@pytest.mark.slow
def test_no_kernel_of_few_rows_spills(arch, dtype, kinds, head_dim, layout):
    menu = planner.menu(load_spec("causal").bind(), arch, dtype, head_dim, **kinds, keys=SplitKeys(), layout=layout)
    assert len(menu.few) >= 2
    for plan in menu.few:
        found = nvrtc.compile(emit(plan), plan.arch)
        assert found.resources.spills == 0, (plan.tile, plan.stages, plan.warps, found.resources)
