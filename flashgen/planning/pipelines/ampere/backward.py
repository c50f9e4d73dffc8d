"""What a candidate of pipeline ampere's backward costs: shared memory, registers and time, sums that can be shown.

The main kernel is FlashAttention-2's backward (Dao 2023, Algorithm 2): a block owns a tile of keys and visits the
queries that see it.  S and dP are computed transposed, so that P and dS, once rounded, are operands of dV += P^T dO and
dK += dS^T Q as they lie in registers; dV and dK never leave them.  Where warps share the keys of a tile they exchange P
and dS through shared memory and divide the columns of dV and dK instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashgen.planning.arch import KIB, Arch
from flashgen.planning.backward import ROW_THREADS
from flashgen.planning.integers import Allowed
from flashgen.planning.members import OneBarrier, OneStage, StepEnd, TwoBarriers
from flashgen.planning.pipelines.ampere import forward as ampere
from flashgen.planning.pipelines.ampere import programs
from flashgen.planning.pipelines.ampere.forward import MMA_DEPTH, MMA_ROWS
from flashgen.planning.pipelines.protocol import Predictor
from flashgen.planning.pipelines.shared import make_plan, total
from flashgen.planning.plan import ITEM, Backward, ByQuery, KernelPlan, Part, Tile
from flashgen.planning.problem import Problem
from flashgen.planning.profile import profile
from flashgen.planning.request import Fixed, KernelRequest

NAME, COPIES, cannot_address = ampere.NAME, ampere.COPIES, ampere.cannot_address
cannot_page = ampere.cannot_page

HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = ampere.HEAD_DIM_STEP, ampere.MIN_HEAD_DIM, ampere.MAX_HEAD_DIM

#: Sides of the planner's tiles; a pinned one has them too.
SIDES = (32, 64, 128)

#: Queries a block of a deterministic backward's entry for dq alone.
DQ_QUERIES = (128, 64, 32)
TILE_RULE = f"both sides of a backward's tile are {', '.join(map(str, SIDES[:-1]))} or {SIDES[-1]}"

STAGES = (1, 2, 3)
INTEGERS = {"stages": Allowed(values=STAGES, rule="a backward has one to three tiles of queries in shared memory")}

#: Enough to see why no tile fits.
EXAMPLES = ((64, 128), (64, 64), (32, 32))

MAX_WARPS = 8

#: The most elements of S, and of dP, that a thread holds at a time.
MAX_SCORES = 32

#: Architectures that add four floats in memory with one instruction (PTX ISA 8.1: from sm_90 on).
VECTOR_ATOMICS = frozenset(("sm_90a", "sm_120"))

#: Registers for mask and score: a band or a bias of the head; a mask of more than so many ops; and what is looked up
#: by position, or has another slope than 1.
LIGHT, LONG, LONG_OPS, HEAVY = 14, 24, 4, 32

#: Registers of dK and dV above which ptxas finds less room for operands.
CROWDED = 144

#: Registers for the loop over the parts of a tile of queries, in a step of one barrier beside so many of dK and dV:
#: 24 bytes were spilled there (head_dim 64, 64 x 128, on sm_90a: `causal`, `causal_bottom_right`, `padding`,
#: `prefix_lm`, `sliding_window`).  Scores, whose scale is constant, get by with all 255, and so do deterministic
#: kernels, which have no address of dq.
IN_PARTS, IN_PARTS_BESIDE = 9, 128

#: Registers that go unused because operands of mma are aligned to fours.
UNALIGNED = 3

#: Float operations on one score: P, dS, two roundings, and what moves them.
SCORE_OPS = 9

#: Clocks that a block waits at a barrier, and for the first byte of a copy where none was under way; only another
#: block hides them.  How much better than n times n warps of a scheduler hide each other.  Leads: with them the model
#: gives what the first kernels reached on an H200 to about a tenth.
BARRIER, FIRST_BYTE, OVERLAP = 300, 1000, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tile, stages, layout of the warps and tiles of P and dS to be judged."""

    tile: Tile
    stages: int
    buffers: int
    kv_warps: int
    q_warps: int
    queries: int  # of a warp at a time: all of its own where warps share keys
    dq_parts: int = 1  # in which a warp computes its columns of dQ

    @property
    def warps(self) -> int:
        return self.kv_warps * self.q_warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def key_blocks(self) -> int:
        """Blocks of 16 keys of a warp."""
        return self.tile.kv // (MMA_ROWS * self.kv_warps)

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps"


