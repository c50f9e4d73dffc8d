"""Formulas: what people read of a variant, and the traffic of bands as closed-form sums."""

import subprocess
import sys

import numpy as np
import pytest
import sympy
from random_masks import random_case, random_mask, seeded

import flashgen as fg
from flashgen.analysis import counts
from flashgen.analysis.facts import analyse
from flashgen.analysis.formula import formula, symbolic, text, tile_formulas
from flashgen.analysis.tiles import Case
from flashgen.lang.load import shipped
from flashgen.planning.plan import Tile

TEXTS = {
    "full": "mask  = True\nscore = s",
    "sliding_window": "mask  = (k <= q) & (q - k < window)\nscore = s",
    "chunked": "mask  = (k <= q) & (q // chunk == k // chunk)\nscore = s",
    "document": "mask  = doc[b, q] == doc[b, k]\nscore = s",
    "softcap": "mask  = True\nscore = cap*tanh(s/cap)",
    "butterfly": "mask  = bitand(bitxor(q // block, k // block), bitxor(q // block, k // block) - 1) == 0\nscore = s",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name):
    assert formula(fg.load_spec(name)).text() == TEXTS[name]


def test_pretty_and_latex():
    chunked = formula(fg.load_spec("chunked"))
    assert chunked.pretty().splitlines() == ["mask  = ⌊q/chunk⌋ = ⌊k/chunk⌋ ∧ k ≤ q", "score = s"]
    quotient = r"\left\lfloor \frac{%s}{\mathrm{chunk}} \right\rfloor"
    assert chunked.latex().splitlines()[0] == rf"mask  = {quotient % 'q'} = {quotient % 'k'} \wedge k \leq q"
    softcap = formula(fg.load_spec("softcap")).pretty().splitlines()
    assert softcap[1:] == ["score =         ⎛ s ⎞", "        cap⋅tanh⎜───⎟", "                ⎝cap⎠"]


