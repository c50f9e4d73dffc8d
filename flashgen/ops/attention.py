"""attention(): one call on torch tensors, checked before anything runs, on a GPU's kernel or on the CPU walk.

A call that repeats another one's shapes, strides, dtypes and devices finds its record and launches; all that is checked
again is what can differ: alignment and numbers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch

from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.errors import LaunchError, shown
from flashgen.lang.expr import Tensor as Declared
from flashgen.lang.stored import broken_promise
from flashgen.lang.variant import Variant
from flashgen.ops import library
from flashgen.ops.dropout import drawn
from flashgen.ops.values import no_flag, no_number, no_tensor, no_variant
from flashgen.planning import arch, planner
from flashgen.planning.ampere import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from flashgen.planning.problem import Problem
from flashgen.runtime import driver, kernel, tiles
from flashgen.runtime.philox import Dropout

#: torch's dtypes by the names that planning uses; the first two run on a GPU, all on a CPU.
DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
GPU_DTYPES = (torch.float16, torch.bfloat16)

#: Rows of q, k and v start at a multiple of this many bytes: kernels move 16 at a time.
ALIGNMENT = 16

#: Records of one variant; when there are more they are all dropped, and shapes still in use come back.
MAX_RECORDS = 4096

#: Variants whose calls are remembered.
MAX_VARIANTS = 1024

#: Architecture whose plan the CPU walks where the variant pins none.
CPU_ARCH = "sm_80"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
    deterministic: bool = False,
    **named: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(mask(score(scale * q k^T))) v of a variant; with `return_lse` (o, lse).

    q is [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len,
    v_head_dim], of one dtype and on one device; heads is a multiple of kv_heads, and query head h reads key head
    h // (heads // kv_heads).  On a GPU float16 or bfloat16, head dims 16 to 256 in steps of 8, the last dimension
    contiguous and rows on multiples of 16 bytes; on a CPU float32 and float64 too, and any head dim.  `scale` is any
    finite number and 1 / sqrt(head_dim) unless given.  `named` are the variant's parameters, constants and captured
    tensors.

    o has q's dtype and is [batch, heads, q_len, v_head_dim], laid out as [batch, q_len, heads, v_head_dim] where q is;
    lse is the natural logarithm of the sum of exponentials, [batch, heads, q_len] in float32 (float64 for float64).  A
    row that attends to nothing gives 0 and lse -inf.  Runs on torch's current stream, may be captured into a CUDA
    graph, and repeated calls give the same bits.

    With `dropout` each probability is dropped by that chance and the others grow by 1 / (1 - dropout); lse is that of
    none dropped.  What is dropped follows from torch's generator of the device (torch.manual_seed repeats it), or from
    `seed`, and from a pair's own batch, head, query and key: not from tiles, pipelines or other heads and lengths.

    Differentiable in q, k, v, lse and the captured float tensors that the score reads, once; the backward recomputes
    the probabilities from lse.  Its reruns may differ in the last bits, as dq is summed in any order, unless
    `deterministic` (or torch.use_deterministic_algorithms) asks for a slower sum in one order.  A gradient of o whose
    rows a kernel cannot load (an expanded one, as that of a sum) is copied.

    Raises LaunchError and PlanError before anything runs: what was asked, the limit, the nearest thing that works.
    Source: Dao 2023, "FlashAttention-2", Algorithms 1 and 2.
    """
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and library.transformed()
    if compiling or (not transformed and library.traced(q, k, v)):
        o, lse = library.through_op(q, k, v, variant, scale, dropout, seed, deterministic, named)
        return (o, lse) if return_lse else o
    if deterministic is not False and (wrong := no_flag("deterministic", deterministic)):
        raise LaunchError(wrong)
    dropped = drawn(dropout, seed, q)
    if transformed or (torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v, *named.values())):
        from flashgen.ops import autograd

        o, lse = autograd.attention(q, k, v, variant, scale, named, dropped, deterministic=deterministic)
    else:
        o, lse = run(q, k, v, variant, scale, named, dropped)
    return (o, lse) if return_lse else o


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    named: Mapping[str, object],
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one eager call, which autograd does not see; arguments, results and errors as in `attention`."""
    calls = calls_of(variant)
    try:
        key = call_key(q, k, v, scale, named, calls.constants, dropout)
        record = calls.records.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        record = None  # something is no tensor, has no strides, or is no number: said below
    if record is None:
        request = checked(q, k, v, variant, scale, named, dropout)
        if request.problem.empty or request.problem.kv_len == 0:
            return _nothing(q, v)
        if not q.is_cuda:
            return _walk(q, k, v, request, dropout)
        record = _recorded(q, k, v, request, dropout)
        remember(calls.records, key, record)
    return record(q, k, v, scale, named, dropout)


def remember(records: dict[tuple, object], key: tuple, record: object) -> None:
    """Keep a record; when there are too many they are all dropped."""
    if len(records) >= MAX_RECORDS:
        records.clear()
    records[key] = record


@dataclass(slots=True)
class _Calls:
    """What is remembered of the calls of one variant: the names of its constants, and its records on GPUs, of both
    passes."""

    constants: frozenset[str]
    records: dict[tuple, _Record] = field(default_factory=dict)
    backward: dict[tuple, object] = field(default_factory=dict)


#: By variant, the oldest dropped beyond MAX_VARIANTS: one that is called again is planned again.
_calls: dict[Variant, _Calls] = {}
_calls_lock = threading.Lock()


def calls_of(variant: Variant) -> _Calls:
    if not isinstance(variant, Variant):
        raise LaunchError(no_variant(variant))
    calls = _calls.get(variant)
    if calls is None:
        with _calls_lock:
            calls = _calls.setdefault(variant, _Calls(frozenset(c.name for c in variant.constants)))
            if len(_calls) > MAX_VARIANTS:
                del _calls[next(iter(_calls))]
    return calls


def call_key(q, k, v, scale, named: Mapping[str, object], constants: frozenset[str], dropout: Dropout | None) -> tuple:
    """All that a record depends on, and what no record has: kinds of tensors and numbers that are refused."""
    key = [
        *(q.is_neg() or k.is_neg() or v.is_neg(), type(scale)),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        scale is not None and scale < 0,
        dropout is not None,
    ]
    for name, value in named.items():
        kind = type(value)
        if name in constants:
            key.append((name, kind, value))
        elif kind is not int and kind is not float and isinstance(value, torch.Tensor):
            key.append((name, kind, value.is_neg(), value.dtype, value.device, value.shape, value.stride()))
        else:
            key.append((name, kind))
    return tuple(key)


# ---------------------------------------------------------------------------------------------------------------------
# Checking a call


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call that is in order.  `variant` has its constants bound, and its score flipped where the scale is negative:
    `scale` is not."""

    problem: Problem
    variant: Variant
    scale: float
    params: dict[str, int | float]
    tensors: dict[str, torch.Tensor]


def checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    named: Mapping[str, object],
    dropout: Dropout | None,
) -> Request:
    """The request of a call, or LaunchError or PlanError for what is wrong with it."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
    _check_together(q, k, v)
    problem = _problem(q, k, v)
    captured = {t.name: named[t.name] for t in variant.tensors if t.name in named}
    constants = {c.name: named[c.name] for c in variant.constants if c.name in named}
    params = variant.values({name: x for name, x in named.items() if name not in captured and name not in constants})
    for declared in variant.tensors:
        _check_captured(variant, declared, captured.get(declared.name), problem, q.device)
    factor = _factor(scale, problem.head_dim)
    bound = variant.bind(**constants)
    bound = bound.with_flipped_score() if factor < 0 else bound
    if q.is_cuda:
        _menu(q, k, v, bound, problem, dropout)  # refuses head dims and pins that no kernel takes
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(name, tensor)
    return Request(
        problem=problem,
        variant=bound,
        scale=abs(factor),
        params=params,
        tensors={name: captured[name] for name in sorted(captured)},
    )


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LaunchError(no_tensor(name, tensor))
    _check_memory(name, name, tensor)
    if tensor.dim() != 4:
        cure = f"\n  nearest: {name}.unsqueeze(0), a batch of one" if tensor.dim() == 3 else ""
        raise LaunchError(
            f"{name} has {tensor.dim()} dimensions {list(tensor.shape)}:"
            f" q, k and v are [batch, heads, seqlen, head_dim]{cure}"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise LaunchError(f"{name} is on {tensor.device}: attention runs on NVIDIA GPUs (cuda) and on the CPU")


def _check_memory(title: str, name: str, tensor: torch.Tensor) -> None:
    """Raise LaunchError for a tensor whose memory does not hold its elements as they are."""
    what = cure = None
    if tensor.is_nested:
        what, cure = "nested: attention takes dense tensors", f"{name}.to_padded_tensor(0.0), and a mask of the lengths"
    elif tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        what, cure = f"{layout}: attention takes dense tensors", f"{name}.to_dense(), a copy"
    elif tensor.is_quantized:
        what, cure = f"quantised ({_dtype(tensor)}): attention takes floats", f"{name}.dequantize(), a copy"
    elif tensor.is_neg():
        what, cure = (
            "a view that negates what lies in memory, as x.imag of a conjugate",
            f"{name}.resolve_neg(), a copy",
        )
    elif tensor._is_zerotensor():
        what, cure = "a ZeroTensor, which has no memory", f"torch.zeros_like({name})"
    elif library.watched(tensor):
        kind = type(tensor).__name__
        what, cure = f"a {kind} beside others that are none: all are, or none is", "one kind of q, k, v and captures"
    if what is not None:
        raise LaunchError(f"{title} is {what}\n  nearest: {cure}")


def _check_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise LaunchError(
                f"q is on {q.device} and {name} on {tensor.device}: they share a device\n"
                f"  nearest: {name}.to({str(q.device)!r}), a copy"
            )
        if tensor.dtype != q.dtype:
            raise LaunchError(
                f"q is {_dtype(q)} and {name} {_dtype(tensor)}: they share a dtype\n  nearest: {name}.to({q.dtype})"
            )
    if q.dtype not in DTYPES:
        raise LaunchError(
            f"q, k and v are {_dtype(q)}: attention takes float16 and bfloat16, on a CPU float32 and float64 too\n"
            "  nearest: q.to(torch.bfloat16)"
        )
    if q.is_cuda and q.dtype not in GPU_DTYPES:
        raise LaunchError(
            f"q, k and v are {_dtype(q)} on {q.device}: tensor cores take 16-bit inputs (and accumulate in float32)\n"
            "  nearest: q.to(torch.bfloat16) or q.to(torch.float16); on a CPU (q.cpu()) float32 and float64 work"
        )


def _problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
    batch, heads, q_len, head_dim = q.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != batch:
            raise LaunchError(
                f"q has batch {batch} and {name} batch {tensor.shape[0]}: they have one batch size"
                + (f"\n  nearest: {name}.expand({batch}, -1, -1, -1), no copy" if tensor.shape[0] == 1 else "")
            )
    for axis, word in ((1, "kv_heads"), (2, "kv_len")):
        if k.shape[axis] != v.shape[axis]:
            raise LaunchError(f"k has {word} {k.shape[axis]} and v {v.shape[axis]}: k and v share their {word}")
    if k.shape[3] != head_dim:
        raise LaunchError(
            f"q has head_dim {head_dim} and k head_dim {k.shape[3]}: the product q k^T needs one head_dim"
            " (only v's may differ)"
        )
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        kv_len=k.shape[2],
        head_dim=head_dim,
        v_head_dim=v.shape[3],
        dtype=DTYPES[q.dtype],
    )


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Rows that a kernel can load 16 bytes at a time; a CPU asks for the contiguous last dimension alone."""
    if tensor.numel() == 0:
        return
    copy = f"\n  nearest: {name}.contiguous(), a copy"
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        raise LaunchError(
            f"{name}'s last dimension is not contiguous (strides {list(tensor.stride())}): elements of a row lie side"
            f" by side{copy}"
        )
    if not tensor.is_cuda:
        return
    for axis, word in enumerate(("batch", "head", "row")):
        bytes_ = tensor.stride(axis) * tensor.itemsize
        if tensor.shape[axis] > 1 and bytes_ % ALIGNMENT:
            raise LaunchError(
                f"{name}'s {word} stride is {bytes_} bytes (strides {list(tensor.stride())}):"
                f" rows start at multiples of {ALIGNMENT} bytes{copy}"
            )
    if tensor.data_ptr() % ALIGNMENT:
        _misaligned(name, tensor)


