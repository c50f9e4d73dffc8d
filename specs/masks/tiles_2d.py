"""2-D tiles (Swin, sliding tile attention): an image of 32 patches a row, in windows of 8 rows and 32 columns.

Source: Liu et al. 2021, arXiv 2103.14030; Zhang et al. 2025, arXiv 2502.04507.
"""

import flashgen as fg

WIDTH, HEIGHT = 64, 8


@fg.variant
def tiles_2d(b, h, q, k):
    row, column = q // WIDTH // HEIGHT, q % WIDTH // 32
    return (row == k // WIDTH // HEIGHT) & (column == k % WIDTH // 32)
