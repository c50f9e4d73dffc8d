"""A call of attention(), checked before anything runs: what was asked, the limit, the nearest thing that works."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from flashgen.errors import LaunchError, shown
from flashgen.lang.expr import Tensor as Declared
from flashgen.lang.variant import Variant
from flashgen.ops import float8, sequences
from flashgen.ops.layouts import check_memory
from flashgen.ops.menus import ALIGNMENT, gpu_menu
from flashgen.ops.splits import INVARIANT, SPLITS
from flashgen.ops.tracing import IN_JIT_TRACE
from flashgen.ops.values import no_number, no_tensor
from flashgen.planning import planner
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.problem import Problem
from flashgen.runtime.philox import Dropout
from flashgen.tuples import new

#: torch's dtypes by the names that planning uses; the first two run on a GPU, all on a CPU.
DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
GPU_DTYPES = (torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """What a call asks for beside q, k and v, not checked yet: `named` are its parameters, constants and captured
    tensors, and what its sequences have of their own (`sequences.NAMES`); `dropout` is drawn.

    A tuple, because every eager call makes one: a frozen dataclass takes three times as long.
    """

    variant: Variant
    scale: float | None
    named: Mapping[str, Any]
    dropout: Dropout | None = None
    deterministic: bool = False

    def apart(self) -> tuple[Call, dict[str, torch.Tensor]]:
        """The call without its tensors, and they by name: autograd and tracers see arguments, not what one holds."""
        tensors = {name: x for name, x in self.named.items() if isinstance(x, torch.Tensor)}
        if not tensors:
            return self, tensors
        numbers = {name: x for name, x in self.named.items() if name not in tensors}
        return Call(self.variant, self.scale, numbers, self.dropout, self.deterministic), tensors

    def joined(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Call:
        """The call that `apart` took apart, or with other tensors in place of its own."""
        if not names:
            return self
        named = {**self.named, **dict(zip(names, tensors, strict=True))}
        return Call(self.variant, self.scale, named, self.dropout, self.deterministic)


class Request(NamedTuple):
    """A call that is in order.  `variant` has its constants bound, and its score flipped where the scale is negative:
    `scale` is not.  `menu` has the forward's kernels on a GPU.

    A tuple, as each new length makes one.
    """

    problem: Problem
    variant: Variant
    scale: float
    params: dict[str, int | float]
    tensors: dict[str, torch.Tensor]
    dropout: Dropout | None
    sequences: sequences.Sequences | None = None
    kv_splits: int | None = None  # that divide its keys; None: flashgen chooses
    invariant: bool = False  # keys are cut into leaves
    menu: planner.Menu | None = None
    eight: float8.Eight | None = None
    kind: Any = None  # on a GPU what calls of one kind share, a `records.Kind`

    @property
    def layout(self) -> Layout:
        return DENSE if self.sequences is None else self.sequences.layout

    def lacks_rows(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether there is no query or no key, in the problem or, where bounds are loose, in memory."""
        if 0 in self.problem:  # of fields that may be 0: batch, heads, and lengths
            return True
        return self.sequences is not None and 0 in (q.shape[2], k.shape[2])  # lengths are bounds

    @property
    def options(self) -> dict[str, Any]:
        """Those of `KernelRequest.of` beside the variant, dtype and head dims."""
        options = {} if self.eight is None else self.eight.options
        return {"dropout": self.dropout is not None, "layout": self.layout, **options}


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Request:
    """The request of a call, or LaunchError or PlanError for what is wrong with it."""
    if torch.jit.is_tracing():
        raise LaunchError(IN_JIT_TRACE)
    variant, named = call.variant, call.named
    own = sequences.of_call(variant, named)
    kv_splits, of_eight = named.get(SPLITS), float8.of_call(named)
    invariant = INVARIANT in named
    if own or of_eight or invariant or kv_splits is not None:
        apart = {*own, *of_eight, SPLITS, INVARIANT}
        named = {name: x for name, x in named.items() if name not in apart}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
    _check_together(q, k, v)
    problem = _problem(q, k, v, paged=sequences.paged(own))
    found, problem = sequences.checked(own, problem, q.device, k.shape[0], (problem.q_len, problem.kv_len))
    layout = DENSE if found is None else found.layout
    eight = float8.checked(of_eight, q, k, v, problem, layout, read=not q.is_cuda or sequences.watched())
    captured = {t.name: named[t.name] for t in variant.tensors if t.name in named}
    constants = {c.name: named[c.name] for c in variant.constants if c.name in named}
    params = variant.values({name: x for name, x in named.items() if name not in captured and name not in constants})
    sizes = _sizes(problem, found)
    for declared in variant.tensors:
        _check_captured(variant, declared, captured.get(declared.name), sizes, q.device, found)
    signed = factor(call.scale, problem.head_dim)
    bound = variant.bind(**constants)
    bound = bound.with_flipped_score() if signed < 0 else bound
    request = Request(
        problem=problem,
        variant=bound,
        scale=abs(signed),
        params=params,
        tensors={name: captured[name] for name in sorted(captured)},
        dropout=call.dropout,
        sequences=found,
        kv_splits=kv_splits,
        invariant=invariant,
        eight=eight,
    )
    if q.is_cuda:  # refuses head dims and pins that no kernel takes
        request = request._replace(menu=gpu_menu(q, k, v, bound, problem, **request.options))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(name, tensor)
    return request


