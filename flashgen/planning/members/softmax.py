"""Pipeline hopper, forward: how scores become P."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# ---------------------------------------------------------------------------------------------------------------------
# Tiles that the mask hides nothing of


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTilesApart:
    """They have code of their own, in which nothing stands between the product and the softmax."""

    template: ClassVar[str] = "hopper/forward_full_tiles_apart.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTilesApart:
    """Masked tiles find their highest scores by code of their own, which serves rows of negative maxima too: most tiles
    come to one branch in place of two."""

    template: ClassVar[str] = "hopper/forward_masked_tiles_apart.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesAlike:
    """One code for all tiles: registers are short."""

    template: ClassVar[str] = "hopper/forward_tiles_alike.cu.j2"


FullTiles = FullTilesApart | MaskedTilesApart | TilesAlike


# ---------------------------------------------------------------------------------------------------------------------
# The score function


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreByElement:
    """One code for all scores: a second would gain nothing, or registers are short."""

    template: ClassVar[str] = "hopper/forward_score_by_element.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreByRow:
    """One code for all scores, and what they read of a row of keys is read two elements at a time, ahead of its use."""

    template: ClassVar[str] = "hopper/forward_score_by_row.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreNearZero:
    """Emitted twice: where all arguments of a warp's tanh are small, a polynomial gives it without the special unit."""

    template: ClassVar[str] = "hopper/forward_score_near_zero.cu.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCap:
    """c * tanh(s / c): one factor makes the argument of a product, c joins that of the exponent, and a polynomial gives
    small tanhs without the special unit."""

    together: int  # scores of a thread that are looked at before their tanh is taken

    template: ClassVar[str] = "hopper/forward_soft_cap.cu.j2"


# ---------------------------------------------------------------------------------------------------------------------
# How the highest score of a row is found


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestAsInteger:
    """Scores are compared as integers, three by one instruction, and again where a thread's are all negative."""

    find_first: ClassVar[str] = "highest_by_integers(s, highest)"
    find: ClassVar[str] = find_first
    members: ClassVar[str] = ""
    find_signs: ClassVar[str] = ""
    nothing_seen: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestBySigns:
    """As integers too, and again where a row's maximum is negative, which is known before S is; `zero` is what a state
    holds of a maximum of 0."""

    find_first: ClassVar[str] = "highest_by_floats(s, highest)"
    find: ClassVar[str] = "highest_to_follow(s, negative, highest)"
    members: ClassVar[str] = "  bool negative = true;  // whether the maximum of a row of this warp is\n"
    nothing_seen: ClassVar[str] = "    negative = true;\n"
    zero: str

    @property
    def find_signs(self) -> str:
        """Of the maxima so far."""
        return f"    negative = __any_sync(~0u, fminf(state.row_max[0], state.row_max[1]) < {self.zero});\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestAsFloat:
    """Scores are compared as floats, two by one instruction: registers are short."""

    find_first: ClassVar[str] = "highest_by_floats(s, highest)"
    find: ClassVar[str] = find_first
    members: ClassVar[str] = ""
    find_signs: ClassVar[str] = ""
    nothing_seen: ClassVar[str] = ""


Highest = HighestAsInteger | HighestBySigns | HighestAsFloat


# ---------------------------------------------------------------------------------------------------------------------
# When O follows a maximum that moved


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleBehindP:
    """Behind P of the tile that moved it."""

    template: ClassVar[str] = "hopper/forward_rescale_behind_p.cu.j2"
    members: ClassVar[str] = ""
    begun: ClassVar[str] = ""
    beside_s: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleBesideS:
    """When the next S is on its way, under which it takes no time; factors are kept until then."""

    template: ClassVar[str] = "hopper/forward_rescale_beside_s.cu.j2"
    members: ClassVar[str] = (
        "  float factor[2] = {};  // what O of these rows is to be multiplied by, where they moved\n"
    )
    begun: ClassVar[str] = "\n    moved = 0;  // O is empty"
    beside_s: ClassVar[str] = "    if (moved) rescale_o();\n"


Rescale = RescaleBehindP | RescaleBesideS

RESCALE_BEHIND_P = RescaleBehindP()


# ---------------------------------------------------------------------------------------------------------------------
# How P is made


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingP:
    """Exponentials, rounded to 16 bits; a row's maximum follows keys that outweigh a share of their row."""

    template: ClassVar[str] = "hopper/forward_p_lagging.cu.j2"
    sums_late: ClassVar[bool] = False
    ones_behind_v: ClassVar[int] = 0
    ones_apart: ClassVar[bool] = False
    before: ClassVar[str] = "find_limits"  # what is found under a product


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactP:
    """Exponentials, rounded to e4m3; a row's maximum is exact in each tile, and its P is 2^8."""

    template: ClassVar[str] = "hopper/forward_p_exact.cu.j2"
    lags: ClassVar[bool] = False
    before: ClassVar[str] = "find_scale"
    sums_late: ClassVar[bool] = False
    ones_behind_v: ClassVar[int] = 0
    ones_apart: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnesBehindV:
    """Eight rows of ones behind those of V turned over: sums come with the columns of P V, by products of N + 8."""

    template: ClassVar[str] = "hopper/forward_sums_behind_v.cu.j2"
    fill: ClassVar[str] = "hopper/forward_ones_behind_v.cu.j2"
    rows: ClassVar[int] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OnesApart:
    """A matrix of ones, and products of their own: P V comes in pieces."""

    template: ClassVar[str] = "hopper/forward_sums_apart.cu.j2"
    fill: ClassVar[str] = "hopper/forward_ones_apart.cu.j2"
    rows: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PByBits:
    """Of eight words of P in a register each `words` hold codes of e4m3 made of the scores by one FMA and a rounding,
    the others exponentials; maxima as above.  Sums are those of rounded P, which products with ones give."""

    template: ClassVar[str] = "hopper/forward_p_by_bits.cu.j2"
    lags: ClassVar[bool] = False
    before: ClassVar[str] = "find_scale"
    sums_late: ClassVar[bool] = True  # they come with P V
    words: int
    sums: OnesBehindV | OnesApart

    @property
    def ones_behind_v(self) -> int:
        """Rows of ones behind those of V turned over."""
        return self.sums.rows

    @property
    def ones_apart(self) -> bool:
        """Whether there is a matrix of ones."""
        return not self.sums.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingPByBits(PByBits):
    """The same, but maxima are looked at where P leaves the range of e4m3 alone: `slack` is how far the highest score
    of a row may be above that whose P is 2^8, as a power of two.

    By `headroom`, another, P of the highest score is lower in the first two tiles of a schedule, whose maxima are
    exact, and in the first that a row sees a key of: most maxima grow, and then need not follow.  Where the second
    tile's is lower by `far` more, the first tile's was no sign of others, and P gets what it was short of.
    """

    template: ClassVar[str] = "hopper/forward_p_lagging_by_bits.cu.j2"
    lags: ClassVar[bool] = True
    slack: float
    headroom: float
    far: float


P8 = ExactP | PByBits | LaggingPByBits

#: What 16 bits have.
LAGGING_P = LaggingP()
