"""Packed documents: tokens see the tokens of their own document; `doc[b, i]` numbers the document of token i."""

import numpy as np

import flashgen as fg


def packed(problem, rng):
    documents = 1 + problem.kv_len // 256
    return np.sort(rng.integers(0, documents, (problem.batch, problem.kv_len), np.int32))


doc = fg.tensor("doc", dims=("batch", "kv"), dtype="int32", sorted=True, example=packed)


@fg.variant
def document(b, h, q, k):
    return doc[b, q] == doc[b, k]
