"""Which way each part of a mask is decided for a tile, and the one change that would settle more: for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flashgen.analysis import tiles
from flashgen.analysis.cells import Cells
from flashgen.analysis.counts import Loss
from flashgen.analysis.equalities import substituted
from flashgen.analysis.facts import analyse
from flashgen.analysis.summaries import unknown
from flashgen.analysis.tiles import Case, Tiling
from flashgen.lang.build import rebuild
from flashgen.lang.expr import Node, Tensor, node, walk
from flashgen.lang.variant import Variant

#: A change is named where it takes away this share of what is visited, or masked, for nothing.
WORTH = 0.5

#: With more tiles than this no change is looked for.
MOST_TILES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A condition of a mask, and how it is decided: by `bounds` of the keys that a tile of queries sees; over a tile by
    `ranges` of values; so, with `summaries` of what only data tell; or only pair by pair, where tensors are read of
    which a tile knows no more than is declared.

    `cells` are those by which tiles are cut, `unknown` the names of such tensors, and of those that are summarised.
    """

    condition: Node
    way: Literal["bounds", "ranges", "summaries", "pairs"]
    cells: Cells | None
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        if self.way == "bounds":
            return "closed form: bounds of the keys that a tile of queries sees"
        if self.way == "pairs":
            named = ", ".join(map(repr, self.unknown))
            return f"pair by pair: of a tile's elements of {named} no more is known than what is declared"
        said = "tile by tile, over ranges of values"
        if self.cells is not None:
            sides = ((self.cells.q, "queries"), (self.cells.k, "keys"))
            said += ", by parts of " + " and ".join(f"{cell} {what}" for cell, what in sides if cell is not None)
        if self.way == "summaries":
            named = ", ".join(map(repr, self.unknown)) or "bits that are put together"
            said += f"; those of {named} are found for each tile first, in the same call"
        return said


def parts(variant: Variant) -> tuple[Part, ...]:
    """The conditions that a mask (constants bound) joins by &, | and ~, each with how it is decided."""
    if variant.mask is None:
        return ()
    return tuple(_part(variant, condition) for condition in _conditions(substituted(variant.mask)))


def _conditions(mask: Node) -> Iterator[Node]:
    joins = ("logical_and", "logical_or", "logical_not")
    stack, seen = [mask], set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op in joins:
            stack.extend(reversed(n.operands))
        elif n.op != "const":
            yield n


def _part(variant: Variant, condition: Node) -> Part:
    facts = analyse(replace(variant, mask=condition, score_node=None))
    known = {one.value for one in facts.summaries}
    left = (n for n in walk([condition], into=lambda n: n not in known) if n not in known)
    unbounded = _named(left) if not facts.exact else ()
    summarised = _named(walk(known)) if not facts.exact else ()
    way: Any = "bounds" if facts.exact else "pairs" if unbounded else "summaries" if known else "ranges"
    return Part(condition=condition, way=way, cells=facts.cells, unknown=unbounded or summarised)


