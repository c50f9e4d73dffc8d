"""Gist tokens that a table marks: a query sees gists, and all since the last one before it."""

import numpy as np

import flashgen as fg


def marks(problem, rng):
    return np.arange(problem.kv_len) % 200 >= 196


is_gist = fg.tensor("is_gist", dims=("kv",), dtype="bool", example=lambda p, rng: marks(p, rng))
segment = fg.tensor(
    "segment", dims=("kv",), dtype="int32", sorted=True, example=lambda p, rng: np.cumsum(marks(p, rng))
)


@fg.variant
def gist_flags(b, h, q, k):
    return (k <= q) & (is_gist[k] | (segment[q] == segment[k]))
