"""NVRTC: CUDA text to a cubin (or PTX) for one architecture, with no GPU and no driver, and its resource report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from flashgen.errors import CompileError
from flashgen.runtime import libnvrtc

#: Every kernel is compiled with these.  -v prints the resource report.
OPTIONS = ("-std=c++17", "--ptxas-options=-O3", "--ptxas-options=-v")

#: NVRTC's own cache (present only beside a driver) drops the resource report, and flashgen keeps a cache of its own.
#: Before this version there is neither the cache nor the option against it.
_CACHES_SINCE = (12, 9)

_PERFORMANCE_LOSS = re.compile(r".*\(C75\d\d\).*")
_DIAGNOSTIC = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What ptxas gave a kernel: registers per thread, and bytes of spills, stack and static shared memory.

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
    library = libnvrtc.library()
    start = time.perf_counter()
    log, cubin = _run(library, source, arch, name, (*OPTIONS, *options), libnvrtc.Program.cubin)
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
    virtual = arch.replace("sm_", "compute_", 1)
    given = ("-std=c++17", *options)
    return _run(libnvrtc.library(), source, virtual, name, given, libnvrtc.Program.ptx)[1]


@lru_cache(maxsize=1)
def version() -> str:
    """The version of the NVRTC that compile uses, as exactly as it is known: its wheel's ("13.0.88"), else "13.0".

    The wheel that the file belongs to is asked first because loading the library costs 30 ms, which a cache hit should
    not pay; where the library is loaded, it has to agree.  Raises CompileError where there is none.
    """
    return libnvrtc.found().wheel or "{}.{}".format(*libnvrtc.library().version)


def versions() -> dict[str, str]:
    """Versions of NVRTC and of the bindings to the driver; raises CompileError where there is no NVRTC."""
    import cuda.bindings

    return {"nvrtc": version(), "cuda-bindings": cuda.bindings.__version__}


def _performance_losses(log: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in _PERFORMANCE_LOSS.findall(log))


def _run(
    library: libnvrtc.Library,
    source: str,
    arch: str,
    name: str,
    options: tuple[str, ...],
    read: Callable[[libnvrtc.Program], bytes | str],
) -> tuple[str, bytes | str]:
    """The log and the result of one NVRTC program."""
    own = ("-no-cache",) if library.version >= _CACHES_SINCE else ()
    with library.program(source, f"{name}.cu") as program:
        status = program.compile((f"--gpu-architecture={arch}", *own, *options))
        log = program.log()
        if status:
            raise CompileError(_refusal(library, status, source, arch, name, log), log=log, source=source)
        return log, read(program)


def _refusal(library: libnvrtc.Library, status: int, source: str, arch: str, name: str, log: str) -> str:
    """The error's text: the first diagnostics, each under the source line it names."""
    if status == libnvrtc.INVALID_OPTION and "gpu-architecture" in log:
        known = [f"sm_{number}" for number in library.architectures()]
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
    return f"NVRTC {version()} cannot compile {name} for {arch} ({library.error(status)})\n{report}"


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
