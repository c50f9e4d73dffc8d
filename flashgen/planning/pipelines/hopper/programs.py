"""The programs of pipeline hopper: who the warps of a forward and of a backward are, and what they hand each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.plan import ITEM, Tile
from flashgen.planning.plan import WARPGROUP_ROWS as ROWS
from flashgen.planning.program import (
    IDLE,
    WARP,
    Axis,
    Declaration,
    Member,
    NamedBarrier,
    Party,
    Program,
    Ring,
    Role,
    declared,
)

#: Warps of a warpgroup.
WARPS = 4

#: What the swizzle of tiles aligns `Shared` to.
ALIGNMENT = 1024

#: Tiles of queries that are known on their way through a forward; of those who add up dq in one order in a backward,
#: steps: at most the stages and 3 are between them and the loader.
WORK_STAGES, SEMAPHORE_STEPS = 4, 8

#: Bytes of a tile that a lane judges, and of the part of it that is looked at, where these lie in shared memory.
JUDGED_BYTES = 48

#: The first id of a forward's barriers that let O into the shared memory of Q: those of turns come before.
O_BARRIER = 4

#: Keys in a row of V that is turned over: 128 bytes, whatever the tile.
KEYS_ACROSS = 128

#: Tiles of V as stored where warps turn them over: one is read while the next is loaded.
V_STAGES = 2

_TWO, _ONE = Axis(size=2, text="2"), Axis(size=1, text="")


def forward(
    *,
    tile: Tile,
    columns: tuple[int, int],
    stages: int,
    q_stages: int,
    registers: tuple[int | None, int | None],
    masked: bool,
    stored: bool,
    ping_pong: bool,
    layout: Layout = DENSE,
    split: bool = False,
    turned: tuple[int, int] | None = None,
    ones: bool = False,
    folded: int = 0,
    loads: bool = False,
    in_time: bool = False,
) -> Program:
    """A forward's program: `columns` of q and k, and of v, in shared memory; `registers` per thread of the producer
    warpgroup and of a consumer, None where none change hands; O is `stored` by TMA from the shared memory of Q, or by
    the consumers themselves; where sequences have lengths of their own, V ends inside a tile; where keys are `split`, a
    tile of queries is one with a part of them.  In 8 bits `turned` has the columns of V once it is turned over, and
    the warps that do it; with `ones` there is a matrix of them; the scheduler's warp `loads` too where one more is
    needed to turn V over.  `folded` are the columns of O of the leaves so far that lie there in float32.  A tile of
    queries is taken from the counter `in_time` where the loader says when."""
    warpgroups = tile.q // ROWS
    transposers = 0 if turned is None else turned[1]
    cleans = layout.own and turned is None  # who turns V over clears it too
    roles = _forward_roles(
        *registers, warpgroups, layout, stored=stored, transposers=transposers, cleans=cleans, loads=loads
    )
    stage = Axis(size=stages, text="STAGES", index="stage")
    axes = {
        "stage": stage,
        "v_stage": stage if turned is None else Axis(size=V_STAGES, text="V_STAGES", index="stage"),
        "q_stage": Axis(size=q_stages, text="Q_STAGES", index="stage"),
        "work_stage": Axis(size=WORK_STAGES, text="WORK_STAGES"),
        "each": Axis(size=warpgroups, text="WARPGROUPS", index="w"),
    }
    flags = {"masked": masked, "stored": stored, "cleans": cleans, "loads": loads, "in_time": in_time}
    rings = tuple(_forward_rings(axes, transposers=transposers, **flags))
    room = max(columns) if stored else columns[0]
    elements = ROWS * room, tile.kv * columns[0], tile.kv * columns[1]
    of, work = {ring.name: ring.member for ring in rings}, work_layout(layout, split=split)
    meet = [_start(roles)]
    if ping_pong:
        why = "a warpgroup issues its products when the one before has issued its own"
        meet += [_meet("turn", 1 + w, 2 * WARPS, ("consumer",), why) for w in range(warpgroups)]
    if stored:
        why = "no warp of the warpgroup multiplies by Q any more: O may lie there"
        meet += [_meet("o", O_BARRIER + w, WARPS, ("consumer",), why) for w in range(warpgroups)]
    return Program(
        roles=roles,
        rings=rings,
        named_barriers=tuple(meet),
        shared=tuple(_forward_members(axes, of, elements, work, turned, masked=masked, ones=ones, folded=folded)),
        dispatch=_chains(roles, ("scheduler", "loader"), ("storer",), ("cleaner",), ("transposer",)),
        names=(Axis(size=WARPS * warpgroups, text="4 * WARPGROUPS"),),
    )


def _forward_roles(
    producer: int | None,
    consumer: int | None,
    warpgroups: int,
    layout: Layout,
    *,
    stored: bool,
    transposers: int,
    cleans: bool,
    loads: bool,
) -> tuple[Role, ...]:
    """In the order of their warps: those of the producer warpgroup, then the consumers."""
    names = [*([] if loads else ["scheduler"]), "loader", *(["storer"] if stored else [])]
    whole = ("scheduler", "loader") if layout.paged or loads else ("scheduler",)
    roles = [Role(name=name, warps=1, threads=WARP if name in whole else 1, registers=producer) for name in names]
    roles.append(_idle(WARPS - len(names) - cleans - transposers, producer))
    if transposers:
        roles.append(Role(name="transposer", warps=transposers, threads=WARP * transposers, registers=producer))
    if cleans:
        roles.append(Role(name="cleaner", warps=1, threads=WARP, registers=producer))
    roles.append(Role(name="consumer", warps=WARPS * warpgroups, threads=128 * warpgroups, registers=consumer))
    return tuple(role for role in roles if role.warps)


def _forward_rings(
    axes: dict[str, Axis], *, masked: bool, stored: bool, transposers: int, cleans: bool, loads: bool, in_time: bool
) -> Iterator[Ring]:
    """In the order in which their barriers are initialised."""
    warpgroups = axes["each"].size
    of_all, waiting = (Party(role="consumer", arrivals=WARPS * warpgroups),), (Party(role="consumer", arrivals=0),)
    of_one, loader = (Party(role="consumer", arrivals=WARPS),), (Party(role="loader", arrivals=1),)
    scheduler = loader if loads else (Party(role="scheduler", arrivals=1),)
    storer, turning = (Party(role="storer", arrivals=1),) * stored, (Party(role="transposer", arrivals=transposers),)
    yield Ring(
        name="q",
        barrier="q_pipe",
        carries="64 rows of Q" + ", then of O" * stored,
        stages=axes["q_stage"],
        each=axes["each"],
        producers=loader,
        consumers=(*waiting, *storer) if stored else of_one,
    )
    if stored:
        yield Ring(
            name="o",
            barrier="o_full",
            carries="64 rows of O in the shared memory of Q",
            stages=axes["q_stage"],
            each=axes["each"],
            producers=of_one,
            consumers=(Party(role="storer", arrivals=0),),
            freed="with q",
        )
    yield Ring(
        name="k",
        barrier="k_pipe",
        carries="a tile of K" + " and its step" * masked,
        stages=axes["stage"],
        producers=loader,
        consumers=of_all,
    )
    yield Ring(
        name="v",
        barrier="v_pipe",
        carries="a tile of V",
        stages=axes["v_stage"],
        producers=loader,
        consumers=turning if transposers else of_all,
    )
    yield Ring(
        name="work",
        barrier="work_pipe",
        carries="a tile of queries to work on",
        stages=axes["work_stage"],
        producers=scheduler,
        consumers=(*of_all, *(() if loads else loader), *storer),
    )
    if in_time:
        yield Ring(
            name="draw",
            barrier="may_draw",
            carries="leave to take the next tile of queries",
            stages=_ONE,
            producers=loader,
            consumers=(Party(role="scheduler", arrivals=0),),
            freed="by the tile that it takes",
        )
    if masked and not loads:
        yield Ring(
            name="next",
            barrier="next_pipe",
            carries="a tile of keys to load",
            stages=_TWO,
            producers=scheduler,
            consumers=loader,
        )
    if cleans:
        yield Ring(
            name="tail",
            barrier="tail_pipe",
            carries="a tile of V with rows that are no keys, which become 0",
            stages=Axis(size=1, text="1"),
            producers=loader,
            consumers=(Party(role="cleaner", arrivals=1),),
        )
    if transposers:
        yield Ring(
            name="turned",
            barrier="turned_pipe",
            carries="a tile of V, turned over",
            stages=axes["stage"],
            producers=turning,
            consumers=of_all,
        )


def _forward_members(
    axes: dict[str, Axis],
    of: dict[str, Member],
    elements: tuple[int, int, int],
    work: tuple[int, int],
    turned: tuple[int, int] | None,
    *,
    masked: bool,
    ones: bool,
    folded: int,
) -> Iterator[Declaration]:
    """What `Shared` has, in order: tiles of Q, of K and of V have so many `elements`, `work` so many bytes."""
    stage, v_stage, of_q = axes["stage"], axes["v_stage"], (axes["q_stage"], axes["each"])
    item = ITEM if turned is None else 1
    yield declared(_tile("QorO", "q_or_o", elements[0], *of_q, item=item))
    yield declared(_tile("KTile", "k", elements[1], stage, item=item))
    yield declared(_tile("VTile", "v", elements[2], v_stage, item=item))
    if turned is not None:
        yield from _turned_members(turned[0], of_q, stage, v_stage, ones)
    if folded:
        yield declared(_folded(folded, axes["each"]), note="O of the leaves so far")
    size, alignment = work
    yield declared(Member(ctype="Work", name="work", size=size, alignment=alignment, axes=(axes["work_stage"],)))
    if masked:
        yield from _step_members(stage, of.get("next"))
    yield declared(of["work"])
    if "draw" in of:
        yield declared(of["draw"])
    yield declared(of["q"])
    if "o" in of:
        yield declared(of["o"])
    if turned is None:
        yield declared(of["k"], of["v"])
    else:
        yield from map(declared, (of["k"], of["v"], of["turned"]))
    if "tail" in of:
        yield declared(Member(ctype="Tail", name="tail", size=8, alignment=8))
        yield declared(of["tail"])


def work_layout(layout: Layout, *, split: bool) -> tuple[int, int]:
    """Bytes of a tile of queries as the scheduler hands it out, a struct of int32, and their alignment; where keys are
    `split` it has a part of them."""
    numbers = 4 + 4 * layout.own + len(layout.origins) + split
    size = 4 * numbers if numbers % 2 == 0 else 16 * math.ceil(numbers / 4)  # an odd number is filled up to be aligned
    return size, math.gcd(size, 16)


def backward(
    *,
    tile: Tile,
    columns: tuple[int, int],
    stages: int,
    registers: tuple[int, int],
    split_dk_dv: bool,
    skips: bool,
    ping_pong: bool,
    deterministic: bool,
    dq_in_main_kernel: bool,
    persistent: bool,
    judged_in_turn: bool,
    lookup_stages: int,
    lookups: tuple[tuple[str, str, int, bool], ...],
    kept_sums: tuple[int, int] = (0, 0),
    layout: Layout = DENSE,
) -> Program:
    """A backward's program: `columns` of q and k, and of v and d_o, in shared memory; tiles of queries in which the
    mask hides everything are skipped by a scheduler, where there may be any (`skips`), which has them in shared memory
    where it judges conditions in turn (`judged_in_turn`); `lookups` are what the mask reads: name, C++ type, bytes of
    an element and whether a query selects it; each thread of the consumers keeps so many `kept_sums`, and a warp so
    many bytes of each. A block takes one tile of keys after another (`persistent`) or has one. Where sequences have
    lengths of their own the loader's warp clears what it copied from behind a sequence: so it is the last of its
    warpgroup, whose roles are told by the first of their warps."""
    producer, consumer = registers
    by_query = any(of_query for *_, of_query in lookups)
    scheduler = Role(name="scheduler", warps=1, threads=1 if persistent else WARP, registers=producer)
    roles = [scheduler if skips or persistent else _idle(1, producer)]
    loader = Role(name="loader", warps=1, threads=WARP if layout.own else 1, registers=producer)
    if not layout.own:
        roles.append(loader)
    if deterministic:
        roles.append(Role(name="dq semaphore", warps=2, threads=2 * WARP, registers=producer))
    elif dq_in_main_kernel:
        roles.append(Role(name="dq accumulation", warps=2, threads=2 * WARP, registers=producer))
    else:
        roles.append(_idle(2, producer))
    if layout.own:
        roles.append(loader)
    names = ("dv consumer", "dk consumer") if split_dk_dv else ("consumer",)
    warps = 2 * WARPS // len(names)
    roles += [Role(name=name, warps=warps, threads=WARP * warps, registers=consumer) for name in names]
    shared_axes = {
        "stage": Axis(size=stages, text="STAGES", index="stage"),
        "semaphore": Axis(size=SEMAPHORE_STEPS, text="SEMAPHORE_STEPS"),
        "lookups": Axis(size=lookup_stages, text="LOOKUP_STAGES", index="stage"),
    }
    rings = tuple(
        _backward_rings(
            shared_axes,
            names,
            warps,
            skips=skips,
            dq_in_main_kernel=dq_in_main_kernel,
            persistent=persistent,
            by_query=by_query,
            deterministic=deterministic,
            own=layout.own,
        )
    )
    helpers = ("dq semaphore", "dq accumulation", "loader")
    lanes = Axis(size=WARP, text=str(WARP))
    judged = (Member(ctype="Judged", name="judged", size=JUDGED_BYTES, alignment=4, axes=(lanes,)),) * judged_in_turn
    return Program(
        roles=tuple(roles),
        rings=rings,
        named_barriers=(
            _start(roles),
            *(_meet("turn", 1 + w, 2 * WARPS, names, "a warpgroup computes P and dS") for w in range(2 * ping_pong)),
        ),
        shared=tuple(
            _backward_members(
                shared_axes, {r.name: r.member for r in rings}, tile, columns, judged, kept_sums, lookups, layout
            )
        ),
        dispatch=_chains(roles, ("scheduler",), helpers[::-1] if layout.own else helpers),
        names=(Axis(size=2 * WARPS, text="WARPS"), Axis(size=WARPS, text="WARPS / 2")),
    )


def _backward_rings(
    axes: dict[str, Axis],
    names: tuple[str, ...],
    warps: int,
    *,
    skips: bool,
    dq_in_main_kernel: bool,
    persistent: bool,
    by_query: bool,
    deterministic: bool,
    own: bool,
) -> Iterator[Ring]:
    """In the order in which their barriers are initialised."""
    arriving = tuple(Party(role=name, arrivals=warps) for name in names)
    waiting = tuple(Party(role=name, arrivals=0) for name in names)
    scheduler, loader = (Party(role="scheduler", arrivals=1),), (Party(role="loader", arrivals=1),)
    if skips or persistent:
        yield Ring(
            name="next",
            barrier="next_pipe",
            carries="a tile of queries to load",
            stages=_TWO,
            producers=scheduler,
            consumers=loader,
            counter="sent",
        )
    yield Ring(
        name="q",
        barrier="pipe",
        carries="a tile of Q, its lse and its step",
        stages=axes["stage"],
        producers=loader,
        consumers=arriving,
    )
    if persistent:
        yield Ring(
            name="keys",
            barrier="keys_pipe",
            carries="a tile of keys to work on, or that none is left",
            stages=_TWO,
            producers=scheduler,
            consumers=(*loader, *arriving),
            counter="taken",
        )
        yield Ring(
            name="k",
            barrier="k_pipe",
            carries="K of a tile of keys",
            stages=Axis(size=1, text="1"),
            producers=loader,
            consumers=arriving,
        )
        yield Ring(
            name="v",
            barrier="v_full",
            carries="V of a tile of keys",
            stages=_ONE,
            producers=loader,
            consumers=waiting,
            freed="with k",
        )
    else:
        cleared = (Party(role="dq accumulation", arrivals=1),) * dq_in_main_kernel
        more, note = (", and leave to add to dq", "v is here, and dq may be added") if dq_in_main_kernel else ("", "")
        yield _once("k", "k_full", "the block's K", loader, waiting)
        yield _once("v", "v_full", "the block's V" + more, (*loader, *cleared), waiting, note)
    if dq_in_main_kernel:
        accumulating = (Party(role="dq accumulation", arrivals=0),)
        yield _once("ending", "ending", "that the last tile of queries is being loaded", loader, accumulating)
        yield _once("added", "added", "that all of dq is added", arriving, accumulating)
    if by_query:
        yield Ring(
            name="lookups",
            barrier="lookups_full",
            carries="what the mask reads by the queries of a tile",
            stages=axes["lookups"],
            producers=scheduler,
            consumers=waiting,
            freed="with next and q: fewer tiles are on their way",
        )
    yield Ring(
        name="d_o",
        barrier="d_o_full",
        carries="a tile of dO and its delta",
        stages=axes["stage"],
        producers=loader,
        consumers=waiting,
        freed="with q",
    )
    if own:
        yield Ring(
            name="landed",
            barrier="landed",
            carries="tiles with rows that are none of the sequence's, which become 0",
            stages=_ONE,
            producers=loader,
            consumers=(Party(role="loader", arrivals=0),),
            freed="by the loader itself",
        )
    last = len(names) - 1  # whose warpgroup has dS, where one has
    yield Ring(
        name="ds",
        barrier="ds_full",
        carries="dS of a tile of queries",
        stages=_TWO,
        producers=arriving[last:],
        consumers=waiting,
        freed="by the dS after it",
    )
    if last:
        yield Ring(
            name="p",
            barrier="p_full",
            carries="P of a tile of queries, and leave to write dS",
            stages=_ONE,
            producers=arriving,
            consumers=waiting[last:],
            freed="by the dS made of it",
        )
    if deterministic:
        semaphore = (Party(role="dq semaphore", arrivals=0),)
        yield Ring(
            name="semaphore",
            barrier="semaphore_full",
            carries="a step, for those who order additions to dq",
            stages=axes["semaphore"],
            producers=loader,
            consumers=semaphore,
            freed="with q: fewer steps are on their way",
        )
        yield Ring(
            name="before",
            barrier="before",
            carries="that the block before has added to dq",
            stages=_TWO,
            producers=(Party(role="dq semaphore", arrivals=1),),
            consumers=waiting,
            freed="with added",
            counter="taken",
        )
        yield Ring(
            name="added",
            barrier="added",
            carries="that this block has added to dq",
            stages=_TWO,
            producers=arriving,
            consumers=semaphore,
            freed="with before",
        )


def _once(
    name: str,
    barrier: str,
    carries: str,
    producers: tuple[Party, ...],
    consumers: tuple[Party, ...],
    note: str = "",
) -> Ring:
    """A ring of one stage that goes round once."""
    return Ring(
        name=name,
        barrier=barrier,
        carries=carries,
        stages=_ONE,
        producers=producers,
        consumers=consumers,
        freed="never: it is filled once",
        note=note,
    )


def _backward_members(
    axes: dict[str, Axis],
    of: dict[str, Member],
    tile: Tile,
    columns: tuple[int, int],
    judged: tuple[Member, ...],
    kept_sums: tuple[int, int],
    lookups: tuple[tuple[str, str, int, bool], ...],
    layout: Layout,
) -> Iterator[Declaration]:
    """What `Shared` has, in order."""
    stage, of_queries, of_keys = axes["stage"], Axis(size=tile.q, text="TILE_Q"), Axis(size=tile.kv, text="TILE_KV")
    yield declared(_tile("KTile", "k", tile.kv * columns[0]))
    yield declared(_tile("VTile", "v", tile.kv * columns[1]))
    yield declared(_tile("QTile", "q", tile.q * columns[0], stage))
    yield declared(_tile("OTile", "d_o", tile.q * columns[1], stage))
    yield declared(_tile("ScoreTile", "ds", tile.q * tile.kv, _TWO))
    if "p" in of:
        pairs = Axis(size=tile.q // 4, text="TILE_Q / 4"), Axis(size=128, text="128")
        note = "from each thread of one warpgroup to one of the other"
        yield declared(Member(ctype="float2", name="p", size=8, alignment=8, axes=pairs), note=note)
    yield declared(*(_words("float", name, stage, of_queries) for name in ("lse", "delta")))
    if "next" in of:
        yield declared(_steps("next", _TWO, ctype="SharedStep"), note="what to load next")
        yield declared(_words("u32", "sent"), note="of such")
    if "next" in of and "keys" in of:
        yield declared(_words("u32", "taken"), note="tiles of keys that were")
        yield declared(Member(ctype="Step", name="coming", size=12, alignment=4), note="what is sent next")
    elif "next" in of:
        yield declared(
            Member(ctype="Looked", name="looked_at", size=8, alignment=4), note="where it looks for the next"
        )
    if judged:
        yield declared(*judged, note="the tile that each lane of its warp judges")
    if "semaphore" in of:
        yield declared(_words("u32", "taken", _TWO), note="of `semaphore_step`, by each of two warps")
    if "next" in of:
        yield declared(of["next"])
    yield declared(_steps("step", stage, ctype="SharedStep"))
    if "semaphore" in of:
        note = "the steps once more, for those who order additions to dq"
        yield declared(_steps("semaphore_step", axes["semaphore"], ctype="SharedStep"), note=note)
    for name, ctype, item, by_query in lookups:
        extents = (axes["lookups"], of_queries) if by_query else (of_keys,)
        yield declared(Member(ctype=ctype, name=name, size=item, alignment=item, axes=extents))
    kept, of_warp = kept_sums
    if kept:
        count = Axis(size=kept, text=str(kept))
        of_warps = count, Axis(size=2 * WARPS, text="WARPS")
        of_threads = count, Axis(size=2 * WARPS * WARP, text=f"{WARP} * WARPS")
        yield declared(Member(ctype="Kept", name="kept", size=of_warp, alignment=8, axes=of_warps))
        yield declared(_words("float", "kept_sum", *of_threads), note="sums of captured gradients")
    if "keys" in of:
        yield declared(Member(ctype="Keys", name="keys", size=24, alignment=4, axes=(_TWO,)), note="in turn")
        yield declared(of["keys"], note="full: they are known; empty: nobody works on them any more")
        yield declared(of["k"], note="empty: of v too")
    else:
        yield declared(Member(ctype="Keys", name="keys", size=24, alignment=4))
    if layout.own:
        yield declared(Member(ctype="Sequence", name="sequence", size=24 if layout.joined else 16, alignment=4))
    yield declared(of["q"], note="full: of q, lse and the step; empty: of all")
    once = ("d_o", *(() if "keys" in of else ("k",)), "v", "landed", "ds", "p", "lookups")
    yield declared(*(of[name] for name in once if name in of))
    if "semaphore" in of:
        yield declared(of["semaphore"])
        yield declared(
            of["before"], of["added"], note="of two steps: the block before has added its dq, and this one has"
        )
    if "ending" in of:
        yield declared(of["ending"], of["added"], note="the last tile of queries is being loaded; all of dq is added")


def _turned_members(
    columns: int, of_q: tuple[Axis, Axis], stage: Axis, v_stage: Axis, ones: bool
) -> Iterator[Declaration]:
    """V turned over, and what the elements of tiles are multiplied by."""
    yield declared(_tile("TurnedTile", "turned", columns * KEYS_ACROSS, stage, item=1))
    if ones:
        yield declared(_tile("OnesTile", "ones", 8 * KEYS_ACROSS, item=1))
    yield declared(_words("float", "q_descale", *of_q))
    yield declared(*(_words("float", f"{name}_descale", stage) for name in ("k", "turned")))
    yield declared(_words("float", "v_descale", v_stage))
    yield declared(_words("int", "v_keys", v_stage), note="of a tile of V; 0: none is left")


def _step_members(stage: Axis, following: Member | None) -> Iterator[Declaration]:
    """The tiles of keys that are loaded, and the ring of those to load next, if another warp says which."""
    if following is None:
        yield declared(_steps("step", stage), note="what k holds")
        return
    yield declared(_steps("next", _TWO), _steps("step", stage), note="what to load next, what k holds")
    yield declared(following)


def _tile(ctype: str, name: str, elements: int, *axes: Axis, item: int = ITEM) -> Member:
    return Member(ctype=ctype, name=name, size=item * elements, alignment=ALIGNMENT, axes=axes)


def _folded(columns: int, each: Axis) -> Member:
    """Four elements of each thread of a warpgroup side by side, then the next four of each."""
    axes = each, Axis(size=columns // 8, text=f"{columns // 8}"), Axis(size=128, text="128")
    return Member(ctype="float4", name="folded", size=16, alignment=ALIGNMENT, axes=axes)


def _steps(name: str, *axes: Axis, ctype: str = "Step") -> Member:
    return Member(ctype=ctype, name=name, size=16, alignment=16, axes=axes)


def _words(ctype: str, name: str, *axes: Axis) -> Member:
    return Member(ctype=ctype, name=name, size=4, alignment=4, axes=axes)


def _idle(warps: int, registers: int | None) -> Role:
    return Role(name=IDLE, warps=warps, threads=0, registers=registers)


def _start(roles: Sequence[Role]) -> NamedBarrier:
    names = tuple(dict.fromkeys(role.name for role in roles if role.warps))
    return _meet("start", 0, sum(role.warps for role in roles), names, "barriers are initialised")


def _meet(name: str, number: int, warps: int, roles: tuple[str, ...], why: str) -> NamedBarrier:
    return NamedBarrier(name=name, id=number, warps=warps, roles=roles, why=why)


def _chains(roles: Sequence[Role], *chains: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The chains of those roles that there are."""
    names = {role.name for role in roles}
    found = (tuple(name for name in chain if name in names) for chain in chains)
    return tuple(chain for chain in found if chain)
