"""Gradients of attention() on torch tensors, from o and lse of any forward: a GPU's kernels, or the CPU walk."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.analysis.derivative import differentiable_of
from flashgen.analysis.facts import analyse
from flashgen.lang.variant import Variant
from flashgen.ops import memory, sequences
from flashgen.ops.call import Call, Request, check_rows
from flashgen.ops.forward import array, cpu_case, strides_like
from flashgen.ops.menus import ALIGNMENT, cpu_request, gpu_menu, loadable
from flashgen.ops.records import Kind, call_key, calls_of, first_of, launch_of, remember, request_of
from flashgen.planning import planner
from flashgen.planning.backward import stored
from flashgen.planning.once import Remembered, once
from flashgen.planning.plan import KernelPlan
from flashgen.runtime import kernel
from flashgen.runtime.launch import Launch
from flashgen.runtime.tiles_backward import walk_backward

#: What differentiating a gradient is told.
SECOND = (
    "flashgen differentiates attention once: there is no gradient of its gradients\n"
    "  nearest: backward() without create_graph, or attention in plain PyTorch where a second derivative is needed"
)

#: The gradients of q, k and v.
_RESULTS = ("dq", "dk", "dv")

#: The tensors whose strides a launch is told.
_STRIDED = ("q", "k", "v", "o", "d_o", *_RESULTS)


class Given(NamedTuple):
    """The tensors of a backward beside the captured ones: gradients of o and lse (None: 0), the inputs, the results."""

    do: torch.Tensor | None
    dlse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor


class Gradients(NamedTuple):
    """dq, dk and dv of the shapes and dtype of q, k and v; and those of captured tensors, in the order asked for."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    captured: tuple[torch.Tensor, ...]


def run_backward(given: Given, call: Call, wanted: Sequence[str]) -> Gradients:
    """Gradients of a call, from those of its results; `wanted` names the captured tensors that want one.

    q, k, v as in `attention`, o and lse as it gave them.  dq, dk and dv are laid out as o is: rows of all heads side
    by side where those of q, k, v are, else contiguous.  Raises what `attention` raises.
    """
    do, dlse, q, k, v, o, lse = given
    do = torch.zeros((), dtype=q.dtype, device=q.device).expand(o.shape) if do is None else _written_out(do)
    dlse = None if dlse is None else _written_out(dlse)
    if q.is_cuda:
        do, o = _loadable(do), _loadable(o)
        dlse = None if dlse is None else dlse.contiguous()
    given = Given(do, dlse, q, k, v, o, lse)
    deterministic, wanted = in_order(call.deterministic), tuple(wanted)
    calls = calls_of(call.variant)
    of_call = call_key(q, k, v, call, calls)
    key = *of_call, do.stride(), o.stride(), deterministic, wanted
    record = calls.backward.get(key)
    if record is None:
        request = request_of(q, k, v, call, calls, of_call)
        if wanted and call.variant.constants:
            known = tuple(name for name in differentiable_of(request.variant) if name in wanted)
            if len(known) < len(wanted):
                return _beside_zeros(run_backward(given, call, known), known, call, wanted)
        if request.lacks_rows(q, k):
            dq, dk, dv = (x.zero_() for x in results(q, k, v))
            return Gradients(dq, dk, dv, tuple(_of_nothing(request, name, dlse) for name in wanted))
        if not q.is_cuda:
            return _walk(given, request, deterministic, wanted)
        record = _Record(given, request, deterministic, wanted)
        remember(calls.backward, key, record)
    return record(given, call)


def _beside_zeros(found: Gradients, known: tuple[str, ...], call: Call, wanted: tuple[str, ...]) -> Gradients:
    """The same for all that are wanted: a value of a constant may leave a captured tensor out of the score."""
    by_name = dict(zip(known, found.captured, strict=True))
    return found._replace(
        captured=tuple(by_name[name] if name in by_name else torch.zeros_like(call.named[name]) for name in wanted)
    )


