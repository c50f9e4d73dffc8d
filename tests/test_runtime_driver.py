"""Loading and launching through a driver that is not there: contexts, capture, argument bytes, and each refusal."""

import ctypes
import sys

import pytest
from fake_driver import OK, FakeDriver

from flashgen.errors import LaunchError
from flashgen.runtime import driver, nvrtc


def use(monkeypatch, fake):
    """Put `fake` behind the module; undone with the test."""
    forget()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    return fake


def forget():
    for cached in (driver.gpu, driver._primary_context):
        cached.cache_clear()


@pytest.fixture
def fake(monkeypatch):
    yield use(monkeypatch, FakeDriver(parameter_bytes=8))
    forget()


def test_gpus(fake):
    assert driver.gpus() == 2
    assert driver.gpu(1) == driver.Gpu(
        index=1, name="Fake 1", capability=(9, 0), sms=132, memory_bytes_per_s=2 * 3201e6 * 6144 / 8
    )
    with pytest.raises(LaunchError, match="cannot find GPU 5: words for CUDA_ERROR_INVALID_DEVICE"):
        driver.gpu(5)


def test_load_enters_the_primary_context_and_leaves_it(fake):
    function = driver.load(b"cubin", "attention_forward", smem_bytes=164_000, device=1)
    assert function.handle == ("function", "context 1", b"attention_forward")
    assert fake.contexts == []
    ((handle, attribute, value),) = fake.named("cuFuncSetAttribute")
    assert handle == function.handle and value == 164_000
    assert attribute.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"


def test_load_is_allowed_during_a_capture(fake):
    driver.load(b"cubin", "attention_forward", smem_bytes=0, device=0)
    relaxed, before = (mode for (mode,) in fake.named("cuThreadExchangeStreamCaptureMode"))
    assert relaxed.name.endswith("RELAXED") and before.name.endswith("GLOBAL")


def test_a_context_is_retained_once(fake):
    for _ in range(3):
        driver.load(b"cubin", "attention_forward", smem_bytes=0, device=0)
    assert len(fake.named("cuDevicePrimaryCtxRetain")) == 1


