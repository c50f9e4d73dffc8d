"""supports(): why a variant cannot be compiled for a request, as data; no reason means that it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from flashgen.errors import PlanError
from flashgen.lang.variant import Variant
from flashgen.ops.options import apart, option, variant_of
from flashgen.ops.stages import default_arch, default_dtype, default_head_dim, keys_of
from flashgen.planning import paging
from flashgen.planning.layout import DENSE, Dense, Layout
from flashgen.planning.request import KernelRequest

if TYPE_CHECKING:
    import torch


#: Options of 8-bit queries.
_OF_8_BITS = ("k_dtype", "v_dtype", "out_dtype", "accuracy")


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
    variant: Variant | str | PathLike[str],
    *,
    arch: str | None = None,
    dtype: str | torch.dtype | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    pipeline: str | None = None,
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    q_stages: int | None = None,
    dropout: bool = False,
    packed: bool = False,
    kv_splits: int | None = None,
    invariant: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    gradients: Sequence[str] = (),
    layout: str = "dense",
    page_size: int | None = None,
    k_dtype: str | torch.dtype | None = None,
    v_dtype: str | torch.dtype | None = None,
    out_dtype: str | torch.dtype | None = None,
    accuracy: str | None = None,
    **constants: int | float,
) -> tuple[Reason, ...]:
    """The reasons why plan(), emit() and compile() with these options would fail; none where they succeed.

    With `backward` those of the kernels of gradients; without it those of a forward.  `layout` says how sequences lie,
    as `plan` takes it: "dense", "padded", "varlen", "paged" or "paged_varlen", whose pages have `page_size` rows.

    Every option that cannot work even beside the defaults of the others gives its own reason.  Unknown constants and
    values outside their bounds are reasons too.  With `pipeline` the reasons why that one does not serve what another
    may; `plan().fallbacks` has them where the planner chooses.
    """
    variant = variant_of(variant)
    integers, constants = apart({"stages": stages, "q_stages": q_stages, **constants})
    reasons = []
    folded: dict[str, int | float] = {}
    for name, value in constants.items():
        try:
            variant.bind(**{name: value})
            folded[name] = value
        except PlanError as error:
            reasons.append(_reason(name, value, error))
    bound = variant.bind(**folded)
    usual: dict[str, Any] = {
        "arch": default_arch(variant),
        "dtype": default_dtype(variant),
        "head_dim": default_head_dim(variant),
        **dict.fromkeys(("v_head_dim", "pipeline", "tile", "kv_splits", "page_size", *_OF_8_BITS, *integers)),
        **{
            "dropout": False,
            "packed": False,
            "invariant": False,
            "backward": False,
            "deterministic": False,
            "gradients": (),
            "layout": DENSE,
        },
    }
    given = {
        **{"arch": arch, "dtype": dtype, "head_dim": head_dim, "v_head_dim": v_head_dim, "pipeline": pipeline},
        **{"tile": tile, **integers, "dropout": dropout, "packed": packed, "kv_splits": kv_splits},
        **{"invariant": invariant, "backward": backward, "deterministic": deterministic},
        **{"gradients": gradients, "layout": layout, "page_size": page_size},
        **dict(zip(_OF_8_BITS, (k_dtype, v_dtype, out_dtype, accuracy), strict=True)),
    }
    asked = dict(usual)
    for name, value in given.items():
        try:
            taken = option(name, value)
        except PlanError as error:
            reasons.append(_reason(name, value, error))
        else:
            asked[name] = usual[name] if taken is None else taken
    failed = _refusal(bound, asked)
    if failed is None:
        return tuple(reasons)
    usual["backward"] = asked["backward"]
    alone = []
    if _refusal(bound, usual) is None:
        on_arch = usual | {"arch": asked["arch"]}
        of_arch = on_arch if _refusal(bound, on_arch) is None else usual  # a pipeline is one of the arch asked for
        of_dtype = usual | {name: asked[name] for name in ("arch", "dtype")}
        besides = {"pipeline": of_arch, "page_size": usual | {"layout": asked["layout"]}}
        besides |= dict.fromkeys(_OF_8_BITS, of_dtype)
        for name, value in asked.items():
            beside = besides.get(name, usual)
            if value != usual[name] and (refused := _refusal(bound, {**beside, name: value})) is not None:
                alone.append(_reason(name, value, refused))
    nothing = (type(None), None), (bool, False), (tuple, ()), (Dense, DENSE)
    together = {name: _said(value) for name, value in asked.items() if (type(value), value) not in nothing}
    return (*reasons, *(alone or [_reason("combination", together, failed)]))


def _refusal(variant: Variant, asked: dict[str, Any]) -> PlanError | None:
    options = dict(asked)
    splits, invariant, page_size = (options.pop(name) for name in ("kv_splits", "invariant", "page_size"))
    layout: Layout = options["layout"]
    try:
        keys = keys_of(splits, invariant)
        request = KernelRequest.of(variant, keys=keys, **options)
        paging.menu_of_pages(request, paging.rows_of_pages(layout.name, layout.paged, page_size))
    except PlanError as error:
        return error
    return None


def _reason(option: str, asked: object, error: PlanError) -> Reason:
    limit, _, nearest = str(error).partition("\n  nearest: ")
    return Reason(option=option, asked=_said(asked), limit=limit, nearest=nearest)


def _said(asked: object) -> object:
    """A value as a call writes it."""
    return asked.name if isinstance(asked, Layout) else asked
