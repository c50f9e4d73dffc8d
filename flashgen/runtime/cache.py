"""The disk cache of cubins: an index from everything that decides a cubin to the cubin, so that a hit renders nothing.

An entry is two files, `<key>.cubin` and its sidecar `<key>.json` (what it is, and a checksum of both).  Both are
written to a temporary name and renamed, the sidecar last; whatever does not check out is compiled again.  Nothing here
can stop a kernel from running: a folder that cannot be read, written or trusted costs one warning a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import hashlib
import itertools
import json
import os
import re
import shlex
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen import resources
from flashgen.errors import FlashgenError
from flashgen.lang.expr import Node, serialize
from flashgen.locks import Lock
from flashgen.runtime import nvrtc

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan

#: Bytes that the folder may hold unless FLASHGEN_CACHE_BYTES says otherwise.
DEFAULT_LIMIT = 1 << 30

#: A process that waits this long for another one's compilation compiles for itself.
LOCK_SECONDS = 120.0

#: A temporary file this old was left by a process that died.
ABANDONED_SECONDS = 3600.0

#: Modes of what others may write.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

#: Files of a folder that are the cache's own: what else lies there is never removed.
_ENTRY, _TEMPORARY = re.compile(r"([0-9a-f]{64})\.(?:cubin|json)"), (".flashgen-", ".tmp")

_warned: set[Path] = set()
_warning = Lock()


class CacheWarning(UserWarning):
    """The disk cache cannot be used; kernels still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A cubin with its resource report; `about` is what the sidecar says of it, `hit` whether it came from disk."""

    cubin: bytes
    resources: nvrtc.Resources
    about: Mapping[str, object]
    hit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder of entries that together stay below `limit` bytes; the least recently used ones go first."""

    folder: Path
    limit: int

    def fetch(self, key: str, build: Callable[[], tuple[nvrtc.Compiled, Mapping[str, object]]]) -> Entry:
        """The entry of `key`; where there is none (or a damaged one) `build()` makes the cubin and what to note of it.

        Of several processes and threads that miss together one builds and the others wait for it.  Raises only what
        `build` raises.  A folder or an entry that others may write is not used: a cubin of theirs would run as the
        caller's.
        """
        if self.limit == 0:
            return self._entry(key, *build())
        with contextlib.suppress(OSError):  # writing says it; and what others make from now on is seen below
            self._make_folder()
        if (wrong := self._wrong()) is not None:
            self._warn(
                f"flashgen does not use its kernel cache {self.folder}, {wrong[0]}: kernels run, but each process"
                f" compiles them again\n  {wrong[1]}"
            )
            return self._entry(key, *build())
        if (found := self._read(key)) is not None:
            return found
        with self._locked(key) as locked:
            if locked and (found := self._read(key)) is not None:
                return found
            entry = self._entry(key, *build())
            self._write(key, entry)
            return entry

    def keeps(self, key: str) -> bool:
        """Whether the folder has an entry of `key` now."""
        return self.limit > 0 and (self.folder / f"{key}.json").is_file()

    def _entry(self, key: str, compiled: nvrtc.Compiled, about: Mapping[str, object]) -> Entry:
        """What was compiled now, with its sidecar."""
        about = {"key": key, "bytes": len(compiled.cubin), "resources": dataclasses.asdict(compiled.resources), **about}
        return Entry(cubin=compiled.cubin, resources=compiled.resources, about=about, hit=False)

    def _read(self, key: str) -> Entry | None:
        try:
            sidecar = self.folder / f"{key}.json"
            about = json.loads(_own_bytes(sidecar))
            cubin = _own_bytes(self.folder / f"{key}.cubin")
            if about.pop("checksum") != _checksum(cubin, about) or about["key"] != key:
                return None
            resources = nvrtc.Resources(**about["resources"])
        # Absent, or damaged in any way: AttributeError is a list, RecursionError too deep a one.
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        with contextlib.suppress(OSError):
            os.utime(sidecar)  # recently used
        return Entry(cubin=cubin, resources=resources, about=about, hit=True)

    def _write(self, key: str, entry: Entry) -> None:
        about = {"checksum": _checksum(entry.cubin, entry.about), **entry.about}
        text = json.dumps(about, indent=1).encode()
        if len(entry.cubin) + len(text) > self.limit:
            return
        try:
            self._make_folder()
            self._replace(f"{key}.cubin", entry.cubin)
            self._replace(f"{key}.json", text)
            self._evict(keep=key)
        except OSError as error:
            self._remove_half(key)
            reason = error.strerror or str(error)
            self._warn(
                f"flashgen cannot write its kernel cache {self.folder} ({reason}): kernels run, but each process"
                " compiles them again\n  set FLASHGEN_CACHE_DIR to a folder that can be written, or"
                " FLASHGEN_CACHE_BYTES=0 to do without one"
            )

    def _remove_half(self, key: str) -> None:
        """Remove a cubin without its sidecar, which would take room that an entry needs."""
        with contextlib.suppress(OSError):
            if not (self.folder / f"{key}.json").exists():
                (self.folder / f"{key}.cubin").unlink(missing_ok=True)

    def _wrong(self) -> tuple[str, str] | None:
        """Why the folder is none, or one that others may put cubins into, and a cure; None: neither, or there is
        nothing."""
        try:
            status = self.folder.stat()
        except OSError:
            return None
        cure = "set FLASHGEN_CACHE_DIR to a folder of your own"
        if not stat.S_ISDIR(status.st_mode):
            return "which is no folder", f"{cure}, or FLASHGEN_CACHE_BYTES=0 to do without one"
        if _is_own(status):
            return None
        if status.st_mode & _OTHERS_WRITE:
            if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:  # such as /tmp others need
                cure = f"chmod go-w {shlex.quote(str(self.folder))}, or {cure}"
            return f"which others may write (its mode is {stat.S_IMODE(status.st_mode):o})", cure
        who = f"it is of user {status.st_uid}, and this process runs as {os.geteuid()}"
        return f"which others may write ({who})", cure

    def _make_folder(self) -> None:
        missing = itertools.takewhile(lambda folder: not folder.exists(), (self.folder, *self.folder.parents))
        for folder in reversed(list(missing)):  # parents=True would make them by the umask
            folder.mkdir(mode=0o700, exist_ok=True)
        self.folder.mkdir(exist_ok=True)  # raises where it is a file

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file so that others see all of it or none; mkstemp makes it readable by its owner alone."""
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=_TEMPORARY[0], suffix=_TEMPORARY[1])
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _evict(self, keep: str) -> None:
        """Remove the least recently used entries until the folder is within its limit, and what dead processes left."""
        now, total = time.time(), 0
        entries: dict[str, list] = {}  # key -> [last use, bytes]
        with os.scandir(self.folder) as files:
            for file in files:
                name = _ENTRY.fullmatch(file.name)
                temporary = file.name.startswith(_TEMPORARY[0]) and file.name.endswith(_TEMPORARY[1])
                with contextlib.suppress(OSError):  # another process evicts too
                    if not (name or temporary) or not file.is_file(follow_symlinks=False):
                        continue
                    status = file.stat(follow_symlinks=False)
                    if name is None:
                        if now - status.st_mtime > ABANDONED_SECONDS:
                            os.unlink(file.path)
                        continue
                    entry = entries.setdefault(name[1], [0.0, 0])
                    entry[0] = max(entry[0], status.st_mtime)
                    entry[1] += status.st_size
                    total += status.st_size
        for key, (_, size) in sorted(entries.items(), key=lambda item: item[1]):
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):  # what cannot be removed stays, and others go
                if key != keep:
                    for kind in ("json", "cubin"):
                        (self.folder / f"{key}.{kind}").unlink(missing_ok=True)
                    total -= size

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[bool]:
        """Hold the lock of `key` (keys share 256 lock files, which stay); False where the folder cannot hold one."""
        from filelock import FileLock

        held = None
        with contextlib.suppress(OSError, NotImplementedError):  # Timeout is an OSError; writing warns if it must
            (self.folder / "locks").mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(self.folder / "locks" / f"{key[:2]}.lock", mode=0o600)
            lock.acquire(timeout=LOCK_SECONDS)
            held = lock
        try:
            yield held is not None
        finally:
            if held is not None:
                with contextlib.suppress(OSError):  # of a network's file system
                    held.release()

    def _warn(self, message: str) -> None:
        _warn_once(self.folder, message)


def _is_own(status: os.stat_result) -> bool:
    """Whether nobody but this user, or root, can have written there."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE


