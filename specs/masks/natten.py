"""NATTEN in two dimensions: an image 64 patches wide, each sees the 13 x 13 around it.

Source: Hassani et al. 2022, arXiv 2204.07143.
"""

import flashgen as fg

WIDTH, REACH = 64, 6


@fg.variant
def natten(b, h, q, k):
    return (abs(q // WIDTH - k // WIDTH) <= REACH) & (abs(q % WIDTH - k % WIDTH) <= REACH)
