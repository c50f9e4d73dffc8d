"""Sequences behind each other in 8 bits on a GPU: the bits of each alone, whatever lies beside it, and float64."""

import pytest
import torch
from gpu_checks import DEVICE
from test_gpu_fp8 import cached

import flashgen as fg
from flashgen.lang.load import load_spec
from flashgen.ops.float8 import dequantised
from flashgen.planning.float8 import WORDS_BY_BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="8 bits are of Hopper"
    ),
]

#: Queries and keys of sequences; two have no query or no key, one ends with a tile, that of NANS is no numbers.
ROWS, KEYS, NANS = (700, 1, 0, 333, 512, 70), (1900, 1, 40, 0, 2048, 90), 4


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(lengths):
    return ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])


class Joined:
    """Codes [rows, heads, columns] of all sequences, and descales of each, by blocks of 128 rows or none."""

    def __init__(self, head_dim, *, blocks=False, heads=8, kv_heads=2, rows=ROWS, keys=KEYS, nans=NANS, seed=0):
        g = torch.Generator(DEVICE).manual_seed(seed)
        self.lengths, self.nans = (rows, keys, keys), nans
        self.codes, self.descales = [], {}
        for name, lengths, h in (("q", rows, heads), ("k", keys, kv_heads), ("v", keys, kv_heads)):
            x = torch.randn(sum(lengths), h, head_dim, device=DEVICE, generator=g) * 100
            codes = x.clamp(-448, 448).to(torch.float8_e4m3fn)  # beyond them lies NaN
            if name != "q" and nans is not None:
                at = slice(sum(lengths[:nans]), sum(lengths[: nans + 1]))
                codes.view(torch.uint8)[at] = 0x7F
            self.codes.append(codes)
            size = (len(lengths), h, *((-(-max(lengths) // 128),) if blocks else ()))
            self.descales[f"{name}_descale"] = torch.rand(size, device=DEVICE, generator=g) * 0.01 + 0.004
        self.given = {"max_seqlen_q": max(rows), "max_seqlen_k": max(keys), **self.descales}

    def __call__(self, variant, **options):
        rows, keys, _ = self.lengths
        return fg.attention_varlen(
            *self.codes, variant, starts(rows), starts(keys), **{**self.given, **options}, return_lse=True
        )

    def alone(self, b):
        """q, k and v [1, heads, rows, columns] of a sequence, and its descales."""
        codes, descales = [], {}
        for x, lengths, (name, each) in zip(self.codes, self.lengths, self.descales.items(), strict=True):
            at = slice(sum(lengths[:b]), sum(lengths[: b + 1]))
            codes.append(x[at].transpose(0, 1).unsqueeze(0))
            blocks = max(1, -(-lengths[b] // 128))
            descales[name] = each[b : b + 1, :, :blocks].contiguous() if each.dim() == 3 else each[b : b + 1]
        return codes, descales


def each(w, o, lse):
    """By sequence, its number and o and lse [1, heads, rows ...]."""
    for b, rows in enumerate(w.lengths[0]):
        at = slice(sum(w.lengths[0][:b]), sum(w.lengths[0][: b + 1]))
        if rows:
            yield b, o[at].transpose(0, 1)[None], lse[:, at][None]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("spec", ["full", "causal", "softcap"])
def test_each_has_the_bits_that_it_has_alone(spec, head_dim, splits, blocks):
    """P is exact: which words are made by bits depends on a row's place in its tile."""
    variant, named = load_spec(spec), {"cap": 20.0} if spec == "softcap" else {}
    options = {"accuracy": "exact", "kv_splits": splits, **named}
    w = Joined(head_dim, blocks=blocks)
    o, lse = w(variant, **options)
    for b, mine, mine_lse in each(w, o, lse):
        codes, descales = w.alone(b)
        if not w.lengths[1][b]:
            assert not mine.any() and bool((mine_lse == -torch.inf).all())
            continue
        right = fg.attention(*codes, variant, **descales, **options, return_lse=True)
        for found, wanted in zip((mine, mine_lse), right, strict=True):
            assert torch.equal(found.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0)), b


@pytest.mark.parametrize("accuracy", WORDS_BY_BITS)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_against_float64(head_dim, accuracy):
    w, causal = Joined(head_dim, blocks=True, nans=None), load_spec("causal")
    o, lse = w(causal, accuracy=accuracy)
    for b, mine, _ in each(w, o, lse):
        codes, descales = w.alone(b)
        if w.lengths[1][b]:
            wide = [dequantised(*pair, torch.float64).cpu() for pair in zip(codes, descales.values(), strict=True)]
            right = fg.attention(*wide, causal)
            assert float((mine.cpu().double() - right).norm() / right.norm()) < 0.04, b


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [16, 64])
def test_keys_in_pages(page_size, splits):
    """Joined queries over pages have the bits of joined keys; other pages are NaN."""
    rows, keys, most = (5, 1, 70, 0), (1000, 40, 333, 64), 1024
    w, causal = Joined(128, rows=rows, keys=keys, nans=None), load_spec("causal")
    options = {"accuracy": "exact", "kv_splits": splits, "q_offset": "end"}
    right = w(causal, **options)
    table = torch.randperm(4 * most // page_size, device=DEVICE).to(torch.int32).view(4, -1)
    caches = []
    for x in w.codes[1:]:
        padded = torch.full((4, x.shape[1], most, x.shape[2]), 0x7F, dtype=torch.uint8, device=DEVICE)
        for b, n in enumerate(keys):
            padded[b, :, :n] = x.view(torch.uint8)[sum(keys[:b]) :][:n].transpose(0, 1)
        caches.append(cached(padded.view(x.dtype), page_size, table))
    given = {**w.descales, **options, "kv_lengths": ints(keys), "page_table": table, "max_seqlen_q": max(rows)}
    found = fg.attention_varlen(w.codes[0], *caches, causal, starts(rows), **given, return_lse=True)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, right, strict=True))


def test_many_short_sequences_reruns_and_a_graph():
    rows = tuple(i % 5 for i in range(200))
    w, causal = Joined(64, rows=rows, keys=rows, nans=3), load_spec("causal")
    cu = starts(rows)

    def call():
        return fg.attention_varlen(*w.codes, causal, cu, accuracy="exact", **w.given)

    first = call().nan_to_num(nan=7.0)
    for _ in range(100):
        assert torch.equal(call().nan_to_num(nan=7.0), first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    cu.copy_(starts(rows[::-1]))  # sequences begin elsewhere: read on the device
    graph.replay()
    assert torch.equal(o.nan_to_num(nan=7.0), call().nan_to_num(nan=7.0))


def test_nested_tensors():
    rows = (70, 3, 0, 300)
    w, causal = Joined(64, rows=rows, keys=rows, nans=None), load_spec("causal")
    offsets = starts(rows).long()
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in w.codes]
    o = fg.attention(*nested, causal, **w.descales, accuracy="exact")
    assert torch.equal(o.values().transpose(0, 1), w(causal, accuracy="exact")[0])
