"""Run the kernels of a plan in the interpreter: emit, compile to PTX, launch on NumPy tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.codegen import emit, params
from flashgen.errors import LaunchError
from flashgen.planning import backward
from flashgen.planning.problem import Problem
from flashgen.runtime import nvrtc
from flashgen.runtime.ptx.counters import Report
from flashgen.runtime.ptx.machine import STEP_LIMIT, Module, load
from flashgen.runtime.ptx.memory import Memory
from flashgen.runtime.ptx.ops.convert import bf16_bits, bf16_value
from flashgen.runtime.ptx.tensormap import BFLOAT16, FLOAT16, TensorMap

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
#: Rows of a box of q and of o: those of one warpgroup.
_BOX_ROWS = 64


class Simulated(NamedTuple):
    """o [batch, heads, q_len, v_head_dim] and lse [batch, heads, q_len] as float32, and what the kernel did."""

    o: np.ndarray
    lse: np.ndarray
    report: Report


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
    """Values as a kernel finds them in memory: bfloat16 as its bits."""
    if dtype == "bfloat16":
        return bf16_bits(np.asarray(values, np.float32))
    return np.ascontiguousarray(values, _STORED[dtype])


def loaded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of a stored float16 or bfloat16 array."""
    return bf16_value(bits) if dtype == "bfloat16" else bits.astype(np.float32)


@lru_cache(maxsize=64)
def module(source: str, arch: str) -> Module:
    """The PTX of emitted CUDA text, parsed; raises CompileError, PtxSyntaxError."""
    return load(nvrtc.ptx(source, arch), target=arch)


