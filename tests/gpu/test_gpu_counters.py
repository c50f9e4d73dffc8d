"""Counters from which blocks take tiles: launches in CUDA graphs have their own, which are 0 between replays."""

import subprocess
import sys
import textwrap

import pytest
import torch
from gpu_checks import DEVICE

import flashgen as fg
from flashgen.ops import memory

pytestmark = pytest.mark.gpu

REPLAYS = 50


def tensors(batch=4, heads=16, q_len=1000, kv_len=1000, dim=64):
    """More tiles of queries than any GPU has SMs."""
    shapes = [(batch, heads, n, dim) for n in (q_len, kv_len, kv_len)]
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def decoding():
    return tensors(batch=32, q_len=1, kv_len=2000, dim=128)


def captured(variant, given, launches=1, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = [fg.attention(*given, variant) for _ in range(launches)]
    return graph, found


@pytest.mark.parametrize(("spec", "make"), [("causal", tensors), ("full", decoding)], ids=["causal", "decoding"])
def test_graphs_beside_each_other(spec, make):
    """Replays on two streams, and calls on a third, whose launches overlap."""
    variant, given = fg.load_spec(spec), make()
    wanted = fg.attention(*given, variant)
    before = len(memory._of_graphs[0])
    graphs = [captured(variant, given, 3) for _ in range(2)]
    assert before - len(memory._of_graphs[0]) == 6, "each launch has its own"
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(REPLAYS):
        for (graph, _), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[-1]):
            eager = fg.attention(*given, variant)
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in (eager, *graphs[0][1], *graphs[1][1]))
    assert not any(kept.any() for kept in memory._kept), "what the last block leaves"


def test_the_first_call_of_a_process_may_be_captured():
    """Nothing may be allocated and cleared inside the capture: the graph clears its counters itself."""
    text = """
        import torch
        import flashgen as fg

        causal = fg.load_spec("causal")
        given = [torch.randn(4, 16, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = fg.attention(*given, causal)
        for _ in range(3):
            o.fill_(float("nan"))
            graph.replay()
            assert torch.equal(o, fg.attention(*given, causal))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(text)], check=True)


def test_a_graph_has_no_kernel_that_clears_counters():
    causal, given = fg.load_spec("causal"), tensors()
    fg.attention(*given, causal)
    graph, _ = captured(causal, given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in names if "attention" in name] == names and names
