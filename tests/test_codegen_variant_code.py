"""The code of a variant as emitted decides as Python does: run on the interpreter for random masks and each spec."""

import numpy as np
import pytest
import variant_kernel
from random_masks import random_case, random_mask, seeded

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import EMPTY, PARTIAL, Case, grid, schedule, true_grid
from flashgen.codegen import emit
from flashgen.codegen.variant_code import variant_code
from flashgen.lang.evaluate import evaluate
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem
from flashgen.runtime import nvrtc

MASKS = range(40)


def positions(sizes):
    names = ("batch", "heads", "q_len", "kv_len")
    return dict(zip("bhqk", np.ogrid[tuple(slice(sizes[name]) for name in names)], strict=True))


def scheduled(facts, case, tile):
    sizes = case.sizes
    q_tiles, kv_tiles = -(-sizes["q_len"] // tile.q), -(-sizes["kv_len"] // tile.kv)
    found = np.zeros((sizes["batch"], sizes["heads"], q_tiles, kv_tiles), np.int32)
    for b, h, i in np.ndindex(found.shape[:3]):
        for kv_tile, cls in schedule(facts, case, tile, i, b, h):
            found[b, h, i, kv_tile] = cls
    return found


def check(variant, case, tile):
    facts = analyse(variant)
    rng = np.random.default_rng(0)
    shape = tuple(case.sizes[n] for n in ("batch", "heads", "q_len", "kv_len"))
    s = rng.normal(0, 3, shape).astype(np.float32)
    visited, kept, scores = variant_kernel.run(facts, case, tile, s)
    np.testing.assert_array_equal(visited, scheduled(facts, case, tile))
    data = {"sizes": case.sizes, "params": case.params, "tensors": case.tensors}
    if variant.mask is not None:
        expected = np.broadcast_to(evaluate(variant.mask, **positions(case.sizes), **data), shape)
        np.testing.assert_array_equal(kept, expected)
    if variant.score_node is not None:
        expected = evaluate(variant.score_node, s=s, **positions(case.sizes), **data)
        np.testing.assert_allclose(scores, np.broadcast_to(expected, shape), rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(every=8)
@pytest.mark.slow
@pytest.mark.parametrize("seed", MASKS)
def test_random_masks_visit_and_keep_what_python_does(seed):
    source = seeded(seed)
    variant = random_mask(source)
    if variant is None:
        pytest.skip("the language refuses this mask")
    case, tile = random_case(source)
    check(variant, case, tile)


@pytest.mark.sampled("causal_bottom_right", "chunked", "full", "gpt_oss", "prefix_lm", "sink_window")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_specs_visit_keep_and_score_as_python_does(name):
    variant = load_spec(shipped()[name]).bind()
    problem = Problem(batch=2, heads=2, kv_heads=1, q_len=150, kv_len=270, head_dim=64, v_head_dim=64)
    rng = np.random.default_rng(1)
    tensors = {t.name: t.example(problem, rng) for t in variant.tensors}
    params = {p.name: min(p.default, 40) if isinstance(p.default, int) else p.default for p in variant.params}
    check(variant, Case(sizes=problem.sizes(), params=params, tensors=tensors), Tile(q=32, kv=16))


@pytest.mark.parametrize(
    ("function", "near"),
    [
        (lambda s, b, h, q, k: 30.0 * fg.tanh(s / 30.0), True),
        (lambda s, b, h, q, k: s - 0.5 * (q - k), False),
        (lambda s, b, h, q, k: fg.tanh(s) + fg.tanh(2.0 * s), False),
        (lambda s, b, h, q, k: fg.tanh(fg.exp(s)), False),
    ],
)
def test_one_tanh_of_something_cheap_is_looked_at_before(function, near):
    found = variant_code(analyse(fg.variant().score(function).bind()), Tile(q=64, kv=64))
    assert (found.small_tanh is not None) == near
    assert not near or (str(found.small_tanh.argument.value), str(found.small_tanh.score.value)) == (
        "s * rcp(30.0f)",
        "30.0f * small_tanh(s * rcp(30.0f))",
    )


cap, free = fg.param("cap", default=30.0, min=1.0), fg.param("free", default=30.0)
caps = fg.tensor("caps", dims=("heads",), dtype="float32")


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda s, b, h, q, k: 30.0 * fg.tanh(s / 30.0), "30.0f"),
        (lambda s, b, h, q, k: fg.tanh(s / cap) * cap, "p.param_cap"),
        (lambda s, b, h, q, k: free * fg.tanh(s / free), None),  # it may be negative, and then the least is the highest
        (lambda s, b, h, q, k: -30.0 * fg.tanh(s / -30.0), None),
        (lambda s, b, h, q, k: caps[h] * fg.tanh(s / caps[h]), None),
        (lambda s, b, h, q, k: 30.0 * fg.tanh(s / 20.0), None),
        (lambda s, b, h, q, k: cap * fg.tanh(s / cap) - 0.5 * (q - k), None),
        (lambda s, b, h, q, k: cap * fg.tanh((s + 1.0) / cap), None),
    ],
)
def test_a_soft_cap_is_one_positive_number_for_all_pairs(function, found):
    of = variant_code(analyse(fg.variant().score(function).bind()), Tile(q=64, kv=64)).soft_cap
    assert (None if of is None else str(of)) == found


