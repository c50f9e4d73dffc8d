"""The order in which blocks of a forward take tiles of queries, where data say how much each of them sees.

Blocks take one after another from a counter.  One that is long and comes last is waited for: so those that see most go
first (longest processing time first: Graham 1969, "Bounds on Multiprocessing Timing Anomalies").  Where expressions
alone hide keys, these are the last queries or all alike.  What data hide follows from no place: a kernel of its own
counts the tiles that each sees, by the summaries, and puts them in order.

H200, 8,192 tokens, 2 x 16 heads, head_dim 128: tokens by flag that all see 1,050 -> 966 us, causal by positions in
blocks whose order is random 803 to 817 -> 774 to 779 us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lang.expr import depends_on
from flashgen.planning.plan import Part

if TYPE_CHECKING:
    from flashgen.planning.plan import KernelPlan
    from flashgen.planning.problem import Problem

#: The kernel that finds it.
ENTRY = "attention_order"

#: Threads of its blocks, a warp for each tile of queries: as many as there can be, since there are few blocks, and a
#: round of tiles waits for L2.
THREADS = 1024

#: Tiles of keys for each SM, below which the kernel, of some 3 us, would take more than is waited for.
LEAST_TILES = 256


def wanted(plan: KernelPlan, tiles: int, kv_tiles: int, sms: int) -> bool:
    """Whether so many tiles of queries of all heads, with up to so many tiles of keys each, are put in order first."""
    return plan.ordered and tiles > sms and tiles * kv_tiles >= LEAST_TILES * sms


def of_each(plan: KernelPlan) -> tuple[bool, bool]:
    """Whether each sequence, and each head, has an order of its own."""
    mask = plan.variant.mask
    return mask is not None and depends_on(mask, "b"), mask is not None and depends_on(mask, "h")


def orders(plan: KernelPlan, batch: int, heads: int) -> int:
    """How many there are."""
    by_batch, by_head = of_each(plan)
    return (batch if by_batch else 1) * (heads if by_head else 1)


def workspaces(plan: KernelPlan, problem: Problem) -> tuple[Part, ...]:
    """Device memory that they need, in bytes by the name of the pointer."""
    if not plan.ordered:
        return ()
    places, tiles = orders(plan, problem.batch, problem.heads), -(-problem.q_len // plan.tile.q)
    why = f"{places} x {tiles} tiles of queries: how much each sees, and those that see most first, int32"
    return (Part(name="order", amount=8 * places * tiles, why=why),)
