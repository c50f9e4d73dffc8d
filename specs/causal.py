"""Causal attention: each query sees itself and the keys before it; positions count from the start of q and k."""

import flashgen as fg


@fg.variant
def causal(b, h, q, k):
    return k <= q
