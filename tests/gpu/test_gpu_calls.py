"""What a call may rely on: reruns, records, streams, threads, graphs, torch.compile, memory, refusals."""

import threading

import pytest
import torch
from gpu_checks import DEVICE, call, check, random_inputs

import flashgen as fg
from flashgen.errors import FlashgenError
from flashgen.ops import forward
from flashgen.planning.problem import Problem

pytestmark = pytest.mark.gpu

window = fg.param("window", default=64, min=1)
pack = fg.tensor("pack", dims=("batch", "kv"), dtype="int32", sorted=True, example=lambda problem, rng: None)


@fg.variant
def windowed(b, h, q, k):
    return (k <= q) & (q - k < window)


@fg.variant
def documents(b, h, q, k):
    return (pack[b, q] == pack[b, k]) & (q - k < window)


def problem(q_len=500, **changes):
    shape = dict(batch=2, heads=4, kv_heads=2, kv_len=q_len, head_dim=64, v_head_dim=64)
    return Problem(q_len=q_len, **{**shape, **changes})


def ids(batch, length, documents):
    return (torch.arange(length, device=DEVICE) * documents // length).int().expand(batch, -1).contiguous()


def same(got, wanted):
    assert all(torch.equal(mine, right) for mine, right in zip(got, wanted, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Repeated calls


def test_reruns_give_the_same_bits():
    q, k, v = random_inputs(problem(1000), 0)
    first = call(q, k, v, windowed)
    for _ in range(200):
        same(fg.attention(q, k, v, windowed, return_lse=True), first)


def test_a_record_serves_every_address_and_number(monkeypatch):
    fresh = fg.variant(lambda b, h, q, k: (pack[b, q] == pack[b, k]) & (q - k < window), name="fresh")
    planned = []
    recorded = forward._recorded
    monkeypatch.setattr(forward, "_recorded", lambda *a: planned.append(a) or recorded(*a))
    held = []  # so that no address comes back
    for seed, (width, count) in enumerate([(64, 3), (64, 3), (7, 3), (500, 5), (1, 1), (64, 3)]):
        q, k, v = random_inputs(problem(), seed)
        o, lse = call(q, k, v, fresh, window=width, pack=ids(2, 500, count), scale=0.1 + seed / 100)
        held += [q, k, v, o, lse]
    assert len(planned) == 1
    check(fresh, q_len=500, heads=4, kv_heads=2, params={"window": 7}, captured={"pack": ids(2, 500, 3)}, scale=0.1)
    check(fresh, q_len=500, heads=4, kv_heads=2, params={"window": 400}, captured={"pack": ids(2, 500, 2)}, scale=0.2)
    assert len(planned) == 1
    q, k, v = random_inputs(problem(), 0)
    call(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, fresh, pack=ids(2, 500, 3))
    assert len(planned) == 2, "other strides need another record"


def test_numbers_are_checked_on_every_call():
    q, k, v = random_inputs(problem(), 0)
    same(call(q, k, v, windowed, window=3), call(q, k, v, windowed, window=3))
    for named, message in (
        ({"window": 0}, "the least it may be is 1"),
        ({"window": 2.5}, "is int32 and got 2.5"),
        ({"window": 3, "scale": float("nan")}, "it must be finite"),
        ({"window": 3, "widow": 3}, "has no parameter 'widow'"),
    ):
        with pytest.raises(FlashgenError, match=message):
            fg.attention(q, k, v, windowed, **named)


def test_a_record_notices_a_misaligned_address():
    room = torch.randn(2 * 4 * 500 * 64 + 8, device=DEVICE).bfloat16()
    _, k, v = random_inputs(problem(), 0)
    good, bad = (room[start : start + 2 * 4 * 500 * 64].view(2, 4, 500, 64) for start in (0, 1))
    call(good, k, v, windowed)
    with pytest.raises(FlashgenError, match=r"q starts 2 bytes past a multiple of 16(?s:.*)nearest: q.clone\(\)"):
        fg.attention(bad, k, v, windowed)
    check(windowed, q_len=500, kv_heads=2)


# ---------------------------------------------------------------------------------------------------------------------
# Streams, threads, graphs, GPUs


def test_several_streams_at_once():
    inputs = [random_inputs(problem(), seed) for seed in range(8)]
    wanted = [call(*tensors, windowed, window=5 + i) for i, tensors in enumerate(inputs)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for i, (tensors, stream) in enumerate(zip(inputs, streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(fg.attention(*tensors, windowed, window=5 + i, return_lse=True))
        torch.cuda.synchronize()
        for got, right in zip(results, wanted, strict=True):
            same(got, right)


def test_a_call_waits_for_its_own_stream():
    q, k, v = random_inputs(problem(), 0)
    wanted = call(q, k, v, windowed)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        got = fg.attention(late, k, v, windowed, return_lse=True)
    stream.synchronize()
    same(got, wanted)


def test_threads_share_records_and_need_no_context():
    inputs = [random_inputs(problem(), seed) for seed in range(6)]
    wanted = [call(*tensors, windowed, window=9 * i + 1) for i, tensors in enumerate(inputs)]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(50):
                    got = fg.attention(*inputs[i], windowed, window=9 * i + 1, return_lse=True)
                    stream.synchronize()
                    same(got, wanted[i])
        except BaseException as error:
            wrong.append(error)

    def work_on_the_default_stream(i):
        try:
            same(fg.attention(*inputs[i], windowed, window=9 * i + 1, return_lse=True), wanted[i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    threads += [threading.Thread(target=work_on_the_default_stream, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_graph_replay():
    tensors = random_inputs(problem(), 0)
    call(*tensors, windowed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fg.attention(*tensors, windowed, window=11, return_lse=True)
    for seed in range(5):
        fresh = random_inputs(problem(), seed)
        for mine, new in zip(tensors, fresh, strict=True):
            mine.copy_(new)
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        same(captured, call(*fresh, windowed, window=11))


def test_a_first_call_may_be_captured():
    """Nothing of this variant is loaded yet: planning, compiling and loading happen inside the capture."""
    fresh = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < 23), name="never_called")
    tensors = random_inputs(problem(), 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fg.attention(*tensors, fresh, return_lse=True)
    graph.replay()
    torch.cuda.synchronize()
    same(captured, call(*tensors, fresh))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_any_gpu_of_the_machine():
    here = random_inputs(problem(), 0)
    wanted = call(*here, windowed)
    there = [t.to("cuda:1") for t in here]
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        got = fg.attention(*there, windowed, return_lse=True)
        assert all(t.device.index == 1 for t in got)
        same([t.to("cuda:0") for t in got], wanted)
    with pytest.raises(FlashgenError, match="q is on cuda:0 and k on cuda:1"):
        fg.attention(here[0], there[1], here[2], windowed)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile, memory, host time


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models(backend):
    def model(q, k, v, width, numbers):
        o = fg.attention(q * 2, k, v, windowed, window=width) + 1
        return o + fg.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, documents, pack=numbers)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed, width in ((0, 3), (1, 4), (2, 90)):
        arguments = (*random_inputs(problem(200), seed), width, ids(2, 200, 3 + seed))
        # A compiler keeps sums in float32 that PyTorch rounds one by one.
        torch.testing.assert_close(compiled(*arguments), model(*arguments), rtol=2**-6, atol=2**-6)


def test_graphs_that_torch_compile_makes():
    """It warms them up, records them and replays them on a stream and in a pool of its own: what is kept for a stream
    (counters of a kernel that hands out tiles, room for lse) has to lie elsewhere."""

    def model(q, k, v, numbers):
        return fg.attention(q * 2, k, v, windowed, window=9) + fg.attention(q, k, v, documents, pack=numbers)

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(6):
            arguments = (*random_inputs(problem(900, heads=16), seed), ids(2, 900, 3 + seed))
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(*arguments).clone()
            torch.testing.assert_close(got, model(*arguments), rtol=2**-6, atol=2**-6)


def test_memory_is_that_of_the_outputs():
    p = problem(4096, heads=8)
    q, k, v = random_inputs(p, 0)
    fg.attention(q, k, v, windowed)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = fg.attention(q, k, v, windowed, return_lse=True)
    outputs = sum(t.numel() * t.itemsize for t in (o, lse))
    assert torch.cuda.max_memory_allocated() - before == outputs


# ---------------------------------------------------------------------------------------------------------------------
# Refusals that need a GPU


def refused(message, *arguments, **named):
    with pytest.raises(FlashgenError, match=message) as caught:
        fg.attention(*arguments, **named)
    return str(caught.value)


def test_devices_and_dtypes():
    q, k, v = random_inputs(problem(), 0)
    text = refused("q is on cuda:0 and k on cpu: they share a device", q, k.cpu(), v, windowed)
    assert "nearest: k.to('cuda:0'), a copy" in text
    text = refused("float32 on cuda:0: tensor cores take 16-bit inputs", q.float(), k.float(), v.float(), windowed)
    assert "q.to(torch.bfloat16)" in text and "on a CPU" in text
    refused("float64 on cuda:0: tensor cores", q.double(), k.double(), v.double(), windowed)
    numbers = ids(2, 500, 3)
    text = refused("'pack' of 'documents' is on cpu and q on cuda:0", q, k, v, documents, pack=numbers.cpu())
    assert "nearest: pack.to('cuda:0')" in text


def test_head_dims():
    for dim, message in (
        (8, "head_dim runs from 16 to 256"),
        (36, "nearest: head_dim 32 or 40"),
        (264, "head_dim 264"),
    ):
        refused(message, *random_inputs(problem(head_dim=dim), 0), windowed)


def test_strides():
    q, k, v = random_inputs(problem(), 0)
    text = refused("k's last dimension is not contiguous", q, k.mT.contiguous().mT, v, windowed)
    assert "nearest: k.contiguous(), a copy" in text
    odd = torch.randn(2, 2, 500, 68, device=DEVICE).bfloat16()[..., :64]
    text = refused("v's row stride is 136 bytes", q, k, odd, windowed)
    assert "rows start at multiples of 16 bytes" in text and "nearest: v.contiguous(), a copy" in text
    refused(
        "q starts 8 bytes past a multiple of 16", random_inputs(problem(head_dim=72), 0)[0][..., 4:68], k, v, windowed
    )


def test_an_index_outside_its_dimension_reads_the_nearest_element():
    table = fg.tensor("table", dims=(None,), dtype="float32", example=lambda p, rng: None)
    far = fg.variant(score=lambda s, b, h, q, k: s + table[q - k + 3], name="far")
    check(far, q_len=200, captured={"table": torch.randn(8, device=DEVICE)})