@pytest.mark.parametrize(
    "call, reason",
    [
        ("cuModuleLoadData", "cannot load attention_forward on GPU 0: words for CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("cuFuncSetAttribute", "cannot give attention_forward 999,999 bytes of shared memory"),
    ],
)
def test_refusals_of_a_load(fake, call, reason):
    fake.refusals[call] = [fake.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]
    with pytest.raises(LaunchError, match=reason):
        driver.load(b"cubin", "attention_forward", smem_bytes=999_999, device=0)
    assert fake.contexts == []
    assert len(fake.named("cuThreadExchangeStreamCaptureMode")) == 2


@pytest.fixture
def ready(fake):
    function = driver.load(b"cubin", "attention_forward", smem_bytes=1_024, device=1)
    return driver.Launcher(function, threads=128)


def held(content):
    """Memory of one parameter, and what a launcher is told of it."""
    buffer = ctypes.create_string_buffer(content, 8)
    return buffer, (ctypes.addressof(buffer),)


def test_launch_passes_grid_stream_and_bytes(fake, ready):
    one, at_one = held(b"abcdefgh")
    _, at_other = held(b"ijklmnop")
    ready(77, 70_000, at_one)
    one.raw = b"ABCDEFGH"
    ready(0, 3, at_one)
    ready(0, 3, at_other)
    first, second, third = fake.launched
    assert (first.gridDimX, first.gridDimY, first.gridDimZ, first.blockDimX) == (70_000, 1, 1, 128)
    assert (first.sharedMemBytes, first.hStream, second.hStream) == (1_024, 77, 0)
    assert (second.gridDimX, third.gridDimX) == (3, 3)
    assert [one.parameters for one in fake.launched] == [b"abcdefgh", b"ABCDEFGH", b"ijklmnop"]
    assert first.context == []


def test_an_early_launch_says_so_in_its_config(fake, ready):
    """Once, when it is made; the driver's struct has the attribute at the place where its header has it."""
    _, at = held(b"")
    ready(0, 1, at)
    function = driver.load(b"cubin", "attention_forward", smem_bytes=0, device=1)
    early = driver.Launcher(function, threads=128, early=True)
    for _ in range(2):
        early(0, 1, at)
    plain, *launched = fake.launched
    assert (plain.attrs, plain.numAttrs) == ([], 0)
    for config in launched:
        (attribute,) = config.attrs
        assert config.numAttrs == 1 and attribute is launched[0].attrs[0]
        assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        assert ctypes.c_int.from_address(int(attribute.getPtr()) + 8).value == 1


@pytest.mark.parametrize("refusal", ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE"])
def test_a_thread_without_a_context_is_lent_one(fake, ready, refusal):
    fake.refusals["cuLaunchKernelEx"] = [getattr(fake.CUresult, refusal)]
    _, at = held(b"")
    ready(0, 1, at)
    assert [one.context for one in fake.launched] == [["context 1"]] and fake.contexts == []


def test_a_launch_that_fails_says_why(fake, ready):
    _, at = held(b"")
    fake.refusals["cuLaunchKernelEx"] = [fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS]
    with pytest.raises(LaunchError, match="cannot launch attention_forward: words for CUDA_ERROR_ILLEGAL_ADDRESS"):
        ready(0, 1, at)
    assert len(fake.named("cuLaunchKernelEx")) == 1
    fake.refusals["cuLaunchKernelEx"] = [fake.CUresult.CUDA_ERROR_INVALID_CONTEXT] * 2
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_CONTEXT"):
        ready(0, 1, at)
    assert fake.contexts == []


def test_a_grid_that_is_too_wide():
    driver.check_blocks("attention_forward", (1 << 31) - 1)
    with pytest.raises(LaunchError, match="needs 2,147,483,648 blocks and a grid holds 2,147,483,647"):
        driver.check_blocks("attention_forward", 1 << 31)


@pytest.fixture
def no_api():
    """The real entry to the bindings, asked afresh."""
    driver._api.cache_clear()
    forget()
    yield
    driver._api.cache_clear()
    forget()


def test_no_bindings(monkeypatch, no_api):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(LaunchError, match=r"(?s)cuda-bindings is not installed.*pip install"):
        driver.gpu(0)
    assert driver.gpus() == 0


def replace(monkeypatch, fake):
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", fake)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)


def test_no_driver(monkeypatch, no_api):
    fake = FakeDriver()
    fake.cuInit = lambda flags: (_ for _ in ()).throw(RuntimeError("libcuda.so.1 not found"))
    replace(monkeypatch, fake)
    with pytest.raises(LaunchError, match=r"(?s)no NVIDIA driver.*libcuda.so.1 not found.*q\.cpu\(\)"):
        driver.gpu(0)
    assert driver.gpus() == 0


def test_no_gpu(monkeypatch, no_api):
    replace(monkeypatch, FakeDriver(init=FakeDriver.CUresult.CUDA_ERROR_NO_DEVICE))
    with pytest.raises(LaunchError, match=r"(?s)no GPU.*CUDA_ERROR_NO_DEVICE.*q\.cpu\(\)"):
        driver.gpu(0)


def test_a_driver_older_than_nvrtc_names_both_and_the_wheel(monkeypatch, no_api):
    replace(monkeypatch, FakeDriver(cuda=12080))
    with pytest.raises(LaunchError) as caught:
        driver.load(b"cubin", "attention_forward", smem_bytes=0, device=0)
    for part in ("CUDA 12.8", f"NVRTC {nvrtc.version()}", "580 or newer", "pip uninstall -y nvidia-cuda-nvrtc && "):
        assert part in str(caught.value)
    assert "pip install 'nvidia-cuda-nvrtc-cu12' 'cuda-bindings<13'" in str(caught.value)


@pytest.mark.parametrize("cuda", [13000, 13010, 14020])
def test_a_driver_new_enough(monkeypatch, no_api, cuda):
    replace(monkeypatch, FakeDriver(cuda=cuda))
    assert driver.gpus() == 2 and driver._api().cuInit(0) == (OK,)
