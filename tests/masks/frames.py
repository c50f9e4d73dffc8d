"""Video by frames of 200 tokens: a frame sees itself, the one before it, and the first (CausVid, Diffusion Forcing)."""

import flashgen as fg

FRAME = 200


@fg.variant
def frames(b, h, q, k):
    i, j = q // FRAME, k // FRAME
    return (j == 0) | (j == i) | (j == i - 1)
