"""What a pass launches on one problem, as one value: every number but addresses.

It is made here, of a plan, a problem and how tensors lie.  The driver (`kernel`) and the interpreter only execute it:
they put addresses in place.  So what the interpreter checks is the launch that a GPU gets.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flashgen.codegen import params as members
from flashgen.planning import backward, order, split_keys, summaries
from flashgen.planning.arch import ARCHS, Arch
from flashgen.planning.float8 import DESCALES, block_of
from flashgen.planning.members import MANY_TILES, InTimeScheduler
from flashgen.planning.once import Remembered, once
from flashgen.planning.plan import BOX_ROWS, ITEM, SWIZZLE, WARPGROUP_ROWS, Part, Specialized, rows_of
from flashgen.planning.problem import ITEMSIZE
from flashgen.planning.quotient import divisor
from flashgen.tuples import new

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem
    from flashgen.runtime.philox import Dropout

#: Of the forward that hands out tiles: the next tile, and the blocks that found none left.
COUNTERS = Part(name="counters", amount=8, why="two int32, 0 between launches")

#: Blocks of the kernels that work on the elements of captured tensors.
ELEMENT_BLOCKS = 256

#: Blocks per SM that finish what the main kernel of a backward left, or that make summaries.
FINISH_BLOCKS = 8

#: Of a tensor that one descale serves: any row shifted by so many bits is 0.
WHOLE_LOG2 = 31

_MAIN_ENTRIES = {name: f"attention_{name}" for name in ("forward", "backward")}

_DROPOUT = tuple(f.name for f in members.DROPOUT)


class Captured(NamedTuple):
    """Shape of a captured tensor: its sizes, and its strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Shape of a cache in pages: their number, the rows of each, and the elements between rows of the page table."""

    pages: int
    page_size: int
    table_row: int

    def numbers(self, tile_kv: int) -> tuple[int, ...]:
        """Those of _OF_CACHE: one copy moves the most rows that lie side by side in each page and in each tile."""
        return self.pages, self.page_size, math.gcd(self.page_size, tile_kv), divisor(self.page_size), self.table_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Descale:
    """How what the elements of q, k or v count by lies: strides over (batch, head, block) in elements, 0 where one
    serves all; blocks of 1 << `block_log2` rows; `heads` query heads that share one of q."""

    strides: tuple[int, int, int]
    block_log2: int
    heads: int = 1


class TensorMapDesc(NamedTuple):
    """What TMA is told of a tensor, but for its address: the arguments of cuTensorMapEncodeTiled.

    `sizes` are (columns, rows, heads, batch) in elements, or heads before rows, and of pages in whole rows (64 columns,
    8 rows, boxes of columns of all heads, groups of 8 rows, pages); `strides` the bytes between all but columns,
    multiples of 16 in any order; `box` what one copy moves, in elements; `swizzle` the bytes of a row of the pattern in
    shared memory; `row_bytes` those of a whole row, which lie side by side.  What lies outside reads as 0.

    A tuple, as each new length makes four: a frozen dataclass takes three times as long.
    """

    tensor: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    box: tuple[int, ...]
    swizzle: int
    row_bytes: int


class Values(Mapping[str, int | float]):
    """Numbers by name: `numbers`, and the places of names among them, which launches of a plan have in common."""

    __slots__ = ("_places", "numbers")

    def __init__(self, places: Mapping[str, int], numbers: tuple[int | float, ...]) -> None:
        self._places, self.numbers = places, numbers

    def __getitem__(self, name: str) -> int | float:
        return self.numbers[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class LaunchGrid(NamedTuple):
    """One kernel of a launch: its entry, its grid and block (one dimension each), its dynamic shared memory; whether it
    starts before the one before it on the stream has ended, for which it then waits itself."""

    entry: str
    blocks: int
    threads: int
    smem_bytes: int
    early: bool


class Launch(NamedTuple):
    """All that executing a plan on one problem takes, but addresses.

    grids       its kernels, in the order in which they run on one stream; all take the plan's `Params`
    values      numbers by name, of which `Params` has some; those of `scalars` may change from call to call
    maps        what the main kernel takes before `Params`
    workspaces  memory beside inputs and results, in bytes by the name of the pointer; it may hold anything
    cleared     memory that is 0 before the first kernel, and left so; launches that may overlap need their own; there
                is none where nobody counts, and its pointer is null

    A tuple, as each new length makes one.
    """

    plan: KernelPlan
    grids: tuple[LaunchGrid, ...]
    values: Values
    maps: tuple[TensorMapDesc, ...]
    workspaces: tuple[Part, ...]
    cleared: tuple[Part, ...]

    @property
    def pointers(self) -> tuple[str, ...]:
        """The names of the addresses that executing it takes, in this order: tensors of maps, other pointers of
        `Params`, what is cleared."""
        return pointers(self.plan)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The fields that each call writes anew: scale, parameters, and what dropout draws."""
        return scalars(self.plan)

    def maps_of(self, grid: LaunchGrid) -> tuple[TensorMapDesc, ...]:
        """Those that a kernel takes."""
        return self.maps if grid.entry == _MAIN_ENTRIES[self.plan.pass_name] else ()

    def packed(self, addresses: Mapping[str, int]) -> bytes:
        """`Params` with these addresses; raises KeyError for a pointer without one."""
        return members.pack(self.plan, {**addresses, **self.values})


