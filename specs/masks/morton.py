"""Patches in Morton order: a patch sees those whose 8 x 8 cell of the image is its own or touches it.

Source: Point Transformer V3 orders points so: Wu et al. 2023, arXiv 2312.10035.
"""

import flashgen as fg


def even_bits(x):
    """The bits 0, 2, 4 ... of x, closed up."""
    x = x & 0x55555555
    x = (x | (x >> 1)) & 0x33333333
    x = (x | (x >> 2)) & 0x0F0F0F0F
    x = (x | (x >> 4)) & 0x00FF00FF
    return (x | (x >> 8)) & 0x0000FFFF


@fg.variant
def morton(b, h, q, k):
    columns = abs(even_bits(q) // 8 - even_bits(k) // 8)
    rows = abs(even_bits(q >> 1) // 8 - even_bits(k >> 1) // 8)
    return (columns <= 1) & (rows <= 1)
