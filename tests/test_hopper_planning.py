"""Candidates of pipeline hopper: what fits and why, what is chosen, and what a call takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.planning import limits, planner, ranking
from flashgen.planning.arch import ARCHS
from flashgen.planning.members import SoftCap, SplitKeys
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest

ARCH = ARCHS["sm_90a"]
FULL = fg.variant()
CAUSAL = load_spec("causal").bind()

#: Bytes that a block may have on sm_90a: 227 KiB.
ROOM = 232_448


def candidate(q, kv, stages=2, q_stages=1):
    return hopper.Candidate(tile=Tile(q=q, kv=kv), stages=stages, q_stages=q_stages)


def smem_bytes(c, d, dv=None):
    return sum(part.amount for part in hopper.smem(c, KernelRequest.of(FULL, ARCH.name, "bfloat16", d, dv)))


def reason_of(c, d, variant=FULL):
    return hopper.does_not_fit_reason(c, KernelRequest.of(variant, ARCH.name, "bfloat16", d))


def menu(variant, head_dim, **options):
    return planner.menu(variant, "sm_90a", "bfloat16", head_dim, pipeline="hopper", **options)


def test_why_80_keys_and_not_88_at_head_dim_256():
    q = 128 * 256 * 2
    assert smem_bytes(candidate(128, 80), 256) == q + 4 * 80 * 256 * 2 + 1024 <= ROOM
    assert smem_bytes(candidate(128, 88), 256) == 245_760 + 1024 > ROOM
    assert reason_of(candidate(128, 80), 256) is None
    reason = "shared memory q 64 + k 88 + v 88 + control 1 = 241 KiB (246,784 bytes) > 227 KiB"
    assert reason_of(candidate(128, 88), 256) == reason
    found = limits.of(menu(FULL, 256, tile=(128, 80), stages=2).plans[0])
    assert str(found[0]) == f"128 x 88, 2 stages, 12 warps: {reason}"
    assert [(str(r.tile), r.stages) for r in found] == [("128x88", 2), ("128x80", 3), ("192x80", 2)]


def test_why_p_would_go_through_shared_memory_for_192_by_192_at_head_dim_64():
    assert reason_of(candidate(192, 192), 64) == (
        "registers o 32 + s 96 + p 48 + overhead 24 = 200 > 160 of a consumer beside 32 of a producer; P would have to"
        " go through shared memory: 152 registers and 193 KiB"
    )


def test_narrow_rows_take_whole_boxes_of_shared_memory():
    assert smem_bytes(candidate(192, 128), 16) == smem_bytes(candidate(192, 128), 64)
    assert smem_bytes(candidate(128, 128), 96) == smem_bytes(candidate(128, 128), 128)


def test_o_needs_room_of_its_own_only_where_it_is_wider_than_q():
    one, two = candidate(128, 64, q_stages=1), candidate(128, 64, q_stages=2)
    assert smem_bytes(two, 64, 192) - smem_bytes(one, 64, 192) == 2 * 128 * 192 * 2 - 128 * 64 * 2
    assert smem_bytes(two, 192, 64) - smem_bytes(one, 192, 64) == 128 * 192 * 2


@pytest.mark.parametrize(("warpgroups", "expected"), [(2, (40, 232)), (3, (32, 160))])
def test_registers_are_given_and_taken_within_the_pool(warpgroups, expected):
    asked = KernelRequest.of(CAUSAL, ARCH.name, "bfloat16", 64)
    assert hopper.division(candidate(64 * warpgroups, 64), asked) == expected
    producer, consumer = expected
    threads = 128 * (1 + warpgroups)
    assert 128 * producer + 128 * warpgroups * consumer <= 65536 // threads // 8 * 8 * threads


def test_tiles_judged_over_ranges_leave_consumers_less():
    asked = KernelRequest.of(load_spec("butterfly").bind(), ARCH.name, "bfloat16", 64)
    assert hopper.division(candidate(128, 64), asked) == (56, 224)
    assert hopper.division(candidate(192, 128), asked) == (56, 152)


def test_a_producer_that_judges_parts_has_what_consumers_can_spare():
    asked = KernelRequest.of(load_spec("butterfly").bind(block=64), ARCH.name, "bfloat16", 64)
    assert hopper.division(candidate(128, 64), asked) == (64, 216)
    assert hopper.division(candidate(192, 128), asked) == (56, 152)


def test_what_does_not_fit_in_registers():
    assert reason_of(candidate(192, 144), 64).startswith("registers o 32 + s 72 + p 36 + overhead 24 = 164 > 160 of a")
    assert reason_of(candidate(192, 128), 64) is None
    assert reason_of(candidate(128, 192, q_stages=1), 128) is not None


# Measured on an H200 (head_dim 64) and an H100 (planning/records).
@pytest.mark.parametrize(
    ("variant", "head_dim", "tile", "stages", "q_stages", "ping_pong"),
    [
        (FULL, 64, "192x128", 2, 2, True),
        (CAUSAL, 64, "192x128", 2, 2, True),
        (FULL, 96, "192x112", 2, 1, False),
        (FULL, 128, "128x128", 2, 2, False),
        (CAUSAL, 128, "128x128", 2, 2, False),
        (FULL, 192, "128x64", 2, 2, False),
        (CAUSAL, 192, "128x80", 2, 1, False),
        (FULL, 256, "128x64", 2, 1, False),
        (CAUSAL, 256, "128x64", 2, 1, False),
    ],
)
def test_the_main_plan_is_one_that_was_measured_good(variant, head_dim, tile, stages, q_stages, ping_pong):
    """The best of those whose kernels for few queries have as many keys in a tile."""
    main = menu(variant, head_dim).plans[0]
    how = main.specialized
    assert (str(main.tile), main.stages, main.q_stages) == (tile, stages, q_stages)
    assert (how.ping_pong, how.o.by_tma) == (ping_pong, q_stages == 2)
    assert how.scheduler.dynamic == (variant.mask is not None)


@pytest.mark.parametrize(
    ("variant", "length", "tile_q"),
    [(CAUSAL, 512, 128), (CAUSAL, 1024, 128), (CAUSAL, 2048, 192), (CAUSAL, 16384, 192), (FULL, 512, 192)],
)
def test_short_causal_sequences_take_tiles_that_waste_less_of_the_diagonal(variant, length, tile_q):
    shape = {"q_len": length, "kv_len": length, "head_dim": 64, "v_head_dim": 64}
    problem = Problem(batch=16384 // length, heads=32, kv_heads=32, **shape)
    assert planner.choose(menu(variant, 64), problem, 132).tile.q == tile_q


@pytest.mark.parametrize(("variant", "head_dim"), [(v, d) for v in (FULL, CAUSAL) for d in (64, 128, 256)])
def test_what_was_measured_says_so(variant, head_dim):
    found = menu(variant, head_dim)
    assert found.record and found.record.startswith(f"sm_90a_hopper_forward: d{head_dim}, ")
    assert len({(p.tile, p.stages, p.q_stages, p.warps) for p in found.plans}) == len(found.plans)
    assert all("measured" in r.reason for r in found.rejected)
    assert menu(variant, 112).record is None


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("spec", ["full", "causal"])
def test_a_command_names_each_form_of_a_menu(spec, head_dim):
    variant = load_spec(spec).bind()
    for plan in menu(variant, head_dim).plans:
        fixed = {"tile": (plan.tile.q, plan.tile.kv), **plan.integers()}
        assert planner.menu(variant, "sm_90a", "bfloat16", head_dim, **fixed).plans == (plan,)
        banner = " ".join(emit(plan).partition("\n\n")[0].replace("\n//", " ").split())
        integers = [f"--{name.replace('_', '-')} {value}" for name, value in plan.integers().items()]
        assert integers[:2] == [f"--stages {plan.stages}", f"--q-stages {plan.q_stages}"]
        assert banner.endswith(" ".join([f"--tile {plan.tile}", *integers]))


@pytest.mark.parametrize("variant", [FULL, CAUSAL])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sequences_of_different_lengths_take_the_form_that_was_fastest(variant, head_dim):
    found = menu(variant, head_dim)
    taken = set()
    for j, shape in enumerate(found.measured.shapes):
        dims = {"head_dim": head_dim, "v_head_dim": head_dim, "kv_heads": shape.heads}
        chosen = planner.choose(found, Problem(**shape._asdict(), **dims), 132)
        if chosen in found.plans:  # and not one of fewer queries
            times = [ms[j] for ms in found.measured.ms]
            assert chosen == found.plans[times.index(min(times))]
            taken.add(chosen)
    assert taken and {plan.tile.kv for plan in taken} == {found.plans[0].tile.kv}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("spec", ["softcap", "local_softcap"])
def test_a_soft_cap_has_one_form_in_all_kernels(spec, head_dim):
    found = menu(load_spec(spec).bind(), head_dim)
    (form,) = {plan.specialized.score for plan in found.plans}
    assert isinstance(form, SoftCap) and found.plans[0].tile.kv // 2 % form.together == 0
    wide = menu(load_spec(spec).bind(), 256)  # fewer are looked at together, or kernels spill
    assert all(isinstance(p.specialized.score, SoftCap) and p.specialized.score.together <= 8 for p in wide.plans)
    biased = fg.variant().score(lambda s, b, h, q, k: 30.0 * fg.tanh(s / 30.0) - 0.1 * (q - k)).bind()
    assert not any(isinstance(plan.specialized.score, SoftCap) for plan in menu(biased, head_dim).plans)


def test_q_stages_are_checked():
    causal = load_spec("causal")
    assert fg.plan(causal, arch="sm_90a", head_dim=128, tile=(128, 64), q_stages=1).q_stages == 1
    assert fg.plan(causal, arch="sm_90a", head_dim=128, stages=3, q_stages=2).q_stages == 2
    for asked, nearest in ((0, 1), (3, 2)):
        with pytest.raises(PlanError, match=rf"one more is loaded\n  nearest: q_stages={nearest}$"):
            fg.plan(causal, arch="sm_90a", q_stages=asked)
    with pytest.raises(
        PlanError, match=r"their one tile of queries once\n  nearest: q_stages=None, or pipeline 'hopper'$"
    ):
        fg.plan(causal, arch="sm_90a", pipeline="ampere", q_stages=1)
    with pytest.raises(PlanError, match=r"nearest: q_stages=None$"):
        fg.plan(causal, arch="sm_80", q_stages=1)
    with pytest.raises(
        PlanError, match=r"with 3 stages and 2 tiles of queries\n(.*\n)*  nearest: 128x128 with 2 stages, or pipeline"
    ):
        fg.plan(causal, arch="sm_90a", head_dim=128, tile=(128, 128), stages=3, q_stages=2)
    for asked in (0, 1):
        (reason,) = fg.supports(causal, arch="sm_90a", q_stages=asked, backward=True)
        assert "q_stages is of a forward" in reason.limit


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["full", "causal", "document", "alibi", "relative_bias", "blocks", "softcap"]),
    st.integers(2, 32).map(lambda n: 8 * n),
    st.integers(2, 32).map(lambda n: 8 * n),
)
def test_every_plan_fits(spec, d, dv):
    found = planner.menu(load_spec(spec).bind(), "sm_90a", "bfloat16", d, dv, pipeline="hopper")
    assert 1 <= len(found.plans) <= ranking.MAX_PLANS and len(found.plans) == len(found.seconds_per_score)
    for plan in found.plans:
        how = plan.specialized
        assert plan.smem_bytes <= ROOM and plan.threads == 128 * (1 + how.warpgroups)
        assert plan.tile.q == 64 * how.warpgroups and plan.tile.kv % 16 == 0
        # What was measured was compiled, and did not spill: there the sum may be a few registers too careful.
        assert plan.registers_estimate <= plan.program.consumer_registers + (2 if found.measured else 0)
        assert d <= plan.padded_head_dim < d + 16 and dv <= plan.padded_v_head_dim < dv + 16


def test_a_pinned_tile_is_checked_and_never_changed():
    assert str(menu(FULL, 128, tile=(128, 176)).plans[0].tile) == "128x176"
    assert menu(FULL, 128, tile=(128, 176), stages=2).plans[0].q_stages == 1
    with pytest.raises(PlanError, match=r"tile 32x64 of .*tile_q is 64, 128 or 192.*\n  nearest: 64x64"):
        menu(FULL, 128, tile=(32, 64))
    with pytest.raises(PlanError, match="128 x 128, 4 stages, 12 warps: shared memory"):
        menu(FULL, 128, tile=(128, 128), stages=4)


def test_a_score_function_is_paced_slower():
    softcap = load_spec("softcap").bind()
    plain, capped = (menu(v, 128, tile=(128, 128)).seconds_per_score[0][0] for v in (FULL, softcap))
    assert capped > plain


@pytest.mark.parametrize(("variant", "head_dim"), [(v, d) for v in (FULL, CAUSAL) for d in (64, 96, 128, 256)])
def test_what_is_too_large_does_not_fit(variant, head_dim):
    for plan in menu(variant, head_dim).plans:
        for r in limits.of(plan):
            larger = [r.tile.q > plan.tile.q, r.tile.kv > plan.tile.kv, r.stages > plan.stages]
            assert sum(larger) == 1 and ">" in r.reason
            with pytest.raises(PlanError):
                menu(variant, head_dim, tile=(r.tile.q, r.tile.kv), stages=r.stages)


# ---------------------------------------------------------------- few queries
def few_of(spec="full", head_dim=128, **options):
    return planner.menu(load_spec(spec), "sm_90a", "bfloat16", head_dim, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("spec", ["full", "causal", "alibi", "tree"])
def test_few_queries_have_the_bits_of_many(spec, head_dim):
    found = few_of(spec, head_dim)
    (plan,) = found.few
    assert plan.tile.q == 64 and plan in found.forms
    assert {plan.order_of_sums for plan in found.forms} == {found.plans[0].order_of_sums}
    assert plan.packed == (spec != "alibi")  # which tells heads apart
    of_stage = 2 * 2 * plan.tile.kv * head_dim  # bytes of keys and values, of which 128 KiB are enough
    assert plan.stages == min(3, max(2, -(-(128 << 10) // of_stage)))
    assert planner.menu(load_spec(spec), "sm_90a", "bfloat16", 128, keys=SplitKeys()).few[0].stages == 2


@pytest.mark.parametrize(
    ("heads", "q_len", "few"), [((32, 8), 1, True), ((32, 8), 16, True), ((32, 8), 17, False), ((8, 8), 64, True)]
)
def test_who_gets_tiles_of_one_warpgroup(heads, q_len, few):
    """Calls whose queries of all heads that share keys fill no more: one more tile would load the keys once more.
    Blocks for every SM come from the keys, which are split."""
    found = few_of(keys=SplitKeys())
    problem = Problem(
        batch=4, heads=heads[0], kv_heads=heads[1], q_len=q_len, kv_len=4096, head_dim=128, v_head_dim=128
    )
    assert (planner.choose(found, problem, 132) in found.few) == few


def test_a_tile_that_is_asked_for_stays():
    assert few_of(tile=(128, 128)).few == ()
    assert few_of(tile=(64, 128)).plans[0].program.text() == "1 scheduler, 1 loader, 1 storer, 4 consumer, 1 idle warp"


def test_a_forward_that_no_tile_fits_falls_back():
    """At head_dim 256 with dropout no registers are left for what documents and a bias read."""
    doc = fg.tensor("doc", ("batch", None), "int32")
    bias = fg.tensor("bias", ("batch", "heads", "kv"), "bfloat16")
    both = fg.variant(lambda b, h, q, k: doc[b, q] == doc[b, k], lambda s, b, h, q, k: s + bias[b, h, k], name="both")
    asked = {"head_dim": 256, "arch": "sm_90a", "dtype": "bfloat16", "dropout": True}
    found = fg.plan(both, **asked)
    (fallback,) = found.fallbacks
    assert (found.pipeline, fallback.pipeline) == ("ampere", "hopper") and "registers" in fallback.reason
    assert "dropout=False" in fallback.nearest
    assert fg.plan(both, **{**asked, "head_dim": 192}).pipeline == "hopper"
    for fixed in ({"pipeline": "hopper"}, {"stages": 2}, {"tile": (64, 16)}):
        with pytest.raises(fg.PlanError, match=r"fits sm_90a|registers"):
            fg.plan(both, **asked, **fixed)
