"""Chunked causal attention, as in Llama 4's local layers: a query sees the keys before it in its own chunk."""

import flashgen as fg

chunk = fg.constant("chunk", default=512, min=1)


@fg.variant
def chunked(b, h, q, k):
    return (k <= q) & (q // chunk == k // chunk)
