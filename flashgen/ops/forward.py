"""attention() without gradients: a GPU's kernel, or the CPU walk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, overload

import numpy as np
import torch

from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.errors import LaunchError
from flashgen.lang.stored import broken_promise
from flashgen.ops import float8, memory, sequences
from flashgen.ops.call import Call, Request, check_rows, checked
from flashgen.ops.layouts import check_memory
from flashgen.ops.menus import ALIGNMENT, addressable, cpu_request, gpu_menu
from flashgen.ops.out import check as check_out
from flashgen.ops.records import Kind, call_key, calls_of, first_of, launch_of, remember, request_of
from flashgen.planning import planner
from flashgen.planning.division import Divided, divide, visits_all
from flashgen.planning.members import ALL_KEYS, Keys
from flashgen.runtime import kernel, tiles
from flashgen.runtime.launch import Launch, counted


@overload
def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    return_lse: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    return_lse: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one eager call, or o alone, which autograd does not see; arguments and errors as in `attention`."""
    calls = calls_of(call.variant)
    key = record = None
    try:
        found = call_key(q, k, v, call, calls)
        if out is not None:
            found = *found, "out", out.shape, out.stride(), out.dtype, out.device
        record = calls.records.get(found)
        key = found
    except (AttributeError, TypeError, ValueError, RuntimeError):
        pass  # something is no tensor, has no strides, or is no number: said below
    if record is None:
        request = request_of(q, k, v, call, calls, key)
        if out is not None:
            _check_out(out, q, k, v, call)
        empty = request.lacks_rows(q, k)
        if empty or not q.is_cuda:
            o, lse = _nothing(q, v, request) if empty else _walk(q, k, v, request)
            o = o if out is None else written(out.copy_(o))
            return (o, lse) if return_lse else o
        lies = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()) if key is None else key
        record = _recorded(q, k, v, request, lies, out)
        if key is not None:
            remember(calls.records, key, record)
    elif out is not None:
        _check_out(out, q, k, v, call)
    result = record(q, k, v, call, return_lse, out)
    if out is not None:
        written(out)
    return result


def written(out: torch.Tensor) -> torch.Tensor:
    """Memory that a call has written to.  Autograd is told: no kernel of ours tells it, and no copy within an op."""
    torch.autograd.graph.increment_version(out)
    return out


def _check_out(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    joined = sequences.VARLEN[0] in call.named
    check_out(out, o_layout(q, v)[0], q, _inputs(q, k, v, call), joined=joined)


def _inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Iterator[tuple[str, object]]:
    """What kernels of a call read."""
    yield from (("q", q), ("k", k), ("v", v))
    yield from call.named.items()


def strides_like(shape: tuple[int, ...], strides: tuple[int, ...], columns: int) -> tuple[int, int, int, int]:
    """Of a result with a tensor's batch, heads and rows: rows of all heads side by side where the tensor's are ([batch,
    rows, heads, columns]), else contiguous."""
    _, heads, rows, _ = shape
    _, of_head, of_row, _ = strides
    if of_head < of_row:
        return rows * heads * columns, columns, heads * columns, 1
    return heads * rows * columns, rows * columns, columns, 1


#: Sizes and strides.
_Shape = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]


def o_layout(q: torch.Tensor, v: torch.Tensor) -> _Shape:
    """Shape and strides of o."""
    return _o_layout(q.shape, q.stride(), v.shape[3])


def _o_layout(shape: tuple[int, ...], strides: tuple[int, ...], columns: int) -> _Shape:
    """Those of rows of so many columns, of a q of this shape and these strides."""
    batch, heads, q_len, _ = shape
    return (batch, heads, q_len, columns), strides_like(shape, strides, columns)


