"""Top-k blocks (MoBA, NSA): a query's block of 64 sees the blocks that a router chose for it, causally.

Source: Lu et al. 2025, arXiv 2502.13189; Yuan et al. 2025, arXiv 2502.11089.
"""

import numpy as np

import flashgen as fg

BLOCK = 64


def routed(problem, rng):
    rows, columns = -(-problem.q_len // BLOCK), -(-problem.kv_len // BLOCK)
    return (rng.random((problem.batch, problem.heads, rows, columns)) < 0.15) | np.eye(rows, columns, dtype=bool)


chosen = fg.tensor("chosen", dims=("batch", "heads", None, None), dtype="bool", example=routed)


@fg.variant
def top_blocks(b, h, q, k):
    return chosen[b, h, q // BLOCK, k // BLOCK] & (k <= q)
