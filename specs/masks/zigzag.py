"""One rank of a zigzag ring: half of its queries are from the front and half from the back of the sequence.

Source: The context parallelism of Llama 3: Dubey et al. 2024, arXiv 2407.21783.
"""

import flashgen as fg

HALF = 512


@fg.variant
def zigzag(b, h, q, k):
    def place(x):
        return fg.where(x < HALF, x + HALF, x + 4 * HALF)

    return place(k) <= place(q)
