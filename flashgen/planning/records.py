"""Measured records: what candidates took on a GPU, as an input to the planner where its model does not decide.

A record is one JSON file for (arch, pipeline, pass), written by `flashgen tune`.  It holds an entry for each class of
variants that was measured: kind of mask, score function or not, padded head dims.  Both 16-bit types share an entry.
An entry keeps the median of every measured candidate on every shape, and the machine it was measured on.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from flashgen.analysis.facts import analyse
from flashgen.errors import PlanError
from flashgen.lang.variant import Variant

#: Of the file; another one is refused.
FORMAT = 1

#: A folder whose records stand before the shipped ones.
VARIABLE = "FLASHGEN_RECORDS"

_SHIPPED = Path(__file__).parent / "records"

#: Head dims are padded to this many columns by every pipeline.
_COLUMNS = 16


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

    form: tuple[tuple[str, object], ...]
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
    if variant.mask is None:
        return "none"
    facts = analyse(variant)
    return "band" if facts.exact and len(facts.visible) == 1 and not variant.tensors else "general"


def file_name(arch: str, pipeline: str, pass_name: str) -> str:
    """What the record of (arch, pipeline, pass) is called in its folder."""
    return f"{arch}_{pipeline}_{pass_name}.json"


def find(arch: str, pipeline: str, pass_name: str, variant: Variant, head_dim: int, v_head_dim: int) -> Entry | None:
    """The entry for a variant (constants bound), of the user's folder or else a shipped one; None: nothing measured.

    Raises PlanError for a damaged record.
    """
    name = file_name(arch, pipeline, pass_name)
    user = os.environ.get(VARIABLE)
    for folder in (Path(user), _SHIPPED) if user else (_SHIPPED,):
        entries = load(folder / name)
        if entries and (found := entries.get(key(variant, head_dim, v_head_dim))):
            return found
    return None


@lru_cache(maxsize=64)
def load(path: Path) -> dict[Key, Entry]:
    """The entries of a record by class; none where there is no such file.  Raises PlanError for a damaged one."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r} is not {FORMAT}")
        return {entry.key: entry for entry in (_entry(path.stem, raw) for raw in data["entries"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"the record {path} cannot be used: {type(error).__name__}: {error}\n"
            f"  nearest: write it again with `flashgen tune`, or remove it"
        ) from error


def _entry(stem: str, raw: dict) -> Entry:
    """An entry out of JSON; raises KeyError, TypeError or ValueError where it is not one."""
    found = Key(**raw["class"])
    shapes = tuple(Shape(**shape) for shape in raw["shapes"])
    timed = tuple(
        Timed(
            form=form(c["form"]),
            blocks_per_sm=int(c["blocks_per_sm"]),
            ms=tuple(float(ms) for ms in c["ms"]),
        )
        for c in raw["candidates"]
    )
    if not shapes or not timed:
        raise ValueError(f"the entry {found} is empty")
    for one in timed:
        if len(one.ms) != len(shapes) or not all(0 < ms < float("inf") for ms in one.ms):
            raise ValueError(f"the entry {found} has no time for each of its {len(shapes)} shapes")
    return Entry(name=f"{stem}: {found}", key=found, shapes=shapes, candidates=timed)


def form(fields: dict) -> tuple[tuple[str, object], ...]:
    """A candidate's fields as a value: what says that two candidates are the same."""
    return tuple(sorted((name, tuple(v.values()) if isinstance(v, dict) else v) for name, v in fields.items()))
