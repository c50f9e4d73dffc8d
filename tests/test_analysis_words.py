"""A mask in words says of each pair what the mask says: random masks, evaluated by their words and by themselves."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.analysis.linear import K
from flashgen.analysis.words import Of, in_words
from flashgen.lang.build import apply
from flashgen.lang.evaluate import evaluate

LENGTH = 24
FLAG = fg.tensor("flag", dims=("q",), dtype="bool")
AT = fg.tensor("at", dims=("kv",), dtype="int32", min=0, max=20)

_NUMBERS = st.integers(-30, 30)
_COMPARISONS = ("__le__", "__lt__", "__ge__", "__gt__", "__eq__", "__ne__")


def _compared(make):
    return st.builds(lambda op, n: lambda q, k: getattr(make(q, k, n), op)(n), st.sampled_from(_COMPARISONS), _NUMBERS)


_LEAVES = st.one_of(
    _compared(lambda q, k, n: q - k),
    _compared(lambda q, k, n: k - q),
    _compared(lambda q, k, n: fg.abs(q - k)),
    _compared(lambda q, k, n: k - 2 * q + fg.maximum(q, 3)),
    _compared(lambda q, k, n: k + 0 * q),
    _compared(lambda q, k, n: 3 * q),
    st.just(lambda q, k: FLAG[q]),
    st.just(lambda q, k: FLAG[k]),
    st.just(lambda q, k: AT[k] == 4),
    st.builds(lambda n: lambda q, k: (AT[k] < n) & (k % 3 == 1), _NUMBERS),
    st.builds(lambda n: lambda q, k: k <= AT[q] + n, _NUMBERS),
)


def _combined(parts):
    both = st.tuples(parts, parts)
    return st.one_of(
        both.map(lambda x: lambda q, k: x[0](q, k) & x[1](q, k)),
        both.map(lambda x: lambda q, k: x[0](q, k) | x[1](q, k)),
        both.map(lambda x: lambda q, k: x[0](q, k) ^ x[1](q, k)),
        parts.map(lambda x: lambda q, k: ~x(q, k)),
    )


MASKS = st.recursive(_LEAVES, _combined, max_leaves=6)


def bits(word, value, places):
    """The word of each place, as booleans."""
    if word.words:
        parts = [bits(part, value, places) for part in word.words]
        return {
            Of.BOTH: lambda: parts[0] & parts[1],
            Of.EITHER: lambda: parts[0] | parts[1],
            Of.ONE: lambda: parts[0] ^ parts[1],
            Of.NOT: lambda: ~parts[0],
        }[word.of]()
    if word.of in (Of.FROM, Of.BELOW):
        first = value(apply("sub", word.node, K), k=0)
        return (places >= first) ^ (word.of is Of.BELOW)
    return value(word.node, k=places)


@settings(deadline=None, max_examples=200)
@given(mask=MASKS, seed=st.integers(0, 1 << 16))
def test_words_say_what_the_mask_says(mask, seed):
    @fg.variant()
    def drawn(b, h, q, k):
        return mask(q, k) | FLAG[k]

    word = in_words(drawn)
    assume(word is not None)
    generator = np.random.default_rng(seed)
    tensors = {"flag": generator.random(LENGTH) < 0.3, "at": generator.integers(0, 21, LENGTH)}
    rows, places = np.arange(LENGTH)[:, None], np.arange(LENGTH)

    def value(n, k):
        where = {"b": 0, "h": 0, "q": rows, "k": k}
        return evaluate(n, **where, sizes={"q": LENGTH, "kv": LENGTH}, params={}, tensors=tensors)

    wanted = value(drawn.mask, places)
    np.testing.assert_array_equal(np.broadcast_to(bits(word, value, places), wanted.shape), wanted)


@pytest.mark.parametrize("most, said", [(1 << 29, True), ((1 << 31) - 1, False)])
def test_only_what_fits_32_bits_bounds_a_key(most, said):
    ends = fg.tensor("ends", dims=("q",), dtype="int32", min=0, max=most)

    @fg.variant()
    def until(b, h, q, k):
        return (k < ends[q]) & FLAG[k]

    assert (in_words(until) is not None) == said
