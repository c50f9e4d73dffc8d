"""A specialised kernel in one description: who its warps are, what they hand each other, and where they meet.

What is planned, emitted, printed and checked about roles comes from here: threads, registers per thread (setmaxnreg),
the members of the emitted `Shared` and their bytes, barriers with the arrivals that each counts, the dispatch of warps,
ids of named barriers.  Models: CUTLASS' PipelineTmaAsync (producer group, consumer group), Pallas' plgpu.Barrier
(arrivals).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

from flashgen.lang.expr import DType
from flashgen.planning.arch import Arch

#: Threads of a warp, and of a warpgroup, whose warps have as many registers each.
WARP, WARPGROUP = 32, 128

#: The C++ type of an element, by its dtype.
CTYPES = {DType.BOOL: "bool", DType.INT32: "int", DType.INT64: "i64", DType.FLOAT32: "float"}

#: Warps of a warpgroup that nothing is asked of.
IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Warps of a block that do one job.

    `threads` of them run (a loader is one thread); `registers` is what a thread of them may hold, None where the
    compiler chooses for the whole block.
    """

    name: str
    warps: int
    threads: int
    registers: int | None = None

    @property
    def single(self) -> bool:
        """Whether one thread does all."""
        return self.threads == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An extent of an array in shared memory: its size, how the emitted text says it, and the index of a loop."""

    size: int
    text: str
    index: str = "i"

    @property
    def loop(self) -> str:
        """The head of a loop over it."""
        return f"for (int {self.index} = 0; {self.index} < {self.text}; {self.index}++) "


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of `Shared`; `size` in bytes of one element and its alignment."""

    ctype: str
    name: str
    size: int
    alignment: int
    axes: tuple[Axis, ...] = ()

    @property
    def text(self) -> str:
        """Its name and extents, as declared."""
        return self.name + "".join(f"[{axis.text}]" for axis in self.axes)

    @property
    def bytes(self) -> int:
        return self.size * math.prod(axis.size for axis in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Members of one type that stand on one line of `Shared`."""

    members: tuple[Member, ...]
    note: str = ""

    @property
    def ctype(self) -> str:
        return self.members[0].ctype


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A role at one end of a ring, and how many of its warps arrive, by one lane each; 0: it waits, and what tells that
    it is done is another's arrival."""

    role: str
    arrivals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Stages of shared memory that go round: a producer fills one, arrives at its `full`, and consumers wait for that.

    Where consumers arrive when they are done, the ring has `empty` barriers, for which the producer waits before it
    fills a stage again; else `freed` says how it knows.  `each` is the axis of several such rings, one a warpgroup;
    `counter` a word in shared memory that counts its stages, 0 at first.
    """

    name: str
    carries: str
    stages: Axis
    producers: tuple[Party, ...]
    consumers: tuple[Party, ...]
    each: Axis | None = None
    barrier: str = ""  # the member of `Shared`; none: copies of cp.async, and all warps meet
    freed: str = ""
    counter: str = ""
    note: str = ""

    @property
    def full(self) -> int:
        """Arrivals that end a phase of `full`."""
        return sum(party.arrivals for party in self.producers)

    @property
    def empty(self) -> int:
        """Arrivals that end a phase of `empty`; 0: there is none."""
        return sum(party.arrivals for party in self.consumers)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those of the array of barriers: a Pipe holds the barriers of all stages."""
        stages = (self.stages,) if self.stages.text and not self.empty else ()
        return (*stages, *((self.each,) if self.each else ()))

    @property
    def indices(self) -> str:
        """Those of the loops over its barriers."""
        return "".join(f"[{axis.index}]" for axis in self.axes)

    @property
    def loops(self) -> str:
        """Loops over its barriers within that which it shares with other rings."""
        return "".join(axis.loop for axis in self.axes[:-1])

    @property
    def initialised(self) -> str:
        """The function that initialises its barriers."""
        if not self.empty:
            return "mbarrier_init"
        return "init" if self.full == 1 else "init_filled_by"

    @property
    def more(self) -> str:
        """What that takes beside the arrivals which end a phase of `empty`."""
        return f", {self.full}" if self.empty and self.full > 1 else ""

    @property
    def member(self) -> Member:
        """The barriers in shared memory."""
        if self.empty:
            size, ctype = 16 * self.stages.size, f"Pipe<{self.stages.text}>"
        else:
            size, ctype = 8, "u64"
        return Member(ctype=ctype, name=self.barrier, size=size, alignment=8, axes=self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Rings whose barriers are initialised in one loop over an axis; None: in no loop."""

    axis: Axis | None
    rings: tuple[Ring, ...]

    @property
    def braces(self) -> bool:
        """Whether the loop has more than one statement."""
        return self.axis is not None and (len(self.rings) > 1 or bool(self.rings[0].counter))

    @property
    def head(self) -> str:
        """What stands before the first statement."""
        if self.axis is None:
            return ""
        return f"    {self.axis.loop}" + "{\n" * self.braces

    @property
    def margin(self) -> str:
        """What stands before each statement."""
        if self.axis is None:
            return "    "
        return "      " * self.braces

    @property
    def tail(self) -> str:
        """What stands behind the last."""
        return "    }\n" * self.braces


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBarrier:
    """A barrier of hardware, by id (0 is that of __syncthreads): `warps` of these roles arrive there or wait."""

    name: str
    id: int
    warps: int
    roles: tuple[str, ...]
    why: str

    @property
    def threads(self) -> int:
        return WARP * self.warps


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the warps of a block do, in the order of their numbers, and how they take turns.

    `rings` stand in the order in which their barriers are initialised, `shared` has the members of `Shared` in order.
    `dispatch` are the chains of if and else by which the warps of the first warpgroup find their roles: another chain
    is other machine code.  `names` are numbers of arrivals that the emitted text has a name for.
    """

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...] = ()
    named_barriers: tuple[NamedBarrier, ...] = ()
    shared: tuple[Declaration, ...] = ()
    dispatch: tuple[tuple[str, ...], ...] = ()
    names: tuple[Axis, ...] = ()

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def specialised(self) -> bool:
        """Whether warps have registers by their role."""
        return any(role.registers for role in self.roles)

    @property
    def consumers(self) -> tuple[Role, ...]:
        """The roles of all warpgroups but the first, which may take registers from that."""
        return tuple(role for role in self.roles if self.first_thread(role.name) >= WARPGROUP)

    @property
    def producer_registers(self) -> int | None:
        """Registers per thread of the first warpgroup after its setmaxnreg."""
        return self.roles[0].registers

    @property
    def consumer_registers(self) -> int | None:
        """Registers per thread of the other warpgroups after theirs."""
        return self.roles[-1].registers

    def text(self) -> str:
        """Every role with its warps and registers per thread, in a line."""
        said, unit = [], " registers per thread"
        for registers, roles in groupby(self.roles, key=lambda role: role.registers):
            counts = Counter[str]()
            for role in roles:
                counts[role.name] += role.warps
            idle = counts.pop(IDLE, 0)
            names = [*counts.items(), *([(IDLE, idle)] if idle else [])]
            kinds = ", ".join(f"{warps} {name}" for name, warps in names)
            held = f" of {registers}{unit}" if registers else ""
            said.append(f"{kinds} warp{'s' * (names[-1][1] > 1)}{held}")
            unit = ""
        return "; ".join(said)

    def role(self, name: str) -> Role:
        return _named(self.roles, name)

    def has(self, name: str) -> bool:
        """Whether there is a role of this name."""
        return any(role.name == name for role in self.roles)

    def first_warp(self, name: str) -> int:
        """The number of a role's first warp."""
        return sum(role.warps for role in self.roles[: self.roles.index(self.role(name))])

    def first_thread(self, name: str) -> int:
        return WARP * self.first_warp(name)

    def threads_of(self, name: str) -> str:
        """What tells the threads of a role of the first warpgroup from all others, by threadIdx.x."""
        role, first = self.role(name), self.first_thread(name)
        end = first + WARP * role.warps
        if role.single:
            return f"== {first}"
        if first == 0:
            return f"< {end}"
        if end == WARPGROUP:
            return f">= {first}"
        return f"/ {WARP} == {first // WARP}" if role.warps == 1 else f">= {first} && threadIdx.x < {end}"

    def ring(self, name: str) -> Ring:
        return _named(self.rings, name)

    def named_barrier(self, name: str) -> NamedBarrier:
        """The first of this name: that of the first warpgroup."""
        return _named(self.named_barriers, name)

    def spelled(self, arrivals: int) -> str:
        """A number of arrivals as the emitted text says it."""
        for name in sorted(self.names, key=lambda n: -n.size):
            if name.size <= arrivals:
                more = arrivals - name.size
                return f"{name.text} + {more}" if more else name.text
        return str(arrivals)

    @property
    def starts(self) -> Iterator[Start]:
        """Rings whose barriers are initialised together."""
        for axis, rings in groupby(self.rings, key=lambda ring: ring.axes[-1] if ring.axes else None):
            yield Start(axis=axis, rings=tuple(rings))

    def shared_bytes(self, alignment: int) -> int:
        """sizeof(Shared), which is a multiple of `alignment`."""
        end = 0
        for member in self._members:
            end = _up(end, member.alignment) + member.bytes
        return _up(end, alignment)

    def control_bytes(self, alignment: int) -> int:
        """What `Shared` has beside its tiles, which are aligned to so much: barriers, messages, and padding."""
        tiles = sum(member.bytes for member in self._members if member.alignment == alignment)
        return self.shared_bytes(alignment) - tiles

    @property
    def _members(self) -> Iterator[Member]:
        return (member for declaration in self.shared for member in declaration.members)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=_Named)


def _named(all_of: tuple[_N, ...], name: str) -> _N:
    """The first of this name."""
    for one in all_of:
        if one.name == name:
            return one
    raise KeyError(name)


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def declared(*members: Member, note: str = "") -> Declaration:
    """A line of `Shared`."""
    return Declaration(members=members, note=note)


def consumer_registers(arch: Arch, warpgroups: int, producer: int) -> int:
    """Registers per thread of `warpgroups` consumers beside a producer warpgroup that keeps so many.

    A block starts with the registers of the SM divided by its threads, rounded down to a multiple of 8; what the
    producers give back the consumers take, and never more.
    """
    threads = WARPGROUP * (1 + warpgroups)
    pool = arch.registers_per_sm // threads // 8 * 8 * threads
    return (pool - WARPGROUP * producer) // (WARPGROUP * warpgroups) // 8 * 8
