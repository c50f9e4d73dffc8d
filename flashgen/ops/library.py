"""flashgen::attention and its backward, the torch.library ops that torch.compile sees; eager calls go around them.

A compiled graph holds no Variant: it holds its token, by which the process finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashgen.errors import LaunchError
from flashgen.lang.variant import Variant, of_token
from flashgen.ops import dropout as drawing
from flashgen.runtime.philox import Dropout

#: What a call has beside q, k and v.  Numbers and tensors of the variant travel as parallel lists of names and values;
#: `state` is the seed and the offset of what is dropped.
_REST = (
    "str variant, float? scale, str[] tensor_names, Tensor[] tensors, str[] int_names, SymInt[] ints,"
    " str[] float_names, float[] floats, float dropout, Tensor? state, bool deterministic"
)

#: Seed and offset of one call's dropout as int64 on the CPU, moving torch's generator on where no seed is given.
#: `site` is the place of the call: two calls never share theirs, whatever a compiler finds equal.
_DRAW = "draw(Tensor like, float dropout, SymInt? seed, int site) -> Tensor"

_FORWARD = f"attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor o, Tensor lse)"

_BACKWARD = (
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {_REST}, str[] wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] captured)"
)

#: The variants of graphs that were traced, which may live as long as the process.
_traced: dict[str, Variant] = {}

_library = torch.library.Library("flashgen", "DEF")
_library.define(_DRAW, tags=(torch.Tag.nondeterministic_seeded,))
_library.define(_FORWARD)
_library.define(_BACKWARD)


def through_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    dropout: float,
    seed: int | None,
    deterministic: bool,
    named: Mapping[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the op, as `attention` traces it; what is wrong with a call is said when it runs."""
    if not isinstance(variant, Variant):
        raise LaunchError(f"attention's fourth argument is a variant and got a {type(variant).__name__}")
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    ints = {name: x for name, x in named.items() if isinstance(x, int)}
    floats = {name: x for name, x in named.items() if isinstance(x, float)}
    if len(tensors) + len(ints) + len(floats) != len(named):
        raise LaunchError("under torch.compile a variant's parameters are Python numbers and its captures tensors")
    if not isinstance(dropout, (int, float)) or not isinstance(seed, (int, type(None))):
        raise LaunchError("under torch.compile dropout and seed are Python numbers")
    if not isinstance(deterministic, bool):
        raise LaunchError(f"deterministic is a {type(deterministic).__name__} and must be True or False")
    state = None
    if dropout != 0 or seed is not None:
        from flashgen.ops.sites import site

        state = torch.ops.flashgen.draw(q, float(dropout), _signed(seed), site())
    return torch.ops.flashgen.attention(
        q,
        k,
        v,
        variant.token,
        scale,
        list(tensors),
        list(tensors.values()),
        list(ints),
        list(ints.values()),
        list(floats),
        list(floats.values()),
        float(dropout),
        state,
        deterministic,
    )


def _signed(seed: int | None) -> int | None:
    """A seed as the schema's 64-bit integer."""
    return seed - (1 << 64) if seed is not None and 1 << 63 <= seed < 1 << 64 else seed


def _known(token: str) -> Variant:
    variant = _traced.get(token) or of_token(token)
    if variant is None:
        raise LaunchError(
            f"flashgen::attention got the token {token!r}, which no variant of this process has: trace again"
        )
    return variant


def _dropout(p: float, state: torch.Tensor | None) -> Dropout | None:
    return drawing.dropout_of(p, *state.tolist()) if p else None


def _draw(like: torch.Tensor, dropout: float, seed: int | None, site: int) -> torch.Tensor:
    drawing.check(dropout, None if seed is None else seed & ((1 << 64) - 1))
    return torch.tensor(drawing.state(like, seed), dtype=torch.int64)


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
    dropout: float,
    state: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashgen.ops.attention import run

    named = dict(zip((*tensor_names, *int_names, *float_names), (*tensors, *ints, *floats), strict=True))
    return run(q, k, v, _known(variant), scale, named, _dropout(dropout, state))


def _attention_backward(
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    variant: str,
    scale: float | None,
    tensor_names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    int_names: Sequence[str],
    ints: Sequence[int],
    float_names: Sequence[str],
    floats: Sequence[float],
    dropout: float,
    state: torch.Tensor | None,
    deterministic: bool,
    wanted: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    from flashgen.ops.autograd import in_order
    from flashgen.ops.backward import run_backward

    named = dict(zip((*tensor_names, *int_names, *float_names), (*tensors, *ints, *floats), strict=True))
    found = run_backward(
        do,
        dlse,
        *(q, k, v, o, lse, _known(variant), scale, named, _dropout(dropout, state)),
        deterministic=in_order(deterministic),
        wanted=wanted,
    )
    return *found[:3], list(found.captured)


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: str, *_) -> tuple[torch.Tensor, torch.Tensor]:
    from flashgen.ops.attention import outputs

    if (known := of_token(variant)) is not None:
        _traced[variant] = known
    return outputs(q, v)


def _backward_shapes(do, dlse, q, k, v, o, lse, variant, scale, tensor_names, tensors, *rest):
    from flashgen.ops.backward import results

    named, wanted = dict(zip(tensor_names, tensors, strict=True)), rest[-1]
    contiguous = torch.contiguous_format
    return *results(q, k, v), [torch.empty_like(named[name], memory_format=contiguous) for name in wanted]


def _keep(ctx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, variant, scale, tensor_names, tensors, int_names, ints, float_names, floats, *drops = inputs
    dropout, state, deterministic = drops
    ctx.save_for_backward(q, k, v, *output, *([] if state is None else [state]), *tensors)
    ctx.numbers = (int_names, ints, float_names, floats)
    ctx.rest = (variant, scale, tensor_names, dropout, state is not None, deterministic)
    ctx.wants = [tensor.requires_grad for tensor in tensors]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    from flashgen.ops.autograd import with_gradient

    q, k, v, o, lse, *tensors = ctx.saved_tensors
    variant, scale, names, dropout, has_state, deterministic = ctx.rest
    state = tensors.pop(0) if has_state else None
    wanted = with_gradient(_known(variant), tuple(names), tuple(ctx.wants))
    *gradients, captured = torch.ops.flashgen.attention_backward(
        *(do, dlse, q, k, v, o, lse, variant, scale, names, tensors, *ctx.numbers, dropout, state, deterministic),
        list(wanted),
    )
    by_name = dict(zip(wanted, captured, strict=True))
    # torch takes an empty list for a list of tensors, and wants one back.
    without, *numbers = (None if found else [] for found in (names, *ctx.numbers))
    of_tensors = [by_name.get(name) for name in names]
    return *gradients, None, None, without, of_tensors, *numbers, None, None, None


def _refuse(ctx, *_):
    from flashgen.ops.autograd import SECOND

    raise LaunchError(SECOND)


for _device in ("CPU", "CUDA"):
    _library.impl("draw", _draw, _device)
    _library.impl("attention", _attention, _device)
    _library.impl("attention_backward", _attention_backward, _device)
torch.library.register_fake("flashgen::draw", lambda *_: torch.empty(2, dtype=torch.int64), lib=_library)
torch.library.register_fake("flashgen::attention", _shapes, lib=_library)
torch.library.register_fake("flashgen::attention_backward", _backward_shapes, lib=_library)
torch.library.register_autograd("flashgen::attention", _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd("flashgen::attention_backward", _refuse, lib=_library)
