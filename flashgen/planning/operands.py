"""What the products of pipeline ampere's forward take: tiles of 16-bit elements, or of 8-bit ones that are widened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.planning.float8 import FLOAT8, Float8

#: What holds every number of 8 bits and takes no more than a shift of e5m2: products of P take it.
WIDE = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class AsStored:
    """Elements of 16 bits, as ldmatrix loads them."""

    template: ClassVar[str] = "ampere/forward_products.cu.j2"
    to_shared: ClassVar[str] = "ampere/forward_o_to_shared.cu.j2"
    to_part: ClassVar[str] = "ampere/forward_o_to_part.cu.j2"
    narrow: ClassVar[tuple[str, ...]] = ()  # tensors of 8 bits in shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """Elements of 8 bits in shared memory, which become float16 on their way to a product.  Partial sums of a tile join
    O times the descale of V.  Queries in bfloat16 become float16 too, each row times a power of two.

    `by_bits`: the architecture has no conversion from e4m3, and elements are put together of their bits.
    `found_again`: registers are so few that a loop keeps neither where descales of its keys lie nor where O goes.
    """

    template: ClassVar[str] = "ampere/forward_products_widened.cu.j2"
    to_shared: ClassVar[str] = "ampere/forward_pairs_to_shared.cu.j2"
    to_part: ClassVar[str] = "ampere/forward_pairs_to_part.cu.j2"
    of: Float8
    by_bits: bool
    found_again: bool = False

    @property
    def narrow(self) -> tuple[str, ...]:
        """Tensors of 8 bits in shared memory."""
        return self.of.scaled

    def __str__(self) -> str:
        what = "q, k and v" if "q" in self.narrow else "k and v"
        how = " by their bits" if self.by_bits else ""
        of_q = ", a row of q times a power of two" if self.narrows_q else ""
        return f"{what} are widened in the kernel{how}: products in {WIDE}{of_q}"

    @property
    def narrows_q(self) -> bool:
        """Whether queries have exponents that float16 lacks."""
        return narrows_q(self.of)


AS_STORED = AsStored()

Operands = AsStored | Widened


def narrows_q(float8: Float8) -> bool:
    """Whether queries of 16 bits become float16."""
    return float8.q not in (WIDE, *FLOAT8)


def widened(float8: Float8, *, by_bits: bool) -> Widened:
    """The operands of tensors of which k and v have 8 bits."""
    return Widened(of=float8, by_bits=by_bits)
