"""Video by frames of 200 tokens: a frame sees itself, the one before it, and the first (CausVid, Diffusion Forcing).

Source: Yin et al. 2024, arXiv 2412.07772; Chen et al. 2024, arXiv 2407.01392.
"""

import flashgen as fg

FRAME = 200


@fg.variant
def frames(b, h, q, k):
    i, j = q // FRAME, k // FRAME
    return (j == 0) | (j == i) | (j == i - 1)
