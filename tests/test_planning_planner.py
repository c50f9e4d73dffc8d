"""The menu: everything in it fits, what is left out says why, and a call picks an entry in constant time."""

import dataclasses
import itertools
import re

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Pins
from flashgen.planning import measured, planner, ranking, records, refusals
from flashgen.planning.arch import ARCHS
from flashgen.planning.float8 import FLOAT8
from flashgen.planning.pipelines.ampere import forward as ampere
from flashgen.planning.plan import KernelPlan
from flashgen.planning.problem import Problem
from flashgen.planning.request import Fixed, KernelRequest

FULL = fg.variant()
SOFTCAP = fg.variant(score=lambda s, b, h, q, k: 30.0 * fg.tanh(s / 30.0), name="softcap")

head_dims = st.integers(2, 32).map(lambda n: 8 * n)
requests = st.fixed_dictionaries(
    {
        "variant": st.sampled_from([FULL, SOFTCAP]),
        "arch": st.sampled_from(list(ARCHS)),
        "dtype": st.sampled_from([dtype for dtype in refusals.DTYPES if dtype not in FLOAT8]),
        "head_dim": head_dims,
        "v_head_dim": head_dims,
        "pipeline": st.just("ampere"),
    }
)


def problem(q_len, kv_len=None, *, batch=1, heads=8, head_dim=128):
    kv_len = q_len if kv_len is None else kv_len
    return Problem(
        batch=batch, heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, v_head_dim=head_dim
    )


def smem_bytes(tile, stages, d, dv):
    """Bytes of a block, written out: Q and later O in one room, K and V in each stage."""
    pad = lambda n: (n + 15) // 16 * 16  # noqa: E731
    d, dv = pad(d), pad(dv)
    return 2 * (tile.q * max(d, dv) + stages * tile.kv * (d + dv))


