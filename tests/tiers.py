"""Grids of parameters of which CI runs a part and the night all."""

from collections.abc import Collection, Sequence

import pytest


def thinned(values: Sequence, kept: Collection, sibling: str) -> list:
    """The values of a `parametrize`, all but those `kept` marked nightly; `sibling` is the test that has them."""
    assert set(kept) <= set(values), "what is kept is of the grid"
    mark = pytest.mark.nightly(sibling=sibling)
    return [
        value if value in kept else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value in values
    ]
