"""Kernels that start before others end: 1,000 calls among kernels that write what they read, in streams and graphs.

Each call's inputs are written by the kernel before it, and overwritten by the kernel behind it, so that a wait which
does not hold shows as other bits.
"""

from __future__ import annotations

import pytest
import torch
from gpu_checks import DEVICE

import flashgen as fg
from flashgen.lang.load import load_spec
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.planning import planner

pytestmark = pytest.mark.gpu

RERUNS, IN_A_GRAPH = 1000, 10

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Work:
    """One call, of inputs that a kernel just before it copies and that another one fills with NaN just behind it."""

    def __init__(self, call, *inputs):
        self.call = call
        self.kept = [[x, (x.float() * -0.5).to(x.dtype)] for x in inputs]
        self.inputs = [torch.full_like(x, float("nan")) for x in inputs]
        self.wanted = [self._once(which) for which in (0, 1)]
        self.differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        assert not any(x.float().isnan().any() for result in self.wanted for x in result)

    def _once(self, which):
        for x, kept in zip(self.inputs, self.kept, strict=True):
            x.copy_(kept[which])
        found = self.call(*self.inputs)
        for x in self.inputs:
            x.fill_(float("nan"))
        return found

    def run(self, which):
        """Once, and count a run of other bits."""
        pairs = zip(self._once(which), self.wanted[which], strict=True)
        self.differing += torch.stack(
            [(x.view(BITS[x.itemsize]) != y.view(BITS[y.itemsize])).any() for x, y in pairs]
        ).any()


def forward(spec, **options):
    variant = load_spec(spec)
    return lambda q, k, v: fg.attention(q, k, v, variant, return_lse=True, **options)


def backward(spec, **options):
    """dk and dv, which no order of additions changes, and dq where it has one."""
    variant = load_spec(spec)

    def call(q, k, v):
        o, lse = fg.attention(q, k, v, variant, return_lse=True)
        found = run_backward(
            Given(v[:, :, : q.shape[2]], None, q, k, v, o, lse), Call(variant, None, {}, **options), ()
        )
        return found[0:3] if options.get("deterministic") else found[1:3]

    return call


def tensors(batch, heads, q_len, kv_len, head_dim=64, dtype=torch.bfloat16):
    shapes = [(batch, heads, n, head_dim) for n in (q_len, kv_len, kv_len)]
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]


doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32")


@fg.variant
def unsorted(b, h, q, k):
    return doc[b, q] == doc[b, k]


def documents(q, k, v):
    """A mask by data: its summaries are a kernel before the one that visits tiles."""
    ids = (k[:, 0, :, 0].nan_to_num() > 0).int()
    return fg.attention(q, k, v, unsorted, return_lse=True, doc=ids)


def quantized(q, k, v):
    """Peaks of all rows of a head, then codes."""
    found = fg.quantize(q, k, v, seed=0)
    return found.q, found.k, found.v, found.q_descale, found.k_descale, found.v_descale


WORKS = {
    "short forward": lambda: Work(forward("causal"), *tensors(1, 8, 197, 197)),
    "forward of several waves": lambda: Work(forward("causal"), *tensors(4, 16, 700, 700, 128)),
    "split keys": lambda: Work(forward("full", kv_splits=7), *tensors(2, 8, 3, 3000, 128)),
    "backward": lambda: Work(backward("causal"), *tensors(2, 8, 500, 500)),
    "backward in order": lambda: Work(backward("causal", deterministic=True), *tensors(2, 8, 500, 500, 128)),
    "quantisation": lambda: Work(quantized, *tensors(2, 4, 700, 700)),
    "mask by data": lambda: Work(documents, *tensors(2, 4, 700, 700)),
}


@pytest.fixture(params=WORKS)
def work(request):
    torch.manual_seed(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield WORKS[request.param]()


def test_a_mask_by_data_is_summarised():
    assert planner.menu(unsorted, "sm_90a", "bfloat16", 64).plans[0].summaries


def test_in_a_stream(work):
    for i in range(RERUNS):
        work.run(i % 2)
    assert int(work.differing) == 0


def test_in_a_graph(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(IN_A_GRAPH):
            work.run(i % 2)
    for _ in range(RERUNS // IN_A_GRAPH):
        graph.replay()
    assert int(work.differing) == 0


def test_behind_another_stream(work):
    """What a call reads may come from a kernel of another stream, beside the one before it on its own."""
    other, own = torch.cuda.Stream(), torch.cuda.current_stream()
    call, slow = work.call, torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)

    def elsewhere(*inputs):
        other.wait_stream(own)
        with torch.cuda.stream(other):
            slow @ slow
            copies = [x.clone() for x in inputs]
        own.wait_stream(other)
        for x in copies:
            x.record_stream(own)
        return call(*copies)

    work.call = elsewhere
    for i in range(RERUNS // 10):
        work.run(i % 2)
    assert int(work.differing) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=own):
        for i in range(IN_A_GRAPH):
            work.run(i % 2)
    for _ in range(RERUNS // IN_A_GRAPH // 10):
        graph.replay()
    assert int(work.differing) == 0


def test_in_a_compiled_graph():
    """What torch.compile captures: a forward and its backward between kernels that inductor made."""
    variant = load_spec("causal")

    def loss(q, k, v):
        return fg.attention(q * 2, k + 1, v * v, variant).float().square().sum()

    q, k, v = (x.requires_grad_() for x in tensors(1, 8, 300, 300))
    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    wanted = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for _ in range(50):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))
