"""Launch records without a GPU: what a driver would be handed, call by call."""

import ctypes
import dataclasses
import struct
import sys
import threading
import warnings

import pytest
from emulated_gpu import EmulatedGpu
from fake_driver import OK, FakeDriver

import flashgen as fg
from flashgen.codegen import params
from flashgen.errors import CompileError, LaunchError
from flashgen.interpreter import simulate
from flashgen.planning import planner
from flashgen.planning.problem import Problem
from flashgen.runtime import cache, driver, kernel, nvrtc
from flashgen.runtime.launch import Captured, make_launch

RESOURCES = nvrtc.Resources(registers=1, spill_stores=0, spill_loads=0, stack_bytes=0, smem_static=0)
PROBLEM = Problem(batch=2, heads=6, kv_heads=3, q_len=1000, kv_len=777, head_dim=64, v_head_dim=64)
STRIDES = {"q": (1, 2, 3), "k": (4, 5, 6), "v": (7, 8, 9), "o": (10, 11, 1 << 40)}
DOC = Captured(sizes=(1, 777), strides=(777, 1))

window = fg.param("window", default=8, min=1)
factor = fg.param("factor", default=0.5)
doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32", sorted=True, example=lambda problem, rng: None)


@fg.variant(head_dims=(64,))
def windowed(b, h, q, k):
    return (q - k < window) & (doc[b, k] == 0)


@windowed.score
def scored(s, b, h, q, k):
    return s * factor


@pytest.fixture
def fake(monkeypatch):
    driver.gpu.cache_clear()
    driver._primary_context.cache_clear()
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    yield fake
    driver.gpu.cache_clear()
    driver._primary_context.cache_clear()


@pytest.fixture
def ready():
    plan = planner.menu(scored, "sm_80", "bfloat16", 64).plans[0]
    return kernel.Kernel(plan=plan, entry=cache.Entry(cubin=b"cubin", resources=RESOURCES, about={}, hit=True))


@pytest.fixture
def launch(ready):
    given = {"scale": 0.5, "params": {"factor": 2.0, "window": 7}, "sms": 108}
    return make_launch(ready.plan, PROBLEM, strides=STRIDES, captured={"doc": DOC}, **given)


def unpacked(plan, content):
    """The fields of a launch's parameters by name."""
    members = params.fields(plan)
    numbers = struct.unpack(
        "<" + "".join(m.format for m in members), content[: struct.calcsize("<" + "".join(m.format for m in members))]
    )
    return dict(zip((m.name for m in members), numbers, strict=True))


