"""The conditions that classes of tiles are found by, apart from what joins them, so that each may be judged alone."""

from __future__ import annotations

from flashgen.analysis.facts import Facts
from flashgen.lang.expr import Node, depends_on

_JOINED = frozenset(("logical_and", "logical_or", "logical_not", "logical_xor"))


def conditions(facts: Facts) -> tuple[Node, ...]:
    """Those that are evaluated over ranges of positions, each once; what is summarised is not taken apart."""
    found: dict[Node, None] = {}
    whole = {one.value for one in facts.summaries}
    left = [n for term in (*facts.visible, *facts.hidden) for n in term.others][::-1]
    while left:
        n = left.pop()
        if n.op in _JOINED and n not in whole:
            left.extend(reversed(n.operands))
        elif depends_on(n, "q", "k"):
            found[n] = None
    return tuple(found)
