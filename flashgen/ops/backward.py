"""Gradients of attention() on torch tensors, from o and lse of any forward: a GPU's kernels, or the CPU walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.analysis.derivative import differentiable
from flashgen.analysis.facts import analyse
from flashgen.lang.variant import Variant
from flashgen.ops.call import ALIGNMENT, Call, Request, check_rows, checked
from flashgen.ops.forward import array, cpu_case, strides_like, strides_of
from flashgen.ops.menus import cpu_request, gpu_menu, loadable
from flashgen.ops.records import Numbers, call_key, calls_of, launch_of, remember
from flashgen.planning import planner
from flashgen.planning.plan import KernelPlan
from flashgen.runtime import driver, kernel
from flashgen.runtime.tiles_backward import walk_backward

#: What differentiating a gradient is told.
SECOND = (
    "flashgen differentiates attention once: there is no gradient of its gradients\n"
    "  nearest: backward() without create_graph, or attention in plain PyTorch where a second derivative is needed"
)

#: Workspaces start at multiples of this many bytes of one allocation.
_ROOM = 256


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
    key = (*call_key(q, k, v, call, calls.constants), do.stride(), o.stride(), deterministic, wanted)
    record = calls.backward.get(key)
    if record is None:
        request = checked(q, k, v, call)
        if request.problem.empty or request.problem.kv_len == 0:
            tensors = [request.tensors[name] for name in wanted]
            dq, dk, dv = (x.zero_() for x in results(q, k, v))
            return Gradients(dq, dk, dv, tuple(map(torch.zeros_like, tensors)))
        if not q.is_cuda:
            return _walk(given, request, deterministic, wanted)
        record = _Record(given, request, deterministic, wanted)
        remember(calls.backward, key, record)
    return record(given, call)


def plan_of(given: Given, request: Request, deterministic: bool, wanted: tuple[str, ...]) -> KernelPlan:
    """The plan of a backward where q lies; PlanError where there is none."""
    problem, variant = request.problem, request.variant
    options = {"deterministic": deterministic, "dropout": request.dropout is not None, "gradients": wanted}
    if given.q.is_cuda:
        menu = gpu_menu(given.q, given.k, given.v, variant, problem, backward=True, **options)
        return planner.choose(menu, problem, driver.gpu(given.q.device.index).sms)
    asked = cpu_request(variant, problem, backward=True, **options)
    return planner.choose(planner.menu_of(asked), problem, asked.arch.sms)


def in_order(deterministic: bool) -> bool:
    """Whether a backward sums in one order: the call's own word, or torch's for the process."""
    return deterministic or (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def with_gradient(variant: Variant, names: tuple[str, ...], needed: tuple[bool, ...]) -> tuple[str, ...]:
    """The captured tensors of a call that want a gradient and have one, sorted."""
    asked = {name for name, wants in zip(names, needed, strict=True) if wants}
    return tuple(name for name in differentiable(variant.score_node) if name in asked)


def results(*inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of these, not written yet."""
    return [torch.empty_strided(x.shape, strides_like(x, x.shape[3]), dtype=x.dtype, device=x.device) for x in inputs]


def _written_out(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its memory does not hold its elements: those of a view that negates, or zeros without any."""
    return torch.zeros_like(x) if x._is_zerotensor() else x.resolve_neg()


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


def _loadable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where a kernel could not load its rows 16 bytes at a time, or TMA not at all."""
    aligned = x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0
    aligned &= loadable(x)
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        aligned &= size == 1 or stride * x.itemsize % ALIGNMENT == 0
    return x if aligned else x.contiguous()


class _Record:
    """The launches for one set of shapes, strides and dtypes: call it with the tensors and numbers of a call."""

    def __init__(self, given: Given, request: Request, deterministic: bool, wanted: tuple[str, ...]) -> None:
        do, _, q, k, v, o, _ = given
        assert do is not None  # run_backward has made it
        plan = plan_of(given, request, deterministic, wanted)
        self._device, self._wanted = q.device, wanted
        self._results = [(name, x.shape, strides_like(x, x.shape[3])) for name, x in (("dq", q), ("dk", k), ("dv", v))]
        strides = {name: strides_of(x) for name, x in {"q": q, "k": k, "v": v, "o": o, "d_o": do}.items()}
        strides |= {name: result[:3] for name, _, result in self._results}
        launch = launch_of(request, plan, strides, driver.gpu(q.device.index).sms)
        self._record, self._pointers = kernel.load(plan).record(launch, q.device.index), launch.pointers
        self._places, self._room = {}, 0
        for part in launch.workspaces:
            self._places[part.name] = self._room
            self._room += -(-part.amount // _ROOM) * _ROOM
        self._tensors = tuple(request.tensors)
        self._numbers = Numbers(request)

    def __call__(self, given: Given, call: Call) -> Gradients:
        numbers = self._numbers(call)
        _, _, q, k, v, _, _ = given
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                check_rows(name, tensor)
        index = self._device.index
        if torch._C._cuda_getDevice() == index:
            return self._run(given, numbers, call.named)
        with torch.cuda.device(index):
            return self._run(given, numbers, call.named)

    def _run(self, given: Given, numbers: tuple[float, ...], named: Mapping[str, Any]) -> Gradients:
        do, dlse, q, k, v, o, lse = given
        found = {
            name: torch.empty_strided(shape, strides, dtype=q.dtype, device=self._device)
            for name, shape, strides in self._results
        }
        sums = {n: torch.empty(named[n].shape, dtype=torch.float32, device=self._device) for n in self._wanted}
        room = torch.empty(self._room, dtype=torch.uint8, device=self._device)
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "d_o": do, "lse": lse, **found}
        for name in self._tensors:
            tensors[f"tensor_{name}"] = named[name]
        for name, x in sums.items():
            tensors[f"grad_{name}"] = x
        addresses = {name: x.data_ptr() for name, x in tensors.items()}
        start = room.data_ptr()
        for name, place in self._places.items():
            addresses[name] = start + place
        addresses["dlse"] = 0 if dlse is None else dlse.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        self._record(tuple(addresses[name] for name in self._pointers), numbers, stream)
        captured = tuple(sums[name].to(named[name].dtype) for name in self._wanted)
        return Gradients(found["dq"], found["dk"], found["dv"], captured)


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
    )
    found = results(q, k, v)
    for result, gradient in zip(found, walked[:3], strict=True):
        result.copy_(torch.from_numpy(gradient))
    captured = (torch.from_numpy(walked.captured[name]).to(request.tensors[name].dtype) for name in wanted)
    dq, dk, dv = found
    return Gradients(dq, dk, dv, tuple(captured))
