"""Dilated causal window: each query sees itself and every `dilation`-th key before it, `window` keys in all."""

import flashgen as fg

window = fg.param("window", default=256, min=1)
dilation = fg.param("dilation", default=4, min=1)


@fg.variant
def dilated(b, h, q, k):
    distance = q - k
    return (distance >= 0) & (distance < window * dilation) & (distance % dilation == 0)
