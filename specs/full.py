"""Full attention: every query sees every key."""

import flashgen as fg


@fg.variant
def full(b, h, q, k):
    return True
