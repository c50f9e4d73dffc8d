"""Longformer: a window to both sides, and the first tokens are global: they see all and all see them."""

import flashgen as fg

reach = fg.param("reach", default=256, min=0)
global_tokens = fg.param("global_tokens", default=16, min=0)


@fg.variant
def longformer(b, h, q, k):
    return (abs(q - k) <= reach) | (k < global_tokens) | (q < global_tokens)