def _own_bytes(path: Path) -> bytes:
    """What a file holds; PermissionError where another user may have written it."""
    with path.open("rb") as file:
        if not _is_own(os.fstat(file.fileno())):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return file.read()


def _warn_once(folder: Path, message: str) -> None:
    """Once a folder and process."""
    with _warning:
        if folder in _warned:
            return
        _warned.add(folder)
    warnings.warn(message, CacheWarning, stacklevel=2)


def default() -> Cache:
    """The cache of this process's environment.

    FLASHGEN_CACHE_DIR, else `flashgen` in XDG_CACHE_HOME, else `~/.cache/flashgen`, else (for a user who has no home) a
    folder of this user among the temporary ones; FLASHGEN_CACHE_BYTES bounds it (0: no cache).  Raises FlashgenError
    for a bound that is not a number of bytes, and for a FLASHGEN_CACHE_DIR in a home that there is not.
    """
    return Cache(folder=_folder(), limit=_limit())


def key(plan: KernelPlan, options: Iterable[str] = ()) -> str:
    """sha256 of all that decides a cubin: the plan (its variant's DAG in it), flashgen's own text, NVRTC, options."""
    decides = [as_data(plan), package_digest(), nvrtc.version(), [*nvrtc.OPTIONS, *options]]
    return hashlib.sha256(json.dumps(decides, separators=(",", ":")).encode()).hexdigest()


