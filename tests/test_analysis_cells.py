"""Cells of masks, captured elements that a tile meets few of, and what equalities say."""

import numpy as np
import pytest
from random_masks import seeded

import flashgen as fg
from flashgen.analysis import cells, tiles
from flashgen.analysis.cells import Cells
from flashgen.analysis.equalities import substituted
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import walk
from flashgen.planning.plan import Tile

block = fg.param("block", default=64, min=1)
table = fg.tensor("table", dims=(None, None), dtype="bool")
ids = fg.tensor("ids", dims=(None,), dtype="int32")
kind = fg.tensor("kind", dims=(None,), dtype="int32", min=0, max=1)
doc = fg.tensor("doc", dims=("kv",), dtype="int32", sorted=True)
weights = fg.tensor("weights", dims=(None, None), dtype="float32")


@pytest.mark.parametrize(
    "mask, found",
    [
        (lambda b, h, q, k: table[q // 128, k // 64], Cells(q=128, k=64)),
        (lambda b, h, q, k: table[q // 8, k // 4], Cells(q=32, k=32)),
        (lambda b, h, q, k: table[(q + 32) // 64, (k + 3) // 64], Cells(q=32, k=None)),
        (lambda b, h, q, k: table[(q + 64) // 64, k >> 6], Cells(q=64, k=64)),
        (lambda b, h, q, k: q // 64 // 8 == k // 64 // 8, Cells(q=64, k=64)),
        (lambda b, h, q, k: q % 96 // 32 == k % 64 // 32, Cells(q=32, k=32)),
        (lambda b, h, q, k: q % 48 // 32 == k % 56 // 7, Cells(q=48, k=56)),
        (lambda b, h, q, k: q // 1560 == k % 1560 // 60, Cells(q=1560, k=60)),
        (lambda b, h, q, k: (q & 3) == (k & 3), Cells(q=32, k=32)),
        (lambda b, h, q, k: (q // 64 ^ k // 64) < 2, Cells(q=64, k=64)),
        (lambda b, h, q, k: q // 3 <= k // 3 + q // (1 << 30), Cells(q=1 << 30, k=33)),
        (lambda b, h, q, k: ids[k // 64] <= q, Cells(q=None, k=64)),
        (lambda b, h, q, k: (q - k) % 128 == 0, None),
        (lambda b, h, q, k: q // block == k // block, None),
        (lambda b, h, q, k: ids[q] == ids[k], None),
        (lambda b, h, q, k: k <= q, None),
    ],
)
def test_cells(mask, found):
    assert analyse(fg.variant(mask)).cells == found


def test_only_what_is_cut_is_judged_by_parts():
    found = Cells(q=128, k=192)
    assert found.within(128, 64) is None and found.within(64, 96) is None
    assert Cells(q=128, k=1 << 31).within(96, 96) == Cells(q=128, k=None)
    assert found.within(192, 64) == Cells(q=128, k=None) and found.within(128, 128) == Cells(q=None, k=192)


@pytest.mark.slow
def test_a_value_has_one_cell_where_it_is_said_to():
    """Every int below a mask of quotients and remainders, against its values."""
    q, source = np.arange(4096), seeded(3)
    for _ in range(300):
        x = lambda q: q  # noqa: E731
        for _ in range(source.integer(1, 4)):
            n, op = (
                source.pick([1, 2, 3, 7, 8, 16, 32, 48, 64]),
                source.pick(["//", "%", "+", "-", "&", "|", ">>", "*"]),
            )
            x = {
                "//": lambda q, x=x, n=n: x(q) // n,
                "%": lambda q, x=x, n=n: x(q) % n,
                "+": lambda q, x=x, n=n: x(q) + n,
                "-": lambda q, x=x, n=n: x(q) - n,
                "&": lambda q, x=x, n=n: x(q) & n,
                "|": lambda q, x=x, n=n: x(q) | n,
                ">>": lambda q, x=x, n=n: x(q) >> n % 5,
                "*": lambda q, x=x, n=n: x(q) * n + x(q) // 2,
            }[op]
        variant = fg.variant(lambda b, h, q, k, x=x: x(q) == k)
        for n in walk([variant.mask]):
            if n.op == "index" or not n.dtype.is_int:
                continue
            values = np.broadcast_to(evaluate(n, q=q, k=0, b=0, h=0, sizes={}, params={}, tensors={}), q.shape)
            for span in (2, 3, 8, 16, 32, 48, 64, 96, 128):
                if cells.single(n, {"q": span, "k": 1}):
                    whole = values[: len(q) // span * span].reshape(-1, span)
                    assert (whole == whole[:, :1]).all(), (n, span)


@pytest.mark.parametrize(
    "mask, wanted",
    [
        (lambda b, h, q, k: table[q // block, k // block], True),
        (lambda b, h, q, k: table[q // 64, k // 64], True),
        (lambda b, h, q, k: table[kind[q], kind[k]], True),
        (lambda b, h, q, k: ids[doc[k]] < q, True),
        (lambda b, h, q, k: weights[q // 64, doc[k]] < 0.5, True),
        (lambda b, h, q, k: table[q // 64, k], False),
        (lambda b, h, q, k: table[q // 2, k // 64], False),
        (lambda b, h, q, k: table[ids[q], 0], False),
        (lambda b, h, q, k: doc[q] == doc[k], False),
        (lambda b, h, q, k: ids[b] == k, False),
    ],
)
def test_which_elements_are_looked_for_at_the_ends_of_their_indices(mask, wanted):
    outermost = [n for n in walk([fg.variant(mask).mask]) if n.op == "load"][-1]
    assert cells.cornered(outermost) == wanted


def test_an_element_of_two_is_one_of_them():
    facts = analyse(fg.variant(lambda b, h, q, k: weights[q // block, k // block] < 0.5))
    values = np.full((8, 8), 0.75, np.float32)
    values[:4, :4] = 0.25
    values[7, 7] = np.nan
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 512, "kv_len": 512}
    case = Case(sizes=sizes, params={"block": 64}, tensors={"weights": values})
    found = tiles.grid(facts, case, Tile(q=128, kv=128))
    assert found.tolist() == [[2, 2, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]  # a NaN may be anything
    three = {"b": 0, "h": 0, "q0": 0, "q1": 191, "k0": 0, "k1": 63}
    assert tiles.classify(facts, case, **three) == tiles.PARTIAL


def test_equalities_are_put_in_where_a_condition_speaks_of_both_sides():
    start = fg.tensor("start", dims=(None,), dtype="int32")
    causal = fg.variant(lambda b, h, q, k: (doc[q] == doc[k]) & (k <= q))

    def offsets(b, h, q, k):
        return (doc[q] == doc[k]) & (q - start[doc[q]] >= k - start[doc[k]])

    (term,) = analyse(fg.variant(offsets)).visible
    assert (term,) == analyse(causal).visible
    either = fg.variant(lambda b, h, q, k: (k < 4) | offsets(b, h, q, k))
    assert len(analyse(either).visible) == 2
    for alone in (
        lambda b, h, q, k: (doc[q] == doc[k]) & (doc[k] > 3),
        lambda b, h, q, k: (doc[q] == doc[k]) | (q - start[doc[q]] >= k - start[doc[k]]),
        lambda b, h, q, k: (doc[q] != doc[k]) & (q - start[doc[q]] >= k - start[doc[k]]),
    ):
        mask = fg.variant(alone).mask
        assert substituted(mask) is mask
