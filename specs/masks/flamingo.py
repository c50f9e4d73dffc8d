"""Flamingo's cross-attention: text sees the 64 latents of the image before it; image i stands at `starts[b, i]`.

Source: Alayrac et al. 2022, arXiv 2204.14198.
"""

import numpy as np

import flashgen as fg

LATENTS = 64


def placed(problem, rng):
    images = -(-problem.kv_len // LATENTS)
    return np.sort(rng.integers(0, max(1, problem.q_len), (problem.batch, images + 1), np.int32))


starts = fg.tensor("starts", dims=("batch", None), dtype="int32", example=placed)


@fg.variant
def flamingo(b, h, q, k):
    image = k // LATENTS
    return (starts[b, image] <= q) & (q < starts[b, image + 1])
