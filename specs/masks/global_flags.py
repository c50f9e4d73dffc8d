"""Longformer with global tokens by flag: a window to both sides, and tokens that see all and are seen by all.

Source: Beltagy et al. 2020, arXiv 2004.05150.
"""

import numpy as np

import flashgen as fg

REACH = 128

flag = fg.tensor("flag", dims=("batch", "kv"), dtype="bool", example=lambda p, rng: np.arange(p.kv_len)[None] % 700 < 3)


@fg.variant
def global_flags(b, h, q, k):
    return (abs(q - k) <= REACH) | flag[b, q] | flag[b, k]
