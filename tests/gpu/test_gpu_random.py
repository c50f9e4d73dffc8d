"""Random specs on a GPU, forward and backward, against the evaluator of `tests/fuzz`; `python -m tests.fuzz gpu`."""

import os

import pytest
from fuzz.engine import search, try_one
from fuzz.judges import JUDGES

pytestmark = pytest.mark.gpu

SEED = int(os.environ["FLASHGEN_FUZZ_SEED"])


def test_random_specs():
    """As many processes as help: each generates, compiles and judges by itself."""
    tally = search(JUDGES["gpu"], SEED, count=240, jobs=min(12, os.cpu_count() or 1))
    print(tally)
    for failure in tally.failures.values():
        small = try_one(JUDGES["gpu"], SEED, int(failure.repro.rsplit(" ", 1)[1]), shrink=60.0)
        pytest.fail(str(next(iter(small.failures.values()), failure)), pytrace=False)
    assert tally.outcomes["held"] >= 0.6 * tally.tried, (tally, tally.reasons)
