"""A KernelPlan compiled (through the disk cache), loaded on the GPUs that call it, and launched from records.

A record is a launch with everything in place that shapes and strides decide: calling it again writes addresses and
numbers into the packed parameters and starts the kernel.
"""

from __future__ import annotations

import ctypes
import operator
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen import codegen
from flashgen.codegen import params
from flashgen.planning import backward, hopper
from flashgen.planning.arch import ARCHS, Arch
from flashgen.runtime import cache, driver, nvrtc

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem
    from flashgen.runtime.philox import Dropout

#: Fields that a kernel takes which drops probabilities.
DROPOUT_FIELDS = ("dropout_seed", "dropout_offset", "dropout_threshold", "dropout_scale")

#: Bytes between rows, heads or batches that a tensor map can hold.
TMA_STRIDE_BYTES = 1 << 40

#: What one TMA copy of pipeline hopper moves: columns of 128 bytes, and of q the rows of one warpgroup.
_BOX_BYTES, _Q_BOX_ROWS = hopper.BOX * hopper.ITEM, hopper.ROWS

#: Where a tensor map points until its first launch; an address has to be a multiple of 16.
_ANY_ADDRESS = 1 << 32

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


class _Packed:
    """The packed parameters of a plan in memory that the driver copies at each launch.

    `given` names the addresses in the order in which calls give them, pointers' names and others; numbers are the
    softmax scale, the parameters by name, and where the plan drops probabilities seed, offset, threshold and scale of
    that.
    """

    __slots__ = ("_numbers", "_pack_pointers", "_pick_pointers", "_slots", "buffer", "pointers")

    def __init__(self, plan: KernelPlan, values: Mapping[str, int | float], given: Sequence[str] | None = None) -> None:
        packed = params.pack(plan, values)
        self.buffer = ctypes.create_string_buffer(packed, len(packed))
        place, end = {}, 0  # the struct has no padding before its end
        for member in params.fields(plan):
            place[member.name] = member.format, end
            end += struct.calcsize(f"<{member.format}")
        self.pointers = tuple(m.name for m in params.fields(plan) if m.ctype.endswith("*"))  # they stand first
        self._pack_pointers = struct.Struct(f"<{len(self.pointers)}Q").pack_into
        self._pick_pointers = operator.itemgetter(*map((given or self.pointers).index, self.pointers))
        numbers = ["scale", *(f"param_{p.name}" for p in plan.variant.params)]
        numbers += DROPOUT_FIELDS if plan.dropout else ()
        self._slots = [(struct.Struct(f"<{place[name][0]}").pack_into, place[name][1]) for name in numbers]
        self._numbers: tuple[int | float, ...] = ()

    def write(self, addresses: tuple[int, ...], numbers: tuple[int | float, ...]) -> None:
        self._pack_pointers(self.buffer, 0, *self._pick_pointers(addresses))
        if numbers != self._numbers:
            for (pack_into, offset), number in zip(self._slots, numbers, strict=True):
                pack_into(self.buffer, offset, number)
            self._numbers = numbers


class Record:
    """One forward kernel on one GPU for one set of shapes and strides; any thread may call it.

    `addresses` are those of q, k, v, o, lse and then of the captured tensors by name; `numbers` the softmax scale, then
    the parameters by name, then `dropout_numbers` where the plan has dropout.  A kernel that `counts` takes the address
    of two int32 that are 0 as well: it leaves them 0, and launches that may overlap need counters of their own.
    """

    __slots__ = ("_launch", "_lock", "_maps", "_packed", "counts")

    def __init__(
        self,
        plan: KernelPlan,
        function: driver.Function,
        values: Mapping[str, int | float],
        blocks: int,
        maps: Mapping[str, driver.TensorMap],
    ) -> None:
        given = [*("q", "k", "v", "o", "lse"), *(f"tensor_{t.name}" for t in plan.variant.tensors), "counters"]
        self._packed = _Packed(plan, values, given)
        self._launch = driver.Launch(
            function, blocks=blocks, threads=plan.threads, arguments=[*maps.values(), self._packed.buffer]
        )
        self._lock = threading.Lock()
        self._maps = [(tensor, given.index(name)) for name, tensor in maps.items()]
        self.counts = "counters" in self._packed.pointers

    def __call__(
        self, addresses: tuple[int, ...], numbers: tuple[int | float, ...], stream: int, counters: int = 0
    ) -> None:
        """Launch on a stream of the GPU that the record is for; raises LaunchError with the driver's reason."""
        with self._lock:
            for tensor, index in self._maps:
                tensor.move(addresses[index])
            self._packed.write((*addresses, counters), numbers)
            self._launch(stream)


