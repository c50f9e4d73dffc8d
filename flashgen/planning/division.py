"""Whether the keys of a call are split among blocks, and among how many: a few integer operations, and why.

A tile of queries is worked on by one block unless there are too few of them for the SMs of a GPU.  Keys are then split:
more blocks load at once, and their parts of o are written, read and combined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from flashgen.analysis import counts
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.errors import PlanError, shown
from flashgen.lang.expr import walk
from flashgen.lang.variant import Variant
from flashgen.planning import leaf_times, planner, split_keys
from flashgen.planning.arch import ARCHS
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.members import ALL_KEYS, FoldedLeaves, Keys, SplitKeys
from flashgen.planning.once import Remembered, once
from flashgen.planning.plan import KernelPlan, Tile
from flashgen.planning.planner import Menu
from flashgen.planning.problem import Problem

#: Keys are split of themselves where a sequence has at most so many queries and at least so many keys.
MOST_QUERIES, LEAST_KEYS = 256, 1024

#: And where that is predicted to be faster by this factor.
GAIN = 1.1

#: Seconds in which a block starts: its first copies, and the end of its last product; and those that each further
#: `AT_ONCE` parts of a row take to combine, which are the ones that are on their way at once.  On an H200, 1 sequence,
#: 32:4 heads, 4,096 keys: 14.1 us with 8 parts, 12.7 with 16, 13.2 with 32.
START, AGAIN, AT_ONCE = 2e-6, 1.5e-6, split_keys.COMBINING.of_any.parts

#: How many times its share of the bandwidth of memory one SM takes where others are idle (1,024 keys, 32:8 heads:
#: 10.7 us on 64 SMs, 11.3 on 32).
ALONE = 1.5

#: Tiles of keys that a part has at least where sequences with lengths of their own are split because one of them may be
#: longer than others: that one fills the SMs by itself.  On an H200, 64 sequences of 256 to 65,536 keys, 32:8 heads:
#: 860 us unsplit, 745 in 8 parts, 741 in 16; as many keys in equal lengths: 747.
LEAST_TILES = 16

#: Tiles of queries times blocks for each, and rows: kernels count them in 32 bits.
MAX_PLACES = (1 << 31) - 1

#: Rounds of blocks that a division may fill the SMs with.
ROUNDS = (1, 2, 3, 4)


class Divided(NamedTuple):
    """The plan that a call gets, of its menu; `splits` blocks divide the keys of a tile of queries.

    `why` says how that number was found, for a person; it is empty where splitting was no question.  A tuple, as each
    new length makes one.
    """

    menu: Menu
    plan: KernelPlan
    splits: int = 1
    why: str = ""


def check_splits(given: object) -> None:
    """Raise PlanError for what is no number of blocks."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= split_keys.MAX_SPLITS:
        number = given if isinstance(given, int) and not isinstance(given, bool) else 1
        raise PlanError(
            f"kv_splits is {shown(given)}: it is a number of blocks that divide keys, 1 to {split_keys.MAX_SPLITS}\n"
            f"  nearest: kv_splits={min(max(number, 1), split_keys.MAX_SPLITS)}, or none: flashgen chooses"
        )


def check_together(kv_splits: object, invariant: bool) -> None:
    """Raise PlanError for a number of blocks beside leaves."""
    if invariant and kv_splits is not None:
        raise PlanError(
            f"kv_splits={shown(kv_splits)} beside invariant=True: keys are cut at fixed positions, and"
            " how often follows from their number\n  nearest: invariant=True alone"
        )


def asks(q_len: int, kv_len: int) -> bool:
    """Whether splitting is a question where nobody says so."""
    return 0 < q_len <= MOST_QUERIES and kv_len >= LEAST_KEYS


def visits_all(problem: Problem, kv_splits: int | None, invariant: bool) -> bool:
    """Whether a block visits all keys, as neither the call nor the problem asks for anything else."""
    if kv_splits is not None or invariant:
        return False
    return problem.kv_len < LEAST_KEYS or not asks(problem.q_len, problem.kv_len)


def mask_parameters(variant: Variant) -> tuple[str, ...]:
    """The parameters of a variant's mask, by which the keys that it shows are counted."""
    used = [] if variant.mask is None else [n.attr for n in walk([variant.mask]) if n.op == "param"]
    return tuple(p.name for p in variant.params if p in used)


