"""Measured records: what candidates took on a GPU, as an input to the planner where its model does not decide.

A record is one JSON file for (arch, pipeline, pass), written by `flashgen tune`.  It holds an entry for each class of
variants that was measured: kind of mask, score function or not, padded head dims.  Both 16-bit types share an entry.
An entry keeps the median of every measured candidate on every shape, and the machine it was measured on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flashgen import jsonfile
from flashgen.errors import PlanError, shown
from flashgen.lang.variant import Variant
from flashgen.planning.profile import profile
from flashgen.planning.request import KernelRequest

#: Of the file; another one is refused.
FORMAT = 1

#: A folder whose records stand before the shipped ones.
VARIABLE = "FLASHGEN_RECORDS"

_SHIPPED = Path(__file__).parent / "records"

#: Head dims are padded to this many columns by every pipeline, and tiles have a multiple of as many rows.
_COLUMNS = 16

#: What a record's numbers reach at most: sizes of a problem, head dims, rows of a tile, stages and blocks of an SM, ms.
_LARGEST, _LARGEST_HEAD_DIM, _LARGEST_TILE, _MOST, _LONGEST_MS = 1 << 24, 1 << 12, 1 << 10, 32, 1e9


class Key(NamedTuple):
    """The class of variants that share an entry; head dims are padded."""

    mask: str  # "none" | "band": one run of keys, nothing read | "general"
    score: bool
    head_dim: int
    v_head_dim: int

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.v_head_dim else f"d{self.head_dim}x{self.v_head_dim}"
        mask = "no mask" if self.mask == "none" else f"{self.mask} mask"
        return f"{dims}, {mask}{', score' if self.score else ''}"


class Shape(NamedTuple):
    """Sizes of a measured problem."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    def __str__(self) -> str:
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} queries x {self.kv_len} keys"
        return f"batch {self.batch}, heads {self.heads}, {lengths}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One candidate: its fields as the pipeline's Candidate has them, and the median milliseconds on each shape."""

    form: tuple[tuple[str, Any], ...]
    blocks_per_sm: int
    ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What was measured for one class; `name` is for a person."""

    name: str
    key: Key
    shapes: tuple[Shape, ...]
    candidates: tuple[Timed, ...]


def key(variant: Variant, head_dim: int, v_head_dim: int) -> Key:
    """The class of a variant whose constants are bound."""
    return Key(
        _mask(variant), variant.score_node is not None, *(-(-d // _COLUMNS) * _COLUMNS for d in (head_dim, v_head_dim))
    )


def _mask(variant: Variant) -> str:
    """The kind of mask: what it asks of registers and of the schedule differs."""
    asked = profile(variant)
    return "none" if not asked.masked else "band" if asked.band else "general"


def file_name(arch: str, pipeline: str, pass_name: str) -> str:
    """What the record of (arch, pipeline, pass) is called in its folder."""
    return f"{arch}_{pipeline}_{pass_name}.json"


def find(pipeline: str, request: KernelRequest) -> Entry | None:
    """The entry for a request, of the user's folder or else a shipped one; None: nothing measured.

    Raises PlanError for a damaged record, and where the user's folder is none.
    """
    name = file_name(request.arch.name, pipeline, request.pass_name)
    user = os.environ.get(VARIABLE)
    if user and not Path(user).is_dir():
        raise PlanError(f"{VARIABLE} is {user!r}, and there is no such folder\n  nearest: unset {VARIABLE}")
    for folder in (Path(user), _SHIPPED) if user else (_SHIPPED,):
        entries = load(folder / name)
        if entries and (found := entries.get(key(request.variant, request.head_dim, request.v_head_dim))):
            return found
    return None


@lru_cache(maxsize=64)
def load(path: Path) -> dict[Key, Entry]:
    """The entries of a record by class; none where there is no such file.  Raises PlanError for a damaged one."""
    try:
        data = jsonfile.checked(jsonfile.read(path), dict, "it")
        if (written := jsonfile.member(data, "format", int)) != FORMAT:
            raise ValueError(f"its format is {written} and not {FORMAT}")
        entries: dict[Key, Entry] = {}
        for number, raw in enumerate(jsonfile.member(data, "entries", list), 1):
            try:
                entry = _entry(path.stem, jsonfile.checked(raw, dict, "it"))
                if entry.key in entries:
                    raise ValueError("another one has its class")
            except ValueError as error:
                raise ValueError(f"entry {number}: {error}") from None
            entries[entry.key] = entry
        return entries
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PlanError(
            f"the record {path} cannot be used: {error}\n"
            "  nearest: remove it, or move it away: candidates are ordered by prediction then, until `flashgen tune`"
            " writes it again"
        ) from error


def _entry(stem: str, raw: dict[str, Any]) -> Entry:
    """An entry out of JSON; raises ValueError where it is not one."""
    of = jsonfile.member(raw, "class", dict)
    found = Key(
        _one_of(of, "mask", ("none", "band", "general")),
        jsonfile.member(of, "score", bool),
        *(_size(of, name, _COLUMNS, _LARGEST_HEAD_DIM) for name in ("head_dim", "v_head_dim")),
    )
    shapes = tuple(
        Shape(*(_size(jsonfile.checked(shape, dict, "a shape"), name, 1, _LARGEST) for name in Shape._fields))
        for shape in jsonfile.member(raw, "shapes", list)
    )
    timed = tuple(
        _timed(jsonfile.checked(c, dict, "a candidate"), len(shapes)) for c in jsonfile.member(raw, "candidates", list)
    )
    if not shapes or not timed:
        raise ValueError(f"the entry of {found} is empty")
    return Entry(name=f"{stem}: {found}", key=found, shapes=shapes, candidates=timed)


def _timed(raw: dict[str, Any], shapes: int) -> Timed:
    fields = jsonfile.member(raw, "form", dict)
    tile = jsonfile.member(fields, "tile", dict)
    if set(tile) != {"q", "kv"}:
        raise ValueError(f"the tile has {', '.join(map(repr, tile)) or 'nothing'}, and must have 'q' and 'kv'")
    tile = {name: _size(tile, name, _COLUMNS, _LARGEST_TILE, _COLUMNS) for name in ("q", "kv")}
    others = {name: jsonfile.checked(fields[name], (int, bool), repr(name)) for name in fields if name != "tile"}
    _size(fields, "stages", 1, _MOST)
    ms = [jsonfile.checked(one, (int, float), "a time") for one in jsonfile.member(raw, "ms", list)]
    if len(ms) != shapes or not all(0 < one < _LONGEST_MS for one in ms):
        raise ValueError(f"a candidate has no time for each of its {shapes} shapes, in ms above 0")
    return Timed(
        form=form({"tile": tile, **others}),
        blocks_per_sm=_size(raw, "blocks_per_sm", 1, _MOST),
        ms=tuple(map(float, ms)),
    )


def _size(data: dict[str, Any], name: str, least: int, most: int, step: int = 1) -> int:
    value = jsonfile.member(data, name, int)
    if not least <= value <= most or value % step:
        steps = f" in steps of {step}" if step > 1 else ""
        raise ValueError(f"{name!r} is {shown(value)}, and must lie between {least} and {most}{steps}")
    return value


def _one_of(data: dict[str, Any], name: str, values: tuple[str, ...]) -> str:
    if (value := jsonfile.member(data, name, str)) not in values:
        raise ValueError(f"{name!r} is {shown(value)}, and must be one of {', '.join(map(repr, values))}")
    return value


def form(fields: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """A candidate's fields as a value: what says that two candidates are the same."""
    return tuple(sorted((name, tuple(v.values()) if isinstance(v, dict) else v) for name, v in fields.items()))
