"""Ways of doing one thing in a kernel, of which a plan has one: each names the template that it is written in.

A kernel's template includes the `template` of what was chosen, and asks nothing; where ways differ by a function alone,
it calls that which was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

# ---------------------------------------------------------------------------------------------------------------------
# Forward: which keys a block visits, of those that its queries see


@dataclass(frozen=True, slots=True, kw_only=True)
class AllKeys:
    """All: it finishes o."""

    name: ClassVar[str] = "all"
    split: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKeys:
    """Each of `splits` blocks visits every so many-th tile of them, and leaves a part of o in float32, with the maximum
    and the sum of each row; a second kernel of the call combines the parts of a row in their order."""

    name: ClassVar[str] = "split"
    split: ClassVar[bool] = True
    turns: ClassVar[bool] = True
    invariant: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return None


#: Keys of a leaf, one number for every kind of call.
#: On an H200, of the speed of the default form.  Decoding 8,192 keys of one sequence 1.07, 32,768 1.00, 131,072 0.95,
#: 1,024 keys, which are one leaf, 0.72 to 0.74; a causal prompt of 8,192 tokens 0.93 (head_dim 64), 0.91 (128) and 0.85
#: (256); before rings were counted in uniform registers 0.88, 0.84 and 0.82, and of leaves of 512 keys 0.84 and 0.79.
LEAF = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Those of one leaf: `keys` of them from an absolute multiple of that number on.  A part is that of a leaf, and the
    second kernel folds leaves from the last to the first: what a row becomes depends on the row alone, in every kind of
    call.

    A prompt, whose blocks fold leaves themselves (`FoldedLeaves`), can afford no smaller leaves; larger ones leave SMs
    idle where one sequence is decoded.
    """

    name: ClassVar[str] = "leaves"
    split: ClassVar[bool] = True
    turns: ClassVar[bool] = False
    invariant: ClassVar[bool] = True
    folds: ClassVar[bool] = False
    keys: int = LEAF

    def number(self, kv_len: int) -> int:
        """Leaves of so many keys."""
        return max(1, -(-kv_len // self.keys))

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return _cuts(self.keys, tile_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLeaves:
    """All, leaf by leaf from the last to the first: the block folds each into those behind it, by the steps of the
    second kernel of `Leaves`, and finishes o with the same bits."""

    name: ClassVar[str] = "folded leaves"
    split: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    invariant: ClassVar[bool] = True
    folds: ClassVar[bool] = True
    keys: int = LEAF

    @property
    def in_parts(self) -> Leaves:
        """The same leaves, each a part."""
        return Leaves(keys=self.keys)

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return _cuts(self.keys, tile_kv)


def _cuts(leaf: int, tile_kv: int) -> str | None:
    return f"its keys divide no leaf of {leaf}, at whose ends rows are cut" if leaf % tile_kv else None


Keys = AllKeys | SplitKeys | Leaves | FoldedLeaves

#: What kernels do unless asked.
ALL_KEYS = AllKeys()


def keys_of(*, invariant: bool, split: bool) -> Keys:
    """The keys that a block visits: of leaves, and whether others visit the rest."""
    if invariant:
        return Leaves() if split else FoldedLeaves()
    return SplitKeys() if split else ALL_KEYS


# ---------------------------------------------------------------------------------------------------------------------
# Every kernel: when it starts, beside the one before it on its stream


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn:
    """It starts when the one before it has ended."""

    early: ClassVar[bool] = False
    calls: ClassVar[tuple[str, ...]] = ()  # functions of the device library that it calls first

    def __str__(self) -> str:
        return "in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapping:
    """Its blocks start while those of the one before leave, and wait for its end before they touch memory (programmatic
    dependent launch); the one behind starts likewise."""

    early: ClassVar[bool] = True
    calls: ClassVar[tuple[str, ...]] = ("griddepcontrol_wait", "griddepcontrol_launch_dependents")

    def __str__(self) -> str:
        return "overlapping: each kernel of a call starts while the one before it on the stream ends, and waits for it"


Launches = InTurn | Overlapping

#: What kernels do where the architecture has no other way.
IN_TURN = InTurn()

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline ampere, backward: whose keys a warp works on


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKeys:
    """A warp has keys to itself: P and dS are operands of dk and dv as they lie in registers."""

    template: ClassVar[str] = "ampere/backward_own_keys.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """Warps that share keys divide queries, then columns of dk and dv: P and dS go through shared memory."""

    template: ClassVar[str] = "ampere/backward_shared_keys.cu.j2"


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline ampere, backward: how a step ends, between P and dS and the next queries


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBarrier:
    """Nothing that a warp may still read is overwritten before the next step's barrier."""

    template: ClassVar[str] = "ampere/backward_one_barrier.cu.j2"
    barriers: ClassVar[int] = 1
    loads_ahead: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBarriers:
    """One when P and dS are complete, one when they have been read."""

    template: ClassVar[str] = "ampere/backward_two_barriers.cu.j2"
    barriers: ClassVar[int] = 2
    loads_ahead: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """The next queries are loaded where these were, when nobody reads them any more."""

    template: ClassVar[str] = "ampere/backward_one_stage.cu.j2"
    barriers: ClassVar[int] = 2
    loads_ahead: ClassVar[bool] = False


StepEnd = OneBarrier | TwoBarriers | OneStage


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, backward: how consumers divide a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesOfKeys:
    """Each warpgroup has half of the keys, dk and dv of these, and of dq half of the `dq_half`."""

    template: ClassVar[str] = "hopper/backward_halves_of_keys.cu.j2"
    dq_half: Literal["queries", "columns"]

    @property
    def dq_template(self) -> str:
        """How the product for dq finds this warpgroup's half."""
        return f"hopper/backward_half_of_{self.dq_half}.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDkDv:
    """Each warpgroup has all keys: one has P and dv, the other dS and dk; and of dq half of the columns."""

    template: ClassVar[str] = "hopper/backward_split_dk_dv.cu.j2"
    dq_half: ClassVar[str] = "columns"


Consumers = HalvesOfKeys | SplitDkDv

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, backward: the order in which blocks start


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadByHead:
    """All keys of a head, then those of the next."""

    template: ClassVar[str] = "hopper/backward_head_by_head.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class InGroups:
    """Keys of heads whose queries and dq stay in L2, in turns; the last keys first where blocks wait for later keys."""

    template: ClassVar[str] = "hopper/backward_in_groups.cu.j2"
    late_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesInGroups:
    """The same where sequences lie behind each other: keys of one, then those of the next."""

    template: ClassVar[str] = "hopper/backward_sequences_in_groups.cu.j2"
    late_first: bool


BlockOrder = HeadByHead | InGroups | SequencesInGroups

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper: how elements of a tile are masked; each pass has a template of that name


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByElement:
    """The mask is asked for each where it is used."""

    form: ClassVar[str] = "by_element"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskWithinBounds:
    """Its bounds of positions are asked of tiles that one of them cuts alone, and the rest of it of each element."""

    form: ClassVar[str] = "within_bounds"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAsBits:
    """It is asked for a few at a time, a bit each, before any is used: registers are short for what it reads."""

    form: ClassVar[str] = "as_bits"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFromBits:
    """It is asked for each, and elements of tables that query and key select are bits by then, which the kernel of
    summaries has made: one word for 32 keys of a row."""

    form: ClassVar[str] = "from_bits"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByWarpgroup:
    """It is the same for all elements of a tile that a warpgroup has, and asked for once."""

    form: ClassVar[str] = "by_warpgroup"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByTile:
    """Nowhere: it is the same for all elements of a tile, which is visited as a whole or not at all."""

    form: ClassVar[str] = "by_tile"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByLookups:
    """It is asked for each where it is used.  What it reads by a query or a key alone is read before, while products
    run: of each key by one lane of a warp, which passes it on."""

    form: ClassVar[str] = "by_lookups"
    looks_up: ClassVar[bool] = True


Mask = MaskByElement | MaskWithinBounds | MaskAsBits | MaskFromBits | MaskByWarpgroup | MaskByTile | MaskByLookups

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, backward: how dq is added up in memory, by which function of consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class DqInAnyOrder:
    """Sums that one kernel clears before and another one finishes behind the main kernel."""

    add: ClassVar[str] = "add_dq"
    in_main_kernel: ClassVar[bool] = False
    warps: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DqInMainKernel:
    """Two warps of a block clear sums of heads to come, and finish complete ones."""

    add: ClassVar[str] = "add_dq"
    in_main_kernel: ClassVar[bool] = True
    warps: ClassVar[tuple[str, ...]] = ("hopper/backward_dq_accumulator.cu.j2",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DqInOrder:
    """Two warps of a block see to the order in which blocks add: the same bits in every run."""

    add: ClassVar[str] = "add_dq_in_order"
    in_main_kernel: ClassVar[bool] = False
    warps: ClassVar[tuple[str, ...]] = ("hopper/backward_dq_semaphore.cu.j2",)


DqSum = DqInAnyOrder | DqInMainKernel | DqInOrder

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: tiles that the mask hides nothing of


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTilesApart:
    """They have code of their own, in which nothing stands between the product and the softmax."""

    template: ClassVar[str] = "hopper/forward_full_tiles_apart.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesAlike:
    """One code for all tiles: registers are short."""

    template: ClassVar[str] = "hopper/forward_tiles_alike.cu.j2"


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: how the highest score of a row is found


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestAsInteger:
    """Scores are compared as integers, three by one instruction, and again where a thread's are all negative."""

    find: ClassVar[str] = "highest_by_integers"


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestAsFloat:
    """Scores are compared as floats, two by one instruction: registers are short."""

    find: ClassVar[str] = "highest_by_floats"


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: who hands out tiles of queries


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScheduler:
    """A counter in memory, long tiles first."""

    template: ClassVar[str] = "hopper/forward_dynamic_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    always_counts: ClassVar[bool] = False  # not where each block has but one tile


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticScheduler:
    """Each block has its share."""

    template: ClassVar[str] = "hopper/forward_static_scheduler.cu.j2"
    dynamic: ClassVar[bool] = False
    always_counts: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceScheduler:
    """A counter in memory; of a tile's number it finds the sequence in the cumulative lengths."""

    template: ClassVar[str] = "hopper/forward_sequence_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    always_counts: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScheduler:
    """A counter in memory; of a number it finds the sequence by the parts of its keys: those that have a tile."""

    template: ClassVar[str] = "hopper/forward_part_scheduler.cu.j2"
    dynamic: ClassVar[bool] = True
    always_counts: ClassVar[bool] = True


Scheduler = DynamicScheduler | StaticScheduler | SequenceScheduler | PartScheduler

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: who loads what the scheduler hands out

_SCHEDULER, _LOADER = "hopper/forward_scheduler.cu.j2", "hopper/forward_loader.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendsToLoader:
    """A warp of its own, which the scheduler's is ahead of."""

    template: ClassVar[str] = "hopper/forward_send_to_loader.cu.j2"
    parts: ClassVar[tuple[str, ...]] = (_SCHEDULER, _LOADER)
    loads: ClassVar[bool] = False
    told: ClassVar[str] = ""  # in the names of the loader's templates
    run: ClassVar[str] = "Loader{shared, map_q, map_k, map_v, p}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendsAndLoads:
    """The scheduler's warp: one more turns V over."""

    template: ClassVar[str] = "hopper/forward_send_and_load.cu.j2"
    parts: ClassVar[tuple[str, ...]] = (_LOADER, _SCHEDULER)
    loads: ClassVar[bool] = True
    told: ClassVar[str] = "told_"
    run: ClassVar[str] = "Scheduler{shared, p, {shared, map_q, map_k, map_v, p}}"


Sender = SendsToLoader | SendsAndLoads

# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: how O leaves, and what a row is


@dataclass(frozen=True, slots=True, kw_only=True)
class OByTma:
    """Through the shared memory of q, from which a thread of its own copies it."""

    template: ClassVar[str] = "hopper/forward_o_by_tma.cu.j2"
    store: ClassVar[str] = "hopper/forward_store.cu.j2"
    by_tma: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OFromRegisters:
    """From the registers of consumers."""

    template: ClassVar[str] = "hopper/forward_o_from_registers.cu.j2"
    store: ClassVar[str] = "hopper/forward_store.cu.j2"
    by_tma: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OInParts:
    """A part of it in float32, from the registers of consumers, where keys are split."""

    template: ClassVar[str] = "hopper/forward_part_of_o.cu.j2"
    store: ClassVar[str] = "hopper/forward_store_part.cu.j2"
    by_tma: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OOfTurnedV:
    """From the registers of consumers, in the order of columns in which V was turned over."""

    template: ClassVar[str] = "hopper/forward_o_of_turned_v.cu.j2"
    store: ClassVar[str] = "hopper/forward_store.cu.j2"
    by_tma: ClassVar[bool] = False


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: where O of the leaves so far lies while the next one is worked on


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFold:
    """A block has no leaves to fold."""

    where: ClassVar[str] = ""
    place: ClassVar[str] = ""
    pause: ClassVar[str] = ""
    pointer: ClassVar[str] = ""
    columns: ClassVar[int] = 0


_OWN = "threadIdx.x % 128"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldInShared:
    """In shared memory, in float32, all `columns` of it: a thread alone reads and writes its elements."""

    where: ClassVar[str] = "shared memory"
    place: ClassVar[str] = f"shared.folded[warpgroup][i][{_OWN}]"
    pause: ClassVar[str] = ""
    pointer: ClassVar[str] = ""
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldInMemory:
    """The first `columns` of it there, as many as fit, and the others in memory of the block, which L2 holds."""

    pause: ClassVar[str] = "      if (i % 4 == 3) __syncwarp();  // no more loads than registers hold\n"
    pointer: ClassVar[str] = "folded"
    columns: int

    @property
    def where(self) -> str:
        """For a person."""
        return f"shared memory ({self.columns} columns) and L2" if self.columns else "L2"

    @property
    def place(self) -> str:
        """Where elements 4 i to 4 i + 3 of a thread lie."""
        there = self.columns // 8
        groups, i = (f"(V_COLUMNS / 8 - {there})", f"(i - {there})") if there else ("(V_COLUMNS / 8)", "i")
        block = "((i64)blockIdx.x * WARPGROUPS + warpgroup)"
        beyond = f"((float4*)p.folded)[({block} * {groups} + {i}) * 128 + {_OWN}]"
        return f"i < {there} ? {FoldInShared.place} : {beyond}" if there else beyond


Fold = NoFold | FoldInShared | FoldInMemory
NO_FOLD = NoFold()


@dataclass(frozen=True, slots=True, kw_only=True)
class OInPartsOfTurnedV:
    """A part of it in float32, in that order."""

    template: ClassVar[str] = "hopper/forward_part_of_turned_o.cu.j2"
    store: ClassVar[str] = "hopper/forward_store_part.cu.j2"
    by_tma: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """A row of a tile is a query of one head."""

    template: ClassVar[str] = "hopper/forward_rows_of_queries.cu.j2"
    scale: ClassVar[str] = "hopper/forward_scale_of_tile.cu.j2"  # of 8 bits
    packed: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQueries:
    """A row of a tile is a query of one of several heads that share keys."""

    template: ClassVar[str] = "hopper/forward_rows_of_packs.cu.j2"
    scale: ClassVar[str] = "hopper/forward_scales_of_rows.cu.j2"
    packed: ClassVar[bool] = True


Rows = Queries | PackedQueries
QUERIES = Queries()
PACKED = PackedQueries()


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: how P V is added up


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLevel:
    """In the accumulators of wgmma, which hold O: 16-bit products are added up exactly enough."""

    template: ClassVar[str] = "hopper/forward_products.cu.j2"
    wgmma: ClassVar[str] = "hopper/forward_wgmma.cu.j2"
    run: ClassVar[str] = "hopper/forward_run_across_tiles.cu.j2"
    take: ClassVar[str] = "await_scores"  # what a step of a schedule does when S is there
    keys_per_word: ClassVar[int] = 2  # of P, in a register
    awaited_late: ClassVar[bool] = True  # P V of the tile before runs under the softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevels:
    """Partial sums of one tile of keys in the accumulators, `piece` columns at a time, and O by float32 additions:
    8-bit wgmma cuts each addend off at 2^-13 of the largest.

    With `ahead` the next scores are on their way while the last partial sums are added; else these come first, for
    which fewer registers will do, and other warpgroups multiply meanwhile.
    """

    template: ClassVar[str] = "hopper/forward_products_8_bits.cu.j2"
    wgmma: ClassVar[str] = "hopper/forward_wgmma_8_bits.cu.j2"
    take: ClassVar[str] = "take_scores"
    keys_per_word: ClassVar[int] = 4
    awaited_late: ClassVar[bool] = False
    piece: int
    ahead: bool

    @property
    def run(self) -> str:
        """The template of a consumer's loops: without scores ahead nothing overlaps across tiles of queries."""
        return f"hopper/forward_run_{'across_tiles' if self.ahead else 'tile_by_tile'}.cu.j2"

    @property
    def order(self) -> str:
        """The template of what is issued when."""
        return f"hopper/forward_scores_{'ahead' if self.ahead else 'behind'}.cu.j2"


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: how P is made


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingP:
    """Exponentials, rounded to 16 bits; a row's maximum follows keys that outweigh a share of their row."""

    template: ClassVar[str] = "hopper/forward_p_lagging.cu.j2"
    sums_late: ClassVar[bool] = False
    ones_behind_v: ClassVar[int] = 0
    ones_apart: ClassVar[bool] = False
    before: ClassVar[str] = "find_limits"  # what is found under a product


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactP:
    """Exponentials, rounded to e4m3; a row's maximum is exact in each tile, and its P is 2^8."""

    template: ClassVar[str] = "hopper/forward_p_exact.cu.j2"
    lags: ClassVar[bool] = False
    before: ClassVar[str] = "find_scale"
    sums_late: ClassVar[bool] = False
    ones_behind_v: ClassVar[int] = 0
    ones_apart: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnesBehindV:
    """Eight rows of ones behind those of V turned over: sums come with the columns of P V, by products of N + 8."""

    template: ClassVar[str] = "hopper/forward_sums_behind_v.cu.j2"
    fill: ClassVar[str] = "hopper/forward_ones_behind_v.cu.j2"
    rows: ClassVar[int] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OnesApart:
    """A matrix of ones, and products of their own: P V comes in pieces."""

    template: ClassVar[str] = "hopper/forward_sums_apart.cu.j2"
    fill: ClassVar[str] = "hopper/forward_ones_apart.cu.j2"
    rows: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PByBits:
    """Of eight words of P in a register each `words` hold codes of e4m3 made of the scores by one FMA and a rounding,
    the others exponentials; maxima as above.  Sums are those of rounded P, which products with ones give."""

    template: ClassVar[str] = "hopper/forward_p_by_bits.cu.j2"
    lags: ClassVar[bool] = False
    before: ClassVar[str] = "find_scale"
    sums_late: ClassVar[bool] = True  # they come with P V
    words: int
    sums: OnesBehindV | OnesApart

    @property
    def ones_behind_v(self) -> int:
        """Rows of ones behind those of V turned over."""
        return self.sums.rows

    @property
    def ones_apart(self) -> bool:
        """Whether there is a matrix of ones."""
        return not self.sums.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingPByBits(PByBits):
    """The same, but maxima are looked at where P leaves the range of e4m3 alone: `slack` is how far the highest score
    of a row may be above that whose P is 2^8, as a power of two.

    By `headroom`, another, P of the highest score is lower in the first two tiles of a schedule, whose maxima are
    exact, and in the first that a row sees a key of: most maxima grow, and then need not follow.  Where the second
    tile's is lower by `far` more, the first tile's was no sign of others, and P gets what it was short of.
    """

    template: ClassVar[str] = "hopper/forward_p_lagging_by_bits.cu.j2"
    lags: ClassVar[bool] = True
    slack: float
    headroom: float
    far: float


P8 = ExactP | PByBits | LaggingPByBits


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline hopper, forward: the V that consumers multiply by


@dataclass(frozen=True, slots=True, kw_only=True)
class VAsStored:
    """Rows of keys, as TMA loads them: 16-bit wgmma takes either order."""

    turned: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VTurnedOver:
    """Rows of columns, which warps of the producers make of V as stored: 8-bit wgmma takes no other order."""

    turned: ClassVar[bool] = True


#: What 16 bits have.
ONE_LEVEL, LAGGING_P, V_AS_STORED, SENDS_TO_LOADER = OneLevel(), LaggingP(), VAsStored(), SendsToLoader()
