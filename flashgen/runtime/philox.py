"""Dropout's random numbers: Philox-4x32-10, a function of a counter and a key, in NumPy.

No state is kept and no mask stored: the number of a (query, key) pair depends on the seed, the offset and the pair's
own place alone, so a forward, a backward, any tile and any pipeline draw the same mask.  The counter is that of the
kernels: (k / 4, q, b * heads + h, low half of the offset), the key (low half of the seed, high half of the seed ^ high
half of the offset), and word k % 4 of the result belongs to key k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Drop each probability with chance `p` in [0, 1); `seed` and `offset` are unsigned 64-bit numbers.

    A call that has a part of the batches and heads counts on from those before: `first` is its first head of all
    batches, and `heads` are those of a batch, its own unless given.
    """

    p: float
    seed: int
    offset: int = 0
    first: int = 0
    heads: int | None = None

    def stride(self, heads: int) -> int:
        """By how many heads batches follow each other, in a call of so many heads."""
        return heads if self.heads is None else self.heads

    @property
    def threshold(self) -> int:
        """A pair is kept where its 32-bit number is at least this."""
        return min(round(self.p * 2**32), 2**32 - 1)

    @property
    def scale(self) -> float:
        """What kept probabilities are multiplied by."""
        return 1 / (1 - self.p)


def philox(counter: tuple[object, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Four 32-bit words (in uint64 arrays) of a counter of four words that broadcast, and a key of two.

    Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep(dropout: Dropout, *, b: object, h: object, q: object, k: object, heads: int) -> np.ndarray:
    """Whether each pair is kept: bool, of the shape that b, h, q and k broadcast to.

    `k` are the keys along the last axis, of which b, h and q have one or none.
    """
    keys = np.atleast_1d(np.asarray(k, np.int64))
    quads, place = np.unique(keys // 4, return_inverse=True)
    seed, offset = dropout.seed, dropout.offset
    head = dropout.first + np.asarray(b, np.int64) * dropout.stride(heads) + np.asarray(h, np.int64)
    words = philox(
        (quads, q, head, offset & 0xFFFFFFFF),
        (seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)),
    )
    drawn = np.stack(words, axis=-1)[..., place.reshape(keys.shape), keys % 4]
    return drawn >= dropout.threshold
