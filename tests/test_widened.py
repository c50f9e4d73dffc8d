"""Keys and values of 8 bits that pipeline ampere widens: emitted kernels executed, the walk, calls, refusals."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from eight_bits import eight
from emulated_gpu import install
from ptx_attention import replace
from test_float8_decode import in_pages, pages_of
from test_ops_float8 import paged

import flashgen as fg
from flashgen.codegen import emit
from flashgen.errors import FlashgenError
from flashgen.interpreter.simulate import simulate
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.planning.float8 import E4M3, E5M2
from flashgen.planning.layout import AT_END, Padded, Paged
from flashgen.planning.members import SplitKeys
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic import predict
from flashgen.runtime import nvrtc
from flashgen.runtime.reference_float8 import Quantised, quantised

AT_NIGHT = pytest.mark.nightly(sibling="test_kernels_are_right")
BF16, F16 = "bfloat16", "float16"
E44, E45, E54 = (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)
SPLIT = {"keys": SplitKeys()}
SMALL = {"tile": (64, 64)}


def work(spec="causal", of_q=BF16, of_keys=E44, arch="sm_90a", **shape):
    options = dict(shape.pop("options", {}))
    if of_q == E4M3 and arch == "sm_90a":
        options["pipeline"] = "ampere"
    return eight(spec, of_q=of_q, of_keys=of_keys, arch=arch, options=options, **shape)


# ---------------------------------------------------------------- kernels
@pytest.mark.sampled(
    "causal-sm_90a-float8_e4m3fn-('float8_e4m3fn', 'float8_e5m2')-{'std': 4.0, 'mean': 1.0}",
    "full-sm_80-bfloat16-('float8_e4m3fn', 'float8_e4m3fn')-{'q_len': 1, 'kv_len': 1, 'heads': 1}",
)
@pytest.mark.parametrize(
    ("spec", "arch", "of_q", "of_keys", "shape"),
    [
        ("causal", "sm_90a", BF16, E44, {"heads": 4, "kv_heads": 2}),
        ("softcap", "sm_80", BF16, E45, {"kv_len": 130, **SMALL}),
        ("full", "sm_80", E4M3, E54, {"head_dim": 48, **SMALL}),
        pytest.param("gpt_oss", "sm_89", F16, E44, {"head_dim": 80, "v_head_dim": 48}, marks=pytest.mark.slow),
        pytest.param("sliding_window", "sm_80", F16, E44, {"head_dim": 16}, marks=AT_NIGHT),
        pytest.param("causal", "sm_89", E4M3, E44, {"head_dim": 256, "heads": 1}, marks=AT_NIGHT),
        pytest.param("causal", "sm_90a", E4M3, E45, {"std": 4.0, "mean": 1.0}, marks=pytest.mark.slow),
        pytest.param("document", "sm_90a", BF16, E54, {"head_dim": 128, "v_head_dim": 256}, marks=AT_NIGHT),
        pytest.param("alibi", "sm_90a", BF16, E44, {"head_dim": 256, "v_head_dim": 16}, marks=AT_NIGHT),
        pytest.param("full", "sm_80", BF16, E44, {"q_len": 1, "kv_len": 1, "heads": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_are_right(spec, arch, of_q, of_keys, shape):
    w = work(spec, of_q, of_keys, arch, **shape)
    assert w.plan.pipeline == "ampere" and w.wrong(w.run()) == ()


@pytest.mark.slow
@pytest.mark.sampled("causal_bottom_right-3-{'q_len': 5, 'kv_len': 200}")
@pytest.mark.parametrize(
    ("spec", "splits", "shape"),
    [
        ("causal_bottom_right", 3, {"q_len": 5, "kv_len": 200}),
        ("softcap", 2, {"of_q": E4M3, "arch": "sm_80", "q_len": 3}),
        pytest.param("full", 9, {"q_len": 40, "of_keys": E54}, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_keys_that_are_split(spec, splits, shape):
    w = work(spec, options=SPLIT, **shape)
    found = w.run(kv_splits=splits)
    assert w.wrong(found) == ()
    predicted = predict(w.plan, w.problem, w.case, splits=splits)
    read = sum(found.report.bytes(buffer=name) for name in ("q", "k", "v"))
    combining = next(report for entry, report in found.reports.items() if "combine" in entry)
    parts = sum(combining.bytes("ld", buffer=name) for name in ("part_o", "part_rows"))
    assert predicted.hbm.read_bytes == read + parts


@pytest.mark.slow
@pytest.mark.parametrize(("of_q", "arch"), [(BF16, "sm_90a"), (E4M3, "sm_80")])
def test_bytes_are_predicted(of_q, arch):
    w = work("full", of_q, arch=arch, kv_len=130)
    report, predicted = w.run().report, predict(w.plan, w.problem, w.case)
    read, written = (sum(report.bytes(buffer=name) for name in names) for names in (("q", "k", "v"), ("o", "lse")))
    assert (predicted.hbm.read_bytes, predicted.hbm.write_bytes) == (read, written)
    tiles = -(-w.problem.q_len // w.plan.tile.q) * w.problem.heads
    assert report.bytes(buffer="k") == tiles * 130 * 64  # a byte an element


EVERY = np.arange(256, dtype=np.uint8)


@pytest.mark.sampled("float16-float8_e5m2-sm_89", "bfloat16-float8_e4m3fn-sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("of_q", [BF16, F16])
def test_every_code_is_widened(kind, arch, of_q):
    """V holds each code once, subnormals and NaN among them, and a row of o is one row of V; with K so too scores
    say that k was widened: q picks one of its columns."""
    w = work("full", of_q, (kind, kind), arch, heads=1, q_len=16, kv_len=16, head_dim=16, tile=(32, 32))
    codes = torch.from_numpy(EVERY.reshape(1, 1, 16, 16).copy()).view(getattr(torch, kind))
    values = codes.double()
    one = np.ones((1, 1), np.float32)
    given = {"k": one, "v": one}
    finite = torch.where(values.isfinite(), values, 0.0)
    # Row i sees key i alone: its score is 2^15 where others have 0.
    eye = torch.eye(16).to(torch.float8_e4m3fn)[None, None]

    def run(q, k, v, scale):
        of = [Quantised(x, torch.ones(1, 1)) for x in (q, k, v)]
        return dataclasses.replace(w, qkv=tuple(of)).run(descales=given, scale=scale)

    v = run(torch.eye(16)[None, None].to(getattr(torch, of_q)), eye.to(codes.dtype), finite.to(codes.dtype), 2.0**15)
    assert np.array_equal(v.o, finite.to(getattr(torch, of_q)).float().numpy())
    # Scores of row i are column i of k, of which the highest is subtracted: lse shows each sum.
    k = run(torch.eye(16)[None, None].to(getattr(torch, of_q)), finite.to(codes.dtype), eye.to(codes.dtype), 1.0)
    right = torch.logsumexp(finite.mT, -1).float().numpy()
    assert np.allclose(k.lse, right, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.sampled("v-sm_80", "v-sm_89")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_nan_stays_one(name, arch):
    """In rows that see it.  Of k in no other; of v in its column alone, where a masked 0 times it is NaN too."""
    w = work("causal", of_keys=E44, arch=arch, q_len=40, kv_len=40)
    codes = {n: x.codes.clone() for n, x in zip("qkv", w.qkv, strict=True)}
    bits = codes[name].view(torch.uint8)
    bits[0, 0, 20, 3] = 0xFF  # the other NaN of e4m3 is 0x7f
    bits[0, 0, 20, 4] = 0x7F
    of = tuple(x._replace(codes=codes[n]) for n, x in zip("qkv", w.qkv, strict=True))
    found = dataclasses.replace(w, qkv=of).run().o
    columns = slice(None) if name == "k" else slice(3, 5)
    assert np.isnan(found[:, :, 20:, columns]).all()
    assert np.isfinite(found[:, :, :20] if name == "k" else np.delete(found, [3, 4], -1)).all()


@pytest.mark.sampled("bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize("of_q", [BF16, pytest.param(E4M3, marks=pytest.mark.slow)])
def test_descales_of_blocks(of_q):
    """Each tile of keys, and each block of queries, has its own; a block of zeros may have the least of all."""
    w = work("full", of_q, arch="sm_80", heads=2, kv_heads=1, q_len=140, kv_len=300, batch=2)
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 2, 2), "k": (2, 1, 3), "v": (2, 1, 3)}
    given = {name: rng.uniform(0.2, 2, shapes[name]).astype(np.float32) for name in w.plan.float8.scaled}
    given["v"][0, 0, 1] = 1e-40
    wide = []
    for name, x in zip("qkv", w.qkv, strict=True):
        codes = x.codes.double()
        if name in given:
            codes = (
                codes * torch.from_numpy(given[name]).double().repeat_interleave(128, 2)[:, :, : codes.shape[2], None]
            )
        wide.append(codes)
    q, k, v = wide[0], *(x.repeat_interleave(2, 1) for x in wide[1:])
    scale = 1e-5 if of_q == E4M3 else 1e-3  # codes reach 448
    right = torch.softmax(scale * q @ k.mT, -1) @ v
    found = torch.from_numpy(w.run(descales=given, scale=scale).o).double()
    assert float((found - right).norm() / right.norm()) < 3e-3


@pytest.mark.sampled("24-2-bfloat16-{'q_len': 5}")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "splits", "of_q", "shape"),
    [
        (None, 1, BF16, {}),
        (24, 2, BF16, {"q_len": 5}),
        pytest.param(None, 1, E4M3, {"q_len": 130, "arch": "sm_80"}, marks=pytest.mark.slow),
        pytest.param(64, 1, F16, {"head_dim": 128, "arch": "sm_89"}, marks=AT_NIGHT),
    ],
    ids=str,
)
def test_sequences_of_their_own_lengths(page_size, splits, of_q, shape):
    """Each has the bits that it has alone; what lies behind it, or in other pages, is NaN."""
    shape = {"heads": 2, "kv_heads": 1, "q_len": 70, "kv_len": 200, "head_dim": 64, "batch": 3, **shape}
    options = SPLIT if splits > 1 else {}
    layout = Padded() if page_size is None else Paged()
    w = work("causal", of_q, options={**options, "layout": layout}, tile=(32, 64), **shape)
    alone = work("causal_bottom_right", of_q, options=options, tile=(32, 64), **shape)
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


@pytest.mark.sampled("alibi-Paged(queries=Padded())-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "layout", "splits"),
    [("alibi", None, 1), ("causal", Padded(), 2), ("alibi", Paged(), 2)],
    ids=str,
)
def test_what_a_loop_finds_again_is_the_same(spec, layout, splits):
    """Bit for bit: where descales of keys lie, and where O of a part goes."""
    shape = {"heads": 4, "kv_heads": 2, "q_len": 20, "kv_len": 150, "head_dim": 16, "batch": 2, "tile": (32, 64)}
    options = {**(SPLIT if splits > 1 else {}), **({} if layout is None else {"layout": layout})}
    w = work(spec, options=options, **shape)
    given = {"q_offset": AT_END, "kv_splits": splits} if layout else {}
    if layout is not None:
        given["sequences"] = {"q_lengths": np.array((20, 3), np.int32), "kv_lengths": np.array((150, 90), np.int32)}
    if layout == Paged():
        codes = (w.qkv[0].codes, *(in_pages(x.codes, 24) for x in w.qkv[1:]))
        table = given["sequences"]["page_table"] = pages_of(2, 150, 24)
        case = dataclasses.replace(w.case, sizes={**w.case.sizes, "kv_len": table.shape[1] * 24})
        qkv = tuple(x._replace(codes=y) for x, y in zip(w.qkv, codes, strict=True))
        w = dataclasses.replace(w, qkv=qkv, case=case)

    def found(again):
        operands = dataclasses.replace(w.plan.operands, found_again=again)
        one = dataclasses.replace(w, plan=dataclasses.replace(w.plan, operands=operands))
        assert ("renew_one(of_keys);" in emit(one.plan)) == again
        return one.run(**given)

    kept, again = found(False), found(True)
    assert np.array_equal(kept.o, again.o) and np.array_equal(kept.lse, again.lse)


def test_where_registers_are_dear():
    """Beside wide rows under a mask, and where a score tells heads apart."""
    options = {"k_dtype": E4M3, "v_dtype": E4M3}
    for spec, head_dim, dear in (
        *(("causal", 128, False), ("causal", 256, False), ("sink_window", 128, False), ("sink_window", 256, True)),
        *(("alibi", 64, True), ("alibi", 256, True), ("full", 256, False), ("padding", 256, True)),
    ):
        menu = planner.menu(load_spec(spec).bind(), "sm_90a", BF16, head_dim, **options)
        assert menu.plans[0].operands.found_again == dear, (spec, head_dim)


# ---------------------------------------------------------------- mutations
#: Of the emitted text, each with the kernel that shows it.
WRONG = {
    "columns of q in another order": (replace("a[r + 2] = four.y;", "a[r + 2] = four.x;"), {}),
    "columns of v not apart": (replace("columns_apart(words[2 * h])", "words[2 * h]"), {}),
    "keys of another product": (replace("b0.x, b1.x", "b1.x, b0.x"), {}),
    "columns of o in another order": (
        replace("make_uint2(cvt_bf16x2(even[2 * r], odd[2 * r])", "make_uint2(cvt_bf16x2(odd[2 * r], even[2 * r])"),
        {},
    ),
    "no descale of v": (replace("fmaf(descale, partial", "fmaf(1.f, partial"), {}),
    "no descale of k": (replace("block_scale * k_of_tile", "block_scale * 1.f"), {}),
    "no descale of q": (replace("p.scale * q_descale(rows.h, rows, p)", "p.scale"), {"of_q": E4M3}),
    "bits without what they stand for": (replace("0x5c005c00", "0x58005800"), {"arch": "sm_80"}),
    "a NaN that is a number": (replace("0x78807880", "0x78007800"), {"arch": "sm_80"}),
    "parts of o in another order": (
        replace("odd[2 * r], even[2 * r + 1]", "even[2 * r + 1], odd[2 * r]"),
        {"options": SPLIT, "q_len": 5},
    ),
}


@pytest.mark.sampled(
    "columns of q in another order", "columns of v not apart", "keys of another product", "no descale of q"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name):
    edit, shape = WRONG[name]
    w = (
        work("full", **{"q_len": 40, "kv_len": 70, **SMALL, **shape})
        if "options" not in shape
        else work("full", **shape)
    )
    options = {"kv_splits": 2} if "options" in shape else {}
    if "NaN" in name:
        w.qkv[2].codes.view(torch.uint8)[0, 0, 3, 3] = 0x7F
        assert np.isnan(w.run().o[..., 3]).all() and not np.isnan(w.run(edit).o[..., 3]).any()
        return
    assert w.wrong(w.run(edit, **options))


# ---------------------------------------------------------------- plans
@pytest.mark.sampled("sm_90a-float8_e4m3fn-64-split pages", "sm_80-bfloat16-64-whole")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SPLIT, {**SPLIT, "layout": Paged()}], ids=["whole", "split", "split pages"])
@pytest.mark.parametrize(
    ("arch", "of_q", "head_dim"), list(itertools.product(("sm_90a", "sm_80"), (BF16, E4M3), (64, 128, 192, 256)))
)
def test_no_kernel_spills(arch, of_q, head_dim, options):
    fixed = {"pipeline": "ampere", "k_dtype": E4M3, "v_dtype": E4M3}
    menu = planner.menu_of(KernelRequest.of(load_spec("causal").bind(), arch, of_q, head_dim, **fixed, **options))
    for plan in menu.plans:
        found = nvrtc.compile(emit(plan), plan.arch)
        assert found.resources.spills == 0, (plan.tile, plan.stages, plan.warps, options, found.resources)


def test_who_widens():
    """Hopper's own pipeline keeps 8-bit queries."""
    full = load_spec("full").bind()

    def plan(arch, of_q, **options):
        return planner.menu_of(KernelRequest.of(full, arch, of_q, 128, k_dtype=E4M3, v_dtype=E4M3, **options)).plans[0]

    assert plan("sm_90a", E4M3).pipeline == "hopper"
    wide = plan("sm_90a", BF16)
    assert wide.pipeline == "ampere" and "products in float16, a row of q times a power of two" in wide.said_of_8_bits
    old = plan("sm_80", E4M3)
    assert "q, k and v are widened in the kernel by their bits: products in float16" in old.said_of_8_bits
    assert old.float8.accuracy == "exact"
    with pytest.raises(FlashgenError, match="nearest: pipeline 'ampere', or tensors dequantised to bfloat16"):
        plan("sm_90a", BF16, pipeline="hopper")


