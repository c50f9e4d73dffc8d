"""Causal attention whose last query sees the last key: for queries that continue a cache of keys."""

import flashgen as fg


@fg.variant
def causal_bottom_right(b, h, q, k):
    return k <= q + fg.kv_len - fg.q_len
