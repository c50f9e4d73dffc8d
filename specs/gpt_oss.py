"""gpt-oss: a causal sliding window, and a learned logit per head that joins the softmax beside the keys."""

import numpy as np

import flashgen as fg

# Every second layer of the model has the window, the others see all keys up to their own: `causal.with_sink(sink)`.
# Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.
window = fg.param("window", default=128, min=1)


def normal(problem, rng):
    return rng.normal(0, 1, problem.heads).astype(np.float32)


sink = fg.sink("sink", dims=("heads",), example=normal)


@fg.variant(sink=sink)
def gpt_oss(b, h, q, k):
    return (k <= q) & (q - k < window)
