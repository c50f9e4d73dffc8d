"""The backward beside its peers: every cell's dq, dk and dv checked against float64 and timed in the same run."""

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
from flashgen.planning.traffic_backward import useful_flops
from flashgen.runtime.gradients import OF_INPUTS, baseline_gradients, judge_gradients, reference_gradients
from flashgen.runtime.reference import Pairs

if TYPE_CHECKING:
    import torch

    from flashgen.bench.cells import Cell
    from flashgen.planning.problem import Problem

#: What a call of a contender is.
TIMED = (
    "torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for flashgen and for packages alike, with the host's part"
    " of it where the GPU waits for that; for a peer of a file its call"
)

#: What a peer's file defines: `backward(cell, q, k, v, do)` gives a call that gives (dq, dk, dv), or None.
ENTRY = "backward"

#: Scores of the (batch, head) pairs that are compared with float64; of a larger cell some pairs are.
CHECKED_SCORES = 1 << 29

#: flashgen's backward with one order of sums, as a contender.
DETERMINISTIC = "deterministic"


def measure(
    cell: Cell,
    pipeline: str,
    *,
    rounds: int,
    names: tuple[str, ...],
    files: Mapping[str, Callable[..., Callable[[], object] | None]],
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
    p = cell.problem
    leaves = [x.detach().requires_grad_() for x in (at.q, at.k, at.v)]

    def gradient(o: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        return functools.partial(torch.autograd.grad, o, leaves, at.do, retain_graph=True)

    def package(name: str) -> Callable[[], object] | None:
        if name == "flex" and peers.has_kernel(cell):
            return None  # compiling it takes ten seconds a cell, and SDPA's kernels are the yardstick there
        call = known[name]()
        return call and gradient(call())

    contenders: dict[str, Callable[[], object]] = {
        name: gradient(attention(*leaves, at.variant, deterministic=name == DETERMINISTIC, **at.asked))
        for name in ("flashgen", DETERMINISTIC)
    }
    own: tuple[str, ...] = (DETERMINISTIC,)
    if dropout:
        own += (peers.UNDROPPED,)
        contenders[peers.UNDROPPED] = gradient(attention(*leaves, at.variant, **at.inputs))
    ours = contenders["flashgen"]()
    pairs = sample(p, CHECKED_SCORES)
    reasons = check(at, {"": ours, "deterministic ": contenders[DETERMINISTIC]()}, pairs)

    def compare(name: str, theirs: tuple[torch.Tensor, ...]) -> list[str]:
        if dropout or not peers.same_maths(name, cell):
            return []
        return [
            reason
            for what, one, other in zip(OF_INPUTS, theirs, ours, strict=True)
            for reason in contest.difference(name, one, other, f"{what}: ")
        ]

    known = peers.builders(names, cell, *leaves, at.inputs, dropout)
    builders = {name: functools.partial(package, name) for name in known}
    builders |= {
        name: functools.partial(build, cell, at.q, at.k, at.v, at.do) for name, build in files.items() if not dropout
    }
    absent, wrong = contest.join(contenders, builders, compare)
    plan = at.plan(backward=True)
    extra = {name: contest.extra_bytes(call) for name, call in contenders.items() if name not in files and at.q.is_cuda}
    timings = contest.timed(
        contenders,
        absent,
        time,
        rounds=rounds,
        before=before and Against(before, cell, pipeline, backward=True, seed=seed),
    )
    return Measured(
        cell=cell,
        timings=timings,
        flops=useful_flops(p, at.visible(plan)),
        plan=plan,
        reasons=(*reasons, *wrong),
        absent=absent,
        extra=extra,
        checked=f"{len(pairs.batches)} of {p.batch} batches, {len(pairs.kv_heads)} of {p.kv_heads} kv_heads",
        own=own,
    )


def sample(problem: Problem, scores: int) -> Pairs:
    """Batches and heads, evenly spread, with at most so many scores together; never none."""
    count = max(1, scores // (problem.q_len * problem.kv_len * problem.group))
    batches = _spread(problem.batch, count)
    return Pairs(batches, _spread(problem.kv_heads, count // len(batches)))


def _spread(total: int, count: int) -> tuple[int, ...]:
    """`count` of range(total), or all: the first and the last among them, where there is room for two."""
    count = min(total, count)
    return tuple(i * (total - 1) // max(count - 1, 1) for i in range(count))


def check(at: Setting, found: Mapping[str, tuple[torch.Tensor, ...]], pairs: Pairs) -> list[str]:
    """What is wrong with gradients, by the tolerance rule, on some batches and heads; `found` by what to call them."""
    p = at.cell.problem

    def part(x: torch.Tensor) -> torch.Tensor:
        return pairs.of(x, p.kv_heads)

    asked = at.variant.bind(), at.case, *map(part, (at.q, at.k, at.v, at.do))
    ref = reference_gradients(*asked, scale=at.scale, pairs=pairs, dropout=at.dropped)
    base = baseline_gradients(*asked, scale=at.scale, pairs=pairs, dropout=at.dropped)
    return [
        f"{about}{what}: {reason}"
        for about, gradients in found.items()
        for what, verdict in judge_gradients(map(part, gradients), base, ref, p.dtype).items()
        for reason in verdict.reasons
    ]
