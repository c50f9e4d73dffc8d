"""Masks as disjunctions of zones and conditions: what each rewrite makes of the masks people write."""

import subprocess
import sys
import textwrap

import pytest

import flashgen as fg
from flashgen.analysis.facts import MAX_TERMS, Term, analyse
from flashgen.analysis.formula import symbolic, text
from flashgen.lang.expr import DType, walk
from flashgen.lang.load import shipped

w = fg.param("w", default=4, min=1)
c = fg.param("c", default=4, min=1)
x = fg.param("x", default=0)
f = fg.param("f", default=1.0)
ids = fg.tensor("ids", dims=("batch", "kv"), dtype="int32", sorted=True)
lengths = fg.tensor("lengths", dims=("batch",), dtype="int64")
reach = fg.tensor("reach", dims=("q",), dtype="int32", min=0, max=512)
layout = fg.tensor("layout", dims=(None, None), dtype="bool")


def shown(term):
    """A term as text: bounds, then uniform conditions in <>, then others in []."""
    signs = {"lo": ">=", "hi": "<="}
    parts = []
    for kind in ("q_lo", "q_hi", "k_lo", "k_hi", "d_lo", "d_hi"):
        name, end = kind.split("_")
        parts += [f"{name} {signs[end]} {text(symbolic(n))}" for n in getattr(term.zone, kind)]
    parts += [f"<{text(symbolic(n))}>" for n in term.uniform]
    parts += [f"[{text(symbolic(n))}]" for n in term.others]
    return ", ".join(parts)


def facts_of(mask):
    return analyse(fg.variant(mask))


def visible(mask):
    return [shown(term) for term in facts_of(mask).visible]


def hidden(mask):
    return [shown(term) for term in facts_of(mask).hidden]


