"""attention() of DTensors that are sharded over batch or heads: each process computes its part, and means what all do.

A variant's b and h are those of all processes.  They are moved by parameters, so that every part takes one kernel; a
captured tensor that the own b or h selects is cut as q is, and any other is read whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from flashgen.errors import LaunchError
from flashgen.lang import build
from flashgen.lang.expr import DType, Node, Param, Tensor, node, walk
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.lang.variant import Variant
from flashgen.ops import autograd, library, sequences
from flashgen.ops.call import Call
from flashgen.ops.dropout import check, drawn
from flashgen.ops.forward import o_layout, run
from flashgen.ops.sinks import with_given_sink
from flashgen.ops.tracing import any_requires_grad, traced, transformed
from flashgen.runtime.philox import Dropout

#: What a dimension of a captured tensor is the size of, and the axis of q and k that is cut with it.
_AXIS_OF = {"batch": 0, "heads": 1, "kv_heads": 1}


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of a dimension that this process has: from `first` on, so many of all."""

    first: int
    count: int
    all: int


@dataclass(frozen=True, slots=True)
class _Part:
    """What this process has of q, k and v, which are `placements` on `mesh`: spans by the name of a dimension."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    spans: Mapping[str, _Span]

    @property
    def cut(self) -> tuple[str, ...]:
        """The names of dimensions that are sharded."""
        axes = {placement.dim for placement in self.placements if isinstance(placement, Shard)}
        return tuple(name for name, axis in _AXIS_OF.items() if axis in axes)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile breaks its graph at such a call
def attend(q: Any, k: Any, v: Any, call: Call, dropout: Any, seed: int | None) -> tuple[DTensor, DTensor]:
    """(o, lse) as DTensors of q's placements, of a call whose dropout is not drawn yet; differentiable as that of
    plain tensors is.  Raises LaunchError for placements that cut what a kernel needs whole."""
    if transformed():
        raise LaunchError(library.SHARDED)
    if sequences.paged(sequences.of_call(call.variant, call.named)):
        raise LaunchError(_beside("page_table"))
    part = _part(q, k, v)
    call = call._replace(variant=with_given_sink(call.variant, call.named), dropout=_drawn(part, dropout, seed, q))
    call = _moved(part, call)
    own = q.to_local(), k.to_local(), v.to_local()
    if traced(*own):
        if call.dropout is not None:
            raise LaunchError(library.SHARDED)  # an op has no place for where dropout counts from
        o, lse = library.attend(*own, call)
    elif torch.is_grad_enabled() and any_requires_grad(*own, *call.named.values()):
        o, lse = autograd.attention(*own, call)
    else:
        o, lse = run(*own, call)
    shape, strides = o_layout(q, v)
    whole = (shape, strides), (shape[:3], (shape[1] * shape[2], shape[2], 1))
    o, lse = (
        DTensor.from_local(x, part.mesh, part.placements, run_check=False, shape=torch.Size(size), stride=stride)
        for x, (size, stride) in zip((o, lse), whole, strict=True)
    )
    return o, lse


def _drawn(part: _Part, dropout: Any, seed: int | None, like: torch.Tensor) -> Dropout | None:
    """The dropout of this part: heads are counted over all."""
    if type(dropout) is float and dropout == 0.0 and seed is None:
        return None
    check(dropout)
    if dropout and seed is None:
        raise LaunchError(
            "dropout of DTensors has no seed: processes would draw by generators of their own\n"
            "  nearest: seed=..., the same number in each process, and another one in each call"
        )
    found = drawn(dropout, seed, like)
    if found is None:
        return None
    batch, heads = part.spans["batch"], part.spans["heads"]
    first = (batch.first * heads.all + heads.first) % (1 << 32)
    return replace(found, first=first, heads=heads.all)


# ---------------------------------------------------------------------------------------------------------------------
# How q, k and v are cut


def _part(q: Any, k: Any, v: Any) -> _Part:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise LaunchError(
                f"{name} is no DTensor and others of q, k and v are: all are, or none is\n"
                f"  nearest: distribute_tensor({name}, mesh, placements), as the others are"
            )
        if x.dim() != 4:
            raise LaunchError(
                f"{name} has {x.dim()} dimensions {list(x.shape)}: DTensors are [batch, heads, seqlen, dim]"
            )
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise LaunchError(
                f"q is {_placed(q)} and {name} {_placed(x)}: q, k and v are sharded alike\n"
                f"  nearest: {name}.redistribute(q.device_mesh, q.placements)"
            )
    for placement in q.placements:
        if type(placement) not in (Shard, Replicate) or (isinstance(placement, Shard) and placement.dim not in (0, 1)):
            raise LaunchError(
                f"q, k and v are {_placed(q)}: a row needs all of its keys, and a kernel whole rows\n"
                "  nearest: Shard(0), over batches, Shard(1), over heads, or Replicate()"
            )
    mesh, placements = q.device_mesh, tuple(q.placements)
    _check_groups(mesh, placements, q.shape[1], k.shape[1])
    at = mesh.get_coordinate()
    if at is None:
        raise LaunchError(f"this process is none of the mesh {mesh}: it has no part of q, k and v")
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1]}
    spans = {name: _span(size, _AXIS_OF[name], mesh, placements, at) for name, size in sizes.items()}
    return _Part(mesh, placements, spans)


def _placed(x: DTensor) -> str:
    return f"{list(x.placements)} on {x.device_mesh}"


def _span(size: int, axis: int, mesh: DeviceMesh, placements: Sequence[Placement], at: Sequence[int]) -> _Span:
    """What a process at a place of the mesh has of a dimension: DTensors are cut as torch.chunk cuts."""
    first, count = 0, size
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == axis:
            each = -(-count // mesh.size(i))
            before = min(each * at[i], count)
            first, count = first + before, min(each, count - before)
    return _Span(first, count, size)


def _check_groups(mesh: DeviceMesh, placements: Sequence[Placement], heads: int, kv_heads: int) -> None:
    """Refuse what separates query heads from the key head that they share, wherever in the mesh."""
    if not kv_heads or heads % kv_heads:
        return  # refused by the call
    group = heads // kv_heads
    for at in itertools.product(*map(range, mesh.shape)):
        of_q, of_k = (_span(n, 1, mesh, placements, at) for n in (heads, kv_heads))
        if (of_q.first, of_q.count) != (group * of_k.first, group * of_k.count):
            raise LaunchError(
                f"{heads} heads over {kv_heads} key heads are sharded so that a process has {of_q.count} heads from"
                f" {of_q.first} on, and {of_k.count} key heads from {of_k.first} on: heads stay with the key head that"
                " they share\n  nearest: a mesh whose size divides the number of key heads, or Shard(0), over batches"
            )


# ---------------------------------------------------------------------------------------------------------------------
# What a variant is to one process


def _index(position: str) -> Node:
    return node("index", DType.INT32, (), position)


def _size(name: str) -> Node:
    return node("problem", DType.INT32, (), name)


#: Heads that share a key head: as many in each part.
_GROUP = build.apply("floor_div", _size("heads"), _size("kv_heads"))

#: The dimensions that a position counts.
_INDICES = ("batch", "heads")

#: What selects the own element of a dimension.
_OWN = {"batch": _index("b"), "heads": _index("h"), "kv_heads": build.apply("floor_div", _index("h"), _GROUP)}


@lru_cache(maxsize=1024)
def _selected(variant: Variant) -> Mapping[str, tuple[str | None, ...]]:
    """For each dimension of each captured tensor the name of the one whose own position selects there, wherever the
    tensor is read; None where anything else does, or where its size is read."""
    found: dict[str, list[set[str | None]]] = {t.name: [set() for _ in t.dims] for t in variant.tensors}
    names = {own: name for name, own in _OWN.items()}
    for n in walk(variant.roots):
        if n.op == "load":
            for axis, at in enumerate(n.operands):
                found[n.attr.name][axis].add(names.get(at))
        elif n.op == "size":
            found[n.attr[0].name][n.attr[1]].add(None)
    return {name: tuple(next(iter(by)) if len(by) == 1 else None for by in axes) for name, axes in found.items()}


@dataclass(frozen=True, slots=True)
class _Shifted:
    """A variant as one process runs it, and the parameters that say where its part is: by name, which field of the span
    of which dimension."""

    variant: Variant
    numbers: Mapping[str, tuple[str, str]]


#: A dimension of a captured tensor: its name and an axis.
_Place = tuple[str, int]


@lru_cache(maxsize=1024)
def _shifted(variant: Variant, cut: tuple[str, ...], own: frozenset[_Place], free: frozenset[_Place]) -> _Shifted:
    """A variant whose b and h are those of all processes where these dimensions are cut; of captured tensors it reads
    the part in the places `own`, and the whole in others, of which those that are `free` have any size."""
    taken = {x.name for declared in (variant.params, variant.constants, variant.tensors) for x in declared}
    numbers: dict[str, tuple[str, str]] = {}
    changed: dict[Node, Node] = {_GROUP: _GROUP}

    def number(field: str, name: str, least: int) -> Node:
        said = f"{field}_{name}"
        while said in taken:
            said += "_"
        numbers[said] = field, name
        declared = Param(name=said, dtype=DType.INT32, default=None, min=least, max=MAX_LENGTH - 1)
        return node("param", DType.INT32, (), declared)

    for name in cut:
        changed[_size(name)] = number("all", name, 1)
        if name in _INDICES:
            changed[_OWN[name]] = build.apply("add", _OWN[name], number("first", name, 0))
    tensors = {t: replace(t, dims=_dims(t, free)) for t in variant.tensors}
    back = {build.rebuild(at, changed.get): at for at in _OWN.values()}

    def localised(n: Node) -> Node | None:
        if n.op == "size" and n.attr[0] in tensors:
            return node("size", n.dtype, (), (tensors[n.attr[0]], n.attr[1]), n.where)
        if n.op != "load":
            return None
        operands = (back.get(at, at) if (n.attr.name, axis) in own else at for axis, at in enumerate(n.operands))
        return node("load", n.dtype, operands, tensors.get(n.attr, n.attr), n.where)

    def rewritten(root: Node | None) -> Node | None:
        if root is None:
            return None
        before, root = None, build.rebuild(root, changed.get)
        while root is not before:  # a load in an index of another one comes the round after
            before, root = root, build.rebuild(root, localised)
        return root

    made = replace(
        variant,
        mask=rewritten(variant.mask),
        score_node=rewritten(variant.score_node),
        sink_node=None if variant.sink_node is None else build.rebuild(variant.sink_node, localised),
        parents=(variant,),
        spec=None,
    )
    left = {p.name for p in made.params}
    return _Shifted(made, {name: of for name, of in numbers.items() if name in left})


def _dims(tensor: Tensor, free: frozenset[_Place]) -> tuple[str | int | None, ...]:
    return tuple(None if (tensor.name, axis) in free else dim for axis, dim in enumerate(tensor.dims))


def _moved(part: _Part, call: Call) -> Call:
    """The call of this process: b and h moved, and its part of each captured tensor."""
    variant, named = call.variant, dict(call.named)
    declared = {t.name: t for t in variant.tensors}
    lengths = sequences.of_call(variant, named)
    own: set[_Place] = set()
    free: set[_Place] = set()
    for name, x in call.named.items():
        if not isinstance(x, torch.Tensor):
            continue
        if name in lengths and name in (*sequences.PADDED, *sequences.VARLEN):
            dims: tuple[str | int | None, ...] = ("batch",) if name in sequences.PADDED else (None,)
            selected: tuple[str | None, ...] = dims  # type: ignore[assignment]
        elif name in declared:
            dims, selected = declared[name].dims, _selected(variant)[name]
        else:
            raise LaunchError(_beside(name))
        if x.dim() != len(dims):
            raise LaunchError(f"{name} has {x.dim()} dimensions {list(x.shape)}, and is declared with {len(dims)}")
        axes = {}
        for axis, (dim, by) in enumerate(zip(dims, selected, strict=True)):
            cut = [i for i, placed in enumerate(_placements(x, part)) if placed == Shard(axis)]
            if by in part.cut and (cut or dim == by) and x.shape[axis] > 1:
                axes[axis] = by
                own.add((name, axis))
            if (axis in axes and dim != by) or (axis not in axes and dim in part.cut and x.shape[axis] > 1):
                free.add((name, axis))
        named[name] = _local(part, name, x, axes)
    found = _shifted(variant, part.cut, frozenset(own), frozenset(free))
    named |= {name: getattr(part.spans[of], field) for name, (field, of) in found.numbers.items()}
    return call._replace(variant=found.variant, named=named)


def _beside(name: str) -> str:
    """What a call is told of a tensor that has no part for each process."""
    return (
        f"{name} is a tensor beside DTensors, which have captured tensors, lengths and positions alone\n"
        f"  nearest: q.to_local(), k.to_local() and v.to_local(), with this process's part of {name}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# What a captured tensor is to one process


def _placements(x: torch.Tensor, part: _Part) -> tuple[Placement, ...]:
    """How a tensor is placed: a plain one is the same in each process."""
    return tuple(x.placements) if isinstance(x, DTensor) else (Replicate(),) * len(part.placements)


def _local(part: _Part, name: str, x: torch.Tensor, axes: Mapping[int, str]) -> torch.Tensor:
    """What a process reads of a captured tensor, whose `axes` are cut as those dimensions of q and k are."""
    placements = _placements(x, part)
    if isinstance(x, DTensor) and x.device_mesh != part.mesh:
        raise LaunchError(
            f"{name} lies on {x.device_mesh} and q on {part.mesh}\n  nearest: {name}.redistribute(q.device_mesh, ...)"
        )
    for axis, dim in axes.items():
        if x.shape[axis] != part.spans[dim].all:
            raise LaunchError(
                f"{name} is {list(x.shape)}: dimension {axis} must be {dim} = {part.spans[dim].all}, that of all"
            )
    cuts = {axis: [i for i, p in enumerate(part.placements) if p == Shard(_AXIS_OF[dim])] for axis, dim in axes.items()}
    for i, placement in enumerate(placements):
        known = type(placement) is Shard and i in cuts.get(placement.dim, ())
        if type(placement) is not Replicate and not known:
            raise LaunchError(
                f"{name} is {list(placements)} and q {list(part.placements)}: a captured tensor is replicated, or"
                " sharded where q is, in a dimension that the own b or h alone selects\n"
                f"  nearest: {name}.redistribute(placements=[Replicate()] * {len(placements)})"
            )
    summed = tuple(
        type(at) is Replicate and isinstance(of_q, Shard) for at, of_q in zip(placements, part.placements, strict=True)
    )
    if torch.is_grad_enabled() and x.requires_grad:
        local = _Local.apply(x, part.mesh, placements, summed)  # type: ignore[no-untyped-call]
    else:
        local = x.to_local() if isinstance(x, DTensor) else x
    for axis, dim in axes.items():
        sharded = [i for i, placement in enumerate(placements) if placement == Shard(axis)]
        if sharded and sharded != cuts[axis]:
            raise LaunchError(
                f"{name} is {list(placements)} and q {list(part.placements)}: {dim} is cut over other dimensions of the"
                f" mesh\n  nearest: {name}.redistribute(placements=[Replicate()] * {len(placements)})"
            )
        if not sharded:
            local = local.narrow(axis, part.spans[dim].first, part.spans[dim].count)
    return local


class _Local(torch.autograd.Function):
    """What a process has of a tensor; its gradient is summed over the dimensions of the mesh that say so."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], summed: tuple[bool, ...]
    ) -> torch.Tensor:
        ctx.of = mesh, placements, summed, x.shape, isinstance(x, DTensor)
        return x.to_local().view_as(x.to_local()) if isinstance(x, DTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mesh, placements, summed, shape, distributed = ctx.of
        parts = [Partial() if adds else placed for adds, placed in zip(summed, placements, strict=True)]
        strides = torch.empty(shape, device="meta").stride()
        found = DTensor.from_local(
            gradient.contiguous(), mesh, parts, run_check=False, shape=shape, stride=strides
        ).redistribute(mesh, placements)
        return found if distributed else found.to_local(), None, None, None
