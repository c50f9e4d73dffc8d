"""Jagged nested tensors: each sequence is what it is alone, o, lse and gradients are nested; others are refused."""

import itertools
import re

import pytest
import torch

import flashgen as fg
from flashgen.errors import FlashgenError, LaunchError
from flashgen.lang.load import load_spec

causal = load_spec("causal")

#: Sequences of 5, 0 and 33 rows.
STARTS = torch.tensor([0, 5, 5, 38])


def jagged(heads=4, starts=STARTS, columns=32, seed=0):
    """Random rows as a nested tensor [batch, rows, heads, columns]."""
    rows = torch.randn(int(starts[-1]), heads, columns, generator=torch.Generator().manual_seed(seed))
    return torch.nested.nested_tensor_from_jagged(rows, starts).requires_grad_()


def spans():
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(STARTS) if a < b]


def test_each_sequence_and_its_gradients_are_what_they_are_alone():
    leaves = jagged(4), jagged(2, seed=1), jagged(2, columns=16, seed=2)
    o, lse = fg.attention(*(x.transpose(1, 2) for x in leaves), causal, return_lse=True)
    assert o.is_nested and o.shape[:2] == (3, 4) and o.shape[3] == 16 and o.shape[2] == leaves[0].shape[1]
    assert lse.is_nested and lse.shape == o.shape[:3]
    torch.autograd.backward([o.values(), lse.values()], [o.values().cos(), torch.ones_like(lse.values())])
    for span in spans():
        alone = [x.values().detach()[span].transpose(0, 1).unsqueeze(0).requires_grad_() for x in leaves]
        want, want_lse = fg.attention(*alone, causal, return_lse=True)
        torch.autograd.backward([want, want_lse], [want.cos(), torch.ones_like(want_lse)])
        torch.testing.assert_close(o.values()[:, span], want[0])
        torch.testing.assert_close(lse.values()[:, span], want_lse[0])
        for leaf, x in zip(leaves, alone, strict=True):
            assert leaf.grad.is_nested
            torch.testing.assert_close(leaf.grad.values()[span].transpose(0, 1), x.grad[0])


def test_keys_of_other_lengths():
    keys = torch.tensor([0, 20, 29, 62])
    q, k = jagged().transpose(1, 2), jagged(4, keys, seed=1).transpose(1, 2)
    o = fg.attention(q, k, k, load_spec("full"), q_offset=0)
    rows = q.values()[:, 5:], k.values()[:, 29:], k.values()[:, 29:]
    torch.testing.assert_close(o.values()[:, 5:], fg.attention(*(x[None] for x in rows), load_spec("full"))[0])


def test_keys_are_split():
    long = torch.tensor([0, 5, 5, 305])
    q, k, v = (jagged(heads, long, seed=i).detach().transpose(1, 2) for i, heads in enumerate((4, 2, 2)))
    one, three = (fg.attention(q, k, v, causal, kv_splits=n).values() for n in (1, 3))
    torch.testing.assert_close(one, three)
    assert not torch.equal(one, three)


REFUSED = [
    (lambda n: (n, n, n), {}, "q is nested with 4 dimensions, and sequences differ in number 1"),
    (
        lambda n: [n.transpose(1, 2)] * 3,
        {"kv_lengths": torch.ones(3, dtype=torch.int32)},
        "kv_lengths was given beside",
    ),
    (lambda n: [n.transpose(1, 2)] * 3, {"kv_splits": 0}, "kv_splits is 0: it is a number of blocks"),
    *(
        (lambda n: [n.transpose(1, 2)] * 3, {name: x}, f"{name} was given beside nested tensors")
        for name, x in (
            ("out", torch.empty(1)),
            ("page_table", torch.zeros(3, 1, dtype=torch.int32)),
            ("page_layout", "phd"),
        )
    ),
    (
        lambda n: [*[n.transpose(1, 2)] * 2, jagged(starts=STARTS.clone()).transpose(1, 2)],
        {},
        "offsets of their own",
    ),
    (
        lambda n: [n.transpose(1, 2), *[torch.randn(3, 4, 5, 32)] * 2],
        {},
        r"q is nested: .* all nested with layout torch.jagged, or all dense\n  nearest: layout=torch.jagged",
    ),
]


@pytest.mark.parametrize(("make", "named", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_refused(make, named, message):
    with pytest.raises(FlashgenError, match=message) as refused:
        fg.attention(*make(jagged()), causal, **named)
    assert "nearest" in str(refused.value)


@pytest.mark.filterwarnings("ignore")  # torch's, of old kinds of tensor
def test_holes_between_sequences_are_refused():
    base = torch.randn(3, 8, 4, 32)
    narrow = torch.nested.narrow(base, 1, torch.tensor([0, 2, 0]), torch.tensor([3, 5, 8]), layout=torch.jagged)
    q = narrow.transpose(1, 2)
    with pytest.raises(LaunchError, match=r"q is nested with holes.*\n  nearest: q.*, a copy") as refused:
        fg.attention(q, q, q, causal)
    cured = eval(re.search(r"nearest: (.*), a copy", str(refused.value))[1], {"q": q})
    o = fg.attention(cured, cured, cured, causal)
    alone = base[1:2, 2:7].transpose(1, 2)
    torch.testing.assert_close(o.values()[:, 3:8], fg.attention(alone, alone, alone, causal)[0])
