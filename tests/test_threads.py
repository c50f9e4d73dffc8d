"""Walks hold NumPy's BLAS to one thread and give it back, also when they fail."""

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from flashgen.runtime import tiles, tiles_backward
from flashgen.runtime.threads import one_blas_thread

BLAS = ThreadpoolController().select(user_api="blas")


def counts():
    return [library["num_threads"] for library in BLAS.info()]


@pytest.fixture(autouse=True)
def two_threads():
    np.ones((2, 2)) @ np.ones((2, 2))
    with BLAS.limit(limits=2, user_api="blas"):
        if set(counts()) != {2}:
            pytest.skip("NumPy's BLAS has no threads to hold")
        yield


def test_one_thread_inside_and_the_callers_after():
    assert set(one_blas_thread(counts)()) == {1}
    assert set(counts()) == {2}


def test_given_back_after_an_error():
    @one_blas_thread
    def fails():
        raise ValueError("in a tile")

    with pytest.raises(ValueError, match="in a tile"):
        fails()
    assert set(counts()) == {2}


@pytest.mark.parametrize(("module", "name"), [(tiles, "walk"), (tiles_backward, "walk_backward")])
def test_both_walks_hold_it(module, name, monkeypatch):
    seen = []

    class Walk:
        def __init__(self, *operands, **options):
            pass

        def run(self):
            seen.extend(counts())

    monkeypatch.setattr(module, {"walk": "_Walk", "walk_backward": "_Backward"}[name], Walk)
    getattr(module, name)(*[None] * (6 if name == "walk" else 9), scale=1.0, dtype="float32")
    assert seen and set(seen) == {1}
