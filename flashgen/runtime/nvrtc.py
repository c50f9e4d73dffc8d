"""NVRTC: CUDA text to a cubin (or PTX) for one architecture, with no GPU and no driver, and its resource report."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from flashgen.errors import CompileError

#: What installs the compiler; named by every error about its absence.
WHEELS = "pip install 'cuda-bindings>=13.0.3,<14' 'nvidia-cuda-nvrtc>=13.0.88,<14'"

#: Every kernel is compiled with these.  -v prints the resource report; -no-cache because NVRTC's own cache (present
#: only beside a driver) drops that report, and flashgen keeps a cache of its own.
OPTIONS = ("-std=c++17", "-no-cache", "--ptxas-options=-O3", "--ptxas-options=-v")

_PERFORMANCE_LOSS = re.compile(r".*\(C75\d\d\).*")
_DIAGNOSTIC = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error")
_loading = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What ptxas gave a kernel: registers a thread, and bytes of spills, stack and static shared memory.

    Of a file with several kernels, the largest of each.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    smem_static: int

    @property
    def spills(self) -> int:
        """Bytes of spill stores and loads together."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A cubin for one architecture, its resources, NVRTC's log and the seconds it took."""

    cubin: bytes
    resources: Resources
    log: str
    seconds: float

    @property
    def performance_losses(self) -> tuple[str, ...]:
        """The (C75xx) lines of the log: ptxas ignored setmaxnreg, or serialised wgmma."""
        return _performance_losses(self.log)


def compile(
    source: str, arch: str, *, name: str = "kernel", options: Iterable[str] = (), allow_performance_loss: bool = False
) -> Compiled:
    """Compile CUDA text to a cubin for `arch` ("sm_80" ...); `name` is what diagnostics call the file.

    `options` are added to OPTIONS.  Raises CompileError with the log and the source lines it names when NVRTC refuses
    the text, when a (C75xx) line says that ptxas gave up speed (unless `allow_performance_loss`), and when no NVRTC is
    installed.
    """
    nvrtc = _nvrtc()
    start = time.perf_counter()
    log, cubin = _run(nvrtc, source, arch, name, (*OPTIONS, *options), nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    seconds = time.perf_counter() - start
    losses = _performance_losses(log)
    if losses and not allow_performance_loss:
        listed = "\n".join(f"  {line}" for line in losses)
        raise CompileError(
            f"{name} compiles for {arch} but ptxas gave up speed:\n{listed}\n"
            "  compile it with allow_performance_loss=True to run it all the same",
            log=log,
            source=source,
        )
    return Compiled(cubin=cubin, resources=_resources(log), log=log, seconds=seconds)


def ptx(source: str, arch: str, *, name: str = "kernel", options: Iterable[str] = ()) -> str:
    """The PTX that NVRTC makes of CUDA text for `arch` ("sm_90a" gives compute_90a); raises CompileError as compile."""
    nvrtc = _nvrtc()
    virtual = arch.replace("sm_", "compute_", 1)
    every = ("-std=c++17", "-no-cache", *options)
    return _run(nvrtc, source, virtual, name, every, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)[1].rstrip(b"\0").decode()


@lru_cache(maxsize=1)
def version() -> str:
    """The version of the NVRTC that compile uses, as exactly as it is known: the wheel's ("13.0.88"), else "13.0".

    The wheel's metadata is asked first because loading the library costs 30 ms, which a cache hit should not pay.  Both
    speak of the same library: the loader looks into site-packages first too, and of two wheels takes the newer.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(PackageNotFoundError):
            return installed(wheel)
    return "{}.{}".format(*library_version())


@lru_cache(maxsize=1)
def library_version() -> tuple[int, int]:
    """CUDA major and minor version that the loaded NVRTC reports; raises CompileError where there is none."""
    nvrtc = _nvrtc()
    return tuple(_ok(nvrtc, nvrtc.nvrtcVersion(), "ask NVRTC for its version"))


def versions() -> dict[str, str]:
    """Versions of NVRTC and of the bindings it is called through; raises CompileError where there is none."""
    import cuda.bindings

    return {"nvrtc": version(), "cuda-bindings": cuda.bindings.__version__}


def _performance_losses(log: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in _PERFORMANCE_LOSS.findall(log))


def _nvrtc():
    """The bindings, with the library behind them loaded."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(f"no NVRTC: cuda-bindings is not installed ({error})\n  install it: {WHEELS}") from error
    with _loading:  # the loader of early bindings is not safe against two threads
        try:
            nvrtc.nvrtcVersion()
        except RuntimeError as error:  # pathfinder's DynamicLibNotFoundError is one
            raise CompileError(f"no NVRTC: its library cannot be loaded ({error})\n  install it: {WHEELS}") from error
    return nvrtc


def _run(nvrtc, source: str, arch: str, name: str, options: tuple[str, ...], size_of, get) -> tuple[str, bytes]:
    """One NVRTC program, compiled and read; the GIL is free while NVRTC works."""
    program = _ok(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []), "start")[0]
    try:
        given = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(given), given)[0]
        log = _read(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        log = log.rstrip(b"\0 \n").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_refusal(nvrtc, status, source, arch, name, log), log=log, source=source)
        return log, _read(nvrtc, program, size_of, get)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc, program, size_of, get) -> bytes:
    buffer = bytearray(_ok(nvrtc, size_of(program), "read a result's size")[0])
    _ok(nvrtc, get(program, buffer), "read a result")
    return bytes(buffer)


def _ok(nvrtc, returned: tuple, doing: str) -> tuple:
    if returned[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC cannot {doing}: {returned[0].name}")
    return returned[1:]


def _refusal(nvrtc, status, source: str, arch: str, name: str, log: str) -> str:
    """The error's text: the first diagnostics, each under the source line it names."""
    if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION and "gpu-architecture" in log:
        known = [f"sm_{number}" for number in _ok(nvrtc, nvrtc.nvrtcGetSupportedArchs(), "list its architectures")[0]]
        return f"NVRTC {version()} does not know the architecture {arch!r}\n  it knows {', '.join(known)}"
    lines, shown = source.splitlines(), []
    for text in log.splitlines():
        found = _DIAGNOSTIC.match(text)
        if found is None or len(shown) == 5:
            continue
        number = int(found["line"])
        inside = found["file"] == f"{name}.cu" and 0 < number <= len(lines)
        shown.append(f"  {text}" + (f"\n    {number} | {lines[number - 1].strip()}" if inside else ""))
    report = "\n".join(shown) or "\n".join(f"  {line}" for line in log.splitlines()[:20])
    return f"NVRTC {version()} cannot compile {name} for {arch} ({status.name})\n{report}"


def _resources(log: str) -> Resources:
    """The report of `--ptxas-options=-v`; absent figures (no static shared memory) are 0."""

    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    return Resources(
        registers=most(r"Used (\d+) registers"),
        spill_stores=most(r"(\d+) bytes spill stores"),
        spill_loads=most(r"(\d+) bytes spill loads"),
        stack_bytes=most(r"(\d+) bytes stack frame"),
        smem_static=most(r"(\d+) bytes smem"),
    )
