"""Leaves that a block folds on its way: bit by bit what the combining kernel makes of them, in every kind of call."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from paged import in_pages
from ptx_attention import replace
from split import differing, split_batch, split_work
from test_traffic_sequences import check

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import division, planner
from flashgen.planning.arch import ARCHS
from flashgen.planning.layout import LAYOUTS, Varlen
from flashgen.planning.members import NO_FOLD, FoldedLeaves, FoldInMemory, FoldInShared, Leaves, ScoreNearZero
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic import predict
from flashgen.runtime import nvrtc, sass, tiles
from flashgen.runtime.philox import Dropout

OWN_AT_NIGHT = pytest.mark.nightly(sibling="test_lengths_of_their_own")

#: Two tiles of keys each: few keys have several leaves.
FOLDED = FoldedLeaves(keys=128)
PARTS = FOLDED.in_parts

#: Three leaves, the last of them not full.
SHAPE = {"q_len": 70, "kv_len": 350}

PLACES = (
    *(FoldInShared(columns=64), FoldInShared(columns=48, held=8), FoldInShared(columns=0, held=32)),
    *(FoldInMemory(columns=0), FoldInMemory(columns=32)),
)


@pytest.fixture(params=PLACES, ids=str)
def place(request, monkeypatch):
    """Where O of the leaves so far lies."""
    plain = hopper.fold
    monkeypatch.setattr(hopper, "fold", lambda c, asked: request.param if asked.keys.folds else plain(c, asked))
    return request.param


def of_both(spec, keys=PARTS, **shape):
    """The work of folded leaves, and what kernels of parts and of folded leaves give."""
    parts, w = (split_work(spec, "hopper", one, **shape) for one in (keys, FOLDED))
    return w, parts.run(kv_splits=keys.number(w.problem.kv_len)), w.run()


# ---------------------------------------------------------------- bits
@pytest.mark.sampled("full")
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
def test_every_spec(spec):
    """The bits of parts, right against float64, the walk's numbers, and bytes as predicted and as counted."""
    w, parts, found = of_both(spec, **SHAPE)
    assert differing(found, parts) == 0
    assert not np.isnan(found.o).any() and w.wrong(found) == ()
    assert {*found.reports} - {"summarise"} == {"attention_forward"} and found.report.conflicts == []
    p, dims = w.problem, {"head_dim": 64, "v_head_dim": 64, "dtype": w.problem.dtype}
    counted = tiles.count(w.plan, w.facts, w.case, **dims)
    walked = tiles.walk(*(w.plan, w.facts, w.case, *(x.float().numpy() for x in w.qkv)), scale=w.scale, dtype=p.dtype)
    assert walked.traffic == counted and counted.parts == 0
    np.testing.assert_allclose(walked.lse, found.lse, atol=w.lse_error())
    predicted = predict(w.plan, p, w.case)
    assert (predicted.hbm.read_bytes, predicted.hbm.write_bytes) == (counted.read_bytes, counted.write_bytes)
    for name in ("q", "k", "v"):
        assert found.report.bytes(buffer=name) == getattr(counted, name), name
    for name in ("o", "lse"):
        stored = found.report.bytes("st", buffer=name) + found.report.bytes("bulk store", buffer=name)
        assert stored == getattr(counted, name), name


@fg.variant().score
def near(s, b, h, q, k):
    """Whose small arguments of tanh have a formula of their own, where registers are left for it."""
    return 20.0 * fg.tanh(s / 20.0) + 0.01 * (k - q)


@pytest.mark.slow
def test_a_score_of_two_forms():
    """What blocks hold of leaves leaves registers for both, as parts of leaves have them: their bits differ."""
    shape = {"head_dim": 96, "v_head_dim": 96, "tile": (128, 128), "q_len": 70, "kv_len": 200}
    parts, w = (split_work(near, "hopper", keys, **shape) for keys in (PARTS, FOLDED))
    assert isinstance(w.plan.specialized.score, ScoreNearZero) and w.plan.specialized.fold.held > 0
    assert differing(w.run(), parts.run(kv_splits=2)) == 0


@pytest.mark.sampled("FoldInMemory(columns=0)", "FoldInShared(columns=48, held=8)")
@pytest.mark.slow
def test_places(place):
    w, parts, found = of_both("causal_bottom_right", **SHAPE)
    assert w.plan.specialized.fold == place and differing(found, parts) == 0


