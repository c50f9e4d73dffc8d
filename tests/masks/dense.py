"""A mask that comes as a tensor, as scaled_dot_product_attention takes it: here packed sequences of random lengths."""

import numpy as np

import flashgen as fg


def packed(problem, rng):
    longest = max(problem.q_len, problem.kv_len)
    edges = np.sort(rng.integers(0, max(1, longest), (problem.batch, 1, 6)), axis=-1)
    query, key = (np.arange(n)[:, None] for n in (problem.q_len, problem.kv_len))
    one = [(x >= edges).sum(axis=-1) for x in (query, key)]
    return one[0][:, :, None] == one[1][:, None, :]


mask = fg.tensor("mask", dims=("batch", "q", "kv"), dtype="bool", example=packed)


@fg.variant
def dense(b, h, q, k):
    return mask[b, q, k]
