"""LongNet's segments: of a segment of 512 each fourth position, shifted by the head.

Source: Ding et al. 2023, arXiv 2307.02486.
"""

import flashgen as fg

SEGMENT, RATE = 512, 4


@fg.variant
def longnet(b, h, q, k):
    return (q // SEGMENT == k // SEGMENT) & (q % RATE == h % RATE) & (k % RATE == h % RATE) & (k <= q)
