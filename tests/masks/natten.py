"""NATTEN in two dimensions: an image 64 patches wide, each sees the 13 x 13 around it."""

import flashgen as fg

WIDTH, REACH = 64, 6


@fg.variant
def natten(b, h, q, k):
    return (abs(q // WIDTH - k // WIDTH) <= REACH) & (abs(q % WIDTH - k % WIDTH) <= REACH)
