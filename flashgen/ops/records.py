"""What is remembered of calls: one that repeats another's shapes, strides, dtypes and devices finds its record.

All that a record checks again is what can differ: alignment and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flashgen.errors import LaunchError
from flashgen.lang.expr import Tensor
from flashgen.lang.variant import Variant
from flashgen.locks import Lock
from flashgen.ops import float8, sequences
from flashgen.ops.call import Call, Request, checked, checked_again, factor
from flashgen.ops.menus import loadable
from flashgen.ops.splits import SPLITS
from flashgen.ops.values import no_variant
from flashgen.planning.division import LEAST_KEYS, MOST_QUERIES, mask_parameters
from flashgen.planning.plan import KernelPlan
from flashgen.planning.planner import Menu
from flashgen.runtime import driver
from flashgen.runtime.launch import Captured, Launch, dropout_scalars, make_launch

#: All that tells one call's launches from another's.
Key = tuple[Any, ...]

#: Where a key has dtypes and devices, of q first, and where what the call has of its own begins.
_DTYPES, _DEVICE, _OF_CALL = 6, 9, 16

#: Records of one variant; when there are more they are all dropped, and shapes still in use come back.
MAX_RECORDS = 4096

#: Variants whose calls are remembered.
MAX_VARIANTS = 1024


@dataclass(slots=True)
class _Calls:
    """What is remembered of the calls of one variant: the names of its constants, its captured tensors and their names,
    those of what sequences may have of their own, the parameters of its mask, its records on GPUs, of both passes, and
    a request of each kind of call there: of those that differ in lengths, strides, numbers and contents alone.

    `last` is the newest of the requests without named values, with the key and the call that it is of: a backward of
    new lengths finds its forward's.
    """

    constants: tuple[str, ...]
    declared: tuple[Tensor, ...]
    tensors: tuple[str, ...]
    sequences: frozenset[str]
    mask_params: tuple[str, ...]
    records: dict[Key, Any] = field(default_factory=dict)
    backward: dict[Key, Any] = field(default_factory=dict)
    requests: dict[Key, Request] = field(default_factory=dict)
    last: tuple[Key, Call, Request] | tuple[None, None, None] = (None, None, None)


#: By token of the variant, the oldest dropped beyond MAX_VARIANTS: one that is called again is planned again.
_calls: dict[str, _Calls] = {}
_calls_lock = Lock()


def calls_of(variant: Variant) -> _Calls:
    if not isinstance(variant, Variant):
        raise LaunchError(no_variant(variant))
    calls = _calls.get(variant.token)
    if calls is None:
        with _calls_lock:
            declared = variant.tensors
            constants, tensors = (tuple(x.name for x in symbols) for symbols in (variant.constants, declared))
            own = frozenset(sequences.names_of(variant))
            made = _Calls(constants, declared, tensors, own, mask_parameters(variant))
            calls = _calls.setdefault(variant.token, made)
            if len(_calls) > MAX_VARIANTS:
                del _calls[next(iter(_calls))]
    return calls


def call_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, calls: _Calls) -> Key:
    """All that a record depends on, and what no record has: kinds of tensors and numbers that are refused."""
    _, scale, named, dropout, _ = call
    of_q, of_k, k_dtype = q.shape, k.shape, k.dtype
    in_q, in_k, in_v, minus = q.stride(), k.stride(), v.stride(), q.is_neg() or k.is_neg() or v.is_neg()
    of_scale, below, drops = type(scale), scale is not None and scale < 0, dropout is not None
    of_tensors = of_q, of_k, v.shape, in_q, in_k, in_v, q.dtype, k_dtype, v.dtype, q.device, k.device, v.device
    key: Key = of_tensors + (minus, of_scale, below, drops)  # noqa: RUF005 (the other way takes twice as long)
    if not named:
        return key
    key = *key, *named, *map(type, named.values())
    if calls.constants:
        key = *key, *map(named.get, calls.constants)
    for name in calls.tensors:
        if name in named:
            x = named[name]
            key = *key, x.shape, x.stride(), x.dtype, x.device, x.is_neg()
    alike = calls.sequences.isdisjoint(named)
    if SPLITS in named:
        key = *key, named[SPLITS]
    elif calls.mask_params and (not alike or (of_k[2] >= LEAST_KEYS and of_q[2] <= MOST_QUERIES)):
        key = *key, *map(named.get, calls.mask_params)
    if k_dtype in float8.DTYPES:
        key = *key, *float8.key(named)
    return key if alike else (*key, *sequences.key(named))


def request_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, calls: _Calls, key: Key | None
) -> Request:
    """The request of a call of that key (None: it has none), or LaunchError or PlanError for what is wrong with it.

    Of a kind that was seen, that alone is checked which may differ: a new length is checked and planned at little cost.
    """
    kind = None
    if key is not None and q.is_cuda:
        of_key, of_call, last = calls.last
        if last is not None and of_call is call and of_key == key:
            return last
        if (kind := _kind(call, calls, key)) is not None and (known := calls.requests.get(kind)) is not None:
            rows, device = (key[0][2], key[1][2]), key[_DEVICE]
            request = checked_again(known, device, rows, call, calls.declared, calls.sequences)
            if not call.named:
                calls.last = key, call, request
            return request
    request = checked(q, k, v, call)
    if q.is_cuda:
        request = request._replace(kind=Kind.of(request, q))
    if kind is not None:
        own = request.sequences
        # Whoever owns the tensors may free them.
        kept = request._replace(tensors={}, sequences=own and own._replace(tensors=()))
        remember(calls.requests, kind, kept)
    return request


def _kind(call: Call, calls: _Calls, key: Key) -> Key | None:
    """What calls have in common that differ in lengths, strides, numbers and contents alone, of the key of one; None
    where k and v are of two lengths, where strides choose the pipeline or are refused, and of 8 bits, whose descales
    have shapes by lengths."""
    of_q, of_k, of_v, in_q, in_k, in_v, dtype, k_dtype = key[:8]
    if k_dtype in float8.DTYPES or not len(of_q) == len(of_k) == len(of_v) == 4:
        return None
    (batch, heads, _, columns), (k_batch, k_heads, kv_len, k_columns) = of_q, of_k
    v_batch, v_heads, v_len, v_columns = of_v
    size, named = dtype.itemsize, call.named
    pages = bool(named) and sequences.paged(named)
    if kv_len != v_len or not (loadable(of_q, in_q, size) and loadable(of_k, in_k, size, in_pages=pages)):
        return None
    if not ((in_v == in_k and of_v == of_k) or loadable(of_v, in_v, size, in_pages=pages)):
        return None
    of_rows = batch, heads, columns, k_batch, k_heads, k_columns, v_batch, v_heads, v_columns
    kind: Key = key[_DTYPES:_OF_CALL] + of_rows
    if named:
        kind = *kind, *named, *map(type, named.values()), *map(named.get, calls.constants)
        if pages:
            kind = *kind, kv_len  # pipelines load pages of some sizes
        for name in calls.tensors:
            if name in named:
                x = named[name]
                kind = *kind, x.dtype, x.device, x.is_neg()
    return kind


class Kind(NamedTuple):
    """What calls of one kind share on a GPU: which it is and how many SMs it has, the dtype of o, whether they are of 8
    bits, the names of captured tensors and of what sequences have of their own, what checks their numbers, and other
    menus than the forward's of whole keys, by what they are of."""

    device: int
    sms: int
    dtype: torch.dtype
    eight: bool
    tensors: tuple[str, ...]
    own: tuple[str, ...]
    numbers: Numbers
    menus: dict[object, Menu]

    @staticmethod
    def of(request: Request, q: torch.Tensor) -> Kind:
        """That of a request and of calls like it."""
        own = () if request.sequences is None else sequences.names(request.sequences.layout)
        dtype, eight = float8.out_dtype(request.eight, q), request.eight is not None
        index = q.device.index
        return Kind(index, driver.gpu(index).sms, dtype, eight, tuple(request.tensors), own, Numbers(request), {})

    def menu_of(self, what: object, ask: Callable[[], Menu]) -> Menu:
        """What `ask` gives, once for calls of one kind."""
        found = self.menus.get(what)
        if found is None:
            found = self.menus[what] = ask()
        return found


