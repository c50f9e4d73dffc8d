"""What a plan costs on a problem: bytes to and from HBM, FLOPs, tiles and a roofline time; nothing is walked.

Bytes are counted as the papers count them, as if there were no L2.  Let a Q tile be visited by the KV tiles of its
schedule.  Then, summed over batch and query heads, at the caller's head dims and in-bounds rows only:

    read   q once a Q tile that visits any key, k and v once a visited (Q tile, KV tile) and query head (of packed
           heads once for all of a tile), every captured tensor once, or the summaries and bits in its place
    write  o once, lse (float32) once

Where keys are split, q is read by each part that visits any key, which writes its part of o in float32; every part
writes the maximum and the sum of its rows.  The kernel that combines them reads all that and writes o and lse.  Where
keys lie in pages, each entry of the page table that leads to a visited key is read once.

A backward is counted kernel by kernel: see `traffic_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from flashgen.analysis import counts
from flashgen.analysis import facts as analysis
from flashgen.errors import PlanError
from flashgen.planning import backward, limits, split_keys, summaries, traffic_backward, traffic_sequences
from flashgen.planning.arch import ARCHS, Arch
from flashgen.planning.integers import shown
from flashgen.planning.plan import KernelPlan, Part, Tile
from flashgen.planning.planner import Measured, Rejected, pipeline_of
from flashgen.planning.problem import STORED_BYTES, Problem
from flashgen.planning.profile import profile
from flashgen.planning.traffic_sequences import OwnLengths

if TYPE_CHECKING:
    from flashgen.analysis.counts import Loss, TileCounts
    from flashgen.analysis.formula import TileFormulas
    from flashgen.analysis.tiles import Case
    from flashgen.lang.expr import Tensor

LSE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes moved between HBM and the SMs."""

    read_bytes: int
    write_bytes: int

    @property
    def total(self) -> int:
        return self.read_bytes + self.write_bytes

    def text(self) -> tuple[str, str]:
        """Read and written, for a person."""
        return decimal(self.read_bytes), decimal(self.write_bytes)

    def as_json(self) -> dict[str, int]:
        return {"read_bytes": self.read_bytes, "write_bytes": self.write_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds that each unit of the reference card needs at its peak rate; the slowest is the prediction."""

    tensor: float
    exponential: float
    l2: float
    dram: float

    @property
    def total(self) -> float:
        return max(self.tensor, self.exponential, self.l2, self.dram)

    @property
    def bound(self) -> str:
        """The unit that decides."""
        return max(("tensor", "exponential", "l2", "dram"), key=lambda name: getattr(self, name))

    def as_json(self) -> dict[str, float]:
        return {"tensor": self.tensor, "exponential": self.exponential, "l2": self.l2, "dram": self.dram}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What orders the candidates where nothing was measured: a model of an SM that is full of blocks.

    `clocks` are those that each unit spends on one score (one query, one key), `together` those that pass, and `ms` the
    milliseconds of the visited tiles at that pace.
    """

    clocks: tuple[tuple[str, float], ...]
    together: float
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a title, one string for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A Problem through a KernelPlan, summed over batch and query heads.

    `hbm` is what the plan moves; `compulsory` each of q, k, v and the captured tensors read once, o and lse written
    once; `standard` Algorithm 0 of FlashAttention (Dao et al. 2022), which writes S and P to HBM in the input dtype and
    reads each back; `lower_bound_bytes` see `lower_bound`.  `flops` are 2 (D + Dv) for each in-bounds element of a
    visited tile and `flops_useful` for each visible pair.  That and the lower bound are None where only reading a huge
    mask pair by pair would tell.

    Where there are several, `hbm` is the sum of the plan's `kernels` (by entry), and `workspaces` is the memory that
    they need beside inputs and results.  Of a backward plan `compulsory` is each of q, k, v, o, do, lse and the
    captured tensors read once, every gradient written once; `standard` its Algorithm 3; and FLOPs are those of its five
    products (see `traffic_backward`).
    """

    plan: KernelPlan
    problem: Problem
    case: Case
    hbm: Bytes
    compulsory: Bytes
    standard: Bytes
    lower_bound_bytes: int | None
    flops: int
    flops_useful: int | None
    tiles: TileCounts
    times: Times
    pace: Pace
    rejected: tuple[Rejected, ...] = ()
    kernels: tuple[tuple[str, Bytes], ...] = ()
    workspaces: tuple[Part, ...] = ()
    measured: Measured | None = None  # what the plan was chosen by; None: by predicted times
    others: tuple[KernelPlan, ...] = ()  # of the same menu, faster on problems of other sizes
    splits: int = 1  # blocks that divide the keys of a tile of queries
    why_splits: str = ""
    sequences: tuple[OwnLengths, ...] = ()  # where each has lengths of its own
    page_size: int | None = None  # rows of a page, where keys lie in pages

    @property
    def predicted_ms(self) -> float:
        return self.times.total

    @property
    def formula(self) -> TileFormulas | None:
        """Tiles, bytes and FLOPs of a forward as SymPy expressions of the shape, or None for a mask that is no band.

        Bytes without those of captured tensors.  The first use imports SymPy.  Raises PlanError for a backward.
        """
        if self.plan.pass_name == "backward":
            raise PlanError("formulas are those of a forward\n  nearest: leave the backward or the formulas out")
        if self.sequences:
            raise PlanError("formulas are those of sequences of one length\n  nearest: leave the layout out")
        from flashgen.analysis.formula import tile_formulas

        return tile_formulas(analysis.analyse(self.plan.variant))

    def tables(self) -> tuple[Table, ...]:
        """The prediction for a person: what was chosen, why it fits, what it moves, how long it takes, what lost."""
        plan, arch, tiles = self.plan, ARCHS[self.plan.arch], self.tiles
        visited = tiles.partial + tiles.full
        return (
            Table(
                title="plan",
                columns=("", ""),
                rows=(
                    ("variant", plan.variant.name),
                    ("arch", f"{plan.arch} ({arch.card})"),
                    ("pipeline", f"{plan.pipeline} {plan.pass_name}"),
                    *((f"instead of {fallback.pipeline}", str(fallback)) for fallback in plan.fallbacks),
                    ("tile", f"{plan.tile.q} queries x {plan.tile.kv} keys, {shown(plan)}"),
                    *([("sequences", self._said_of_sequences())] if self.sequences else []),
                    *([("packed", self._packing())] if plan.packed and not self.sequences else []),
                    *([("kv splits", f"{self.splits}: {self.why_splits}")] if self.why_splits else []),
                    *([("summaries", "; ".join(map(str, plan.summaries)))] if plan.summaries else []),
                    ("warps", plan.program.text()),
                    *([("8 bits", plan.said_of_8_bits)] if plan.float8 else []),
                    *([("launch", str(plan.launches))] if plan.launches.early else []),
                    ("blocks per SM", str(plan.blocks_per_sm)),
                    ("chosen by", f"measured times ({self.measured.record})" if self.measured else "predicted times"),
                    *([("menu covers", self.measured.covers)] if self.measured else []),
                    *([("other sizes", "; ".join(map(_shape, self.others)))] if self.others else []),
                    *(("judged whole", note) for note in analysis.analyse(plan.variant).notes()),
                ),
            ),
            _sum("shared memory", plan.smem, arch.smem_per_block, "bytes"),
            _sum("registers per thread (estimate)", plan.registers, _most_registers(plan, arch), "registers"),
            Table(
                title="tiles",
                columns=("total", "empty", "partial", "full", "useful"),
                rows=((*map(str, (tiles.total, tiles.empty, tiles.partial, tiles.full)), _share(self)),),
            ),
            *([_losses(tiles.loss)] if tiles.loss is not None and not tiles.loss.exact else []),
            Table(
                title="HBM traffic",
                columns=("", "read", "written"),
                rows=(
                    *((entry, *moved.text()) for entry, moved in self.kernels),
                    ("this plan", *self.hbm.text()),
                    ("compulsory", *self.compulsory.text()),
                    ("standard attention", *self.standard.text()),
                    ("lower bound, both", _counted(self.lower_bound_bytes, decimal), ""),
                ),
            ),
            *([_workspaces(self.workspaces)] if self.workspaces else []),
            Table(
                title=f"time on {arch.card}, {visited} tiles visited",
                columns=("unit", "ms", ""),
                rows=tuple(
                    (name, f"{ms:.4g}", "decides" if name == self.times.bound else "")
                    for name, ms in self.times.as_json().items()
                ),
            ),
            *([] if self.measured else [_pace_table(self)]),
            *([_rejections("too large", found)] if (found := limits.of(plan)) else []),
            _rejections("rejected", self.rejected),
        )

    def _said_of_sequences(self) -> str:
        """How they lie, and how long they are."""
        rows, keys = ([getattr(own, name) for own in self.sequences] for name in ("q_rows", "kv_len"))
        lengths = (_spread(x, *what) for x, *what in ((rows, "query", "queries"), (keys, "key", "keys")))
        pages = f"; {self.pages} pages of {self.page_size} rows" if self.page_size else ""
        return f"{self.plan.layout.name}: {len(self.sequences)} of {'; '.join(lengths)}{pages}"

    @property
    def pages(self) -> int:
        """Pages that keys lie in; 0 where they lie in none."""
        return sum(-(-own.kv_len // self.page_size) for own in self.sequences) if self.page_size else 0

    def _packing(self) -> str:
        """What a tile of packed heads holds, and what that saves."""
        plan, problem = self.plan, self.problem
        pack, queries = plan.pack(problem.group), plan.tile_queries(problem.group)
        alone = -(-problem.q_len // plan.tile.q) * problem.heads * problem.batch
        tiles = -(-problem.q_len // queries) * problem.heads * problem.batch // pack
        held = f"{queries} queries of {f'{pack} heads that share keys' if pack > 1 else 'one head'}"
        return f"a tile holds {held}: {tiles} tiles of queries, where one head a tile makes {alone}"

    def as_json(self, *, formulas: bool = False) -> dict[str, object]:
        """The prediction as plain numbers, strings, lists and dicts: bytes, counts and milliseconds.

        With `formulas` (which imports SymPy) bytes and FLOPs also as text in the symbols of the shape, None for a mask
        that is no band.
        """
        plan, problem, tiles = self.plan, self.problem, self.tiles
        found: dict[str, object] = {
            "variant": plan.variant.name,
            "pass": plan.pass_name,
            "arch": plan.arch,
            "pipeline": plan.pipeline,
            "dtype": problem.dtype,
            "kv_dtype": problem.kv_dtype,
            "8_bits": plan.said_of_8_bits or None,
            "shape": problem.sizes() | {"head_dim": problem.head_dim, "v_head_dim": problem.v_head_dim},
            "tile": {"q": plan.tile.q, "kv": plan.tile.kv},
            "stages": plan.stages,
            "warps": plan.warps,
            "roles": [{"name": r.name, "warps": r.warps, "registers": r.registers} for r in plan.program.roles],
            "blocks_per_sm": plan.blocks_per_sm,
            "q_in_registers": plan.q_in_registers,
            "dropout": plan.dropout,
            "layout": plan.layout.name,
            "sequences": [asdict(own) for own in self.sequences],
            "page_size": self.page_size,
            "pages": self.pages,
            "pack": plan.pack(problem.group),
            "kv_splits": self.splits,
            "kv_splits_why": self.why_splits or None,
            "smem_bytes": plan.smem_bytes,
            "registers_estimate": plan.registers_estimate,
            "hbm": self.hbm.as_json(),
            "compulsory": self.compulsory.as_json(),
            "standard": self.standard.as_json(),
            "lower_bound_bytes": self.lower_bound_bytes,
            "flops": self.flops,
            "flops_useful": self.flops_useful,
            "tiles": {"total": tiles.total, "empty": tiles.empty, "partial": tiles.partial, "full": tiles.full},
            "block_mask": None if tiles.loss is None else tiles.loss.as_json(),
            "predicted_ms": self.predicted_ms,
            "times_ms": self.times.as_json(),
            "bound": self.times.bound,
            "pace_ms": self.pace.ms,
            "pace_clocks": dict(self.pace.clocks) | {"together": self.pace.together},
            "chosen_by": "measured" if self.measured else "predicted",
            "record": self.measured and self.measured.record,
            "slower_than_best": self.measured
            and dict(zip(map(str, self.measured.shapes), self.measured.losses, strict=True)),
            "fallbacks": [asdict(fallback) for fallback in plan.fallbacks],
            "passed_over": "; ".join(f"pipeline {f.pipeline}: {f.reason}" for f in plan.fallbacks) or None,
            "judged_whole": list(analysis.analyse(plan.variant).notes()),
            "summaries": [asdict(one) for one in plan.summaries],
            "kernels": [{"entry": entry, **moved.as_json()} for entry, moved in self.kernels],
            "workspaces": [{"name": part.name, "bytes": part.amount} for part in self.workspaces],
            "too_large": _listed(limits.of(plan)),
            "others": [{"tile": {"q": p.tile.q, "kv": p.tile.kv}, "stages": p.stages} for p in self.others],
            "rejected": _listed(self.rejected),
        }
        if plan.pass_name == "backward":
            found |= {
                "deterministic": plan.deterministic,
                "gradients": list(plan.gradients),
            }
        if formulas:
            names = ("read_bytes", "write_bytes", "flops", "flops_useful")
            formula = self.formula
            found["formula"] = None if formula is None else {name: str(getattr(formula, name)) for name in names}
        return found


def predict(
    plan: KernelPlan,
    problem: Problem,
    case: Case,
    *,
    rejected: Iterable[Rejected] = (),
    dlse: bool = False,
    measured: Measured | None = None,
    others: Iterable[KernelPlan] = (),
    splits: int = 1,
    why_splits: str = "",
    sequences: Iterable[OwnLengths] = (),
    page_size: int | None = None,
) -> Prediction:
    """What `plan` costs on `problem`; `case` carries the sizes, parameters and captured tensors of the same call.

    Closed form where the mask allows, never a walk.  `dlse` says that a backward is given the gradient of lse too;
    `measured` and `rejected` are those of the menu that the plan comes from, `others` its other plans; `splits` blocks
    divide keys where the plan splits them, and `why_splits` says why so many.  Where the plan's layout has lengths of
    their own, `sequences` are these, and `problem` bounds them: those of a padded batch are counted in its q_len rows;
    a layout of pages has a `page_size`.  Raises PlanError where problem and plan disagree on head dims or pages, and
    for a backward of such a layout.
    """
    own = tuple(sequences)
    asked, planned = (problem.head_dim, problem.v_head_dim), (plan.head_dim, plan.v_head_dim)
    if asked != planned:
        raise PlanError(
            f"the plan is for head_dim {planned[0]} and v_head_dim {planned[1]}, the problem has {asked[0]} and"
            f" {asked[1]}\n  nearest: a menu for the problem's head dims"
        )
    if plan.layout.paged != (page_size is not None):
        raise PlanError(
            f"the plan's layout is {plan.layout.name} and page_size is {page_size}: pages have a number of rows\n"
            f"  nearest: {'page_size=16' if plan.layout.paged else 'no page_size, or layout paged'}"
        )
    if plan.layout.own and plan.pass_name == "backward":
        raise PlanError(
            f"a backward's traffic is predicted for sequences of one length, and the plan's layout is"
            f" {plan.layout.name}\n  nearest: the forward, or layout dense"
        )
    if plan.layout.own and plan.keys.invariant and plan.keys.split:
        raise PlanError(
            "what leaves move is predicted for sequences of one length, and the plan's layout is"
            f" {plan.layout.name}\n  nearest: invariant=False, or layout dense"
        )
    if plan.pass_name == "backward":
        costs = _backward_costs(plan, problem, case, dlse)
    else:
        of_own = (own, splits, page_size)
        costs = _own_costs(plan, problem, case, *of_own) if plan.layout.own else _costs(plan, problem, case, splits)
    arch, tiles = ARCHS[plan.arch], costs["tiles"]
    return Prediction(
        plan=plan,
        problem=problem,
        case=case,
        lower_bound_bytes=lower_bound(problem, arch, tiles.visible, costs["hbm"], costs["compulsory"]),
        rejected=tuple(rejected),
        measured=measured,
        others=tuple(others),
        splits=splits,
        why_splits=why_splits,
        sequences=own,
        page_size=page_size,
        **costs,
    )


def _shape(plan: KernelPlan) -> str:
    """A plan by what tells it from the others of its menu."""
    form = ", heads packed" if plan.packed else ", dq in kernels of its own" if _dq_apart(plan) else ""
    return f"{plan.tile}, {shown(plan)}{form}"


def _dq_apart(plan: KernelPlan) -> bool:
    return plan.backward is not None and not plan.backward.dq_in_main_kernel


def _costs(plan: KernelPlan, problem: Problem, case: Case, splits: int) -> dict[str, Any]:
    """Fields of the prediction of a forward."""
    tiles = _tiles(plan, problem, case)
    captured = _stored(plan.variant.tensors, case)
    of_summaries, read_again = _summaries(plan, problem, case)
    visits = _moved(problem, tiles, _stored(summaries.tensors_beside(plan), case) + read_again)
    parts = None
    if plan.keys.split and not problem.empty:
        parts = split_keys.rows_of_parts(plan, problem, case, splits), split_keys.rows(plan, problem) * splits
    compulsory, standard = _compulsory(problem, captured), _standard(problem, captured)
    found = _costs_of(plan, problem, case, tiles, visits, parts, of_summaries, compulsory)
    workspaces = (*split_keys.workspaces(plan, problem, splits), *summaries.workspaces(plan, problem))
    return {**found, "standard": standard, "workspaces": workspaces}


def _own_costs(
    plan: KernelPlan, problem: Problem, case: Case, own: tuple[OwnLengths, ...], splits: int, page_size: int | None
) -> dict[str, Any]:
    """Fields of the prediction of a forward whose sequences have lengths of their own."""
    tiles = traffic_sequences.count(plan, problem, case, own)
    captured = _stored(plan.variant.tensors, case)
    read = problem.read_bytes(tiles.visited_rows, tiles.visited_columns)
    rows = traffic_sequences.written_rows(plan, problem, own)
    written = rows * (problem.v_head_dim * problem.o_itemsize + LSE_BYTES)
    table = 0 if page_size is None else traffic_sequences.table_bytes(plan, problem, case, own, page_size)
    beside = _stored(summaries.tensors_beside(plan), case) + table
    visits = _bytes(read + beside, written)
    compulsory = _bytes(traffic_sequences.inputs(problem, own) + captured + table, written)
    alone = [_standard(one.of(problem), 0) for one in own]
    standard = _bytes(sum(x.read_bytes for x in alone) + captured, sum(x.write_bytes for x in alone))
    q_rows, parts = sum(one.q_rows for one in own), None
    if plan.keys.split:
        of_q = traffic_sequences.count_parts(plan, problem, case, own, splits)
        parts = of_q, q_rows * problem.heads * splits
    found = _costs_of(plan, problem, case, tiles, visits, parts, _bytes(0, 0), compulsory)
    workspaces = split_keys.workspaces(plan, problem, splits, q_rows)
    return {**found, "standard": standard, "workspaces": workspaces}


def _costs_of(
    plan: KernelPlan,
    problem: Problem,
    case: Case,
    tiles: TileCounts,
    visits: Bytes,
    parts: tuple[int, int] | None,
    of_summaries: Bytes,
    compulsory: Bytes,
) -> dict[str, Any]:
    """Fields of the prediction of a forward that visits these tiles, for which one kernel moves so much where keys are
    not split; `parts` are the rows of o of all parts, and their maxima and sums."""
    combined = _bytes(0, 0)
    if parts is not None:
        visits, combined = _parts(plan, problem, case, visits, tiles, *parts)
    kernels = {summaries.ENTRY: of_summaries} if plan.summaries else {}
    kernels |= {"attention_forward": visits} | ({split_keys.ENTRY: combined} if plan.keys.split else {})
    moved = _bytes(sum(one.read_bytes for one in kernels.values()), sum(one.write_bytes for one in kernels.values()))
    per_pair, scores = 2 * (problem.head_dim + problem.v_head_dim), tiles.visited * plan.tile.q * plan.tile.kv
    special, _ = profile(plan.variant).score_ops
    padded = 2 * (plan.padded_head_dim + plan.padded_v_head_dim) * scores
    at_l2 = moved.total + split_keys.folded_bytes(plan, tiles.visited_elements)
    return {
        "hbm": moved,
        "compulsory": compulsory,
        "flops": per_pair * tiles.visited_elements,
        "flops_useful": None if tiles.visible is None else per_pair * tiles.visible,
        "tiles": tiles,
        "times": _times(plan, padded, scores * (1 + special), at_l2, compulsory.total),
        "pace": _pace(plan, scores),
        "kernels": tuple(kernels.items()) if len(kernels) > 1 else (),
    }


def _parts(
    plan: KernelPlan, problem: Problem, case: Case, visits: Bytes, tiles: TileCounts, rows: int, of_rows: int
) -> tuple[Bytes, Bytes]:
    """What visiting tiles in parts moves, in place of `visits`, and what combining these does."""
    again = (rows - tiles.visited_rows) * problem.head_dim * problem.itemsize
    parts = rows * problem.v_head_dim * split_keys.PART_ITEM + of_rows * split_keys.PART_ROW
    sink = plan.variant.sink
    of_sink = 0 if sink is None else case.tensors[sink.name].size * STORED_BYTES[sink.dtype]
    return (
        _bytes(visits.read_bytes + again - of_sink, parts),
        _bytes(parts + of_sink, visits.write_bytes),
    )


def _summaries(plan: KernelPlan, problem: Problem, case: Case) -> tuple[Bytes, int]:
    """What making the summaries moves, and what each kernel that classifies tiles by them reads; nothing where there
    are no queries or no keys, as no kernel runs."""
    sizes = {t.name: case.tensors[t.name].size * STORED_BYTES[t.dtype] for t in plan.variant.tensors}
    if problem.empty or problem.kv_len == 0:
        return _bytes(0, 0), 0
    made = _bytes(*summaries.moved(plan, problem, sizes))
    return made, made.write_bytes


def _tiles(plan: KernelPlan, problem: Problem, case: Case) -> TileCounts:
    """The tiles of a forward; one of packed heads is counted once, as its keys are read once."""
    tile = Tile(q=plan.tile_queries(problem.group), kv=plan.tile.kv)
    found, pack = counts.count(analysis.analyse(plan.variant), case, tile), plan.pack(problem.group)
    shared = {name: getattr(found, name) for name in ("total", "empty", "partial", "full", "visited_columns")}
    shared |= {name: count for name in ("unseen", "uncut") if (count := getattr(found, name)) is not None}
    return replace(found, **{name: count // pack for name, count in shared.items()})


def _backward_costs(plan: KernelPlan, problem: Problem, case: Case, dlse: bool) -> dict[str, Any]:
    """Fields of the prediction of a backward."""
    facts, by_itself = analysis.analyse(plan.variant), backward.layout(plan).by_query
    tiles = counts.count(facts, case, plan.tile)
    keys = counts.count_keys(facts, case, plan.tile, tiles.visited)
    queries = None
    scores = tiles.visited * plan.tile.q * plan.tile.kv
    again = 0  # scores of the tiles of a dq by itself
    if by_itself is not None:
        queries = counts.count(facts, case, Tile(q=by_itself.tile_q, kv=plan.tile.kv))
        again = queries.visited * by_itself.tile_q * plan.tile.kv
    variant, of_pairs = plan.variant, _stored(plan.variant.pair_tensors, case)
    shapes = {name: case.tensors[name].shape for name in plan.gradients}
    elements = sum(map(math.prod, shapes.values()))
    of_score = sum(math.prod(shapes[name]) for name in plan.score_gradients)
    sink = _stored([variant.sink] if plan.sink_gradient and variant.sink else [], case), elements - of_score
    captured = of_pairs + sink[0]
    of_summaries, read_again = _summaries(plan, problem, case)
    given = _stored(summaries.tensors_beside(plan), case) + read_again
    by_entry = traffic_backward.moved(plan, problem, keys, queries, given, of_score, sink, dlse=dlse)
    if plan.summaries and by_entry:
        by_entry = {summaries.ENTRY: (of_summaries.read_bytes, of_summaries.write_bytes)} | by_entry
    moved = _bytes(*map(sum, zip((0, 0), *by_entry.values(), strict=True)))
    # Without queries or keys no kernel runs.
    ends = traffic_backward.compulsory(problem, captured, elements, dlse=dlse) if by_entry else (0, 0)
    compulsory = _bytes(*ends)
    padded = problem._replace(head_dim=plan.padded_head_dim, v_head_dim=plan.padded_v_head_dim)
    special = 1 + profile(plan.variant).derived_special
    return {
        "hbm": moved,
        "compulsory": compulsory,
        "standard": _bytes(*traffic_backward.standard(problem, captured, elements)),
        "flops": traffic_backward.flops(
            problem, tiles.visited_elements, None if queries is None else queries.visited_elements
        ),
        "flops_useful": None if tiles.visible is None else traffic_backward.useful_flops(problem, tiles.visible),
        "tiles": tiles,
        "times": _times(
            plan,
            traffic_backward.flops(padded, scores, None if queries is None else again),
            (scores + again) * special,
            moved.total,
            compulsory.total,
        ),
        "pace": _pace(plan, scores),
        "kernels": tuple((entry, _bytes(*pair)) for entry, pair in by_entry.items()),
        "workspaces": (
            (*backward.workspaces(plan, problem, shapes), *summaries.workspaces(plan, problem)) if by_entry else ()
        ),
    }


def _bytes(read: int, written: int) -> Bytes:
    return Bytes(read_bytes=read, write_bytes=written)


def lower_bound(problem: Problem, arch: Arch, visible: int | None, moved: Bytes, compulsory: Bytes) -> int | None:
    """Bytes that exact attention needs at least: the larger of touching everything once and the IO bound.

    Touching once is `compulsory`, or what the plan reads where the mask hides so many keys that this is less.  The IO
    bound is FlashAttention's Theta(N^2 d^2 / M) elements for a fast memory of M elements (Dao et al. 2022, Proposition
    3; tight for M >= d^2, Saha and Ye 2024), taken as pairs (D + Dv)^2 / M: visible pairs, and K and V streaming past a
    tile whose rows of Q and O fill the shared memory and registers of one SM.  None where the visible pairs
    were not counted.
    """
    if visible is None:
        return None
    once = compulsory.write_bytes + min(compulsory.read_bytes, moved.read_bytes)
    squares = visible * (problem.head_dim + problem.v_head_dim) ** 2 * problem.kv_itemsize**2
    return max(once, squares // arch.on_chip_bytes)


def _stored(tensors: Iterable[Tensor], case: Case) -> int:
    """Bytes of captured tensors, each once."""
    return sum(case.tensors[tensor.name].size * STORED_BYTES[tensor.dtype] for tensor in tensors)


def _written(problem: Problem) -> tuple[int, int]:
    rows = problem.batch * problem.heads * problem.q_len
    return rows * problem.v_head_dim * problem.o_itemsize, rows * LSE_BYTES


def _moved(problem: Problem, tiles: TileCounts, captured: int) -> Bytes:
    read = problem.read_bytes(tiles.visited_rows, tiles.visited_columns)
    return Bytes(read_bytes=read + captured, write_bytes=sum(_written(problem)))


def _inputs(problem: Problem) -> int:
    """Bytes of q, k and v."""
    return problem.batch * problem.read_bytes(problem.heads * problem.q_len, problem.kv_heads * problem.kv_len)


def _compulsory(problem: Problem, captured: int) -> Bytes:
    return Bytes(read_bytes=_inputs(problem) + captured, write_bytes=sum(_written(problem)))


def _standard(problem: Problem, captured: int) -> Bytes:
    scores = problem.batch * problem.heads * problem.q_len * problem.kv_len * problem.itemsize
    o, _ = _written(problem)  # Algorithm 0 keeps no lse
    return Bytes(read_bytes=_inputs(problem) + captured + 2 * scores, write_bytes=2 * scores + o)


def _times(plan: KernelPlan, flops: int, special: int, moved: int, compulsory: int) -> Times:
    """FLOPs and special results of whole tiles at padded head dims for the units that work on them, bytes for the
    memories."""
    arch = ARCHS[plan.arch]
    return Times(
        tensor=1e3 * flops / arch.tensor_flops[plan.pipeline],
        exponential=1e3 * special / arch.special_per_s,
        l2=1e3 * moved / arch.l2_bytes_per_s,
        dram=1e3 * compulsory / arch.hbm_bytes_per_s,
    )


def _pace(plan: KernelPlan, scores: int) -> Pace:
    arch, pipeline = ARCHS[plan.arch], pipeline_of(plan)
    seconds = pipeline.seconds_per_score(plan, arch)[-1]
    return Pace(
        clocks=tuple(pipeline.clocks(plan, arch).items()),
        together=seconds * arch.clock_hz,
        ms=1e3 * seconds * scores / arch.sms,
    )


def _pace_table(prediction: Prediction) -> Table:
    """The pace for a person: in clocks for a thousand scores."""
    plan, pace = prediction.plan, prediction.pace
    sharing = "1 block" if plan.blocks_per_sm == 1 else f"{plan.blocks_per_sm} blocks"
    return Table(
        title="pace, which orders the candidates: an SM's clocks for 1000 scores",
        columns=("unit", "clocks", ""),
        rows=(
            *((unit, f"{1e3 * clocks:.4g}", "") for unit, clocks in pace.clocks),
            ("together", f"{1e3 * pace.together:.4g}", f"with {sharing}: {pace.ms:.4g} ms for the tiles visited"),
        ),
    )


def _losses(loss: Loss) -> Table:
    """What is not known of tiles before they are visited costs."""
    return Table(
        title="beside a block mask, made by evaluating every pair",
        columns=("tiles", "here", "block mask", "ratio"),
        rows=(
            ("visited", str(loss.visited), str(loss.seen), f"{loss.visits:.2f}"),
            ("masked pair by pair", str(loss.masked), str(loss.cut), f"{loss.masks:.2f}"),
        ),
    )


def _workspaces(parts: tuple[Part, ...]) -> Table:
    """Memory beside inputs and results."""
    terms = tuple((part.name, decimal(part.amount), part.why) for part in parts)
    return Table(
        title="workspaces", columns=("", "bytes", ""), rows=(*terms, ("sum", decimal(sum(p.amount for p in parts)), ""))
    )


def _sum(title: str, parts: tuple[Part, ...], limit: int, unit: str) -> Table:
    """The terms of a sum, the sum and its limit."""
    terms = tuple((part.name, str(part.amount), part.why) for part in parts)
    total = ("sum", str(sum(part.amount for part in parts)), f"of {limit} {unit}")
    return Table(title=title, columns=("", unit, ""), rows=(*terms, total))


def _most_registers(plan: KernelPlan, arch: Arch) -> int:
    """What a thread that computes may hold."""
    return plan.program.consumer_registers or arch.registers_per_thread


def _rejections(title: str, rows: Iterable[Rejected]) -> Table:
    return Table(
        title=title,
        columns=("tile", "stages", "warps", "reason"),
        rows=tuple((str(r.tile), str(r.stages), str(r.warps), r.reason) for r in rows),
    )


def _listed(rows: Iterable[Rejected]) -> list[dict[str, object]]:
    """The same as JSON."""
    return [
        {
            "tile": {"q": r.tile.q, "kv": r.tile.kv},
            "stages": r.stages,
            "warps": r.warps,
            "reason": r.reason,
        }
        for r in rows
    ]


def _share(prediction: Prediction) -> str:
    """Useful FLOPs of all."""
    flops = prediction.flops
    return _counted(prediction.flops_useful, lambda useful: f"{useful / flops:.1%}" if flops else "nothing to do")


def _counted(count: int | None, said: Callable[[int], str]) -> str:
    """A number that only a count of the visible pairs gives."""
    return "not counted" if count is None else said(count)


def decimal(count: int) -> str:
    """Bytes of traffic in the largest decimal unit that leaves a number of at least 1, as bandwidths are given."""
    power = min(4, int(math.log10(count) // 3)) if count else 0
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _spread(lengths: Sequence[int], one: str, many: str) -> str:
    """The least and the largest, and their sum."""
    least, most = min(lengths), max(lengths)
    span = str(most) if least == most else f"{least} to {most}"
    return f"{span} {one if most == 1 else many}, {sum(lengths)} in all"
