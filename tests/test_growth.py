"""What a variant costs before it is compiled grows with its operations, not with its cases: counted, never timed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from nested_masks import MASKS, SCORES

import flashgen as fg
from flashgen.analysis import derivative, facts
from flashgen.analysis import words as analysis_words
from flashgen.analysis.derivative import SCORE, derive
from flashgen.analysis.facts import MAX_ATOMS, analyse
from flashgen.analysis.formula import formula
from flashgen.analysis.linear import Algebra
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.codegen.printer import Formula
from flashgen.codegen.variant_code import MAX_FORMULA
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import walk
from flashgen.planning import backward, planner, profile
from flashgen.runtime import nvrtc

DEPTHS = (4, 10, 20, 40)
SIZES = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 8, "kv_len": 8}


class Counter:
    """Counts calls, and stops what makes too many of them."""

    def __init__(self, most: int) -> None:
        self.calls, self.most = 0, most

    def of(self, function):
        def counted(*arguments, **options):
            self.calls += 1
            assert self.calls <= self.most, f"more than {self.most} steps"
            return function(*arguments, **options)

        return counted


@pytest.mark.sampled(
    "exclusive or",
    "exclusive or of what is judged",
    "inequality",
    "the same twice",
    "minimum and maximum",
    "maximum",
    "absolute value",
    "quotients",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_analysis(name, monkeypatch):
    for depth in DEPTHS:
        variant = fg.variant(MASKS[name](depth))
        with monkeypatch.context() as patch:
            counter = Counter(40_000 + 4_000 * depth)
            patch.setattr(facts, "apply", counter.of(facts.apply))
            patch.setattr(Algebra, "extent", counter.of(Algebra.extent))
            found = analyse.__wrapped__(variant)
        atoms = [n for term in (*found.visible, *found.hidden) for n in term.nodes()]
        assert len(atoms) <= 2 * MAX_ATOMS
        assert len(list(walk([*variant.roots, *atoms]))) <= 50 * (depth + MAX_ATOMS)


@pytest.mark.sampled("exclusive or", "the same twice", "minimum and maximum", "maximum", "absolute value", "quotients")
@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_emitted_masks(name):
    text = emit(planner.menu(fg.variant(MASKS[name](40)), "sm_80", "bfloat16", 64).plans[0])
    assert len(text) < 150_000


@pytest.mark.parametrize("name", SCORES)
def test_derivatives(name, monkeypatch):
    for depth in DEPTHS:
        score = fg.variant(score=SCORES[name](depth)).score_node
        with monkeypatch.context() as patch:
            counter = Counter(2_000 + 150 * depth)
            patch.setattr(derivative, "apply", counter.of(derivative.apply))
            slope = derive.__wrapped__(score)
        assert len(list(walk([slope]))) <= 50 + 40 * depth


@pytest.mark.parametrize("name", SCORES)
def test_deep_derivatives_are_right(name):
    """Against a difference quotient in float64, away from the edges."""
    score = fg.variant(score=SCORES[name](24)).score_node
    slope = derive(score)
    s = np.linspace(-0.9, 0.9, 2000)[:, None]  # 0 is a tie of some
    k, step = np.arange(3), 1e-7

    def at(root, x):
        given = {"b": 0, "h": 0, "q": 0, "k": k, "s": x, "sizes": SIZES, "params": {}, "tensors": {}}
        return np.broadcast_to(evaluate(root, **given, float_dtype=np.float64), (len(s), len(k)))

    left, right = (at(score, s) - at(score, s - step)) / step, (at(score, s + step) - at(score, s)) / step
    smooth = np.abs(left - right) <= 1e-4 * (1 + np.abs(left))
    assert smooth.mean() > 0.9
    np.testing.assert_allclose(at(slope, s)[smooth], left[smooth], rtol=1e-4, atol=1e-5)


def test_a_choice_of_0_deep_down_is_exactly_0():
    """What it is multiplied by is infinite there: a product would be NaN."""

    def gated(s, b, h, q, k):
        for i in range(2 * derivative.MAX_OPENED):
            s = fg.where(k > i, s, 0.0) * 2.0
        return fg.exp(s * 1e30) * fg.where(k > 90, s, 0.0)

    slope = derive(fg.variant(score=gated).score_node)
    given = {"b": 0, "h": 0, "q": 0, "k": np.array([0, 50]), "sizes": SIZES, "params": {}, "tensors": {}}
    assert evaluate(slope, **given, s=np.array([3.0])).tolist() == [0.0, 0.0]


def squares(depth):
    def score(s, b, h, q, k):
        for _ in range(depth):
            s = s * s + s
        return s

    return fg.variant(score=score)


@pytest.mark.slow
def test_formulas_and_reprs():
    variant = squares(60)
    assert Formula().inline(variant.score_node, MAX_FORMULA) is None
    assert Formula().inline(squares(2).score_node, MAX_FORMULA) == "(s * s + s) * (s * s + s) + (s * s + s)"
    assert formula(variant).text() == "mask  = True\nscore = (121 operations)"
    assert "* (s" not in emit(planner.menu(variant, "sm_80", "bfloat16", 64).plans[0]).partition("*/")[0]
    for value in (variant, variant.score_node, analyse(variant)):
        assert len(repr(value)) < 2_000
    for name in MASKS:
        for depth in DEPTHS:
            assert len(formula(fg.variant(MASKS[name](depth))).pretty()) < 20_000


def chain(length):
    t = fg.tensor("t", dims=("kv",), dtype="int32", min=0, max=1)

    def mask(b, h, q, k):
        x = k
        for i in range(length):
            x = x + (t[k] if i % 2 else q)
        return (x % 7 <= 3) & (x <= 10**6)

    def score(s, b, h, q, k):
        for i in range(length):
            s = s + 0.25 * (i % 3)
        return s

    return fg.variant(mask, score)


@pytest.mark.slow
def test_a_chain_of_2000_additions_is_planned_and_emitted():
    variant = chain(2000)
    found = analyse(variant)
    case = Case(sizes=SIZES, params={}, tensors={"t": np.ones(8, np.int32)})
    kept = case.evaluate(variant.mask, b=0, h=0, q=np.arange(8)[:, None], k=np.arange(8))
    x = np.arange(8) + 1000 * np.arange(8)[:, None] + 1000
    assert np.array_equal(kept, x % 7 <= 3) and found.visible
    assert derive(variant.score_node, SCORE) is not None
    assert len(emit(planner.menu(variant, "sm_80", "bfloat16", 64).plans[0])) < 250_000
    assert formula(variant).text().count("operations)") == 2


@pytest.mark.sampled(length=(150,))
@pytest.mark.slow
@pytest.mark.parametrize("length", (150, 2000))
def test_a_chain_of_additions_compiles(length):
    def mask(b, h, q, k):
        x = k
        for i in range(length):
            x = x + (q if i % 2 else h)
        return x <= 5000

    text = emit(planner.menu(fg.variant(mask), "sm_80", "bfloat16", 64).plans[0])
    assert nvrtc.compile(text, "sm_80").cubin


@pytest.mark.slow
def test_a_chain_of_20000_operations_is_shown_pickled_and_copied():
    def score(s, b, h, q, k):
        for i in range(20_000):
            s = s + float(i % 5)
        return s

    variant = fg.variant(score=score)
    root = variant.score_node
    assert len(repr(variant)) < 1_000
    assert copy.deepcopy(variant) == variant and copy.copy(variant) == variant and copy.deepcopy(root) is root
    data = pickle.dumps(variant)
    assert pickle.loads(data).score_node is root and hash(pickle.loads(data)) == hash(variant)
    assert pickle.loads(pickle.dumps(root)) is root
    token = variant.token
    del variant, root  # and load it into a process that does not have it any more
    assert pickle.loads(data).token == token


def words(of_key):
    """A mask in words, of which each level is a part of the next two times; `of_key(i, k)` is a condition of a key."""

    def at(depth):
        def mask(b, h, q, k):
            x = k <= q
            for i in range(depth):
                x = (x & (k + i > FAR[q])) | (x & of_key(i, k))
            return x

        return fg.variant(mask)

    return at


FAR = fg.tensor("far", dims=("q",), dtype="int32", min=0, max=1000)
IDS = fg.tensor("ids", dims=("kv",), dtype="int32")


@pytest.mark.parametrize("of_key, said", [(lambda i, k: IDS[k] == i % 3, True), (lambda i, k: IDS[k] == i, False)])
def test_masks_in_words(of_key, said, monkeypatch):
    for depth in DEPTHS[1:]:
        variant = words(of_key)(depth)
        with monkeypatch.context() as patch:
            counter = Counter(50 + 20 * depth)
            patch.setattr(analysis_words, "Word", counter.of(analysis_words.Word))
            found = analysis_words.in_words.__wrapped__(variant)
        assert (found is not None) == said
        if found is not None:
            assert len(found.leaves) <= 50 + 4 * depth and len(found.having(analysis_words.Of.KEY)) == 3
            plan = planner.menu(variant, "sm_90a", "bfloat16", 128).plans[0]
            assert plan.masked_in_words and len(emit(plan)) < 150_000


def test_elements_that_queries_or_keys_select(monkeypatch):
    for depth in DEPTHS:
        variant = fg.variant(MASKS["rounds"](depth))
        with monkeypatch.context() as patch:
            counter = Counter(50 + 10 * depth)
            patch.setattr(backward, "reversed", counter.of(reversed), raising=False)
            assert backward.lookups(variant) == ()


@pytest.mark.parametrize("count", [100, 300])
def test_planning_walks_a_mask_once_for_each_size_of_tile(count, monkeypatch):
    """Candidates are hundreds, and each asks whether its tiles are alike."""

    def some_keys(b, h, q, k):
        found = k <= -1
        for i in range(count):
            found = found | (k == 7 * i)
        return found

    sizes, alone = [], profile.single
    monkeypatch.setattr(profile, "single", lambda n, spans: sizes.append((n, *spans.values())) or alone(n, spans))
    menu = planner.menu(fg.variant(some_keys).bind(), "sm_90a", "bfloat16", 64)
    assert menu.plans and len(sizes) == len(set(sizes)) > 5
