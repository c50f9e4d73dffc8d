"""NVRTC: cubins and PTX with no GPU, the resource report, and what each failure says."""

import sys

import pytest

from flashgen.errors import CompileError
from flashgen.runtime import nvrtc

GOOD = """
extern "C" __global__ void scale(float* x, float factor) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x] * factor;
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {
    float held[96];
    #pragma unroll
    for (int i = 0; i < 96; ++i) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; ++i) x[i * 1024 + (threadIdx.x * 7 & 1023)] = held[i] * held[95 - i];
}
"""
# Without __launch_bounds__(threads, 1) ptxas ignores setmaxnreg and says so: C7508.
IGNORED_SETMAXNREG = """
extern "C" __global__ void f(float* x) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    x[threadIdx.x] = 1.f;
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_cubin_and_resources(arch):
    made = nvrtc.compile(GOOD, arch, name="scale")
    assert made.cubin[:4] == b"\x7fELF"
    assert 1 <= made.resources.registers <= 255
    assert made.resources.smem_static == 1024
    assert made.resources.spills == made.resources.stack_bytes == 0
    assert made.seconds > 0 and made.performance_losses == ()


def test_spills_are_reported():
    resources = nvrtc.compile(SPILLING, "sm_80").resources
    assert resources.registers <= 32
    assert resources.spill_stores > 0 and resources.spill_loads > 0 and resources.stack_bytes > 0
    assert resources.spills == resources.spill_stores + resources.spill_loads


def test_options_reach_the_compiler():
    made = nvrtc.compile("#ifndef GIVEN\n#error not given\n#endif\n" + GOOD, "sm_80", options=["-DGIVEN=1"])
    assert made.cubin


def test_ptx_names_its_target():
    text = nvrtc.ptx(GOOD, "sm_90a")
    assert ".target sm_90a" in text and ".entry scale(" in text and "\0" not in text


def test_error_carries_log_and_source_line():
    source = GOOD.replace("* factor", "* facto")
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(source, "sm_80", name="attention_forward")
    message = str(caught.value)
    assert "cannot compile attention_forward for sm_80" in message
    assert "6 | x[threadIdx.x] = tile[255 - threadIdx.x] * facto;" in message
    assert 'identifier "facto" is undefined' in caught.value.log
    assert caught.value.source == source


def test_ptx_error_carries_the_log_too():
    with pytest.raises(CompileError, match="cannot compile kernel for compute_80"):
        nvrtc.ptx("nonsense", "sm_80")


def test_unknown_arch_lists_the_known_ones():
    with pytest.raises(CompileError, match=r"does not know the architecture 'sm_35'\n  it knows sm_75, sm_80"):
        nvrtc.compile(GOOD, "sm_35")


def test_performance_loss_is_a_failure_unless_allowed():
    with pytest.raises(CompileError, match=r"(?s)gave up speed:.*\(C7508\).*allow_performance_loss=True"):
        nvrtc.compile(IGNORED_SETMAXNREG, "sm_90a")
    made = nvrtc.compile(IGNORED_SETMAXNREG, "sm_90a", allow_performance_loss=True)
    assert made.cubin and "(C7508)" in made.performance_losses[0]


def test_missing_bindings_name_the_wheel(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r"no NVRTC: cuda-bindings is not installed(?s:.*)nvidia-cuda-nvrtc>=13"):
        nvrtc.compile(GOOD, "sm_80")


def test_missing_library_names_the_wheel(monkeypatch):
    from cuda.bindings import nvrtc as bindings

    def absent():
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(bindings, "nvrtcVersion", absent)
    with pytest.raises(CompileError, match=r"(?s)library cannot be loaded.*nvidia-cuda-nvrtc>=13"):
        nvrtc.ptx(GOOD, "sm_80")


def test_versions():
    assert nvrtc.versions().keys() == {"nvrtc", "cuda-bindings"}
    major, minor = nvrtc.library_version()
    assert nvrtc.version().startswith(f"{major}.{minor}")


@pytest.mark.parametrize(
    "wheels, version",
    [
        ({"nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": "12.9.86"}, "13.0.88"),
        ({"nvidia-cuda-nvrtc-cu12": "12.9.86"}, "12.9.86"),
        ({}, "{}.{}".format(*nvrtc.library_version())),
    ],
)
def test_the_version_is_that_of_the_wheel_that_is_loaded(monkeypatch, wheels, version):
    from importlib import metadata

    def installed(name):
        if name not in wheels:
            raise metadata.PackageNotFoundError(name)
        return wheels[name]

    monkeypatch.setattr(metadata, "version", installed)
    assert nvrtc.version.__wrapped__() == version
