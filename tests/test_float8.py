"""Forwards of 8 bits on Hopper, on the interpreter whose products add up as the hardware's do, and what is refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from eight_bits import eight, errors_of_forms
from ptx_attention import replace

import flashgen as fg
from flashgen.codegen import emit
from flashgen.compat import flash_attn, vllm
from flashgen.errors import FlashgenError
from flashgen.interpreter.ops.wgmma import _cut_sum
from flashgen.interpreter.simulate import simulate
from flashgen.lang import float8
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.float8 import ACCURACIES, E4M3, E5M2, ERRORS, block_of
from flashgen.planning.members import (
    HighestAsInteger,
    Leaves,
    MaskAsBits,
    MaskByLookups,
    MaskByTile,
    MaskWithinBounds,
    SendsAndLoads,
)
from flashgen.planning.request import KernelRequest
from flashgen.runtime import nvrtc, sass
from flashgen.runtime.reference_float8 import Quantised, cut_products, quantised

TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype", TORCH)
def test_codes_are_those_of_torch(dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 4096)
    ties = float8.values(np.arange(0x70, dtype=np.uint8), dtype)
    x = torch.cat([x.clamp(-440, 440), torch.from_numpy((ties[1:] + ties[:-1]) / 2), torch.tensor([0.0, -0.0])])
    assert np.array_equal(float8.codes(x.numpy(), dtype), x.to(TORCH[dtype]).view(torch.uint8).numpy())
    every = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(float8.values(every.numpy(), dtype), every.view(TORCH[dtype]).float().numpy(), equal_nan=True)


def test_codes_saturate_and_keep_a_nan():
    largest = float8.codes(np.array([1e9, np.inf, -1e9], np.float32), E4M3)
    assert float8.values(largest, E4M3).tolist() == [448, 448, -448]
    assert np.isnan(float8.values(float8.codes(np.array([np.nan]), E5M2), E5M2)).all()


def test_sums_are_cut_as_measured_on_hopper():
    """One level over 8,192 keys of V = |N(0, 1)| keeps 87% of its length on the hardware, 128 keys 99.9%."""
    rng = np.random.default_rng(0)
    p = float8.rounded(np.exp2(rng.standard_normal((1, 8192)) * 1.44 + 2).astype(np.float32), E4M3).astype(float)
    v = float8.rounded(np.abs(rng.standard_normal((32, 8192))).astype(np.float32), E4M3).astype(float)

    def kept(got, n):
        return float((got / (p[:, :n] @ v[:, :n].T)).mean())

    assert kept(_cut_sum(p, v, np.zeros(1), 13), 8192) == pytest.approx(0.87, abs=0.02)
    few = _cut_sum(p[:, :128], v[:, :128], np.zeros(1), 13)
    assert kept(few, 128) == pytest.approx(0.9994, abs=0.0006)
    ours = cut_products(torch.from_numpy(p[:, :128]).float(), torch.from_numpy(v[:, :128]).float(), TORCH[E4M3])
    assert np.array_equal(ours.double().numpy(), few)


@pytest.mark.parametrize(
    ("a", "b", "kept"),
    [
        ([1, 1], [1, 2.0**-13], 1 + 2.0**-13),  # the last place that counts
        ([1, 1, 1], [1, 2.0**-14, 2.0**-14], 1),  # each addend by itself
        ([1, -1, 1], [1, 1.5 * 2.0**-13, 0], 1 - 2.0**-13),  # toward zero
        ([1.5, 1], [1.5, 2.0**-13], 2.25),  # the sum's own last place is that of 2
        ([1.5, 1, 1], [1.5, 2.0**-13, 2.0**-13], 2.25 + 2.0**-12),  # that of 1.5 times 1.5 is that of 1
        ([2.0**-9, 2.0**-6], [1, 2.0**-14], 2.0**-9),  # a subnormal counts as 2^-6
    ],
)
def test_what_is_cut_off(a, b, kept):
    """By the powers of two of the factors, which need no sum to be known: 1.5 times 1.5 counts as 1."""
    of = [np.zeros((1, 32)) for _ in range(2)]
    of[0][0, : len(a)], of[1][0, : len(b)] = a, b
    assert _cut_sum(*of, np.zeros(1), 13, ("e4m3", "e5m2")).item() == kept
    assert cut_products(*(torch.from_numpy(x).float() for x in of), TORCH[E5M2]).item() == kept


def test_what_is_cut_off_is_one_rule():
    """The reference's and the interpreter's, on sums of subnormals, of either dtype."""
    rng = np.random.default_rng(0)
    for dtype, kind in ((E4M3, "e4m3"), (E5M2, "e5m2")):
        power = 2.0 ** rng.integers(-12, 3, (24, 1))
        a, b = (float8.rounded((rng.standard_normal((24, 160)) * power).astype(np.float32), of) for of in (E4M3, dtype))
        found = _cut_sum(a.astype(float), b.astype(float), np.zeros(1), 13, ("e4m3", kind))
        assert np.array_equal(cut_products(torch.from_numpy(a), torch.from_numpy(b), TORCH[dtype]).double(), found)
        assert not np.array_equal(found, a.astype(float) @ b.T.astype(float))


@pytest.mark.parametrize(("length", "blocks", "block"), [(300, 3, 128), (300, 2, 256), (300, 1, 512), (128, 1, 128)])
def test_blocks_are_powers_of_two(length, blocks, block):
    assert block_of(length, blocks) == block


# ---------------------------------------------------------------- the kernel
AT_NIGHT = pytest.mark.nightly(sibling="test_kernels_are_right")

#: V with a mean over many keys: where one level of sums is too short.
LONG = {"mean": 1.0, "heads": 1, "kv_heads": 1, "q_len": 20, "kv_len": 1200, "tile": (128, 128)}


@pytest.mark.sampled(
    "full-{'options': {'accuracy': 'exact'}}",
    "document-{'kv_len': 150, 'q_len': 150, 'heads': 1}",
    "gpt_oss-{'head_dim': 64, 'heads': 4, 'kv_heads': 2}",
    "padding-{'batch': 2, 'heads': 1}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("full", {"options": {"accuracy": "exact"}}),
        ("full", LONG),
        pytest.param("full", {"options": {"accuracy": "fast"}, "head_dim": 128}, marks=pytest.mark.slow),
        pytest.param("causal", {"options": {"accuracy": "exact"}, "head_dim": 128}, marks=AT_NIGHT),
        pytest.param("full", {"options": {"accuracy": "fast"}, **LONG}, marks=pytest.mark.slow),
        pytest.param("full", {"options": {"accuracy": "exact"}, **LONG}, marks=AT_NIGHT),
        ("causal", {"head_dim": 128, "q_len": 140, "kv_len": 140}),
        ("document", {"kv_len": 150, "q_len": 150, "heads": 1}),  # tiles judged by summaries
        pytest.param("document", {"head_dim": 128, "q_len": 140, "kv_len": 260, "heads": 1}, marks=pytest.mark.slow),
        pytest.param("blocks", {"head_dim": 128, "q_len": 140, "kv_len": 260, "heads": 1}, marks=AT_NIGHT),
        pytest.param("dilated", {"head_dim": 128, "kv_len": 260, "heads": 1}, marks=AT_NIGHT),
        pytest.param("softcap", {"head_dim": 256, "heads": 1}, marks=AT_NIGHT),
        *(
            pytest.param(spec, {"head_dim": 256, "q_len": 150, "kv_len": 150, "heads": 1}, marks=AT_NIGHT)
            for spec in ("tree", "relative_bias", "top_blocks")  # 32 keys a tile
        ),
        pytest.param("softcap", {"head_dim": 96, "batch": 2}, marks=AT_NIGHT),
        pytest.param("gpt_oss", {"head_dim": 64, "heads": 4, "kv_heads": 2}, marks=pytest.mark.slow),
        pytest.param("alibi", {"head_dim": 128}, marks=AT_NIGHT),
        pytest.param("sliding_window", {"head_dim": 80, "q_len": 300, "kv_len": 300}, marks=AT_NIGHT),
        pytest.param("full", {"head_dim": 192, "heads": 1}, marks=AT_NIGHT),
        ("full", {"head_dim": 256, "heads": 1, "options": {"accuracy": "fast"}}),
        pytest.param("causal", {"head_dim": 256, "heads": 1, "q_len": 200}, marks=pytest.mark.slow),
        pytest.param("full", {"head_dim": 208, "heads": 1, "options": {"accuracy": "exact"}}, marks=AT_NIGHT),
        pytest.param("full", {"options": {"accuracy": "fast"}, "head_dim": 256, **LONG}, marks=AT_NIGHT),
        pytest.param("sliding_window", {"tile": (192, 128), "q_len": 250, "kv_len": 250}, marks=pytest.mark.slow),
        ("padding", {"batch": 2, "heads": 1}),  # a mask that reads: the scheduler does not load
        pytest.param("full", {"head_dim": 176, "heads": 1}, marks=AT_NIGHT),
        pytest.param("full", {"head_dim": 160, "heads": 1}, marks=AT_NIGHT),
        pytest.param("full", {"head_dim": 128, "v_head_dim": 64}, marks=AT_NIGHT),
        pytest.param("full", {"head_dim": 64, "v_head_dim": 128}, marks=AT_NIGHT),
        pytest.param("causal_bottom_right", {"head_dim": 128, "q_len": 300, "kv_len": 100}, marks=pytest.mark.slow),
        pytest.param("full", {"of_keys": (E5M2, E5M2)}, marks=AT_NIGHT),
        pytest.param("full", {"of_keys": (E4M3, E5M2), "options": {"out_dtype": "float16"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_are_right(spec, shape):
    w = eight(spec, **shape)
    assert w.wrong(w.run()) == ()


#: Peaked rows, whose sums of P lose as much as they do: o is too long by 0.1%, and the baseline's too.
PEAKED = {"std": 5.0, "heads": 1, "q_len": 128, "kv_len": 640, "head_dim": 128}


@pytest.mark.sampled("fast")
@pytest.mark.parametrize("accuracy", ["default", pytest.param("fast", marks=pytest.mark.slow)])
def test_the_baseline_has_the_bias_of_the_accumulators(accuracy, monkeypatch):
    w = eight("full", options={"accuracy": accuracy}, **PEAKED)
    found = w.run()
    assert w.wrong(found) == ()
    monkeypatch.setattr("flashgen.runtime.reference_float8.cut_products", lambda a, b, of_b: a @ b.mT)
    assert [reason[:11] for reason in w.wrong(found)] == ["signed bias"]


@pytest.mark.slow
def test_the_errors_that_a_plan_prints_are_those_of_an_emulation():
    found = errors_of_forms()
    for name, said in ERRORS.items():
        for one, emulated in zip(said[:2], found[name][:2], strict=True):
            assert one == pytest.approx(emulated, abs=0.02), name
        assert found[name][2] <= said[2] + 0.05
    assert "error of o 1.1x exact's" in str(plan_of("full", 64).float8)


@pytest.mark.slow
def test_warps_in_any_order():
    w = eight("causal", q_len=200, tile=(128, 64))
    assert w.wrong(w.run(seed=5)) == ()


@pytest.mark.slow
def test_descales_of_blocks():
    """Each block of rows, head and batch counts by its own."""
    w = eight("full", batch=2, heads=2, kv_heads=2, q_len=140, kv_len=140, tile=(128, 64))
    rng = np.random.default_rng(1)
    given = {name: rng.uniform(0.5, 2, (2, 2, 2)).astype(np.float32) for name in "qkv"}
    q, k, v = (
        x.codes.double() * torch.from_numpy(given[name]).repeat_interleave(128, 2)[:, :, :140, None]
        for name, x in zip("qkv", w.qkv, strict=True)
    )
    scale = 1e-4  # codes reach 448
    right = torch.softmax(q @ k.mT * scale, -1) @ v
    arrays = [x.codes.float().numpy() for x in w.qkv]
    found = torch.from_numpy(simulate(w.plan, w.case, *arrays, scale=scale, descales=given).o).double()
    assert float((found - right).norm() / right.norm()) < 0.03


def one_level(source):
    """O in the accumulators of wgmma, tile after tile."""
    start = "    wgmma_fence();\n#pragma unroll\n    for (int n = 0; n < TILE_KV; n += 32) {"
    again = "    for (int i = 0; i < PIECE / 2; i++) partial[i] = o[column / 2 + i] / v_descale;\n"
    source = replace(start, again + start)(source)
    source = replace("if (n == 0) wgmma_pv_first(partial, a, v);", "if (n == 0) wgmma_pv(partial, a, v);")(source)
    return replace("fmaf(partial[i], v_descale, o[column / 2 + i])", "partial[i] * v_descale")(source)


def growing(accuracy, mean=0.0, **shape):
    """Scores of which each tile of keys has higher ones, in the order in which they are visited: the last first."""
    w = eight("full", heads=1, q_len=40, kv_len=1200, options={"accuracy": accuracy}, mean=mean, **shape)
    k = w.qkv[1].values[0, 0]
    grown = w.qkv[0].values[0, 0].mean(0) / 4 + k * torch.linspace(3, 0.2, 1200)[:, None]
    new = quantised(grown[None, None], torch.float8_e4m3fn)
    w.descales["k"] = new.descale.numpy()
    return dataclasses.replace(w, qkv=(w.qkv[0], new, w.qkv[2]))


@pytest.mark.sampled(dim=[64])
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_maxima_that_lag_follow_before_p_leaves_its_range(dim):
    w = growing("fast", head_dim=dim)
    found = w.run()
    assert w.wrong(found) == ()
    rule = re.search(r"    if \((young == 0 && )?!__any_sync\(~0u, round\(s\)\)\) return;\n", emit(w.plan))
    never = "" if rule[1] is None else "if (young == 0) "
    blind = w.run(replace(rule[0], f"    {never}{{\n      round(s);\n      return;\n    }}\n"))
    assert w.wrong(blind)


@pytest.mark.sampled(dim=[64])
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 256])
def test_few_keys_of_the_first_tile_cost_no_second_look(dim):
    """Row i sees i + 1 keys of its first tile: maxima of so few would be passed in most of the others."""
    shape = {"heads": 1, "q_len": 64, "kv_len": 576, "head_dim": dim, "std": 0.8, "options": {"accuracy": "fast"}}
    w = eight("causal_bottom_right", tile=(128, 128), **shape)
    once_more = "    look(s);\n    round(s);\n  }\n"
    spoiled = "    if (young == 0)\n#pragma unroll\n      for (int i = 0; i < TILE_KV / 2; i++) s[i] = 0.f;\n"
    edit = replace(once_more, spoiled + once_more)
    assert w.wrong(w.run(edit)) == ()
    lagging = replace("limit = young > 0 ? EARLY : OFFSET + SLACK", "limit = OFFSET + SLACK")
    assert w.wrong(w.run(lagging)) == ()
    assert w.wrong(w.run(lambda source: lagging(edit(source))))


@pytest.mark.sampled("default-{'head_dim': 64}", "exact-{'head_dim': 128}")
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{"head_dim": 64}, {"head_dim": 128}, {"head_dim": 128, "heads": 2, "q_len": 1}], ids=str
)
@pytest.mark.parametrize("accuracy", ["exact", "default"])
def test_maxima_below_zero_are_looked_for(accuracy, shape):
    """Every score is negative, and tiles that are visited later have higher ones."""
    w = eight("full", **{"heads": 1, "q_len": 40, "kv_len": 400, **shape}, options={"accuracy": accuracy})
    q, k = w.qkv[0].values.abs(), w.qkv[1].values.abs() * torch.linspace(0.3, 3, 400)[:, None]
    below = tuple(quantised(x.float(), torch.float8_e4m3fn) for x in (q, -k))
    w = dataclasses.replace(w, qkv=(*below, w.qkv[2]))
    w.descales.update({name: x.descale.numpy() for name, x in zip("qk", below, strict=True)})
    found = w.run()
    assert w.wrong(found) == ()
    always = dataclasses.replace(w.plan.specialized, highest=HighestAsInteger())
    same = dataclasses.replace(w, plan=dataclasses.replace(w.plan, specialized=always))
    assert emit(same.plan) != emit(w.plan)
    expected = same.run()
    assert np.array_equal(found.o, expected.o) and np.array_equal(found.lse, expected.lse)
    edit = re.compile(r"negative = __any_sync\(.*\);")
    assert w.wrong(w.run(lambda source: edit.sub("negative = false;", source)))


@pytest.mark.slow
def test_rows_do_not_depend_on_their_neighbours():
    """A warp looks at the maxima of all its rows where one of them needs it."""
    w = growing("fast")
    both = w.run()
    codes = w.qkv[0].codes.clone()
    codes[:, :, 1::2] = 0  # of every second row all scores are 0: it needs no second look
    alone = dataclasses.replace(w, qkv=(Quantised(codes, w.qkv[0].descale), *w.qkv[1:])).run()
    assert np.array_equal(both.o[:, :, ::2], alone.o[:, :, ::2]) and not np.array_equal(both.o, alone.o)


#: Mutations of the emitted text, and the data that show them.
WRONG = {
    "one level of sums": (one_level, LONG),
    "keys of V in another order": (replace("v[d / 128][lane]", "v[d / 128][lane ^ 1]"), {}),
    "columns of V in another order": (replace("turned[d + lane % 16]", "turned[d + (lane + 8) % 16]"), {}),
    "P that saturates": (replace("OFFSET = 8.f", "OFFSET = 10.f"), {}),
    "the descale of another tensor": (replace("q_descale(work, first", "k_descale(0, 0, 0) + 0 * (first"), {}),
    "O that does not follow its maxima": (replace("if (moved) rescale();", ""), {}),
    "K and V that are said to have come": (
        replace("return mbarrier_test_wait(pipe.full", "return true | mbarrier_test_wait(pipe.full"),
        {"head_dim": 128},
    ),
    "V that is read before it is turned over": (replace("full(shared.turned_pipe", "full(shared.v_pipe"), {}),
}


@pytest.mark.sampled("keys of V in another order", "columns of V in another order")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_seen(name):
    edit, shape = WRONG[name]
    w = eight("full", **shape)
    try:
        wrong = w.wrong(w.run(edit))
    except Exception as trap:  # the interpreter's
        wrong = (str(trap),)
    assert wrong


# ---------------------------------------------------------------- what ptxas makes of it
DIMS = (64, 128, 160, 192)
EVERY = [
    (spec, head_dim, accuracy)
    for spec in sorted(shipped())
    for accuracy, dims in (("default", range(64, 257, 16)), ("exact", DIMS), ("fast", DIMS))
    for head_dim in dims
]


def menu_of(spec, head_dim, **options):
    return planner.menu_of(KernelRequest.of(load_spec(spec).bind(), "sm_90a", E4M3, head_dim, **options))


def plan_of(spec, head_dim, **options):
    return menu_of(spec, head_dim, **options).plans[0]


@pytest.mark.sampled("full-192-exact")
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "head_dim", "accuracy"), EVERY)
def test_no_kernel_spills(spec, head_dim, accuracy):
    """Nor is wgmma put one after another, of which compile() raises."""
    try:
        plans = menu_of(spec, head_dim, accuracy=accuracy).plans
    except FlashgenError as refused:
        assert "fits" in str(refused) or "no kernel" in str(refused) or "declared" in str(refused)
        return
    for plan in plans:
        found = sass.check(plan, nvrtc.compile(emit(plan), "sm_90a"))
        assert [reason for reason in found if "where the plan estimates" not in reason] == [], plan.tile


@pytest.mark.parametrize(
    ("spec", "head_dim", "form", "keys"),
    [
        ("document", 128, MaskByLookups(), 128),
        ("document", 64, MaskByLookups(), 128),
        ("blocks", 128, MaskByTile(), 128),
        ("dilated", 128, MaskWithinBounds(), 128),
        ("tree", 64, MaskAsBits(), 64),
    ],
)
def test_masks_have_the_forms_of_16_bits(spec, head_dim, form, keys):
    """And tiles as large as registers hold beside what a mask reads."""
    plan = plan_of(spec, head_dim, accuracy="fast")
    assert (plan.specialized.mask, plan.tile.kv) == (form, keys)
    assert ("find_bits" in emit(plan), "look_up(work_ring)" in emit(plan)) == (False, form == MaskByLookups())


@pytest.mark.parametrize("spec", ["tree", "relative_bias", "top_blocks"])
def test_fewer_keys_leave_registers_for_256_columns(spec):
    for accuracy in ACCURACIES:
        assert plan_of(spec, 256, accuracy=accuracy).tile.kv == 32


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_tanh_is_as_exact_as_p(head_dim):
    """Where P is exact it is a polynomial if its argument is small, else one instruction."""
    exact, *others = (emit(plan_of("softcap", head_dim, accuracy=accuracy)) for accuracy in ACCURACIES)
    assert "score_small_tanh" in exact and "tanh_approx" not in exact
    for text in others:
        assert "tanh_approx" in text and "small_tanh" not in text


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: s + 1000.0 * fg.tanh(0.001 * fg.float32(q - k)),
        lambda s, b, h, q, k: 30.0 * fg.tanh(s / 20.0),
        lambda s, b, h, q, k: 30.0 * fg.tanh(s / 30.0) + 900.0 * fg.tanh(s / 30.0),
    ],
    ids=["of positions", "of another scale", "of another use"],
)
def test_a_tanh_that_caps_no_score_is_exact(score):
    """It may be multiplied by anything: 11 bits of it would be few."""
    plan = planner.menu(fg.variant(score=score).bind(), "sm_90a", E4M3, 128, accuracy="fast").plans[0]
    assert "tanh_f32(" in emit(plan) and "tanh_approx" not in emit(plan)


@pytest.mark.parametrize(
    ("spec", "roles"), [("causal", {"loader": 1, "transposer": 3}), ("document", None), ("padding", None)]
)
def test_who_turns_v_over(spec, roles):
    """Three warps, where one warp can schedule and load; masks that are judged or read have one for each."""
    found = {role.name: role.warps for role in plan_of(spec, 64).program.roles if role.name != "consumer"}
    assert found == (roles or {"scheduler": 1, "loader": 1, "transposer": 2})


@pytest.mark.parametrize(
    ("spec", "head_dim", "loads", "anew"),
    [
        ("causal", 128, True, False),
        ("prefix_lm", 128, True, False),
        ("sliding_window", 64, True, False),  # 56 registers
        ("sliding_window", 128, True, True),
        ("sink_window", 128, True, True),
        ("longformer", 128, False, False),
        ("causal", 256, True, False),
        ("causal_bottom_right", 256, False, False),
    ],
)
def test_who_schedules_has_registers(spec, head_dim, loads, anew):
    """With 40 it keeps no ends of several runs, or leaves loading to another warp."""
    plan = plan_of(spec, head_dim)
    assert (plan.specialized.sender == SendsAndLoads(), plan.specialized.runs_anew) == (loads, anew)


@pytest.mark.parametrize(
    ("head_dim", "accuracy", "beside"),
    [(256, "fast", True), (192, "default", True), (256, "exact", False), (128, "fast", False)],
)
def test_v_that_is_late_is_loaded_beside_its_k(head_dim, accuracy, beside):
    assert plan_of("causal", head_dim, accuracy=accuracy).specialized.v.beside_k is beside


@pytest.mark.sampled("causal-fast")
@pytest.mark.slow
@pytest.mark.parametrize("accuracy", ["fast", "default"])
@pytest.mark.parametrize("spec", ["full", "causal", "document"])
def test_one_block_loads_for_several_tiles_of_queries(spec, accuracy):
    """V beside its K, with rings that go round: `document` has a warp that loads and another that schedules."""
    shape = {"heads": 1, "kv_heads": 1, "q_len": 300, "kv_len": 300, "head_dim": 256}
    w = eight(spec, options={"accuracy": accuracy}, **shape)
    assert w.plan.specialized.v.beside_k
    assert w.wrong(w.run(sms=1)) == ()


def test_tiles_that_the_planner_picks():
    """Three warpgroups where V is narrow, whatever the form; scores ahead where registers hold them."""
    for accuracy in ("exact", "default", "fast"):
        of = {d: plan_of("full", d, accuracy=accuracy) for d in (64, 128, 256)}
        assert [str(plan.tile) for plan in of.values()] == ["192x128", "128x128", "128x128"]
        assert [plan.specialized.products.ahead for plan in of.values()] == [False, True, False]


# ---------------------------------------------------------------- calls
def draw(dtype=torch.float8_e4m3fn):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 150, 64, generator=g) for heads in (4, 2, 2))
    return [quantised(x, dtype) for x in (q, k, v)]


def call(of, **options):
    q, k, v = (x.codes for x in of)
    given = {f"{name}_descale": x.descale for name, x in zip("qkv", of, strict=True)}
    return fg.attention(q, k, v, load_spec("causal"), **{**given, **options})


@pytest.mark.parametrize("out", [None, torch.float16, "bfloat16"])
def test_the_walk_on_a_cpu(out):
    of = draw()
    o, lse = call(of, out_dtype=out, return_lse=True)
    assert o.dtype == (torch.float16 if out is torch.float16 else torch.bfloat16) and lse.dtype == torch.float32
    right, right_lse = fg.attention(*(x.values.double() for x in of), load_spec("causal"), return_lse=True)
    errors = {}
    for accuracy in ("exact", "default", "fast"):
        o, lse = call(of, accuracy=accuracy, return_lse=True)
        errors[accuracy] = float((o.double() - right).norm() / right.norm())
        assert float((lse - right_lse).abs().max()) < (1e-5 if accuracy == "exact" else 0.06)
    assert errors["exact"] < errors["default"] < errors["fast"] < 0.03


def test_descales_broadcast():
    of = draw()
    q, k, v = (x.descale for x in of)
    one = torch.tensor([0.01])
    by_head, whole = call(of), call(of, q_descale=one, k_descale=one, v_descale=one)
    blocks = {f"{name}_descale": x[:, :, None].expand(-1, -1, 2) for name, x in (("q", q), ("k", k), ("v", v))}
    assert torch.equal(call(of, **blocks), by_head)
    everywhere = {name: one.expand(2, heads) for name, heads in (("q_descale", 4), ("k_descale", 2), ("v_descale", 2))}
    assert torch.equal(call(of, **everywhere), whole)
    of_groups = q.unflatten(1, (2, 2)).amax(-1)  # one for the heads that share keys
    assert torch.equal(call(of, q_descale=of_groups), call(of, q_descale=of_groups.repeat_interleave(2, 1)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"q_descale": None}, "q_descale is missing"),
        ({"k_descale": torch.ones(3)}, "must broadcast from [1], [batch, heads] = [2, 2]"),
        ({"q_descale": torch.ones(2, 3)}, "must broadcast"),
        ({"v_descale": torch.ones(2, 2, 3)}, "nearest: 2 blocks of 128 rows"),
        ({"v_descale": torch.zeros(1)}, "positive and finite"),
        ({"v_descale": torch.tensor([[1.0, float("inf")], [1.0, 1.0]])}, "v_descale holds inf at [0, 1]"),
        ({"v_descale": torch.tensor([float("nan")])}, "positive and finite"),
        ({"k_descale": torch.ones(1, dtype=torch.float64)}, "nearest: k_descale.float()"),
        ({"k_descale": torch.ones(1, device="meta")}, "nearest: k_descale.to('cpu')"),
        ({"k_descale": 1.0}, "k_descale"),
        ({"accuracy": "precise"}, "accuracy is 'precise'"),
        ({"out_dtype": torch.float32}, "nearest: out_dtype=torch.bfloat16"),
        ({"dropout": 0.1}, "dropout is not there in 8 bits"),
        ({"invariant": True}, "cuts no rows into leaves in 8 bits"),
    ],
    ids=str,
)
def test_refused(options, said):
    with pytest.raises(FlashgenError) as refused:
        call(draw(), **options)
    assert said in str(refused.value) and "nearest:" in str(refused.value)


def test_dtypes_that_are_refused():
    q, k, v = draw()
    with pytest.raises(FlashgenError, match="queries of 8 bits are float8_e4m3fn"):
        call(draw(torch.float8_e5m2))
    call([q, *(Quantised(x.codes.float().to(torch.float8_e5m2), x.descale) for x in (k, v))])
    with pytest.raises(FlashgenError, match="q_descale is of 8-bit tensors, and q is bfloat16"):
        call([Quantised(x.values.bfloat16(), x.descale) for x in (q, k, v)])


#: Calls that have no descales, of q, k and v [batch, heads, seqlen, head_dim], and the names of what q and k are there.
STARTS = torch.tensor([0, 40], dtype=torch.int32)
WITHOUT_DESCALES = {
    "scaled_dot_product_attention": (fg.scaled_dot_product_attention, "query", "key"),
    "flex_attention": (fg.flex_attention, "query", "key"),
    "flash_attn_func": (lambda *of: flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in of)), "q", "k"),
    "flash_attn_with_kvcache": (
        lambda *of: flash_attn.flash_attn_with_kvcache(*(x.transpose(1, 2) for x in of)),
        *("q", "k"),
    ),
    "flash_attn_varlen_func": (
        lambda *of: flash_attn.flash_attn_varlen_func(*(x[0].transpose(0, 1) for x in of), STARTS, STARTS, 40, 40),
        *("q", "k"),
    ),
    "vllm.flash_attn_varlen_func": (
        lambda *of: vllm.flash_attn_varlen_func(*(x[0].transpose(0, 1) for x in of), 40, STARTS, 40, STARTS),
        *("q", "k"),
    ),
}


@pytest.mark.parametrize("entrance", WITHOUT_DESCALES)
def test_entrances_without_descales_say_so_themselves(entrance):
    call, of_q, of_k = WITHOUT_DESCALES[entrance]
    q, k, v = (torch.zeros(1, 2, 40, 64).to(dtype) for dtype in (torch.bfloat16, *TORCH.values()))
    for given, name in (((k, k, k), of_q), ((q, k, v), of_k)):
        said = f"{entrance}: {name} is float8_e4m3fn, and this call takes no descales"
        with pytest.raises(FlashgenError, match=f"^{re.escape(said)}"):
            call(*given)


def test_gradients_and_graphs_are_refused():
    of = draw()
    with pytest.raises(FlashgenError, match=r"no gradient.*\n  nearest: torch.no_grad"):
        call(of, q_descale=of[0].descale.requires_grad_())
    for backward in ({"backward": True}, {"backward": True, "deterministic": True}):
        with pytest.raises(FlashgenError, match="no backward in 8 bits"):
            KernelRequest.of(load_spec("full"), "sm_90a", E4M3, 64, **backward)


@pytest.mark.parametrize(
    ("arch", "head_dim", "options", "said"),
    [
        ("sm_80", 64, {"accuracy": "fast"}, "nearest: accuracy='exact'"),
        ("sm_80", 72, {}, "nearest: head_dim 64 or 80"),
        ("sm_80", 64, {"keys": Leaves()}, "nearest: invariant=False"),
        ("sm_90a", 48, {}, "nearest: head_dim 64"),
        ("sm_90a", 72, {}, "nearest: head_dim 64 or 80"),
        ("sm_90a", 272, {}, "nearest: head_dim <= 256"),
        ("sm_90a", 64, {"dropout": True}, "nearest: dropout=False"),
        ("sm_90a", 64, {"keys": Leaves()}, "cuts no rows into leaves in 8 bits"),
        ("sm_90a", 64, {"v_dtype": "bfloat16"}, "multiply 8 bits by 8 bits"),
    ],
)
def test_plans_that_are_refused(arch, head_dim, options, said):
    with pytest.raises(FlashgenError) as refused:
        planner.menu_of(KernelRequest.of(load_spec("full"), arch, E4M3, head_dim, **options))
    assert said in str(refused.value)


def test_the_command_in_a_banner_gives_the_kernel_again():
    plan = plan_of("causal", 64, k_dtype=E5M2, out_dtype="float16")
    head = emit(plan).partition("\n\n")[0]
    assert "--dtype float8_e4m3fn" in head and "--k-dtype float8_e5m2" in head and "--out-dtype float16" in head
