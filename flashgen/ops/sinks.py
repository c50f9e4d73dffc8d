"""A sink that a call gives to a variant which declares none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from flashgen.errors import LaunchError
from flashgen.lang.sink import SHAPES, sink
from flashgen.lang.variant import Variant
from flashgen.ops.values import no_tensor

#: What a call and the sink that it declares are called.
NAME = "sink"

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def with_given_sink(variant: Variant, named: Mapping[str, object]) -> Variant:
    """The variant with the sink that a call names, where it declares nothing of that name.

    What it declares, and what is given to no Variant, is checked as all values of a call are.  Raises LaunchError for
    what is no logit for each head, or where the variant has a sink already.
    """
    if NAME not in named or not isinstance(variant, Variant) or _declares(variant):
        return variant
    given = named[NAME]
    if not isinstance(given, torch.Tensor):
        raise LaunchError(no_tensor(NAME, given))
    if given.dtype not in _DTYPES:
        raise LaunchError(
            f"sink is {str(given.dtype).removeprefix('torch.')}: it is {', '.join(_DTYPES.values())}\n"
            "  nearest: sink.float()"
        )
    return _with_sink(variant, given.dim(), _DTYPES[given.dtype])


@lru_cache(maxsize=1024)
def _declares(variant: Variant) -> bool:
    """Whether a variant has something of that name."""
    names = {x.name for x in variant.params} | {x.name for x in variant.constants} | {x.name for x in variant.tensors}
    return NAME in names


@lru_cache(maxsize=1024)
def _with_sink(variant: Variant, rank: int, dtype: str) -> Variant:
    """A variant with a sink of so many dimensions; the same one each time."""
    if variant.sink is not None:
        raise LaunchError(f"{variant.name!r} has a sink of its own\n  nearest: {variant.sink.name}=... in its place")
    for dims in SHAPES:
        if len(dims) == rank:
            return variant.with_sink(sink(NAME, dims, dtype))
    shapes = " or ".join(f"[{', '.join(dims)}]" for dims in SHAPES)
    raise LaunchError(f"sink has {rank} dimensions: it is {shapes}, a logit for each query head")
