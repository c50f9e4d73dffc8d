"""A KernelPlan walked tile by tile on the CPU: the kernel's own order, skipping and online softmax, in NumPy.

The walk also counts what it moves.  Every slice it takes of q, k, v, o and lse adds numel x itemsize, so the count is
made of what was read and written and not of a formula; the planner's formulas live in `planning/traffic.py` and
neither side calls the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.analysis import tiles
from flashgen.analysis.tiles import FULL
from flashgen.lang import float8
from flashgen.lang.evaluate import check_positions, evaluate
from flashgen.lang.stored import rounded
from flashgen.planning import order, split_keys, summaries
from flashgen.planning.arch import ARCHS
from flashgen.planning.float8 import CODE_BIAS, E4M3, FAR, FLOAT8, WORDS_BY_BITS
from flashgen.planning.members import FoldedLeaves, Leaves
from flashgen.planning.plan import Tile
from flashgen.planning.problem import ITEMSIZE, STORED_BYTES
from flashgen.runtime import philox
from flashgen.runtime.threads import one_blas_thread

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.tiles import Case
    from flashgen.lang.expr import Node, Tensor
    from flashgen.planning.plan import KernelPlan
    from flashgen.runtime.philox import Dropout


@dataclass(slots=True, kw_only=True)
class Visits:
    """What a walk visited, summed over batch and query heads: `total` to `full` are tiles (visited: partial and full),
    `elements` the (query, key) pairs of visited tiles and `visible` those of them that the mask lets through."""

    total: int = 0
    empty: int = 0
    partial: int = 0
    full: int = 0
    elements: int = 0
    visible: int = 0

    def count(self, other: Visits) -> None:
        """Count what another walk visited as well."""
        for name in ("total", "empty", "partial", "full", "elements", "visible"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True, kw_only=True)
class Traffic(Visits):
    """What a walk visited, and the bytes of each operand that it moved; of `summaries`, of the `order` of tiles of
    queries, and of `parts` where keys are split, those written, beside `parts_read`; of the page `table` those of the
    entries that lead to visited keys, each once."""

    q: int = 0
    k: int = 0
    v: int = 0
    captured: int = 0
    o: int = 0
    lse: int = 0
    summaries: int = 0
    order: int = 0
    parts: int = 0
    parts_read: int = 0
    table: int = 0

    @property
    def read_bytes(self) -> int:
        # Summaries by whoever classifies tiles, the half of the order that is one, parts by whoever combines them.
        classified = self.summaries * (2 if self.order else 1) + self.order // 2
        return self.q + self.k + self.v + self.captured + self.table + classified + self.parts_read

    @property
    def write_bytes(self) -> int:
        return self.o + self.lse + self.summaries + self.order + self.parts

    def add(self, other: Traffic) -> None:
        """Count what another walk visited and moved as well."""
        self.count(other)
        for name in ("q", "k", "v", "captured", "o", "lse", "parts", "parts_read", "table"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Sequence(NamedTuple):
    """One of a batch: its queries sit at q_offset to q_len - 1, and it has kv_len keys.

    Its rows begin at q_start and k_start of the arrays, in their batch `at`; where the arrays of keys are those of a
    cache, they lie in these `pages`, one after the other.
    """

    q_offset: int
    q_len: int
    kv_len: int
    at: int
    q_start: int = 0
    k_start: int = 0
    pages: tuple[int, ...] | None = None

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Where its queries lie."""
        rows = self.q_len - self.q_offset
        return slice(self.at, self.at + 1), slice(None), slice(self.q_start, self.q_start + rows)

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        """Where its keys lie."""
        return slice(self.at, self.at + 1), slice(None), slice(self.k_start, self.k_start + self.kv_len)

    def own_keys(self, x: np.ndarray) -> np.ndarray:
        """Its rows of keys or of values, [1, kv_heads, kv_len, dim]: no other row is looked at."""
        if self.pages is None:
            return x[self.keys]
        rows = x[list(self.pages)].swapaxes(0, 1)  # [kv_heads, pages, page_size, dim]
        return rows.reshape(1, rows.shape[0], -1, rows.shape[-1])[:, :, : self.kv_len]

    def case(self, case: Case) -> Case:
        """The case of the sequence, of that of a batch."""
        return replace(case, sizes={**case.sizes, "q_len": self.q_len, "kv_len": self.kv_len}, q_offset=self.q_offset)


