"""What each sequence of a call has of its own: numbers of queries and keys, and the position of its first query."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from flashgen.errors import LaunchError, shown
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.lang.variant import Variant
from flashgen.ops.layouts import check_layout
from flashgen.ops.pages import cache_of, checked_table, pages_of
from flashgen.ops.values import whole
from flashgen.planning.layout import AT_END, Padded, Paged, Varlen
from flashgen.planning.problem import Problem
from flashgen.runtime.launch import Cache
from flashgen.runtime.tiles import Sequence

#: The names of a call of attention() for it, which are a variant's own where it declares them: those of
#: `Padded.pointers`, in their order.
PADDED = ("q_lengths", "kv_lengths", "q_offset")

#: What attention_varlen() calls its own among named values, which no variant can: those of `Varlen.pointers` in their
#: order, and the bounds of lengths.
VARLEN = ("varlen.cu_seqlens_q", "varlen.cu_seqlens_k", "varlen.q_offset")
BOUNDS = ("varlen.max_seqlen_q", "varlen.max_seqlen_k")

#: Those of `Paged.pointers`, where queries are padded and where they are joined; a page table is the last.
PAGED = (*PADDED, "page_table")
PAGED_VARLEN = (VARLEN[0], "varlen.kv_lengths", VARLEN[2], "varlen.page_table")

_PADDED, _VARLEN = Padded(), Varlen()

_NAMES = {"padded": PADDED, "varlen": VARLEN, "paged": PAGED, "paged_varlen": PAGED_VARLEN}

#: Set to 1 in the environment, the values of tensors on a GPU are checked too, for which the host waits.
CHECK = "FLASHGEN_CHECK"


class Sequences(NamedTuple):
    """Tensors that kernels take, int32 or None, in the order of `layout.pointers`; where the third of them is None all
    first queries sit at `q_offset`, or AT_END.  `rows` are those of q and of k, or of each page of a cache."""

    layout: Padded | Varlen | Paged
    tensors: tuple[torch.Tensor | None, ...]
    q_offset: int
    rows: tuple[int, int]
    cache: Cache | None = None

    @property
    def alike(self) -> bool:
        """Whether none has lengths or positions of its own."""
        q_lengths, kv_lengths, q_offsets, *_ = self.tensors
        return q_lengths is kv_lengths is q_offsets is None


def names_of(variant: Variant) -> tuple[str, ...]:
    """The names that calls of a variant have for it."""
    return (*(name for name in PAGED if name not in variant.names), *dict.fromkeys((*VARLEN, *PAGED_VARLEN)), *BOUNDS)


def paged(given: Mapping[str, Any]) -> bool:
    """Whether these values of a call, of its own, say that keys lie in pages."""
    return PAGED[-1] in given or PAGED_VARLEN[-1] in given


def joined(variant: Variant, named: dict[str, Any], **given: object) -> dict[str, Any]:
    """A call's named values with these of its sequences, or of the variant where it declares the name.

    Raises LaunchError for a `q_offset` that is no position.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "q_offset" in given and (not isinstance(variant, Variant) or "q_offset" in names_of(variant)):
        given["q_offset"] = position(given["q_offset"])
    return {**named, **given}


def hand_over(variant: Variant, named: dict[str, Any], meant: dict[str, Any]) -> None:
    """Values that a call means for itself become named ones, and None, where the variant declares the name: then it is
    the variant's own."""
    for name in variant.names if isinstance(variant, Variant) else ():
        if meant.get(name) is not None:
            named[name], meant[name] = meant[name], None


def in_pages(
    cu_seqlens_q: object, cu_seqlens_k: object, kv_lengths: object, table: object, most: int
) -> dict[str, Any]:
    """Named values of a call with joined queries, at most so many of each sequence, over keys in pages."""
    if cu_seqlens_k is not None:
        raise LaunchError(
            "cu_seqlens_k says where keys lie behind each other, and page_table that they lie in pages\n"
            "  nearest: kv_lengths=cu_seqlens_k.diff() in its place"
        )
    values = (cu_seqlens_q, kv_lengths, None, table)
    found: dict[str, Any] = {name: x for name, x in zip(PAGED_VARLEN, values, strict=True) if x is not None}
    return {**found, BOUNDS[0]: most}


