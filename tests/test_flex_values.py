"""from_flex: one element of a score or mask, beside what PyTorch makes of the same numbers."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import flashgen
from flashgen.lang.evaluate import evaluate

TABLE = torch.arange(24.0).reshape(4, 6)
FLAGS = torch.tensor([[False] * 6, [True] * 6, [False] * 5 + [True], [True] * 5 + [False]])
MANY, NONE = torch.arange(90), torch.zeros(0, dtype=torch.int64)

#: Scores, and where they are asked for: (score, q, k).
SCORES = {
    "index_select by a position": (lambda s, b, h, q, k: TABLE.index_select(0, q)[0].sum(), [(0.0, 2, 1)]),
    "index_select of columns": (lambda s, b, h, q, k: torch.index_select(TABLE, 1, k)[q].sum(), [(0.0, 2, 1)]),
    "power by a filled integer": (lambda s, b, h, q, k: s ** torch.full_like(q, 2.5), [(3.0, 0, 0)]),
    "power by a new integer": (lambda s, b, h, q, k: s ** q.new_full((), -2.5), [(3.0, 0, 0)]),
    "power by a converted number": (lambda s, b, h, q, k: s ** torch.tensor(2.5).int(), [(3.0, 0, 0)]),
    "condition of a filled integer": (lambda s, b, h, q, k: s if torch.full_like(q, 0.5) else -s, [(3.0, 0, 0)]),
    "condition of a filled condition": (lambda s, b, h, q, k: s if torch.full_like(q > 0, 0.5) else -s, [(3.0, 0, 0)]),
    "round": (
        lambda s, b, h, q, k: torch.round(s) - s,
        [(x, 0, 0) for x in (8388609.0, -8388609.0, 0.49999997, -0.49999997, 0.5, 1.5, 2.5, -0.5, -1.5, 1e-10, -1e-10)],
    ),
    "round of a large position": (lambda s, b, h, q, k: torch.round(q.float()) - q, [(0.0, 8388609, 0)]),
    "expm1": (
        lambda s, b, h, q, k: torch.expm1(s),
        [(x, 0, 0) for x in (1e-6, -1e-6, 1e-30, 0.01, 0.499, -0.499, 0.501, -0.501, 3.0, -20.0, 100.0, -torch.inf)],
    ),
    "relu6 of an integer": (lambda s, b, h, q, k: TABLE[0][F.relu6(q - k)], [(0.0, q, 3) for q in (1, 5, 8)]),
    "hardtanh of an integer": (
        lambda s, b, h, q, k: TABLE[0][F.hardtanh(q - k, -1.7, 2.9)],
        [(0.0, q, 3) for q in (0, 2, 3, 4, 9)],
    ),
    "index of a filled integer": (lambda s, b, h, q, k: TABLE[torch.full_like(q, 1.9)][k], [(0.0, 0, 2)]),
    "amax of conditions": (lambda s, b, h, q, k: s * FLAGS[k].amax(), [(3.0, 0, k) for k in range(4)]),
    "amin of conditions": (lambda s, b, h, q, k: s * torch.amin(FLAGS, 1)[k], [(3.0, 0, k) for k in range(4)]),
    "max and min of conditions": (
        lambda s, b, h, q, k: torch.where(FLAGS[k].max(), s, -s) * torch.min(FLAGS[k]).int(),
        [(3.0, 0, k) for k in range(4)],
    ),
    "amax of many conditions": (lambda s, b, h, q, k: s * (q == MANY).amax(), [(3.0, 5, 0), (3.0, 100, 0)]),
    "mean of integers as floats": (lambda s, b, h, q, k: s * MANY.mean(dtype=torch.float32), [(3.0, 0, 0)]),
    "isin of nothing": (lambda s, b, h, q, k: torch.where(torch.isin(k, NONE), s, -s), [(3.0, 0, 0)]),
    "any of nothing": (lambda s, b, h, q, k: torch.where((k == NONE).any(), s, -s), [(3.0, 0, 0)]),
    "all and sum of nothing": (
        lambda s, b, h, q, k: torch.where((k == NONE).all(), s, -s) + (NONE * q).sum() + NONE.shape[0],
        [(3.0, 0, 0)],
    ),
    "power of a number": (
        lambda s, b, h, q, k: 2.0 ** (k % 5) + torch.bitwise_left_shift(1, k % 5) + 3.0**k,
        [(0.0, 0, 7)],
    ),
    "sign of a power": (lambda s, b, h, q, k: torch.where(k % 2 == 0, 1, -1) * 3.0**k, [(0.0, 0, 2), (0.0, 0, 3)]),
    "integer of a filled integer": (lambda s, b, h, q, k: s * int(torch.full_like(q, -1.9)), [(3.0, 0, 0)]),
}


class Index:
    """What a function is traced with, to PyTorch's parser of arguments."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function


