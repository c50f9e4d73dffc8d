"""plan, emit, compile and supports: reasons are empty exactly when the stages succeed."""

import dataclasses
import inspect
import itertools
import re

import pytest
import torch

import flashgen as fg
from flashgen.errors import PlanError, SpecError
from flashgen.lang.load import shipped
from flashgen.ops import menus, sequences, stages
from flashgen.ops.supports import Reason
from flashgen.planning.arch import ARCHS
from flashgen.planning.problem import Problem
from flashgen.runtime import cache, driver

block = fg.constant("block", default=64, min=1, max=512)


@fg.variant
def blocks(b, h, q, k):
    return q // block >= k // block


softcapped = fg.variant(score=lambda s, b, h, q, k: 30 * fg.tanh(s / 30), name="softcapped", dtypes=("float16",))
pinned = fg.variant(lambda b, h, q, k: k <= q, name="pinned", head_dims=(64,), only=True, tile=(64, 64), arch="sm_80")


@pytest.fixture(autouse=True)
def an_a100(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "gpus", lambda: 1)
    monkeypatch.setattr(
        driver,
        "gpu",
        lambda index: driver.Gpu(index=0, name="A100", capability=(8, 0), sms=108, memory_bytes_per_s=1.6e12),
    )
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


PRODUCT = list(
    itertools.product(
        [blocks, softcapped, pinned],
        [*ARCHS, "sm_90", "sm_75", "sm_100", "nonsense"],
        ["float16", "bfloat16", "float32"],
        [8, 16, 40, 64, 100, 128, 256, 264],
        [None, 64, 256, 3],
        [None, "ampere", "hopper", "volta"],
        [None, (64, 64), (128, 128), (100, 64), (256, 256)],
        [None, 2, 3, 9],
    )
)
NAMES = ("variant", "arch", "dtype", "head_dim", "v_head_dim", "pipeline", "tile", "stages")


def cases(step, offset=0):
    """Every `step`-th of the product; a step that shares no factor with its sides meets every value of each."""
    return [dict(zip(NAMES, PRODUCT[i], strict=True)) for i in range(offset, len(PRODUCT), step)]


@pytest.mark.sampled(step=(307,))
@pytest.mark.slow
@pytest.mark.parametrize("step", (307, 151, 97, 47))
def test_reasons_are_empty_exactly_when_there_is_a_plan(step):
    seen = {True: 0, False: 0}
    for case in cases(step):
        reasons = fg.supports(**case)
        try:
            fg.plan(**case)
            planned = True
        except PlanError:
            planned = False
        assert (not reasons) == planned, (case, reasons)
        assert all(isinstance(reason, Reason) and reason.limit for reason in reasons)
        seen[planned] += 1
    assert min(seen.values()) > 5


