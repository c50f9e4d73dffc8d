"""Walks hold NumPy's BLAS to one thread and give it back, also when they fail and whatever overlaps."""

import threading
from concurrent.futures import ThreadPoolExecutor

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
    before = BLAS.limit(limits=2)
    with BLAS.limit(limits=2):  # at whose end other threads may set limits too
        if set(counts()) != {2}:
            pytest.skip("NumPy's BLAS has no threads to hold")
    yield
    with before:
        pass


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


class Gate:
    """A walk that says when it is inside and leaves when it is told to, by an error if that is asked for."""

    def __init__(self, fails):
        self.inside, self.leave, self.fails = threading.Event(), threading.Event(), fails

    @one_blas_thread
    def walk(self):
        self.inside.set()
        assert self.leave.wait(60)
        if self.fails:
            raise ValueError("in a tile")
        return counts()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_overlapping_walks_give_it_back_in_any_order(order, fails):
    with ThreadPoolExecutor(3) as pool:
        gates = [Gate(fails and i == order[0]) for i in range(3)]
        running = []
        for gate in gates:
            running.append(pool.submit(gate.walk))
            assert gate.inside.wait(60)
            assert set(counts()) == {1}
        for i in order:
            gates[i].leave.set()
            assert (running[i].exception(60) is not None) == gates[i].fails
            assert set(counts()) == ({2} if i == order[-1] else {1}), "one thread until the last walk has left"
    assert set(one_blas_thread(counts)()) == {1}
    assert set(counts()) == {2}, "and the next walk begins anew"


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
