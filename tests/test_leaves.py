"""Keys that are cut into leaves: the same bits in every kind of call, by emitted kernels and by the walk."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from emulated_gpu import install
from paged import in_pages
from ptx_attention import replace
from split import differing, split_batch, split_work
from test_split_keys import check

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.errors import LaunchError, PlanError
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import division, planner
from flashgen.planning.arch import ARCHS
from flashgen.planning.layout import LAYOUTS, Varlen
from flashgen.planning.members import LEAF, FoldedLeaves, Leaves
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.planning.traffic import predict
from flashgen.runtime import tiles

PIPELINES = ("ampere", "hopper")

PADDED_AT_NIGHT = pytest.mark.nightly(sibling="test_a_padded_batch")
JOINED_AT_NIGHT = pytest.mark.nightly(sibling="test_sequences_behind_each_other")

#: Two tiles of keys each: few keys have several leaves.
SMALL = Leaves(keys=128)

#: Three leaves, the last of them not full.
SHAPE = {"q_len": 70, "kv_len": 350}


# ---------------------------------------------------------------- kernels
@pytest.mark.sampled("ampere-document", "hopper-sliding_window")
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_spec(pipeline, spec):
    """Right against float64, with the walk's numbers, and bytes as predicted and as counted."""
    check(split_work(spec, pipeline, SMALL, **SHAPE), 3)


@pytest.mark.nightly(sibling="test_every_spec")
@pytest.mark.parametrize("dims", [(128, 128), (72, 40), (64, 200)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_head_dims_and_dtypes(pipeline, dtype, dims):
    tile = {"hopper": (128, 64), "ampere": (32, 32)}[pipeline]
    shape = {"dtype": dtype, "head_dim": dims[0], "v_head_dim": dims[1], "tile": tile, "q_len": 5, "kv_len": 200}
    check(split_work("full", pipeline, SMALL, **shape), 2)


@pytest.mark.sampled("hopper-5")
@pytest.mark.slow
@pytest.mark.parametrize("leaves", [5, 40])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_leaves_without_a_key(pipeline, leaves):
    """Rows that see nothing, and parts that nothing is written to: the workspace holds NaN."""
    w = split_work("causal_bottom_right", pipeline, SMALL, q_len=70, kv_len=10)
    result = w.run(kv_splits=leaves)
    assert w.wrong(result) == ()
    assert not result.o[:, :, :60].any() and (result.lse[:, :, :60] == -np.inf).all()


# ---------------------------------------------------------------- bits
@pytest.mark.sampled(leaves=(33,))
@pytest.mark.slow
@pytest.mark.parametrize("leaves", [4, 33, 70])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_leaves_behind_the_last_key_change_nothing(pipeline, leaves):
    """A call counts the leaves of the longest sequence that it may have: more than 32 are combined in groups."""
    w = split_work("causal_bottom_right", pipeline, SMALL, q_len=5, kv_len=350)
    assert differing(w.run(kv_splits=leaves), w.run(kv_splits=3)) == 0


@pytest.mark.sampled("hopper-None")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "tile"), [("ampere", (32, 64)), ("ampere", (128, 64)), ("hopper", (192, 64)), ("hopper", None)]
)
def test_tiles_of_queries_and_packed_heads(pipeline, tile):
    shape = {"heads": 2, "kv_heads": 1, "q_len": 37, "kv_len": 300}
    small = split_work("causal_bottom_right", pipeline, SMALL, **shape).run(kv_splits=3)
    other = split_work("causal_bottom_right", pipeline, SMALL, **shape, tile=tile, packed=tile is None)
    assert differing(other.run(kv_splits=3), small) == 0


@pytest.mark.sampled("hopper-100-229")
@pytest.mark.slow
@pytest.mark.parametrize(("start", "end"), [(0, 100), (100, 229), (229, 300)])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_chunk_of_a_prompt_has_its_rows(pipeline, start, end):
    """Each chunk has the keys up to its own end alone, and so other numbers of leaves."""
    whole = split_work("causal", pipeline, SMALL, heads=1, q_len=300, kv_len=300)
    found, (q, k, v) = whole.run(kv_splits=3), whole.qkv
    shape = {"q_lengths": (end - start,), "kv_lengths": (end,), "q_offset": (start,), "heads": 1}
    chunk = split_batch("causal", pipeline, SMALL, q_len=end - start, kv_len=end, **shape)
    own = tuple(x.float().numpy() for x in (q[:, :, start:end], k[:, :, :end], v[:, :, :end]))
    part = dataclasses.replace(chunk, qkv=own).run(kv_splits=SMALL.number(end))
    rows = found._replace(o=found.o[:, :, start:end], lse=found.lse[:, :, start:end])
    assert differing(part, rows) == 0


