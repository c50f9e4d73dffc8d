"""Which warps run next: in lockstep where they can (no seed), or one at a time in random order (a seed).

Without a seed, bundles of lanes at the same place are joined and run as one wide vector, the lowest place first, so
that diverged lanes meet again; asynchronous copies land only when nothing else can go on.  With a seed each warp runs
by itself, warps are picked at random, and copies land at random moments.
"""

from __future__ import annotations

import numpy as np

from flashgen.interpreter.block import IDLE, Block, Bundle, Cluster
from flashgen.interpreter.errors import Deadlock, StepLimit, Trap, Uninitialised
from flashgen.interpreter.registers import LANES, Mask
from flashgen.interpreter.translate import Fork, Jump, Suspend, attach

#: A bundle that ran this many basic blocks more than another gives way to it (loops that poll).
_FAIR = 4096


def run_cluster(cluster: Cluster, quantum: int) -> None:
    """Advance a cluster by up to `quantum` basic blocks.  Raises Deadlock where none of its warps can go on."""
    rng = cluster.launch.rng
    for turn in range(quantum):
        if rng is not None and cluster.in_flight and rng.random() < 0.1:
            cluster.land(int(rng.integers(len(cluster.in_flight))))
        blocks = [block for block in cluster.blocks if block.bundles]
        if not blocks:
            return
        if rng is not None:
            rng.shuffle(blocks)
        elif turn % 2 and len(blocks) > 1:
            blocks = blocks[1:] + blocks[:1]
        for block in blocks:
            bundle = _choose(block)
            if bundle is not None:
                _execute(block, bundle)
                break
        else:
            if not cluster.in_flight:
                if not cluster.launch.alone:  # until the kernel before has ended
                    return
                if cluster.wake():  # they look again when other clusters have had their turn
                    return
                _stuck(cluster)
            cluster.land(0 if rng is None else int(rng.integers(len(cluster.in_flight))))


def parked(cluster: Cluster) -> bool:
    """Whether nothing goes on here before the kernel before has ended."""
    if cluster.launch.alone or cluster.in_flight:
        return False
    return all(_choose(block) is None for block in cluster.blocks if block.bundles)


def check_progress(clusters: list[Cluster]) -> None:
    """Raises Deadlock where all clusters do nothing but look whether another has done something."""
    if all(cluster.idle >= IDLE for cluster in clusters):
        raise Deadlock("\n".join(_who_waits(cluster) for cluster in clusters))


def _stuck(cluster: Cluster) -> None:
    """Nothing can go on: report the lanes that wait for others of their warp, or else the deadlock."""
    for block in cluster.blocks:
        waiting = {row for bundle in block.bundles if bundle.wait for row in range(bundle.a, bundle.b)}
        for bundle in block.bundles:
            if bundle.wait is None and not waiting & set(range(bundle.a, bundle.b)):
                _execute(block, bundle)  # raises Diverged: the rest of the warp will never come
    raise Deadlock(_who_waits(cluster))


