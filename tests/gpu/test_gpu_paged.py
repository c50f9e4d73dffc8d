"""Keys in the pages of a cache: the bits of those in a tensor, no wait, a graph that is replayed with other pages."""

import pytest
import torch
from caches import cached
from decoding import Model, differing
from gpu_checks import DEVICE
from test_gpu_sequences import SPECS, given, ints

import flashgen as fg
from flashgen.lang.load import load_spec

pytestmark = pytest.mark.gpu

#: Queries and keys of sequences.
ROWS, KEYS = (700, 1, 16, 333, 512), (1900, 1, 40, 1023, 2048)


def draw(head_dim, dtype, page_size, **options):
    cache = cached(KEYS, page_size, kv_heads=2, dim=head_dim, dtype=dtype, device=DEVICE, **options)
    torch.manual_seed(0)
    return cache, torch.randn(sum(ROWS), 8, head_dim, device=DEVICE, dtype=dtype)


def alone(b, q, cache, variant, **named):
    """The rows of a sequence by dense kernels, behind other queries before them."""
    before = torch.randn(1, q.shape[1], KEYS[b] - ROWS[b], q.shape[2], device=DEVICE, dtype=q.dtype)
    start = sum(ROWS[:b])
    whole = torch.cat([before, q[start : start + ROWS[b]].transpose(0, 1)[None]], dim=2)
    k, v = cache.keys[b][None], cache.values[b][None]
    o, lse = fg.attention(whole, k, v, variant, return_lse=True, **named)
    return o[0, :, before.shape[2] :], lse[0, :, before.shape[2] :]


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", sorted(SPECS))
def test_mixed_batches_have_the_bits_of_keys_in_a_tensor(spec, dtype, head_dim, page_size):
    variant, named = load_spec(spec), given(spec)
    cache, q = draw(head_dim, dtype, page_size)
    starts = ints([sum(ROWS[:b]) for b in range(len(ROWS) + 1)])
    of_cache = {"page_table": cache.table, "kv_lengths": cache.lengths, "q_offset": "end", **named}
    o, lse = fg.attention_varlen(
        q, cache.k, cache.v, variant, starts, max_seqlen_q=max(ROWS), return_lse=True, **of_cache
    )
    heads_outside = [x.transpose(1, 2).contiguous() for x in (cache.k, cache.v)]
    for b, rows in enumerate(ROWS):
        span = slice(sum(ROWS[:b]), sum(ROWS[:b]) + rows)
        want, want_lse = alone(b, q, cache, variant, **named)
        assert torch.equal(o[span].transpose(0, 1), want) and torch.equal(lse[:, span], want_lse)
        one = {**of_cache, "page_table": cache.table[b : b + 1], "kv_lengths": cache.lengths[b : b + 1]}
        one["kv_splits"] = 1  # of few queries keys would be split
        mine = q[span].transpose(0, 1)[None]
        assert torch.equal(fg.attention(mine, cache.k, cache.v, variant, **one)[0], want)
        assert torch.equal(fg.attention(mine, *heads_outside, variant, page_layout="hpd", **one)[0], want)


@pytest.mark.parametrize("spec", ["causal", "softcap"])
def test_split_keys_of_mixed_batches(spec):
    """Near what one block for all keys gives; the same bits in every run and in memory that the call is given."""
    variant, named = load_spec(spec), given(spec)
    cache, q = draw(128, torch.bfloat16, 16)
    starts = ints([sum(ROWS[:b]) for b in range(len(ROWS) + 1)])
    named |= {"page_table": cache.table, "kv_lengths": cache.lengths, "q_offset": "end", "max_seqlen_q": max(ROWS)}
    whole = fg.attention_varlen(q, cache.k, cache.v, variant, starts, kv_splits=1, **named)
    for splits in (2, 7):
        o = fg.attention_varlen(q, cache.k, cache.v, variant, starts, kv_splits=splits, **named)
        torch.testing.assert_close(o, whole, rtol=0.01, atol=0.01)
        out = torch.full_like(q, torch.nan)
        fg.attention_varlen(q, cache.k, cache.v, variant, starts, kv_splits=splits, out=out, **named)
        assert torch.equal(out, o)


