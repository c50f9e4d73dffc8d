"""A wrong number of the host traps in the interpreter, is refused, or shows in the result.

What is changed here is the value that the driver executes as well, so these are mutations of what a GPU is given.  Two
kinds of numbers are not here: the blocks of a forward that hands out tiles, any number of which is right, and those
that order blocks by what L2 holds, which decide speed alone.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
from ptx_attention import replace, work
from ptx_backward import Backward

from flashgen.interpreter import errors
from flashgen.lang.load import load_spec
from flashgen.planning.traffic import predict

RESULT, TRAFFIC = "a wrong result", "more or fewer keys read than predicted"


def number(name, value):
    """Another value of a field of Params; `value` of the one that it has."""

    def change(launch):
        return launch._replace(values={**launch.values, name: value(launch.values[name])})

    return change


def tensor_map(tensor, **changes):
    """Another tensor map; each change is a function of what it has."""

    def change(launch):
        (desc,) = (d for d in launch.maps if d.tensor == tensor)
        changed = desc._replace(**{name: value(getattr(desc, name)) for name, value in changes.items()})
        assert changed != desc
        return launch._replace(maps=tuple(changed if d is desc else d for d in launch.maps))

    return change


def grid(entry, **changes):
    """Another grid or block of the kernel whose name ends so."""

    def change(launch):
        (found,) = (g for g in launch.grids if g.entry == f"attention_{entry}")
        changed = found._replace(**{name: value(getattr(found, name)) for name, value in changes.items()})
        return launch._replace(grids=tuple(changed if g is found else g for g in launch.grids))

    return change


def room(name, amount):
    """Other bytes of a workspace, or of what is cleared."""

    def change(launch):
        def changed(parts):
            return tuple(dataclasses.replace(p, amount=amount(p.amount)) if p.name == name else p for p in parts)

        assert any(p.name == name for p in (*launch.workspaces, *launch.cleared))
        return launch._replace(workspaces=changed(launch.workspaces), cleared=changed(launch.cleared))

    return change


def at(index, value):
    """Another element of a tuple."""
    return lambda old: (*old[:index], value(old[index]), *old[index + 1 :])


def first_two_exchanged(old):
    return (old[1], old[0], *old[2:])


def less(n):
    return n - 1


def more(n):
    return n + 1


def half(n):
    return n // 2


def twice(n):
    return n * 2


def without(entry):
    """Without the kernel of this name."""

    def change(launch):
        left = tuple(g for g in launch.grids if g.entry != f"attention_{entry}")
        assert len(left) == len(launch.grids) - 1
        return launch._replace(grids=left)

    return change


def last_two_exchanged(launch):
    *before, first, second = launch.grids
    return launch._replace(grids=(*before, second, first))


AMPERE = {
    "a tile of queries too few": (number("q_tiles", less), {errors.OutOfBounds}),
    "a tile of queries too many": (number("q_tiles", more), {RESULT}),
    "a block too few": (grid("forward", blocks=less), {RESULT}),
    "a block too many": (grid("forward", blocks=more), {errors.OutOfBounds}),
    "a warp too few": (grid("forward", threads=lambda n: n - 32), {errors.Uninitialised}),
    "a warp too many": (grid("forward", threads=lambda n: n + 32), {errors.BadLaunch}),
    "half of shared memory": (grid("forward", smem_bytes=half), {errors.OutOfBounds}),
    "a key too many": (number("kv_len", more), {errors.OutOfBounds}),
    "a key too few": (number("kv_len", less), {RESULT}),
    "another scale": (number("scale", twice), {RESULT}),
    "the batch stride of v": (number("v_batch", less), {errors.Misaligned}),
    "the head stride of k": (number("k_head", half), {RESULT}),
    "the row stride of q": (number("q_row", twice), {errors.OutOfBounds}),
    "the row stride of o": (number("o_row", half), {errors.Race}),
    "the head stride of o": (number("o_head", half), {errors.Race}),
    "the stride of a captured tensor": (number("stride1_doc", twice), {errors.OutOfBounds}),
    "the size of a captured tensor": (number("size1_table", half), {RESULT}),
}

HOPPER = {
    "a tile of queries too few": (number("q_tiles", less), {TRAFFIC, RESULT}),
    "a tile of queries too many": (number("q_tiles", more), {TRAFFIC}),
    "no block": (grid("forward", blocks=lambda n: 0), {errors.BadLaunch}),
    "a warp too few": (grid("forward", threads=lambda n: n - 32), {errors.Deadlock}),
    "half of shared memory": (grid("forward", smem_bytes=half), {errors.OutOfBounds}),
    "half of the heads in a pack": (number("pack_log2", less), {errors.Race}),
    "twice the heads in a pack": (number("pack_log2", more), {errors.OutOfBounds}),
    "a pack too few": (number("packs", less), {TRAFFIC, RESULT}),
    "a pack too many": (number("packs", more), {errors.OutOfBounds}),
    "no head in L2": (number("l2_heads", lambda n: 0), {TRAFFIC, RESULT}),
    "half of the rows in a box of k": (tensor_map("k", box=at(1, half)), {errors.Deadlock}),
    "twice the rows in a box of v": (tensor_map("v", box=at(1, twice)), {errors.OutOfBounds}),
    "half of the columns in a box of q": (tensor_map("q", box=at(0, half)), {errors.Deadlock}),
    "a box of q of half of the heads": (tensor_map("q", box=at(1, half)), {errors.Deadlock}),
    "a box of o of twice the heads": (tensor_map("o", box=at(1, twice)), {errors.Race}),
    "the row stride of k": (tensor_map("k", strides=at(0, half)), {RESULT}),
    "the head stride of v": (tensor_map("v", strides=at(1, half)), {RESULT}),
    "heads of q and queries changed places": (tensor_map("q", strides=first_two_exchanged), {errors.OutOfBounds}),
    "the stride of o over queries": (tensor_map("o", strides=at(1, twice)), {errors.OutOfBounds}),
    "rows of k beyond the last": (tensor_map("k", sizes=at(1, more)), {errors.OutOfBounds}),
    "the last row of v left out": (tensor_map("v", sizes=at(1, less)), {RESULT}),
    "columns of q left out": (tensor_map("q", sizes=at(0, half)), {RESULT}),
    "a query of o left out": (tensor_map("o", sizes=at(2, less)), {RESULT}),
    "a swizzle of 64 bytes": (tensor_map("k", swizzle=half), {errors.BadLaunch}),
    "one counter": (room("counters", half), {errors.OutOfBounds}),
}

AMPERE_BACKWARD = {
    "a tile of queries too few": (number("q_tiles", less), {errors.OutOfBounds}),
    "a tile of queries too many": (number("q_tiles", more), {errors.OutOfBounds}),
    "a block of rows too few to prepare": (grid("backward_prepare", blocks=less), {RESULT}),
    "a block of keys too few": (grid("backward", blocks=less), {RESULT}),
    "a block of keys too many": (grid("backward", blocks=more), {errors.OutOfBounds}),
    "a block of rows too few to finish": (grid("backward_finish", blocks=less), {RESULT}),
    "half of shared memory": (grid("backward", smem_bytes=half), {errors.OutOfBounds}),
    "nothing cleared": (without("backward_clear"), {RESULT}),
    "nothing prepared": (without("backward_prepare"), {RESULT}),
    "finished too early": (last_two_exchanged, {RESULT}),
    "room for lse": (room("lse_log2", half), {errors.OutOfBounds}),
    "room for delta": (room("delta", half), {errors.OutOfBounds}),
    "room for dq": (room("dq_sum", half), {errors.OutOfBounds}),
    "the row stride of do": (number("d_o_row", half), {RESULT}),
    "the head stride of dq": (number("dq_head", half), {errors.Race}),
    "the row stride of dk": (number("dk_row", twice), {errors.OutOfBounds}),
}

DETERMINISTIC = {
    "a block of queries too few": (grid("backward_dq", blocks=less), {RESULT}),
    "kernels in another order": (lambda x: x._replace(grids=x.grids[::-1]), {RESULT}),
    "sums of a captured tensor not rounded": (without("backward_gradients"), {RESULT}),
    "room for exact sums": (room("exact_table", half), {errors.OutOfBounds}),
}

HOPPER_BACKWARD = {
    "a tile of queries too few": (number("q_tiles", less), {errors.OutOfBounds}),
    "a tile of keys too few": (number("kv_tiles", less), {errors.OutOfBounds}),
    "a tile of keys too many": (number("kv_tiles", more), {RESULT}),
    "heads cleared by nobody": (number("clear_distance", less), {errors.Deadlock}),
    "no head in L2": (number("l2_heads", lambda n: 0), {errors.OutOfBounds}),
    "a block of keys too few": (grid("backward", blocks=less), {RESULT}),
    "a block of keys too many": (grid("backward", blocks=more), {errors.OutOfBounds}),
    "half of the rows in a box of k": (tensor_map("k", box=at(1, half)), {errors.Deadlock}),
    "twice the rows in a box of do": (tensor_map("d_o", box=at(1, twice)), {errors.NotComplete}),
    "the row stride of do": (tensor_map("d_o", strides=at(0, half)), {RESULT}),
    "the head stride of v": (tensor_map("v", strides=at(1, half)), {RESULT}),
    "the last row of q left out": (tensor_map("q", sizes=at(1, less)), {RESULT}),
    "room for counters of heads": (room("progress", lambda n: n - 4), {errors.OutOfBounds}),
    "room for dq": (room("dq_sum", half), {errors.OutOfBounds}),
}

MUTATIONS = {
    "ampere": AMPERE,
    "hopper": HOPPER,
    "ampere backward": AMPERE_BACKWARD,
    "ampere deterministic": DETERMINISTIC,
    "hopper backward": HOPPER_BACKWARD,
}


@lru_cache
def subject(name):
    if name == "ampere":
        variant = load_spec("document") & load_spec("relative_bias")
        return work(variant, name, batch=2, kv_heads=2, q_len=70, kv_len=75)
    if name == "hopper":
        shape = {"heads": 8, "kv_heads": 2, "q_len": 40, "kv_len": 70}
        return work("causal_bottom_right", name, packed=True, q_stages=2, **shape)
    if name == "hopper backward":
        return Backward("causal", pipeline="hopper", head_dim=80, heads=4, kv_heads=4, q_len=70, kv_len=140)
    return Backward("relative_bias", deterministic="deterministic" in name, head_dim=32, q_len=70, kv_len=75)


def noticed(name, change):
    """What notices a change of the launch: the class of a trap or a refusal, or what is off."""
    w = subject(name)
    try:
        result = w.run(change=change, step_limit=300_000)
    except errors.PtxError as error:
        return {type(error)}
    found = {RESULT} if w.wrong(result) else set()
    if name == "hopper":
        columns = predict(w.plan, w.problem, w.case).tiles.visited_columns
        found |= {TRAFFIC} if result.report.bytes(buffer="k") != columns * w.problem.head_dim * 2 else set()
    return found


@pytest.mark.sampled(every=7)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mutation"), [(name, m) for name, found in MUTATIONS.items() for m in found])
def test_a_wrong_number_is_noticed(name, mutation):
    change, expected = MUTATIONS[name][mutation]
    assert noticed(name, change) == expected


@pytest.mark.slow
def test_counters_that_are_not_left_as_they_were_found():
    with pytest.raises(errors.NotCleared, match=r"counters is left as \[0, 2\]: the next launch needs zeros there"):
        subject("hopper").run(replace("p.counters[0] = p.counters[1] = 0;", "p.counters[0] = 0;"))


@pytest.mark.sampled("ampere", "hopper")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_launch_as_made_is_silent(name):
    assert noticed(name, None) == set()
