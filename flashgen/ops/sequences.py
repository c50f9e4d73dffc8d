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
from flashgen.planning.layout import AT_END
from flashgen.planning.problem import Problem
from flashgen.runtime.tiles import Sequence

#: The names of a call for it, which are a variant's own where it declares them.
NAMES = ("q_lengths", "kv_lengths", "q_offset")

#: Set to 1 in the environment, the values of tensors on a GPU are checked too, for which the host waits.
CHECK = "FLASHGEN_CHECK"


class Sequences(NamedTuple):
    """int32 tensors [batch] or None; without `q_offsets` all first queries sit at `q_offset`, or AT_END."""

    q_lengths: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    q_offsets: torch.Tensor | None
    q_offset: int

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Those that kernels take, in the order of `layout.POINTERS`."""
        return self[:3]


def names_of(variant: Variant) -> tuple[str, ...]:
    """The names that calls of a variant have for it."""
    own = [x.name for x in variant.params] + [x.name for x in variant.constants] + [x.name for x in variant.tensors]
    return tuple(name for name in NAMES if name not in own)


def joined(variant: Variant, named: dict[str, Any], **given: object) -> dict[str, Any]:
    """A call's named values with these of its sequences; "end" becomes a number, as graphs hold no words.

    Raises LaunchError for a word or a number that is no position.
    """
    given = {name: value for name, value in given.items() if value is not None}
    first = given.get("q_offset")
    if "q_offset" in given and isinstance(variant, Variant) and "q_offset" in names_of(variant):
        if isinstance(first, str) and first == "end":
            given["q_offset"] = AT_END
        elif not isinstance(first, (int, torch.Tensor)) or isinstance(first, bool):
            raise LaunchError(
                f'q_offset is {shown(first)}: it is a position, an int32 tensor [batch] of them, or "end"\n'
                '  nearest: q_offset="end", which puts the last query beside the last key'
            )
        elif isinstance(first, int) and first < 0:
            raise LaunchError(
                f"q_offset is {shown(first)}: positions are not negative\n"
                '  nearest: q_offset=0, or q_offset="end", which puts the last query beside the last key'
            )
    return {**named, **given}


def of_call(variant: Variant, named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's named values that say what sequences have of their own."""
    return {name: named[name] for name in names_of(variant) if name in named}


def checked(given: Mapping[str, Any], problem: Problem, device: torch.device) -> Sequences | None:
    """The sequences of a call on a device, None where they are alike, or LaunchError for what is wrong with them; what
    tensors on a GPU hold is not looked at."""
    if not given:
        return None
    first = given.get("q_offset", 0)
    tensors = {name: x for name, x in given.items() if name != "q_offset" or isinstance(first, torch.Tensor)}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, problem, device)
    found = Sequences(
        q_lengths=given.get("q_lengths"),
        kv_lengths=given.get("kv_lengths"),
        q_offsets=tensors.get("q_offset"),
        q_offset=0 if "q_offset" in tensors else first,
    )
    check_offset(found.q_offset, problem.q_len)
    if found.q_offset == AT_END and found.q_lengths is None and problem.q_len > problem.kv_len:
        raise LaunchError(
            f'q_offset="end" of {problem.q_len} queries over {problem.kv_len} keys: the first query would sit before'
            f" position 0\n  nearest: at most {problem.kv_len} queries"
        )
    if device.type == "cpu":
        of_batch(found, problem)
    return found


def reach(found: Sequences, problem: Problem) -> int:
    """One past the last position that the host knows queries to sit at, which a dimension "q" of a captured tensor must
    hold.  Kernels clamp an index beyond; on a CPU it is a CapturedIndexError."""
    if found.q_offset == AT_END or found.q_offsets is not None or found.q_lengths is not None:
        return 0
    return found.q_offset + problem.q_len


def check_offset(q_offset: int, q_len: int) -> None:
    """Raise LaunchError for a position that reaches too far with so many queries."""
    if q_offset + q_len >= MAX_LENGTH:
        raise LaunchError(
            f"q_offset is {shown(q_offset)} with {q_len} queries: positions stay below 2^24\n"
            f"  nearest: q_offset={MAX_LENGTH - 1 - q_len}"
        )


