"""Bytes, FLOPs and tiles against a loop that counts them one tile at a time; the JSON that `flashgen plan` prints."""

import dataclasses
import json

import numpy as np
import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.analysis import counts, tiles
from flashgen.analysis import facts as analysis
from flashgen.analysis.tiles import Case
from flashgen.errors import PlanError
from flashgen.planning import planner, refusals, traffic
from flashgen.planning.arch import ARCHS
from flashgen.planning.problem import ITEMSIZE, Problem

WINDOW = fg.param("window", default=5, min=1)
DOC = fg.tensor("doc", dims=("batch", "kv"), dtype="int32")
BIAS = fg.tensor("bias", dims=("heads",), dtype="bfloat16")

MASKS = {
    "full": fg.variant(),
    "causal": fg.variant(lambda b, h, q, k: k <= q, name="causal"),
    "bottom_right": fg.variant(lambda b, h, q, k: k <= q + fg.kv_len - fg.q_len, name="bottom_right"),
    "window": fg.variant(lambda b, h, q, k: (k <= q) & (q - k < WINDOW), name="window"),
    "sink": fg.variant(lambda b, h, q, k: (k <= q) & ((q - k < WINDOW) | (k < 3)), name="sink"),
    "far": fg.variant(lambda b, h, q, k: k >= q + 40, name="far"),
    "nothing": fg.variant(lambda b, h, q, k: k < 0, name="nothing"),
    "heads": fg.variant(lambda b, h, q, k: (k <= q) | (h % 2 == 0), name="heads"),
    "dilated": fg.variant(lambda b, h, q, k: (k <= q) & ((q - k) % 4 == 0), name="dilated"),
    "document": fg.variant(lambda b, h, q, k: DOC[b, k] == DOC[b, q], name="document"),
    "alibi": fg.variant(lambda b, h, q, k: k <= q, lambda s, b, h, q, k: s + BIAS[h] * (k - q), name="alibi"),
}

shapes = st.builds(
    lambda batch, kv_heads, group, q_len, kv_len, d, dv, dtype: Problem(
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=8 * d,
        v_head_dim=8 * dv,
        dtype=dtype,
    ),
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(2, 12),
    st.integers(2, 12),
    st.sampled_from(list(ITEMSIZE)),
)
tile_shapes = st.tuples(st.sampled_from([16, 32, 48, 64, 128]), st.sampled_from([16, 32, 64]))


