"""Spec files: run one and find its variant."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import linecache
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import source
from flashgen.lang.variant import Variant
from flashgen.locks import Lock
from flashgen.resources import folder

_one_at_a_time = Lock(threading.RLock)
_numbers = itertools.count()

#: Characters of a path that an error shows.
_SHOWN = 120


def load_spec(path: str | os.PathLike) -> Variant:
    """The variant of a spec file: the one that no other Variant of the file was built from; it knows its `spec`.

    The file may import modules that lie beside it; installed packages keep their names.  The bare name of a shipped
    spec works too.  Raises SpecError, at the user's line where there is one, for a file that is missing, cannot be
    read, is not Python, raises, or has no variant or several.
    """
    file = _find(_path(path))
    with _one_at_a_time, _siblings(file.parent):
        module = _run(file)
    known = _known().get(file.stem)
    return replace(_choose(module, file), spec=file.stem if known and known.resolve() == file else file.name)


def shipped() -> dict[str, Path]:
    """The specs that come with flashgen and whose kernels are kept in `generated`, by name."""
    return {file.stem: file for file in sorted(folder("specs").glob("*.py"))}


def gallery() -> dict[str, Path]:
    """The masks of real models that come with flashgen beside them, by name."""
    return {file.stem: file for file in sorted((folder("specs") / "masks").glob("*.py"))}


def _known() -> dict[str, Path]:
    return shipped() | gallery()


def _path(given: object) -> Path:
    """What was asked for, as a path."""
    try:
        text = os.fsdecode(given)
    except TypeError:
        raise SpecError(f"a spec is a path or the name of a shipped spec, and got {given!r}; {_shipped()}") from None
    if not text:
        raise SpecError(f"the path of the spec is empty; {_shipped()}")
    return Path(text)


def _shipped() -> str:
    return f"shipped specs, by name: {', '.join(_known())}"


def _find(path: Path) -> Path:
    known = _known()
    try:
        if path.is_file():
            return path.resolve()
        if path.is_dir():
            specs = ", ".join(sorted(f.name for f in path.glob("*.py"))) or "none"
            raise SpecError(f"{path} is a folder; name one of its specs: {specs}")
        if path.name in known and path.parent == Path():
            return known[path.name].resolve()
        if path.is_symlink():
            raise SpecError(f"{path} is a link to {path.readlink()}, where there is no file; {_shipped()}")
        beside = [str(f) for f in path.parent.glob("*.py") if f.is_file()] if path.parent.is_dir() else []
    except OSError as error:  # a name that is too long, a folder that is closed to us
        asked = str(path) if len(str(path)) <= _SHOWN else f"{str(path)[:_SHOWN]}..."
        raise SpecError(f"cannot look for the spec {asked}: {error.strerror}; {_shipped()}") from None
    raise SpecError(f"there is no spec file {path}{source.nearest(str(path), [*beside, *known])}; {_shipped()}")


def _read(file: Path) -> bytes:
    """The bytes of a spec that Python can decode."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the spec {file}: {error.strerror}; give a file that you may read") from None
    try:
        importlib.util.decode_source(text)
    except (UnicodeDecodeError, SyntaxError) as error:
        raise SpecError(
            f"{file} is not Python: {error}; save it as UTF-8, or name its encoding in the first line, as in"
            " # coding: latin-1"
        ) from None
    return text


def _run(file: Path) -> ModuleType:
    linecache.checkcache(str(file))  # a file that changed since the last load shows its new lines
    text = _read(file)
    module = ModuleType(f"_flashgen_spec_{next(_numbers)}_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where a dataclass looks up postponed annotations
    try:
        exec(compile(text, str(file), "exec"), module.__dict__)
    except SpecError:
        raise
    except SyntaxError as error:
        if error.filename is None:  # not even text
            raise SpecError(f"{file} is not Python: {error.msg}") from error
        raise source.as_spec_error(error) from error
    except (Exception, SystemExit) as error:
        raise source.as_spec_error(error, folder=str(file.parent)) from error
    finally:
        del sys.modules[module.__name__]
    return module


def _choose(module: ModuleType, file: Path) -> Variant:
    mine: dict[int, tuple[str, Variant]] = {}
    imported = []
    for name, value in vars(module).items():
        if not isinstance(value, Variant):
            continue
        if value.file != str(file):
            imported.append(name)
        elif id(value) not in mine or name == value.name:
            mine[id(value)] = (name, value)
    built_upon = _ancestors(value for _, value in mine.values())
    final = [(name, value) for name, value in mine.values() if id(value) not in built_upon]
    if len(final) == 1:
        name, value = final[0]
        doc = value.doc or (module.__doc__ or "").strip()
        return replace(value, name=_name(name, value, mine), doc=doc)
    at = SourceLine(str(file), 1, linecache.getline(str(file), 1))
    if final:
        names = " and ".join(f"{name!r} ({_line(v, file)})" for name, v in final)
        raise SpecError(
            f"the spec has {len(final)} variants, {names}: a spec file describes one; build one from the others"
            " (with &, | or .then) or move one to a file of its own",
            where=at,
        )
    note = f"; it imports {', '.join(imported)}, which other files describe" if imported else ""
    raise SpecError(f"the spec has no variant{note}: decorate a function (b, h, q, k) with @fg.variant", where=at)


def _name(variable: str, variant: Variant, mine: dict[int, tuple[str, Variant]]) -> str:
    """The name of the variable that holds the variant; of the mask's, where a score function was added by decorating
    it: the function that then has the variable's name says what is computed, and not of what."""
    if variant.where is not None and variant.where.text.lstrip().startswith("@") and variant.score_node is not None:
        for parent in variant.parents:
            masked, _ = mine.get(id(parent), ("_", parent))
            if parent.mask is not None and not masked.startswith("_"):
                return masked
    return variant.name if variable.startswith("_") else variable


def _line(variant: Variant, file: Path) -> str:
    if variant.where.path == str(file):
        return f"line {variant.where.line}"
    return f"{variant.where.path}:{variant.where.line}"


def _ancestors(variants: Iterable[Variant]) -> dict[int, Variant]:
    """What the variants were built from, each once, by id."""
    found: dict[int, Variant] = {}
    stack = [parent for variant in variants for parent in variant.parents]
    while stack:
        variant = stack.pop()
        if id(variant) not in found:
            found[id(variant)] = variant
            stack.extend(variant.parents)
    return found


class _Siblings(importlib.abc.MetaPathFinder):
    """Finds `import causal` beside the spec that is being run."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if path is not None or name not in self.files:
            return None
        return importlib.util.spec_from_file_location(name, self.files[name])


def _is_taken(name: str) -> bool:
    """Whether a name is Python's own, flashgen's or an installed package's: no file beside a spec takes it."""
    if name in sys.stdlib_module_names or name == __package__.partition(".")[0]:
        return True
    installed = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    return importlib.machinery.PathFinder.find_spec(name, installed) is not None


@contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Specs of one folder import each other by name while one of them runs, and leave no module behind."""
    names = {file.stem: file for file in folder.glob("*.py") if not _is_taken(file.stem)}
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = _Siblings(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
