"""What to emit: a KernelPlan holds every number and every yes or no that a template needs, and no length."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.lang.variant import Variant
from flashgen.planning.float8 import CODE_BIAS, OFFSET, Float8
from flashgen.planning.integers import Integers
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.members import (
    ALL_KEYS,
    ENDS_BESIDE_NEXT,
    FIRST_TILE_WHOLE,
    IN_TURN,
    LAGGING_P,
    NO_FOLD,
    ONE_LEVEL,
    P8,
    QUERIES,
    RESCALE_BEHIND_P,
    SENDS_TO_LOADER,
    V_AS_STORED,
    BlockOrder,
    Consumers,
    DqSum,
    FirstTile,
    Fold,
    FullTiles,
    Highest,
    Keys,
    LaggingP,
    LaggingPByBits,
    Launches,
    Mask,
    MaskByElement,
    MaskByTile,
    MaskInWords,
    MaskWithinBounds,
    OByTma,
    OFromRegisters,
    OInParts,
    OInPartsOfTurnedV,
    OneLevel,
    OOfTurnedV,
    OwnKeys,
    PByBits,
    Rescale,
    Rows,
    Scheduler,
    ScoreByElement,
    ScoreByRow,
    ScoreNearZero,
    ScoreWithSlope,
    Sender,
    SharedKeys,
    SoftCap,
    SoftCapWithSlope,
    SplitDkDv,
    StepEnd,
    TileEnd,
    TwoLevels,
    VAsStored,
    VTurnedOver,
)
from flashgen.planning.operands import AS_STORED, WIDE, Operands, Widened
from flashgen.planning.program import Program

#: Rows of a product of one warpgroup (wgmma's m).
WARPGROUP_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of queries and of keys that one step of a kernel works on."""

    q: int
    kv: int

    def __str__(self) -> str:
        return f"{self.q}x{self.kv}"


#: Bytes of float16 and bfloat16.
ITEM = 2

#: Bytes of a row of the widest pattern by which TMA swizzles.
SWIZZLE = 128

#: Rows after which the swizzle repeats: a box that begins and ends there may lie anywhere in a tile.
BOX_ROWS = 8


