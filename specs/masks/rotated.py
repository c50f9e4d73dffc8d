"""A cache that goes round (Mistral): slot i holds the position that `position` says.

Source: Jiang et al. 2023, arXiv 2310.06825.
"""

import numpy as np

import flashgen as fg

WINDOW = 512


def slots(problem, rng):
    return np.roll(np.arange(problem.kv_len), problem.kv_len // 3)


position = fg.tensor("position", dims=("kv",), dtype="int32", example=slots)


@fg.variant
def rotated(b, h, q, k):
    return (position[k] <= q) & (q - position[k] < WINDOW)
