"""One cell on the GPU: the tensors that its contenders share, who takes part, what each needs, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.analysis.counts import count
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.bench.against import BEFORE, Against
from flashgen.bench.inputs import draw
from flashgen.bench.protocol import Ratio, Timings, whole_turns
from flashgen.errors import FlashgenError, LaunchError
from flashgen.ops import stages
from flashgen.runtime import captured
from flashgen.runtime.philox import Dropout

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell
    from flashgen.lang.variant import Variant
    from flashgen.planning.plan import KernelPlan

#: Relative error of a peer against flashgen above which they do not compute the same attention.
SAME = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """A cell's variant with its pipeline pinned, random tensors as a model has them, and what its calls drop."""

    cell: Cell
    variant: Variant
    inputs: Mapping[str, object]
    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dropped: Dropout | None = None

    @property
    def asked(self) -> dict[str, object]:
        """What flashgen's calls are given by name."""
        dropped = {} if self.dropped is None else {"dropout": self.dropped.p, "seed": self.dropped.seed}
        return {**self.inputs, **dropped}

    @property
    def scale(self) -> float:
        return self.cell.problem.head_dim**-0.5

    def plan(self, **options: object) -> KernelPlan:
        """What flashgen runs for the cell: `ops.stages.plan` of its shapes."""
        p = self.cell.problem
        shape = {"batch": p.batch, "heads": p.heads, "kv_heads": p.kv_heads, "seqlen": p.q_len, "kv_seqlen": p.kv_len}
        dims = {"head_dim": p.head_dim, "v_head_dim": p.v_head_dim, "dtype": p.dtype}
        return stages.plan(self.variant, **shape, **dims, dropout=self.dropped is not None, **options)

    def visible(self, plan: KernelPlan) -> int:
        """Pairs that the mask keeps, over batch and query heads."""
        return count(analyse(self.variant.bind()), self.case, plan.tile).visible


def prepare(cell: Cell, pipeline: str | None, seed: int, *, device: str = "cuda", dropout: float = 0.0) -> Setting:
    """Fresh random input, on the current GPU unless told otherwise, for a pipeline or (None) the one that the planner
    chooses; with a chance of dropout."""
    p = cell.problem
    variant = cell.variant()
    variant = dataclasses.replace(variant, pins=dataclasses.replace(variant.pins, pipeline=pipeline))
    values = variant.values(dict(cell.params))
    arrays = captured.examples(variant, p, seed)
    q, k, v, do = draw(p, seed, device=device)
    return Setting(
        cell=cell,
        variant=variant,
        inputs={**values, **captured.on_device(variant, arrays, device)},
        case=Case(sizes=p.sizes(), params=values, tensors=arrays),
        q=q,
        k=k,
        v=v,
        do=do,
        dropped=Dropout(p=dropout, seed=seed, offset=0) if dropout else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One cell: its timings, the ratios to each peer, useful TFLOP/s, and what the check found (empty: right).

    plan     tile and pipeline that served it
    own      contenders that are flashgen in another form: their speed is given as a part of flashgen's
    extra    bytes of GPU memory that a call takes beyond its results, at its peak, by contender
    checked  how much of the result was compared with float64
    """

    cell: Cell
    timings: Timings
    flops: int
    plan: KernelPlan
    reasons: tuple[str, ...]
    absent: Mapping[str, str]
    extra: Mapping[str, int]
    checked: str
    own: tuple[str, ...] = ()

    def tflops(self, name: str) -> float:
        """Useful TFLOP/s of a contender: masked pairs do not count."""
        return self.timings.tflops(name, self.flops)

    def ratio(self, name: str) -> Ratio:
        """How many times faster flashgen is than a peer; of its own other forms, their speed beside it."""
        return self.timings.ratio(name, "flashgen") if name in self.own else self.timings.ratio("flashgen", name)

    def as_json(self) -> dict[str, object]:
        return {
            "cell": str(self.cell),
            "pipeline": self.plan.pipeline,
            "tile": str(self.plan.tile),
            "checked": self.checked,
            "reasons": list(self.reasons),
            **self.timings.as_json(self.flops, self.ratio),
            "extra_bytes": dict(self.extra),
            "absent": dict(self.absent),
        }


def join(
    contenders: dict[str, Callable[[], object]],
    builders: Mapping[str, Callable[[], Callable[[], object] | None]],
    compare: Callable[[str, object], Iterable[str]],
) -> tuple[dict[str, str], list[str]]:
    """Build each peer, run it once and add it to the contenders: why some are absent, and what `compare` says of
    results that are not flashgen's.  A builder gives None for a cell that the peer does not know."""
    absent: dict[str, str] = {}
    reasons: list[str] = []
    for name, build in builders.items():
        try:
            call = build()
            if call is None:
                continue
            theirs = call()
        except FlashgenError:
            raise
        except Exception as error:  # a peer that refuses a cell is a fact about the peer, and is recorded
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            continue
        reasons += compare(name, theirs)
        contenders[name] = call
    return absent, reasons


def timed(
    contenders: Mapping[str, Callable[[], object]],
    absent: dict[str, str],
    time: Callable[..., Timings],
    *,
    rounds: int,
    before: Against | None,
) -> Timings:
    """Time contenders, and the kernels of another checkout where there are such; why not, where that fails."""
    with contextlib.ExitStack() as stack:
        if before is not None:
            try:
                contenders = {**contenders, BEFORE: stack.enter_context(before)}
            except LaunchError as error:
                absent[BEFORE] = str(error)
        return time(contenders, rounds=whole_turns(rounds, len(contenders)))


def difference(name: str, theirs: torch.Tensor, ours: torch.Tensor, about: str = "") -> list[str]:
    """What is wrong with a peer's result beside flashgen's (nothing: an empty list)."""
    error = float((theirs.float() - ours.float()).norm() / ours.float().norm())
    return [] if error <= SAME else [f"{about}{name} differs by {error:.3g}"]


def extra_bytes(call: Callable[[], object]) -> int:
    """Bytes of GPU memory that a call takes at its peak beyond what it returns, by torch's allocator."""
    import torch

    call()  # what a first call keeps is no cost of a call
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    peak = torch.cuda.max_memory_allocated() - before
    return peak - sum(x.nbytes for x in (found if isinstance(found, tuple | list) else (found,)))
