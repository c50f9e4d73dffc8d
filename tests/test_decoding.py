"""A model decodes from pages with the bits of its prefill, on the CPU walk."""

import pytest
import torch
from decoding import Model, decode, differing, prefill

from flashgen.runtime import tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_has_the_bits_of_prefill(dtype):
    assert differing(Model.drawn(32, dtype, "cpu"), 200) == 0


def test_the_comparison_sees_another_order_of_keys(monkeypatch):
    """Pages in the wrong order change attention's outputs: what is compared depends on the table."""
    model, words = Model.drawn(32, torch.float32, "cpu"), list(range(20))
    right = prefill(model, words)[0]
    assert all(map(torch.equal, right, decode(model, words)[0]))
    own_keys = tiles.Sequence.own_keys
    monkeypatch.setattr(tiles.Sequence, "own_keys", lambda own, x: own_keys(own._replace(pages=own.pages[::-1]), x))
    assert not any(map(torch.equal, right, decode(model, words)[0]))
