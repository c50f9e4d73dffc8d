"""Happens-before between warps: vector clocks, and a shadow of shared memory that remembers who touched what.

The method is FastTrack's (Flanagan and Freund, 2009): a write is remembered as one epoch (agent, time), reads as the
last time of each reader.  A warp counts as one thread, except that lanes of one warp which pass data to each other
need a `bar.warp.sync` (or any barrier) between.

Agents that write: each warp, the atomics of each warp (which no barrier need order among themselves), the cp.async of
each warp (time: its group number), each mbarrier (time: the phase that completes when its copies have landed).
Agents that read: each warp, the wgmma of each warp and the bulk stores of each warp (time: their group number).

A second set of clocks holds what is visible to the async proxy: fence.proxy.async by a warp copies what that warp
knows into it, and barriers carry it along.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.interpreter.errors import MissingFence, NotComplete, Race, Trap, Uninitialised

#: An epoch is agent << SHIFT | time; 0 means never written.
SHIFT = 40
_TIME = (1 << SHIFT) - 1
_NEVER = np.int64(-1)


class Shadow:
    """What is remembered of each granule of one block's shared memory."""

    __slots__ = ("flat_reads", "lane", "line", "readers", "reads", "written")

    def __init__(self, granules: int, readers: int) -> None:
        self.written = np.zeros(granules, np.int64)
        self.lane = np.zeros(granules, np.int8)
        self.line = np.zeros(granules, np.int32)
        self.reads = np.zeros((granules, readers), np.int32)
        self.flat_reads = self.reads.reshape(-1)
        self.readers = readers


class Clocks:
    """A snapshot of what an agent knows: generic and async-proxy visible times of every agent."""

    __slots__ = ("generic", "proxy")

    def __init__(self, agents: int) -> None:
        self.generic = np.zeros(agents, np.int64)
        self.proxy = np.zeros(agents, np.int64)

    def join(self, generic: np.ndarray, proxy: np.ndarray) -> None:
        np.maximum(self.generic, generic, out=self.generic)
        np.maximum(self.proxy, proxy, out=self.proxy)

    def copy(self) -> Clocks:
        out = Clocks(0)
        out.generic, out.proxy = self.generic.copy(), self.proxy.copy()
        return out


