"""The prediction of a backward: the walk's own counts, formulas by hand, times, tables and JSON."""

import dataclasses
import json

import numpy as np
import pytest
from backward_checks import case_of, plan_of, problem_of
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import backward, planner
from flashgen.planning.arch import ARCHS
from flashgen.planning.plan import Tile
from flashgen.planning.traffic import predict
from flashgen.runtime.launch import grids
from flashgen.runtime.tiles_backward import count_backward

SPECS = sorted(shipped())


def differences(variant, problem, case, tile, dlse=True, **options):
    """The walk's own counts beside the planner's formulas."""
    plan = plan_of(variant, problem, tile, **options)
    p = predict(plan, problem, case, dlse=dlse)
    d, dv = problem.head_dim, problem.v_head_dim
    shape = {"head_dim": d, "v_head_dim": dv, "dtype": problem.dtype}
    counted = count_backward(plan, analyse(variant), case, dlse=dlse, **shape)
    wanted = {
        **{
            f"{entry} {way}": (moves.total(), getattr(dict(p.kernels)[entry], f"{way}_bytes"))
            for entry, moved in counted.kernels.items()
            for way, moves in (("read", moved.read), ("write", moved.written))
        },
        "entries": (list(counted.kernels), [entry for entry, _ in p.kernels]),
        "read": (counted.read_bytes, p.hbm.read_bytes),
        "write": (counted.write_bytes, p.hbm.write_bytes),
        "useful": (2 * (3 * d + 2 * dv) * counted.visible, p.flops_useful),
    }
    if counted.kernels:
        wanted |= {name: (getattr(counted, name), getattr(p.tiles, name)) for name in ("empty", "partial", "full")}
    if not plan.deterministic:
        wanted["flops"] = (2 * (3 * d + 2 * dv) * counted.elements, p.flops)
    assert p.lower_bound_bytes <= p.hbm.total
    return {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}


@pytest.mark.sampled("blocks-False", "causal-False", "full-True", "local_softcap-True", "log_distance-False")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "deterministic"), [(name, deterministic) for name in SPECS for deterministic in (False, True)]
)
def test_the_planner_and_the_walk_count_the_same(name, deterministic):
    """Neither calls the other."""
    variant = load_spec(name).bind()
    for shape in (
        dict(q_len=700, kv_len=700, head_dim=64),
        dict(q_len=1, kv_len=77, dtype="float16"),
        dict(q_len=130, kv_len=513, heads=6, kv_heads=2, head_dim=64, v_head_dim=96),
        dict(q_len=65, kv_len=640, dtype="float32"),
        dict(q_len=0, kv_len=5),
        dict(q_len=33, kv_len=0),
    ):
        problem = problem_of(**shape)
        case = case_of(variant, problem)
        for tile, dlse in (((64, 64), False), ((64, 128), True), ((16, 32), True)):
            assert differences(variant, problem, case, tile, dlse, deterministic=deterministic) == {}, (shape, tile)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_heads_that_see_other_tiles_are_counted_the_same(data):
    draw = data.draw
    near, far, step = draw(st.integers(-40, 40)), draw(st.integers(0, 90)), draw(st.integers(0, 20))

    def mask(b, h, q, k):
        return ((q - k >= near) & (q - k <= near + far) | (k < step * b)) & (k >= step * h)

    variant = fg.variant(mask)
    group = draw(st.sampled_from([1, 2, 4]))
    problem = problem_of(
        batch=draw(st.integers(1, 2)),
        heads=4,
        kv_heads=4 // group,
        q_len=draw(st.integers(0, 90)),
        kv_len=draw(st.integers(0, 90)),
        head_dim=16,
    )
    tile = draw(st.sampled_from([(16, 16), (32, 16), (16, 64)]))
    assert differences(variant, problem, case_of(variant, problem), tile, deterministic=draw(st.booleans())) == {}


def test_flops_of_a_dq_by_itself_count_its_own_tiles():
    causal = load_spec("causal").bind()
    problem = problem_of(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64, head_dim=16, v_head_dim=24)
    plan = plan_of(causal, problem, (16, 16), deterministic=True)
    assert plan.backward.by_query.tile_q == 32
    p = predict(plan, problem, case_of(causal, problem))
    by_key = (4 + 3 + 2 + 1) * 16 * 16
    by_query = (2 + 4) * 32 * 16
    assert p.flops == 2 * (2 * 16 + 2 * 24) * by_key + 2 * (2 * 16 + 24) * by_query
    assert p.flops_useful == 2 * (3 * 16 + 2 * 24) * 64 * 65 // 2


