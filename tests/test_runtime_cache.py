"""The disk cache: hits, damage, two processes, a folder that cannot be used, eviction, and what keys an entry."""

import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import stat
import threading
import time
import warnings
from pathlib import Path

import filelock
import pytest

from flashgen.errors import CompileError, FlashgenError
from flashgen.lang import expr
from flashgen.lang.load import load_spec
from flashgen.planning import planner
from flashgen.runtime import cache, kernel, nvrtc
from flashgen.runtime.cache import Cache, CacheWarning

RESOURCES = nvrtc.Resources(registers=128, spill_stores=0, spill_loads=4, stack_bytes=8, smem_static=16)


def made(content: bytes = b"\x7fELF cubin", about=None):
    return nvrtc.Compiled(cubin=content, resources=RESOURCES, log="", seconds=0.5), about or {"variant": "causal"}


def refuse():
    raise AssertionError("a hit must not build")


@pytest.fixture
def folder(tmp_path):
    return Cache(folder=tmp_path / "deep" / "cache", limit=1 << 20)


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())


def test_a_miss_builds_and_a_hit_does_not(folder):
    first = folder.fetch("ab12", made)
    assert not first.hit and first.cubin == b"\x7fELF cubin"
    again = folder.fetch("ab12", refuse)
    assert again.hit and again.cubin == first.cubin and again.resources == RESOURCES
    assert again.about["variant"] == "causal" and again.about["bytes"] == len(first.cubin)


def test_folder_and_files_are_private(folder):
    folder.fetch("ab12", made)
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    for name in ("ab12.cubin", "ab12.json"):
        assert stat.S_IMODE((folder.folder / name).stat().st_mode) == 0o600


def test_sidecar_is_json_for_people(folder):
    folder.fetch("ab12", made)
    about = json.loads((folder.folder / "ab12.json").read_text())
    assert about["variant"] == "causal" and about["resources"]["registers"] == 128
    assert not list(folder.folder.glob("*.tmp"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "ab12.cubin").write_bytes(b"\x7fELF cu"),
        lambda f: (f / "ab12.cubin").write_bytes(b""),
        lambda f: (f / "ab12.cubin").unlink(),
        lambda f: (f / "ab12.json").unlink(),
        lambda f: (f / "ab12.json").write_text('{"key": "ab12", "cub'),
        lambda f: (f / "ab12.json").write_bytes(b"\xff\xfe\x00"),
        lambda f: (f / "ab12.json").write_text("[]"),
        lambda f: (f / "ab12.json").write_text("{}"),
        lambda f: (f / "ab12.json").write_text("null"),
        lambda f: (f / "ab12.json").write_text("[" * 200_000),
        lambda f: (f / "ab12.json").write_text('{"key": 1' + "0" * 5_000 + "}"),
        # What is beside the cubin is believed only as it was written.
        lambda f: (f / "ab12.json").write_text((f / "ab12.json").read_text().replace("128", "64")),
        lambda f: (f / "ab12.json").write_text((f / "ab12.json").read_text().replace('"causal"', '"full"')),
        lambda f: (f / "ab12.json").write_text((f / "ab12.json").read_text().replace('"bytes"', '"byte"')),
        lambda f: (f / "ab12.json").write_text((f / "ab12.json").read_text().replace('"checksum"', '"check"')),
        lambda f: (f / "ab12.json").write_text((f / "ab12.json").read_text().replace('"registers"', '"register"')),
        lambda f: (f / "ab12.json").write_text((f / "ab12.json").read_text().replace('"ab12"', '"ab13"')),
        lambda f: ((f / "ab12.json").unlink(), (f / "ab12.json").mkdir(), (f / "ab12.json").rmdir()),
    ],
)
def test_a_damaged_entry_is_built_again(folder, damage):
    folder.fetch("ab12", made)
    damage(folder.folder)
    again = folder.fetch("ab12", lambda: made(b"\x7fELF new"))
    assert not again.hit and again.cubin == b"\x7fELF new"
    assert folder.fetch("ab12", refuse).cubin == b"\x7fELF new"


def test_what_build_raises_comes_through_and_leaves_nothing(folder):
    def fail():
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        folder.fetch("ab12", fail)
    assert not list(folder.folder.glob("ab12*"))
    assert not folder.fetch("ab12", made).hit  # and the lock is free


def _fetch_slowly(path, started, counter):
    def build():
        with counter.get_lock():
            counter.value += 1
        time.sleep(0.3)
        return made()

    started.wait()
    assert Cache(folder=path, limit=1 << 20).fetch("ab12", build).cubin == b"\x7fELF cubin"