@pytest.mark.sampled("307-2")
@pytest.mark.slow
@pytest.mark.parametrize("step, count", [(307, 2), (151, 2), (41, 12)])
def test_what_is_supported_emits_and_compiles(step, count):
    supported = [case for case in cases(step, 7) if not fg.supports(**case)]
    for case in supported[:: max(1, len(supported) // count)]:
        plan = fg.plan(**case)
        kernel = fg.compile(plan)
        assert kernel.cubin[:4] == b"\x7fELF" and "attention_forward" in fg.emit(plan)


learned = fg.tensor("learned", dims=("heads", None), dtype="float32")
biased = fg.variant(score=lambda s, b, h, q, k: s + learned[h, q], name="biased")

PASSES = list(
    itertools.product(
        [blocks, biased],
        ["sm_80", "sm_90a", "nonsense"],
        ["bfloat16", "float32"],
        [64, 100, 256],
        [None, "ampere", "hopper"],
        [False, True],
        [False, True],
        [False, True],
        [False, True],
        [(), ("learned",), ("block",)],
    )
)
PASS_NAMES = (*NAMES[:4], "pipeline", "dropout", "packed", "backward", "deterministic", "gradients")


@pytest.mark.slow
def test_reasons_are_empty_exactly_when_there_is_a_plan_of_either_pass():
    seen = {True: 0, False: 0}
    for values in PASSES[::11]:
        case = dict(zip(PASS_NAMES, values, strict=True))
        reasons = fg.supports(**case)
        try:
            plan = fg.plan(**case)
            assert plan.pass_name == ("backward" if case["backward"] else "forward")
            planned = True
        except PlanError:
            planned = False
        assert (not reasons) == planned, (case, reasons)
        seen[planned] += 1
    assert min(seen.values()) > 10


LAYOUTS = list(
    itertools.product(
        ["dense", "padded", "varlen", "paged", "paged_varlen", "elsewhere"],
        [None, 16, 12, 0],
        [None, "hopper", "ampere"],
        ["bfloat16", "float8_e4m3fn"],
        [{}, {"backward": True}, {"dropout": True}, {"kv_splits": 4}, {"invariant": True}, {"packed": True}],
    )
)


def refused(**case):
    """Whether there is no such plan, which supports() gives reasons for, and for nothing else."""
    reasons = fg.supports(**case)
    try:
        fg.plan(**case)
    except PlanError:
        assert reasons, case
    else:
        assert not reasons, (case, reasons)
    return bool(reasons)


@pytest.mark.sampled("37")
@pytest.mark.parametrize("step", [37, pytest.param(5, marks=pytest.mark.slow)])
def test_reasons_are_empty_exactly_when_there_is_a_plan_of_a_layout(step):
    cases = [
        {"layout": layout, "page_size": size, "pipeline": pipeline, "dtype": dtype, **options}
        for layout, size, pipeline, dtype, options in LAYOUTS[::step]
    ]
    found = [refused(variant="causal", arch="sm_90a", head_dim=64, **case) for case in cases]
    assert min(found.count(True), found.count(False)) > 2


def test_reasons_of_a_layout():
    asked = {"arch": "sm_90a", "pipeline": "hopper"}
    for layout in ("dense", "padded", "varlen", "paged", "paged_varlen"):
        assert fg.supports("causal", layout=layout, **asked) == ()
    (reason,) = fg.supports("causal", layout="paged", page_size=12, **asked)
    assert reason.option == "combination" and "TMA cannot load pages" in reason.limit
    assert (reason.asked["layout"], reason.asked["page_size"]) == ("paged", 12)
    assert fg.supports("causal", layout="paged", page_size=12, arch="sm_90a") == ()
    (reason,) = fg.supports("causal", layout="varlen", page_size=16, **asked)
    assert reason.option == "page_size" and reason.nearest == "layout paged, or no page_size"
    (reason,) = fg.supports("causal", layout="paged", backward=True, **asked)
    assert (reason.option, reason.asked) == ("layout", "paged") and "have no gradients" in reason.limit
    (reason,) = fg.supports("causal", layout="elsewhere", **asked)
    assert (reason.option, reason.asked, reason.nearest) == ("layout", "elsewhere", "layout='dense'")


@pytest.mark.slow
def test_a_backward_emits_and_compiles():
    for options in ({}, {"deterministic": True}, {"dropout": True, "gradients": ("learned",)}):
        options = {"backward": True, "arch": "sm_80", "head_dim": 64, **options}
        assert fg.supports(biased, **options) == ()
        plan = fg.plan(biased, **options)
        assert fg.compile(plan).cubin[:4] == b"\x7fELF" and "attention_backward" in fg.emit(plan)


def test_reasons_of_a_backward():
    (reason,) = fg.supports(biased, deterministic=True)
    assert reason.option == "deterministic" and "is of a backward" in reason.limit
    assert reason.nearest == "backward=True"
    (reason,) = fg.supports(biased, backward=True, gradients=("q",))
    assert reason.option == "gradients" and "has derivatives by learned" in reason.limit
    assert reason.nearest == "gradients=('learned',)"
    (reason,) = fg.supports(blocks, backward=True, gradients=("learned",))
    assert "has derivatives by no captured tensor" in reason.limit
    assert fg.supports(biased, arch="sm_90a", backward=True, pipeline="hopper") == ()
    asked = {"arch": "sm_90a", "backward": True, "pipeline": "hopper", "gradients": ("learned",)}
    assert fg.supports(biased, arch="sm_90a", backward=True, pipeline="hopper", deterministic=True) == ()
    assert fg.supports(biased, **asked) == ()
    asked["head_dim"] = 256
    reasons = fg.supports(biased, **asked)
    assert reasons and {r.nearest for r in reasons} == {"pipeline 'ampere', or head_dim 128, or gradients=()"}
    assert fg.supports(biased, **{**asked, "pipeline": None}) == ()


def test_each_option_gives_its_own_reason():
    reasons = fg.supports(blocks, arch="sm_80", dtype="float32", head_dim=12, tile=(100, 64), stages=9, block=0)
    assert {reason.option for reason in reasons} == {"block", "dtype", "head_dim", "tile", "stages"}
    by_option = {reason.option: reason for reason in reasons}
    assert by_option["dtype"].nearest == "bfloat16" and by_option["head_dim"].asked == 12
    assert by_option["head_dim"].nearest == "head_dim 16" and "multiples of 16" in by_option["tile"].limit


def test_a_combination_that_fails_together():
    (reason,) = fg.supports(blocks, arch="sm_86", head_dim=256, tile=(128, 128))
    assert reason.option == "combination" and "shared memory" in reason.limit
    assert reason.asked == {"arch": "sm_86", "dtype": "bfloat16", "head_dim": 256, "tile": (128, 128)}


def test_pins_and_only_are_reasons():
    assert fg.supports(pinned) == ()
    (reason,) = fg.supports(pinned, head_dim=128)
    assert reason.option == "head_dim" and "declared for head_dim 64 only" in reason.limit
    (reason,) = fg.supports(pinned, arch="sm_90a")
    assert reason.option == "arch" and reason.nearest == "sm_80"
    impossible = fg.variant(name="impossible", tile=(256, 256))
    (reason,) = fg.supports(impossible, head_dim=256)
    assert reason.option == "combination"


def test_unknown_constants_are_reasons():
    (reason,) = fg.supports(blocks, blok=3)
    assert reason.option == "blok" and "no constant 'blok'" in reason.limit


@pytest.mark.parametrize(
    "name, value, nearest",
    [
        ("tile", "64x32", "(64, 32)"),
        ("tile", (64, "x"), "(128, 64)"),
        ("tile", 64, "(128, 64)"),
        ("seqlen", "64", "64"),
        ("batch", 2.5, "2"),
        ("head_dim", 64.0, "64"),
        ("stages", True, "1"),
        ("heads", "many", "64"),
        ("dtype", 16, "'bfloat16'"),
        ("arch", 80, "'sm_80'"),
        ("pipeline", 1, "'ampere'"),
        ("dropout", 0.1, "True"),
        ("gradients", "learned", "('learned',)"),
    ],
)
def test_an_option_of_another_type(name, value, nearest):
    message = rf"^{name} is .* and got {re.escape(repr(value))}\n  nearest: {name}={re.escape(nearest)}$"
    with pytest.raises(PlanError, match=message):
        fg.plan(biased, **{name: value, "backward": name == "gradients"})
    if name not in ("seqlen", "batch", "heads"):
        (reason,) = fg.supports(biased, **{name: value, "backward": name == "gradients"})
        assert (reason.option, reason.asked) == (name, value) and reason.nearest == f"{name}={nearest}"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stages", 0, "^0 stages for .*\n  nearest: [12] stages"),
        ("pipeline", "", "has no pipeline ''"),
        ("dtype", "", "^dtype '' is not one of"),
        ("arch", "", "^'' is not an architecture"),
        ("tile", (), r"^tile is \(queries, keys\).* and got \(\)"),
        (
            "head_dim",
            10**400,
            r"^head_dim is a whole number of 64 bits and got 2\^1328 or more\n  nearest: head_dim=64",
        ),
        ("stages", -(1 << 4000), r"^stages is a whole number of 64 bits and got -2\^4000 or more"),
    ],
    ids=["stages", "pipeline", "dtype", "arch", "tile", "a huge head_dim", "a huge negative stages"],
)
@pytest.mark.parametrize("backward", [False, True])
def test_nothing_but_none_stands_for_none_given(name, value, message, backward):
    with pytest.raises(PlanError, match=message):
        fg.plan("causal", backward=backward, **{name: value})
    (reason,) = fg.supports("causal", backward=backward, **{name: value})
    assert reason.option == name and reason.asked == value