def test_compulsory_and_standard_by_hand():
    table = load_spec("relative_bias").bind()
    problem = problem_of(batch=2, heads=4, kv_heads=2, q_len=10, kv_len=12, head_dim=16, v_head_dim=24)
    case = case_of(table, problem)
    p = predict(plan_of(table, problem), problem, case, dlse=True)
    bias = 4 * 257 * 4
    q, k, v, o, rows = (2 * n for n in (4 * 10 * 16, 2 * 12 * 16, 2 * 12 * 24, 4 * 10 * 24, 4 * 10))
    s = rows * 12
    assert p.compulsory.read_bytes == 2 * (q + k + v + 2 * o) + 2 * 4 * rows + bias
    assert p.compulsory.write_bytes == 2 * (q + k + v) + bias
    assert p.standard.read_bytes == 2 * (5 * s + 2 * o + v + k + q) + bias
    assert p.standard.write_bytes == 2 * (2 * s + q + k + v) + bias
    without = predict(plan_of(table, problem), problem, case)
    assert p.compulsory.read_bytes - without.compulsory.read_bytes == 4 * rows
    assert p.hbm.read_bytes - without.hbm.read_bytes == 4 * rows


def test_times_are_those_of_the_reference_card():
    softcap = load_spec("softcap").bind()
    problem = problem_of(batch=1, heads=16, kv_heads=16, q_len=8192, kv_len=8192, head_dim=128, dtype="bfloat16")
    plan = plan_of(softcap, problem, (64, 128))
    times = predict(plan, problem, case_of(softcap, problem)).times
    pairs = 16 * 8192**2
    assert times.tensor == pytest.approx(10 * pairs * 128 / 312e12 * 1e3)
    special = 1 + 2 + 2  # ex2, tanh, and the divisions of s and of 1 by cap
    assert times.exponential == pytest.approx(pairs * special / (16 * 108 * 1.41e9) * 1e3)
    assert times.bound == "tensor"
    alone = predict(plan_of(softcap, problem, (64, 128), deterministic=True), problem, case_of(softcap, problem)).times
    assert alone.tensor > 1.3 * times.tensor


def test_workspaces_are_linear_in_the_length():
    full = load_spec("full").bind()
    for q_len in (1000, 64000):
        problem = problem_of(batch=1, heads=8, kv_heads=8, q_len=q_len, kv_len=q_len, head_dim=64)
        p = predict(plan_of(full, problem, (64, 128)), problem, case_of(full, problem))
        assert sum(part.amount for part in p.workspaces) <= 8 * (q_len + 64) * (64 * 4 + 8)


@pytest.mark.slow
@pytest.mark.sampled("sm_80", "sm_90a")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_columns_of_dq_are_whole_products_for_every_warp(arch):
    """An mma gives 16 columns: a warp's share of them, and each part of it, is a multiple of that."""
    causal = load_spec("causal").bind()
    for head_dim in (16, 40, 72, 96, 104, 128, 160, 176, 192, 208, 224, 240, 256):
        for plan in planner.backward_menu(causal, arch, "bfloat16", head_dim, pipeline="ampere").plans:
            b = plan.backward
            columns = plan.padded_head_dim // (plan.warps // b.dq_q_warps)
            assert columns % (16 * b.dq_parts) == 0, (head_dim, plan.tile, b)


def test_json_and_tables():
    table = load_spec("relative_bias").bind()
    problem = problem_of(q_len=256, kv_len=256, head_dim=64)
    plan = plan_of(table, problem, (64, 128), deterministic=True)
    p = predict(plan, problem, case_of(table, problem))
    found = json.loads(json.dumps(p.as_json()))
    assert (found["pass"], found["deterministic"], found["gradients"]) == ("backward", True, ["table"])
    assert [k["entry"] for k in found["kernels"]] == [x.entry for x in grids(plan, problem, sms=108)]
    assert sum(k["read_bytes"] for k in found["kernels"]) == found["hbm"]["read_bytes"]
    assert {w["name"] for w in found["workspaces"]} == {"lse_log2", "delta", "exact_table"}
    tables = {t.title: t for t in p.tables()}
    assert len(tables["HBM traffic"].rows) == 5 + 4
    assert tables["workspaces"].rows[-1][0] == "sum"
    for t in tables.values():
        assert all(len(row) == len(t.columns) for row in t.rows)
    with pytest.raises(PlanError, match="formulas are those of a forward"):
        p.as_json(formulas=True)


