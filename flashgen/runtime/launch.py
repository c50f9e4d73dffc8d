"""What a pass launches on one problem, as one value: every number but addresses.

It is made here, of a plan, a problem and how tensors lie.  The driver (`kernel`) and the interpreter only execute it:
they put addresses in place.  So what the interpreter checks is the launch that a GPU gets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flashgen.codegen import params as members
from flashgen.planning import backward, split_keys, summaries
from flashgen.planning.arch import ARCHS
from flashgen.planning.float8 import DESCALES, block_of
from flashgen.planning.layout import division
from flashgen.planning.once import once
from flashgen.planning.plan import WARPGROUP_ROWS, Part, rows_of

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

_DROPOUT = tuple(f.name for f in members.DROPOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Shape of a captured tensor: its sizes, and its strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Shape of a cache in pages: their number, the rows of each, and the elements between rows of the page table."""

    pages: int
    page_size: int
    table_row: int

    def numbers(self, tile_kv: int) -> dict[str, int]:
        """Fields of `Params`: one copy moves the most rows that lie side by side in each page and in each tile."""
        magic, shift = division(self.page_size)
        return {
            "pages": self.pages,
            "page_size": self.page_size,
            "page_rows": math.gcd(self.page_size, tile_kv),
            "page_magic": magic,
            "page_shift": shift,
            "table_row": self.table_row,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Descale:
    """How what the elements of q, k or v count by lies: strides over (batch, head, block) in elements, 0 where one
    serves all; blocks of 1 << `block_log2` rows; `heads` query heads that share one of q."""

    strides: tuple[int, int, int]
    block_log2: int
    heads: int = 1


class TensorMapDesc(NamedTuple):
    """What TMA is told of a 4-D tensor, but for its address: the arguments of cuTensorMapEncodeTiled.

    `sizes` are (columns, rows, heads, batch) in elements, or heads before rows; `strides` the bytes between all but
    columns, multiples of 16 in any order; `box` what one copy moves, in elements; `swizzle` the bytes of a row of the
    pattern in shared memory.  What lies outside reads as 0.

    A tuple, as each new length makes four: a frozen dataclass takes three times as long.
    """

    tensor: str
    dtype: str
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]
    swizzle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchGrid:
    """One kernel of a launch: its entry, its grid and block (one dimension each), its dynamic shared memory; whether it
    starts before the one before it on the stream has ended, for which it then waits itself."""

    entry: str
    blocks: int
    threads: int
    smem_bytes: int
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that executing a plan on one problem takes, but addresses.

    grids       its kernels, in the order in which they run on one stream; all take the plan's `Params`
    values      the numbers of `Params` by field; those of `scalars` may change from call to call
    maps        what the main kernel takes before `Params`
    workspaces  memory beside inputs and results, in bytes by the name of the pointer; it may hold anything
    cleared     memory that is 0 before the first kernel, and left so; launches that may overlap need their own: in a
                CUDA graph a kernel more, so there is none where nobody counts, and its pointer is null
    """

    plan: KernelPlan
    grids: tuple[LaunchGrid, ...]
    values: Mapping[str, int | float] = field(hash=False)
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
        return self.maps if grid.entry == main_entry(self.plan) else ()

    def packed(self, addresses: Mapping[str, int]) -> bytes:
        """`Params` with these addresses; raises KeyError for a pointer without one."""
        return members.pack(self.plan, {**addresses, **self.values})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """What no problem decides of the launches of a plan, worked out once: a new length is a few integer operations.

    numbers   the fields of `Params` that are no addresses
    pointers  those of `Launch.pointers`
    maps      the tensors of tensor maps, and the dtypes of their elements
    threads, smem_bytes  of the kernel that visits tiles
    """

    numbers: tuple[str, ...]
    pointers: tuple[str, ...]
    maps: tuple[tuple[str, str], ...]
    threads: int
    smem_bytes: int


@once
def _outline(plan: KernelPlan) -> _Outline:
    fields = members.fields(plan)
    in_params = [f.name for f in fields if f.ctype.endswith("*")]
    cleared = [name for name in in_params if name == COUNTERS.name]
    others = (name for name in in_params if name != COUNTERS.name)
    mapped = members.maps(plan)
    return _Outline(
        numbers=tuple(f.name for f in fields if not f.ctype.endswith("*")),
        pointers=tuple(dict.fromkeys((*mapped, *others, *cleared))),
        maps=tuple((name, operand_dtype(plan, name)) for name in mapped),
        threads=plan.threads,
        smem_bytes=plan.smem_bytes,
    )


def pointers(plan: KernelPlan) -> tuple[str, ...]:
    """Those of every launch of a plan."""
    return _outline(plan).pointers


def scalars(plan: KernelPlan) -> tuple[str, ...]:
    """Those of every launch of a plan."""
    of_variant = (f"param_{p.name}" for p in plan.variant.params)
    of_layout = ("q_offset",) * plan.layout.own
    return ("scale", *of_variant, *of_layout, *(_DROPOUT if plan.dropout else ()))


def make_launch(
    plan: KernelPlan,
    problem: Problem,
    *,
    strides: Mapping[str, tuple[int, int, int]],
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
    `l2_kv_heads`, the key heads whose tensors its L2 holds, and `clear_distance`, the key heads that a backward clears
    dq of in advance, follow from the plan and the problem unless given: small problems on few SMs then show what large
    ones do.
    """
    outline, group = _outline(plan), problem.group
    pack = plan.pack(group)
    heads = problem.batch * problem.kv_heads
    together = min(_l2_kv_heads(plan, problem) if l2_kv_heads is None else l2_kv_heads, heads)
    if plan.backward is not None:
        clear_distance = min(
            backward.clear_distance(plan, problem, sms, together) if clear_distance is None else clear_distance, heads
        )
    q_rows, kv_rows = (problem.q_len, problem.kv_len) if rows is None else rows
    if plan.layout.joined:
        in_pages = () if cache is None else ("k", "v")
        strides = {name: of if name in in_pages else (0, *of[1:]) for name, of in strides.items()}
    q_tiles, kv_tiles = _tiles_of(plan, problem, pack, q_rows, kv_rows)
    numbers: dict[str, int | float | None] = {
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "q_len": problem.q_len,
        "kv_len": problem.kv_len,
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        "l2_heads": together if plan.backward is not None else together * group // pack,
        "clear_distance": clear_distance,
        "packs": problem.heads // pack,
        "pack_log2": pack.bit_length() - 1,
        "q_rows": q_rows,
        "kv_rows": kv_rows,
        "q_offset": q_offset,
        "splits": kv_splits,
        "q_start": 0,
        "k_start": 0,
        "scale": scale,
    }
    for name, value in params.items():
        numbers[f"param_{name}"] = value
    if cache is not None:
        numbers |= cache.numbers(plan.tile.kv)
    if dropout is not None:
        numbers |= zip(_DROPOUT, dropout_scalars(dropout, problem.heads), strict=True)
    if descales:
        for name, descale in descales.items():
            numbers[f"{name}_block_log2"] = descale.block_log2
        if "q" in descales:
            numbers["q_descale_heads"] = descales["q"].heads
        strides = {**strides, **{DESCALES[name]: descale.strides for name, descale in descales.items()}}
    for name, of_tensor in strides.items():
        numbers |= zip(_axes(name), of_tensor, strict=True)
    for name, tensor in captured.items():
        for (of_size, of_stride), size, stride in zip(
            _dimensions(name, len(tensor.sizes)), tensor.sizes, tensor.strides, strict=True
        ):
            numbers[of_size] = size
            numbers[of_stride] = stride if size > 1 else 0  # of size 1: it broadcasts
    workspaces: tuple[Part, ...] = ()
    if plan.backward is not None:
        shapes = {name: captured[name].sizes for name in plan.gradients}
        workspaces = backward.workspaces(plan, problem, shapes, q_tiles if plan.layout.joined else None)
    return Launch(
        plan=plan,
        grids=grids(plan, problem, sms, (q_rows, kv_rows), kv_splits),
        values=MappingProxyType({name: numbers[name] for name in outline.numbers}),
        maps=tuple(
            [
                _tensor_map(name, dtype, plan, problem, pack, strides[name], (q_rows, kv_rows), cache)
                for name, dtype in outline.maps
            ]
        ),
        workspaces=(
            *workspaces,
            *split_keys.workspaces(plan, problem, kv_splits, q_rows, sms),
            *(summaries.workspaces(plan, problem) if plan.summaries else ()),
        ),
        cleared=(COUNTERS,) if _counts(plan, problem, sms, (q_rows, kv_rows), kv_splits) else (),
    )


