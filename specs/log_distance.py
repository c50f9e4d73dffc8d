"""Logarithmic distance decay (KERPLE): the score falls with the logarithm of the distance, to both sides."""

import flashgen as fg

strength = fg.param("strength", default=1.0, min=0.0)
spread = fg.param("spread", default=0.1, min=0.0)


@fg.variant().score
def log_distance(s, b, h, q, k):
    return s - strength * fg.log(1.0 + spread * abs(q - k))
