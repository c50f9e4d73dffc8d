"""The planner's sum of registers against what ptxas gives the emitted kernels, and no plan that spills."""

import pytest

from flashgen.codegen import emit
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.runtime import nvrtc

pytest.importorskip("cuda.bindings.nvrtc")

CASES = [
    *(("sm_80", spec, 128) for spec in ("full", "causal", "chunked", "dilated", "alibi", "softcap", "document")),
    *(("sm_80", "causal", head_dim) for head_dim in (32, 64, 96, 192, 256)),
    *((arch, "causal", 128) for arch in ("sm_86", "sm_89", "sm_90a", "sm_120")),
]


@pytest.mark.sampled("sm_80-causal-32", "sm_90a-causal-128")
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "spec", "head_dim"), CASES)
def test_no_spill_and_the_estimate_holds(arch, spec, head_dim):
    menu = planner.menu(load_spec(spec).bind(), arch, "bfloat16", head_dim, pipeline="ampere")
    for plan in menu.plans[:2]:
        found = nvrtc.compile(emit(plan), arch, name=f"{spec}, {plan.tile}").resources
        assert (found.spills, found.stack_bytes) == (0, 0), (plan.tile, found)
        assert found.registers <= 65_536 // (plan.threads * plan.blocks_per_sm)
        assert plan.registers_estimate == pytest.approx(found.registers, rel=0.12), (plan.tile, found)