@pytest.mark.parametrize(
    ("function", "value", "names"),
    [
        (lambda s, b, h, q, k: s - 0.5 * (q - k), "s - 0.5f * q_minus_k", ("q_minus_k",)),
        (lambda s, b, h, q, k: s + 1.0 / (k - q), "s + 1.0f * rcp(k_minus_q)", ("k_minus_q",)),
        (lambda s, b, h, q, k: s - 0.5 * (q - k + 1), None, ()),  # another number
        (lambda s, b, h, q, k: s - 0.5 * (q - b), None, ()),
        (lambda s, b, h, q, k: s - 0.5 * (fg.int64(q) - k), None, ()),
    ],
)
def test_a_score_is_given_distances_as_floats(function, value, names):
    facts = analyse(fg.variant().score(function).bind())
    found = variant_code(facts, Tile(q=64, kv=64), distances=True)
    assert found.distances == names and (not names or str(found.score.value) == value)
    assert found.distance_parameters == "".join(f"float {name}, " for name in names)
    assert variant_code(facts, Tile(q=64, kv=64)).distances == ()


doc = fg.tensor("doc", dims=(None,), dtype="int32")
perm = fg.tensor("perm", dims=("q",), dtype="int64", min=0)
cu = fg.tensor("cu", dims=(None,), dtype="int64", sorted=True)

#: Masks that read one tensor by indices of either width, beside one another and by q and k.
WIDTHS = {
    "permuted": lambda b, h, q, k: doc[perm[q]] == doc[k],
    "lengths": lambda b, h, q, k: (k >= cu[doc[q]]) & (k < cu[doc[q] + 1]),
    "both": lambda b, h, q, k: doc[perm[q]] <= doc[k + 0 * perm[q]],
}


def of_widths(name):
    return fg.variant(WIDTHS[name], name=name).bind()


@pytest.mark.parametrize("name", WIDTHS)
def test_a_tensor_is_read_by_indices_of_both_widths(name):
    rng = np.random.default_rng(4)
    tensors = {"doc": np.sort(rng.integers(0, 3, 24, np.int32)), "perm": rng.permutation(24), "cu": np.arange(0, 40, 8)}
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 24, "kv_len": 24}
    variant = of_widths(name)
    tensors = {t.name: tensors[t.name] for t in variant.tensors}
    check(variant, Case(sizes=sizes, params={}, tensors=tensors), Tile(q=5, kv=4))


@pytest.mark.sampled("permuted-sm_90a", "lengths-sm_80")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", WIDTHS)
def test_both_passes_of_it_compile(name, arch):
    for menu in (planner.menu, planner.backward_menu):
        nvrtc.ptx(emit(menu(of_widths(name), arch, "bfloat16", 64, 64).plans[0]), arch)


