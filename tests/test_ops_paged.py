"""attention(page_table=) and mixed batches: on a CPU, on an emulated GPU, traced, refused."""

import logging

import numpy as np
import pytest
import torch
from caches import cached
from emulated_gpu import install
from test_ops_padded import causal, ints

import flashgen as fg
from flashgen.errors import LaunchError
from flashgen.lang.load import load_spec, shipped
from flashgen.ops.records import calls_of
from flashgen.planning.problem import Problem

#: Keys of sequences: one ends with a page of 16, one inside a page.
KEYS = (70, 16, 1)


def queries(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def dense(q, cache, b, variant=causal, **named):
    """What a sequence gives alone, its keys in a tensor."""
    k, v = (x[b][None] for x in (cache.keys, cache.values))
    return fg.attention(q, k, v, variant, q_offset="end", return_lse=True, **named)


def paged(q, cache, variant=causal, **named):
    given = {"page_table": cache.table, "kv_lengths": cache.lengths, "q_offset": "end", **named}
    return fg.attention(q, cache.k, cache.v, variant, return_lse=True, **given)


@pytest.mark.parametrize("page_size", [1, 7, 16, 48])
def test_a_cache_in_pages_has_the_bits_of_one_in_a_tensor(page_size):
    cache, q = cached(KEYS, page_size), queries(3, 2, 1, 32)
    o, lse = paged(q, cache)
    for b in range(3):
        want, want_lse = dense(q[b : b + 1], cache, b)
        assert torch.equal(o[b : b + 1], want) and torch.equal(lse[b : b + 1], want_lse)


def test_heads_outside_and_rows_of_queries():
    cache, q, rows = cached((70, 33), 16, kv_heads=2), queries(2, 4, 5, 32), ints(5, 2)
    o, lse = paged(q, cache, q_lengths=rows)
    heads = [x.transpose(1, 2).contiguous() for x in (cache.k, cache.v)]
    again = paged(q, cache._replace(k=heads[0], v=heads[1]), q_lengths=rows, page_layout="hpd")
    assert torch.equal(o, again[0]) and torch.equal(lse, again[1])
    for b, n in enumerate(rows.tolist()):
        assert torch.equal(o[b : b + 1, :, :n], dense(q[b : b + 1, :, :n], cache, b)[0])
        assert not o[b, :, n:].any()


def test_a_full_table_needs_no_lengths():
    cache, q = cached((32, 32), 16), queries(2, 2, 1, 32)
    full = cache._replace(table=cache.table[:, :2])
    o = fg.attention(q, full.k, full.v, causal, page_table=full.table, q_offset="end")
    assert torch.equal(o, paged(q, cache)[0])


def mixed(q, cache, starts, variant=causal, **named):
    given = {"page_table": cache.table, "kv_lengths": cache.lengths, "q_offset": "end", **named}
    return fg.attention_varlen(q, cache.k, cache.v, variant, starts, max_seqlen_q=9, return_lse=True, **given)


def test_one_call_reads_a_prompt_and_decodes():
    cache, starts = cached((70, 16, 9, 40), 16), ints(0, 1, 2, 11, 11)
    q = queries(11, 2, 32)
    o, lse = mixed(q, cache, starts)
    for b in range(3):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        want, want_lse = dense(q[rows].transpose(0, 1)[None], cache, b)
        assert torch.equal(o[rows].transpose(0, 1)[None], want) and torch.equal(lse[:, rows][None], want_lse)


@pytest.mark.sampled(spec=("alibi", "document", "padding", "tree"))
@pytest.mark.slow
@pytest.mark.parametrize("spec", sorted(shipped()))
def test_every_spec(spec):
    """In pages, and mixed, each sequence has the bits that it has in a padded batch."""
    variant, keys = load_spec(spec).bare, (40, 64, 7)
    width = 5 * 16
    problem = Problem(
        **{"batch": 3, "heads": 2, "kv_heads": 1, "q_len": width, "kv_len": width, "head_dim": 32, "v_head_dim": 32},
        dtype="float32",
    )
    rng = np.random.default_rng(0)
    captured = {t.name: torch.from_numpy(np.asarray(t.example(problem, rng))) for t in variant.tensors}
    cache, q, rows = cached(keys, 16), queries(3, 2, 6, 32), ints(6, 1, 4)
    assert cache.table.shape[1] == 5
    k, v = torch.zeros(2, 3, 1, width, 32)
    for b, n in enumerate(keys):
        k[b, :, :n], v[b, :, :n] = cache.keys[b], cache.values[b]
    want, want_lse = fg.attention(
        q, k, v, variant, q_lengths=rows, kv_lengths=cache.lengths, q_offset="end", return_lse=True, **captured
    )
    o, lse = paged(q, cache, variant, q_lengths=rows, **captured)
    assert torch.equal(o, want) and torch.equal(lse, want_lse)
    joined = torch.cat([q[b, :, :n].transpose(0, 1) for b, n in enumerate(rows.tolist())])
    o, lse = mixed(joined, cache, ints(0, 6, 7, 11), variant, **captured)
    for b, (first, n) in enumerate(((0, 6), (6, 1), (7, 4))):
        assert torch.equal(o[first : first + n].transpose(0, 1), want[b, :, :n])
        assert torch.equal(lse[:, first : first + n], want_lse[b, :, :n])


REFUSED = [
    ({"page_table": cached(KEYS, 16).table.long()}, "page_table is int64"),
    ({"page_table": [[0], [1], [2]]}, "page_table is a list"),
    ({"page_table": cached(KEYS, 16).table[:2]}, r"page_table is \[2, 6\].*\n  nearest: a row for each of 3 sequences"),
    ({"page_table": cached(KEYS, 16).table[0]}, r"page_table is \[6\]"),
    ({"page_table": cached(KEYS, 16).table.t().contiguous().t()}, "with strides"),
    ({"page_table": cached(KEYS, 16).table.to("meta")}, "page_table is on meta"),
    ({"page_table": cached(KEYS, 16).table + 90}, r"page_table\[0, 0\] is \d+: the cache has pages 0 to 9"),
    ({"kv_lengths": ints(70, 17, 1)}, r"page_table\[1, 1\] is -7: .*\n  nearest: kv_lengths\[1\] = 16"),
    ({"kv_lengths": ints(97, 16, 1)}, r"kv_lengths\[0\] is 97: lengths are 0 to the most keys that pages hold = 96"),
    ({"kv_lengths": torch.tensor(KEYS)}, "kv_lengths is int64"),
    ({"page_layout": "nhd"}, "page_layout is 'nhd': \"phd\" for caches"),
    ({"page_table": None, "page_layout": "phd", "kv_lengths": None}, "there is no page_table"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(given, message):
    with pytest.raises(LaunchError, match=message) as refused:
        paged(queries(3, 2, 1, 32), cached(KEYS, 16), **given)
    assert "nearest" in str(refused.value)


def test_caches_that_are_refused():
    cache, q = cached(KEYS, 16), queries(3, 2, 1, 32)
    wide = torch.zeros(3, 1 << 20, dtype=torch.int32)
    for changed, message in (
        ({"k": cache.k[0]}, "k has 3 dimensions"),
        ({"v": cache.v[:-1]}, "k has 10 pages and v 9"),
        ({"v": cache.v[:, :8]}, "k has page_size 16 and v 8"),
        ({"k": cache.k[:, :0], "v": cache.v[:, :0]}, "10 pages of 0 rows"),
        ({"k": cache.k[:0], "v": cache.v[:0]}, "0 pages of 16 rows"),
        ({"table": wide}, r"positions stay below 2\^24\n  nearest: page_table\[:, :1048575\]"),
    ):
        with pytest.raises(LaunchError, match=message):
            paged(q, cache._replace(**changed))
    starts = ints(0, 1, 2, 3)
    for given, message in (
        ({"cu_seqlens_k": ints(0, 70, 86, 87)}, "cu_seqlens_k says where keys lie behind each other"),
        ({"max_seqlen_k": 97}, "max_seqlen_k is 97: a row of page_table has room for 96"),
        ({"max_seqlen_k": 69}, r"kv_lengths\[0\] is 70"),
    ):
        with pytest.raises(LaunchError, match=message):
            mixed(q[:, :, 0], cache, starts, **given)
    with pytest.raises(LaunchError, match="keys and values in pages have none"):
        paged(q.requires_grad_(), cache)
    with torch.no_grad():
        paged(q, cache)


def test_a_variant_that_captures_a_table_of_its_own():
    """The names are the variant's where it declares them, as masks over a whole cache do."""
    table = fg.tensor("page_table", dims=("kv",), dtype="int32")
    own = fg.variant(lambda b, h, q, k: table[k] >= 0)
    q, k, v = queries(1, 2, 3, 32), queries(1, 1, 20, 32), queries(1, 1, 20, 32)
    seen = torch.arange(20, dtype=torch.int32) - 5
    o = fg.attention(q, k, v, own, page_table=seen)
    torch.testing.assert_close(o, fg.attention(q, k[:, :, 5:], v[:, :, 5:], fg.variant()))


@pytest.mark.slow
def test_compiled():
    cache, q = cached(KEYS, 16), queries(3, 2, 1, 32)

    def call(q, k, v, table, lengths):
        one = fg.attention(q, k, v, causal, page_table=table, kv_lengths=lengths, q_offset="end")
        starts = torch.arange(4, dtype=torch.int32)
        rows = q[:, :, 0]
        given = {"page_table": table, "kv_lengths": lengths, "q_offset": "end", "max_seqlen_q": 1}
        return one, fg.attention_varlen(rows, k, v, causal, starts, **given)

    given = q, cache.k, cache.v, cache.table, cache.lengths
    got, want = torch.compile(call, backend="aot_eager", fullgraph=True)(*given), call(*given)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(want[0][:, :, 0], want[1])


def test_opcheck():
    cache, q = cached((20, 5), 16), queries(2, 2, 1, 32)
    names = ["page_table", "kv_lengths"]
    tensors = [cache.table, cache.lengths]
    k, v = (x.transpose(1, 2) for x in (cache.k.nan_to_num(), cache.v.nan_to_num()))
    rest = (causal.token, names, tensors, ["q_offset"], [-1], [], None, None, False)
    torch.library.opcheck(torch.ops.flashgen.attention.default, (q, k, v, *rest))


@pytest.mark.sampled("sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_records_of_a_gpu(capability, monkeypatch):
    gpu = install(monkeypatch, capability)
    caches = [cached(keys, 16, dtype=torch.bfloat16, spare=spare) for keys, spare in ((KEYS, 3), ((70, 3, 17), 2))]
    q = queries(3, 2, 1, 32, dtype=torch.bfloat16)
    for cache in caches:
        given = {"page_table": gpu.put(cache.table), "kv_lengths": gpu.put(cache.lengths)}
        got = fg.attention(gpu.put(q), *map(gpu.put, (cache.k, cache.v)), causal, q_offset="end", **given)
        want = paged(q, cache)[0]
        torch.testing.assert_close(*(x.as_subclass(torch.Tensor) for x in (got, want)), rtol=0.03, atol=0.03)
    assert len(gpu.plans) == len(calls_of(causal).records) == 1
    k, v, at = gpu.put(cache.k), gpu.put(cache.v), gpu.put(q)
    wrong = gpu.put(torch.full_like(cache.table, 1 << 30))  # no address outside of the cache follows from it
    o = fg.attention(at, k, v, causal, page_table=wrong, kv_lengths=given["kv_lengths"], q_offset="end")
    assert not o.as_subclass(torch.Tensor).any()
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    with pytest.raises(LaunchError, match=r"page_table\[0, 0\] is 1073741824"):
        fg.attention(at, k, v, causal, page_table=wrong, kv_lengths=given["kv_lengths"], q_offset="end")


@pytest.mark.sampled("as usual first")
@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 8), (8, 0)], ids=["as usual first", "apart first"])
def test_heads_that_boxes_of_whole_rows_do_not_reach_go_to_pipeline_ampere(monkeypatch, order):
    """Two caches that differ in strides alone, one after another in one process: each gets its own pipeline."""
    gpu = install(monkeypatch, (9, 0))
    q = queries(2, 2, 1, 128, dtype=torch.bfloat16)
    variant = fg.variant(lambda b, h, q, k: k <= q + 0)
    for gap in order:
        cache = cached((40, 33), 16, kv_heads=2, dim=128, dtype=torch.bfloat16)
        k, v = (torch.nn.functional.pad(x, (0, gap))[..., :128] for x in (cache.k, cache.v))
        at, k, v, table, lengths = (gpu.put(x) for x in (q, k, v, cache.table, cache.lengths))
        assert k.stride(2) == 128 + gap
        encoded = len(gpu.named("cuTensorMapEncodeTiled"))
        got = fg.attention(at, k, v, variant, page_table=table, kv_lengths=lengths, q_offset="end")
        torch.testing.assert_close(
            *(x.as_subclass(torch.Tensor) for x in (got, paged(q, cache)[0])), rtol=0.03, atol=0.03
        )
        assert (len(gpu.named("cuTensorMapEncodeTiled")) == encoded) == bool(gap), "pipeline ampere has no maps"


@pytest.mark.slow
def test_pages_that_tma_cannot_load_go_to_pipeline_ampere(monkeypatch, caplog):
    gpu = install(monkeypatch, (9, 0))
    cache, q = cached((9, 3), 1, dtype=torch.bfloat16), queries(2, 2, 1, 32, dtype=torch.bfloat16)
    tensors = [gpu.put(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths)]

    def call(variant):
        q, k, v, table, lengths = tensors
        return fg.attention(q, k, v, variant, page_table=table, kv_lengths=lengths, q_offset="end")

    own = fg.variant(lambda b, h, q, k: k <= q + 0)
    with caplog.at_level(logging.WARNING, logger="flashgen"):
        got = call(own)
    want = paged(q, cache)[0]
    torch.testing.assert_close(*(x.as_subclass(torch.Tensor) for x in (got, want)), rtol=0.03, atol=0.03)
    assert "TMA cannot load pages: pages of 1 rows" in caplog.text and "nearest: pages of 16 rows" in caplog.text
    with pytest.raises(LaunchError, match="pinned to pipeline hopper, whose TMA cannot load pages") as refused:
        call(fg.variant(lambda b, h, q, k: k <= q, pipeline="hopper"))
    assert "nearest: pages of 16 rows, or pipeline ampere" in str(refused.value)
