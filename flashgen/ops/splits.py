"""How many blocks divide the keys of a call: what it says, where it says so, and the kernel that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashgen.lang.variant import Variant
from flashgen.planning import division
from flashgen.planning.division import Divided
from flashgen.planning.members import Keys
from flashgen.planning.planner import Menu

if TYPE_CHECKING:
    from flashgen.ops.call import Request

#: What attention() calls it among named values, which no variant can.
SPLITS = "call.kv_splits"


def joined(variant: Variant, named: dict[str, Any], kv_splits: object) -> dict[str, Any]:
    """A call's named values with its `kv_splits`, or that of the variant where it declares the name.

    Raises PlanError for what is no number of blocks.
    """
    if isinstance(variant, Variant) and "kv_splits" in _declared(variant):
        return {**named, "kv_splits": kv_splits}
    division.check_splits(kv_splits)
    return {**named, SPLITS: kv_splits}


def refused(variant: Variant, named: Mapping[str, Any]) -> bool:
    """Whether a call that takes no `kv_splits` is given one."""
    return "kv_splits" in named and isinstance(variant, Variant) and "kv_splits" not in _declared(variant)


def _declared(variant: Variant) -> set[str]:
    return {x.name for declared in (variant.params, variant.constants, variant.tensors) for x in declared}


def divided(request: Request, ask: Callable[[Keys], Menu], sms: int) -> Divided:
    """The plan of a call on so many SMs, of the menu that `ask` gives for the keys that a block visits."""
    return division.divide(
        ask,
        request.problem,
        sms,
        kv_splits=request.kv_splits,
        params=request.params,
        layout=request.layout,
    )
