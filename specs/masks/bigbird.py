"""BigBird's encoder: blocks of 64 see their neighbours, random blocks, and the first and last block, which see all.

Source: Zaheer et al. 2020, arXiv 2007.14062.
"""

import numpy as np

import flashgen as fg

BLOCK, RANDOM = 64, 3


def drawn(problem, rng):
    rows, columns = -(-problem.q_len // BLOCK), -(-problem.kv_len // BLOCK)
    return rng.integers(0, max(1, columns), (problem.heads, rows, RANDOM), np.int32)


chosen = fg.tensor("chosen", dims=("heads", None, RANDOM), dtype="int32", example=drawn)


@fg.variant
def bigbird(b, h, q, k):
    i, j, last = q // BLOCK, k // BLOCK, (fg.kv_len - 1) // BLOCK
    spread = (chosen[h, i, 0] == j) | (chosen[h, i, 1] == j) | (chosen[h, i, 2] == j)
    ends = (i == 0) | (i == last) | (j == 0) | (j == last)
    return (abs(i - j) <= 1) | spread | ends