@functools.lru_cache(maxsize=256)
def _axes(name: str) -> tuple[str, str, str]:
    """The fields of a tensor's strides."""
    return f"{name}_batch", f"{name}_head", f"{name}_row"


@functools.lru_cache(maxsize=256)
def _dimensions(name: str, count: int) -> tuple[tuple[str, str], ...]:
    """The fields of a captured tensor's sizes and strides, by dimension."""
    return tuple((f"size{axis}_{name}", f"stride{axis}_{name}") for axis in range(count))


def _tiles_of(plan: KernelPlan, problem: Problem, pack: int, q_rows: int, kv_rows: int) -> tuple[int, int]:
    """Tiles of queries, and of keys, of a sequence."""
    of_q = _tiles(plan, problem, plan.tile.q // pack, problem.q_len, q_rows)
    return of_q, _tiles(plan, problem, plan.tile.kv, problem.kv_len, kv_rows)


def main_entry(plan: KernelPlan) -> str:
    """The kernel that visits tiles."""
    return f"attention_{plan.pass_name}"


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
    if plan.backward is None:
        found = _forward_grids(plan, problem, sms, rows, kv_splits)
    else:
        found = _backward_grids(plan, problem, sms, rows)
    if plan.summaries:
        found.insert(0, _summaries_grid(plan, problem, sms))
    started = [grid for grid in found if grid.blocks]
    return tuple([replace(grid, early=True) for grid in started] if plan.launches.early else started)


def _summaries_grid(plan: KernelPlan, problem: Problem, sms: int) -> LaunchGrid:
    most = max(summaries.count(one, problem) for one in plan.summaries)
    blocks = min(-(-32 * most // summaries.THREADS), FINISH_BLOCKS * sms)
    return LaunchGrid(entry=summaries.ENTRY, blocks=blocks, threads=summaries.THREADS, smem_bytes=0)


_Rows = tuple[int | None, int | None]


def _forward_grids(plan: KernelPlan, problem: Problem, sms: int, rows: _Rows, kv_splits: int) -> list[LaunchGrid]:
    blocks = _handed_out(plan, problem, rows, kv_splits)
    if plan.specialized is not None:  # each block takes tile after tile
        blocks = min(blocks, sms)
    return [_main_grid(plan, blocks), *([_combine_grid(plan, problem, rows[0])] if plan.keys.split else [])]


def _handed_out(plan: KernelPlan, problem: Problem, rows: _Rows, kv_splits: int) -> int:
    """Tiles of queries, one for each part of their keys, that blocks of a forward take."""
    pack = plan.pack(problem.group)
    tiles = _tiles(plan, problem, plan.tile.q // pack, problem.q_len, rows[0]) * (problem.heads // pack)
    return tiles * (1 if plan.layout.joined else problem.batch) * (kv_splits if plan.keys.split else 1)


def _counts(plan: KernelPlan, problem: Problem, sms: int, rows: _Rows, kv_splits: int) -> bool:
    """Whether blocks count the tiles that they take."""
    if _outline(plan).pointers[-1] != COUNTERS.name:
        return False
    assert plan.specialized is not None
    return plan.specialized.scheduler.always_counts or _handed_out(plan, problem, rows, kv_splits) > sms


def _combine_grid(plan: KernelPlan, problem: Problem, q_rows: int | None) -> LaunchGrid:
    warps = split_keys.COMBINE_WARPS
    blocks = -(-split_keys.rows(plan, problem, q_rows) // warps)
    return LaunchGrid(entry=split_keys.ENTRY, blocks=blocks, threads=32 * warps, smem_bytes=0)


def _backward_grids(plan: KernelPlan, problem: Problem, sms: int, in_memory: _Rows) -> list[LaunchGrid]:
    layout, batch = plan.backward, 1 if plan.layout.joined else problem.batch
    heads = problem.heads * batch
    q_blocks = _q_tiles(plan, problem, in_memory[0]) * heads
    rows = {"threads": layout.row_threads, "smem_bytes": 0}
    tiles = _kv_tiles(plan, problem, in_memory[1]) * problem.kv_heads * batch
    found = [
        LaunchGrid(entry="attention_backward_prepare", blocks=q_blocks, **rows),
        _main_grid(plan, min(tiles, sms) if layout.in_turn else tiles),
    ]
    if layout.by_query is None:
        blocks = min(q_blocks, FINISH_BLOCKS * sms) if layout.dq_in_main_kernel else q_blocks
        found.append(LaunchGrid(entry="attention_backward_finish", blocks=blocks, **rows))
    else:
        size = {"threads": layout.by_query.threads, "smem_bytes": layout.by_query.smem_bytes}
        blocks = _tiles(plan, problem, layout.by_query.tile_q, problem.q_len, in_memory[0]) * heads
        found.append(LaunchGrid(entry="attention_backward_dq", blocks=blocks, **size))
    if plan.sink_gradient:
        found.insert(1, LaunchGrid(entry="attention_backward_sink", blocks=ELEMENT_BLOCKS, **rows))
    if plan.score_gradients:
        found.insert(0, LaunchGrid(entry="attention_backward_clear", blocks=ELEMENT_BLOCKS, **rows))
        if plan.deterministic:
            found.append(LaunchGrid(entry="attention_backward_gradients", blocks=ELEMENT_BLOCKS, **rows))
    return found


def _main_grid(plan: KernelPlan, blocks: int) -> LaunchGrid:
    outline = _outline(plan)
    return LaunchGrid(entry=main_entry(plan), blocks=blocks, threads=outline.threads, smem_bytes=outline.smem_bytes)


def _q_tiles(plan: KernelPlan, problem: Problem, q_rows: int | None = None) -> int:
    """Tiles of queries of a sequence; where sequences are joined, the most that all of them may have."""
    return _tiles(plan, problem, plan.tile_queries(problem.group), problem.q_len, q_rows)


def _kv_tiles(plan: KernelPlan, problem: Problem, kv_rows: int | None = None) -> int:
    """The same of keys."""
    return _tiles(plan, problem, plan.tile.kv, problem.kv_len, kv_rows)


def _tiles(plan: KernelPlan, problem: Problem, size: int, length: int, rows: int | None) -> int:
    if plan.layout.joined:  # each sequence may end inside a tile
        rows = length * problem.batch if rows is None else rows
        return rows // size + problem.batch
    return -(-length // size)


def _l2_kv_heads(plan: KernelPlan, problem: Problem) -> int:
    """Key heads that pipeline hopper works on together: of a forward those whose keys and values L2 holds beside
    queries and outputs."""
    if plan.backward is not None:
        return backward.l2_kv_heads(plan, problem)
    return ARCHS[plan.arch].l2_holds(problem.kv_len * (problem.head_dim + problem.v_head_dim) * problem.kv_itemsize)


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


def _tensor_map(
    name: str,
    dtype: str,
    plan: KernelPlan,
    problem: Problem,
    pack: int,
    strides: tuple[int, int, int],
    in_memory: tuple[int, int],
    cache: Cache | None,
) -> TensorMapDesc:
    """That of q, k, v, o or d_o, with so many rows of q, and of k, in memory: of each page where there is a cache."""
    item = problem.itemsize
    columns = problem.head_dim if name in "qk" else problem.v_head_dim
    wide = rows_of(columns, item)
    batch, of_head, of_row = strides
    batch_size = 1 if plan.layout.joined else problem.batch
    if name in ("k", "v"):
        rows, heads, box = in_memory[1], problem.kv_heads, (wide.columns, plan.tile.kv, 1, 1)
        if cache is not None:
            rows, batch_size = cache.page_size, cache.pages
            box = (wide.columns, math.gcd(cache.page_size, plan.tile.kv), 1, 1)
    else:
        rows, heads = in_memory[0], problem.heads
        # Of a forward, those of one warpgroup.
        box = (wide.columns, WARPGROUP_ROWS if plan.backward is None else plan.tile.q, 1, 1)
        if plan.packed and name in "qo":  # the heads of a query side by side
            rows, heads, of_row, of_head = heads, rows, of_head, of_row
            box = (wide.columns, pack, WARPGROUP_ROWS // pack, 1)
    least = -(-columns * item // 16) * 16  # of a size of 1 any stride will do
    return TensorMapDesc(
        name,
        dtype,
        (columns, rows or 1, heads or 1, batch_size or 1),  # without a key nothing is copied
        (
            of_row * item if rows > 1 else least,
            of_head * item if heads > 1 else least,
            batch * item if batch_size > 1 else least,
        ),
        box,
        wide.bytes,
    )