@pytest.mark.sampled("other dims")
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"tile": (192, 64)},
        {"q_stages": 2, "q_len": 200},
        {"heads": 8, "kv_heads": 2, "packed": True, "batch": 2, "q_len": 37},
        {"dtype": "float16", "head_dim": 40, "v_head_dim": 72},
    ],
    ids=["three warpgroups", "o by TMA", "packed", "other dims"],
)
def test_forms_of_kernels(shape):
    w, parts, found = of_both("causal_bottom_right", **{**SHAPE, **shape})
    assert differing(found, parts) == 0 and w.wrong(found) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"tile": (192, 64)},
        {"tile": (192, 128), "keys": 256},
        {"tile": (192, 64), "dtype": "float16", "kv_len": 300},
        {"tile": (192, 64), "head_dim": 96, "v_head_dim": 96},  # no turns
    ],
    ids=["192x64", "192x128", "float16", "wide"],
)
@pytest.mark.sampled("192x64", "wide")
def test_first_tiles_as_seen(shape):
    """On the diagonal warpgroups leave out keys and tiles that they see none of: no bit changes."""
    shape = {"heads": 1, "q_len": 450, "kv_len": 450} | shape
    folded = FoldedLeaves(keys=shape.pop("keys", 128))
    parts, w = (split_work("causal", "hopper", keys, **shape) for keys in (folded.in_parts, folded))
    assert w.plan.takes_first_keys == (w.plan.head_dim <= 64) and not parts.plan.takes_first_keys
    found = w.run()
    assert differing(found, parts.run(kv_splits=folded.in_parts.number(w.problem.kv_len))) == 0
    assert w.wrong(found) == () and found.report.conflicts == []


@pytest.mark.slow
def test_rows_and_tiles_that_see_nothing():
    """Of the first 60 queries no key, and two whole tiles of queries; leaves behind the last key."""
    _, parts, found = of_both("causal_bottom_right", heads=1, q_len=300, kv_len=150)
    assert differing(found, parts) == 0
    assert not found.o[:, :, :150].any() and (found.lse[:, :, :150] == -np.inf).all()


@pytest.mark.slow
def test_a_sink_alone_is_what_parts_make_of_it():
    w = split_work("gpt_oss", "hopper", FOLDED, q_len=300, kv_len=40, head_dim=32)
    parts = split_work("gpt_oss", "hopper", PARTS, q_len=300, kv_len=40, head_dim=32)
    assert differing(w.run(), parts.run(kv_splits=1)) == 0


@pytest.mark.sampled("in parts-229-300")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [(PARTS, 0, 100), (FOLDED, 100, 229), (PARTS, 229, 300), (PARTS, 299, 300)],
    ids=["in parts-0-100", "folded-100-229", "in parts-229-300", "in parts-299-300"],
)
def test_chunks_of_a_prompt_by_any_kernel(keys, start, end):
    """A prompt whose blocks fold leaves has the rows of chunks of it, whose keys are in parts or are folded too."""
    whole = split_work("causal", "hopper", FOLDED, heads=1, q_len=300, kv_len=300)
    found, (q, k, v) = whole.run(), whole.qkv
    shape = {"q_lengths": (end - start,), "kv_lengths": (end,), "q_offset": (start,), "heads": 1}
    chunk = split_batch("causal", "hopper", keys, q_len=end - start, kv_len=end, **shape)
    own = tuple(x.float().numpy() for x in (q[:, :, start:end], k[:, :, :end], v[:, :, :end]))
    part = dataclasses.replace(chunk, qkv=own).run(kv_splits=PARTS.number(end))
    rows = found._replace(o=found.o[:, :, start:end], lse=found.lse[:, :, start:end])
    assert differing(part, rows) == 0


@pytest.mark.sampled("causal-varlen")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("causal", "varlen"),
        ("gpt_oss", "paged"),
        pytest.param("gpt_oss", "padded", marks=OWN_AT_NIGHT),
        pytest.param("full", "padded", marks=OWN_AT_NIGHT),
        pytest.param("full", "varlen", marks=OWN_AT_NIGHT),
        pytest.param("causal", "paged", marks=OWN_AT_NIGHT),
    ],
)
def test_lengths_of_their_own(spec, layout):
    """As parts give it, which `test_leaves.py` compares with each sequence's whole prompt."""
    shape = {"q_lengths": (5, 0, 40), "kv_lengths": (130, 40, 270), "q_offset": "end", "q_len": 40, "kv_len": 270}
    if layout == "varlen":
        shape |= {"layout": Varlen()}
    parts, w = (split_batch(spec, "hopper", keys, **shape) for keys in (PARTS, FOLDED))
    w = in_pages(w, 16) if layout == "paged" else w
    assert w.plan.keys == FOLDED and differing(w.run(), parts.run(kv_splits=3)) == 0