def as_data(value: object) -> object:
    """A frozen value as JSON data, every compared field of it, so that equal data means equal values."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Node):
        return serialize([value])
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [as_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): as_data(value[name]) for name in sorted(value)}
    if dataclasses.is_dataclass(value):
        own = {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare}
        return {"type": type(value).__name__, **own}
    raise TypeError(f"{type(value).__name__} has no place in a cache key")


@lru_cache(maxsize=1)
def package_digest() -> str:
    """sha256 of every source file of flashgen and every template, by content; once a process."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parents[1], resources.folder("templates")):
        for path, name in sorted(_sources(root)):
            content = Path(path).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path, path below root with / between) of the Python files and templates under `root`."""
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name != "__pycache__"]
        for name in files:
            if name.endswith((".py", ".j2", ".cuh")):
                path = os.path.join(folder, name)
                yield path, os.path.relpath(path, root).replace(os.sep, "/")


def _checksum(cubin: bytes, about: Mapping[str, object]) -> str:
    """sha256 of all that a hit reads."""
    digest = hashlib.sha256(cubin)
    digest.update(json.dumps(about, sort_keys=True).encode())
    return digest.hexdigest()


def _folder() -> Path:
    if chosen := os.environ.get("FLASHGEN_CACHE_DIR"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise FlashgenError(
                f"FLASHGEN_CACHE_DIR is {chosen!r}, and that user has no home\n  nearest: a path that starts with /"
            ) from None
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is to be ignored, says the XDG specification
    if shared.is_absolute():
        return shared / "flashgen"
    with contextlib.suppress(RuntimeError):  # a container's user without an entry, and no HOME
        return Path("~/.cache/flashgen").expanduser()
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written, as writing will say
        temporary = Path("/tmp")
    folder = temporary / f"flashgen-{os.geteuid()}"
    if _limit():
        _warn_once(
            Path("~"),
            f"flashgen keeps its kernel cache in {folder}, since this user (number {os.geteuid()}) has no home\n"
            "  set FLASHGEN_CACHE_DIR to a folder that lasts, or FLASHGEN_CACHE_BYTES=0 to do without one",
        )
    return folder


def _limit() -> int:
    text = os.environ.get("FLASHGEN_CACHE_BYTES", "")
    if not text:
        return DEFAULT_LIMIT
    try:
        limit = int(text)
    except ValueError:
        limit = -1
    if limit < 0:
        raise FlashgenError(f"FLASHGEN_CACHE_BYTES is {text!r}: it must be a whole number of bytes, such as 1073741824")
    return limit