@pytest.mark.parametrize(
    ("of_q", "options", "said"),
    [
        (BF16, {"k_dtype": E4M3}, "keys and values have 8 bits together"),
        (BF16, {"k_dtype": E4M3, "v_dtype": E4M3, "out_dtype": F16}, "o has the dtype of queries of 16 bits"),
        (BF16, {"k_dtype": E4M3, "v_dtype": E4M3, "accuracy": "fast"}, "nearest: accuracy='exact'"),
        (BF16, {"k_dtype": F16}, "they share a dtype"),
        ("float32", {"k_dtype": E4M3, "v_dtype": E4M3}, "nearest: q in bfloat16"),
        (BF16, {"k_dtype": E4M3, "v_dtype": E4M3, "backward": True}, "no backward in 8 bits"),
        (BF16, {"k_dtype": E4M3, "v_dtype": E4M3, "tile": (96, 48)}, "tile_kv 32, 64 or 128"),
        (BF16, {"k_dtype": E4M3, "v_dtype": E4M3, "dropout": True}, "nearest: dropout=False"),
    ],
    ids=str,
)
def test_plans_that_are_refused(of_q, options, said):
    with pytest.raises(FlashgenError) as refused:
        planner.menu_of(KernelRequest.of(load_spec("full").bind(), "sm_80", of_q, 64, **options))
    assert said in str(refused.value)


