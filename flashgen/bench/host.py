"""The host's part: what a call, a plan, an import and a first call take before the GPU works, in microseconds.

A repeated call is timed beside its peers, on problems that a GPU computes sooner than a host asks for the next; what a
process does once is timed in fresh processes.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.bench import backward, cold, contest, forward, peers
from flashgen.bench.cells import Cell, cell
from flashgen.bench.protocol import Ratio, Timings, in_time, rotation, whole_turns
from flashgen.errors import LaunchError
from flashgen.runtime.gradients import OF_INPUTS

if TYPE_CHECKING:
    import torch

#: A mask that all peers have, one with a parameter and one with a captured tensor; 64 queries are soon computed.
CELLS = tuple(
    cell(specs, 64, 64, batch=2, heads=4, **params)
    for specs, params in (("causal", {}), ("sliding_window", {"window": 32}), ("causal+document", {}))
)

#: Calls of a slot, and calls before them that are not timed.  A stream takes about 1,000 launches before its host
#: waits: a slot of the contender with the most launches a call stays below.
CALLS, WARM_CALLS = 100, 10

#: Microseconds that `import flashgen` may take.
IMPORT_LIMIT = 60_000

#: What a fresh process is asked to measure of itself: it prints seconds.
PROCESS = """
import json, time
start = time.perf_counter()
import flashgen
imported = time.perf_counter()
flashgen.plan("causal", head_dim=64, arch="sm_90a")
first = time.perf_counter()
flashgen.plan("causal", head_dim=128, arch="sm_90a")
print(json.dumps([imported - start, first - imported, time.perf_counter() - first]))
"""

#: What those seconds are.
OF_PROCESS = ("import flashgen", "first plan of a process", "plan")

#: The row of a first call.
FIRST_CALL = "first call, warm cache"

#: Fresh processes that a first call is timed in at most: each loads PyTorch, which takes seconds and is not timed.
FIRST_CALLS = 3

#: What a whole run takes on an H200, about, in minutes: half of one for processes, most of the rest compiles `flex`.
MINUTES = 2

#: Contender of the forward's rows: the allocation of o alone, which is part of every call of flashgen.
ALLOCATION = "allocation"

#: Contender of the rows of a change: the same call again and again.
REPEATED = "repeated"

#: What no library but flashgen is timed at.
OWN = ("flashgen", ALLOCATION, REPEATED)

#: Lengths of q and of k in calls of which each has other ones: more pairs than a run has calls.
LENGTHS = range(33, 161)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was measured: microseconds by contender, a round an entry.

    where    the cell that is called, or what else was asked
    reasons  what is wrong with a result (empty: nothing)
    absent   peers that refused, and why
    """

    what: str
    where: str
    us: Mapping[str, tuple[float, ...]]
    reasons: tuple[str, ...] = ()
    absent: Mapping[str, str]

    def ratio(self, name: str) -> Ratio:
        """How many times the host time of flashgen a peer takes, round by round."""
        return Timings(rounds=self.us).ratio("flashgen", name)

    def as_json(self) -> dict[str, object]:
        others = [name for name in self.us if name not in OWN]
        ratios = {name: self.ratio(name) for name in others}
        return {
            "what": self.what,
            "where": self.where,
            "ratio": {name: [round(x, 3) for x in (r.median, r.low, r.high)] for name, r in ratios.items()},
            "us": {name: [round(x, 2) for x in values] for name, values in self.us.items()},
            "reasons": list(self.reasons),
            "absent": dict(self.absent),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A call, and what surrounds a slot of its calls."""

    call: Callable[[], object]
    around: Callable[[], AbstractContextManager] = nullcontext

    def __call__(self) -> object:
        with self.around():
            return self.call()


def slot(
    contender: Contender, settle: Callable[[], None], *, calls: int | None = None, warm: int | None = None
) -> float:
    """Seconds of the host in one of so many calls (CALLS), behind those that are not timed (WARM_CALLS)."""
    call, count = contender.call, CALLS if calls is None else calls
    with contender.around():
        for _ in range(WARM_CALLS if warm is None else warm):
            call()
        settle()
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - start
        settle()
    return seconds / count


def interleave(
    contenders: Mapping[str, Contender],
    settle: Callable[[], None],
    *,
    rounds: int,
    slot: Callable[[Contender, Callable[[], None]], float] = slot,
    until: float | None = None,
) -> dict[str, tuple[float, ...]]:
    """Microseconds of the host in one call: each round times a slot of every contender, in an order that rotates.

    `settle` waits for the GPU: before a slot, so that its queue is empty, and after it.  Python's collector rests
    meanwhile.  No round but the first begins after `until`, a moment of time.monotonic().
    """
    names, collecting = list(contenders), gc.isenabled()
    found: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for index in in_time(rounds, until):
            for name in rotation(names, index):
                found[name].append(1e6 * slot(contenders[name], settle))
    finally:
        if collecting:
            gc.enable()
    return {name: tuple(values) for name, values in found.items()}


def calls(at: Cell, *, rounds: int, names: tuple[str, ...], seed: int = 0) -> Iterator[Row]:
    """A repeated call of one cell on the current GPU, checked: the forward alone, and with its gradients."""
    import torch

    from flashgen.ops import memory
    from flashgen.ops.attention import attention

    setting = contest.prepare(at, None, seed)
    leaves = [x.detach().requires_grad_() for x in (setting.q, setting.k, setting.v)]

    def gradients(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(), leaves, setting.do)

    def row(
        what: str,
        own: dict[str, Contender],
        peer: Callable[[str], Callable[[], object] | None],
        compare: Callable[[str, object], list[str]],
        reasons: list[str],
    ) -> Row:
        made: dict[str, Contender] = {}

        def build(name: str) -> Callable[[], object] | None:
            if (call := peer(name)) is None:
                return None
            made[name] = Contender(call=call, around=functools.partial(peers.backend, name))
            return made[name]

        joined: dict[str, Callable[[], object]] = {}
        builders = {name: functools.partial(build, name) for name in names}
        absent, wrong = contest.join(joined, builders, compare)
        contenders = {**own, **{name: made[name] for name in joined}}
        us = interleave(contenders, torch.cuda.synchronize, rounds=whole_turns(rounds, len(contenders)))
        return Row(what=what, where=str(at), us=us, reasons=(*reasons, *wrong), absent=absent)

    run = functools.partial(attention, setting.q, setting.k, setting.v, setting.variant, **setting.inputs)
    o, lse = run(return_lse=True)

    def allocate() -> None:
        memory.empty_strided(tuple(o.shape), o.stride(), o.dtype)

    yield row(
        "forward",
        {"flashgen": Contender(call=run), ALLOCATION: Contender(call=allocate)},
        lambda name: peers.bare(name)(at, setting.q, setting.k, setting.v, setting.inputs),
        lambda name, theirs: contest.difference(name, theirs, o),
        forward.check(setting, o, lse),
    )

    def ours() -> tuple[torch.Tensor, ...]:
        return gradients(functools.partial(attention, *leaves, setting.variant, **setting.inputs))

    def theirs(name: str) -> Callable[[], object] | None:
        call = peers.bare(name)(at, *leaves, setting.inputs)
        return call and functools.partial(gradients, call)

    right = ours()

    def compare(name: str, found: tuple[torch.Tensor, ...]) -> list[str]:
        return [
            reason
            for what, one, other in zip(OF_INPUTS, found, right, strict=True)
            for reason in contest.difference(name, one, other, f"{what}: ")
        ]

    everything = backward.sample(at.problem, backward.CHECKED_SCORES)
    reasons = backward.check(setting, {"": right}, everything)
    yield row("forward + backward", {"flashgen": Contender(call=ours)}, theirs, compare, reasons)


def changes(at: Cell, *, rounds: int, seed: int = 0) -> Iterator[Row]:
    """The forward of one cell where each call differs from the one before it, beside the same call again: in a length
    that none had, in a parameter, in captured tensors that lie elsewhere."""
    import torch

    from flashgen.ops.attention import attention

    setting = contest.prepare(at, None, seed)
    q, k, v, variant = setting.q, setting.k, setting.v, setting.variant
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    if not variant.tensors:
        rows = [x[:, :, :1].repeat(1, 1, LENGTHS.stop, 1) for x in (q, k, v)]
        pairs = itertools.cycle(itertools.product(LENGTHS, LENGTHS))

        def of_lengths(q_len: int, kv_len: int) -> object:
            cut = [x[:, :, :length] for x, length in zip(rows, (q_len, kv_len, kv_len), strict=True)]
            return attention(*cut, variant, **setting.inputs)

        same = at.problem.q_len, at.problem.kv_len
        found["a new length"] = lambda: of_lengths(*next(pairs)), lambda: of_lengths(*same)
    run = functools.partial(attention, q, k, v, variant)
    repeated = functools.partial(run, **setting.inputs)
    numbers = {p.name: setting.inputs[p.name] for p in variant.params}
    if numbers:
        values = ({name: x + 1 + i % len(LENGTHS) for name, x in numbers.items()} for i in itertools.count())
        found["a new parameter"] = lambda: run(**{**setting.inputs, **next(values)}), repeated
    if variant.tensors:
        names = [t.name for t in variant.tensors]
        copies = itertools.cycle([{name: setting.inputs[name].clone() for name in names} for _ in range(2)])
        found["new content"] = lambda: run(**{**setting.inputs, **next(copies)}), repeated
    for what, (changing, again) in found.items():
        changing()
        contenders = {"flashgen": Contender(call=changing), REPEATED: Contender(call=again)}
        us = interleave(contenders, torch.cuda.synchronize, rounds=whole_turns(rounds, len(contenders)))
        yield Row(what=what, where=str(at), us=us, absent={})


def processes(rounds: int) -> list[Row]:
    """What a fresh process takes to import flashgen and to plan, without a GPU.

    Raises LaunchError with what a process complained of.
    """
    measured = [_process() for _ in range(rounds)]
    return [
        Row(what=what, where="a fresh process", us={"flashgen": tuple(1e6 * s[i] for s in measured)}, absent={})
        for i, what in enumerate(OF_PROCESS)
    ]


def _process() -> list[float]:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True)
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise LaunchError(f"a fresh process ended with {done.returncode}: {complaint}")
    return json.loads(done.stdout)


def first_call(rounds: int, *, device: str = "cuda") -> Row:
    """From a spec to its first result in a fresh process that finds its kernels in the cache: the first cell's, so many
    times but at most FIRST_CALLS."""
    at = CELLS[0]
    (spec,) = at.specs
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(cold.process, spec, at.problem, device, Path(folder))
        start()  # fills the cache
        seconds = [start()[1] for _ in range(min(rounds, FIRST_CALLS))]
    return Row(what=FIRST_CALL, where=str(at), us={"flashgen": tuple(1e6 * s for s in seconds)}, absent={})
