"""A layout of blocks whose size comes with the call."""

import numpy as np

import flashgen as fg

block = fg.param("block", default=128, min=1)


def drawn(problem, rng):
    rows, columns = -(-problem.q_len // 128), -(-problem.kv_len // 128)
    return (rng.random((rows, columns)) < 0.2) | np.eye(rows, columns, dtype=bool)


layout = fg.tensor("layout", dims=(None, None), dtype="bool", example=drawn)


@fg.variant
def paged_blocks(b, h, q, k):
    return layout[q // block, k // block]
