"""Packed sequences, told apart by positions that restart: `position[i]` is token i's place in its own.

Source: Krell et al. 2021, arXiv 2107.02027; position_ids of Hugging Face's padding-free training.
"""

import numpy as np

import flashgen as fg


def starts(problem, rng):
    edges = np.sort(rng.choice(np.arange(1, max(9, problem.kv_len)), 7, replace=False))
    edges = np.concatenate([[0], edges])
    at = np.arange(problem.kv_len)
    return at - edges[np.searchsorted(edges, at, "right") - 1]


position = fg.tensor("position", dims=("kv",), dtype="int32", min=0, max=1 << 24, example=starts)


@fg.variant
def restarts(b, h, q, k):
    return (k <= q) & (k >= q - position[q])