def _named(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The tensors of which a tile meets many elements that nothing orders."""
    return tuple(dict.fromkeys(n.attr.name for n in nodes if n.op == "load" and unknown(n)))


# ---------------------------------------------------------------------------------------------------------------------
# What would settle more


def cure(variant: Variant, case: Case, tile: Tiling, loss: Loss, *, b: int = 0, h: int = 0) -> str | None:
    """The one change of a declaration, or of what is captured, by which fewer tiles would be visited or masked for
    nothing; None where nothing is lost, or there are too many tiles to see.

    A promise is named only if the data keep it and it was tried.
    """
    told = parts(variant)
    unsettled = {name for part in told for name in part.unknown}
    counted = tiles.tiles_of(case.sizes["q_len"], tile.q) * tiles.tiles_of(case.sizes["kv_len"], tile.kv)
    if loss.exact or counted > MOST_TILES:
        return None
    # A promise about what selects elements of a tensor may settle what none about the tensor does.
    asked = unsettled | _selecting(variant, unsettled)
    tensors = [tensor for tensor in variant.tensors if tensor.name in asked]
    before = _cost(variant, case, tile, b, h)
    truth = loss.seen + loss.cut
    wasted = before * (1 - truth / (loss.visited + loss.masked))  # of this batch and head
    tried = [(_cost(_with(variant, to), case, tile, b, h), to) for one in tensors for to in _promises(one, case)]
    best = min(tried, key=lambda pair: pair[0], default=None)
    if best is not None and before - best[0] >= WORTH * wasted:
        return f"fg.tensor({best[1].name!r}, ..., {_promised(best[1])}) would settle more tiles: these data keep it"
    for tensor in tensors:
        if (said := _recaptured(tensor, case.tensors[tensor.name])) is not None:
            return said
    names = ", ".join(repr(tensor.name) for tensor in tensors if tensor.name in unsettled)
    if not names:
        return None
    why = "only its elements tell" if any(part.way == "pairs" for part in told) else "elements of a tile lie far apart"
    return f"no promise about {names} would settle more tiles: {why}"


def _selecting(variant: Variant, names: Set[str]) -> set[str]:
    """The tensors whose elements select elements of these."""
    loads = (n for n in walk([variant.mask] if variant.mask is not None else []) if n.op == "load")
    inner = walk([o for n in loads if n.attr.name in names for o in n.operands])
    return {n.attr.name for n in inner if n.op == "load"}


def _cost(variant: Variant, case: Case, tile: Tiling, b: int, h: int) -> int:
    """Tiles visited, and those masked once more."""
    found = tiles.grid(analyse(variant), case, tile, b, h)
    return int((found != tiles.EMPTY).sum() + (found == tiles.PARTIAL).sum())


def _promises(tensor: Tensor, case: Case) -> Iterator[Tensor]:
    """The tensor with one promise more that its data keep."""
    array = case.tensors[tensor.name]
    if tensor.dtype == "bool" or array.size == 0 or np.isnan(array).any():
        return
    if not tensor.sorted and (np.diff(array, axis=-1) >= 0).all():
        yield replace(tensor, sorted=True)
    low, high = array.min().item(), array.max().item()
    if tensor.min != low or tensor.max != high:
        yield replace(tensor, min=low, max=high)


def _promised(tensor: Tensor) -> str:
    return "sorted=True" if tensor.sorted else f"min={tensor.min:g}, max={tensor.max:g}"


def _with(variant: Variant, tensor: Tensor) -> Variant:
    """The variant with another declaration of that tensor."""

    def declared(n: Node) -> Node | None:
        if n.op == "load" and n.attr.name == tensor.name:
            return node(n.op, n.dtype, n.operands, replace(tensor, example=n.attr.example), n.where)
        return None

    return replace(variant, mask=rebuild(variant.mask, declared), score_node=None)


def _recaptured(tensor: Tensor, array: np.ndarray) -> str | None:
    """What else could be captured, by how these data look."""
    if array.ndim == 0 or array.shape[-1] < 2:
        return None
    if tensor.dtype == "bool":
        if not (array[..., 1:] & ~array[..., :-1]).any():
            return (
                f"{tensor.name!r} is true up to a length: captured as such (dtype='int32', one for each row), and"
                " compared with the position, it bounds the keys that are visited"
            )
        return None
    new = np.diff(array, axis=-1) != 0
    runs = new.sum(axis=-1) + 1
    values = [len(np.unique(row)) for row in array.reshape(-1, array.shape[-1])]
    if (
        "int" in tensor.dtype
        and not tensor.sorted
        and runs.ravel().tolist() == values
        and 1 < max(values) <= array.shape[-1] // 8
    ):
        return (
            f"{tensor.name!r} has runs of equal values in no order: numbered upwards and declared sorted=True, they"
            " settle more tiles"
        )
    return None
