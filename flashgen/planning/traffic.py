"""What a plan costs on a problem: bytes to and from HBM, FLOPs, tiles and a roofline time; nothing is walked.

Bytes are counted as the papers count them, as if there were no L2.  Let a Q tile be visited by the KV tiles of its
schedule.  Then, summed over batch and query heads, at the caller's head dims and in-bounds rows only:

    read   q once a Q tile that visits any key, k and v once a visited (Q tile, KV tile) and query head (of packed
           heads once for all of a tile), every captured tensor once, or the summaries and bits in its place
    write  o once, lse (float32) once

Where keys are split, q is read by each part that visits any key, which writes its part of o in float32; every part
writes the maximum and the sum of its rows.  The kernel that combines them reads all that and writes o and lse.  Where
keys lie in pages, each entry of the page table that leads to a visited key is read once.

A backward is counted kernel by kernel: see `traffic_backward`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.analysis import counts
from flashgen.analysis import facts as analysis
from flashgen.errors import PlanError
from flashgen.planning import backward, order, split_keys, summaries, traffic_backward, traffic_sequences
from flashgen.planning.arch import ARCHS, Arch
from flashgen.planning.menu import Measured, Rejected
from flashgen.planning.pipelines.table import pipeline_of
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.prediction import Bytes, Pace, Prediction, Times
from flashgen.planning.problem import STORED_BYTES, Problem
from flashgen.planning.profile import profile
from flashgen.planning.traffic_sequences import OwnLengths

if TYPE_CHECKING:
    from flashgen.analysis.counts import TileCounts
    from flashgen.analysis.tiles import Case
    from flashgen.lang.expr import Tensor

LSE_BYTES = 4


def predict(
    plan: KernelPlan,
    problem: Problem,
    case: Case,
    *,
    rejected: Iterable[Rejected] = (),
    dlse: bool = False,
    measured: Measured | None = None,
    others: Iterable[KernelPlan] = (),
    splits: int = 1,
    why_splits: str = "",
    sequences: Iterable[OwnLengths] = (),
    page_size: int | None = None,
) -> Prediction:
    """What `plan` costs on `problem`; `case` carries the sizes, parameters and captured tensors of the same call.

    Closed form where the mask allows, never a walk.  `dlse` says that a backward is given the gradient of lse too;
    `measured` and `rejected` are those of the menu that the plan comes from, `others` its other plans; `splits` blocks
    divide keys where the plan splits them, and `why_splits` says why so many.  Where the plan's layout has lengths of
    their own, `sequences` are these, and `problem` bounds them: those of a padded batch are counted in its q_len rows;
    a layout of pages has a `page_size`.  Raises PlanError where problem and plan disagree on head dims or pages, and
    for a backward of such a layout.
    """
    own = tuple(sequences)
    asked, planned = (problem.head_dim, problem.v_head_dim), (plan.head_dim, plan.v_head_dim)
    if asked != planned:
        raise PlanError(
            f"the plan is for head_dim {planned[0]} and v_head_dim {planned[1]}, the problem has {asked[0]} and"
            f" {asked[1]}\n  nearest: a menu for the problem's head dims"
        )
    if plan.layout.paged != (page_size is not None):
        raise PlanError(
            f"the plan's layout is {plan.layout.name} and page_size is {page_size}: pages have a number of rows\n"
            f"  nearest: {'page_size=16' if plan.layout.paged else 'no page_size, or layout paged'}"
        )
    if plan.layout.own and plan.pass_name == "backward":
        raise PlanError(
            f"a backward's traffic is predicted for sequences of one length, and the plan's layout is"
            f" {plan.layout.name}\n  nearest: the forward, or layout dense"
        )
    if plan.layout.own and plan.keys.invariant and plan.keys.split:
        raise PlanError(
            "what leaves move is predicted for sequences of one length, and the plan's layout is"
            f" {plan.layout.name}\n  nearest: invariant=False, or layout dense"
        )
    if plan.pass_name == "backward":
        costs = _backward_costs(plan, problem, case, dlse)
    else:
        of_own = (own, splits, page_size)
        costs = _own_costs(plan, problem, case, *of_own) if plan.layout.own else _costs(plan, problem, case, splits)
    arch, tiles = ARCHS[plan.arch], costs["tiles"]
    return Prediction(
        plan=plan,
        problem=problem,
        case=case,
        lower_bound_bytes=lower_bound(problem, arch, tiles.visible, once(costs["hbm"], costs["compulsory"])),
        rejected=tuple(rejected),
        measured=measured,
        others=tuple(others),
        splits=splits,
        why_splits=why_splits,
        sequences=own,
        page_size=page_size,
        **costs,
    )


class _Parts(NamedTuple):
    """Rows of o whose keys are split among so many blocks; `visited` are those of all parts that see any key, and
    `read` those that the kernel `entry` loads, which combines them."""

    visited: int
    read: int
    rows: int
    splits: int
    entry: str


def _parts_of(plan: KernelPlan, count: Callable[[int], int], rows: int, launched: int, splits: int) -> _Parts:
    """`count` says how many rows of parts see any key, of so many parts; by the rows that are `launched`, among which
    those beyond a sequence's length are, the kernel that combines them is chosen."""
    visited, anyway = count(splits), split_keys.read_anyway(plan, launched, splits)
    read = visited + rows * anyway - count(anyway) if anyway else visited
    return _Parts(visited=visited, read=read, rows=rows, splits=splits, entry=split_keys.entry(plan, launched, splits))


