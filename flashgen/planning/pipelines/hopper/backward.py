"""What a candidate of pipeline hopper's backward costs: shared memory, registers and time, sums that can be shown.

A block owns 128 keys, 64 a warpgroup, and visits the queries that see them, which one warp of a third warpgroup finds
and another loads.  S and dP are computed transposed, so that P and dS are operands of dV += P^T dO and dK += dS^T Q as
they lie in registers.  dS goes through shared memory for dQ, whose product runs one tile of queries late and is added
up in memory: in any order, or (`deterministic`) from the last keys to the first, when two more warps have seen that the
block of the next keys that these queries see has added.  The warpgroups take turns: one computes P and dS while the
other's products run.

Of head dims over 128 dK and dV of 64 keys fill the registers of both warpgroups: then a block owns 64 keys, one
warpgroup has S, P and dV, the other dP, dS and dK, and P goes from one to the other through shared memory.  Each works
on its scores while the other's products run.  At head_dim 256 on an H200 adding up dQ is then the limit: the crossbar's
way to L2 is 90% busy, tensor cores 53%; without these additions a call takes 0.58 of its time, with half of them 0.75.
(Two blocks of a cluster that send each other dS, so that each adds up half of the columns for the keys of both, were
slower nevertheless, 0.83x: one buffer of dS is all that fits, and each step waits for the other block's.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from flashgen.analysis.conditions import conditions
from flashgen.analysis.distances import Seen
from flashgen.lang.expr import Node, depends_on, walk
from flashgen.planning.arch import ARCHS, KIB, Arch
from flashgen.planning.backward import ROW_THREADS, looks_up, lookup_names, own_dimensions
from flashgen.planning.integers import Allowed
from flashgen.planning.members import (
    BlockOrder,
    Consumers,
    DqInAnyOrder,
    DqInMainKernel,
    DqInOrder,
    DqSum,
    HalvesOfKeys,
    HeadByHead,
    InGroups,
    Mask,
    MaskAsBits,
    MaskByElement,
    MaskByTile,
    MaskByWarpgroup,
    MaskFromBits,
    ScoreWithSlope,
    SequencesInGroups,
    SoftCapWithSlope,
    SplitDkDv,
)
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.pipelines.hopper import programs
from flashgen.planning.pipelines.hopper.candidate import boxed, padded
from flashgen.planning.pipelines.protocol import Predictor
from flashgen.planning.pipelines.shared import make_plan, total
from flashgen.planning.plan import ITEM, KernelPlan, Part, SpecializedBackward, Tile, staged
from flashgen.planning.plan import WARPGROUP_ROWS as ROWS
from flashgen.planning.problem import ITEMSIZE, Problem
from flashgen.planning.profile import profile
from flashgen.planning.program import CTYPES, Program, consumer_registers
from flashgen.planning.request import Fixed, KernelRequest
from flashgen.planning.summaries import keeps_bits

NAME, COPIES, cannot_address = hopper.NAME, hopper.COPIES, hopper.cannot_address
cannot_page = hopper.cannot_page

HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = hopper.HEAD_DIM_STEP, hopper.MIN_HEAD_DIM, hopper.MAX_HEAD_DIM

#: The largest head dim of which a warpgroup holds dK and dV of its own 64 keys.
OWN_KEYS = 128

#: Queries that a block works on at a time, and its keys: 64 for larger head dims than OWN_KEYS, 128 for others.
TILES = (Tile(q=ROWS, kv=2 * ROWS), Tile(q=2 * ROWS, kv=2 * ROWS), Tile(q=ROWS, kv=ROWS))
TILE_RULE = f"a backward's tile on pipeline {NAME} is {TILES[0]} or {TILES[1]}, over head_dim {OWN_KEYS} {TILES[2]}"

STAGES = (2, 3)
INTEGERS = {"stages": Allowed(values=STAGES, rule="TMA fills one stage while another is used")}

#: Enough to see why no tile fits.
EXAMPLES = ((128, 128), (64, 128))

WARPGROUPS = 2

#: Up to this head_dim kernels of their own clear and finish dq.
DQ_APART = 64

#: What that costs a block of the main kernel in seconds, by whether its queries are fewer than so many: on an H200,
#: head_dim 128, 16 blocks an SM, 75 us of 410 at 512 queries, 78 of 740 at 1,024, 27 of 1,260 at 2,048.
SHORT_QUERIES = 2048
DQ_SECONDS = {True: 4.9e-6, False: 1.7e-6}

#: What it costs such a block that it takes one tile of keys after another, likewise: on an H200 0.94 to 0.98 of the
#: time at 512 and 1,024 queries, 0.98 at 2,048, and at 8,192 1.02 to 1.03.
LONG_QUERIES = 4096
TAKING_SECONDS = {True: -2.5e-6, False: 1e-6}

#: Bytes of P where it goes from one warpgroup to the other: dS is made of it as it was, not as it is rounded for dV.
P_ITEM = ITEMSIZE["float32"]

#: Registers of a producer's thread, and of one that judges tiles by evaluating more than so many ops over ranges.  Of
#: the shipped masks and pairs of them all up to 23 fit; of those above a third do not.
PRODUCER_REGISTERS, JUDGE_REGISTERS, JUDGED_OPS = 24, 40, 23

#: Those of one that goes on to parts of tiles: the most that consumers can spare; and the ops that fit without.
PARTS_REGISTERS, PARTS_OPS = (72, 56, 40), 17

#: Conditions that may be judged in turn where consumers can spare none: two bits each.
CONDITIONS = 16

#: Ops of a mask that is asked once for all elements of a warpgroup, beside which S and dP both fit: `bigbird` has 24,
#: and spilled 8 bytes.
ONCE_OPS = 12

#: Tiles of queries whose lookups shared memory holds: those of all stages, two more that are sent, one being found.
LOOKUP_STAGES = 8

#: Bytes of lookups that a query and a key may need there; a mask that needs more reads its elements where it uses them.
LOOKUP_BYTES = 16

#: Registers of a consumer's thread beside fragments: addresses, barriers, loop state; for a mask or a score; and for
#: what is looked up by position or has another slope than 1.
OVERHEAD, LIGHT, HEAVY = 25, 4, 12

#: For dropout, for each stage but one and each 64 queries of a tile, and once more where a mask (with dq in one order a
#: score too) reads captured tensors as it goes: what is kept, and random numbers on their way.  Where a score does, 128
#: queries take more beside that: what it reads is on its way (relative_bias at head_dim 48 spilled 5 registers).
DROPOUT, DROPOUT_READ = 6, 16

#: For dq in one order, with 128 queries whose scores read elements as they need them: barriers of the block before and
#: of this one.
ORDER = 28

#: For scores that have a slope and read elements by position, with 128 queries: what they read is on its way while S
#: becomes P and P times the slope.
SLOPE_READ = 28

#: Scores of a thread whose tanhs are taken together: 16 at head_dim 64 took 1.04 of the time on an H200.
CAPPED = 32

#: For the gradient of a captured element, by what selects it (where a query does, for each stage but one): sums and
#: addresses.  Query and key together select one for each score: of 64 queries ptxas has few on their way, of 128 many.
#: 128 queries would also keep dS in float32 beside what is rounded.  (An element of three dimensions and no mask spill
#: 24 bytes at head_dim 128, of what is read once a step, which costs less than a slower pipeline.)
CAPTURED_GRAD_REGISTERS, PAIR_GRAD_REGISTERS = 8, {ROWS: 11, 2 * ROWS: 60}

#: Captured elements of a score that may have gradients.
CAPTURED_GRADS = 3

#: For such sums in one order, of 64 queries: digits on their way.  None where calls may store an element for each pair:
#: others spill 12 bytes at head_dim 128, but on pipeline ampere those that store took five times as long.
PAIR_GRAD_ORDER = 8

#: What a consumer needs beside fragments on their way: with less ptxas serialises products (C7512).
BESIDE = 48

#: Float operations on one score: P, dS, roundings, and what moves them.
SCORE_OPS = 8

#: Clocks of a step that nothing hides, by whether the warpgroups take turns: the first product's latency, barriers, the
#: way of dS through shared memory.
STEP_CLOCKS = {False: 500, True: 200}

#: Terms of a mask of whose tiles one thread finds the next in a producer's registers: `sink_window` has 4, and spills.
SCHEDULED_TERMS = 3

#: How much of the other units' time adds to that of the busiest.
INTERFERENCE = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tile and stages to be judged.  The form for `short` sequences: other kernels clear and finish dq where the main
    one could, and blocks take tiles of keys one after another where they may."""

    tile: Tile
    stages: int
    short: bool = False

    @property
    def split_dk_dv(self) -> bool:
        """Whether the warpgroups divide gradients, not keys."""
        return self.tile.kv == ROWS

    @property
    def warps(self) -> int:
        return 4 * (1 + WARPGROUPS)

    def __str__(self) -> str:
        return f"{self.tile.q} x {self.tile.kv}, {self.stages} stages, {self.warps} warps"


