"""Gates on the machine code of every kept kernel, and that each of them fails when it should."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from kept import KEPT
from ptx_attention import replace, work

from flashgen.codegen import emit
from flashgen.errors import CompileError
from flashgen.lang.load import load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.plan import Part
from flashgen.runtime import nvrtc, sass

GOLDENS = {f"{path.parent}-{path.stem}": path for path in KEPT}


#: Of each kind one: both passes of both pipelines, wide, of 8 bits, split, and who makes 8 bits; folded in
#: `test_folded_leaves.py`.
@pytest.mark.sampled(
    "sm_80/forward-document",
    "sm_80/forward/split-causal_bottom_right",
    "sm_80/backward-relative_bias",
    "sm_90a/forward-alibi",
    "sm_90a/forward/float8/head_dim_64-causal",
    "sm_90a/backward/head_dim_256-causal",
    "sm_90a/backward/deterministic-causal",
    "sm_90a/backward/short-causal",
    "sm_90a/quantize-varlen",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_every_kept_kernel_keeps_to_its_plan(name):
    golden = KEPT[GOLDENS[name]]
    compiled = nvrtc.compile(golden.text, golden.plan.arch, name=name)
    if golden.attends:
        assert sass.check(golden.plan, compiled) == ()
    assert (compiled.resources.spills, compiled.resources.stack_bytes) == (0, 0)
    assert "warning" not in compiled.log


#: The architectures without golden files, one for each spec in turn.
ELSEWHERE = tuple(zip(shipped(), itertools.cycle(("sm_86", "sm_89", "sm_90a", "sm_120")), strict=False))


@pytest.mark.sampled("longformer-sm_86")
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "arch"), ELSEWHERE)
def test_every_spec_passes_on_another_architecture(spec, arch):
    """All gates but one: the estimate of registers was fitted to the kept kernels."""
    variant = load_spec(spec).bind()
    head_dim = min(128, max(variant.head_dims))
    forward = planner.menu(variant, arch, "bfloat16", head_dim, pipeline="ampere").plans[0]
    backward = planner.backward_menu(variant, arch, "bfloat16", head_dim).plans[0]
    for plan in (forward, backward):
        found = sass.check(plan, nvrtc.compile(emit(plan), arch))
        assert [reason for reason in found if "where the plan estimates" not in reason] == []


@pytest.fixture(scope="module")
def kernel():
    """(plan, compiled) of each pipeline."""
    found = {}
    for pipeline in ("ampere", "hopper"):
        w = work("causal", pipeline, head_dim=64)
        found[pipeline] = w.plan, nvrtc.compile(w.source, w.plan.arch)
    return found


@pytest.mark.slow
def test_emitted_kernels_pass(kernel):
    for plan, compiled in kernel.values():
        assert sass.check(plan, compiled) == ()


@pytest.mark.slow
def test_spills_are_found():
    w = work("causal", "ampere")
    crowded = replace("__launch_bounds__(THREADS, BLOCKS_PER_SM)", "__launch_bounds__(THREADS, 12)")(w.source)
    reasons = sass.check(w.plan, nvrtc.compile(crowded, "sm_80"))
    assert any("bytes of spills" in reason for reason in reasons)
    assert any("accesses to local memory" in reason for reason in reasons)
    assert any("registers where the plan estimates" in reason for reason in reasons)


@pytest.mark.slow
def test_registers_beyond_what_the_blocks_leave(kernel):
    plan, compiled = kernel["ampere"]
    reasons = sass.check(dataclasses.replace(plan, blocks_per_sm=16), compiled)
    assert any(f"16 blocks of {plan.threads} threads leave" in reason for reason in reasons)


@pytest.mark.slow
def test_an_estimate_that_is_off(kernel):
    plan, compiled = kernel["ampere"]
    wrong = dataclasses.replace(plan, registers=(Part(name="all", amount=50),))
    assert any("estimates 50" in reason for reason in sass.check(wrong, compiled))


@pytest.mark.slow
def test_a_pipeline_without_its_instructions(kernel):
    (ampere, _), (hopper, _) = kernel["ampere"], kernel["hopper"]
    reasons = sass.check(hopper, kernel["ampere"][1])
    assert "no HGMMA, UTMALDG, USETMAXREG in attention_forward" in reasons
    assert "setmaxnreg is missing: 0 dec, 0 inc" in reasons
    assert "no HMMA, LDGSTS, LDSM in attention_forward" in sass.check(ampere, kernel["hopper"][1])


@pytest.mark.slow
def test_consumers_that_use_more_than_they_asked_for(kernel, monkeypatch):
    plan, compiled = kernel["hopper"]
    (code,) = sass.disassemble(compiled.cubin).values()
    (start,) = (at for at, i in enumerate(code.instructions) if "TRY_ALLOC" in i.text)
    used = code.registers_from(start)
    assert 60 < used <= plan.program.consumer_registers
    wrong = f"0x{plan.program.consumer_registers:x}", "0x20"
    less = [dataclasses.replace(i, text=i.text.replace(*wrong)) for i in code.instructions]
    monkeypatch.setattr(sass, "disassemble", lambda cubin: {code.name: dataclasses.replace(code, instructions=less)})
    reasons = sass.check(plan, compiled)
    assert f"setmaxnreg 32 where the plan has {plan.program.consumer_registers}" in reasons
    assert any(reason.startswith(f"{used} registers in use after setmaxnreg 32 at 0x") for reason in reasons)


LISTING = """
                              // +----------------------
                              // |   # 0 1 2 10 200 |  # 0 |
                              // +----------------------