@settings(deadline=None, max_examples=60)
@given(requests)
def test_every_plan_fits(request):
    arch = ARCHS[request["arch"]]
    menu = planner.menu(**request)
    assert 1 <= len(menu.plans) <= ranking.MAX_PLANS
    assert len({plan if menu.record else plan.tile.q for plan in menu.plans}) == len(menu.plans)
    for plan, seconds_per_score in zip(menu.plans, menu.seconds_per_score, strict=True):
        assert plan.smem_bytes == smem_bytes(plan.tile, plan.stages, plan.head_dim, plan.v_head_dim)
        assert plan.smem_bytes <= arch.smem_per_block
        assert plan.registers_estimate <= 255
        assert plan.blocks_per_sm >= 1
        assert plan.blocks_per_sm * (plan.smem_bytes + 1024) <= arch.smem_per_sm
        assert plan.blocks_per_sm * plan.registers_estimate * plan.threads <= arch.registers_per_sm
        assert plan.blocks_per_sm * plan.warps <= arch.max_warps
        assert plan.tile.q in (16 * plan.warps, 32 * plan.warps)
        assert plan.tile.kv % 16 == 0 and plan.padded_head_dim % 16 == 0 and plan.padded_v_head_dim % 16 == 0
        assert plan.head_dim <= plan.padded_head_dim < plan.head_dim + 16
        assert len(seconds_per_score) == plan.blocks_per_sm
        # Sharing an SM hides latency: more blocks never slow a score down.
        assert all(a >= b > 0 for a, b in itertools.pairwise(seconds_per_score))


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(requests)
def test_reasons_of_rejected_candidates_are_true(request):
    arch = ARCHS[request["arch"]]
    menu = planner.menu(**request)
    d, dv = request["head_dim"], request["v_head_dim"]
    assert menu.rejected
    for r in menu.rejected:
        bytes_needed = smem_bytes(r.tile, r.stages, d, dv)
        if r.reason.startswith("shared memory"):
            assert bytes_needed > arch.smem_per_block
            assert r.reason == f"shared memory {bytes_needed / 1024:.4g} KiB > {arch.smem_per_block // 1024} KiB"
        elif r.reason.startswith("registers"):
            assert bytes_needed <= arch.smem_per_block
            assert int(r.reason.split()[1]) > 255 or "threads" in r.reason
        else:
            reason, _, other_bits = r.reason.partition(", whose bits are those of ")
            assert other_bits == (
                "" if r.tile.kv == menu.plans[0].tile.kv else f"{menu.plans[0].tile.kv} keys at a time"
            )
            if menu.record:  # its times rank the plans, beside the one that is fastest on the longest shape
                mean, least, most = map(float, re.findall(r"([\d.]+)x", reason))
                assert reason == f"measured {mean:.2f}x the menu's time, {least:.2f}x to {most:.2f}x by shape"
                assert least <= mean <= most
                assert other_bits or mean > 1 - measured.USEFUL * len(menu.measured.shapes)
                continue
            assert reason.startswith("predicted")
            assert other_bits or float(reason.split()[1].rstrip("x")) >= 1
            i, rival = next(
                (i, p) for i, p in enumerate(menu.plans) if f" {p.tile.q} x {p.tile.kv}, {p.stages} stages" in reason
            )
            assert (i > 0) == reason.endswith("where blocks are few") and r.tile.q >= rival.tile.q
            fixed = planner.menu(**request, tile=(r.tile.q, r.tile.kv), stages=r.stages)
            if fixed.plans[0].warps == r.warps:
                assert fixed.seconds_per_score[0][-1] >= menu.seconds_per_score[0][-1] / ranking.NEAR


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_measured_menu_says_how_near_it_comes_to_the_best_of_all(head_dim):
    variant = FULL.bind()
    measured = planner.menu(variant, "sm_90a", "bfloat16", head_dim).measured
    entry = records.find("hopper", KernelRequest.of(variant, "sm_90a", "bfloat16", head_dim))
    for j, loss in enumerate(measured.losses):
        best = min(timed.ms[j] for timed in entry.candidates)
        assert measured.least[j] == best and loss == min(ms[j] for ms in measured.ms) / best - 1 >= 0
    assert sum(measured.losses) / len(measured.losses) < 0.03  # of kernels that add up in one order
    assert measured.covers.startswith(
        f"{len(entry.shapes)} shapes, each within {max(measured.losses):.2%} of the fastest"
    )


def test_every_candidate_is_in_the_menu_or_rejected_once():
    menu = planner.menu(FULL, "sm_80", "bfloat16", 128)
    seen = [(p.tile, p.stages, p.warps) for p in (*menu.plans, *menu.rejected)]
    assert len(seen) == len(set(seen))
    assert set(seen) == {(c.tile, c.stages, c.warps) for c in ampere.candidates(Fixed())}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 72, 96, 128, 192, 256])
def test_there_is_a_plan_everywhere(arch, head_dim):
    main = planner.menu(FULL, arch, "float16", head_dim, pipeline="ampere").plans[0]
    assert (main.arch, main.pipeline, main.head_dim, main.dtype) == (arch, "ampere", head_dim, "float16")
    assert main.program.roles[0].name == "compute" and main.stages >= 2


def test_sm_90_is_sm_90a():
    assert planner.menu(FULL, "sm_90", "bfloat16", 64).plans[0].arch == "sm_90a"


def test_memoised_and_deterministic():
    first = planner.menu(FULL, "sm_80", "bfloat16", 64)
    assert planner.menu(FULL, "sm_80", "bfloat16", 64, 64) is first
    planner.menu_of.cache_clear()
    assert planner.menu(FULL, "sm_80", "bfloat16", 64) == first


def test_plan_holds_no_length():
    names = {field.name for field in dataclasses.fields(KernelPlan)}
    assert not names & {"batch", "heads", "kv_heads", "q_len", "kv_len", "params", "tensors"}


# ---------------------------------------------------------------------------------------------------------------------
# What is fixed is checked, never changed


