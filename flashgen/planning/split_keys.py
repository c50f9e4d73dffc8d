"""Keys that are split among blocks: the kernel that combines their parts, and the memory that holds these."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flashgen.analysis import counts
from flashgen.analysis.facts import analyse
from flashgen.planning.arch import ARCHS
from flashgen.planning.members import FoldedLeaves, Leaves
from flashgen.planning.plan import Part, Tile

if TYPE_CHECKING:
    from flashgen.analysis.tiles import Case
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

#: The kernels that combine the parts of rows: by a warp for each, of any number of parts or of few, and by a block for
#: each.
ENTRY, ENTRY_OF_FEW, ENTRY_BY_BLOCK = "attention_combine", "attention_combine_few_parts", "attention_combine_by_block"


class AtOnce(NamedTuple):
    """Parts of a row that are on their way at once, and blocks of an SM that have registers for them."""

    parts: int
    blocks: int


class Combining(NamedTuple):
    """How these kernels are made: warps of a block, what is on its way by a warp of each kind, and parts by a block."""

    warps: int
    of_any: AtOnce
    of_few: AtOnce
    by_block: int


#: Of rows of up to 128 columns.  With 8 parts at once twice as many rows are on an SM.  On an H200, 8 sequences of 8k
#: keys and 16 queries in 4 parts take 50.6 us so and 51.3 with 16 (32:4 heads, 4,096 rows); of 16 parts 8 at once cost
#: 0.3 us.
COMBINING = Combining(warps=4, of_any=AtOnce(parts=16, blocks=4), of_few=AtOnce(parts=8, blocks=8), by_block=64)

#: Blocks of an SM where 64 registers are too few for that: of leaves 8 to 40 bytes were spilled, and of parts that take
#: turns on other architectures than these 4 to 24.
ROOMY_BLOCKS, SPARING_ARCHS = 6, ("sm_90a",)

#: Seconds that such a kernel takes for itself, beside what it reads and writes.
COMBINE = 3e-6

#: A block each have at most so many rows, of more parts than a warp looks at at once.  On an H200 (1 sequence of 256k
#: keys, 32:4 heads, 256 leaves) a call takes 151 us with it and 158 without; with 32 parts it would take 0.2 us longer.
FEW_ROWS = 1024

#: Columns of o in the lanes of a warp, four in each.
COLUMNS = 128

#: Bytes of an element of a part of o, and of the maximum and the sum of a row of it.
PART_ITEM, PART_ROW = 4, 8

#: Parts whose maxima are found at once: those of a warp's lanes.
PARTS_OF_A_WARP = 32

#: Blocks that keys are split among at most.
MAX_SPLITS = 512


def tiles(plan: KernelPlan, problem: Problem) -> int:
    """Tiles of queries, of all heads and batches."""
    q_tiles = -(-problem.q_len // plan.tile_queries(problem.group))
    return q_tiles * problem.heads * problem.batch // plan.pack(problem.group)


def rows(plan: KernelPlan, problem: Problem, q_rows: int | None = None) -> int:
    """Rows of o; `q_rows` are those of q in memory where sequences lie behind each other."""
    if plan.layout.joined:
        return problem.heads * (problem.batch * problem.q_len if q_rows is None else q_rows)
    return problem.batch * problem.heads * problem.q_len


def combining(plan: KernelPlan) -> Combining:
    """How a plan's kernels that combine are made."""
    return _combining(plan.v_head_dim, plan.keys.turns and plan.arch in SPARING_ARCHS)


@lru_cache
def _combining(columns: int, spares: bool) -> Combining:
    """For rows of so many columns; `spares`: 64 registers are enough for few parts."""
    made, groups = COMBINING, -(-columns // COLUMNS)
    return made._replace(
        of_any=made.of_any._replace(parts=made.of_any.parts // groups),
        of_few=AtOnce(parts=made.of_few.parts // groups, blocks=made.of_few.blocks if spares else ROOMY_BLOCKS),
        by_block=made.by_block if groups == 1 else made.by_block // 4,
    )


def entry(plan: KernelPlan, rows: int, splits: int) -> str:
    """The kernel that combines so many parts of each of so many rows."""
    if splits <= combining(plan).of_few.parts:
        return ENTRY_OF_FEW
    return ENTRY_BY_BLOCK if rows <= FEW_ROWS and splits > PARTS_OF_A_WARP else ENTRY


def read_anyway(plan: KernelPlan, rows: int, splits: int) -> int:
    """Parts of a row of o that its warp loads before it knows which ones visited a tile: the first ones of those that
    take turns, while the maxima of all are on their way."""
    if not plan.keys.turns or (which := entry(plan, rows, splits)) == ENTRY_BY_BLOCK:
        return 0
    made = combining(plan)
    return min(splits, (made.of_few if which == ENTRY_OF_FEW else made.of_any).parts)


def rows_of_parts(plan: KernelPlan, problem: Problem, case: Case, splits: int) -> int:
    """Queries of tiles of queries, over the parts of these that visit any key; of sequences of one length."""
    facts, tile = analyse(plan.variant), Tile(q=plan.tile_queries(problem.group), kv=plan.tile.kv)
    if isinstance(plan.keys, Leaves):
        return counts.count_leaves(facts, case, tile, plan.keys.keys // tile.kv)
    return counts.count_parts(facts, case, tile, splits)


def folded_bytes(plan: KernelPlan, pairs: int) -> int:
    """What L2 moves beside where blocks fold leaves in memory: O of the leaves so far, read and written for each leaf;
    `pairs` are those of a query and a key that are visited, counted as if leaves were full."""
    if not isinstance(plan.keys, FoldedLeaves) or plan.specialized is None or not plan.specialized.fold.pointer:
        return 0
    return 2 * pairs // plan.keys.keys * (plan.padded_v_head_dim - plan.specialized.fold.columns) * PART_ITEM


def workspaces(
    plan: KernelPlan, problem: Problem, splits: int, q_rows: int | None = None, sms: int | None = None
) -> tuple[Part, ...]:
    """Device memory that parts need, or blocks that fold leaves there, on so many SMs; in bytes by the name of the
    pointer."""
    if plan.specialized is not None and plan.specialized.fold.pointer:
        blocks = ARCHS[plan.arch].sms if sms is None else sms
        columns = plan.padded_v_head_dim - plan.specialized.fold.columns
        amount = blocks * plan.tile.q * columns * PART_ITEM
        why = f"{blocks} blocks x {plan.tile.q} rows x {columns} columns x {PART_ITEM} bytes, which stay in L2"
        return (Part(name=plan.specialized.fold.pointer, amount=amount, why=why),)
    if not plan.keys.split:
        return ()
    number = rows(plan, problem, q_rows) * splits
    columns = plan.v_head_dim
    return (
        Part(
            name="part_o",
            amount=number * columns * PART_ITEM,
            why=f"{number} parts of rows x {columns} columns x {PART_ITEM} bytes",
        ),
        Part(name="part_rows", amount=number * PART_ROW, why=f"{number} maxima and sums, float32"),
    )
