"""from_flex: one element of a score or mask, beside what PyTorch makes of the same numbers."""

import numpy as np
import pytest
import torch

import flashgen
from flashgen.lang.evaluate import evaluate

TABLE = torch.arange(24.0).reshape(4, 6)

#: Scores, and where they are asked for: (score, q, k).
SCORES = {
    "index_select by a position": (lambda s, b, h, q, k: TABLE.index_select(0, q)[0].sum(), [(0.0, 2, 1)]),
    "index_select of columns": (lambda s, b, h, q, k: torch.index_select(TABLE, 1, k)[q].sum(), [(0.0, 2, 1)]),
    "select by a position": (lambda s, b, h, q, k: TABLE.select(0, q)[k], [(0.0, 2, 1)]),
    "power by a filled integer": (lambda s, b, h, q, k: s ** torch.full_like(q, 2.5), [(3.0, 0, 0)]),
    "power by a new integer": (lambda s, b, h, q, k: s ** q.new_full((), -2.5), [(3.0, 0, 0)]),
    "power by a converted number": (lambda s, b, h, q, k: s ** torch.tensor(2.5).int(), [(3.0, 0, 0)]),
    "condition of a filled integer": (lambda s, b, h, q, k: s if torch.full_like(q, 0.5) else -s, [(3.0, 0, 0)]),
    "condition of a filled condition": (lambda s, b, h, q, k: s if torch.full_like(q > 0, 0.5) else -s, [(3.0, 0, 0)]),
    "index of a filled integer": (lambda s, b, h, q, k: TABLE[torch.full_like(q, 1.9)][k], [(0.0, 0, 2)]),
    "integer of a filled integer": (lambda s, b, h, q, k: s * int(torch.full_like(q, -1.9)), [(3.0, 0, 0)]),
}

PLACES = [
    pytest.param(function, *place, id=f"{name} {place}")
    for name, (function, given) in SCORES.items()
    for place in given
]


def of_flashgen(variant, score, q, k):
    tensors = {name: x.detach().numpy() for name, x in variant.given.items()}
    sizes = dict(batch=1, heads=1, kv_heads=1, q_len=9, kv_len=9)
    at = dict(b=0, h=0, q=q, k=k, s=score, sizes=sizes, params={}, tensors=tensors, float_dtype=np.float32)
    return torch.tensor(evaluate(variant.score_node, **at).item())


def of_torch(function, score, q, k):
    return function(torch.tensor(score), *(torch.tensor(x, dtype=torch.int32) for x in (0, 0, q, k)))


@pytest.mark.parametrize(("function", "score", "q", "k"), PLACES)
def test_values_are_those_of_torch(function, score, q, k):
    found = of_flashgen(flashgen.from_flex(score_mod=function), score, q, k)
    torch.testing.assert_close(found, of_torch(function, score, q, k), check_dtype=False)


def test_index_select_takes_rows_of_indices():
    with pytest.raises(flashgen.SpecError, match=r"index_select takes a row of indices, and got shape \[1, 2\]"):
        flashgen.from_flex(score_mod=lambda s, b, h, q, k: torch.index_select(TABLE, 0, torch.tensor([[0, 1]])).sum())
