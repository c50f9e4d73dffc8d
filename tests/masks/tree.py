"""Speculative decoding by a tree (Medusa, EAGLE, SGLang): drafts see the cache, and of each other what a table says."""

import numpy as np

import flashgen as fg

DRAFTS = 64


def ancestors(problem, rng):
    parent = [0, *(int(rng.integers(0, i)) for i in range(1, DRAFTS))]
    sees = np.eye(DRAFTS, dtype=bool)
    for i in range(1, DRAFTS):
        sees[i] |= sees[parent[i]]
    return sees


seen = fg.tensor("seen", dims=(DRAFTS, DRAFTS), dtype="bool", example=ancestors)


@fg.variant
def tree(b, h, q, k):
    draft = k - (fg.kv_len - fg.q_len)
    return (draft < 0) | seen[q % DRAFTS, fg.maximum(draft, 0) % DRAFTS] & (q // DRAFTS == draft // DRAFTS)
