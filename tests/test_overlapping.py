"""Kernels that start before the one before them on the stream has ended: which do, and that each waits where it must.

The interpreter runs such a kernel as far as it goes without its wait before it runs the kernel before.  What a wrong
place of griddepcontrol would do on a GPU, on some days, is then a trap on every day.
"""

from __future__ import annotations

import re

import pytest
from ptx_attention import work
from ptx_backward import Backward
from split import split_work

from flashgen.codegen import emit
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner, quantize
from flashgen.planning.arch import ARCHS
from flashgen.planning.members import InTurn, Overlapping
from flashgen.runtime.launch import grids

WAIT, LAUNCH = "griddepcontrol_wait();", "griddepcontrol_launch_dependents();"

#: Small problems of one tile or two: what happens before the wait is the same in all blocks.
FORWARD = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 40, "kv_len": 70}
BACKWARD = {**FORWARD, "head_dim": 80}  # warps of the main kernel clear and finish dq, and wait for it


def within(name, wait, launch):
    """An edit of a file: other text in the place of both instructions of one kernel, or of a function of it."""

    def change(text):
        at = re.search(rf"\b{name}\(", text).start()
        changed, count = re.subn(rf"{re.escape(WAIT)}\s*{re.escape(LAUNCH)}", wait + launch, text[at:], count=1)
        assert count == 1
        return text[:at] + changed

    return change


#: What is wrong with a kernel, and what the trap says.
MUTATIONS = {
    "no wait": ("", LAUNCH, "launch_dependents before griddepcontrol.wait"),
    "neither": ("", "", "before griddepcontrol.wait|without griddepcontrol.wait|has read it"),
    "the other order": (LAUNCH, WAIT, "launch_dependents before griddepcontrol.wait"),
}


def of(name):
    """Parameters of a test: the edit of each mutation in the kernel of this name."""
    return [
        pytest.param(within(name, wait, launch), words, id=f"{name}, {what}")
        for what, (wait, launch, words) in MUTATIONS.items()
    ]


# ---------------------------------------------------------------- which kernels do
@pytest.mark.slow
def test_kernels_of_hopper_overlap_and_no_others():
    for name, arch in ARCHS.items():
        expected = Overlapping() if name == "sm_90a" else InTurn()
        for pipeline in arch.pipelines:
            for pass_ in (planner.menu, planner.backward_menu):
                plan = pass_(load_spec("causal"), name, "bfloat16", 64, pipeline=pipeline).plans[0]
                assert plan.launches == expected
                problem = work("causal", "ampere", **FORWARD).problem
                assert {grid.early for grid in grids(plan, problem, 4)} == {expected.early}
                assert ("griddepcontrol" in emit(plan)) == expected.early
        plan = quantize.plan(name, "bfloat16", 64, block=None, rotated=True, centred=False)
        assert plan.launches == expected


def test_each_kernel_waits_and_lets_the_next_one_start():
    """Of every file: no entry is without."""
    for plan in (
        work("document", "hopper", **FORWARD).plan,
        split_work("causal", "hopper", **FORWARD).plan,
        *(
            planner.backward_menu(load_spec("alibi"), "sm_90a", "bfloat16", 64, **options).plans[0]
            for options in ({"gradients": ("slopes",), "deterministic": True}, {"pipeline": "ampere"})
        ),
    ):
        text = emit(plan)
        entries = text.count('extern "C" __global__')
        loader = plan.pipeline == "hopper" and plan.backward is not None  # which waits by itself
        shared = plan.keys.split  # two entries that combine have one body
        assert entries >= 1 and text.count(WAIT) == text.count(LAUNCH) == entries + loader - shared


# ---------------------------------------------------------------- each wait is needed, and where it stands
@pytest.mark.slow
@pytest.mark.sampled("attention_forward, neither")
@pytest.mark.parametrize("edit, words", of("attention_forward"))
def test_a_forward(edit, words):
    with pytest.raises(errors.NotComplete, match=words):
        work("causal", "hopper", **FORWARD).run(edit)


@pytest.mark.slow
@pytest.mark.sampled("combine, neither")
@pytest.mark.parametrize("edit, words", [*of("attention_forward"), *of("combine")])
def test_a_combination(edit, words):
    with pytest.raises(errors.NotComplete, match=words):
        split_work("causal", "hopper", **FORWARD).run(edit, kv_splits=2)


@pytest.mark.slow
@pytest.mark.sampled("attention_backward_prepare, the other order")
@pytest.mark.parametrize(
    "edit, words",
    [m for name in ("prepare", "finish") for m in of(f"attention_backward_{name}")]
    + of("attention_backward")
    + [of("wait_for_rows")[1]],
)
def test_a_backward(edit, words):
    b = Backward("causal", pipeline="hopper", **BACKWARD)
    with pytest.raises(errors.NotComplete, match=words):
        b.run(edit)


@pytest.mark.slow
def test_what_the_kernel_behind_reads_too_early():
    """It is named where it is written, whatever values lie there before."""
    edit = within("combine", "if (p.part_rows[0].y == 0.5f) __trap(); " + WAIT, LAUNCH)
    with pytest.raises(errors.NotComplete, match=r"into byte .* of part_rows .*: the kernel behind has read it"):
        split_work("causal", "hopper", **FORWARD).run(edit, kv_splits=2)


@pytest.mark.slow
def test_nobody_writes_before_the_wait():
    edit = within("combine", "p.part_rows[0] = NO_PART; " + WAIT, LAUNCH)
    with pytest.raises(errors.NotComplete, match=r"st into byte .* of part_rows .* may still use it"):
        split_work("causal", "hopper", **FORWARD).run(edit, kv_splits=2)
