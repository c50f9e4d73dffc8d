"""Fences.  An interpreter does one thing at a time: they have an effect on clocks alone, of races and of order."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.interpreter.build import Build, Closure
from flashgen.interpreter.registers import Mask, Slots

_ORDER = ("sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl")


def fence(b: Build) -> Closure:
    within_block = "cta" in b.mods
    b.drop(*_ORDER)
    b.done(0)

    def run(V: Slots, m: Mask) -> None:
        block = V[0].block
        order = block.launch.memory.account.order
        if order is not None and not within_block:
            order.fence(block.number)

    return run


def proxy_fence(b: Build) -> Closure:
    """fence.proxy.async: generic accesses known so far are visible to the async proxy."""
    if not b.take("async"):
        if b.take("tensormap::generic"):
            raise b.unknown("a fence for tensor maps in memory")
        if not b.take("alias"):
            raise b.unknown("this proxy")
    b.drop("global", "shared::cta", "shared::cluster")
    b.done(0)
    return _to_async


def barrier_init_fence(b: Build) -> Closure:
    b.drop("release", "cluster")
    b.done(0)
    return _to_async


def _to_async(V: Slots, m: Mask) -> None:
    group = V[0]
    races = group.block.cluster.races
    if races is not None:
        rows = group.rows if m is True else group.rows[m.any(1)]
        races.proxy_fence(rows + group.block.first_row)


TABLE: dict[str, Callable[[Build], Closure]] = {
    "fence": fence,
    "membar": fence,
    "fence.proxy": proxy_fence,
    "fence.mbarrier_init": barrier_init_fence,
}