def test_traffic_of_lengths_of_their_own():
    """What blocks fold moves as much as what they add up at once: no part goes through memory."""
    shape = {"q_lengths": (5, 40), "kv_lengths": (130, 350), "q_offset": "end", "q_len": 40, "kv_len": 350}
    w = split_batch("causal", "hopper", FOLDED, **shape)
    assert check(w).workspaces == ()


@pytest.mark.slow
def test_dropout():
    shape = {"q_lengths": (40,), "kv_lengths": (270,), "q_len": 40, "kv_len": 270, "head_dim": 32}
    drop = Dropout(p=0.3, seed=5, offset=0)
    parts, w = (split_batch("causal", "hopper", keys, dropout=drop, **shape) for keys in (PARTS, FOLDED))
    assert differing(w.run(), parts.run(kv_splits=3)) == 0


# ---------------------------------------------------------------- mutations
@cache
def in_order():
    """The work of folded leaves, and what kernels of parts give."""
    parts, w = (split_work("causal_bottom_right", "hopper", one, q_len=130, kv_len=350) for one in (PARTS, FOLDED))
    return w, parts.run(kv_splits=3)


EDITS = {
    "no rescale": replace("__fmul_rn(weights.before, before)", "before"),
    "a leaf that weighs 1": replace("__fmaf_rn(weights.part, part, kept)", "__fmaf_rn(1.f, part, kept)"),
    "roundings of another order": replace(
        "__fmaf_rn(weights.part, part, kept)", "__fmaf_rn(weights.before, before, weights.part * part)"
    ),
    "the first leaf is read": replace("first ? float4{} : folded_o(i, thread)", "folded_o(i, thread)"),
    "a leaf that ends late": replace("step.tile / LEAF_TILES !=", "(step.tile + 1) / LEAF_TILES !="),
}


@pytest.mark.sampled("the first leaf is read")
@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_another_fold_is_noticed(name, monkeypatch):
    # Registers begin with 0 in the interpreter, shared memory with NaN.
    monkeypatch.setattr(hopper, "fold", lambda c, asked: PLACES[0] if asked.keys.folds else NO_FOLD)
    w, parts = in_order()
    try:
        found = w.run(EDITS[name])
    except Trap:
        return
    assert differing(found, parts) > 0


@pytest.mark.slow
def test_another_order_of_parts_is_noticed():
    """From the first leaf to the last."""
    parts, w = (split_work("full", "hopper", one, **SHAPE) for one in (PARTS, FOLDED))
    text = parts.source.replace("leaves - 1 - lane", "lane").replace("parts + last - start - i)", "parts + start + i)")
    assert text != parts.source
    assert differing(dataclasses.replace(parts, source=text).run(kv_splits=3), w.run()) > 0


# ---------------------------------------------------------------- plans
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_leaves_are_of_one_size(head_dim):
    """In every layout and form, whatever shared memory is left, and no kernel folds where it need not."""
    for variant in (*(load_spec(spec).bind() for spec in ("full", "causal", "softcap")), near.bind()):
        menus = [
            planner.menu_of(KernelRequest.of(variant, "sm_90a", "bfloat16", head_dim, layout=layout, keys=keys))
            for layout in LAYOUTS.values()
            for keys in (Leaves(), FoldedLeaves())
        ]
        forms = [plan for menu in menus for plan in menu.forms]
        assert len({(plan.pipeline, plan.order_of_sums) for plan in forms}) == 1
        where = {type(menu.plans[0].specialized.fold) for menu in menus[1::2]}
        assert where == {FoldInMemory if head_dim == 256 else FoldInShared}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_leaves_are_of_one_size_beside_dropout(head_dim):
    asked = [
        KernelRequest.of(load_spec(spec).bind(), "sm_90a", "bfloat16", head_dim, keys=keys, dropout=True)
        for spec in ("full", "causal")
        for keys in (Leaves(), FoldedLeaves())
    ]
    orders = [{plan.order_of_sums for plan in planner.menu_of(request).forms} for request in asked]
    assert len(orders[0] | orders[1]) == 1 and len(orders[2] | orders[3]) == 1