def divide(
    ask: Callable[[Keys], Menu],
    problem: Problem,
    sms: int,
    *,
    kv_splits: int | None = None,
    params: Mapping[str, int | float],
    layout: Layout = DENSE,
    invariant: bool = False,
    alike: bool = False,
) -> Divided:
    """The plan for a problem on so many SMs, of the menu that `ask` gives for blocks that visit all keys or a part.

    `kv_splits` is what a call says, None where it leaves that open; `invariant` asks for leaves; sequences that are
    `alike`, as no lengths are given, are all as long as the problem says where they are padded.  Raises PlanError where
    keys cannot be split and a call says so.
    """
    if visits_all(problem, kv_splits, invariant):
        return _whole(ask, problem, sms, "")
    check_splits(kv_splits)
    check_together(kv_splits, invariant)
    if invariant:
        return _in_leaves(ask, problem, sms, FoldedLeaves(), params, layout)
    if kv_splits == 1:
        return _whole(ask, problem, sms, "as asked")
    menu = ask(SplitKeys())
    plan = planner.choose(menu, problem, sms)
    if kv_splits is not None:
        _check_places(plan, problem, kv_splits)
        return Divided(menu=menu, plan=plan, splits=kv_splits, why="as asked")
    uneven = layout.joined or layout.paged or (layout.own and not alike)
    splits, why = number(plan, problem, steps(plan, problem, params, layout), sms, uneven=uneven)
    return Divided(menu=menu, plan=plan, splits=splits, why=why) if splits > 1 else _whole(ask, problem, sms, why)


def _in_leaves(
    ask: Callable[[Keys], Menu],
    problem: Problem,
    sms: int,
    keys: FoldedLeaves,
    params: Mapping[str, int | float],
    layout: Layout,
) -> Divided:
    """Leaves that a block folds on its way, or that each are a part of a row: the bits are the same."""
    menu, parts = ask(keys), ask(keys.in_parts)
    plan, apart = planner.choose(menu, problem, sms), planner.choose(parts, problem, sms)
    leaves = keys.in_parts.number(problem.kv_len)
    found = f"leaves of {keys.keys} keys, as asked"
    if plan.specialized is None or not plan.keys.folds:
        why = f"a part for each, as pipeline {plan.pipeline} folds them through memory"
    elif leaves > 1 and layout.own and asks(problem.q_len, problem.kv_len):
        why = "a part for each, as one block might have the longest sequence"
    else:
        visible = steps(plan, problem, params, layout)
        alone, divided = (leaf_times.seconds(one, problem, visible, leaves, sms) for one in (plan, apart))
        if alone <= divided:
            why = f"{found}: a block folds those that its queries see, in {plan.specialized.fold.where}"
            return Divided(menu=menu, plan=plan, why=why)
        why = f"a part for each, predicted {alone / divided:.3g}x as fast as a block that folds them"
    tiles, rows = split_keys.tiles(apart, problem), split_keys.rows(apart, problem)
    if max(tiles * leaves, rows) > MAX_PLACES:
        raise PlanError(
            f"invariant=True of {tiles} tiles of queries, {rows} rows and {leaves} leaves of {keys.keys} keys: kernels"
            " count rows, and tiles times leaves, below 2^31\n  nearest: fewer queries a call, which have the same bits"
        )
    return Divided(menu=parts, plan=apart, splits=leaves, why=f"{found}: {why}")


