"""MInference's vertical and slash lines by blocks of 64, with the first block and the window of the last.

Source: Jiang et al. 2024, arXiv 2407.02490.
"""

import flashgen as fg

BLOCK = 64

vertical = fg.tensor(
    "vertical",
    dims=("heads", None),
    dtype="bool",
    example=lambda p, rng: rng.random((p.heads, -(-p.kv_len // BLOCK))) < 0.1,
)
slash = fg.tensor(
    "slash",
    dims=("heads", None),
    dtype="bool",
    example=lambda p, rng: rng.random((p.heads, -(-max(p.q_len, p.kv_len) // BLOCK))) < 0.1,
)


@fg.variant
def streaming_blocks(b, h, q, k):
    i, j = q // BLOCK, k // BLOCK
    return (k <= q) & ((j == 0) | (i - j < 2) | vertical[h, j] | slash[h, fg.maximum(i - j, 0)])
