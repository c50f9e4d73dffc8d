"""Keys in pages that are split among blocks: emitted kernels executed, the walk, predicted bytes, calls."""

import numpy as np
import pytest
import torch
from ptx_attention import replace
from split import split_pages

import flashgen as fg
from flashgen.interpreter.errors import Trap
from flashgen.lang.load import load_spec
from flashgen.planning.layout import Padded, Varlen
from flashgen.planning.traffic import predict
from flashgen.planning.traffic_sequences import OwnLengths

PIPELINES = ("ampere", "hopper")

#: One is shorter than a part, one has no query, one no key, one ends inside a page.
LENGTHS = {"q_lengths": (5, 2, 0, 3, 1), "kv_lengths": (130, 350, 40, 3, 0)}
SHAPE = {"q_len": 5, "kv_len": 350, **LENGTHS}

PACKED = {"heads": 8, "kv_heads": 2, "packed": True}


def in_float64(q, k, v, first, causal):
    """o and lse of [1, heads, rows, dim] over keys that heads share, by a softmax of whole rows."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        s = np.where(np.arange(k.shape[2]) <= first + np.arange(q.shape[2])[:, None], s, -np.inf)
    top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), -1e30)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(total == 0, 1, total), (np.log(total) + top)[..., 0]


def check(w, splits, edit=lambda text: text):
    """Right against float64 and 0 in rows that are no query; the walk and the planner count the same."""
    result = w.run(edit, kv_splits=splits)
    joined = w.plan.layout.joined
    for b, (own, pages) in enumerate(zip(w.sequences, w.tables, strict=True)):
        one = own.walked(0 if joined else b)._replace(k_start=0, pages=pages)
        q, k, v = (x.astype(np.float64) for x in (w.qkv[0][one.queries], *map(one.own_keys, w.qkv[1:])))
        o, lse = in_float64(q, k, v, own.q_offset, causal=w.variant.mask is not None)
        np.testing.assert_allclose(result.o[one.queries], o, atol=2**-6)
        np.testing.assert_allclose(result.lse[one.queries], lse, atol=1e-5)
        if not joined:
            assert not result.o[b, :, own.q_rows :].any() and (result.lse[b, :, own.q_rows :] == -np.inf).all()
    assert all(report.conflicts == [] for report in result.reports.values())
    counted_alike(w, splits, result)


def counted_alike(w, splits, result):
    """The walk's, the planner's and the kernels' bytes."""
    with np.errstate(all="ignore"):
        walked = w.walked(kv_splits=splits)
    np.testing.assert_allclose(walked.o, result.o, atol=2**-6)
    own = [OwnLengths(q_rows=x.q_rows, kv_len=x.kv_len, q_offset=x.q_offset) for x in w.sequences]
    page_size, counted = w.qkv[1].shape[2], walked.traffic
    told = predict(w.plan, w.problem, w.case, splits=splits, sequences=own, page_size=page_size)
    assert (told.hbm.read_bytes, told.hbm.write_bytes) == (counted.read_bytes, counted.write_bytes)
    assert (told.tiles.total, told.tiles.partial, told.tiles.full) == (counted.total, counted.partial, counted.full)
    assert (told.tiles.visited_elements, told.tiles.visible) == (counted.elements, counted.visible)
    combining = next(entry for entry in result.reports if "combine" in entry)
    visits, combines = (result.reports[entry] for entry in ("attention_forward", combining))
    for name in ("o", "lse"):
        assert combines.bytes("st", buffer=name) == getattr(counted, name), name
    for report, kind, moved in ((visits, "st", counted.parts), (combines, "ld", counted.parts_read)):
        assert sum(report.bytes(kind, buffer=name) for name in ("part_o", "part_rows")) == moved
    assert dict(told.kernels)[combining].write_bytes == counted.o + counted.lse
    sinks = 0 if w.variant.sink is None else counted.captured
    assert dict(told.kernels)[combining].read_bytes == counted.parts_read + sinks
    assert sum(part.amount for part in told.workspaces) >= counted.parts
    assert 0 < counted.table <= visits.bytes("ld", buffer="page_table")
    if w.plan.pipeline == "ampere":  # TMA copies whole boxes
        for name in ("q", "k", "v"):
            assert visits.bytes(buffer=name) == getattr(counted, name), name


# ---------------------------------------------------------------- kernels
@pytest.mark.sampled("ampere-varlen", "hopper-padded")
@pytest.mark.slow
@pytest.mark.parametrize("layout", [Padded(), Varlen()], ids=lambda layout: layout.name)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_lengths_of_their_own(pipeline, layout):
    """Positions count from each sequence's own end; rows and pages of no key hold NaN."""
    first = (125, 348, 0, 0, 0)
    check(split_pages("causal", pipeline, 16, q_offset=first, layout=layout, **SHAPE), 4)


@pytest.mark.nightly(sibling="test_lengths_of_their_own")
@pytest.mark.parametrize("splits", [1, 9, 40])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_numbers_of_blocks(pipeline, splits):
    check(split_pages("full", pipeline, 48, layout=Varlen(), **SHAPE), splits)