def nearest_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile that TILE_RULE allows and that comes closest."""
    near = min(TILES, key=lambda t: abs(t.q - tile[0]) + abs(t.kv - tile[1]))
    return near.q, near.kv


def candidates(fixed: Fixed) -> Iterator[Candidate]:
    """Every candidate that has what is fixed, and else what the planner may choose freely."""
    for t in [fixed.tile] if fixed.tile else TILES:
        for s in fixed.among("stages", STAGES):
            yield Candidate(tile=t, stages=s)


def unsupported_reason(request: KernelRequest) -> str | None:
    """Why the pipeline has no such backward, or None."""
    asked, tile, stages = request.profile, request.fixed.tile, request.fixed.stages
    wide = request.widest > OWN_KEYS
    if request.dropout and wide:
        return f"its backward has dropout for head dims up to {OWN_KEYS}"
    if request.score_gradients and wide:
        return f"its backward has gradients of captured tensors for head dims up to {OWN_KEYS}"
    reads = asked.captured_grads
    if reads and (asked.has_slope or any(n.op == "score" for n in walk(chain.from_iterable(reads)))):
        return "its backward keeps no scores, which gradients of captured tensors take where a score is more than a sum"
    if len(reads) > CAPTURED_GRADS:
        return f"its backward has the gradients of at most {CAPTURED_GRADS} captured elements per score"
    if tile is not None and nearest_tile((tile.q, tile.kv)) != (tile.q, tile.kv):
        return TILE_RULE
    if stages is not None and stages not in STAGES:
        return INTEGERS["stages"].rule
    reasons = [does_not_fit_reason(c, request) for c in candidates(request.fixed)]
    return None if None in reasons else reasons[0]


def _layout(plan: KernelPlan) -> SpecializedBackward:
    """How warps divide work, of a plan of this pipeline."""
    assert isinstance(plan.backward, SpecializedBackward)
    return plan.backward


def dq_parts(c: Candidate, head_dim: int) -> tuple[int, ...]:
    """Columns of dq that a warpgroup computes: of 64 queries half of the boxes' columns, of 128 all.

    Of more than 64 columns a box and then the rest: what is under way fills registers, and a product's columns lie in
    one box.
    """
    if c.tile.q > ROWS:
        return (padded(head_dim),)
    half = boxed(head_dim) // 2
    return (half,) if half <= 64 else (64, half - 64)


def consumers(c: Candidate) -> Consumers:
    """How the warpgroups divide a tile."""
    return SplitDkDv() if c.split_dk_dv else HalvesOfKeys(dq_half="queries" if c.tile.q > ROWS else "columns")


def block_order(request: KernelRequest) -> BlockOrder:
    """The order in which blocks start."""
    if request.layout.joined:
        return SequencesInGroups(late_first=request.deterministic)
    if request.deterministic or request.profile.hides:
        return InGroups(late_first=request.deterministic)
    return HeadByHead()


def dq_sum(c: Candidate, request: KernelRequest) -> DqSum:
    """How dq is added up."""
    if request.deterministic:
        return DqInOrder()
    return DqInMainKernel() if dq_in_main_kernel(c, request) else DqInAnyOrder()


def ping_pong(c: Candidate, request: KernelRequest) -> bool:
    """Whether the warpgroups take turns at P and dS.

    On an H200 that brings 1 to 3% under a mask and with scores, and costs 2% with 128 queries and neither; where
    both read elements by position from global memory they had better do it at once.
    """
    return not (c.split_dk_dv or waits(c, request) or (request.profile.plain and c.tile.q > ROWS))


def persistent(c: Candidate, request: KernelRequest) -> bool:
    """Whether blocks take one tile of keys after another, of which the next is loaded while gradients are stored.

    What blocks keep for one tile alone, as sums of captured gradients are, is not kept anew; additions to dq in one
    order are those of blocks that start in order.
    """
    asked, facts = request.profile, request.profile.facts
    one_kind = not (c.split_dk_dv or request.deterministic or request.score_gradients or request.layout.own)
    little = not asked.conditional and len(facts.visible) + len(facts.hidden) <= SCHEDULED_TERMS
    return c.short and one_kind and little


def scores_first(c: Candidate, request: KernelRequest) -> bool:
    """Whether dP waits for scores and masks: what they need leaves no registers for both S and dP."""
    return c.split_dk_dv or waits(c, request) or request.profile.has_slope or _from_bits(c, request)


def waits(c: Candidate, request: KernelRequest) -> bool:
    """Whether mask or score read elements by position that neither shared memory holds for them nor bits; where the
    mask is asked once, whether that is much."""
    asked = request.profile
    if _uniform_by_warpgroup(c, request):
        return asked.score_reads_by_position or asked.mask_ops > ONCE_OPS
    tables = asked.pair_tables if _from_bits(c, request) else ()
    return looks_up(asked.variant, known={*tables, *walk(asked.lookups if lookup_stages(c, request) else ())})


def _uniform(c: Candidate, request: KernelRequest) -> bool:
    """Whether the mask is the same all over a tile, which one kernel judges."""
    asked = request.profile
    one_judge = asked.conditional and not (request.deterministic or request.layout.own)
    return one_judge and asked.uniform(c.tile)


def _uniform_by_warpgroup(c: Candidate, request: KernelRequest) -> bool:
    """Whether it is the same for all elements that a warpgroup has."""
    asked, dense = request.profile, not request.layout.own
    return dense and not c.split_dk_dv and asked.uniform(Tile(q=c.tile.q, kv=ROWS))


def _from_bits(c: Candidate, request: KernelRequest) -> bool:
    """Whether tables of all pairs are read as bits."""
    dense = not (c.split_dk_dv or request.deterministic or request.layout.own)
    return dense and keeps_bits(request.profile.facts, c.tile, "q")


def mask(c: Candidate, request: KernelRequest) -> Mask:
    """How elements are masked: a few at a time where what is read beside them leaves no registers."""
    if _uniform(c, request):
        return MaskByTile()
    if _uniform_by_warpgroup(c, request):
        return MaskByWarpgroup()
    if _from_bits(c, request):
        return MaskFromBits()
    short = _needed(registers(c, request)) > _beside(JUDGE_REGISTERS, request) and not c.split_dk_dv
    heavy = request.profile.masked and (waits(c, request) or judged_in_turn(c, request))
    return MaskAsBits() if short and heavy else MaskByElement()


def score(c: Candidate, request: KernelRequest) -> ScoreWithSlope | SoftCapWithSlope:
    """How scores that have a slope become P, and P times the slope.  At head_dim 256 one warpgroup does that while the
    other multiplies: taken together, tanhs of a soft cap made the kernel 3% slower on an H200."""
    together = request.profile.soft_capped and not c.split_dk_dv
    return SoftCapWithSlope(together=CAPPED) if together else ScoreWithSlope()


def lookup_stages(c: Candidate, request: KernelRequest) -> int:
    """Tiles of queries of which shared memory holds what the mask looks up: where tiles are judged at all."""
    item = 0 if c.split_dk_dv or _uniform(c, request) else sum(n.dtype.itemsize for n in request.profile.lookups)
    return LOOKUP_STAGES if 0 < item <= LOOKUP_BYTES and request.profile.conditional else 0


def dq_in_main_kernel(c: Candidate, request: KernelRequest) -> bool:
    """Whether two warps of the producer's clear and finish sums of dq while others multiply.

    On an H200 that takes 0.96 to 0.99 of the time at head_dim 128 from 2,048 queries on; at 64 it is kernels of their
    own that take 0.94 to 1.0 of it.  A dq in one order needs these warps itself; with what looks elements up, drops or
    adds to gradients, and with a padded head dim, registers are short.  Of sequences with lengths of their own a head
    has no number of slices that the host knows.
    """
    plain = not (request.deterministic or request.dropout or request.score_gradients or request.profile.looks_up)
    plain = plain and not request.layout.own and request.head_dim == padded(request.head_dim)
    return plain and not (c.short or c.split_dk_dv) and request.head_dim > DQ_APART


def smem(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block."""
    d, dv, tile = boxed(request.head_dim), boxed(request.v_head_dim), c.tile
    parts = [
        Part(name="k", amount=tile.kv * d * ITEM, why=f"{tile.kv} rows x {d} columns x {ITEM} bytes"),
        Part(name="v", amount=tile.kv * dv * ITEM, why=f"{tile.kv} rows x {dv} columns x {ITEM} bytes"),
        staged("q", c.stages, tile.q, d),
        staged("d_o", c.stages, tile.q, dv),
        Part(
            name="ds",
            amount=2 * tile.q * tile.kv * ITEM,
            why=f"2 tiles of {tile.q} queries x {tile.kv} keys x {ITEM} bytes",
        ),
    ]
    if c.split_dk_dv:
        why = f"{tile.kv} keys x {tile.q} queries x {P_ITEM} bytes, from one warpgroup to the other"
        parts.append(Part(name="p", amount=tile.kv * tile.q * P_ITEM, why=why))
    rows = c.stages * tile.q * 8
    parts.append(Part(name="lse, delta", amount=rows, why=f"{c.stages} stages x {tile.q} x 2 float32"))
    if lookup_stages(c, request):
        known = request.profile.lookups
        sizes = [(LOOKUP_STAGES * tile.q if depends_on(n, "q") else tile.kv, n.dtype.itemsize) for n in known]
        why = f"elements that the mask reads by the queries of {LOOKUP_STAGES} tiles, and by keys"
        parts.append(Part(name="lookups", amount=sum(count * item for count, item in sizes), why=why))
    kept, of_warp = request.profile.kept_sums
    if kept:
        amount = kept * WARPGROUPS * (2 * ROWS * 4 + 4 * of_warp)
        of_each = f"float32 a thread of the consumers, {of_warp} bytes a warp"
        why = f"{kept} x ({of_each}): sums for gradients of captured tensors"
        parts.append(Part(name="kept sums", amount=amount, why=why))
    control = program(c, request).shared_bytes(programs.ALIGNMENT) - total(parts)
    parts.append(Part(name="control", amount=control, why="barriers and messages"))
    return tuple(parts)