def _choose(block: Block) -> Bundle | None:
    """The bundle to run next, joined with others at its place; None where all wait."""
    ready = [bundle for bundle in list(block.bundles) if _ready(block, bundle)]
    if len(ready) > 1:
        ready = _joined(block, ready)
    runnable = [bundle for bundle in ready if _met(block, bundle)]
    if not runnable:
        return None
    codes, rng = block.launch.program.blocks, block.launch.rng
    if rng is not None:
        warp = runnable[int(rng.integers(len(runnable)))].a
        runnable = [bundle for bundle in runnable if bundle.a == warp]
    return min(runnable, key=lambda bundle: (bundle.turns // _FAIR, codes[bundle.pc].rank, bundle.a))


def _joined(block: Block, bundles: list[Bundle]) -> list[Bundle]:
    """Bundles at one place become one (with a seed: only those of one warp)."""
    apart = block.launch.rng is not None
    found: dict[tuple[int, int], Bundle] = {}
    for bundle in bundles:
        first = found.setdefault((bundle.pc, bundle.a if apart else 0), bundle)
        if first is not bundle:
            _join(first, bundle)
            block.bundles.remove(bundle)
    return list(found.values())


def _met(block: Block, bundle: Bundle) -> bool:
    """Whether the lanes that must execute the next instruction together are here; warps that are not are split off."""
    code = block.launch.program.blocks[bundle.pc]
    if not code.meets or bundle.mask is True:
        return True
    alive, unmet = block.alive, bundle.unmet
    if unmet is not None and unmet[0] is bundle.mask and unmet[1] == bundle.pc and unmet[2] is alive:
        return False
    named = alive[bundle.a : bundle.b]
    if code.members is not None:
        members = block.group(bundle.a, bundle.b).slots[code.members]
        warp = np.where(bundle.mask, members, np.uint32(0)).max(1, keepdims=True)
        named = named & (warp >> np.arange(LANES, dtype=np.uint32) & np.uint32(1)).astype(bool)
    here = bundle.mask.any(1)
    missing = (named & ~bundle.mask).any(1) & here
    if not missing.any():
        return True
    if (missing == here).all():
        bundle.unmet = bundle.mask, bundle.pc, alive
        return False
    later = _cut(bundle, bundle.mask & missing[:, None])
    block.bundles.append(later)
    bundle.a, bundle.b, bundle.mask = _trim(bundle.a, bundle.mask & ~missing[:, None])
    return True


def _ready(block: Block, bundle: Bundle) -> bool:
    """Whether (a part of) a bundle can run; the part that still waits is split off."""
    wait = bundle.wait
    if wait is None:
        return True
    events = block.cluster.events
    if bundle.seen == events:
        return False
    bundle.seen = events
    ready = wait.poll(block.group(bundle.a, bundle.b), bundle.mask)
    if ready is True:
        bundle.wait = None
        return True
    if ready is False or not ready.any():
        return False
    everyone = np.ones((bundle.b - bundle.a, LANES), bool) if bundle.mask is True else bundle.mask
    rest = everyone & ~ready
    if rest.any():
        later = _cut(bundle, rest)
        later.wait, later.seen = wait, -1
        block.bundles.append(later)
    bundle.a, bundle.b, bundle.mask = _trim(bundle.a, ready)
    bundle.wait = None
    return True


def _trim(a: int, mask: np.ndarray) -> tuple[int, int, Mask]:
    rows = np.flatnonzero(mask.any(1))
    first, last = int(rows[0]), int(rows[-1]) + 1
    part = mask[first:last]
    return a + first, a + last, True if part.all() else part


def _cut(bundle: Bundle, mask: np.ndarray) -> Bundle:
    a, b, part = _trim(bundle.a, mask)
    return Bundle(a, b, part, bundle.pc, None, -1, bundle.turns)


def _join(into: Bundle, other: Bundle) -> None:
    a, b = min(into.a, other.a), max(into.b, other.b)
    mask = np.zeros((b - a, LANES), bool)
    for bundle in (into, other):
        mask[bundle.a - a : bundle.b - a] |= bundle.mask
    into.a, into.b, into.mask = a, b, True if mask.all() else mask
    into.turns = max(into.turns, other.turns)


def _execute(block: Block, bundle: Bundle) -> None:
    """Run the basic block that a bundle stands at, and move it on."""
    launch = block.launch
    code = launch.program.blocks[bundle.pc]
    group = block.group(bundle.a, bundle.b)
    V, m = group.slots, bundle.mask
    warps = group.n if m is True else int(m.any(1).sum())
    launch.steps += warps * (len(code.instructions) or 1)
    launch.executed[bundle.pc] += warps
    limit = launch.options.step_limit
    if launch.steps > limit:
        raise StepLimit(f"more than {limit} warp instructions: the kernel may never end (raise step_limit if it does)")
    bundle.turns += 1
    at = 0
    end = code.end
    try:
        for at, run in enumerate(code.ops):  # noqa: B007 - the trap below wants to know where
            run(V, m)
        if type(end) is Suspend:
            at = len(code.ops)
            bundle.wait = end.run(V, m)
            bundle.seen = -1
            bundle.pc = end.next
            return
    except Trap as trap:
        attach(trap, code, at, f"in {place(block)}, warps {bundle.a}..{bundle.b - 1}")
        raise
    if type(end) is Jump:
        bundle.pc = end.target
    else:
        try:
            if type(end) is Fork:
                _fork(block, bundle, end, V)
            else:
                block.bundles.remove(bundle)
                _leave(block, bundle)
        except Trap as trap:
            attach(trap, code, len(code.ops), f"in {place(block)}, warps {bundle.a}..{bundle.b - 1}")
            raise


def _fork(block: Block, bundle: Bundle, end: Fork, V: list) -> None:
    taken = ~V[end.slot] if end.negated else V[end.slot].copy()  # it becomes a mask: the register may change
    m = bundle.mask
    if end.written is not None and not (V[end.written] if m is True else V[end.written][m]).all():
        raise Uninitialised("a branch is taken on a predicate that nothing wrote")
    if m is True:
        if taken.all():
            bundle.pc = end.target
            return
        if not taken.any():
            bundle.pc = end.other
            return
        stay = ~taken
    else:
        stay, taken = ~taken & m, taken & m
        if not stay.any():
            bundle.pc = end.target
            return
        if not taken.any():
            bundle.pc = end.other
            return
    other = _cut(bundle, stay)
    other.pc = end.other
    bundle.a, bundle.b, bundle.mask = _trim(bundle.a, taken)
    bundle.pc = end.target
    block.bundles.append(other)


def _leave(block: Block, bundle: Bundle) -> None:
    rows = slice(bundle.a, bundle.b)
    block.alive = block.alive.copy()
    block.alive[rows] &= False if bundle.mask is True else ~bundle.mask
    for row in range(bundle.a, bundle.b):
        if not block.alive[row].any() and (bundle.mask is True or bundle.mask[row - bundle.a].any()):
            for finish in block.launch.leaving:
                finish(block, row)
    block.cluster.events += 1


def place(block: Block) -> str:
    return f"block {block.index}" + (f" (rank {block.rank} of its cluster)" if len(block.cluster.blocks) > 1 else "")


def _who_waits(cluster: Cluster) -> str:
    lines = ["no warp can advance:"]
    for block in cluster.blocks:
        for bundle in sorted(block.bundles, key=lambda b: b.a):
            lanes = "" if bundle.mask is True or bundle.mask.all() else f" ({int(bundle.mask.sum())} lanes)"
            code = block.launch.program.blocks
            before = [c for c in code if type(c.end) is Suspend and c.end.next == bundle.pc]
            line = f", PTX line {before[0].instructions[-1].line}" if before else ""
            awake = "the other lanes of their warp" if code[bundle.pc].meets else "another block"  # looks again
            what = bundle.wait.describe() if bundle.wait else awake
            lines.append(f"  {place(block)} warps {bundle.a}..{bundle.b - 1}{lanes} wait for {what}{line}")
    return "\n".join(lines)
