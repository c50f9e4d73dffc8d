"""Butterfly block sparsity (FlashAttention, section 3.3): block i sees block j where at most one bit differs."""

import flashgen as fg

block = fg.constant("block", default=128, min=1)


@fg.variant
def butterfly(b, h, q, k):
    differ = (q // block) ^ (k // block)
    return (differ & (differ - 1)) == 0
