"""Execute a launch in the interpreter: emit, compile to PTX, put NumPy tensors in memory, run the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.codegen import emit
from flashgen.errors import LaunchError
from flashgen.interpreter.counters import Report
from flashgen.interpreter.errors import NotCleared
from flashgen.interpreter.machine import LOCKSTEP, STEP_LIMIT, Kernel, Module, Options, load
from flashgen.interpreter.memory import Memory
from flashgen.interpreter.ops.convert import bf16_bits, bf16_value
from flashgen.interpreter.tensormap import BFLOAT16, FLOAT16, SWIZZLE_SPAN, UINT8, TensorMap
from flashgen.lang import float8
from flashgen.planning.backward import stored as in_own_dtype
from flashgen.planning.float8 import ACCUMULATOR_BITS, DESCALES, FLOAT8
from flashgen.planning.problem import Problem
from flashgen.runtime import nvrtc
from flashgen.runtime.launch import (
    COUNTERS,
    Cache,
    Captured,
    Descale,
    Launch,
    LaunchGrid,
    TensorMapDesc,
    descale_of,
    main_entry,
    make_launch,
    operand_dtype,
)

if TYPE_CHECKING:
    from flashgen.analysis.tiles import Case
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.philox import Dropout

_STORED = {
    "bool": np.uint8,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    "float32": np.float32,
}
_ENUMERATORS = {"float16": FLOAT16, "bfloat16": BFLOAT16, **dict.fromkeys(FLOAT8, UINT8)}

#: Tensors whose strides a launch is made of.
_STRIDED = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")


class Simulated(NamedTuple):
    """o [batch, heads, q_len, v_head_dim] and lse [batch, heads, q_len] as float32, and what the kernel that visits
    tiles did; `reports` has what each did, by its entry, and `workspaces` are as kernels leave them, in words that are
    float32 or as wide."""

    o: np.ndarray
    lse: np.ndarray
    report: Report
    reports: dict[str, Report]
    workspaces: dict[str, np.ndarray]


class SimulatedBackward(NamedTuple):
    """dq, dk, dv of the shapes of q, k, v and the gradients of captured tensors by name, as float32.

    `workspaces` are as the kernels leave them, in words that are float32 or as wide; `reports` has what each kernel
    did, by its entry.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    captured: dict[str, np.ndarray]
    workspaces: dict[str, np.ndarray]
    reports: dict[str, Report]


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a kernel finds them in memory: bfloat16 and 8-bit floats as their bits."""
    if dtype in FLOAT8:
        return float8.codes(np.asarray(values, np.float32), dtype)
    if dtype == "bfloat16":
        return bf16_bits(np.asarray(values, np.float32))
    return np.ascontiguousarray(values, _STORED[dtype])


def loaded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of a stored array of 8- or 16-bit floats."""
    if dtype in FLOAT8:
        return float8.values(bits, dtype)
    return bf16_value(bits) if dtype == "bfloat16" else bits.astype(np.float32)


@lru_cache(maxsize=64)
def module(source: str, arch: str) -> Module:
    """The PTX of emitted CUDA text, parsed; raises CompileError, PtxSyntaxError."""
    return load(nvrtc.ptx(source, arch), target=arch)


def execute(
    launch: Launch,
    memory: Memory,
    addresses: Mapping[str, int],
    *,
    source: str | None = None,
    options: Options = LOCKSTEP,
) -> dict[str, Report]:
    """Run the kernels of a launch on tensors that lie in memory, and say what each did, by its entry.

    `addresses` are those of `launch.pointers`.  `source` replaces the emitted text; whether blocks start in order
    follows from the plan, whatever `options` say.  Raises CompileError, BadLaunch, and a Trap for what a kernel does
    wrong.
    """
    plan, layout = launch.plan, launch.plan.backward
    in_order = layout is not None and (layout.dq_in_main_kernel or (plan.deterministic and layout.adds_dq))
    kernel = module(source if source is not None else emit(plan), plan.arch)
    kernels = [
        Kernel(
            entry=grid.entry,
            grid=grid.blocks,
            block=grid.threads,
            smem_bytes=grid.smem_bytes,
            params=arguments(launch, grid, addresses),
            early=grid.early,
        )
        for grid in launch.grids
    ]
    reports = kernel.launch_all(kernels, memory, replace(options, in_order=in_order))
    return {grid.entry: report for grid, report in zip(launch.grids, reports, strict=True)}


def arguments(launch: Launch, grid: LaunchGrid, addresses: Mapping[str, int]) -> list[bytes]:
    """The parameters of one kernel of a launch: its tensor maps, then `Params`."""
    maps = [_tensor_map(desc, addresses[desc.tensor]) for desc in launch.maps_of(grid)]
    return [*maps, launch.packed(addresses)]