@pytest.mark.parametrize("tile", [(64, 64), (128, 32), (16, 16), (48, 80), (96, 112), (256, 16), (240, 32)])
def test_a_fixed_tile_is_kept(tile):
    menu = planner.menu(FULL, "sm_80", "bfloat16", 64, tile=tile)
    assert {(plan.tile.q, plan.tile.kv) for plan in menu.plans} == {tile}
    assert len(menu.plans) == 1


def test_pins_of_the_variant_are_kept_and_the_call_overrides_them():
    pinned = fg.variant(tile=(64, 32), stages=3)
    plan = planner.menu(pinned, "sm_80", "bfloat16", 64).plans[0]
    assert ((plan.tile.q, plan.tile.kv), plan.stages) == ((64, 32), 3)
    plan = planner.menu(pinned, "sm_80", "bfloat16", 64, tile=(64, 64), stages=2).plans[0]
    assert ((plan.tile.q, plan.tile.kv), plan.stages) == ((64, 64), 2)


@pytest.mark.parametrize("menu", [planner.menu, planner.backward_menu])
@pytest.mark.parametrize(
    "asked, says",
    [
        ({"stages": 0}, "0 stages for"),
        ({"stages": -1}, "-1 stages for"),
        ({"pipeline": ""}, "has no pipeline ''"),
        ({"tile": (0, 0)}, "tile 0 x 0|tile 0x0"),
    ],
)
def test_nothing_is_not_taken_for_not_asked(menu, asked, says):
    with pytest.raises(PlanError, match=says):
        menu(FULL, "sm_80", "bfloat16", 64, **asked)
    if menu is planner.menu:  # a backward takes none of these from the variant
        pinned = dataclasses.replace(FULL, pins=Pins(**asked))
        with pytest.raises(PlanError, match=says):
            menu(pinned, "sm_80", "bfloat16", 64)


