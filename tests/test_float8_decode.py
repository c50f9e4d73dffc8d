"""Few queries in 8 bits: keys that are split among blocks, heads that share keys in one tile, one warpgroup of queries;
emitted kernels executed, and what a call takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from eight_bits import eight
from ptx_attention import replace

import flashgen as fg
from flashgen.interpreter.simulate import simulate
from flashgen.lang.load import load_spec
from flashgen.planning import division, planner
from flashgen.planning.arch import ARCHS
from flashgen.planning.float8 import E4M3
from flashgen.planning.layout import AT_END, Padded, Paged
from flashgen.planning.members import ALL_KEYS, SplitKeys
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic import predict
from flashgen.runtime.reference_float8 import quantised

AT_NIGHT = pytest.mark.nightly(sibling="test_kernels_are_right")

#: Few queries and three tiles of keys, the last of them not full.
SHAPE = {"q_len": 5, "kv_len": 350, "head_dim": 128}
SPLIT, PACKED = {"keys": SplitKeys()}, {"keys": SplitKeys(), "packed": True}


def work(spec="full", options=SPLIT, **shape):
    return eight(spec, options=options, **{**SHAPE, **shape})


@pytest.mark.sampled(
    "full-3-{'keys': SplitKeys()}-{}",
    "softcap-2-{'keys': SplitKeys(), 'packed': True, 'accuracy': 'exact'}-{'heads': 4, 'head_dim': 64}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "splits", "options", "shape"),
    [
        ("full", 3, SPLIT, {}),
        ("causal_bottom_right", 2, PACKED, {"heads": 8, "kv_heads": 2}),
        ("full", 1, {"packed": True}, {"heads": 4, "batch": 2}),
        ("softcap", 2, {**PACKED, "accuracy": "exact"}, {"heads": 4, "head_dim": 64}),
        pytest.param("full", 9, SPLIT, {}, marks=AT_NIGHT),
        pytest.param("full", 3, {**PACKED, "accuracy": "exact"}, {"heads": 3, "q_len": 40}, marks=pytest.mark.slow),
        pytest.param("full", 3, {**PACKED, "accuracy": "fast"}, {"heads": 4, "q_len": 40}, marks=pytest.mark.slow),
        pytest.param("causal", 2, {**SPLIT, "accuracy": "exact"}, {"q_len": 70, "kv_len": 211}, marks=AT_NIGHT),
        pytest.param("alibi", 2, {**SPLIT, "accuracy": "exact"}, {"heads": 4}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, {**SPLIT, "accuracy": "exact"}, {"heads": 4, "head_dim": 64}, marks=AT_NIGHT),
        pytest.param("document", 2, SPLIT, {"q_len": 150, "kv_len": 150}, marks=pytest.mark.slow),
        pytest.param("full", 2, PACKED, {"heads": 4, "head_dim": 192}, marks=AT_NIGHT),
        pytest.param("full", 2, PACKED, {"heads": 4, "tile": (128, 128)}, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_kernels_are_right(spec, splits, options, shape):
    w = work(spec, options, **shape)
    found = w.run(kv_splits=splits)
    assert w.wrong(found) == () and all(report.conflicts == [] for report in found.reports.values())


@pytest.mark.slow
def test_blocks_without_a_key():
    """Rows that see nothing, and parts that nothing is written to: the workspace holds NaN."""
    w = work("causal_bottom_right", q_len=70, kv_len=10, options={**PACKED, "accuracy": "exact"})
    found = w.run(kv_splits=3)
    assert w.wrong(found) == ()
    assert not found.o[:, :, :60].any() and (found.lse[:, :, :60] == -np.inf).all()


@pytest.mark.sampled("no packs")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shape", "edit"),
    [
        (PACKED, {"heads": 16, "q_len": 10}, replace("q_descale[r] *", "q_descale[0] *")),
        (PACKED, {"heads": 4, "q_len": 140}, replace(">> p.pack_log2, p.q_len - 1)", ">> p.pack_log2, 0)")),
        pytest.param(SPLIT, {"heads": 4, "q_len": 140}, None, marks=pytest.mark.slow),
    ],
    ids=["packs of 16", "packs of 4", "no packs"],
)
def test_each_row_has_the_descale_of_its_head_and_block(options, shape, edit):
    """A thread's two rows are of one head where packs have at most 8."""
    w = work(options={**options, "accuracy": "exact"}, head_dim=64, **shape)
    rng, blocks = np.random.default_rng(1), -(-w.problem.q_len // 128)
    shapes = {"q": (1, w.problem.heads, blocks), "k": (1, 1, 3), "v": (1, 1, 3)}
    given = {name: rng.uniform(0.2, 2, shape).astype(np.float32) for name, shape in shapes.items()}
    q, k, v = (
        x.codes.double() * torch.from_numpy(given[name]).repeat_interleave(128, 2)[:, :, : x.codes.shape[2], None]
        for name, x in zip("qkv", w.qkv, strict=True)
    )
    scale = 1e-5  # codes reach 448
    right = torch.softmax(scale * q @ k.mT, -1) @ v
    for change in (None, edit):
        found = w.run(change, descales=given, kv_splits=2, scale=scale).o
        error = float((torch.from_numpy(found).double() - right).norm() / right.norm())
        assert (error > 0.1) == (change is not None), error
        if edit is None:
            break


@pytest.mark.slow
def test_no_descale_beyond_the_last_block_is_read():
    """A warpgroup may have no query: the third of a tile of 192 behind 385 queries."""
    w = eight("full", heads=1, q_len=385, kv_len=64, tile=(192, 64))
    given = {**w.descales, "q": np.full((1, 1, 4), w.descales["q"][0, 0], np.float32)}
    assert w.wrong(w.run(descales=given)) == ()


#: Mutations of the emitted text.
WRONG = {
    "columns of a part in another order": replace("o[i + 2 * r + 4], o[", "o[i + 2 * r + 5], o["),
    "parts in one place": replace("part_of(work.part,", "part_of(0,"),
    "the maximum of another row": replace("make_float2(done.row_max[r], sum)", "make_float2(done.row_max[0], sum)"),
    "each part from the first tile": replace("index -= part * tiles;", "index -= part * tiles; part = 0;"),
}


@pytest.mark.sampled("each part from the first tile")
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name):
    w = work(options={**PACKED, "accuracy": "exact"}, heads=4, q_len=12, head_dim=64)
    edit = WRONG[name]
    try:
        wrong = w.wrong(w.run((lambda text: edit(text.replace("tiles, part =", "tiles; int part ="))), kv_splits=3))
    except Exception as trap:  # the interpreter's
        wrong = (str(trap),)
    assert wrong
    if name == "parts in one place":
        assert w.wrong(w.run(kv_splits=3)) == ()


