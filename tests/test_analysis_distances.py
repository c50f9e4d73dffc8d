"""What of a query and a key an expression sees, and which elements many pairs of a tile read."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_masks import drawn, integers, random_case, w

import flashgen as fg
from flashgen.analysis.distances import Distances, Seen, selection
from flashgen.lang.evaluate import evaluate
from flashgen.lang.expr import walk

flat = fg.tensor("flat", dims=(None,), dtype="float32")
bucket = fg.tensor("bucket", dims=(None,), dtype="int32")
by_head = fg.tensor("by_head", dims=("heads", None), dtype="float32")

ROOTS = {
    "nothing": (lambda b, h, q, k: b + h * w, Seen.NOTHING),
    "lengths": (lambda b, h, q, k: fg.q_len - fg.kv_len, Seen.NOTHING),
    "query": (lambda b, h, q, k: q // 2, Seen.QUERY),
    "key": (lambda b, h, q, k: bucket[k], Seen.KEY),
    "distance": (lambda b, h, q, k: q - k, Seen.DISTANCE),
    "from the end": (lambda b, h, q, k: k + fg.kv_len - 1 - q, Seen.DISTANCE),
    "three times": (lambda b, h, q, k: 3 * q + b - 3 * k, Seen.DISTANCE),
    "moved": (lambda b, h, q, k: (q + 5) - (k + w), Seen.DISTANCE),
    "clipped": (lambda b, h, q, k: fg.clamp(k - q, -8, 8), Seen.DISTANCE),
    "divided": (lambda b, h, q, k: (q - k) // 4 + (k - q) % 3, Seen.DISTANCE),
    "by a table": (lambda b, h, q, k: bucket[q - k + 64], Seen.DISTANCE),
    "chosen": (lambda b, h, q, k: fg.where(q < k, 2, fg.abs(q - k)), Seen.PAIR),
    "of a difference chosen": (lambda b, h, q, k: fg.where(q - k < 0, 2, fg.abs(q - k)), Seen.DISTANCE),
    "both": (lambda b, h, q, k: q * w + k, Seen.PAIR),
    "sum": (lambda b, h, q, k: q + k, Seen.PAIR),
    "unequal": (lambda b, h, q, k: 2 * q - k, Seen.PAIR),
    "blocks": (lambda b, h, q, k: q // 2 - k // 2, Seen.PAIR),
    "by two tables": (lambda b, h, q, k: bucket[q] - bucket[k], Seen.PAIR),
}


def index_of(function):
    """The node of an index by which a score reads."""
    score = fg.variant(score=lambda s, b, h, q, k: s + flat[function(b, h, q, k)]).score_node
    (load,) = (n for n in walk([score]) if n.op == "load" and n.attr.name == "flat")
    return load.operands[0]


def assert_seen(found, root, case, rows, columns):
    """What a value is said to see is all that it sees, over these queries and keys."""
    places = {"b": 0, "h": 0, "q": np.array(rows, int)[:, None], "k": np.array(columns, int)}
    value = evaluate(root, **places, sizes=case.sizes, params=case.params, tensors=case.tensors)
    value = np.broadcast_to(value, (len(rows), len(columns)))
    if found in (Seen.NOTHING, Seen.DISTANCE):
        offsets = range(1 - len(rows), len(columns))
        assert all(len(set(np.diagonal(value, offset).tolist())) == 1 for offset in offsets if value.size)
    if found in (Seen.NOTHING, Seen.QUERY):
        assert (value == value[:, :1]).all()
    if found in (Seen.NOTHING, Seen.KEY):
        assert (value == value[:1]).all()


@pytest.mark.parametrize("name", ROOTS)
def test_what_an_index_sees(name):
    function, seen = ROOTS[name]
    assert Distances().seen(index_of(function)) is seen


@given(st.data())
def test_what_sees_the_distance_alone_is_the_same_wherever_a_pair_lies(data):
    """The language's integers, drawn at random: those of one distance have one value."""
    source = drawn(data)
    try:
        root = index_of(integers(source, 3))
    except fg.errors.SpecError:
        assume(False)
    found = Distances().seen(root)
    case, _ = random_case(source)
    assert_seen(found, root, case, range(case.sizes["q_len"]), range(case.sizes["kv_len"]))


