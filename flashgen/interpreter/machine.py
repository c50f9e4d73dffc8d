"""Load PTX and launch its kernels on NumPy buffers."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen.interpreter import ops
from flashgen.interpreter.block import Block, Cluster
from flashgen.interpreter.counters import Report
from flashgen.interpreter.errors import BadLaunch, WrongTarget
from flashgen.interpreter.memory import BASE as GLOBALS_BASE
from flashgen.interpreter.memory import GLOBALS_BYTES, Early, Memory
from flashgen.interpreter.order import Order
from flashgen.interpreter.parser import Entry, Source, Variable, parse
from flashgen.interpreter.registers import Banks
from flashgen.interpreter.scheduler import check_progress, parked, run_cluster
from flashgen.interpreter.shared import BASE as SHARED_BASE
from flashgen.interpreter.translate import Program, translate
from flashgen.planning.float8 import ACCUMULATOR_BITS

#: Warp instructions after which a launch is given up.
STEP_LIMIT = 200_000_000
_REGISTER_FILE = 65536
_MAX_THREADS = 1024

Dim = tuple[int, int, int]


def _dim(value: int | Sequence[int]) -> Dim:
    values = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _warps(threads: int) -> int:
    return -(-threads // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How kernels are executed, beside what a driver is told.

    `seed`: None runs warps in lockstep and lets asynchronous copies land as late as they can; a number picks warps one
    by one and lands copies at random.  `check=False` leaves out the race shadow (bounds and barriers are always
    checked).  A launch is given up after `step_limit` warp instructions.  `resident` clusters run at a time; with a
    seed they start in a random order, but for `in_order`: of a kernel whose blocks wait for those before them.
    `registers` a thread has at launch (setmaxnreg's pool), by default what the block size allows.  `accumulator_bits`
    are those that products of 8 bits keep of an addend below the largest of a step; None: all.
    """

    seed: int | None = None
    check: bool = True
    step_limit: int = STEP_LIMIT
    resident: int = 4
    registers: int | None = None
    in_order: bool = False
    accumulator_bits: int | None = ACCUMULATOR_BITS


#: In lockstep, and everything is checked.
LOCKSTEP = Options()