try:
    TABLE.select(0, Index())
except TypeError:
    pass  # an older PyTorch asks no index of select() what it is
else:
    SCORES["select by a position"] = (lambda s, b, h, q, k: TABLE.select(0, q)[k], [(0.0, 2, 1)])

PLACES = [
    pytest.param(function, *place, id=f"{name} {place}")
    for name, (function, given) in SCORES.items()
    for place in given
]


def of_flashgen(variant, score, q, k):
    tensors = {name: x.detach().numpy() for name, x in variant.given.items()}
    sizes = dict(batch=1, heads=1, kv_heads=1, q_len=9, kv_len=9)
    at = dict(b=0, h=0, q=q, k=k, s=np.float32(score), sizes=sizes, params={}, tensors=tensors, float_dtype=np.float32)
    return torch.tensor(evaluate(variant.score_node, **at).item())


def of_torch(function, score, q, k):
    return function(torch.tensor(score), *(torch.tensor(x, dtype=torch.int32) for x in (0, 0, q, k)))


@pytest.mark.parametrize(("function", "score", "q", "k"), PLACES)
def test_values_are_those_of_torch(function, score, q, k):
    found = of_flashgen(flashgen.from_flex(score_mod=function), score, q, k)
    torch.testing.assert_close(found, of_torch(function, score, q, k), rtol=1e-6, atol=0, check_dtype=False)


def test_index_select_takes_rows_of_indices():
    with pytest.raises(flashgen.SpecError, match=r"index_select takes a row of indices, and got shape \[1, 2\]"):
        flashgen.from_flex(score_mod=lambda s, b, h, q, k: torch.index_select(TABLE, 0, torch.tensor([[0, 1]])).sum())


#: What is made of a captured row, and elements of which several are the result.
TIES = {
    "amax of 4": (lambda t: t.amax(), torch.zeros(4)),
    "amin of 3": (lambda t: t.amin(0), torch.zeros(3)),
    "amax with others between": (lambda t: t.amax(), torch.tensor([2.0, 1.0, 2.0, 0.0, 2.0, 1.0])),
    "amax of 2 with a larger one": (lambda t: t.amax(), torch.tensor([1.0, 1.0, 2.0])),
    "torch.max": (lambda t: torch.max(t), torch.zeros(5)),
    "torch.min": (lambda t: torch.min(t), torch.tensor([0.0, 1.0, 0.0, 0.0])),
    "amax of two dimensions": (lambda t: t.amax((0, 1)), torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
    "amax of amax": (lambda t: t.amax(1).amax(0), torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
    "amin of dimensions of one": (lambda t: t.amin((0, 1, 2)), torch.zeros(1, 3, 1)),
    "maximum": (lambda t: torch.maximum(t[0], t[1]), torch.zeros(2)),
    "fmax": (lambda t: torch.fmax(t[0], t[1]), torch.zeros(2)),
    "fmin": (lambda t: torch.fmin(t[0], t[1]), torch.zeros(2)),
    "fmax without a tie": (lambda t: torch.fmax(t[0], t[1]), torch.arange(2.0)),
    "fmin of three": (lambda t: torch.fmin(torch.fmin(t[0], t[1]), t[2]), torch.zeros(3)),
    "maximum of maximum": (lambda t: torch.maximum(torch.maximum(t[0], t[1]), t[2]), torch.zeros(3)),
}


@pytest.mark.parametrize("name", TIES)
def test_ties_have_torch_s_gradient(name):
    function, elements = TIES[name]
    ours, theirs = (elements.clone().requires_grad_() for _ in range(2))
    q = torch.zeros(1, 1, 1, 16)
    _, lse = flashgen.attention(q, q, q, flashgen.from_flex(None, lambda s, *at: function(ours)), return_lse=True)
    lse.sum().backward()
    function(theirs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