def _check_places(plan: KernelPlan, problem: Problem, kv_splits: int) -> None:
    """Raise PlanError for more tiles, each with a part of the keys, or more rows than kernels count."""
    tiles, rows = split_keys.tiles(plan, problem), split_keys.rows(plan, problem)
    most = max(1, MAX_PLACES // max(1, tiles)) if rows <= MAX_PLACES else 1
    if kv_splits > most:
        raise PlanError(
            f"kv_splits={kv_splits} of {tiles} tiles of queries and {rows} rows: kernels count rows, and tiles times"
            f" kv_splits, below 2^31\n  nearest: kv_splits={most}"
        )


def _whole(ask: Callable[[Keys], Menu], problem: Problem, sms: int, why: str) -> Divided:
    menu = ask(ALL_KEYS)
    return Divided(menu=menu, plan=planner.choose(menu, problem, sms), why=why)


def steps(plan: KernelPlan, problem: Problem, params: Mapping[str, int | float], layout: Layout) -> int:
    """Tiles of keys that the last tile of queries sees, as far as is known: of a mask that reads captured tensors,
    batches, heads or a parameter without a value all.  Queries with positions of their own count as the last ones.

    Of lengths that end inside of one tile of keys it is what the shortest of them says: a cache that grows by a key at
    a time asks anew with each tile.
    """
    all_tiles, whole = -(-problem.kv_len // plan.tile.kv), problem.kv_len % plan.tile.kv == 0
    by_tiles = _visible(plan)
    if by_tiles is None:
        return all_tiles
    named = tuple(params.items())
    at = problem.batch, problem.heads, problem.kv_heads, problem.q_len, all_tiles, whole, layout.own, named
    found = by_tiles.get(at)
    return by_tiles.keep(at, _steps(plan, problem, params, layout)) if found is None else found


@once
def _visible(plan: KernelPlan) -> Remembered[tuple[object, ...], int] | None:
    """What `steps` has found of a plan; None where all tiles of keys are visible as far as is known."""
    facts = analyse(plan.variant)
    if plan.variant.mask is None or plan.variant.pair_tensors or facts.uses_batch or facts.uses_head:
        return None
    return Remembered()


def _steps(plan: KernelPlan, problem: Problem, params: Mapping[str, int | float], layout: Layout) -> int:
    kv = plan.tile.kv
    if any(name not in params for name in mask_parameters(plan.variant)):
        return -(-problem.kv_len // kv)
    sizes, first = problem.sizes(), 0
    if problem.kv_len % kv:
        sizes["kv_len"] = problem.kv_len // kv * kv + 1
    if layout.own:
        sizes["q_len"] = max(sizes["kv_len"], problem.q_len)
        first = sizes["q_len"] - problem.q_len
    case = Case(sizes=sizes, params=params, tensors={}, q_offset=first)
    tile = Tile(q=plan.tile_queries(problem.group), kv=kv)
    return counts.visited_by(analyse(plan.variant), case, tile, -(-problem.q_len // tile.q) - 1)


def number(plan: KernelPlan, problem: Problem, visible: int, sms: int, *, uneven: bool = False) -> tuple[int, str]:
    """Among how many blocks the `visible` tiles of keys are best divided, and why; sequences that are `uneven` see so
    many at most."""
    known = _divisions(plan)
    at = problem.batch, problem.heads, problem.kv_heads, problem.q_len, visible, sms, uneven
    found = known.get(at)
    return known.keep(at, _number(plan, problem, visible, sms, uneven)) if found is None else found


@once
def _divisions(plan: KernelPlan) -> Remembered[tuple[int, ...], tuple[int, str]]:
    """What `number` has found of a plan: it does not depend on the number of keys."""
    return Remembered()


def _number(plan: KernelPlan, problem: Problem, visible: int, sms: int, uneven: bool) -> tuple[int, str]:
    tiles = split_keys.tiles(plan, problem)
    if not tiles or not visible:
        return 1, ""
    filled = [rounds * sms * plan.blocks_per_sm // tiles for rounds in ROUNDS]
    filled += [AT_ONCE, *(n // AT_ONCE * AT_ONCE for n in filled)]
    most = min(visible, split_keys.MAX_SPLITS)
    tried = {1, most, *(min(most, max(1, n)) for n in filled)}
    times = {n: seconds(plan, problem, visible, n, sms) for n in sorted(tried)}
    best = min(times, key=lambda n: times[n])
    gain = times[1] / times[best]
    found = f"{tiles} tiles of queries on {sms} SMs, {visible} tiles of keys each"
    parts = _of_uneven(tiles, problem, visible, sms) if uneven else 1
    if gain < GAIN and parts > 1:
        each = -(-visible // parts)
        return parts, f"{found}: at most {each} a block, as one of {problem.batch} sequences may be longer than others"
    if gain < GAIN:
        return 1, f"{found}: {best} blocks for each would bring {gain:.2f}x" if best > 1 else found
    each = -(-visible // best)
    return best, f"{found}: {each} a block, predicted {gain:.3g}x as fast as by one"


def _of_uneven(tiles: int, problem: Problem, visible: int, sms: int) -> int:
    """Among how many blocks the keys of sequences are divided whose lengths the device alone knows."""
    return max(1, min(sms * problem.batch // tiles, visible // LEAST_TILES)) if problem.batch > 1 else 1


def seconds(plan: KernelPlan, problem: Problem, visible: int, splits: int, sms: int) -> float:
    """Seconds of the kernels of a call whose tiles of queries see so many tiles of keys each.

    A block loads as fast as its share of L2 allows, and of HBM, from which tiles of queries that share keys load them
    once, and no faster than an SM that has few others beside it; or it computes for longer.
    """
    arch, tiles = ARCHS[plan.arch], split_keys.tiles(plan, problem)
    room = sms * plan.blocks_per_sm
    blocks = tiles * min(splits, visible)
    active = min(blocks, room)
    sharing = max(1, tiles // max(1, problem.batch * problem.kv_heads))
    moved = problem.read_bytes(0, plan.tile.kv)
    alone = ALONE * arch.hbm_bytes_per_s / sms
    load = moved / min(arch.l2_bytes_per_s / max(active, sms), arch.hbm_bytes_per_s * sharing / active, alone * sharing)
    together = -(-active // sms)  # blocks that share an SM
    pace = planner.pipeline_of(plan).seconds_per_score(plan, arch)[together - 1]
    compute = together * pace * plan.tile.q * plan.tile.kv
    rounds = -(-blocks // room)
    found = rounds * (START + -(-visible // splits) * max(load, compute))
    if splits == 1:
        return found
    parts = split_keys.rows(plan, problem) * min(splits, visible) * (problem.v_head_dim * split_keys.PART_ITEM)
    again = (min(splits, visible) - 1) // AT_ONCE * AGAIN
    return found + split_keys.COMBINE + again + 2 * parts / arch.l2_bytes_per_s