def program(c: Candidate, request: KernelRequest) -> Program:
    """What the warps of a candidate do."""
    known = request.profile.lookups if lookup_stages(c, request) else ()
    read = zip(lookup_names(known), known, strict=True)
    return programs.backward(
        tile=c.tile,
        columns=(boxed(request.head_dim), boxed(request.v_head_dim)),
        stages=c.stages,
        registers=division(c, request),
        split_dk_dv=c.split_dk_dv,
        skips=request.profile.hides and request.profile.conditional,
        ping_pong=ping_pong(c, request),
        deterministic=request.deterministic,
        dq_in_main_kernel=dq_in_main_kernel(c, request),
        persistent=persistent(c, request),
        layout=request.layout,
        judged_in_turn=judged_in_turn(c, request),
        lookup_stages=lookup_stages(c, request),
        kept_sums=request.profile.kept_sums,
        lookups=tuple((name, CTYPES[n.dtype], n.dtype.itemsize, depends_on(n, "q")) for name, n in read),
    )


def registers(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """32-bit registers of a consumer's thread: S and dP, or what comes of them, with dV and dK."""
    columns = padded(request.head_dim) + padded(request.v_head_dim)
    owned = Part(name="dk, dv", amount=columns // 2, why=f"{ROWS} x {columns} float32")
    if c.split_dk_dv:
        columns = padded(request.widest)
        owned = Part(name="dk or dv", amount=columns // 2, why=f"{ROWS} x {columns} float32")
    scores, dq = c.tile.q // 2, dq_parts(c, request.head_dim)[0] // 2
    if not c.split_dk_dv:
        fragments = Part(name="s, dp", amount=2 * scores, why="S and dP in float32, later P, dS and dQ")
    elif dq > scores:
        fragments = Part(name="s, dq", amount=scores + dq, why="S of this tile of queries, dQ of the one before")
    else:
        fragments = Part(name="p, dp, ds", amount=2 * scores, why="dP in float32, P and dS in 16 bits")
    asked, of_variant, waiting = request.profile, _variant_registers(c, request), waits(c, request)
    of_dropout = DROPOUT * ((c.stages - 1) * c.tile.q // ROWS)
    of_dropout += DROPOUT * (waiting and (asked.masked or request.deterministic))
    of_dropout += DROPOUT_READ * (c.tile.q > ROWS and asked.score_reads_by_position)
    of_order = ORDER * (request.deterministic and c.tile.q > ROWS and waiting)
    selections = asked.selections if request.layout.own else asked.selections_in_blocks
    of_captured = sum(
        _captured_grad_registers(c, one.seen, request, load)
        for one, (load, _) in zip(selections, asked.captured_grads, strict=True)
    )
    return (
        owned,
        fragments,
        Part(name="overhead", amount=OVERHEAD, why="addresses, barriers, loop state"),
        *([Part(name="variant", amount=of_variant, why="mask, score, its derivative")] if of_variant else []),
        *([Part(name="dropout", amount=of_dropout, why="what is kept, random numbers")] if request.dropout else []),
        *([Part(name="order", amount=of_order, why="of additions to dq")] if of_order else []),
        *(
            [Part(name="gradients", amount=of_captured, why="of captured tensors: sums, addresses")]
            if of_captured
            else []
        ),
    )


def _captured_grad_registers(c: Candidate, selected: Seen, request: KernelRequest, load: Node) -> int:
    pair, long = selected is Seen.PAIR, c.tile.q > ROWS
    each = PAIR_GRAD_REGISTERS[c.tile.q] if pair or (long and selected is Seen.DISTANCE) else CAPTURED_GRAD_REGISTERS
    stored = own_dimensions(request.variant, load.attr.name, request.layout)
    of_order = PAIR_GRAD_ORDER if pair and request.deterministic and not long and not stored else 0
    by_query = selected not in (Seen.NOTHING, Seen.KEY)
    return each * (c.stages - 1 if by_query else 1) + of_order + (c.tile.q // 2 if long else 0)


def _variant_registers(c: Candidate, request: KernelRequest) -> int:
    asked = request.profile
    if asked.plain:
        return 0
    heavy = asked.looks_up or asked.has_slope or not asked.exact
    of_slope = SLOPE_READ if c.tile.q > ROWS and asked.has_slope and asked.score_reads_by_position else 0
    return (HEAVY if heavy else LIGHT) + of_slope


def division(c: Candidate, request: KernelRequest) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread: together those of a block, rounded down to eights.

    A producer that judges parts of tiles, or by much, or orders additions to dq of sequences with lengths of their own,
    has more if consumers can spare them.
    """
    producer, ordered = PRODUCER_REGISTERS, request.layout.own and request.deterministic
    if _uniform(c, request):
        return producer, _beside(producer, request)
    if ordered or request.profile.cuts(c.tile) or not _judges_little(c, request):
        little = _judges_little(c, request) or judged_in_turn(c, request)
        producer = _spared(c, request) or (PRODUCER_REGISTERS if little else JUDGE_REGISTERS)
    return producer, _beside(producer, request)


def judged_in_turn(c: Candidate, request: KernelRequest) -> bool:
    """Whether conditions of a tile are judged one after another: consumers spare no registers for all at once.

    One warp does it for all others, and nothing but positions in dense sequences makes a tile.
    """
    asked = request.profile
    one_judge = asked.hides and asked.conditional and not (request.deterministic or request.layout.own)
    if not one_judge or _uniform(c, request) or _judges_little(c, request) or _spared(c, request) is not None:
        return False
    return 0 < len(conditions(asked.facts)) <= CONDITIONS


def _judges_little(c: Candidate, request: KernelRequest) -> bool:
    """Whether the fewest registers are enough to judge a tile."""
    return request.profile.judged_ops <= (PARTS_OPS if request.profile.cuts(c.tile) else JUDGED_OPS)


def _spared(c: Candidate, request: KernelRequest) -> int | None:
    """The most registers for a producer that judges parts of tiles, or by much, which leave consumers theirs."""
    needed = _needed(registers(c, request))
    wanted = PARTS_REGISTERS if request.profile.cuts(c.tile) else (JUDGE_REGISTERS,)
    return next((n for n in wanted if needed <= _beside(n, request)), None)


def _beside(producer: int, request: KernelRequest) -> int:
    """Registers of a consumer beside so many of a producer."""
    return consumer_registers(request.arch, WARPGROUPS, producer)


def _needed(parts: tuple[Part, ...]) -> int:
    """Of a consumer, all of its registers."""
    return max(total(parts), total(parts[:2]) + BESIDE)


def does_not_fit_reason(c: Candidate, request: KernelRequest) -> str | None:
    """Why the candidate cannot run on the architecture, or None."""
    if c.split_dk_dv != (request.widest > OWN_KEYS):
        return f"{c.tile.kv} keys per block are for head dims {'over' if c.split_dk_dv else 'up to'} {OWN_KEYS}"
    arch, smem_bytes = request.arch, total(smem(c, request))
    if smem_bytes > arch.smem_per_block:
        return f"shared memory {smem_bytes / KIB:.4g} KiB > {arch.smem_per_block / KIB:.4g} KiB"
    needed = _needed(registers(c, request))
    producer, consumer = division(c, request)
    if needed > consumer:
        return f"registers {needed} > {consumer} of a consumer beside {producer} a producer"
    return None


def plan(c: Candidate, request: KernelRequest) -> KernelPlan:
    """The plan of a candidate that fits."""
    return make_plan(
        *(c, request, (padded(request.head_dim), padded(request.v_head_dim))),
        pipeline=NAME,
        program=program(c, request),
        q_in_registers=False,
        blocks_per_sm=1,
        smem=smem(c, request),
        registers=registers(c, request),
        backward=SpecializedBackward(
            consumers=consumers(c),
            blocks=block_order(request),
            dq=dq_sum(c, request),
            dq_parts=dq_parts(c, request.head_dim),
            ping_pong=ping_pong(c, request),
            scores_first=scores_first(c, request),
            lookup_stages=lookup_stages(c, request),
            row_threads=ROW_THREADS,
            mask=mask(c, request),
            score=score(c, request),
            judged_in_turn=judged_in_turn(c, request),
            persistent=persistent(c, request),
            short=c.short,
        ),
    )


def for_short(found: KernelPlan, request: KernelRequest) -> KernelPlan | None:
    """The same kernel in the form for short sequences, where that is another."""
    short = plan(Candidate(tile=found.tile, stages=found.stages, short=True), request)
    return None if replace(_layout(short), short=False) == _layout(found) else short


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """Clocks an SM spends on one score (one query, one key) in the main kernel, by unit.

    Shared memory: what wgmma reads of both operands, but of P and dS in registers; copies of q and d_o; dS, and P
    where it changes hands; and dQ on its way.  L2: q and d_o once per tile, and the sum of dq there and back.
    """
    d, dv, dq = plan.padded_head_dim, plan.padded_v_head_dim, plan.dq_sum_columns
    q, kv, layout = plan.tile.q, plan.tile.kv, _layout(plan)
    special, arithmetic = profile(plan.variant).score_ops
    sm_clocks = arch.sms * arch.clock_hz
    readers = 1 if layout.split_dk_dv else WARPGROUPS  # of q and d_o, for scores and then for gradients
    moved = readers * ((ROWS + q) * (d + dv) + q * (d + dv)) + q * (d + dv)
    moved += WARPGROUPS * kv * (ROWS * len(layout.dq_parts) + layout.dq_columns)
    moved += (2 + 2 * P_ITEM // ITEM if layout.split_dk_dv else 2) * q * kv
    return {
        "tensor": 2 * (2 * d + 2 * dv + dq) * sm_clocks / arch.tensor_flops[NAME],
        "special": (1 + special) / arch.special_per_clock,
        "arithmetic": (SCORE_OPS + 2 * arithmetic) / arch.fp32_lanes,
        "shared memory": ITEM * moved / (q * kv * arch.smem_per_clock),
        "l2": (ITEM * (d + dv) + 8 * dq) / kv * sm_clocks / arch.l2_bytes_per_s,
    }


def seconds_per_score(plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
    """Seconds an SM needs for one score, which rank the plan; one block shares it."""
    by_unit = clocks(plan, arch)
    busiest, total = max(by_unit.values()), sum(by_unit.values())
    step = STEP_CLOCKS[_layout(plan).ping_pong] / (plan.tile.q * plan.tile.kv)
    return ((busiest + INTERFERENCE * (total - busiest) + step) / arch.clock_hz,)


def predictor(plan: KernelPlan, seconds_per_score: tuple[float, ...]) -> Predictor:
    """Seconds of the SM with most blocks, if every block visits every query; and, of plans that differ in that alone,
    what it takes to clear and finish dq, and to take tiles of keys one after another."""
    q, kv, in_main, taking = plan.tile.q, plan.tile.kv, _layout(plan).dq_in_main_kernel, _layout(plan).persistent
    dq_second = 8 * plan.dq_sum_columns / ARCHS[plan.arch].hbm_bytes_per_s  # of a row: float32, there and back

    def seconds(problem: Problem, sms: int) -> float:
        blocks = -(-problem.kv_len // kv) * problem.kv_heads * problem.batch
        scores = kv * max(1, -(-problem.q_len // q)) * q * problem.group
        rows = problem.q_len * problem.heads * problem.batch
        queries = problem.q_len * problem.group
        of_block = DQ_SECONDS[queries < SHORT_QUERIES] if in_main else 0.0
        of_block += TAKING_SECONDS[queries < LONG_QUERIES] if taking else 0.0
        apart = 0.0 if in_main else rows * dq_second
        return -(-blocks // sms) * (scores * seconds_per_score[0] + of_block) + apart

    return seconds