def _costs(plan: KernelPlan, problem: Problem, case: Case, splits: int) -> dict[str, Any]:
    """Fields of the prediction of a forward."""
    tiles = _tiles(plan, problem, case)
    captured = _stored(plan.variant.tensors, case)
    of_summaries, read_again = _summaries(plan, problem, case)
    ordering = _ordering(plan, problem, case, read_again)
    ordered = 0 if ordering is None else ordering.write_bytes // 2  # the other half says how much each tile sees
    visits = _moved(problem, tiles, _stored(summaries.tensors_beside(plan), case) + read_again + ordered)
    parts = None
    if plan.keys.split and not problem.empty:
        count = functools.partial(split_keys.rows_of_parts, plan, problem, case)
        rows = split_keys.rows(plan, problem)
        parts = _parts_of(plan, count, rows, rows, splits)
    compulsory, standard = _compulsory(problem, captured), _standard(problem, captured)
    before = {summaries.ENTRY: of_summaries} if plan.summaries else {}
    before |= {} if ordering is None else {order.ENTRY: ordering}
    found = _costs_of(plan, problem, case, tiles, visits, parts, before, compulsory)
    workspaces = (*split_keys.workspaces(plan, problem, splits), *summaries.workspaces(plan, problem))
    return {**found, "standard": standard, "workspaces": (*workspaces, *order.workspaces(plan, problem))}


def _own_costs(
    plan: KernelPlan, problem: Problem, case: Case, own: tuple[OwnLengths, ...], splits: int, page_size: int | None
) -> dict[str, Any]:
    """Fields of the prediction of a forward whose sequences have lengths of their own."""
    tiles = traffic_sequences.count(plan, problem, case, own)
    captured = _stored(plan.variant.tensors, case)
    read = problem.read_bytes(tiles.visited_rows, tiles.visited_columns)
    rows = traffic_sequences.written_rows(plan, problem, own)
    written = rows * (problem.v_head_dim * problem.o_itemsize + LSE_BYTES)
    table = 0 if page_size is None else traffic_sequences.table_bytes(plan, problem, case, own, page_size)
    beside = _stored(summaries.tensors_beside(plan), case) + table
    visits = _bytes(read + beside, written)
    compulsory = _bytes(traffic_sequences.inputs(problem, own) + captured + table, written)
    alone = [_standard(one.of(problem), 0) for one in own]
    standard = _bytes(sum(x.read_bytes for x in alone) + captured, sum(x.write_bytes for x in alone))
    q_rows, parts = sum(one.q_rows for one in own), None
    if plan.keys.split:
        count = functools.partial(traffic_sequences.count_parts, plan, problem, case, own)
        parts = _parts_of(plan, count, q_rows * problem.heads, split_keys.rows(plan, problem, q_rows), splits)
    found = _costs_of(plan, problem, case, tiles, visits, parts, {}, compulsory)
    workspaces = split_keys.workspaces(plan, problem, splits, q_rows)
    return {**found, "standard": standard, "workspaces": workspaces}


