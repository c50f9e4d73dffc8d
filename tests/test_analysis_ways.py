"""How parts of a mask are decided, and the change that would settle more tiles."""

import numpy as np
import ported
import pytest

import flashgen as fg
from flashgen.analysis import counts, tiles, ways
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.planning.plan import Tile

TILE = Tile(q=64, kv=64)
LENGTH = 512


def cure(mask, **tensors):
    variant = fg.variant(mask).bind()
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": LENGTH, "kv_len": LENGTH}
    case = Case(sizes=sizes, params={}, tensors=tensors)
    facts = analyse(variant)
    loss = counts.loss(tiles.grid(facts, case, TILE), tiles.true_grid(facts, case, TILE))
    return loss, ways.cure(variant, case, TILE, loss)


def tensor(name, dtype="int32", **promises):
    return fg.tensor(name, dims=("kv",), dtype=dtype, **promises)


IN_ORDER = np.repeat(np.arange(8, dtype=np.int32), 64)
SHUFFLED = np.repeat(np.array([3, 0, 7, 1, 6, 2, 5, 4], np.int32), 64)
FLAGS = np.arange(LENGTH) % 100 < 3


@pytest.mark.parametrize(
    "promises, array, said",
    [
        (dict(), IN_ORDER, None),
        (dict(min=0, max=7), SHUFFLED, None),
        (
            dict(),
            np.repeat(np.array([3, 0, 7, 1, 8, 6, 2, 5, 4], np.int32), 57)[:LENGTH],
            "'x' has runs of equal values in no order: numbered upwards",
        ),
        (dict(sorted=True), IN_ORDER, None),
        (dict(), np.arange(LENGTH, dtype=np.int32) * 37 % 512, "no promise about 'x' would settle more tiles"),
    ],
)
def test_equal_ids(promises, array, said):
    x = tensor("x", **promises)
    loss, found = cure(lambda b, h, q, k: x[q] == x[k], x=array)
    assert loss.exact == (said is None)
    assert found is None if said is None else found.startswith(said)


def test_reach():
    reach = tensor("reach")
    loss, found = cure(lambda b, h, q, k: (k <= q) & (q - k <= reach[q]), reach=np.arange(LENGTH, dtype=np.int32) % 3)
    assert loss.exact and found is None


def test_flags():
    keep = tensor("keep", "bool")
    for mask in (lambda b, h, q, k: keep[k], lambda b, h, q, k: keep[k] | (abs(q - k) < 9)):
        loss, found = cure(mask, keep=np.arange(LENGTH) < 300)
        assert loss.exact and found is None
    pairs = fg.tensor("pairs", dims=(None, None), dtype="bool")
    one = np.arange(128 * 128).reshape(128, 128) == 1
    _, found = cure(lambda b, h, q, k: pairs[q % 128, k % 128], pairs=one)
    assert found == "no promise about 'pairs' would settle more tiles: only its elements tell"


@pytest.mark.parametrize("name", sorted(ported.FILES))
def test_a_promise_that_is_named_is_worth_it(name):
    """And nothing is named where nothing is lost."""
    variant, case = ported.variant(name), ported.case(name, 1024, q_len=1024, kv_len=1024)
    facts = analyse(variant)
    loss = counts.loss(tiles.grid(facts, case, TILE), tiles.true_grid(facts, case, TILE))
    found = ways.cure(variant, case, TILE, loss)
    if loss.exact:
        assert found is None
    elif found and "min=" in found:
        low, high = (int(found.partition(f"{end}=")[2].split(",")[0].split(")")[0]) for end in ("min", "max"))
        (one,) = (t for t in variant.tensors if repr(t.name) in found)
        promised = ways._with(variant, next(t for t in ways._promises(one, case) if (t.min, t.max) == (low, high)))
        after = counts.loss(tiles.grid(analyse(promised), case, TILE), tiles.true_grid(facts, case, TILE))
        assert after.visited + after.masked < loss.visited + loss.masked


def test_ways_of_parts():
    def told(mask):
        return [str(part) for part in ways.parts(fg.variant(mask).bind())]

    x, flag = tensor("x", sorted=True), tensor("flag", "bool")
    assert told(lambda b, h, q, k: (k <= q) & ((x[q] == x[k]) | flag[k]) & (q // 96 == k // 64)) == [
        "closed form: bounds of the keys that a tile of queries sees",
        "tile by tile, over ranges of values",
        "tile by tile, over ranges of values; those of 'flag' are found for each tile first, in the same call",
        "tile by tile, over ranges of values, by parts of 96 queries and 64 keys",
    ]
    assert ways.parts(fg.variant()) == ()


def test_a_promise_about_what_selects_an_element():
    rank, seen = tensor("rank", min=0), fg.tensor("seen", dims=(None, None), dtype="bool")
    data = {"rank": np.repeat(np.arange(9, dtype=np.int32), 57)[:LENGTH], "seen": np.eye(9, dtype=bool)}
    loss, found = cure(lambda b, h, q, k: seen[rank[q], rank[k]], **data)
    assert not loss.exact
    assert found == "fg.tensor('rank', ..., sorted=True) would settle more tiles: these data keep it"