@dataclass(slots=True)
class Launch:
    """One launch in progress."""

    program: Program
    grid: Dim
    block: Dim
    cluster: Dim
    smem_bytes: int
    smem_total: int
    params: np.ndarray
    memory: Memory
    options: Options
    rng: np.random.Generator | None
    registers: int
    report: Report
    executed: list[int]
    leaving: tuple[Callable[[Block, int], None], ...]
    early: bool = False
    alone: bool = True  # the kernel before has ended
    steps: int = 0
    constants: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    spare: list[Banks] = field(default_factory=list)  # registers of blocks that have ended: fresh memory takes longer

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def warps(self) -> int:
        return _warps(self.threads)

    @property
    def clusters(self) -> Dim:
        x, y, z = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        return x, y, z


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One of the kernels that run on a stream: its entry, grid, block, dynamic shared memory and parameters; an `early`
    one starts before the one before it has ended."""

    entry: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    smem_bytes: int
    params: bytes | Sequence[bytes]
    cluster: int | Sequence[int] = 1
    early: bool = False


class Module:
    """A parsed PTX module; kernels are translated at their first launch."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.programs: dict[str, Program] = {}

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(self.source.entries)

    def entry(self, name: str) -> Entry:
        """Raises BadLaunch for a name that the module lacks."""
        if name not in self.source.entries:
            raise BadLaunch(f"no kernel {name!r} in this module (it has {', '.join(self.entries) or 'none'})")
        return self.source.entries[name]

    def program(self, name: str) -> Program:
        """The translated kernel.  Raises UnknownInstruction with the line of what is not modelled."""
        if name not in self.programs:
            entry = self.entry(name)
            self.programs[name] = translate(entry, _symbols(self.source, entry))
        return self.programs[name]

    def launch(
        self,
        entry: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        smem_bytes: int,
        params: bytes | Sequence[bytes],
        memory: Memory,
        *,
        cluster: int | Sequence[int] = 1,
        **options: Any,
    ) -> Report:
        """Run a kernel to its end on the buffers of `memory`.

        `params` is one byte string per kernel parameter (or one for all of them); `options` are those of `Options`.
        Raises BadLaunch for what a driver would refuse, StepLimit, and a Trap for what the kernel does wrong.
        """
        kernel = Kernel(entry=entry, grid=grid, block=block, smem_bytes=smem_bytes, params=params, cluster=cluster)
        return self.launch_all([kernel], memory, Options(**options))[0]

    def launch_all(self, kernels: Sequence[Kernel], memory: Memory, options: Options = LOCKSTEP) -> list[Report]:
        """Run kernels in their order on one stream; errors are those of `launch`.

        One that starts `early` runs as far as it can without its griddepcontrol.wait before the one before it runs:
        what it would read too early, and any write, is a Trap.  The first one stands behind kernels that are not known,
        which may write anything.
        """
        memory.place([(v.name, at, v.data or bytes(v.size)) for v, at in _globals(self.source)])
        running = [_Running(self._prepare(kernel, memory, options)) for kernel in kernels]
        try:
            with np.errstate(all="ignore"):
                running[0].start(known=False)
                for one, behind in itertools.zip_longest(running, running[1:]):
                    one.account.behind = behind and behind.start(known=True)
                    one.finish()
        finally:
            memory.take_back()
        return [one.report() for one in running]

    def _prepare(self, kernel: Kernel, memory: Memory, options: Options) -> Launch:
        program, params, smem_bytes = self.program(kernel.entry), kernel.params, kernel.smem_bytes
        grid, block, cluster = _dim(kernel.grid), _dim(kernel.block), _dim(kernel.cluster)
        entry = program.entry
        threads = block[0] * block[1] * block[2]
        limit = int(np.prod(entry.limits.get("maxntid", (_MAX_THREADS,))))
        if not 0 < threads <= min(limit, _MAX_THREADS):
            raise BadLaunch(f"{threads} threads per block: kernel {entry.name} takes 1..{min(limit, _MAX_THREADS)}")
        required = entry.limits.get("reqnctapercluster")
        if required and cluster == (1, 1, 1):
            cluster = _dim(required)
        if min(grid) < 1 or any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise BadLaunch(f"a grid of {grid} blocks is no positive multiple of the cluster {cluster}")
        return Launch(
            program=program,
            grid=grid,
            block=block,
            cluster=cluster,
            smem_bytes=smem_bytes,
            smem_total=_shared_layout(self.source, entry)[1] + smem_bytes,
            params=_pack(entry, params),
            memory=memory,
            options=options,
            rng=None if options.seed is None else np.random.default_rng(options.seed),
            registers=options.registers or min(255, _REGISTER_FILE // (32 * _warps(threads)) // 8 * 8),
            report=Report(),
            executed=[0] * len(program.blocks),
            leaving=ops.LEAVING,
            early=kernel.early,
            alone=not kernel.early,
        )


class _Running:
    """A kernel in execution, which may stop once: where it waits for the one before it."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.account, self.seconds = launch, launch.memory.new_account(), 0.0
        if launch.options.check and launch.cluster == (1, 1, 1):
            self.account.order = Order(launch.memory.data.size)
        self.parts = _run(launch)

    def start(self, *, known: bool) -> Early | None:
        """What it does before it waits, if it starts early; whether the kernel before is `known`, whose writes
        are seen."""
        if self.launch.alone:
            return None
        self.account.early = early = Early(self.launch.memory.data.size, known=known)
        self._go_on()
        self.account.early = None
        self.launch.alone = True
        return early

    def finish(self) -> None:
        """The rest: the kernel before has ended."""
        self._go_on()

    def _go_on(self) -> None:
        start = time.perf_counter()
        self.launch.memory.account = self.account
        next(self.parts, None)
        self.seconds += time.perf_counter() - start

    def report(self) -> Report:
        """What it did, once it has ended."""
        launch, report = self.launch, self.launch.report
        report.traffic, report.touched, report.steps = self.account.traffic, self.account.touched, launch.steps
        for code, count in zip(launch.program.blocks, launch.executed, strict=True):
            for instruction in code.instructions:
                report.instructions[instruction.opcode] += count
        report.seconds = self.seconds
        return report


def _run(launch: Launch) -> Iterator[None]:
    """Keep as many clusters in flight as asked until the grid is done; stops once where all wait for the one before."""
    count = int(np.prod(launch.clusters))
    order = np.arange(count)
    if launch.rng is not None and not launch.options.in_order:
        launch.rng.shuffle(order)
    waiting = [int(n) for n in order[::-1]]
    slots: list[Cluster | None] = [None] * max(1, min(launch.options.resident, count))
    while waiting or any(slots):
        for slot, cluster in enumerate(slots):
            if cluster is None and waiting:
                n = waiting.pop()
                x, y, _ = launch.clusters
                cluster = slots[slot] = Cluster(launch, (n % x, n // x % y, n // (x * y)), slot)
            if cluster is not None:
                run_cluster(cluster, 64 if launch.rng is None else int(launch.rng.integers(1, 64)))
                if cluster.done:
                    slots[slot] = None
                    launch.spare += [block.banks for block in cluster.blocks]
        running = [cluster for cluster in slots if cluster is not None]
        if running and all(parked(cluster) for cluster in running):
            yield
            for cluster in running:
                cluster.events += 1
        elif running:
            check_progress(running)


def _pack(entry: Entry, params: bytes | Sequence[bytes]) -> np.ndarray:
    """Kernel parameters at the offsets that PTX gives them."""
    offsets, total = _param_offsets(entry)
    blob = bytearray(total)
    if isinstance(params, bytes | bytearray):
        if len(params) != total:
            raise BadLaunch(f"{len(params)} bytes of parameters: kernel {entry.name} takes {total}")
        blob[:] = params
    else:
        if len(params) != len(entry.params):
            raise BadLaunch(f"{len(params)} parameters: kernel {entry.name} takes {len(entry.params)}")
        for variable, value in zip(entry.params, params, strict=True):
            if len(value) != variable.size:
                raise BadLaunch(f"parameter {variable.name} has {len(value)} bytes, not {variable.size}")
            at = offsets[variable.name]
            blob[at : at + variable.size] = value
    return np.frombuffer(bytes(blob) + bytes(-total % 16), np.uint8)


def _param_offsets(entry: Entry) -> tuple[dict[str, int], int]:
    offsets, at = {}, 0
    for variable in entry.params:
        at = -(-at // variable.align) * variable.align
        offsets[variable.name] = at
        at += variable.size
    return offsets, at


def _shared_layout(source: Source, entry: Entry) -> tuple[dict[str, int], int]:
    """Offsets of a kernel's shared variables, and the bytes before the dynamic ones (which share one offset)."""
    offsets, at = {}, 0
    variables = [v for v in (*entry.variables, *source.variables) if v.space == "shared"]
    for variable in variables:
        if variable.size:
            at = -(-at // variable.align) * variable.align
            offsets[variable.name] = at
            at += variable.size
    dynamic = [v for v in variables if not v.size]
    align = max((v.align for v in dynamic), default=16)
    at = -(-at // align) * align
    offsets.update((v.name, at) for v in dynamic)
    return offsets, at


def _globals(source: Source) -> list[tuple[Variable, int]]:
    """Module-scope variables in global memory, with their addresses."""
    out, at = [], GLOBALS_BASE
    for variable in source.variables:
        if variable.space in ("global", "const"):
            at = -(-at // max(variable.align, 16)) * max(variable.align, 16)
            out.append((variable, at))
            at += variable.size
    if at > GLOBALS_BASE + GLOBALS_BYTES:
        raise BadLaunch(f"module-scope variables take {at - GLOBALS_BASE} bytes: up to {GLOBALS_BYTES} are modelled")
    return out


def _symbols(source: Source, entry: Entry) -> dict[str, tuple[str, int]]:
    """Every name a kernel may use as an address -> (space, address in that space)."""
    symbols: dict[str, tuple[str, int]] = {}
    for name, at in _param_offsets(entry)[0].items():
        symbols[name] = ("param", at)
    for name, at in _shared_layout(source, entry)[0].items():
        symbols[name] = ("shared", SHARED_BASE + at)
    symbols.update((variable.name, (variable.space, address)) for variable, address in _globals(source))
    local = 0
    for variable in entry.variables:
        if variable.space == "local":
            symbols[variable.name] = ("local", local)
            local += -(-variable.size // 16) * 16
    return symbols


def load(text: str, *, target: str | None = None) -> Module:
    """Parse a PTX module.

    `target` names the architecture that the text must be for ("sm_80").  Raises PtxSyntaxError, or WrongTarget with
    both names.
    """
    source = parse(text)
    if target is not None and source.target != target:
        raise WrongTarget(f"this PTX is for {source.target}, not for {target}: compile it for {target}")
    if not re.fullmatch(r"sm_\d+[af]?", source.target):
        raise WrongTarget(f"target {source.target!r} is no architecture")
    return Module(source)
