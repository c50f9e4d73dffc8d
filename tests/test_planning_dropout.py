"""Forward plans that drop probabilities, of both pipelines, with registers for their random words."""

import pytest

from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.runtime import nvrtc


@pytest.mark.sampled("sm_80-ampere-40", "sm_80-ampere-64", "sm_90a-ampere-128", "sm_90a-ampere-256")
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize(("arch_name", "pipeline"), [("sm_80", "ampere"), ("sm_90a", "hopper"), ("sm_90a", "ampere")])
def test_nothing_spills(arch_name, pipeline, head_dim):
    variant = load_spec("causal").bind()
    plans = planner.menu(variant, arch_name, "bfloat16", head_dim, dropout=True, pipeline=pipeline).plans
    assert all(plan.dropout and plan.pipeline == pipeline for plan in plans)
    compiled = nvrtc.compile(emit(plans[0]), arch_name)
    assert compiled.resources.spills == 0
    if pipeline == "ampere":  # of the other ptxas reports what a block starts with
        assert abs(plans[0].registers_estimate - compiled.resources.registers) < 0.12 * compiled.resources.registers


@pytest.mark.sampled("128-softcap")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "spec"),
    [(head_dim, spec) for head_dim in (64, 128) for spec in ("alibi", "softcap", "document", "relative_bias")],
)
def test_nothing_spills_beside_masks_and_scores(spec, head_dim):
    for plan in planner.menu(load_spec(spec).bind(), "sm_90a", "bfloat16", head_dim, dropout=True).plans:
        assert plan.pipeline == "hopper" and nvrtc.compile(emit(plan), "sm_90a").resources.spills == 0


def test_a_plan_without_dropout_is_another():
    variant = load_spec("causal").bind()
    plain, dropping = (planner.menu(variant, "sm_80", "bfloat16", 64, dropout=d).plans[0] for d in (False, True))
    assert not plain.dropout and dropping.dropout
    assert "dropout" not in [part.name for part in plain.registers]
    assert "dropout" in [part.name for part in dropping.registers]


def test_hopper_drops_at_every_head_dim_and_packs_no_heads_then():
    variant = load_spec("causal").bind()
    for head_dim in (16, 64, 96, 128, 192, 256):
        menu = planner.menu(variant, "sm_90a", "bfloat16", head_dim, dropout=True)
        assert {plan.pipeline for plan in menu.plans} == {"hopper"} and menu.packed is None
    with pytest.raises(
        PlanError, match=r"'causal' drops probabilities of each head by itself.*\n  nearest: packed=False"
    ):
        planner.menu(variant, "sm_90a", "bfloat16", 64, dropout=True, packed=True)