WITHIN = {
    "quotients": (lambda b, h, q, k: q // 64 - k // 32, 64, Seen.NOTHING),
    "an image's rows": (lambda b, h, q, k: q // 32 - k // 32, 32, Seen.NOTHING),
    "an image": (lambda b, h, q, k: (q // 48 - k // 48) * 95 + q % 48 - k % 48, 16, Seen.DISTANCE),
    "an image of 8": (lambda b, h, q, k: (q // 8 - k // 16) * 15 + q % 8 - k % 16, 8, Seen.DISTANCE),
    "a query, and a block of keys": (lambda b, h, q, k: q * 16 + k // 16, 64, Seen.QUERY),
    "a key, and a block of queries": (lambda b, h, q, k: (q + 32) // 32 * 256 + k, 32, Seen.KEY),
    "an image of 12": (lambda b, h, q, k: q // 12 - k // 12, 0, Seen.PAIR),
    "keys of 8": (lambda b, h, q, k: q // 64 - k // 8, 64, Seen.KEY),
    "both": (lambda b, h, q, k: q % 64 * 64 + k % 64, 0, Seen.PAIR),
    "the distance anywhere": (lambda b, h, q, k: q - k, 0, Seen.DISTANCE),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_an_index_sees_in_blocks(name):
    function, queries, seen = WITHIN[name]
    load = fg.variant(score=lambda s, b, h, q, k: s + flat[function(b, h, q, k)]).score_node.operands[1]
    found = selection(load, aligned=True)
    assert (found.queries, found.seen) == (queries, seen)
    anywhere = selection(load, aligned=False)
    assert anywhere.queries == 0 and (anywhere.seen is Seen.PAIR) == (queries > 0 or seen is Seen.PAIR)


def test_what_the_score_selects_is_seen_by_pairs():
    variant = fg.variant(score=lambda s, b, h, q, k: s + by_head[h, fg.int32(fg.clamp(s + 4, 0, 7)) + q // 64])
    load = variant.score_node.operands[1]
    found = selection(load, aligned=True)
    assert (found.queries, found.seen) == (0, Seen.PAIR)


@given(st.data())
def test_what_is_seen_in_blocks_holds_in_each(data):
    source = drawn(data)
    queries, keys = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.sampled_from([2, 4, 8]))
    try:
        root = index_of(integers(source, 3))
    except fg.errors.SpecError:
        assume(False)
    found = Distances(queries, keys).seen(root)
    case, _ = random_case(source)
    for q_first, k_first in [(0, 0), (queries, 0), (2 * queries, keys), (0, 3 * keys)]:
        rows = range(q_first, min(q_first + queries, case.sizes["q_len"]))
        columns = range(k_first, min(k_first + keys, case.sizes["kv_len"]))
        assert_seen(found, root, case, rows, columns)


@pytest.mark.parametrize(
    ("read", "gathers"),
    [
        (lambda h, q, k: by_head[h, 0], True),
        (lambda h, q, k: by_head[h, fg.clamp(q - k, -8, 8) + 8], True),
        (lambda h, q, k: by_head[h, bucket[q - k + 64]], True),
        (lambda h, q, k: by_head[h, (q - k + 64) // 16], True),
        (lambda h, q, k: by_head[h, fg.where(abs(q - k) < 8, q - k + 8, 17)], True),
        (lambda h, q, k: by_head[h, q - k + 64], False),
        (lambda h, q, k: by_head[h, 2 * k + 99 - 2 * q], False),
        (lambda h, q, k: by_head[h, fg.where(q - k < 0, fg.minimum(q - k, -1) + by_head.size(1), q - k)], False),
        (lambda h, q, k: by_head[h, q], False),
        (lambda h, q, k: by_head[h, q * 2 + k], False),
    ],
)
def test_an_element_that_many_pairs_read_gathers(read, gathers):
    variant = fg.variant(score=lambda s, b, h, q, k: s + read(h, q, k))
    (load,) = (n for n in walk([variant.score_node]) if n.op == "load" and n.attr.name == "by_head")
    assert Distances().gathers(load) is gathers
