"""Registers that kernels of the shipped masks spill: none, and elsewhere what is listed here, no more and no less."""

import functools

import ptx_attention
import pytest
import test_ptx_attention
from spills import Asked, plans, variants

from flashgen.analysis.derivative import differentiable_of
from flashgen.codegen import emit
from flashgen.lang.load import gallery, load_spec, shipped
from flashgen.planning import planner
from flashgen.planning.layout import Padded, Varlen
from flashgen.runtime import nvrtc

pytest.importorskip("cuda.bindings.nvrtc")

known = functools.cache(variants)


def spilled(plan):
    return nvrtc.compile(emit(plan), plan.arch).resources.spills


SHIPPED = [
    (name, kind, arch, head_dim)
    for name in sorted(shipped() | gallery())
    for kind in ("forward", "backward")
    for arch in ("sm_90a", "sm_80")
    for head_dim in (64, 128)
]


#: What did spill: who schedules tiles on Hopper, and who judges them on Ampere.
@pytest.mark.sampled("bigbird-forward-sm_80-64", "sink_window-forward-sm_90a-64")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "arch", "head_dim"), SHIPPED)
def test_no_kernel_of_a_shipped_mask_spills(name, kind, arch, head_dim):
    """Every plan of its menu; of a backward also with the gradients of captured tensors."""
    beside = kind == "backward" and differentiable_of(known()[name])
    found = [
        spilled(plan)
        for asked in ((kind, "gradients") if beside else (kind,))
        for plan in plans(known()[name], Asked(name, asked, arch, head_dim, "bfloat16"))
    ]
    assert found == [0] * len(found)


#: Bytes that deterministic backwards of pipeline hopper spill where sequences have lengths of their own: the loader's
#: thread has 24 registers, of which its next step takes three, and consumers can spare none (with 232 of theirs ptxas
#: serialises products).  It happens once a tile of queries, beside five products of consumers that wait for nothing.
LISTED = {
    ("full", 64): (0, 8),
    ("full", 128): (20, 40),
    ("causal", 64): (0, 18),
    ("causal", 128): (40, 48),
    ("sliding_window", 64): (10, 8),
    ("sliding_window", 128): (24, 42),
    ("alibi", 64): (0, 18),
    ("alibi", 128): (32, 52),
    ("document", 128): (0, 0),
}


#: Bytes that forwards spill there, of who schedules: beside three runs of keys and what the sequence has of its own the
#: number of tiles and the next one's leave its 32 registers, once for a tile of queries.
LISTED_FORWARDS = {"longformer": (36, 8), "zigzag": (0, 0), "bigbird": (0, 0)}


@pytest.mark.sampled("causal-128")
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "head_dim"), list(LISTED))
def test_what_is_listed_spills_as_much(spec, head_dim):
    """As padded and as joined sequences."""
    variant = load_spec(spec).bind()
    asked = [
        planner.backward_menu(variant, "sm_90a", "bfloat16", head_dim, layout=layout, deterministic=True)
        for layout in (Padded(), Varlen())
    ]
    assert tuple(spilled(menu.plans[0]) for menu in asked) == LISTED[spec, head_dim]


@pytest.mark.sampled(name=("longformer",))
@pytest.mark.slow
@pytest.mark.parametrize("name", list(LISTED_FORWARDS))
def test_what_is_listed_of_forwards_spills_as_much(name):
    """As padded and as joined sequences, at head_dim 64."""
    asked = [planner.menu(known()[name], "sm_90a", "bfloat16", 64, layout=layout) for layout in (Padded(), Varlen())]
    assert tuple(spilled(menu.plans[0]) for menu in asked) == LISTED_FORWARDS[name]


@pytest.mark.sampled(
    "causal-64-anew0", "prefix_lm-64-anew1", "zigzag-64-anew3", "sink_window-128-anew4", "streaming_blocks-64-anew5"
)
@pytest.mark.parametrize(
    ("name", "head_dim", "anew"),
    [
        ("causal", 64, [False, False, False]),
        ("prefix_lm", 64, [False, False]),  # three conditions
        ("sink_window", 64, [True, False]),  # four, beside three warpgroups and beside two
        ("zigzag", 64, [True, False]),
        ("sink_window", 128, [False]),
        ("streaming_blocks", 64, [True, False]),  # six, and parts
        ("bigbird", 64, [True, True]),
        ("bigbird", 128, [True]),
    ],
)
def test_who_schedules_keeps_ends_of_runs_where_registers_are_left(name, head_dim, anew):
    menu = planner.menu(known()[name], "sm_90a", "bfloat16", head_dim)
    assert [plan.specialized.runs_anew for plan in menu.plans] == anew
    for plan in menu.plans:
        assert ("rows.q_last);  // no ends of runs are kept" in emit(plan)) == plan.specialized.runs_anew


@pytest.mark.sampled("sink_window-tile0")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile"), (("sink_window", (192, 128)), ("bigbird", (192, 64))))
def test_ends_of_runs_found_anew(name, tile):
    """Of a sink behind a window and of parts of tiles, right against float64."""
    work = ptx_attention.work(name, "hopper", tile=tile, stages=3, q_stages=2, q_len=391, kv_len=391)
    assert work.plan.specialized.runs_anew
    test_ptx_attention.check(work)
