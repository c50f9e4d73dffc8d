"""The forward of pipeline hopper on tensors of 8 bits: what its candidates cost, where that differs from 16 bits.

P V is added up in two levels: partial sums of a tile of keys by wgmma, O in float32 by additions.  V is turned over by
two or three warps of the producers, since 8-bit wgmma takes keys side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from flashgen.planning.arch import KIB, Arch
from flashgen.planning.float8 import FAR, FLOAT8, HEADROOM, LEAST_BLOCK, SLACK, WORDS_BY_BITS
from flashgen.planning.integers import Allowed
from flashgen.planning.layout import Layout
from flashgen.planning.members import (
    P8,
    PACKED,
    ExactP,
    Highest,
    HighestAsFloat,
    HighestAsInteger,
    HighestBySigns,
    Keys,
    LaggingPByBits,
    Mask,
    MaskByElement,
    MaskByTile,
    MaskByWarpgroup,
    MaskFromBits,
    MaskWithinBounds,
    OInPartsOfTurnedV,
    OnesApart,
    OnesBehindV,
    OOfTurnedV,
    PByBits,
    ScoreByElement,
    ScoreNearZero,
    Sender,
    SendsAndLoads,
    SendsToLoader,
    TilesAlike,
    TwoLevels,
    VTurnedOver,
)
from flashgen.planning.pipelines.hopper import candidate, forward, masks, pace, programs
from flashgen.planning.pipelines.hopper.candidate import ALONE, ROWS, Candidate
from flashgen.planning.pipelines.shared import SOFTMAX_OPS, make_plan, total
from flashgen.planning.plan import KernelPlan, Part, Specialized, Tile, rows_of
from flashgen.planning.profile import profile
from flashgen.planning.program import Program, consumer_registers
from flashgen.planning.request import Fixed, KernelRequest
from flashgen.planning.summaries import WORD

#: As of 16 bits.
NAME, COPIES, SHARES_SM = forward.NAME, forward.COPIES, forward.SHARES_SM
cannot_address, cannot_page = forward.cannot_address, forward.cannot_page
predictor, packing_gain = pace.predictor, pace.packing_gain
cannot_pack = forward.cannot_pack

#: Consumer warpgroups, and the queries of a tile.  One is for decoding: products of 128 rows, few of which are queries,
#: would take longer than the keys of a tile need from memory.
WARPGROUPS = (ALONE, *candidate.WARPGROUPS)
QUERIES = tuple(ROWS * w for w in WARPGROUPS)

#: Head dims that the pipeline emits: rows of 16 bytes.  Narrower ones are bound by exponentials, as 16 bits are.
HEAD_DIM_STEP, MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 64, 256

#: Columns of q and k, and keys, in one product; columns of a box that TMA copies.
DEPTH, BOX = 32, 128

#: Keys of a tile: powers of two, so that blocks of keys with one descale hold whole tiles.
KEYS: tuple[int, ...] = (128, 64, 32)
TILE_RULE = f"tile_q is 64, 128 or 192 (warpgroups of {ROWS} rows), tile_kv 32, 64 or 128 (which divide {LEAST_BLOCK})"
KEY_STEP = DEPTH

#: No tile has fewer queries than those of QUERIES.
SMALL_QUERIES, FEW_QUERIES, FEW_BYTES = None, (), None
EXAMPLES = ((128, 128), (128, 64), (128, 32))

INTEGERS = {
    "stages": Allowed(values=(2, 3, 4), rule="TMA fills one stage while another is used"),
    "q_stages": Allowed(values=(1, 2), rule="while one is worked on, one more is loaded"),
}
FREE_STAGES = (4, 3, 2)

#: Registers of a consumer's thread for what it asked before the softmax, beside what lanes pass on: `document` spilled
#: 24 bytes with 2 left.
ANSWERS_REGISTERS = 3

#: Columns of P V that are multiplied at a time: partial sums take as many registers as scores of a tile.
PIECE = 128

#: Registers of a consumer's thread beside fragments, two more where there is a mask or a score.
OVERHEAD, VARIANT_REGISTERS = 12, 4

#: Those of a producer's thread: of those that turn V over one holds four fragments of 4 words.  More where tiles are
#: judged by much, and where consumers leave them: under some masks a warp that schedules and loads spills a few bytes
#: with 40.
PRODUCER_REGISTERS, MANY_PRODUCER_REGISTERS = 40, 56

#: Where sequences have lengths of their own a mask that is given what it reads takes so many more: `document` spilled 8
#: bytes at head_dim 128 in tiles of 128 keys.
OWN_REGISTERS = 4

#: Weighed ops that classes of tiles are found by (`Profile.judged_ops`) for which the fewer do, if nothing is kept that
#: follows from a tile's rows: `fixed` has 23, and `natten`, with 41, spilled 20 bytes.
FEW_JUDGED_OPS = 24

#: Those of a warp that schedules and loads, and more for each condition of a tile that is visible or that is partial;
#: those that it gives back where it keeps nothing that follows from a tile's rows.  With 40 registers and all kept a
#: window spilled 8 bytes at head_dim 128, a sink beside one 32, `longformer` 80 to 96 (and 12 with nothing kept).
SENDER_REGISTERS, VISIBLE_REGISTERS, HIDDEN_REGISTERS, RENEWED_REGISTERS = 36, 1, 2, 2

#: And where P V comes in pieces beside a mask that is more than one comparison.  `causal_bottom_right` and `prefix_lm`
#: at head_dim 256 spilled 8 bytes, as many with nothing kept: only where several conditions are partial does it give
#: registers back.
PIECES_REGISTERS = 2

#: Warps that turn V over, where the scheduler's warp does not load, and where it does.
TURNING_WARPS = (2, 3)

#: Clocks that positions in rings of three stages cost a step more than in those of a power of two: by SASS.
RING_CLOCKS = 10

#: Registers that a thread can have: all that one warpgroup of consumers starts with.
MOST_REGISTERS = 256

#: Registers of a consumer's thread for scales and descales of two rows, where heads are packed.
SCALE_REGISTERS = 3

#: A score function that reads an element for each key takes one more register for so many keys.  Where P V comes in
#: pieces producers keep the many that consumers leave beside it: with 40 `relative_bias` spilled 8 bytes.
READING_KEYS = 8

#: Three warpgroups hold S, partial sums and O of so many columns of V.
NARROW = 64

#: Keys of a tile with which partial sums may follow scores where both of them would fit one after the other.
NARROW_KEYS = 64

#: 8-bit products beside 16-bit ones.
RATE = 2

#: Float operations more on one element of O for each tile of keys: partial sums join it.
FOLD_OPS = 1


def unsupported_reason(request: KernelRequest) -> str | None:
    """Why there is no such 8-bit kernel, or None."""
    if request.float8 is not None and request.float8.q not in FLOAT8:
        return f"multiplies 8-bit keys and values by queries of 8 bits, not by {request.float8.q}"
    if request.dropout:
        return "drops no probabilities in 8 bits"
    if request.keys.invariant:
        return "cuts no rows into leaves in 8 bits"
    return None


def nearest_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile that TILE_RULE allows and that comes closest."""
    q, kv = tile
    return min(QUERIES, key=lambda rows: abs(rows - q)), min(KEYS, key=lambda keys: abs(keys - kv))


