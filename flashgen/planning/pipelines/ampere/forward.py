"""What a candidate of pipeline ampere costs: shared memory, registers and time, each a sum that can be shown.

The kernel is FlashAttention-2's forward (Dao 2023, Algorithm 1): every warp owns 16 or 32 query rows of the tile, Q
stays in shared memory (or in registers), K and V tiles pass through a ring of stages filled by cp.async, products are
mma.sync m16n8k16 with float32 accumulators in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flashgen.planning.arch import KIB, Arch, find
from flashgen.planning.integers import Allowed
from flashgen.planning.members import PACKED, FoldedLeaves
from flashgen.planning.operands import AS_STORED, Operands
from flashgen.planning.pipelines.ampere import programs
from flashgen.planning.pipelines.protocol import Predictor
from flashgen.planning.pipelines.shared import DROPOUT_OPS, SOFTMAX_OPS, make_plan, total
from flashgen.planning.pipelines.shared import cannot_pack as cannot_pack
from flashgen.planning.plan import ITEM, KernelPlan, Part, Tile, staged
from flashgen.planning.problem import Problem
from flashgen.planning.profile import Profile, profile
from flashgen.planning.request import Fixed, KernelRequest

NAME, COPIES = "ampere", "cp.async"

#: Head dims that the pipeline emits, in steps of 8 (rows of 16 bytes).
HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 16, 256

#: One mma: 16 query rows (m), and 16 columns of the reduction (k), to which head dims and tile_kv are padded.
MMA_ROWS, MMA_DEPTH = 16, 16

#: Schedulers of an SM, among which warps and registers are divided.
SCHEDULERS = 4

#: Registers that a kernel needs beyond its sum where a limit below the architecture's own holds it down.
TIGHT = 6

#: Registers of elements captured for each key, and of their addresses, on the way; and of those that a query and a key
#: select together by way of three dimensions or of another element: two plans with 129 and 134 in use spilled.
CAPTURED, CAPTURED_BY_PAIR = 8, 14

#: Registers of a mask that judges tiles by more than so many ops over ranges: `bigbird` (50 of them) at head_dim 64
#: spilled 8 bytes, `longnet` (43) nothing.
JUDGE_REGISTERS, JUDGED_OPS = 14, 45

MAX_TILE = 256
TILE_RULE = f"both sides are multiples of {MMA_ROWS} (the rows and the depth of one mma) up to {MAX_TILE}"
STAGES = (2, 3, 4)
INTEGERS = {"stages": Allowed(values=STAGES, rule="cp.async fills one stage while another is used")}

#: Queries of a tile that are tried, and the step of keys at which a plan shows a sum that no longer fits: mma's depth.
QUERIES, KEY_STEP = (32, 64, 128), 16

#: Menus have small tiles of their own; calls whose rows fill one tile take the least of these that holds them.
SMALL_QUERIES, FEW_QUERIES, FEW_BYTES = None, (16, 32, 64), None

#: Several blocks share an SM, and hide each other's waiting.
SHARES_SM = True

#: Enough to see why no tile fits: a large, a middle and the smallest one.
EXAMPLES = ((128, 64), (64, 64), (32, 16))

#: Tiles the planner tries by itself: powers of two, which divide the blocks of block-sparse masks, so that a tile is
#: rarely cut by one.  A pinned tile may be any multiple of 16 up to MAX_TILE.
FREE_TILE_Q = QUERIES[::-1]
FREE_TILE_KV = (128, 64, 32, 16)
FREE_STAGES = (2, 3)

#: A block of more warps would leave each less than 128 registers.
MAX_WARPS = 16

#: Registers of each word of bits that say which scores dropout keeps, and of draws on their way to it: with one, `full`
#: at head_dim 32 spilled 8 and 16 bytes (128 keys, 128 scores for each thread).
KEPT_WORD = 4

#: Clocks of a KV tile that nothing inside its warp hides: the barrier, the shuffles of the row maximum, and the latency
#: of the first and last mma, ldmatrix and ex2.  A lead: with it the model gives the speed that FlashAttention-2 was
#: seen to reach on an H200 (head_dim 64, 128 and 256) to about a tenth.
TILE_LATENCY = 500

#: More warps than this on an SM hide nothing more, and cost registers.
USEFUL_WARPS = 16

#: Registers by which ptxas moves loads of V ahead of their use, as a share of O's, and how many of those it gives up
#: without spilling, by the 16-row blocks of a warp; for K, registers for each doubling of tile_kv.
V_AHEAD, SPARED = 0.3, {1: 0.0, 2: 0.75}
K_AHEAD = 9

#: Registers of a row's head and query where heads are packed: with 4 of them plans of 8 bits spilled (`full` and
#: `softcap` at head_dim 128, 32 keys, 168 registers).
PACKED_REGISTERS = 9

#: Registers of addresses where one warp copies all of a stage, for each KiB beyond so many, and for rows of more
#: columns than NARROW: 15 of 128 keys in 16 bits spilled (head_dim 128), and 6 of 32 keys in 8 bits (256).
COPIED_ALONE, ALONE_KIB, WIDE_ALONE, NARROW = 3, 16, 24, 128


#: Registers that a score function wants in a warp of 32 rows beside a part of the keys of a sequence with its own
#: lengths: without them `alibi` spilled 76 bytes (head_dim 128, 64 x 32, 2 warps).
OWN_LENGTHS = 20


class Block(Protocol):
    """What divides the registers of an SM."""

    @property
    def warps(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tile, stages and warps to be judged."""

    tile: Tile
    stages: int
    warps: int
    q_in_registers: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows_per_warp(self) -> int:
        return self.tile.q // self.warps

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps"