def test_a_million_tokens_are_predicted_at_once():
    window = load_spec("sliding_window").bind()
    plan = plan_of(window, problem_of(head_dim=128), (64, 128), deterministic=True)

    def prediction(length):
        problem = problem_of(batch=1, heads=16, kv_heads=4, q_len=length, kv_len=length, head_dim=128)
        return predict(plan, problem, Case(sizes=problem.sizes(), params={"window": 1024}, tensors={}))

    prediction(1 << 14)  # what is made once in a process
    few, many = effort(lambda: prediction(1 << 14)), effort(lambda: prediction(1 << 20))
    assert many.calls < 1.05 * few.calls and many.peak_bytes < 1 << 20
    assert prediction(1 << 20).flops_useful == 10 * 128 * 16 * (1024 * (1 << 20) - 1024 * 1023 // 2)


def test_predict_refuses_a_plan_for_other_head_dims():
    full = load_spec("full").bind()
    problem = problem_of(head_dim=64)
    other = problem._replace(head_dim=32)
    with pytest.raises(PlanError, match="the plan is for head_dim 64 and v_head_dim 64, the problem has 32 and 64"):
        predict(plan_of(full, problem), other, case_of(full, other))
    assert np.isfinite(predict(plan_of(full, problem), problem, case_of(full, problem)).predicted_ms)


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper


def pinned(variant, pipeline):
    return dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline=pipeline))


def test_a_pinned_pipeline_rules_better_ones_out_and_others_stand_in_for_it():
    causal = load_spec("causal").bind()
    menu = planner.backward_menu(pinned(causal, "ampere"), "sm_90a", "bfloat16", 64)
    assert menu.plans[0].pipeline == "ampere" and menu.fallbacks[0].pinned
    assert menu.fallbacks[0].reason == "'causal' is pinned to pipeline ampere"
    assert planner.backward_menu(pinned(causal, "hopper"), "sm_90a", "bfloat16", 64).plans[0].pipeline == "hopper"
    with pytest.raises(PlanError, match="sm_80 has no pipeline 'hopper'"):
        planner.backward_menu(pinned(causal, "hopper"), "sm_80", "bfloat16", 64)


@pytest.mark.sampled(
    "causal", "full", "local_softcap", "log_distance", "longformer", "sink_window", "sliding_window", "softcap"
)
@pytest.mark.parametrize("name", SPECS)
def test_hopper_serves_every_spec(name):
    for dtype in ("bfloat16", "float16"):
        for head_dim, form in ((128, {}), (256, {}), (128, {"deterministic": True}), (256, {"deterministic": True})):
            plan = planner.backward_menu(load_spec(name).bind(), "sm_90a", dtype, head_dim, **form).plans[0]
            assert plan.pipeline == "hopper"
        plan = planner.backward_menu(load_spec(name).bind(), "sm_90a", dtype, 128, dropout=True).plans[0]
        assert plan.dropout and plan.pipeline == ("ampere" if name == "tree" else "hopper")


