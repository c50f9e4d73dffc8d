"""The backward whose blocks take tiles of keys one after another: executed, and each hand-over is needed."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_attention import replace
from ptx_backward import DROPOUT, Backward, check

from flashgen.bench.cells import cell
from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning import planner

#: Two SMs take 8 to 16 tiles of keys; some have keys that no query sees, or few queries.
HEADS = {"batch": 2, "heads": 4, "kv_heads": 2, "seed": 3}

#: Six tiles of keys: enough for each SM to take more than one.
FEWER = {**HEADS, "batch": 1}


@pytest.mark.sampled("4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape"),
    CASES := [
        ("causal", {"head_dim": 128, "q_len": 150, "kv_len": 260}),
        ("causal", {"head_dim": 80, "q_len": 150, "kv_len": 260}),
        ("full", {"head_dim": 64, "q_len": 131, "kv_len": 137}),
        ("sliding_window", {"head_dim": 128, "q_len": 270, "kv_len": 140}),
        ("softcap", {"head_dim": 96, "v_head_dim": 40, "q_len": 70, "kv_len": 150}),
        ("prefix_lm", {"head_dim": 64, "q_len": 140, "kv_len": 140}),
        ("causal_bottom_right", {"head_dim": 128, "q_len": 150, "kv_len": 70}),
        ("gpt_oss", {"head_dim": 64, "q_len": 140, "kv_len": 140}),
        ("relative_bias", {"head_dim": 128, "q_len": 70, "kv_len": 140}),
        ("causal", {"head_dim": 128, "dropout": DROPOUT, "q_len": 71, "kv_len": 137}),
        ("full", {"head_dim": 128, "q_len": 1, "kv_len": 1}),
    ],
    ids=map(str, range(len(CASES))),
)
def test_tiles_of_keys_one_after_another(spec, shape):
    b = Backward(spec, pipeline="hopper", short=True, **HEADS, **shape)
    assert b.plan.backward.persistent
    check(b, sms=2)


@pytest.mark.sampled("80")
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 80, 64])
def test_in_any_order_of_warps_and_copies(head_dim):
    b = Backward("causal", pipeline="hopper", short=True, head_dim=head_dim, q_len=90, kv_len=260, **FEWER)
    lockstep = b.run(sms=1)
    result = b.run(seed=0, sms=3)
    np.testing.assert_array_equal(result.dk, lockstep.dk)
    np.testing.assert_array_equal(result.dv, lockstep.dv)
    np.testing.assert_allclose(result.dq, lockstep.dq, rtol=2.0**-7, atol=1e-6)  # the order of additions is free


MUTATIONS = {
    "K overwritten before it is read": replace("    await_empty(shared.k_pipe, Ring<1>{taken});\n    u64&", "    u64&"),
    "tiles told before they are done": replace("    await_empty(shared.keys_pipe, at);\n", ""),
    "the counter not cleared": replace("  if (blockIdx.x == 0 && threadIdx.x == 0) *p.taken = 0;\n", ""),
    "dk of the tile before kept": replace("dk[i] = 0.f;", "dk[i] *= 1.f;"),
    "dQ of the tile before added": replace("      dq_tile = -1;\n", ""),
    "dS before the first not 0": replace("none[i] = {};", "none[i] = none[i];"),
    "dS counted by steps": replace("        exchanged++;\n        release_tiles();", "        release_tiles();"),
    "V of the first tile for all": replace("mbarrier_wait(shared.v_full, taken % 2);\n    m", "\n    m"),
    "the last queries not released": replace(
        "    release(shared.pipe, Ring<STAGES>{ring.passed - 1});\n    release", "    release"
    ),
    "K not released": replace("    release(shared.k_pipe, Ring<1>{taken});\n", ""),
}


@pytest.mark.sampled("dQ of the tile before added")
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    b = Backward("causal", pipeline="hopper", short=True, head_dim=128, q_len=150, kv_len=260, **FEWER)
    assert any(b.fails(MUTATIONS[name], seed=seed, sms=2) for seed in range(3))


@pytest.mark.slow
def test_the_counter_is_read_when_it_has_been_cleared():
    """A tile with few steps is sent before the kernel that clears the counter has ended."""
    b = Backward("full", pipeline="hopper", short=True, heads=3, kv_heads=3, head_dim=128, q_len=70, kv_len=140)
    assert b.wrong(b.run(sms=2)) == []
    waits = replace("  DEVICE int next_number() {\n    griddepcontrol_wait();\n", "  DEVICE int next_number() {\n")
    with pytest.raises(errors.Trap, match="taken"):
        b.run(waits, sms=2)


def test_who_takes_tiles_of_keys_one_after_another():
    """Short sequences, as measured on an H200."""
    for spec, head_dim, lengths in (
        ("causal", 64, (512, 1024, 2048)),
        ("full", 64, (512, 1024, 2048)),
        ("causal", 128, (512, 1024, 2048)),
        ("full", 128, (512, 1024, 2048)),
        ("causal", 256, ()),
        ("document", 128, ()),
        ("sink_window", 128, ()),
    ):
        menu = planner.backward_menu(load_spec(spec).bind(), "sm_90a", "bfloat16", head_dim)
        for length in (512, 1024, 2048, 4096, 16_384):
            chosen = planner.choose(menu, cell(spec, head_dim, length).problem, 132)
            assert chosen.backward.persistent == (length in lengths), (spec, head_dim, length)
    for options in ({"deterministic": True}, {"gradients": ("table",)}):
        menu = planner.backward_menu(load_spec("relative_bias").bind(), "sm_90a", "bfloat16", 128, **options)
        assert not any(plan.backward.persistent for plan in menu.forms)
