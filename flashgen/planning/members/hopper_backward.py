"""Pipeline hopper, backward: how consumers divide a tile, in which order blocks start, and how dq is added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

# ---------------------------------------------------------------------------------------------------------------------
# How consumers divide a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesOfKeys:
    """Each warpgroup has half of the keys, dk and dv of these, and of dq half of the `dq_half`."""

    template: ClassVar[str] = "hopper/backward_halves_of_keys.cu.j2"
    dq_half: Literal["queries", "columns"]

    @property
    def dq_template(self) -> str:
        """How the product for dq finds this warpgroup's half."""
        return f"hopper/backward_half_of_{self.dq_half}.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDkDv:
    """Each warpgroup has all keys: one has P and dv, the other dS and dk; and of dq half of the columns."""

    template: ClassVar[str] = "hopper/backward_split_dk_dv.cu.j2"
    dq_half: ClassVar[str] = "columns"


Consumers = HalvesOfKeys | SplitDkDv

# ---------------------------------------------------------------------------------------------------------------------
# How scores that have a slope become P, and P times the slope


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWithSlope:
    """Score function and derivative of each score."""

    template: ClassVar[str] = "hopper/backward_score_with_slope.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCapWithSlope:
    """Of c * tanh(s / c) the slope is that of tanh: tanhs are found as in the forward, and c joins the exponent."""

    template: ClassVar[str] = "hopper/backward_soft_cap.cu.j2"
    together: int  # scores of a thread that are looked at before their tanh is taken


# ---------------------------------------------------------------------------------------------------------------------
# The order in which blocks start


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadByHead:
    """All keys of a head, then those of the next."""

    template: ClassVar[str] = "hopper/backward_head_by_head.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class InGroups:
    """Keys of heads whose queries and dq stay in L2, in turns; the last keys first where blocks wait for later keys."""

    template: ClassVar[str] = "hopper/backward_in_groups.cu.j2"
    late_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesInGroups:
    """The same where sequences lie behind each other: keys of one, then those of the next."""

    template: ClassVar[str] = "hopper/backward_sequences_in_groups.cu.j2"
    late_first: bool


BlockOrder = HeadByHead | InGroups | SequencesInGroups

# ---------------------------------------------------------------------------------------------------------------------
# How dq is added up in memory, by which function of consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class DqInAnyOrder:
    """Sums that one kernel clears before and another one finishes behind the main kernel."""

    add: ClassVar[str] = "add_dq"
    in_main_kernel: ClassVar[bool] = False
    warps: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DqInMainKernel:
    """Two warps of a block clear sums of heads to come, and finish complete ones."""

    add: ClassVar[str] = "add_dq"
    in_main_kernel: ClassVar[bool] = True
    warps: ClassVar[tuple[str, ...]] = ("hopper/backward_dq_accumulator.cu.j2",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DqInOrder:
    """Two warps of a block see to the order in which blocks add: the same bits in every run."""

    add: ClassVar[str] = "add_dq_in_order"
    in_main_kernel: ClassVar[bool] = False
    warps: ClassVar[tuple[str, ...]] = ("hopper/backward_dq_semaphore.cu.j2",)


DqSum = DqInAnyOrder | DqInMainKernel | DqInOrder
