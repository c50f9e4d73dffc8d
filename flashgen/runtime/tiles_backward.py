"""The backward of a KernelPlan walked tile by tile on the CPU: keys outside, queries inside, P recomputed from lse.

As `runtime.tiles`, it counts what it takes and puts, kernel by kernel; the planner's formulas for the same are in
`planning/traffic.py`, and neither side calls the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.analysis import tiles
from flashgen.analysis.derivative import derive
from flashgen.analysis.tiles import FULL
from flashgen.lang.expr import DIMS, Node
from flashgen.lang.stored import rounded
from flashgen.planning import backward, summaries
from flashgen.planning.plan import Tile
from flashgen.planning.problem import STORED_BYTES, Problem
from flashgen.runtime.threads import one_blas_thread
from flashgen.runtime.tiles import Tiles, Visits

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.tiles import Case
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.philox import Dropout
    from flashgen.runtime.tiles import Sequence

#: Bytes of lse, delta, dlse and of a workspace's element, and of the exact sum of one captured element's gradient.
_FLOAT, _EXACT = 4, 64


@dataclass(slots=True, kw_only=True)
class Moved:
    """Bytes that one kernel reads and writes, by operand; a reduction in memory reads and writes."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class BackwardTraffic(Visits):
    """What a backward walk visited, and what it moved by entry in the order of their launches, over batch and heads.

    Visits are those of the kernel that works on keys: a kernel for dq that visits them again is not counted again.
    """

    kernels: dict[str, Moved] = field(default_factory=dict)

    def add(self, other: BackwardTraffic) -> None:
        """Count what another walk visited and moved as well."""
        self.count(other)
        for name, moved in other.kernels.items():
            mine = self.kernels.setdefault(name, Moved())
            mine.read.update(moved.read)
            mine.written.update(moved.written)

    @property
    def read_bytes(self) -> int:
        return sum(moved.read.total() for moved in self.kernels.values())

    @property
    def write_bytes(self) -> int:
        return sum(moved.written.total() for moved in self.kernels.values())