def cannot_address(
    sizes: Sequence[int], strides: Sequence[int], itemsize: int, *, in_pages: bool = False
) -> str | None:
    """Why cp.async cannot load a tensor: it loads any whose rows start at multiples of 16 bytes."""
    return None


def cannot_page(page_size: int) -> str | None:
    """Why cp.async cannot load tiles from pages: each row has an address of its own."""
    return None


def padded(head_dim: int) -> int:
    """Columns a tile holds: head_dim rounded up to the depth of one mma."""
    return -(-head_dim // MMA_DEPTH) * MMA_DEPTH


def nearest_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile that TILE_RULE allows and that comes closest."""
    q, kv = (min(MAX_TILE, max(MMA_ROWS, MMA_ROWS * round(side / MMA_ROWS))) for side in tile)
    return q, kv


def unsupported_reason(request: KernelRequest) -> str | None:
    """Why the pipeline has no such forward, or None; the planner says where a tile does not fit."""
    return None


def candidates(fixed: Fixed) -> Iterator[Candidate]:
    """Every candidate that has what is fixed, and else what the planner may choose freely."""
    free = [Tile(q=q, kv=kv) for q in FREE_TILE_Q for kv in FREE_TILE_KV]
    for t in [fixed.tile] if fixed.tile else free:
        rows = t.q // MMA_ROWS
        for w in (rows, rows // 2) if rows % 2 == 0 else (rows,):
            if w > MAX_WARPS or (fixed.tile is None and w == 1):
                continue
            for s in fixed.among("stages", FREE_STAGES):
                for q_in_registers in (False, True):
                    yield Candidate(tile=t, stages=s, warps=w, q_in_registers=q_in_registers)


def smem(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block."""
    d, dv = padded(request.head_dim), padded(request.v_head_dim)
    return (
        Part(
            name="q",
            amount=c.tile.q * max(d, dv) * ITEM,
            why=f"{c.tile.q} rows x {max(d, dv)} columns x {ITEM} bytes; o leaves through the same room",
        ),
        staged("k", c.stages, c.tile.kv, d),
        staged("v", c.stages, c.tile.kv, dv),
    )


def registers(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """32-bit registers of a thread at the widest point of the loop, as ptxas likes to use them.

    The widest point is S complete with the first operands of P V on their way: O, S (whose room P then takes over) and
    fragments.  What is no array was fitted to what ptxas reports for emitted kernels; the loads that it moves ahead of
    their use come last, and a tight budget takes from them.
    """
    d, dv, m = padded(request.head_dim), padded(request.v_head_dim), c.rows_per_warp // MMA_ROWS
    o = c.tile.q * dv // c.threads
    q = m * d // 4 if c.q_in_registers else 4 * m
    swizzles = 2 * min(d // MMA_DEPTH, 4) + 2 * min(dv // MMA_DEPTH, 4)
    s = c.tile.q * c.tile.kv // c.threads
    words = KEPT_WORD * math.ceil(s / 32) if request.dropout else 0
    copied = c.tile.kv * (d + dv) * (1 if request.float8 else ITEM)
    alone = COPIED_ALONE * max(0, copied // KIB - ALONE_KIB) + WIDE_ALONE * (max(d, dv) > NARROW)
    return (
        Part(name="o", amount=o, why=f"{c.tile.q} x {dv} float32 over {c.threads} threads"),
        Part(name="s", amount=s, why=f"{c.tile.q} x {c.tile.kv} float32, then p"),
        Part(name="q", amount=q, why="all of the warp's rows" if c.q_in_registers else "fragments of one step"),
        Part(name="softmax", amount=4 * m, why=f"running maximum and sum of {2 * m} rows"),
        Part(
            name="addresses",
            amount=20 + swizzles + alone * (c.warps == 1),
            why="of the copies, strides, loop state; the swizzle's columns",
        ),
        Part(name="mask", amount=mask_registers(request.profile), why="positions, bounds and values in partial tiles"),
        *((Part(name="dropout", amount=words, why="a bit for each score, and draws"),) if request.dropout else ()),
        Part(
            name="loads ahead",
            amount=round(V_AHEAD * o + K_AHEAD * math.log2(c.tile.kv / MMA_DEPTH)),
            why="of k and v fragments",
        ),
    )


def needed(c: Candidate, parts: tuple[Part, ...]) -> int:
    """Registers below which ptxas spills: it can do with fewer loads of V ahead."""
    spared = SPARED[c.rows_per_warp // MMA_ROWS] * V_AHEAD * parts[0].amount
    return total(parts) - round(spared)


def within(parts: tuple[Part, ...], limit: int) -> tuple[Part, ...]:
    """The registers with as few loads ahead as a budget that is tight leaves."""
    *others, last = parts
    spare = limit - total(others)
    return (*others, replace(last, amount=min(last.amount, spare)))


def budget(c: Block, arch: Arch, blocks: int) -> int:
    """Registers that a thread may have while `blocks` blocks share an SM.

    A quarter of the file belongs to each of the four schedulers, and the fullest one decides; they go out by eights.
    Below the most that a thread can have, ptxas wants a few more than it needs.
    """
    warps = -(-blocks * c.warps // SCHEDULERS)
    each = arch.registers_per_sm // SCHEDULERS // (32 * warps) // 8 * 8
    return arch.registers_per_thread if each > arch.registers_per_thread else each - TIGHT


def does_not_fit_reason(c: Candidate, request: KernelRequest) -> str | None:
    """Why the candidate cannot run on the architecture, or None."""
    return beyond_limits(c, request, smem(c, request), registers(c, request))


def beyond_limits(
    c: Candidate, request: KernelRequest, memory: tuple[Part, ...], wanted: tuple[Part, ...]
) -> str | None:
    """The limit that shared memory or registers pass, or None."""
    arch, smem_bytes = request.arch, total(memory)
    if smem_bytes > arch.smem_per_block:
        return f"shared memory {smem_bytes / KIB:.4g} KiB > {arch.smem_per_block / KIB:.4g} KiB"
    own_parts = request.layout.own and request.keys.split and request.variant.score_node is not None
    count = needed(c, wanted) + OWN_LENGTHS * (own_parts and c.rows_per_warp > MMA_ROWS)
    if count > arch.registers_per_thread:
        return f"registers {count} > {arch.registers_per_thread}"
    if count > budget(c, arch, 1):
        return f"registers {count} x {c.threads} threads > {arch.registers_per_sm}"
    return None


def plan(c: Candidate, request: KernelRequest) -> KernelPlan:
    """The plan of a candidate that fits, with as many blocks per SM as memory, registers and warps allow."""
    if isinstance(request.keys, FoldedLeaves):  # registers are for o of one leaf
        request = request.visiting(request.keys.in_parts)
    return plan_of(c, request, smem(c, request), registers(c, request))


def plan_of(
    c: Candidate,
    request: KernelRequest,
    memory: tuple[Part, ...],
    wanted: tuple[Part, ...],
    operands: Operands = AS_STORED,
) -> KernelPlan:
    """The plan of a candidate that takes so much."""
    arch = request.arch
    by_memory = arch.smem_per_sm // (total(memory) + arch.smem_reserved)
    by_warps = max(1, min(arch.max_warps, USEFUL_WARPS) // c.warps)
    most = min(by_memory, by_warps, arch.max_blocks)
    blocks = max(n for n in range(1, most + 1) if n == 1 or needed(c, wanted) <= budget(c, arch, n))
    return make_plan(
        *(c, request, (padded(request.head_dim), padded(request.v_head_dim))),
        pipeline=NAME,
        program=programs.forward(c.warps, c.stages),
        q_in_registers=c.q_in_registers,
        blocks_per_sm=blocks,
        smem=memory,
        registers=within(wanted, budget(c, arch, blocks)),
        operands=operands,
    )


def packed(plan: KernelPlan) -> KernelPlan | None:
    """The form of a plan whose tiles have rows of all heads that share keys, as far as their number is a power of two;
    None where registers do not allow it.  An SM may have fewer blocks of it."""
    *others, ahead = plan.registers
    wanted = (*others, Part(name="packed", amount=PACKED_REGISTERS, why="heads and queries of rows"), ahead)
    least, arch = total(wanted) - round(SPARED[plan.tile.q // plan.warps // MMA_ROWS] * ahead.amount), find(plan.arch)
    blocks = next((n for n in range(plan.blocks_per_sm, 0, -1) if least <= budget(plan, arch, n)), None)
    if blocks is None:
        return None
    return replace(plan, registers=within(wanted, budget(plan, arch, blocks)), blocks_per_sm=blocks, rows=PACKED)


def packing_gain(
    packed: KernelPlan,
    plan: KernelPlan,
    seconds_per_score: Callable[[KernelPlan], tuple[float, ...]],
    problem: Problem,
    sms: int,
) -> float:
    """How many times as long as on the tiles of a packed form the SM with most to do works on those of `plan`, where
    each sees the same keys; O(1)."""

    def seconds(one: KernelPlan) -> float:
        if not one.keys.split:
            return predictor(one, seconds_per_score(one))(problem, sms)
        pack = one.pack(problem.group)  # of tiles among as many blocks as fill the SMs
        return -(-problem.q_len * pack // one.tile.q) / pack * one.tile.q * seconds_per_score(one)[-1]

    return seconds(plan) / seconds(packed)


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """Clocks an SM spends on one score (one query, one key), by the unit that spends them.

    Tensor cores: two products.  Special functions: one ex2, and those of the score function.  Arithmetic: the softmax,
    the score function, dropout, and rescaling O once per tile.  Shared memory: every warp reads all of K and V for its
    rows, Q again for each KV tile unless registers hold it, and cp.async writes K and V once per block.  Latency: what
    a warp waits in each KV tile, over the four schedulers.  L2: K and V once per block.
    """
    d, dv = plan.padded_head_dim, plan.padded_v_head_dim
    rows = plan.tile.q // plan.warps
    special, arithmetic = profile(plan.variant).score_ops
    arithmetic += DROPOUT_OPS if plan.dropout else 0
    sm_clocks = arch.sms * arch.clock_hz
    q_again = 0 if plan.q_in_registers else d / plan.tile.kv
    bytes_moved = ITEM * ((d + dv) / rows + q_again + (d + dv) / plan.tile.q)
    return {
        "tensor": 2 * (d + dv) * sm_clocks / arch.tensor_flops[NAME],
        "special": (1 + special) / arch.special_per_clock,
        "arithmetic": (SOFTMAX_OPS + arithmetic + dv / plan.tile.kv) / arch.fp32_lanes,
        "shared memory": bytes_moved / arch.smem_per_clock,
        "latency": TILE_LATENCY / (4 * rows * plan.tile.kv),
        "l2": ITEM * (plan.head_dim + plan.v_head_dim) / plan.tile.q * sm_clocks / arch.l2_bytes_per_s,
    }


def seconds_per_score(plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
    """Seconds an SM needs for one score while 1, 2 ... blocks share it; the last one ranks the plan."""
    return tuple(pace(clocks(plan, arch), plan, arch, blocks) for blocks in range(1, plan.blocks_per_sm + 1))


def predictor(plan: KernelPlan, seconds_per_score: tuple[float, ...]) -> Predictor:
    """Seconds of the SM with most blocks, if every block visits every key."""
    q, kv, full, packed = plan.tile.q, plan.tile.kv, len(seconds_per_score), plan.packed

    def seconds(problem: Problem, sms: int) -> float:
        pack = plan.pack(problem.group) if packed else 1
        blocks = -(-problem.q_len * pack // q) * problem.heads * problem.batch // pack
        waves, rest = divmod(-(-blocks // sms), full)
        scores = q * max(1, -(-problem.kv_len // kv)) * kv
        return scores * (waves * full * seconds_per_score[-1] + (rest * seconds_per_score[rest - 1] if rest else 0.0))

    return seconds


def pace(by_unit: dict[str, float], plan: KernelPlan, arch: Arch, blocks: int) -> float:
    """Seconds an SM needs for one score while `blocks` blocks share it, of the clocks of its units.

    One warp a scheduler runs product, softmax and loads one after another; n warps hide all but the slowest unit
    n-fold.  Loads from L2 run behind all of it.
    """
    l2 = by_unit.pop("l2")
    warps_a_scheduler = blocks * plan.warps / 4
    slowest, total = max(by_unit.values()), sum(by_unit.values())
    hidden = slowest + (total - slowest) / max(warps_a_scheduler, 1)
    return max(hidden / min(warps_a_scheduler, 1), l2) / arch.clock_hz


def mask_registers(asked: Profile) -> int:
    """Registers that positions, bounds and values of the mask take in a partial tile, by its number of ops; those of
    captured elements, and of judging tiles."""
    ops = asked.mask_ops
    captured = CAPTURED if asked.loads_by_key else 0
    captured += CAPTURED_BY_PAIR if asked.reads_far_by_pair else 0
    judged = JUDGE_REGISTERS if asked.judged_ops > JUDGED_OPS else 0
    return captured + judged + (4 + 2 * min(ops, 6) if ops else 0)
