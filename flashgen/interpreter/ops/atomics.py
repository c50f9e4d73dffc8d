"""atom and red, on global and shared memory: lanes take effect one after another, in lane order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.memory import Reader
from flashgen.interpreter.ops.loads import note_granule
from flashgen.interpreter.ops.remote import local_address
from flashgen.interpreter.order import Order
from flashgen.interpreter.parser import Sink, Vec
from flashgen.interpreter.registers import LANES, Mask, Slots, spread

_SCOPES = ("relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz")


def _wrap(old: Any, limit: Any) -> Any:
    return old.dtype.type(0) if old >= limit else old + old.dtype.type(1)


def _unwrap(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


_UPDATE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": _wrap,
    "dec": _unwrap,
}


def _build(b: Build, returns: bool) -> Closure:
    kind, mods = b.type(), frozenset(b.mods)
    b.drop(*_SCOPES)
    space = b.take("global", "shared::cta", "shared")
    swap = returns and bool(b.take("cas"))
    name = "" if swap else b.take(*_UPDATE)
    count = {"": 1, "v2": 2, "v4": 4}[b.take("v2", "v4")]
    b.done((2 + swap + returns,))
    if not space or (not swap and not name) or (count > 1 and returns) or kind in ("f16", "bf16", "f16x2", "bf16x2"):
        raise b.unknown("this form")
    operands = list(b.operands)
    target = operands.pop(0) if returns else Sink()
    address, offset = b.address(operands[0])
    items = operands[1].items if isinstance(operands[1], Vec) else (operands[1],)
    if len(items) != count:
        raise b.unknown(f"{len(items)} operands for {count} elements")
    values = [b.read(item, kind) for item in items]
    new = b.read(operands[2], kind) if swap else None
    d = None if isinstance(target, Sink) else b.write(target, kind)
    width, dtype, instruction = types.size(kind), types.DTYPES[kind], b.instruction
    update = _UPDATE.get(name)
    note_granule(b, "shared" if space.startswith("shared") else "global", width)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        where = spread(np.asarray(V[address]).astype(np.int64) + offset, (group.n, LANES))
        lanes = np.ones(where.shape, bool) if m is True else m
        if space == "global":
            memory = group.block.launch.memory
            by = Reader(block=group.block.number, atomic=True)
            at = memory.access(where, m, width * count, "atom" if returns else "red", write=True, by=by)
            if memory.account.order is not None:
                _order(memory.account.order, group.block.number, at[lanes], width * count, mods)
            view = memory.data.view(dtype)
        else:
            memory = group.block.shared
            at, pattern = memory.access(group, local_address(group.block, where, m), m, width * count)
            group.block.launch.report.note_shared(
                instruction, int(lanes.any(1).sum()), pattern.wavefronts, pattern.ideal
            )
            memory.note_atomic(group, at, pattern, m, instruction.line)
            view = memory.data.view(dtype)
        index = at // width
        full = [spread(V[slot], where.shape) for slot in values]
        if name == "add" and d is None:
            for k, value in enumerate(full):
                np.add.at(view, index[lanes] + k, value[lanes])
            return
        other = None if new is None else spread(V[new], where.shape)
        for row, lane in np.argwhere(lanes):
            for k, value in enumerate(full):
                old = view[index[row, lane] + k]
                if d is not None:
                    V[d][row, lane] = old
                x = value[row, lane]
                if other is not None:
                    x = other[row, lane] if old == x else old
                    view[index[row, lane]] = x
                else:
                    view[index[row, lane] + k] = update(old, x)

    return run


def _order(order: Order, block: int, words: np.ndarray, width: int, mods: frozenset[str]) -> None:
    """What an atomic on words in global memory orders, and its update."""
    wide = "cta" not in mods
    (order.acquire if wide and mods & {"acquire", "acq_rel"} else order.relaxed_read)(block, words)
    order.update(block, words, width)
    order.relaxed_write(block, words)
    if wide and mods & {"release", "acq_rel"}:
        order.release(block, words, alone=False)


TABLE: dict[str, Callable[[Build], Closure]] = {
    "atom": lambda b: _build(b, True),
    "red": lambda b: _build(b, False),
}
