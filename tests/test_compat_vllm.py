"""flashgen.compat.vllm against a written-out form, sequence by sequence, as an engine's backend would call it."""

import pytest
import torch
from test_compat_flash_attn import written_out

import flashgen
from flashgen.compat.vllm import flash_attn_varlen_func
from flashgen.errors import FlashgenError, LaunchError, PlanError
from flashgen.ops import splits
from flashgen.planning.division import check_splits

#: A prompt that is read, a chunk behind 9 keys, two sequences that decode, and one without queries.
QUERIES, KEYS, BLOCK = (7, 4, 1, 1, 0), (7, 13, 21, 1, 5), 8
HEADS, KV_HEADS, DIM = 4, 2, 16


def starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def batch():
    random = torch.Generator().manual_seed(0)
    shapes = (sum(QUERIES), HEADS, DIM), (sum(KEYS), KV_HEADS, DIM), (sum(KEYS), KV_HEADS, DIM)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def right(q, k, v, s_aux=None, **options):
    """(result, lse [heads, total_q]): each sequence alone; sinks join the sum of a row."""
    found = []
    for of_q, of_k, of_v in zip(*(x.split(n) for x, n in ((q, QUERIES), (k, KEYS), (v, KEYS))), strict=True):
        if len(of_q):
            o, lse = written_out(*(x[None] for x in (of_q, of_k, of_v)), **options)
            if s_aux is not None:
                whole = torch.logaddexp(lse, s_aux.double()[:, None])
                o, lse = o * torch.exp(lse - whole).transpose(1, 2)[..., None], whole
            found.append((o[0], lse[0]))
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)


