"""supports(): why a variant cannot be compiled for a request, as data; no reason means that it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.errors import PlanError
from flashgen.lang.load import load_spec
from flashgen.lang.variant import Variant
from flashgen.ops.stages import default_arch, default_dtype, default_head_dim, menu_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One thing that stands in the way: the option, what it was asked to be, the limit, and the nearest that works.

    `option` is "combination" where each option would work alone, or where the variant's own pins rule all out.
    """

    option: str
    asked: object
    limit: str
    nearest: str


def supports(
    variant: Variant | str,
    *,
    arch: str | None = None,
    dtype: str | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    pipeline: str | None = None,
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    dropout: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    gradients: Sequence[str] = (),
    **constants: int | float,
) -> tuple[Reason, ...]:
    """The reasons why plan(), emit() and compile() with these options would fail; none where they succeed.

    With `backward` those of the kernels of gradients; without it those of a forward.

    Every option that cannot work even beside the defaults of the others gives its own reason.  Unknown constants and
    values outside their bounds are reasons too.
    """
    variant = load_spec(variant) if isinstance(variant, str) else variant
    reasons = []
    folded: dict[str, int | float] = {}
    for name, value in constants.items():
        try:
            variant.bind(**{name: value})
            folded[name] = value
        except PlanError as error:
            reasons.append(_reason(name, value, error))
    bound = variant.bind(**folded)
    asked = {
        "arch": arch or default_arch(variant),
        "dtype": dtype or default_dtype(variant),
        "head_dim": default_head_dim(variant) if head_dim is None else head_dim,
        "v_head_dim": v_head_dim,
        "pipeline": pipeline,
        "tile": tile,
        "stages": stages,
        "dropout": dropout,
        "backward": backward,
        "deterministic": deterministic,
        "gradients": tuple(gradients),
    }
    error = _refusal(bound, asked)
    if error is None:
        return tuple(reasons)
    usual = {
        "arch": default_arch(variant),
        "dtype": default_dtype(variant),
        "head_dim": default_head_dim(variant),
        **dict.fromkeys(("v_head_dim", "pipeline", "tile", "stages")),
        **{"dropout": False, "backward": backward, "deterministic": False, "gradients": ()},
    }
    alone = []
    if _refusal(bound, usual) is None:
        for option, value in asked.items():
            if value != usual[option] and (refused := _refusal(bound, {**usual, option: value})) is not None:
                alone.append(_reason(option, value, refused))
    given = {option: value for option, value in asked.items() if value not in (None, False, ())}
    return (*reasons, *(alone or [_reason("combination", given, error)]))


def _refusal(variant: Variant, options: dict[str, object]) -> PlanError | None:
    positional = ("arch", "dtype", "head_dim", "v_head_dim")
    named = {name: value for name, value in options.items() if name not in positional}
    try:
        menu_of(variant, *(options[name] for name in positional), **named)
    except PlanError as error:
        return error
    return None


def _reason(option: str, asked: object, error: PlanError) -> Reason:
    limit, _, nearest = str(error).partition("\n  nearest: ")
    return Reason(option=option, asked=asked, limit=limit, nearest=nearest)
