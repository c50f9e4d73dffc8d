"""mov, packing and unpacking, addresses of other state spaces, and instructions that only advise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.interpreter import types
from flashgen.interpreter.block import Asleep
from flashgen.interpreter.build import Build, Closure, May
from flashgen.interpreter.errors import KernelTrap
from flashgen.interpreter.parser import Reg, Sink, Vec
from flashgen.interpreter.registers import CLOCKS, Mask, Slots
from flashgen.interpreter.spaces import WINDOWS

SUSPENDING = ("nanosleep",)


def move(b: Build) -> Closure:
    kind = b.type()
    b.done(2)
    target, source = b.operands
    if isinstance(source, Vec):
        return _pack(b, kind, source)
    if isinstance(target, Vec):
        return _unpack(b, kind, target)
    if isinstance(source, Reg) and source.name in CLOCKS:
        return _clock(b, kind)
    d, x = b.write(target, kind), b.read(source, kind)

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], V[x], where=m)

    return run


def _clock(b: Build, kind: str) -> Closure:
    """Clocks count warp instructions: they grow, and mean nothing else here."""
    d = b.write(b.operands[0], kind)

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], V[0].block.launch.steps, where=m, casting="unsafe")

    return run


def _part(kind: str, count: int) -> str:
    return f"b{8 * types.size(kind) // count}"


def _pack(b: Build, kind: str, source: Vec) -> Closure:
    part = _part(kind, len(source.items))
    parts = [b.read(item, part) for item in source.items]
    d, dtype = b.write(b.operands[0], kind), types.bits_of(types.DTYPES[kind])
    shift = 8 * types.size(part)

    def run(V: Slots, m: Mask) -> None:
        word = dtype.type(0)
        for n, slot in enumerate(parts):
            word = word | np.asarray(V[slot]).astype(dtype) << dtype.type(n * shift)
        np.copyto(V[d].view(dtype), word, where=m)

    return run


def _unpack(b: Build, kind: str, target: Vec) -> Closure:
    part = _part(kind, len(target.items))
    x = b.read(b.operands[1], f"b{8 * types.size(kind)}")
    parts = [None if isinstance(item, Sink) else b.write(item, part) for item in target.items]
    shift = 8 * types.size(part)

    def run(V: Slots, m: Mask) -> None:
        word = np.asarray(V[x])
        pieces = [word >> word.dtype.type(n * shift) for n in range(len(parts))]
        for slot, piece in zip(parts, pieces, strict=True):
            if slot is not None:
                np.copyto(V[slot], piece, where=m, casting="unsafe")

    return run


def to_generic_or_back(b: Build) -> Closure:
    """cvta.space (to generic) and cvta.to.space (from generic)."""
    kind = b.type()
    back = bool(b.take("to"))
    space = b.take("global", "shared::cta", "shared", "local", "param", "const")
    b.done(2)
    if not space or kind != "u64":
        raise b.unknown("this form")
    window = np.uint64(WINDOWS[space.split("::")[0]])
    d, x = b.write(b.operands[0], kind), b.read(b.operands[1], kind)
    ufunc = np.subtract if back else np.add

    def run(V: Slots, m: Mask) -> None:
        ufunc(V[x], window, out=V[d], where=m)

    return run


def map_to_rank(b: Build) -> Closure:
    """mapa: the shared::cluster address of the same variable in another block of the cluster."""
    kind = b.type()
    if not b.take("shared::cluster"):
        raise b.unknown("a generic address")
    b.done(3)
    d, x, rank = b.write(b.operands[0], kind), b.read(b.operands[1], kind), b.read(b.operands[2], "u32")

    def run(V: Slots, m: Mask) -> None:
        address = np.asarray(V[x]).astype(np.uint64) & np.uint64(0xFFFFFF)
        moved = address | np.asarray(V[rank]).astype(np.uint64) + np.uint64(1) << np.uint64(24)
        np.copyto(V[d], moved, where=m, casting="unsafe")

    return run


def advice(b: Build) -> Closure:
    """An instruction without effect on results."""
    return lambda V, m: None


def policy(b: Build) -> Closure:
    """createpolicy: a cache policy, which changes nothing here."""
    d = b.write(b.operands[0], "b64")

    def run(V: Slots, m: Mask) -> None:
        np.copyto(V[d], np.uint64(0), where=m)

    return run


def sleep(b: Build) -> May:
    """nanosleep: what a warp does that polls."""

    def run(V: Slots, m: Mask) -> Asleep:
        cluster = V[0].block.cluster
        return Asleep(cluster, cluster.events)

    return May(run)


def kernel_trap(b: Build) -> Closure:
    def run(V: Slots, m: Mask) -> None:
        raise KernelTrap("the kernel executed trap")

    return run


TABLE: dict[str, Callable[[Build], Closure]] = {
    "mov": move,
    "cvta": to_generic_or_back,
    "mapa": map_to_rank,
    "prefetch": advice,
    "prefetchu": advice,
    "nanosleep": sleep,
    "discard": advice,
    "applypriority": advice,
    "createpolicy": policy,
    "trap": kernel_trap,
}