class BackwardRecord:
    """The kernels of a backward on one GPU for one set of shapes and strides; any thread may call it.

    `pointers` are the names of the addresses that a call gives, in that order: inputs, gradients, workspaces, captured
    tensors.  Numbers are those of a Record; `maps` are what the main kernel takes before the parameters.
    """

    __slots__ = ("_launches", "_lock", "_maps", "_packed", "pointers")

    def __init__(
        self,
        plan: KernelPlan,
        values: Mapping[str, int | float],
        entries: Sequence[tuple[backward.Launch, driver.Function]],
        maps: Mapping[str, driver.TensorMap],
    ) -> None:
        members = [f.name for f in params.fields(plan) if f.ctype.endswith("*")]
        self.pointers = tuple(dict.fromkeys((*maps, *members)))
        self._packed = _Packed(plan, values, self.pointers)
        self._maps = [(tensor, self.pointers.index(name)) for name, tensor in maps.items()]
        self._launches = []
        for entry, function in entries:
            before = maps.values() if entry.entry == backward.MAIN else ()
            size = {"blocks": entry.blocks, "threads": entry.threads}
            self._launches.append(driver.Launch(function, **size, arguments=[*before, self._packed.buffer]))
        self._lock = threading.Lock()

    def __call__(self, addresses: tuple[int, ...], numbers: tuple[int | float, ...], stream: int) -> None:
        """Launch all of them, one after the other, on a stream; raises LaunchError with the driver's reason."""
        with self._lock:
            for tensor, index in self._maps:
                tensor.move(addresses[index])
            self._packed.write(addresses, numbers)
            for launch in self._launches:
                launch(stream)


