"""fg.any and fg.sum: what they mean, what is known of them, how they are emitted, and their gradients."""

from __future__ import annotations

import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch
from ptx_attention import work
from ptx_backward import Backward
from test_analysis_tiles import case_of
from variant_kernel import run as run_variant

import flashgen as fg
from flashgen.analysis import tiles
from flashgen.analysis.derivative import derive, slopes
from flashgen.analysis.facts import analyse
from flashgen.analysis.formula import formula
from flashgen.analysis.tiles import EMPTY, FULL, PARTIAL
from flashgen.errors import CapturedIndexError, PlanError, SpecError
from flashgen.lang import ranges
from flashgen.lang.bounds import bounds
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import DType, loop_indices, walk
from flashgen.lang.loops import LOOPS, MAX_ROUNDS, by_round
from flashgen.planning.plan import Tile
from flashgen.planning.request import KernelRequest
from flashgen.runtime.reference import Evaluator

SIZES = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": 9, "kv_len": 11}
B, H, Q, K = np.ogrid[0:2, 0:3, 0:9, 0:11]

top = fg.tensor("top", dims=("batch", None, 4), dtype="int32")
count = fg.tensor("count", dims=("batch", "q"), dtype="int32", min=0, max=4)
w = fg.tensor("w", dims=("heads", 3), dtype="float32")
many = fg.param("many", default=2, max=3)

RNG = np.random.default_rng(0)
TENSORS = {
    "top": RNG.integers(-1, 4, (2, 3, 4)).astype(np.int32),
    "count": RNG.integers(0, 5, (2, 9)).astype(np.int32),
    "w": RNG.normal(0, 1, (3, 3)).astype(np.float32),
}


def value(root, *, s=None, many=2, live=None, float_dtype=np.float64):
    given = {"sizes": SIZES, "params": {"many": many}, "tensors": TENSORS, "float_dtype": float_dtype, "live": live}
    found = evaluate(root, b=B, h=H, q=Q, k=K, s=s, **given)
    return np.broadcast_to(found, (2, 3, 9, 11))


def mask(function):
    return fg.variant(function).mask


def score(function):
    return fg.variant(score=function).score_node


def by_hand(function):
    """A rule in plain Python at every pair."""
    return np.array([function(*at) for at in itertools.product(range(2), range(3), range(9), range(11))]).reshape(
        2, 3, 9, 11
    )


# ---------------------------------------------------------------------------------------------------------------------
# Meaning


