"""Lanes of a warp among themselves: shuffles, votes, reductions, and bar.warp.sync."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.errors import Diverged
from flashgen.interpreter.parser import Imm, Not, Pair, Reg, Sink
from flashgen.interpreter.registers import LANES, Group, Mask, Slots, spread

_LANE = np.arange(LANES, dtype=np.int64)
_BIT = np.uint32(1) << np.arange(LANES, dtype=np.uint32)


def _lanes(group: Group, m: Mask) -> np.ndarray:
    return np.ones((group.n, LANES), bool) if m is True else m


def _bits(lanes: np.ndarray) -> np.ndarray:
    """[n, 32] booleans -> [n, 1] words."""
    return (lanes * _BIT).sum(1, dtype=np.uint32)[:, None]


def check_members(group: Group, m: Mask, members: np.ndarray, what: str) -> None:
    """The lanes that a membermask names are exactly those here (all of them must execute the instruction together)."""
    if m is True and (np.asarray(members) == np.uint32(0xFFFFFFFF)).all():
        return
    lanes = _lanes(group, m)
    here = spread(_bits(lanes), lanes.shape)
    named = spread(members, lanes.shape)
    bad = lanes & (here != named)
    if bad.any():
        row, lane = (int(x) for x in np.argwhere(bad)[0])
        raise Diverged(
            f"{what} in warp {group.a + row} names lanes {int(named[row, lane]):#010x}, but lanes"
            f" {int(here[row, lane]):#010x} execute it together"
        )


def shuffle(b: Build) -> Closure:
    kind = b.type()
    mode = b.take("up", "down", "bfly", "idx")
    b.done(5)
    if kind != "b32" or not mode:
        raise b.unknown("this form")
    target, inside = (b.operands[0], Sink())
    if isinstance(target, Pair):
        target, inside = target.first, target.second
    x, by, clamp, members = (b.read(operand, "b32") for operand in b.operands[1:5])
    d = b.write(target, "b32")
    p = None if isinstance(inside, Sink) else b.write(inside, "pred")
    fixed = isinstance(b.operands[2], Imm) and isinstance(b.operands[3], Imm)
    plans: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def source(V: Slots) -> tuple[np.ndarray, np.ndarray]:
        """For each lane: whom it reads, and whether that lane is within its segment."""
        group = V[0]
        if fixed and group.n in plans:
            return plans[group.n]
        shape = (group.n, LANES)
        amount = spread(np.asarray(V[by]).astype(np.int64) & 31, shape)
        c = spread(np.asarray(V[clamp]).astype(np.int64), shape)
        segment, limit = c >> 8 & 31, c & 31
        last = (_LANE & segment) | (limit & ~segment)
        first = spread(_LANE & segment, shape)
        if mode == "up":
            j = _LANE - amount
            ok = j >= last
        elif mode == "down":
            j = _LANE + amount
            ok = j <= last
        elif mode == "bfly":
            j = _LANE ^ amount
            ok = j <= last
        else:
            j = first | (amount & ~segment)
            ok = j <= last
        plan = np.where(ok, j, _LANE), ok
        if fixed:
            plans[group.n] = plan
        return plan

    if isinstance(b.operands[1], Reg):
        b.footprint.reads.discard(b.operands[1].name)  # a lane whose value nobody reads need not have one
        b.footprint.exchanged = b.operands[1].name, lambda V: source(V)[0]

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        check_members(group, m, V[members], "shfl.sync")
        j, ok = source(V)
        if m is not True:
            read = np.take_along_axis(m, j, 1)
            if (m & ~read).any():
                raise Diverged("shfl.sync reads a lane that does not take part")
        value = np.take_along_axis(spread(V[x], (group.n, LANES)), j, 1)
        np.copyto(V[d], value, where=m)
        if p is not None:
            np.copyto(V[p], ok, where=m)

    return run


def vote(b: Build) -> Closure:
    kind = b.type()
    mode = b.take("any", "all", "uni", "ballot")
    if not b.take("sync"):
        raise b.unknown("the form without .sync")
    b.done(3)
    operand = b.operands[1]
    negate = isinstance(operand, Not)
    x, members = b.read(operand.reg if negate else operand, "pred"), b.read(b.operands[2], "b32")
    d = b.write(b.operands[0], kind)

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        check_members(group, m, V[members], "vote.sync")
        lanes = _lanes(group, m)
        p = spread(~np.asarray(V[x]) if negate else V[x], lanes.shape)
        if mode == "ballot":
            value = _bits(p & lanes)
        elif mode == "any":
            value = (p & lanes).any(1, keepdims=True)
        else:
            value = (p | ~lanes).all(1, keepdims=True)
            if mode == "uni":
                value = value | ~(p & lanes).any(1, keepdims=True)
        np.copyto(V[d], value, where=m)

    return run


_REDUCE: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce(b: Build) -> Closure:
    kind = b.type()
    b.take("sync")
    ufunc = _REDUCE.get(b.take(*_REDUCE))
    b.done(3)
    if ufunc is None or kind not in ("u32", "s32", "b32"):
        raise b.unknown("this form")
    d, x, members = b.write(b.operands[0], kind), b.read(b.operands[1], kind), b.read(b.operands[2], "b32")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        check_members(group, m, V[members], "redux.sync")
        values, lanes = spread(V[x], (group.n, LANES)), _lanes(group, m)
        for row in np.flatnonzero(lanes.any(1)):
            result = ufunc.reduce(values[row][lanes[row]], dtype=types.DTYPES[kind])
            V[d][row][lanes[row]] = result

    return run


def elect(b: Build) -> Closure:
    """elect.sync: the predicate holds in one lane, here the lowest."""
    b.take("sync")
    b.done(2)
    target = b.operands[0]
    if not isinstance(target, Pair):
        raise b.unknown("a form without a predicate")
    members = b.read(b.operands[1], "b32")
    d = None if isinstance(target.first, Sink) else b.write(target.first, "b32")
    p = b.write(target.second, "pred")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        check_members(group, m, V[members], "elect.sync")
        first = _lanes(group, m).argmax(1)[:, None]
        if d is not None:
            np.copyto(V[d], first, where=m, casting="unsafe")
        np.copyto(V[p], first == _LANE, where=m)

    return run


def active_mask(b: Build) -> Closure:
    b.type()
    b.done(1)
    d = b.write(b.operands[0], "b32")

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], _bits(_lanes(V[0], m)), where=m)

    return run


def warp_barrier(b: Build) -> Closure:
    """bar.warp.sync: the lanes meet, and what they wrote is ordered."""
    b.done(1)
    members = b.read(b.operands[0], "b32")

    def run(V: Slots, m: Mask) -> None:
        group = V[0]
        check_members(group, m, V[members], "bar.warp.sync")
        races = group.block.cluster.races
        if races is not None:
            rows = group.rows if m is True else group.rows[m.any(1)]
            races.warp_sync(rows + group.block.first_row)

    return run


TABLE: dict[str, Callable[[Build], Closure]] = {
    "shfl.sync": shuffle,
    "vote": vote,
    "redux": reduce,
    "elect": elect,
    "activemask": active_mask,
    "bar.warp.sync": warp_barrier,
    "barrier.warp.sync": warp_barrier,
}
