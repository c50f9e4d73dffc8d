"""What a call costs that differs from the one before in a length, a number or a content: steps of the host beside those
of a call that repeats, on an emulated Hopper that runs nothing.  `flashgen bench flex` and `host` give microseconds."""

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from effort import effort
from emulated_gpu import install
from fake_driver import OK

import flashgen as fg
from flashgen.ops import menus
from flashgen.ops.attention import attention, attention_varlen
from flashgen.ops.backward import Given, run_backward
from flashgen.ops.call import Call
from flashgen.planning import choice, planner
from flashgen.planning.pipelines import table
from flashgen.runtime import kernel, nvrtc

window = fg.param("window", default=40, min=1)
causal = fg.variant(lambda b, h, q, k: k <= q, name="causal")
band = fg.variant(lambda b, h, q, k: (k <= q) & (q - k < window), name="band")


@pytest.fixture
def gpu(monkeypatch):
    """No kernel is compiled, and none runs."""
    gpu, built = install(monkeypatch, (9, 0)), []
    resources = nvrtc.Resources(registers=1, spill_stores=0, spill_loads=0, stack_bytes=0, smem_static=0)

    def build(plan):
        built.append(plan)
        return kernel.cache.Entry(cubin=b"%d" % len(built), resources=resources, about={}, hit=False)

    monkeypatch.setattr(kernel, "build", build)
    encode = ctypes.PYFUNCTYPE(ctypes.c_int)(int)
    at = ctypes.cast(encode, ctypes.c_void_p).value
    for name, returned in (
        ("_cuLaunchKernelEx", (OK,)),
        ("_cuGetProcAddress", (OK, at, None)),
    ):
        monkeypatch.setattr(type(gpu), name, lambda self, *_, returned=returned: returned)
    addresses = itertools.count(1 << 32, 1 << 24)
    gpu.memory = SimpleNamespace(add=lambda *_, **__: next(addresses))  # the interpreter's own counts with the package
    gpu.built, gpu.encode = built, encode
    return gpu


def tensors(gpu, q_len, kv_len, *, heads=4, dim=64):
    return [
        gpu.empty((2, n, rows, dim), (n * rows * dim, rows * dim, dim, 1), torch.bfloat16)
        for n, rows in ((heads, q_len), (heads // 2, kv_len), (heads // 2, kv_len))
    ]


def of_attention(gpu, length):
    q, k, v = tensors(gpu, length, length + 20)
    return lambda: attention(q, k, v, causal)


def of_documents(gpu, length):
    q, k, v = tensors(gpu, length, length)
    doc = gpu.empty((2, length), (length, 1), torch.int32)
    variant = fg.from_flex(lambda b, h, i, j: doc[b, i] == doc[b, j])
    return lambda: attention(q, k, v, variant)


def of_sequences(gpu, length):
    q, k, v = (gpu.empty((length, heads, 64), (heads * 64, 64, 1), torch.bfloat16) for heads in (4, 2, 2))
    starts = gpu.put(torch.tensor([0, 10, length], dtype=torch.int32))
    return lambda: attention_varlen(q, k, v, causal, starts, max_seqlen_q=length)


def of_growing_cache(gpu, length):
    q, k, v = tensors(gpu, 1, 2000 + length)
    return lambda: attention(q, k, v, band, q_offset="end", window=512)


def of_gradients(gpu, length):
    q, k, v = tensors(gpu, length, length)
    o, do = (gpu.empty(q.shape, q.stride(), q.dtype) for _ in range(2))
    lse = gpu.empty(q.shape[:3], (4 * length, length, 1), torch.float32)
    return lambda: run_backward(Given(do, None, q, k, v, o, lse), Call(causal, None, {}), ())


def of_number(gpu, number):
    q, k, v = tensors(gpu, 100, 100)
    return lambda: attention(q, k, v, band, window=number)


def of_content(gpu, seed):
    q, k, v = tensors(gpu, 96, 96)
    doc = gpu.empty((2, 96), (96, 1), torch.int32)
    variant = fg.from_flex(lambda b, h, i, j: doc[b, i] == doc[b, j])
    return lambda: attention(q, k, v, variant)


#: How many steps more than a repeated call each may take.
MOST = {
    of_attention: 126,
    of_documents: 127,
    of_sequences: 172,
    of_growing_cache: 182,
    of_gradients: 133,
    of_number: 29,
    of_content: 9,
}


@pytest.mark.parametrize("make", MOST, ids=lambda make: make.__name__)
def test_what_changes_takes_few_steps_more(gpu, make):
    for n in (64, 65, 66, 128, 130):  # other plans may serve these
        make(gpu, n)()
    kernels = len(gpu.built)
    again, more = make(gpu, 66), []
    again()
    repeated = effort(again).calls
    for n in (67, 129, 131):
        more.append(effort(make(gpu, n)).calls - repeated)
    assert max(more) <= MOST[make], more
    assert len(gpu.built) == kernels, "nothing is compiled"


def test_a_cache_that_grows_asks_anew_with_each_tile(gpu, monkeypatch):
    """Among how many blocks keys are split follows from tiles of keys, which are counted once for each."""
    from flashgen.planning import division

    asked = []
    real = division.counts.visited_by
    monkeypatch.setattr(division.counts, "visited_by", lambda *given: asked.append(given) or real(*given))
    of_growing_cache(gpu, 0)()
    asked.clear()
    for n in itertools.chain(range(1, 30), range(5)):
        of_growing_cache(gpu, n)()
    assert len(asked) <= 2


def test_a_plan_is_chosen_anew_with_each_step_of_lengths(gpu, monkeypatch):
    """Sides of tiles are whole steps, so that the times which are compared are those of every length in one."""
    of_attention(gpu, 64)()  # the menu is made
    asked = []
    real = choice._of_single_heads
    monkeypatch.setattr(choice, "_of_single_heads", lambda *given: asked.append(given) or real(*given))
    for n in itertools.chain(range(801, 817), range(1601, 1617)):
        of_attention(gpu, n)()
    assert len(asked) == 4, "keys are 20 more than queries: two steps of these"
    assert {problem.q_len % choice.STEP for _, problem, _ in asked} == {0}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sides_of_tiles_are_whole_steps(arch):
    for head_dim, backward in itertools.product((64, 128, 256), (False, True)):
        menu = (planner.backward_menu if backward else planner.menu)(causal, arch, "bfloat16", head_dim)
        for plan in menu.forms:
            assert plan.tile.q % choice.STEP == plan.tile.kv % choice.STEP == 0


def test_strides_that_no_pipeline_is_asked_about_are_served_by_all():
    for pipeline, itemsize in itertools.product(table.PIPELINES.values(), (1, 2, 4)):
        for stride in (16, menus._ANY - 16):
            assert pipeline.cannot_address((2, 2, 2, 64), (stride, stride, stride, 1), itemsize) is None
    assert not menus.addressable((2, 2, 2, 64), (0, 64, 64, 1), 2)
    assert not menus.addressable((2, 2, 2, 64), (1 << 40, 64, 64, 1), 2)


def test_a_kernel_is_readied_once_and_its_records_share_that(gpu):
    """What starts a kernel is of its entries, not of lengths; records hold their own parameters and maps."""
    for n in range(700, 740):
        of_attention(gpu, n)()
    configs = {id(given[0]) for given in gpu.named("cuLaunchKernelEx")}
    assert len(configs) == len({slot.kernel.plan for slot in kernel._kernels.values()}) == 1