# ---------------------------------------------------------------- the choice
def divided(batch, kv_len, heads=32, kv_heads=8, dtype=E4M3, q_len=1, **options):
    def ask(keys):
        return planner.menu_of(KernelRequest.of(load_spec("full").bind(), "sm_90a", dtype, 128, keys=keys))

    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    problem = Problem(**shape, head_dim=128, v_head_dim=128, dtype=dtype)
    return division.divide(ask, problem, ARCHS["sm_90a"].sms, params={}, **options)


@pytest.mark.parametrize(("batch", "kv_len"), [(8, 32768), (1, 131072), (32, 8192)])
def test_decoding_is_divided_as_in_16_bits(batch, kv_len):
    found, wide = (divided(batch, kv_len, dtype=dtype) for dtype in (E4M3, "bfloat16"))
    assert found.plan.packed and found.plan.tile.q == 64  # one warpgroup
    assert (found.splits, found.plan.keys) == (wide.splits, wide.plan.keys)
    assert divided(batch, kv_len, kv_splits=1).plan.keys == ALL_KEYS


def test_many_queries_have_more_warpgroups():
    assert divided(2, 8192, 16, 16, q_len=4096).plan.tile.q == 128


@pytest.mark.slow
def test_bytes_of_parts_are_predicted():
    w = work(heads=4, options=PACKED)
    found = w.run(kv_splits=2)
    predicted = predict(w.plan, w.problem, w.case, splits=2)
    names = ("q", "k", "v")
    read = sum(found.report.bytes(buffer=name) for name in names)
    parts = sum(found.report.bytes("st", buffer=name) for name in ("part_o", "part_rows"))
    combine = found.reports["attention_combine_few_parts"]
    written = sum(combine.bytes("st", buffer=name) for name in ("o", "lse"))
    assert (predicted.hbm.read_bytes, predicted.hbm.write_bytes) == (read + parts, written + parts)