def outputs(q: torch.Tensor, v: torch.Tensor, eight: float8.Eight | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a call, not written yet."""
    shape, strides = o_layout(q, v)
    o = torch.empty_strided(shape, strides, dtype=float8.out_dtype(eight, q), device=q.device)
    return o, torch.empty(shape[:3], dtype=_lse_dtype(q), device=q.device)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _nothing(q: torch.Tensor, v: torch.Tensor, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a key: rows of a sequence have nothing but their sinks."""
    o, lse = outputs(q, v, request.eight)
    sink = request.variant.sink
    if sink is None or not request.problem.batch:
        return o.zero_(), lse.fill_(-math.inf)
    lse.copy_(sequences.of_each(request.tensors[sink.name], request.sequences, q.shape[2]))
    if (beyond := sequences.beyond(request.sequences, q.shape[2])) is not None:
        lse.masked_fill_(beyond, -math.inf)
    return o.zero_(), lse


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


class _Record:
    """A launch for one set of shapes, strides and dtypes: call it with the tensors and numbers of a call.

    All that a call can still get wrong is checked anew: numbers, and where its tensors lie.
    """

    __slots__ = (
        *("_counted", "_counts", "_first", "_kind", "_many_rows", "_o_shape", "_o_strides", "_places", "_record"),
        "_room",
    )

    def __init__(self, o: _Shape, request: Request, loaded: kernel.Kernel, launch: Launch) -> None:
        self._kind: Kind = request.kind
        self._record = loaded.record(launch, self._kind.device)
        self._counts, self._counted = bool(launch.cleared), counted(launch.plan)
        self._o_shape, self._o_strides = o
        batch, heads, rows, _ = self._o_shape
        self._many_rows = batch * heads * rows > memory.ROWS
        self._places, self._room = memory.places(launch.workspaces)
        self._first = None if request.sequences is None else first_of(request)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        return_lse: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        index, _, dtype, eight, tensors, own_names, numbers_of, _ = self._kind
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(q, k, v, call, return_lse, out)
        first = self._first
        numbers = numbers_of(call) if first is None else numbers_of(call, first(call.named))
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        captured = [call.named[name].data_ptr() for name in tensors] if tensors else ()
        if (at_q | at_k | at_v) % ALIGNMENT or 0 in (at_q, at_k, at_v, *captured):
            self._refuse(q, k, v, call)
        o = memory.empty_strided(self._o_shape, self._o_strides, dtype) if out is None else out
        stream = torch._C._cuda_getCurrentRawStream(index)
        counts = self._counts
        shared = memory.of_stream(index, stream) if counts or not return_lse else None
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = o
        if return_lse or self._many_rows or shared is None:
            batch, heads, rows, _ = self._o_shape
            lse = memory.empty_strided((batch, heads, rows), (heads * rows, rows, 1), torch.float32)
            at_lse = lse.data_ptr()
            result = (o, lse) if return_lse else o
        else:
            at_lse = shared.data_ptr() + memory.ROWS_START
        own: tuple[int, ...] = float8.addresses(call.named) if eight else ()
        if eight and sequences.watched():
            self._check(q, k, v, call)
        if own_names:
            own = *own, *sequences.addresses(own_names, call.named)
            if sequences.watched():
                self._check(q, k, v, call)
        if self._places:
            room = memory.empty_strided((self._room,), (1,), torch.uint8)
            start = room.data_ptr()
            own = *own, *[start + place for place in self._places]
        addresses = at_q, at_k, at_v, o.data_ptr(), at_lse, *own, *captured
        if counts:
            counters = memory.of_graph(index) if shared is None else shared
            addresses = *addresses, counters.data_ptr()
        elif self._counted:
            addresses = *addresses, 0
        self._record(addresses, numbers, stream)
        return result

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Raise LaunchError for lengths and positions out of their bounds, which the host waits to read."""
        request = checked(q, k, v, call)
        if request.sequences is not None:
            sequences.of_batch(request.sequences, request.problem)

    def _refuse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Raise LaunchError if the tensors of a call have no memory, or rows that a kernel cannot load."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_memory(name, name, tensor)
            check_rows(name, tensor)
        for name in self._kind.tensors:
            check_memory(name, name, call.named[name])


def _divided(ask: Callable[[Keys], planner.Menu], request: Request, sms: int) -> Divided:
    """The plan of a request, of the menu that `ask` gives for the keys that a block visits."""
    return divide(
        *(ask, request.problem, sms),
        kv_splits=request.kv_splits,
        params=request.params,
        layout=request.layout,
        invariant=request.invariant,
        alike=request.sequences is not None and request.sequences.alike,
    )


def _recorded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: Request,
    lies: tuple[Any, ...],
    out: torch.Tensor | None,
) -> _Record:
    """Plan, compile and load what a request needs, as far as that is not done; `lies` begins with the shapes of q, k
    and v, and then their strides."""
    if out is not None and not addressable(tuple(out.shape), out.stride(), out.itemsize):
        raise LaunchError(
            f"out has strides {list(out.stride())}, which TMA cannot write to\n  nearest: out.contiguous(), a copy"
        )
    sms, problem, splits = request.kind.sms, request.problem, 1
    if request.menu is not None and visits_all(problem, request.kv_splits, request.invariant):
        plan = planner.choose(request.menu, problem, sms)
    else:
        found = _divided(functools.partial(_menu, q, k, v, request), request, sms)
        plan, splits = found.plan, found.splits
    loaded = kernel.load(plan)
    shape, _, _, of_q, of_k, of_v = lies[:6]
    o = _o_layout(shape, of_q, problem.v_head_dim)
    of_o = o[1] if out is None else out.stride()
    of_rows = {"q": of_q[:3], "k": of_k[:3], "v": of_v[:3], "o": of_o[:3]}
    launch = launch_of(request, loaded.plan, of_rows, sms, kv_splits=splits)
    return _Record(o, request, loaded, launch)


def _menu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, keys: Keys) -> planner.Menu:
    """That of blocks which visit such keys; asked for once for calls of one kind."""
    assert request.menu is not None  # q lies on a GPU
    if keys is ALL_KEYS:
        return request.menu

    def ask() -> planner.Menu:
        return gpu_menu(q, k, v, request.variant, request.problem, keys=keys, **request.options)

    return request.kind.menu_of(keys, ask)


# ---------------------------------------------------------------------------------------------------------------------
# On a CPU


def _walk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan that a GPU would run, tile by tile in NumPy."""
    problem, variant = request.problem, request.variant
    case = cpu_case(request)
    for declared in variant.tensors:
        if broken := broken_promise(declared, case.tensors[declared.name]):
            raise LaunchError(f"captured tensor {declared.name!r} of {variant.name!r} {broken}")

    def ask(keys: Keys) -> planner.Menu:
        return planner.menu_of(cpu_request(variant, problem, keys=keys, **request.options))

    found = _divided(ask, request, cpu_request(variant, problem, **request.options).arch.sms)
    own = None if request.sequences is None else sequences.of_batch(request.sequences, problem)
    if own is not None and request.eight is not None:
        q, k, v, own = float8.of_sequences(q, k, v, request.eight, own, request.layout, problem)
    walked = tiles.walk(
        found.plan,
        analyse(variant),
        case,
        *(array(tensor) for tensor in operands(q, k, v, request.eight)),
        scale=request.scale,
        dtype=problem.dtype,
        dropout=request.dropout,
        sequences=own,
        kv_splits=found.splits,
    )
    o, lse = outputs(q, v, request.eight)
    return o.copy_(torch.from_numpy(walked.o)), lse.copy_(torch.from_numpy(walked.lse))


def operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, eight: float8.Eight | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v; of 8 bits their values."""
    if eight is None:
        return q, k, v
    given = (("q", q), ("k", k), ("v", v))
    q, k, v = (float8.dequantised(x, eight.descales[name]) if x.dtype in float8.DTYPES else x for name, x in given)
    return q, k, v


def cpu_case(request: Request) -> Case:
    tensors = {name: array(tensor) for name, tensor in request.tensors.items()}
    return Case(sizes=request.problem.sizes(), params=request.params, tensors=tensors)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The values as NumPy holds them: 16-bit floats as float32, which is exact.

    By DLPack, as `numpy()` would keep the tensor's storage from being resized, which FSDP does.
    """
    tensor = tensor.detach()
    return np.from_dlpack(tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor)