@pytest.mark.sampled("sliding_window-hopper-shape1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "pipeline", "shape"),
    [
        ("causal", "ampere", {"q_lengths": (5, 40, 3), "kv_lengths": (130, 350, 300)}),
        ("sliding_window", "hopper", {"q_lengths": (5, 40), "kv_lengths": (40, 270)}),
        ("full", "hopper", {"q_lengths": (0, 5), "kv_lengths": (40, 350)}),
        pytest.param("full", "ampere", {"q_lengths": (0, 5), "kv_lengths": (40, 350)}, marks=PADDED_AT_NIGHT),
        pytest.param(
            *("causal", "hopper"),
            {"q_lengths": (5, 2, 40), "kv_lengths": (130, 350, 64), "heads": 8, "packed": True},
            marks=PADDED_AT_NIGHT,
        ),
    ],
)
def test_a_padded_batch(spec, pipeline, shape):
    """Bit by bit each sequence as its whole prompt gives it alone; what lies beyond is NaN."""
    w = split_batch(spec, pipeline, SMALL, **{"q_offset": "end", "q_len": 40, "kv_len": 350, **shape})
    assert w.wrong(w.run(kv_splits=3)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "pipeline", "shape"),
    [
        ("causal", "ampere", {}),
        pytest.param("causal", "hopper", {"heads": 8, "packed": True}, marks=JOINED_AT_NIGHT),
        pytest.param("full", "hopper", {}, marks=JOINED_AT_NIGHT),
        pytest.param("gpt_oss", "ampere", {}, marks=JOINED_AT_NIGHT),
    ],
)
def test_sequences_behind_each_other(spec, pipeline, shape):
    """The keys of one sequence are NaN, which no other row has."""
    shape = {"q_lengths": (5, 2, 0, 40), "kv_lengths": (130, 260, 40, 140), "poisoned": 2, **shape}
    w = split_batch(spec, pipeline, SMALL, q_offset="end", q_len=40, kv_len=260, layout=Varlen(), **shape)
    assert w.wrong(w.run(kv_splits=3)) == []


@pytest.mark.sampled("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pages(pipeline):
    w = split_batch("causal", pipeline, SMALL, q_lengths=(5, 40), kv_lengths=(130, 270), q_len=40, kv_len=270)
    paged = in_pages(w, 16)
    result, dense = paged.run(kv_splits=SMALL.number(paged.problem.kv_len)), w.run(kv_splits=3)
    assert differing(result, dense) == 0


# ---------------------------------------------------------------- mutations
COMBINE = {
    "a lost leaf": replace("32 - __clz(seen)", "31 - __clz(seen)"),
    "leaves that were not written": lambda text: replace("weights.part == 0.f ? kept :", "")(
        replace("seen >> start, p)", "~0u, p)")(text)
    ),
    "a wrong maximum": replace("fmaxf(row.row_max, highest_before(sees ? leaf.x : MINUS_INFINITY))", "row.row_max"),
    "another order": replace("parts + leaves - 1 - lane]", "parts + lane]"),
}
VISITS = {
    ("ampere", "a leaf that ends late"): replace("(rows.part + 1) * LEAF_TILES", "(rows.part + 1) * LEAF_TILES + 1"),
    ("ampere", "a leaf that begins early"): replace("lane <= tile - first", "lane <= tile"),
    ("hopper", "a leaf that ends late"): replace("(work.part + 1) * LEAF_TILES", "(work.part + 1) * LEAF_TILES + 1"),
    ("hopper", "a leaf that begins late"): replace(
        "rows, p)) >= work.part * LEAF_TILES", "rows, p)) > work.part * LEAF_TILES"
    ),
}


@pytest.mark.sampled("leaves that were not written")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINE)
def test_a_wrong_combination_is_noticed(name):
    """The last rows see keys of the last leaf alone."""
    assert noticed(split_work("chunked", "ampere", SMALL, heads=1, q_len=300, kv_len=300), COMBINE[name])


@pytest.mark.sampled("hopper-a leaf that ends late")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), list(VISITS))
def test_other_boundaries_are_noticed(pipeline, name):
    assert noticed(split_work("document", pipeline, SMALL, heads=1, q_len=300, kv_len=300), VISITS[pipeline, name])


def noticed(w, edit):
    """Whether a kernel with this change does wrong."""
    try:
        result = w.run(edit, kv_splits=3)
    except Trap:
        return True
    return bool(w.wrong(result))


@pytest.mark.slow
def test_a_wrong_walk_is_noticed(monkeypatch):
    w = split_work("causal_bottom_right", "ampere", SMALL, **SHAPE)
    right = tiles._Walk._of_blocks
    monkeypatch.setattr(tiles._Walk, "_of_blocks", lambda *given: right(*given)[:-1])
    with pytest.raises(AssertionError):
        check(w, 3)


