"""Pipeline hopper, forward: how P V is added up, and the V that consumers multiply by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# ---------------------------------------------------------------------------------------------------------------------
# How P V is added up

#: Pieces that are, at least and at most: those of 208 to 240 columns of v.
TIED = (104, 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLevel:
    """In the accumulators of wgmma, which hold O: 16-bit products are added up exactly enough."""

    template: ClassVar[str] = "hopper/forward_products.cu.j2"
    wgmma: ClassVar[str] = "hopper/forward_wgmma.cu.j2"
    overlaps: ClassVar[bool] = True  # scores are on their way while P V is
    take: ClassVar[str] = "await_scores"  # what a step of a schedule does when S is there
    keys_per_word: ClassVar[int] = 2  # of P, in a register
    awaited_late: ClassVar[bool] = True  # P V of the tile before runs under the softmax
    members: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevels:
    """Partial sums of one tile of keys in the accumulators, `piece` columns at a time, and O by float32 additions:
    8-bit wgmma cuts each addend off at 2^-13 of the largest.

    With `ahead` the next scores are on their way while the last partial sums are added; else these come first, for
    which fewer registers will do, and other warpgroups multiply meanwhile.  Those who `ask_early` whether K and V of
    the next products have come do so before the softmax, and need not wait for the answer behind it.
    """

    template: ClassVar[str] = "hopper/forward_products_8_bits.cu.j2"
    wgmma: ClassVar[str] = "hopper/forward_wgmma_8_bits.cu.j2"
    take: ClassVar[str] = "take_scores"
    keys_per_word: ClassVar[int] = 4
    awaited_late: ClassVar[bool] = False
    piece: int
    ahead: bool
    ask_early: bool

    @property
    def members(self) -> str:
        """What consumers keep."""
        known = "  bool k_full = false, v_full = false;  // whether what the next products take is known to have come\n"
        return known if self.ask_early else ""

    @property
    def tied(self) -> bool:
        """Whether a piece is told to take the registers of the one before: of 104 to 120 columns ptxas gives each its
        own, and spills 8 to 48 bytes."""
        return TIED[0] <= self.piece <= TIED[1]

    @property
    def overlaps(self) -> bool:
        """Whether scores are on their way while P V is."""
        return self.ahead

    @property
    def order(self) -> str:
        """The template of what is issued when."""
        return f"hopper/forward_scores_{'ahead' if self.ahead else 'behind'}.cu.j2"


# ---------------------------------------------------------------------------------------------------------------------
# The V that consumers multiply by


@dataclass(frozen=True, slots=True, kw_only=True)
class VAsStored:
    """Rows of keys, as TMA loads them: 16-bit wgmma takes either order."""

    turned: ClassVar[bool] = False
    beside_k: ClassVar[bool] = False
    #: In which both are loaded.
    order: ClassVar[str] = "K one tile ahead of V: the order in which the consumers use them."


@dataclass(frozen=True, slots=True, kw_only=True)
class VTurnedOver:
    """Rows of columns, which warps of the producers make of V as stored: 8-bit wgmma takes no other order.

    `beside_k` it is loaded behind its own K, a tile earlier than others: turning it over takes most of a step.
    """

    turned: ClassVar[bool] = True
    beside_k: bool

    @property
    def follows(self) -> str:
        """The template of how it follows K where who schedules loads."""
        return f"hopper/forward_v_{'beside' if self.beside_k else 'behind_next'}_k.cu.j2"

    @property
    def order(self) -> str:
        """In which it and K are loaded."""
        return "V behind its own K: to turn it over takes most of a step." if self.beside_k else VAsStored.order


#: What 16 bits have.
ONE_LEVEL, V_AS_STORED = OneLevel(), VAsStored()
