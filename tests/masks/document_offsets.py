"""Packed documents, causal by the position inside each: `off[i]` is where document i starts."""

import numpy as np

import flashgen as fg


def lengths(problem, rng):
    edges = np.sort(rng.choice(np.arange(1, max(9, problem.kv_len)), 7, replace=False))
    return np.concatenate([[0], edges]).astype(np.int32)


def numbered(problem, rng):
    return np.searchsorted(lengths(problem, np.random.default_rng(7)), np.arange(problem.kv_len), "right") - 1


doc = fg.tensor("doc", dims=("kv",), dtype="int32", sorted=True, example=numbered)
off = fg.tensor("off", dims=(None,), dtype="int32", example=lambda p, rng: lengths(p, np.random.default_rng(7)))


@fg.variant
def document_offsets(b, h, q, k):
    return (doc[q] == doc[k]) & (q - off[doc[q]] >= k - off[doc[k]])