def remember(records: dict[Key, Any], key: Key, record: object) -> None:
    """Keep a record; when there are too many they are all dropped."""
    if len(records) >= MAX_RECORDS:
        records.clear()
    records[key] = record


class Numbers:
    """Scale, parameters and dropout of a call as a kernel takes them, checked where they are not those of the last;
    call it with the position of the first query where kernels take one.

    The same ones are the same tuple again.  Calls of one kind share it.
    """

    __slots__ = ("_apart", "_behind", "_floats", "_head_dim", "_heads", "_last", "_params", "_variant")

    def __init__(self, request: Request) -> None:
        self._variant, self._head_dim = request.variant, request.problem.head_dim
        self._params, self._heads = tuple(request.params), request.problem.heads
        self._floats = any(p.dtype.is_float for p in self._variant.params)
        self._last: tuple[Key, tuple[float, ...]] = ((), ())
        self._behind: tuple[tuple[float, ...], int, tuple[float, ...]] = ((), 0, ())
        self._apart: tuple[tuple[float, ...], dict[str, int | float]] = ((), {})

    def __call__(self, call: Call, first: int | None = None) -> tuple[float, ...]:
        _, scale, named, dropout, _ = call
        given, numbers = self._last
        now: Key = (scale, *map(named.get, self._params)) if self._params else (scale,)
        if given != now:
            values = self._variant.values({name: named[name] for name in self._params if name in named})
            numbers = abs(factor(scale, self._head_dim)), *[values[name] for name in self._params]
            if not (0 in now if self._floats else scale == 0):  # 0.0 and -0.0 are equal and not the same
                self._last = now, numbers
        if first is not None:
            of, known, behind = self._behind
            if of is not numbers or known != first:
                behind = *numbers, first
                self._behind = numbers, first, behind
            numbers = behind
        return numbers if dropout is None else (*numbers, *dropout_scalars(dropout, self._heads))

    def apart(self, call: Call) -> tuple[float, dict[str, int | float]]:
        """Scale and parameters of a call."""
        numbers = self(call)
        if not self._params:
            return numbers[0], {}
        of, params = self._apart
        if of is not numbers:
            params = dict(zip(self._params, numbers[1:], strict=False))  # what dropout draws stands behind them
            self._apart = numbers, params
        return numbers[0], params


def first_of(request: Request) -> sequences.First | None:
    """What gives the position of the first query to calls of a request's lengths; None where kernels take none."""
    own = request.sequences
    if own is None:
        return None
    bounding = bool(request.tensors) and not own.layout.joined
    dims = {t.name: t.dims for t in request.variant.tensors} if bounding else {}
    return sequences.First(own, request.problem, request.tensors, dims)


def launch_of(
    request: Request, plan: KernelPlan, strides: Mapping[str, tuple[int, ...]], sms: int, *, kv_splits: int = 1
) -> Launch:
    """The launch of a plan on a call's tensors, of these strides in elements, on a GPU of so many SMs; `kv_splits`
    blocks divide keys where the plan splits them."""
    own, eight, tensors = request.sequences, request.eight, request.tensors
    return make_launch(
        plan,
        request.problem,
        strides=strides,
        captured={name: Captured(x.shape, x.stride()) for name, x in tensors.items()} if tensors else {},
        scale=request.scale,
        params=request.params,
        dropout=request.dropout,
        rows=None if own is None else own.rows,
        kv_splits=kv_splits,
        cache=None if own is None else own.cache,
        descales={} if eight is None else float8.launched(eight, request.problem),
        sms=sms,
    )