@pytest.mark.sampled("64-alibi-0")
@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    ("head_dim", "spec"),
    [*((d, spec) for d in (64, 128, 256) for spec in ("full", "causal")), (64, "alibi"), (64, "sink_window")],
)
def test_machine_code_keeps_to_its_plan(head_dim, spec, turn):
    """No spill, no serialised product."""
    request = KernelRequest.of(load_spec(spec).bind(), "sm_90a", "bfloat16", head_dim, keys=FoldedLeaves())
    for plan in planner.menu_of(request).forms[turn::2]:
        found = sass.check(plan, nvrtc.compile(emit(plan), plan.arch))
        assert [reason for reason in found if "where the plan estimates" not in reason] == []


def test_the_sum_of_shared_memory():
    """O of the leaves so far is a term of it, beside tiles, as long as it fits."""
    plan = fg.plan("full", arch="sm_90a", seqlen=8192, head_dim=128, invariant=True)
    assert {part.name: part.amount for part in plan.smem}["folded"] == 128 * 64 * 4
    assert {part.name: part.amount for part in plan.registers}["held"] == 32
    assert plan.specialized.fold == FoldInShared(columns=64, held=32) and plan.smem_bytes <= 227 << 10
    wide = fg.plan("full", arch="sm_90a", seqlen=8192, head_dim=256, invariant=True)
    assert wide.specialized.fold == FoldInMemory(columns=64)
    assert {part.name: part.amount for part in wide.smem}["folded"] == 128 * 64 * 4


def chosen(arch="sm_90a", head_dim=128, layout="dense", **sizes):
    problem = Problem(
        **{"batch": 1, "heads": 16, "kv_heads": 16, "head_dim": head_dim, "v_head_dim": head_dim, **sizes}
    )
    variant, lies = load_spec("causal").bind(), LAYOUTS[layout]

    def ask(keys):
        return planner.menu_of(KernelRequest.of(variant, arch, "bfloat16", head_dim, layout=lies, keys=keys))

    return problem, division.divide(ask, problem, ARCHS[arch].sms, params={}, layout=lies, invariant=True)


def test_who_folds():
    """A block, where blocks are enough for all SMs; else each leaf is a part, and so on the other pipeline."""
    problem, found = chosen(batch=2, q_len=8192, kv_len=8192)
    assert found.plan.keys == FoldedLeaves()
    assert "a block folds those that its queries see, in registers and shared" in found.why
    told = predict(found.plan, problem, Case(sizes=problem.sizes(), params={}, tensors={}), why_splits=found.why)
    assert told.workspaces == ()
    problem, found = chosen(head_dim=256, batch=2, q_len=8192, kv_len=8192)
    told = predict(found.plan, problem, Case(sizes=problem.sizes(), params={}, tensors={}))
    assert [(part.name, part.amount) for part in told.workspaces] == [("folded", 132 * 128 * 192 * 4)]
    _, found = chosen(layout="padded", batch=64, q_len=1, kv_len=65536)
    assert found.plan.keys == Leaves() and "one block might have the longest sequence" in found.why
    _, found = chosen(layout="padded", batch=64, q_len=1, kv_len=1024)  # one leaf
    assert found.plan.keys == FoldedLeaves() and found.splits == 1
    _, found = chosen(layout="varlen", q_len=512, kv_len=1 << 17)
    assert found.plan.keys == Leaves() and "as fast as a block that folds them" in found.why
    _, found = chosen(arch="sm_80", batch=2, q_len=8192, kv_len=8192)
    assert found.plan.keys == Leaves() and "pipeline ampere folds them through memory" in found.why


def test_commands():
    """The banner's command names the form."""
    request = KernelRequest.of(load_spec("full").bind(), "sm_90a", "bfloat16", 64, keys=FoldedLeaves())
    texts = [emit(planner.menu_of(one).plans[0]) for one in (request, request.visiting(Leaves()))]
    flags = [[word for word in text.split() if word in ("--invariant", "--split-keys")] for text in texts]
    assert sorted(flags[0]) == ["--invariant"] and sorted(flags[1]) == ["--invariant", "--split-keys"]


def test_tiles_that_leaves_cut_are_refused():
    with pytest.raises(PlanError, match="its keys divide no leaf of 1024"):
        planner.menu_of(
            KernelRequest.of(load_spec("full").bind(), "sm_90a", "bfloat16", 64, tile=(128, 96), keys=FoldedLeaves())
        )