def _of_nothing(request: Request, name: str, dlse: torch.Tensor | None) -> torch.Tensor:
    """The gradient of a captured tensor where no row has a key: lse of a row is its sink, if there is one."""
    x, sink = request.tensors[name], request.variant.sink
    if sink is None or name != sink.name or dlse is None or not request.problem.batch:
        return torch.zeros_like(x)
    if (beyond := sequences.beyond(request.sequences, dlse.shape[2])) is not None:
        dlse = dlse.masked_fill(beyond, 0.0)
    of_rows = sequences.summed(dlse, x.shape, request.sequences).masked_fill(x == -math.inf, 0.0)
    return of_rows.sum_to_size(x.shape).to(x.dtype)


def plan_of(given: Given, request: Request, deterministic: bool, wanted: tuple[str, ...]) -> KernelPlan:
    """The plan of a backward where q lies; PlanError where there is none."""
    problem = request.problem
    if given.q.is_cuda:
        ask = functools.partial(_menu, given, request, deterministic, wanted)
        menu = request.kind.menu_of(("backward", deterministic, wanted), ask)
        return planner.choose(menu, problem, request.kind.sms)
    asked = cpu_request(request.variant, problem, **_options(request, deterministic, wanted))
    return planner.choose(planner.menu_of(asked), problem, asked.arch.sms)


def _menu(given: Given, request: Request, deterministic: bool, wanted: tuple[str, ...]) -> planner.Menu:
    options = _options(request, deterministic, wanted)
    return gpu_menu(given.q, given.k, given.v, request.variant, request.problem, **options)


