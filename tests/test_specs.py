"""The shipped specs: each loads, documents itself, and computes what its docstring says."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import DIMS
from flashgen.lang.load import shipped
from flashgen.planning.problem import Problem

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, q_len=24, kv_len=24, head_dim=64, v_head_dim=64)
REQUIRED = (
    "full causal causal_bottom_right sliding_window sink_window prefix_lm chunked document alibi softcap dilated"
    " longformer butterfly relative_bias blocks"
)
SPECS = list(shipped())


def captured(variant, problem=PROBLEM, seed=0):
    rng = np.random.default_rng(seed)
    return {t.name: t.example(problem, rng) for t in variant.tensors}


def positions(problem):
    shape = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
    return dict(zip("bhqk", np.ogrid[tuple(map(slice, shape))], strict=True))


def mask(name, problem=PROBLEM, constants=None, tensors=None, **params):
    """[batch, heads, q_len, kv_len], from the spec."""
    variant = fg.load_spec(name).bind(**(constants or {}))
    tensors = captured(variant, problem) if tensors is None else tensors
    found = evaluate(
        variant.mask, **positions(problem), sizes=problem.sizes(), params=variant.values(params), tensors=tensors
    )
    return np.broadcast_to(found, (problem.batch, problem.heads, problem.q_len, problem.kv_len))


def brute(rule, problem=PROBLEM):
    """[batch, heads, q_len, kv_len], from a plain Python rule."""
    shape = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
    return np.array([bool(rule(*index)) for index in np.ndindex(shape)]).reshape(shape)


def test_the_required_specs_are_shipped():
    assert set(REQUIRED.split()) <= set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_a_shipped_spec_is_documented_named_after_its_file_and_has_examples(name):
    variant = fg.load_spec(name)
    assert variant.name == name
    assert variant.doc.endswith(".") and "\n" not in variant.doc
    assert 128 in variant.head_dims and "bfloat16" in variant.dtypes
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q": 24, "kv": 24}
    for tensor, array in ((t, captured(variant)[t.name]) for t in variant.tensors):
        assert array.dtype.name == tensor.dtype
        for dim, size in zip(tensor.dims, array.shape, strict=True):
            assert size == (sizes[dim] if dim in DIMS else dim or size)
        if tensor.sorted:
            assert (np.diff(array, axis=-1) >= 0).all()
        assert tensor.min is None or (array >= tensor.min).all()
    assert variant.values({}).keys() == {p.name for p in variant.params}, "every parameter has a default"


@pytest.mark.parametrize("name", SPECS)
def test_a_shipped_spec_loads_the_same_twice(name):
    assert fg.load_spec(name).digest() == fg.load_spec(name).digest()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (3, 3), (0, 7), (130, 130)])
def test_a_shipped_spec_evaluates_at_any_length(name, q_len, kv_len):
    problem = Problem(batch=1, heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=64, v_head_dim=64)
    variant = fg.load_spec(name)
    for root in variant.roots:
        value = evaluate(
            root,
            **positions(problem),
            s=np.zeros((1, 1, q_len, kv_len)),
            sizes=problem.sizes(),
            params=variant.values({}),
            tensors=captured(variant, problem),
        )
        assert not np.isnan(value).any()
        np.broadcast_to(value, (1, 2, q_len, kv_len))


def test_full_and_causal():
    assert fg.load_spec("full").mask is None
    assert np.array_equal(mask("causal"), brute(lambda b, h, q, k: k <= q))


def test_causal_bottom_right_lets_the_last_query_see_the_last_key():
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=3, kv_len=8, head_dim=64, v_head_dim=64)
    assert np.array_equal(mask("causal_bottom_right", problem), brute(lambda b, h, q, k: k - 8 <= q - 3, problem))


@pytest.mark.parametrize("window", [1, 5, 99])
def test_windows(window):
    assert np.array_equal(mask("sliding_window", window=window), brute(lambda b, h, q, k: k <= q and q - k < window))
    assert np.array_equal(
        mask("sink_window", window=window, sinks=2),
        brute(lambda b, h, q, k: k <= q and (q - k < window or k < 2)),
    )
    assert np.array_equal(
        mask("longformer", reach=window, global_tokens=3),
        brute(lambda b, h, q, k: abs(q - k) <= window or k < 3 or q < 3),
    )
    assert np.array_equal(
        mask("dilated", window=window, dilation=3),
        brute(lambda b, h, q, k: any(q - k == 3 * i for i in range(window))),
    )


def test_prefix_and_padding():
    assert np.array_equal(mask("prefix_lm", prefix=6), brute(lambda b, h, q, k: k < 6 or k <= q))
    lengths = np.array([0, 17], np.int32)
    assert np.array_equal(mask("padding", tensors={"lengths": lengths}), brute(lambda b, h, q, k: k < lengths[b]))


def test_chunked():
    assert np.array_equal(
        mask("chunked", constants={"chunk": 5}), brute(lambda b, h, q, k: k <= q and q // 5 == k // 5)
    )


def test_documents():
    doc = np.sort(np.random.default_rng(0).integers(0, 4, (2, 24), np.int32))
    assert np.array_equal(mask("document", tensors={"doc": doc}), brute(lambda b, h, q, k: doc[b, q] == doc[b, k]))
    assert np.array_equal(
        mask("packed_softcap", tensors={"doc": doc}), brute(lambda b, h, q, k: k <= q and doc[b, q] == doc[b, k])
    )


def test_butterfly_is_the_union_of_the_butterfly_factors():
    factors = {0, 1, 2, 4, 8, 16}
    assert np.array_equal(
        mask("butterfly", constants={"block": 2}), brute(lambda b, h, q, k: (q // 2) ^ (k // 2) in factors)
    )


def test_blocks():
    layout = np.random.default_rng(1).random((6, 6)) < 0.5
    assert np.array_equal(
        mask("blocks", constants={"block": 4}, tensors={"layout": layout}),
        brute(lambda b, h, q, k: layout[q // 4, k // 4]),
    )


def score(name, s, tensors=None, **params):
    variant = fg.load_spec(name)
    tensors = captured(variant) if tensors is None else tensors
    return evaluate(
        variant.score_node,
        **positions(PROBLEM),
        s=s,
        sizes=PROBLEM.sizes(),
        params=variant.values(params),
        tensors=tensors,
        float_dtype=np.float64,
    )


def test_scores():
    s = np.random.default_rng(2).normal(0, 30, (2, 4, 24, 24))
    p = positions(PROBLEM)
    slopes = captured(fg.load_spec("alibi"))["slopes"]
    assert np.allclose(slopes, [2**-2, 2**-4, 2**-6, 2**-8])
    assert np.allclose(score("alibi", s), s - slopes[:, None, None].astype(float) * (p["q"] - p["k"]))
    for name in ("softcap", "local_softcap", "packed_softcap"):
        assert np.allclose(score(name, s, cap=20.0), 20 * np.tanh(s / 20))
    assert np.allclose(
        score("log_distance", s, strength=2.0, spread=0.5), s - 2 * np.log1p(0.5 * np.abs(p["q"] - p["k"]))
    )


def test_relative_bias_reads_the_table_at_the_clipped_distance():
    table = np.arange(4 * 7, dtype=np.float32).reshape(4, 7)  # reaches 3 to either side
    got = score("relative_bias", np.zeros((2, 4, 24, 24)), tensors={"table": table})
    for b, h, q, k in [(0, 0, 5, 5), (1, 2, 5, 7), (0, 3, 20, 1), (0, 3, 1, 20)]:
        assert got[b, h, q, k] == table[h, min(max(k - q, -3), 3) + 3]


def test_tree():
    """Drafts after five positions of text; where keys are fewer than drafts, all are drafts."""
    seen = np.tril(np.random.default_rng(0).random((19, 19)) < 0.5) | np.eye(19, dtype=bool)
    wanted = brute(lambda b, h, q, k: k <= q and (k < 5 or seen[max(q - 5, 0), k - 5]))
    assert np.array_equal(mask("tree", tensors={"drafts": seen}), wanted)
    seen = np.tril(np.ones((40, 40), bool))
    assert np.array_equal(mask("tree", tensors={"drafts": seen}), brute(lambda b, h, q, k: k <= q))