def _misaligned(name: str, tensor: torch.Tensor) -> NoReturn:
    raise LaunchError(
        f"{name} starts {tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT} (storage offset"
        f" {tensor.storage_offset()}): rows start at multiples of {ALIGNMENT} bytes\n  nearest: {name}.clone(), a copy"
    )


def _check_captured(
    variant: Variant, declared: Declared, given: object, problem: Problem, device: torch.device
) -> None:
    title = f"captured tensor {declared.name!r} of {variant.name!r}"
    dims = ", ".join("any" if dim is None else str(dim) for dim in declared.dims)
    if given is None:
        raise LaunchError(variant.missing(declared))
    if not isinstance(given, torch.Tensor):
        cure = f"\n  nearest: torch.from_numpy({declared.name})" if isinstance(given, np.ndarray) else ""
        raise LaunchError(f"{title} got a {type(given).__name__}, not a torch.Tensor{cure}")
    _check_memory(title, declared.name, given)
    if _dtype(given) != declared.dtype:
        raise LaunchError(
            f"{title} is {_dtype(given)} and declared {declared.dtype}\n"
            f"  nearest: {declared.name}.to(torch.{declared.dtype})"
        )
    if given.device != device:
        raise LaunchError(
            f"{title} is on {given.device} and q on {device}\n  nearest: {declared.name}.to({str(device)!r})"
        )
    shape = list(given.shape)
    if given.dim() != len(declared.dims):
        raise LaunchError(f"{title} has {given.dim()} dimensions {shape} and is declared [{dims}]")
    sizes = {"q": problem.q_len, "kv": problem.kv_len, **problem.sizes()}
    for axis, dim in enumerate(declared.dims):
        wanted = sizes[dim] if isinstance(dim, str) else dim
        if wanted is not None and shape[axis] != wanted and not (isinstance(dim, str) and shape[axis] == 1):
            named = f"{dim} = {wanted}" if isinstance(dim, str) else f"{wanted}"
            alternative = " (or 1: it broadcasts)" if isinstance(dim, str) else ""
            raise LaunchError(
                f"{title} is {shape} and declared [{dims}]: dimension {axis} must be {named}{alternative}"
            )
        if shape[axis] == 0 and wanted != 0:
            raise LaunchError(f"{title} is {shape}: dimension {axis} is empty, so there is nothing to read")
        if shape[axis] >= 1 << 31:
            raise LaunchError(f"{title} is {shape}: sizes stay below 2^31")