def _options(request: Request, deterministic: bool, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Those of `KernelRequest.of` beside the variant, dtype and head dims."""
    dropout = request.dropout is not None
    return {
        **{"backward": True, "deterministic": deterministic, "dropout": dropout, "gradients": wanted},
        "layout": request.layout,
    }


def in_order(deterministic: bool) -> bool:
    """Whether a backward sums in one order: the call's own word, or torch's for the process."""
    return deterministic or (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def with_gradient(variant: Variant, names: tuple[str, ...], needed: tuple[bool, ...]) -> tuple[str, ...]:
    """The captured tensors of a call that want a gradient and have one, sorted."""
    asked = {name for name, wants in zip(names, needed, strict=True) if wants}
    return tuple(name for name in differentiable_of(variant) if name in asked)


def results(*inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of these, not written yet."""
    return [torch.empty_strided(*_like(x), dtype=x.dtype, device=x.device) for x in inputs]


def _like(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of the gradient of an input."""
    shape = tuple(x.shape)
    return shape, strides_like(shape, x.stride(), shape[3])


def _written_out(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its memory does not hold its elements: those of a view that negates, or zeros without any."""
    if x._is_zerotensor():
        return torch.zeros_like(x)
    return x.resolve_neg() if x.is_neg() else x


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


def _loadable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where a kernel could not load its rows 16 bytes at a time, or TMA not at all."""
    strides = x.stride()
    if x.data_ptr() % ALIGNMENT == 0:
        if loadable(x.shape, strides, x.itemsize):
            return x
        # The stride of one row, head or sequence may be any.
        apart = [0 if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True)]
        strides = (*apart[:3], strides[3])
        if loadable(x.shape, strides, x.itemsize):
            return x
    return x.clone(memory_format=torch.contiguous_format)  # x.contiguous() may be x, which starts where it did


class _Record:
    """The launches for one set of shapes, strides and dtypes: call it with the tensors and numbers of a call."""

    __slots__ = (
        *("_first", "_joined", "_kind", "_pick", "_places", "_record", "_results", "_room", "_sums", "_wanted"),
    )

    def __init__(self, given: Given, request: Request, deterministic: bool, wanted: tuple[str, ...]) -> None:
        do, _, q, k, v, o, _ = given
        assert do is not None  # run_backward has made it
        plan = plan_of(given, request, deterministic, wanted)
        self._kind: Kind = request.kind
        (_, of_dq), (_, of_dk), (_, of_dv) = self._results = _like(q), _like(k), _like(v)
        given_strides = q.stride(), k.stride(), v.stride(), o.stride(), do.stride(), of_dq, of_dk, of_dv
        strides = dict(zip(_STRIDED, [of[:3] for of in given_strides], strict=True))
        launch = launch_of(request, plan, strides, self._kind.sms)
        self._record = kernel.load(plan).record(launch, self._kind.device)
        self._places, self._room = memory.places(launch.workspaces)
        self._wanted = wanted
        self._sums = _sums(plan, request, wanted) if wanted else []
        self._first = None if request.sequences is None else first_of(request)
        self._joined = request.sequences is not None and request.sequences.layout.joined
        pickers = _pickers(plan)
        self._pick = pickers.get(wanted) or pickers.keep(wanted, _picker(self._kind, launch, wanted))

    def __call__(self, given: Given, call: Call) -> Gradients:
        index, _, dtype, _, tensors, own, numbers_of, _ = self._kind
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(given, call)
        first = self._first
        numbers = numbers_of(call) if first is None else numbers_of(call, first(call.named))
        do, dlse, q, k, v, o, lse = given
        assert do is not None  # run_backward has made it
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (inputs[0] | inputs[1] | inputs[2]) % ALIGNMENT:
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                check_rows(name, tensor)
        dq, dk, dv = [memory.empty_strided(shape, strides, dtype) for shape, strides in self._results]
        if self._joined:  # rows of no sequence
            dq.zero_(), dk.zero_(), dv.zero_()
        room = memory.empty_strided((self._room,), (1,), torch.uint8)
        start = room.data_ptr()
        sums = [memory.empty_strided(shape, strides, of_sum) for shape, strides, of_sum in self._sums]
        addresses = (
            *inputs,
            *(o.data_ptr(), do.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr()),
            *(dq.data_ptr(), dk.data_ptr(), dv.data_ptr()),
            *[start + place for place in self._places],
            *[call.named[name].data_ptr() for name in tensors],
            *[x.data_ptr() for x in sums],
            *(sequences.addresses(own, call.named) if own else ()),
        )
        self._record(self._pick(addresses), numbers, torch._C._cuda_getCurrentRawStream(index))
        captured = tuple(x.to(call.named[name].dtype) for x, name in zip(sums, self._wanted, strict=True))
        return Gradients(dq, dk, dv, captured)


def _sums(plan: KernelPlan, request: Request, wanted: tuple[str, ...]) -> list[tuple[Any, Any, torch.dtype]]:
    """Sizes, strides and dtypes of the gradients of captured tensors in memory."""
    shapes = {name: tuple(request.tensors[name].shape) for name in wanted}
    own = stored(plan, request.problem, shapes)
    return [(of, memory.contiguous(of), getattr(torch, own.get(name, "float32"))) for name, of in shapes.items()]


_Picker = Callable[[tuple[int, ...]], tuple[int, ...]]


@once
def _pickers(plan: KernelPlan) -> Remembered[tuple[str, ...], _Picker]:
    """What `_picker` has found of a plan, by the captured tensors that want a gradient."""
    return Remembered()


def _picker(kind: Kind, launch: Launch, wanted: tuple[str, ...]) -> _Picker:
    """What picks the addresses of a launch out of those that a record has of its calls."""
    given = [*("q", "k", "v", "o", "d_o", "lse", "dlse"), *_RESULTS, *(part.name for part in launch.workspaces)]
    given += [*(f"tensor_{name}" for name in kind.tensors), *(f"grad_{name}" for name in wanted)]
    given += launch.plan.layout.pointers
    return operator.itemgetter(*map(given.index, launch.pointers))


# ---------------------------------------------------------------------------------------------------------------------
# On a CPU


def _walk(given: Given, request: Request, deterministic: bool, wanted: tuple[str, ...]) -> Gradients:
    """The plan that a GPU would run, tile by tile in NumPy."""
    do, dlse, q, k, v, o, lse = given
    assert do is not None  # run_backward has made it
    walked = walk_backward(
        plan_of(given, request, deterministic, wanted),
        analyse(request.variant),
        cpu_case(request),
        *(array(x) for x in (q, k, v, o, lse, do)),
        scale=request.scale,
        dtype=request.problem.dtype,
        dlse=None if dlse is None else array(dlse),
        dropout=request.dropout,
        sequences=None if request.sequences is None else sequences.of_batch(request.sequences, request.problem),
    )
    found = results(q, k, v)
    for result, gradient in zip(found, walked[:3], strict=True):
        result.copy_(torch.from_numpy(gradient))
    captured = (torch.from_numpy(walked.captured[name]).to(request.tensors[name].dtype) for name in wanted)
    dq, dk, dv = found
    return Gradients(dq, dk, dv, tuple(captured))
