"""Variants: built from functions and from each other, frozen, with the parameters they need."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import PlanError, SpecError
from flashgen.lang import build, trace
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import DType, const, node
from flashgen.lang.variant import DTYPES, HEAD_DIMS, Pins

window = fg.param("window", default=8, min=1, max=99)
block = fg.constant("block", default=4, min=1)
cap = fg.param("cap", default=30.0, min=1.0)
bias = fg.tensor("bias", dims=("heads",), dtype="float32")


@fg.variant
def causal(b, h, q, k):
    """Keys up to the query."""
    return k <= q


@fg.variant(head_dims=(64,))
def local(b, h, q, k):
    return q - k < window


@fg.variant
def blocked(b, h, q, k):
    return q // block == k // block


@fg.variant().score
def softcap(s, b, h, q, k):
    return cap * fg.tanh(s / cap)


def softcap_of(s, b, h, q, k):
    return cap * fg.tanh(s / cap)


@fg.variant().score
def biased(s, b, h, q, k):
    return s + bias[h]


def test_the_decorator_names_and_describes():
    assert (causal.name, causal.doc) == ("causal", "Keys up to the query.")
    assert (softcap.name, softcap.mask) == ("softcap", None)
    assert causal.where.path == __file__ and causal.where.text == "@fg.variant"
    assert causal.head_dims == HEAD_DIMS and causal.dtypes == DTYPES


def test_the_call_and_the_decorators_make_the_same():
    def rule(b, h, q, k):
        return k <= q

    def double(s, b, h, q, k):
        return s * 2

    called = fg.variant(rule, double)
    assert called.name == "rule"
    assert fg.variant()(rule).score(double) == fg.variant(rule).score(double) == called
    assert fg.variant(name="chosen")(rule).name == fg.variant(rule, name="chosen").name == "chosen"
    assert fg.variant(name="chosen").score(double).name == "chosen"
    assert fg.variant(mask=rule).name == "rule" and fg.variant(score=double).name == "double"
    assert fg.variant().name == "full" and fg.variant(lambda b, h, q, k: k <= q).name == "variant"
    assert fg.variant()(lambda b, h, q, k: k <= q).name == fg.variant(score=lambda s, b, h, q, k: s).name == "variant"
    assert fg.variant().score(lambda s, b, h, q, k: s * 2).name == "variant"
    assert fg.variant(name="chosen").score(lambda s, b, h, q, k: s * 2).name == "chosen"
    assert fg.variant(rule).score(lambda s, b, h, q, k: s * 2).name == "rule"


def test_variants_are_frozen_compared_by_meaning_and_pickled():
    again = fg.variant(lambda b, h, q, k: k <= q, name="causal", doc="Keys up to the query.")
    assert again == causal and hash(again) == hash(causal)
    assert again != fg.variant(lambda b, h, q, k: k <= q, name="other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        causal.mask = None
    assert pickle.loads(pickle.dumps(causal & local)) == causal & local


def test_a_variant_with_examples_is_pickled_without_them():
    table = fg.tensor("table", dims=("heads", None), dtype="float32", example=lambda problem, rng: None)
    variants = [fg.load_spec("relative_bias"), fg.variant(score=lambda s, b, h, q, k: s + table[h, 0])]
    for variant in variants:
        again = pickle.loads(pickle.dumps(variant))
        assert again == variant and again.token == variant.token and variant.examples and not again.examples
        assert again.tensors == variant.tensors


def test_decorators_return_new_variants_and_remember_where_they_came_from():
    scored = causal.score(lambda s, b, h, q, k: s)
    assert causal.score_node is None and scored.score_node is trace.SCORE
    assert scored.parents == (causal,) and scored.name == "causal"
    assert causal.score(softcap_of).name == "causal" and fg.variant().score(softcap_of).name == "softcap_of"
    assert (causal & local).parents == (causal, local)
    assert (~causal).parents == (causal,)


# ---------------------------------------------------------------------------------------------------------------------
# Combining


def test_masks_combine():
    assert (causal & local).mask is build.apply("logical_and", causal.mask, local.mask)
    assert (causal | local).mask is build.apply("logical_or", causal.mask, local.mask)
    assert (~causal).mask is build.apply("logical_not", causal.mask)
    assert (causal & local).name == "causal_and_local" and (~causal).name == "not_causal"


def test_full_attention_combines_to_what_it_means():
    full = fg.variant()
    assert (full & causal).mask is (causal & full).mask is causal.mask
    assert (full | causal).mask is None
    assert (~full).mask is const(False) and (~~full).mask is None


def test_the_one_score_of_an_and_is_kept():
    assert (causal & softcap).score_node is (softcap & causal).score_node is softcap.score_node
    with pytest.raises(SpecError, match=r"both have a score function.*softcap\.then\(biased\)"):
        softcap & biased


@pytest.mark.parametrize("combine", [lambda: softcap | causal, lambda: causal | softcap, lambda: ~softcap])
def test_or_and_not_refuse_a_score(combine):
    with pytest.raises(SpecError, match="combines masks and variant 'softcap' has a score function"):
        combine()


def test_then_composes_in_order():
    first_softcap = softcap.then(biased)
    s, h = trace.SCORE, node("index", DType.INT32, (), "h")
    capped = softcap.score_node
    load = node("load", DType.FLOAT32, (h,), bias.tensor)
    assert first_softcap.score_node is build.apply("add", capped, load)
    assert biased.then(softcap).score_node is build.rebuild(
        capped, lambda n: build.apply("add", s, load) if n is s else None
    )
    assert softcap.then(lambda s, b, h, q, k: s + bias[h]).score_node is first_softcap.score_node
    assert causal.then(softcap).score_node is softcap.score_node
    assert causal.then(softcap & local).mask is (causal & local).mask


def test_a_second_score_or_mask_is_refused():
    with pytest.raises(SpecError, match=r"has a score function already.*\.then"):
        softcap.score(lambda s, b, h, q, k: s)
    with pytest.raises(SpecError, match="has a mask already"):
        causal(lambda b, h, q, k: True)
    with pytest.raises(SpecError, match="combine variants with &"):
        fg.variant(mask=causal)


def test_what_is_no_variant_does_not_combine():
    for combine in (lambda: causal & 3, lambda: causal | (lambda b, h, q, k: True)):
        with pytest.raises(TypeError):
            combine()


def test_declarations_of_both_sides_must_agree():
    other = fg.param("window", default=8, min=1, max=98)
    with pytest.raises(SpecError, match="'window' is declared twice"):
        local & fg.variant(lambda b, h, q, k: k < other)


# ---------------------------------------------------------------------------------------------------------------------
# Pins and dimensions


def test_pins_and_dimensions():
    v = fg.variant(tile=[128, 64], stages=3, pipeline="ampere", arch="sm_80", head_dims=[128, 64], dtypes="float16")
    assert v.pins == Pins(tile=(128, 64), stages=3, pipeline="ampere", arch="sm_80")
    assert v.head_dims == (64, 128) and v.dtypes == ("float16",) and not v.only
    assert fg.variant(head_dims=96, only=True).only


def test_combined_pins_and_dimensions():
    tiled, staged = fg.variant(tile=(128, 64)), fg.variant(stages=2)
    assert (tiled & staged).pins == Pins(tile=(128, 64), stages=2)
    with pytest.raises(SpecError, match=r"pins tile=\(128, 64\) and .* pins tile=\(64, 64\)"):
        tiled & fg.variant(tile=(64, 64))
    assert (causal & local).head_dims == (64,)
    assert (fg.variant(head_dims=(64, 96)) & fg.variant(head_dims=(96, 128))).head_dims == (96,)
    with pytest.raises(SpecError, match="none is shared"):
        fg.variant(head_dims=96) & fg.variant(head_dims=32)
    assert (causal & fg.variant(dtypes="float16", only=True)).only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tyle": (1, 2)}, "no option 'tyle' (did you mean 'tile'?)"),
        ({"warps": 4}, "no option 'warps'; the pins are tile, stages, pipeline, arch"),
        ({"tile": 128}, "tile is (rows of q, rows of kv)"),
        ({"tile": (128, 0)}, "tile is (rows of q, rows of kv)"),
        ({"stages": 0}, "stages is a positive integer"),
        ({"arch": 80}, "arch is a name"),
        ({"head_dims": ()}, "head_dims is a tuple of positive integers"),
        ({"head_dims": (64, "128")}, "head_dims is a tuple of positive integers"),
        ({"dtypes": ("float32",)}, "dtypes is a tuple of 'float16' and 'bfloat16'"),
        ({"only": True}, "give one of them"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(SpecError) as caught:
        fg.variant(**options)
    assert message in str(caught.value) and caught.value.where.path == __file__


# ---------------------------------------------------------------------------------------------------------------------
# What it needs


def test_symbols_are_sorted_by_name():
    v = (causal & local & blocked).then(softcap).then(biased)
    assert [p.name for p in v.params] == ["cap", "window"]
    assert [c.name for c in v.constants] == ["block"]
    assert [t.name for t in v.tensors] == ["bias"]
    assert v.roots == (v.mask, v.score_node) and fg.variant().roots == ()


def test_uses():
    assert causal.uses("q") and causal.uses("k") and not causal.uses("h") and not causal.uses("s")
    assert biased.uses("h") and biased.uses("s") and biased.uses("bias") and not biased.uses("window")
    assert fg.variant(lambda b, h, q, k: b < fg.batch).uses("batch")
    sized = fg.tensor("sized", dims=(None,), dtype="int32")
    assert fg.variant(lambda b, h, q, k: k < sized.size(0)).uses("sized")


def test_values_fill_in_defaults():
    assert local.values({}) == {"window": 8} and local.values({"window": np.int64(9)}) == {"window": 9}
    assert softcap.values({"cap": 3}) == {"cap": 3.0}
    assert type(softcap.values({"cap": 3})["cap"]) is float
    assert local.values({"window": 9.0}) == {"window": 9}


required = fg.variant(lambda b, h, q, k: q - k < fg.param("reach", min=0), name="required")
LINE = inspect.currentframe().f_lineno - 1


@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        (local, {"windw": 3}, "'local' has no parameter 'windw' (did you mean 'window'?); it takes window"),
        (causal, {"window": 3}, "'causal' has no parameter 'window'; it takes nothing: its mask and score read none"),
        (blocked, {"block": 3}, "'block' of 'blocked' is the int32 constant"),
        (biased, {"bias": 3}, "'bias' of 'biased' is a captured tensor of float32, ('heads',), not a parameter"),
        (required, {}, "'required' needs the parameter 'reach', int32, at least 0\n  nearest: reach=... in a call,"),
        (required, {}, f"--param reach=VALUE of a command, or default= of the fg.param that {__file__}:{LINE} is"),
        (local, {"window": 0}, "parameter 'window' of 'local' is 0: the least it may be is 1"),
        (local, {"window": 100}, "the most it may be is 99"),
        (local, {"window": 2.5}, "is int32 and got 2.5: give a whole number"),
        (local, {"window": float("inf")}, "is int32 and got inf"),
        (local, {"window": float("nan")}, "is int32 and got nan"),
        (local, {"window": Fraction(10**400)}, "does not fit into -2^31 to 2^31 - 1"),
        (local, {"window": Fraction(9, 2)}, "is int32 and got Fraction(9, 2): give a whole number"),
        (local, {"window": "8"}, "is int32 and got '8'"),
        (local, {"window": True}, "is int32 and got True"),
        (required, {"reach": 1 << 31}, "2147483648 does not fit into -2^31 to 2^31 - 1"),
        (softcap, {"cap": float("nan")}, "got NaN"),
        (softcap, {"cap": 1e39}, "is float32: 1e+39 does not fit"),
        (softcap, {"cap": 0.5}, "is 0.5: the least it may be is 1.0"),
    ],
)
def test_bad_parameters(variant, given, message):
    with pytest.raises(PlanError) as caught:
        variant.values(given)
    assert message in str(caught.value)


def test_bind_folds_constants():
    q, k = node("index", DType.INT32, (), "q"), node("index", DType.INT32, (), "k")
    for size, bound in ((4, blocked.bind()), (7, blocked.bind(block=7))):
        assert bound.constants == () and bound.name == "blocked"
        assert bound.mask is build.apply("eq", build.apply("floor_div", q, size), build.apply("floor_div", k, size))
    assert causal.bind() is causal
    area = fg.variant(lambda b, h, q, k: q < block * block - 1)
    assert area.bind(block=3).mask is build.apply("lt", q, 8)
    assert fg.variant(lambda b, h, q, k: block > 2).bind().mask is None
    scaled = fg.constant("scaled", default=2.0)
    assert fg.variant(score=lambda s, b, h, q, k: s * scaled).bind().score_node.operands[1] is const(2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"blok": 3}, "no constant 'blok' (did you mean 'block'?)"),
        ({"block": 0}, "constant 'block' of 'blocked' is 0: the least it may be is 1"),
        ({"block": 1.5}, "give a whole number"),
    ],
)
def test_bad_constants(given, message):
    with pytest.raises(PlanError) as caught:
        blocked.bind(**given)
    assert message in str(caught.value)
    with pytest.raises(PlanError, match="is the int32 parameter"):
        local.bind(window=3)


def test_a_flipped_score_computes_the_same_from_minus_s():
    s = np.linspace(-60, 60, 13)

    def value(variant, s):
        return evaluate(variant.score_node, s=s, sizes={}, params={"cap": 30.0}, tensors={}, float_dtype=np.float64)

    assert np.array_equal(value(softcap.with_flipped_score(), -s), value(softcap, s))
    flipped = causal.with_flipped_score()
    assert np.array_equal(value(flipped, -s), s) and flipped.mask is causal.mask
    assert flipped.name == "causal" and flipped.parents == (causal,)


def test_equal_declarations_keep_the_example_of_their_own_spec():
    def declared(example):
        doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32", sorted=True, example=example)
        return fg.variant(lambda b, h, q, k: doc[b, q] == doc[b, k])

    def first(problem, rng): ...
    def second(problem, rng): ...

    none, one, two = declared(None), declared(first), declared(second)
    assert none == one == two  # what they compute is the same
    assert [v.tensors[0].example for v in (none, one, two)] == [None, first, second]
    shifted = two.score(lambda s, b, h, q, k: s + 1.0)
    assert (shifted & fg.variant(lambda b, h, q, k: k <= q)).tensors[0].example is second
    assert shifted.bind().tensors[0].example is second


def test_a_score_that_chooses_between_a_number_and_minus_infinity_is_a_mask():
    near, seen = (lambda q, k: q - k < 9), (lambda q, k: k <= q)
    plain = fg.variant(seen_mask := lambda b, h, q, k: seen(q, k) & near(q, k)).bind()
    for hides in (
        lambda s, b, h, q, k: fg.where(seen(q, k) & near(q, k), s, -math.inf),
        lambda s, b, h, q, k: fg.where(seen(q, k), fg.where(near(q, k), s, -math.inf), -math.inf),
    ):
        bound = fg.variant(score=hides).bind()
        assert bound.mask is plain.mask and bound.score_node is None
    bound = fg.variant(seen_mask).score(lambda s, b, h, q, k: fg.where(q > k + 4, -math.inf, 2.0 * s)).bind()
    assert bound.mask is fg.variant(lambda b, h, q, k: seen_mask(b, h, q, k) & ~(q > k + 4)).mask
    assert bound.score_node is fg.variant(score=lambda s, b, h, q, k: 2.0 * s).score_node
    assert bound.bind() is bound


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: fg.where(s > 0.0, s, -math.inf),  # the score decides
        lambda s, b, h, q, k: fg.where(k <= q, s, -1e9),  # a number
        lambda s, b, h, q, k: fg.where(k <= q, s, -math.inf) * 2.0,  # what comes after may make one of it
        lambda s, b, h, q, k: fg.where(k <= q, s, math.inf),
    ],
)
def test_other_choices_of_a_score_stay_scores(score):
    variant = fg.variant(score=score)
    assert variant.bind() is variant
