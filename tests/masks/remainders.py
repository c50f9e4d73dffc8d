"""A window inside chunks, by the places that remain: (q % 256) - (k % 256)."""

import flashgen as fg

CHUNK, WINDOW = 256, 64


@fg.variant
def remainders(b, h, q, k):
    distance = (q % CHUNK) - (k % CHUNK)
    return (q // CHUNK == k // CHUNK) & (distance >= 0) & (distance < WINDOW)
