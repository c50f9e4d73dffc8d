"""Integers at the ends of their types: no tile of a mask is EMPTY or FULL that is not, in Python and in a kernel."""

import numpy as np
import pytest
from random_masks import seeded
from test_codegen_variant_code import check_sound

import flashgen as fg
from flashgen.analysis.facts import analyse
from flashgen.analysis.tiles import Case
from flashgen.errors import SpecError
from flashgen.planning.plan import Tile

LOW32, HIGH32, LOW64, HIGH64 = -(1 << 31), (1 << 31) - 1, -(1 << 63), (1 << 63) - 1

P = fg.param("P", dtype="int64")
R = fg.param("R", dtype="int64", min=-(1 << 40), max=1 << 40)
W = fg.param("W", dtype="int32")
ends = fg.tensor("ends", dims=("batch",), dtype="int64")
starts = fg.tensor("starts", dims=("batch",), dtype="int64", min=0)
documents = fg.tensor("documents", dims=("batch", "kv"), dtype="int64", sorted=True)
marks = fg.tensor("marks", dims=("kv",), dtype="int64")
narrow = fg.tensor("narrow", dims=("kv",), dtype="int32")
shifts = fg.tensor("shifts", dims=("batch",), dtype="int32")

NAMED = {
    "a parameter": lambda b, h, q, k: k - 5 < P,
    "a parameter beside q": lambda b, h, q, k: (q - k < P) & (k <= q),
    "a parameter from below": lambda b, h, q, k: k + 7 >= P,
    "a parameter plus a constant": lambda b, h, q, k: k < P + 5,
    "a parameter that cancels": lambda b, h, q, k: (k + P) - P <= q,
    "a sum that wraps": lambda b, h, q, k: (P + 5 > P) & (k <= q),
    "a local sum that wraps": lambda b, h, q, k: k + P >= P,
    "an offset": lambda b, h, q, k: k <= q + ends[b],
    "a negative": lambda b, h, q, k: k >= -P,
    "an absolute value": lambda b, h, q, k: abs(P) > k,
    "an absolute value of a sum": lambda b, h, q, k: abs(ends[b] - k) > 4,
    "a multiple": lambda b, h, q, k: 3 * k <= 2 * P + 5,
    "twice k": lambda b, h, q, k: 2 * k + 1 < ends[b],
    "a quotient": lambda b, h, q, k: k // 3 <= P,
    "a quotient of it": lambda b, h, q, k: k - q < P // 3,
    "by -1": lambda b, h, q, k: k < P // -1,
    "by a parameter": lambda b, h, q, k: q // fg.maximum(W, 1) <= P,
    "a shift": lambda b, h, q, k: k < (P << 3),
    "a cast": lambda b, h, q, k: fg.int32(P) > k,
    "a smaller one": lambda b, h, q, k: k < fg.minimum(ends[b], q + 1),
    "one of two": lambda b, h, q, k: fg.where(k < 9, ends[b], P) + k > 3,
    "both ends": lambda b, h, q, k: (k >= starts[b]) & (k < ends[b]),
    "equal": lambda b, h, q, k: k + 1 == ends[b],
    "unequal": lambda b, h, q, k: q - k != ends[b],
    "two of 64 bits": lambda b, h, q, k: k - ends[b] < P,
    "a window of another width": lambda b, h, q, k: q - k - W < P,
    "a bounded one beside it": lambda b, h, q, k: k < R + ends[b],
    "a bounded one apart": lambda b, h, q, k: k - R < ends[b],
    "documents": lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (k <= q),
    "older documents": lambda b, h, q, k: documents[b, k] + 3 < documents[b, q],
    "marks": lambda b, h, q, k: marks[k] - marks[q] <= P,
    "a window of 32 bits": lambda b, h, q, k: (q - k < W) & (k <= q),
    "from below": lambda b, h, q, k: k - q > W,
    "32 bits plus a constant": lambda b, h, q, k: k <= W + 7,
    "32 bits on both sides": lambda b, h, q, k: k - W < shifts[b],
    "a negative of 32 bits": lambda b, h, q, k: q - k >= -W,
    "a product of 32 bits": lambda b, h, q, k: W * shifts[b] * W > k - q,
    "marks of 32 bits": lambda b, h, q, k: narrow[k] - narrow[q] > W,
    "an absolute value of 32 bits": lambda b, h, q, k: abs(narrow[k]) + q > -W,
}


