"""A KernelPlan compiled (through the disk cache), loaded on the GPUs that call it, and launched from records.

A record is a `Launch` as the driver takes it: calling it again writes addresses and scalars into the packed parameters
and starts the kernels.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen import codegen
from flashgen.codegen import params
from flashgen.locks import Lock
from flashgen.runtime import cache, driver, nvrtc
from flashgen.runtime.launch import main_entry, picker, pointers, scalars

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.launch import Launch, LaunchGrid

#: By plan, and by the id of the plan that its slot keeps: to hash one takes microseconds.
_kernels: dict[KernelPlan | int, _Slot] = {}
_slots = Lock()


class _Shared:
    """What the records of a kernel on one GPU share: how parameters are packed, and what starts its entries, which one
    call at a time does.  The rest of a record follows from its launch.

    Addresses are those of `Launch.pointers`, numbers those of `Launch.scalars`.
    """

    __slots__ = (
        *("_first", "_load", "_maps_bytes", "_pack", "_pack_pointers", "_pick_numbers", "_pick_pointers", "_room"),
        *("_scalars", "lock", "main", "maps", "of_maps", "starts"),
    )

    def __init__(self, plan: KernelPlan, device: int, load: Callable[[LaunchGrid], driver.Function]) -> None:
        members, known = params.fields(plan), pointers(plan)
        place, end = {}, 0  # the struct has no padding before its end
        for member in members:
            place[member.name] = member.format, end
            end += struct.calcsize(f"<{member.format}")
        of_pointers = [m.name for m in members if m.ctype.endswith("*")]  # they stand first
        self._pack_pointers = struct.Struct(f"<{len(of_pointers)}Q").pack_into
        self._pick_pointers = operator.itemgetter(*map(known.index, of_pointers))
        numbers = members[len(of_pointers) :]
        self._pick_numbers = picker(plan, [m.name for m in numbers])
        self._pack = struct.Struct("<" + "".join(m.format for m in numbers)).pack_into
        self._first = 8 * len(of_pointers)
        self._scalars = list(_runs([place[name] for name in scalars(plan)]))
        maps = params.maps(plan)
        #: What picks the addresses of the tensors of maps among all; None where there are no maps.
        self.of_maps = operator.itemgetter(*map(known.index, maps)) if maps else None
        self.maps = driver.maps(device) if maps else None
        self._maps_bytes = driver.TENSOR_MAP_BYTES * len(maps)
        room = self._maps_bytes + (driver.TENSOR_MAP_ALIGNMENT if maps else 0)
        self._room = ctypes.c_char * (room + params.sizeof(plan))
        self._load, self.main = load, main_entry(plan)
        self.starts: dict[str, driver.Launcher] = {}
        self.lock = threading.Lock()

    def room(self, numbers: tuple[int | float, ...]) -> tuple[ctypes.Array, int, int]:
        """Memory of a launch's tensor maps, and of its parameters without its addresses behind them; the address where
        the maps start, and the place where the parameters do."""
        buffer, of_maps = self._room(), self._maps_bytes
        start = at = ctypes.addressof(buffer)
        if of_maps:
            at = start + -start % driver.TENSOR_MAP_ALIGNMENT
        first = at - start + of_maps
        self._pack(buffer, first + self._first, *self._pick_numbers(numbers))
        return buffer, at, first

    def start(self, grid: LaunchGrid) -> driver.Launcher:
        """What starts an entry, loaded by the first launch that has it."""
        if grid.entry in self.starts:
            return self.starts[grid.entry]
        made = driver.Launcher(self._load(grid), threads=grid.threads, early=grid.early)
        return self.starts.setdefault(grid.entry, made)

    def point(self, buffer: ctypes.Array, first: int, addresses: tuple[int, ...]) -> None:
        self._pack_pointers(buffer, first, *self._pick_pointers(addresses))

    def count(self, buffer: ctypes.Array, first: int, numbers: tuple[int | float, ...]) -> None:
        if len(self._scalars) == 1:
            ((pack_into, offset, _),) = self._scalars
            pack_into(buffer, first + offset, *numbers)
            return
        start = 0
        for pack_into, offset, end in self._scalars:
            pack_into(buffer, first + offset, *numbers[start:end])
            start = end


def _runs(places: list[tuple[str, int]]) -> Iterator[tuple[Callable[..., None], int, int]]:
    """What packs members of these formats and offsets, together where they lie side by side in this order: that, where
    it starts, and how many members end with it."""
    formats, start, end = "", 0, 0
    for number, (format_, offset) in enumerate(places):
        if formats and offset != end:
            yield struct.Struct(f"<{formats}").pack_into, start, number
            formats = ""
        if not formats:
            start = offset
        formats, end = formats + format_, offset + struct.calcsize(f"<{format_}")
    if formats:
        yield struct.Struct(f"<{formats}").pack_into, start, len(places)


class Record:
    """A launch on one GPU with everything in place but addresses and scalars; any thread may call it.

    What the call before it left in place is not written again.  A new length is one more record of thousands: it has
    its parameters and tensor maps, and shares the rest.
    """

    __slots__ = (*("_addresses", "_buffer", "_descs", "_first", "_mapped", "_maps", "_numbers", "_shared", "_starts"),)

    def __init__(self, launch: Launch, shared: _Shared) -> None:
        _, grids, values, descs, _, _ = launch
        starts, main = shared.starts, shared.main
        self._shared = shared
        self._buffer, at, self._first = shared.room(values.numbers)
        behind = at + driver.TENSOR_MAP_BYTES * len(descs)
        #: Where its tensor maps are, and what they are made of; where their tensors lie, once they are made.
        self._maps, self._descs = range(at, behind, driver.TENSOR_MAP_BYTES), descs
        self._mapped: list[int] | None = None
        of_main, of_others, self._starts = (*self._maps, behind), (behind,), []
        for grid in grids:
            entry, blocks, _, _, _ = grid
            if blocks > driver.MAX_BLOCKS:
                driver.check_blocks(entry, blocks)
            start = starts.get(entry) or shared.start(grid)
            self._starts.append((start, blocks, of_main if entry == main else of_others))
        self._addresses: tuple[int, ...] | None = None
        self._numbers: tuple[int | float, ...] | None = None

    def __call__(self, addresses: tuple[int, ...], numbers: tuple[int | float, ...], stream: int) -> None:
        """Start its kernels, one after the other, on a stream of the GPU that the record is for.

        `addresses` are those of `launch.pointers`, `numbers` those of `launch.scalars`: the tuple of an earlier call
        stands for what is in it.  Raises LaunchError with the driver's reason, the first time where TMA cannot address
        a tensor (its pipeline's `cannot_address` says so before).
        """
        shared = self._shared
        with shared.lock:
            if addresses != self._addresses:
                self._addresses = None  # until all of them are in place
                if shared.of_maps is not None:
                    self._map(list(shared.of_maps(addresses)))
                shared.point(self._buffer, self._first, addresses)
                self._addresses = addresses
            if numbers is not self._numbers:  # equal ones may differ: 0.0 and -0.0
                self._numbers = None
                shared.count(self._buffer, self._first, numbers)
                self._numbers = numbers
            for start, blocks, parameters in self._starts:
                start(stream, blocks, parameters)

    def _map(self, addresses: list[int]) -> None:
        """Have its tensor maps point to tensors at these addresses."""
        known, maps = self._mapped, self._shared.maps
        assert maps is not None  # its kernel takes some
        if known is None:
            first = self._first - driver.TENSOR_MAP_BYTES * len(addresses)
            places = range(first, self._first, driver.TENSOR_MAP_BYTES)
            maps.encode(self._buffer, places, self._descs, addresses)
            self._mapped, self._descs = addresses, ()  # they are not kept
            return
        for i, address in enumerate(addresses):
            if address != known[i]:
                maps.move(self._maps[i], address)
                known[i] = address


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled plan: its cubin and what it uses, loaded once on each GPU that asks."""

    plan: KernelPlan
    entry: cache.Entry
    _functions: dict[tuple[int, str], driver.Function] = field(default_factory=dict, repr=False, compare=False)
    _shared: dict[int, _Shared] = field(default_factory=dict, init=False, repr=False, compare=False)
    _loading: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def cubin(self) -> bytes:
        return self.entry.cubin

    @property
    def resources(self) -> nvrtc.Resources:
        return self.entry.resources

    def function(self, device: int, entry: str, smem_bytes: int) -> driver.Function:
        """An entry in the context of GPU `device`, ready for `smem_bytes` of dynamic shared memory.

        Raises LaunchError where it cannot be loaded there.
        """
        found = self._functions.get((device, entry))
        if found is None:
            with self._loading:
                found = self._functions.get((device, entry))
                if found is None:
                    found = driver.load(self.cubin, entry, smem_bytes=smem_bytes, device=device)
                    self._functions[device, entry] = found
        return found

    def record(self, launch: Launch, device: int) -> Record:
        """A launch of this kernel's plan on GPU `device`.

        Raises LaunchError where a kernel cannot be loaded, or a grid would be too wide.
        """
        shared = self._shared.get(device)
        if shared is None:

            def load(grid: LaunchGrid) -> driver.Function:
                return self.function(device, grid.entry, grid.smem_bytes)

            shared = self._shared.setdefault(device, _Shared(self.plan, device, load))
        return Record(launch, shared)


@dataclass(slots=True)
class _Slot:
    """A kernel of this process, or the place where the first thread that needs it builds it."""

    plan: KernelPlan
    lock: threading.Lock = field(default_factory=threading.Lock)
    kernel: Kernel | None = None


def load(plan: KernelPlan) -> Kernel:
    """The plan's kernel: of this process, else of the disk cache, else compiled now.  Threads that meet build it once.

    Raises CompileError.
    """
    slot = _kernels.get(id(plan)) or _kernels.get(plan)
    if slot is None:
        with _slots:
            slot = _kernels.setdefault(plan, _Slot(plan))
            _kernels.setdefault(id(slot.plan), slot)
    if slot.kernel is not None:
        return slot.kernel
    with slot.lock:
        if slot.kernel is None:
            slot.kernel = Kernel(plan=plan, entry=build(plan))
        return slot.kernel


def build(plan: KernelPlan, facts: Facts | None = None) -> cache.Entry:
    """The plan's cubin out of the disk cache, where a hit renders nothing, else emitted, compiled and put there.

    `facts` are the variant's, where the caller has them.  `about["seconds"]` says what emitting and compiling took when
    it was made.  Raises CompileError.
    """

    def make() -> tuple[nvrtc.Compiled, dict[str, object]]:
        start = time.perf_counter()
        source = codegen.emit(plan, facts)
        emitted = time.perf_counter() - start
        compiled = nvrtc.compile(source, plan.arch, name=re.sub(r"\W", "_", f"{plan.variant.name}_{plan.pass_name}"))
        return compiled, {**_about(plan), "seconds": {"emit": emitted, "nvrtc": compiled.seconds}}

    return cache.default().fetch(cache.key(plan), make)


def _about(plan: KernelPlan) -> dict[str, object]:
    """What the sidecar tells a person."""
    variant = plan.variant
    return {
        "variant": variant.name,
        "spec": f"{variant.where.path}:{variant.where.line}" if variant.where else None,
        "arch": plan.arch,
        "nvrtc": nvrtc.version(),
        "plan": cache.as_data(plan),
    }


def _after_fork() -> None:
    """What threads of the parent were building is built anew in the child, where nobody would free their locks."""
    for key, slot in list(_kernels.items()):
        if slot.kernel is None:
            del _kernels[key]


os.register_at_fork(after_in_child=_after_fork)
