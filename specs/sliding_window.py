"""Causal sliding window: each query sees itself and the `window - 1` keys before it."""

import flashgen as fg

window = fg.param("window", default=1024, min=1)


@fg.variant
def sliding_window(b, h, q, k):
    return (k <= q) & (q - k < window)