# ---------------------------------------------------------------- the choice
@pytest.mark.sampled("sm_80-256", "sm_90a-128")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_menu_adds_up_in_one_order(arch, head_dim):
    """The kernels of every layout, and those of few and of many queries."""
    for spec in ("full", "causal", "relative_bias", "softcap", "document"):
        variant = load_spec(spec).bind()
        menus = [
            planner.menu_of(KernelRequest.of(variant, arch, "bfloat16", head_dim, layout=layout, keys=Leaves()))
            for layout in LAYOUTS.values()
        ]
        forms = [plan for menu in menus for plan in menu.forms]
        assert len({(plan.pipeline, plan.order_of_sums) for plan in forms}) == 1
        assert {plan.keys.keys for plan in forms} == {LEAF}


def test_a_tile_that_leaves_cut_is_refused():
    with pytest.raises(PlanError, match="its keys divide no leaf of 1024"):
        fg.plan("full", arch="sm_90a", head_dim=64, tile=(128, 96), invariant=True)


def test_plans():
    whole = fg.plan("full", arch="sm_90a", seqlen=8192, head_dim=128, invariant=True)
    token = fg.plan("full", arch="sm_90a", seqlen=1, kv_seqlen=8192, heads=32, kv_heads=8, head_dim=128, invariant=True)
    assert whole.keys == FoldedLeaves() and token.keys == Leaves() and token.packed
    assert whole.order_of_sums == token.order_of_sums
    assert fg.supports("full", arch="sm_90a", invariant=True) == ()
    assert [r.option for r in fg.supports("full", arch="sm_90a", invariant=True, backward=True)] == ["invariant"]
    with pytest.raises(PlanError, match="kv_splits=4 beside invariant=True"):
        fg.plan("full", arch="sm_90a", kv_splits=4, invariant=True)
    with pytest.raises(PlanError, match=r"cuts no rows into leaves in 8 bits(.|\n)*invariant=False"):
        fg.plan("full", arch="sm_90a", dtype="float8_e4m3fn", invariant=True)


def divided(layout="dense", **sizes):
    problem = Problem(batch=1, kv_heads=8, head_dim=128, v_head_dim=128, **sizes)
    variant, lies = load_spec("full"), LAYOUTS[layout]

    def ask(keys):
        return planner.menu_of(KernelRequest.of(variant, "sm_90a", "bfloat16", 128, layout=lies, keys=keys))

    return problem, division.divide(ask, problem, ARCHS["sm_90a"].sms, params={}, layout=lies, invariant=True)


def test_numbers_of_leaves_and_their_memory():
    problem, found = divided(heads=32, q_len=1, kv_len=8000)
    assert found.splits == 8 and "leaves of 1024 keys" in found.why
    case = Case(sizes=problem.sizes(), params={}, tensors={})
    told = predict(found.plan, problem, case, splits=found.splits, why_splits=found.why)
    assert sum(part.amount for part in told.workspaces) == 32 * 8 * (4 * 128 + 8)
    padded = planner.menu(load_spec("full"), "sm_90a", "bfloat16", 128, layout=LAYOUTS["padded"], keys=Leaves()).plans[
        0
    ]
    with pytest.raises(PlanError, match="what leaves move is predicted for sequences of one length"):
        predict(padded, problem, case)
    with pytest.raises(PlanError, match=r"kernels count rows(.|\n)*nearest: fewer queries a call"):
        divided(layout="padded", heads=1 << 23, q_len=200, kv_len=1 << 20)


