"""Accuracy and speed beside the peers on inputs as trained models have them: what N(0, 1) does not show.

Errors are against float64, of some heads of each draw; beside flashgen's and the peers' stand those of the exact
algorithm, which is `runtime.reference.baseline`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.bench import contest, peers
from flashgen.bench.cells import Cell, cell
from flashgen.bench.contest import SAME, Setting
from flashgen.bench.inputs import INPUTS, draw
from flashgen.bench.peers import BEST
from flashgen.bench.protocol import Ratio, Timings, interleave, whole_turns
from flashgen.ops.attention import attention
from flashgen.planning.traffic_backward import useful_flops
from flashgen.runtime.gradients import OF_INPUTS, baseline_gradients, judge_gradients, reference_gradients
from flashgen.runtime.reference import Pairs, baseline, judge, judge_lse, percentile, reference, rms

if TYPE_CHECKING:
    import torch

    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

#: Elements of o (of dq) in the sample of a draw.
SAMPLE = 1 << 20

#: The share of the elements whose errors are the tail.
TAIL = 1e-4

#: The exact algorithm, among those whose errors are given.
EXACT = "exact"

#: How many times the error of the better of `BEST` flashgen's may be, and its largest error of lse that of the
#: exact algorithm: more is marked.
BARS = {"rms": 1.05, "largest": 1.25, "tail": 1.1}
LSE_BAR = 1.25

#: What a peer's file may define beside `peer`: `peer_lse(cell, q, k, v)` gives a call that gives lse, or None.
LSE_ENTRY = "peer_lse"

#: Of a contender, what makes its call for the tensors as they are filled now; None where it does not know the cell.
Make = Callable[[], Callable[[], object] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCell:
    """A cell and what its tensors hold: a name of `inputs.INPUTS`."""

    cell: Cell
    input: str

    def __str__(self) -> str:
        return f"{self.cell} {self.input}"


def table(seqlen: int = 8192) -> list[DataCell]:
    """Every input in both dtypes, three head dims, full and causal; cells of one shape are next to each other."""
    return [
        DataCell(cell=cell(spec, head_dim, seqlen, batch=2, heads=16, dtype=dtype), input=name)
        for dtype in ("bfloat16", "float16")
        for head_dim in (64, 128, 256)
        for spec in ("full", "causal")
        for name in INPUTS
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of one result against float64: RMS error over RMS, largest error and 99.99th percentile of the error, these two
    medians over the draws.  Errors of lse are in nats."""

    rms: float
    largest: float
    tail: float

    def over(self, other: Errors) -> Errors:
        """How many times those of another."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Errors(
            **{f.name: a / b if b else math.nan for f, (a, b) in zip(dataclasses.fields(self), pairs, strict=True)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Errors of one draw, and the RMS of what they are of."""

    rms: float
    largest: float
    tail: float
    of: float


def errors_of(found: torch.Tensor, ref: torch.Tensor) -> Drawn:
    """Those of one draw's sample."""
    error = found.double() - ref
    return Drawn(rms=rms(error), largest=float(error.abs().max()), tail=percentile(error, TAIL), of=rms(ref))


