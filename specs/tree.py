"""A tree of drafts behind a text: a draft sees the drafts that `drafts` says, and all of the text before it."""

import numpy as np

import flashgen as fg


def ancestors(problem, rng):
    size = max(1, min(64, problem.kv_len // 2))
    seen = np.eye(size, dtype=bool)
    for draft in range(1, size):
        seen[draft] |= seen[rng.integers(0, draft)]  # its parent, and whom that sees
    return seen


# drafts[i, j]: draft i sees draft j, itself or one before it.  The last positions are the drafts'.  Source: Miao et al.
# 2023, "SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and Verification".
drafts = fg.tensor("drafts", dims=(None, None), dtype="bool", example=ancestors)


@fg.variant
def tree(b, h, q, k):
    size = fg.minimum(drafts.size(0), fg.kv_len)
    first = fg.kv_len - size
    i = fg.minimum(fg.maximum(q - first, 0), size - 1)
    return (k <= q) & ((k < first) | drafts[i, fg.maximum(k - first, 0)])
