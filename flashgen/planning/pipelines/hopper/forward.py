"""What a candidate of pipeline hopper costs: shared memory and registers, each a sum that can be shown.

The kernel is FlashAttention-3's forward (Shah et al. 2024, Algorithm 2): one block per SM, in which one
warpgroup hands out, loads and stores tiles and two or three others multiply by wgmma, 64 query rows each, with P in
registers.  A block takes tile after tile of queries, so that the first product of one runs beside the last of another,
or O of one is stored while queries of another come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from flashgen.lang.expr import Node, depends_on
from flashgen.planning.arch import KIB, find
from flashgen.planning.integers import Allowed
from flashgen.planning.layout import Layout, Padded
from flashgen.planning.members import (
    ALL_KEYS,
    ENDS_BESIDE_NEXT,
    FIRST_TILE_WHOLE,
    NO_FOLD,
    PACKED,
    RESCALE_BEHIND_P,
    DynamicScheduler,
    EndsBeforeNext,
    FirstTile,
    FirstTileAsSeen,
    Fold,
    FoldInMemory,
    FoldInShared,
    FullTiles,
    FullTilesApart,
    Highest,
    HighestAsFloat,
    HighestAsInteger,
    HighestBySigns,
    InTimeScheduler,
    Keys,
    Leaves,
    MaskAsBits,
    MaskByElement,
    MaskByTile,
    MaskByWarpgroup,
    MaskedTilesApart,
    MaskFromBits,
    MaskInWords,
    MaskWithinBounds,
    OByTma,
    OFromRegisters,
    OInParts,
    PartScheduler,
    Rescale,
    RescaleBesideS,
    Scheduler,
    ScoreByElement,
    ScoreByRow,
    ScoreNearZero,
    SequenceScheduler,
    SoftCap,
    StaticScheduler,
    TileEnd,
    TilesAlike,
)
from flashgen.planning.pipelines.hopper import masks, programs
from flashgen.planning.pipelines.hopper.candidate import ALONE, BOX, DEPTH, ROWS, WARPGROUPS, Candidate, boxed, padded
from flashgen.planning.pipelines.hopper.pace import FOLD_ITEM, SHORT_COLUMNS
from flashgen.planning.pipelines.hopper.pace import clocks as clocks
from flashgen.planning.pipelines.hopper.pace import packing_gain as packing_gain
from flashgen.planning.pipelines.hopper.pace import predictor as predictor
from flashgen.planning.pipelines.hopper.pace import seconds_per_score as seconds_per_score
from flashgen.planning.pipelines.shared import cannot_pack as cannot_pack
from flashgen.planning.pipelines.shared import make_plan, total
from flashgen.planning.plan import BOX_ROWS, ITEM, SWIZZLE, KernelPlan, Part, Specialized, Tile, in_whole_rows, staged
from flashgen.planning.problem import STORED_BYTES
from flashgen.planning.profile import profile
from flashgen.planning.program import WARP, Program, consumer_registers
from flashgen.planning.request import Fixed, KernelRequest
from flashgen.planning.summaries import WORD

NAME, COPIES = "hopper", "TMA"

#: Bytes between rows, heads or batches that a tensor map can hold.
TMA_STRIDE_BYTES = 1 << 40

#: Head dims that the pipeline emits, in steps of 8: TMA takes rows whose stride is a multiple of 16 bytes.
HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 16, 256


MAX_TILE_KV = 256
TILE_RULE = f"tile_q is 64, 128 or 192 (warpgroups of {ROWS} rows), tile_kv a multiple of {DEPTH} up to {MAX_TILE_KV}"
STAGES = (2, 3, 4)

#: Queries of a tile, and the step of keys at which a plan shows the sum that no longer fits: wgmma's n.
QUERIES, KEY_STEP = tuple(ROWS * w for w in WARPGROUPS), 8

#: Queries of a tile where SMs would be left without a block.
SMALL_QUERIES = ROWS * ALONE

#: And of those whose rows fill one tile.
FEW_QUERIES = (SMALL_QUERIES,)

#: Bytes of keys and values in shared memory that keep memory busy for these: of 13 caches that were decoded on an H200
#: at head_dim 128, two stages of 64 KiB took 0.987 to 1.0 of the time of three.
FEW_BYTES = 128 * KIB

#: Columns in steps of which O of the leaves so far lies in shared memory.
FOLD_COLUMNS = 32

#: Registers in steps of which they hold O of the leaves so far, and the most of them: 48 at head_dim 96 took 1.08 of
#: the time of none, 40 took 0.98.
HELD_STEP, MOST_HELD = 8, 40

#: Registers for leaves beside those of three warpgroups, and more where the mask is no band: `alibi` and `sink_window`
#: at head_dim 64 spilled 16 and 28 bytes.
FOLD_REGISTERS, RUNS_REGISTERS = 4, 4

#: And where a part of a padded sequence is one leaf: `causal` at head_dim 64 spilled 8 bytes in tiles of 192 queries.
#: More where a block of two warpgroups folds leaves of many columns beside a score function: `alibi` at head_dim 256
#: spilled 20 to 40 bytes; and twice those of three beside dropout: `full` and `causal` at 128 spilled 44 and 32.
OWN_PART_REGISTERS, WIDE_FOLD_REGISTERS, WIDE_FOLD = 4, 12, 192

#: A block has an SM to itself.
SHARES_SM = False

#: Tiles whose sums an error message shows.
EXAMPLES = ((128, 128), (128, 64), (128, 32))

#: Tiles and stages that the planner tries by itself, the best first.  Measured on an H200: more than 128 keys bring
#: nothing at any head dim, and fewer always cost.
FREE_TILE_KV = (128, 112, 96, 80, 64, 48, 32, 16)
FREE_STAGES = (3, 2)

#: Registers of a consumer's thread beside fragments: softmax, addresses, barriers; two more where there is a mask or a
#: score; and one more for every so many columns of q and k, whose descriptors are kept, but no less than for a few:
#: `chunked` at head_dim 16 and 32 beside 64 columns of v spilled 48 bytes, and ptxas serialised its products.
OVERHEAD, VARIANT_REGISTERS, DESCRIPTOR_COLUMNS, LEAST_COLUMNS = 19, 2, 12, 48

#: Registers that a score function needs beside S; those of a captured element and its address, and of finding them.
SCORE_REGISTERS, ELEMENT_REGISTERS, CAPTURED_REGISTERS = 4, 2, 8

#: And more where query and key select it together: `tree` at head_dim 128 spilled 12 bytes with one left.
PAIR_REGISTERS = 4

#: Elements on their way at once where the mask is asked for a few at a time: `tree` at head_dim 128, heads packed, does
#: not spill in tiles of 128 keys.
READ_AT_ONCE = 4

#: Registers that must be left where a mask reads several elements for each key at once: `gist_flags` and
#: `document_offsets` at head_dim 128 spilled 24 bytes with one left.
SEVERAL_READ_REGISTERS = 2

#: Registers of a mask that divides by what a call gives: `dilated` spilled 24 bytes with six left at head_dim 256, and
#: 12 with ten at 64.
DIVISOR_REGISTERS = 11

#: Registers for where rows of bits lie that are made of a table of all pairs.
BITS_REGISTERS = 4

#: A score function that reads an element for each key, in every tile, takes one more register for so many keys.
READING_KEYS = 6

#: Registers for dropout: a bit for each score of a thread, and rounds of Philox; and so many more (of 64 keys or more)
#: beside the maxima, with which ptxas mixes them.  So no shipped spec spills.
DROPOUT_REGISTERS, DROPOUT_BESIDE = 16, 22

#: And with three stages: without these `causal` at head_dim 128 spilled 56 bytes, and `full` 20.
DROPOUT_THIRD_STAGE = 8

#: Registers of what leads to a row of elements that a score reads, beside these: float32 in tiles of 128 x 96 at
#: head_dim 128 spilled 16 bytes with 13, and took 517 us in place of 469.  More in tiles of three warpgroups and more
#: than 64 keys: 192 x 80 at head_dim 64 spilled 20 bytes with 18.
ROW_REGISTERS, WIDE_ROW_REGISTERS = 14, 6

#: Registers that a score function wants beside those counted where it is emitted twice.
ROOM = 16

#: Votes in a tile on whether all arguments are small, for O of so many columns and for more, where kernels that
#: take half a tile together spill 24 to 32 bytes.  On an H100 one took 0.96 to 1.0 of the time of two for N(0, 1), and
#: 1.07 to 1.09 of it where few are large.
CAPPED_COLUMNS, CAP_VOTES, WIDE_CAP_VOTES = 192, 2, 4

#: Columns of O for which signs of maxima say how highest scores are found.
SIGNS_COLUMNS = range(96, 129)

#: Registers wanted for the queries of a thread's two rows where heads are packed and mask or score use queries: none
#: follows from the other any more.  Kernels of 128 x 64 at head_dim 256 spilled with 10 left; where registers hold O of
#: leaves, 40 of these fit beside them at head_dim 128 in place of 32.
PACKED_REGISTERS, PACKED_BESIDE_HELD = 12, 8

#: Registers of what leads to elements that a mask looks up of a query and a key.
LOOKUP_REGISTERS = 8

#: Registers of a producer's thread that judges tiles by evaluating conditions over ranges, not by zones alone; and of
#: one that goes on to parts of tiles, if consumers can spare them.
JUDGE_REGISTERS, PARTS_REGISTERS = 56, 64

#: Registers of one that keeps what follows from a tile's rows: for each condition of a tile that is visible or that is
#: partial, and for going on to parts.  `sink_window` (4 of them), `longformer` and `zigzag` at head_dim 64 spilled 8 to
#: 44 bytes with 32 registers, `streaming_blocks` (6) 32 bytes with 56, `bigbird` (16) 184 bytes with 64.
SCHEDULER_REGISTERS, RUN_REGISTERS, PART_REGISTERS = 29, 1, 22

#: Tiles of queries in shared memory: with two the next one is loaded while this one is worked on, and O leaves by TMA.
Q_STAGES = (1, 2)

INTEGERS = {
    "stages": Allowed(values=STAGES, rule="TMA fills one stage while another is used"),
    "q_stages": Allowed(values=Q_STAGES, rule="while one is worked on, one more is loaded"),
}


def cannot_address(
    sizes: Sequence[int], strides: Sequence[int], itemsize: int, *, in_pages: bool = False
) -> str | None:
    """Why TMA cannot load a tensor [batch, heads, rows, columns] with these strides in elements, or None.

    Rows are known to start at multiples of 16 bytes.  Where copies of a page bring whole rows, the map of a cache
    counts heads in boxes.
    """
    batch, head, row = strides[:3]
    if in_pages and in_whole_rows(sizes[3], itemsize) and sizes[1] > 1 and head * itemsize % SWIZZLE:
        return f"its heads lie {head * itemsize} bytes apart, and in pages boxes start at multiples of {SWIZZLE}"
    if batch and head and row and max(batch, head, row) * itemsize < TMA_STRIDE_BYTES:
        return None
    for axis, word in enumerate(("batch", "head", "row")):
        if sizes[axis] > 1 and strides[axis] == 0:
            return f"its {word} stride is 0 (expanded)"
        if sizes[axis] > 1 and strides[axis] * itemsize >= TMA_STRIDE_BYTES:
            return f"its {word} stride is {strides[axis] * itemsize} bytes, and TMA's stay below 2^40"
    return None


def cannot_page(page_size: int) -> str | None:
    """Why TMA cannot load tiles of keys from pages of so many rows, or None."""
    if page_size % BOX_ROWS:
        return f"pages of {page_size} rows are no boxes of a swizzled tile, which have multiples of {BOX_ROWS} rows"
    return None


def nearest_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile that TILE_RULE allows and that comes closest."""
    q, kv = tile
    rows = min((ROWS * w for w in (*WARPGROUPS, ALONE)), key=lambda r: abs(r - q))
    return rows, min(MAX_TILE_KV, max(DEPTH, DEPTH * round(kv / DEPTH)))


