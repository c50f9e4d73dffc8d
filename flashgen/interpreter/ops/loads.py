"""ld and st in every state space."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.errors import Misaligned, OutOfBounds, Uninitialised
from flashgen.interpreter.memory import BASE as GLOBAL_BASE
from flashgen.interpreter.memory import Reader
from flashgen.interpreter.ops.remote import local_address, remote_shared
from flashgen.interpreter.parser import Instruction, Sink, Vec
from flashgen.interpreter.registers import LANES, Group, Mask, Slots, spread
from flashgen.interpreter.shared import SharedMemory
from flashgen.interpreter.spaces import WINDOW_BYTES, WINDOWS, split

#: Modifiers that order or place an access: in an interpreter, which does one thing at a time, they change no value.
_ADVICE = (
    *("weak", "volatile", "relaxed", "acquire", "release", "mmio", "cta", "cluster", "gpu", "sys"),
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"),
    *("L1::evict_normal", "L1::evict_last", "L1::evict_first", "L1::evict_unchanged", "L1::no_allocate"),
    *("L2::64B", "L2::128B", "L2::256B", "L2::cache_hint"),
)
_SPACES = ("global", "shared::cta", "shared::cluster", "shared", "local", "param::entry", "param", "const")
#: Those of accesses that are ordered with others of the same word, and make a block wait for another.
_STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})
_COUNTS = {"": 1, "v2": 2, "v4": 4, "v8": 8}

Fetch = Callable[..., list[np.ndarray]]
Put = Callable[..., None]


def _form(b: Build) -> tuple[str, str, int]:
    """(type, space, elements) from the modifiers."""
    kind = b.type()
    hint = "L2::cache_hint" in b.mods
    b.drop(*_ADVICE)
    space = b.take(*_SPACES)
    count = _COUNTS[b.take("v2", "v4", "v8")]
    b.done(3 if hint else 2)
    if kind == "pred" or count * types.size(kind) > 32:
        raise b.unknown(f"type {kind}")
    return kind, {"const": "global", "param::entry": "param", "shared::cta": "shared"}.get(space, space), count


def _items(b: Build, operand: Any, count: int) -> tuple[Any, ...]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != count:
        raise b.unknown(f"{len(items)} operands for {count} elements")
    return items


def load(b: Build) -> Closure:
    mods = frozenset(b.mods)
    kind, space, count = _form(b)
    signed = kind in types.SIGNED
    width = types.size(kind)
    targets = [
        None if isinstance(item, Sink) else b.wide_write(item, signed)[0] for item in _items(b, b.operands[0], count)
    ]
    address, offset = b.address(b.operands[1])
    note_granule(b, space, width * count)
    fetch = {"global": _loading(mods), "": partial(_ld_generic, _loading(mods))}.get(space) or _FETCH[space]
    dtype = types.bits_of(types.DTYPES[kind]) if not signed else types.DTYPES[kind]
    instruction = b.instruction

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        where = np.asarray(V[address]).astype(np.int64) + offset
        parts = fetch(group, spread(where, (group.n, LANES)), m, width, count, instruction)
        for slot, part in zip(targets, parts, strict=True):
            if slot is not None:
                np.copyto(V[slot], part.view(dtype), where=m, casting="unsafe")

    return run


def store(b: Build) -> Closure:
    mods = frozenset(b.mods)
    kind, space, count = _form(b)
    bits = f"b{8 * types.size(kind)}"
    width = types.size(kind)
    values = [b.read(item, bits) for item in _items(b, b.operands[1], count)]
    address, offset = b.address(b.operands[0])
    note_granule(b, space, width * count)
    put = {"global": _storing(mods), "": partial(_st_generic, _storing(mods))}.get(space) or _PUT.get(space)
    if put is None:
        raise b.unknown(f"a store to {space}")
    instruction = b.instruction

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        where = spread(np.asarray(V[address]).astype(np.int64) + offset, (group.n, LANES))
        put(group, where, m, width, [V[slot] for slot in values], instruction)

    return run


def note_granule(b: Build, space: str, width: int) -> None:
    """The shadow of shared memory is as fine as the narrowest access that may reach it."""
    if space in ("shared", "shared::cluster", ""):
        b.translator.granule = min(b.translator.granule, width)


# ---------------------------------------------------------------- global
def _loading(mods: frozenset[str]) -> Fetch:
    """How a load from global memory with these modifiers is ordered."""
    if "nc" in mods:
        return partial(_ld_global, constant=True)
    if mods.isdisjoint(_STRONG):
        return _ld_global
    return partial(_ld_word, acquires="acquire" in mods and "cta" not in mods)


def _storing(mods: frozenset[str]) -> Put:
    """The same of a store."""
    if "release" in mods and "cta" not in mods:
        return _release_word
    return _st_global if mods.isdisjoint(_STRONG) else _st_word


def _ld_global(
    group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction, *, constant: bool = False
) -> list[np.ndarray]:
    memory = group.block.launch.memory
    by = Reader(block=group.block.number, constant=constant)
    offset = memory.access(where, m, width * count, "ld", by=by)
    return _gather(memory.views, memory.rows16, offset, width, count)


def _ld_word(
    group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction, *, acquires: bool
) -> list[np.ndarray]:
    """A word by which blocks wait for each other."""
    memory, block = group.block.launch.memory, group.block.number
    offset = memory.access(where, m, width * count, "ld")
    if (order := memory.account.order) is not None:
        (order.acquire if acquires else order.relaxed_read)(block, offset if m is True else offset[m])
    return _gather(memory.views, memory.rows16, offset, width, count)


def _st_global(group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction) -> None:
    memory, count = group.block.launch.memory, len(values)
    offset = memory.access(where, m, width * count, "st", write=True)
    memory.own(offset.reshape(-1) if m is True else offset[m], width * count, group.block.number)
    _scatter(memory.views, offset, m, width, values)


def _st_word(group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction) -> None:
    """A word by which blocks wait for each other, behind a fence."""
    _st_global(group, where, m, width, values, i)
    if (order := group.block.launch.memory.account.order) is not None:
        offset = where - GLOBAL_BASE
        order.relaxed_write(group.block.number, offset if m is True else offset[m])


def _release_word(
    group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction
) -> None:
    """The same without one: any block may write it."""
    memory = group.block.launch.memory
    offset = memory.access(where, m, width * len(values), "st", write=True)
    if (order := memory.account.order) is not None:
        order.release(group.block.number, offset if m is True else offset[m], alone=True)
    _scatter(memory.views, offset, m, width, values)


def _gather(
    views: dict[int, np.ndarray], rows16: np.ndarray, offset: np.ndarray, width: int, count: int
) -> list[np.ndarray]:
    """Elements at byte offsets [n, 32]: one array an element, as unsigned integers of `width` bytes."""
    if width * count == 16 and width == 4:
        rows = rows16[offset >> 4]
        return [np.ascontiguousarray(rows[..., k]) for k in range(4)]
    first = offset // width
    return [views[width][first + k] for k in range(count)]


def _scatter(views: dict[int, np.ndarray], offset: np.ndarray, m: Mask, width: int, values: list[np.ndarray]) -> None:
    first = offset // width
    if m is not True:
        first = first[m]
    for k, value in enumerate(values):
        if m is not True:
            value = spread(value, m.shape)[m]
        views[width][first + k] = value


# ---------------------------------------------------------------- shared
def shared_load(group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction) -> list[np.ndarray]:
    memory = group.block.shared
    address, pattern = memory.access(group, where, m, width * count)
    memory.note_read(group, address, pattern, m)
    group.block.launch.report.note_shared(i, _warps(group, m), pattern.wavefronts, pattern.ideal)
    return _gather(memory.views, memory.rows16, address, width, count)


def shared_store(
    group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction
) -> None:
    memory = group.block.shared
    address, pattern = memory.access(group, where, m, width * len(values))
    memory.note_write(group, address, pattern, m, i.line)
    group.block.launch.report.note_shared(i, _warps(group, m), pattern.wavefronts, pattern.ideal)
    _scatter(memory.views, address, m, width, values)


def _warps(group: Group, m: Mask) -> int:
    return group.n if m is True else int(m.any(1).sum())


def _ld_cluster(group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction) -> list[np.ndarray]:
    """Another block's shared memory, one lane at a time (rare)."""
    out = [np.zeros(where.shape, f"u{width}") for _ in range(count)]
    for row, lane in _lanes(group, m):
        memory, address = remote_shared(group.block, int(where[row, lane]))
        _remote_check(memory, address, width * count, group, row, lane, i, write=False)
        for k in range(count):
            out[k][row, lane] = memory.views[width][address // width + k]
    return out


def _st_cluster(group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction) -> None:
    for row, lane in _lanes(group, m):
        memory, address = remote_shared(group.block, int(where[row, lane]))
        _remote_check(memory, address, width * len(values), group, row, lane, i, write=True)
        for k, value in enumerate(values):
            memory.views[width][address // width + k] = spread(value, where.shape)[row, lane]


def _remote_check(
    memory: SharedMemory, address: int, width: int, group: Group, row: int, lane: int, i: Instruction, *, write: bool
) -> None:
    memory.check(address, address + width, width)
    if memory.races is None:
        return
    where = memory.span(address, width)
    rows = np.full(where.shape, group.a + row + group.block.first_row)
    if write:
        memory.races.write(memory.shadow, where, rows, lane, i.line)
    else:
        memory.races.read(memory.shadow, where, rows, lane)


def _lanes(group: Group, m: Mask) -> list[tuple[int, int]]:
    """(row, lane) of every lane that takes part."""
    lanes = np.ones((group.n, LANES), bool) if m is True else m
    return [(int(r), int(c)) for r, c in np.argwhere(lanes)]


# ---------------------------------------------------------------- param and local
def _ld_param(group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction) -> list[np.ndarray]:
    params = group.block.launch.params
    active = where.reshape(-1) if m is True else where[m]
    if int(active.min()) < 0 or int(active.max()) + width * count > params.size:
        raise OutOfBounds(f"kernel parameters hold {params.size} bytes: a read at {int(active.max())} is outside")
    if (active % width).any():
        raise Misaligned("a kernel parameter is read at an address that is no multiple of its size")
    where = where if m is True else np.where(m, where, active[0])
    view = (
        params.view(f"u{width}")
        if params.size % width == 0
        else params[: params.size // width * width].view(f"u{width}")
    )
    return [view[where // width + k] for k in range(count)]


def _local_index(group: Group, where: np.ndarray, m: Mask, width: int) -> tuple[np.ndarray, ...]:
    size = group.block.local.shape[2]
    active = where.reshape(-1) if m is True else where[m]
    if int(active.min()) < 0 or int(active.max()) + width > size:
        raise OutOfBounds(f"local memory has {size} bytes per thread: an access at {int(active.max())} is outside")
    if (active % width).any():
        raise Misaligned("a local access is not aligned")
    where = where if m is True else np.where(m, where, active[0])
    return np.arange(group.a, group.b)[:, None], np.arange(LANES)[None, :], where


def _ld_local(group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction) -> list[np.ndarray]:
    row, lane, at = _local_index(group, where, m, width * count)
    written = group.block.keep("local written", lambda: np.zeros(group.block.local.shape, bool))
    known = written[row, lane, at]
    if not (known if m is True else known[m]).all():
        raise Uninitialised("local memory is read before anything wrote it")
    view = group.block.local.view(f"u{width}")
    return [view[row, lane, at // width + k] for k in range(count)]


def _st_local(group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction) -> None:
    row, lane, at = _local_index(group, where, m, width * len(values))
    written = group.block.keep("local written", lambda: np.zeros(group.block.local.shape, bool))
    view = group.block.local.view(f"u{width}")
    lanes = np.ones((group.n, LANES), bool) if m is True else m
    row, lane = spread(row, lanes.shape)[lanes], spread(lane, lanes.shape)[lanes]
    at = at[lanes]
    for k, value in enumerate(values):
        view[row, lane, at // width + k] = spread(value, lanes.shape)[lanes]
    for byte in range(width * len(values)):
        written[row, lane, at + byte] = True


# ---------------------------------------------------------------- generic
def _by_space(where: np.ndarray, m: Mask) -> list[tuple[str, np.ndarray, Mask]]:
    """(state space, addresses within it, lanes) for each space that lanes reach into."""
    active = where.reshape(-1) if m is True else where[m]
    low, high = split(int(active.min())), split(int(active.max()))
    if low[0] == high[0]:
        return [(low[0], where - WINDOWS[low[0]], m)]
    space = where // WINDOW_BYTES
    lanes = np.ones(where.shape, bool) if m is True else m
    return [
        (name, where - WINDOWS[name], lanes & (space == WINDOWS[name] // WINDOW_BYTES))
        for name in ("global", "shared", "local", "param")
        if (lanes & (space == WINDOWS[name] // WINDOW_BYTES)).any()
    ]


def _ld_generic(
    of_global: Fetch, group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction
) -> list[np.ndarray]:
    spaces, fetch = _by_space(where, m), {**_FETCH, "global": of_global}
    if len(spaces) == 1:
        return fetch[spaces[0][0]](group, spaces[0][1], m, width, count, i)
    out = [np.zeros(where.shape, f"u{width}") for _ in range(count)]
    for space, address, lanes in spaces:
        for whole, part in zip(out, fetch[space](group, address, lanes, width, count, i), strict=True):
            np.copyto(whole, part, where=lanes)
    return out


def _st_generic(
    of_global: Put, group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction
) -> None:
    put = {**_PUT, "global": of_global}
    for space, address, lanes in _by_space(where, m):
        if space == "param":
            raise OutOfBounds("a store into kernel parameters")
        put[space](group, address, lanes, width, values, i)


def _ld_any_shared(
    group: Group, where: np.ndarray, m: Mask, width: int, count: int, i: Instruction
) -> list[np.ndarray]:
    mine = local_address(group.block, where, m)
    if mine is None:
        return _ld_cluster(group, where, m, width, count, i)
    return shared_load(group, mine, m, width, count, i)


def _st_any_shared(
    group: Group, where: np.ndarray, m: Mask, width: int, values: list[np.ndarray], i: Instruction
) -> None:
    mine = local_address(group.block, where, m)
    if mine is None:
        _st_cluster(group, where, m, width, values, i)
    else:
        shared_store(group, mine, m, width, values, i)


_FETCH: dict[str, Fetch] = {
    "shared": shared_load,
    "shared::cluster": _ld_any_shared,
    "param": _ld_param,
    "local": _ld_local,
}
_PUT: dict[str, Put] = {
    "shared": shared_store,
    "shared::cluster": _st_any_shared,
    "local": _st_local,
}

TABLE: dict[str, Callable[[Build], Closure]] = {"ld": load, "ldu": load, "st": store}
