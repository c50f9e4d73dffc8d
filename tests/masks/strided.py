"""Sparse Transformer, strided: a window, and every 128-th key before it."""

import flashgen as fg

STRIDE = 128


@fg.variant
def strided(b, h, q, k):
    return (k <= q) & ((q - k < STRIDE) | ((q - k) % STRIDE == 0))