k:                            // |                  |      |
.text.k:                      // |                  |      |
        /*0000*/    MOV R1, 0x1 ;          // |   1   ^          |      |
        /*0010*/    USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0x18 ;  // |   1   :          |      |
.L_x_0:                       // |   1   :          |      |
        /*0020*/    IADD3 R10, R1, 0x1, RZ ;   // |   2   v   ^      |  1 ^ |
        /*0030*/    @P0 BRA `(.L_x_0) ;  // |   1   :          |      |
        /*0040*/    EXIT ;          // |                  |      |
        /*0050*/    MOV R200, RZ ;  // |   1          ^   |      |
        /*0060*/    BRA `(.L_x_0) ;  // |                  |      |
"""


def test_listings_are_read_and_followed():
    code = sass.parse(LISTING)["k"]
    assert [i.opcode for i in code.instructions] == ["MOV", "USETMAXREG", "IADD3", "BRA", "EXIT", "MOV", "BRA"]
    assert code.instructions[2].live == {1, 10}
    assert code.reached(1) == {1, 2, 3, 4}
    assert code.registers_from(1) == 11
    assert code.registers_from(5) == 201


@pytest.mark.parametrize(
    ("threads", "blocks", "registers"), [(128, 1, 255), (128, 4, 128), (64, 7, 128), (384, 1, 168)]
)
def test_the_budget_of_a_thread(threads, blocks, registers):
    assert sass.budget(threads, blocks) == registers


def test_what_is_no_cubin_is_refused():
    with pytest.raises(CompileError, match="nvdisasm cannot read the cubin"):
        sass.disassemble(b"no cubin")


def test_without_nvdisasm(monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(CompileError, match=r"no nvdisasm(.|\n)*nearest: pip install 'nvidia-cuda-nvdisasm"):
        sass.nvdisasm()


@pytest.mark.sampled(head_dim=(128,))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "called", "plain", "branching"),
    [
        (
            128,
            "if_small(s[i], 0x1.fffffep0f, small_tanh(s[i], unit), large_tanh(s[i], unit))",
            "large_tanh(s[i], unit)",
            "fabsf(s[i]) < 2.f ? small_tanh(s[i], unit) : large_tanh(s[i], unit)",
        ),
        (
            256,
            "if_small(x, 0x1p-6f, x * fmaf(x * x, -1.f / 3, 1.f), tanh_far(x))",
            "tanh_far(x)",
            "fabsf(x) <= 0x1p-6f ? x * fmaf(x * x, -1.f / 3, 1.f) : tanh_far(x)",
        ),
    ],
)
def test_a_soft_cap_has_no_branch_for_each_score(head_dim, called, plain, branching):
    """With `?:` in tanh_f32 there were 32 of them, and the backward took 1.6 times as long on an H200."""
    variant = load_spec("softcap").bind()
    text = emit(planner.backward_menu(variant, "sm_90a", "bfloat16", head_dim).plans[0])
    plain, branching = (replace(called, by)(text) for by in (plain, branching))
    counted = [nvrtc.ptx(one, "sm_90a").count("bra") for one in (text, plain, branching)]
    assert counted[0] == counted[1] < counted[2]
