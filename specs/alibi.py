"""ALiBi: causal attention whose score falls linearly with distance, by a captured slope per head."""

import numpy as np
from causal import causal

import flashgen as fg


def geometric(problem, rng):
    return np.exp2(-8 * np.arange(1, problem.heads + 1) / problem.heads).astype(np.float32)


slopes = fg.tensor("slopes", dims=("heads",), dtype="float32", example=geometric)


@causal.score
def alibi(s, b, h, q, k):
    return s - slopes[h] * (q - k)
