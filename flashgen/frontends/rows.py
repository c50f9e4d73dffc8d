"""Indexing of traced arrays, other shapes of them, and what adds up or searches their rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flashgen.frontends.arrays import (
    Array,
    Index,
    broadcast,
    cast,
    constant,
    filled,
    lift,
    of_language,
    pointwise,
    position,
    promoted,
    rearranged,
)
from flashgen.lang import functions as fg
from flashgen.lang.loops import MAX_ROUNDS
from flashgen.lang.proxies import Expr, apply, node_of, refused

#: Rows up to this long are written out; longer ones are loops, where the language has one.
WRITTEN_OUT = 8
LONGEST_WRITTEN_OUT = 64

# ---------------------------------------------------------------------------------------------------------------------
# Indexing


def _getitem(x: Any, index: Any) -> Array:
    """x[index], of numbers, slices, None, ... and rows of integers, as torch reads them."""
    a = lift(x)
    items = [_item(i) for i in (index if isinstance(index, tuple) else (index,))]
    given = sum(i is not None and i is not Ellipsis for i in items)
    if given > a.rank:
        raise refused(f"a tensor of {a.rank} dimension{'s' * (a.rank != 1)} got {given} indices")
    if (at := next((n for n, i in enumerate(items) if i is Ellipsis), None)) is not None:
        items[at : at + 1] = [slice(None)] * (a.rank - given)
    items += [slice(None)] * (a.rank - sum(i is not None for i in items))
    rows = [i for i in items if isinstance(i, Array) and i.rank]
    together = broadcast(*rows)
    places = [n for n, i in enumerate(items) if isinstance(i, (Array, int))]
    if rows and places != list(range(places[0], places[-1] + 1)):
        raise refused("rows of indices with slices between them: index one dimension at a time")
    extents: list[int] = []
    readers: list[Callable[[Index], Any]] = []
    sizes: list[Expr] | None = [] if a.sizes is not None and not rows else None
    start = None  # where the dimensions that rows of indices make begin
    for item in items:
        dim = len(readers)
        if item is None:
            extents.append(1)
            sizes = None
        elif isinstance(item, slice):
            first, step = 0, 1
            if item.start is item.stop is item.step is None:  # each may be a traced value, which `==` compares
                count = a._extents[dim]
                if sizes is not None and a.sizes is not None:
                    sizes.append(a.sizes[dim])
            else:
                bounds = slice(*map(_bound, (item.start, item.stop, item.step)))
                if bounds.step is not None and bounds.step < 1:
                    raise refused("a slice of a tensor has a step above 0, as in torch")
                first, stop, step = bounds.indices(a.extents[dim])
                count, sizes = len(range(first, stop, step)), None
            out = len(extents)
            extents.append(count)
            readers.append(partial(_sliced, out, first, step))
        else:
            if rows and start is None:
                start = len(extents)
                extents.extend(together)
            size = a.sizes[dim] if a.sizes is not None else a.extents[dim]
            if isinstance(item, int) and not -a._extents[dim] <= item < a._extents[dim]:
                raise refused(f"index {item} is out of bounds for a dimension of size {a._extents[dim]}")
            readers.append(_reader(item, size, start, len(together)))
    made = Array(
        lambda index: a.at(tuple(read(index) for read in readers)),
        extents,
        a.dtype,
        of=a.of.union(*(i.of for i in items if isinstance(i, Array))),
        sizes=None if sizes is None or not extents else tuple(sizes),
    )
    return made


def _bound(end: Any) -> int | None:
    """An end or the step of a slice, which says how many elements there are."""
    if isinstance(end, Array) and end.known is None:
        raise refused(
            "a slice by a traced value has no size before the kernel runs: capture at = torch.arange(t.size(0)), and"
            " write torch.where(at >= q_idx, t, 0) for t[q_idx:]"
        )
    return None if end is None else operator.index(end)


def _item(i: Any) -> Any:
    """An index as torch reads it: Python numbers as they are, tensors as Arrays, which are integers."""
    if i is None or i is Ellipsis or isinstance(i, slice):
        return i
    if isinstance(i, (list, tuple)):
        i = torch.tensor(i, device="cpu")
        return Array(_table(i.tolist()), i.shape, i.dtype)
    if not isinstance(i, (Array, torch.Tensor)):
        if isinstance(i, bool):
            raise refused("a condition is no index: write torch.where")
        return operator.index(i)
    a = lift(i)
    if a.dtype in (torch.bool, torch.uint8):
        raise refused(
            f"an index of {str(a.dtype).removeprefix('torch.')} selects by condition in torch: write x.long()"
        )
    if a.dtype.is_floating_point:
        raise refused("an index of floats is an error in torch: write x.long()")
    return a


def _table(values: Any) -> Callable[[Index], Expr]:
    """Elements of nested lists, by known indices."""

    def at(index: Index) -> Expr:
        found = values
        for i in index:
            if not isinstance(i, int):
                raise refused("a tensor that the function makes is indexed by a traced value: make it outside")
            found = found[i]
        return Expr(node_of(found))

    return at


def _sliced(out: int, first: int, step: int, index: Index) -> int | Expr:
    """The index that a slice reads, from that of its result."""
    moved = index[out] if step == 1 else index[out] * step
    return moved + first if first else moved


def _reader(item: Any, size: int | Expr, start: int | None, rank: int) -> Callable[[Index], Any]:
    """What reads the index of one dimension out of the index of the result."""
    if isinstance(item, int):
        fixed = position(item, size)
        return lambda index: fixed
    if not item.rank:
        at = position(item.element, size)
        return lambda index: at

    def read(index: Index) -> int | Expr:
        own = index[start : start + rank][rank - item.rank :]  # type: ignore[operator]
        return position(item.at(tuple(0 if n == 1 else i for n, i in zip(item.extents, own, strict=True))), size)

    return read


def table(tensor: torch.Tensor) -> Array:
    """A tensor that the function itself made of plain numbers."""
    if not tensor.dim():
        return constant(tensor.item(), of_language(tensor.dtype))
    values, dtype = tensor.tolist(), of_language(tensor.dtype)
    return Array(lambda index: cast(_table(values)(index), dtype), tensor.shape, dtype)


def _select(x: Any, dim: int, index: Any) -> Array:
    a = lift(x)
    return _getitem(a, (*[slice(None)] * _dim(a, dim), index))


def _index_select(x: Any, dim: int, index: Any) -> Array:
    """A dimension by a row of indices; of one position it stays, with size 1."""
    at = lift(index)
    if at.rank > 1:
        raise refused(f"torch.index_select takes a row of indices, and got shape {list(at._extents)}")
    return _select(x, dim, at if at.rank else _unsqueeze(at, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Shapes


def _dim(a: Array, dim: int, more: int = 0) -> int:
    rank = a.rank + more
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise refused(f"dimension {dim} of a tensor of {rank} dimensions")
    return dim % max(rank, 1)


def _unsqueeze(x: Any, dim: int) -> Array:
    a = lift(x)
    at = _dim(a, dim, 1)
    extents = (*a._extents[:at], 1, *a._extents[at:])
    return rearranged(a, extents, lambda index: index[:at] + index[at + 1 :])


def _squeeze(x: Any, dim: int | Sequence[int] | None = None) -> Array:
    a = lift(x)
    dims = range(a.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(a, d) for d in dims if a.rank and a.extents[_dim(a, d)] == 1}
    kept = [d for d in range(a.rank) if d not in gone]

    def index_of(index: Index) -> Index:
        own = dict(zip(kept, index, strict=True))
        return tuple(own.get(d, 0) for d in range(a.rank))

    return rearranged(a, [a._extents[d] for d in kept], index_of)


def _shape_of(given: Sequence[Any]) -> list[int]:
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return [operator.index(n) for n in given]


def _view(x: Any, *shape: Any, **options: Any) -> Array:
    a = lift(x)
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise refused("x.view(dtype) reads other types out of the same bits: write x.to(dtype)")
    wanted, count = _shape_of(shape or (options["shape"],)), math.prod(a.extents)
    rest = math.prod(n for n in wanted if n != -1)
    wanted = [count // rest if n == -1 else n for n in wanted]
    if math.prod(wanted) != count:
        raise refused(f"shape {list(a.extents)} cannot be viewed as {wanted}")

    def index_of(index: Index) -> Index:
        flat: int | Expr = 0
        for size, i in zip(wanted, index, strict=True):
            flat = flat * size + i
        own: list[int | Expr] = []
        for size in reversed(a._extents):
            own.append(flat % size)
            flat = flat // size
        return tuple(reversed(own))

    return rearranged(a, wanted, index_of)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Array:
    a = lift(x)
    first, last = _dim(a, start_dim), _dim(a, end_dim)
    sizes = a.extents
    return _view(a, [*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :]])


def _expand(x: Any, *shape: Any, implicit: bool = False) -> Array:
    a = lift(x)
    shape_given = _shape_of(shape)
    new = len(shape_given) - a.rank
    wanted = [a._extents[d - new] if n == -1 else n for d, n in enumerate(shape_given)]
    if all(n == -1 for n in shape_given):
        return a
    own = a.extents
    if tuple(wanted) == own:
        return a
    if new < 0 or any(size not in (1, wanted[new + d]) for d, size in enumerate(own)):
        raise refused(f"shape {list(own)} does not expand to {wanted}")
    return rearranged(a, wanted, lambda index: tuple(0 if n == 1 else i for n, i in zip(own, index[new:], strict=True)))


def _expand_as(x: Any, other: Any) -> Array:
    return _expand(x, lift(other).extents)


def _view_as(x: Any, other: Any) -> Array:
    return _view(x, lift(other).extents)


def _permute(x: Any, *dims: Any) -> Array:
    a = lift(x)
    order = [_dim(a, d) for d in _shape_of(dims)]
    return rearranged(
        a, [a._extents[d] for d in order], lambda index: tuple(index[order.index(d)] for d in range(a.rank))
    )


def _transpose(x: Any, dim0: int, dim1: int) -> Array:
    a = lift(x)
    order = list(range(a.rank))
    i, j = _dim(a, dim0), _dim(a, dim1)
    order[i], order[j] = order[j], order[i]
    return _permute(a, order)


def _turned(x: Any) -> Array:
    a = lift(x)
    return _permute(a, list(reversed(range(a.rank))))


def _stack(tensors: Sequence[Any], dim: int = 0) -> Array:
    parts = [lift(x) for x in tensors]
    dtype, extents = promoted(*parts), broadcast(*parts)
    at = dim % (len(extents) + 1)

    def element(index: Index) -> Expr:
        own = index[:at] + index[at + 1 :]
        which = index[at]
        if isinstance(which, int):
            return cast(parts[which].at(own if parts[which].rank else ()), dtype)
        found = cast(parts[-1].at(own if parts[-1].rank else ()), dtype)
        for n in range(len(parts) - 2, -1, -1):
            found = fg.where(which == n, cast(parts[n].at(own if parts[n].rank else ()), dtype), found)
        return found

    return Array(
        element, (*extents[:at], len(parts), *extents[at:]), dtype, of=frozenset().union(*(p.of for p in parts))
    )


def _unbind(x: Any, dim: int = 0) -> tuple[Array, ...]:
    a = lift(x)
    return tuple(_select(a, dim, i) for i in range(a.extents[_dim(a, dim)]))


INDEXING: dict[str, Callable[..., Any]] = {
    "getitem": _getitem,
    "index_select": _index_select,
    "select": _select,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "view": _view,
    "flatten": _flatten,
    "ravel": _flatten,
    "expand": _expand,
    "broadcast_to": _expand,
    "expand_as": _expand_as,
    "view_as": _view_as,
    "permute": _permute,
    "transpose": _transpose,
    "t": _turned,
    "stack": _stack,
    "unbind": _unbind,
}

# ---------------------------------------------------------------------------------------------------------------------
# Reductions


def _reduction(
    fold: Callable[[Any, Any, tuple[int, ...]], Any],
    *,
    of: Callable[[torch.dtype], torch.dtype],
    loop: Callable[..., Expr] | None = None,
    empty: Any = None,
) -> Callable[..., Array]:
    """A row as one element: `fold` of two, `loop` of the language for long rows, `empty` where there is none.

    A fold is told of how many parts its first operand is, and of how many each part is made.
    """

    def call(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
        a = lift(x)
        made = of(a.dtype) if dtype is None else dtype
        dims = range(a.rank) if dim is None else [dim] if not isinstance(dim, (tuple, list)) else dim
        a = Array(partial(_cast_at, a, made), a._extents, made, of=a.of)
        parts: tuple[int, ...] = ()
        for d in sorted((_dim(a, d) for d in dims), reverse=True):
            if a.rank:
                count = a.extents[d]
                a = one(a, d, keepdim, parts)
                parts = (count, *parts)
        return a

    def one(a: Array, dim: int, keepdim: bool, parts: tuple[int, ...]) -> Array:
        count = a.extents[dim]
        left = (*a.extents[:dim], *((1,) if keepdim else ()), *a.extents[dim + 1 :])

        def at(index: Index) -> Expr:
            before, after = index[:dim], index[dim + keepdim :]

            def element(i: int | Expr) -> Expr:
                return a.at((*before, i, *after))

            if not count:
                if empty is None:
                    raise refused("a row of no elements has no smallest and no largest")
                return Expr(node_of(empty))
            if count <= WRITTEN_OUT or loop is None or not a.of:  # what the function made has no memory to loop over
                if count > LONGEST_WRITTEN_OUT:
                    raise refused(
                        f"this row has {count} elements, and at most {LONGEST_WRITTEN_OUT} can be searched so"
                    )
                found = element(0)
                for i in range(1, count):
                    found = fold(found, element(i), (i, *parts))
                return found
            if count > MAX_ROUNDS:
                raise refused(f"this row has {count} elements, and a loop has at most {MAX_ROUNDS} rounds")
            return loop(count, element)

        return Array(at, left, a.dtype, of=a.of)

    return call


def _cast_at(a: Array, dtype: torch.dtype, index: Index) -> Expr:
    return cast(a.at(index), dtype)


def _counted(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.int64


def _all_of(count: int, element: Callable[[Any], Expr]) -> Expr:
    return ~fg.any(count, lambda i: ~element(i))


def _of_two(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any, tuple[int, ...]], Any]:
    return lambda x, y, parts: build(x, y)


_ANY = _reduction(_of_two(operator.or_), of=lambda dtype: torch.bool, loop=fg.any, empty=False)
_ALL = _reduction(_of_two(operator.and_), of=lambda dtype: torch.bool, loop=_all_of, empty=True)
_SUM = _reduction(_of_two(operator.add), of=_counted, loop=fg.sum, empty=0)


def _extremum(op: str, of_bools: Callable[[Any, Any], Any], loop: Callable[..., Expr]) -> Callable[..., Array]:
    """A minimum or maximum, whose ties are shared among all elements of the row; of conditions whether all or any of
    them hold."""
    of_numbers = _reduction(lambda x, y, parts: apply(op, x, y, attr=parts), of=lambda dtype: dtype)
    of_conditions = _reduction(_of_two(of_bools), of=lambda dtype: dtype, loop=loop)

    def call(x: Any, dim: Any = None, keepdim: bool = False) -> Array:
        a = lift(x)
        return (of_conditions if a.dtype is torch.bool else of_numbers)(a, dim, keepdim)

    return call


def _dot(x: Any, y: Any) -> Array:
    a, b = lift(x), lift(y)
    if a.rank != 1 or b.rank != 1:
        raise refused(
            f"a product of shapes {list(a._extents)} and {list(b._extents)}: only that of two rows is one number"
        )
    dtype = promoted(a, b)
    return _SUM(pointwise(operator.mul, a, b, dtype=dtype, given=dtype))


def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    a = lift(x)
    made = a.dtype if dtype is None else dtype
    if not made.is_floating_point:
        name = str(made).removeprefix("torch.")
        raise refused(f"mean() of {name} is an error in torch: write x.float().mean()")
    total = _SUM(a, dim, keepdim, dtype=made)
    count = math.prod(a.extents) // max(math.prod(total.extents), 1)
    return pointwise(operator.truediv, total, filled(float(count), ()), dtype=made, given=made)


def _nonzeros(x: Any, dim: Any = None) -> Array:
    a = lift(x)
    return _SUM(Array(lambda index: cast(a.at(index), torch.bool), a._extents, torch.bool, of=a.of), dim)


REDUCTIONS: dict[str, Callable[..., Array]] = {
    "any": _ANY,
    "all": _ALL,
    "sum": _SUM,
    "prod": _reduction(_of_two(operator.mul), of=_counted, empty=1),
    "amin": _extremum("minimum", operator.and_, _all_of),
    "amax": _extremum("maximum", operator.or_, fg.any),
    "mean": _mean,
    "count_nonzero": _nonzeros,
    "dot": _dot,
    "inner": _dot,
    "vdot": _dot,
    "matmul": _dot,
}