@pytest.mark.parametrize("page_size", [1, 7])
def test_pages_of_few_rows(page_size):
    """Pipeline ampere loads them, row by row."""
    cache, q = draw(128, torch.bfloat16, page_size)
    q = torch.stack([q[:4].transpose(0, 1)] * len(KEYS))
    of_cache = {"page_table": cache.table, "kv_lengths": cache.lengths}
    o = fg.attention(q, cache.k, cache.v, load_spec("full"), **of_cache)
    for b in range(len(KEYS)):
        want = fg.attention(q[b : b + 1], cache.keys[b][None], cache.values[b][None], load_spec("full"))
        torch.testing.assert_close(o[b : b + 1], want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_decoding_of_many_heads_in_packed_tiles(q_len):
    cache, q = draw(128, torch.bfloat16, 16)
    q, variant = q[: len(KEYS) * q_len].view(len(KEYS), q_len, 8, 128).transpose(1, 2), load_spec("causal")
    of_cache = {"page_table": cache.table, "kv_lengths": cache.lengths}
    for splits in (1, 3, None):
        named = {"q_offset": "end", "kv_splits": splits}
        o = fg.attention(q, cache.k, cache.v, variant, **of_cache, **named)
        for b in (0, 2, 3, 4):  # the other has a single key
            want = fg.attention(q[b : b + 1], cache.keys[b][None], cache.values[b][None], variant, **named)
            if splits is None:  # by the problem, which is another
                torch.testing.assert_close(o[b : b + 1], want, rtol=0.01, atol=0.01)
            else:
                assert torch.equal(o[b : b + 1], want)


def test_offsets_of_pages_beyond_32_bits():
    page, head_dim = 16 * 2 * 128, 128
    pages = (1 << 31) // page + 8
    k, v = (torch.empty(pages, 16, 2, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    q = torch.randn(1, 8, 1, head_dim, dtype=torch.bfloat16, device=DEVICE)
    table = ints([[pages - 1, 3, pages - 5]])
    for x in (k, v):
        x[table[0].long()] = torch.randn(3, 16, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    rows = [x[table[0].long()].flatten(0, 1).transpose(0, 1)[None] for x in (k, v)]
    for pipeline in ("hopper", "ampere") if torch.cuda.get_device_capability()[0] == 9 else ("ampere",):
        variant = fg.variant(pipeline=pipeline)
        assert torch.equal(fg.attention(q, k, v, variant, page_table=table), fg.attention(q, *rows, variant))


@pytest.mark.parametrize("splits", [1, 4])
def test_no_call_waits_and_a_graph_takes_other_lengths_and_pages(splits):
    variant = load_spec("causal")
    caches = [draw(128, torch.bfloat16, 16, seed=seed)[0] for seed in (0, 1)]
    q = torch.randn(len(KEYS), 8, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v, table, lengths = (x.clone() for x in (caches[0].k, caches[0].v, caches[0].table, caches[0].lengths))

    def call():
        of_cache = {"page_table": table, "kv_lengths": lengths}
        return fg.attention(q, k, v, variant, q_offset="end", kv_splits=splits, **of_cache)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for cache, most in ((caches[0], 2048), (caches[1], 2048), (caches[1], 129)):
        k.copy_(cache.k), v.copy_(cache.v), table.copy_(cache.table)
        lengths.copy_(cache.lengths.clamp(max=most))
        graph.replay()
        assert torch.equal(o, call())
        for b, n in enumerate(lengths.tolist()):
            rows = (x[b][None, :, :n] for x in (cache.keys, cache.values))
            want = fg.attention(q[b : b + 1], *rows, variant, q_offset="end", kv_splits=splits)
            assert torch.equal(o[b : b + 1], want)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decoding_has_the_bits_of_prefill(head_dim):
    assert differing(Model.drawn(head_dim, torch.bfloat16, DEVICE), 200) == 0
