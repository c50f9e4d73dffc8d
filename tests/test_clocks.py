"""Consumers that count clocks (clocks.py) are the kernels that run without: no register of theirs is spilled."""

from __future__ import annotations

import pytest
from clocks import PARTS, chosen, marked

from flashgen.bench.cells import cell
from flashgen.codegen import emit
from flashgen.runtime import nvrtc


@pytest.mark.sampled("full-256-512", "causal-64-512", "causal-128-8192")
@pytest.mark.slow
@pytest.mark.parametrize("seqlen", [512, 8192])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("spec", ["full", "causal"])
def test_marked_kernels_spill_nothing(spec, head_dim, seqlen):
    plan = chosen(cell(spec, head_dim, seqlen))
    text = marked(emit(plan))
    assert all(f"mark<{i}>();" in text for i in range(len(PARTS)))
    compiled = nvrtc.compile(text, plan.arch)
    assert compiled.resources.spill_stores == 0 and not compiled.performance_losses


def test_a_text_without_a_part_is_refused():
    with pytest.raises(ValueError, match="K awaited ends nowhere"):
        marked("struct Consumer {\n  DEVICE void run() {}\n};\n")