EXACT = {
    "causal": (lambda b, h, q, k: k <= q, ["d >= 0"], ["d <= -1"]),
    "bottom right": (
        lambda b, h, q, k: k <= q + fg.kv_len - fg.q_len,
        ["d >= q_len - kv_len"],
        ["d <= (q_len - kv_len) - 1"],
    ),
    "window": (lambda b, h, q, k: (k <= q) & (q - k < w), ["d >= 0, d <= w - 1"], ["d <= -1", "d >= w"]),
    "negated": (lambda b, h, q, k: ~((k > q) | (q - k >= w)), ["d >= 0, d <= w - 1"], ["d <= -1", "d >= w"]),
    "two sides": (lambda b, h, q, k: abs(q - k) <= 3, ["d >= -3, d <= 3"], ["d >= 4", "d <= -4"]),
    "at a distance": (
        lambda b, h, q, k: abs(q - k) == 3,
        ["d >= 3, d <= 3", "d >= -3, d <= -3"],
        ["d >= -2, d <= 2", "d >= 4", "d <= -4"],
    ),
    "diagonal": (lambda b, h, q, k: q == k, ["d >= 0, d <= 0"], ["d <= -1", "d >= 1"]),
    "all but the diagonal": (lambda b, h, q, k: q != k, ["d <= -1", "d >= 1"], ["d >= 0, d <= 0"]),
    "prefix": (
        lambda b, h, q, k: (k <= q) | (k < x),
        ["d >= 0", "k <= x - 1"],
        ["k >= x, d <= -1"],
    ),
    "padding": (lambda b, h, q, k: k < lengths[b], ["k <= lengths[b] - 1"], ["k >= lengths[b]"]),
    "minimum": (lambda b, h, q, k: fg.minimum(q, k) < 5, ["q <= 4", "k <= 4"], ["q >= 5, k >= 5"]),
    "maximum": (lambda b, h, q, k: k < fg.maximum(x, 5), ["k <= max(5, x) - 1"], ["k >= max(5, x)"]),
    "choice of numbers": (
        lambda b, h, q, k: k < fg.where(q < 10, 5, q),
        ["q <= 9, k <= 4", "q >= 10, d >= 1"],
        ["q <= 9, k >= 5", "q >= 10, d <= 0"],
    ),
    "choice of conditions by head": (
        lambda b, h, q, k: fg.where(h < 4, k <= q, q - k < w),
        ["d >= 0, <h < 4>", "d <= w - 1, <4 <= h>"],
        ["d <= -1, <h < 4>", "d >= w, <4 <= h>"],
    ),
    "exclusive or": (
        lambda b, h, q, k: (k <= q) ^ (k < 5),
        ["k >= 5, d >= 0", "k <= 4, d <= -1"],
        ["k <= 4, d >= 0", "k >= 5, d <= -1"],
    ),
    "equal conditions": (
        lambda b, h, q, k: (k <= q) == (k < 5),
        ["k <= 4, d >= 0", "k >= 5, d <= -1"],
        ["k >= 5, d >= 0", "k <= 4, d <= -1"],
    ),
    "counted conditions": (
        lambda b, h, q, k: fg.int32(k <= q) + fg.int32(k < 5) >= 1,
        ["d >= 0", "k <= 4, d <= -1"],
        ["k >= 5, d <= -1"],
    ),
    "one quotient": (
        lambda b, h, q, k: (q - k) // 4 != 3,
        ["d <= 11", "d >= 16"],
        ["d >= 12, d <= 15"],
    ),
    "a quotient by a parameter": (lambda b, h, q, k: k // c < 3, ["k <= c*3 - 1"], ["k >= c*3"]),
    "a shift": (lambda b, h, q, k: (k >> 3) <= 2, ["k <= 23"], ["k >= 24"]),
    "a multiple": (lambda b, h, q, k: 3 * k <= 2 * x + 5, ["k <= (x*2 + 5) // 3"], ["k >= (x*2 + 8) // 3"]),
    "both in 64 bits": (lambda b, h, q, k: fg.int64(k) <= fg.int64(q), ["d >= 0"], ["d <= -1"]),
    "cancelled": (lambda b, h, q, k: q - k < w - k, ["q <= w - 1"], ["q >= w"]),
    "without a position": (lambda b, h, q, k: h % 2 == 0, ["<h % 2 == 0>"], ["<h % 2 != 0>"]),
    "always": (lambda b, h, q, k: (k >= 0) & (k < fg.kv_len) & (q - k <= fg.q_len), [""], []),
    "all but the last key": (lambda b, h, q, k: k < fg.kv_len - 1, ["k <= kv_len - 2"], ["k >= kv_len - 1"]),
    "the last query": (lambda b, h, q, k: q >= fg.q_len - 1, ["q >= q_len - 1"], ["q <= q_len - 2"]),
    "never": (lambda b, h, q, k: (k > q) & (k < q), [], ["d >= 0", "d <= 0"]),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_masks(name):
    mask, seen, unseen = EXACT[name]
    assert visible(mask) == seen
    assert hidden(mask) == unseen
    assert facts_of(mask).exact


JUDGED = {
    "chunks, by their distance": (
        lambda b, h, q, k: (k <= q) & (q // c == k // c),
        ["d >= 0, d <= c - 1, [q // c == k // c]"],
    ),
    "block causal": (lambda b, h, q, k: k // 16 <= q // 16, ["d >= -15, [k // 16 <= q // 16]"]),
    "block causal by remainder": (
        lambda b, h, q, k: k - k % 16 <= q,
        ["d >= -15, [k <= k % 16 + q]"],
    ),
    "a window of blocks": (
        lambda b, h, q, k: (q // 64 - k // 64 < w) & (k <= q),
        ["d >= 0, d <= w*64 - 1, [q // 64 < k // 64 + w]"],
    ),
    "dilation": (
        lambda b, h, q, k: (k <= q) & ((q - k) % 4 == 0),
        ["d >= 0, [(q - k) % 4 == 0]"],
    ),
    "a captured window of known bound": (lambda b, h, q, k: q - k <= reach[q], ["d <= 512, [q - reach[q] <= k]"]),
    "strided causal": (lambda b, h, q, k: 2 * k <= q, ["k <= (q_len - 1) // 2, [k*2 <= q]"]),
    "documents": (lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q), ["d >= 0, [ids[b, q] == ids[b, k]]"]),
    "a captured condition": (lambda b, h, q, k: ~layout[q // 8, k // 8], ["[layout[q // 8, k // 8] == 0]"]),
    "a float comparison": (lambda b, h, q, k: q - k < f, ["[q - k < f]"]),
    "an alternative of judged conditions stays whole": (
        lambda b, h, q, k: layout[q // 8, k // 8] | (ids[b, q] == ids[b, k]),
        ["[(ids[b, q] == ids[b, k]) | (layout[q // 8, k // 8] != 0)]"],
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_masks_judged_in_part(name):
    mask, seen = JUDGED[name]
    assert visible(mask) == seen
    assert not facts_of(mask).exact


def test_a_negated_float_comparison_keeps_its_meaning_for_nan():
    (term,) = facts_of(lambda b, h, q, k: ~(q * f < k * f)).visible
    assert [n.op for n in term.others] == ["logical_not"]


def test_no_mask_is_always():
    facts = analyse(fg.variant())
    assert facts.visible == (Term(),) and facts.hidden == () and facts.exact


def test_bounds_of_parameters_drop_weaker_bounds():
    """w is at least 1, so a key that is less than w back and one that is less than 1 back are one condition."""
    assert visible(lambda b, h, q, k: (q - k < w) & (q - k < 1)) == ["d <= 0"]
    assert visible(lambda b, h, q, k: (q - k < w) | (q - k < 1)) == ["d <= w - 1"]


def test_a_mask_of_many_terms_is_judged_where_it_does_not_fit():
    def many(b, h, q, k):
        mask = k == 3
        for i in range(5, 5 + 4 * MAX_TERMS, 2):
            mask = mask | (k == i)
        return mask & (k <= q)

    facts = facts_of(many)
    assert len(facts.visible) == 1 and not facts.exact
    (term,) = facts.visible
    assert len(term.others) == 1 and term.zone.d_lo  # the causal half is still a bound
    assert len(facts.hidden) <= MAX_TERMS


@pytest.mark.slow
def test_a_deep_chain_of_conditions_does_not_recurse():
    def deep(b, h, q, k):
        mask = k >= 1
        for i in range(3, 5000, 2):
            mask = mask & (k != i)
        return mask

    assert len(facts_of(deep).hidden) <= MAX_TERMS


def test_dependence_on_batch_and_head():
    padding = facts_of(lambda b, h, q, k: k < lengths[b])
    heads = facts_of(lambda b, h, q, k: (k <= q) | (h == 0))
    cancelled = facts_of(lambda b, h, q, k: k + h <= q + h)
    assert (padding.uses_batch, padding.uses_head) == (True, False)
    assert (heads.uses_batch, heads.uses_head) == (False, True)
    assert (cancelled.uses_batch, cancelled.uses_head) == (False, False)


def test_bounds_and_uniform_conditions_are_free_of_the_position():
    for name in shipped():
        facts = analyse(fg.load_spec(name).bind())
        for term in (*facts.visible, *facts.hidden):
            nodes = [*term.zone.nodes(), *term.uniform]
            assert all(not (n.op == "index" and n.attr in ("q", "k")) for n in walk(nodes)), name
            assert all(n.dtype.is_int for n in term.zone.nodes())
            assert all(n.dtype is DType.BOOL for n in (*term.uniform, *term.others))


@pytest.mark.slow
def test_facts_are_the_same_in_every_process():
    script = textwrap.dedent(
        """
        import flashgen as fg
        from flashgen.analysis.facts import analyse
        from flashgen.lang.expr import serialize
        from flashgen.lang.load import shipped
        for name in shipped():
            facts = analyse(fg.load_spec(name).bind())
            for term in (*facts.visible, *facts.hidden):
                print(name, [len(getattr(term.zone, kind)) for kind in term.zone.__slots__])
                print(serialize(term.nodes()))
        """
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and len(runs[0].splitlines()) > 100


# ---------------------------------------------------------------------------------------------------------------------
# Widths


def wide(mask):
    facts = facts_of(mask)
    return {text(symbolic(n)) for n in facts.int64 if n in set(walk([facts.variant.mask]))}


def test_positions_and_windows_fit_in_32_bits():
    assert wide(lambda b, h, q, k: (k <= q + fg.kv_len - fg.q_len) & (q - k < w) & (q % 64 < 2 * k + 7)) == set()
    assert wide(lambda b, h, q, k: q - k < 100 * (h + 1) + 2 * b + fg.heads + fg.batch) == set()


def test_products_that_may_pass_32_bits_are_widened():
    assert wide(lambda b, h, q, k: q * fg.kv_len + k < 7) == {"q*kv_len", "q*kv_len + k"}
    assert wide(lambda b, h, q, k: q - k < x * 2) == {"x*2"}
    assert wide(lambda b, h, q, k: q - k < abs(x)) == {"abs(x)"}  # of the least int32


def test_declared_bounds_keep_32_bits():
    small = fg.param("small", default=1, min=-1000, max=1000)
    assert wide(lambda b, h, q, k: q - k < small * 2000) == set()
    assert wide(lambda b, h, q, k: (q * 127) // 2 <= k) == set()
    assert wide(lambda b, h, q, k: (q * 129) // 2 <= k) == {"q*129"}


def test_what_the_analysis_derives_is_widened_too():
    """q - k < x holds from d = x - 1, which leaves int32 for the least x."""
    facts = facts_of(lambda b, h, q, k: q - k < x)
    (bound,) = facts.visible[0].zone.d_hi
    assert text(symbolic(bound)) == "x - 1" and bound in facts.int64


def test_captured_64_bit_values_are_of_their_own_type():
    facts = facts_of(lambda b, h, q, k: k < lengths[b])
    (length,) = (n for n in walk(facts.visible[0].zone.nodes()) if n.op == "load")
    assert length.dtype is DType.INT64
    assert not facts.int64, "and as a bound they are clamped to an int32"
