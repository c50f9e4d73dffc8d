"""A KernelPlan compiled (through the disk cache), loaded on the GPUs that call it, and launched from records.

A record is a `Launch` as the driver takes it: calling it again writes addresses and scalars into the packed parameters
and starts the kernels.
"""

from __future__ import annotations

import ctypes
import operator
import re
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen import codegen
from flashgen.codegen import params
from flashgen.runtime import cache, driver, nvrtc
from flashgen.runtime.launch import pointers, scalars

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.launch import Launch

#: By plan, and by the id of the plan that its slot keeps: to hash one takes microseconds.
_kernels: dict[KernelPlan | int, _Slot] = {}
_slots = threading.Lock()


class _Packing:
    """How the launches of a plan pack their parameters: what does not depend on a problem.

    Addresses are those of `Launch.pointers`, numbers those of `Launch.scalars`.
    """

    __slots__ = (
        *("_buffer", "_first", "_pack", "_pack_pointers", "_pick_numbers", "_pick_pointers", "_scalars", "places"),
    )

    def __init__(self, plan: KernelPlan) -> None:
        members, known = params.fields(plan), pointers(plan)
        place, end = {}, 0  # the struct has no padding before its end
        for member in members:
            place[member.name] = member.format, end
            end += struct.calcsize(f"<{member.format}")
        of_pointers = [m.name for m in members if m.ctype.endswith("*")]  # they stand first
        self._buffer = ctypes.c_char * params.sizeof(plan)
        self._pack_pointers = struct.Struct(f"<{len(of_pointers)}Q").pack_into
        self._pick_pointers = operator.itemgetter(*map(known.index, of_pointers))
        numbers = members[len(of_pointers) :]
        self._pick_numbers = operator.itemgetter(*[m.name for m in numbers])
        self._pack = struct.Struct("<" + "".join(m.format for m in numbers)).pack_into
        self._first = 8 * len(of_pointers)
        self._scalars = [(struct.Struct(f"<{place[name][0]}").pack_into, place[name][1]) for name in scalars(plan)]
        #: Where the addresses of the tensors of maps stand among all.
        self.places = [known.index(name) for name in params.maps(plan)]

    def of(self, launch: Launch) -> ctypes.Array:
        """The parameters of a launch, without its addresses."""
        buffer = self._buffer()
        self._pack(buffer, self._first, *self._pick_numbers(launch.values))
        return buffer

    def point(self, buffer: ctypes.Array, addresses: tuple[int, ...]) -> None:
        self._pack_pointers(buffer, 0, *self._pick_pointers(addresses))

    def count(self, buffer: ctypes.Array, numbers: tuple[int | float, ...]) -> None:
        for (pack_into, offset), number in zip(self._scalars, numbers, strict=True):
            pack_into(buffer, offset, number)


class Record:
    """A launch on one GPU with everything in place but addresses and scalars; any thread may call it.

    What the call before it left in place is not written again, and the launch is not kept: a new length is one more of
    thousands.
    """

    __slots__ = ("_addresses", "_buffer", "_launchers", "_lock", "_maps", "_numbers", "_packing")

    def __init__(self, launch: Launch, packing: _Packing, functions: Sequence[driver.Function], device: int) -> None:
        self._packing = packing
        self._buffer = packing.of(launch)
        self._maps = driver.TensorMaps(launch.maps, device=device) if launch.maps else None
        maps, params = () if self._maps is None else self._maps.pointers, ctypes.addressof(self._buffer)
        self._launchers = [
            driver.Launcher(
                function,
                blocks=grid.blocks,
                threads=grid.threads,
                early=grid.early,
                arguments=(*maps, params) if launch.maps_of(grid) else (params,),
            )
            for grid, function in zip(launch.grids, functions, strict=True)
        ]
        self._addresses: tuple[int, ...] | None = None
        self._numbers: tuple[int | float, ...] | None = None
        self._lock = threading.Lock()

    def __call__(self, addresses: tuple[int, ...], numbers: tuple[int | float, ...], stream: int) -> None:
        """Start its kernels, one after the other, on a stream of the GPU that the record is for.

        `addresses` are those of `launch.pointers`, `numbers` those of `launch.scalars`: the tuple of an earlier call
        stands for what is in it.  Raises LaunchError with the driver's reason, the first time where TMA cannot address
        a tensor (its pipeline's `cannot_address` says so before).
        """
        with self._lock:
            if addresses != self._addresses:
                self._addresses = None  # until all of them are in place
                if self._maps is not None:
                    places = self._packing.places
                    if not self._maps.addresses:
                        self._maps.encode(map(addresses.__getitem__, places))
                    for i, (index, known) in enumerate(zip(places, self._maps.addresses, strict=True)):
                        if addresses[index] != known:
                            self._maps.move(i, addresses[index])
                self._packing.point(self._buffer, addresses)
                self._addresses = addresses
            if numbers is not self._numbers:  # equal ones may differ: 0.0 and -0.0
                self._numbers = None
                self._packing.count(self._buffer, numbers)
                self._numbers = numbers
            for start in self._launchers:
                start(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled plan: its cubin and what it uses, loaded once on each GPU that asks."""

    plan: KernelPlan
    entry: cache.Entry
    _functions: dict[tuple[int, str], driver.Function] = field(default_factory=dict, repr=False, compare=False)
    _loading: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _packing: _Packing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_packing", _Packing(self.plan))

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
        functions = [self.function(device, grid.entry, grid.smem_bytes) for grid in launch.grids]
        return Record(launch, self._packing, functions, device)


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