@pytest.mark.slow
def test_hopper_serves_what_it_can_and_says_what_not():
    causal, biased = load_spec("causal").bind(), load_spec("relative_bias").bind()
    factor = fg.tensor("factor", dims=("heads",), dtype="float32")
    scaled = fg.variant(score=lambda s, b, h, q, k: s * factor[h], name="scaled").bind()
    selected = fg.variant(score=lambda s, b, h, q, k: s + factor[fg.int32(s > 0)], name="selected").bind()
    for head_dim in (16, 40, 64, 72, 96, 128):
        menu = planner.backward_menu(causal, "sm_90a", "bfloat16", head_dim)
        assert {plan.pipeline for plan in menu.plans} == {"hopper"} and menu.fallbacks == ()
        assert menu.plans[0].tile.q == (128 if head_dim <= 64 else 64)
    for dims in ((136, 136), (192, 128), (192, 192), (64, 256), (256, 256)):
        (plan,) = planner.backward_menu(causal, "sm_90a", "bfloat16", *dims).plans
        assert (plan.pipeline, plan.tile) == ("hopper", Tile(q=64, kv=64)) and plan.backward.split_dk_dv
    for variant, head_dim, form, why in (
        (load_spec("softcap").bind(), 64, {"dropout": True, "tile": (128, 128)}, "registers 241 > 240"),
        (biased, 128, {"gradients": ("table",), "dropout": True}, "registers 243 > 240"),
        (scaled, 64, {"gradients": ("factor",)}, "keeps no scores"),
        (selected, 64, {"gradients": ("factor",)}, "keeps no scores"),
        (causal, 192, {"dropout": True}, "dropout for head dims up to 128"),
        (causal, 128, {"tile": (64, 64)}, "64 keys per block are for head dims over 128"),
        ((load_spec("blocks") & load_spec("document")).bind(), 128, {"deterministic": True}, "registers"),
        (causal, 64, {"tile": (32, 32)}, "a backward's tile"),
    ):
        menu = planner.backward_menu(variant, "sm_90a", "bfloat16", head_dim, **form)
        assert menu.plans[0].pipeline == "ampere"
        (fallback,) = menu.fallbacks
        assert (fallback.pipeline, fallback.pinned) == ("hopper", False) and why in fallback.reason
        with pytest.raises(PlanError, match="nearest: pipeline 'ampere'"):
            planner.backward_menu(variant, "sm_90a", "bfloat16", head_dim, pipeline="hopper", **form)


@pytest.mark.parametrize("name", ["causal", "alibi"])
def test_what_the_main_kernel_sweeps_is_counted_there(name):
    variant = load_spec(name).bind()
    problem = problem_of(batch=8, heads=32, kv_heads=16, q_len=300, kv_len=700, head_dim=128, dtype="bfloat16")
    case, plan = case_of(variant, problem), planner.backward_menu(variant, "sm_90a", "bfloat16", 128).plans[0]
    cleared = backward.clear_distance(plan, problem)
    assert plan.backward.dq_in_main_kernel and 0 < cleared < 8 * 16
    p = predict(plan, problem, case)
    counted = count_backward(plan, analyse(variant), case, head_dim=128, v_head_dim=128, dtype="bfloat16").kernels
    for entry, moved in p.kernels:
        assert (moved.read_bytes, moved.write_bytes) == (counted[entry].read.total(), counted[entry].written.total())
    assert dict(p.kernels)["attention_backward_finish"].read_bytes == cleared * 2 * 300 * 128 * 4
    assert {part.name: part.amount for part in p.workspaces}["progress"] == 4 * (8 * 16 + 1)


def test_blocks_wait_for_earlier_blocks_alone():
    causal = load_spec("causal").bind()
    plan = planner.backward_menu(causal, "sm_90a", "bfloat16", 128).plans[0]
    for q_len, kv_len in ((1, 1), (2048, 2048), (1 << 18, 1 << 18), (2048, 1 << 18)):
        problem = problem_of(batch=4, heads=16, kv_heads=16, q_len=q_len, kv_len=kv_len, head_dim=128)
        assert min(backward.l2_kv_heads(plan, problem) + 1, 64) <= backward.clear_distance(plan, problem) <= 64
    empty = problem_of(batch=4, heads=16, kv_heads=16, kv_len=0, head_dim=128)
    assert backward.clear_distance(plan, empty) == 64


def test_who_clears_and_finishes_dq():
    """Warps of the main kernel where heads are wide and sequences long, as measured."""
    causal = load_spec("causal").bind()
    for head_dim, length, in_main in ((64, 512, False), (64, 8192, False), (128, 2048, False), (128, 4096, True)):
        menu = planner.backward_menu(causal, "sm_90a", "bfloat16", head_dim)
        problem = problem_of(batch=4, heads=16, kv_heads=16, q_len=length, kv_len=length, head_dim=head_dim)
        chosen = planner.choose(menu, problem, 132)
        assert chosen.backward.dq_in_main_kernel == in_main and chosen in menu.forms
    for options in ({"deterministic": True}, {"tile": (128, 128)}):
        assert planner.backward_menu(causal, "sm_90a", "bfloat16", 128, **options).small is None