def make_case(variant, problem, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {
        "doc": np.sort(rng.integers(0, 4, (problem.batch, max(problem.q_len, problem.kv_len, 1))), axis=1),
        "bias": rng.standard_normal(problem.heads).astype(np.float32),
    }
    wanted = {tensor.name for tensor in variant.tensors}
    return Case(
        sizes=problem.sizes(),
        params=variant.values({}),
        tensors={name: array for name, array in arrays.items() if name in wanted},
    )


def make_plan(variant, problem, arch="sm_90a", pipeline="ampere", **options):
    return planner.menu(variant, arch, "bfloat16", problem.head_dim, problem.v_head_dim, pipeline=pipeline, **options)


def counted(plan, problem, case):
    """Bytes, elements and tiles, one tile at a time, as an attention kernel goes through them."""
    facts, item = analysis.analyse(plan.variant), problem.itemsize
    n = dict.fromkeys(("read", "written", "elements", "visible", "total", "empty", "partial", "full"), 0)
    for b in range(problem.batch):
        for h in range(problem.heads):
            for q_tile in range(-(-problem.q_len // plan.tile.q)):
                q = np.arange(q_tile * plan.tile.q, min((q_tile + 1) * plan.tile.q, problem.q_len))
                judged = dict(tiles.schedule(facts, case, plan.tile, q_tile, b, h))
                if judged:
                    n["read"] += len(q) * problem.head_dim * item
                for kv_tile in range(-(-problem.kv_len // plan.tile.kv)):
                    k = np.arange(kv_tile * plan.tile.kv, min((kv_tile + 1) * plan.tile.kv, problem.kv_len))
                    seen = np.ones((len(q), len(k)), bool)
                    if plan.variant.mask is not None:
                        seen = seen & case.evaluate(plan.variant.mask, b=b, h=h, q=q[:, None], k=k)
                    cls = judged.get(kv_tile, tiles.EMPTY)
                    if facts.exact:
                        true = tiles.EMPTY if not seen.any() else tiles.FULL if seen.all() else tiles.PARTIAL
                        assert cls == true
                    n["total"] += 1
                    n[{tiles.EMPTY: "empty", tiles.PARTIAL: "partial", tiles.FULL: "full"}[cls]] += 1
                    n["visible"] += int(seen.sum())
                    if cls != tiles.EMPTY:
                        n["read"] += len(k) * (problem.head_dim + problem.v_head_dim) * item
                        n["elements"] += len(q) * len(k)
                n["written"] += len(q) * (problem.v_head_dim * problem.o_itemsize + 4)
    return n


@pytest.mark.sampled("bottom_right", "far", "nothing")
@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@settings(deadline=None, max_examples=40)
@given(problem=shapes, tile=tile_shapes, seed=st.integers(0, 99))
def test_counts_equal_a_loop_over_tiles(name, problem, tile, seed):
    variant = MASKS[name]
    case = make_case(variant, problem, seed)
    plan = make_plan(variant, problem, tile=tile).plans[0]
    plan = dataclasses.replace(plan, summaries=())  # which tests of their own count
    p = traffic.predict(plan, problem, case)
    n = counted(plan, problem, case)
    captured = sum(a.size * {"doc": 4, "bias": 2}[name] for name, a in case.tensors.items())
    assert (p.hbm.read_bytes, p.hbm.write_bytes) == (n["read"] + captured, n["written"])
    per_pair = 2 * (problem.head_dim + problem.v_head_dim)
    assert (p.flops, p.flops_useful) == (per_pair * n["elements"], per_pair * n["visible"])
    found = {key: getattr(p.tiles, key) for key in ("total", "empty", "partial", "full")}
    if problem.q_len and problem.kv_len:
        assert found == {key: n[key] for key in found}

    q, k, v, o = (
        problem.batch * heads * length * dim * item
        for heads, length, dim, item in (
            (problem.heads, problem.q_len, problem.head_dim, problem.itemsize),
            (problem.kv_heads, problem.kv_len, problem.head_dim, problem.itemsize),
            (problem.kv_heads, problem.kv_len, problem.v_head_dim, problem.itemsize),
            (problem.heads, problem.q_len, problem.v_head_dim, problem.o_itemsize),
        )
    )
    rows = problem.batch * problem.heads * problem.q_len
    assert (p.compulsory.read_bytes, p.compulsory.write_bytes) == (q + k + v + captured, o + 4 * rows)
    s = rows * problem.kv_len * problem.itemsize
    # Algorithm 0: read Q, K, write S; read S, write P; read P, V, write O.
    assert (p.standard.read_bytes, p.standard.write_bytes) == (q + k + s + s + v + captured, s + s + o)
    assert p.lower_bound_bytes <= p.hbm.total
    assert p.lower_bound_bytes >= p.compulsory.write_bytes
    assert p.flops_useful <= p.flops


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(["full", "causal", "window", "sink"]),
    problem=shapes.filter(lambda p: p.dtype in refusals.DTYPES),
    arch=st.sampled_from(list(ARCHS)),
    scale=st.sampled_from([1, 64]),
)
def test_no_plan_of_the_menu_moves_less_than_the_lower_bound(name, problem, arch, scale):
    variant = MASKS[name]
    problem = Problem(
        **{f: getattr(problem, f) for f in ("batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype")},
        q_len=scale * problem.q_len,
        kv_len=scale * problem.kv_len,
    )
    case = make_case(variant, problem)
    for plan in make_plan(variant, problem, arch).plans:
        p = traffic.predict(plan, problem, case)
        assert p.lower_bound_bytes <= p.hbm.total
        slowest = max(p.times.as_json().values())
        assert p.predicted_ms == slowest == p.times.as_json()[p.times.bound]


def test_times_are_those_of_the_reference_card():
    problem = Problem(batch=1, heads=16, kv_heads=16, q_len=8192, kv_len=8192, head_dim=128, v_head_dim=128)
    case = make_case(MASKS["full"], problem)
    plan = make_plan(MASKS["full"], problem, "sm_80", tile=(128, 64)).plans[0]
    times = traffic.predict(plan, problem, case).times
    assert times.tensor == pytest.approx(4 * 16 * 8192**2 * 128 / 312e12 * 1e3)
    assert times.exponential == pytest.approx(16 * 8192**2 / (16 * 108 * 1.41e9) * 1e3)
    assert times.dram == pytest.approx((4 * 16 * 8192 * 256 + 16 * 8192 * 4) / 2.039e12 * 1e3)
    k_and_v = 16 * 64 * 8192 * 512  # 64 Q tiles, each streams K and V once
    assert times.l2 == pytest.approx((2 * 16 * 8192 * 256 + 16 * 8192 * 4 + k_and_v) / 7.2e12 * 1e3)
    assert times.bound == "tensor"


def test_hbm_has_no_time_for_keys_that_a_mask_hides():
    """One query at the end of a long cache, which sees a short window of it."""
    short = fg.variant(lambda b, h, q, k: k > fg.kv_len - 300, name="short")
    problem = Problem(batch=1, heads=8, kv_heads=8, q_len=1, kv_len=65_536, head_dim=128, v_head_dim=128)
    plan = make_plan(short, problem, "sm_80", tile=(64, 64)).plans[0]
    found = traffic.predict(plan, problem, make_case(short, problem))
    visited = 5 * 64  # keys of tiles, one of which the window cuts
    assert found.times.dram == pytest.approx(8 * ((2 * visited + 2) * 256 + 4) / 2.039e12 * 1e3)
    assert found.compulsory.total > 200 * found.hbm.total and found.lower_bound_bytes == found.hbm.total


def test_nor_has_a_backward():
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=65_536, head_dim=64, v_head_dim=64)
    near = fg.variant(lambda b, h, q, k: k <= q, name="near")
    plan = make_plan(near, problem, "sm_80", backward=True).plans[0]
    found = traffic.predict(plan, problem, make_case(near, problem))
    least = found.compulsory.write_bytes + min(found.compulsory.read_bytes, found.hbm.read_bytes)
    assert found.hbm.read_bytes < found.compulsory.read_bytes
    assert found.times.dram == pytest.approx(least / 2.039e12 * 1e3)


def test_flash_attention_moves_far_less_than_standard_attention():
    problem = Problem(batch=1, heads=16, kv_heads=16, q_len=8192, kv_len=8192, head_dim=64, v_head_dim=64)
    case = make_case(MASKS["full"], problem)
    p = traffic.predict(make_plan(MASKS["full"], problem, "sm_80").plans[0], problem, case)
    assert p.compulsory.total <= p.lower_bound_bytes <= p.hbm.total < p.standard.total / 3


def test_json_has_the_documented_fields():
    problem = Problem(batch=2, heads=16, kv_heads=4, q_len=1000, kv_len=900, head_dim=128, v_head_dim=64)
    variant = MASKS["causal"]
    menu = make_plan(variant, problem, "sm_80")
    p = traffic.predict(menu.plans[0], problem, make_case(variant, problem), rejected=menu.rejected)
    found = json.loads(json.dumps(p.as_json()))
    kinds = {
        "variant": str,
        "arch": str,
        "pipeline": str,
        "tile": dict,
        "stages": int,
        "warps": int,
        "roles": list,
        "smem_bytes": int,
        "registers_estimate": int,
        "hbm": dict,
        "compulsory": dict,
        "standard": dict,
        "lower_bound_bytes": int,
        "flops": int,
        "flops_useful": int,
        "tiles": dict,
        "predicted_ms": float,
        "pace_ms": float,
        "pace_clocks": dict,
        "too_large": list,
        "rejected": list,
        "shape": dict,
        "dtype": str,
        "bound": str,
    }
    assert {name: type(found[name]) for name in kinds} == kinds
    assert set(found["tile"]) == {"q", "kv"}
    assert set(found["tiles"]) == {"total", "empty", "partial", "full"}
    for name in ("hbm", "compulsory", "standard"):
        assert {key: type(value) for key, value in found[name].items()} == {"read_bytes": int, "write_bytes": int}
    assert found["roles"] == [{"name": "compute", "warps": found["warps"], "registers": None}]
    assert found["rejected"] and all({"tile", "reason"} <= set(r) for r in found["rejected"])
    assert (found["variant"], found["arch"], found["pipeline"]) == ("causal", "sm_80", "ampere")
    assert found["shape"] == {
        "batch": 2,
        "heads": 16,
        "kv_heads": 4,
        "q_len": 1000,
        "kv_len": 900,
        "head_dim": 128,
        "v_head_dim": 64,
    }


def test_tables_show_the_sums():
    problem = Problem(batch=1, heads=8, kv_heads=8, q_len=512, kv_len=512, head_dim=128, v_head_dim=128)
    menu = make_plan(MASKS["causal"], problem, "sm_80", tile=(128, 64))
    p = traffic.predict(menu.plans[0], problem, make_case(MASKS["causal"], problem), rejected=menu.rejected)
    tables = {table.title: table for table in p.tables()}
    for table in tables.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    assert tables["shared memory"].rows == (
        ("q", "32768", "128 rows x 128 columns x 2 bytes; o leaves through the same room"),
        ("k", "32768", "2 stages x 64 rows x 128 columns x 2 bytes"),
        ("v", "32768", "2 stages x 64 rows x 128 columns x 2 bytes"),
        ("sum", "98304", "of 166912 bytes"),
    )
    registers = tables["registers per thread (estimate)"].rows
    assert int(registers[-1][1]) == sum(int(row[1]) for row in registers[:-1]) == p.plan.registers_estimate
    assert [row[0] for row in tables["HBM traffic"].rows][:3] == ["this plan", "compulsory", "standard attention"]
    assert sum(row[2] == "decides" for t in p.tables() if t.title.startswith("time") for row in t.rows) == 1


@pytest.mark.parametrize("arch, pipeline", [("sm_80", "ampere"), ("sm_90a", "hopper")])
def test_the_pace_is_what_orders_the_candidates(arch, pipeline):
    # Head dims for which no record stands before the model.
    problem = Problem(batch=1, heads=8, kv_heads=8, q_len=2048, kv_len=2048, head_dim=112, v_head_dim=112)
    case = make_case(MASKS["full"], problem)
    menu = planner.menu(MASKS["full"], arch, "bfloat16", 112, pipeline=pipeline)
    main = traffic.predict(menu.plans[0], problem, case, rejected=menu.rejected)
    [slow] = [r for r in menu.rejected if (r.tile.q, r.tile.kv, r.stages) == (menu.plans[0].tile.q, 16, 2)][:1]
    assert slow.reason.startswith("predicted")
    other = planner.menu(MASKS["full"], arch, "bfloat16", 112, pipeline=pipeline, tile=(slow.tile.q, 16), stages=2)
    slower = traffic.predict(other.plans[0], problem, case)
    # Both tiles divide the problem, so that the ratio of the seconds_per_score is the one in the reason.
    assert f"predicted {slower.pace.ms / main.pace.ms:.2f}x the time of" in slow.reason
    assert slower.times.tensor == main.times.tensor  # the roofline does not tell them apart
    tables = {table.title: table for table in main.tables()}
    rows = tables["pace, which orders the candidates: an SM's clocks for 1000 scores"].rows
    assert rows[-1][0] == "together" and f"{main.pace.ms:.4g} ms" in rows[-1][2]
    assert float(rows[-1][1]) >= max(float(row[1]) for row in rows[:-1])
    measured = dataclasses.replace(main, measured=planner.menu(MASKS["full"], "sm_90a", "bfloat16", 128).measured)
    assert not any(table.title.startswith("pace") for table in measured.tables())


def test_what_only_a_count_of_the_pairs_would_tell_is_said_to_be_unknown(monkeypatch):
    monkeypatch.setattr(counts, "MAX_COUNTED", 100)
    problem = Problem(batch=1, heads=8, kv_heads=8, q_len=512, kv_len=512, head_dim=128, v_head_dim=128)
    strided = fg.variant(lambda b, h, q, k: (q - k) % 3 == 0)
    p = traffic.predict(make_plan(strided, problem, "sm_80").plans[0], problem, make_case(strided, problem))
    assert (p.flops_useful, p.lower_bound_bytes) == (None, None)
    tables = {table.title: table for table in p.tables()}
    assert ("lower bound, both", "not counted", "") in tables["HBM traffic"].rows
    assert tables["tiles"].rows[0][-1] == "not counted"
    assert p.as_json()["lower_bound_bytes"] is None


def test_a_million_tokens_are_planned_as_fast_as_a_thousand():
    window = fg.param("width", default=1024, min=1)
    variant = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name="long")

    def plan(length):
        planner.menu_of.cache_clear()
        analysis.analyse.cache_clear()
        problem = Problem(batch=1, heads=16, kv_heads=16, q_len=length, kv_len=length, head_dim=128, v_head_dim=128)
        case = Case(sizes=problem.sizes(), params=variant.values({}), tensors={})
        menu = planner.menu(variant, "sm_90a", "bfloat16", 128)
        chosen = planner.choose(menu, problem, 132)
        return traffic.predict(chosen, problem, case, rejected=menu.rejected)

    plan(1 << 13)  # what is made once in a process
    few, many = effort(lambda: plan(1 << 13)), effort(lambda: plan(1 << 20))
    assert many.calls < 1.05 * few.calls and many.peak_bytes < 1 << 20
    assert many.calls < 20_000  # a first call waits for it
    visible = 1024 * (1 << 20) - 1024 * 1023 // 2
    assert plan(1 << 20).flops_useful == 4 * 128 * 16 * visible


@pytest.mark.sampled("full", "bottom_right")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "causal", "bottom_right", "window"])
def test_formulas_give_the_same_bytes_and_flops(name):
    problem = Problem(batch=2, heads=4, kv_heads=2, q_len=50, kv_len=70, head_dim=32, v_head_dim=16)
    case = make_case(MASKS[name], problem)
    p = traffic.predict(make_plan(MASKS[name], problem, tile=(32, 16)).plans[0], problem, case)
    values = {
        **problem.sizes(),
        **case.params,
        "tile_q": 32,
        "tile_kv": 16,
        "head_dim": 32,
        "v_head_dim": 16,
        "itemsize": problem.itemsize,
    }

    def number(expression):
        return expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols}).doit()

    assert number(p.formula.read_bytes) == p.hbm.read_bytes
    assert number(p.formula.write_bytes) == p.hbm.write_bytes
    assert (number(p.formula.flops), number(p.formula.flops_useful)) == (p.flops, p.flops_useful)
    assert p.as_json(formulas=True)["formula"]["write_bytes"] == str(p.formula.write_bytes)
    assert "formula" not in p.as_json()


def test_there_is_no_formula_for_a_mask_that_is_no_band():
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64, head_dim=64, v_head_dim=64)
    p = traffic.predict(make_plan(MASKS["dilated"], problem).plans[0], problem, make_case(MASKS["dilated"], problem))
    assert p.formula is None and p.as_json(formulas=True)["formula"] is None


def test_predict_refuses_a_plan_for_other_head_dims():
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=8, kv_len=8, head_dim=64, v_head_dim=64)
    plan = planner.menu(MASKS["full"], "sm_80", "bfloat16", 128).plans[0]
    with pytest.raises(PlanError, match="the plan is for head_dim 128 and v_head_dim 128, the problem has 64 and 64"):
        traffic.predict(plan, problem, make_case(MASKS["full"], problem))