def dropout_numbers(dropout: Dropout) -> tuple[int | float, ...]:
    """What kernels that drop probabilities take beside the other numbers, in the order of DROPOUT_FIELDS."""
    return dropout.seed, dropout.offset, dropout.threshold, dropout.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled plan: its cubin and what it uses, loaded once on each GPU that asks."""

    plan: KernelPlan
    entry: cache.Entry
    _functions: dict[tuple[int, str], driver.Function] = field(default_factory=dict, repr=False, compare=False)
    _loading: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def cubin(self) -> bytes:
        return self.entry.cubin

    @property
    def resources(self) -> nvrtc.Resources:
        return self.entry.resources

    def function(self, device: int, entry: str | None = None, smem_bytes: int | None = None) -> driver.Function:
        """An entry (unless given the plan's main one) in the context of GPU `device`.

        Raises LaunchError where it cannot be loaded there.
        """
        name = entry or f"attention_{self.plan.pass_name}"
        with self._loading:
            if (device, name) not in self._functions:
                room = self.plan.smem_bytes if smem_bytes is None else smem_bytes
                self._functions[device, name] = driver.load(self.cubin, name, smem_bytes=room, device=device)
            return self._functions[device, name]

    def record(self, problem: Problem, layout: Layout, captured: Mapping[str, Captured], device: int) -> Record:
        """A launch of this kernel for one problem that is not empty.

        Raises LaunchError where the kernel cannot be loaded, the grid would be too wide, or TMA cannot address q, k or
        v (`tma_unsupported_reason` says so before).
        """
        plan = self.plan
        strides = {name: getattr(layout, name) for name in "qkvo"}
        values = self._values(problem, strides, captured)
        blocks = values["q_tiles"] * values["packs"] * problem.batch
        if plan.specialized is not None:  # each block takes tile after tile
            blocks = min(blocks, driver.gpu(device).sms)
        return Record(plan, self.function(device), values, blocks, _tensor_maps(plan, problem, strides, device))

    def backward_record(
        self,
        problem: Problem,
        strides: Mapping[str, tuple[int, int, int]],
        captured: Mapping[str, Captured],
        device: int,
    ) -> BackwardRecord:
        """The launches of a backward for one problem with queries and keys.

        `strides` are those of q, k, v, o, d_o, dq, dk and dv in elements over (batch, heads, rows).  Raises LaunchError
        where a kernel cannot be loaded, a grid would be too wide, or TMA cannot address q, k, v or d_o.
        """
        entries = backward.launches(self.plan, problem)
        functions = [self.function(device, entry.entry, entry.smem_bytes) for entry in entries]
        values = self._values(problem, strides, captured)
        maps = _tensor_maps(self.plan, problem, strides, device)
        return BackwardRecord(self.plan, values, tuple(zip(entries, functions, strict=True)), maps)

    def _values(
        self, problem: Problem, strides: Mapping[str, tuple[int, int, int]], captured: Mapping[str, Captured]
    ) -> dict[str, int | float]:
        """Every field of the parameters; addresses and numbers, which each call writes, are 0."""
        tile, pack = self.plan.tile, self.plan.pack(problem.group)
        if self.plan.backward is None:
            together, clear_distance = l2_heads(problem, ARCHS[self.plan.arch]), 0
        else:
            together, clear_distance = (
                backward.l2_kv_heads(self.plan, problem),
                backward.clear_distance(self.plan, problem),
            )
        values: dict[str, int | float] = {f.name: 0 for f in params.fields(self.plan)}
        values |= {
            **problem.sizes(),
            "q_tiles": -(-problem.q_len // self.plan.tile_queries(problem.group)),
            "kv_tiles": -(-problem.kv_len // tile.kv),
            "l2_heads": together // pack,
            "clear_distance": clear_distance,
            "packs": problem.heads // pack,
            "pack_log2": pack.bit_length() - 1,
        }
        for name, of_tensor in strides.items():
            for axis, stride in zip(("batch", "head", "row"), of_tensor, strict=True):
                values[f"{name}_{axis}"] = stride
        for name, tensor in captured.items():
            for axis, (size, stride) in enumerate(zip(tensor.sizes, tensor.strides, strict=True)):
                values[f"size{axis}_{name}"] = size
                values[f"stride{axis}_{name}"] = stride if size > 1 else 0  # of size 1: it broadcasts
        return values


def l2_heads(problem: Problem, arch: Arch) -> int:
    """Query heads that pipeline hopper works on together: those whose keys and values L2 holds beside queries and
    outputs."""
    of_one = problem.kv_len * (problem.head_dim + problem.v_head_dim) * problem.itemsize
    return min(arch.l2_holds(of_one) * problem.group, problem.batch * problem.heads)


def tma_unsupported_reason(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> str | None:
    """Why TMA cannot address a tensor [batch, heads, rows, columns] with these strides in elements, or None.

    Rows are known to start at multiples of 16 bytes.
    """
    for axis, word in enumerate(("batch", "head", "row")):
        if sizes[axis] > 1 and strides[axis] == 0:
            return f"its {word} stride is 0 (expanded)"
        if sizes[axis] > 1 and strides[axis] * itemsize >= TMA_STRIDE_BYTES:
            return f"its {word} stride is {strides[axis] * itemsize} bytes, and TMA's stay below 2^40"
    return None


def _tensor_maps(
    plan: KernelPlan, problem: Problem, strides: Mapping[str, tuple[int, int, int]], device: int
) -> dict[str, driver.TensorMap]:
    """The tensor maps that a plan's main kernel takes; addresses come with each call."""
    return {name: _tensor_map(name, plan, problem, strides[name], device) for name in params.maps(plan)}


def _tensor_map(
    name: str, plan: KernelPlan, problem: Problem, layout: tuple[int, int, int], device: int
) -> driver.TensorMap:
    """The tensor map of q, k, v, o or d_o."""
    columns = problem.head_dim if name in "qk" else problem.v_head_dim
    if name in ("k", "v"):
        rows, heads, box = problem.kv_len, problem.kv_heads, (plan.tile.kv,)
    else:
        rows, heads = problem.q_len, problem.heads
        box = (_Q_BOX_ROWS if plan.backward is None else plan.tile.q,)
    sizes, least = (rows, heads, problem.batch), -(-columns * problem.itemsize // 16) * 16
    strides = tuple(reversed(layout))
    if plan.packed and name in "qo":  # the heads of a query side by side
        pack = plan.pack(problem.group)
        box = pack, _Q_BOX_ROWS // pack
        sizes, strides = ((x[1], x[0], x[2]) for x in (sizes, strides))
    return driver.TensorMap(
        plan.dtype,
        address=_ANY_ADDRESS,
        sizes=(columns, *sizes),  # of a size of 1 any stride will do
        strides=tuple(s * problem.itemsize if n > 1 else least for n, s in zip(sizes, strides, strict=True)),
        box=(_BOX_BYTES // problem.itemsize, *box),
        device=device,
    )


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
