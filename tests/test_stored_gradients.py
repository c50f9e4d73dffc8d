"""Gradients of captured tensors of which each pair has an element of its own: stored, where others are added up."""

import numpy as np
import ptx_backward
import pytest
from ptx_attention import replace

import flashgen as fg
from flashgen.planning import backward, planner
from flashgen.planning.layout import DENSE, Padded
from flashgen.planning.problem import Problem
from flashgen.planning.traffic import predict
from flashgen.runtime.tiles_backward import count_backward


def tensor(name, *dims, dtype="float32", more=0):
    """A tensor of these dimensions; `more`: of so many more queries and keys than there are, whose values are none."""
    sizes = {"batch": "batch", "heads": "heads", "q": "q_len", "kv": "kv_len"}

    def example(problem, rng):
        extents = [getattr(problem, sizes[d]) for d in dims]
        found = np.round(rng.standard_normal(extents, "float32") * 8) / 8  # which 16 bits hold
        pads = [(0, more if d in ("q", "kv") else 0) for d in dims]
        return np.pad(found, pads, constant_values=np.nan)

    declared = [None if more and d in ("q", "kv") else d for d in dims]
    return fg.tensor(name, dims=declared, dtype=dtype, example=example)


of_all = tensor("of_all", "batch", "heads", "q", "kv")
of_heads = tensor("of_heads", "heads", "q", "kv")
of_pairs = tensor("of_pairs", "q", "kv")
keys_first = tensor("keys_first", "heads", "kv", "q")
longer = tensor("longer", "q", "kv", more=3)
in_bf16 = tensor("in_bf16", "heads", "q", "kv", dtype="bfloat16")
in_fp16 = tensor("in_fp16", "heads", "q", "kv", dtype="float16")


@fg.variant(score=lambda s, b, h, q, k: s + of_heads[h, q, k])
def below(b, h, q, k):
    return k <= q


@fg.variant(score=lambda s, b, h, q, k: s + in_bf16[h, q, k])
def below_in_bf16(b, h, q, k):
    return k <= q


def biased(name, score):
    return fg.variant(score=score, name=name)


#: By name: the variant, the tensor, heads, batch, and whether each pair has an element of its own in that call.
CASES = {
    "all": (biased("all", lambda s, b, h, q, k: s + of_all[b, h, q, k]), "of_all", 2, 2, True),
    "heads": (biased("heads", lambda s, b, h, q, k: s + of_heads[h, q, k]), "of_heads", 2, 1, True),
    "pairs": (biased("pairs", lambda s, b, h, q, k: s + 0.5 * of_pairs[q, k]), "of_pairs", 1, 1, True),
    "keys first": (biased("keys_first", lambda s, b, h, q, k: s + keys_first[h, k, q]), "keys_first", 2, 1, True),
    "masked": (below, "of_heads", 2, 1, True),
    "masked, bfloat16": (below_in_bf16, "in_bf16", 2, 1, True),
    "float16": (biased("fp16", lambda s, b, h, q, k: s + in_fp16[h, q, k]), "in_fp16", 2, 1, True),
    "a batch that shares bfloat16": (below_in_bf16, "in_bf16", 1, 2, False),
    "a batch that shares it": (biased("heads", lambda s, b, h, q, k: s + of_heads[h, q, k]), "of_heads", 1, 2, False),
    "heads that share it": (biased("pairs", lambda s, b, h, q, k: s + of_pairs[q, k]), "of_pairs", 2, 1, False),
    "longer": (biased("longer", lambda s, b, h, q, k: s + longer[q, k]), "longer", 1, 1, False),
}


def work_of(name, **options):
    variant, of, heads, batch, _ = CASES[name]
    shape = {"head_dim": 64, "q_len": 70, "kv_len": 83, "heads": heads, "kv_heads": 1, "batch": batch} | options
    return ptx_backward.Backward(variant, gradients=(of,), **shape)