def candidates(fixed: Fixed) -> Iterator[Candidate]:
    """Every candidate that has what is fixed, and else what the planner may choose freely."""
    free = [Tile(q=ROWS * w, kv=kv) for w in WARPGROUPS for kv in KEYS]
    for tile in [fixed.tile] if fixed.tile else free:
        for stages in fixed.among("stages", FREE_STAGES):
            for q_stages in fixed.among("q_stages", (2, 1)):
                yield Candidate(tile=tile, stages=stages, q_stages=q_stages)


def padded(head_dim: int, step: int) -> int:
    """Head dim rounded up to whole steps of a product."""
    return -(-head_dim // step) * step


def _columns(request: KernelRequest) -> tuple[int, int]:
    """Those of q and k, and of v, in shared memory: whole boxes."""
    qk, v = (padded(dim, rows_of(dim, 1).columns) for dim in (request.head_dim, request.v_head_dim))
    return qk, v


def smem(c: Candidate, request: KernelRequest) -> tuple[Part, ...]:
    """Bytes of shared memory of a block."""
    d, dv = _columns(request)

    def staged(name: str, stages: int, rows: int, columns: int) -> Part:
        why = f"{stages} stages x {rows} rows x {columns} bytes"
        return Part(name=name, amount=stages * rows * columns, why=why)

    return (
        staged("q", c.q_stages, c.tile.q, d),
        staged("k", c.stages, c.tile.kv, d),
        staged("v", programs.V_STAGES, c.tile.kv, dv),
        staged("v turned over", c.stages, request.v_head_dim + _p(request).ones_behind_v, programs.KEYS_ACROSS),
        *((staged("ones", 1, 8, programs.KEYS_ACROSS),) if _p(request).ones_apart else ()),
        Part(
            name="control",
            amount=_control(
                *(c, request.profile.hides, _p(request).ones_apart, _sender(c, request)), request.keys, request.layout
            ),
            why="barriers, messages and descales",
        ),
    )


@lru_cache
def _control(c: Candidate, masked: bool, ones: bool, sender: Sender, keys: Keys, layout: Layout) -> int:
    """Bytes of barriers and messages, which neither the size of tiles nor that of registers changes."""
    return _program(c, (BOX, BOX), BOX, (0, 0), masked, ones, sender, keys, layout).control_bytes(programs.ALIGNMENT)


def _program(
    c: Candidate,
    columns: tuple[int, int],
    turned: int,
    registers: tuple[int, int],
    masked: bool,
    ones: bool,
    sender: Sender,
    keys: Keys,
    layout: Layout,
) -> Program:
    return programs.forward(
        tile=c.tile,
        columns=columns,
        stages=c.stages,
        q_stages=c.q_stages,
        registers=registers,
        masked=masked,
        stored=False,
        ping_pong=False,
        layout=layout,
        split=keys.split,
        turned=(turned, TURNING_WARPS[sender.loads]),
        ones=ones,
        loads=sender.loads,
    )


def piece(request: KernelRequest) -> int:
    """Columns of P V that are multiplied at a time: equal parts of all."""
    parts = -(-request.v_head_dim // PIECE)
    return request.v_head_dim // parts


def registers(c: Candidate, request: KernelRequest, *, ahead: bool = False) -> tuple[Part, ...]:
    """32-bit registers of a consumer's thread; with the next scores `ahead`, these beside the partial sums."""
    asked, dv, keys, partial = request.profile, request.v_head_dim, c.tile.kv, piece(request)
    scores, sums = f"{ROWS} x {keys} float32", f"{ROWS} x {partial} float32"
    both: tuple[Part, ...]
    if ahead:
        both = (Part(name="s", amount=keys // 2, why=scores), Part(name="partial", amount=partial // 2, why=sums))
    else:
        one = max(keys, partial) // 2
        both = (Part(name="s or partial", amount=one, why=f"{scores}, or {sums}, one after the other"),)
    parts = [
        Part(name="o", amount=dv // 2, why=f"{ROWS} x {dv} float32 over 128 threads"),
        *both,
        Part(name="p", amount=keys // 8, why=f"{ROWS} x {keys} in 8 bits"),
        *(() if isinstance(_p(request), ExactP) else (Part(name="sums", amount=4, why="of rows of P"),)),
        Part(
            name="overhead",
            amount=OVERHEAD + (0 if asked.plain else VARIANT_REGISTERS),
            why="softmax, addresses, loop state, descriptors",
        ),
    ]
    if asked.scored:
        reads = keys // READING_KEYS if asked.score_reads_by_key else 0
        parts.append(Part(name="score", amount=forward.SCORE_REGISTERS + reads, why="what the score function keeps"))
    form = _mask(c, request)
    if form.looks_up:  # these themselves have registers of partial sums, which have joined O
        amount = asked.mask_ops - 1 + OWN_REGISTERS * request.layout.own
        parts.append(Part(name="mask", amount=amount, why="what is made of elements that lanes pass on"))
    if isinstance(form, MaskFromBits):
        words = 2 * keys // WORD
        parts.append(
            Part(name="bits", amount=forward.BITS_REGISTERS + words, why=f"{words} words of bits, and their address")
        )
    if _captures(c, request):
        of_pairs = forward.PAIR_REGISTERS * asked.mask_reads_pairs
        amount = forward.CAPTURED_REGISTERS + of_pairs + forward.ELEMENT_REGISTERS * (keys // 4)
        parts.append(Part(name="captured", amount=amount, why="elements that are read for each key"))
    return tuple(parts)


def _mask(c: Candidate, request: KernelRequest) -> Mask:
    """How elements are masked: as in 16 bits.  Bounds are not asked apart where P V comes in pieces, or where three
    warpgroups have maxima that lag: `dilated` spilled 104 bytes at head_dim 256, and 404 at 64."""
    form = masks.form(c, request)
    short = request.v_head_dim > PIECE or (c.warpgroups > 2 and _p(request).lags)
    return MaskByElement() if short and isinstance(form, MaskWithinBounds) else form


def _captures(c: Candidate, request: KernelRequest) -> bool:
    """Whether consumers read elements for each key where they use them."""
    asked, form = request.profile, _mask(c, request)
    if isinstance(form, MaskFromBits):
        return asked.score_reads_by_key or asked.mask_reads_beside_tables
    given = form.looks_up or isinstance(form, MaskByTile | MaskByWarpgroup)
    return asked.score_reads_by_key if given else asked.reads_by_key


def division(c: Candidate, request: KernelRequest) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread."""
    rest = min(MOST_REGISTERS, consumer_registers(request.arch, c.warpgroups, MANY_PRODUCER_REGISTERS))
    judges = request.profile.judged_ops > FEW_JUDGED_OPS or _captures(c, request)
    many = (request.profile.judged and judges) or c.warpgroups > 2 or total(registers(c, request, ahead=True)) < rest
    reads = request.profile.score_reads_by_key and request.v_head_dim > PIECE
    many = many or (reads and total(registers(c, request)) <= rest)
    producer = MANY_PRODUCER_REGISTERS if many else PRODUCER_REGISTERS
    return producer, min(MOST_REGISTERS, consumer_registers(request.arch, c.warpgroups, producer))


def _ahead(c: Candidate, request: KernelRequest) -> bool:
    """Whether the next scores are on their way beside partial sums: with one warpgroup or two, where these come in one
    piece and registers hold both.  Three fill the tensor cores without."""
    whole = c.warpgroups < 3 and piece(request) == request.v_head_dim
    return whole and total(registers(c, request, ahead=True)) <= division(c, request)[1]


def _most_keys(c: Candidate, request: KernelRequest) -> int:
    """The most keys of a tile whose fragments registers hold; one warpgroup spills with more than NARROW_KEYS, found by
    compiling."""
    some = [keys for keys in KEYS if c.warpgroups > 1 or keys <= NARROW_KEYS]
    tiles = (replace(c, tile=Tile(q=c.tile.q, kv=keys)) for keys in some)
    wanted = {t.tile.kv: total(registers(t, request)) for t in tiles}
    return next((keys for keys in some if wanted[keys] <= division(c, request)[1]), some[-1])


def _highest(c: Candidate, request: KernelRequest) -> Highest:
    """How the highest score of a row is found: by floats where P V comes in pieces beside many keys, found by compiling
    (1,800 to 2,000 bytes of spills by integers); by integers where maxima lag, which are seldom looked for.

    By signs 8,192 tokens on an H200 are 1.00 to 1.03 times as fast at head_dim 128, 1.01 to 1.02 times at 64.
    """
    if request.v_head_dim > PIECE and c.tile.kv > NARROW_KEYS:
        return HighestAsFloat()
    return HighestAsInteger() if _p(request).lags else HighestBySigns(zero="-OFFSET")


def does_not_fit_reason(c: Candidate, request: KernelRequest) -> str | None:
    """Why the candidate cannot run on the architecture, or None."""
    # Of one piece and many keys, or elements of pairs, ptxas spills where scores are not ahead.
    many = c.tile.kv > NARROW_KEYS or request.profile.mask_reads_pairs
    both = c.warpgroups < 3 and request.v_head_dim <= PIECE and many
    memory, wanted = smem(c, request), registers(c, request, ahead=both)
    if total(memory) > request.arch.smem_per_block:
        terms = " + ".join(f"{part.name} {part.amount / KIB:.4g}" for part in memory)
        whole = f"{total(memory) / KIB:.4g} KiB ({total(memory):,} bytes)"
        return f"shared memory {terms} = {whole} > {request.arch.smem_per_block / KIB:.4g} KiB"
    if c.warpgroups > 2 and request.v_head_dim > NARROW:
        return f"three warpgroups with {request.v_head_dim} columns of v: more than {NARROW} leave them no registers"
    if request.v_head_dim > PIECE and c.tile.kv != (most := _most_keys(c, request)):
        return f"{request.v_head_dim} columns of v with {c.tile.kv} keys: registers and steps are best used with {most}"
    producer, consumer = division(c, request)
    if total(wanted) > consumer:
        terms = " + ".join(f"{part.name} {part.amount}" for part in wanted)
        return f"registers {terms} = {total(wanted)} > {consumer} of a consumer beside {producer} of a producer"
    return None


def plan(c: Candidate, request: KernelRequest) -> KernelPlan:
    """The plan of a candidate that fits."""
    ahead, sender = _ahead(c, request), _sender(c, request)
    columns = _columns(request)
    masked = request.profile.hides
    return make_plan(
        *(c, request, (padded(request.head_dim, DEPTH), request.v_head_dim)),
        pipeline=NAME,
        program=_program(
            *(c, columns, request.v_head_dim + _p(request).ones_behind_v, division(c, request)),
            masked=masked,
            ones=_p(request).ones_apart,
            sender=sender,
            keys=request.keys,
            layout=request.layout,
        ),
        q_in_registers=False,
        blocks_per_sm=1,
        smem=smem(c, request),
        registers=registers(c, request, ahead=ahead),
        specialized=Specialized(
            warpgroups=c.warpgroups,
            ping_pong=False,
            score=_score(request),
            mask=_mask(c, request),
            full_tiles=TilesAlike(),
            highest=_highest(c, request),
            o=OInPartsOfTurnedV() if request.keys.split else OOfTurnedV(),
            scheduler=forward.scheduler(c, request),
            products=TwoLevels(piece=piece(request), ahead=ahead, ask_early=ahead and _asks_early(c, request)),
            p=_p(request),
            v=VTurnedOver(beside_k=_beside_k(c, request)),
            sender=sender,
            runs_anew=(sender.loads or request.profile.judged) and _missing(c, request) > 0,
        ),
    )


def _asks_early(c: Candidate, request: KernelRequest) -> bool:
    """Whether consumers ask before the softmax what has come, and keep the answers."""
    room = division(c, request)[1] - total(registers(c, request, ahead=True))
    if _mask(c, request).looks_up and room < ANSWERS_REGISTERS:
        return False
    # 8,192 tokens at head_dim 128 on an H200 are 1.02 to 1.03 times as fast, causal or in a window; without a mask 0.99
    # to 1.00, and 1.02 by signs as well (`_highest`); 0.97 to 0.99 where maxima lag, which leaves no time between.
    return not _p(request).lags


def _beside_k(c: Candidate, request: KernelRequest) -> bool:
    """Whether V is loaded behind its own K."""
    # One tile later products of head_dim 256, which has two stages, wait for it during 287 of 3,255 clocks a step.
    # Beside K 8,192 tokens on an H200 are 1.07 times as fast where P is made by bits, 1.01 where half of it is, 0.98
    # where none is: exponentials leave time to turn it over.  At 128, with four stages, it is 1.00.  One warpgroup, for
    # decoding, waits for memory: K goes ahead.
    return c.warpgroups > ALONE and request.v_head_dim > PIECE and _p(request).sums_late


def _sender(c: Candidate, request: KernelRequest) -> Sender:
    """Who loads: a warp of its own where conditions are judged tile by tile or tensors read, which would keep tiles
    waiting and registers do not hold (found by compiling), or where there are many conditions; where rows of V are
    cleared, and where keys are split."""
    apart = request.profile.judged or request.profile.mask_reads or request.layout.own or request.keys.split
    several = request.profile.hides and len(request.profile.facts.hidden) > 1
    spared = RENEWED_REGISTERS + _of_pieces(request) if several else 0
    return SendsToLoader() if apart or _missing(c, request) > spared else SendsAndLoads()


def _missing(c: Candidate, request: KernelRequest) -> int:
    """Registers that a warp which schedules and loads has too few, if it keeps what follows from a tile's rows."""
    asked = request.profile
    if not asked.hides or c.warpgroups == 1:  # one warpgroup leaves each thread more than any needs
        return 0
    conditions = VISIBLE_REGISTERS * len(asked.facts.visible) + HIDDEN_REGISTERS * len(asked.facts.hidden)
    return max(0, SENDER_REGISTERS + conditions + _of_pieces(request) - division(c, request)[0])


def _of_pieces(request: KernelRequest) -> int:
    """Registers more that it needs where P V comes in pieces."""
    return PIECES_REGISTERS if request.v_head_dim > PIECE and request.profile.mask_ops > 1 else 0


def _p(request: KernelRequest) -> P8:
    """How P is made."""
    assert request.float8 is not None
    words = WORDS_BY_BITS[request.float8.accuracy]
    if not words:
        return ExactP()
    sums = OnesBehindV() if piece(request) == request.v_head_dim else OnesApart()
    slack, asked = SLACK[request.float8.accuracy], request.profile
    # Where P V comes in pieces beside a score function or a mask of several runs, ptxas spills 4 to 8 bytes.
    if not slack or (not sums.rows and (asked.scored or (asked.masked and not asked.band))):
        return PByBits(words=words, sums=sums)
    return LaggingPByBits(words=words, sums=sums, slack=slack, headroom=HEADROOM, far=FAR)


def packed(plan: KernelPlan) -> KernelPlan | None:
    """The form of a plan whose tiles have rows of all heads that share keys; None where registers do not allow it.

    The rows of a thread are of two heads, each with a descale of q.
    """
    assert plan.specialized is not None
    amount = SCALE_REGISTERS + forward.PACKED_REGISTERS * profile(plan.variant).uses_query
    registers = (*plan.registers, Part(name="packed", amount=amount, why="the scales and the queries of two rows"))
    if total(registers) > (plan.program.consumer_registers or 0):
        return None
    return replace(plan, registers=registers, rows=PACKED)


def clocks(plan: KernelPlan, arch: Arch) -> dict[str, float]:
    """Clocks an SM spends on one score (one query, one key), by the unit that spends them.

    Shared memory: a tile of K and of V turned over for each warpgroup's product, what TMA writes, and what turning V
    over reads and writes.
    """
    special, arithmetic = profile(plan.variant).score_ops
    sm_clocks = arch.sms * arch.clock_hz
    exponentials = 1 - _words(plan) / 8
    dims = plan.padded_head_dim + plan.padded_v_head_dim
    once = plan.padded_head_dim + 3 * plan.padded_v_head_dim
    fold = FOLD_OPS * plan.padded_v_head_dim / plan.tile.kv
    return {
        "tensor": 2 * dims * sm_clocks / (RATE * arch.tensor_flops[NAME]),
        "special": (exponentials + special) / arch.special_per_clock,
        "arithmetic": (SOFTMAX_OPS + arithmetic + fold) / arch.fp32_lanes,
        "shared memory": (dims / ROWS + once / plan.tile.q) / arch.smem_per_clock,
    }


def _words(plan: KernelPlan) -> int:
    """Of eight words of P those that take no exponentials."""
    return 0 if plan.float8 is None else WORDS_BY_BITS[plan.float8.accuracy]


def seconds_per_score(plan: KernelPlan, arch: Arch) -> tuple[float, ...]:
    """Seconds an SM needs for one score, which rank the plan; one block shares it."""
    by_unit = clocks(plan, arch)
    softmax = by_unit["special"] + by_unit["arithmetic"]
    busiest, second = sorted(by_unit.values(), reverse=True)[:2]
    specialized, tile = plan.specialized, plan.tile
    assert specialized is not None and isinstance(specialized.products, TwoLevels)
    exposed = max(0.0, pace.SOFTMAX_STRETCH * softmax - (specialized.warpgroups - 1) * busiest)
    # Without scores ahead a warpgroup's own products stand one after another, which one other does not fill.
    alone = specialized.warpgroups == 2 and not specialized.products.ahead
    exposed += by_unit["tensor"] / 2 if alone else 0.0
    step = (pace.STEP_CLOCKS + (plan.stages == 3) * RING_CLOCKS) / (tile.q * tile.kv)
    between = (plan.q_stages == 1) * pace.Q_LOAD_CLOCKS + (plan.stages == 2) * pace.KV_LOAD_CLOCKS
    if plan.keys.split:  # as in 16 bits, but that a fourth stage brings nothing: 1.02 to 1.03x the time on an H200
        between, step = 0, step + pace.MEMORY_CLOCKS / (min(plan.stages, 3) * tile.q * tile.kv)
    found = busiest + pace.INTERFERENCE * second + exposed + step + between / (tile.q * pace.TYPICAL_KEYS)
    return (found / arch.clock_hz,)


def _score(request: KernelRequest) -> ScoreByElement | ScoreNearZero:
    """How scores are made of products.  Where P V comes in pieces `local_softcap` spilled 16 bytes with more code."""
    near_zero = request.profile.near_zero and isinstance(_p(request), ExactP) and not _of_pieces(request)
    return ScoreNearZero() if near_zero else ScoreByElement()
