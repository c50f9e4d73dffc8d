"""A KernelPlan compiled (through the disk cache), loaded on the GPUs that call it, and launched from records.

A record is a launch with everything in place that shapes and strides decide: calling it again writes addresses and
numbers into the packed parameters and starts the kernel.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen.codegen import params
from flashgen.runtime import cache, driver, nvrtc

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

_kernels: dict[KernelPlan, _Slot] = {}
_slots = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Shape of a captured tensor: its sizes, and its strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Strides in elements of q, k, v and o over (batch, heads, rows); a row's elements lie side by side."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    o: tuple[int, int, int]


class Record:
    """One kernel on one GPU for one set of shapes and strides; any thread may call it.

    `addresses` are those of q, k, v, o, lse and then of the captured tensors by name; `numbers` the softmax scale and
    then the parameters by name.
    """

    __slots__ = ("_addresses", "_buffer", "_launch", "_lock", "_numbers", "_slots")

    def __init__(self, plan: KernelPlan, function: driver.Function, values: Mapping[str, int | float], blocks: int):
        packed = params.pack(plan, values)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._launch = driver.Launch(function, blocks=blocks, threads=plan.threads, arguments=[self._buffer])
        self._lock = threading.Lock()
        place, end = {}, 0  # the struct has no padding before its end
        for member in params.fields(plan):
            place[member.name] = member.format, end
            end += struct.calcsize(f"<{member.format}")
        pointers = sum(letter == "Q" for letter, _ in place.values())  # they stand first
        self._addresses = struct.Struct(f"<{pointers}Q").pack_into
        numbers = [place[name] for name in ("scale", *(f"param_{p.name}" for p in plan.variant.params))]
        self._slots = [(struct.Struct(f"<{letter}").pack_into, offset) for letter, offset in numbers]
        self._numbers: tuple[int | float, ...] = ()

    def __call__(self, addresses: Sequence[int], numbers: tuple[int | float, ...], stream: int) -> None:
        """Launch on a stream of the GPU that the record is for; raises LaunchError with the driver's reason."""
        with self._lock:
            self._addresses(self._buffer, 0, *addresses)
            if numbers != self._numbers:
                for (pack_into, offset), number in zip(self._slots, numbers, strict=True):
                    pack_into(self._buffer, offset, number)
                self._numbers = numbers
            self._launch(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled plan: its cubin and what it uses, loaded once on each GPU that asks."""

    plan: KernelPlan
    entry: cache.Entry
    _functions: dict[int, driver.Function] = field(default_factory=dict, repr=False, compare=False)
    _loading: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def cubin(self) -> bytes:
        return self.entry.cubin

    @property
    def resources(self) -> nvrtc.Resources:
        return self.entry.resources

    def function(self, device: int) -> driver.Function:
        """The kernel in the context of GPU `device`; raises LaunchError where it cannot be loaded there."""
        with self._loading:
            if device not in self._functions:
                plan = self.plan
                self._functions[device] = driver.load(
                    self.cubin, f"attention_{plan.pass_name}", smem_bytes=plan.smem_bytes, device=device
                )
            return self._functions[device]

    def record(self, problem: Problem, layout: Layout, captured: Mapping[str, Captured], device: int) -> Record:
        """A launch of this kernel for one problem that is not empty.

        Raises LaunchError where the kernel cannot be loaded or the grid would be too wide.
        """
        q_tiles = -(-problem.q_len // self.plan.tile.q)
        values: dict[str, int | float] = {**problem.sizes(), "q_tiles": q_tiles}
        for name in ("q", "k", "v", "o"):
            for axis, stride in zip(("batch", "head", "row"), getattr(layout, name), strict=True):
                values[f"{name}_{axis}"] = stride
        for name, tensor in captured.items():
            for axis, (size, stride) in enumerate(zip(tensor.sizes, tensor.strides, strict=True)):
                values[f"size{axis}_{name}"] = size
                values[f"stride{axis}_{name}"] = stride if size > 1 else 0  # of size 1: it broadcasts
        blank = {f.name: 0 for f in params.fields(self.plan)}  # addresses and numbers: written by each call
        return Record(self.plan, self.function(device), blank | values, q_tiles * problem.heads * problem.batch)


@dataclass(slots=True)
class _Slot:
    """A kernel of this process, or the place where the first thread that needs it builds it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kernel: Kernel | None = None


def load(plan: KernelPlan) -> Kernel:
    """The plan's kernel: of this process, else of the disk cache, else compiled now.  Threads that meet build it once.

    Raises CompileError.
    """
    with _slots:
        slot = _kernels.setdefault(plan, _Slot())
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
        from flashgen.codegen import emit

        start = time.perf_counter()
        source = emit(plan, facts)
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
