"""What a plan costs on a problem, as a value: bytes, FLOPs, tiles and times; `traffic.py` counts them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from flashgen.analysis import facts as analysis
from flashgen.errors import PlanError
from flashgen.planning import limits, tables
from flashgen.planning.menu import Measured, Rejected
from flashgen.planning.plan import KernelPlan, Part
from flashgen.planning.problem import Problem
from flashgen.planning.tables import Table, decimal
from flashgen.planning.traffic_sequences import OwnLengths

if TYPE_CHECKING:
    from flashgen.analysis.counts import TileCounts
    from flashgen.analysis.formula import TileFormulas
    from flashgen.analysis.tiles import Case


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
        """The prediction for a person."""
        return tables.of(self)

    @property
    def pages(self) -> int:
        """Pages that keys lie in; 0 where they lie in none."""
        return sum(-(-own.kv_len // self.page_size) for own in self.sequences) if self.page_size else 0

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
