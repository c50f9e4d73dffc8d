"""What of a query and a key an expression sees: both, one of them, or only how far apart they are."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.analysis.cells import single
from flashgen.analysis.linear import Algebra, K, Linear, Q, term
from flashgen.lang.build import apply
from flashgen.lang.expr import Node


class Seen(enum.Enum):
    """What of a pair of query and key a value depends on."""

    NOTHING = "nothing"
    QUERY = "query"
    KEY = "key"
    DISTANCE = "distance"
    PAIR = "pair"

    def beside(self, other: Seen) -> Seen:
        """What a function of two values sees."""
        if Seen.NOTHING in (self, other):
            return other if self is Seen.NOTHING else self
        return self if self is other else Seen.PAIR


class Distances:
    """What values see anywhere, or within blocks of `queries` x `keys` that start at multiples of both; each fact is
    found once.

    In a block q // 64 and k // 64 may be one number each, and then q % 64 - k % 64 is a distance.
    """

    def __init__(self, queries: int = 0, keys: int = 0) -> None:
        self._algebra = Algebra()
        self._block = {"q": queries, "k": keys} if queries else None
        self._known: dict[Node, Seen] = {Q: Seen.QUERY, K: Seen.KEY}

    def seen(self, root: Node) -> Seen:
        """What of query and key a value depends on."""
        stack = [root]
        while stack:
            n = stack[-1]
            missing = [] if n in self._known else [m for m in self._made_of(n) if m not in self._known]
            if not missing:
                self._known.setdefault(n, self._seen(n))
                stack.pop()
            stack.extend(missing)
        return self._known[root]

    def gathers(self, load: Node) -> bool:
        """Whether many pairs of a tile may read one element, whichever query and key they have: nothing of the pair
        selects it, or a distance that is clipped, or that a table or a function puts in a bucket."""
        seen = self.seen(load)
        return seen is Seen.NOTHING or (seen is Seen.DISTANCE and not any(map(self._steep, load.operands)))

    def _steep(self, index: Node) -> bool:
        """Whether an index is another one at each distance, but for those below 0, which may count from the end."""
        if index.op == "where" and index.operands[0].op == "lt" and index.operands[0].operands[0] is index.operands[2]:
            return self._steep(index.operands[2])
        return Q in self._form(index).terms

    def _seen(self, n: Node) -> Seen:
        if n.op == "score":
            return Seen.PAIR
        terms, others = self._form(n).terms, _all(self._known[m] for m in self._made_of(n))
        of_q, of_k = terms.get(Q, 0), terms.get(K, 0)
        if of_q + of_k == 0:
            return others.beside(Seen.DISTANCE if of_q else Seen.NOTHING)
        return _all([others, Seen.QUERY if of_q else Seen.NOTHING, Seen.KEY if of_k else Seen.NOTHING])

    def _made_of(self, n: Node) -> tuple[Node, ...]:
        """What decides, beside multiples of q and k: the other terms of a sum, else the operands; nothing of what a
        block has one value of."""
        if self._block is not None and n.dtype.is_int and single(n, self._block):
            return ()
        terms = self._form(n).terms
        return n.operands if n in terms else tuple(t for t in terms if t not in (Q, K))

    def _form(self, n: Node) -> Linear:
        """A sum with its coefficients of q and k; a remainder of what a block has one quotient of is as good as what is
        divided."""
        if not n.dtype.is_int:
            return term(n)
        form = self._algebra.form(n)
        if self._block is None:
            return form
        for t, coefficient in form.terms.items():
            if single(t, self._block):
                form = form.without([t])
            elif t.op == "mod" and single(apply("floor_div", *t.operands), self._block):
                form = form.without([t]) + self._form(t.operands[0]) * coefficient
        return form


#: Queries of blocks within which reads of a tile are looked at, the most first, and keys: those of a block of products.
BLOCKS, KEYS = (64, 32, 16, 8), 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What selects the element of a captured tensor that a read has.

    seen       of query and key, in blocks of so many `queries` by KEYS keys; 0: anywhere
    gathers    many pairs of a tile may read one element (`Distances.gathers`)
    distances  what tells it of other values there
    """

    seen: Seen
    queries: int
    gathers: bool
    distances: Distances


def selection(load: Node, *, aligned: bool) -> Selection:
    """What selects an element: less than a pair in blocks, where that is so anywhere only of a pair.

    Blocks that see nothing come before larger ones.  `aligned`: tiles start at multiples of their size.
    """
    whole = Distances()
    seen = whole.seen(load)
    anywhere = Selection(seen=seen, queries=0, gathers=whole.gathers(load), distances=whole)
    if not aligned or seen is not Seen.PAIR:
        return anywhere
    within = [(queries, Distances(queries, KEYS)) for queries in BLOCKS]
    found = [Selection(seen=d.seen(load), queries=queries, gathers=False, distances=d) for queries, d in within]
    alike = [one for one in found if one.seen is Seen.NOTHING]
    less = [one for one in found if one.seen is not Seen.PAIR]
    return (alike or less or [anywhere])[0]


def _all(seen: Iterable[Seen]) -> Seen:
    found = Seen.NOTHING
    for one in seen:
        found = found.beside(one)
    return found