class First:
    """The number that calls of one set of shapes give the position of the first query as; call it with named values.

    Raises LaunchError where positions reach too far for a captured tensor, or at all.
    """

    __slots__ = ("_least", "_q_len")

    def __init__(self, problem: Problem, captured: Mapping[str, torch.Tensor], variant: Variant) -> None:
        self._q_len = problem.q_len
        by_query = ((t.name, axis) for t in variant.tensors for axis, dim in enumerate(t.dims) if dim == "q")
        sizes = [(captured[name].shape[axis], name) for name, axis in by_query if captured[name].shape[axis] > 1]
        self._least = min(sizes, default=(MAX_LENGTH, ""))

    def __call__(self, named: Mapping[str, Any]) -> int:
        first = named.get("q_offset", 0)
        if isinstance(first, torch.Tensor):
            return 0
        check_offset(first, self._q_len)
        least, name = self._least
        if first + self._q_len > least and "q_lengths" not in named:
            raise LaunchError(
                f"q_offset is {first} with {self._q_len} queries, and {name} has {least} positions\n"
                f"  nearest: {name} of at least {first + self._q_len}"
            )
        return first


def addresses(named: Mapping[str, Any]) -> tuple[int, ...]:
    """Where the tensors of a call lie, 0 for none, in the order of `layout.POINTERS`."""
    given = (named.get(name) for name in NAMES)
    return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in given)


def _check_tensor(name: str, tensor: object, problem: Problem, device: torch.device) -> None:
    wanted = f"an int32 tensor [batch], on q's device ({device})"
    if not isinstance(tensor, torch.Tensor):
        cure = f"torch.tensor({name}, dtype=torch.int32, device={str(device)!r})"
        raise LaunchError(f"{name} is a {type(tensor).__name__}: it is {wanted}\n  nearest: {cure}")
    if tensor.dtype != torch.int32:
        raise LaunchError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}: it is {wanted}\n  nearest: {name}.to(torch.int32)"
        )
    if tensor.device != device:
        raise LaunchError(
            f"{name} is on {tensor.device}: it is {wanted}\n  nearest: {name}.to({str(device)!r}), a copy"
        )
    if tensor.layout != torch.strided or tuple(tensor.shape) != (problem.batch,):
        raise LaunchError(
            f"{name} is {list(tensor.shape)} and batch is {problem.batch}: it is {wanted}\n"
            f"  nearest: one number for each of {problem.batch} sequences"
        )
    if problem.batch > 1 and tensor.stride(0) != 1:
        raise LaunchError(
            f"{name} has stride {tensor.stride(0)}: its numbers lie side by side\n  nearest: {name}.contiguous()"
        )


def watched() -> bool:
    """Whether values on a GPU are to be checked."""
    return os.environ.get(CHECK) == "1"


def of_batch(found: Sequences, problem: Problem) -> tuple[Sequence, ...]:
    """Each sequence by its numbers, read from where the tensors are; LaunchError for what is outside of its bounds."""
    q_lengths, kv_lengths, q_offsets = (_read(x) for x in found.tensors)
    rows = _bounded("q_lengths", q_lengths, problem.q_len, "q_len", problem.batch)
    keys = _bounded("kv_lengths", kv_lengths, problem.kv_len, "kv_len", problem.batch)
    if q_offsets is not None:
        first, most = q_offsets, MAX_LENGTH - 1 - problem.q_len
        _refuse_outside("q_offset", first, most, f"positions are 0 to {most}, so that all queries stay below 2^24")
    elif found.q_offset == AT_END:
        first = keys - rows
        for b in np.flatnonzero(first < 0)[:1]:
            raise LaunchError(
                f'q_offset="end" of {rows[b]} queries over {keys[b]} keys in sequence {b}: the first query would sit'
                f" before position 0\n  nearest: q_lengths[{b}] of at most {keys[b]}"
            )
    else:
        first = np.full(problem.batch, found.q_offset)
    each = zip(first.tolist(), rows.tolist(), keys.tolist(), strict=True)
    return tuple(Sequence(q_offset=at, q_len=at + n, kv_len=kv_len) for at, n, kv_len in each)


def _read(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().numpy().astype(np.int64)


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
