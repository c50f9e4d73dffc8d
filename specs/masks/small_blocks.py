"""A layout of blocks of 16, of which a tile holds many (sparse attention trained by blocks as small as an mma's).

Source: Gray et al. 2017, GPU kernels for block-sparse weights, and layouts that Child et al. 2019 trained with them.
"""

import numpy as np

import flashgen as fg

BLOCK = 16


def learned(problem, rng):
    rows, columns = -(-problem.q_len // BLOCK), -(-problem.kv_len // BLOCK)
    near = abs(np.arange(rows)[:, None] - np.arange(columns)) < 3
    return near | (rng.random((problem.heads, rows, columns)) < 0.003)


layout = fg.tensor("layout", dims=("heads", None, None), dtype="bool", example=learned)


@fg.variant
def small_blocks(b, h, q, k):
    return layout[h, q // BLOCK, k // BLOCK] & (k <= q)
