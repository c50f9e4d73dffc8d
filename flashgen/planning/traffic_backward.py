"""What a backward moves and computes, in closed form over the counts of its tiles; bytes as (read, written).

Counted as `planning.traffic` counts: in-bounds rows at the caller's head dims, as if there were no L2.  By entry, all
named attention_backward..., summed over batch and heads:

    _clear      writes the sums of captured gradients as 0 (where any is asked for), and where a mask hides pairs what
                each pair has an element of its own in
    _prepare    reads o, do, lse and dlse; writes lse and delta as the others want them, and the sum of dq as 0
    _sink       reads the sinks, lse and delta of every row, writes the sinks' gradient (where it is asked for)
    (the main)  reads k and v once a KV tile that any query sees, q, do, lse and delta once a visited (KV tile, Q tile)
                and query head, and there reads and writes the sum of dq; writes dk and dv once; reads and writes the
                sums of captured gradients once, and writes the elements that pairs of visited tiles have of their own
    _finish     reads the sum of dq, writes dq; where the main kernel does that, _prepare clears the sums of the first
                `clear_distance` heads of keys alone and _finish finishes the last ones: the main kernel has the others
    _dq         in place of _finish and of the sum of dq, where the plan has a dq by itself: reads as the forward does,
                with do, lse and delta beside q; writes dq once
    _gradients  reads the exact sums of captured gradients, writes them rounded (where deterministic)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashgen.planning import backward
from flashgen.planning.problem import STORED_BYTES
from flashgen.planning.profile import profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.analysis.counts import KeyCounts, TileCounts
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

#: Bytes of float32, which lse, delta and sums are; and of the exact sum of one captured element's gradient.
_FLOAT, _EXACT = 4, 64


class CapturedGradients(NamedTuple):
    """Captured tensors whose gradients are asked for: elements that are `added` up; bytes of those of which each pair
    has its own, the `whole`, and of which those of pairs in visited tiles are `stored`."""

    added: int
    whole: int
    stored: int


def captured_gradients(
    plan: KernelPlan, problem: Problem, shapes: Mapping[str, tuple[int, ...]], visited: int
) -> CapturedGradients:
    """Those of a plan, where `visited` pairs lie in visited tiles; `shapes` are those of the captured tensors."""
    alone = backward.stored(plan, problem, shapes)
    added = sum(math.prod(shapes[name]) for name in plan.score_gradients if name not in alone)
    of_pair = sum(STORED_BYTES[dtype] for dtype in alone.values())
    pairs = problem.batch * problem.heads * problem.q_len * problem.kv_len
    return CapturedGradients(added, of_pair * pairs, of_pair * visited)


def moved(
    plan: KernelPlan,
    problem: Problem,
    by_key: KeyCounts,
    by_query: TileCounts | None,
    captured: int,
    gradients: CapturedGradients,
    sink: tuple[int, int],
    *,
    dlse: bool,
) -> dict[str, tuple[int, int]]:
    """Bytes of each entry in the order of launches; none where there are no queries or no keys.

    `by_key` are counts of the plan's own tiles, `by_query` those of the tiles of a dq by itself; `captured` the bytes
    of the captured tensors of mask and score, `sink` the bytes and the elements of the sinks.
    """
    if problem.empty or problem.kv_len == 0:
        return {}
    columns = (problem.head_dim + problem.v_head_dim) * problem.itemsize
    of_query = columns + 2 * _FLOAT  # q, do, lse, delta
    rows = problem.batch * problem.heads * problem.q_len
    dq, dq_sum = problem.head_dim * problem.itemsize, problem.head_dim * _FLOAT
    sums = gradients.added * (_EXACT if plan.deterministic else _FLOAT)
    added = dq_sum if backward.layout(plan).adds_dq else 0
    heads = problem.batch * problem.kv_heads
    ends = rows // heads * backward.clear_distance(plan, problem)
    swept = rows - ends
    cleared = sums + (gradients.whole if profile(plan.variant).hides else 0)
    found = {"attention_backward_clear": (0, cleared)} if plan.score_gradients else {}
    found["attention_backward_prepare"] = (
        rows * (2 * problem.v_head_dim * problem.itemsize + _FLOAT * (2 if dlse else 1)),
        rows * 2 * _FLOAT + ends * added,
    )
    if plan.sink_gradient:
        of_sink, sinks = sink
        found["attention_backward_sink"] = (rows * 2 * _FLOAT + of_sink, sinks * _FLOAT)
    found["attention_backward"] = (
        by_key.keys * columns + by_key.rows * (of_query + added) + swept * added + captured + sums,
        by_key.rows * added + swept * (added + dq) + heads * problem.kv_len * columns + sums + gradients.stored,
    )
    if by_query is None:
        found["attention_backward_finish"] = (ends * dq_sum, ends * dq)
    else:
        read = by_query.visited_rows * of_query + by_query.visited_columns * columns + captured
        found["attention_backward_dq"] = (read, rows * dq)
    if plan.score_gradients and plan.deterministic:
        found["attention_backward_gradients"] = (sums, gradients.added * _FLOAT)
    return found


def compulsory(problem: Problem, captured: int, gradients: int, *, dlse: bool) -> tuple[int, int]:
    """q, k, v, o, do, lse and the captured tensors read once, every gradient written once; `gradients` are the bytes of
    those of captured tensors."""
    rows = problem.batch * problem.heads * problem.q_len
    inputs = problem.batch * (
        problem.heads * problem.q_len * problem.head_dim
        + problem.kv_heads * problem.kv_len * (problem.head_dim + problem.v_head_dim)
    )
    beside = rows * (2 * problem.v_head_dim * problem.itemsize + _FLOAT * (2 if dlse else 1))
    return inputs * problem.itemsize + beside + captured, inputs * problem.itemsize + gradients


def standard(problem: Problem, captured: int, gradients: int) -> tuple[int, int]:
    """The standard backward (Dao et al. 2022, Algorithm 3), in the input dtype; `gradients` as in `compulsory`.

    It reads P and do for dv; do and v for dP, which it writes; P and dP for dS, which it writes; dS and k for dq; and
    dS and q for dk.
    """
    rows, keys = problem.batch * problem.heads * problem.q_len, problem.batch * problem.kv_heads * problem.kv_len
    scores = rows * problem.kv_len
    q, do = rows * problem.head_dim, rows * problem.v_head_dim
    k, v = keys * problem.head_dim, keys * problem.v_head_dim
    read, written = 5 * scores + 2 * do + v + k + q, 2 * scores + q + k + v
    return read * problem.itemsize + captured, written * problem.itemsize + gradients


def flops(problem: Problem, by_key: int, by_query: int | None) -> int:
    """Of the products that run on so many pairs: S, dP, dV and dS^T Q of those visited by keys, dS K of those too, or
    again S and dP and then dS K of those visited by queries."""
    d, dv = problem.head_dim, problem.v_head_dim
    if by_query is None:
        return useful_flops(problem, by_key)
    return 2 * ((2 * d + 2 * dv) * by_key + (2 * d + dv) * by_query)


def useful_flops(problem: Problem, pairs: int) -> int:
    """Of the five products that a backward from lse needs: S, dP, dV, dQ and dK."""
    return 2 * (3 * problem.head_dim + 2 * problem.v_head_dim) * pairs
