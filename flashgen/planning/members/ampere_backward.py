"""Pipeline ampere, backward: whose keys a warp works on, and how a step ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# ---------------------------------------------------------------------------------------------------------------------
# Whose keys a warp works on


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKeys:
    """A warp has keys to itself: P and dS are operands of dk and dv as they lie in registers."""

    template: ClassVar[str] = "ampere/backward_own_keys.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """Warps that share keys divide queries, then columns of dk and dv: P and dS go through shared memory."""

    template: ClassVar[str] = "ampere/backward_shared_keys.cu.j2"


# ---------------------------------------------------------------------------------------------------------------------
# How a step ends, between P and dS and the next queries


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBarrier:
    """Nothing that a warp may still read is overwritten before the next step's barrier."""

    template: ClassVar[str] = "ampere/backward_one_barrier.cu.j2"
    barriers: ClassVar[int] = 1
    loads_ahead: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBarriers:
    """One when P and dS are complete, one when they have been read."""

    template: ClassVar[str] = "ampere/backward_two_barriers.cu.j2"
    barriers: ClassVar[int] = 2
    loads_ahead: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """The next queries are loaded where these were, when nobody reads them any more."""

    template: ClassVar[str] = "ampere/backward_one_stage.cu.j2"
    barriers: ClassVar[int] = 2
    loads_ahead: ClassVar[bool] = False


StepEnd = OneBarrier | TwoBarriers | OneStage
