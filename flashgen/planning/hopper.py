"""What a candidate of pipeline hopper costs: shared memory, registers and time, each a sum that can be shown.

The kernel is FlashAttention-3's forward (Shah et al. 2024, Algorithm 2): one block a multiprocessor, in which one
warpgroup hands out and loads tiles by TMA and two or three others multiply by wgmma, 64 query rows each.  P stays in
registers.  A block takes tile after tile of queries, so that the first product of one runs beside the last of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.lang.variant import Variant
from flashgen.planning.ampere import SOFTMAX_OPS, score_ops
from flashgen.planning.arch import KIB, Arch
from flashgen.planning.plan import KernelPlan, Part, Role, Specialized, Tile
from flashgen.planning.problem import Problem

NAME = "hopper"

#: Head dims that the pipeline emits, in steps of 8: TMA takes rows whose stride is a multiple of 16 bytes.
HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 16, 256

ITEM = 2  # bytes of float16 and bfloat16

#: Query rows of a warpgroup (wgmma's m), and the depth of one wgmma, to which head dims and tile_kv are padded.
ROWS, DEPTH = 64, 16

#: Columns of a box that TMA copies: 128 bytes, the widest swizzle.  A narrower row is padded with zeros.
BOX = 64

#: Registers of a producer's and of a consumer's thread by the number of consumer warpgroups.  A block starts with
#: 65,536 / threads, rounded down to a multiple of 8; what the producers give back the consumers take, and never more:
#: 168 x 384 = 40 x 128 + 232 x 256, and 128 x 512 = 32 x 128 + 160 x 384.
REGISTERS = {2: (40, 232), 3: (32, 160)}

#: Registers of a consumer's thread beside fragments: softmax state, addresses, barriers, what ptxas needs to move them.
OVERHEAD = 32

#: Shared memory for barriers and messages: less than this, which the alignment of tiles rounds it up to.
CONTROL = KIB

MAX_TILE_KV = 256
STAGES = (2, 3, 4)

#: Whether its forward can drop probabilities.
DROPOUT = False

#: Tiles the planner tries by itself.
FREE_TILE_KV = tuple(range(48, 193, 16))

#: Warpgroups take turns to issue products where a product is so short that the softmax of one must run under those of
#: the others; with longer ones they find their turns by themselves.
PING_PONG_COLUMNS = 64

#: Clocks of a step that no other warpgroup hides: the latency of the first wgmma, of barriers and shuffles.
STEP_CLOCKS = 400

#: Clocks from one tile of queries to the next: the epilogue; with one stage for Q the load of the next one too.
EPILOGUE_CLOCKS, Q_LOAD_CLOCKS = 1600, 2000

#: Keys that a tile of queries sees where nothing is known: weighs what happens once a tile of queries.
TYPICAL_KEYS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tile and stages to be judged; `q_stages` tiles of queries in shared memory."""

    tile: Tile
    stages: int
    q_stages: int

    @property
    def warpgroups(self) -> int:
        return self.tile.q // ROWS

    @property
    def warps(self) -> int:
        return 4 * (1 + self.warpgroups)

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps"


