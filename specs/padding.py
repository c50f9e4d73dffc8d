"""Padded batches: sequence b has `lengths[b]` keys, and what lies behind them is never seen."""

import numpy as np

import flashgen as fg


def random_lengths(problem, rng):
    return rng.integers(0, problem.kv_len + 1, problem.batch, np.int32)


lengths = fg.tensor("lengths", dims=("batch",), dtype="int32", min=0, example=random_lengths)


@fg.variant
def padding(b, h, q, k):
    return k < lengths[b]