def test_the_command_in_a_banner_gives_the_kernel_again():
    from cli import flashgen

    w = work("causal", BF16, E45, "sm_80", options=SPLIT)
    text = emit(w.plan)
    lines = text[text.index("// made by  ") :].split("\n\n")[0].splitlines()
    command = " ".join(line.removeprefix("//").replace("made by", "").strip() for line in lines)
    assert "--k-dtype float8_e4m3fn --v-dtype float8_e5m2" in command
    assert flashgen(*command.removeprefix("flashgen ").split()).out == text


# ---------------------------------------------------------------- calls
def drawn(of_q=torch.bfloat16, q_len=5, kv_len=200, batch=2):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 4, q_len, 64, generator=g).to(of_q)
    k, v = (quantised(torch.randn(batch, 2, kv_len, 64, generator=g), torch.float8_e4m3fn) for _ in range(2))
    return q, k, v


def off(found, right):
    return float((found.double() - right.double()).norm() / right.double().norm())


CAUSAL = load_spec("causal_bottom_right")


@pytest.mark.parametrize("of_q", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"kv_splits": 2}, {"accuracy": "exact"}])
def test_the_walk_on_a_cpu(of_q, options):
    q, k, v = drawn(of_q)
    right, right_lse = fg.attention(q.double(), k.values.double(), v.values.double(), CAUSAL, return_lse=True)
    o, lse = fg.attention(
        q, k.codes, v.codes, CAUSAL, k_descale=k.descale, v_descale=v.descale, return_lse=True, **options
    )
    assert o.dtype == of_q and off(o, right) < 3e-3
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("in_pages", [False, True])
def test_sequences_behind_each_other_on_a_cpu(in_pages):
    """Those of lengths 100, 0 and 70 have the bits that each has alone."""
    q, k, v = drawn(q_len=170, kv_len=170, batch=1)
    starts = torch.tensor([0, 100, 100, 170], dtype=torch.int32)
    rows, given = (
        [x[0].transpose(0, 1) for x in (q, k.codes, v.codes)],
        {"k_descale": k.descale, "v_descale": v.descale},
    )
    if in_pages:  # of 10 keys, those of the third sequence first
        table = torch.tensor([[*range(7, 17)], [0] * 10, [*range(7), 0, 0, 0]], dtype=torch.int32)
        given |= {"page_table": table, "kv_lengths": starts.diff()}
        rows[1:] = [torch.cat([x[100:], x[:100]]).unflatten(0, (17, 10)) for x in rows[1:]]
    o = fg.attention_varlen(*rows, CAUSAL, starts, max_seqlen_q=100, **given)
    for part in (slice(0, 100), slice(100, 170)):
        alone = (x[:, :, part] for x in (q, k.codes, v.codes))
        right = fg.attention(*alone, CAUSAL, k_descale=k.descale, v_descale=v.descale)
        assert torch.equal(o[part], right[0].transpose(0, 1))