def unsupported_reason(request: KernelRequest) -> str | None:
    """Why no tile fits, where any may be taken, or None: the pipeline has every forward of the language.  Leaves have
    the bits of one pipeline: where they do not fit no other serves them."""
    if request.fixed.tile or request.fixed.pipeline or request.fixed.integers() or request.keys.invariant:
        return None
    reasons = []
    for c in candidates(request.fixed):
        reason = does_not_fit_reason(c, request)
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[-1]


def candidates(fixed: Fixed) -> Iterator[Candidate]:
    """Every candidate that has what is fixed, and else what the planner may choose freely."""
    free = [Tile(q=ROWS * w, kv=kv) for w in WARPGROUPS for kv in FREE_TILE_KV]
    for t in [fixed.tile] if fixed.tile else free:
        for s in fixed.among("stages", FREE_STAGES):
            for q_stages in fixed.among("q_stages", Q_STAGES):
                yield Candidate(tile=t, stages=s, q_stages=q_stages)


def smem(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block.  Where TMA stores O, a tile leaves through the room of its Q."""
    found, columns = _tiles_and_messages(c, request), fold(c, request).columns
    return (*found, *((_folded(c, columns),) if columns else ()))


def _tiles_and_messages(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    d, dv = boxed(request.head_dim), boxed(request.v_head_dim)
    room = max(d, dv) if _stored(c, request.layout, request.keys) else d
    masked, in_time = request.profile.hides, _in_time(c, request)
    control = _control(c.tile.q, c.stages, c.q_stages, masked, in_time, request.layout, request.keys)
    return (
        staged("q", c.q_stages, c.tile.q, room),
        staged("k", c.stages, c.tile.kv, d),
        staged("v", c.stages, c.tile.kv, dv),
        Part(name="control", amount=control, why="barriers and messages"),
    )


def fold(c: Candidate, request: KernelRequest) -> Fold:
    """Where a block keeps O of the leaves so far: in registers that nothing else needs, and as many columns in shared
    memory as fit."""
    if not request.keys.folds:
        return NO_FOLD
    held = _held(c, request)
    columns = padded(request.v_head_dim) - 2 * held
    left = request.arch.smem_per_block - total(_tiles_and_messages(c, request))
    fit = left // (c.tile.q * FOLD_ITEM) // FOLD_COLUMNS * FOLD_COLUMNS
    return FoldInShared(columns=columns, held=held) if columns <= fit else FoldInMemory(columns=max(0, fit))


def _held(c: Candidate, request: KernelRequest) -> int:
    """Registers of a thread that may hold O of the leaves so far.  They leave what decides forms, so that these are the
    same where leaves are parts: some forms of scores have other bits."""
    if c.warpgroups != min(WARPGROUPS) or masks.cuts(c, request):
        return 0
    left = max(PACKED_BESIDE_HELD, ROOM * request.profile.scored)
    room = division(c, request)[1] - total(_needed(c, request)) - left
    return max(0, min(room // HELD_STEP * HELD_STEP, MOST_HELD, padded(request.v_head_dim) // 2))


def _folded(c: Candidate, columns: int) -> Part:
    why = f"{c.tile.q} rows x {columns} columns x {FOLD_ITEM} bytes of the leaves so far"
    return Part(name="folded", amount=c.tile.q * columns * FOLD_ITEM, why=why)


@lru_cache
def _control(tile_q: int, stages: int, q_stages: int, masked: bool, in_time: bool, layout: Layout, keys: Keys) -> int:
    """Bytes of barriers and messages, which neither the size of tiles nor that of registers changes."""
    c = Candidate(tile=Tile(q=tile_q, kv=DEPTH), stages=stages, q_stages=q_stages)
    flags = {"masked": masked, "ping_pong": False, "in_time": in_time}
    found = _program(c, (BOX, BOX), (0, 0), layout=layout, keys=keys, **flags)
    return found.control_bytes(programs.ALIGNMENT)


def program(c: Candidate, request: KernelRequest, *, ping_pong: bool) -> Program:
    """What the warps of a candidate do."""
    columns = boxed(request.head_dim), boxed(request.v_head_dim)
    registers = (None, None) if c.warpgroups == ALONE else division(c, request)
    masked, layout, keys = request.profile.hides, request.layout, request.keys
    return _program(
        *(c, columns, registers),
        masked=masked,
        ping_pong=ping_pong,
        layout=layout,
        keys=keys,
        folded=fold(c, request).columns,
        in_time=_in_time(c, request),
    )


def _program(
    c: Candidate,
    columns: tuple[int, int],
    registers: tuple[int | None, int | None],
    *,
    masked: bool,
    ping_pong: bool,
    layout: Layout,
    keys: Keys,
    folded: int = 0,
    in_time: bool,
) -> Program:
    return programs.forward(
        tile=c.tile,
        columns=columns,
        stages=c.stages,
        q_stages=c.q_stages,
        registers=registers,
        masked=masked,
        stored=_stored(c, layout, keys),
        ping_pong=ping_pong,
        layout=layout,
        split=keys.split,
        folded=folded,
        in_time=in_time,
    )


def registers(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """32-bit registers of a consumer's thread: S of one tile is on its way while P of the one before is multiplied."""
    held = fold(c, request).held
    why = f"{ROWS} x {2 * held} float32 of O of the leaves so far"
    return (*_needed(c, request), *((Part(name="held", amount=held, why=why),) if held else ()))


def _needed(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Those that no other place could hold."""
    asked, dv = request.profile, padded(request.v_head_dim)
    parts = [
        Part(name="o", amount=dv // 2, why=f"{ROWS} x {dv} float32 over 128 threads"),
        Part(name="s", amount=c.tile.kv // 2, why=f"{ROWS} x {c.tile.kv} float32 over 128 threads"),
        Part(name="p", amount=c.tile.kv // 4, why=f"{ROWS} x {c.tile.kv} in 16 bits over 128 threads"),
        Part(
            name="overhead",
            amount=OVERHEAD
            + (0 if asked.plain else VARIANT_REGISTERS)
            + max(padded(request.head_dim), LEAST_COLUMNS) // DESCRIPTOR_COLUMNS,
            why="softmax, addresses, loop state, descriptors",
        ),
    ]
    if asked.scored:
        reads = c.tile.kv // READING_KEYS if _score_reads(request) else 0
        parts.append(Part(name="score", amount=SCORE_REGISTERS + reads, why="what the score function keeps"))
    if request.keys.invariant and (amount := _of_leaves(c, request)):
        parts.append(Part(name="fold", amount=amount, why="maxima and sums of the leaves so far"))
    if request.dropout:
        amount = DROPOUT_REGISTERS + DROPOUT_BESIDE * min(c.tile.kv, BOX) // BOX
        amount += DROPOUT_THIRD_STAGE if c.stages > 2 else 0
        parts.append(Part(name="dropout", amount=amount, why="what is kept, random numbers"))
    if asked.judged and asked.mask_divides:
        parts.append(Part(name="divisor", amount=DIVISOR_REGISTERS, why="quotients by a parameter, of the mask"))
    form = masks.form(c, request)
    if isinstance(form, MaskFromBits):
        words = 2 * c.tile.kv // WORD
        parts.append(Part(name="bits", amount=BITS_REGISTERS + words, why=f"{words} words of bits, and their address"))
    if form.looks_up:
        known = asked.word_lookups if isinstance(form, MaskInWords) else asked.lookups
        words = sum(_words(n, c.tile.kv) for n in known)
        parts.append(Part(name="looked up", amount=LOOKUP_REGISTERS + words, why=f"{words} words of queries and keys"))
    if rows := _rows(request):
        words = sum(c.tile.kv // 2 * STORED_BYTES[n.attr.dtype] // 4 for n in rows)
        wide = c.warpgroups > min(WARPGROUPS) and c.tile.kv > BOX
        amount = ROW_REGISTERS * len(rows) + words + WIDE_ROW_REGISTERS * wide
        parts.append(Part(name="rows", amount=amount, why=f"{words} words of both rows, and where they lie"))
    given: dict[type, bool] = dict.fromkeys((MaskByTile, MaskByWarpgroup), False)
    given[MaskFromBits] = asked.mask_reads_beside_tables
    by_score = _score_reads(request)
    if by_score or (not form.looks_up and given.get(type(form), asked.mask_reads_by_key > 0)):
        alone = isinstance(form, MaskAsBits) and c.warpgroups <= min(WARPGROUPS) and not by_score
        keys = min(c.tile.kv // 4, READ_AT_ONCE) if alone else c.tile.kv // 4
        of_pairs = asked.mask_reads_pairs and not isinstance(form, MaskFromBits)
        parts.append(
            Part(
                name="captured",
                amount=CAPTURED_REGISTERS + PAIR_REGISTERS * of_pairs + ELEMENT_REGISTERS * keys,
                why=f"an element and its address for each of {keys} keys, and what leads to them",
            )
        )
    return tuple(parts)


def _rows(request: KernelRequest) -> tuple[Node, ...]:
    """What scores read of rows of keys, two elements at a time."""
    return request.profile.score_rows if isinstance(_plain_score(request), ScoreByRow) else ()


def _score_reads(request: KernelRequest) -> bool:
    """Whether scores read an element for each key by itself."""
    asked = request.profile
    return asked.score_reads_beside_rows if _rows(request) else asked.score_reads_by_key


def _words(lookup: Node, kv: int) -> int:
    """Of a thread, for what a mask looks up: by its two queries, or by the keys of a tile, some for each lane."""
    return (2 if depends_on(lookup, "q") else -(-kv // WARP)) * -(-lookup.dtype.itemsize // 4)


def _of_leaves(c: Candidate, request: KernelRequest) -> int:
    """Registers for what leaves leave, mostly of both forms alike, which have as many keys in a tile."""
    asked, keys = request.profile, request.keys
    if c.warpgroups > min(WARPGROUPS):
        of_lengths = OWN_PART_REGISTERS * (not keys.folds and request.layout.own and not request.layout.joined)
        return 0 if asked.plain else FOLD_REGISTERS + RUNS_REGISTERS * (not asked.band) + of_lengths
    if c.warpgroups < min(WARPGROUPS):
        return 0
    wide = padded(request.v_head_dim) > WIDE_FOLD
    return 2 * FOLD_REGISTERS * request.dropout + WIDE_FOLD_REGISTERS * (wide and asked.scored)


def division(c: Candidate, request: KernelRequest) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread; where one warpgroup consumes alone, none changes hands: any
    thread may have the most that there is."""
    if c.warpgroups == ALONE:
        return request.arch.registers_per_thread, request.arch.registers_per_thread
    fewest = 40 if c.warpgroups == 2 or request.profile.several_runs_read else 32
    producer = JUDGE_REGISTERS if request.profile.judged else fewest
    if masks.cuts(c, request):
        fewer = consumer_registers(request.arch, c.warpgroups, PARTS_REGISTERS)
        if total(registers(c, request)) <= fewer:
            return PARTS_REGISTERS, fewer
    return producer, consumer_registers(request.arch, c.warpgroups, producer)


def does_not_fit_reason(c: Candidate, request: KernelRequest) -> str | None:
    """Why the candidate cannot run on the architecture, or None."""
    arch, memory, wanted = request.arch, smem(c, request), registers(c, request)
    smem_bytes, needed = total(memory), total(wanted)
    if smem_bytes > arch.smem_per_block:
        whole = f"{smem_bytes / KIB:.4g} KiB ({smem_bytes:,} bytes)"
        return f"shared memory {_terms(memory, KIB)} = {whole} > {arch.smem_per_block / KIB:.4g} KiB"
    producer, consumer = division(c, request)
    if needed > consumer:
        text = f"registers {_terms(wanted)} = {needed} > {consumer} of a consumer beside {producer} of a producer"
        p, p_bytes = c.tile.kv // 4, c.tile.q * c.tile.kv * ITEM
        if needed - p <= consumer and smem_bytes + p_bytes <= arch.smem_per_block:
            there = f"{needed - p} registers and {(smem_bytes + p_bytes) / KIB:.4g} KiB"
            text += f"; P would have to go through shared memory: {there}"
        return text
    if request.fixed.tile is not None:
        return None
    if not request.layout.own and masks.lighter(c, request):
        found = does_not_fit_reason(c, replace(request, layout=Padded()))
        return found and f"{found}, in tiles of sequences with lengths of their own, which add up in the same order"
    return _narrow(c, request) if request.keys.invariant else None


def _narrow(c: Candidate, request: KernelRequest) -> str | None:
    """Why a tile is not that of leaves: all lives of a row take the same steps, those of the widest tile that fits."""
    wider = (kv for kv in FREE_TILE_KV if kv > c.tile.kv and request.keys.unfit(kv) is None)
    least = (Candidate(tile=Tile(q=min(QUERIES), kv=kv), stages=min(FREE_STAGES), q_stages=1) for kv in wider)
    found = next((one.tile.kv for one in least if does_not_fit_reason(one, request) is None), None)
    return None if found is None else f"{found} keys fit, and leaves are cut into tiles of one size"


def _terms(parts: tuple[Part, ...], unit: int = 1) -> str:
    """The terms of a sum in a line."""
    return " + ".join(f"{part.name} {part.amount / unit:.4g}" for part in parts)


def _takes_turns(c: Candidate, request: KernelRequest) -> bool:
    """Whether warpgroups issue products in turns."""
    return request.widest <= SHORT_COLUMNS and c.warpgroups > min(WARPGROUPS)


def plan(c: Candidate, request: KernelRequest) -> KernelPlan:
    """The plan of a candidate that fits."""
    ping_pong = _takes_turns(c, request)
    return make_plan(
        *(c, request, (padded(request.head_dim), padded(request.v_head_dim))),
        pipeline=NAME,
        program=program(c, request, ping_pong=ping_pong),
        q_in_registers=False,
        blocks_per_sm=1,
        smem=smem(c, request),
        registers=registers(c, request),
        specialized=Specialized(
            warpgroups=c.warpgroups,
            ping_pong=ping_pong,
            score=_score(c, request),
            mask=_few_at_a_time(c, request) or masks.form(c, request),
            full_tiles=_full_tiles(c, request),
            highest=_highest(c, request),
            o=_o(c, request),
            scheduler=scheduler(c, request),
            fold=fold(c, request),
            runs_anew=runs_anew(c, request),
            first=_first_tile(c, request),
            ends=_ends(c, request),
            rescale=_rescale(c, request),
        ),
    )


def _full_tiles(c: Candidate, request: KernelRequest) -> FullTiles:
    """Which tiles have code of their own."""
    # Other masks spill with code for each kind of tile, and without a score it brings nothing (0.99 to 1.00).
    if request.profile.scored and request.profile.band and _room_for_more_code(c, request):
        return FullTilesApart()
    return MaskedTilesApart() if isinstance(_highest(c, request), HighestBySigns) else TilesAlike()


def _highest(c: Candidate, request: KernelRequest) -> Highest:
    """How the highest score of a row is found."""
    # Two registers spill beside dropout at head_dim 128 (16 bytes, outside of loops).
    if request.dropout:
        return HighestAsFloat()
    # By signs, with masked tiles apart, 8,192 tokens at head_dim 128 take 0.97 to 0.99 of the time on an H200 without a
    # mask, causal 0.98 to 0.995, in a window 0.97, of `alibi`, whose scores fall with distance, 0.935; at head_dim 96,
    # causal, 0.98.  At 64 it is 1.00, at 192 and 256 1.00 to 1.07.
    by_signs = c.warpgroups > ALONE and padded(request.v_head_dim) in SIGNS_COLUMNS
    return HighestBySigns(zero="0.f") if by_signs else HighestAsInteger()


def _rescale(c: Candidate, request: KernelRequest) -> Rescale:
    """When O follows a maximum that moved."""
    # Where maxima move at each tile of keys (`rising` of bench data) 8,192 causal tokens take 0.92 of the time beside S
    # on an H200, at a standard deviation of 4 nats 0.95, of N(0, 1) 1.00; without a mask 0.98, 0.99, 1.00.  512 causal
    # tokens take 1.02.  At head_dim 64 and 256 it costs 1 to 3%.
    beside = c.warpgroups == min(WARPGROUPS) and padded(request.v_head_dim) == 128
    return RescaleBesideS() if beside else RESCALE_BEHIND_P


def _first_tile(c: Candidate, request: KernelRequest) -> FirstTile:
    """What a warpgroup does with the first tile of keys."""
    keys = padded(c.tile.kv // 2)
    alone = c.warpgroups == ALONE or keys == c.tile.kv
    # Three warpgroups leave few registers, and so do many columns: in tiles of 192 queries at head_dim 64 `longformer`
    # spilled 28 bytes and `dilated` 128, at head_dim 256 `longformer` 8 and `natten` 196 in place of 120.
    short = c.warpgroups > min(WARPGROUPS) or padded(request.v_head_dim) > WIDE_FOLD
    runs, form = len(request.profile.facts.visible), masks.form(c, request)
    tight = short and (runs > 1 or isinstance(form, MaskWithinBounds) or masks.cuts(c, request))
    # The last tile that a tile of queries sees begins at the same position, where it is as long.  Of a window two
    # warpgroups then visit 9 tiles in step, and half a tile less of one of them cost 3% (head_dim 128, an H200).
    passes = c.tile.q > c.tile.kv
    in_step = not passes and all(term.zone.d_hi or term.zone.k_hi for term in request.profile.facts.visible)
    # Of leaves where warpgroups take turns: elsewhere what leaves weigh is found under the first product.  A diagonal
    # that lengths or parameters place takes registers: `causal_bottom_right` spilled 8 bytes at head_dim 64.
    bounds = [bound for term in request.profile.facts.visible for bound in term.zone.nodes()]
    plain = len(bounds) == 1 and bounds[0].op == "const" and _takes_turns(c, request)
    whole = request.keys.split or (request.keys.folds and not plain)
    if alone or tight or in_step or whole or not request.profile.ends_at_query:
        return FIRST_TILE_WHOLE
    return FirstTileAsSeen(keys=keys, passes=passes)


def _ends(c: Candidate, request: KernelRequest) -> TileEnd:
    """Where a tile of queries ends."""
    if request.keys.folds:  # leaves have loops of their own
        return ENDS_BESIDE_NEXT
    # Causal tiles of 128 queries at head_dim 64, which serve problems of few tiles: 512 tokens in a batch of 32 took
    # 0.95 of the time, 1,024 in one of 16 took 1.014 (an H200).  At head_dim 128 such tiles are for all lengths: 512
    # tokens took 0.98, 4,096 took 1.03.
    narrow = request.widest <= SHORT_COLUMNS and c.warpgroups == min(WARPGROUPS)
    few_keys = narrow and isinstance(_first_tile(c, request), FirstTileAsSeen)
    return EndsBeforeNext() if c.q_stages == 1 or few_keys else ENDS_BESIDE_NEXT


def runs_anew(c: Candidate, request: KernelRequest) -> bool:
    """Whether who schedules has no registers to keep all that follows from a tile's rows."""
    asked = request.profile
    if not asked.hides:
        return False
    runs = len(asked.facts.visible) + len(asked.facts.hidden)
    needed = SCHEDULER_REGISTERS + RUN_REGISTERS * runs + PART_REGISTERS * masks.cuts(c, request)
    return needed > division(c, request)[0]


def _stored(c: Candidate, layout: Layout, keys: Keys = ALL_KEYS) -> bool:
    """Whether TMA stores O: a tile of it, which may reach over the rows of the next sequence where they are joined."""
    return c.q_stages > 1 and not layout.joined and not keys.split


def _o(c: Candidate, request: KernelRequest) -> OByTma | OFromRegisters | OInParts:
    if request.keys.split:
        return OInParts()
    return OByTma() if _stored(c, request.layout) else OFromRegisters()


def _few_at_a_time(c: Candidate, request: KernelRequest) -> MaskAsBits | None:
    """Bits where a mask reads several elements for each key and leaves next to no register: one spilled there."""
    several = request.profile.judged and request.profile.mask_reads_by_key > 1
    tight = division(c, request)[1] - total(_needed(c, request)) < SEVERAL_READ_REGISTERS
    return MaskAsBits() if several and tight and isinstance(masks.form(c, request), MaskByElement) else None


def _in_time(c: Candidate, request: KernelRequest) -> bool:
    """Whether blocks take tiles of queries that see many keys in time."""
    # Who sends visible tiles of keys one by one is two of them ahead, and leaves are short.
    ahead = request.profile.hides or request.float8 is not None or isinstance(request.keys, Leaves)
    return c.warpgroups == ALONE and not ahead


def scheduler(c: Candidate, request: KernelRequest) -> Scheduler:
    """Who hands out tiles of queries."""
    in_time = _in_time(c, request)
    if request.layout.joined:
        return SequenceScheduler(in_time=in_time)
    if request.keys.turns and request.layout.own:
        return PartScheduler(in_time=in_time)
    # Where sequences have lengths of their own, so have the parts of their keys.
    uneven = request.profile.masked or (request.keys.split and request.layout.own)
    if not uneven:
        return InTimeScheduler() if in_time else StaticScheduler()
    by_data = request.profile.hides and bool(request.profile.facts.summaries)
    # Tiles that are judged by their parts take longer to count than is waited for.
    ordered = by_data and not (request.layout.own or masks.cuts(c, request))
    return DynamicScheduler(ordered=ordered and request.keys == ALL_KEYS)


def packed(plan: KernelPlan) -> KernelPlan | None:
    """The form of a plan whose tiles have rows of all heads that share keys, as far as their number is a power of two;
    None where registers do not allow it.

    Rows of a head lie `pack` rows apart, so that a tile of few queries is full, and loads keys for all of these heads.
    """
    registers = plan.registers
    if profile(plan.variant).uses_query:
        holds = plan.specialized is not None and plan.specialized.fold.held > 0
        amount = PACKED_BESIDE_HELD if holds else PACKED_REGISTERS
        registers += (Part(name="packed", amount=amount, why="the queries of two rows"),)
        if total(registers) > (plan.program.consumer_registers or find(plan.arch).registers_per_thread):
            return None
    return replace(plan, registers=registers, rows=PACKED)


def _plain_score(request: KernelRequest) -> ScoreByElement | ScoreByRow:
    """How scores are made of products where one code is for all."""
    asked = request.profile
    return ScoreByRow() if asked.score_rows and not (asked.near_zero or asked.soft_capped) else ScoreByElement()


def _score(c: Candidate, request: KernelRequest) -> ScoreByElement | ScoreByRow | ScoreNearZero | SoftCap:
    """How scores are made of products."""
    if request.profile.soft_capped:
        votes = CAP_VOTES if padded(request.v_head_dim) <= CAPPED_COLUMNS else WIDE_CAP_VOTES
        return SoftCap(together=c.tile.kv // 2 // votes)
    near_zero = request.profile.near_zero and _room_for_more_code(c, request)
    return ScoreNearZero() if near_zero else _plain_score(request)


def _room_for_more_code(c: Candidate, request: KernelRequest) -> bool:
    """Whether registers are left for a score function that is emitted twice."""
    return total(_needed(c, request)) + ROOM <= division(c, request)[1]
