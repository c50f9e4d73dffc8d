"""Forward plans that drop probabilities: from a pipeline that can, with registers for their random words."""

import pytest

from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.runtime import nvrtc


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("arch_name", ["sm_80", "sm_90a"])
def test_nothing_spills(arch_name, head_dim):
    variant = load_spec("causal").bind()
    plans = planner.menu(variant, arch_name, "bfloat16", head_dim, dropout=True).plans
    assert all(plan.dropout and plan.pipeline == "ampere" for plan in plans)
    compiled = nvrtc.compile(emit(plans[0]), arch_name)
    assert compiled.resources.spills == 0
    assert abs(plans[0].registers_estimate - compiled.resources.registers) < 0.12 * compiled.resources.registers


def test_a_plan_without_dropout_is_another():
    variant = load_spec("causal").bind()
    plain, dropping = (planner.menu(variant, "sm_80", "bfloat16", 64, dropout=d).plans[0] for d in (False, True))
    assert not plain.dropout and dropping.dropout
    assert "dropout" not in [part.name for part in plain.registers]
    assert "dropout" in [part.name for part in dropping.registers]


def test_a_pipeline_without_dropout_gives_way_unless_it_is_asked_for():
    variant = load_spec("causal").bind()
    plain, dropping = (planner.menu(variant, "sm_90a", "bfloat16", 64, dropout=d).plans[0] for d in (False, True))
    assert (plain.pipeline, dropping.pipeline) == ("hopper", "ampere")
    with pytest.raises(PlanError, match="pipeline 'hopper' has no dropout\n  nearest: pipeline 'ampere'"):
        planner.menu(variant, "sm_90a", "bfloat16", 64, dropout=True, pipeline="hopper")