def checked_again(
    known: Request,
    device: torch.device,
    rows: tuple[int, int],
    call: Call,
    declared: Sequence[Declared],
    of_sequences: Set[str],
) -> Request:
    """As `checked`, of a call on a GPU that differs from that of `known` in lengths, strides that every pipeline can
    load, numbers and contents alone; `rows` are those of q, and of k and v, `declared` the captured tensors,
    `of_sequences` names what sequences may have of their own.  Where tensors start is looked at by whoever launches."""
    if not call.named and call.scale is None and call.dropout is None:  # as of most calls: lengths alone differ
        return new(Request, (known.problem.of_lengths(*rows), *known[1:]))
    variant, named, found, problem = call.variant, call.named, known.sequences, known.problem
    if found is None:
        problem = problem.of_lengths(*rows)
    else:
        if not found.layout.joined:  # else lengths are bounds that the call gives
            problem = problem.of_lengths(*rows)
        own = {name: x for name, x in named.items() if name in of_sequences}
        pages = 0 if found.cache is None else found.cache.pages
        found, problem = sequences.checked(own, problem, device, pages, rows)
    captured = known.tensors
    if declared:
        captured = {one.name: named[one.name] for one in declared}
        sizes = _sizes(problem, found)
        for one in declared:
            _check_shape(variant, one, captured[one.name], sizes, found)
    scale, params = known.kind.numbers.apart(call)
    own_fields = problem, known.variant, scale, params, captured, call.dropout, found, named.get(SPLITS)
    return new(Request, own_fields + known[_OF_KIND:])


#: Where the fields of a Request begin that calls of one kind share.
_OF_KIND = Request._fields.index("invariant")


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LaunchError(no_tensor(name, tensor))
    check_memory(name, name, tensor)
    if tensor.dim() != 4:
        cure = f"\n  nearest: {name}.unsqueeze(0), a batch of one" if tensor.dim() == 3 else ""
        raise LaunchError(
            f"{name} has {tensor.dim()} dimensions {list(tensor.shape)}:"
            f" q, k and v are [batch, heads, seqlen, head_dim]{cure}"
        )
    check_device(name, tensor)


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Raise LaunchError for a tensor where nothing of flashgen's runs."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise LaunchError(f"{name} is on {tensor.device}: attention runs on NVIDIA GPUs (cuda) and on the CPU")


def _check_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    narrow = any(x.dtype in float8.DTYPES for x in (q, k, v))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise LaunchError(
                f"q is on {q.device} and {name} on {tensor.device}: they share a device\n"
                f"  nearest: {name}.to({str(q.device)!r}), a copy"
            )
        if tensor.dtype != q.dtype and not narrow:
            raise LaunchError(
                f"q is {_dtype(q)} and {name} {_dtype(tensor)}: they share a dtype\n  nearest: {name}.to({q.dtype})"
            )
    if narrow:
        float8.check_together(q, k, v)
        return
    if q.dtype not in DTYPES:
        raise LaunchError(
            f"q, k and v are {_dtype(q)}: attention takes float16 and bfloat16, 8-bit floats with descales, and on a"
            " CPU float32 and float64 too\n  nearest: q.to(torch.bfloat16)"
        )
    if q.is_cuda and q.dtype not in GPU_DTYPES:
        raise LaunchError(
            f"q, k and v are {_dtype(q)} on {q.device}: tensor cores take 16-bit inputs (and accumulate in float32)\n"
            "  nearest: q.to(torch.bfloat16) or q.to(torch.float16); on a CPU (q.cpu()) float32 and float64 work"
        )


