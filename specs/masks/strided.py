"""Sparse Transformer, strided: a window, and every 128-th key before it.

Source: Child et al. 2019, arXiv 1904.10509.
"""

import flashgen as fg

STRIDE = 128


@fg.variant
def strided(b, h, q, k):
    return (k <= q) & ((q - k < STRIDE) | ((q - k) % STRIDE == 0))
