"""Run the kernel of a plan in the interpreter: emit, compile to PTX, launch on NumPy tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashgen.codegen import emit, params
from flashgen.errors import LaunchError
from flashgen.runtime import nvrtc
from flashgen.runtime.ptx.counters import Report
from flashgen.runtime.ptx.machine import STEP_LIMIT, Module, load
from flashgen.runtime.ptx.memory import Memory
from flashgen.runtime.ptx.ops.convert import bf16_bits, bf16_value
from flashgen.runtime.ptx.tensormap import BFLOAT16, FLOAT16, TensorMap

if TYPE_CHECKING:
    from flashgen.analysis.tiles import Case
    from flashgen.planning.plan import KernelPlan

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


class Simulated(NamedTuple):
    """o [batch, heads, q_len, v_head_dim] and lse [batch, heads, q_len] as float32, and what the kernel did."""

    o: np.ndarray
    lse: np.ndarray
    report: Report


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


def simulate(
    plan: KernelPlan,
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    source: str | None = None,
    seed: int | None = None,
    check: bool = True,
    track: tuple[str, ...] = (),
    step_limit: int = STEP_LIMIT,
    multiprocessors: int = 2,
) -> Simulated:
    """Run a plan's forward kernel on [batch, heads, length, dim] float arrays, rounded to the plan's dtype.

    `source` replaces the emitted text (mutations, probes).  `seed` and `check` are those of Module.launch; buffers
    named in `track` have the addresses of their accesses recorded; `multiprocessors` is the number of blocks of a
    pipeline whose blocks take tile after tile.  o and lse start as NaN.  Raises CompileError, LaunchError for a problem
    without any output, and a Trap for what the kernel does wrong.
    """
    sizes = case.sizes
    batch, heads, q_len = sizes["batch"], sizes["heads"], sizes["q_len"]
    if 0 in (batch, heads, q_len):
        raise LaunchError("a problem without any output element launches no kernel")
    memory = Memory()
    memory.track = frozenset(track)
    values: dict[str, int | float] = {**sizes, "q_tiles": -(-q_len // plan.tile.q), "scale": scale}
    o = np.full((batch, heads, q_len, plan.v_head_dim), np.nan, np.float32)
    o = stored(o, plan.dtype)
    lse = np.full((batch, heads, q_len), np.nan, np.float32)
    tensors = {"q": stored(q, plan.dtype), "k": stored(k, plan.dtype), "v": stored(v, plan.dtype), "o": o}
    for name, array in tensors.items():
        values[name] = memory.add(name, array, writable=name == "o")
        for axis, stride in zip(("batch", "head", "row"), _strides(array), strict=False):
            values[f"{name}_{axis}"] = stride
    values["lse"] = memory.add("lse", lse, writable=True)
    for name, value in case.params.items():
        values[f"param_{name}"] = value
    for tensor in plan.variant.tensors:
        array = stored(case.tensors[tensor.name], tensor.dtype)
        values[f"tensor_{tensor.name}"] = memory.add(tensor.name, array)
        for axis, (size, stride) in enumerate(zip(array.shape, _strides(array), strict=True)):
            values[f"size{axis}_{tensor.name}"] = size
            values[f"stride{axis}_{tensor.name}"] = stride if size > 1 else 0
    blocks = int(values["q_tiles"]) * heads * batch
    kernel = module(source if source is not None else emit(plan), plan.arch)
    arguments = []
    if plan.specialized is not None:
        counters = np.zeros(2, np.int32)
        values |= {"counters": memory.add("counters", counters, writable=True), "l2_heads": min(2, heads)}
        rows = {"q": 64, "k": plan.tile.kv, "v": plan.tile.kv, "o": 64}
        names = "qkvo" if plan.specialized.staged else "qkv"
        arguments = [_map(tensors[name], int(values[name]), rows[name], plan.dtype) for name in names]
        blocks = min(blocks, multiprocessors)
    report = kernel.launch(
        f"attention_{plan.pass_name}",
        blocks,
        plan.threads,
        plan.smem_bytes,
        [*arguments, params.pack(plan, values)],
        memory,
        seed=seed,
        check=check,
        step_limit=step_limit,
    )
    return Simulated(loaded(o, plan.dtype), lse, report)


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides of a contiguous array in elements."""
    out, step = [], 1
    for size in reversed(array.shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def _map(array: np.ndarray, address: int, rows: int, dtype: str) -> bytes:
    """The tensor map of [batch, heads, length, dim]: boxes of 64 columns by `rows` rows, 128-byte swizzle."""
    batch, heads, length, dim = array.shape
    _, head, row, _ = (stride * array.itemsize for stride in _strides(array))
    return TensorMap.encode_tiled(
        BFLOAT16 if dtype == "bfloat16" else FLOAT16, 4, address, (dim, max(length, 1), heads, batch),
        (row, head, heads * head), (64, rows, 1, 1), (1, 1, 1, 1), swizzle=3,
    ).to_bytes()  # fmt: skip