def _tensor_map(desc: TensorMapDesc, address: int) -> bytes:
    swizzle = next(n for n, span in SWIZZLE_SPAN.items() if span == desc.swizzle)
    return TensorMap.encode_tiled(
        *(_ENUMERATORS[desc.dtype], len(desc.sizes), address, desc.sizes, desc.strides, desc.box),
        element_strides=(1,) * len(desc.sizes),
        swizzle=swizzle,
    ).to_bytes()


class _Tensors:
    """The tensors of one call, contiguous in memory, and the launch on them."""

    def __init__(self, plan: KernelPlan, case: Case) -> None:
        for name, what in (("batch", "sequence"), ("heads", "query head"), ("q_len", "query")):
            if case.sizes[name] == 0:
                raise LaunchError(f"a problem of {name} 0 has no output, and launches no kernel\n  nearest: one {what}")
        self.plan, self.case, self.memory = plan, case, Memory()
        self.addresses: dict[str, int] = {}
        self.strides: dict[str, tuple[int, int, int]] = {}
        self.captured: dict[str, Captured] = {}
        for tensor in plan.variant.tensors:
            array = stored(case.tensors[tensor.name], tensor.dtype)
            self.addresses[f"tensor_{tensor.name}"] = self.memory.add(tensor.name, array)
            self.captured[tensor.name] = Captured(sizes=array.shape, strides=_strides(array))

    def add(self, name: str, array: np.ndarray, *, writable: bool = False) -> np.ndarray:
        """A tensor at the pointer of this name; strides over batch, heads and rows go with it where it has them."""
        self.addresses[name] = self.memory.add(name, array, writable=writable)
        if name in _STRIDED:
            self.strides[name] = _strides(array)[:3]
        return array

    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A tensor to be written, NaN at first."""
        return self.add(name, stored(np.full(shape, np.nan, np.float32), dtype), writable=True)

    def add_descale(self, name: str, array: np.ndarray) -> Descale:
        """What the elements of q, k or v count by: [1], [batch, heads] or [batch, heads, blocks]."""
        array = np.ascontiguousarray(array, np.float32)
        self.add(DESCALES[name], array)
        sizes = self.case.sizes
        rows = sizes["q_len"] if name == "q" else sizes["kv_len"]
        return descale_of(array.shape, _strides(array), rows, sizes["heads"])

    def add_sequences(self, given: Mapping[str, np.ndarray]) -> None:
        """What the plan's layout has of each sequence; what is not given is null."""
        for name in self.plan.layout.pointers:
            self.addresses[name] = 0
            if name in given:
                self.add(name, np.ascontiguousarray(given[name], np.int32))

    @property
    def problem(self) -> Problem:
        dims = {"head_dim": self.plan.head_dim, "v_head_dim": self.plan.v_head_dim}
        return Problem(**self.case.sizes, **dims, dtype=self.plan.dtype, kv_dtype=operand_dtype(self.plan, "k"))

    def run(
        self,
        facts: Mapping[str, object],
        change: Callable[[Launch], Launch] | None,
        source: str | None,
        options: Options,
    ) -> tuple[dict[str, np.ndarray], dict[str, Report]]:
        """Make the launch, `change` it and execute it; its workspaces by name, which start as NaN, and reports.

        `facts` are what make_launch is told beside the tensors, `source` and `options` those of `execute`.
        """
        launch = make_launch(
            self.plan,
            self.problem,
            strides=self.strides,
            captured=self.captured,
            params=self.case.params,
            **facts,
        )
        launch = launch if change is None else change(launch)
        self.addresses[COUNTERS.name] = 0  # unless somebody counts
        zeros = [np.zeros(part.amount // 4, np.int32) for part in launch.cleared]
        for part, array in zip(launch.cleared, zeros, strict=True):
            self.add(part.name, array, writable=True)
        workspaces = {
            part.name: self.add(part.name, np.full(part.amount // 4, np.nan, np.float32), writable=True)
            for part in launch.workspaces
        }
        reports = execute(launch, self.memory, self.addresses, source=source, options=options)
        for part, array in zip(launch.cleared, zeros, strict=True):
            if array.any():
                raise NotCleared(f"{part.name} is left as {array.tolist()}: the next launch needs zeros there")
        return workspaces, reports


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides of a contiguous array in elements."""
    out, step = [], 1
    for size in reversed(array.shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def simulate(
    plan: KernelPlan,
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    source: str | None = None,
    dropout: Dropout | None = None,
    seed: int | None = None,
    check: bool = True,
    track: tuple[str, ...] = (),
    step_limit: int = STEP_LIMIT,
    sms: int = 2,
    l2_kv_heads: int | None = 2,
    change: Callable[[Launch], Launch] | None = None,
    sequences: Mapping[str, np.ndarray] = MappingProxyType({}),
    q_offset: int = 0,
    kv_splits: int = 1,
    descales: Mapping[str, np.ndarray] = MappingProxyType({}),
    accumulator_bits: int | None = ACCUMULATOR_BITS,
) -> Simulated:
    """Run a plan's forward kernel on [batch, heads, length, dim] float arrays, rounded to the plan's dtype; joined
    sequences are a batch of 1, and a cache has pages in place of a batch.

    `source` replaces the emitted text and `change` the launch (mutations, probes).  `seed`, `check`, `step_limit` and
    `accumulator_bits` are those of `Options`; buffers named in `track` have the addresses of their accesses recorded;
    `sms` and `l2_kv_heads` are those of make_launch, of a GPU as small as the problems that can be run here.
    `descales` are those of q, k and v in 8 bits, by tensor.  `sequences` are the int32 [batch] tensors of a layout that
    has them, by pointer, `q_offset` and `kv_splits` are those of make_launch.  o and lse start as NaN.
    Raises CompileError, LaunchError for a problem without any output, and a Trap for what the kernel does wrong.
    """
    tensors = _Tensors(plan, case)
    tensors.memory.track = frozenset(track)
    for name, array in (("q", q), ("k", k), ("v", v)):
        tensors.add(name, stored(array, operand_dtype(plan, name)))
    rows = np.shape(q)[:-1]
    o = tensors.result("o", (*rows, plan.v_head_dim), plan.out_dtype)
    lse = tensors.result("lse", rows, "float32")
    tensors.add_sequences(sequences)
    facts = {"scale": scale, "dropout": dropout, "sms": sms, "l2_kv_heads": l2_kv_heads, "q_offset": q_offset}
    facts["rows"], facts["kv_splits"] = (rows[-1], np.shape(k)[-2]), kv_splits
    if plan.layout.paged:
        table_row = sequences["page_table"].shape[1]
        facts["cache"] = Cache(pages=np.shape(k)[0], page_size=np.shape(k)[-2], table_row=table_row)
    if plan.float8 is not None:
        facts["descales"] = {name: tensors.add_descale(name, descales[name]) for name in plan.float8.scaled}
    options = Options(seed=seed, check=check, step_limit=step_limit, accumulator_bits=accumulator_bits)
    workspaces, reports = tensors.run(facts, change, source, options)
    return Simulated(loaded(o, plan.out_dtype), lse, reports[main_entry(plan)], reports, workspaces)


def simulate_backward(
    plan: KernelPlan,
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    d_o: np.ndarray,
    *,
    scale: float,
    dlse: np.ndarray | None = None,
    source: str | None = None,
    dropout: Dropout | None = None,
    seed: int | None = None,
    check: bool = True,
    step_limit: int = STEP_LIMIT,
    sms: int = 2,
    l2_kv_heads: int | None = 2,
    clear_distance: int | None = 2,
    change: Callable[[Launch], Launch] | None = None,
    sequences: Mapping[str, np.ndarray] = MappingProxyType({}),
    q_offset: int = 0,
) -> SimulatedBackward:
    """Run the kernels of a backward plan, in their order, on the results of a forward.

    Arrays are [batch, heads, length, dim] floats, rounded to the plan's dtype, lse and dlse [batch, heads, q_len].
    Results and workspaces start as NaN.  Options and errors are those of `simulate`; `clear_distance` is that
    of make_launch.
    """
    tensors = _Tensors(plan, case)
    for name, array in (("q", q), ("k", k), ("v", v), ("o", o), ("d_o", d_o)):
        tensors.add(name, stored(array, plan.dtype))
    tensors.add("lse", np.ascontiguousarray(lse, np.float32))
    if dlse is not None:
        tensors.add("dlse", np.ascontiguousarray(dlse, np.float32))
    else:
        tensors.addresses["dlse"] = 0
    results = [tensors.result(f"d{name}", array.shape, plan.dtype) for name, array in (("q", q), ("k", k), ("v", v))]
    shapes = {name: np.shape(case.tensors[name]) for name in plan.gradients}
    dtypes = dict.fromkeys(shapes, "float32") | in_own_dtype(plan, tensors.problem, shapes)
    captured = {name: tensors.result(f"grad_{name}", shape, dtypes[name]) for name, shape in shapes.items()}
    facts = {
        "scale": scale,
        "dropout": dropout,
        "sms": sms,
        "l2_kv_heads": l2_kv_heads,
        "clear_distance": clear_distance,
        "q_offset": q_offset,
        "rows": (np.shape(q)[-2], np.shape(k)[-2]),
    }
    tensors.add_sequences(sequences)
    options = Options(seed=seed, check=check, step_limit=step_limit)
    workspaces, reports = tensors.run(facts, change, source, options)
    captured = {name: loaded(gradient, dtypes[name]) for name, gradient in captured.items()}
    return SimulatedBackward(*(loaded(result, plan.dtype) for result in results), captured, workspaces, reports)