def check(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def asked(**options):
    return {
        "max_seqlen_q": max(QUERIES),
        "cu_seqlens_q": starts(QUERIES),
        "max_seqlen_k": max(KEYS),
        "softmax_scale": 0.2,
        "return_softmax_lse": True,
        **options,
    }


OPTIONS = (
    {"causal": True},
    {"causal": True, "window_size": [4, 0]},
    {"window_size": (3, 2), "softcap": 5.0},
    {"causal": True, "alibi_slopes": torch.arange(1.0, 1 + HEADS) / 8},
    {"causal": True, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
)


def names(options):
    """The options as `right` has them."""
    return {name: tuple(x) if name == "window_size" else x for name, x in options.items()} | {"scale": 0.2}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_keys_behind_each_other(options):
    q, k, v = batch()
    found = flash_attn_varlen_func(q, k, v, **asked(cu_seqlens_k=starts(KEYS), **options))
    check(found, right(q, k, v, **names(options)))
    assert flashgen.last_backend().call == "vllm.flash_attn_varlen_func"


def cache(x, seed):
    """The rows of each sequence in pages of a cache, in any order, and the table; NaN lies in between."""
    pages = [-(-n // BLOCK) for n in KEYS]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(len(KEYS), max(pages) + 1, dtype=torch.int32)
    held = torch.full((len(order), BLOCK, *x.shape[1:]), torch.nan, dtype=x.dtype)
    for b, rows in enumerate(x.split(KEYS)):
        mine = order[sum(pages[:b]) : sum(pages[: b + 1])]
        table[b, : len(mine)] = mine
        for page, part in zip(mine.tolist(), rows.split(BLOCK), strict=True):
            held[page, : len(part)] = part
    return held, table


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_keys_in_the_blocks_of_a_cache(options):
    q, k, v = batch()
    (k_cache, table), (v_cache, _) = cache(k, 1), cache(v, 1)
    used = torch.tensor(KEYS, dtype=torch.int32)
    given = asked(seqused_k=used, block_table=table, **options)
    expected = right(q, k, v, **names(options))
    check(flash_attn_varlen_func(q, k_cache, v_cache, **given), expected)
    out = torch.full_like(q, torch.nan)
    found, lse = flash_attn_varlen_func(q, k_cache, v_cache, **given, num_splits=2, out=out)
    assert found is out
    check((out, lse), expected)


def test_out_is_written_and_returned():
    q, k, v = batch()
    out = torch.empty_like(q)
    given = asked(cu_seqlens_k=starts(KEYS), causal=True, return_softmax_lse=False)
    assert flash_attn_varlen_func(q, k, v, out=out, **given) is out
    torch.testing.assert_close(out, flash_attn_varlen_func(q, k, v, fa_version=3, num_splits=1, **given))
    parts = flash_attn_varlen_func(q, k, v, num_splits=2, **given)
    torch.testing.assert_close(out, parts)
    assert flash_attn_varlen_func(q, k, v, out=out, num_splits=2, **given) is out and torch.equal(out, parts)
    with pytest.raises(PlanError, match="kv_splits is -1"):
        flash_attn_varlen_func(q, k, v, num_splits=-1, **given)
    with pytest.raises(LaunchError, match=r"^out is torch.float32"):
        flash_attn_varlen_func(q, k, v, out=out.float(), **given)


def test_keys_are_divided_as_asked(monkeypatch):
    """By one block where an engine asks for bits that depend on no other row."""
    asked_for = []
    monkeypatch.setattr(splits, "check_splits", lambda number: asked_for.append(number) or check_splits(number))
    given = asked(cu_seqlens_k=starts(KEYS), causal=True, return_softmax_lse=False)
    whole, parts = (flash_attn_varlen_func(*batch(), num_splits=n, **given) for n in (1, 2))
    flash_attn_varlen_func(*batch(), num_splits=0, **given)
    assert asked_for == [1, 2]
    torch.testing.assert_close(parts, whole)


ONE = torch.ones(1)
REFUSED = {
    "q_v": ONE,
    "return_attn_probs": True,
    "scheduler_metadata": ONE,
    "q_descale": ONE,
    "k_descale": ONE,
    "v_descale": ONE,
    "cp_world_size": 2,
    "cp_rank": 1,
    "cp_tot_seqused_k": ONE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name):
    with pytest.raises(LaunchError, match=rf" serves no {name} in flashgen\n  nearest: "):
        flash_attn_varlen_func(*batch(), **asked(cu_seqlens_k=starts(KEYS), **{name: REFUSED[name]}))


def test_keys_are_said_to_lie_in_one_way():
    table, used = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    for given in (
        {},
        {"seqused_k": used, "cu_seqlens_k": starts(KEYS)},
        {"block_table": table},
        {"block_table": table, "seqused_k": used, "cu_seqlens_k": starts(KEYS)},
    ):
        with pytest.raises(LaunchError, match=r"is not served\n  nearest: "):
            flash_attn_varlen_func(*batch(), **asked(**given))


class Backend:
    """A backend as thin as an engine's may be: what it is handed goes on by the same names."""

    def __init__(self, scale, window, softcap, sinks):
        self.fixed = {"softmax_scale": scale, "window_size": window, "softcap": softcap, "s_aux": sinks}

    def forward(self, query, key, value, metadata, output):
        return flash_attn_varlen_func(query, key, value, causal=True, out=output, **metadata, **self.fixed)


def test_a_thin_class_is_a_backend():
    q, k, v = (x.float() for x in batch())
    sinks = torch.zeros(HEADS)
    metadata = asked(cu_seqlens_k=starts(KEYS))
    metadata = {name: metadata[name] for name in metadata if name not in ("softmax_scale", "return_softmax_lse")}
    o = Backend(0.2, (5, 0), 0.0, sinks).forward(q, k, v, metadata, torch.empty_like(q))
    expected, _ = right(*(x.double() for x in (q, k, v)), s_aux=sinks, causal=True, window_size=(5, 0), scale=0.2)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)


def test_wrong_shapes_are_refused():
    q, k, v = batch()
    with pytest.raises(FlashgenError, match=r"attention_varlen takes \[rows, heads, head_dim\]"):
        flash_attn_varlen_func(q[None], k, v, **asked(cu_seqlens_k=starts(KEYS)))
    with pytest.raises(LaunchError, match=r"window_size is \(keys before, keys after\), -1 for no end, and got 4"):
        flash_attn_varlen_func(q, k, v, **asked(cu_seqlens_k=starts(KEYS), window_size=4))
    used = torch.ones(5, dtype=torch.int32)
    with pytest.raises(LaunchError, match=r"block_table is a list, not a torch\.Tensor"):
        flash_attn_varlen_func(q, k, v, **asked(seqused_k=used, block_table=[[0]]))
    pages, table = torch.zeros(2, BLOCK, KV_HEADS, DIM, dtype=q.dtype), torch.zeros(5, 2, dtype=torch.int32)
    for name, given in (("block_table", {"block_table": table.long()}), ("seqused_k", {"seqused_k": used.long()})):
        with pytest.raises(LaunchError, match=rf"{name} is int64.*\n  nearest: {name}.to\(torch.int32\)"):
            flash_attn_varlen_func(q, pages, pages, **asked(**{"seqused_k": used, "block_table": table, **given}))
    call = asked(seqused_k=used * 9, block_table=table)
    with pytest.raises(LaunchError, match=r"kv_lengths\[0\] is 9 and max_seqlen_k is 8: .*\n  nearest: max_seqlen_k=9"):
        flash_attn_varlen_func(q, pages, pages, **{**call, "max_seqlen_k": 8})
    with pytest.raises(LaunchError, match=r"kv_lengths\[0\] is 18: .* the most keys that pages hold = 16"):
        flash_attn_varlen_func(q, pages, pages, **{**call, "seqused_k": used * 18, "max_seqlen_k": 8})
    rows = len(q)
    with pytest.raises(LaunchError, match=rf"out is \[4, 4, 16\] and o \[{rows}, 4, 16\]\n"):
        flash_attn_varlen_func(q, pages, pages, **asked(seqused_k=used, block_table=table), out=q.new_empty(4, 4, 16))