@pytest.mark.slow
def test_two_processes_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    started, counter = context.Event(), context.Value("i", 0)
    workers = [context.Process(target=_fetch_slowly, args=(tmp_path / "c", started, counter)) for _ in range(3)]
    for worker in workers:
        worker.start()
    started.set()
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert counter.value == 1


def test_threads_build_once_and_other_keys_do_not_wait(folder):
    built, go, both = [], threading.Barrier(5), threading.Barrier(2, timeout=10)

    def build(key):
        built.append(key)
        both.wait()  # passes only when "ab" and "cd" build at the same time
        return made()

    def work(key):
        go.wait()
        folder.fetch(key, lambda: build(key))

    threads = [threading.Thread(target=work, args=(key,)) for key in ("ab1", "ab1", "cd1", "cd1", "cd1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(built) == ["ab1", "cd1"]


def test_a_lock_that_never_frees_is_not_waited_for(folder, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    folder.folder.mkdir(parents=True)
    with folder._locked("ab12") as held:
        assert held
        assert folder.fetch("ab99", made).cubin  # shares the lock file of ab12


def check_one_warning(broken: Cache, reason: str):
    """The kernel is there each time; the first miss warns, the second says nothing more."""
    with pytest.warns(CacheWarning, match=reason) as caught:
        assert broken.fetch("ab12", made).cubin == b"\x7fELF cubin"
    assert len(caught) == 1
    assert "cannot write its kernel cache" in str(caught[0].message)
    assert "FLASHGEN_CACHE_DIR" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert broken.fetch("cd34", made).cubin == b"\x7fELF cubin"


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    check_one_warning(Cache(folder=tmp_path / "file" / "flashgen", limit=1 << 20), "Not a directory")


@pytest.mark.parametrize("mode", [None, 0o644, 0o666])
def test_a_path_that_is_no_folder_is_said_to_be_none(tmp_path, mode):
    path = tmp_path / "file"
    if mode is None:
        path = Path(os.devnull)
    else:
        path.write_text("")
        path.chmod(mode)
    with pytest.warns(CacheWarning, match="which is no folder(?s:.*)FLASHGEN_CACHE_BYTES=0") as caught:
        assert not Cache(folder=path, limit=1 << 20).fetch("ab12", made).hit
    assert len(caught) == 1 and "chmod" not in str(caught[0].message)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_is_not_used(tmp_path, monkeypatch, mode):
    mine = Cache(folder=tmp_path / "a cache", limit=1 << 20)
    assert not mine.fetch("ab12", made).hit and mine.fetch("ab12", made).hit
    mine.folder.chmod(mode)
    with pytest.warns(CacheWarning, match=f"which others may write .its mode is {mode:o}.") as caught:
        assert not mine.fetch("ab12", made).hit
        assert not mine.fetch("cd34", made).hit
    assert len(caught) == 1 and (f"chmod go-w '{mine.folder}'" in str(caught[0].message)) == (mode != 0o1777)
    assert not list(mine.folder.glob("cd34*"))
    mine.folder.chmod(0o755)
    assert mine.fetch("ab12", made).hit


def test_a_folder_of_someone_else_is_not_used(tmp_path, monkeypatch):
    theirs = Cache(folder=tmp_path, limit=1 << 20)
    tmp_path.chmod(0o755)
    assert not theirs.fetch("ab12", made).hit
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.warns(CacheWarning, match="it is of user"):
        assert not theirs.fetch("ab12", made).hit


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_root_does_not_use_a_folder_of_someone_else(tmp_path):
    theirs = Cache(folder=tmp_path, limit=1 << 20)
    tmp_path.chmod(0o700)
    assert not theirs.fetch("ab12", made).hit and theirs.fetch("ab12", made).hit
    os.chown(tmp_path, 12345, -1)
    with pytest.warns(CacheWarning, match="it is of user 12345, and this process runs as 0") as caught:
        assert not theirs.fetch("ab12", made).hit
        assert not theirs.fetch("cd34", made).hit
    assert len(caught) == 1 and "chmod" not in str(caught[0].message)
    assert not list(tmp_path.glob("cd34*"))


def test_a_folder_that_others_make_meanwhile_is_not_read(tmp_path, monkeypatch):
    """Between a look at a folder that is not there and the reading of it."""
    theirs = Cache(folder=tmp_path / "cache", limit=1 << 20)
    theirs.fetch("ab12", made)
    kept = (tmp_path / "cache").rename(tmp_path / "kept")
    kept.chmod(0o777)
    make = Cache._make_folder

    def late(self):
        if kept.exists():
            kept.rename(self.folder)
        make(self)

    monkeypatch.setattr(Cache, "_make_folder", late)
    with pytest.warns(CacheWarning, match="others may write"):
        assert not theirs.fetch("ab12", made).hit


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    check_one_warning(Cache(folder=tmp_path, limit=1 << 20), "Permission denied")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_folder_that_refuses_files(folder, monkeypatch, code):
    """A read-only file system, a folder of someone else, a full disk: no file can be made."""

    def refuse_to_open(path, flags, *rest, **named):
        if flags & os.O_CREAT and str(folder.folder) in str(path):
            raise OSError(code, os.strerror(code), path)
        return opened(path, flags, *rest, **named)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse_to_open)
    check_one_warning(folder, os.strerror(code))


def test_disk_that_fills_during_a_write(folder, monkeypatch):
    folder.fetch("0000", made)

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            self.file.write(content[:3])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = open
    monkeypatch.setattr(cache, "open", lambda *a: Full(opened(*a)), raising=False)
    check_one_warning(folder, "No space left on device")
    monkeypatch.undo()
    assert not list(folder.folder.glob("*.tmp")) and not list(folder.folder.glob("ab12*"))
    assert folder.fetch("0000", refuse).hit  # what was there is whole


def test_read_only_folder_still_hits(folder, monkeypatch):
    folder.fetch("ab12", made)

    def refuse_to_touch(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse_to_touch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.fetch("ab12", refuse).hit


def test_the_least_recently_used_entry_goes_first(tmp_path):
    small, keys = Cache(folder=tmp_path, limit=9_000), [f"{number:064x}" for number in range(4)]
    for number, key in enumerate(keys[:3]):
        small.fetch(key, lambda: made(bytes(2_500)))
        for kind in ("cubin", "json"):
            os.utime(tmp_path / f"{key}.{kind}", (number, number))
    assert small.fetch(keys[0], refuse).hit  # used again: now the youngest
    small.fetch(keys[3], lambda: made(bytes(2_500)))
    left = {keys[0], keys[2], keys[3]}
    assert {path.stem for path in tmp_path.glob("*.json")} == {path.stem for path in tmp_path.glob("*.cubin")} == left
    assert sum(path.stat().st_size for path in tmp_path.glob("0*")) <= 9_000


def test_what_is_no_entry_is_never_removed(tmp_path):
    """Nor does it stop what is."""
    small = Cache(folder=tmp_path, limit=9_000)
    for name in ("results.json", "draft.tmp", "kernel.cubin"):
        (tmp_path / name).write_bytes(bytes(20_000))
        os.utime(tmp_path / name, (1, 1))
    for name in (f"{99:064x}.json", ".flashgen-old.tmp", "plots.json"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(6):
            small.fetch(f"{number:064x}", lambda: made(bytes(2_500)))
    assert all((tmp_path / name).stat().st_size == 20_000 for name in ("results.json", "draft.tmp", "kernel.cubin"))
    assert sum(path.stat().st_size for path in tmp_path.glob("0*.cubin")) <= 9_000


def test_an_entry_that_others_may_have_written_is_built_again(folder):
    for kind in ("cubin", "json"):
        folder.fetch("ab12", made)
        (folder.folder / f"ab12.{kind}").chmod(0o666)
        assert not folder.fetch("ab12", made).hit
        assert folder.fetch("ab12", refuse).hit  # that one is our own


def test_folders_above_are_private_too(tmp_path):
    before = os.umask(0)
    try:
        Cache(folder=tmp_path / "a" / "b" / "c", limit=1 << 20).fetch("ab12", made)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


def test_a_lock_that_cannot_be_released_stops_nothing(folder, monkeypatch):
    released = filelock.FileLock.release

    def fails(self, *rest, **named):
        released(self, *rest, **named)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(filelock.FileLock, "release", fails)
    assert folder.fetch("ab12", made).cubin == b"\x7fELF cubin"


def test_half_an_entry_takes_no_room(folder, monkeypatch):
    replaced = os.replace

    def no_sidecar(source, target):
        if str(target).endswith(".json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replaced(source, target)

    monkeypatch.setattr(os, "replace", no_sidecar)
    with pytest.warns(CacheWarning, match="No space left on device"):
        folder.fetch("ab12", made)
    assert not list(folder.folder.glob("ab12*"))


def test_a_child_does_not_wait_for_a_thread_of_its_parent():
    """Which was building a kernel when it was forked."""
    plan = planner.menu(load_spec("full"), "sm_80", "bfloat16", 64).plans[0]
    slot = kernel._Slot(plan)
    with slot.lock, cache._warning, kernel._slots:
        kernel._kernels[plan] = slot
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            with cache._warning, kernel._slots:
                os._exit(0 if plan not in kernel._kernels else 1)
        kernel._kernels.pop(plan)
    assert os.waitpid(child, 0)[1] == 0


def test_an_entry_above_the_limit_is_not_kept(tmp_path):
    small = Cache(folder=tmp_path / "c", limit=1_000)
    small.fetch("k0", made)
    assert small.fetch("k1", lambda: made(bytes(2_000))).cubin == bytes(2_000)
    assert small.fetch("k0", refuse).hit and not small.fetch("k1", made).hit


def test_a_limit_of_zero_leaves_no_trace(tmp_path):
    none = Cache(folder=tmp_path / "c", limit=0)
    assert none.fetch("k0", made).cubin == b"\x7fELF cubin"
    assert not (tmp_path / "c").exists()


def test_what_dead_processes_left_is_swept(folder):
    folder.fetch("ab12", made)
    old, new = (folder.folder / f".flashgen-{name}.tmp" for name in ("old", "new"))
    old.write_text("x")
    new.write_text("x")
    os.utime(old, (1, 1))
    folder.fetch("cd34", made)
    assert not old.exists() and new.exists()


def test_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_CACHE_BYTES", "12345")
    assert cache.default() == Cache(folder=tmp_path, limit=12345)
    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.delenv("FLASHGEN_CACHE_BYTES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default() == Cache(folder=tmp_path / "xdg" / "flashgen", limit=cache.DEFAULT_LIMIT)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default().folder == tmp_path / ".cache" / "flashgen"


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user of a container: no HOME, no entry in the list of users; the folder of temporary files."""
    import pwd

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "FLASHGEN_CACHE_DIR", "FLASHGEN_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    return tmp_path


def test_without_a_home_the_cache_is_temporary_and_private(homeless):
    with pytest.warns(CacheWarning, match="has no home") as caught:
        assert not cache.default().fetch("ab12", made).hit
        assert cache.default().fetch("ab12", refuse).hit
    own = homeless / f"flashgen-{os.geteuid()}"
    assert len(caught) == 1 and str(own) in str(caught[0].message)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_temporary_folder_that_someone_made_for_us_is_not_used(homeless):
    own = homeless / f"flashgen-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.warns(CacheWarning) as caught:
        assert cache.default().fetch("ab12", made).cubin == b"\x7fELF cubin"
    assert [("has no home" in str(w.message), "others may write" in str(w.message)) for w in caught] == [
        (True, False),
        (False, True),
    ]
    assert not list(own.iterdir())


def test_without_a_home_and_without_a_folder_for_temporary_files(homeless, monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    def unwritable(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cache.tempfile, "gettempdir", none)
    monkeypatch.setattr(Cache, "_make_folder", unwritable)
    with pytest.warns(CacheWarning):
        assert cache.default().fetch("ab12", made).cubin == b"\x7fELF cubin"


def test_a_folder_in_a_home_that_there_is_not(homeless, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "~/kernels")
    with pytest.raises(FlashgenError, match="FLASHGEN_CACHE_DIR is '~/kernels', and that user has no home"):
        cache.default()


def test_no_cache_says_nothing_of_a_home(homeless, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_BYTES", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.default().fetch("ab12", made).cubin == b"\x7fELF cubin"
    assert not list(homeless.iterdir())


@pytest.mark.parametrize("text", ["1GB", "-1", "1.5"])
def test_a_limit_that_is_no_number_of_bytes(monkeypatch, text):
    monkeypatch.setenv("FLASHGEN_CACHE_BYTES", text)
    with pytest.raises(FlashgenError, match=f"FLASHGEN_CACHE_BYTES is '{text}': it must be a whole number of bytes"):
        cache.default()


def test_data_of_nodes_tells_meaning_apart():
    def visible(bound):
        return expr.node("le", expr.DType.BOOL, (expr.node("index", expr.DType.INT32, (), "k"), expr.const(bound)))

    assert cache.as_data(visible(1)) == cache.as_data(visible(1)) != cache.as_data(visible(2))
    with pytest.raises(TypeError, match="set has no place in a cache key"):
        cache.as_data({1})


def test_data_skips_only_what_equality_skips():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Value:
        number: float
        parts: tuple[int, ...]
        origin: object = dataclasses.field(default=None, compare=False)

    one = Value(number=1.0, parts=(1, 2), origin=object())
    assert cache.as_data(one) == {"type": "Value", "number": 1.0, "parts": [1, 2]}
    assert json.dumps(cache.as_data(one)) != json.dumps(cache.as_data(Value(number=1, parts=(1, 2))))
