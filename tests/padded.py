"""Padded sequences on the PTX interpreter: a kernel, tensors with NaN beyond each sequence, and each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from ptx_attention import ARCH, TILES, VALUES

from flashgen.analysis.facts import Facts, analyse
from flashgen.analysis.tiles import Case
from flashgen.codegen import emit
from flashgen.interpreter.machine import STEP_LIMIT
from flashgen.interpreter.simulate import Simulated, SimulatedBackward, simulate, simulate_backward
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant
from flashgen.planning.layout import AT_END, Dense, Layout, Padded
from flashgen.planning.members import Leaves
from flashgen.planning.pipelines.ampere import forward as ampere
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.plan import KernelPlan
from flashgen.planning.planner import backward_menu, menu
from flashgen.planning.problem import Problem
from flashgen.planning.request import KernelRequest
from flashgen.runtime import tiles as runtime
from flashgen.runtime.philox import Dropout
from flashgen.runtime.tiles_backward import WalkedBackward, walk_backward


@dataclass(frozen=True)
class Sequence:
    """One of a batch: how many queries and keys it has, where its queries begin, and its first rows in memory."""

    q_rows: int
    kv_len: int
    q_offset: int
    q_start: int = 0
    k_start: int = 0

    def walked(self, at: int) -> runtime.Sequence:
        """As the walk takes it, in this batch of the arrays."""
        return runtime.Sequence(self.q_offset, self.q_offset + self.q_rows, self.kv_len, at, self.q_start, self.k_start)

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_rows)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_start + self.kv_len)


@dataclass(frozen=True)
class Batch:
    """A kernel of padded sequences and what it runs on; `q_offset` and `tensors` are what its launch is told."""

    plan: KernelPlan
    variant: Variant
    facts: Facts
    problem: Problem
    case: Case
    qkv: tuple[np.ndarray, np.ndarray, np.ndarray]
    scale: float
    sequences: tuple[Sequence, ...]
    q_offset: int
    tensors: Mapping[str, np.ndarray]
    dropout: Dropout | None

    def run(self, edit: Callable[[str], str] = lambda text: text, **options) -> Simulated:
        """All sequences by one launch of the kernel, its text changed by `edit`."""
        return simulate(
            self.plan,
            self.case,
            *self.qkv,
            scale=self.scale,
            source=edit(emit(self.plan)),
            sequences=self.tensors,
            q_offset=self.q_offset,
            dropout=self.dropout,
            **options,
        )

    def backward(
        self,
        edit: Callable[[str], str] = lambda text: text,
        tile: tuple[int, int] | None = None,
        pipeline: str = "ampere",
        seed: int | None = None,
        step_limit: int = STEP_LIMIT,
        given: tuple[np.ndarray, np.ndarray] | None = None,
        **options,
    ) -> tuple[SimulatedBackward, WalkedBackward]:
        """The gradients of all sequences by the backward's kernels, and by the walk; dO is NaN where no query is.

        `given` are the gradients of o and lse, random ones unless given; `options` those of the plan.
        """
        p, (q, k, v) = self.problem, self.qkv
        tile = (32, 64) if tile is None and pipeline == "ampere" else tile
        request = {"tile": tile, "pipeline": pipeline, "layout": self.plan.layout, "dropout": self.dropout is not None}
        of_arch = ARCH[pipeline], p.dtype, p.head_dim, p.v_head_dim
        plan = backward_menu(self.variant, *of_arch, **request, **options).plans[0]
        numbers = {"scale": self.scale, "dropout": self.dropout}
        joined = self.plan.layout.joined
        own = tuple(x.walked(0 if joined else b) for b, x in enumerate(self.sequences))
        walks = {**numbers, "dtype": p.dtype, "sequences": own}
        o, lse, _ = runtime.walk(self.plan, self.facts, self.case, q, k, v, **walks)
        rng = np.random.default_rng(1)
        do, dlse = given or (rng.standard_normal(x.shape, np.float32) for x in (o, lse))
        do, o = (torch.from_numpy(x).to(getattr(torch, p.dtype)).float().numpy() for x in (do, o))
        for b, one in enumerate(() if joined else self.sequences):
            do[b, :, one.q_rows :] = dlse[b, :, one.q_rows :] = np.nan
        walked = walk_backward(plan, self.facts, self.case, q, k, v, o, lse, do, dlse=dlse, **walks)
        told = {"sequences": self.tensors, "q_offset": self.q_offset, "source": edit(emit(plan)), "seed": seed}
        told |= {**numbers, "step_limit": step_limit}
        return simulate_backward(plan, self.case, q, k, v, o, lse, do, dlse=dlse, **told), walked

    def alone(self, b: int) -> Simulated:
        """The rows of sequence b by the kernel without layouts, of a problem whose first queries are others."""
        own, (q, k, v), rng = self.sequences[b], self.qkv, np.random.default_rng(b)
        i = 0 if self.plan.layout.joined else b
        shape = (1, self.problem.heads, own.q_offset + own.q_rows, self.problem.head_dim)
        whole = rng.standard_normal(shape, np.float32)
        whole[:, :, own.q_offset :] = q[i : i + 1, :, own.queries]
        lengths = {"q": shape[2], "kv": own.kv_len}
        tensors = {}
        for tensor in self.variant.tensors:
            x = self.case.tensors[tensor.name]
            for axis, dim in enumerate(tensor.dims):
                if x.shape[axis] > 1 and dim == "batch":
                    x = np.take(x, [b], axis)
                elif x.shape[axis] > 1 and dim in lengths:
                    x = np.take(x, range(lengths[dim]), axis)
            tensors[tensor.name] = x
        sizes = {**self.case.sizes, "batch": 1, "q_len": shape[2], "kv_len": own.kv_len}
        case = Case(sizes=sizes, params=self.case.params, tensors=tensors)
        k, v = (x[i : i + 1, :, own.keys] for x in (k, v))
        plan = replace(self.plan, layout=Dense())
        if plan.specialized is not None:
            plan = hopper_plan(plan, self.variant, self.problem, Dense())
        splits = plan.keys.number(own.kv_len) if isinstance(plan.keys, Leaves) else 1
        found = simulate(plan, case, whole, k, v, scale=self.scale, kv_splits=splits)
        return found._replace(o=found.o[:, :, own.q_offset :], lse=found.lse[:, :, own.q_offset :])

    def wrong(self, result: Simulated) -> list[str]:
        """Where a result differs from each sequence alone, bit by bit, and from nothing beyond."""
        found = []
        for b, own in enumerate(self.sequences):
            i = 0 if self.plan.layout.joined else b
            o, lse = result.o[i], result.lse[i]
            if own.q_rows:
                alone = self.alone(b)
                if not np.array_equal(o[:, own.queries], alone.o[0], equal_nan=True):
                    found.append(f"o of {b}")
                if not np.array_equal(lse[:, own.queries], alone.lse[0], equal_nan=True):
                    found.append(f"lse of {b}")
            if self.plan.layout.joined:
                continue
            if o[:, own.q_rows :].any() or not (lse[:, own.q_rows :] == -np.inf).all():
                found.append(f"beyond {b}")
        return found


def hopper_plan(plan: KernelPlan, variant: Variant, p: Problem, layout: Layout) -> KernelPlan:
    """The same tile and stages with another layout."""
    candidate = hopper.Candidate(tile=plan.tile, stages=plan.stages, q_stages=plan.q_stages)
    request = KernelRequest.of(variant, plan.arch, p.dtype, p.head_dim, p.v_head_dim, layout=layout)
    asked = replace(request.asked, dropout=plan.dropout, keys=plan.keys)
    found = hopper.plan(candidate, replace(request, asked=asked))
    return hopper.packed(found) if plan.packed else found


def batch(
    spec: str | Variant,
    pipeline: str,
    *,
    q_lengths: tuple[int, ...] | None = None,
    kv_lengths: tuple[int, ...] | None = None,
    q_offset: int | str | tuple[int, ...] = 0,
    q_stages: int = 2,
    packed: bool = False,
    dropout: Dropout | None = None,
    tile: tuple[int, int] | None = None,
    beyond: float = np.nan,
    poisoned: int = 0,
    seed: int = 0,
    layout: Layout = Padded(),  # noqa: B008 (it is frozen)
    **shape,
) -> Batch:
    """Sequences of a spec, behind each other where the layout joins them.

    `shape` overrides 2 heads over 1, 100 queries, 211 keys, head_dim 64; two sequences have the same lengths unless
    given.  Rows beyond a sequence hold `beyond`, and where they are joined the keys of one that is `poisoned` do.
    """
    given = next((x for x in (q_lengths, kv_lengths, q_offset) if isinstance(x, tuple)), (0, 0))
    shape = {"heads": 2, "kv_heads": 1, "q_len": 100, "kv_len": 211, "head_dim": 64, **shape, "batch": len(given)}
    shape.setdefault("v_head_dim", shape["head_dim"])
    problem = p = Problem(**{"dtype": "bfloat16", **shape})
    rows = q_lengths or (p.q_len,) * p.batch
    keys = kv_lengths or (p.kv_len,) * p.batch
    at = q_offset if isinstance(q_offset, tuple) else (q_offset,) * p.batch
    ends = [kv_len - n if first == "end" else first for n, kv_len, first in zip(rows, keys, at, strict=True)]
    sequences = tuple(Sequence(*one) for one in zip(rows, keys, ends, strict=True))
    values = VALUES.get(spec, {}) if isinstance(spec, str) else {}
    variant = load_spec(spec) if isinstance(spec, str) else spec
    constants = {c.name: values[c.name] for c in variant.constants if c.name in values}
    variant = variant.bind(**constants)
    params = variant.values({name: value for name, value in values.items() if name not in constants})
    rng = np.random.default_rng(seed)
    positions = problem._replace(q_len=max(own.q_offset for own in sequences) + p.q_len)
    tensors = {t.name: np.asarray(t.example(positions, rng)) for t in variant.tensors}
    case = Case(sizes=problem.sizes(), params=params, tensors=tensors)
    shapes = (p.heads, p.q_len, p.head_dim), (p.kv_heads, p.kv_len, p.head_dim), (p.kv_heads, p.kv_len, p.v_head_dim)
    random = [torch.from_numpy(rng.standard_normal((p.batch, *s), np.float32)) for s in shapes]
    q, k, v = (x.to(getattr(torch, p.dtype)).float().numpy() for x in random)
    for b, own in enumerate(sequences):
        q[b, :, own.q_rows :] = k[b, :, own.kv_len :] = v[b, :, own.kv_len :] = beyond
    told = {name: np.array(x, np.int32) for name, x in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths)) if x}
    if isinstance(q_offset, tuple):
        told["q_offsets"] = np.array(q_offset, np.int32)
    plan = menu(
        variant,
        ARCH[pipeline],
        p.dtype,
        p.head_dim,
        p.v_head_dim,
        tile=tile or TILES[pipeline],
        stages=2,
        pipeline=pipeline,
        dropout=dropout is not None,
        layout=layout,
    ).plans[0]
    if pipeline == "hopper":
        plan = hopper_plan(replace(plan, **{"q_stages": q_stages}), variant, problem, layout)
    if packed:
        plan = {"ampere": ampere, "hopper": hopper}[pipeline].packed(plan)
    if layout.joined:
        starts = [np.cumsum([0, *lengths]).tolist() for lengths in (rows, keys)]
        each = list(zip(sequences, *starts, strict=False))
        q, k, v = (
            np.concatenate([x[b : b + 1, :, : getattr(own, of)] for b, own in enumerate(sequences)], axis=2)
            for x, of in ((q, "q_rows"), (k, "kv_len"), (v, "kv_len"))
        )
        sequences = tuple(replace(own, q_start=at, k_start=at_k) for own, at, at_k in each)
        told = {name: x for name, x in told.items() if name == "q_offsets"}
        told |= {f"cu_seqlens_{of}": np.array(x, np.int32) for of, x in zip("qk", starts, strict=True)}
        k[:, :, sequences[poisoned].keys] = v[:, :, sequences[poisoned].keys] = beyond
    first = AT_END if q_offset == "end" else q_offset if isinstance(q_offset, int) else 0
    return Batch(
        *(plan, variant, analyse(variant), problem, case, (q, k, v), p.head_dim**-0.5),
        *(sequences, first, told, dropout),
    )
