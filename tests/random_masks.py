"""Random masks and problems for property tests: `random_mask(seeded(7))` repeats one, `drawn(data)` lets hypothesis
choose, and so shrink.

The grammar has bands, prefixes, chunks, dilation, bit tricks, choices, parameters, and captured tensors that are
sorted, unsorted, bounded, boolean and 64 bits wide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import flashgen as fg
from flashgen.analysis.tiles import Case
from flashgen.errors import SpecError
from flashgen.planning.plan import Tile


@dataclass(frozen=True)
class Source:
    """Where random choices come from."""

    pick: Callable[[Sequence], object]
    integer: Callable[[int, int], int]


def seeded(seed: int) -> Source:
    rng = random.Random(seed)
    return Source(pick=rng.choice, integer=rng.randint)


def drawn(data) -> Source:
    from hypothesis import strategies as st

    return Source(
        pick=lambda options: data.draw(st.sampled_from(options)),
        integer=lambda low, high: data.draw(st.integers(low, high)),
    )


w = fg.param("w", default=4, min=1)
c = fg.param("c", default=4, min=1)
x = fg.param("x", default=0)
f = fg.param("f", default=2.5)
ids = fg.tensor("ids", dims=("batch", "kv"), dtype="int32", sorted=True)
mess = fg.tensor("mess", dims=("batch", None), dtype="int32")
layout = fg.tensor("layout", dims=(None, None), dtype="bool")
lengths = fg.tensor("lengths", dims=("batch",), dtype="int64")
reach = fg.tensor("reach", dims=(None,), dtype="int32", min=0, max=4)
tilt = fg.tensor("tilt", dims=("heads",), dtype="float32")
MOST = 24  # the longest length that `random_case` makes


def integers(source: Source, depth: int) -> Callable:
    """A function of (b, h, q, k) that gives an int expression."""
    if depth == 0 or source.integer(0, 2) == 0:
        number = source.integer(-3, 8)
        return source.pick(
            [
                lambda b, h, q, k: q,
                lambda b, h, q, k: k,
                lambda b, h, q, k: q - k,
                lambda b, h, q, k: q + number,
                lambda b, h, q, k: w,
                lambda b, h, q, k: c,
                lambda b, h, q, k: x,
                lambda b, h, q, k: h,
                lambda b, h, q, k: fg.q_len + b,
                lambda b, h, q, k: fg.kv_len,
                lambda b, h, q, k: lengths[b],
            ]
        )
    left, right = integers(source, depth - 1), integers(source, depth - 1)
    number, power = source.integer(-3, 4), source.pick([1, 2, 3, 4])
    chosen = source.pick(
        [
            lambda m, n: m + n,
            lambda m, n: m - n,
            lambda m, n: m // power,
            lambda m, n: m // c,
            lambda m, n: m % power,
            lambda m, n: m % c,
            lambda m, n: m * number,
            lambda m, n: m >> 1,
            lambda m, n: m ^ n,
            lambda m, n: m & 6,
            lambda m, n: abs(m),
            lambda m, n: fg.minimum(m, n),
            lambda m, n: fg.maximum(m, n),
            None,
        ]
    )
    if chosen is None:
        choice = conditions(source, 0)
        return lambda b, h, q, k: fg.where(choice(b, h, q, k), left(b, h, q, k), right(b, h, q, k))
    return lambda b, h, q, k: chosen(left(b, h, q, k), right(b, h, q, k))


def conditions(source: Source, depth: int) -> Callable:
    """A function of (b, h, q, k) that gives a condition."""
    if depth == 0 or source.integer(0, 1) == 0:
        left, right = integers(source, 2), integers(source, 2)
        return source.pick(
            [
                lambda b, h, q, k: k <= q,
                lambda b, h, q, k: q - k < w,
                lambda b, h, q, k: k < x,
                lambda b, h, q, k: q // c == k // c,
                lambda b, h, q, k: ids[b, q] == ids[b, k],
                lambda b, h, q, k: mess[b, q] <= mess[b, k],
                lambda b, h, q, k: layout[q // 4, k // 4],
                lambda b, h, q, k: q - k <= reach[q],
                lambda b, h, q, k: tilt[h] * (q - k) < f,
                lambda b, h, q, k: left(b, h, q, k) <= right(b, h, q, k),
                lambda b, h, q, k: left(b, h, q, k) < right(b, h, q, k),
                lambda b, h, q, k: left(b, h, q, k) == right(b, h, q, k),
                lambda b, h, q, k: left(b, h, q, k) != right(b, h, q, k),
            ]
        )
    one, two = conditions(source, depth - 1), conditions(source, depth - 1)
    joined = source.pick(
        [
            lambda m, n: m & n,
            lambda m, n: m & n,
            lambda m, n: m | n,
            lambda m, n: m | n,
            lambda m, n: m ^ n,
            lambda m, n: ~m,
            lambda m, n: m == n,
            lambda m, n: fg.int32(m) + fg.int32(n) >= 1,
            None,
        ]
    )
    if joined is None:
        choice = conditions(source, 0)
        return lambda b, h, q, k: fg.where(choice(b, h, q, k), one(b, h, q, k), two(b, h, q, k))
    return lambda b, h, q, k: joined(one(b, h, q, k), two(b, h, q, k))


def random_mask(source: Source, depth: int = 3) -> fg.Variant:
    """A variant with a random mask; None where the language refuses what was drawn (a shift or a divisor)."""
    condition = conditions(source, depth)
    try:
        return fg.variant(lambda b, h, q, k: condition(b, h, q, k), name="random")
    except SpecError:
        return None


def random_case(source: Source) -> tuple[Case, Tile]:
    """A small problem with parameters and captured data for any mask of the grammar, and a tile."""
    q_len, kv_len = source.integer(1, MOST), source.integer(1, MOST)
    batch = source.integer(1, 2)
    rng = np.random.default_rng(source.integer(0, 1 << 20))
    longest = max(q_len, kv_len)
    case = Case(
        sizes={"batch": batch, "heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len},
        params={
            "w": source.integer(1, 9),
            "c": source.integer(1, 9),
            "x": source.integer(-9, 30),
            "f": float(source.integer(-3, 9)),
        },
        tensors={
            "ids": np.sort(rng.integers(0, 4, (source.pick([1, batch]), longest), np.int32), axis=1),
            "mess": rng.integers(0, 3, (batch, longest), np.int32),
            "layout": rng.random((6, 6)) < 0.4,
            "lengths": rng.integers(-2, MOST + 2, batch),
            "reach": rng.integers(0, 5, longest, np.int32),
            "tilt": rng.normal(size=2).astype(np.float32),
        },
    )
    return case, Tile(q=source.integer(1, 7), kv=source.integer(1, 7))


def banded(draw: Callable) -> tuple[fg.Variant, dict[str, int], tuple[int, int]]:
    """A band and a prefix of keys that some heads see, the sizes of a small problem, and a tile, by hypothesis."""
    from hypothesis import strategies as st

    lo, hi = sorted((draw(st.integers(-40, 40)), draw(st.integers(-40, 40))))
    prefix, head = draw(st.integers(0, 20)), draw(st.integers(0, 3))

    @fg.variant()
    def variant(b, h, q, k):
        return ((q - k >= lo) & (q - k <= hi)) | (k < prefix) & (h >= head)

    group = draw(st.sampled_from([1, 2, 4]))
    sizes = {"batch": draw(st.integers(1, 2)), "heads": 4, "kv_heads": 4 // group}
    sizes |= {"q_len": draw(st.integers(1, 70)), "kv_len": draw(st.integers(1, 70))}
    return variant, sizes, draw(st.sampled_from([(16, 16), (16, 32), (32, 16), (64, 64), (128, 32)]))
