"""The GPU path of attention() without a GPU: tensors that say they are on one, and a driver that keeps what it gets."""

import contextlib
import functools
import struct
import threading
import weakref
from random import Random

import numpy as np
import pytest
import torch
from effort import effort
from fake_driver import OK, FakeDriver

import flashgen as fg
from flashgen.codegen import params
from flashgen.errors import FlashgenError
from flashgen.ops import forward, memory, menus, records
from flashgen.ops.attention import attention
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.planning import planner
from flashgen.runtime import cache, driver, kernel, nvrtc

window = fg.param("window", default=8, min=1)
block = fg.constant("block", default=4, min=1)
doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32", sorted=True, example=lambda problem, rng: None)


# What these tests read is Params of pipeline ampere, on either GPU; tests/test_ops_emulated.py has tensor maps.
called = fg.variant(
    lambda b, h, q, k: (q - k < window) & (q // block >= k // block) & (doc[b, k] == 0), name="v", pipeline="ampere"
)

slope = fg.param("slope", default=0.5)


@called.score
def sloped(s, b, h, q, k):
    return s - slope * abs(q - k)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    index = 1
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", type(self).index))


class OnFirstGpu(OnGpu):
    index = 0


class Machine(FakeDriver):
    """Functions tell which of the plans that were `built` they are of."""

    def _cuModuleLoadData(self, cubin):
        return OK, ("module", self.contexts[-1], self.built[int(cubin)])

    def _cuModuleGetFunction(self, module, entry):
        return OK, ("function", module[1], entry, module[2])


def on_gpu(tensor, kind=OnGpu):
    return tensor.as_subclass(kind)


@pytest.fixture
def machine(monkeypatch):
    """Two GPUs, of which torch's current one is the second; `entered` are the devices that calls switched to."""
    fake, entered = Machine(), []
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
        return cache.Entry(cubin=b"%d" % (len(built) - 1), resources=resources, about={}, hit=True)

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
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.stream + index, raising=False)
    monkeypatch.setattr(memory, "empty_strided", allocate)
    for name, value in (("_of_streams", {}), ("_of_graphs", {}), ("_free_counters", lambda index: [])):
        monkeypatch.setattr(memory, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", enter)
    fake.entered, fake.built, fake.capturing, fake.stream = entered, built, False, 100
    yield fake
    for cached in (driver.gpu, driver._primary_context):
        cached.cache_clear()


def tensors(*, kind=OnGpu, dtype=torch.bfloat16, q_len=70, kv_len=90, dim=64, v_dim=64):
    q, k, v = torch.zeros(2, 4, q_len, dim), torch.zeros(2, 2, kv_len, dim), torch.zeros(2, 2, kv_len, v_dim)
    return [on_gpu(t.to(dtype), kind) for t in (q, k, v)]


def ids(batch=2, length=90):
    return on_gpu(torch.zeros(batch, length, dtype=torch.int32))


def fields(fake, launched):
    members = params.fields(launched.function[-1])
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
    for limit, grad in ((64, False), (84, True)):
        with torch.set_grad_enabled(grad):
            call = functools.partial(attention, q, k, v, called, doc=doc, window=5, scale=0.25)
            for _ in range(3):  # results then lie where those of the call before did
                call()
            assert effort(call).calls < limit


def test_a_repeated_call_checks_and_plans_nothing(machine, monkeypatch):
    """Of both passes: what the record's key proves is not asked again."""
    asked = []
    for module, name in (
        *(
            (records, "checked"),
            (records, "checked_again"),
            (menus, "gpu_menu"),
            (planner, "choose"),
            (planner, "menu_of"),
        ),
        *((kernel, "load"), (records, "make_launch"), (params, "fields")),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _name=name, _real=real, **k: asked.append(_name) or _real(*a, **k))
    (q, k, v), numbers = tensors(), ids()
    both = [torch.zeros_like(q), torch.zeros_like(q), on_gpu(torch.zeros(2, 4, 70))]

    def call(width):
        named = {"doc": numbers, "window": width}
        attention(q, k, v, called, **named)
        run_backward(Given(both[0], None, q, k, v, *both[1:]), Call(called, None, named), ())

    call(5)
    assert {"checked", "choose", "load", "make_launch"} <= set(asked)
    asked.clear()
    for width in (5, 5, 6, 7):
        call(width)
    assert asked == [] and len(machine.launched) > 5


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_a_new_length_takes_few_steps(machine, dropped):
    """What differs is checked and launched anew, and nothing else is asked."""

    def call(q_len, kv_len):
        q, k, v = tensors(q_len=q_len, kv_len=kv_len)
        attention(q, k, v, called, doc=ids(length=kv_len), window=5, dropout=dropped, seed=1 if dropped else None)

    call(70, 90)
    first = machine.launched[-1]
    assert effort(lambda: call(150, 333)).calls < 225
    other = machine.launched[-1]
    assert first.function == other.function and len(machine.built) == 1
    wanted = {"q_len": 150, "kv_len": 333, "size1_doc": 333, "q_row": 64, "q_head": 150 * 64, "param_window": 5}
    assert {name: fields(machine, other)[name] for name in wanted} == wanted


def test_a_new_length_is_planned_once(machine, monkeypatch):
    """Of calls that differ in lengths, strides, numbers and contents: the first is checked whole, and asks for a
    menu; others are refused for what is wrong with them alone."""
    asked = []
    for module, name in (
        (records, "checked"),
        (menus.KernelRequest, "of"),
        (planner, "menu_of"),
        (params, "fields_of"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _name=name, _real=real, **k: asked.append(_name) or _real(*a, **k))

    def call(q_len=70, kv_len=90, dtype=torch.bfloat16, **named):
        q, k, v = tensors(q_len=q_len, kv_len=kv_len, dtype=dtype)
        return attention(q, k, v, called, **{"doc": ids(length=kv_len), "window": 5, "scale": 0.5, **named})

    call()
    assert {"checked", "of", "menu_of"} <= set(asked)
    asked.clear()
    for lengths in ((71, 90), (1, 1), (300, 200)):
        call(*lengths, window=lengths[0])
    assert not {"checked", "of", "menu_of"} & set(asked)
    for wrong, reason in (
        ({"doc": ids(length=80)}, "dimension 1 must be kv = 95"),
        ({"window": 0}, "the least it may be is 1"),
        ({"scale": float("inf")}, "it must be finite"),
    ):
        with pytest.raises(FlashgenError, match=reason):
            call(95, 95, **wrong)
    assert asked == []
    for other in (
        {"dtype": torch.float16},
        {"block": 8},
        {"scale": -1.0},
        {"doc": ids(length=90).long()[:, :90].int()},
    ):
        call(**{"q_len": 44, **other})
    assert asked.count("checked") == 3
    (q, k, v), kinds = tensors(q_len=45), records.calls_of(called).requests
    assert len(kinds) == 4 and not any(kind.tensors for kind in kinds.values()), "nothing is kept alive"
    attention(q, k[:, :, :1].expand(-1, -1, 90, -1), v, called, doc=ids(), window=5, scale=0.5)
    assert asked.count("checked") == 4 and len(kinds) == 4, "strides may choose the pipeline"


#: What calls of `Sequence` change, one thing at a time; the first of each works.
CHANGES = {
    "window": (5, 6, 0, True, 6.0),
    "slope": (0.0, -0.0, 0.5, 1, 2.0),
    "block": (4, 8, 0),
    "named": (True, False),
    "scale": (None, 0.25, -0.25, 0.0, -0.0, True, float("nan")),
    "captured": ("whole", "one", "strided", "float"),
    "layout": ("contiguous", "rows first", "every second row"),
    "dtype": (torch.bfloat16, torch.float16),
    "q_len": (70, 71),
    "past": (0, 2, 16),
    "stream": (100, 200),
    "gpu": (1, 0),
    "return_lse": (False, True),
}


class Sequence:
    """Calls with what CHANGES has, and what a driver gets of each, or its refusal; `fresh` forgets what was before."""

    def __init__(self, machine):
        self.machine, self.kept = machine, {}

    def q(self, past, q_len, dtype, layout, kind):
        """Drawn once, so that a call and its fresh twin are given one address; `past` are bytes past an aligned one."""
        at = past, q_len, dtype, layout, kind
        if at not in self.kept:
            room = torch.zeros(2 * 2 * 4 * q_len * 64 + 64, dtype=dtype)
            start = next(i for i in range(64) if room[i:].data_ptr() % 64 == past)
            strides = {
                "contiguous": (4 * q_len * 64, q_len * 64, 64, 1),
                "rows first": (q_len * 256, 64, 256, 1),
                "every second row": (8 * q_len * 64, 2 * q_len * 64, 128, 1),
            }[layout]
            self.kept[at] = on_gpu(room[start:].as_strided((2, 4, q_len, 64), strides), kind)
        return self.kept[at]

    def others(self, dtype, kind, captured):
        at = dtype, kind
        if at not in self.kept:
            whole = torch.zeros(2, 90, dtype=torch.int32)
            docs = {"whole": whole, "one": whole[:1].clone(), "strided": torch.zeros(2, 180, dtype=torch.int32)[:, ::2]}
            docs |= {"float": whole.float()}
            _, k, v = tensors(kind=kind, dtype=dtype)
            self.kept[at] = k, v, {name: on_gpu(x, kind) for name, x in docs.items()}
        k, v, docs = self.kept[at]
        return k, v, docs[captured]

    def __call__(self, *, fresh, **of):
        if fresh:
            records._calls.clear()
        kind, launches = (OnFirstGpu, OnGpu)[of["gpu"]], len(self.machine.launched)
        q = self.q(of["past"], of["q_len"], of["dtype"], of["layout"], kind)
        k, v, captured = self.others(of["dtype"], kind, of["captured"])
        named = {name: of[name] for name in ("window", "slope", "block")} if of["named"] else {}
        self.machine.stream = of["stream"]
        try:
            got = attention(q, k, v, sloped, scale=of["scale"], return_lse=of["return_lse"], doc=captured, **named)
        except FlashgenError as error:
            assert len(self.machine.launched) == launches
            return str(error)
        (launched,) = self.machine.launched[launches:]
        o = got[0] if of["return_lse"] else got
        found = fields(self.machine, launched)
        assert found.pop("o") == o.data_ptr()
        lse = found.pop("lse")
        assert not of["return_lse"] or lse == got[1].data_ptr()
        return repr(
            (sorted(found.items()), launched.function, launched.hStream, launched.gridDimX, o.dtype, o.stride())
        )


@pytest.mark.slow
def test_sequences_of_calls_equal_fresh_calls(machine):
    random, sequence = Random(0), Sequence(machine)
    of = {name: values[0] for name, values in CHANGES.items()}
    outcomes = set()
    for _ in range(250):
        name = random.choice(list(CHANGES))
        of[name] = random.choice(CHANGES[name])
        if random.random() < 0.2:  # back to what works
            of = {name: values[0] for name, values in CHANGES.items()} | {name: of[name]}
        repeated = sequence(fresh=False, **of), sequence(fresh=False, **of)
        kept = dict(records._calls)
        assert repeated == (sequence(fresh=True, **of),) * 2, of
        records._calls.clear()
        records._calls.update(kept)
        outcomes.add(repeated[0])
    assert len(outcomes) > 40 and any("nearest" in outcome for outcome in outcomes)


def test_a_captured_tensor_that_was_freed(machine):
    """A record holds none: the next one's address is read, and its contents are the kernel's to read."""
    given = tensors()
    held = []
    for _ in range(3):
        numbers = ids()
        attention(*given, called, doc=numbers)
        assert fields(machine, machine.launched[-1])["tensor_doc"] == numbers.data_ptr()
        held.append(weakref.ref(numbers.untyped_storage()))
        del numbers
    assert not any(storage() for storage in held)
    assert len(records.calls_of(called).records) == 1


def lse_of(machine, given, **named):
    attention(*given, called, doc=ids(), **named)
    return fields(machine, machine.launched[-1])["lse"]


def test_lse_that_nobody_asked_for_lies_in_memory_of_its_stream(machine, monkeypatch):
    allocated = []
    real = memory.empty_strided
    monkeypatch.setattr(memory, "empty_strided", lambda *given: allocated.append(real(*given)) or allocated[-1])
    given = tensors()
    lse_of(machine, given, return_lse=True)
    assert len(allocated) == 2 and memory._of_streams == {}, "what a call returns is its own"
    allocated.clear()
    first = lse_of(machine, given)
    assert first == allocated[1].data_ptr() + memory.ROWS_START and len(allocated) == 2
    assert allocated[1].numel() * 4 == memory.ROWS_START + 4 * memory.ROWS
    assert {lse_of(machine, given) for _ in range(3)} == {first} and len(allocated) == 5
    machine.stream += 100
    assert lse_of(machine, given) not in (first, 0) and len(allocated) == 7
    machine.stream -= 100
    assert lse_of(machine, given) == first
    machine.capturing = True
    assert lse_of(machine, given) == allocated[-1].data_ptr() and allocated[-1].shape == (2, 4, 70)
    machine.stream = -OnGpu.index  # the default stream is 0
    lse_of(machine, given)
    assert lse_of(machine, given) == lse_of(machine, given)
    machine.capturing = False
    attention(*given, called, doc=ids(), return_lse=True)
    assert fields(machine, machine.launched[-1])["lse"] == allocated[-1].data_ptr()
    monkeypatch.setattr(memory, "ROWS", 2 * 4 * 71 - 1)
    lse_of(machine, tensors(q_len=70))
    assert allocated[-1].shape != (2, 4, 70)
    lse_of(machine, tensors(q_len=71))
    assert allocated[-1].shape == (2, 4, 71)


def test_memory_of_a_stream_is_in_no_graph_s_pool(machine, monkeypatch):
    """torch.compile warms a CUDA graph up under a pool for what the thread allocates, and nothing may stay in there."""
    real, by_thread = memory.empty_strided, {}
    monkeypatch.setattr(
        memory,
        "empty_strided",
        lambda *given: by_thread.setdefault(threading.get_ident(), []).append(x := real(*given)) or x,
    )
    lse_of(machine, tensors())
    mine = by_thread.pop(threading.get_ident())
    assert [x.shape for x in mine] == [(2, 4, 70, 64)], "o is the call's"
    ((kept,),) = by_thread.values()
    assert kept is memory._of_streams[1, 101]


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


def test_a_backward_follows_how_results_and_their_gradients_lie(machine):
    q, k, v = tensors()
    lse = on_gpu(torch.zeros(2, 4, 70))
    flat = torch.zeros(2, 4, 70, 64, dtype=torch.bfloat16)
    turned = flat.transpose(1, 2).contiguous().transpose(1, 2)
    past = torch.zeros(flat.numel() + 8, dtype=torch.bfloat16)[1:-7].view(flat.shape)
    rows = {True: (70 * 256, 64, 256), False: (70 * 256, 70 * 64, 64)}
    for o, do in ((flat, flat), (flat, turned), (turned, flat), (flat, flat), (flat, past), (turned, past)):
        o, do = on_gpu(o), on_gpu(do)
        run_backward(Given(do, None, q, k, v, o, lse), Call(called, None, {"doc": ids()}), ())
        got = fields(machine, machine.launched[-1])
        for name, x in (("o", o), ("d_o", do)):
            strides = tuple(got[f"{name}_{axis}"] for axis in ("batch", "head", "row"))
            assert strides == rows[x.stride(1) < x.stride(2)]
            assert (got[name] == x.data_ptr()) == (x.data_ptr() % 16 == 0), "what a kernel cannot load is copied"
    assert len(machine.built) == 1


EIGHT = [
    {"length": 70, "blocks": (1,), "accuracy": "exact", "out_dtype": torch.float16},
    {"length": 300, "blocks": (1, 1, 3), "accuracy": "exact", "out_dtype": torch.float16},
    {"length": 71, "blocks": (1,), "accuracy": "fast", "out_dtype": torch.float16},
    {"length": 72, "blocks": (1,), "accuracy": "exact", "out_dtype": torch.bfloat16},
]


def test_descales_and_options_of_8_bits_are_a_call_s_own(machine, monkeypatch):
    """At another length too, where all that may differ is checked again."""
    seen, full = [], fg.variant()
    monkeypatch.setattr(forward, "_recorded", lambda q, k, v, request, *_: seen.append(request) or (lambda *_: None))
    for of in EIGHT:
        given = tensors(q_len=of["length"], kv_len=of["length"], dtype=torch.float8_e4m3fn)
        descales = {f"{name}_descale": on_gpu(torch.ones(of["blocks"])) for name in "qkv"}
        attention(*given, full, accuracy=of["accuracy"], out_dtype=of["out_dtype"], **descales)
        eight = seen[-1].eight
        assert all(eight.descales[name] is descales[f"{name}_descale"] for name in "qkv")
        assert eight.options["accuracy"] == of["accuracy"]
        assert eight.options["out_dtype"] == str(of["out_dtype"]).removeprefix("torch.")


def test_a_window_over_pages_divides_keys_whoever_called_before(machine):
    band = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name="band", pipeline="ampere")
    q, _, _ = tensors(q_len=1)
    k, v = (on_gpu(torch.zeros(8, 2, 16, 64, dtype=torch.bfloat16)) for _ in "kv")
    table, kernels = on_gpu(torch.zeros(2, 1024, dtype=torch.int32)), []
    for reach in (16, 10000, 16):
        before = len(machine.launched)
        attention(q, k, v, band, page_table=table, page_layout="hpd", q_offset="end", window=reach)
        kernels.append(len(machine.launched) - before)
    assert kernels == [1, 2, 1], "the second one combines parts"