def test_any_is_that_of_python():
    root = mask(lambda b, h, q, k: fg.any(count[b, q], lambda i: top[b, q // 4, i] == k // 4))
    rows, held = TENSORS["count"], TENSORS["top"]
    assert np.array_equal(
        value(root), by_hand(lambda b, h, q, k: any(held[b, q // 4, i] == k // 4 for i in range(rows[b, q])))
    )


@pytest.mark.parametrize("many", [-3, 0, 1, 3])
def test_sum_is_that_of_python_and_nothing_is_0(many):
    held = TENSORS["w"].astype(np.float64)
    root = score(lambda s, b, h, q, k: fg.sum(globals()["many"], lambda i: w[h, i] * (q - k * i)))
    expected = by_hand(lambda b, h, q, k: math.fsum(held[h, i] * (q - k * i) for i in range(many)))
    assert np.allclose(value(root, many=many), expected, rtol=0, atol=1e-12)
    whole = score(lambda s, b, h, q, k: fg.float32(fg.sum(globals()["many"], lambda i: q * i - k) % 7))
    assert np.array_equal(value(whole, many=many), by_hand(lambda b, h, q, k: sum(q * i - k for i in range(many)) % 7))


def test_loops_in_loops():
    root = mask(
        lambda b, h, q, k: fg.any(3, lambda i: fg.sum(i + 1, lambda j: q + i * j) == k + fg.sum(2, lambda j: j))
    )
    expected = by_hand(lambda b, h, q, k: any(sum(q + i * j for j in range(i + 1)) == k + 1 for i in range(3)))
    assert np.array_equal(value(root), expected) and expected.any()


def test_what_never_runs_is_its_constant():
    assert mask(lambda b, h, q, k: fg.any(0, lambda i: k > i) | (k < 3)).op == "logical_or"
    assert np.array_equal(
        value(mask(lambda b, h, q, k: fg.any(-2, lambda i: i == k) | (k < 3))), by_hand(lambda b, h, q, k: k < 3)
    )
    for body in (lambda i: i, lambda i: 0.5 * i):
        made = score(lambda s, b, h, q, k, body=body: s + fg.sum(0, body)).operands[1]
        assert (made.op, made.attr) == ("const", 0.0)


def test_an_index_may_leave_its_dimension_in_rounds_that_are_not_there():
    root = mask(lambda b, h, q, k: fg.any(count[b, q], lambda i: top[b, q // 4, i + 4 - count[b, q]] == k))
    assert value(root).shape == (2, 3, 9, 11)
    beyond = mask(lambda b, h, q, k: fg.any(count[b, q], lambda i: top[b, q // 4, i + 1] == k))
    with pytest.raises(CapturedIndexError, match="index 4 is outside dimension 2 of size 4"):
        value(beyond)
    assert value(beyond, live=TENSORS["count"][:, None, :, None] < 4).shape == (2, 3, 9, 11)


def test_pytorch_reads_them_alike():
    case = case_of(9, 11, 2, 3, TENSORS, many=2)
    at = {name: torch.from_numpy(x.copy()) for name, x in zip("bhqk", (B, H, Q, K), strict=True)}
    s = RNG.normal(0, 1, (2, 3, 9, 11))
    for root in (
        mask(lambda b, h, q, k: fg.any(count[b, q], lambda i: top[b, q // 4, i] == k // 4)),
        score(lambda s, b, h, q, k: s + fg.sum(many, lambda i: w[h, i] * fg.tanh(s * i))),
        score(lambda s, b, h, q, k: fg.sum(3, lambda i: fg.sum(i, lambda j: w[h, j] * (i - k)))),
    ):
        found = Evaluator(case, torch.device("cpu"))(root, torch.float64, {**at, "s": torch.from_numpy(s)})
        assert np.allclose(np.broadcast_to(found.numpy(), s.shape), value(root, s=s), rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# One node, whatever the names


def test_equal_loops_are_one_node_and_pickle_to_themselves():
    first, second = (mask(lambda b, h, q, k: fg.any(3, lambda i: fg.any(2, lambda j: i + j == k))) for _ in range(2))
    assert first is second is pickle.loads(pickle.dumps(first))
    assert first is not mask(lambda b, h, q, k: fg.any(3, lambda i: fg.any(2, lambda j: j + i == k)))
    assert not loop_indices(first) and len({n.attr for n in walk([first]) if n.op == "loop_index"}) == 2


def test_a_score_put_into_a_loop_keeps_its_own_index():
    """Both loops would have the same index if what is put in were not told apart."""
    first = fg.variant(score=lambda s, b, h, q, k: fg.sum(3, lambda i: s * (i + 1)))
    both = first.then(lambda s, b, h, q, k: fg.sum(3, lambda i: s * w[h, i]))
    again = first.then(fg.variant(score=lambda s, b, h, q, k: fg.sum(3, lambda i: s * w[h, i])))
    s = RNG.normal(0, 1, (2, 3, 9, 11))
    expected = 6 * s * TENSORS["w"].astype(np.float64).sum(1)[None, :, None, None]
    for variant in (both, again):
        assert np.allclose(value(variant.score_node, s=s), expected)


def test_rounds_of_a_constant_are_known_once_it_is_bound():
    c = fg.constant("c", 4, min=0, max=9)
    variant = fg.variant(lambda b, h, q, k: fg.any(c, lambda i: q + i == k))
    for rounds in (0, 2, 9):
        bound = variant.bind(c=rounds)
        assert np.array_equal(
            value(bound.mask), by_hand(lambda b, h, q, k, n=rounds: any(q + i == k for i in range(n)))
        )
        assert {n.attr.most for n in walk([bound.mask]) if n.op == "any"} == ({rounds} - {0})


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            lambda b, h, q, k: fg.any(fg.kv_len, lambda i: k == i),
            f"at most {MAX_ROUNDS} rounds, and may get 16,777,215",
        ),
        (lambda b, h, q, k: fg.any(top[b, 0, 0], lambda i: k == i), "declare fg.tensor('top', ..., max=1024), or less"),
        (lambda b, h, q, k: fg.any(top.size(1), lambda i: k == i), "write fg.minimum(n, 1024), or less"),
        (lambda b, h, q, k: fg.any(2.0, lambda i: k == i), "a number of rounds and got float32; write fg.int32(x)"),
        (lambda b, h, q, k: fg.any(k < q, lambda i: k == i), "a number of rounds and got bool"),
        (lambda b, h, q, k: fg.any(3, lambda i: k + i), "fg.any asks for a condition and got int32: compare it"),
        (
            lambda b, h, q, k: fg.sum(3, lambda i: k == i) > 1,
            "fg.sum adds numbers and got a condition; write fg.int32(c)",
        ),
        (lambda b, h, q, k: fg.any(3, k == q), "a number of rounds and a function of the index"),
        (lambda b, h, q, k: fg.any(3, lambda: k == q), "takes the index alone"),
        (lambda b, h, q, k: fg.any(3, lambda i: None), "nothing (a missing `return`?)"),
        (lambda b, h, q, k: fg.any(3, lambda i: kept.append(i) or k == i) | (kept[-1] == k), "outside of that loop"),
    ],
)
def test_what_is_no_loop_says_so_at_its_line(function, told):
    with pytest.raises(SpecError) as caught:
        fg.variant(function)
    assert told in str(caught.value) and caught.value.where.path == __file__


kept: list = []


# ---------------------------------------------------------------------------------------------------------------------
# What is known of them


def test_bounds_hold_what_happens_and_no_more():
    x = fg.param("x", min=-2, max=5, dtype=int)
    n = fg.param("n", min=1, max=3, dtype=int)
    y = fg.param("y", min=0.5, max=2.0)

    def known(function):
        return bounds(score(function))

    total = known(lambda s, b, h, q, k: fg.float32(fg.sum(n, lambda i: x + i)))
    assert (total.lo, total.hi) == (-6.0, 21.0)
    total = known(lambda s, b, h, q, k: fg.sum(n, lambda i: y))
    assert 0.49 < total.lo <= 0.5 and 6.0 <= total.hi < 6.01 and not total.nan
    assert known(lambda s, b, h, q, k: fg.sum(n, lambda i: s)).nan, "infinities of both signs"
    found = [
        bounds(mask(lambda b, h, q, k, n=n, c=c: fg.any(n, lambda i: c) | (k < 0)).operands[0])
        for n, c in ((n, n >= 1), (fg.minimum(n, 2) - 1, n >= 1), (n, n < 1))
    ]
    assert [(bool(t.may_true), bool(t.may_false)) for t in found] == [(True, False), (True, True), (False, True)]


@pytest.mark.parametrize("seed", range(40))
def test_ranges_by_round_hold_every_sum_and_any(seed):
    """On random ranges of rounds and bodies, against every choice."""
    rng = np.random.default_rng(seed)
    lo = int(rng.integers(-1, 3))
    rounds = lo, int(rng.integers(lo, 4))
    ends = np.sort(rng.integers(-3, 4, (4, 2)), 1)
    for dtype, make in ((DType.INT32, ranges.ints), (DType.FLOAT32, ranges.floats)):
        found = by_round("sum", ranges.ints(*rounds), lambda i, make=make: make(*ends[i]), dtype)
        possible = [
            sum(chosen)
            for n in range(rounds[0], rounds[1] + 1)
            for chosen in itertools.product(*(range(a, b + 1) for a, b in ends[: max(n, 0)]))
        ]
        assert found.lo <= min(possible) and found.hi >= max(possible)
        if rounds[0] == rounds[1]:
            assert (found.lo, found.hi) == (min(possible), max(possible))
    truths = [ranges.Truth(np.bool_(t), np.bool_(f)) for t, f in rng.permutation([(1, 0), (0, 1), (1, 1), (0, 1)])]
    found = by_round("any", ranges.ints(*rounds), lambda i: truths[i], DType.BOOL)
    happens = {
        any(chosen)
        for n in range(rounds[0], rounds[1] + 1)
        for chosen in itertools.product(
            *([x for x, may in ((True, t.may_true), (False, t.may_false)) if may] for t in truths[: max(n, 0)])
        )
    }
    assert found.may_true >= (True in happens) and found.may_false >= (False in happens)
    if rounds[0] == rounds[1]:
        assert (bool(found.may_true), bool(found.may_false)) == (True in happens, False in happens)


def sparse(batch=1, blocks=4):
    """Blocks of 16 keys that blocks of 16 queries see, by a table of at most four, and how many of them count."""
    layout = fg.tensor("layout", dims=("batch", None, 4), dtype="int32")
    seen = fg.tensor("seen", dims=("batch", None), dtype="int32", min=0, max=4)

    @fg.variant
    def variant(b, h, q, k):
        return fg.any(seen[b, q // 16], lambda i: layout[b, q // 16, i] == k // 16)

    rng = np.random.default_rng(1)
    tensors = {
        "layout": rng.integers(-1, blocks, (batch, blocks, 4)).astype(np.int32),
        "seen": rng.integers(0, 5, (batch, blocks)).astype(np.int32),
    }
    return variant, case_of(16 * blocks - 3, 16 * blocks - 5, batch, 1, tensors)


@pytest.mark.parametrize("tile", [Tile(q=16, kv=16), Tile(q=16, kv=8), Tile(q=8, kv=16)])
def test_tiles_of_a_table_of_blocks_are_judged_exactly(tile):
    """Round by round a tile reads one element; by the range of the index it would know nothing."""
    variant, case = sparse(batch=2)
    facts = analyse(variant)
    for b in range(2):
        judged, true = tiles.grid(facts, case, tile, b, 0), tiles.true_grid(facts, case, tile, b, 0)
        assert np.array_equal(judged, true)
        assert {EMPTY, FULL} <= set(judged.ravel().tolist())


@pytest.mark.sampled("<lambda>1", "<lambda>2", "<lambda>5")
@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: fg.any(count[b, q], lambda i: top[b, q // 4, i] == k // 4),
        lambda b, h, q, k: k <= q + fg.sum(many, lambda i: i + top[b, 0, 0]),
        lambda b, h, q, k: ~fg.any(fg.minimum(q, 3), lambda i: abs(q - k) == i * 2),
        lambda b, h, q, k: fg.sum(2, lambda i: fg.sin(fg.float32(k * i))) * fg.float32(q) > 0.25,
        lambda b, h, q, k: fg.any(many, lambda i: fg.sum(i + 1, lambda j: k - j) > q),
        lambda b, h, q, k: fg.sum(fg.minimum(q, 3), lambda i: k * i - q) <= k,
        lambda b, h, q, k: fg.sum(fg.minimum(k, 2) - 1, lambda i: fg.float32(q) * 0.5 + i) > 1.5,
        lambda b, h, q, k: fg.sum(fg.minimum(q, 2), lambda i: fg.int64(k) * 3_000_000_000 * (q + i)) > 9_000_000_000,
        lambda b, h, q, k: fg.sum(fg.minimum(q, 3), lambda i: k * 1_000_000_000) > q,
    ],
)
def test_tiles_in_python_and_in_a_kernel_are_sound_and_the_same(function):
    variant = fg.variant(function)
    case = case_of(9, 11, 2, 3, TENSORS, many=2)
    facts, tile = analyse(variant), Tile(q=4, kv=3)
    visited, kept_, _ = run_variant(facts, case, tile)
    for b, h in itertools.product(range(2), range(3)):
        judged, true = tiles.grid(facts, case, tile, b, h), tiles.true_grid(facts, case, tile, b, h)
        assert np.all((judged == true) | (judged == PARTIAL))
        assert np.array_equal(visited[b, h], judged), (b, h)
    assert np.array_equal(kept_, value(variant.mask, float_dtype=np.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives


def slope_of(root, s, step=1e-6):
    return (value(root, s=s + step) - value(root, s=s - step)) / (2 * step)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: fg.sum(3, lambda i: w[h, i] * fg.tanh(s * (i + 1))),
        lambda s, b, h, q, k: fg.sum(many, lambda i: s),
        lambda s, b, h, q, k: fg.sum(count[b, q], lambda i: fg.sin(s) * i + fg.exp(fg.sin(s) * 0.1)),
        lambda s, b, h, q, k: fg.tanh(s) * fg.sum(3, lambda i: fg.sum(i + 1, lambda j: fg.cos(s + j) * fg.tanh(s))),
        lambda s, b, h, q, k: fg.where(fg.any(3, lambda i: q + i == k), fg.sum(2, lambda i: s * s * i), s),
    ],
)
def test_the_derivative_of_a_sum_is_the_sum_of_derivatives(function):
    root, s = score(function), RNG.normal(0, 1, (2, 3, 9, 11))
    assert np.allclose(value(derive(root), s=s), slope_of(root, s), atol=1e-7)


def test_a_sum_that_its_score_does_not_move_has_no_derivative():
    assert derive(score(lambda s, b, h, q, k: fg.sum(3, lambda i: w[h, i] * i))) is None
    root = score(lambda s, b, h, q, k: fg.sum(3, lambda i: s * 2.0))
    assert not any(n.op in LOOPS for n in walk([derive(root)])), "what no index moves is multiplied by the rounds"


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: fg.sum(3, lambda i: w[h, i] * fg.tanh(s * (i + 1))) + fg.sum(3, lambda i: w[h, i]),
        lambda s, b, h, q, k: fg.sum(many, lambda i: w[h, i] * w[h, i]) * w[h, 0],
        lambda s, b, h, q, k: fg.sum(fg.minimum(count[b, q], 3), lambda i: w[h, i] * i) * fg.sum(2, lambda j: w[h, j]),
        lambda s, b, h, q, k: fg.sum(2, lambda i: fg.sum(i + 2, lambda j: fg.tanh(w[h, j] * s) + w[h, i] * w[h, 2])),
    ],
)
def test_elements_that_an_index_selects_have_derivatives(function, monkeypatch):
    root, s = score(function), RNG.normal(0, 1, (2, 3, 9, 11))
    found = np.zeros((2, 3, 9, 11, 3))
    for load, slope in slopes(root, "w").items():
        at = value(load.operands[1]).astype(int)
        for e in range(3):
            found[..., e] += np.where(at == e, value(slope, s=s), 0)
    step = 1e-3
    for e in range(3):
        moved = []
        for by in (step, -step):
            held = TENSORS["w"].astype(np.float64)
            held[:, e] += by
            monkeypatch.setitem(TENSORS, "w", held)
            moved.append(value(root, s=s))
            monkeypatch.undo()
        assert np.allclose(found[..., e], (moved[0] - moved[1]) / (2 * step), atol=1e-5)


def test_gradients_of_more_elements_than_there_are_kernels_for_are_refused():
    table = fg.tensor("table", dims=("heads", 32), dtype="float32")
    variant = fg.variant(score=lambda s, b, h, q, k: s + fg.sum(17, lambda i: table[h, i] * (q - k)))
    asked = (variant, "sm_80", "bfloat16", 64, 64)
    with pytest.raises(PlanError, match=r"for one score a loop reads up to 17 elements of it \(line \d+"):
        KernelRequest.of(*asked, backward=True, gradients=("table",))
    assert KernelRequest.of(*asked, backward=True).asked.gradients == ()


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_a_loop_is_a_loop_in_the_kernel_and_what_it_carries_stands_before_it():
    @fg.variant
    def variant(b, h, q, k):
        return fg.any(count[b, q], lambda i: top[b, q // 4, i] == k // 4)

    scored = variant.score(lambda s, b, h, q, k: s + fg.sum(3, lambda i: w[h, i] * fg.tanh(s * 0.5)))
    work_ = work(scored, "ampere", case=case_of(9, 11, 2, 3, TENSORS), batch=2, heads=3, q_len=9, kv_len=11)
    body = re.search(r"DEVICE bool keep\(.*?\n}", work_.source, re.DOTALL)[0]
    lines = [line for line in body.splitlines()[1:] if "__builtin_assume" not in line]
    assert lines == [
        "  const int count_q = read_count(b, q, p);",
        "  const int q_block = q / 4;",
        "  const int k_block = k / 4;",
        "  bool some = false;",
        "  #pragma unroll 1",
        "  for (int i = 0; i < min(count_q, 4) && !some; ++i) {",
        "    const int top_i = read_top(b, q_block, i, p);",
        "    some = top_i == k_block;",
        "  }",
        "  return some;",
        "}",
    ]
    body = re.search(r"DEVICE float score\(.*?\n}", work_.source, re.DOTALL)[0]
    assert body.index("tanh_f32(s * 0.5f)") < body.index("for (int i = 0; i < 3; ++i) {")
    assert re.search(r"// visible +any\(count\[b, q\], i: top\[b, q // 4, i\] == k // 4\)", work_.source)


def test_formulas():
    text = formula(
        fg.variant(
            lambda b, h, q, k: fg.any(many, lambda i: q + i == k) & (k < 3),
            score=lambda s, b, h, q, k: s + fg.sum(3, lambda i: w[h, i] * i),
        )
    )
    assert "any(many, i: q + i == k)" in text.text() and "sum(3, i: w[h, i]*i)" in text.text()
    assert "any i < many" in text.pretty() and r"\sum_{i=0}^{2}" in text.latex() and r"\bigvee_{i <" in text.latex()


# ---------------------------------------------------------------------------------------------------------------------
# Kernels, executed


@fg.variant
def looped(b, h, q, k):
    return fg.any(count[b, q % 9], lambda i: top[b, q // 64, i] == k // 64) | (k == q)


@looped.score
def looped_scores(s, b, h, q, k):
    return (
        s
        + fg.sum(3, lambda i: w[h, i] * fg.cos((q - k) * 0.05 * (i + 1)) * fg.tanh(s))
        - fg.sum(2, lambda i: k * i) * 0.001
    )


@fg.variant
def summed(b, h, q, k):
    return fg.sum(2, lambda i: k - i * 3) <= 2 * q


@summed.score
def summed_scores(s, b, h, q, k):
    return s + fg.sum(3, lambda i: w[h, i] * (k - q)) * 0.01


def data(heads=2):
    return case_of(
        130,
        150,
        1,
        heads,
        {"top": TENSORS["top"][:1], "count": TENSORS["count"][:1], "w": TENSORS["w"][:heads]},
    )


@pytest.mark.sampled("ampere-variant0", "hopper-variant3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "variant"),
    [(pipeline, variant) for pipeline in ("ampere", "hopper") for variant in (looped_scores, summed_scores)],
)
def test_kernels_of_loops(pipeline, variant):
    w_ = work(variant, pipeline, case=data(), q_len=130, kv_len=150)
    result = w_.run()
    assert w_.wrong(result) == () and result.report.conflicts == []


@pytest.mark.sampled("hopper-gradients2-variant2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "gradients", "variant"),
    [
        (pipeline, gradients, variant)
        for pipeline, gradients in (("ampere", ("w",)), ("hopper", ()))
        for variant in (looped_scores, summed_scores)
    ],
)
def test_backward_kernels_of_loops(pipeline, gradients, variant):
    b = Backward(variant, pipeline=pipeline, case=data(), gradients=gradients, q_len=130, kv_len=150)
    result = b.run()
    assert b.wrong(result) == [] and tuple(result.captured) == gradients