def test_none_stands_for_none_given():
    nothing = dict.fromkeys(("arch", "dtype", "head_dim", "v_head_dim", "pipeline", "tile", "stages", "q_stages"))
    nothing |= dict.fromkeys(("dropout", "packed", "deterministic", "gradients"))
    for backward in (False, True):
        assert fg.plan(biased, backward=backward, **nothing) == fg.plan(biased, backward=backward)
        assert fg.supports(biased, backward=backward, **nothing) == ()
    assert fg.plan(biased, backward=None) == fg.plan(biased)


def test_a_combination_names_every_pin():
    impossible = fg.variant(name="impossible", tile=(256, 256))
    (reason,) = fg.supports(impossible, head_dim=256, stages=0)
    assert reason.option == "combination" and reason.asked["stages"] == 0 and "dropout" not in reason.asked


def test_what_says_the_same_is_the_same():
    import numpy as np
    import torch

    plan = fg.plan("causal", arch="sm_80", tile=(64, 64), head_dim=64, dtype="float16")
    same = fg.plan(
        shipped()["causal"], arch="sm_80", tile=[64, np.int64(64)], head_dim=np.int32(64), dtype=torch.float16
    )
    assert same == plan
    assert fg.supports(shipped()["causal"], dtype=torch.float16, tile=[64, 64], arch="sm_80") == ()
    (reason,) = fg.supports("causal", dtype=torch.float32)
    assert reason.option == "dtype" and "16-bit" in reason.limit
    learns = {"backward": True, "arch": "sm_80", "head_dim": 64}
    assert fg.plan(biased, **learns, gradients=["learned"]) == fg.plan(biased, **learns, gradients=("learned",))


