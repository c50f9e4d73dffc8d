"""A key padding mask, as tokenizers give it.

Source: The attention_mask of Hugging Face's tokenizers and of BERT: Devlin et al. 2018, arXiv 1810.04805.
"""

import numpy as np

import flashgen as fg


def padded(problem, rng):
    lengths = rng.integers(1, problem.kv_len + 1, (problem.batch, 1))
    return np.arange(problem.kv_len) < lengths


attend = fg.tensor("attend", dims=("batch", "kv"), dtype="bool", example=padded)


@fg.variant
def key_padding(b, h, q, k):
    return attend[b, k]