@pytest.mark.sampled(layout=(Padded(),))
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    (Padded(), Varlen()),
    ids=lambda layout: layout.name,
)
def test_packed_heads(layout):
    first = (125, 348, 0, 0, 0)
    check(split_pages("causal", "hopper", 16, q_offset=first, layout=layout, **SHAPE, **PACKED), 3)


@pytest.mark.sampled("hopper")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_sink_joins_once(pipeline):
    """What the learned sinks make of the sum, beside the walk."""
    w = split_pages("gpt_oss", pipeline, 16, q_offset="end", q_len=5, kv_len=350, kv_lengths=(40, 350))
    counted_alike(w, 3, w.run(kv_splits=3))


# ---------------------------------------------------------------- mutations
MUTATIONS = {
    ("ampere", "the table of the first sequence"): replace("p.page_table += at.b * p.table_row;", ""),
    ("ampere", "others skipped once too often"): replace("others > 0 && seen", "others >= 0 && seen"),
    ("hopper", "the table of the first sequence"): replace("p.page_table + work.b * p.table_row", "p.page_table"),
    ("hopper", "parts of rows that are no query"): replace(
        ">= work.q_len - work.q_offset) continue", ">= p.q_rows) continue"
    ),
    ("hopper", "each part from the first tile"): replace(" - work.part", ""),
}


@pytest.mark.sampled("ampere-others skipped once too often", "hopper-each part from the first tile")
@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), MUTATIONS)
def test_what_is_wrong_is_noticed(pipeline, name):
    w = split_pages("full", pipeline, 16, **SHAPE)
    with pytest.raises((Trap, AssertionError)):
        check(w, 4, MUTATIONS[pipeline, name])


# ---------------------------------------------------------------- attention()
def cached(lengths, page_size, seed=0):
    """q of two rows for each sequence, caches with NaN where no key is, the table, the lengths, and keys alone."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=rng).tolist()
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    caches = [torch.full((len(order), page_size, 2, 32), torch.nan) for _ in "kv"]
    alone = []
    for b, n in enumerate(lengths):
        table[b, : counts[b]] = torch.tensor(order[sum(counts[:b]) :][: counts[b]])
        rows = [torch.randn(n, 2, 32, generator=rng) for _ in "kv"]
        for cache, x in zip(caches, rows, strict=True):
            for i in range(n):
                cache[table[b, i // page_size], i % page_size] = x[i]
        alone.append([x.transpose(0, 1)[None] for x in rows])
    q = torch.randn(len(lengths), 4, 2, 32, generator=rng)
    return q, *caches, table, torch.tensor(lengths, dtype=torch.int32), alone


KEYS = (1300, 3, 40)


def expected(q, alone):
    found = [fg.attention(q[b : b + 1], *alone[b], causal, q_offset="end", kv_splits=1) for b in range(len(alone))]
    return torch.cat(found)


causal = load_spec("causal")


@pytest.mark.parametrize("splits", [None, 3, 30])
def test_attention(splits):
    """Without a number flashgen splits these keys too: few queries, many keys."""
    q, k, v, table, lengths, alone = cached(KEYS, 16)
    given = {"page_table": table, "kv_lengths": lengths, "q_offset": "end"}
    o = fg.attention(q, k, v, causal, **given, kv_splits=splits)
    torch.testing.assert_close(o, expected(q, alone), atol=2e-6, rtol=1e-5)
    assert not torch.equal(o, fg.attention(q, k, v, causal, **given, kv_splits=1))
    out = torch.full_like(q, torch.nan)
    assert fg.attention(q, k, v, causal, **given, kv_splits=splits, out=out) is out and torch.equal(out, o)


@pytest.mark.parametrize("splits", [None, 5])
def test_sequences_behind_each_other(splits):
    q, k, v, table, lengths, alone = cached(KEYS, 16)
    rows, starts = q.transpose(1, 2).reshape(-1, 4, 32), torch.arange(0, 7, 2, dtype=torch.int32)
    given = {"page_table": table, "kv_lengths": lengths, "max_seqlen_q": 2, "q_offset": "end", "kv_splits": splits}
    o = fg.attention_varlen(rows, k, v, causal, starts, **given)
    want = expected(q, alone).transpose(1, 2).reshape(-1, 4, 32)
    torch.testing.assert_close(o, want, atol=2e-6, rtol=1e-5)
    out = torch.full_like(rows, torch.nan)
    assert fg.attention_varlen(rows, k, v, causal, starts, **given, out=out) is out and torch.equal(out, o)


@pytest.mark.slow
def test_compiled():
    q, k, v, table, lengths, _ = cached(KEYS, 16)

    def call(q, k, v, out):
        given = {"page_table": table, "kv_lengths": lengths, "q_offset": "end", "kv_splits": 3}
        return fg.attention(q, k, v, causal, **given) + fg.attention(q, k, v, causal, **given, out=out)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, torch.empty_like(q)), call(q, k, v, torch.empty_like(q)))