# ---------------------------------------------------------------- calls
def test_the_walk_on_a_cpu():
    g, shapes = torch.Generator().manual_seed(0), ((2, 8, 3, 64), (2, 2, 400, 64), (2, 2, 400, 64))
    q, k, v = (quantised(torch.randn(shape, generator=g), torch.float8_e4m3fn) for shape in shapes)
    given = {f"{name}_descale": x.descale for name, x in zip("qkv", (q, k, v), strict=True)}
    codes = [x.codes for x in (q, k, v)]
    causal = load_spec("causal_bottom_right")
    right, right_lse = fg.attention(*(x.values.double() for x in (q, k, v)), causal, return_lse=True)
    for splits in (1, 2, 5):
        o, lse = fg.attention(*codes, causal, **given, kv_splits=splits, accuracy="exact", return_lse=True)
        assert float((o.double() - right).norm() / right.norm()) < 0.03
        torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- lengths of a sequence's own
def pages_of(batch, kv_len, page_size):
    """A page table: the last page of all is that of the first keys of the first sequence."""
    each = -(-kv_len // page_size)
    return np.arange(batch * each, dtype=np.int32)[::-1].reshape(batch, each).copy()


def in_pages(x, page_size):
    """[batch, heads, rows, columns] of codes as [pages, heads, page_size, columns]; rows of no key are NaN."""
    batch, heads, rows, columns = x.shape
    table = pages_of(batch, rows, page_size)
    room = torch.full((batch, heads, table.shape[1] * page_size, columns), torch.nan).to(x.dtype)
    room[:, :, :rows] = x
    pages = room.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
    return pages.view(torch.uint8)[table.ravel().argsort().copy()].view(x.dtype)


@pytest.mark.sampled("{'keys': SplitKeys(), 'packed': True}-2-{'heads': 4, 'q_len': 5}-16")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "splits", "shape", "page_size"),
    [
        ({}, 1, {}, None),
        (PACKED, 3, {"heads": 4, "q_len": 5}, None),
        (PACKED, 2, {"heads": 4, "q_len": 5}, 16),
        pytest.param({}, 1, {"head_dim": 128}, 64, marks=pytest.mark.slow),
        pytest.param({"accuracy": "exact"}, 1, {"q_len": 150, "head_dim": 192}, None, marks=AT_NIGHT),
        pytest.param({"accuracy": "fast", "packed": True}, 1, {"heads": 4, "head_dim": 128}, None, marks=AT_NIGHT),
        pytest.param({"accuracy": "exact"}, 1, {"q_len": 150}, 256, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_sequences_of_their_own_lengths(options, splits, shape, page_size):
    """Each has the bits that it has alone; what lies behind it, or in other pages, is NaN."""
    shape = {"heads": 2, "kv_heads": 1, "q_len": 70, "kv_len": 350, "head_dim": 64, "batch": 3, **shape}
    layout = Padded() if page_size is None else Paged()
    w = eight("causal", options={**options, "layout": layout}, **shape)
    alone = eight("causal_bottom_right", options=options, **shape)
    q_lengths, kv_lengths = (shape["q_len"], 3, 0), (shape["kv_len"], 131, 40)
    codes = [x.codes.clone() for x in w.qkv]
    for b, (rows, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        codes[0][b, :, rows:] = codes[1][b, :, keys:] = codes[2][b, :, keys:] = torch.nan
    of_kernel = codes if page_size is None else [codes[0], *(in_pages(x, page_size) for x in codes[1:])]
    w = dataclasses.replace(w, qkv=tuple(x._replace(codes=y) for x, y in zip(w.qkv, of_kernel, strict=True)))
    lengths = {"q_lengths": np.array(q_lengths, np.int32), "kv_lengths": np.array(kv_lengths, np.int32)}
    if page_size is not None:
        lengths["page_table"] = table = pages_of(shape["batch"], shape["kv_len"], page_size)
        sizes = {**w.case.sizes, "kv_len": table.shape[1] * page_size}
        w = dataclasses.replace(w, case=dataclasses.replace(w.case, sizes=sizes))
    found = w.run(sequences=lengths, q_offset=AT_END, kv_splits=splits)
    for b, (rows, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        assert not found.o[b, :, rows:].any() and (found.lse[b, :, rows:] == -np.inf).all()
        if not rows:
            continue
        sizes = {**w.case.sizes, "batch": 1, "q_len": rows, "kv_len": keys}
        case = dataclasses.replace(w.case, sizes=sizes)
        arrays = [x[b : b + 1, :, :n].float().numpy() for x, n in zip(codes, (rows, keys, keys), strict=True)]
        descales = {name: x[b : b + 1] for name, x in w.descales.items()}
        one = simulate(alone.plan, case, *arrays, scale=w.scale, descales=descales, kv_splits=splits)
        assert np.array_equal(found.o[b, :, :rows], one.o[0]) and np.array_equal(found.lse[b, :, :rows], one.lse[0])
