"""NVRTC's library: found by path, so that no other NVRTC of the process (PyTorch may bring one) stands in for it.

Its C functions are called through ctypes.  Bindings would take the library whose soname is loaded already, or that of
their own CUDA version.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashgen.errors import CompileError

#: What installs the compiler; named by every error about its absence.
WHEEL = "pip install 'nvidia-cuda-nvrtc>=13.0.88,<14'"

#: The wheels that bring it, the package's own first, and where in `nvidia/` each puts it.
_WHEELS = (
    ("nvidia-cuda-nvrtc", "cu13/lib/libnvrtc.so.13"),
    ("nvidia-cuda-nvrtc-cu12", "cuda_nvrtc/lib/libnvrtc.so.12"),
)

#: The names that a CUDA toolkit, conda and the system's loader know it by.
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")

#: nvrtcResult: the one that is no error, and the one that blames an option.
_SUCCESS, INVALID_OPTION = 0, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where NVRTC lies (a soname alone: wherever the loader finds it), and the wheel's version if a wheel's it is."""

    path: str
    wheel: str | None


class Library:
    """The loaded NVRTC; `version` is what it says of itself.  Its methods may run in several threads at once."""

    def __init__(self, path: str) -> None:
        """Load the library of a path or soname; raises OSError or AttributeError where it is none."""
        # NVRTC opens its builtins by their name alone, and the wheel's folder is on no search path.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if os.sep in path else ():
            with contextlib.suppress(OSError):  # then NVRTC says that it misses them
                ctypes.CDLL(str(builtins))
        self._c = ctypes.CDLL(path)
        self._c.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._ok(self._c.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "tell its version")
        self.version = major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """The compute capabilities it compiles for: 80 is sm_80."""
        count = ctypes.c_int()
        self._ok(self._c.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "count its architectures")
        listed = (ctypes.c_int * count.value)()
        self._ok(self._c.nvrtcGetSupportedArchs(listed), "list its architectures")
        return tuple(listed)

    def error(self, status: int) -> str:
        """The name of a status, such as NVRTC_ERROR_COMPILATION."""
        return self._c.nvrtcGetErrorString(status).decode()

    @contextlib.contextmanager
    def program(self, source: str, name: str) -> Iterator[Program]:
        """A program of CUDA text; `name` is what diagnostics call the file."""
        handle = ctypes.c_void_p()
        made = self._c.nvrtcCreateProgram(ctypes.byref(handle), source.encode(), name.encode(), 0, None, None)
        self._ok(made, "start")
        try:
            yield Program(self, handle)
        finally:
            self._c.nvrtcDestroyProgram(ctypes.byref(handle))

    def _read(self, result: str, handle: ctypes.c_void_p) -> bytes:
        """What `nvrtcGet{result}` gives of a program."""
        size = ctypes.c_size_t()
        self._ok(getattr(self._c, f"nvrtcGet{result}Size")(handle, ctypes.byref(size)), f"size its {result}")
        buffer = ctypes.create_string_buffer(size.value)
        self._ok(getattr(self._c, f"nvrtcGet{result}")(handle, buffer), f"give its {result}")
        return buffer.raw

    def _ok(self, status: int, doing: str) -> None:
        if status != _SUCCESS:
            raise CompileError(f"NVRTC cannot {doing}: {self.error(status)}")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of a library, to be compiled once and read."""

    library: Library
    handle: ctypes.c_void_p

    def compile(self, options: Iterable[str]) -> int:
        """Compile it; the status, 0 for success.  The GIL is free meanwhile."""
        given = [option.encode() for option in options]
        return self.library._c.nvrtcCompileProgram(self.handle, len(given), (ctypes.c_char_p * len(given))(*given))

    def log(self) -> str:
        return self.library._read("ProgramLog", self.handle).rstrip(b"\0 \n").decode(errors="replace")

    def cubin(self) -> bytes:
        return self.library._read("CUBIN", self.handle)

    def ptx(self) -> str:
        return self.library._read("PTX", self.handle).rstrip(b"\0").decode()


@lru_cache(maxsize=1)
def found() -> Found:
    """Which NVRTC is used: the wheel that flashgen installs, else that of CUDA 12, else one that is no wheel's.

    Nothing is loaded but in search of the last, which the system's loader may know.  Raises CompileError for none.
    """
    from importlib.metadata import distributions  # slow to import, and most processes hit the cache

    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for wheel, inside in _WHEELS:
        for folder in folders:
            if (folder / inside).is_file():
                about = next(iter(distributions(name=wheel, path=[str(folder.parent)])), None)
                return Found(path=str(folder / inside), wheel=about.version if about is not None else None)
    homes = (f"{home}/lib64" for home in map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")) if home)
    for folder, soname in itertools.product((f"{sys.prefix}/lib", *homes), _SONAMES):
        if (path := Path(folder, soname)).is_file():
            return Found(path=str(path), wheel=None)
    for soname in _SONAMES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(soname)
            return Found(path=soname, wheel=None)
    looked = ", ".join(f"nvidia/{inside}" for _, inside in _WHEELS)
    raise CompileError(
        f"no NVRTC: none of {looked} is installed, and the system has no {' or '.join(_SONAMES)}\n  install it: {WHEEL}"
    )


@lru_cache(maxsize=1)
def library() -> Library:
    """`found`, loaded.  Raises CompileError where it cannot be, or is not what its wheel says."""
    which = found()
    try:
        loaded = Library(which.path)
    except (OSError, AttributeError) as error:
        raise CompileError(f"no NVRTC: {which.path} cannot be loaded ({error})\n  install it: {WHEEL}") from error
    says = "{}.{}".format(*loaded.version)
    if which.wheel is not None and which.wheel.split(".")[:2] != says.split("."):
        raise CompileError(
            f"{which.path} says that it is NVRTC {says}, and its wheel that it is {which.wheel}\n"
            f"  install it again: {WHEEL.replace('install', 'install --force-reinstall', 1)}"
        )
    return loaded
