"""The backward of pipeline ampere: what a candidate costs, the menu of plans, and what a call launches and allocates.

The main kernel is FlashAttention-2's backward (Dao 2023, Algorithm 2): a block owns a tile of keys, visits the queries
that see it, and keeps dK and dV in registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.lang.variant import Variant
from flashgen.planning import arch as archs
from flashgen.planning.ampere import ITEM, padded
from flashgen.planning.arch import Arch
from flashgen.planning.plan import Backward, ByQuery, KernelPlan, Part, Role, Tile
from flashgen.planning.problem import Problem

#: Threads of a block of the entries that work on rows or elements alone, and blocks of those over elements.
ROW_THREADS, ELEMENT_BLOCKS = 256, 256

#: Bytes of an exact sum (see device/exact.cuh).
EXACT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tile, stages and layout of the warps to be judged."""

    tile: Tile
    stages: int
    kv_warps: int
    q_warps: int
    queries: int
    dq_q_warps: int
    buffers: int
    blocks: int

    @property
    def warps(self) -> int:
        return self.kv_warps * self.q_warps


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel of a backward pass: its entry, its grid and block (one dimension each), and its dynamic shared memory."""

    entry: str
    blocks: int
    threads: int
    smem_bytes: int


def candidate(head_dim: int, arch: Arch, *, deterministic: bool = False) -> Candidate:
    if head_dim <= 64:
        return Candidate(tile=Tile(q=64, kv=128), stages=2, kv_warps=4, q_warps=1, queries=32, dq_q_warps=2, buffers=2, blocks=2)
    return Candidate(tile=Tile(q=64, kv=128), stages=3, kv_warps=4, q_warps=2, queries=32, dq_q_warps=2, buffers=2, blocks=1)


def plan(
    c: Candidate,
    variant: Variant,
    arch: Arch,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    *,
    deterministic: bool = False,
    dropout: bool = False,
    gradients: tuple[str, ...] = (),
) -> KernelPlan:
    """The plan of a candidate."""
    step = 16 * c.q_warps
    d, dv = (-(-padded(n) // step) * step for n in (head_dim, v_head_dim))
    backward = Backward(
        kv_warps=c.kv_warps,
        q_warps=c.q_warps,
        queries=c.queries,
        dq_q_warps=c.dq_q_warps,
        buffers=c.buffers,
        by_query=by_query(c, arch, d, dv) if deterministic else None,
        vector_atomics=arch.name in ("sm_90a", "sm_120"),
        one_barrier=c.buffers == 2 and (c.q_warps == 1 or c.stages == 3),
        row_threads=ROW_THREADS,
    )
    return KernelPlan(
        variant=variant,
        pass_name="backward",
        pipeline="ampere",
        arch=arch.name,
        dtype=dtype,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        padded_head_dim=d,
        padded_v_head_dim=dv,
        tile=c.tile,
        stages=c.stages,
        roles=(Role(name="compute", warps=c.warps),),
        q_in_registers=False,
        blocks_per_sm=c.blocks,
        smem=smem(c, backward, d, dv),
        registers=(),
        backward=backward,
        deterministic=deterministic,
        dropout=dropout,
        gradients=gradients,
    )


def by_query(c: Candidate, arch: Arch, d: int, dv: int) -> ByQuery:
    """The largest tile of queries whose shared memory fits, with the keys of a quarter or half of a tile at a time."""
    keys = min(c.tile.kv, 64 if max(d, dv) <= 128 else 32)
    for tile_q in (128, 64, 32):
        parts = (
            Part(name="q", amount=tile_q * d * ITEM),
            Part(name="d_o", amount=tile_q * dv * ITEM),
            Part(name="k", amount=2 * keys * d * ITEM),
            Part(name="v", amount=2 * keys * dv * ITEM),
        )
        found = ByQuery(tile_q=tile_q, keys=keys, blocks_per_sm=1, smem=parts)
        if found.smem_bytes <= arch.smem_per_block:
            return found
    raise AssertionError("a tile of 32 queries fits every architecture")


def smem(c: Candidate, backward: Backward, d: int, dv: int) -> tuple[Part, ...]:
    """Bytes of shared memory of a block; `d` and `dv` are padded head dims."""
    scores = c.buffers * c.tile.q * c.tile.kv * ITEM
    parts = [
        Part(name="k", amount=c.tile.kv * d * ITEM),
        Part(name="v", amount=c.tile.kv * dv * ITEM),
        Part(name="q", amount=c.stages * c.tile.q * d * ITEM),
        Part(name="d_o", amount=c.stages * c.tile.q * dv * ITEM),
    ]
    if backward.shares_p:
        parts.append(Part(name="p", amount=scores))
    if backward.score_tiles:
        parts.append(Part(name="ds", amount=scores))
    parts.append(Part(name="lse, delta", amount=c.stages * c.tile.q * 8))
    return tuple(parts)


def launches(plan: KernelPlan, problem: Problem) -> tuple[Launch, ...]:
    """The kernels of a backward pass, in the order in which they run on one stream; all take the plan's Params."""
    q_blocks = -(-problem.q_len // plan.tile.q) * problem.heads * problem.batch
    kv_blocks = -(-problem.kv_len // plan.tile.kv) * problem.kv_heads * problem.batch
    rows = plan.backward.row_threads
    entries = [
        Launch(entry="attention_backward_prepare", blocks=q_blocks, threads=rows, smem_bytes=0),
        Launch(entry="attention_backward", blocks=kv_blocks, threads=plan.threads, smem_bytes=plan.smem_bytes),
    ]
    by_query = plan.backward.by_query
    if by_query is None:
        entries.append(Launch(entry="attention_backward_finish", blocks=q_blocks, threads=rows, smem_bytes=0))
    else:
        blocks = -(-problem.q_len // by_query.tile_q) * problem.heads * problem.batch
        entries.append(
            Launch(
                entry="attention_backward_dq", blocks=blocks, threads=by_query.threads, smem_bytes=by_query.smem_bytes
            )
        )
    if plan.gradients:
        over_elements = {"blocks": ELEMENT_BLOCKS, "threads": rows, "smem_bytes": 0}
        entries.insert(0, Launch(entry="attention_backward_clear", **over_elements))
        if plan.deterministic:
            entries.append(Launch(entry="attention_backward_gradients", **over_elements))
    return tuple(entry for entry in entries if entry.blocks)


def workspaces(
    plan: KernelPlan, problem: Problem, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[Part, ...]:
    """Device memory that a backward pass needs beside its inputs and results, in bytes by the name of the pointer.

    `shapes` are those of the captured tensors whose gradients are asked for.
    """
    rows = -(-problem.q_len // plan.tile.q) * plan.tile.q * problem.heads * problem.batch
    parts = [
        Part(name="lse_log2", amount=4 * rows, why="float32 a row"),
        Part(name="delta", amount=4 * rows, why="float32 a row"),
    ]
    if plan.backward.adds_dq:
        parts.append(Part(name="dq_sum", amount=4 * rows * plan.padded_head_dim, why="dq in float32, where it is added up"))
    if plan.deterministic:
        for name in plan.gradients:
            elements = math.prod(shapes[name])
            why = f"{elements} exact sums of {EXACT_BYTES} bytes, which depend on no order"
            parts.append(Part(name=f"exact_{name}", amount=EXACT_BYTES * elements, why=why))
    return tuple(parts)