def pooled(draws: Sequence[Drawn]) -> Errors:
    """Those of all draws."""
    whole, of = (
        math.sqrt(statistics.fmean(x**2 for x in xs)) for xs in zip(*((d.rms, d.of) for d in draws), strict=True)
    )
    return Errors(
        rms=whole / of if of else math.nan,
        largest=statistics.median(d.largest for d in draws),
        tail=statistics.median(d.tail for d in draws),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell: errors by result (o and lse; dq, dk and dv) and contender, timings, and what is wrong (empty: right).

    plan     what served it
    sample   elements of o, or of dq, that were compared with float64
    absent   why contenders are missing, by name
    """

    cell: DataCell
    plan: KernelPlan
    errors: Mapping[str, Mapping[str, Errors]]
    timings: Timings
    flops: int
    draws: int
    sample: int
    reasons: tuple[str, ...]
    absent: Mapping[str, str]

    def faster(self, name: str) -> Ratio:
        """How many times faster flashgen is than a peer."""
        return self.timings.ratio("flashgen", name)

    def beside(self, what: str, name: str) -> Errors | None:
        """How many times the errors of a contender, or of the exact algorithm, flashgen's are."""
        known = self.errors[what]
        return known["flashgen"].over(known[name]) if name in known else None

    def over_bars(self, what: str) -> dict[str, float]:
        """By measure, how many times the better of the peers' error flashgen's is, where that is above its bar."""
        found = [ratio for name in BEST if (ratio := self.beside(what, name))]
        if what == "lse":
            ratio = self.beside(what, EXACT).largest
            return {"largest": ratio} if ratio > LSE_BAR else {}
        worst = {bar: max((getattr(ratio, bar) for ratio in found), default=0.0) for bar in BARS}
        return {bar: ratio for bar, ratio in worst.items() if ratio > BARS[bar]}

    def as_json(self) -> dict[str, object]:
        def told(errors: Errors) -> dict[str, float]:
            return {name: float(f"{x:.5g}") for name, x in dataclasses.asdict(errors).items()}

        return {
            "cell": str(self.cell),
            "dtype": self.cell.cell.problem.dtype,
            "input": self.cell.input,
            "pipeline": self.plan.pipeline,
            "tile": str(self.plan.tile),
            "draws": self.draws,
            "sample": self.sample,
            "reasons": list(self.reasons),
            "over_bars": {what: bars for what in self.errors if (bars := self.over_bars(what))},
            "errors": {what: {name: told(x) for name, x in by.items()} for what, by in self.errors.items()},
            "times_error": {
                what: {name: told(self.beside(what, name)) for name in by if name != "flashgen"}
                for what, by in self.errors.items()
            },
            **self.timings.as_json(self.flops, self.faster),
            "absent": dict(self.absent),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """The forward or the backward of a setting.

    results   what a call gives, in this order
    makers    of each contender
    lses      of each that tells lse
    expected  in float64 and by the exact algorithm, of a sample: (lse, if there is one, behind `results`)
    wrong     what the tolerance rule says of flashgen's results: (found, exact, float64)
    """

    results: tuple[str, ...]
    makers: Mapping[str, Make]
    lses: Mapping[str, Make]
    expected: Callable[[Pairs], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    wrong: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], list[str]]


def forward(at: Setting, names: Sequence[str], files: Mapping[str, Mapping[str, Callable]]) -> Pass:
    """The forward of flashgen, of packages and of files: each file's functions by entry."""
    shape, p, qkv = at.cell, at.cell.problem, (at.q, at.k, at.v)
    run = functools.partial(attention, *qkv, at.variant, **at.inputs)
    makers: dict[str, Make] = {"flashgen": lambda: run}
    # A package's call reads the tensors anew; a file may keep what it made of them.
    makers |= {name: functools.cache(functools.partial(peers.of(name), shape, *qkv, at.inputs)) for name in names}
    makers |= {name: functools.partial(file["peer"], shape, *qkv) for name, file in files.items()}
    lses: dict[str, Make] = {"flashgen": lambda: lambda: run(return_lse=True)[1]}
    lses |= {name: functools.partial(peers.lse, name, shape, *qkv) for name in names}
    lses |= {name: functools.partial(file[LSE_ENTRY], shape, *qkv) for name, file in files.items() if LSE_ENTRY in file}

    def expected(pairs: Pairs) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        asked = at.variant.bind(), at.case, *(pairs.of(x, p.kv_heads) for x in qkv)
        right, exact = (make(*asked, scale=at.scale, pairs=pairs) for make in (reference, baseline))
        return right, exact

    def wrong(found: Sequence, exact: Sequence, right: Sequence) -> list[str]:
        (o, lse), (right_o, right_lse) = found, right
        return [*judge(o, exact[0], right_o, p.dtype).reasons, *judge_lse(lse, right_lse)]

    return Pass(results=("o",), makers=makers, lses=lses, expected=expected, wrong=wrong)


def backward(at: Setting, names: Sequence[str], files: Mapping[str, Mapping[str, Callable]]) -> Pass:
    """The gradients, as `forward`; of flashgen and packages with a forward of their own before."""
    import torch

    shape, p = at.cell, at.cell.problem
    leaves = [x.detach().requires_grad_() for x in (at.q, at.k, at.v)]  # of the same memory

    def gradient(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return functools.partial(torch.autograd.grad, call(), leaves, at.do, retain_graph=True)

    def package(known: Make) -> Callable[[], object] | None:
        return (call := known()) and gradient(call)

    run = functools.partial(attention, *leaves, at.variant, **at.inputs)
    makers: dict[str, Make] = {"flashgen": lambda: gradient(run)}
    for name in names:
        known = functools.cache(functools.partial(peers.of(name), shape, *leaves, at.inputs))
        makers[name] = functools.partial(package, known)
    makers |= {
        name: functools.partial(file["backward"], shape, at.q, at.k, at.v, at.do) for name, file in files.items()
    }

    def expected(pairs: Pairs) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        asked = at.variant.bind(), at.case, *(pairs.of(x, p.kv_heads) for x in (at.q, at.k, at.v, at.do))
        right, exact = (
            make(*asked, scale=at.scale, pairs=pairs)[:3] for make in (reference_gradients, baseline_gradients)
        )
        return right, exact

    def wrong(found: Sequence, exact: Sequence, right: Sequence) -> list[str]:
        verdicts = judge_gradients(found, exact, right, p.dtype)
        return [f"{what}: {reason}" for what, verdict in verdicts.items() for reason in verdict.reasons]

    return Pass(results=OF_INPUTS, makers=makers, lses={}, expected=expected, wrong=wrong)


def measure(
    cells: Sequence[DataCell],
    of: Callable[..., Pass],
    pipeline: str | None = None,
    *,
    rounds: int,
    draws: int,
    names: Sequence[str],
    files: Mapping[str, Mapping[str, Callable]],
    seed: int = 0,
    device: str = "cuda",
    time: Callable[..., Timings] = interleave,
) -> Iterator[Result]:
    """Draw, check and time cells of one shape, one after the other in the same memory, so that kernels and peers are
    made once; `of` is `forward` or `backward`."""
    at = contest.prepare(cells[0].cell, pipeline, seed, device=device)
    asked = of(at, names, files)
    calls = {"flashgen": asked.makers["flashgen"]()}
    others = {name: make for name, make in asked.makers.items() if name != "flashgen"}
    absent, _ = contest.join(calls, others, lambda *_: ())
    lses: dict[str, Callable[[], object]] = {}
    told, _ = contest.join(lses, {name: make for name, make in asked.lses.items() if name in calls}, lambda *_: ())
    asked = dataclasses.replace(
        asked,
        makers={name: asked.makers[name] for name in calls},
        lses={name: asked.lses[name] for name in lses},
    )
    absent |= {f"{name}, its lse": reason for name, reason in told.items()}
    del calls, lses  # with the results that a graph keeps
    for one in cells:
        yield _measure(one, at, asked, rounds=rounds, draws=draws, seed=seed, time=time, absent=absent)


def sample(problem: Problem, draw: int) -> Pairs:
    """Heads of one batch with together at least `SAMPLE` elements of o, or all: other ones in each draw 0, 1, 2, ..."""
    p = problem
    count = min(p.kv_heads, -(-SAMPLE // (p.group * p.q_len * p.v_head_dim)))
    turn, batch = divmod(draw, p.batch)
    return Pairs((batch,), tuple(sorted((turn * count + i) % p.kv_heads for i in range(count))))


def _measure(
    one: DataCell,
    at: Setting,
    asked: Pass,
    *,
    rounds: int,
    draws: int,
    seed: int,
    time: Callable[..., Timings],
    absent: Mapping[str, str],
) -> Result:
    import torch

    p = at.cell.problem
    results = (*asked.results, *(("lse",) if asked.lses else ()))
    drawn: dict[str, dict[str, list[Drawn]]] = {what: {} for what in results}
    judged: dict[str, list[list[torch.Tensor]]] = {"flashgen": [], EXACT: [], "float64": []}
    for i in range(draws):
        _fill(at, one.input, seed + i)
        pairs = sample(p, i)
        right, exact = asked.expected(pairs)
        found = {EXACT: dict(zip(results, exact, strict=True))}
        for name, make in asked.makers.items():
            given = make()()
            given = given if isinstance(given, tuple | list) else (given,)
            found[name] = {what: pairs.of(x, p.kv_heads) for what, x in zip(asked.results, given, strict=True)}
        for name, make in asked.lses.items():
            found[name]["lse"] = pairs.of(make()().reshape(at.q.shape[:3]), p.kv_heads)
        truth = dict(zip(results, right, strict=True))
        for name, by in found.items():
            for what, x in by.items():
                drawn[what].setdefault(name, []).append(errors_of(x, truth[what]))
        for name, by in (("flashgen", found["flashgen"]), (EXACT, found[EXACT]), ("float64", truth)):
            judged[name].append([by[what].flatten() for what in results])
    errors = {what: {name: pooled(each) for name, each in by.items()} for what, by in drawn.items()}
    reasons = asked.wrong(*([torch.cat(x) for x in zip(*judged[name], strict=True)] for name in judged))
    sampled = sum(x[0].numel() for x in judged["float64"])
    judged.clear()
    plan = at.plan(backward=asked.results == OF_INPUTS)
    visible = at.visible(plan)
    contenders = {name: make() for name, make in asked.makers.items()}
    return Result(
        cell=one,
        plan=plan,
        errors=errors,
        timings=time(contenders, rounds=whole_turns(rounds, len(contenders))),
        flops=useful_flops(p, visible) if asked.results == OF_INPUTS else 2 * (p.head_dim + p.v_head_dim) * visible,
        draws=draws,
        sample=sampled,
        reasons=(*reasons, *_strangers(errors)),
        absent=absent,
    )


def _fill(at: Setting, name: str, seed: int) -> None:
    """Draw an input into the setting's own tensors, which calls were made for."""
    import torch

    drawn = draw(at.cell.problem, seed, name, device=at.q.device.type)
    with torch.no_grad():
        for mine, new in zip((at.q, at.k, at.v, at.do), drawn, strict=True):
            mine.copy_(new)


def _strangers(errors: Mapping[str, Mapping[str, Errors]]) -> list[str]:
    """Peers whose errors say that they compute something else."""
    return [
        f"{name}: its {what} is off by {found.rms:.3g} of the RMS: it does not compute this attention"
        for what, by in errors.items()
        for name, found in by.items()
        if name not in ("flashgen", EXACT) and not found.rms <= max(SAME, 10 * by[EXACT].rms)
    ]