def candidates(fixed: Fixed) -> Iterator[Candidate]:
    """Every candidate that has what is fixed, and else what the planner may choose freely."""
    free = [Tile(q=q, kv=kv) for q in SIDES for kv in SIDES]
    for t in [fixed.tile] if fixed.tile else free:
        for kv_warps, q_warps, queries in _layouts(t):
            for s in fixed.among("stages", STAGES):
                base = Candidate(tile=t, stages=s, buffers=1, kv_warps=kv_warps, q_warps=q_warps, queries=queries)
                both = replace(base, buffers=2)
                for c in (base, both) if one_barrier(both) else (base,):
                    for dq_parts in (1, 2):
                        yield replace(c, dq_parts=dq_parts)


def _layouts(t: Tile) -> Iterator[tuple[int, int, int]]:
    """Warps along keys, warps that share keys, and queries at a time, for a tile."""
    for key_blocks in (2, 1):
        kv_warps, most = t.kv // (MMA_ROWS * key_blocks), 2 * MAX_SCORES // key_blocks
        for q_warps in (1, 2, 4):
            if kv_warps == 0 or not 2 <= kv_warps * q_warps <= MAX_WARPS or t.q < MMA_ROWS * q_warps:
                continue
            if q_warps == 1:
                yield from ((kv_warps, 1, n) for n in (64, 32, 16) if n <= min(t.q, most))
            elif t.q // q_warps <= most:
                yield kv_warps, q_warps, t.q // q_warps


def nearest_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile that TILE_RULE allows and that comes closest."""
    q, kv = (min(SIDES, key=lambda side: (abs(math.log2(side / max(n, 1))), side)) for n in tile)
    return q, kv


def padded(head_dim: int, c: Candidate) -> int:
    """Columns a tile holds: whole steps of mma for every warp that shares keys."""
    step = MMA_DEPTH * c.q_warps
    return -(-head_dim // step) * step


def dq_q_warps(c: Candidate, d: int) -> int:
    """How many warps divide the queries of dQ (the others divide columns) so that they read least: squares do."""
    fits = [n for n in (1, 2, 4, 8) if c.warps % n == 0 and c.tile.q % (MMA_ROWS * n) == 0]
    fits = [n for n in fits if d % (MMA_DEPTH * (c.warps // n)) == 0]
    return min(fits, key=lambda n: (c.dq_parts * c.tile.q // n + d * n // c.warps, n), default=0)


def backward(c: Candidate, request: KernelRequest) -> Backward:
    """The layout of a candidate's warps."""
    return Backward(
        kv_warps=c.kv_warps,
        q_warps=c.q_warps,
        queries=c.queries,
        dq_q_warps=dq_q_warps(c, padded(request.head_dim, c)),
        dq_parts=c.dq_parts,
        buffers=c.buffers,
        by_query=by_query(c, request) if request.deterministic else None,
        vector_atomics=request.arch.name in VECTOR_ATOMICS,
        step_end=step_end(c),
        row_threads=ROW_THREADS,
    )


def one_barrier(c: Candidate) -> bool:
    """Whether a step needs one barrier: nothing that a warp may still read is overwritten before the next."""
    return c.buffers == 2 and c.stages == (2 if c.q_warps == 1 else 3)


def step_end(c: Candidate) -> StepEnd:
    """How a step ends."""
    if c.stages == 1:
        return OneStage()
    return OneBarrier() if one_barrier(c) else TwoBarriers()