def without_sink(variant: Variant, gradients: tuple[str, ...]) -> tuple[str, ...]:
    """The captured tensors whose gradients are asked for, but for the sink's."""
    return tuple(name for name in gradients if variant.sink is None or name != variant.sink.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One term of a sum that is shown to a person: shared memory in bytes, registers in 32-bit registers per thread."""

    name: str
    amount: int
    why: str = ""


def staged(name: str, stages: int, rows: int, columns: int) -> Part:
    """The shared memory of `stages` tiles of 16-bit elements."""
    why = f"{stages} stages x {rows} rows x {columns} columns x {ITEM} bytes"
    return Part(name=name, amount=stages * rows * columns * ITEM, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBits:
    """The values of a condition as bits: a row for each query ("q") or key ("k"), of whole tiles of so many `columns`
    of the other."""

    by: str
    columns: int

    def __str__(self) -> str:
        return f"a row for each {'query' if self.by == 'q' else 'key'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSummary:
    """A part of the mask of which a kernel of its own finds the least and the greatest value over each `positions`
    queries ("q") or keys ("k"), or so many queries and `keys` ("qk"), before tiles are classified by them (see
    `analysis.summaries`)."""

    name: str
    side: str
    positions: int
    keys: int
    steps: tuple[int, int]  # at whose multiples it changes: queries, and keys
    range_type: str  # the C++ type of what bounds a value
    itemsize: int
    grouped: bool  # the bounds of two groups of values
    by_batch: bool
    by_head: bool
    tensors: tuple[str, ...]  # captured tensors that it reads
    bits: RowBits | None = None  # how its values are kept; None: they are not

    def __str__(self) -> str:
        bits = f", and its bits, {self.bits}" if self.bits else ""
        in_groups = " in two groups" if self.grouped else ""
        return f"{self.name}, its least and greatest value over {self.what}{in_groups}{bits}"

    @property
    def what(self) -> str:
        """What one is made of, for a person."""
        if self.side == "qk":
            return f"{self.positions} queries and {self.keys} keys"
        return f"{self.positions} {'queries' if self.side == 'q' else 'keys'}"

    @property
    def pointer(self) -> str:
        """The name of the memory that holds it."""
        return f"summary_{self.name}"

    @property
    def bits_pointer(self) -> str:
        """The name of the memory that holds its bits."""
        return f"bits_{self.name}"

    @property
    def ctype(self) -> str:
        """The C++ type of one."""
        return self.range_type.replace("Range", "Grouped") if self.grouped else self.range_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A better pipeline of the architecture that does not serve a request, why, and the nearest that it serves."""

    pipeline: str
    reason: str
    nearest: str
    pinned: bool = False  # the variant's own pin rules it out, which is no news to whoever wrote it

    def __str__(self) -> str:
        return f"{self.reason} (nearest: {self.nearest})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """Rows of a tile as TMA writes them: the columns of a box, and its bytes, by which they are swizzled."""

    columns: int
    bytes: int

    @property
    def descriptor(self) -> str:
        """The function that describes such an operand to wgmma."""
        return "matrix_descriptor" if self.bytes == SWIZZLE else "narrow_matrix_descriptor"

    @property
    def twist(self) -> str:
        """By what the number of a 16-byte chunk of row `lane` is swizzled."""
        return "lane % 8" if self.bytes == SWIZZLE else "lane / 2 % 4"


def rows_of(columns: int, itemsize: int) -> SharedRows:
    """Rows of 128 bytes, or of 64 where 8-bit tensors have no more: half of wider ones would be zeros, which TMA
    writes."""
    narrow = itemsize == 1 and columns * 2 <= SWIZZLE
    width = SWIZZLE // 2 if narrow else SWIZZLE
    return SharedRows(columns=width // itemsize, bytes=width)


def in_whole_rows(columns: int, itemsize: int) -> bool:
    """Whether one copy of a page brings rows of several swizzled boxes: of small pages TMA starts as many copies as it
    can, and these are half of them or fewer."""
    return itemsize == ITEM and columns * itemsize > SWIZZLE and columns * itemsize % SWIZZLE == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialized:
    """How the warps of a block divide work on pipeline hopper: some hand out and load tiles, warpgroups consume."""

    warpgroups: int  # consumers, 64 query rows each
    ping_pong: bool  # warpgroups take turns to issue products
    score: ScoreByElement | ScoreByRow | ScoreNearZero | SoftCap
    mask: Mask = field(default_factory=MaskByElement)
    full_tiles: FullTiles
    highest: Highest
    o: OByTma | OFromRegisters | OInParts | OOfTurnedV | OInPartsOfTurnedV
    scheduler: Scheduler
    products: OneLevel | TwoLevels = ONE_LEVEL
    p: LaggingP | P8 = LAGGING_P
    rescale: Rescale = RESCALE_BEHIND_P
    v: VAsStored | VTurnedOver = V_AS_STORED
    fold: Fold = NO_FOLD
    sender: Sender = SENDS_TO_LOADER
    first: FirstTile = FIRST_TILE_WHOLE
    ends: TileEnd = ENDS_BESIDE_NEXT
    runs_anew: bool = False  # who schedules finds the ends of runs of keys for each 32 tiles, else keeps them

    @property
    def run(self) -> str:
        """The template of a consumer's loops; without scores ahead nothing overlaps."""
        return self.ends.run if self.products.overlaps else "hopper/forward_run_one_after_another.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByQuery:
    """The entry of a deterministic backward for dq alone: 16 queries per warp, walking over keys as the forward."""

    tile_q: int
    keys: int  # at a time
    blocks_per_sm: int
    smem: tuple[Part, ...]

    @property
    def threads(self) -> int:
        return 2 * self.tile_q

    @property
    def smem_bytes(self) -> int:
        return sum(part.amount for part in self.smem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """How the warps of a backward block divide a tile, and what they exchange through shared memory.

    `kv_warps` times `q_warps` warps hold P and dS: keys by queries.  Those that share keys divide the columns of dk and
    dv among themselves; they exchange P and dS, the others need not.  dQ is `dq_q_warps` warps of queries by the rest
    of columns.
    """

    kv_warps: int
    q_warps: int
    queries: int  # of a warp at a time
    dq_q_warps: int
    dq_parts: int  # in which a warp computes its columns of dQ, one after another
    buffers: int  # tiles of P and dS in shared memory; with two, no warp waits for the readers of the tile before
    by_query: ByQuery | None  # None: dq is added up in memory
    vector_atomics: bool  # four floats an addition in memory
    step_end: StepEnd
    row_threads: int  # of a block of the entries that work on rows alone

    @property
    def adds_dq(self) -> bool:
        """Whether dq is added up in memory."""
        return self.by_query is None

    @property
    def shares_p(self) -> bool:
        """Whether warps need P of each other."""
        return self.q_warps > 1

    @property
    def keys(self) -> OwnKeys | SharedKeys:
        """Whose keys a warp works on."""
        return SharedKeys() if self.shares_p else OwnKeys()

    @property
    def dq_in_parts(self) -> bool:
        """Whether a warp computes its columns of dQ one part after another."""
        return self.dq_parts > 1

    @property
    def dq_in_main_kernel(self) -> bool:
        """Other kernels clear and finish the sums of dq."""
        return False

    @property
    def persistent(self) -> bool:
        """Each block has one tile of keys."""
        return False

    @property
    def lookup_stages(self) -> int:
        """The mask looks up itself what it reads."""
        return 0

    @property
    def judged_in_turn(self) -> bool:
        """Registers suffice to judge a tile at once."""
        return False

    @property
    def score_tiles(self) -> bool:
        """Whether dS goes through shared memory."""
        return self.shares_p or self.adds_dq


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecializedBackward:
    """How the warps of a backward block divide work on pipeline hopper: one loads tiles, two warpgroups consume.

    Each warpgroup owns half of the keys of a tile, dk and dv of these; or all keys, one P and dv, the other dS and dk.
    Of dq it computes 64 queries of all columns, or all queries of half of the columns.  In a deterministic plan two
    more warps see to the order in which blocks add to dq.
    """

    consumers: Consumers
    blocks: BlockOrder
    dq: DqSum
    dq_parts: tuple[int, ...]  # columns of dq in a warpgroup's products, one after another
    ping_pong: bool  # one warpgroup computes P and dS while the other's products run
    scores_first: bool  # dP is computed when scores and masks have been applied, else beside S
    lookup_stages: int  # tiles of queries whose mask operands shared memory holds; 0: the mask reads them itself
    row_threads: int  # of a block of the entries that work on rows alone
    mask: Mask = field(default_factory=MaskByElement)
    score: ScoreWithSlope | SoftCapWithSlope = field(default_factory=ScoreWithSlope)
    judged_in_turn: bool = False  # a tile's conditions are judged one after another through shared memory, else at once
    persistent: bool = False  # blocks take one tile of keys after another from a counter, else each has one
    short: bool = False  # the form for short sequences, where that is another

    @property
    def split_dk_dv(self) -> bool:
        """Whether the warpgroups divide gradients, not keys."""
        return isinstance(self.consumers, SplitDkDv)

    @property
    def dq_in_main_kernel(self) -> bool:
        """Whether two warps of a block clear sums of dq of heads to come, and finish complete ones."""
        return self.dq.in_main_kernel

    @property
    def dq_in_parts(self) -> bool:
        """Whether a warpgroup computes its columns of dq one part after another."""
        return len(self.dq_parts) > 1

    @property
    def dq_by_queries(self) -> bool:
        """Whether the warpgroups divide the queries of dq, else its columns."""
        return self.consumers.dq_half == "queries"

    @property
    def dq_columns(self) -> int:
        """Columns of dq that a warpgroup computes."""
        return sum(self.dq_parts)

    @property
    def by_query(self) -> None:
        """No entry for dq by itself."""

    @property
    def adds_dq(self) -> bool:
        """dq is added up in memory."""
        return True

    @property
    def vector_atomics(self) -> bool:
        """Four floats of a lane lie side by side where dq is added up."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan(Integers):
    """One kernel, decided.  It alone is emitted and it alone keys kernels: no length, batch, head count or value.

    Its integers (see `integers`) are `stages`, and what else its pipeline has.

    `head_dim` and `v_head_dim` are the caller's; `padded_head_dim` and `padded_v_head_dim` what the tiles hold (the
    extra columns are zero).  `variant` has its constants bound.
    """

    variant: Variant
    pass_name: str  # "forward" | "backward"
    pipeline: str  # "ampere" | "hopper"
    arch: str  # "sm_80" ...
    dtype: str  # "float16" | "bfloat16" | "float8_e4m3fn", of q
    head_dim: int
    v_head_dim: int
    padded_head_dim: int
    padded_v_head_dim: int
    tile: Tile
    stages: int
    program: Program = field(hash=False)  # follows from the rest
    q_in_registers: bool
    blocks_per_sm: int  # what __launch_bounds__ asks for
    smem: tuple[Part, ...]
    registers: tuple[Part, ...]
    specialized: Specialized | None = None  # of pipeline hopper
    backward: Backward | SpecializedBackward | None = None  # of pass "backward"
    deterministic: bool = False  # the same bits in every run
    dropout: bool = False
    keys: Keys = ALL_KEYS  # that a block of a forward visits
    rows: Rows = QUERIES  # of a tile of a forward
    launches: Launches = IN_TURN  # when its kernels start
    gradients: tuple[str, ...] = ()  # captured tensors whose gradient is asked for
    layout: Layout = DENSE  # of sequences in q, k, v and o
    float8: Float8 | None = None  # of keys and values of 8 bits
    operands: Operands = AS_STORED  # of the products of pipeline ampere's forward
    summaries: tuple[TileSummary, ...] = ()  # of the mask, made before tiles are classified
    fallbacks: tuple[Fallback, ...] = field(default=(), compare=False)  # how it was chosen, not what is emitted

    @property
    def score_gradients(self) -> tuple[str, ...]:
        """Of `gradients`, what the score reads: found tile by tile."""
        return without_sink(self.variant, self.gradients)

    @property
    def sink_gradient(self) -> bool:
        """Whether the gradient of the sink is asked for: found by rows."""
        return self.gradients != self.score_gradients

    @property
    def lag_share(self) -> float:
        """Share of what a row has added up that a key's P must pass before the row's maximum follows it.

        A key that dominates a row is then multiplied as 1, which is exact; of others the roundings average out, as they
        do beside an exact maximum.  RMS error in units of that with an exact maximum (bfloat16, head_dim 128, 8,192
        keys): N(0, 1) 1.02, scores of standard deviation 2 1.03, all other inputs of `flashgen bench data` at most
        1.01; emulated with shares of 1/8 and 1/2, 1.07 and 1.15.  Of rows of N(0, 1) almost none moves late.
        """
        return 1 / 16

    @property
    def lag_most(self) -> int:
        """The power of two beyond which P makes a maximum follow in any case: P and O stay finite for 2^24 keys and
        values up to 2^39 in bfloat16, which has the range of float32, and P in float16."""
        return 15 if self.p_dtype == "float16" else 64

    @property
    def order_of_sums(self) -> tuple[object, ...]:
        """What the bits of o and lse depend on beside a row's own scores: kernels of one menu share it.

        Keys are walked from the last tile to the first, each tile's from its first on, and what a row subtracts follows
        its scores from tile to tile: so tiles of as many keys take the same steps, whatever else differs.
        """
        if self.pass_name == "backward":
            return ()
        return (self.tile.kv, None if self.specialized is None else type(self.specialized.score))

    @property
    def out_dtype(self) -> str:
        """The dtype of o."""
        return self.dtype if self.float8 is None else self.float8.out

    @property
    def said_of_8_bits(self) -> str:
        """What has which dtype, and how P is made, for a person."""
        widened = f"; {self.operands}" if isinstance(self.operands, Widened) else ""
        return f"{self.float8}{widened}" if self.float8 else ""

    @property
    def p_dtype(self) -> str:
        """The dtype to which P is rounded."""
        return WIDE if isinstance(self.operands, Widened) else self.dtype

    @property
    def p_offset(self) -> int:
        """P of a row's highest score, as a power of two, where a maximum does not lag."""
        return OFFSET

    @property
    def code_of_one(self) -> str:
        """The code of 1 in e4m3 where codes are made of logarithms, in units of 2^-24, with what makes their mean
        right: f is taken for log2(1 + f), which is more."""
        return f"{(8 * 7 + CODE_BIAS) * 2.0**-24!r}"

    @property
    def k_step(self) -> int:
        """Columns of q and k in one product."""
        return 16 if self.float8 is None else 32

    @property
    def p_slack(self) -> float:
        """How far a score may be above a row's maximum before that follows, in 8 bits, as a power of two."""
        p = None if self.specialized is None else self.specialized.p
        return p.slack if isinstance(p, LaggingPByBits) else 0.0

    @property
    def rough_tanh(self) -> bool:
        """Whether the tanh of a soft cap is taken with 11 bits: codes of P made of logarithms hide it.  A soft cap
        of 8 bits, head_dim 128, 8,192 keys, on an H100: 785 us in place of 948 by a polynomial where arguments are
        small, with the same error of o (0.0114)."""
        return self.specialized is not None and isinstance(self.specialized.p, PByBits)

    @property
    def p_headroom(self) -> float:
        """How much lower P is in the first two tiles of a schedule, in 8 bits, and in the first that a row sees a key
        of, as a power of two."""
        p = None if self.specialized is None else self.specialized.p
        return p.headroom if isinstance(p, LaggingPByBits) else 0.0

    @property
    def qk_rows(self) -> SharedRows:
        """Rows of q and k in shared memory."""
        return rows_of(self.padded_head_dim, 2 if self.float8 is None else 1)

    @property
    def v_rows(self) -> SharedRows:
        """Rows of v in shared memory, as stored."""
        return rows_of(self.padded_v_head_dim, 2 if self.float8 is None else 1)

    @property
    def whole_rows(self) -> tuple[str, ...]:
        """Which of k and v lie in shared memory in whole rows, eight by eight, as one copy of a page brings them."""
        if self.specialized is None or not self.layout.paged or self.float8 is not None:
            return ()
        return tuple(name for name, d in (("k", self.head_dim), ("v", self.v_head_dim)) if in_whole_rows(d, ITEM))

    @property
    def said_boxes(self) -> str:
        """How wide boxes are, for a person."""
        if self.whole_rows:
            return f"64 columns, rows of {SWIZZLE} bytes"
        qk, v = self.qk_rows, self.v_rows
        if qk == v:
            return f"{qk.columns} columns, rows of {qk.bytes} bytes"
        return f"{qk.columns} columns of q and k and {v.columns} of v, rows of {qk.bytes} and {v.bytes} bytes"

    @property
    def loads_two_ahead(self) -> bool:
        """Whether two tiles are on their way while another is used."""
        return self.stages > 2

    @property
    def loads_q_ahead(self) -> bool:
        """Whether the queries of the next tile are loaded under the keys of this one, where tiles follow from a block's
        number.  Where they come from a counter, a block knows its next one late, and copies of queries would hold up
        those of the last keys: causal calls took 2 to 5% longer.  Where keys are split, a block has one tile."""
        of = self.specialized
        if not isinstance(of, Specialized) or not of.scheduler.foresees or of.sender.loads:
            return False
        return self.q_stages == 2 and not self.layout.paged and not self.keys.split

    @property
    def equal_columns(self) -> bool:
        """Whether rows of q take as many bytes as those of o."""
        q = 1 if "q" in self.operands.narrow else ITEM
        return self.padded_head_dim * q == self.padded_v_head_dim * ITEM

    @property
    def copies_whole_tiles_apart(self) -> bool:
        """Whether tiles of keys within a sequence are copied by instructions of their own, which ask for no rows: few
        are left for a byte of 8-bit elements.  Their addresses take registers: at head_dim 256 eight were spilled."""
        narrow, widest = self.operands.narrow, max(self.padded_head_dim, self.padded_v_head_dim)
        return bool(narrow) and not self.layout.paged and widest <= 128

    @property
    def few_rows(self) -> bool:
        """Whether warps look which of their rows are queries, and take no exponentials of eight that are none: in tiles
        of decoding, most of whose rows are none.

        The branch has ptxas wait for P V behind the exponentials: with one warpgroup a tile takes less time by that
        too (8 tiles of a leaf: 16.3 us for 17.2 on an H200).  Others have another warpgroup's products meanwhile, and
        would take 1 to 11% longer.
        """
        of, decodes = self.specialized, self.packed or self.keys.split or self.keys.folds
        return of is not None and of.warpgroups == 1 and self.float8 is None and decodes

    @property
    def packed(self) -> bool:
        """Whether the rows of a tile are pairs of a query and one of several heads that share keys."""
        return self.rows.packed

    @property
    def masked_by_tile(self) -> bool:
        """Whether the mask is the same all over each tile."""
        of = self.specialized if isinstance(self.specialized, Specialized) else self.backward
        return isinstance(getattr(of, "mask", None), MaskByTile)

    @property
    def masked_within_bounds(self) -> bool:
        """Whether elements are asked for the bounds of the mask apart from the rest of it."""
        return isinstance(self.specialized, Specialized) and isinstance(self.specialized.mask, MaskWithinBounds)

    @property
    def ordered(self) -> bool:
        """Whether blocks take tiles of queries in an order that a kernel before it may have found."""
        if not isinstance(self.specialized, Specialized) or self.packed:
            return False
        return getattr(self.specialized.scheduler, "ordered", False)

    @property
    def masked_in_words(self) -> bool:
        """Whether the mask is asked for 32 keys at a time."""
        return isinstance(self.specialized, Specialized) and isinstance(self.specialized.mask, MaskInWords)

    @property
    def takes_first_keys(self) -> bool:
        """Whether a warpgroup may multiply by the first keys of a tile alone."""
        return isinstance(self.specialized, Specialized) and self.specialized.first != FIRST_TILE_WHOLE

    @property
    def looks_up(self) -> bool:
        """Whether the mask is given what it reads by a query or a key alone."""
        if self.backward is not None:
            return self.backward.lookup_stages > 0
        return isinstance(self.specialized, Specialized) and self.specialized.mask.looks_up

    @property
    def reads_rows(self) -> bool:
        """Whether the score is given elements of rows of keys, which are read two at a time."""
        return isinstance(self.specialized, Specialized) and isinstance(self.specialized.score, ScoreByRow)

    @property
    def caps_scores(self) -> bool:
        """Whether a soft cap is in the factors of scores, in place of a score function."""
        if isinstance(self.backward, SpecializedBackward):
            return isinstance(self.backward.score, SoftCapWithSlope)
        return isinstance(self.specialized, Specialized) and isinstance(self.specialized.score, SoftCap)

    @property
    def one_score(self) -> bool:
        """Whether one function gives all scores of a forward in 16 bits: it may give powers of two."""
        if not isinstance(self.specialized, Specialized) or self.float8 is not None:
            return False
        return isinstance(self.specialized.score, ScoreByElement | ScoreByRow)

    def pack(self, group: int) -> int:
        """Heads in a tile, of a `group` that shares keys: the largest power of two that divides it, the rows of a tile
        and those of a warpgroup, which one copy moves; 1 where nothing is packed."""
        if not self.packed:
            return 1
        return max(1, min(group & -group, self.tile.q & -self.tile.q, WARPGROUP_ROWS))

    def tile_queries(self, group: int) -> int:
        """Queries in a tile of `tile.q` rows."""
        return self.tile.q // self.pack(group)

    @property
    def block_rows(self) -> int:
        """Rows that a block owns: queries in a forward, keys in a backward."""
        return self.tile.q if self.backward is None else self.tile.kv

    @property
    def dq_sum_columns(self) -> int:
        """Columns of a row of dq where it is added up in memory."""
        if isinstance(self.backward, SpecializedBackward):
            return self.backward.dq_columns * WARPGROUP_ROWS * 2 // self.tile.q
        return self.padded_head_dim

    @property
    def warps(self) -> int:
        return self.program.warps

    @property
    def threads(self) -> int:
        return self.program.threads

    @property
    def smem_bytes(self) -> int:
        return sum(part.amount for part in self.smem)

    @property
    def registers_estimate(self) -> int:
        return sum(part.amount for part in self.registers)