@pytest.mark.parametrize(
    ("dims", "columns"),
    [((64, 64), 64), ((40, 64), 48), ((64, 128), 64), ((96, 96), 128), ((136, 64), 192), ((256, 256), 256)],
)
def test_hoppers_dq_is_added_up_in_whole_boxes(dims, columns):
    full = load_spec("full").bind()
    problem = problem_of(q_len=200, kv_len=300, head_dim=dims[0], v_head_dim=dims[1], dtype="bfloat16")
    plan = planner.backward_menu(full, "sm_90a", "bfloat16", *dims).plans[0]
    assert plan.dq_sum_columns == columns
    p = predict(plan, problem, case_of(full, problem))
    rows = -(-200 // plan.tile.q) * plan.tile.q * 8
    assert {part.name: part.amount for part in p.workspaces}["dq_sum"] == 4 * rows * columns
    entries = ("attention_backward_prepare", "attention_backward", "attention_backward_finish")
    assert tuple(entry for entry, _ in p.kernels) == entries == tuple(x.entry for x in grids(plan, problem, sms=132))
    assert p.predicted_ms > 0 and plan.smem_bytes <= 227 * 1024


def test_hoppers_deterministic_backward_needs_a_word_a_tile_of_queries_and_nothing_else():
    causal = load_spec("causal").bind()
    problem = problem_of(q_len=200, kv_len=300, head_dim=128, dtype="bfloat16")
    asked = (causal, "sm_90a", "bfloat16", 128)
    plan = planner.backward_menu(*asked, deterministic=True).plans[0]
    free = planner.backward_menu(*asked).plans[0]
    assert plan.deterministic and not free.deterministic
    assert (plan.tile, plan.stages, plan.smem, plan.registers) == (free.tile, free.stages, free.smem, free.registers)
    p, q = (predict(x, problem, case_of(causal, problem)) for x in (plan, free))
    assert {part.name: part.amount for part in p.workspaces}["dq_semaphore"] == 4 * 2 * 4 * 4
    assert "dq_semaphore" not in {part.name for part in q.workspaces}
    assert (p.kernels, p.hbm, p.flops) == (q.kernels, q.hbm, q.flops)


def test_hoppers_warpgroups_take_turns_unless_they_wait_for_what_they_look_up():
    def layout(spec, head_dim):
        variant = load_spec(spec).bind()
        return planner.backward_menu(variant, "sm_90a", "bfloat16", head_dim, pipeline="hopper").plans[0].backward

    specs = ("full", "causal", "document", "relative_bias")
    turns = {(spec, d): layout(spec, d).ping_pong for spec in specs for d in (64, 128)}
    assert [case for case, found in turns.items() if not found] == [
        ("full", 64),
        ("relative_bias", 64),
        ("relative_bias", 128),
    ]
    specs = ("causal", "document", "alibi", "softcap", "relative_bias")
    first = {spec: layout(spec, 64).scores_first for spec in specs}
    assert first == {"causal": False, "document": False, "alibi": False, "softcap": True, "relative_bias": True}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_head_dims_far_beyond_the_largest_are_refused_with_the_sums(arch, deterministic):
    """A layout is made for the sums of the message: none of it may need what does not fit."""
    for head_dims in ((512, 64), (64, 512), (1024, 1024)):
        with pytest.raises(PlanError, match="head_dim <= 256"):
            planner.backward_menu(load_spec("causal").bind(), arch, "bfloat16", *head_dims, deterministic=deterministic)


def test_stages_that_no_tile_has_room_for_are_refused_with_the_nearest():
    asked = {"pipeline": "ampere", "stages": 3, "deterministic": True}
    with pytest.raises(PlanError, match="fits sm_120 with 3 stages") as refusal:
        planner.backward_menu(load_spec("causal").bind(), "sm_120", "bfloat16", 192, **asked)
    assert "32 x 32, 3 stages" in str(refusal.value) and "nearest: 32x32 with 2 stages" in str(refusal.value)
    (plan, *_) = planner.backward_menu(
        load_spec("causal").bind(), "sm_120", "bfloat16", 192, **(asked | {"stages": 2})
    ).plans
    assert str(plan.tile) == "32x32"
