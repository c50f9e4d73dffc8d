"""NVRTC: cubins and PTX with no GPU, the resource report, and what each failure says."""

import contextlib
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from flashgen.errors import CompileError
from flashgen.runtime import libnvrtc, nvrtc

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


@pytest.fixture
def afresh():
    """The library searched for and loaded again, before and after."""
    cached = (libnvrtc.found, libnvrtc.library, nvrtc.version)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def wheels(folder, monkeypatch, **installed):
    """A folder of packages in which each wheel ("cu12", "cu13") of a version is an empty file, and no other."""
    for name, version in installed.items():
        wheel, inside = next(found for found in libnvrtc._WHEELS if f".so.{name[2:]}" in found[1])
        (folder / "nvidia" / inside).parent.mkdir(parents=True)
        (folder / "nvidia" / inside).write_text("")
        about = folder / f"{wheel.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {wheel}\nVersion: {version}\n")
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(folder / "elsewhere" / "nvidia"), str(folder / "nvidia")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "prefix", str(folder))


def test_bindings_are_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert nvrtc.compile(GOOD, "sm_80").cubin


@pytest.mark.parametrize(
    "installed, version",
    [
        ({"cu13": "13.0.88", "cu12": "12.4.127"}, "13.0.88"),
        ({"cu12": "12.4.127", "cu13": "13.5.37"}, "13.5.37"),
        ({"cu12": "12.8.93"}, "12.8.93"),
    ],
)
def test_the_newest_major_of_the_wheels_is_found(monkeypatch, tmp_path, afresh, installed, version):
    wheels(tmp_path, monkeypatch, **installed)
    assert nvrtc.version() == version
    assert libnvrtc.found().path.endswith(f"libnvrtc.so.{version[:2]}")


def test_a_toolkit_serves_where_no_wheel_is_installed(monkeypatch, tmp_path, afresh):
    wheels(tmp_path, monkeypatch)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.12").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert libnvrtc.found() == libnvrtc.Found(path=str(tmp_path / "lib64" / "libnvrtc.so.12"), wheel=None)


def test_no_library_names_the_wheel(monkeypatch, tmp_path, afresh):
    wheels(tmp_path, monkeypatch)
    monkeypatch.setattr(libnvrtc, "_SONAMES", ("libnvrtc.so.absent",))
    with pytest.raises(CompileError, match=r"(?s)none of nvidia/cu13/lib/libnvrtc.so.13.*nvidia-cuda-nvrtc>=13"):
        nvrtc.ptx(GOOD, "sm_80")


def test_a_library_that_cannot_be_loaded_names_its_path(monkeypatch, tmp_path, afresh):
    wheels(tmp_path, monkeypatch, cu13="13.0.88")
    with pytest.raises(CompileError, match=r"(?s)cu13/lib/libnvrtc.so.13 cannot be loaded.*nvidia-cuda-nvrtc>=13"):
        nvrtc.compile(GOOD, "sm_80")


def test_a_library_that_is_not_what_its_wheel_says_is_refused(monkeypatch, afresh):
    real = libnvrtc.found()
    monkeypatch.setattr(libnvrtc, "found", lambda: libnvrtc.Found(path=real.path, wheel="12.4.127"))
    with pytest.raises(CompileError, match=r"(?s)says that it is NVRTC 13\..*its wheel that it is 12\.4\.127"):
        nvrtc.compile(GOOD, "sm_80")


def test_the_version_is_that_of_the_library_that_runs():
    assert nvrtc.versions().keys() == {"nvrtc", "cuda-bindings"}
    assert nvrtc.version().startswith("{}.{}".format(*libnvrtc.library().version))


def test_a_library_of_no_wheel_is_asked_for_its_version(monkeypatch, afresh):
    real = libnvrtc.found()
    monkeypatch.setattr(libnvrtc, "found", lambda: libnvrtc.Found(path=real.path, wheel=None))
    assert nvrtc.version() == "{}.{}".format(*libnvrtc.library().version)


# An NVRTC that cannot compile, as PyTorch may have loaded one: version 12.4, and every option is wrong.
_OLD = """
int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 4; return 0; }
int nvrtcCreateProgram(void **p, const char *s, const char *n, int c, void *h, void *i) { *p = 0; return 0; }
int nvrtcCompileProgram(void *p, int n, const char *const *o) { return 5; }
int nvrtcDestroyProgram(void **p) { return 0; }
int nvrtcGetProgramLogSize(void *p, unsigned long *n) { *n = 1; return 0; }
int nvrtcGetProgramLog(void *p, char *text) { *text = 0; return 0; }
const char *nvrtcGetErrorString(int status) { return "THE_OLD_ONE"; }
"""
_BESIDE_IT = """
import ctypes, sys
old = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
from flashgen.runtime import libnvrtc, nvrtc
source = 'extern "C" __global__ void f(float* x) { *x = 1.f; }'
assert nvrtc.compile(source, "sm_80").cubin[:4] == b"\\x7fELF" and ".entry f(" in nvrtc.ptx(source, "sm_80")
old.nvrtcVersion(*map(ctypes.byref, numbers := (ctypes.c_int(), ctypes.c_int())))
print(libnvrtc.library().version, nvrtc.version(), *(n.value for n in numbers))
"""


@pytest.mark.parametrize("soname", ["libnvrtc.so.12", "libnvrtc.so.13"])
def test_another_library_that_is_loaded_already_is_left_alone(tmp_path, soname):
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler makes the other library")
    (tmp_path / "old.c").write_text(_OLD)
    build = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", tmp_path / soname, tmp_path / "old.c"]
    subprocess.run(build, check=True)
    found = subprocess.run(
        [sys.executable, "-c", _BESIDE_IT, tmp_path / soname], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"{libnvrtc.library().version} {nvrtc.version()} 12 4\n"


@pytest.mark.parametrize("version, caches", [((12, 4), False), ((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_only_a_version_that_caches_is_told_not_to(version, caches):
    class Library:
        def __init__(self):
            self.version, self.options = version, ()

        @contextlib.contextmanager
        def program(self, source, name):
            yield self

        def compile(self, options):
            self.options = options

        def log(self):
            return ""

    library = Library()
    nvrtc._run(library, GOOD, "sm_80", "kernel", ("-std=c++17",), lambda program: b"")
    assert ("-no-cache" in library.options) == caches and "-std=c++17" in library.options
