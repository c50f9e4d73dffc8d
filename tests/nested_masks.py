"""Masks and scores of any depth whose cases double at each level, by name: `MASKS["rounds"](40)` is a mask function."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import flashgen as fg


def _mask(step: Callable, first: Callable, last: Callable) -> Callable[[int], Callable]:
    """A mask that takes `step(x, q, k, i)` so many times, from `first(q, k)`, and then is `last(x)`."""
    return lambda depth: lambda b, h, q, k: last(reduce(lambda x, i: step(x, q, k, i), range(depth), first(q, k)))


def _condition(step: Callable) -> Callable[[int], Callable]:
    return _mask(step, lambda q, k: k <= q, lambda x: x)


def _number(step: Callable) -> Callable[[int], Callable]:
    return _mask(step, lambda q, k: q, lambda x: x <= 7)


MASKS = {
    "exclusive or": _condition(lambda x, q, k, i: x ^ (q - k > 2 * i)),
    "exclusive or of what is judged": _condition(lambda x, q, k, i: x ^ (k % 8 > i % 8)),
    "equality": _condition(lambda x, q, k, i: x == (k > 3 * i)),
    "inequality": _condition(lambda x, q, k, i: x != (q > 2 * i + 1)),
    "choice of conditions": _condition(lambda x, q, k, i: fg.where(x, q - k < 3 * i, ~x & (k > i))),
    "both ways": _condition(lambda x, q, k, i: (x & (k > i)) | (~x & (q < 9 * i))),
    "the same twice": _condition(lambda x, q, k, i: x & x),
    "rounds": _number(lambda x, q, k, i: fg.where(x > k + i, x - k, x + i)),
    "minimum and maximum": _number(lambda x, q, k, i: fg.minimum(fg.maximum(x - k, i), x + k)),
    "maximum": _number(lambda x, q, k, i: fg.maximum(x - k, q - x)),
    "absolute value": _number(lambda x, q, k, i: abs(x - k) - i),
    "counted": _number(lambda x, q, k, i: x + fg.int32(x > k + i)),
    "quotients": _number(lambda x, q, k, i: (x + k + i) // 2),
}


def _score(step: Callable) -> Callable[[int], Callable]:
    return lambda depth: lambda s, b, h, q, k: reduce(lambda x, i: step(x, k, i), range(depth), s)


SCORES = {
    "maximum": _score(lambda x, k, i: fg.maximum(x * 0.5, x - 0.25 * i)),
    "minimum of maximum": _score(lambda x, k, i: fg.maximum(fg.minimum(x * 1.125, 0.5 * i), -0.5 * i)),
    "clamp": _score(lambda x, k, i: fg.clamp(x * 1.125, -2.0, 2.0)),
    "choice": _score(lambda x, k, i: fg.where(x > 0.125 * i, x * 0.5, x + 0.25)),
    "choice of 0": _score(lambda x, k, i: x * fg.where(k > i - 30, x * 0.25 + 0.75, 0.0)),
    "absolute value": _score(lambda x, k, i: abs(x - 0.5)),
    "square": _score(lambda x, k, i: x * x * 0.5 + x * 0.25),
}