class _MapOutline(NamedTuple):
    """What no problem decides of a tensor map beside its tensor's name, but for packed heads and pages."""

    dtype: str
    item: int
    columns: int
    box: tuple[int, int, int, int]
    swizzle: int
    least: int  # bytes between the elements of a dimension of size 1: any stride will do
    of_keys: bool
    packed: bool
    whole_rows: bool


#: Of a tensor map what lengths and strides do not decide: its tensor, the place of an earlier one of the same outline
#: and that one's tensor, the fields of the outline, and how many heads and sequences have rows of their own.  A plain
#: tuple, as each new length unpacks four: one with names takes twice as long.
_MapForm = tuple[str, int | None, str, str, int, int, tuple[int, ...], int, int, bool, bool, bool, int, int]

#: What lengths do not decide of the launches of a plan on so many heads of so many batches: heads of a pack, packs, the
#: logarithm of the former, queries of a tile; bytes of a position of what L2 is to hold, of a key head (in a forward of
#: keys, in a backward of queries), and what `l2_heads` counts of a key head; and the maps.
_Form = tuple[int, int, int, int, int, int, tuple[_MapForm, ...]]


#: The numbers that every launch has, in order: parameters, and what only some plans take, stand behind them.
_NUMBERS = (
    *("batch", "heads", "kv_heads", "q_len", "kv_len", "q_tiles", "kv_tiles", "l2_heads", "packs", "pack_log2"),
    *("q_rows", "kv_rows", "q_offset", "splits", "q_start", "k_start", "scale"),
)

#: What kernels that split keys divide by beside these.
_DIVISORS = ("by_q_tiles", "by_heads", "by_packs", "by_batch", "by_splits", "by_group")

_ByTiles = tuple[tuple[LaunchGrid, ...], tuple[Part, ...], tuple[Part, ...], int]