def by_query(c: Candidate, request: KernelRequest) -> ByQuery | None:
    """The entry for dq alone: the tile of queries with most warps on an SM, of equal ones the largest; None
    where none fits."""
    arch, d, keys = request.arch, padded(request.head_dim, c), _keys_of_dq(c, request)
    found = []
    for tile_q in DQ_QUERIES:
        warps, parts = tile_q // MMA_ROWS, _smem_of_dq(tile_q, c, request)
        by_memory = arch.smem_per_sm // (total(parts) + arch.smem_reserved)
        needed = d // 2 + keys + HEAVY + 50
        fits = [n for n in range(1, by_memory + 1) if n * warps <= ampere.USEFUL_WARPS]
        fits = [n for n in fits if n == 1 or needed <= ampere.budget(replace(c, kv_warps=warps, q_warps=1), arch, n)]
        if fits:
            blocks = fits[-1]
            found.append((blocks * warps, tile_q, ByQuery(tile_q=tile_q, keys=keys, blocks_per_sm=blocks, smem=parts)))
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _keys_of_dq(c: Candidate, request: KernelRequest) -> int:
    """Keys at a time of the entry for dq alone."""
    wide = padded(request.widest, c) > 128
    return min(c.tile.kv, (32 if wide else 64) // (2 if request.dropout else 1))


def _smem_of_dq(tile_q: int, c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block of the entry for dq alone."""
    d, dv, keys = padded(request.head_dim, c), padded(request.v_head_dim, c), _keys_of_dq(c, request)
    return (
        Part(name="q", amount=tile_q * d * ITEM, why=f"{tile_q} rows x {d} columns; dq leaves through the same room"),
        Part(name="d_o", amount=tile_q * dv * ITEM, why=f"{tile_q} rows x {dv} columns"),
        Part(name="k", amount=2 * keys * d * ITEM, why=f"2 stages x {keys} rows x {d} columns"),
        Part(name="v", amount=2 * keys * dv * ITEM, why=f"2 stages x {keys} rows x {dv} columns"),
    )


def smem(c: Candidate, layout: Backward, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block."""
    d, dv = padded(request.head_dim, c), padded(request.v_head_dim, c)
    scores = c.buffers * c.tile.q * c.tile.kv * ITEM
    of_scores = f"{c.buffers} tiles of {c.tile.kv} keys x {c.tile.q} queries x {ITEM} bytes"
    parts = [
        Part(
            name="k",
            amount=c.tile.kv * d * ITEM,
            why=f"{c.tile.kv} rows x {d} columns; dk leaves through the same room",
        ),
        Part(
            name="v",
            amount=c.tile.kv * dv * ITEM,
            why=f"{c.tile.kv} rows x {dv} columns; dv leaves through the same room",
        ),
        Part(name="q", amount=c.stages * c.tile.q * d * ITEM, why=f"{c.stages} stages x {c.tile.q} rows x {d} columns"),
        Part(
            name="d_o",
            amount=c.stages * c.tile.q * dv * ITEM,
            why=f"{c.stages} stages x {c.tile.q} rows x {dv} columns",
        ),
    ]
    if layout.shares_p:
        parts.append(Part(name="p", amount=scores, why=of_scores))
    if layout.score_tiles:
        parts.append(Part(name="ds", amount=scores, why=of_scores))
    parts.append(
        Part(name="lse, delta", amount=c.stages * c.tile.q * 8, why=f"{c.stages} stages x {c.tile.q} x 2 float32")
    )
    return tuple(parts)


def registers(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """32-bit registers of a thread at the widest point of the loop: P and dP, or a part of dQ, beside dV and dK.

    What is no array was fitted to what ptxas reports for emitted kernels; the operands, which it moves ahead of their
    use, come last, and a tight budget takes from them.
    """
    d, dv = padded(request.head_dim, c), padded(request.v_head_dim, c)
    scores, dq = _scores(c), _dq(c, request)
    p = Part(name="p, dp", amount=2 * scores, why=f"{MMA_ROWS * c.key_blocks} keys x {c.queries} queries, float32")
    # Of 64 queries at a time ptxas loads everything ahead, except where rows of 128 bytes give it few addresses.
    operands = 24 if c.queries < 64 or d % 64 == dv % 64 == 0 else 112
    kept = c.tile.kv * (d + dv) // c.threads
    if kept > CROWDED:
        operands += 8
    if d != dv:
        operands += _uneven(c)
    addresses = 30 + (0 if one_barrier(c) else 4) - (10 if c.q_warps > 1 else 0)
    return (
        Part(name="dk, dv", amount=kept, why=f"{c.tile.kv} x {d + dv} float32"),
        p if p.amount >= dq else Part(name="dq", amount=dq, why=f"{c.tile.q} x {d} float32 in {c.dq_parts} parts"),
        Part(name="addresses", amount=addresses, why="of tiles and copies, strides, loop state"),
        Part(name="variant", amount=_variant_registers(request), why="mask, score, their derivatives, dropout"),
        Part(name="operands", amount=operands, why="fragments of this step and the next"),
    )


def _scores(c: Candidate) -> int:
    """Elements of S, and of dP, that a thread holds at a time."""
    return MMA_ROWS * c.key_blocks * c.queries // 32


def _dq(c: Candidate, request: KernelRequest) -> int:
    """Elements of dQ that a thread holds at a time."""
    return 0 if request.deterministic else c.tile.q * padded(request.head_dim, c) // (c.threads * c.dq_parts)


def needed(c: Candidate, parts: tuple[Part, ...], request: KernelRequest) -> int:
    """Registers below which ptxas spills: while it holds all of P and dP it can do with fewer operands ahead.

    Not where the score has a slope or gradients of its own: x is kept then too, beside P as it is rounded.  Nor where
    rows of K and of V differ in length: 8 bytes were spilled at head_dim 96 and 192, and at 128 and 96 (sm_120).
    """
    if request.profile.has_slope or request.score_gradients or request.head_dim != request.v_head_dim:
        return total(parts)
    spared = min(_scores(c) // 2, 2 * _scores(c) - _dq(c, request)) - _in_parts(c, parts[0].amount, request)
    return total(parts) - max(0, spared)


def _uneven(c: Candidate) -> int:
    """Registers for operands where rows of K and of V differ in length: what keeps 723 plans from spilling."""
    if c.queries == 64:
        return 0
    if c.queries == c.tile.q:  # ptxas sees no loop over the tile, and loads all of it ahead
        return 56
    if c.threads <= 128:
        return 29
    return 18 if c.queries == 32 else 4


def _in_parts(c: Candidate, kept: int, request: KernelRequest) -> int:
    """Registers that the loop over the parts of a tile of queries keeps, where ptxas was seen to lack them."""
    in_parts = one_barrier(c) and c.queries * c.q_warps < c.tile.q and kept >= IN_PARTS_BESIDE
    spares = request.profile.scored or request.deterministic
    return IN_PARTS if in_parts and not spares else 0


def _variant_registers(request: KernelRequest) -> int:
    """What ptxas keeps for mask and score: little for a band or a bias of the head, more for what it must look up."""
    asked = request.profile
    if asked.plain and not request.dropout:
        return 0
    heavy = asked.looks_up or not asked.exact or asked.has_slope or request.dropout or bool(request.score_gradients)
    return HEAVY if heavy else LONG if asked.mask_ops > LONG_OPS else LIGHT


def budget(c: Candidate, arch: Arch, blocks: int) -> int:
    """Registers that a thread may have while `blocks` blocks share an SM, less those lost to alignment."""
    return ampere.budget(c, arch, blocks) - UNALIGNED


def _layout(plan: KernelPlan) -> Backward:
    """How warps divide work, of a plan of this pipeline."""
    assert isinstance(plan.backward, Backward)
    return plan.backward


def unsupported_reason(request: KernelRequest) -> str | None:
    """Why the pipeline has no such backward: it has every one, and the planner says where a tile does not fit."""
    return None


def does_not_fit_reason(c: Candidate, request: KernelRequest) -> str | None:
    """Why the candidate cannot run on the architecture, or None."""
    arch, d = request.arch, padded(request.head_dim, c)
    if dq_q_warps(c, d) == 0:
        return f"{c.warps} warps cannot divide {c.tile.q} x {d} elements of dq"
    blocks = d // (MMA_DEPTH * (c.warps // dq_q_warps(c, d)))
    if blocks % c.dq_parts:
        return f"{blocks} blocks of {MMA_DEPTH} columns of dq a warp are not {c.dq_parts} equal parts"
    layout = backward(c, request)
    smem_bytes = total(smem(c, layout, request))
    if smem_bytes > arch.smem_per_block:
        return f"shared memory {smem_bytes / KIB:.4g} KiB > {arch.smem_per_block / KIB:.4g} KiB"
    count = needed(c, registers(c, request), request)
    if count > budget(c, arch, 1):
        return f"registers {count} > {budget(c, arch, 1)}"
    if request.deterministic and layout.by_query is None:
        least = total(_smem_of_dq(min(DQ_QUERIES), c, request))
        return f"shared memory {least / KIB:.4g} KiB of the kernel for dq > {arch.smem_per_block / KIB:.4g} KiB"
    return None


def plan(c: Candidate, request: KernelRequest) -> KernelPlan:
    """The plan of a candidate that fits, with as many blocks per SM as memory, registers and warps allow."""
    arch, layout = request.arch, backward(c, request)
    memory, parts = smem(c, layout, request), registers(c, request)
    by_memory = arch.smem_per_sm // (total(memory) + arch.smem_reserved)
    most = min(by_memory, arch.max_blocks, max(1, ampere.USEFUL_WARPS // c.warps))
    least = needed(c, parts, request)
    blocks = max(n for n in range(1, most + 1) if n == 1 or least <= budget(c, arch, n))
    return make_plan(
        *(c, request, (padded(request.head_dim, c), padded(request.v_head_dim, c))),
        pipeline=NAME,
        program=programs.backward(
            *(c.warps, c.stages, layout.buffers), shares_p=layout.shares_p, shares_ds=layout.score_tiles
        ),
        q_in_registers=False,
        blocks_per_sm=blocks,
        smem=memory,
        registers=ampere.within(parts, budget(c, arch, blocks)),
        backward=layout,
    )


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """Clocks an SM spends on one score (one query, one key) in the main kernel, by unit.

    Tensor cores: five products, of which a deterministic plan leaves one to another entry.  Shared memory: operands of
    S and dP for each warp's part of a tile, those of dV, dK and dQ, P and dS where they are exchanged, and the copies
    of cp.async.  L2: q and d_o once per tile, and the sum of dq there and back.
    """
    d, dv = plan.padded_head_dim, plan.padded_v_head_dim
    q, kv, layout, warps = plan.tile.q, plan.tile.kv, _layout(plan), plan.warps
    special, arithmetic = profile(plan.variant).score_ops
    sm_clocks = arch.sms * arch.clock_hz
    keys, queries = kv // layout.kv_warps, layout.queries
    parts = q // (layout.q_warps * queries)  # of S, one after another
    moved = warps * parts * (keys + queries) * (d + dv)  # S and dP
    moved += warps * q * (d + dv) // layout.q_warps  # d_o and q again, for dV and dK
    if layout.shares_p:
        moved += 2 * (warps * keys * q + q * kv)
    elif layout.score_tiles:
        moved += q * kv
    columns, rows = d * layout.dq_q_warps // warps, q // layout.dq_q_warps
    if layout.adds_dq:
        moved += warps * kv * (layout.dq_parts * rows + columns)
    moved += q * (d + dv)
    products = 2 * (2 * d + 2 * dv) + (2 * d if layout.adds_dq else 0)
    sums = 8 * d if layout.adds_dq else 0
    return {
        "tensor": products * sm_clocks / arch.tensor_flops[NAME],
        "special": (1 + special) / arch.special_per_clock,
        "arithmetic": (SCORE_OPS + 2 * arithmetic) / arch.fp32_lanes,
        "shared memory": ITEM * moved / (q * kv * arch.smem_per_clock),
        "l2": (ITEM * (d + dv) + sums) / kv * sm_clocks / arch.l2_bytes_per_s,
    }


def seconds_per_score(plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
    """Seconds an SM needs for one score while 1, 2 ... blocks share it; the last one ranks the plan."""
    return tuple(_pace(plan, arch, blocks) for blocks in range(1, plan.blocks_per_sm + 1))


def _pace(plan: KernelPlan, arch: Arch, blocks: int) -> float:
    """Seconds for one score: the slowest unit, what the warps of a scheduler do not hide of the others, and waiting."""
    by_unit = clocks(plan, arch)
    l2 = by_unit.pop("l2")
    warps = blocks * plan.warps / ampere.SCHEDULERS
    slowest, total = max(by_unit.values()), sum(by_unit.values())
    hidden = slowest + (total - slowest) / max(OVERLAP * warps, 1)
    return max(hidden / min(warps, 1) + _waiting(plan, arch) / blocks, l2) / arch.clock_hz


def _waiting(plan: KernelPlan, arch: Arch) -> float:
    """Clocks for one score in which all warps of a block wait: barriers, and copies that none of its work hides."""
    q, columns = plan.tile.q, plan.padded_head_dim + plan.padded_v_head_dim
    clocks: float = BARRIER * _layout(plan).step_end.barriers
    if plan.stages == 1:
        clocks += FIRST_BYTE + ITEM * q * columns * arch.sms * arch.clock_hz / arch.l2_bytes_per_s
    return clocks / (q * plan.tile.kv)


def for_short(found: KernelPlan, request: KernelRequest) -> KernelPlan | None:
    """None: its kernels are the same at any length."""
    return None


def predictor(plan: KernelPlan, seconds_per_score: tuple[float, ...]) -> Predictor:
    """Seconds of the SM with most blocks, if every block visits every query."""
    q, kv, full = plan.tile.q, plan.tile.kv, len(seconds_per_score)

    def seconds(problem: Problem, sms: int) -> float:
        blocks = -(-problem.kv_len // kv) * problem.kv_heads * problem.batch
        waves, rest = divmod(-(-blocks // sms), full)
        scores = kv * max(1, -(-problem.q_len // q)) * q * problem.group
        return scores * (waves * full * seconds_per_score[-1] + (rest * seconds_per_score[rest - 1] if rest else 0.0))

    return seconds