def _costs_of(
    plan: KernelPlan,
    problem: Problem,
    case: Case,
    tiles: TileCounts,
    visits: Bytes,
    parts: _Parts | None,
    before: Mapping[str, Bytes],
    compulsory: Bytes,
) -> dict[str, Any]:
    """Fields of the prediction of a forward that visits these tiles, for which one kernel moves so much where keys are
    not split, and those `before` it by name."""
    combining = {split_keys.ENTRY: _bytes(0, 0)} if plan.keys.split else {}
    if parts is not None:
        visits, combined = _parts(plan, problem, case, visits, tiles, parts)
        combining = {parts.entry: combined}
    kernels = {**before, "attention_forward": visits, **combining}
    moved = _bytes(sum(one.read_bytes for one in kernels.values()), sum(one.write_bytes for one in kernels.values()))
    per_pair, scores = 2 * (problem.head_dim + problem.v_head_dim), tiles.visited * plan.tile.q * plan.tile.kv
    special, _ = profile(plan.variant).score_ops
    padded = 2 * (plan.padded_head_dim + plan.padded_v_head_dim) * scores
    at_l2 = moved.total + split_keys.folded_bytes(plan, tiles.visited_elements)
    return {
        "hbm": moved,
        "compulsory": compulsory,
        "flops": per_pair * tiles.visited_elements,
        "flops_useful": None if tiles.visible is None else per_pair * tiles.visible,
        "tiles": tiles,
        "times": _times(plan, padded, scores * (1 + special), at_l2, once(moved, compulsory)),
        "pace": _pace(plan, scores),
        "kernels": tuple(kernels.items()) if len(kernels) > 1 else (),
    }


def _parts(
    plan: KernelPlan, problem: Problem, case: Case, visits: Bytes, tiles: TileCounts, of: _Parts
) -> tuple[Bytes, Bytes]:
    """What visiting tiles in parts moves, in place of `visits`, and what combining these does."""
    again = (of.visited - tiles.visited_rows) * problem.head_dim * problem.itemsize
    row, all_rows = problem.v_head_dim * split_keys.PART_ITEM, of.rows * of.splits * split_keys.PART_ROW
    sink = plan.variant.sink
    of_sink = 0 if sink is None else case.tensors[sink.name].size * STORED_BYTES[sink.dtype]
    return (
        _bytes(visits.read_bytes + again - of_sink, of.visited * row + all_rows),
        _bytes(of.read * row + all_rows + of_sink, visits.write_bytes),
    )


def _summaries(plan: KernelPlan, problem: Problem, case: Case) -> tuple[Bytes, int]:
    """What making the summaries moves, and what each kernel that classifies tiles by them reads; nothing where there
    are no queries or no keys, as no kernel runs."""
    sizes = {t.name: case.tensors[t.name].size * STORED_BYTES[t.dtype] for t in plan.variant.tensors}
    if problem.empty or problem.kv_len == 0:
        return _bytes(0, 0), 0
    made = _bytes(*summaries.moved(plan, problem, sizes))
    return made, made.write_bytes