def padded(head_dim: int) -> int:
    """Columns of a product: head_dim rounded up to the depth of one wgmma."""
    return -(-head_dim // DEPTH) * DEPTH


def boxed(head_dim: int) -> int:
    """Columns in shared memory: head_dim rounded up to whole boxes."""
    return -(-head_dim // BOX) * BOX


def candidates(tile: Tile | None, stages: int | None) -> Iterator[Candidate]:
    """Every candidate for a pinned tile or number of stages, or for what the planner may choose freely."""
    for t in [tile] if tile else [Tile(q=ROWS * w, kv=kv) for w in REGISTERS for kv in FREE_TILE_KV]:
        for s in [stages] if stages else STAGES[:1]:
            for q_stages in (2, 1):
                yield Candidate(tile=t, stages=s, q_stages=q_stages)


def smem(c: Candidate, head_dim: int, v_head_dim: int) -> tuple[Part, ...]:
    """Bytes of shared memory of a block."""
    d, dv = boxed(head_dim), boxed(v_head_dim)
    return (
        Part(
            name="q",
            amount=c.q_stages * c.tile.q * d * ITEM,
            why=f"{c.q_stages} stages x {c.tile.q} rows x {d} columns x {ITEM} bytes",
        ),
        Part(
            name="k",
            amount=c.stages * c.tile.kv * d * ITEM,
            why=f"{c.stages} stages x {c.tile.kv} rows x {d} columns x {ITEM} bytes",
        ),
        Part(
            name="v",
            amount=c.stages * c.tile.kv * dv * ITEM,
            why=f"{c.stages} stages x {c.tile.kv} rows x {dv} columns x {ITEM} bytes",
        ),
        Part(name="control", amount=CONTROL, why="barriers and messages"),
    )


def registers(c: Candidate, v_head_dim: int) -> tuple[Part, ...]:
    """32-bit registers of a consumer's thread: S of one tile is on its way while P of the one before is multiplied."""
    return (
        Part(name="o", amount=padded(v_head_dim) // 2, why=f"{ROWS} x {padded(v_head_dim)} float32 over 128 threads"),
        Part(name="s", amount=c.tile.kv // 2, why=f"{ROWS} x {c.tile.kv} float32 over 128 threads"),
        Part(name="p", amount=c.tile.kv // 4, why=f"{ROWS} x {c.tile.kv} in 16 bits over 128 threads"),
        Part(name="overhead", amount=OVERHEAD, why="softmax, addresses, loop state"),
    )


def refusal(c: Candidate, arch: Arch, smem_bytes: int, needed: int) -> str | None:
    """Why the candidate cannot run on `arch`, or None."""
    if c.tile.q % ROWS or c.warpgroups not in REGISTERS:
        rows = " or ".join(str(ROWS * w) for w in REGISTERS)
        return f"tile_q is not {rows}: {' or '.join(map(str, REGISTERS))} warpgroups of {ROWS} rows"
    if smem_bytes > arch.smem_per_block:
        return f"shared memory {smem_bytes:,} bytes > {arch.smem_per_block:,}"
    limit = REGISTERS[c.warpgroups][1]
    if needed > limit:
        return f"registers {needed} > {limit} of a consumer where {c.warpgroups} warpgroups share {arch.registers_per_sm:,}"
    return None


def plan(c: Candidate, variant: Variant, arch: Arch, dtype: str, head_dim: int, v_head_dim: int) -> KernelPlan:
    """The plan of a candidate that fits."""
    producer, consumer = REGISTERS[c.warpgroups]
    return KernelPlan(
        variant=variant,
        pass_name="forward",
        pipeline=NAME,
        arch=arch.name,
        dtype=dtype,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        padded_head_dim=padded(head_dim),
        padded_v_head_dim=padded(v_head_dim),
        tile=c.tile,
        stages=c.stages,
        roles=(
            Role(name="producer", warps=4, registers=producer),
            Role(name="consumer", warps=4 * c.warpgroups, registers=consumer),
        ),
        q_in_registers=False,
        blocks_per_sm=1,
        smem=smem(c, head_dim, v_head_dim),
        registers=registers(c, v_head_dim),
        specialized=Specialized(
            warpgroups=c.warpgroups,
            producer_registers=producer,
            consumer_registers=consumer,
            q_stages=c.q_stages,
            ping_pong=max(head_dim, v_head_dim) <= PING_PONG_COLUMNS,
            staged=c.q_stages > 1,
            dynamic=variant.mask is not None,
        ),
    )


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """Clocks a multiprocessor spends on one score (one query, one key), by the unit that spends them."""
    special, arithmetic = score_ops(plan.variant)
    share = arch.sms * arch.clock_hz
    return {
        "tensor": 2 * (plan.padded_head_dim + plan.padded_v_head_dim) * share / arch.tensor_flops[NAME],
        "special": (1 + special) / arch.special_per_clock,
        "arithmetic": (SOFTMAX_OPS + arithmetic) / arch.fp32_lanes,
    }


def pace(plan: KernelPlan, arch: Arch) -> float:
    """Seconds a multiprocessor needs for one score: the planner's ranking.

    n warpgroups hide all but the slowest unit n-fold; a step has a latency that nothing hides, and so has the way from
    one tile of queries to the next.
    """
    by_unit = clocks(plan, arch)
    slowest, total = max(by_unit.values()), sum(by_unit.values())
    hidden = slowest + (total - slowest) / plan.specialized.warpgroups
    step = STEP_CLOCKS / (plan.tile.q * plan.tile.kv)
    return (hidden + step + between_tiles(plan) / (plan.tile.q * TYPICAL_KEYS)) / arch.clock_hz


def between_tiles(plan: KernelPlan) -> int:
    """Clocks from one tile of queries to the next in which a warpgroup multiplies nothing."""
    return EPILOGUE_CLOCKS + (Q_LOAD_CLOCKS if plan.specialized.q_stages == 1 else 0)


def busiest(plan: KernelPlan, pace: float, problem: Problem, sms: int) -> float:
    """Seconds of the multiprocessor with most to do, if a mask hides half of the keys along a diagonal, in O(1)."""
    q_tiles = -(-problem.q_len // plan.tile.q) * problem.heads * problem.batch
    keys = -(-problem.kv_len // plan.tile.kv) * plan.tile.kv
    if plan.variant.mask is not None:
        keys = min(keys, (keys + plan.tile.q + plan.tile.kv) / 2)  # half, and half of the tiles on the diagonal in vain
    share = -(-q_tiles // sms) if plan.variant.mask is None else max(1.0, q_tiles / sms)  # dynamic: no last wave
    return share * plan.tile.q * keys * pace
