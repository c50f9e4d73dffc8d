"""The integers of a kernel that the planner chooses and a call may fix: a row each, from which all else follows.

To add one: a field of `Integers` with its row here; in each pipeline that has it its values (`INTEGERS`), and a field
of that name in its Candidate, by which candidates differ; and what the template makes of it (`plan.<name>`).  From
these follow the option of the command line, plan() and supports(), the field of the plan and of the cache's key, what
`flashgen plan` shows, the command in a kernel's banner, and why other pipelines refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer:
    """How one of them is spoken of; `{}` is its value, `{rule}`, `{low}` and `{high}` what a pipeline allows."""

    passes: tuple[str, ...]
    help: str  # on the command line
    shown: Callable[[int], str]  # in a plan
    counts: str
    asked: str
    limit: str
    nearest: str
    kind: str | None = None  # what a value is, where "a whole number" says too little
    example: int | None = None  # nearest to what is no whole number
    absent: str = "pipeline {pipeline!r} has no such choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The values, in order, that a pipeline has kernels for, and why no others."""

    values: tuple[int, ...]
    rule: str

    def nearest(self, value: int) -> int:
        """The one that comes closest."""
        return min(self.values, key=lambda one: abs(one - value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """The integers of a plan, or those that are fixed; None: the kernel has none, or nobody fixed it."""

    stages: int | None = field(
        default=None,
        metadata={
            "row": Integer(
                passes=("forward", "backward"),
                help="Tiles of keys in shared memory (of queries in a backward): checked, never changed.",
                shown=lambda n: f"{n} stage{'s' if n > 1 else ''}",
                counts="stages",
                asked="{} stages",
                limit="{rule}, so {low} to {high} work",
                nearest="{} stages",
            )
        },
    )
    q_stages: int | None = field(
        default=None,
        metadata={
            "row": Integer(
                passes=("forward",),
                help="Tiles of queries in shared memory, 1 or 2, of a forward on Hopper: checked, never changed.",
                shown=lambda n: f"{n} of queries",
                counts="tiles of queries",
                asked="{} tiles of queries in shared memory",
                limit="{rule}",
                nearest="q_stages={}",
                kind="1 or 2",
                example=2,
                absent="blocks of pipeline {pipeline!r} load their one tile of queries once",
            )
        },
    )

    def integers(self) -> dict[str, int]:
        """Those that are given, by name."""
        return {name: value for name in INTEGERS if (value := getattr(self, name)) is not None}


#: Every row by its name.
INTEGERS: Mapping[str, Integer] = MappingProxyType({f.name: f.metadata["row"] for f in fields(Integers)})


def shown(integers: Integers) -> str:
    """Those of a plan in a line: "2 stages, 1 of queries"."""
    return ", ".join(INTEGERS[name].shown(value) for name, value in integers.integers().items())