def test_what_is_no_variant_and_no_plan():
    for call in (fg.plan, fg.supports):
        with pytest.raises(PlanError, match="a variant or the path of a spec is asked for and got 3"):
            call(3)
    for name in ("emit", "compile"):
        for given in ("causal", fg.load_spec("causal")):
            with pytest.raises(
                PlanError, match=rf"{name}\(\) takes a plan and got a .*\n.*flashgen.{name}\(flashgen.plan\("
            ):
                getattr(fg, name)(given)


def test_names_that_the_calls_use_are_no_names_of_constants():
    # A variant's own stands before these, so that specs that have them keep their meaning.
    later = {*sequences.PAGED}
    for call in (fg.plan, fg.supports, fg.attention):
        for name, parameter in inspect.signature(call).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name not in later:
                with pytest.raises(SpecError, match=f"the name '{name}' belongs to the call"):
                    fg.constant(name, default=1)


def test_plan_defaults():
    plan = fg.plan(softcapped)
    assert (plan.arch, plan.dtype, plan.head_dim, plan.v_head_dim) == ("sm_80", "float16", 128, 128)
    assert fg.plan(pinned).head_dim == 64 and fg.plan("causal").variant.name == "causal"
    assert fg.plan(fg.variant(head_dims=(32, 96))).head_dim == 96


def test_plan_follows_the_gpu_present(monkeypatch):
    monkeypatch.setattr(
        driver, "gpu", lambda index: driver.Gpu(index=0, name="A", capability=(8, 6), sms=10, memory_bytes_per_s=1e12)
    )
    assert fg.plan(softcapped).arch == "sm_86" and fg.plan(pinned).arch == "sm_80"
    assert stages.sm_count("sm_86") == 10 and stages.sm_count("sm_80") == ARCHS["sm_80"].sms
    monkeypatch.setattr(driver, "gpus", lambda: 0)
    assert fg.plan(pinned).arch == "sm_80" and fg.plan(softcapped).arch in ARCHS


def test_plan_of_a_problem_is_the_call_s():
    long, short = (fg.plan("causal", arch="sm_80", seqlen=n) for n in (8192, 64))
    assert long == fg.plan("causal", arch="sm_80") and short.tile.q < long.tile.q
    with pytest.raises(PlanError, match="heads cannot share"):
        fg.plan("causal", heads=8, kv_heads=3, seqlen=64)
    with pytest.raises(PlanError, match="kv_seqlen alone is no problem"):
        fg.plan("causal", kv_seqlen=64)
    for name in ("batch", "heads", "kv_heads"):
        with pytest.raises(PlanError, match=f"^{name} alone is no problem\n  nearest: give seqlen too"):
            fg.plan("causal", **{name: 0})


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["head_dim", "v_head_dim"])
def test_a_head_dim_of_0_is_not_one_that_was_not_given(name, backward):
    (reason,) = fg.supports("causal", backward=backward, **{name: 0})
    assert (reason.option, reason.asked) == (name, 0) and reason.nearest == f"{name} 16"
    for seqlen in (None, 64):
        with pytest.raises(PlanError, match=f"^no kernel .*{name} runs from 16"):
            fg.plan("causal", backward=backward, seqlen=seqlen, **{name: 0})


