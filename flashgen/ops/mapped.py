"""A call under torch.func.vmap: its mapped dimension joins the batch where that means the same, else each element is a
call of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.lang.expr import walk
from flashgen.lang.variant import Variant
from flashgen.ops.call import Call

#: The dimension of a tensor that is mapped, or None where all elements share the tensor.
Dim = int | None

Tensors = tuple[torch.Tensor, ...]


def over_batch(
    call: Call, names: Sequence[str], tensors: Sequence[Any], dims: Sequence[Dim], wanted: Sequence[str] = ()
) -> list[int | None] | None:
    """The dimension of each tensor that its mapped one joins, where one call on a larger batch gives what a call for
    each element would; None where it would not.

    `tensors` are those with a batch first, and then the captured ones, which `names` names; `wanted` are those whose
    gradients are asked for: a sum over the batch is none over elements.
    """
    if call.dropout is not None or not _positions_alone(call.variant):
        return None
    first = len(tensors) - len(names)
    if any(x is not None and x.dim() - (dim is not None) != 4 for x, dim in zip(tensors[:3], dims[:3], strict=True)):
        return None  # refused by the call for an element
    axes: list[int | None] = [0] * first
    declared = {tensor.name: tensor.dims for tensor in call.variant.tensors}
    for name, x, dim in zip(names, tensors[first:], dims[first:], strict=True):
        at = [axis for axis, of in enumerate(declared.get(name, ())) if of == "batch"]
        if len(at) > 1 or x.dim() - (dim is not None) != len(declared.get(name, ())):
            return None
        own = bool(at) and _without(x, dim)[at[0]] != 1
        if not own and (dim is not None or name in wanted):  # one for the whole batch, and not for all elements
            return None
        axes.append(at[0] if own else None)
    return axes


def _positions_alone(variant: Variant) -> bool:
    """Whether a variant knows no more of the batch than which element of a captured tensor is its own."""
    for n in walk(variant.roots):
        if (n.op, n.attr) == ("problem", "batch") or (n.op == "size" and n.attr[0].dims[n.attr[1]] == "batch"):
            return False
        dims = n.attr.dims if n.op == "load" else (None,) * len(n.operands)
        for dim, operand in zip(dims, n.operands, strict=True):
            if ((operand.op, operand.attr) == ("index", "b")) != (dim == "batch"):
                return False
    return True


def _without(x: torch.Tensor, dim: Dim) -> list[int]:
    """The shape of an element's tensor."""
    return [size for axis, size in enumerate(x.shape) if axis != dim]


def mapped(
    n: int,
    tensors: Sequence[Any],
    dims: Sequence[Dim],
    axes: Sequence[int | None] | None,
    once: Callable[..., Tensors],
    last: Sequence[int] = (),
) -> tuple[Tensors, tuple[int, ...]]:
    """Results of `once` for n elements, and where they are mapped: by one call where there are `axes` (of
    `over_batch`), else by n.  Batches come first in results, but for the `last` ones, which have them there."""
    if axes is None:
        each = [
            once(*(x if dim is None else _element(x, dim, i, n) for x, dim in zip(tensors, dims, strict=True)))
            for i in range(max(n, 1))  # of none the shapes are those of one
        ]
        results = tuple(torch.stack(of)[:n] for of in zip(*each, strict=True))
    else:
        found = once(*(_joined(x, dim, axis, n) for x, dim, axis in zip(tensors, dims, axes, strict=True)))
        batch = next(_without(x, dim)[0] for x, dim in zip(tensors, dims, strict=True) if x is not None)
        at = (*(0,) * (len(found) - len(last)), *last)
        return tuple(x.unflatten(axis, (n, batch)) for x, axis in zip(found, at, strict=True)), at
    return results, (0,) * len(results)


def _element(x: torch.Tensor, dim: int, i: int, n: int) -> torch.Tensor:
    """One of n elements; of none, one of zeros."""
    return x.select(dim, i) if n else x.new_zeros(_without(x, dim))


def _joined(x: Any, dim: Dim, axis: int | None, n: int) -> Any:
    """A tensor whose dimension `axis` holds the elements one after the other; a copy where it does not already."""
    if x is None or axis is None:
        return x
    apart = x.unsqueeze(axis).expand(*x.shape[:axis], n, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return apart.flatten(axis, axis + 1)
