"""`flashgen bench serving` on a CPU: contests are right at small sizes, and what a tree refuses is recorded."""

import functools
import inspect

import pytest
import torch
from stub_timer import Stub

from flashgen.bench import joined, serving, suite
from flashgen.bench.joined import Documents
from flashgen.bench.suite import Ground, Row

GROUND = Ground(device="cpu")


def measure(make, *given, ground=GROUND, **bars):
    row = Row(part="part", name="row", make=functools.partial(make, *given), timer=Stub(), bars=bars)
    return suite.measure(row, ground, rounds=7)


def small(*lengths, **sizes):
    return serving.Cache(lengths=lengths, heads=4, kv_heads=2, head_dim=64, **sizes)


def paged(q, k_cache, v_cache, page_table, kv_lengths):
    """Attention to a cache in pages, by PyTorch, of queries at the end."""

    def call():
        rows = []
        for b, n in enumerate(kv_lengths.tolist()):
            pages = page_table[b, : -(-n // k_cache.shape[1])].long()
            k, v = (x[pages].flatten(0, 1)[:n].transpose(0, 1)[None] for x in (k_cache, v_cache))
            seen = torch.arange(n) <= torch.arange(n - q.shape[2], n)[:, None]
            rows.append(
                torch.nn.functional.scaled_dot_product_attention(q[b : b + 1], k, v, attn_mask=seen, enable_gqa=True)
            )
        return torch.cat(rows)

    return call


def spoilt(*given):
    call = paged(*given)
    return lambda: call() * 1.05


def test_decoding_is_checked_and_its_peers_too():
    def decode(q, k, v):
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    peer = {"decode": decode, "paged": paged}
    off = {"decode": lambda q, k, v: lambda: 1.05 * decode(q, k, v)(), "paged": spoilt}
    files = {"mine": peer, "off": off, "dense": {"decode": decode}}
    found = measure(serving.decode, small(96, 96), (16, 64), ground=Ground(device="cpu", files=files))
    peers = ["mine", "off", "dense", *(f"{name} pages of {size}" for size in (16, 64) for name in ("mine", "off"))]
    assert list(found.timings.rounds) == ["flashgen", "causal at the end", *peers]
    told = {reason.split(":")[0] for reason in found.reasons}
    assert told == {"off", "off pages of 16", "off pages of 64"}
    assert found.bytes == 2 * 2 * 96 * 2 * 64 * 2  # k and v, batch, keys, heads, head_dim, bytes


@pytest.mark.parametrize(
    "make, of, other",
    [(serving.pages, small(96, 96, q_len=4), "dense"), (serving.mixed, small(30, 100, 17), "equal lengths")],
)
def test_pages_hold_what_dense_tensors_hold(make, of, other):
    found = measure(
        make, of, 16, ground=Ground(device="cpu", files={"mine": {"paged": paged}, "off": {"paged": spoilt}})
    )
    assert list(found.timings.rounds) == ["flashgen", other, "mine", "off"] and found.absent == {}
    assert found.reasons and all(reason.startswith("off: ") for reason in found.reasons)


def test_unused_entries_of_a_table_are_no_pages():
    filled = serving.fill(small(30, 100, 17), 16, GROUND)
    used = [-(-n // 16) for n in (30, 100, 17)]
    pages = [page for row, count in zip(filled.table.tolist(), used, strict=True) for page in row[:count]]
    assert sorted(pages) == list(range(sum(used)))
    assert all(page == serving.NO_PAGE for row, n in zip(filled.table.tolist(), used, strict=True) for page in row[n:])
    assert pages != sorted(pages)  # another order than that of positions


@pytest.mark.parametrize(
    "make, given",
    [
        (serving.queries, (small(96, 96, q_len=4),)),
        (serving.window, (small(96, 96), 32)),
        (serving.tree, (small(96, 96, q_len=8),)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_parts_are_right(make, given):
    found = measure(make, *given)
    assert found.reasons == () and found.absent == {} and found.timings is not None
    assert len(found.others) == 1


def test_a_wrong_result_is_said(monkeypatch):
    right = serving.attention
    monkeypatch.setattr(serving, "attention", lambda *given, **named: 1.02 * right(*given, **named))
    for make, *given in ((serving.queries, small(96, q_len=4)), (serving.window, small(96), 32)):
        assert any("RMS error" in reason for reason in measure(make, *given).reasons)


@pytest.mark.parametrize("mask", joined.MASKS)
def test_sequences_behind_each_other(monkeypatch, mask):
    monkeypatch.setattr(joined, "BLOCK", 16)
    of = Documents(lengths=(48, 16, 64), heads=2, head_dim=64)
    for passing, factor in ((joined.forward, 4), (joined.backward, 10)):
        found = measure(passing, of, mask)
        assert found.reasons == () and found.absent == {}
        ms = {name: each[0] for name, each in found.timings.rounds.items()}
        # 128 tokens in all: dense calls have 2, 8 and 2 sequences of 48, 16 and 64.
        assert ms[joined.ALONE] == pytest.approx(ms["dense 48"] / 2 + ms["dense 16"] / 8 + ms["dense 64"] / 2)
        visible = sum(n * (n + (1 if mask == "causal" else 16)) // 2 for n in of.lengths)
        assert found.flops == factor * visible * 2 * 64


def test_wrong_gradients_of_sequences_are_said(monkeypatch):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return 1.05 * dx

    right = joined.attention_varlen
    monkeypatch.setattr(joined, "attention_varlen", lambda q, k, *rest, **named: right(q, Off.apply(k), *rest, **named))
    found = measure(joined.backward, Documents(lengths=(48, 16), heads=2, head_dim=64), "causal")
    assert {reason.partition(":")[0] for reason in found.reasons} == {"dk"}


@pytest.mark.slow
def test_bits_that_differ_are_counted(monkeypatch):
    found = measure(serving.bits, small(64, 64, q_len=64), 32, {})
    forms = {"batch 1", "chunks of 32", "decoded", "decoded, 1 split", "decoded, 4 splits", "pages of 16"}
    assert found.about["other bits"].keys() == forms
    assert set(found.about["other bits"].values()) == {0}
    assert found.about["elements"]["decoded"] == 2 * 4 * 16 * 64  # batch, heads, the last queries, head_dim
    right = serving.attention

    def off(*given, **named):
        o = right(*given, **{name: x for name, x in named.items() if name != "invariant"})
        return o * (1 + 2**-7) if given[0].shape[2] == 32 else o

    monkeypatch.setattr(serving, "attention", off)
    found = measure(serving.bits, small(64, 64, q_len=64), 32, {"invariant": True})
    assert [reason.partition(":")[0] for reason in found.reasons] == ["chunks of 32"]
    assert found.about["other bits"]["chunks of 32"] > 0


@pytest.mark.slow
def test_bits_of_peers_are_counted_against_their_own():
    def decode(q, k, v):
        def call():
            # Row by row of the batch, so that PyTorch's bits do not depend on it; a query alone gets others.
            seen = torch.arange(k.shape[2]) <= torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
            rows = zip(*(x.float().split(1) for x in (q, k, v)), strict=True)
            o = torch.cat([attend(*row, attn_mask=seen, enable_gqa=True) for row in rows])
            return o * (1 + 2**-7) if q.shape[2] == 1 else o

        return call

    attend = torch.nn.functional.scaled_dot_product_attention
    ground = Ground(device="cpu", files={"mine": {"decode": decode}})
    found = measure(serving.bits, small(64, 64, q_len=64), 32, {}, ground=ground)
    told, of = found.about["other bits"], found.about["elements"]
    assert found.reasons == () and told["mine batch 1"] == 0 and "mine pages of 16" not in told
    assert told["mine decoded"] > 0.9 * of["mine decoded"]
    failing = Ground(device="cpu", files={"mine": {"decode": lambda q, k, v: decode(q, k, v) if len(q) < 2 else 1 / 0}})
    found = measure(serving.bits, small(64, 64, q_len=64), 32, {}, ground=failing)
    assert found.absent["mine"].startswith("ZeroDivisionError") and found.about["other bits"]["chunks of 32"] == 0
    assert found.reasons == ("mine batch 1: mine gave no prompt at once to compare with",)
    found = measure(serving.bits, small(64, 64, q_len=64), 32, {"invariant": True}, ground=ground)
    assert not any(name.startswith("mine") for name in found.about["other bits"])


def test_the_table_has_every_case():
    rows = serving.SUITE.rows(False)
    names = [str(row) for row in rows]
    assert len(set(names)) == len(names)
    decode = [row.name for row in rows if row.part == "decode"]
    assert len(decode) == 13 and "b1 32:4 256k" in decode and "b128 32:8 2k" in decode
    parts = {"decode", "pages", "queries", "mixed", "window", "tree", "varlen", "invariant", "bits", "host"}
    assert {row.part for row in rows} == parts


def test_every_row_has_what_its_contest_asks_for():
    for row in serving.SUITE.rows(backward=False):
        inspect.signature(row.make.func).bind(*row.make.args, GROUND)
    found = measure(serving.host_time, small(96))
    assert list(found.timings.rounds) == ["flashgen", "causal at the end"] and not found.reasons
