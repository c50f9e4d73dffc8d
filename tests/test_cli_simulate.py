"""`flashgen simulate`: the verb over the interpreter."""

import json
import re

import pytest
from cli import flashgen

from flashgen.interpreter import simulate
from flashgen.runtime.philox import Dropout

SMALL = ("--seqlen", "70", "--heads", "1", "--head-dim", "32", "--arch", "sm_80", "--tile", "64x32")


def test_a_kernel_is_executed_checked_and_counted():
    ran = flashgen("simulate", "causal", *SMALL)
    assert "checked against float64, no trap, seed 0" in ran.out
    executed, predicted = (re.search(rf"^{name} +([\d,]+)", ran.out, re.MULTILINE) for name in ("all", "predicted"))
    assert executed[1] == predicted[1]
    assert "no instructions with bank conflicts" in ran.out
    assert "mma.sync" in ran.out


@pytest.mark.slow
def test_a_kernel_that_drops_is_checked_on_the_pairs_that_it_keeps(monkeypatch):
    dropping = (*SMALL, "--dropout", "0.3")
    got = json.loads(flashgen("simulate", "causal", *dropping, "--json").out)
    assert (got["dropout"], got["passed"]) == (0.3, True)
    right = simulate.simulate
    others = Dropout(p=0.3, seed=1)
    monkeypatch.setattr(simulate, "simulate", lambda *a, **k: right(*a, **{**k, "dropout": others}))
    assert "check failed: RMS error" in flashgen("simulate", "causal", *dropping, code=1).err
    assert "nearest: --dropout 0.99" in flashgen("simulate", "causal", *SMALL, "--dropout", "1", code=2).err


@pytest.mark.slow
def test_copies_may_end_late():
    assert "no trap" in flashgen("simulate", "full", *SMALL, "--late").out


@pytest.mark.slow
def test_a_kernel_that_does_not_end_in_time():
    ran = flashgen("simulate", "full", *SMALL, "--step-limit", "50", code=2)
    assert "50" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "option, what, cure",
    [("--seqlen", "q_len", "one query"), ("--heads", "heads", "one query head"), ("--batch", "batch", "one sequence")],
)
def test_nothing_to_execute(option, what, cure):
    found = flashgen("simulate", "full", *SMALL, option, "0", code=2).err
    assert f"a problem of {what} 0 has no output, and launches no kernel\n  nearest: {cure}" in found