def _factor(scale: object, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if wrong := no_number("scale", scale):
        raise LaunchError(wrong)
    if not abs(scale) <= _FLOAT32_MAX:  # a NaN neither
        raise LaunchError(
            f"scale is {shown(scale)}: it must be finite in float32\n"
            f"  nearest: 1 / sqrt(head_dim) = {head_dim**-0.5:.6g}"
        )
    return float(scale)


_FLOAT32_MAX = float(np.finfo(np.float32).max)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# Outputs


def o_layout(q: torch.Tensor, v: torch.Tensor) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Shape and strides of o: rows of all heads side by side where q's are ([batch, q_len, heads, head_dim]), else
    contiguous."""
    batch, heads, q_len, _ = q.shape
    dim = v.shape[3]
    if q.stride(1) < q.stride(2):
        return (batch, heads, q_len, dim), (q_len * heads * dim, dim, heads * dim, 1)
    return (batch, heads, q_len, dim), (heads * q_len * dim, q_len * dim, dim, 1)


def outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a call, not written yet."""
    shape, strides = o_layout(q, v)
    o = torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device)
    return o, torch.empty(shape[:3], dtype=_lse_dtype(q), device=q.device)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _nothing(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = outputs(q, v)
    return o.zero_(), lse.fill_(-math.inf)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


class Numbers:
    """Scale, parameters and dropout of a call as a kernel takes them, checked where they are not those of the last."""

    __slots__ = ("_head_dim", "_last", "_params", "_variant")

    def __init__(self, request: Request) -> None:
        self._variant, self._head_dim = request.variant, request.problem.head_dim
        self._params = tuple(request.params)
        self._last: tuple[tuple, tuple[float, ...]] = ((), ())

    def __call__(self, scale: float | None, named: Mapping[str, object], dropout: Dropout | None) -> tuple[float, ...]:
        given, numbers = self._last
        if given != (now := (scale, *[named.get(name) for name in self._params])):
            values = self._variant.values({name: named[name] for name in self._params if name in named})
            numbers = abs(_factor(scale, self._head_dim)), *[values[name] for name in self._params]
            self._last = (now, numbers)
        return numbers if dropout is None else (*numbers, *kernel.dropout_numbers(dropout))


class _Record:
    """A launch for one set of shapes, strides and dtypes: call it with the tensors and numbers of a call."""

    __slots__ = (
        *("_device", "_dtype", "_index", "_launch", "_lse_shape", "_numbers", "_o_shape", "_o_strides", "_tensors"),
    )

    def __init__(self, q: torch.Tensor, v: torch.Tensor, request: Request, launch: kernel.Record) -> None:
        self._launch = launch
        self._device, self._index, self._dtype = q.device, q.device.index, q.dtype
        self._o_shape, self._o_strides = o_layout(q, v)
        self._lse_shape = self._o_shape[:3]
        self._tensors = tuple(request.tensors)
        self._numbers = Numbers(request)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        named: Mapping[str, object],
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        captured = [named[name] for name in self._tensors]
        numbers = self._numbers(scale, named, dropout)
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (inputs[0] | inputs[1] | inputs[2]) % ALIGNMENT:
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                check_rows(name, tensor)
        read = [tensor.data_ptr() for tensor in captured]
        if 0 in inputs or 0 in read:
            for name, tensor in zip(("q", "k", "v", *self._tensors), (q, k, v, *captured), strict=True):
                _check_memory(name, name, tensor)
        o = torch.empty_strided(self._o_shape, self._o_strides, dtype=self._dtype, device=self._device)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=self._device)
        addresses = (*inputs, o.data_ptr(), lse.data_ptr(), *read)
        if torch._C._cuda_getDevice() == self._index:
            self._start(addresses, numbers)
        else:
            with torch.cuda.device(self._index):
                self._start(addresses, numbers)
        return o, lse

    def _start(self, addresses: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if self._launch.counts:
            counters = _counters(self._device, stream)
            self._launch(addresses, numbers, stream, counters.data_ptr())
        else:
            self._launch(addresses, numbers, stream)


def _menu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, problem: Problem, dropout: Dropout | None
) -> planner.Menu:
    """The plans for a problem on q's GPU, of its best pipeline that can address the tensors; the planner memoises."""
    asked = (variant, gpu_arch(q), problem.dtype, problem.head_dim, problem.v_head_dim)
    menu = planner.menu(*asked, dropout=dropout is not None)
    if menu.plans[0].specialized is None:
        return menu
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refusal = kernel.tma_unsupported_reason(tensor.shape, tensor.stride(), tensor.itemsize)
        if refusal is not None and variant.pins.pipeline is not None:
            raise LaunchError(
                f"{variant.name!r} is pinned to pipeline {variant.pins.pipeline}, whose TMA cannot address {name}:"
                f" {refusal}\n  nearest: {name}.contiguous(), a copy, or pipeline ampere"
            )
        if refusal is not None:
            return planner.menu(*asked, pipeline="ampere")
    return menu