@pytest.mark.slow
@pytest.mark.sampled("hopper-False-all", "ampere-True-masked")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pipeline", ["hopper", "ampere"])
def test_an_element_of_each_pair_is_stored(pipeline, deterministic, name):
    """Right, of unclear memory, in lengths that end inside a tile; bytes are those that the plan says."""
    _, of, heads, _, alone = CASES[name]
    work = work_of(name, pipeline=pipeline, deterministic=deterministic)
    result = ptx_backward.check(work)
    report = result.reports["attention_backward"]
    added = report.bytes("red", buffer=f"grad_{of}") + report.bytes("red", buffer=f"exact_{of}")
    assert (added == 0) is alone
    w, p = work.forward, work.forward.problem
    dims = {"head_dim": p.head_dim, "v_head_dim": p.v_head_dim, "dtype": p.dtype}
    moved = count_backward(work.plan, w.facts, w.case, dlse=True, **dims).kernels
    predicted = dict(predict(work.plan, p, w.case, dlse=True).kernels)
    for entry, counted in moved.items():
        assert sum(counted.read.values()) == predicted[entry].read_bytes, entry
        assert sum(counted.written.values()) == predicted[entry].write_bytes, entry
    if alone:
        item = 2 if of in ("in_bf16", "in_fp16") else 4
        pairs = item * p.batch * heads * p.q_len * p.kv_len
        cleared = result.reports["attention_backward_clear"].bytes(buffer=f"grad_{of}")
        assert cleared == moved["attention_backward_clear"].written["sums"] == (pairs if "masked" in name else 0)
        assert report.bytes(buffer=f"grad_{of}") == moved["attention_backward"].written["sums"] <= pairs


def plan_of(name, **options):
    variant, of, *_ = CASES[name]
    return planner.backward_menu(variant.bind(), "sm_90a", "bfloat16", 128, gradients=(of,), **options).plans[0]


def test_an_element_stored_needs_no_order():
    """Exact sums take 64 bytes an element and more registers than pipeline hopper has."""
    plan = plan_of("heads", deterministic=True)
    assert plan.pipeline == "hopper"
    problem = Problem(batch=1, heads=2, kv_heads=2, q_len=64, kv_len=96, head_dim=128, v_head_dim=128, dtype="bfloat16")
    for shape, alone in (((2, 64, 96), True), ((2, 64, 97), False), ((1, 64, 96), False)):
        memory = {part.name: part.amount for part in backward.workspaces(plan, problem, {"of_heads": shape})}
        assert memory["exact_of_heads"] == (0 if alone else 64 * np.prod(shape))


def test_what_an_element_of_each_pair_is():
    score = {
        "twice": lambda s, b, h, q, k: s + of_pairs[q, k] + of_pairs[k, q],
        "one query": lambda s, b, h, q, k: s + of_pairs[0, k],
        "shifted": lambda s, b, h, q, k: s + of_pairs[q, k + 1],
        "halves": lambda s, b, h, q, k: s + of_heads[h // 2, q, k],
        "in a loop": lambda s, b, h, q, k: s + fg.sum(2, lambda i: of_heads[i, q, k]),
    }
    for name, of in score.items():
        variant = fg.variant(score=of, name=name.replace(" ", "_"))
        for captured in variant.tensors:
            assert backward.own_dimensions(variant, captured.name, DENSE) == (), name
    assert backward.own_dimensions(CASES["all"][0], "of_all", DENSE) == ("b", "h", "q", "k")
    assert backward.own_dimensions(CASES["keys first"][0], "keys_first", DENSE) == ("h", "k", "q")


def test_sequences_with_lengths_of_their_own_add():
    """There a key has another position than its row."""
    plan = plan_of("heads", layout=Padded())
    assert backward.storable(plan) == () and backward.storable(plan_of("heads")) == ("of_heads",)


MUTATIONS = {
    "lanes not exchanged": replace("exchange_lines(part[m]);", ""),
    "another lane": replace("odd ? x[i] : x[i + 2], 1)", "odd ? x[i] : x[i + 2], 2)"),
    "of the same key": replace("k_first = k + 8 * odd;", "k_first = k + 8;"),
    "queries beyond": replace("q_first + 8 * j + i < p.q_len && ", ""),
    "keys beyond": replace(" && k_first + 16 * m < p.kv_len", ""),
    "rows in pairs": replace("(i == 3 ? 5 : 1)", "(i % 2 ? 3 : 1)"),
}


@pytest.mark.slow
@pytest.mark.sampled("queries beyond", "another lane")
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_of_stores_are_noticed(name):
    assert work_of("heads", pipeline="hopper").fails(MUTATIONS[name])


@pytest.mark.slow
def test_what_no_tile_visits_is_cleared():
    work = work_of("masked", pipeline="hopper", q_len=150, kv_len=300)
    assert work.wrong(work.run()) == []
    assert work.fails(replace("p.grad_of_heads[i] = 0.f;", ";"))