@pytest.mark.sampled("capability2-of_q2-1-16")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "of_q", "splits", "page_size"),
    [
        ((9, 0), torch.bfloat16, 3, 24),
        ((8, 0), torch.float8_e4m3fn, 1, None),
        pytest.param((8, 9), torch.float16, 1, 16, marks=pytest.mark.slow),
    ],
)
def test_each_pointer_of_a_call_reaches_its_tensor(capability, of_q, splits, page_size, monkeypatch):
    gpu = install(monkeypatch, capability)
    q, k, v = drawn(kv_len=192)
    x = quantised(q.float(), of_q)
    given = {"kv_lengths": torch.tensor([192, 140], dtype=torch.int32), "q_offset": "end", "kv_splits": splits}
    right = fg.attention(x.values, k.values, v.values, CAUSAL, **{**given, "kv_splits": None})
    codes = [k.codes, v.codes]
    if page_size is not None:
        given["page_table"] = torch.randperm(384 // page_size).to(torch.int32).view(2, -1)
        codes = [paged(of, page_size, given["page_table"]) for of in codes]
    given |= {"k_descale": k.descale, "v_descale": v.descale}
    given |= {"q_descale": x.descale} if of_q.itemsize == 1 else {}
    named = {name: gpu.put(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    o = fg.attention(*(gpu.put(t) for t in (x.codes, *codes)), CAUSAL, **named)
    ((plan, *_), *_) = gpu.launches
    assert plan.pipeline == "ampere" and plan.keys.split == (splits > 1)
    assert off(o, right) < 5e-3
    assert off(fg.attention(x.codes, *codes, CAUSAL, **given), right) < (0.04 if of_q.itemsize == 1 else 5e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"q_descale": torch.ones(1)}, "q_descale is of queries of 8 bits"),
        ({"k_descale": None}, "k_descale is missing"),
        ({"v_descale": torch.zeros(1)}, "descales are positive"),
        ({"accuracy": "fast"}, "P has 16 bits there"),
        ({"out_dtype": torch.float16}, "o has the dtype of queries of 16 bits"),
        ({"dropout": 0.1}, "dropout is not there in 8 bits"),
        ({"invariant": True}, "cuts no rows into leaves in 8 bits"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refused(options, said):
    q, k, v = drawn()
    with pytest.raises(FlashgenError) as refused:
        fg.attention(q, k.codes, v.codes, CAUSAL, **{"k_descale": k.descale, "v_descale": v.descale, **options})
    assert said in str(refused.value) and "nearest:" in str(refused.value)


@pytest.mark.slow
def test_dtypes_that_do_not_go_together():
    q, k, v = drawn()
    given = {"k_descale": k.descale, "v_descale": v.descale}
    for x in ((q.float(), k.codes, v.codes), (q, k.codes, v.values.bfloat16()), (q, k.values.bfloat16(), v.codes)):
        with pytest.raises(FlashgenError, match=r"keys and values have 8 bits together|share a dtype"):
            fg.attention(*x, CAUSAL, **given)
    with pytest.raises(FlashgenError, match="a gradient is wanted"):
        fg.attention(q.clone().requires_grad_(), k.codes, v.codes, CAUSAL, **given)
    assert torch.compile(lambda: fg.attention(q, k.codes, v.codes, CAUSAL, **given), backend="eager")().shape == q.shape


@pytest.mark.slow
def test_the_command_line():
    from cli import flashgen

    shape = ("--seqlen", "20", "--head-dim", "32", "--heads", "1")
    assert "as predicted" in flashgen("run", "causal", "--kv-dtype", E5M2, "--device", "cpu", *shape).out
    assert "no trap" in flashgen("simulate", "causal", "--kv-dtype", E4M3, "--arch", "sm_80", *shape).out
    told = flashgen("plan", "causal", "--kv-dtype", E4M3, "--arch", "sm_90a", "--seqlen", "4096").out
    assert "widened in the kernel" in " ".join(told.split())
