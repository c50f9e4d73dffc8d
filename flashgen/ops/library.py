"""flashgen::attention, the torch.library op that torch.compile sees; eager calls go around it.

A compiled graph holds no Variant: it holds a token, under which tracing registers the variant in this process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant
from flashgen.runtime import cache

#: Numbers and tensors of the variant travel as parallel lists of names and values.
SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, str variant, float? scale, str[] tensor_names, Tensor[] tensors,"
    " str[] int_names, SymInt[] ints, str[] float_names, float[] floats) -> (Tensor o, Tensor lse)"
)

_library = torch.library.Library("flashgen", "DEF")
_library.define(SCHEMA)
_variants: dict[str, Variant] = {}


def through_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    named: Mapping[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the op, as `attention` traces it; what is wrong with a call is said when it runs."""
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    ints = {name: x for name, x in named.items() if isinstance(x, int)}
    floats = {name: x for name, x in named.items() if isinstance(x, float)}
    if len(tensors) + len(ints) + len(floats) != len(named):
        raise LaunchError("under torch.compile a variant's parameters are Python numbers and its captures tensors")
    inputs = [q, k, v, *tensors.values()]
    if torch.is_grad_enabled() and any([x.requires_grad for x in inputs]):
        raise LaunchError("an input requires grad and flashgen has no backward pass yet: compile it under no_grad()")
    return torch.ops.flashgen.attention(
        q,
        k,
        v,
        _token(variant),
        scale,
        list(tensors),
        list(tensors.values()),
        list(ints),
        list(ints.values()),
        list(floats),
        list(floats.values()),
    )


@torch.compiler.assume_constant_result
def _token(variant: Variant) -> str:
    """A name for the variant, equal for equal ones; known in this process from now on."""
    if not isinstance(variant, Variant):
        raise LaunchError(f"attention's fourth argument is a variant and got a {type(variant).__name__}")
    token = hashlib.sha256(json.dumps(cache.as_data(variant)).encode()).hexdigest()[:32]
    return _variants.setdefault(token, variant) and token


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: str,
    scale: float | None,
    tensor_names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    int_names: Sequence[str],
    ints: Sequence[int],
    float_names: Sequence[str],
    floats: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashgen.ops.attention import run

    if variant not in _variants:
        raise LaunchError(
            f"flashgen::attention got the token {variant!r}, which no call in this process registered: trace again"
        )
    named = dict(zip((*tensor_names, *int_names, *float_names), (*tensors, *ints, *floats), strict=True))
    return run(q, k, v, _variants[variant], scale, named)


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_) -> tuple[torch.Tensor, torch.Tensor]:
    from flashgen.ops.attention import outputs

    return outputs(q, v)


_library.impl("attention", _attention, "CPU")
_library.impl("attention", _attention, "CUDA")
torch.library.register_fake("flashgen::attention", _shapes, lib=_library)