def random_case(rng: np.random.Generator, variant: fg.Variant, turn: int) -> Case:
    """A small problem whose parameters and captured elements stand at the ends of their types, or are small; the
    parameters take turns."""

    def some(low, high, *shape):
        near = rng.integers(0, 7, shape)
        kinds = np.stack([low + near, high - near, near, -near, (low // 2) + near - 6, (high // 2) - near + 6])
        return np.choose(rng.integers(0, len(kinds), shape) if shape else turn % len(kinds), kinds)

    sizes = {"batch": 2, "heads": 1, "kv_heads": 1, "q_len": 14, "kv_len": 22}
    params = {"P": some(LOW64, HIGH64), "W": some(LOW32, HIGH32), "R": rng.integers(-(1 << 40), 1 << 40)}
    tensors = {
        "ends": some(LOW64, HIGH64, 2),
        "starts": some(0, HIGH64, 2).clip(0),
        "documents": np.sort(some(LOW64, HIGH64, 2, 22), axis=1),
        "marks": some(LOW64, HIGH64, 22),
        "narrow": some(LOW32, HIGH32, 22).astype(np.int32),
        "shifts": some(LOW32, HIGH32, 2).astype(np.int32),
    }
    return Case(
        sizes=sizes,
        params={p.name: int(params[p.name]) for p in variant.params},
        tensors={t.name: tensors[t.name] for t in variant.tensors},
    )


@pytest.mark.sampled(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_leaves_at_the_ends_of_their_types(name):
    variant, rng = fg.variant(NAMED[name]), np.random.default_rng(5)
    cases = [random_case(rng, variant, turn) for turn in range(6)]
    check_sound(variant, cases, Tile(q=4, kv=5), launched=3)


def _integer(source, depth):
    if depth == 0 or source.integer(0, 3) == 0:
        number = source.pick([0, 1, 5, -3, 1 << 20, HIGH32])
        return source.pick(
            [
                lambda b, h, q, k: q,
                lambda b, h, q, k: k,
                lambda b, h, q, k: k + number,
                lambda b, h, q, k: P,
                lambda b, h, q, k: R,
                lambda b, h, q, k: W,
                lambda b, h, q, k: ends[b],
                lambda b, h, q, k: documents[b, k],
                lambda b, h, q, k: marks[q],
                lambda b, h, q, k: narrow[k],
                lambda b, h, q, k: shifts[b],
            ]
        )
    left, right = _integer(source, depth - 1), _integer(source, depth - 1)
    number = source.pick([-1, 2, 3, -4, 1 << 20])
    joined = source.pick(
        [
            lambda m, n: m + n,
            lambda m, n: m - n,
            lambda m, n: m - n,
            lambda m, n: -m,
            lambda m, n: m * number,
            lambda m, n: m // number,
            lambda m, n: m % number,
            lambda m, n: abs(m),
            lambda m, n: fg.minimum(m, n),
            lambda m, n: fg.maximum(m, n),
            lambda m, n: fg.where(m < n, m, n + 1),
            lambda m, n: m >> 2,
            lambda m, n: m << 2,
            lambda m, n: m ^ n,
            lambda m, n: fg.int32(m),
        ]
    )
    return lambda b, h, q, k: joined(left(b, h, q, k), right(b, h, q, k))


def _mask(source):
    pairs = [(_integer(source, 2), _integer(source, 2)) for _ in range(2)]
    compared = [
        source.pick(
            [
                lambda m, n: m < n,
                lambda m, n: m <= n,
                lambda m, n: m > n,
                lambda m, n: m == n,
                lambda m, n: m != n,
            ]
        )
        for _ in pairs
    ]
    joined = source.pick([lambda m, n: m & n, lambda m, n: m | n, lambda m, n: m])

    def mask(b, h, q, k):
        conditions = [c(m(b, h, q, k), n(b, h, q, k)) for c, (m, n) in zip(compared, pairs, strict=True)]
        return joined(*conditions)

    return mask


@pytest.mark.sampled("14", "16", "18", "20", "24", "26", "28")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_masks_at_the_ends_of_their_types(seed):
    try:
        variant = fg.variant(_mask(seeded(seed)), name="extremes")
    except SpecError:
        pytest.skip("the language refuses what was drawn")
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, variant, turn) for turn in range(6)]
    check_sound(variant, cases, Tile(q=4, kv=5), launched=2 if seed < 15 else 0)


def test_ordinary_masks_of_64_bits_keep_their_runs():
    """Bounds of a zone, and so no tile that is only looked at."""
    for mask in (
        lambda b, h, q, k: k < ends[b],
        lambda b, h, q, k: (k >= ends[b]) & (k <= q),
        lambda b, h, q, k: k < ends[b] + 5,
        lambda b, h, q, k: q - k < P,
        lambda b, h, q, k: k < fg.minimum(ends[b], q + 1),
        lambda b, h, q, k: k - W <= ends[b],
    ):
        assert analyse(fg.variant(mask)).exact
    packed = analyse(fg.variant(lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (k <= q)))
    assert packed.visible[0].zone.d_lo
