"""What of a query and a key an expression sees: both, one of them, or only how far apart they are."""

from __future__ import annotations

import enum

from flashgen.analysis.linear import Algebra, K, Linear, Q, term
from flashgen.lang.expr import Node, depends_on


class Seen(enum.Enum):
    """What of a pair of query and key a value depends on."""

    NOTHING = "nothing"
    QUERY = "query"
    KEY = "key"
    DISTANCE = "distance"
    PAIR = "pair"


class Distances:
    """What stays as it is where a query and a key move together by any number; each fact is found once."""

    def __init__(self) -> None:
        self._algebra = Algebra()
        self._known: dict[Node, bool] = {}

    def __call__(self, root: Node) -> bool:
        """Whether a node depends on q and k through q - k alone, or on neither."""
        stack = [root]
        while stack:
            n = stack[-1]
            missing = [m for m in self._made_of(n) if m not in self._known]
            if n in self._known or not missing:
                self._known.setdefault(n, self._moves_with(n))
                stack.pop()
            else:
                stack.extend(missing)
        return self._known[root]

    def seen(self, n: Node) -> Seen:
        """What of query and key a node depends on."""
        by_query, by_key = depends_on(n, "q"), depends_on(n, "k")
        if by_query and by_key:
            return Seen.DISTANCE if self(n) else Seen.PAIR
        return Seen.QUERY if by_query else Seen.KEY if by_key else Seen.NOTHING

    def gathers(self, load: Node) -> bool:
        """Whether many pairs of a tile may read one element, whichever query and key they have: nothing of the pair
        selects it, or a distance that is clipped, or that a table or a function puts in a bucket."""
        seen = self.seen(load)
        return seen is Seen.NOTHING or (seen is Seen.DISTANCE and not any(map(self._steep, load.operands)))

    def _steep(self, index: Node) -> bool:
        """Whether an index is another one at each distance, but for those below 0, which may count from the end."""
        if index.op == "where" and index.operands[0].op == "lt" and index.operands[0].operands[0] is index.operands[2]:
            return self._steep(index.operands[2])
        return index.dtype.is_int and Q in self._form(index).terms

    def _form(self, n: Node) -> Linear:
        return self._algebra.form(n) if n.dtype.is_int else term(n)

    def _made_of(self, n: Node) -> tuple[Node, ...]:
        """What decides: the terms of a sum but q and k themselves, else the operands."""
        terms = self._form(n).terms
        return n.operands if n in terms else tuple(t for t in terms if t not in (Q, K))

    def _moves_with(self, n: Node) -> bool:
        terms = self._form(n).terms
        level = terms.get(Q, 0) + terms.get(K, 0) == 0
        return level and n.op != "score" and all(self._known[m] for m in self._made_of(n))
