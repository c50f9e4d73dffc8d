"""What every backward shares: what it asks of a variant, who works together, and its memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from types import MappingProxyType

from flashgen.analysis.derivative import derive, slopes
from flashgen.analysis.facts import analyse
from flashgen.analysis.words import Of, in_words
from flashgen.lang.expr import Node, const, depends_on, loop_indices, positions_of, reads_by, walk
from flashgen.lang.variant import Variant
from flashgen.planning.arch import ARCHS
from flashgen.planning.layout import Layout
from flashgen.planning.plan import Backward, KernelPlan, Part, SpecializedBackward
from flashgen.planning.problem import Problem

#: Threads of a block of the entries that work on rows or elements alone.
ROW_THREADS = 256

#: Bytes of an exact sum (see device/exact.cuh).
EXACT_BYTES = 64


def has_slope(variant: Variant) -> bool:
    """Whether the derivative of the score is anything but 1."""
    return variant.score_node is not None and derive(variant.score_node) is not const(1.0)


def looks_up(variant: Variant, known: Collection[Node] = ()) -> bool:
    """Whether mask or score read a captured tensor by the query or the key, beside the elements that are known."""
    return any(reads_by(root, "q", "k", known=known) for root in (variant.mask, variant.score_node))


def captured_grads(variant: Variant, name: str) -> dict[Node, Node]:
    """The elements of a captured tensor that the score depends on, each with the score's derivative by it."""
    return {} if variant.score_node is None else slopes(variant.score_node, name)


def own_dimensions(variant: Variant, name: str, layout: Layout) -> tuple[str, ...]:
    """The positions that select an element of a captured tensor, one a dimension, where they are a query and a key and
    so two pairs that differ in one of them never read the same; empty of others, and of sequences with lengths of their
    own, where positions are not rows."""
    if layout.own:
        return ()
    reads = list(captured_grads(variant, name))
    positions = tuple(n.attr for n in reads[0].operands if n.op == "index") if len(reads) == 1 else ()
    alone = len(positions) == len(set(positions)) and {"q", "k"} <= set(positions)
    return positions if alone and len(positions) == len(reads[0].operands) else ()


def storable(plan: KernelPlan) -> tuple[str, ...]:
    """The captured tensors of whose gradient each pair may have an element of its own (`stored`)."""
    return tuple(name for name in plan.score_gradients if own_dimensions(plan.variant, name, plan.layout))


