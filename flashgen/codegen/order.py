"""What templates write of the order in which blocks take tiles of queries."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning import order
from flashgen.planning.plan import KernelPlan


@dataclass(frozen=True, slots=True)
class OrderCode:
    """Texts of a plan's kernels."""

    plan: KernelPlan

    @property
    def threads(self) -> int:
        """Of a block of the kernel that finds it."""
        return order.THREADS

    @property
    def batch(self) -> str:
        """The sequence of such a block."""
        by_batch, by_head = order.of_each(self.plan)
        return "0" if not by_batch else "(int)blockIdx.x / p.heads" if by_head else "(int)blockIdx.x"

    @property
    def head(self) -> str:
        """The head of such a block."""
        by_batch, by_head = order.of_each(self.plan)
        return "0" if not by_head else "(int)blockIdx.x % p.heads" if by_batch else "(int)blockIdx.x"

    @property
    def number(self) -> str:
        """Which of all orders is that of the head `head` among those of all sequences."""
        by_batch, by_head = order.of_each(self.plan)
        if by_batch:
            return "head" if by_head else "head / p.heads"
        return "head % p.heads" if by_head else "0"

    @property
    def lookup(self) -> str:
        """The function that reads one."""
        if not self.plan.ordered:
            return ""
        return (
            "  // The tile of queries at a place of an order, where there are orders.\n"
            "  DEVICE int in_order(int number, int place) {\n"
            "    return p.ordered ? p.order[(2ll * number + 1) * p.q_tiles + place] : p.q_tiles - 1 - place;\n"
            "  }\n\n"
        )

    def q_tile(self, place: str) -> str:
        """The tile of queries at a place of that order."""
        return f"in_order({self.number}, {place})" if self.plan.ordered else f"p.q_tiles - 1 - {place}"
