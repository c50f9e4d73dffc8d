"""One rank of a striped ring: query i is token 4 i + 1, key j token 4 j + 2.

Source: Brandon et al. 2023, arXiv 2311.09431.
"""

import flashgen as fg


@fg.variant
def striped(b, h, q, k):
    return 4 * k + 2 <= 4 * q + 1
