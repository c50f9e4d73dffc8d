"""Soft-capped scores, as in Gemma 2: tanh keeps them within -cap .. cap."""

import flashgen as fg

cap = fg.param("cap", default=30.0, min=0.001)


@fg.variant().score
def softcap(s, b, h, q, k):
    return cap * fg.tanh(s / cap)
