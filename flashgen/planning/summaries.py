"""Summaries of a plan: over how many positions each is made, and the memory that holds them.

What is summarised follows from the mask (`analysis.summaries`).  A kernel of its own finds it in the same call, before
the one that visits tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flashgen.analysis.facts import analyse
from flashgen.lang.expr import DType, walk
from flashgen.planning.plan import Part, RowBits, Tile, TileSummary

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.summaries import Summary
    from flashgen.lang.expr import Node, Tensor
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

#: The kernel that makes them.
ENTRY = "attention_summaries"

#: Threads of its blocks, a warp for each summary.
THREADS = 256

#: Bytes of what bounds a value, by its C++ type.
_BYTES = {"Truth": 2, "FloatRange": 24, "Range<int>": 8, "Range<i64>": 16}

#: Keys whose bits are a word; queries whose rows of bits a warp makes: enough warps that reading waits little.
WORD, ROWS = 32, 32


def tile_summaries(facts: Facts, tile: Tile, bits: RowBits | None = None) -> tuple[TileSummary, ...]:
    """Those of a mask over tiles of so many queries and keys: where cells cut tiles, over what divides both.  `bits`:
    how the values of `pair_tables` are kept."""
    if not facts.hidden:
        return ()
    of = _parts(facts, tile)
    parts = {side: math.gcd(size, ROWS) if bits is not None and bits.by == side else size for side, size in of.items()}
    kept = pair_tables(facts) if bits is not None else ()
    return tuple(
        TileSummary(
            name=one.name,
            side=one.side,
            positions=(parts if one in kept else of)[one.side[0]],
            keys=(parts if one in kept else of)["k"] if one.side == "qk" else 0,
            steps=one.steps,
            range_type=(kind := _range_type(one, facts)),
            itemsize=_BYTES[kind] * (2 if one.grouped else 1),
            grouped=one.grouped,
            by_batch=one.by_batch,
            by_head=one.by_head,
            tensors=one.tensors,
            bits=bits if one in kept else None,
        )
        for one in facts.summaries
    )


def _parts(facts: Facts, tile: Tile) -> dict[str, int]:
    """The queries and the keys that a summary is over."""
    cells = facts.cells and facts.cells.within(tile.q, tile.kv)
    return {"q": math.gcd(tile.q, (cells and cells.q) or 0), "k": math.gcd(tile.kv, (cells and cells.k) or 0)}


def keeps_bits(facts: Facts, tile: Tile, columns: str) -> bool:
    """Whether there are tables of all pairs, and a summary's queries ("q") or keys ("k") are whole words of a row."""
    return bool(facts.hidden and pair_tables(facts)) and _parts(facts, tile)[columns] % WORD == 0


def pair_tables(facts: Facts) -> tuple[Summary, ...]:
    """Conditions that are elements of a table of all pairs: one for each query and key."""
    return tuple(one for one in facts.summaries if one.side == "qk" and one.pairs)


def tensors_beside(plan: KernelPlan) -> tuple[Tensor, ...]:
    """The captured tensors that kernels which visit tiles read beside summaries: those of the score, those that tell
    the class of a tile, those of the mask of a pair where it is asked for, but for what is bits by then, and in a
    forward the sink."""
    variant, summarised = plan.variant, _summarised(plan)
    pairs = [root for root in variant.pair_roots if root is not variant.mask or not plan.masked_by_tile]
    read = _loaded(pairs, {n for n, bits in summarised.items() if bits}) | {t.name for t in tensors_of_classes(plan)}
    if variant.sink is not None and plan.pass_name == "forward":
        read.add(variant.sink.name)
    return tuple(tensor for tensor in variant.tensors if tensor.name in read)


def tensors_of_classes(plan: KernelPlan) -> tuple[Tensor, ...]:
    """The captured tensors that tell the class of a tile beside summaries."""
    facts = analyse(plan.variant)
    classes = [n for term in (*facts.visible, *facts.hidden) for n in term.nodes()]
    read = _loaded(classes, set(_summarised(plan)))
    return tuple(tensor for tensor in plan.variant.tensors if tensor.name in read)


def _summarised(plan: KernelPlan) -> dict[Node, RowBits | None]:
    """The parts of the mask that have summaries, and how their values are kept."""
    made = {one.name: one.bits for one in plan.summaries}
    return {one.value: made[one.name] for one in analyse(plan.variant).summaries if one.name in made}


def _loaded(roots: Iterable[Node], known: set[Node]) -> set[str]:
    """The names of the tensors that expressions read but for those that are `known`."""
    return {n.attr.name for n in walk(roots, into=lambda n: n not in known) if n.op == "load" and n not in known}


def _range_type(one: Summary, facts: Facts) -> str:
    if one.value.dtype is DType.BOOL:
        return "Truth"
    if one.value.dtype.is_float:
        return "FloatRange"
    return "Range<i64>" if one.value.dtype is DType.INT64 or one.value in facts.int64 else "Range<int>"


def count(one: TileSummary, problem: Problem) -> int:
    """How many there are in a problem."""
    places = (problem.batch if one.by_batch else 1) * (problem.heads if one.by_head else 1)
    tiles = -(-(problem.kv_len if one.side == "k" else problem.q_len) // one.positions)
    return tiles * (-(-problem.kv_len // one.keys) if one.keys else 1) * places


def words(one: TileSummary, problem: Problem) -> int:
    """How many words of bits there are."""
    if one.bits is None:
        return 0
    places = (problem.batch if one.by_batch else 1) * (problem.heads if one.by_head else 1)
    rows, columns = (problem.q_len, problem.kv_len)[:: 1 if one.bits.by == "q" else -1]
    return places * rows * -(-columns // one.bits.columns) * (one.bits.columns // WORD)


def moved(plan: KernelPlan, problem: Problem, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that making them reads and writes; `sizes` are those of captured tensors, each of which counts once."""
    read = {name for one in plan.summaries for name in one.tensors}
    return sum(sizes[name] for name in read), sum(
        count(one, problem) * one.itemsize + 4 * words(one, problem) for one in plan.summaries
    )


def workspaces(plan: KernelPlan, problem: Problem) -> tuple[Part, ...]:
    """Device memory that they need, in bytes by the name of the pointer."""
    found = []
    for one in plan.summaries:
        number = count(one, problem)
        why = f"{number} x {one.itemsize} bytes: least and greatest value over {one.what}"
        found.append(Part(name=one.pointer, amount=-(-number * one.itemsize // 4) * 4, why=why))
    for one in plan.summaries:
        if one.bits is not None:
            why = f"a bit for each pair of a query and a key, {one.bits}"
            found.append(Part(name=one.bits_pointer, amount=4 * words(one, problem), why=why))
    return tuple(found)
