"""Dilated: every fourth key before the query (LongNet)."""

import flashgen as fg


@fg.variant
def dilated_causal(b, h, q, k):
    return (k <= q) & ((q - k) % 4 == 0)
