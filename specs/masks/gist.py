"""Gist tokens: what follows a sequence's gist sees of what came before it nothing but the gist.

Source: Mu et al. 2023, arXiv 2304.08467.
"""

import numpy as np

import flashgen as fg

GIST = 16


def placed(problem, rng):
    return rng.integers(problem.q_len // 4, max(1, problem.q_len // 2), problem.batch, np.int32)


first = fg.tensor("first", dims=("batch",), dtype="int32", min=0, max=1 << 24, example=placed)


@fg.variant
def gist(b, h, q, k):
    before, after = k < first[b], q >= first[b] + GIST
    return (k <= q) & ~(before & after)