# ---------------------------------------------------------------- attention()
@pytest.fixture(scope="module")
def prompt():
    """A prompt of two leaves, and what it gives."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 1300, 32, generator=g) for h in (4, 2, 2))
    causal = load_spec("causal")
    return causal, (q, k, v), fg.attention(q, k, v, causal, return_lse=True, invariant=True)


@pytest.mark.slow
def test_attention(prompt):
    """Rows of a prompt, in chunks of it, one by one, alone, padded and in pages."""
    causal, (q, k, v), (o, lse) = prompt
    torch.testing.assert_close(o, fg.attention(q, k, v, causal), atol=2e-6, rtol=1e-5)
    for start, end in ((0, 512), (512, 1200), (1200, 1299), (1299, 1300)):
        given = q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal
        part, part_lse = fg.attention(*given, q_offset=start, return_lse=True, invariant=True)
        assert torch.equal(part, o[:, :, start:end]) and torch.equal(part_lse, lse[:, :, start:end])
    assert torch.equal(fg.attention(q[1:], k[1:], v[1:], causal, invariant=True), o[1:])
    lengths = torch.tensor([700, 1300], dtype=torch.int32)
    last = torch.stack([q[b, :, n - 1 : n] for b, n in enumerate(lengths.tolist())])
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[0, :, 700:], bad_v[0, :, 700:] = torch.nan, torch.inf
    found = fg.attention(last, bad_k, bad_v, causal, q_offset="end", kv_lengths=lengths, invariant=True)
    assert all(torch.equal(found[b, :, 0], o[b, :, n - 1]) for b, n in enumerate(lengths.tolist()))
    order = torch.randperm(2 * 82, generator=torch.Generator().manual_seed(1))
    caches = []
    for x in (k, v):
        cache = torch.full((2 * 82, 16, 2, 32), torch.nan)
        rows = torch.nn.functional.pad(x, (0, 0, 0, 82 * 16 - 1300)).transpose(1, 2).reshape(-1, 16, 2, 32)
        cache[order] = rows
        caches.append(cache)
    table = order.view(2, 82).to(torch.int32)
    found = fg.attention(last, *caches, causal, page_table=table, kv_lengths=lengths, q_offset="end", invariant=True)
    assert all(torch.equal(found[b, :, 0], o[b, :, n - 1]) for b, n in enumerate(lengths.tolist()))


def test_sequences_of_a_batch(prompt):
    causal, (q, k, v), (o, _) = prompt
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    queries = torch.cat([rows[0][600:700], rows[0][1299:]])
    keys, values = (torch.cat([x[:700], x]) for x in rows[1:])
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 100, 101], [0, 700, 2000])]
    bounds = {"max_seqlen_q": 100, "max_seqlen_k": 1500, "q_offset": "end"}
    found = fg.attention_varlen(queries, keys, values, causal, *starts, **bounds, invariant=True)
    assert torch.equal(found[:100].transpose(0, 1), o[0, :, 600:700])
    assert torch.equal(found[100:].transpose(0, 1), o[0, :, 1299:])


@pytest.mark.slow
def test_gradients_and_graphs():
    q, k, v = (torch.randn(1, 2, n, 32, dtype=torch.float64, requires_grad=True) for n in (4, 700, 700))
    full = load_spec("full")
    grads = [
        torch.autograd.grad(fg.attention(q, k, v, full, invariant=flag).sum(), (q, k, v)) for flag in (False, True)
    ]
    for whole, parts in zip(*grads, strict=True):
        torch.testing.assert_close(whole, parts)
    given = [x.detach().float() for x in (q, k, v)]

    def call(q, k, v):
        return fg.attention(q, k, v, full, invariant=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), call(*given))


def test_what_cannot_be_is_refused():
    x, full = torch.randn(1, 1, 4, 32), load_spec("full")
    with pytest.raises(PlanError, match=r"kv_splits=2 beside invariant=True(.|\n)*nearest: invariant=True alone"):
        fg.attention(x, x, x, full, kv_splits=2, invariant=True)
    with pytest.raises(LaunchError, match="invariant is a int and must be True or False"):
        fg.attention(x, x, x, full, invariant=1)


@pytest.mark.slow
def test_pages_that_tma_cannot_load_are_refused(monkeypatch):
    """Pipeline ampere, which serves other calls, has other bits."""
    gpu, full = install(monkeypatch, (9, 0)), load_spec("full")
    tensors = [torch.randn(1, 2, 1, 32), *torch.randn(2, 9, 1, 2, 32)]
    q, k, v = (gpu.put(x.bfloat16()) for x in tensors)
    table = gpu.put(torch.arange(9, dtype=torch.int32)[None])
    with pytest.raises(LaunchError, match="invariant=True has the bits of pipeline hopper"):
        fg.attention(q, k, v, full, page_table=table, invariant=True)


@pytest.mark.slow
def test_records_of_a_gpu(monkeypatch):
    """Calls on an emulated GPU: a chunk has the rows of its prompt."""
    gpu, causal = install(monkeypatch, (9, 0)), load_spec("causal")
    q, k, v = (torch.randn(1, h, 600, 32).bfloat16() for h in (2, 1, 1))

    def call(rows, keys, **given):
        tensors = [gpu.put(x.contiguous()) for x in (q[:, :, rows], k[:, :, keys], v[:, :, keys])]
        return fg.attention(*tensors, causal, invariant=True, **given).as_subclass(torch.Tensor)

    whole = call(slice(600), slice(600))
    assert torch.equal(call(slice(500, 520), slice(520), q_offset=500), whole[:, :, 500:520])
    assert torch.equal(call(slice(599, 600), slice(600), q_offset="end"), whole[:, :, 599:])


@pytest.mark.slow
def test_command_line():
    words = ["full", "--seqlen", "1", "--kv-seqlen", "3000", "--arch", "sm_90a", "--head-dim", "64", "--invariant"]
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "plan", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "3: leaves of 1024 keys, as asked: a part for each" in " ".join(
        done.stdout.split()
    ), done.stdout
