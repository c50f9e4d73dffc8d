"""A causal window that a score function says: everything else becomes -inf."""

import math

import flashgen as fg

WINDOW = 256


@fg.variant().score
def score_window(s, b, h, q, k):
    return fg.where((k <= q) & (q - k < WINDOW), s - 0.01 * (q - k), -math.inf)