def test_a_record_packs_what_the_kernel_reads(fake, ready, launch):
    fake.parameter_bytes = params.sizeof(ready.plan)
    record = ready.record(launch, device=1)
    record((0x10, 0x20, 0x30, 0x40, 0x50, 0x60), (0.125, 0.25, 99), stream=5)
    (launched,) = fake.launched
    got = unpacked(ready.plan, launched.parameters)
    q_tiles = -(-1000 // ready.plan.tile.q)
    wanted = {
        **{"q": 0x10, "k": 0x20, "v": 0x30, "o": 0x40, "lse": 0x50, "tensor_doc": 0x60},
        **{"q_batch": 1, "q_head": 2, "q_row": 3, "o_row": 1 << 40},
        **{"batch": 2, "heads": 6, "kv_heads": 3, "q_len": 1000, "kv_len": 777, "q_tiles": q_tiles},
        **{"size0_doc": 1, "size1_doc": 777, "stride0_doc": 0, "stride1_doc": 1},
        **{"scale": 0.125, "param_factor": 0.25, "param_window": 99},
    }
    assert {name: got[name] for name in wanted} == wanted
    assert launched.gridDimX == q_tiles * 6 * 2 and launched.blockDimX == ready.plan.threads
    assert launched.sharedMemBytes == ready.plan.smem_bytes and launched.hStream == 5
    assert launched.function[1:] == ("context 1", b"attention_forward")


class ArgumentsOf(EmulatedGpu):
    """Keeps what each kernel of a launch is given, byte by byte."""

    def __init__(self, launch):
        super().__init__()
        self.launch, self.grids, self.arguments = launch, [], []

    def _cuLaunchKernelEx(self, config, function, pointers, extra):
        grid = self.launch.grids[len(self.grids)]
        sizes = [*(128 for _ in self.launch.maps_of(grid)), params.sizeof(self.launch.plan)]
        given = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        self.arguments.append([ctypes.string_at(a, n) for a, n in zip(given, sizes, strict=True)])
        self.grids.append((function[2].decode(), config.gridDimX, config.blockDimX, config.sharedMemBytes))
        return (OK,)


@pytest.mark.parametrize(
    ("menu", "arch"), [(planner.menu, "sm_80"), (planner.menu, "sm_90a"), (planner.backward_menu, "sm_90a")]
)
def test_the_driver_executes_the_launch_that_the_interpreter_does(fake, monkeypatch, ready, menu, arch):
    plan = menu(fg.variant(lambda b, h, q, k: k <= q), arch, "bfloat16", 64).plans[0]
    strides = {name: (64_000, 640, 64) for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")}
    given = {"strides": strides, "captured": {}, "scale": 0.125, "params": {}, "sms": 3}
    launch = make_launch(plan, PROBLEM, **given)
    gpu = ArgumentsOf(launch)
    monkeypatch.setattr(driver, "_api", lambda: gpu)
    record = dataclasses.replace(ready, plan=plan).record(launch, device=1)
    addresses = {name: 0x1000 * (1 + i) for i, name in enumerate(launch.pointers)}
    record(tuple(addresses.values()), tuple(launch.values[name] for name in launch.scalars), stream=5)
    assert [(x.entry, x.blocks, x.threads, x.smem_bytes) for x in launch.grids] == gpu.grids
    assert [simulate.arguments(launch, grid, addresses) for grid in launch.grids] == gpu.arguments


def test_a_repeated_call_changes_addresses_and_numbers_alone(fake, ready, launch):
    fake.parameter_bytes = params.sizeof(ready.plan)
    record = ready.record(launch, device=0)
    asked = len(fake.calls)
    for start in (0x1000, 0x2000, 0x2000):
        for number in (3, 4):
            record(tuple(range(start, start + 6)), (0.5, 1.0, number), stream=0)
    assert {name for name, _ in fake.calls[asked:]} == {"cuLaunchKernelEx"}
    got = [unpacked(ready.plan, launched.parameters) for launched in fake.launched]
    assert [(g["q"], g["tensor_doc"], g["param_window"]) for g in got] == [
        (start, start + 5, number) for start in (0x1000, 0x2000, 0x2000) for number in (3, 4)
    ]
    volatile = {"q", "k", "v", "o", "lse", "tensor_doc", "param_window"}
    assert len({tuple((n, x) for n, x in g.items() if n not in volatile) for g in got}) == 1


def test_a_tensor_map_moves_where_its_tensor_does(fake, monkeypatch, ready):
    """The first launch encodes them where they are; one that is elsewhere is moved."""
    plan = planner.menu(fg.variant(lambda b, h, q, k: k <= q), "sm_90a", "bfloat16", 64).plans[0]
    strides = dict.fromkeys("qkvo", (64_000, 640, 64))
    launch = make_launch(plan, PROBLEM, strides=strides, captured={}, scale=0.125, params={}, sms=3)
    gpu = EmulatedGpu()
    monkeypatch.setattr(gpu, "_cuLaunchKernelEx", lambda *_: (OK,), raising=False)
    monkeypatch.setattr(driver, "_api", lambda: gpu)
    record = dataclasses.replace(ready, plan=plan).record(launch, device=1)
    at = [0x1000 * (1 + i) for i in range(len(launch.pointers))]
    maps = len(launch.maps)

    def moved():
        before = len(gpu.named("cuTensorMapReplaceAddress"))
        record(tuple(at), (0.125,), stream=0)
        return len(gpu.named("cuTensorMapReplaceAddress")) - before

    assert maps == len({desc.tensor for desc in launch.maps}) == 4
    unlike = len({desc[1:] for desc in launch.maps})
    assert unlike == 2, "v is like k, and o like q"
    assert (moved(), moved()) == (2, 0)
    encoded = gpu.named("cuTensorMapEncodeTiled")
    assert len(encoded) == unlike
    for *_, box, _, _, _, promotion, _ in encoded:  # L2 fetches no more than a row of a box
        assert promotion.name.endswith(f"_{2 * box[0]}B")
    at[0] += 16
    assert (moved(), moved()) == (1, 0)
    at[launch.pointers.index("lse")] += 16
    assert (moved(), moved()) == (0, 0)
    at[0], at[1] = at[1], at[0]
    gpu.refusals["cuTensorMapReplaceAddress"] = [gpu.CUresult.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(LaunchError, match="move a tensor map"):
        moved()
    assert (moved(), moved()) == (2, 0)


@pytest.mark.parametrize(
    ("head_dim", "memory_khz", "promotion"),
    [(64, 2_000_000, "128B"), (128, 2_000_000, "256B"), (128, 3_201_000, "128B")],
)
def test_what_l2_fetches_where_a_copy_misses(fake, monkeypatch, ready, head_dim, memory_khz, promotion):
    """A whole row at most, and where memory is slow more than the box asks for."""
    plan = planner.menu(fg.variant(lambda b, h, q, k: k <= q), "sm_90a", "bfloat16", head_dim).plans[0]
    strides = dict.fromkeys("qkvo", (64_000, 640, head_dim))
    problem = PROBLEM._replace(head_dim=head_dim, v_head_dim=head_dim)
    launch = make_launch(plan, problem, strides=strides, captured={}, scale=0.125, params={}, sms=3)
    gpu = EmulatedGpu((9, 0))
    monkeypatch.setattr(gpu, "memory_khz", memory_khz)
    monkeypatch.setattr(gpu, "_cuLaunchKernelEx", lambda *_: (OK,), raising=False)
    monkeypatch.setattr(driver, "_api", lambda: gpu)
    driver.gpu.cache_clear()
    record = dataclasses.replace(ready, plan=plan).record(launch, device=0)
    record(tuple(0x1000 * (1 + i) for i in range(len(launch.pointers))), (0.125,), stream=0)
    driver.gpu.cache_clear()
    encoded = gpu.named("cuTensorMapEncodeTiled")
    assert encoded and all(fetched.name.endswith(promotion) for *_, fetched, _ in encoded)


def test_maps_are_encoded_by_a_thread_that_gave_up_its_context(fake, monkeypatch, ready):
    """A thread that had a current context is not asked again, and is lent one where it has none any more."""
    plan = planner.menu(fg.variant(lambda b, h, q, k: k <= q), "sm_90a", "bfloat16", 64).plans[0]
    strides = dict.fromkeys("qkvo", (64_000, 640, 64))
    launch = make_launch(plan, PROBLEM, strides=strides, captured={}, scale=0.125, params={}, sms=3)
    gpu = ArgumentsOf(launch)
    monkeypatch.setattr(driver, "_api", lambda: gpu)
    monkeypatch.setattr(driver._thread, "had_context", True)
    record = dataclasses.replace(ready, plan=plan).record(launch, device=1)
    addresses = {name: 0x1000 * (1 + i) for i, name in enumerate(launch.pointers)}
    record(tuple(addresses.values()), (0.125,), stream=0)
    assert [simulate.arguments(launch, grid, addresses) for grid in launch.grids] == gpu.arguments
    assert not driver._thread.had_context and gpu.contexts == []


def test_what_failed_to_be_packed_is_packed_again(fake, ready, launch):
    fake.parameter_bytes = params.sizeof(ready.plan)
    record = ready.record(launch, device=0)
    right = (0.5, 1.0, 3)
    record((16,) * 6, right, stream=0)
    wrong = (0.25, 1.0, "three")
    for _ in range(2):
        with pytest.raises(struct.error):
            record((16,) * 6, wrong, stream=0)
    with pytest.raises(struct.error):
        record((32,) * 5 + (-1,), right, stream=0)
    record((16,) * 6, right, stream=0)
    assert fake.launched[0].parameters == fake.launched[1].parameters


def test_zeros_of_either_sign_are_written(fake, ready, launch):
    fake.parameter_bytes = params.sizeof(ready.plan)
    record = ready.record(launch, device=0)
    for zero in (0.0, -0.0):
        record((16,) * 6, (0.5, zero, 3), stream=0)
        assert str(unpacked(ready.plan, fake.launched[-1].parameters)["param_factor"]) == str(zero)


def test_threads_do_not_mix_their_parameters(fake, ready, launch):
    fake.parameter_bytes = params.sizeof(ready.plan)
    record = ready.record(launch, device=0)

    def work(number):
        for _ in range(200):
            record((number,) * 6, (float(number), float(number), number), stream=number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(fake.launched) == 800
    for launched in fake.launched:
        got = unpacked(ready.plan, launched.parameters)
        assert {got[n] for n in ("q", "lse", "tensor_doc", "scale", "param_window")} == {launched.hStream}


def test_threads_do_not_mix_records_of_one_kernel(fake, ready):
    """What starts a kernel is shared: its grid, stream and parameters are those of the record that is called."""
    fake.parameter_bytes = params.sizeof(ready.plan)
    given = {"strides": STRIDES, "captured": {"doc": DOC}, "scale": 0.5, "params": {"factor": 2.0, "window": 7}}
    lengths = {1: 64, 2: 640, 3: 1000, 4: 2000}
    launches = {
        n: make_launch(ready.plan, PROBLEM._replace(q_len=length), **given, sms=108) for n, length in lengths.items()
    }
    records = {n: ready.record(made, device=0) for n, made in launches.items()}

    def work(number):
        for _ in range(200):
            records[number]((number,) * 6, (float(number), float(number), number), stream=number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in lengths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(fake.launched) == 800
    for launched in fake.launched:
        got, n = unpacked(ready.plan, launched.parameters), launched.hStream
        assert (got["q"], got["q_len"], launched.gridDimX) == (n, lengths[n], launches[n].grids[0].blocks)


def test_a_kernel_is_loaded_once_a_gpu(fake, ready, launch):
    for device in (0, 1, 0, 1):
        ready.record(launch, device=device)
    assert len(fake.named("cuModuleLoadData")) == 2


@pytest.fixture
def empty_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_load_builds_once_for_all_threads(monkeypatch, empty_memory, ready):
    built, go = [], threading.Barrier(4)

    def build(plan):
        built.append(plan)
        return ready.entry

    monkeypatch.setattr(kernel, "build", build)
    found = []

    def work():
        go.wait()
        found.append(kernel.load(ready.plan))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len({id(one) for one in found}) == 1


def test_a_failed_build_is_tried_again(monkeypatch, empty_memory, ready):
    outcomes = [CompileError("no"), ready.entry]

    def build(plan):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(kernel, "build", build)
    with pytest.raises(CompileError, match="no"):
        kernel.load(ready.plan)
    assert kernel.load(ready.plan).entry is ready.entry


@pytest.mark.slow
def test_build_makes_a_cubin_and_a_hit_renders_nothing(monkeypatch, empty_memory, ready):
    first = kernel.build(ready.plan)
    assert first.cubin[:4] == b"\x7fELF" and not first.hit and first.resources.spills == 0
    assert first.about["variant"] == "windowed" and first.about["plan"]["tile"]["q"] == ready.plan.tile.q
    assert first.about["spec"].startswith(__file__) and set(first.about["seconds"]) == {"emit", "nvrtc"}

    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(nvrtc, "compile", None)
    again = kernel.build(ready.plan)
    assert again.hit and again.cubin == first.cubin and again.resources == first.resources


def test_build_runs_without_a_cache(monkeypatch, tmp_path, ready):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_warned", set())
    with pytest.warns(cache.CacheWarning):
        assert kernel.build(ready.plan).cubin[:4] == b"\x7fELF"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel.build(ready.plan).cubin[:4] == b"\x7fELF"


def test_a_kernel_that_does_not_compile(monkeypatch, empty_memory, ready):
    from flashgen import codegen

    monkeypatch.setattr(codegen, "emit", lambda plan, facts: "int broken(")
    with pytest.raises(CompileError, match=r"(?s)cannot compile windowed_forward for sm_80.*1 \| int broken\("):
        kernel.build(ready.plan)
    assert not list(empty_memory.glob("*.json"))


def test_the_key_tells_plans_apart(ready):
    plan = ready.plan
    other_mask = dataclasses.replace(scored, mask=fg.variant(lambda b, h, q, k: q < k).mask)
    changes = (
        {"arch": "sm_90a"},
        {"dtype": "float16"},
        {"stages": plan.stages + 1},
        {"tile": dataclasses.replace(plan.tile, kv=plan.tile.kv + 16)},
        {"variant": other_mask},
    )
    keys = [cache.key(plan), *(cache.key(dataclasses.replace(plan, **change)) for change in changes)]
    keys += [cache.key(plan, ["-DX"])]
    assert len(set(keys)) == len(keys)
    assert cache.key(plan) == cache.key(dataclasses.replace(plan))


def test_the_key_follows_sources_and_compiler(monkeypatch, ready):
    before = cache.key(ready.plan)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.9.9")
    changed = cache.key(ready.plan)
    monkeypatch.setattr(cache, "package_digest", lambda: "other sources")
    assert len({before, changed, cache.key(ready.plan)}) == 3


def test_the_digest_reads_every_source(tmp_path):
    (tmp_path / "inner" / "__pycache__").mkdir(parents=True)
    for name in ("a.py", "inner/b.cuh", "inner/c.cu.j2", "inner/__pycache__/d.py", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert sorted(name for _, name in cache._sources(tmp_path)) == ["a.py", "inner/b.cuh", "inner/c.cu.j2"]
    cache.package_digest.cache_clear()
    assert cache.package_digest() == cache.package_digest()