@pytest.mark.sampled("64-sm_90a-causal", "256-sm_80-causal", "256-sm_80-blocks", "256-sm_90a-causal")
@pytest.mark.parametrize("name", ["causal", "blocks"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_tile_and_stages_that_the_planner_takes_by_itself_give_the_same_kernel(name, arch, head_dim):
    asked = (load_spec(name).bind(), arch, "bfloat16", head_dim)
    for pipeline in ARCHS[arch].pipelines:
        menu = planner.menu(*asked, pipeline=pipeline)
        for plan in menu.plans:
            fixed = {"pipeline": pipeline, "tile": (plan.tile.q, plan.tile.kv)}
            form = {"stages": plan.stages, "q_stages": plan.q_stages}
            assert planner.menu(*asked, **fixed, **form).plans == (plan,)
            assert plan in planner.menu(*asked, **fixed).plans
    for plan in planner.backward_menu(*asked).plans:
        fixed = {"tile": (plan.tile.q, plan.tile.kv), "stages": plan.stages}
        assert planner.backward_menu(*asked, **fixed).plans == (plan,)


def refused(*lines, variant=FULL, arch="sm_80", dtype="bfloat16", head_dim=128, **options):
    with pytest.raises(PlanError) as error:
        planner.menu(variant, arch, dtype, head_dim, **options)
    for line in lines:
        assert line in str(error.value), str(error.value)


def test_a_tile_that_cannot_fit_names_the_nearest():
    refused(
        "tile 128x256 of 'full' (head_dim 128, bfloat16) does not fit sm_80",
        "128 x 256, 2 stages, 4 warps: shared memory 288 KiB > 163 KiB",
        "nearest: 128x128",
        tile=(128, 256),
    )
    refused("with 4 stages", "nearest: 128x128 with 2 stages", tile=(128, 128), stages=4)
    wide = {"head_dim": 64, "arch": "sm_90a", "pipeline": "ampere"}
    refused("registers", "> 255", "x 512 threads > 65536", "nearest:", tile=(256, 256), **wide)


@pytest.mark.parametrize(("tile", "nearest"), [((100, 64), "96x64"), ((64, 8), "64x16"), ((512, 64), "128x64")])
def test_a_tile_outside_the_grid_of_mma(tile, nearest):
    refused(f"tile {tile[0]}x{tile[1]} of 'full'", "multiples of 16", f"nearest: {nearest}", tile=tile)


TILES = list(itertools.product((0, 64, 100, 192, 256, 512), (8, 64, 100, 200, 256)))


@pytest.mark.sampled(
    "64-4-sm_80-ampere",
    "128-4-sm_86-ampere",
    "256-None-sm_86-ampere",
    "256-4-sm_80-ampere",
    "256-4-sm_86-ampere",
    "256-4-sm_90a-None",
)
@pytest.mark.slow
@pytest.mark.parametrize("arch, pipeline", [("sm_80", "ampere"), ("sm_86", "ampere"), ("sm_90a", None)])
@pytest.mark.parametrize("stages", [None, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_nearest_tile_works(arch, pipeline, stages, head_dim):
    asked = (FULL, arch, "bfloat16", head_dim)
    refusals = 0
    for tile in TILES:
        try:
            planner.menu(*asked, pipeline=pipeline, tile=tile, stages=stages)
        except PlanError as error:
            refusals += 1
            found = re.search(r"nearest: (\d+)x(\d+)(?: with (\d) stages)?(?:, or pipeline '(\w+)')?", str(error))
            q, kv, other_stages, other = found.groups()
            near = {"tile": (int(q), int(kv)), "stages": int(other_stages) if stages else None}
            assert planner.menu(*asked, pipeline=pipeline, **near).plans
            if other:
                assert planner.menu(*asked, pipeline=other, tile=tile, stages=stages).plans
    assert refusals > 10


@pytest.mark.slow
def test_the_nearest_tile_of_a_backward_works():
    for tile in TILES:
        with pytest.raises(PlanError) as error:
            planner.backward_menu(FULL, "sm_86", "bfloat16", 256, tile=tile)
        q, kv = re.search(r"nearest: (\d+)x(\d+)$", str(error.value)).groups()
        assert planner.backward_menu(FULL, "sm_86", "bfloat16", 256, tile=(int(q), int(kv))).plans


def test_another_pipeline_that_takes_a_tile_is_named():
    asked = {"arch": "sm_90a", "head_dim": 64}
    refused("nearest: 64x64, or pipeline 'ampere', which takes 32x64", tile=(32, 64), **asked)
    refused("nearest: 128x96, or pipeline 'ampere', which takes 96x96", tile=(96, 96), **asked)


@pytest.mark.parametrize(("stages", "nearest"), [(1, "2 stages"), (7, "4 stages")])
def test_stages_outside_the_range(stages, nearest):
    refused(f"{stages} stages", "2 to 4 work", f"nearest: {nearest}", stages=stages)


@pytest.mark.parametrize("stages", ampere.INTEGERS["stages"].values)
def test_every_number_of_stages_fits_somewhere(stages):
    for arch in ARCHS:
        assert {plan.stages for plan in planner.menu(FULL, arch, "bfloat16", 256, stages=stages).plans} == {stages}


def test_head_dims_that_do_not_work():
    refused(
        "no tile of 'full' (head_dim 512, bfloat16) fits sm_80",
        "128 x 64, 2 stages, 8 warps: shared memory 384 KiB > 163 KiB",
        "nearest: head_dim <= 256 on sm_80",
        head_dim=512,
    )
    refused("nearest: v_head_dim <= 256 on sm_80", head_dim=64, v_head_dim=264)
    refused("(head_dim 100, bfloat16)", "steps of 8", "nearest: head_dim 96 or 104", head_dim=100)
    refused("nearest: head_dim 16", head_dim=8)
    refused("head_dim 64, v_head_dim 20", "nearest: v_head_dim 16 or 24", head_dim=64, v_head_dim=20)


def test_a_head_dim_just_above_the_largest_is_refused_where_it_would_fit():
    refused("nearest: head_dim <= 256 on sm_90a", arch="sm_90a", head_dim=264)


def test_dtypes_that_do_not_work():
    refused("float32", "16-bit inputs", "run on a CPU", "nearest: bfloat16", dtype="float32")
    refused("nearest: bfloat16", dtype="float64")


def test_architectures_and_pipelines_that_do_not_work():
    refused("below sm_80", "nearest: sm_80", arch="sm_75")
    refused("sm_80 has no pipeline 'hopper'", "nearest: pipeline 'ampere'", pipeline="hopper")
    refused("'full' is pinned to sm_86", "asked: sm_80", variant=dataclasses.replace(FULL, pins=Pins(arch="sm_86")))
    assert planner.menu(dataclasses.replace(FULL, pins=Pins(arch="sm_90")), "sm_90a", "bfloat16", 64).plans


def test_only_refuses_what_the_spec_did_not_declare():
    only = fg.variant(head_dims=(64, 128), dtypes=("float16",), only=True)
    assert planner.menu(only, "sm_80", "float16", 128).plans
    refused("declared for head_dim 64, 128 only", "nearest: head_dim 128", variant=only, dtype="float16", head_dim=120)
    refused("declared for dtype float16 only", "nearest: dtype float16", variant=only)
    free = fg.variant(head_dims=(64, 128), dtypes=("float16",))
    assert planner.menu(free, "sm_80", "bfloat16", 96).plans


# ---------------------------------------------------------------------------------------------------------------------
# Choosing for a call


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_problems_take_a_fast_plan_and_short_ones_more_blocks(arch, head_dim):
    menu, sms = planner.menu(FULL, arch, "bfloat16", head_dim, pipeline="ampere"), ARCHS[arch].sms
    best = menu.seconds_per_score[0][-1]
    long = planner.choose(menu, problem(16384, batch=2, heads=16, head_dim=head_dim), sms)
    assert menu.seconds_per_score[menu.plans.index(long)][-1] < 1.05 * best
    short = planner.choose(menu, problem(128, heads=4, head_dim=head_dim), sms)
    assert menu.record or short.tile.q < menu.plans[0].tile.q  # where it was measured, times decide


def test_a_grid_that_one_plan_just_fills_takes_that_plan():
    menu = planner.menu(FULL, "sm_80", "bfloat16", 128)
    main = menu.plans[0]
    filled = problem(main.tile.q * 8, 8192, heads=108 * main.blocks_per_sm)
    assert planner.choose(menu, filled, 108) is main


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 4), st.integers(1, 40), st.integers(1, 200))
def test_choose_is_deterministic_and_picks_from_the_menu(q_len, kv_len, batch, heads, sms):
    menu = planner.menu(FULL, "sm_80", "bfloat16", 128)
    asked = problem(q_len, kv_len, batch=batch, heads=heads)
    chosen = planner.choose(menu, asked, sms)
    assert chosen in menu.plans
    assert planner.choose(menu, asked, sms) is chosen


def test_choose_takes_no_longer_for_longer_problems():
    menu = planner.menu(FULL, "sm_80", "bfloat16", 128)
    short, long = (problem(length, heads=64, batch=64) for length in (128, 1 << 23))
    few, many = (effort(lambda asked=asked: planner.choose(menu, asked, 108)).calls for asked in (short, long))
    assert few == many < 40  # every call of attention makes one


def test_a_dearer_score_function_is_paced_slower():
    plain, capped = (planner.menu(v, "sm_90a", "bfloat16", 64, tile=(128, 64)) for v in (FULL, SOFTCAP))
    assert capped.seconds_per_score[0][0] > plain.seconds_per_score[0][0]


def test_q_in_registers_saves_shared_memory_reads():
    plan = planner.menu(FULL, "sm_80", "bfloat16", 64, tile=(64, 64)).plans[0]
    inside, outside = (
        ampere.clocks(dataclasses.replace(plan, q_in_registers=where), ARCHS["sm_80"]) for where in (True, False)
    )
    assert inside["shared memory"] < outside["shared memory"]
    assert {k: v for k, v in inside.items() if k != "shared memory"} == {
        k: v for k, v in outside.items() if k != "shared memory"
    }