class Walked(NamedTuple):
    """o [batch, heads, q_len, v_head_dim] and lse [batch, heads, q_len] (natural log), and what making them moved."""

    o: np.ndarray
    lse: np.ndarray
    traffic: Traffic


@one_blas_thread
def walk(
    plan: KernelPlan,
    facts: Facts,
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    dtype: str,
    dropout: Dropout | None = None,
    sequences: tuple[Sequence, ...] | None = None,
    kv_splits: int = 1,
) -> Walked:
    """Attention by FlashAttention-2's forward (Dao 2023, Algorithm 1) over the plan's tiles.

    q is [batch, heads, q_len, head_dim], k and v [batch, kv_heads, kv_len, head_dim | v_head_dim], float32, or float64
    where `dtype` is "float64"; `dtype` is what the caller's tensors hold, or q alone where the plan is of 8-bit keys:
    it sizes the traffic, and p is rounded to it before P V, or to what the plan says of 8 bits.  s = scale * (q . k),
    then the score function, then the mask; a sink joins the sum of its row last; a row with nothing to attend gives 0
    and lse = -inf, or its sink.  With `dropout` o is that of the kept probabilities (FlashAttention, Dao et al. 2022,
    Algorithm 4), lse that of all.  o has the precision of the sums: rounding it is the caller's.  Raises
    IndexError where a captured tensor is read outside its dimension.

    Where the batch's `sequences` are given, the first rows and keys of each are read, and o is 0 and lse -inf in rows
    that are no query; where they have pages k and v are caches, [pages, kv_heads, page_size, head_dim | v_head_dim].
    Where the plan splits keys, `kv_splits` parts take turns over the tiles of a schedule, and are combined as by its
    kernel.
    """
    options = {"scale": scale, "dtype": dtype, "dropout": dropout, "kv_splits": kv_splits}
    if sequences is None:
        return _Walk(plan, facts, case, q, k, v, **options).run()
    o = np.zeros((*q.shape[:-1], v.shape[-1]), np.float64 if dtype == "float64" else np.float32)
    lse, traffic = np.full(q.shape[:-1], -np.inf, o.dtype), Traffic()
    for b, own in enumerate(sequences):
        operands = q[own.queries], own.own_keys(k), own.own_keys(v)
        one = _Walk(plan, facts, own.case(case), *operands, first=b, call_rows=lse.size, **options)
        o[own.queries], lse[own.queries], _ = one.run()
        traffic.add(one.traffic)
        if own.pages is not None:
            traffic.table += 4 * len({key // k.shape[2] for key in one.visited_keys()})
    traffic.captured //= max(len(sequences), 1)  # they are shared
    if not plan.layout.joined:  # rows that are no query are written too
        traffic.o, traffic.lse = o.size * max(ITEMSIZE[dtype], ITEMSIZE["bfloat16"]), lse.size * 4
    return Walked(o, lse, traffic)


def count(
    plan: KernelPlan, facts: Facts, case: Case, *, head_dim: int, v_head_dim: int, dtype: str, kv_splits: int = 1
) -> Traffic:
    """What `walk` would move and visit, without the arithmetic: the same tiles of operands that hold no memory."""
    sizes, zero = case.sizes, np.zeros((), np.float32)
    keys = (sizes["batch"], sizes["kv_heads"], sizes["kv_len"])
    q = np.broadcast_to(zero, (sizes["batch"], sizes["heads"], sizes["q_len"], head_dim))
    k, v = np.broadcast_to(zero, (*keys, head_dim)), np.broadcast_to(zero, (*keys, v_head_dim))
    return _Walk(plan, facts, case, q, k, v, scale=1.0, dtype=dtype, kv_splits=kv_splits).count()


def by_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b [..., rows, columns], each row with the bits that it has beside any other rows, and as any of them: where
    rows are multiplied together, a BLAS may add those of one place in another order than those of another."""
    return (a[..., None, :] @ b[..., None, :, :])[..., 0, :]


def of_length(x: np.ndarray, length: int, axis: int, value: float) -> np.ndarray:
    """The same with so many elements on an axis, the last of them `value`."""
    if (beyond := length - x.shape[axis]) == 0:
        return x
    shape = list(x.shape)
    shape[axis] = beyond
    return np.concatenate([x, np.full(shape, value, x.dtype)], axis)


class _Rows:
    """The running softmax of one Q tile: m the row maxima, l the row sums of p, acc the unnormalised output.

    A maximum lags as a kernel's does: it follows a key whose p passes `share` of what its row has added up, and p that
    passes 2^`most`.  All that a row becomes depends on the row alone.
    """

    def __init__(self, q: np.ndarray, v_head_dim: int, plan: KernelPlan) -> None:
        self.offset = plan.p_offset if plan.p_dtype in FLOAT8 else None
        self.words = 0 if plan.float8 is None else WORDS_BY_BITS[plan.float8.accuracy]
        self.slack, self.headroom, self.tiles = plan.p_slack, plan.p_headroom * math.log(2), 0
        self.keys, self.share, self.most = plan.tile.kv, plan.lag_share, 2.0**plan.lag_most
        self.m = np.full(q.shape[:-1], -np.inf, q.dtype)
        self.l = np.zeros(q.shape[:-1], q.dtype)
        self.acc = np.zeros((*q.shape[:-1], v_head_dim), q.dtype)

    def add(self, s: np.ndarray, v: np.ndarray, dtype: str, kept: np.ndarray | None = None) -> None:
        """One KV tile's scores (-inf where masked) and values, and which pairs dropout keeps."""
        s, v = of_length(s, self.keys, -1, -np.inf), of_length(v, self.keys, -2, 0.0)
        highest = s.max(axis=-1)
        if self.offset is None:
            limit = np.where(self.l == 0, self.most, np.clip(self.share * self.l, 1, self.most))
            m = np.where(np.exp(highest - self.m) > limit, highest, self.m)
        else:
            above = (highest - self.m) * math.log2(math.e)
            young = self.headroom > 0 and self.tiles < 2
            room = np.where(young | (self.m == -np.inf), self.headroom, 0)
            limit = -self.headroom * math.log2(math.e) if young else self.slack
            m = np.where(above > limit, highest + room, self.m)
            if self.tiles == 1:
                far = above < -self.headroom * math.log2(math.e) - FAR
                m = np.where(far & (self.m > -np.inf), self.m - self.headroom, m)
            self.tiles += 1
        base = np.where(m == -np.inf, 0, m)  # nothing visible yet: exp(-inf - 0) is 0, where -inf - -inf is not
        p = self._by_bits(s, base) if self.words else np.exp(s - base[..., None])
        decay = np.exp(self.m - base)
        self.l = self.l * decay + p.sum(axis=-1)
        p = p if kept is None else np.where(of_length(kept, self.keys, -1, False), p, 0)
        self.acc = self.acc * decay[..., None] + by_rows(self._rounded(p, dtype), v)
        self.m = m

    def combine(self, parts: list[_Rows]) -> None:
        """Parts of the same rows, in their order; this has seen nothing.  They are multiplied by what follows the
        highest maximum so far of groups of them."""
        for first in range(0, len(parts), split_keys.PARTS_OF_A_WARP):
            group = parts[first : first + split_keys.PARTS_OF_A_WARP]
            sees = [~(part.l <= 0) for part in group]
            highest = np.stack([np.where(seen, part.m, -np.inf) for seen, part in zip(sees, group, strict=True)])
            m = np.fmax(self.m, np.fmax.reduce(highest)).astype(self.m.dtype)
            decay = np.where(m == self.m, 1, np.exp(self.m - m)).astype(self.m.dtype)
            self.l, self.acc, self.m = self.l * decay, self.acc * decay[..., None], m
            for seen, part in zip(sees, group, strict=True):
                weight = np.where(seen, np.exp(part.m - m), 0).astype(m.dtype)
                self.l = self.l + weight * part.l
                self.acc = self.acc + weight[..., None] * part.acc

    def fold(self, leaves: list[_Rows]) -> None:
        """Leaves of the same rows, from the last to the first; this has seen nothing.  One of which a row sees nothing
        leaves it as it is."""
        for leaf in reversed(leaves):
            seen = ~(leaf.l <= 0)
            m = np.where(seen, np.fmax(self.m, leaf.m), self.m)
            before = np.where(m == self.m, 1, np.exp(self.m - m)).astype(m.dtype)
            weight = np.where(seen, np.exp(leaf.m - m), 0).astype(m.dtype)
            kept, acc = before * self.l, before[..., None] * self.acc
            self.l = np.where(weight == 0, kept, kept + weight * leaf.l)
            self.acc = np.where(weight[..., None] == 0, acc, acc + weight[..., None] * leaf.acc)
            self.m = m

    def _by_bits(self, s: np.ndarray, base: np.ndarray) -> np.ndarray:
        """P in e4m3, part of it made of the scores' bits."""
        power = (s - base[..., None]) * math.log2(math.e) + self.offset
        rows, keys = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
        exact = float8.rounded(np.exp2(power), E4M3)
        found = np.where(float8.taken_by_bits(rows, keys, self.words), float8.by_bits(power, CODE_BIAS), exact)
        return np.ldexp(found, -self.offset)

    def _rounded(self, p: np.ndarray, dtype: str) -> np.ndarray:
        """P as products take it: of 8 bits times a power of two, which is undone."""
        return (
            rounded(p, dtype)
            if self.offset is None
            else np.ldexp(rounded(np.ldexp(p, self.offset), dtype), -self.offset)
        )

    def join(self, sink: np.ndarray) -> None:
        """The rows' sinks; -inf: none."""
        m = np.maximum(self.m, sink)
        base = np.where(m == -np.inf, 0, m)
        decay = np.exp(self.m - base)
        self.l, self.acc, self.m = self.l * decay + np.exp(sink - base), self.acc * decay[..., None], m

    def finish(self, factor: float) -> tuple[np.ndarray, np.ndarray]:
        """o, times a factor, and lse; a row that saw nothing has l = 0 and m = -inf."""
        o = np.divide(self.acc, self.l[..., None], out=np.zeros_like(self.acc), where=(self.l != 0)[..., None])
        return o * o.dtype.type(factor), self.m + np.log(self.l)


class Tiles:
    """What both passes do with a tile: query heads beside the key/value head they share, positions, mask and scores.

    It is made of what `walk` takes, and its arrays begin with sequence `first`.  q is [batch, kv_heads, group, length,
    dim], k and v [batch, kv_heads, 1, length, dim].
    """

    def __init__(
        self,
        plan: KernelPlan,
        facts: Facts,
        case: Case,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        dtype: str,
        dropout: Dropout | None = None,
        first: int = 0,
    ) -> None:
        if plan.layout.own:  # its kernels have no summaries
            facts = replace(facts, summaries=())
        self.plan, self.facts, self.case, self.dropout = plan, facts, case, dropout
        self.variant = facts.variant
        self.precision = np.float64 if dtype == "float64" else np.float32
        self.scale, self.dtype, self.itemsize = scale, dtype, ITEMSIZE[dtype]
        self.p_dtype = dtype if plan.float8 is None else plan.p_dtype
        self.itemsizes = {"q": self.itemsize, **dict.fromkeys("kv", self.itemsize if plan.float8 is None else 1)}
        sizes = case.sizes
        self.first, self.batch, self.kv_heads = first, q.shape[0], sizes["kv_heads"]
        self.group = sizes["heads"] // max(self.kv_heads, 1)
        self.q_len, self.kv_len = sizes["q_len"] - case.q_offset, sizes["kv_len"]  # rows of queries, and of keys
        self.pack = plan.pack(self.group)
        self.tile = Tile(q=plan.tile_queries(self.group), kv=plan.tile.kv)  # queries and keys
        self.q = self.grouped(q)
        self.k, self.v = k[:, :, None], v[:, :, None]

    def grouped(self, x: np.ndarray) -> np.ndarray:
        """[batch, heads, ...] with the query heads of a key/value head on an axis of their own."""
        return x.reshape(self.batch, self.kv_heads, self.group, *x.shape[2:])

    def places(self) -> Iterator[tuple[int | None, int | None]]:
        """The batch and the query head of each schedule; None: all share it and are walked together."""
        if 0 in (self.batch, self.kv_heads, self.group):
            return
        for b in range(self.batch) if self.facts.uses_batch else (None,):
            for h in range(self.kv_heads * self.group) if self.facts.uses_head else (None,):
                yield b, h

    def at(self, b: int | None, h: int | None) -> tuple[slice, slice, slice]:
        """Where a place lies in [batch, kv_heads, group]."""
        on_batch, everything = slice(None) if b is None else slice(b, b + 1), slice(None)
        if h is None:
            return on_batch, everything, everything
        kv_head, member = divmod(h, self.group)
        return on_batch, slice(kv_head, kv_head + 1), slice(member, member + 1)

    def keys(self, kv_tile: int) -> slice:
        return slice(kv_tile * self.tile.kv, min((kv_tile + 1) * self.tile.kv, self.kv_len))

    def rows(self, q_tile: int, size: int | None = None) -> slice:
        size = size or self.tile.q
        return slice(q_tile * size, min((q_tile + 1) * size, self.q_len))

    def visible(self, symbols: Mapping[str, np.ndarray]) -> np.ndarray:
        """The mask in a PARTIAL tile; its floats are float32 whatever the precision of the sums, as in a kernel."""
        return np.asarray(self.evaluate(self.variant.mask, np.float32, symbols), bool)

    def scores(
        self, q: np.ndarray, k: np.ndarray, symbols: Mapping[str, np.ndarray], live: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """scale * q k^T, and what the score function makes of it."""
        keys, k = k.shape[-2], of_length(k, self.plan.tile.kv, -2, 0.0)
        raw = self.precision(self.scale) * by_rows(q, k.swapaxes(-1, -2))[..., :keys]
        if self.variant.score_node is None:
            return raw, raw
        s = self.evaluate(self.variant.score_node, self.precision, {**symbols, "s": raw}, live=live)
        return raw, np.broadcast_to(np.asarray(s, self.precision), raw.shape)

    def row_sinks(self, at: tuple[slice, slice, slice]) -> np.ndarray | None:
        """Those of a place, [batch, kv_heads, group, 1]."""
        if self.variant.sink_node is None:
            return None
        symbols = self.symbols(at, slice(0, 1), slice(0, 1))
        found = self.evaluate(self.variant.sink_node, self.precision, symbols)
        shape = np.broadcast_shapes(*(symbols[name].shape for name in "bh"))
        return np.broadcast_to(np.asarray(found, self.precision), shape)[..., 0]

    def kept(self, symbols: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The pairs that dropout keeps."""
        if self.dropout is None:
            return None
        return philox.keep(self.dropout, **symbols, heads=self.kv_heads * self.group)

    def evaluate(
        self, root: Node, precision: type, symbols: Mapping[str, np.ndarray], live: np.ndarray | None = None
    ) -> np.ndarray:
        case = self.case
        return evaluate(
            root,
            sizes=case.sizes,
            params=case.params,
            tensors=case.tensors,
            float_dtype=precision,
            live=live,
            **symbols,
        )

    def symbols(self, at: tuple[slice, slice, slice], rows: slice, keys: slice) -> dict[str, np.ndarray]:
        """b, h, q and k of a tile, shaped to broadcast to [batch, kv_heads, group, rows, keys]."""
        heads = np.arange(self.kv_heads * self.group).reshape(self.kv_heads, self.group)
        return {
            "b": np.arange(self.first, self.first + self.batch)[at[0], None, None, None, None],
            "h": heads[at[1], at[2]][None, :, :, None, None],
            "q": np.arange(rows.start, rows.stop)[:, None] + self.case.q_offset,
            "k": np.arange(keys.start, keys.stop),
        }

    def summarised(self) -> tuple[int, int]:
        """Bytes that the kernel of summaries reads, of each captured tensor once, and writes."""
        read, written = set(), 0
        for one in self.plan.summaries:
            places = (self.batch if one.by_batch else 1) * (self.kv_heads * self.group if one.by_head else 1)
            starts = range(0, self.kv_len if one.side == "k" else self.q_len, one.positions)
            tiles_each = len(range(0, self.kv_len, one.keys)) if one.keys else 1
            written += places * len(starts) * tiles_each * one.itemsize
            if one.bits is not None:
                rows, length = (self.q_len, self.kv_len) if one.bits.by == "q" else (self.kv_len, self.q_len)
                written += places * rows * len(range(0, length, one.bits.columns)) * one.bits.columns // 8
            read.update(one.tensors)
        return self.captured_bytes(t for t in self.variant.tensors if t.name in read), written

    def captured_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Captured tensors count once: a kernel's repeated reads of them are left to the caches."""
        return sum(self.case.tensors[t.name].size * STORED_BYTES[t.dtype] for t in tensors)


class _Walk(Tiles):
    """`call_rows` are those of o in the whole call, of which this may be one sequence."""

    def __init__(self, *operands: Any, kv_splits: int = 1, call_rows: int | None = None, **options: Any) -> None:
        super().__init__(*operands, **options)
        self.traffic, self.splits, self.visited = Traffic(), kv_splits, set[int]()
        self.call_rows = math.prod(self.q.shape[:-1]) if call_rows is None else call_rows

    def visited_keys(self) -> Iterator[int]:
        """Those of all tiles that were visited."""
        for kv_tile in self.visited:
            keys = self.keys(kv_tile)
            yield from range(keys.start, keys.stop)

    def run(self) -> Walked:
        if (mask := self.plan.variant.mask) is not None:
            check_positions(mask, self.case.sizes, self.case.tensors)
        sizes, dim = self.case.sizes, self.v.shape[-1]
        o = np.zeros((*self.q.shape[:-1], dim), self.precision)
        lse = np.full(self.q.shape[:-1], -np.inf, self.precision)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for at, rows, schedule in self._q_tiles():
                running = self._walk_rows(at, rows, schedule, dim)
                if (sinks := self.row_sinks(at)) is not None:
                    running.join(sinks)
                o[*at, rows], lse[*at, rows] = running.finish(1.0 if self.dropout is None else self.dropout.scale)
                self._wrote(o[*at, rows], lse[*at, rows])
        self._count_captured()
        shape = (self.batch, sizes["heads"], self.q_len)
        return Walked(o.reshape(*shape, dim), lse.reshape(shape), self.traffic)

    def count(self) -> Traffic:
        o = np.broadcast_to(np.zeros((), self.precision), (*self.q.shape[:-1], self.v.shape[-1]))
        for at, rows, schedule in self._q_tiles():
            for of_block in self._of_blocks(at, rows, schedule):
                self._walk_row(at, rows, of_block, None)
            self._wrote(o[*at, rows], o[*at, rows, 0])
        self._count_captured()
        return self.traffic

    def _count_captured(self) -> None:
        self.traffic.captured += self.captured_bytes(summaries.tensors_beside(self.plan))
        if self.q.size and self.kv_len:  # else no kernel runs
            read, self.traffic.summaries = self.summarised()
            self.traffic.captured += read
            q_tiles, kv_tiles = -(-self.q_len // self.tile.q), -(-self.kv_len // self.tile.kv)
            heads = self.kv_heads * self.group
            if order.wanted(self.plan, q_tiles * heads * self.batch, kv_tiles, ARCHS[self.plan.arch].sms):
                self.traffic.order = 8 * order.orders(self.plan, self.batch, heads) * q_tiles
                self.traffic.captured += self.captured_bytes(summaries.tensors_of_classes(self.plan))

    def _q_tiles(self) -> Iterator[tuple[tuple[slice, slice, slice], slice, list[tuple[int, int]]]]:
        """Each Q tile's batches and heads, rows and KV schedule."""
        for q_tile in range(-(-self.q_len // self.tile.q)):
            for b, h in self.places():
                schedule = tiles.schedule(self.facts, self.case, self.tile, q_tile, self.first + (b or 0), h or 0)
                yield self.at(b, h), self.rows(q_tile), schedule

    def _walk_rows(
        self, at: tuple[slice, slice, slice], rows: slice, schedule: list[tuple[int, int]], columns: int
    ) -> _Rows:
        """One Q tile by the blocks that work on it."""
        parts = []
        for of_block in self._of_blocks(at, rows, schedule):
            parts.append(_Rows(self.q[*at, rows].astype(self.precision, copy=False), columns, self.plan))
            self._walk_row(at, rows, of_block, parts[-1])
        if not self.plan.keys.split and not self.plan.keys.invariant:
            return parts[0]
        combined = _Rows(self.q[*at, rows].astype(self.precision, copy=False), columns, self.plan)
        if self.plan.keys.invariant:
            combined.fold(parts)
        else:
            combined.combine(parts)
        return combined

    def _of_blocks(
        self, at: tuple[slice, slice, slice], rows: slice, schedule: list[tuple[int, int]]
    ) -> list[list[tuple[int, int]]]:
        """The KV tiles of each block that works on a Q tile; where keys are split, of those that visit any, and where
        they are in leaves, of each leaf, whose Q one block reads once if it folds them."""
        q = self.q[*at, rows]
        walks, kv_tiles = math.prod(q.shape[:3]) // self.pack, -(-self.kv_len // self.tile.kv)
        self.traffic.total += walks * kv_tiles
        self.traffic.empty += walks * (kv_tiles - len(schedule))
        if isinstance(self.plan.keys, Leaves):
            parts = self._by_leaf(schedule, self.plan.keys.keys, self.splits)
        elif isinstance(self.plan.keys, FoldedLeaves):  # of one block
            if schedule:
                self._read("q", q)
            return self._by_leaf(schedule, self.plan.keys.keys, self.plan.keys.in_parts.number(self.kv_len))
        elif not self.plan.keys.split:
            return [schedule]
        else:
            parts = [schedule[i :: self.splits] for i in range(min(self.splits, len(schedule)))]
        lines, visited = math.prod(q.shape[:4]), sum(map(bool, parts))
        anyway = split_keys.read_anyway(self.plan, self.call_rows, self.splits)
        row, others = self.v.shape[-1] * split_keys.PART_ITEM, lines * self.splits * split_keys.PART_ROW
        self.traffic.parts += lines * visited * row + others
        self.traffic.parts_read += lines * max(visited, anyway) * row + others
        return parts

    def _by_leaf(self, schedule: list[tuple[int, int]], keys: int, leaves: int) -> list[list[tuple[int, int]]]:
        """The KV tiles of each leaf of so many keys."""
        return [[step for step in schedule if step[0] * self.tile.kv // keys == i] for i in range(leaves)]

    def _walk_row(
        self, at: tuple[slice, slice, slice], rows: slice, schedule: list[tuple[int, int]], running: _Rows | None
    ) -> None:
        """One Q tile over the KV tiles of a block; without `running` only counted."""
        traffic, q = self.traffic, self.q[*at, rows]
        walks = math.prod(q.shape[:3]) // self.pack
        if schedule and not self.plan.keys.folds:  # a Q tile that sees nothing is not even loaded
            self._read("q", q)
        for kv_tile, tile_class in schedule:
            self.visited.add(kv_tile)
            keys = self.keys(kv_tile)
            # Every query head reads its own copy of the K and V tile that its group shares, packed heads one together.
            copies = q.shape[2] // self.pack
            k = self._read("k", self.k[at[0], at[1], :, keys], copies)
            v = self._read("v", self.v[at[0], at[1], :, keys], copies)
            pairs = math.prod(q.shape[:4]) * k.shape[3]
            traffic.elements += pairs
            symbols = self.symbols(at, rows, keys)
            if tile_class == FULL:
                traffic.full += walks
                traffic.visible += pairs
                keep = None
            else:
                traffic.partial += walks
                keep = self.visible(symbols)
                traffic.visible += int(np.broadcast_to(keep, (*q.shape[:4], k.shape[3])).sum())
            if running is not None:
                _, s = self.scores(q, k, symbols, keep)
                running.add(s if keep is None else np.where(keep, s, -np.inf), v, self.p_dtype, self.kept(symbols))

    def _read(self, name: str, tile: np.ndarray, copies: int = 1) -> np.ndarray:
        setattr(self.traffic, name, getattr(self.traffic, name) + copies * tile.size * self.itemsizes[name])
        return tile

    def _wrote(self, o: np.ndarray, lse: np.ndarray) -> None:
        self.traffic.o += o.size * max(self.itemsize, ITEMSIZE["bfloat16"])
        self.traffic.lse += lse.size * np.dtype(np.float32).itemsize
