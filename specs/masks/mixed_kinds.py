"""Transfusion and the like: which kind of span sees which is a table, and spans come in order.

Source: Zhou et al. 2024, arXiv 2408.11039.
"""

import numpy as np

import flashgen as fg

SPAN = 192

kind = fg.tensor(
    "kind",
    dims=("batch", None),
    dtype="int32",
    min=0,
    max=3,
    example=lambda p, rng: rng.integers(0, 4, (p.batch, -(-max(p.q_len, p.kv_len) // SPAN)), np.int32),
)
sees = fg.tensor("sees", dims=(4, 4), dtype="bool", example=lambda p, rng: np.tril(np.ones((4, 4), bool)))


@fg.variant
def mixed_kinds(b, h, q, k):
    return sees[kind[b, q // SPAN], kind[b, k // SPAN]] & (k // SPAN <= q // SPAN)
