"""What follows from a plan alone, worked out once: plans are large, and to hash one takes microseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan

T = TypeVar("T")

#: Plans that a function remembers; when there are more they are all forgotten.
MAX_PLANS = 1024


def once(function: Callable[[KernelPlan], T]) -> Callable[[KernelPlan], T]:
    """The function, which remembers what it gave for a plan: this object, not one that is equal to it."""
    known: dict[int, tuple[KernelPlan, T]] = {}  # the plan is kept, so that no other has its id

    @functools.wraps(function)
    def remembered(plan: KernelPlan) -> T:
        found = known.get(id(plan))
        if found is not None:
            return found[1]
        made = function(plan)
        if len(known) >= MAX_PLANS:
            known.clear()
        known[id(plan)] = plan, made
        return made

    return remembered