def check_sound(variant, cases, tile, launched):
    """No tile is EMPTY or FULL in Python that is not, and the first cases are judged alike by a kernel."""
    facts = analyse(variant)
    for i, case in enumerate(cases):
        for b, h in np.ndindex(case.sizes["batch"], case.sizes["heads"]):
            true, found = true_grid(facts, case, tile, b, h), grid(facts, case, tile, b, h)
            assert ((found == PARTIAL) | (found == true)).all(), (case.params, case.tensors)
            for row in range(len(true)):
                visited = {kv_tile for kv_tile, _ in schedule(facts, case, tile, row, b, h)}
                assert visited >= set(np.flatnonzero(true[row] != EMPTY)), (case.params, case.tensors)
        if i < launched:
            check(variant, case, tile)


NEGATIVE = fg.tensor("negative", dims=("kv",), dtype="int32", max=-1)
STEP = fg.param("step", dtype=int, max=-1)
NUMBERS64 = fg.tensor("numbers64", dims=("kv",), dtype="int64")
STEP64 = fg.param("step64", dtype="int64", max=-1)
ORDERED64 = fg.tensor("ordered64", dims=("kv",), dtype="int64", sorted=True)


@pytest.mark.sampled(
    "-1-<lambda>5",
    "-1-<lambda>7",
    "-4-<lambda>0",
    "-7-<lambda>6",
    "-7-<lambda>7",
    "-2147483648-<lambda>1",
    "-2147483648-<lambda>2",
    "-2147483648-<lambda>3",
    "-2147483648-<lambda>4",
    "-2147483648-<lambda>8",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: NEGATIVE[k] % STEP == 0,
        lambda b, h, q, k: NEGATIVE[k] // STEP > 1,
        lambda b, h, q, k: NUMBERS64[k] // -1 > 3,
        lambda b, h, q, k: NUMBERS64[k] % STEP64 < -1,
        lambda b, h, q, k: NUMBERS64[k] // STEP64 >= q,
        lambda b, h, q, k: (q - k) % STEP == -2,
        lambda b, h, q, k: ORDERED64[k] % STEP64 == 0,
        lambda b, h, q, k: ORDERED64[k] // -1 > 3,
        lambda b, h, q, k: abs(ORDERED64[k]) > 3,
    ],
)
@pytest.mark.parametrize("step", [-1, -4, -7, -(1 << 31)])
def test_negative_divisors_hide_nothing_that_is_visible(mask, step):
    lowest, rng = -(1 << 63), np.random.default_rng(3)
    tensors = {
        "negative": np.concatenate([[-(1 << 31), -(1 << 31) + 1], -rng.integers(1, 20, 30)]).astype(np.int32),
        "numbers64": np.concatenate([[lowest, lowest + 1, (1 << 63) - 1], rng.integers(-20, 20, 29)]),
        "ordered64": np.concatenate([[lowest] * 3, np.sort(rng.integers(-40, 40, 27)), [(1 << 63) - 1] * 2]),
    }
    variant = fg.variant(mask)
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 9, "kv_len": 32}
    used = {t.name for t in variant.tensors}
    for step64 in (step, lowest):
        params = {p.name: step64 if p.name == "step64" else step for p in variant.params}
        case = Case(sizes=sizes, params=params, tensors={n: t for n, t in tensors.items() if n in used})
        check_sound(variant, [case], Tile(q=4, kv=4), launched=1)
        if "step64" not in params:
            break


def test_what_is_inside_its_dimension_is_not_clamped():
    """Neither where one element is read nor where tiles are judged: its size is a register that the judge lacks."""
    chosen = fg.tensor("chosen", dims=("batch", "heads", None, "q"), dtype="bool")
    mask = fg.variant(lambda b, h, q, k: chosen[b, h, q // 64, k] & chosen[b, k, q // 64, q]).bind()
    (reader,) = variant_code(analyse(mask), Tile(q=64, kv=64)).readers
    assert (
        reader.clamped == (1, 2, 3) and len(reader.lines) == 3
    )  # read by a key too, where heads and queries are asked
    mask = fg.variant(lambda b, h, q, k: chosen[b, h, k // 64, q]).bind()
    (reader,) = variant_code(analyse(mask), Tile(q=64, kv=64)).readers
    assert reader.clamped == (2,) and reader.ranged
    text = emit(planner.menu(mask, "sm_80", "bfloat16", 64).plans[0])
    assert "clamp_index(i2, p.size2_chosen)" in text and "p.size0_chosen" not in text
