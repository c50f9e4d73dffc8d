"""What scores read of rows of keys on pipeline hopper: two elements at a time where they lie side by side."""

import contextlib

import numpy as np
import pytest
import torch
from emulated_gpu import install
from ptx_attention import replace, work

import flashgen as fg
from flashgen.interpreter import errors
from flashgen.planning.members import ScoreByElement, ScoreByRow
from flashgen.planning.planner import menu

_SIZES = {"batch": "batch", "heads": "heads", "q": "q_len", "kv": "kv_len"}


def table(name, *dims, dtype="float32", more=0):
    """A tensor of these dimensions; `more`: of a number of keys that is so much larger, and no dimension's name."""

    def example(problem, rng):
        extents = [getattr(problem, _SIZES[d]) + more * (d == "kv") for d in dims]
        return np.round(rng.standard_normal(extents, "float32") * 8) / 8  # which 16 bits hold

    return fg.tensor(name, dims=[None if more and d == "kv" else d for d in dims], dtype=dtype, example=example)


def added(name, bias, element):
    return fg.variant(score=lambda s, b, h, q, k: s + element(bias, b, h, q, k), name=name)


of_all = table("of_all", "batch", "heads", "q", "kv", dtype="bfloat16")
of_heads = table("of_heads", "heads", "q", "kv")
of_pairs = table("of_pairs", "q", "kv", dtype="float16")
keys_first = table("keys_first", "heads", "kv", "q")
longer = table("longer", "q", "kv", more=5)
shorter = table("shorter", "q", "kv", dtype="bfloat16", more=-7)


@fg.variant(score=lambda s, b, h, q, k: s + of_heads[h, q, k])
def below(b, h, q, k):
    return (k <= q) & (k % 5 != 3)


CASES = {
    "all": added("all", of_all, lambda t, b, h, q, k: t[b, h, q, k]),
    "heads": added("heads", of_heads, lambda t, b, h, q, k: 0.5 * t[h, q, k]),
    "pairs": added("pairs", of_pairs, lambda t, b, h, q, k: t[q, k] * t[q // 2, k]),
    "keys first": added("keys_first", keys_first, lambda t, b, h, q, k: t[h, k, q]),
    "longer": added("longer", longer, lambda t, b, h, q, k: t[q, k]),
    "shorter": added("shorter", shorter, lambda t, b, h, q, k: t[q, k]),
    "masked": below,
}


def form(variant, head_dim=64):
    return type(menu(variant, "sm_90a", "bfloat16", head_dim).plans[0].specialized.score)


@pytest.mark.slow
@pytest.mark.sampled("212-all", "384-shorter", "211-keys first")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_len", [211, 212, 384])  # rows at odd places; a last tile that is none; whole tiles alone
def test_rows_are_read_right(kv_len, name):
    w = work(CASES[name], "hopper", kv_len=kv_len, q_len=100, batch=2 if name == "all" else 1, tile=(128, 64))
    assert isinstance(w.plan.specialized.score, ScoreByRow)
    assert w.wrong(w.run()) == ()


@pytest.mark.slow
def test_rows_of_packed_heads_and_of_three_warpgroups():
    for options in ({"packed": True, "heads": 4, "q_len": 50}, {"tile": (192, 64), "q_len": 150, "kv_len": 150}):
        w = work(CASES["longer"], "hopper", **options)
        assert w.wrong(w.run()) == ()


@pytest.mark.slow
def test_elements_are_read_two_at_a_time():
    """A load for two keys of a thread, where there is one for each key of rows at odd places."""
    shape = {"q_len": 128, "heads": 1, "tile": (128, 64), "batch": 1}
    aligned, odd = (
        work(CASES["pairs"], "hopper", kv_len=kv_len, **shape).run().report.instructions for kv_len in (256, 255)
    )

    def loads(counts):
        return sum(n for opcode, n in counts.items() if opcode.startswith("ld.global.nc"))

    of_pairs_of_keys = 2 * 128 * 256 // 2 // 32  # two tables, by the instructions of warps
    assert loads(aligned) == of_pairs_of_keys and loads(odd) > 1.5 * of_pairs_of_keys


MUTATIONS = {
    "another key": replace("_row[r] + (first + 8 * i)", "_row[r] + (first + 8 * i + 2)", 1),
    "one row for both": replace("of_heads_q_row[r] = ", "of_heads_q_row[0] = of_heads_q_row[1] = "),
    "beyond the last key": replace(" && first + TILE_KV <= p.kv_len", ""),
    "odd places": replace(" && (u64)from % (2 * sizeof(*from)) == 0", ""),
    "rows apart": replace("p.stride2_of_heads == 1 && ", ""),
    "elements swapped": replace("of_heads_q[i / 2 % 2][i / 4], i % 2", "of_heads_q[i / 2 % 2][i / 4], 1 - i % 2"),
}


@pytest.mark.slow
@pytest.mark.sampled("elements swapped")
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    variant = CASES["keys first" if name == "rows apart" else "heads"]
    edit = MUTATIONS[name]
    if name == "rows apart":
        edit = replace("p.stride1_keys_first == 1 && ", "")
    kv_len = {"odd places": 211, "beyond the last key": 300}.get(name, 256)
    w = work(variant, "hopper", kv_len=kv_len, q_len=130, tile=(128, 64))
    with contextlib.suppress(errors.PtxError):  # an address that is none
        assert w.wrong(w.run(edit))


def test_what_is_read_by_row():
    """Floats of which the key is an index by itself, and the query is in another; of one or two tables."""
    by_key = table("by_key", "heads", "kv")
    counted = fg.tensor("counted", dims=("q", "kv"), dtype="int32")
    three = [table(f"t{i}", "q", "kv") for i in range(3)]
    cases = {
        ScoreByRow: [*CASES.values()],
        ScoreByElement: [
            added("by_key", by_key, lambda t, b, h, q, k: t[h, k]),
            added("distances", of_pairs, lambda t, b, h, q, k: t[q, fg.maximum(k - q, 0)]),
            added("counted", counted, lambda t, b, h, q, k: t[q, k]),
            fg.variant(score=lambda s, b, h, q, k: s + sum(t[q, k] for t in three), name="three"),
            fg.variant(score=lambda s, b, h, q, k: fg.tanh(s) + of_pairs[q, k], name="tanh"),
        ],
    }
    for expected, variants in cases.items():
        assert {form(v) for v in variants} == {expected}


@pytest.mark.sampled("3")
@pytest.mark.slow
@pytest.mark.parametrize("splits", [None, 3])
def test_rows_of_sequences_with_lengths_of_their_own(monkeypatch, splits):
    gpu = install(monkeypatch, (9, 0))
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    q, k, v, bias = random(2, 2, 9, 64), random(2, 1, 300, 64), random(2, 1, 300, 64), random(2, 2, 300, 300)
    lengths = torch.tensor([300, 170], dtype=torch.int32)
    options = {"q_offset": "end", "kv_splits": splits}
    right = fg.attention(q, k, v, CASES["all"], of_all=bias, kv_lengths=lengths, **options)
    on_gpu = [gpu.put(x) for x in (q, k, v, bias, lengths)]
    found = fg.attention(*on_gpu[:3], CASES["all"], of_all=on_gpu[3], kv_lengths=on_gpu[4], **options)
    found, right = (x.as_subclass(torch.Tensor).float() for x in (found, right))
    assert torch.allclose(found, right, rtol=0.02, atol=0.02)