class Races:
    """Clocks of all warps of a cluster.  Rows are warps, numbered over the blocks of the cluster."""

    MBARRIERS = 160
    SHIFT = SHIFT

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.wgmma = rows
        self.bulk = 2 * rows
        self.cp_async = 3 * rows
        self.atomic = 4 * rows
        self.mbarrier = 5 * rows
        self.agents = 5 * rows + self.MBARRIERS + 1
        self.pending = self.agents - 1  # writes in flight: nobody ever knows of them
        self.barriers = 0
        self.generic = np.zeros((rows, self.agents), np.int64)
        self.proxy = np.zeros((rows, self.agents), np.int64)
        self.generic[:, self.pending] = self.proxy[:, self.pending] = _NEVER
        every = np.arange(rows)
        self.generic[every, every] = 1
        self.pending_epoch = np.int64(self.pending << SHIFT | 1)

    def shadow(self, granules: int) -> Shadow:
        return Shadow(granules, 3 * self.rows)

    def new_barrier(self) -> int:
        """The agent number of a new mbarrier."""
        if self.barriers == self.MBARRIERS:
            raise Trap(f"more than {self.MBARRIERS} mbarriers in one cluster")
        self.barriers += 1
        return self.mbarrier + self.barriers - 1

    def clocks(self) -> Clocks:
        return Clocks(self.agents)

    # ------------------------------------------------------------ order
    def release(self, row: int, into: Clocks) -> None:
        """All that `row` did so far is known to whoever acquires `into`."""
        into.join(self.generic[row], self.proxy[row])
        self.generic[row, row] += 1

    def acquire(self, row: int, clocks: Clocks) -> None:
        np.maximum(self.generic[row], clocks.generic, out=self.generic[row])
        np.maximum(self.proxy[row], clocks.proxy, out=self.proxy[row])

    def warp_sync(self, rows: np.ndarray) -> None:
        """Lanes of a warp met: later accesses are ordered after earlier ones."""
        self.generic[rows, rows] += 1

    def proxy_fence(self, rows: np.ndarray) -> None:
        """fence.proxy.async: what these warps know becomes visible to the async proxy."""
        self.proxy[rows] = np.maximum(self.proxy[rows], self.generic[rows])

    def finish(self, row: int, agent: int, time: int) -> None:
        """A warp waited for its own asynchronous group."""
        if self.generic[row, agent] < time:
            self.generic[row, agent] = time

    # ------------------------------------------------------------ accesses
    def read(self, shadow: Shadow, where: np.ndarray, rows: np.ndarray, lanes: Any) -> None:
        """Warps `rows` read the granules `where` through the generic proxy (arrays of one length)."""
        epoch = shadow.written[where]
        own = self.generic[rows, rows]
        agent = epoch >> SHIFT
        ok = self.generic[rows, agent] >= epoch & _TIME
        if not ok.all() or not epoch.all():
            self._explain_read(shadow, where, rows, epoch, ok, "reads")
        same = epoch == rows << SHIFT | own
        if same.any():
            other = same & (shadow.lane[where] != lanes)
            if other.any():
                at = int(other.argmax())
                raise Race(
                    f"lane {np.broadcast_to(lanes, where.shape)[at]} reads shared memory that lane"
                    f" {shadow.lane[where[at]]} of its warp wrote (PTX line {shadow.line[where[at]]})"
                    " with no bar.warp.sync between"
                )
        shadow.flat_reads[where * shadow.readers + rows] = own

    def read_async(
        self, shadow: Shadow, where: np.ndarray, rows: np.ndarray, kind: int, times: np.ndarray | int
    ) -> None:
        """Asynchronous operations of warps `rows` read all granules `where` through the async proxy.

        They go on until the agent `kind + row` reaches the group number of `times`.
        """
        epoch = shadow.written[where]
        writer, time = epoch >> SHIFT, epoch & _TIME
        every = rows.tolist()  # row by row: a gather or a scatter of both dimensions takes four times as long
        written = epoch.all()
        for row in every:
            ok = self.generic[row].take(writer) >= time
            if not written or not ok.all():
                who = np.full(where.shape, row)
                self._explain_read(shadow, where, who, epoch, ok, "reads through the async proxy")
        landed = writer >= self.mbarrier
        for row in every if not landed.all() else ():
            ok = landed | (self.proxy[row].take(writer) >= time)
            if not ok.all():
                at = int((~ok).argmax())
                raise MissingFence(
                    f"the async proxy reads shared memory written by {self.name(int(writer[at]))}"
                    f" (PTX line {shadow.line[where[at]]}) with no fence.proxy.async between"
                )
        for row, last in zip(every, np.broadcast_to(times, rows.shape), strict=True):
            shadow.reads[:, kind + row][where] = last

    def write(self, shadow: Shadow, where: np.ndarray, rows: np.ndarray, lanes: Any, line: int) -> None:
        """Warps `rows` write granules through the generic proxy."""
        self.check_write(shadow, where, rows)
        epoch = rows << SHIFT | self.generic[rows, rows]
        shadow.written[where] = epoch
        shadow.lane[where] = lanes
        shadow.line[where] = line
        clash = shadow.written[where] != epoch
        if clash.any():
            at = int(clash.argmax())
            raise Race(f"two warps write the same shared memory at once: {self.name(int(rows[at]))} and another")

    def atomic_update(self, shadow: Shadow, where: np.ndarray, rows: np.ndarray, line: int) -> None:
        """Warps `rows` update granules atomically: ordered after every access that is no atomic."""
        epoch = shadow.written[where]
        writer = epoch >> SHIFT
        ok = (self.generic[rows, writer] >= epoch & _TIME) | ((writer >= self.atomic) & (writer < self.mbarrier))
        if not ok.all() or not epoch.all():
            self._explain_read(shadow, where, rows, epoch, ok, "updates")
        self._check_reads(shadow, where, rows)
        times = self.generic[rows, rows]
        self.generic[rows, self.atomic + rows] = times
        shadow.written[where] = (self.atomic + rows) << SHIFT | times
        shadow.line[where] = line

    def check_write(self, shadow: Shadow, where: np.ndarray, rows: np.ndarray) -> None:
        """A write by `rows` is ordered after every earlier access."""
        epoch = shadow.written[where]
        ok = self.generic[rows, epoch >> SHIFT] >= epoch & _TIME
        if not ok.all():
            at = int((~ok).argmax())
            self._raise(int(rows[at]), "writes", int(epoch[at]), int(shadow.line[where[at]]))
        self._check_reads(shadow, where, rows)

    def _check_reads(self, shadow: Shadow, where: np.ndarray, rows: np.ndarray) -> None:
        late = shadow.reads[where] > self.generic[rows, : shadow.readers]
        if late.any():
            at, reader = (int(x) for x in np.argwhere(late)[0])
            kind = "is still reading" if reader >= self.rows else "read"
            raise Race(
                f"{self.name(int(rows[at]))} writes shared memory that {self.name(reader)} {kind}:"
                " no barrier orders the write after the read"
            )

    def write_pending(self, shadow: Shadow, where: np.ndarray, row: int, line: int) -> None:
        """An asynchronous write by warp `row` begins: it is ordered like a write of that warp, and lands later."""
        self.check_write(shadow, where, np.full(where.shape, row))
        shadow.written[where] = self.pending_epoch
        shadow.line[where] = line

    # ------------------------------------------------------------ words
    def name(self, agent: int) -> str:
        if agent >= self.pending:
            return "an asynchronous copy"
        if agent >= self.mbarrier:
            return "a bulk copy"
        kind, row = divmod(agent, self.rows)
        return ("", "wgmma of ", "a bulk store of ", "cp.async of ", "an atomic of ")[kind] + f"warp {row}"

    def _explain_read(
        self, shadow: Shadow, where: np.ndarray, rows: np.ndarray, epoch: np.ndarray, ok: np.ndarray, verb: str
    ) -> None:
        unwritten = epoch == 0
        if unwritten.any():
            raise Uninitialised(f"{self.name(int(rows[unwritten.argmax()]))} {verb} shared memory that nothing wrote")
        at = int((~ok).argmax())
        self._raise(int(rows[at]), verb, int(epoch[at]), int(shadow.line[where[at]]))

    def _raise(self, row: int, verb: str, epoch: int, line: int) -> None:
        writer = epoch >> SHIFT
        place = f" (PTX line {line})" if line else ""
        if writer == self.pending:
            raise NotComplete(f"{self.name(row)} {verb} shared memory that a bulk copy{place} has still to write")
        if writer >= self.mbarrier:
            raise NotComplete(
                f"{self.name(row)} {verb} shared memory written by a bulk copy{place} without waiting for its mbarrier"
            )
        if self.cp_async <= writer < self.atomic:
            whose = "it" if writer - self.cp_async == row else "its warp, or no barrier followed"
            raise NotComplete(
                f"{self.name(row)} {verb} shared memory written by {self.name(writer)}{place}: {whose} has not waited"
                f" for group {epoch & _TIME}"
            )
        raise Race(f"{self.name(row)} {verb} shared memory that {self.name(writer)} wrote{place}: no barrier between")
