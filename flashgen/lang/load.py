"""Spec files: run one and find its variant."""

from __future__ import annotations

import importlib.abc
import importlib.util
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from flashgen.errors import SourceLine, SpecError
from flashgen.lang import source
from flashgen.lang.variant import Variant

_one_at_a_time = threading.RLock()


def load_spec(path: str | os.PathLike) -> Variant:
    """The variant of a spec file: the one that no other Variant of the file was built from; it knows its `spec`.

    The file may import specs that lie beside it.  The bare name of a shipped spec works too.  Raises SpecError, at the
    user's line where there is one, for a file that is missing, is not Python, raises, or has no variant or several.
    """
    file = _find(Path(path))
    with _one_at_a_time, _siblings(file.parent):
        module = _run(file)
    known = shipped().get(file.stem)
    return replace(_choose(module, file), spec=file.stem if known and known.resolve() == file else file.name)


def shipped() -> dict[str, Path]:
    """The specs that come with flashgen, by name."""
    from flashgen.resources import folder

    return {file.stem: file for file in sorted(folder("specs").glob("*.py"))}


def _find(path: Path) -> Path:
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        specs = ", ".join(sorted(f.name for f in path.glob("*.py"))) or "none"
        raise SpecError(f"{path} is a folder; name one of its specs: {specs}")
    known = shipped()
    if path.name in known and path.parent == Path():
        return known[path.name].resolve()
    beside = [str(f) for f in path.parent.glob("*.py")] if path.parent.is_dir() else []
    raise SpecError(
        f"there is no spec file {path}{source.nearest(str(path), [*beside, *known])};"
        f" shipped specs, by name: {', '.join(known)}"
    )


def _run(file: Path) -> ModuleType:
    linecache.checkcache(str(file))  # a file that changed since the last load shows its new lines
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    try:
        text = file.read_bytes()
        exec(compile(text, str(file), "exec"), module.__dict__)
    except SpecError:
        raise
    except SyntaxError as error:
        if error.filename is None:  # not even text
            raise SpecError(f"{file} is not Python: {error.msg}") from error
        raise source.as_spec_error(error) from error
    except (Exception, SystemExit) as error:
        raise source.as_spec_error(error, folder=str(file.parent)) from error
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
    built_upon = {id(ancestor) for _, value in mine.values() for ancestor in _ancestors(value)}
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


def _ancestors(variant: Variant) -> Iterator[Variant]:
    for parent in variant.parents:
        yield parent
        yield from _ancestors(parent)


class _Siblings(importlib.abc.MetaPathFinder):
    """Finds `import causal` beside the spec that is being run; names of the standard library stay Python's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None):
        file = self.folder / f"{name}.py"
        if path is not None or name in sys.stdlib_module_names or not file.is_file():
            return None
        return importlib.util.spec_from_file_location(name, file)


@contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Specs of one folder import each other by name while one of them runs, and leave no module behind."""
    names = {file.stem for file in folder.glob("*.py")} - sys.stdlib_module_names
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = _Siblings(folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