def test_powers_of_integer_operations_have_latex():
    def shown(function):
        return formula(fg.variant(function)).latex().splitlines()[0]

    squared = shown(lambda b, h, q, k: q - (k % 3) ** 2 > 0)
    assert squared == r"mask  = q - \left(k \bmod 3\right)^{2} > 0"
    broken = shown(lambda b, h, q, k: fg.float32(k & 3) ** 0.3 < fg.float32(q // 2) ** 0.3)
    assert broken == (
        r"mask  = \operatorname{bitand}\left(k, 3\right)^{0.3}"
        r" < \left\lfloor \frac{q}{2} \right\rfloor^{0.3}"
    )


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_spec_has_a_formula_without_trailing_blanks(name):
    found = formula(fg.load_spec(name))
    for shown in (found.text(), found.pretty(), found.latex()):
        assert shown.startswith("mask  = ") and "score = " in shown
        assert all(line == line.rstrip() for line in shown.splitlines())


def test_integer_operations_are_bracketed_as_they_were_written():
    def shown(function):
        return text(symbolic(fg.variant(function).mask))

    assert shown(lambda b, h, q, k: -(q // 2) < k) == "-(q // 2) < k"
    assert shown(lambda b, h, q, k: (-q) // 2 < k) == "(-q) // 2 < k"
    assert shown(lambda b, h, q, k: (q * 2) // 3 < k) == "(q*2) // 3 < k"
    assert shown(lambda b, h, q, k: q * (k // 3) < k) == "q*(k // 3) < k"
    assert shown(lambda b, h, q, k: (q + k) % 3 < k >> 1) == "(q + k) % 3 < k >> 1"
    assert shown(lambda b, h, q, k: (q // 2) // 3 < k) == "(q // 2) // 3 < k"
    assert shown(lambda b, h, q, k: (q << 2) + k < 9) == "(q << 2) + k < 9"
    assert shown(lambda b, h, q, k: k - (q >> 1) < q + k % 3) == "k - (q >> 1) < q + k % 3"
    assert shown(lambda b, h, q, k: fg.int32(q < k) << 2 == ~k) == "where(k > q, 1, 0) << 2 == bitnot(k)"


CHOICES = {
    "where(where(k < q, kv_len, 5) == 3, h, q - k) > 1": lambda b, h, q, k: (
        fg.where(fg.where(q > k, fg.kv_len, 5) == 3, h, q - k) > 1
    ),
    "where(where(q < q/3, kv_len, b) == 3, h, q - k) > 1": lambda b, h, q, k: (
        fg.where(fg.where(q / 3 > fg.float32(q), fg.kv_len, b) == 3, h, q - k) > 1
    ),
    "k < where(where(q > 3, k, h) == 4, 1, 0) + 5": lambda b, h, q, k: k < fg.int32(fg.where(q > 3, k, h) == 4) + 5,
    "q - k <= where(where(h < h/3, kv_len, b) == 1, 5, 3)": lambda b, h, q, k: (
        q - k <= fg.where(fg.where(h / 3 > fg.float32(h), fg.kv_len, b) == 1, 5, 3)
    ),
}
SIZES = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": 7, "kv_len": 9}


@pytest.mark.parametrize("shown", CHOICES)
def test_a_choice_by_another_choice_is_written_as_it_was(shown):
    variant = fg.variant(CHOICES[shown])
    found, case = formula(variant), Case(sizes=SIZES, params={}, tensors={})
    assert found.text().splitlines()[0] == f"mask  = {shown}"
    assert "ITE" not in found.pretty() + found.latex()
    for q, k in np.ndindex(7, 9):
        place = {"b": 1, "h": 2, "q": q, "k": k}
        assert concrete(found.mask, case, place) == bool(case.evaluate(variant.mask, **place)), place


def test_brackets_around_shifts_and_remainders_are_in_all_forms():
    found = formula(fg.variant(lambda b, h, q, k: (q << 2) + k < -(q % 3)))
    assert found.pretty().splitlines()[0] == "mask  = (q << 2) + k < -(q % 3)"
    assert found.latex().splitlines()[0] == r"mask  = \left(q \ll 2\right) + k < - \left(q \bmod 3\right)"


def concrete(expression, case, place):
    """The value of a symbolic mask at a position."""
    values = {**case.sizes, **case.params, **place}
    names = {x: values[x.name] for x in expression.free_symbols if isinstance(x, sympy.Symbol) and x.name in values}
    found = expression.subs(names).doit()

    def element(x):
        array = case.tensors[x.base.name]
        index = [0 if size == 1 else int(i) for i, size in zip(x.indices, array.shape, strict=True)]
        value = array[tuple(index)].item()
        return sympy.sympify(int(value) if isinstance(value, bool) else value)

    return bool(found.replace(lambda x: isinstance(x, sympy.Indexed), element).doit())


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(40))
def test_a_formula_means_what_the_mask_means(seed):
    source = seeded(seed)
    variant = random_mask(source, depth=2)
    if variant is None:
        pytest.skip("the language refuses this mask")
    case, _ = random_case(source)
    expression = symbolic(variant.mask)
    for _ in range(4):
        place = {"b": 0, "h": 1}
        place |= {"q": source.integer(0, case.sizes["q_len"] - 1), "k": source.integer(0, case.sizes["kv_len"] - 1)}
        assert concrete(expression, case, place) == bool(case.evaluate(variant.mask, **place)), place


# ---------------------------------------------------------------------------------------------------------------------
# Traffic

BANDS = {
    "full": {},
    "causal": {},
    "causal_bottom_right": {},
    "sliding_window": {"window": 9},
    "alibi": {},
}


@pytest.mark.sampled(
    "shape1-full",
    "shape1-alibi",
    "shape2-full",
    "shape2-causal",
    "shape2-causal_bottom_right",
    "shape2-sliding_window",
    "shape2-alibi",
    "shape3-full",
    "shape0-full",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("shape", [(37, 50, 8, 4), (50, 37, 8, 16), (3, 20, 8, 8), (20, 3, 8, 8)])
def test_traffic_formulas_count_as_the_tiles_do(name, shape):
    q_len, kv_len, tile_q, tile_kv = shape
    facts = analyse(fg.load_spec(name).bind())
    formulas = tile_formulas(facts)
    case = Case(
        sizes={"batch": 2, "heads": 3, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}, params=BANDS[name], tensors={}
    )
    counted = counts.count(facts, case, Tile(q=tile_q, kv=tile_kv))
    known = {**case.sizes, **case.params, "tile_q": tile_q, "tile_kv": tile_kv}

    def number(expression):
        return expression.subs({x: known[x.name] for x in expression.free_symbols if x.name in known}).doit()

    for field in ("total", "visited", "visited_rows", "visited_columns", "visited_elements", "visible"):
        assert number(getattr(formulas, field)) == getattr(counted, field), field
    known |= {"head_dim": 64, "v_head_dim": 32, "itemsize": 2}
    assert number(formulas.flops) == 2 * 96 * counted.visited_elements
    assert number(formulas.flops_useful) == 2 * 96 * counted.visible
    assert number(formulas.read_bytes) == 2 * (64 * counted.visited_rows + 96 * counted.visited_columns)
    assert number(formulas.write_bytes) == 6 * q_len * (2 * 32 + 4)


def test_traffic_of_a_band_that_a_choice_by_another_moves_is_counted():
    facts = analyse(fg.variant(CHOICES["q - k <= where(where(h < h/3, kv_len, b) == 1, 5, 3)"]).bind())
    visible = tile_formulas(facts).visible
    known = {x: SIZES[x.name] for x in visible.free_symbols if x.name in SIZES}
    counted = counts.count(facts, Case(sizes=SIZES, params={}, tensors={}), Tile(q=4, kv=4))
    assert visible.subs(known).doit() == counted.visible


def test_traffic_of_simple_masks_reads_simply():
    full = tile_formulas(analyse(fg.load_spec("full")))
    assert str(full.visible) == "batch*heads*kv_len*q_len"
    causal = tile_formulas(analyse(fg.load_spec("causal")))
    assert str(causal.visible) == "batch*heads*Sum(Min(q, kv_len - 1) + 1, (q, 0, q_len - 1))"
    assert not causal.visited.has(sympy.Piecewise)


def test_a_band_that_a_head_moves_is_summed_over_heads():
    """Its condition stays inside the sum over queries: no index is left over, and numbers are those of the tiles."""
    off = fg.tensor("off", dims=("heads",), dtype="int32", min=-50, max=50)
    facts = analyse(fg.variant(lambda b, h, q, k: k <= q + off[h]).bind())
    formulas, shift = tile_formulas(facts), np.array([-9, 0, 5], np.int32)
    sizes = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": 12, "kv_len": 14}
    case = Case(sizes=sizes, params={}, tensors={"off": shift})
    counted = counts.count(facts, case, Tile(q=4, kv=4))
    known = {**sizes, "tile_q": 4, "tile_kv": 4}
    for field in ("total", "visited", "visited_rows", "visited_columns", "visited_elements", "visible"):
        expression = getattr(formulas, field)
        free = {x.name for x in expression.free_symbols if isinstance(x, sympy.Symbol)}
        assert free <= {*known, "off"}, field
        found = expression.subs({x: known[x.name] for x in expression.free_symbols if x.name in known}).doit()
        found = found.replace(
            lambda x: isinstance(x, sympy.Indexed), lambda x: sympy.Integer(int(shift[int(x.indices[0])]))
        )
        assert found.doit() == getattr(counted, field), field


def test_captured_lengths_appear_in_the_sum_over_the_batch():
    padding = tile_formulas(analyse(fg.load_spec("padding").bind()))
    lengths = sympy.IndexedBase("lengths", integer=True)
    assert any(x.base == lengths for x in padding.visible.atoms(sympy.Indexed))


def test_masks_of_several_zones_have_no_traffic_formula():
    for name in ("prefix_lm", "document", "longformer"):
        assert tile_formulas(analyse(fg.load_spec(name).bind())) is None


@pytest.mark.slow
def test_nothing_but_this_module_needs_sympy():
    script = (
        "import sys, numpy as np, flashgen as fg\n"
        "from flashgen.analysis import counts, derivative, facts, tiles\n"
        "v = fg.load_spec('sliding_window').bind()\n"
        "sizes = dict(batch=1, heads=1, kv_heads=1, q_len=9, kv_len=9)\n"
        "case = tiles.Case(sizes=sizes, params=v.values({}), tensors={})\n"
        "from flashgen.planning.plan import Tile\n"
        "counts.count(facts.analyse(v), case, Tile(q=4, kv=4))\n"
        "derivative.derive(fg.load_spec('softcap').score_node)\n"
        "assert 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_arrays_need_no_sympy_numbers():
    """Counts are plain ints, ready for JSON."""
    facts = analyse(fg.load_spec("longformer").bind())
    case = Case(
        sizes={"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 50, "kv_len": 60},
        params={"reach": np.int64(5), "global_tokens": 2},
        tensors={},
    )
    found = counts.count(facts, case, Tile(q=8, kv=8))
    assert all(type(getattr(found, name)) is int for name in found.__slots__)
