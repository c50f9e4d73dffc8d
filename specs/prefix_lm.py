"""Prefix language model: all queries see the first `prefix` keys, which see each other; the rest is causal."""

import flashgen as fg

prefix = fg.param("prefix", default=256, min=0)


@fg.variant
def prefix_lm(b, h, q, k):
    return (k < prefix) | (k <= q)