_OF_CACHE = ("pages", "page_size", "page_rows", "by_page_size", "table_row")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """What no problem decides of the launches of a plan, worked out once: a new length is a few integer operations.

    pointers  those of `Launch.pointers`
    counted   whether `COUNTERS` are among them
    maps      the tensors of maps, for each the place of an earlier one that has the same outline, and that
    main      the kernel that visits tiles, of no block
    params    the names of parameters
    scaled    operands that have descales
    strided   tensors whose strides are numbers of `Params`
    captured  the names of captured tensors
    joined    whether sequences lie behind each other
    gradients whether the gradients of captured tensors are asked for
    storable  those of whose gradients each pair may have an element of its own
    summaries by what side, and by how many positions, summaries are counted
    by_length whether other things than counts of tiles and summaries decide grids or workspaces
    places    those of all numbers among `Values.numbers`, by name
    by_tiles  what `_by_tiles` has found, where counts of tiles and of positions of summaries alone decide it
    forms     what `_form` has found, by batch, heads and key heads
    arch      that of the plan, `forward` whether it is one, and `tile_kv` the keys of its tiles
    """

    pointers: tuple[str, ...]
    counted: bool
    maps: tuple[tuple[str, int | None, _MapOutline], ...]
    main: LaunchGrid
    params: tuple[str, ...]
    scaled: tuple[str, ...]
    strided: tuple[str, ...]
    captured: tuple[str, ...]
    joined: bool
    gradients: bool
    storable: tuple[str, ...]
    summaries: tuple[tuple[str, int], ...]
    by_length: bool
    places: Mapping[str, int]
    by_tiles: Remembered[tuple[int, ...], _ByTiles]
    forms: Remembered[tuple[int, int, int], _Form]
    arch: Arch
    forward: bool
    tile_kv: int


@once
def _outline(plan: KernelPlan) -> _Outline:
    struct = members.fields(plan)
    in_params = [f.name for f in struct if f.ctype.endswith("*")]
    cleared = [name for name in in_params if name == COUNTERS.name]
    others = (name for name in in_params if name != COUNTERS.name)
    maps = members.maps(plan)
    outlines = [_map_outline(plan, name) for name in maps]
    params = tuple(p.name for p in plan.variant.params)
    scaled = () if plan.float8 is None else plan.float8.scaled
    strided = ("q", "k", "v", "o", *(DESCALES[name] for name in scaled))
    if plan.backward is not None:
        strided = (*strided, "d_o", "dq", "dk", "dv")
    of_rows = {f.name for f in struct if f.name.endswith("_row")}
    strided = tuple(name for name in strided if f"{name}_row" in of_rows)  # TMA knows those of its tensors
    names = [*_NUMBERS, *(_DIVISORS if plan.keys.split else ()), *(f"param_{name}" for name in params)]
    names += (*_OF_CACHE, *members.head_boxes(plan.whole_rows)) if plan.layout.paged else ()
    names += _DROPOUT if plan.dropout else ()
    names += [*(f"{name}_block_log2" for name in scaled), *(["q_descale_heads"] if "q" in scaled else [])]
    names += [f"{name}_{axis}" for name in strided for axis in ("batch", "head", "row")]
    for tensor in plan.variant.tensors:
        for axis in range(len(tensor.dims)):
            names += f"size{axis}_{tensor.name}", f"stride{axis}_{tensor.name}"
    storable = () if plan.backward is None else backward.storable(plan)
    names += () if plan.backward is None else ("clear_distance", *(f"stored_{name}" for name in storable))
    names.append("ordered")
    return _Outline(
        pointers=tuple(dict.fromkeys((*maps, *others, *cleared))),
        counted=bool(cleared),
        maps=tuple(
            (name, outlines.index(outlines[i]) if outlines[i] in outlines[:i] else None, outlines[i])
            for i, name in enumerate(maps)
        ),
        main=_grid(plan, main_entry(plan), 0, plan.threads, plan.smem_bytes),
        params=params,
        scaled=scaled,
        strided=strided,
        captured=tuple(tensor.name for tensor in plan.variant.tensors),
        joined=plan.layout.joined,
        gradients=bool(plan.gradients),
        storable=storable,
        summaries=tuple(
            pair
            for one in plan.summaries
            for pair in ((one.side, one.positions), *([("k", one.keys)] if one.keys else []))
        ),
        by_length=(
            plan.keys.split
            or (plan.backward is not None and plan.backward.by_query is not None)
            or any(one.bits is not None for one in plan.summaries)
        ),
        places=MappingProxyType({name: place for place, name in enumerate(names)}),
        by_tiles=Remembered(),
        forms=Remembered(),
        arch=ARCHS[plan.arch],
        forward=plan.backward is None,
        tile_kv=plan.tile.kv,
    )