class WalkedBackward(NamedTuple):
    """dq, dk and dv of the shapes of q, k and v; gradients of the plan's captured tensors; and what it moved."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    captured: dict[str, np.ndarray]
    traffic: BackwardTraffic


@one_blas_thread
def walk_backward(
    plan: KernelPlan,
    facts: Facts,
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    *,
    scale: float,
    dtype: str,
    dlse: np.ndarray | None = None,
    dropout: Dropout | None = None,
    sequences: tuple[Sequence, ...] | None = None,
) -> WalkedBackward:
    """Gradients of sum(o * do) + sum(lse * dlse) by FlashAttention-2's backward (Dao 2023, Algorithm 2).

    Operands as `runtime.tiles.walk` takes and gives them: float32, or float64 where `dtype` is "float64"; o as the
    caller holds it, rounded to `dtype`, do of its shape, lse and dlse [batch, heads, q_len].  P and dS are rounded to
    `dtype` before their products.  A row whose lse is -inf, a masked pair and a score of -inf add exactly 0.  Results
    have the precision of the sums; without queries or without keys they are 0 and nothing moves.
    With `plan.backward.by_query` dq is computed in a walk of its own; `plan.gradients` names the captured tensors whose
    gradient is wanted.  Raises IndexError where one is read outside its dimension.  `sequences` are those of the walk:
    dq is 0 in rows that are no query, dk and dv in rows that are no key.
    """
    options = {"scale": scale, "dtype": dtype, "dropout": dropout}
    if sequences is None:
        return _Backward(plan, facts, case, q, k, v, o, lse, do, dlse, **options).run()
    precision = np.float64 if dtype == "float64" else np.float32
    dq, dk, dv = (np.zeros(x.shape, precision) for x in (q, k, v))
    captured = {name: np.zeros(case.tensors[name].shape, precision) for name in plan.gradients}
    traffic = BackwardTraffic()
    for b, own in enumerate(sequences):
        by_query = (x if x is None else x[own.queries] for x in (o, lse, do, dlse))
        operands = q[own.queries], k[own.keys], v[own.keys], *by_query
        found = _Backward(plan, facts, own.case(case), *operands, first=b, **options).run()
        dq[own.queries], dk[own.keys], dv[own.keys] = found.dq, found.dk, found.dv
        for name, gradient in found.captured.items():
            captured[name] += gradient
        traffic.add(found.traffic)
    return WalkedBackward(dq, dk, dv, captured, traffic)


def count_backward(
    plan: KernelPlan, facts: Facts, case: Case, *, head_dim: int, v_head_dim: int, dtype: str, dlse: bool = False
) -> BackwardTraffic:
    """What `walk_backward` would move and visit, without the arithmetic: tiles of operands that hold no memory."""
    sizes, zero = case.sizes, np.zeros((), np.float32)
    rows = (sizes["batch"], sizes["heads"], sizes["q_len"])
    keys = (sizes["batch"], sizes["kv_heads"], sizes["kv_len"])
    q, o, lse = (np.broadcast_to(zero, shape) for shape in ((*rows, head_dim), (*rows, v_head_dim), rows))
    k, v = np.broadcast_to(zero, (*keys, head_dim)), np.broadcast_to(zero, (*keys, v_head_dim))
    walk = _Backward(plan, facts, case, q, k, v, o, lse, o, lse if dlse else None, scale=1.0, dtype=dtype)
    return walk.count()


class _Tile(NamedTuple):
    """What a tile comes to, each [batch, kv_heads, group, rows, keys]: the kept probabilities; the derivatives by
    scale * q k^T and by what the score function makes of it; scale * q k^T itself; and which pairs count."""

    p: np.ndarray
    ds: np.ndarray
    by_score: np.ndarray
    raw: np.ndarray
    seen: np.ndarray


class _Backward(Tiles):
    def __init__(
        self,
        plan: Any,
        facts: Any,
        case: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        do: Any,
        dlse: Any,
        **options: Any,
    ) -> None:
        super().__init__(plan, facts, case, q, k, v, **options)
        self.o, self.lse, self.do = (self.grouped(x) for x in (o, lse, do))
        self.dlse = None if dlse is None else self.grouped(dlse)
        self.traffic = BackwardTraffic()
        self.moved = Moved()  # of the kernel that is walked
        self.factor = 1.0 if self.dropout is None else self.dropout.scale
        self.arithmetic = True
        self.adds_dq = plan.backward.adds_dq
        dims = {"head_dim": q.shape[-1], "v_head_dim": v.shape[-1], "dtype": plan.dtype}
        sizes = {**case.sizes, "batch": self.batch, "q_len": self.q_len, **dims}
        self.heads = self.batch * self.kv_heads
        # Of so many the main kernel does not clear, and of so many not finish, the sums of dq.
        self.ends = backward.clear_distance(plan, Problem(**sizes))
        self.shapes = {name: case.tensors[name].shape for name in plan.gradients}
        stored = backward.stored(plan, Problem(**sizes), self.shapes)
        self.stored = {name: STORED_BYTES[dtype] for name, dtype in stored.items()}  # bytes of an element

    def run(self) -> WalkedBackward:
        self.q, self.do = (x.astype(self.precision, copy=False) for x in (self.q, self.do))
        self.delta = np.zeros(self.lse.shape, self.precision)
        self.base = np.zeros(self.lse.shape, self.precision)
        self.dq = np.zeros(self.q.shape, self.precision)
        self.dk, self.dv = (np.zeros(x.shape, self.precision) for x in (self.k, self.v))
        self.captured = {name: np.zeros(shape, self.precision) for name, shape in self.shapes.items()}
        with np.errstate(all="ignore"):
            self._walk()
        dq = self.dq.reshape(self.batch, self.case.sizes["heads"], self.q_len, self.q.shape[-1])
        return WalkedBackward(dq, self.dk[:, :, 0], self.dv[:, :, 0], self.captured, self.traffic)

    def count(self) -> BackwardTraffic:
        self.arithmetic = False
        self.delta = self.base = self.lse
        self.dq, self.dk, self.dv = self.q, self.k, self.v
        if self.kv_len:  # a call without a key runs no kernel
            self._walk()
        return self.traffic

    def _walk(self) -> None:
        if 0 in self.lse.shape:
            return
        if self.kv_len == 0:  # rows have nothing but their sink: every other gradient is 0
            if self.plan.sink_gradient:
                self._prepare()
                self._sink()
            return
        if self.plan.summaries:
            self._enter("attention_summaries")
            self.moved.read["captured"], self.moved.written["summaries"] = self.summarised()
        gradients = bool(self.plan.score_gradients)
        if gradients:
            self._enter("attention_backward_clear")
            self._sums(read=False)
            if self.facts.hidden:
                every = (of_each * math.prod(self.shapes[name]) for name, of_each in self.stored.items())
                self.moved.written["sums"] += sum(every)
        self._prepare()
        if self.plan.sink_gradient:
            self._sink()
        self._keys()
        if self.adds_dq:
            self._enter("attention_backward_finish")
            self._finish(self.ends)
        else:
            self._queries()
        if gradients and self.plan.deterministic:
            self._enter("attention_backward_gradients")
            self._sums(written=False)
            self.moved.written["gradients"] += _FLOAT * self._captured_elements()

    # -- the kernels

    def _prepare(self) -> None:
        """delta = rowsum(do * o) - dlse, and lse where P is 0 in rows that see nothing."""
        self._enter("attention_backward_prepare")
        for q_tile in range(-(-self.q_len // self.plan.tile.q)):
            at = (..., self.rows(q_tile))
            o, do = self._read("o", self.o[*at, :]), self._read("do", self.do[*at, :])
            lse = self._read("lse", self.lse[at], _FLOAT)
            dlse = None if self.dlse is None else self._read("dlse", self.dlse[at], _FLOAT)
            if self.arithmetic:
                empty = lse == -np.inf
                delta = (do * o).sum(-1) if dlse is None else (do * o).sum(-1) - np.where(empty, 0, dlse)
                self.delta[at] = np.where(empty, 0, delta)
                self.base[at] = np.where(empty, np.inf, lse)
            self._wrote("lse", self.base[at], _FLOAT)
            self._wrote("delta", self.delta[at], _FLOAT)
        if self.adds_dq:  # it starts at 0
            self._sums_of_dq("written", self.ends)

    def _sink(self) -> None:
        """The gradient of each sink: what it takes of a row has no value, so dP of it is 0."""
        self._enter("attention_backward_sink")
        sink = self.variant.sink
        self.moved.read["captured"] += self.case.tensors[sink.name].size * STORED_BYTES[sink.dtype]
        lse, delta = (self._read(name, x, _FLOAT) for name, x in (("lse", self.base), ("delta", self.delta)))
        if self.arithmetic:
            everywhere = (slice(None),) * 3
            ds = -(np.exp(self.row_sinks(everywhere) - lse) * delta).sum(-1)[..., None, None]
            self._add_at(self.variant.sink_node, ds, self.symbols(everywhere, slice(0, 1), slice(0, 1)))
        self.moved.written["gradients"] += _FLOAT * self.case.tensors[sink.name].size

    def _keys(self) -> None:
        """dk and dv a KV tile at a time, over the queries that see it; dq too where it is added up in memory."""
        self._enter("attention_backward", captured=True)
        if self.plan.score_gradients:
            self._sums()
        if self.adds_dq:
            self._sums_of_dq("written", self.heads - self.ends)
            self._finish(self.heads - self.ends)
        q_tiles = -(-self.q_len // self.plan.tile.q)
        for on, heads in self._kv_places():
            for kv_tile in range(-(-self.kv_len // self.plan.tile.kv)):
                at_keys = (*on, slice(None), self.keys(kv_tile))
                k = v = None
                dk, dv = (np.zeros((), self.precision),) * 2
                for b, h, at in heads:
                    schedule = tiles.schedule_queries(
                        self.facts, self.case, self.plan.tile, kv_tile, self.first + (b or 0), h or 0
                    )
                    if schedule and k is None:  # keys that no query sees are not even loaded
                        k, v = self._read("k", self.k[at_keys]), self._read("v", self.v[at_keys])
                    walks = self.lse[at].shape[0] * self.lse[at].shape[1]
                    self.traffic.total += walks * q_tiles
                    self.traffic.empty += walks * (q_tiles - len(schedule))
                    for q_tile, tile_class in schedule:
                        rows = self.rows(q_tile)
                        q, do = self._read_rows(at, rows)
                        symbols = self.symbols(at, rows, self.keys(kv_tile))
                        keep = self._counted(symbols, tile_class, walks, q.shape[3], k.shape[3])
                        if self.stored:
                            self.moved.written["sums"] += sum(self.stored.values()) * walks * q.shape[3] * k.shape[3]
                        if self.arithmetic:
                            tile = self._tile(at, rows, q, do, k, v, symbols, keep)
                            dv = dv + self._round(tile.p).swapaxes(-1, -2) @ do
                            dk = dk + self._round(tile.ds).swapaxes(-1, -2) @ q
                            self._add_captured(tile, symbols, keep)
                        if self.adds_dq:
                            self._read("dq", self.dq[*at, rows], _FLOAT)
                            if self.arithmetic:
                                self.dq[*at, rows] += self.precision(self.scale) * (self._round(tile.ds) @ k)
                            self._wrote("dq", self.dq[*at, rows], _FLOAT)
                if self.arithmetic:
                    self.dk[at_keys] = self.precision(self.scale) * dk
                    self.dv[at_keys] = self.precision(self.factor) * dv
                self._wrote("dk", self.dk[at_keys])
                self._wrote("dv", self.dv[at_keys])

    def _queries(self) -> None:
        """dq a Q tile at a time, over its keys in the forward's order: nothing is added up in memory."""
        self._enter("attention_backward_dq", captured=True)
        tile = Tile(q=self.plan.backward.by_query.tile_q, kv=self.plan.tile.kv)
        for q_tile in range(-(-self.q_len // tile.q)):
            rows = self.rows(q_tile, tile.q)
            for b, h in self.places():
                at = self.at(b, h)
                schedule = tiles.schedule(self.facts, self.case, tile, q_tile, self.first + (b or 0), h or 0)
                dq = np.zeros((), self.precision)
                if schedule:
                    q, do = self._read_rows(at, rows)
                for kv_tile, tile_class in schedule:
                    keys = self.keys(kv_tile)
                    copies = q.shape[2]  # every query head reads its own copy
                    k = self._read("k", self.k[at[0], at[1], :, keys], copies * self.itemsize)
                    v = self._read("v", self.v[at[0], at[1], :, keys], copies * self.itemsize)
                    if self.arithmetic:
                        symbols = self.symbols(at, rows, keys)
                        keep = None if tile_class == FULL else self.visible(symbols)
                        dq = dq + self._round(self._tile(at, rows, q, do, k, v, symbols, keep).ds) @ k
                if self.arithmetic:
                    self.dq[*at, rows] = self.precision(self.scale) * dq
                self._wrote("dq", self.dq[*at, rows])

    def _finish(self, heads: int) -> None:
        """dq of so many heads of keys rounded, out of the sums in float32."""
        self._sums_of_dq("read", heads)
        self.moved.written["dq"] += self.dq.size // self.heads * heads * self.itemsize

    def _sums_of_dq(self, way: str, heads: int) -> None:
        getattr(self.moved, way)["dq"] += self.dq.size // self.heads * heads * _FLOAT

    # -- a tile

    def _tile(
        self,
        at: tuple[slice, slice, slice],
        rows: slice,
        q: np.ndarray,
        do: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        symbols: Mapping[str, np.ndarray],
        keep: np.ndarray | None,
    ) -> _Tile:
        raw, s = self.scores(q, k, symbols, keep)
        seen = s != -np.inf
        if keep is not None:
            s, seen = np.where(keep, s, -np.inf), seen & keep
        p = np.exp(s - self.base[*at, rows][..., None])
        dp, kept = do @ v.swapaxes(-1, -2), self.kept(symbols)
        if kept is not None:
            dp = np.where(kept, self.precision(self.factor) * dp, 0)
        ds = p * (dp - self.delta[*at, rows][..., None])
        tile = _Tile(p=p if kept is None else np.where(kept, p, 0), ds=ds, by_score=ds, raw=raw, seen=seen)
        if self.variant.score_node is None:
            return tile
        return tile._replace(ds=self._chained(derive(self.variant.score_node), tile, symbols, keep))

    def _chained(
        self, derivative: Node | None, tile: _Tile, symbols: Mapping[str, np.ndarray], keep: np.ndarray | None
    ) -> np.ndarray:
        """The derivative by the score times that of the score, which nobody sees where the pair is masked."""
        if derivative is None:
            return np.zeros_like(tile.by_score)
        by = self.evaluate(derivative, self.precision, {**symbols, "s": tile.raw}, live=keep)
        return np.where(tile.seen, tile.by_score * by, 0).astype(self.precision, copy=False)

    def _add_captured(self, tile: _Tile, symbols: Mapping[str, np.ndarray], keep: np.ndarray | None) -> None:
        for name in self.plan.score_gradients:
            for load, slope in backward.captured_grads(self.variant, name).items():
                gradient = self._chained(slope, tile, symbols, keep)
                self._add_at(load, gradient, {**symbols, "s": tile.raw}, keep)

    def _add_at(
        self, load: Node, gradient: np.ndarray, symbols: Mapping[str, np.ndarray], live: np.ndarray | None = None
    ) -> None:
        """What the elements that a captured tensor is read at gain."""
        name, place = load.attr.name, []
        for dim, size, index in zip(load.attr.dims, self.captured[name].shape, load.operands, strict=True):
            i = np.asarray(self.evaluate(index, self.precision, symbols, live=live))
            i = np.zeros_like(i) if size == 1 and dim in DIMS else np.clip(i, 0, size - 1)
            place.append(np.broadcast_to(i, gradient.shape))
        np.add.at(self.captured[name], tuple(place), gradient)

    # -- what is counted

    def _enter(self, kernel: str, *, captured: bool = False) -> None:
        self.moved = self.traffic.kernels[kernel] = Moved()
        if captured and self.variant.pair_tensors:
            self.moved.read["captured"] += self.captured_bytes(summaries.tensors_beside(self.plan))
            self.moved.read["summaries"] += self.summarised()[1]

    def _counted(
        self, symbols: Mapping[str, np.ndarray], tile_class: int, walks: int, rows: int, keys: int
    ) -> np.ndarray | None:
        """A visited tile, counted, and its mask where it has one."""
        self.traffic.elements += walks * rows * keys
        if tile_class == FULL:
            self.traffic.full += walks
            self.traffic.visible += walks * rows * keys
            return None
        self.traffic.partial += walks
        keep = self.visible(symbols)
        shape = np.broadcast_shapes(keep.shape, *(np.shape(x) for x in symbols.values()))
        self.traffic.visible += int(np.broadcast_to(keep, shape).sum())
        return keep

    def _read_rows(self, at: tuple[slice, slice, slice], rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """q and do of a Q tile, and beside them its lse and delta."""
        for name, x in (("lse", self.base), ("delta", self.delta)):
            self._read(name, x[*at, rows], _FLOAT)
        return self._read("q", self.q[*at, rows]), self._read("do", self.do[*at, rows])

    def _read(self, name: str, x: np.ndarray, itemsize: int | None = None) -> np.ndarray:
        self.moved.read[name] += x.size * (itemsize or self.itemsize)
        return x

    def _wrote(self, name: str, x: np.ndarray, itemsize: int | None = None) -> None:
        self.moved.written[name] += x.size * (itemsize or self.itemsize)

    def _sums(self, *, read: bool = True, written: bool = True) -> None:
        """The sums of captured gradients, each element once: a kernel's repeated additions are left to the caches."""
        size = self._captured_elements() * (_EXACT if self.plan.deterministic else _FLOAT)
        for counter, moves in ((self.moved.read, read), (self.moved.written, written)):
            if moves:
                counter["sums"] += size

    def _captured_elements(self) -> int:
        """Of gradients that are added up."""
        return sum(self.case.tensors[name].size for name in self.plan.score_gradients if name not in self.stored)

    def _kv_places(self) -> Iterator[tuple[tuple[slice, slice], list[tuple[int | None, int | None, tuple]]]]:
        """The batches and key/value heads that are walked together, and the query heads that each visits in turn."""
        members = [slice(i, i + 1) for i in range(self.group)]
        for b in dict.fromkeys(b for b, _ in self.places()):
            for kv_head in range(self.kv_heads) if self.facts.uses_head else (None,):
                on = self.at(b, None if kv_head is None else kv_head * self.group)[:2]
                heads = (None if kv_head is None else kv_head * self.group + i for i in range(self.group))
                yield on, [(b, h, (*on, member)) for h, member in zip(heads, members, strict=True)]

    def _round(self, x: np.ndarray) -> np.ndarray:
        return rounded(x, self.dtype)