def _problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, paged: bool) -> Problem:
    """That of the tensors; where k and v are pages, a sequence of one of them."""
    batch, heads, q_len, head_dim = q.shape
    if paged and k.shape[0] != v.shape[0]:
        raise LaunchError(f"k has {k.shape[0]} pages and v {v.shape[0]}: one table says where both lie")
    for name, tensor in () if paged else (("k", k), ("v", v)):
        if tensor.shape[0] != batch:
            raise LaunchError(
                f"q has batch {batch} and {name} batch {tensor.shape[0]}: they have one batch size"
                + (f"\n  nearest: {name}.expand({batch}, -1, -1, -1), no copy" if tensor.shape[0] == 1 else "")
            )
    for axis, word in ((1, "kv_heads"), (2, "page_size" if paged else "kv_len")):
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
        dtype=float8.DTYPES[q.dtype] if q.dtype in float8.DTYPES else DTYPES[q.dtype],
        kv_dtype=float8.DTYPES.get(k.dtype),
    )


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Rows that a kernel can load 16 bytes at a time; a CPU asks for the contiguous last dimension alone."""
    shape, strides = tensor.shape, tensor.stride()
    if 0 in shape:
        return
    copy = f"\n  nearest: {name}.contiguous(), a copy"
    if strides[3] != 1 and shape[3] > 1:
        raise LaunchError(
            f"{name}'s last dimension is not contiguous (strides {list(strides)}): elements of a row lie side"
            f" by side{copy}"
        )
    if not tensor.is_cuda:
        return
    itemsize = tensor.itemsize
    for axis, word in enumerate(("batch", "head", "row")):
        bytes_ = strides[axis] * itemsize
        if bytes_ % ALIGNMENT and shape[axis] > 1:
            raise LaunchError(
                f"{name}'s {word} stride is {bytes_} bytes (strides {list(strides)}):"
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
    variant: Variant,
    declared: Declared,
    given: object,
    sizes: Mapping[str, int],
    device: torch.device,
    own: sequences.Sequences | None,
) -> None:
    title = f"captured tensor {declared.name!r} of {variant.name!r}"
    if given is None:
        raise LaunchError(variant.missing(declared))
    if not isinstance(given, torch.Tensor):
        cure = f"\n  nearest: torch.from_numpy({declared.name})" if isinstance(given, np.ndarray) else ""
        raise LaunchError(f"{title} got a {type(given).__name__}, not a torch.Tensor{cure}")
    check_memory(title, declared.name, given)
    if _dtype(given) != declared.dtype:
        raise LaunchError(
            f"{title} is {_dtype(given)} and declared {declared.dtype}\n"
            f"  nearest: {declared.name}.to(torch.{declared.dtype})"
        )
    if given.device != device:
        raise LaunchError(
            f"{title} is on {given.device} and q on {device}\n  nearest: {declared.name}.to({str(device)!r})"
        )
    _check_shape(variant, declared, given, sizes, own)


def _check_shape(
    variant: Variant, declared: Declared, given: torch.Tensor, sizes: Mapping[str, int], own: sequences.Sequences | None
) -> None:
    """Raise LaunchError for a captured tensor of another shape than the one declared, where dimensions have `sizes`."""
    shape, dims = given.shape, declared.dims
    if len(shape) != len(dims):
        title, said = _declared(variant, declared)
        raise LaunchError(f"{title} has {len(shape)} dimensions {list(shape)} and is declared {said}")
    if own is not None:  # positions may reach less far than the tensor
        sizes = {**sizes, "q": max([sizes["q"], *(n for n, dim in zip(shape, dims, strict=True) if dim == "q")])}
    for axis, dim in enumerate(dims):
        wanted, size = sizes[dim] if isinstance(dim, str) else dim, shape[axis]
        if wanted is not None and size != wanted and not (isinstance(dim, str) and size == 1):
            named = f"{dim} = {wanted}" if isinstance(dim, str) else f"{wanted}"
            alternative = " (or 1: it broadcasts)" if isinstance(dim, str) else ""
            title, said = _declared(variant, declared)
            raise LaunchError(
                f"{title} is {list(shape)} and declared {said}: dimension {axis} must be {named}{alternative}"
            )
        if size == 0 and wanted != 0:
            title, _ = _declared(variant, declared)
            raise LaunchError(f"{title} is {list(shape)}: dimension {axis} is empty, so there is nothing to read")
        if size >= 1 << 31:
            title, _ = _declared(variant, declared)
            raise LaunchError(f"{title} is {list(shape)}: sizes stay below 2^31")


def _sizes(problem: Problem, own: sequences.Sequences | None) -> dict[str, int]:
    """Those of the dimensions of captured tensors; "q" is the least where sequences have positions of their own."""
    q_len = problem.q_len if own is None else sequences.reach(own, problem)
    return {"q": q_len, "kv": problem.kv_len, **problem.sizes()}


def _declared(variant: Variant, declared: Declared) -> tuple[str, str]:
    """What a captured tensor is called, and the dimensions that it is declared with."""
    dims = ", ".join("any" if dim is None else str(dim) for dim in declared.dims)
    return f"captured tensor {declared.name!r} of {variant.name!r}", f"[{dims}]"


def factor(scale: Any, head_dim: int) -> float:
    """The scale that a call asks for, or LaunchError."""
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