def _form(plan: KernelPlan, problem: Problem) -> _Form:
    outline, heads, group = _outline(plan), problem.heads, problem.group
    pack, batches, maps = plan.pack(group), 1 if outline.joined else problem.batch, []
    for tensor, like, of in outline.maps:
        if of.packed:  # the heads of a query side by side
            of = of._replace(box=(of.box[0], pack, WARPGROUP_ROWS // pack, 1))
        twin = "" if like is None else outline.maps[like][0]
        maps.append((tensor, like, twin, *of, problem.kv_heads if of.of_keys else heads, batches))
    of_l2 = problem.read_bytes(0, 1) if outline.forward else backward.query_bytes(problem)
    unit = group // pack if outline.forward else 1
    return pack, heads // pack, pack.bit_length() - 1, plan.tile.q // pack, of_l2, unit, tuple(maps)


def picker(plan: KernelPlan, names: Sequence[str]) -> Callable[[tuple[int | float, ...]], tuple[int | float, ...]]:
    """What picks the numbers of these names out of `Values.numbers` of a plan's launches."""
    return operator.itemgetter(*map(_outline(plan).places.__getitem__, names))


def _map_outline(plan: KernelPlan, name: str) -> _MapOutline:
    """That of q, k, v, o or d_o."""
    item, of_keys = ITEMSIZE[plan.dtype], name in ("k", "v")
    columns = plan.head_dim if name in ("q", "k") else plan.v_head_dim
    wide = rows_of(columns, item)
    of_q = WARPGROUP_ROWS if plan.backward is None else plan.tile.q  # of a forward, those of one warpgroup
    return _MapOutline(
        dtype=operand_dtype(plan, name),
        item=item,
        columns=columns,
        box=(wide.columns, plan.tile.kv if of_keys else of_q, 1, 1),
        swizzle=wide.bytes,
        least=-(-columns * item // 16) * 16,
        of_keys=of_keys,
        packed=plan.packed and name in ("q", "o"),
        whole_rows=name in plan.whole_rows,
    )


def pointers(plan: KernelPlan) -> tuple[str, ...]:
    """Those of every launch of a plan."""
    return _outline(plan).pointers


def counted(plan: KernelPlan) -> bool:
    """Whether COUNTERS are among these."""
    return _outline(plan).counted


def scalars(plan: KernelPlan) -> tuple[str, ...]:
    """Those of every launch of a plan."""
    of_variant = (f"param_{p.name}" for p in plan.variant.params)
    of_layout = ("q_offset",) * plan.layout.own
    return ("scale", *of_variant, *of_layout, *(_DROPOUT if plan.dropout else ()))


def make_launch(
    plan: KernelPlan,
    problem: Problem,
    *,
    strides: Mapping[str, tuple[int, ...]],
    captured: Mapping[str, Captured],
    scale: float,
    params: Mapping[str, int | float],
    dropout: Dropout | None = None,
    q_offset: int = 0,
    rows: tuple[int, int] | None = None,
    kv_splits: int = 1,
    cache: Cache | None = None,
    descales: Mapping[str, Descale] = MappingProxyType({}),
    sms: int,
    l2_kv_heads: int | None = None,
    clear_distance: int | None = None,
) -> Launch:
    """The launch of a plan on a problem with queries.

    `strides` are those of q, k, v and o, and in a backward of d_o, dq, dk and dv, in elements over (batch, heads,
    rows); a row's elements lie side by side.  `q_offset` is the first query's position where the layout of the plan has
    one, `rows` are those of q and of k in memory where they are not q_len and kv_len, `cache` what k and v are pages
    of where the layout says so.  `kv_splits` blocks divide the keys of a tile of queries where the plan splits keys.
    `sms` are those of the GPU.
    `l2_kv_heads`, the key heads that blocks take in turns, and `clear_distance`, the key heads that a backward clears
    dq of in advance, follow from the plan, the problem and the SMs unless given: small problems on few SMs then show
    what large ones do.
    """
    outline, (batch, heads, kv_heads, q_len, kv_len, _, _, _, _) = _outline(plan), problem
    forms, of = outline.forms, (batch, heads, kv_heads)
    form = forms.get(of) or forms.keep(of, _form(plan, problem))
    pack, packs, pack_log2, tile_q, l2_bytes, l2_unit, maps = form
    rows = (q_len, kv_len) if rows is None else rows
    if l2_kv_heads is None:
        of_one = l2_bytes * (kv_len if outline.forward else q_len)
        together = outline.arch.heads_in_turns(of_one, batch * kv_heads, sms, forward=outline.forward)
    else:
        together = min(l2_kv_heads, batch * kv_heads)
    if outline.joined:
        in_pages = () if cache is None else ("k", "v")
        strides = {name: of if name in in_pages else (0, *of[1:]) for name, of in strides.items()}
    if descales:
        strides = {**strides, **{DESCALES[name]: descale.strides for name, descale in descales.items()}}
    q_rows, kv_rows = rows
    if outline.joined:
        q_tiles, kv_tiles = _tiles(tile_q, q_len, batch, q_rows), _tiles(outline.tile_kv, kv_len, batch, kv_rows)
    else:
        q_tiles, kv_tiles = -(-q_len // tile_q), -(-kv_len // outline.tile_kv)
    # In the order of _NUMBERS, and of what stands behind them.
    numbers: list[int | float] = [batch, heads, kv_heads, q_len, kv_len, q_tiles, kv_tiles, together * l2_unit]
    numbers += packs, pack_log2, q_rows, kv_rows, q_offset, kv_splits, 0, 0, scale
    if plan.keys.split:
        numbers += map(divisor, (q_tiles, heads, packs, batch, kv_splits, heads // kv_heads))
    if outline.params:
        numbers += [params[name] for name in outline.params]
    if plan.layout.paged:
        assert cache is not None  # keys lie there
        numbers += cache.numbers(plan.tile.kv)
        numbers += [_head_boxes(strides[name][1], kv_heads) for name in plan.whole_rows]
    if plan.dropout:
        assert dropout is not None  # the plan is that of a call with it
        numbers += dropout_scalars(dropout, heads)
    if outline.scaled:
        numbers += [descales[name].block_log2 for name in outline.scaled]
        numbers += [descales["q"].heads] if "q" in outline.scaled else []
    for name in outline.strided:
        numbers += strides[name]
    for name in outline.captured:
        for size, stride in zip(*captured[name], strict=True):
            numbers += size, stride if size > 1 else 0  # of size 1: it broadcasts
    if not outline.forward:
        if clear_distance is None:
            clear_distance = backward.clear_distance(plan, problem, sms, together)
        numbers.append(min(clear_distance, batch * kv_heads))
    if outline.by_length or outline.gradients:
        shapes = {name: captured[name].sizes for name in plan.gradients}
        if outline.storable:
            alone = backward.stored(plan, problem, shapes)
            numbers += [int(name in alone) for name in outline.storable]
        by_tiles = _by_tiles(plan, problem, sms, rows, q_tiles, pack, kv_splits, shapes)
    else:
        known, at = outline.by_tiles, (batch, heads, kv_heads, q_tiles, kv_tiles, sms)
        if outline.summaries:
            at = *at, *[-(-(kv_len if side == "k" else q_len) // n) for side, n in outline.summaries]
        by_tiles = known.get(at) or known.keep(at, _by_tiles(plan, problem, sms, rows, q_tiles, pack, kv_splits, {}))
    grids, workspaces, cleared, ordered = by_tiles
    numbers += (ordered,)
    descs = _tensor_maps(maps, strides, rows, cache, outline.tile_kv) if maps else ()
    return new(Launch, (plan, grids, Values(outline.places, tuple(numbers)), descs, workspaces, cleared))


def _by_tiles(
    plan: KernelPlan,
    problem: Problem,
    sms: int,
    rows: tuple[int, int],
    q_tiles: int,
    pack: int,
    kv_splits: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> _ByTiles:
    """Grids, workspaces, what is cleared, and whether tiles of queries are put in order."""
    outline, taken = _outline(plan), _taken(plan, problem, q_tiles, pack, kv_splits)
    workspaces: tuple[Part, ...] = ()
    if plan.backward is not None:
        workspaces = backward.workspaces(plan, problem, shapes, q_tiles if outline.joined else None)
    workspaces = (*workspaces, *split_keys.workspaces(plan, problem, kv_splits, rows[0], sms))
    if plan.summaries:
        workspaces = (*workspaces, *summaries.workspaces(plan, problem), *order.workspaces(plan, problem))
    counts = outline.counted and taken > sms and not _few_keys(plan, problem, kv_splits)
    cleared = (COUNTERS,) if counts else ()  # else each block has but one tile, or its share
    found = _grids(plan, problem, sms, rows, taken, kv_splits)
    return found, workspaces, cleared, int(any(grid.entry == order.ENTRY for grid in found))


def _few_keys(plan: KernelPlan, problem: Problem, kv_splits: int) -> bool:
    """Whether tiles of queries see too few keys to be taken from a counter that is kept for those that see many."""
    of = plan.specialized
    if not isinstance(of, Specialized) or not isinstance(of.scheduler, InTimeScheduler):
        return False
    return -(-problem.kv_len // plan.tile.kv) < MANY_TILES * kv_splits


def main_entry(plan: KernelPlan) -> str:
    """The kernel that visits tiles."""
    return _MAIN_ENTRIES[plan.pass_name]


def dropout_scalars(dropout: Dropout, heads: int) -> tuple[int | float, ...]:
    """What kernels that drop probabilities take beside the other scalars, in the order of `Launch.scalars`."""
    return dropout.seed, dropout.offset, dropout.threshold, dropout.scale, dropout.first, dropout.stride(heads)


def grids(
    plan: KernelPlan,
    problem: Problem,
    sms: int,
    rows: tuple[int | None, int | None] = (None, None),
    kv_splits: int = 1,
) -> tuple[LaunchGrid, ...]:
    """The kernels of a pass on a GPU of so many SMs, in the order in which they run on one stream; `rows` and
    `kv_splits` are those of make_launch."""
    pack, q_tiles = plan.pack(problem.group), _q_tiles(plan, problem, rows[0])
    taken = _taken(plan, problem, q_tiles, pack, kv_splits)
    return _grids(plan, problem, sms, rows, taken, kv_splits)


_Rows = tuple[int | None, int | None]


def _grids(
    plan: KernelPlan, problem: Problem, sms: int, rows: _Rows, taken: int, kv_splits: int
) -> tuple[LaunchGrid, ...]:
    if plan.backward is None:
        found = _forward_grids(plan, problem, sms, rows, taken, kv_splits)
        if order.wanted(plan, taken, -(-problem.kv_len // plan.tile.kv), sms):
            blocks = order.orders(plan, problem.batch, problem.heads)
            found.insert(0, _grid(plan, order.ENTRY, blocks, order.THREADS))
    else:
        found = _backward_grids(plan, problem, sms, rows)
    if plan.summaries:
        found.insert(0, _summaries_grid(plan, problem, sms))
    return tuple([grid for grid in found if grid.blocks])


def _grid(plan: KernelPlan, entry: str, blocks: int, threads: int, smem_bytes: int = 0) -> LaunchGrid:
    return LaunchGrid(entry, blocks, threads, smem_bytes, plan.launches.early)


def _summaries_grid(plan: KernelPlan, problem: Problem, sms: int) -> LaunchGrid:
    most = max(summaries.count(one, problem) for one in plan.summaries)
    blocks = min(-(-32 * most // summaries.THREADS), FINISH_BLOCKS * sms)
    return _grid(plan, summaries.ENTRY, blocks, summaries.THREADS)


def _forward_grids(
    plan: KernelPlan, problem: Problem, sms: int, rows: _Rows, taken: int, kv_splits: int
) -> list[LaunchGrid]:
    # On pipeline hopper each block takes tile after tile.
    main = _main_grid(plan, taken if plan.specialized is None or taken < sms else sms)
    return [main, _combine_grid(plan, problem, rows[0], kv_splits)] if plan.keys.split else [main]


def _taken(plan: KernelPlan, problem: Problem, q_tiles: int, pack: int, kv_splits: int) -> int:
    """Tiles of queries, one for each part of their keys, that blocks of a forward take."""
    tiles = q_tiles * (problem.heads // pack)
    return tiles * (1 if plan.layout.joined else problem.batch) * (kv_splits if plan.keys.split else 1)


def _combine_grid(plan: KernelPlan, problem: Problem, q_rows: int | None, kv_splits: int) -> LaunchGrid:
    rows, warps = split_keys.rows(plan, problem, q_rows), split_keys.COMBINING.warps
    entry = split_keys.entry(plan, rows, kv_splits)
    return _grid(plan, entry, rows if entry == split_keys.ENTRY_BY_BLOCK else -(-rows // warps), 32 * warps)


def _backward_grids(plan: KernelPlan, problem: Problem, sms: int, in_memory: _Rows) -> list[LaunchGrid]:
    layout, batch = plan.backward, 1 if plan.layout.joined else problem.batch
    heads = problem.heads * batch
    q_blocks = _q_tiles(plan, problem, in_memory[0]) * heads
    kv_tiles = _kv_tiles(plan, problem, in_memory[1]) * problem.kv_heads * batch
    found = [
        _grid(plan, "attention_backward_prepare", q_blocks, layout.row_threads),
        _main_grid(plan, min(kv_tiles, sms) if layout.persistent else kv_tiles),
    ]
    if layout.by_query is None:
        blocks = min(q_blocks, FINISH_BLOCKS * sms) if layout.dq_in_main_kernel else q_blocks
        found.append(_grid(plan, "attention_backward_finish", blocks, layout.row_threads))
    else:
        own = layout.by_query
        blocks = _tiles(own.tile_q, problem.q_len, _joined(plan, problem), in_memory[0]) * heads
        found.append(_grid(plan, "attention_backward_dq", blocks, own.threads, own.smem_bytes))
    if plan.gradients:
        by_element = functools.partial(_grid, plan, blocks=ELEMENT_BLOCKS, threads=layout.row_threads)
        if plan.sink_gradient:
            found.insert(1, by_element("attention_backward_sink"))
        if plan.score_gradients:
            found.insert(0, by_element("attention_backward_clear"))
            if plan.deterministic:
                found.append(by_element("attention_backward_gradients"))
    return found


def _main_grid(plan: KernelPlan, blocks: int) -> LaunchGrid:
    main = _outline(plan).main
    return LaunchGrid(main.entry, blocks, main.threads, main.smem_bytes, main.early)


def _q_tiles(plan: KernelPlan, problem: Problem, q_rows: int | None = None) -> int:
    """Tiles of queries of a sequence; where sequences are joined, the most that all of them may have."""
    return _tiles(plan.tile_queries(problem.group), problem.q_len, _joined(plan, problem), q_rows)


def _kv_tiles(plan: KernelPlan, problem: Problem, kv_rows: int | None = None) -> int:
    """The same of keys."""
    return _tiles(plan.tile.kv, problem.kv_len, _joined(plan, problem), kv_rows)


def _joined(plan: KernelPlan, problem: Problem) -> int | None:
    """How many sequences lie behind each other; None where each has tensors of its own."""
    return problem.batch if plan.layout.joined else None


def _tiles(size: int, length: int, joined: int | None, rows: int | None) -> int:
    """Tiles of so many queries or keys, of each sequence of this length, or of all that are joined."""
    if joined is None:
        return -(-length // size)
    rows = length * joined if rows is None else rows
    return rows // size + joined  # each sequence may end inside a tile


def descale_of(shape: tuple[int, ...], strides: tuple[int, ...], rows: int, heads: int) -> Descale:
    """How a tensor of descales, [1], [batch, heads] or [batch, heads, blocks], serves so many rows and query heads; a
    dimension of size 1 serves all.  The shape is one that broadcasts."""
    shape, strides = (*shape, *(1,) * (3 - len(shape))), (*strides, *(0,) * (3 - len(strides)))
    block = block_of(rows, shape[2]) or 1
    return Descale(
        strides=tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True)),
        block_log2=block.bit_length() - 1 if shape[2] > 1 else WHOLE_LOG2,
        heads=heads // shape[1] if heads % shape[1] == 0 else 1,
    )


def operand_dtype(plan: KernelPlan, name: str) -> str:
    """That of q, k, v, o or d_o as an operand."""
    if plan.float8 is None:
        return plan.dtype
    return {"k": plan.float8.k, "v": plan.float8.v}.get(name, plan.dtype)


def _tensor_maps(
    maps: tuple[_MapForm, ...],
    strides: Mapping[str, tuple[int, ...]],
    in_memory: tuple[int, int],
    cache: Cache | None,
    tile_kv: int,
) -> tuple[TensorMapDesc, ...]:
    """Those of tensors with so many rows of q, and of k, in memory: of each page where there is a cache."""
    found: list[TensorMapDesc] = []
    for tensor, like, twin, dtype, item, columns, box, swizzle, least, of_keys, packed, whole, heads, batches in maps:
        of_tensor = strides[tensor]
        if like is None or of_tensor != strides[twin]:
            batch, of_head, of_row = of_tensor
            rows = in_memory[of_keys] or 1  # without a key nothing is copied
            if of_keys and cache is not None:
                rows, batches = cache.page_size, cache.pages or 1
                box = (box[0], math.gcd(rows, tile_kv), 1, 1)
            if packed:
                rows, heads, of_row, of_head = heads, rows, of_head, of_row
            sizes = columns, rows, heads, batches
            of_row = of_row * item if rows > 1 else least
            of_head = of_head * item if heads > 1 else least
            steps = of_row, of_head, batch * item if batches > 1 else least
            if whole:
                sizes, steps, box = _in_whole_rows(sizes, steps, box)
        else:
            _, sizes, steps, dtype, box, swizzle, _ = found[like]
        found.append(new(TensorMapDesc, (tensor, sizes, steps, dtype, box, swizzle, columns * item)))
    return tuple(found)


def _head_boxes(of_head: int, heads: int) -> int:
    """Boxes of columns from a head to the next, so many elements on."""
    assert heads == 1 or of_head * ITEM % SWIZZLE == 0  # whoever chose the plan asked `cannot_address`
    return of_head * ITEM // SWIZZLE if heads > 1 else 0


def _in_whole_rows(
    sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The map of a cache whose copies bring whole rows of a page in groups of eight, of one in boxes of columns.

    Heads and the boxes of a row's columns are one dimension: a map has five at most.
    """
    (columns, rows, heads, pages), (of_row, of_head, of_page) = sizes, strides
    boxes = columns * ITEM // SWIZZLE
    return (
        (box[0], BOX_ROWS, (heads - 1) * _head_boxes(of_head // ITEM, heads) + boxes, rows // BOX_ROWS, pages),
        (of_row, SWIZZLE, BOX_ROWS * of_row, of_page),
        (box[0], BOX_ROWS, boxes, box[1] // BOX_ROWS, 1),
    )
