"""The GPU path of attention() without a GPU: tensors that say they are on one, and a driver that keeps what it gets."""

import contextlib
import functools
import struct

import numpy as np
import pytest
import torch
from effort import effort
from fake_driver import FakeDriver

import flashgen as fg
from flashgen.codegen import params
from flashgen.errors import FlashgenError
from flashgen.ops import memory, records
from flashgen.ops.attention import attention
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.runtime import cache, driver, kernel, nvrtc

window = fg.param("window", default=8, min=1)
block = fg.constant("block", default=4, min=1)
doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32", example=lambda problem, rng: None)


# What these tests read is Params of pipeline ampere, on either GPU; tests/test_ops_emulated.py has tensor maps.
called = fg.variant(
    lambda b, h, q, k: (q - k < window) & (q // block >= k // block) & (doc[b, k] == 0), name="v", pipeline="ampere"
)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    index = 1
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", type(self).index))


class OnFirstGpu(OnGpu):
    index = 0


def on_gpu(tensor, kind=OnGpu):
    return tensor.as_subclass(kind)


@pytest.fixture
def machine(monkeypatch):
    """Two GPUs, of which torch's current one is the second; `entered` are the devices that calls switched to."""
    fake, entered = FakeDriver(), []
    for cached in (driver.gpu, driver._primary_context):
        cached.cache_clear()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(records, "_calls", {})
    resources = nvrtc.Resources(registers=1, spill_stores=0, spill_loads=0, stack_bytes=0, smem_static=0)
    built = []

    def build(plan):
        built.append(plan)
        fake.parameter_bytes = params.sizeof(plan)
        return cache.Entry(cubin=b"cubin", resources=resources, about={}, hit=True)

    def allocated(make):
        return lambda *shape, dtype, device: make(*shape, dtype=dtype).as_subclass(
            OnGpu if device.index else OnFirstGpu
        )

    current = [1]

    @contextlib.contextmanager
    def enter(index):
        entered.append(index)
        current.append(index)
        yield
        current.pop()

    def allocate(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype, device=torch.device("cuda", current[-1]))

    monkeypatch.setattr(kernel, "build", build)
    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, allocated(getattr(torch, name)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(memory, "empty_strided", allocate)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", enter)
    fake.entered, fake.built = entered, built
    yield fake
    for cached in (driver.gpu, driver._primary_context):
        cached.cache_clear()


def tensors(*, kind=OnGpu, dtype=torch.bfloat16, q_len=70, kv_len=90, dim=64, v_dim=64):
    q, k, v = torch.zeros(2, 4, q_len, dim), torch.zeros(2, 2, kv_len, dim), torch.zeros(2, 2, kv_len, v_dim)
    return [on_gpu(t.to(dtype), kind) for t in (q, k, v)]


def ids(batch=2, length=90):
    return on_gpu(torch.zeros(batch, length, dtype=torch.int32))


def fields(fake, launched):
    members = params.fields(fake.built[-1])
    layout = "<" + "".join(member.format for member in members)
    numbers = struct.unpack(layout, launched.parameters[: struct.calcsize(layout)])
    return dict(zip((member.name for member in members), numbers, strict=True))


def test_what_a_launch_is_given(machine):
    _, k, v = tensors(v_dim=40)
    rows_first = on_gpu(torch.zeros(2, 70, 4, 64, dtype=torch.bfloat16).transpose(1, 2))
    numbers = ids(batch=1)
    o, lse = attention(rows_first, k, v, called, doc=numbers, window=5, scale=0.25, return_lse=True)
    (launched,) = machine.launched
    got = fields(machine, launched)
    wanted = {
        **{"q": rows_first.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "tensor_doc": numbers.data_ptr()},
        **{"o": o.data_ptr(), "lse": lse.data_ptr()},
        **{"q_batch": 70 * 256, "q_head": 64, "q_row": 256, "k_batch": 90 * 128, "k_head": 90 * 64, "k_row": 64},
        **{"o_batch": 70 * 160, "o_head": 40, "o_row": 160, "v_row": 40},
        **{"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 70, "kv_len": 90, "scale": 0.25, "param_window": 5},
        **{"size0_doc": 1, "stride0_doc": 0, "size1_doc": 90, "stride1_doc": 1},
    }
    assert {name: got[name] for name in wanted} == wanted
    assert o.shape == (2, 4, 70, 40) and o.transpose(1, 2).is_contiguous() and o.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 70) and lse.dtype == torch.float32
    assert launched.hStream == 101 and machine.entered == []


def test_a_repeated_call_only_launches(machine):
    for _ in range(2):
        attention(*tensors(), called, doc=ids())
    before, plans = len(machine.calls), len(machine.built)
    for width in (1, 2, 3):
        attention(*tensors(), called, doc=ids(), window=width, scale=width / 8)
    assert {name for name, _ in machine.calls[before:]} == {"cuLaunchKernelEx"}
    assert [fields(machine, launched)["param_window"] for launched in machine.launched[-3:]] == [1, 2, 3]
    assert [fields(machine, launched)["scale"] for launched in machine.launched[-3:]] == [0.125, 0.25, 0.375]
    assert len(machine.built) == plans


def test_a_repeated_call_takes_few_steps(machine):
    """What a GPU waits for in short calls; `flashgen bench host` gives the microseconds."""
    (q, k, v), doc = tensors(), ids()
    q.requires_grad_()
    for limit, grad in ((80, False), (100, True)):
        with torch.set_grad_enabled(grad):
            call = functools.partial(attention, q, k, v, called, doc=doc, window=5, scale=0.25)
            call()
            assert effort(call).calls < limit


def test_one_record_a_set_of_shapes(machine):
    kept = records.calls_of(called).records
    q, k, v = tensors()
    for length in (90, 90, 90):
        attention(q, k, v, called, doc=ids(length=length))
    assert len(kept) == 1
    attention(q, k, v, called, doc=ids(batch=1))
    attention(on_gpu(q.transpose(1, 2).contiguous().transpose(1, 2)), k, v, called, doc=ids())
    attention(*tensors(q_len=71), called, doc=ids())
    attention(*tensors(dtype=torch.float16), called, doc=ids())
    attention(q, k, v, called, doc=ids(), scale=-0.5)
    assert len(kept) == 6
    plans = len(set(machine.built))
    attention(q, k, v, called, doc=ids(), block=8)
    assert len(kept) == 7 and len(set(machine.built)) == plans + 1


def test_records_are_bounded(machine, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORDS", 3)
    for length in range(60, 70):
        attention(*tensors(q_len=length), called, doc=ids())
        assert len(records.calls_of(called).records) <= 3


def test_another_gpu_than_the_current_one(machine):
    q, k, v = tensors(kind=OnFirstGpu)
    numbers = ids().as_subclass(OnFirstGpu)
    attention(q, k, v, called, doc=numbers)
    assert machine.entered == [0] and machine.launched[-1].hStream == 100
    assert machine.built[-1].arch == "sm_80" and machine.launched[-1].function[1] == "context 0"
    attention(*tensors(), called, doc=ids())
    assert machine.built[-1].arch == "sm_90a" and machine.entered == [0]


def test_a_negative_scale_flips_the_score_and_not_the_number(machine):
    attention(*tensors(), called, doc=ids(), scale=-0.5)
    assert fields(machine, machine.launched[-1])["scale"] == 0.5
    assert machine.built[-1].variant.score_node is not None
    attention(*tensors(), called, doc=ids(), scale=0.5)
    assert machine.built[-1].variant.score_node is None


def test_empty_problems_launch_nothing(machine):
    for q_len, kv_len in ((0, 90), (70, 0)):
        o, lse = attention(*tensors(q_len=q_len, kv_len=kv_len), called, doc=ids(length=kv_len), return_lse=True)
        assert (o == 0).all() and (lse == -torch.inf).all()
    assert machine.launched == [] and machine.built == []


def refused(message, *arguments, **named):
    with pytest.raises(FlashgenError, match=message) as caught:
        attention(*arguments, **named)
    return str(caught.value)


def test_refusals_launch_nothing(machine):
    q, k, v = tensors()
    text = refused("float32 on cuda:1: tensor cores take 16-bit", *tensors(dtype=torch.float32), called, doc=ids())
    assert "q.to(torch.bfloat16)" in text
    refused("head_dim runs from 16 to 256 in steps of 8", *tensors(dim=12), called, doc=ids())
    text = refused(
        "q is on cuda:1 and k on cuda:0: they share a device", q, k.as_subclass(OnFirstGpu), v, called, doc=ids()
    )
    assert "nearest: k.to('cuda:1'), a copy" in text
    refused("'doc' of 'v' is on cpu and q on cuda:1", q, k, v, called, doc=torch.zeros(2, 90, dtype=torch.int32))
    ragged = on_gpu(torch.zeros(2, 2, 90, 68, dtype=torch.bfloat16)[..., :64])
    text = refused("v's row stride is 136 bytes", q, k, ragged, called, doc=ids())
    assert "rows start at multiples of 16 bytes" in text and "nearest: v.contiguous(), a copy" in text
    assert machine.launched == []


def test_what_a_record_checks_again(machine):
    q, k, v = tensors()
    attention(q, k, v, called, doc=ids(), window=3)
    refused("the least it may be is 1", q, k, v, called, doc=ids(), window=0)
    refused("is int32 and got True", q, k, v, called, doc=ids(), window=True)
    refused("is int32 and got array", q, k, v, called, doc=ids(), window=np.array([3, 3]))
    refused("scale is a bool", q, k, v, called, doc=ids(), window=3, scale=True)
    refused("scale is a ndarray", q, k, v, called, doc=ids(), window=3, scale=np.ones(2))
    for name, i in (("q", 0), ("k", 1), ("v", 2)):
        given = [on_gpu(torch._neg_view(x)) if j == i else x for j, x in enumerate(tensors())]
        refused(rf"^{name} is a view that negates(?s:.*)nearest: {name}.resolve_neg\(\)", *given, called, doc=ids())
    minus = on_gpu(torch._neg_view(ids()))
    refused("'doc' of 'v' is a view that negates", q, k, v, called, doc=minus, window=3)
    nothing = on_gpu(torch._efficientzerotensor(q.shape, dtype=q.dtype))
    refused(r"^q is a ZeroTensor, which has no memory(?s:.*)nearest: torch.zeros", nothing, k, v, called, doc=ids())
    nothing = on_gpu(torch._efficientzerotensor((2, 90), dtype=torch.int32))
    refused("doc is a ZeroTensor", q, k, v, called, doc=nothing, window=3)
    refused("is int32 and got 'wide'", q, k, v, called, doc=ids(), window="wide")
    refused("it must be finite", q, k, v, called, doc=ids(), window=3, scale=float("inf"))
    refused("has no parameter 'widow'", q, k, v, called, doc=ids(), widow=3)
    refused("needs the captured tensor 'doc'", q, k, v, called)
    room = torch.zeros(q.numel() + 8, dtype=torch.bfloat16)
    start = next(i for i in range(8) if room[i:].data_ptr() % 16 == 2)
    moved = on_gpu(room[start : start + q.numel()].view(q.shape))
    refused(r"q starts 2 bytes past a multiple of 16(?s:.*)nearest: q\.clone\(\)", moved, k, v, called, doc=ids())
    assert len(machine.launched) == 1


def test_what_a_launch_of_a_backward_is_given(machine):
    q, k, v = tensors()
    o, lse = (on_gpu(x) for x in (torch.zeros(2, 4, 70, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 70)))
    do, dlse = (on_gpu(torch.zeros_like(x)) for x in (o, lse))
    numbers = ids()
    for width in (5, 6):
        call = Call(called, 0.25, {"doc": numbers, "window": width}, None, deterministic=True)
        found = run_backward(Given(do, dlse, q, k, v, o, lse), call, ())
    assert len(machine.built) == 1 and machine.built[0].pass_name == "backward" and machine.built[0].deterministic
    got = fields(machine, machine.launched[-1])
    given = {"q": q, "k": k, "v": v, "o": o, "d_o": do, "lse": lse, "dlse": dlse, "tensor_doc": numbers}
    given |= {"dq": found.dq, "dk": found.dk, "dv": found.dv}
    wanted = {name: tensor.data_ptr() for name, tensor in given.items()} | {"scale": 0.25, "param_window": 6}
    assert {name: got[name] for name in wanted} == wanted
