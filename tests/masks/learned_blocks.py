"""A learned layout of blocks of 64 (SeerAttention, Sparse Transformer kernels), the same for all of a batch."""

import numpy as np

import flashgen as fg

BLOCK = 64


def learned(problem, rng):
    rows, columns = -(-problem.q_len // BLOCK), -(-problem.kv_len // BLOCK)
    return (rng.random((problem.heads, rows, columns)) < 0.15) | np.eye(rows, columns, dtype=bool)


layout = fg.tensor("layout", dims=("heads", None, None), dtype="bool", example=learned)


@fg.variant
def learned_blocks(b, h, q, k):
    return layout[h, q // BLOCK, k // BLOCK]
