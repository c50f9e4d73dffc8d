"""Timers on a GPU that is made up: what is captured, what is timed, and how often."""

import contextlib

import pytest
import torch

from flashgen.bench import timers
from flashgen.bench.host import Contender


class Gpu:
    """CUDA's streams, events and graphs with a clock that calls move on, by milliseconds."""

    def __init__(self):
        self.now, self.flushed, self.captures, self.capturing = 0.0, 0, [], None

    def works(self, ms):
        def call():
            if self.capturing is None:
                self.now += ms
            else:
                self.capturing.append(ms)

        return call

    def install(self, monkeypatch):
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            def __init__(self):
                self.held = []
                gpu.captures.append(self)

            def replay(self):
                gpu.now += sum(self.held)

        @contextlib.contextmanager
        def graph(of, stream):
            assert stream == "aside"
            gpu.capturing = of.held
            yield
            gpu.capturing = None

        class Flushed:
            def zero_(self):
                gpu.flushed += 1
                gpu.now += 50.0

        for name, value in (
            *(("Event", Event), ("CUDAGraph", Graph), ("graph", graph), ("synchronize", lambda: None)),
            *(("current_stream", lambda: "aside"), ("Stream", lambda: "aside")),
            ("stream", lambda one: contextlib.nullcontext(one)),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, **n: Flushed() if n.get("device") == "cuda" else empty(*a, **n))
        return gpu


@pytest.fixture
def gpu(monkeypatch):
    return Gpu().install(monkeypatch)


def timed(timer, gpu, **ms):
    with timer.around():
        ready = {name: timer.ready(gpu.works(each)) for name, each in ms.items()}
        return timer.time(ready, rounds=8)


def test_eager_calls(gpu):
    found = timed(timers.Eager(), gpu, a=1.0, b=3.0)
    assert found.rounds == {"a": (1.0,) * 8, "b": (3.0,) * 8} and not gpu.captures


def test_a_graph_holds_several_calls_and_one_is_told(gpu):
    found = timed(timers.Graph(calls=10), gpu, a=0.25, b=0.5)
    assert [graph.held for graph in gpu.captures] == [[0.25] * 10, [0.5] * 10]
    assert found.rounds == {"a": (0.25,) * 8, "b": (0.5,) * 8}


def test_every_call_beside_an_empty_l2_comes_behind_a_write(gpu):
    found = timed(timers.Cold(), gpu, a=1.0, b=4.0)
    assert [graph.held for graph in gpu.captures] == [[1.0], [4.0]]
    assert found.rounds == {"a": (1.0,) * 8, "b": (4.0,) * 8}  # without the write's 50
    assert gpu.flushed == 2 * timers.FEWEST + 8 * (8 + timers.FEWEST)


def test_what_cannot_be_captured_says_so(gpu):
    def call():
        if gpu.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        timers.Graph().ready(call)


def test_the_hosts_part_counts_calls_behind_those_that_warm(gpu):
    counted = []
    chosen = Contender(call=lambda: counted.append(1))
    timer = timers.Host(calls=3, warm=2)
    found = timer.time({"a": timer.ready(lambda: None), "b": timer.ready(chosen)}, rounds=4)
    assert len(counted) == 4 * 5 and all(len(each) == 4 for each in found.rounds.values())


@pytest.mark.parametrize("timer", [timers.Eager(), timers.Graph(), timers.Cold(), timers.Host()])
def test_every_timer_says_what_a_number_is(timer):
    assert timer.doc