def gpu_arch(q: torch.Tensor) -> str:
    """The architecture whose kernels run on q's GPU."""
    return arch.of_device(*driver.gpu(q.device.index).capability).name


def _counters(device: torch.device, stream: int) -> torch.Tensor:
    """Two zeros that only the launches of one stream share; in a CUDA graph each launch has its own, of the graph's
    memory, because a replay may run beside anything."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    found = _zeros.get((device, stream))
    if found is None:
        found = _zeros[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return found


_zeros: dict[tuple[torch.device, int], torch.Tensor] = {}


def _recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, dropout: Dropout | None) -> _Record:
    """Plan, compile and load what the request needs, as far as that is not done."""
    problem, index = request.problem, q.device.index
    menu = _menu(q, k, v, request.variant, problem, dropout)
    loaded = kernel.load(planner.choose(menu, problem, driver.gpu(index).sms))
    layout = kernel.Layout(q=q.stride()[:3], k=k.stride()[:3], v=v.stride()[:3], o=o_layout(q, v)[1][:3])
    return _Record(q, v, request, loaded.record(problem, layout, captured_shapes(request), index))


def captured_shapes(request: Request) -> dict[str, kernel.Captured]:
    """Shapes of the captured tensors as records take them."""
    return {
        name: kernel.Captured(sizes=tuple(tensor.shape), strides=tensor.stride())
        for name, tensor in request.tensors.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# On a CPU


def _walk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, dropout: Dropout | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan that a GPU would run, tile by tile in NumPy."""
    problem, variant = request.problem, request.variant
    case = cpu_case(request)
    for declared in variant.tensors:
        if broken := broken_promise(declared, case.tensors[declared.name]):
            raise LaunchError(f"captured tensor {declared.name!r} of {variant.name!r} {broken}")
    menu = planner.menu(*cpu_request(variant, problem), dropout=dropout is not None)
    walked = tiles.walk(
        planner.choose(menu, problem, arch.find(variant.pins.arch or CPU_ARCH).sms),
        analyse(variant),
        case,
        *(array(tensor) for tensor in (q, k, v)),
        scale=request.scale,
        dtype=problem.dtype,
        dropout=dropout,
    )
    o, lse = outputs(q, v)
    return o.copy_(torch.from_numpy(walked.o)), lse.copy_(torch.from_numpy(walked.lse))


def cpu_case(request: Request) -> Case:
    tensors = {name: array(tensor) for name, tensor in request.tensors.items()}
    return Case(sizes=request.problem.sizes(), params=request.params, tensors=tensors)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The values as NumPy holds them: 16-bit floats as float32, which is exact."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()


def cpu_request(variant: Variant, problem: Problem) -> tuple[Variant, str, str, int, int]:
    """What a menu is asked for whose tiles are walked.  Where no kernel takes the dtype or the head dims, those of the
    nearest that one takes: the walk needs its tiles and their order only."""
    dtype = problem.dtype if problem.itemsize == 2 else variant.dtypes[-1]
    dims = problem.head_dim, problem.v_head_dim
    if not variant.only or problem.head_dim in variant.head_dims:
        dims = tuple(min(max(-(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, MIN_HEAD_DIM), MAX_HEAD_DIM) for dim in dims)
    return variant, variant.pins.arch or CPU_ARCH, dtype, *dims
