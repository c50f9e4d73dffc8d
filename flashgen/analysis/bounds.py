"""A mask as bounds of positions and the rest: where no bound cuts a tile, pairs are asked for the rest alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, reduce

from flashgen.analysis.facts import Facts, analyse
from flashgen.lang.build import apply
from flashgen.lang.expr import Node, depends_on, walk
from flashgen.lang.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A mask that holds where both do: `bounds`, the facts of its conditions that zones alone judge, and `rest`."""

    bounds: Facts
    rest: Node


@lru_cache(maxsize=256)
def bounded(variant: Variant) -> Bounded | None:
    """The mask of a variant whose constants are bound, where it is a conjunction of bounds and of something else that
    reads nothing; else None."""
    if variant.mask is None:
        return None
    alone = {n: analyse(replace(variant, mask=n, score_node=None, sink_node=None)) for n in _conjuncts(variant.mask)}
    bounds = [n for n, facts in alone.items() if facts.exact and facts.hidden and _by_positions(n)]
    rest = [n for n in alone if n not in bounds]
    if not bounds or not rest or any(n.op == "load" for n in walk(rest)):
        return None
    asked = replace(variant, mask=_all(bounds), score_node=None, sink_node=None)
    return Bounded(bounds=analyse(asked), rest=_all(rest))


def _conjuncts(n: Node) -> list[Node]:
    """The conditions that all hold where the mask does."""
    return [one for side in n.operands for one in _conjuncts(side)] if n.op == "logical_and" else [n]


def _by_positions(n: Node) -> bool:
    return depends_on(n, "q", "k") and not any(one.op == "load" for one in walk([n]))


def _all(conditions: list[Node]) -> Node:
    return reduce(lambda a, b: apply("logical_and", a, b), conditions)
