"""Block sparsity by a captured layout: block (i, j) of `block` x `block` positions is visible where layout[i, j]."""

import numpy as np

import flashgen as fg

BLOCK = 128
block = fg.constant("block", default=BLOCK, min=1)


def random_blocks(problem, rng):
    rows, columns = (max(1, -(-length // BLOCK)) for length in (problem.q_len, problem.kv_len))
    return (rng.random((rows, columns)) < 0.25) | np.eye(rows, columns, dtype=bool)


layout = fg.tensor("layout", dims=(None, None), dtype="bool", example=random_blocks)


@fg.variant
def blocks(b, h, q, k):
    return layout[q // block, k // block]
