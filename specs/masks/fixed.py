"""Sparse Transformer, fixed: its own block of 128, and the last 8 of each block before it.

Source: Child et al. 2019, arXiv 1904.10509.
"""

import flashgen as fg

STRIDE, KEPT = 128, 8


@fg.variant
def fixed(b, h, q, k):
    return (k <= q) & ((q // STRIDE == k // STRIDE) | (k % STRIDE >= STRIDE - KEPT))