class _Arguments:
    """Tensors placed in memory, and the values of the members of `Params`."""

    def __init__(self, plan: KernelPlan, case: Case, scale: float, dropout: Dropout | None) -> None:
        self.plan = plan
        self.memory = Memory()
        self.values: dict[str, int | float] = {**case.sizes, "scale": scale}
        self.tensors: dict[str, np.ndarray] = {}
        for name, value in case.params.items():
            self.values[f"param_{name}"] = value
        for tensor in plan.variant.tensors:
            array = stored(case.tensors[tensor.name], tensor.dtype)
            self.values[f"tensor_{tensor.name}"] = self.memory.add(tensor.name, array)
            for axis, (size, stride) in enumerate(zip(array.shape, _strides(array), strict=True)):
                self.values[f"size{axis}_{tensor.name}"] = size
                self.values[f"stride{axis}_{tensor.name}"] = stride if size > 1 else 0
        if dropout is not None:
            self.values |= {
                "dropout_seed": dropout.seed,
                "dropout_offset": dropout.offset,
                "dropout_threshold": dropout.threshold,
                "dropout_scale": dropout.scale,
            }

    def add(self, name: str, array: np.ndarray, *, writable: bool = False) -> np.ndarray:
        """A tensor as it lies in memory; strides over batch, heads and rows go with it where it has them."""
        self.values[name] = self.memory.add(name, array, writable=writable)
        self.tensors[name] = array
        if array.ndim == 4:
            for axis, stride in zip(("batch", "head", "row"), _strides(array), strict=False):
                self.values[f"{name}_{axis}"] = stride
        return array

    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A tensor to be written, NaN at first."""
        return self.add(name, stored(np.full(shape, np.nan, np.float32), dtype), writable=True)

    def tensor_map(self, name: str, rows: int, pack: int | None = None) -> bytes:
        """The map of [batch, heads, length, dim]: boxes of 64 columns by `rows` rows, 128-byte swizzle.

        Where rows are those of `pack` heads, heads stand before queries.
        """
        array = self.tensors[name]
        batch, heads, length, dim = array.shape
        _, head, row, _ = (stride * array.itemsize for stride in _strides(array))
        sizes, strides, box = (max(length, 1), heads), (row, head), (rows, 1)
        if pack is not None:
            sizes, strides, box = sizes[::-1], strides[::-1], (pack, rows // pack)
        return TensorMap.encode_tiled(
            BFLOAT16 if self.plan.dtype == "bfloat16" else FLOAT16,
            4,
            int(self.values[name]),
            (dim, *sizes, batch),
            (*strides, heads * head),
            (64, *box, 1),
            (1, 1, 1, 1),
            swizzle=3,
        ).to_bytes()

    def packed(self) -> bytes:
        return params.pack(self.plan, self.values)


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides of a contiguous array in elements."""
    out, step = [], 1
    for size in reversed(array.shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def _outputs_of(case: Case) -> tuple[int, int, int]:
    """(batch, heads, q_len).  Raises LaunchError where there is no output."""
    rows = case.sizes["batch"], case.sizes["heads"], case.sizes["q_len"]
    if 0 in rows:
        raise LaunchError("a problem without any output element launches no kernel")
    return rows


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
) -> Simulated:
    """Run a plan's forward kernel on [batch, heads, length, dim] float arrays, rounded to the plan's dtype.

    `source` replaces the emitted text (mutations, probes).  `seed` and `check` are those of Module.launch; buffers
    named in `track` have the addresses of their accesses recorded; `sms` is the number of blocks of a
    pipeline whose blocks take tile after tile.  o and lse start as NaN.  Raises CompileError, LaunchError for a problem
    without any output, and a Trap for what the kernel does wrong.
    """
    rows = _outputs_of(case)
    arguments = _Arguments(plan, case, scale, dropout)
    arguments.memory.track = frozenset(track)
    for name, array in (("q", q), ("k", k), ("v", v)):
        arguments.add(name, stored(array, plan.dtype))
    o = arguments.result("o", (*rows, plan.v_head_dim), plan.dtype)
    lse = arguments.result("lse", rows, "float32")
    group = case.sizes["heads"] // case.sizes["kv_heads"]
    pack, q_tiles = plan.pack(group), -(-rows[2] // plan.tile_queries(group))
    arguments.values |= {"q_tiles": q_tiles, "packs": rows[1] // pack, "pack_log2": pack.bit_length() - 1}
    blocks = q_tiles * rows[0] * rows[1] // pack
    maps = []
    if plan.specialized is not None:
        arguments.add("counters", np.zeros(2, np.int32), writable=True)
        arguments.values["l2_heads"] = min(2, rows[1] // pack)
        of_rows = {"rows": _BOX_ROWS, "pack": pack if plan.packed else None}
        boxes = {name: {"rows": plan.tile.kv} if name in "kv" else of_rows for name in params.maps(plan)}
        maps = [arguments.tensor_map(name, **box) for name, box in boxes.items()]
        blocks = min(blocks, sms)
    report = module(source if source is not None else emit(plan), plan.arch).launch(
        f"attention_{plan.pass_name}",
        blocks,
        plan.threads,
        plan.smem_bytes,
        [*maps, arguments.packed()],
        arguments.memory,
        seed=seed,
        check=check,
        step_limit=step_limit,
    )
    return Simulated(loaded(o, plan.dtype), lse, report)


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
    l2_heads: int = 2,
    clear_distance: int = 2,
) -> SimulatedBackward:
    """Run the kernels of a backward plan, in their order, on the results of a forward.

    Arrays are [batch, heads, length, dim] floats, rounded to the plan's dtype, lse and dlse [batch, heads, q_len].
    Results and workspaces start as NaN.  Options and errors are those of `simulate`; `l2_heads` and `clear_distance`
    are fewer key heads than on a GPU, so that small problems show what blocks do for each other.
    """
    rows = _outputs_of(case)
    arguments = _Arguments(plan, case, scale, dropout)
    for name, array in (("q", q), ("k", k), ("v", v), ("o", o), ("d_o", d_o)):
        arguments.add(name, stored(array, plan.dtype))
    arguments.add("lse", np.ascontiguousarray(lse, np.float32))
    arguments.values["dlse"] = 0
    if dlse is not None:
        arguments.add("dlse", np.ascontiguousarray(dlse, np.float32))
    results = [arguments.result(f"d{name}", array.shape, plan.dtype) for name, array in (("q", q), ("k", k), ("v", v))]
    captured = {
        name: arguments.result(f"grad_{name}", np.shape(case.tensors[name]), "float32") for name in plan.gradients
    }
    problem = Problem(**case.sizes, head_dim=plan.head_dim, v_head_dim=plan.v_head_dim, dtype=plan.dtype)
    shapes = {name: array.shape for name, array in captured.items()}
    workspaces = {
        part.name: arguments.add(part.name, np.full(part.amount // 4, np.nan, np.float32), writable=True)
        for part in backward.workspaces(plan, problem, shapes)
    }
    arguments.values["q_tiles"] = -(-rows[2] // plan.tile.q)
    arguments.values["kv_tiles"] = -(-case.sizes["kv_len"] // plan.tile.kv)
    heads = rows[0] * case.sizes["kv_heads"]
    arguments.values |= {"l2_heads": min(l2_heads, heads), "clear_distance": min(clear_distance, heads)}
    maps = [arguments.tensor_map(n, plan.tile.kv if n in "kv" else plan.tile.q) for n in params.maps(plan)]
    kernel = module(source if source is not None else emit(plan), plan.arch)
    reports = {
        launch.entry: kernel.launch(
            launch.entry,
            launch.blocks,
            launch.threads,
            launch.smem_bytes,
            [*(maps if launch.entry == backward.MAIN else ()), arguments.packed()],
            arguments.memory,
            seed=seed,
            check=check,
            step_limit=step_limit,
            in_order=plan.backward.dq_in_main_kernel or (plan.deterministic and plan.backward.adds_dq),
        )
        for launch in backward.launches(plan, problem)
    }
    return SimulatedBackward(*(loaded(result, plan.dtype) for result in results), captured, workspaces, reports)
