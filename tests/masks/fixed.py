"""Sparse Transformer, fixed: its own block of 128, and the last 8 of each block before it."""

import flashgen as fg

STRIDE, KEPT = 128, 8


@fg.variant
def fixed(b, h, q, k):
    return (k <= q) & ((q // STRIDE == k // STRIDE) | (k % STRIDE >= STRIDE - KEPT))