@pytest.mark.slow
def test_a_plan_names_the_better_pipelines_that_do_not_serve_it():
    """And fixing the better one gives the same reason; `supports` has none where something serves."""
    factor = fg.tensor("factor", dims=("heads",), dtype="float32")
    scaled = fg.variant(score=lambda s, b, h, q, k: s * factor[h], name="scaled")
    judged = {"head_dim": 136, "dropout": True}
    for variant, options, nearest in (
        ("causal", {"head_dim": 192, "dropout": True}, ["head_dim 128", "dropout=False"]),
        ("causal", {"head_dim": 64, "v_head_dim": 136, "dropout": True}, ["v_head_dim 128", "dropout=False"]),
        ("causal", {"head_dim": 128, "tile": (64, 64)}, ["tile=None"]),
        ("blocks", judged, ["head_dim 128", "dropout=False"]),
        ("relative_bias", {"head_dim": 192, "gradients": ("table",)}, ["head_dim 128", "gradients=()"]),
        (scaled, {"head_dim": 64, "gradients": ("factor",)}, ["gradients=()"]),
        (scaled, {"head_dim": 192, "gradients": ("factor",), "dropout": True}, ["no single change"]),
    ):
        asked = {"arch": "sm_90a", "backward": True, **options}
        plan = fg.plan(variant, **asked)
        (fallback,) = plan.fallbacks
        assert (plan.pipeline, fallback.pipeline, fallback.pinned) == ("ampere", "hopper", False)
        assert fallback.nearest == ", or ".join(nearest)
        assert fg.supports(variant, **asked) == ()
        reasons = fg.supports(variant, **asked, pipeline="hopper")
        assert any(fallback.reason in reason.limit for reason in reasons)
        for change in nearest[:1]:
            if found := re.fullmatch(r"(\w+) (\d+)", change):
                assert fg.plan(variant, **asked | {found[1]: int(found[2])}).fallbacks == ()
                assert fg.plan(variant, **asked | {found[1]: int(found[2]) + 8}).fallbacks != ()
    assert fg.plan("causal", arch="sm_90a", backward=True).fallbacks == ()
    assert fg.plan("causal", arch="sm_80", backward=True, dropout=True, head_dim=192).fallbacks == ()


def test_fallbacks_are_no_part_of_a_kernel():
    chosen, fixed = (
        fg.plan("causal", arch="sm_90a", backward=True, dropout=True, head_dim=192, pipeline=pipeline)
        for pipeline in (None, "ampere")
    )
    assert chosen.fallbacks and not fixed.fallbacks
    assert chosen == fixed and hash(chosen) == hash(fixed) and cache.key(chosen) == cache.key(fixed)


def test_a_fallback_is_logged_once_for_a_kernel_and_a_pin_never(monkeypatch, caplog):
    monkeypatch.setattr(
        driver,
        "gpu",
        lambda index: driver.Gpu(index=0, name="H", capability=(9, 0), sms=132, memory_bytes_per_s=4.9e12),
    )
    monkeypatch.setattr(menus, "_told", {})

    def menu(variant, kv_len, **options):
        q, k = torch.zeros(1, 2, 8, 192), torch.zeros(1, 2, kv_len, 192)
        sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 8, "kv_len": kv_len}
        problem = Problem(**sizes, head_dim=192, v_head_dim=192, dtype="bfloat16")
        return menus.gpu_menu(q, k, k, variant, problem, backward=True, **options)

    causal = fg.load_spec("causal").bind()
    ampere, hopper = (
        dataclasses.replace(causal, pins=dataclasses.replace(causal.pins, pipeline=name))
        for name in ("ampere", "hopper")
    )
    assert menu(causal, 8).fallbacks == () and caplog.records == []
    assert menu(ampere, 8, dropout=True).fallbacks[0].pinned and caplog.records == []
    for number, variant in enumerate((causal, hopper), 1):
        for kv_len in (8, 8, 24):
            assert menu(variant, kv_len, dropout=True).plans[0].pipeline == "ampere"
            assert len(caplog.records) == number
    assert caplog.records[0].getMessage() == (
        "the backward of 'causal' (head_dim 192, bfloat16) runs on pipeline ampere instead of hopper: its backward has"
        " dropout for head dims up to 128\n  nearest: head_dim 128, or dropout=False"
    )


def test_constants_are_folded():
    small, large = (fg.plan(blocks, block=n) for n in (64, 128))
    assert small != large and "128" in fg.emit(large) and fg.plan(blocks) == small
    with pytest.raises(PlanError, match="the least it may be is 1"):
        fg.plan(blocks, block=0)