def refuse_gradients(variant: Variant, named: Mapping[str, Any]) -> None:
    """Raise LaunchError where keys lie in pages: no backward reads them there."""
    if paged(named) and paged(of_call(variant, named)):
        raise LaunchError(
            "q, k, v or a captured tensor requires a gradient, and keys and values in pages have none\n"
            "  nearest: the call under torch.no_grad(), or k and v without pages"
        )


def position(first: object) -> Any:
    """Where the first query sits, AT_END for "end", as graphs hold no words.  Raises LaunchError for anything else."""
    if isinstance(first, str) and first == "end":
        return AT_END
    first = whole(first)
    if not isinstance(first, (int, torch.SymInt, torch.Tensor)) or isinstance(first, bool):
        raise LaunchError(
            f'q_offset is {shown(first)}: it is a position, an int32 tensor [batch] of them, or "end"\n'
            '  nearest: q_offset="end", which puts the last query beside the last key'
        )
    if isinstance(first, int) and first < 0:
        raise LaunchError(
            f"q_offset is {shown(first)}: positions are not negative\n"
            '  nearest: q_offset=0, or q_offset="end", which puts the last query beside the last key'
        )
    return first


def of_call(variant: Variant, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's named values that say what sequences have of their own."""
    return {name: named[name] for name in names_of(variant) if name in named} if named else {}


def checked(
    given: Mapping[str, Any], problem: Problem, device: torch.device, pages: int, rows: tuple[int, int]
) -> tuple[Sequences | None, Problem]:
    """The sequences of a call on a device, None where they are alike, and the problem that they are of, of that of the
    tensors, which have so many rows of q and of k, or of each of so many pages; or LaunchError for what is wrong with
    them.  What tensors on a GPU hold is not looked at."""
    if not given:
        return None, problem
    queries: Padded | Varlen = _VARLEN if VARLEN[0] in given else _PADDED
    layout = Paged(queries=queries) if paged(given) else queries
    own = names(layout)
    _refuse_others(given, layout)
    first, table, cache = given.get(own[2], 0), given.get(own[-1]), None
    if layout.joined:
        of_k = rows[1] * pages if layout.paged else rows[1]
        problem = _joined_problem(given, problem, device, (rows[0], of_k))
    if layout.paged:
        table = checked_table(table, problem.batch, device)
        cache, most = cache_of(table, pages, rows[1])
        problem = problem.of_lengths(problem.q_len, _bounded_by_table(given, most))
    tensors = [given.get(name) for name in own[:2]] + [first if isinstance(first, torch.Tensor) else None]
    for name, tensor in zip(own, tensors, strict=False):
        if tensor is not None:
            _check_tensor(name, tensor, problem.batch + (name in VARLEN[:2]), device)
    if layout.paged:
        tensors.append(table)
    found = Sequences(layout, tuple(tensors), 0 if tensors[2] is not None else first, rows, cache)
    check_offset(found.q_offset, problem.q_len)
    if found.q_offset == AT_END and tensors[0] is None and problem.q_len > problem.kv_len:
        raise LaunchError(
            f'q_offset="end" of {problem.q_len} queries over {problem.kv_len} keys: the first query would sit before'
            f" position 0\n  nearest: at most {problem.kv_len} queries"
        )
    if device.type == "cpu":
        of_batch(found, problem)
    return found, problem


def _refuse_others(given: Mapping[str, Any], layout: Padded | Varlen | Paged) -> None:
    """Raise LaunchError for values that say of sequences what those of such a layout do not have."""
    wanted = (*names(layout), *(BOUNDS if layout.joined else ()))
    for name in given:
        if name not in wanted and given[name] is not None:
            of = "q" if name == PADDED[0] else "k"
            raise LaunchError(
                f"{_said(name)} is of sequences in padded rows or in pages, and these lie behind each other:"
                f" cu_seqlens_{of} says how long each is\n"
                f"  nearest: cu_seqlens_{of} in its place, and no {_said(name)}"
            )


def _joined_problem(given: Mapping[str, Any], problem: Problem, device: torch.device, rows: tuple[int, int]) -> Problem:
    """The problem of sequences that lie behind each other in the tensors of one."""
    starts, bounds = given[VARLEN[0]], [given.get(name, 0) for name in BOUNDS]
    for name, bound, own in zip(BOUNDS, bounds, rows, strict=True):
        if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound < MAX_LENGTH:
            raise LaunchError(
                f"{_said(name)} is {shown(bound)}: it is a whole number that no sequence is longer than, below 2^24\n"
                f"  nearest: {_said(name)}={own}, that of all rows"
            )
    if not isinstance(starts, torch.Tensor) or starts.is_nested or starts.dim() != 1 or starts.numel() == 0:
        if isinstance(starts, torch.Tensor):
            _check_dense("cu_seqlens_q", starts)
        raise LaunchError(
            f"cu_seqlens_q is {_shape(starts)}: it is an int32 tensor [sequences + 1], on q's device ({device})\n"
            "  nearest: torch.tensor([0, length of the first, length of the first two ...], dtype=torch.int32)"
        )
    return problem.of_lengths(bounds[0], bounds[1], batch=starts.numel() - 1)


def _bounded_by_table(given: Mapping[str, Any], most: int) -> int:
    """The most keys that a sequence may have: what a page table has room for, unless the call says less."""
    bound = int(given.get(BOUNDS[1], most))
    if bound > most:
        raise LaunchError(
            f"max_seqlen_k is {bound}: a row of page_table has room for {most} keys\n  nearest: max_seqlen_k={most}"
        )
    return bound


def _said(name: str) -> str:
    """A name as a call has it."""
    return name.removeprefix("varlen.")


def _shape(x: object) -> object:
    return list(x.shape) if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def reach(found: Sequences, problem: Problem) -> int:
    """One past the last position that the host knows queries to sit at, which a dimension "q" of a captured tensor must
    hold.  Kernels clamp an index beyond; on a CPU it is a CapturedIndexError."""
    if found.layout.joined or found.q_offset == AT_END or found.tensors[0] is not None or found.tensors[2] is not None:
        return 0
    return found.q_offset + problem.q_len


def check_offset(q_offset: int, q_len: int) -> None:
    """Raise LaunchError for a position that reaches too far with so many queries."""
    if q_offset + q_len >= MAX_LENGTH:
        raise LaunchError(
            f"q_offset is {shown(q_offset)} with {q_len} queries: positions stay below 2^24\n"
            f"  nearest: q_offset={MAX_LENGTH - 1 - q_len}"
        )


_Dims = Mapping[str, tuple[str | int | None, ...]]


class First:
    """The number that calls of one set of shapes give the position of the first query as; call it with named values.

    Raises LaunchError where positions reach too far for a captured tensor, or at all.
    """

    __slots__ = ("_least", "_name", "_q_len")

    def __init__(self, found: Sequences, problem: Problem, captured: Mapping[str, torch.Tensor], dims: _Dims) -> None:
        self._q_len, self._name = problem.q_len, names(found.layout)[2]
        by_query = ((name, axis) for name, of in dims.items() for axis, dim in enumerate(of) if dim == "q")
        sizes = [(captured[name].shape[axis], name) for name, axis in by_query if captured[name].shape[axis] > 1]
        known = not found.layout.joined and found.tensors[0] is None
        self._least = min(sizes, default=(MAX_LENGTH, "")) if known else (MAX_LENGTH, "")

    def __call__(self, named: Mapping[str, Any]) -> int:
        first = named.get(self._name, 0)
        if isinstance(first, torch.Tensor):
            return 0
        check_offset(first, self._q_len)
        least, name = self._least
        if first + self._q_len > least:
            raise LaunchError(
                f"q_offset is {first} with {self._q_len} queries, and {name} has {least} positions\n"
                f"  nearest: {name} of at least {first + self._q_len}"
            )
        return int(first)


def names(layout: Padded | Varlen | Paged) -> tuple[str, ...]:
    """The names of a call's values for what kernels point to, in the order of `layout.pointers`."""
    return _NAMES[layout.name]


def key(named: Mapping[str, Any]) -> list[object]:
    """What the launches of a call depend on in these of its values, whose names are known in their order: not where
    queries sit, but for AT_END."""
    found: list[object] = []
    for name in named:
        if name in _OWN:
            x = named[name]
            if isinstance(x, torch.Tensor):
                found += x.shape, x.stride(), x.dtype, x.device
            elif x is not None:
                found.append(x if name in BOUNDS else x == AT_END)
    return found


_OWN = frozenset((*PAGED, *VARLEN, *PAGED_VARLEN, *BOUNDS))


def addresses(names: tuple[str, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
    """Where the tensors of these names lie; 0 for none."""
    given = [named.get(name) for name in names]
    return tuple([x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in given])


def _check_tensor(name: str, tensor: object, size: int, device: torch.device) -> None:
    def wanted() -> str:
        return f"an int32 tensor [{'sequences + 1' if name in VARLEN[:2] else 'batch'}], on q's device ({device})"

    if not isinstance(tensor, torch.Tensor):
        cure = f"torch.tensor({_said(name)}, dtype=torch.int32, device={str(device)!r})"
        raise LaunchError(f"{_said(name)} is a {type(tensor).__name__}: it is {wanted()}\n  nearest: {cure}")
    if tensor.is_nested or tensor.layout != torch.strided:
        _check_dense(_said(name), tensor)
    if tensor.dtype != torch.int32:
        dtype, cure = str(tensor.dtype).removeprefix("torch."), f"{_said(name)}.to(torch.int32)"
        raise LaunchError(f"{_said(name)} is {dtype}: it is {wanted()}\n  nearest: {cure}")
    if tensor.device != device:
        cure = f"{_said(name)}.to({str(device)!r}), a copy"
        raise LaunchError(f"{_said(name)} is on {tensor.device}: it is {wanted()}\n  nearest: {cure}")
    if tensor.shape != (size,):
        raise LaunchError(f"{_said(name)} is {list(tensor.shape)}: it is {wanted()}\n  nearest: {size} numbers")
    if size > 1 and tensor.stride(0) != 1:
        raise LaunchError(
            f"{_said(name)} has stride {tensor.stride(0)}: its numbers lie side by side\n"
            f"  nearest: {_said(name)}.contiguous()"
        )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise LaunchError for numbers of sequences that do not lie side by side in one tensor."""
    check_layout(name, name, tensor, nested=f"torch.cat({name}.unbind()), a copy")


def beyond(found: Sequences | None, rows: int) -> torch.Tensor | None:
    """Which of a tensor's rows of queries are no query of any sequence, [batch or 1, 1, rows], without a wait; None
    where all are one's."""
    lengths = None if found is None else found.tensors[0]
    if found is None or lengths is None:
        return None
    at = torch.arange(rows, device=lengths.device)
    if found.layout.joined:
        return ((at < lengths[0]) | (at >= lengths[-1]))[None, None]
    return (at >= lengths[:, None])[:, None]


def places(starts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of joined sequences, of which there is one at least, the number of its sequence, its position there,
    and whether it is in one, found on the device; a row of none has those of some sequence."""
    row = torch.arange(rows, dtype=torch.int32, device=starts.device)
    number = torch.searchsorted(starts[1:], row, right=True, out_int32=True)
    within = (row >= starts[0]) & (row < starts[-1])
    number = number.clamp(max=starts.shape[0] - 2)
    return number, row - starts[number], within


def of_each(numbers: torch.Tensor, found: Sequences | None, rows: int) -> torch.Tensor:
    """Numbers [sequences or 1, heads or 1] as those of rows of queries, which broadcast to [batch, heads, rows]: where
    sequences lie behind each other, a row of none has those of some sequence."""
    number = _number_of_each(numbers.shape, found, rows)
    return numbers.unsqueeze(-1) if number is None else numbers[number].T.unsqueeze(0)


def summed(of_rows: torch.Tensor, shape: torch.Size, found: Sequences | None) -> torch.Tensor:
    """What rows of queries [batch, heads, rows] add up to, [sequences, heads], for numbers of a shape as `of_each` has
    them; rows of no sequence are 0."""
    number = _number_of_each(shape, found, of_rows.shape[2])
    if number is None:
        return of_rows.sum(-1)
    return of_rows.new_zeros((shape[0], of_rows.shape[1])).index_add_(0, number, of_rows[0].T)


def _number_of_each(shape: torch.Size, found: Sequences | None, rows: int) -> torch.Tensor | None:
    """The sequence of each row, by which numbers of this shape are found; None where they lie as batches of rows do."""
    if found is None or not found.layout.joined or len(shape) < 2 or shape[0] <= 1:
        return None
    assert found.tensors[0] is not None  # where sequences begin
    return places(found.tensors[0], rows)[0]


def watched() -> bool:
    """Whether values on a GPU are to be checked."""
    return os.environ.get(CHECK) == "1"


def of_batch(found: Sequences, problem: Problem) -> tuple[Sequence, ...]:
    """Each sequence by its numbers, read from where the tensors are; LaunchError for what is outside of its bounds."""
    of_q, of_k, q_offsets, *table = (_read(x) for x in found.tensors)
    q_start, k_start = np.zeros((2, problem.batch), np.int64)
    if found.layout.joined:
        q_start, rows = _spans("cu_seqlens_q", of_q, found.rows[0], problem.q_len, "max_seqlen_q")
    else:
        rows = _bounded("q_lengths", of_q, problem.q_len, "q_len", problem.batch)
    if found.layout.joined and not found.layout.paged:
        k_start, keys = _spans("cu_seqlens_k", of_k, found.rows[1], problem.kv_len, "max_seqlen_k")
    else:
        what, most = "kv_len", problem.kv_len
        if found.cache is not None and of_k is not None and table[0] is not None:
            what, most = "the most keys that pages hold", table[0].shape[1] * found.cache.page_size
            _check_bound(of_k, problem.kv_len, most)
        keys = _bounded("kv_lengths", of_k, most, what, problem.batch)
    pages = (None,) * problem.batch if found.cache is None else pages_of(table[0], keys, found.cache)
    if q_offsets is not None:
        first, most = q_offsets, MAX_LENGTH - 1 - problem.q_len
        _refuse_outside("q_offset", first, most, f"positions are 0 to {most}, so that all queries stay below 2^24")
    elif found.q_offset == AT_END:
        first = keys - rows
        for b in np.flatnonzero(first < 0)[:1]:
            raise LaunchError(
                f'q_offset="end" of {rows[b]} queries over {keys[b]} keys in sequence {b}: the first query would sit'
                f" before position 0\n  nearest: at most {keys[b]} queries there"
            )
    else:
        first = np.full(problem.batch, found.q_offset)
    each = zip(*(x.tolist() for x in (first, rows, keys, q_start, k_start)), pages, strict=True)
    return tuple(
        Sequence(at, at + n, kv_len, 0 if found.layout.joined else b, *starts)
        for b, (at, n, kv_len, *starts) in enumerate(each)
    )


def _spans(name: str, starts: np.ndarray | None, rows: int, most: int, bound: str) -> tuple[np.ndarray, np.ndarray]:
    """Where sequences begin, and how long they are."""
    assert starts is not None  # joined sequences have them
    lengths = np.diff(starts)
    for b in np.flatnonzero(lengths < 0)[:1]:
        raise LaunchError(
            f"{name} decreases from {starts[b]} to {starts[b + 1]} behind sequence {b}: it is a sum of lengths\n"
            f"  nearest: {name} in order"
        )
    for b in np.flatnonzero(lengths > most)[:1]:
        raise LaunchError(
            f"sequence {b} of {name} has {lengths[b]} rows and {bound} is {most}: no sequence is longer than that\n"
            f"  nearest: {bound}={lengths.max()}"
        )
    if starts[0] < 0 or starts[-1] > rows:
        raise LaunchError(
            f"{name} goes from {starts[0]} to {starts[-1]}: the tensor has rows 0 to {rows}\n"
            f"  nearest: {name} that ends with {rows}"
        )
    return starts[:-1], lengths


def _read(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().numpy().astype(np.int64)


def _check_bound(lengths: np.ndarray, most: int, room: int) -> None:
    """Raise LaunchError for a sequence in pages that has more keys than max_seqlen_k says, and no more than a row of
    its table has `room` for."""
    for b in np.flatnonzero((lengths > most) & (lengths <= room))[:1]:
        raise LaunchError(
            f"kv_lengths[{b}] is {lengths[b]} and max_seqlen_k is {most}: no sequence is longer than that\n"
            f"  nearest: max_seqlen_k={min(lengths.max(), room)}"
        )


def _bounded(name: str, given: np.ndarray | None, most: int, what: str, batch: int) -> np.ndarray:
    if given is None:
        return np.full(batch, most)
    _refuse_outside(name, given, most, f"lengths are 0 to {what} = {most}")
    return given


def _refuse_outside(name: str, values: np.ndarray, most: int, why: str) -> None:
    for b in np.flatnonzero((values < 0) | (values > most))[:1]:
        raise LaunchError(
            f"{name}[{b}] is {values[b]}: {why}\n  nearest: {name}[{b}] = {min(max(int(values[b]), 0), most)}"
        )
