"""The forward beside its peers: every cell checked against float64 and timed in the same run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.bench import contest, peers
from flashgen.bench.against import Against
from flashgen.bench.contest import Measured, Setting
from flashgen.bench.protocol import Timings, interleave
from flashgen.ops.attention import attention
from flashgen.runtime.reference import baseline, judge, judge_lse, reference

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell

#: What a call of a contender is.
TIMED = "one call that gives o"

#: What a peer's file defines: `peer(cell, q, k, v)` gives a call that gives o, or None for a cell it lacks.
ENTRY = "peer"


def measure(
    cell: Cell,
    pipeline: str,
    *,
    rounds: int,
    names: tuple[str, ...],
    files: Mapping[str, Callable[..., peers.Call | None]],
    seed: int = 0,
    dropout: float = 0.0,
    before: Path | None = None,
    device: str = "cuda",
    time: Callable[..., Timings] = interleave,
) -> Measured:
    """Check and time one cell on the current GPU, with fresh random input.  With dropout, peers drop other pairs: their
    results are not compared, and files take no part.  `before` is another checkout, whose kernels take part."""
    import torch

    at = contest.prepare(cell, pipeline, seed, device=device, dropout=dropout)
    p, q, k, v = cell.problem, at.q, at.k, at.v
    run = functools.partial(attention, q, k, v, at.variant, **at.asked)
    o, lse = run(return_lse=True)
    reasons = check(at, o, lse)
    del lse

    def compare(name: str, theirs: torch.Tensor) -> list[str]:
        return contest.difference(name, theirs, o) if peers.same_maths(name, cell) and not dropout else []

    contenders: dict[str, Callable[[], object]] = {"flashgen": run}
    builders = peers.builders(names, cell, q, k, v, at.inputs, dropout)
    own: tuple[str, ...] = ()
    if dropout:
        own = (peers.UNDROPPED,)
        contenders[peers.UNDROPPED] = functools.partial(attention, q, k, v, at.variant, **at.inputs)
    if p.dtype == "float16":  # beside the same kernel in bfloat16
        own += ("bfloat16",)
        same = [x.to(torch.bfloat16) for x in (q, k, v)]
        contenders["bfloat16"] = functools.partial(attention, *same, at.variant, **at.asked)
    builders |= {name: functools.partial(build, cell, q, k, v) for name, build in files.items() if not dropout}
    absent, wrong = contest.join(contenders, builders, compare)
    plan = at.plan()
    extra = {name: contest.extra_bytes(call) for name, call in contenders.items() if name not in files and q.is_cuda}
    timings = contest.timed(
        contenders,
        absent,
        time,
        rounds=rounds,
        before=before and Against(before, cell, pipeline, backward=False, seed=seed),
    )
    return Measured(
        cell=cell,
        timings=timings,
        flops=2 * (p.head_dim + p.v_head_dim) * at.visible(plan),
        plan=plan,
        reasons=(*reasons, *wrong),
        absent=absent,
        extra=extra,
        checked="all of it",
        own=own,
    )


def check(at: Setting, o: torch.Tensor, lse: torch.Tensor) -> list[str]:
    """What is wrong with o and lse, by the tolerance rule."""

    asked = at.variant.bind(), at.case, at.q, at.k, at.v
    ref, ref_lse = reference(*asked, scale=at.scale, dropout=at.dropped)
    base, _ = baseline(*asked, scale=at.scale, dropout=at.dropped)
    return [*judge(o, base, ref, at.cell.problem.dtype).reasons, *judge_lse(lse, ref_lse)]
