"""What the kernels of all pipelines have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flashgen.planning.integers import INTEGERS
from flashgen.planning.members import MaskFromBits
from flashgen.planning.plan import KernelPlan, Part, RowBits, Tile
from flashgen.planning.request import KernelRequest
from flashgen.planning.summaries import tile_summaries

if TYPE_CHECKING:
    from flashgen.planning.pipelines.protocol import Candidate

#: Float operations of the softmax on one score: scale and subtract (one FMA), maximum, sum, half a conversion, and one
#: of moves and predicates.
SOFTMAX_OPS = 4.5

#: Integer operations of dropout on one score: ten rounds of Philox, six each, for four scores, and choosing.
DROPOUT_OPS = 18


def total(parts: Iterable[Part]) -> int:
    """The sum of its terms."""
    return sum(part.amount for part in parts)


def cannot_pack(request: KernelRequest) -> str | None:
    """Why no tile of a request can hold several heads, or None."""
    if request.dropout:
        return "drops probabilities of each head by itself: its heads share no tile"
    if request.profile.summarised_by_query:
        return "is summarised over tiles of queries, of which a packed tile has no fixed number"
    return "tells heads apart, which then share no tile" if request.profile.uses_head else None


def make_plan(c: Candidate, request: KernelRequest, padded: tuple[int, int], **fields: Any) -> KernelPlan:
    """A candidate as a plan: what was asked for, the columns that tiles of q and k and of v hold, the candidate's tile
    and integers, and the pipeline's own fields."""
    layout = fields.get("backward")
    by_query = None if layout is None else layout.by_query
    queries = c.tile.q if by_query is None else math.gcd(c.tile.q, by_query.tile_q)
    mask = getattr(fields.get("specialized") or layout, "mask", None)
    by = ("q", c.tile.kv) if layout is None else ("k", c.tile.q)  # a thread has two rows of S, or of S^T
    bits = RowBits(by=by[0], columns=by[1]) if isinstance(mask, MaskFromBits) else None
    tile = Tile(q=queries, kv=c.tile.kv)
    return KernelPlan(
        variant=request.variant,
        pass_name=request.pass_name,
        arch=request.arch.name,
        dtype=request.dtype,
        head_dim=request.head_dim,
        v_head_dim=request.v_head_dim,
        padded_head_dim=padded[0],
        padded_v_head_dim=padded[1],
        tile=c.tile,
        dropout=request.dropout,
        keys=request.keys,
        launches=request.arch.launches,
        deterministic=request.deterministic,
        gradients=request.gradients,
        layout=request.layout,
        float8=request.float8,
        summaries=() if request.layout.own else tile_summaries(request.profile.facts, tile, bits),
        **{name: getattr(c, name) for name in INTEGERS if hasattr(c, name)},
        **fields,
    )