def stored(plan: KernelPlan, problem: Problem, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The captured tensors of whose gradient each pair has an element of its own, in a call with captured tensors of
    these shapes, and their dtypes: it is stored so, where others are added up in float32."""
    extents = {"b": problem.batch, "h": problem.heads, "q": problem.q_len, "k": problem.kv_len}

    def alone(name: str) -> bool:
        positions = own_dimensions(plan.variant, name, plan.layout)
        shared = [extents[position] for position in extents if position not in positions]
        return tuple(shapes[name]) == tuple(map(extents.get, positions)) and all(extent == 1 for extent in shared)

    dtypes = {tensor.name: tensor.dtype for tensor in plan.variant.tensors}
    return {name: dtypes[name] for name in storable(plan) if alone(name)}


def lookups(variant: Variant) -> tuple[Node, ...]:
    """The elements of captured tensors that the mask reads by the query alone, or by the key and no query head; none
    of a mask that hides nothing, which no kernel evaluates."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()  # what several others use is looked at once
    left = [variant.mask] if variant.mask is not None and analyse(variant).hidden else []
    while left:
        n = left.pop()
        if n in seen:
            continue
        seen.add(n)
        element = n.op == "load" and not loop_indices(n)  # and not one for each round of a loop
        selected: Set[str] = positions_of(n) if element else frozenset()
        if len(selected & {"q", "k"}) == 1 and not {"h", "k"} <= selected:
            found[n] = None
        else:
            left.extend(reversed(n.operands))
    return tuple(found)


def word_lookups(variant: Variant) -> tuple[Node, ...]:
    """What a mask in words is given: its conditions of keys alone, and the elements that queries alone select; none of
    another mask."""
    word = in_words(variant)
    if word is None:
        return ()
    of_queries = (n for n in lookups(variant) if depends_on(n, "q"))
    return (*of_queries, *word.having(Of.KEY))


def lookup_names(known: tuple[Node, ...]) -> tuple[str, ...]:
    """A name of its own for each element of a captured tensor, or condition, by the first tensor that it reads."""
    found: list[str] = []
    for n in known:
        read = next((m.attr.name for m in walk([n]) if m.op == "load"), "seen")
        stem = f"{read}_{'q' if depends_on(n, 'q') else 'k'}"
        number = sum(name.startswith(stem) for name in found)
        found.append(f"{stem}{number + 1}" if number else stem)
    return tuple(found)


def layout(plan: KernelPlan) -> Backward | SpecializedBackward:
    """How the warps of a backward's plan divide work."""
    assert plan.backward is not None
    return plan.backward


def l2_kv_heads(plan: KernelPlan, problem: Problem, sms: int | None = None) -> int:
    """Key heads whose blocks a masked backward on pipeline hopper starts together: those whose queries, d_o and dq in
    float32 L2 holds, if `sms` blocks are enough for each; SMs of the architecture's card unless given."""
    arch, of_one = ARCHS[plan.arch], problem.q_len * query_bytes(problem)
    heads = problem.batch * problem.kv_heads
    return arch.heads_in_turns(of_one, heads, arch.sms if sms is None else sms, forward=False)


def query_bytes(problem: Problem) -> int:
    """Bytes of a query, its d_o and its dq in float32, of all heads that share a key head."""
    columns = (problem.head_dim + problem.v_head_dim) * problem.itemsize + problem.head_dim * 4
    return problem.group * columns


def clear_distance(plan: KernelPlan, problem: Problem, sms: int | None = None, together: int | None = None) -> int:
    """Key heads between the blocks of one and those that clear its sum of dq, where the main kernel does both: the
    first so many are cleared before it, the last so many finished behind it.  All of them where it does neither.

    Blocks start in order, those of some heads in turns: with as many heads between, no block waits for a later one;
    with the heads that the GPU works on at a time as well, hardly any block waits at all.  `sms` are those of the
    architecture's card unless given, `together` the heads that they take in turns (`l2_kv_heads`).
    """
    heads, blocks = problem.kv_heads * problem.batch, -(-problem.kv_len // plan.tile.kv)
    if blocks == 0 or not layout(plan).dq_in_main_kernel:
        return heads
    sms = ARCHS[plan.arch].sms if sms is None else sms
    together = l2_kv_heads(plan, problem, sms) if together is None else together
    return min((together if plan.variant.mask is not None else 1) + -(-sms // blocks), heads)


def workspaces(
    plan: KernelPlan,
    problem: Problem,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    q_tiles: int | None = None,
) -> tuple[Part, ...]:
    """Device memory that a backward pass needs beside its inputs and results, in bytes by the name of the pointer.

    `shapes` are those of the captured tensors whose gradients are asked for, `q_tiles` a head's tiles of queries in all
    sequences unless each has those of q_len.
    """
    q_tiles = -(-problem.q_len // plan.tile.q) * problem.batch if q_tiles is None else q_tiles
    rows = q_tiles * plan.tile.q * problem.heads
    parts = [
        Part(name="lse_log2", amount=4 * rows, why="float32 per row"),
        Part(name="delta", amount=4 * rows, why="float32 per row"),
    ]
    if layout(plan).adds_dq:
        parts.append(
            Part(name="dq_sum", amount=4 * rows * plan.dq_sum_columns, why="dq in float32, where it is added up")
        )
        if plan.deterministic:
            why = "int32 a tile of queries, who added to its dq last"
            parts.append(Part(name="dq_semaphore", amount=4 * rows // plan.tile.q, why=why))
    if layout(plan).dq_in_main_kernel:
        heads = problem.kv_heads * problem.batch
        parts.append(Part(name="progress", amount=4 * (heads + 1), why="a counter a key head, and one of heads"))
    if layout(plan).persistent:
        parts.append(Part(name="taken", amount=4, why="how many tiles of keys blocks have taken after their first"))
    if plan.deterministic:
        alone = stored(plan, problem, shapes)
        for name in plan.score_gradients:
            elements = 0 if name in alone else math.prod(shapes[name])
            why = f"{elements} exact sums of {EXACT_BYTES} bytes, which depend on no order"
            parts.append(Part(name=f"exact_{name}", amount=EXACT_BYTES * elements, why=why))
    return tuple(parts)
