"""Learned relative bias: a captured table per head, read at the distance k - q clipped to the table's reach."""

import numpy as np

import flashgen as fg

REACH = 128


def learned(problem, rng):
    return rng.normal(0, 0.5, (problem.heads, 2 * REACH + 1)).astype(np.float32)


table = fg.tensor("table", dims=("heads", None), dtype="float32", example=learned)
reach = table.size(1) // 2


@fg.variant().score
def relative_bias(s, b, h, q, k):
    return s + table[h, reach + fg.clamp(k - q, -reach, reach)]