def _ordering(plan: KernelPlan, problem: Problem, case: Case, of_summaries: int) -> Bytes | None:
    """What putting tiles of queries in order moves; None where they are not."""
    tiles = -(-problem.q_len // plan.tile.q) * problem.heads * problem.batch
    if not order.wanted(plan, tiles, -(-problem.kv_len // plan.tile.kv), ARCHS[plan.arch].sms):
        return None
    read = of_summaries + _stored(summaries.tensors_of_classes(plan), case)
    return _bytes(read, sum(part.amount for part in order.workspaces(plan, problem)))


def _tiles(plan: KernelPlan, problem: Problem, case: Case) -> TileCounts:
    """The tiles of a forward; one of packed heads is counted once, as its keys are read once."""
    tile = Tile(q=plan.tile_queries(problem.group), kv=plan.tile.kv)
    found, pack = counts.count(analysis.analyse(plan.variant), case, tile), plan.pack(problem.group)
    shared = {name: getattr(found, name) for name in ("total", "empty", "partial", "full", "visited_columns")}
    shared |= {name: count for name in ("unseen", "uncut") if (count := getattr(found, name)) is not None}
    return replace(found, **{name: count // pack for name, count in shared.items()})


def _backward_costs(plan: KernelPlan, problem: Problem, case: Case, dlse: bool) -> dict[str, Any]:
    """Fields of the prediction of a backward."""
    facts, by_itself = analysis.analyse(plan.variant), backward.layout(plan).by_query
    tiles = counts.count(facts, case, plan.tile)
    keys = counts.count_keys(facts, case, plan.tile, tiles.visited)
    queries = None
    scores = tiles.visited * plan.tile.q * plan.tile.kv
    again = 0  # scores of the tiles of a dq by itself
    if by_itself is not None:
        queries = counts.count(facts, case, Tile(q=by_itself.tile_q, kv=plan.tile.kv))
        again = queries.visited * by_itself.tile_q * plan.tile.kv
    variant, of_pairs = plan.variant, _stored(plan.variant.pair_tensors, case)
    shapes = {name: case.tensors[name].shape for name in plan.gradients}
    elements = sum(map(math.prod, shapes.values()))
    of_score = sum(math.prod(shapes[name]) for name in plan.score_gradients)
    gradients = traffic_backward.captured_gradients(plan, problem, shapes, tiles.visited_elements)
    sink = _stored([variant.sink] if plan.sink_gradient and variant.sink else [], case), elements - of_score
    of_gradients = gradients.whole + STORED_BYTES["float32"] * (gradients.added + sink[1])
    captured = of_pairs + sink[0]
    of_summaries, read_again = _summaries(plan, problem, case)
    given = _stored(summaries.tensors_beside(plan), case) + read_again
    by_entry = traffic_backward.moved(plan, problem, keys, queries, given, gradients, sink, dlse=dlse)
    if plan.summaries and by_entry:
        by_entry = {summaries.ENTRY: (of_summaries.read_bytes, of_summaries.write_bytes)} | by_entry
    moved = _bytes(*map(sum, zip((0, 0), *by_entry.values(), strict=True)))
    # Without queries or keys no kernel runs.
    ends = traffic_backward.compulsory(problem, captured, of_gradients, dlse=dlse) if by_entry else (0, 0)
    compulsory = _bytes(*ends)
    padded = problem._replace(head_dim=plan.padded_head_dim, v_head_dim=plan.padded_v_head_dim)
    special = 1 + profile(plan.variant).derived_special
    return {
        "hbm": moved,
        "compulsory": compulsory,
        "standard": _bytes(*traffic_backward.standard(problem, captured, of_gradients)),
        "flops": traffic_backward.flops(
            problem, tiles.visited_elements, None if queries is None else queries.visited_elements
        ),
        "flops_useful": None if tiles.visible is None else traffic_backward.useful_flops(problem, tiles.visible),
        "tiles": tiles,
        "times": _times(
            plan,
            traffic_backward.flops(padded, scores, None if queries is None else again),
            (scores + again) * special,
            moved.total,
            once(moved, compulsory),
        ),
        "pace": _pace(plan, scores),
        "kernels": tuple((entry, _bytes(*pair)) for entry, pair in by_entry.items()),
        "workspaces": (
            (*backward.workspaces(plan, problem, shapes), *summaries.workspaces(plan, problem)) if by_entry else ()
        ),
    }


def _bytes(read: int, written: int) -> Bytes:
    return Bytes(read_bytes=read, write_bytes=written)


def once(moved: Bytes, compulsory: Bytes) -> int:
    """Bytes that a plan touches, each once, which HBM moves at least: `compulsory`, with what the plan reads in place
    of all inputs where the mask hides so many keys that this is less."""
    return compulsory.write_bytes + min(compulsory.read_bytes, moved.read_bytes)


def lower_bound(problem: Problem, arch: Arch, visible: int | None, touched: int) -> int | None:
    """Bytes that exact attention needs at least: the larger of touching everything `once` and the IO bound.

    The IO bound is FlashAttention's Theta(N^2 d^2 / M) elements for a fast memory of M elements (Dao et al. 2022,
    Proposition 3; tight for M >= d^2, Saha and Ye 2024), taken as pairs (D + Dv)^2 / M: visible pairs, and K and V
    streaming past a tile whose rows of Q and O fill the shared memory and registers of one SM.  None where the visible
    pairs were not counted.
    """
    if visible is None:
        return None
    squares = visible * (problem.head_dim + problem.v_head_dim) ** 2 * problem.kv_itemsize**2
    return max(touched, squares // arch.on_chip_bytes)


def _stored(tensors: Iterable[Tensor], case: Case) -> int:
    """Bytes of captured tensors, each once."""
    return sum(case.tensors[tensor.name].size * STORED_BYTES[tensor.dtype] for tensor in tensors)


def _written(problem: Problem) -> tuple[int, int]:
    rows = problem.batch * problem.heads * problem.q_len
    return rows * problem.v_head_dim * problem.o_itemsize, rows * LSE_BYTES


def _moved(problem: Problem, tiles: TileCounts, captured: int) -> Bytes:
    read = problem.read_bytes(tiles.visited_rows, tiles.visited_columns)
    return Bytes(read_bytes=read + captured, write_bytes=sum(_written(problem)))


def _inputs(problem: Problem) -> int:
    """Bytes of q, k and v."""
    return problem.batch * problem.read_bytes(problem.heads * problem.q_len, problem.kv_heads * problem.kv_len)


def _compulsory(problem: Problem, captured: int) -> Bytes:
    return Bytes(read_bytes=_inputs(problem) + captured, write_bytes=sum(_written(problem)))


def _standard(problem: Problem, captured: int) -> Bytes:
    scores = problem.batch * problem.heads * problem.q_len * problem.kv_len * problem.itemsize
    o, _ = _written(problem)  # Algorithm 0 keeps no lse
    return Bytes(read_bytes=_inputs(problem) + captured + 2 * scores, write_bytes=2 * scores + o)


def _times(plan: KernelPlan, flops: int, special: int, moved: int, touched: int) -> Times:
    """FLOPs and special results of whole tiles at padded head dims for the units that work on them; bytes that are
    `moved` for L2, and `touched` once for HBM."""
    arch = ARCHS[plan.arch]
    return Times(
        tensor=1e3 * flops / arch.tensor_flops[plan.pipeline],
        exponential=1e3 * special / arch.special_per_s,
        l2=1e3 * moved / arch.l2_bytes_per_s,
        dram=1e3 * touched / arch.hbm_bytes_per_s,
    )


def _pace(plan: KernelPlan, scores: int) -> Pace:
    arch, pipeline = ARCHS[plan.arch], pipeline_of(plan)
    seconds = pipeline.seconds_per_score(plan, arch)[-1]
    return Pace(
        clocks=tuple(pipeline.clocks(plan, arch).items()),
        together=seconds * arch.clock_hz,
        ms=1e3 * seconds * scores / arch.sms,
    )
