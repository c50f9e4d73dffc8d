"""Integer expressions as linear forms: a constant plus integer multiples of terms, q and k among them.

Linear rewriting is exact because integers of an expression are exact: an int32 operation that could overflow is widened
(`widths`), and a form that could leave int64 is not rewritten at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

from flashgen.analysis.abstract import Judge, anywhere
from flashgen.lang.build import apply, literal
from flashgen.lang.expr import DType, Node, node, walk
from flashgen.lang.ranges import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN

Q = node("index", DType.INT32, (), "q")
K = node("index", DType.INT32, (), "k")
LENGTH = {
    Q: node("problem", DType.INT32, (), "q_len"),
    K: node("problem", DType.INT32, (), "kv_len"),
}

#: A sum of more terms is one term of its own: linear forms stay cheap, and a mask's bounds short.
MAX_TERMS = 32


@dataclass(frozen=True, slots=True)
class Linear:
    """`constant` plus the sum of `coefficient * term`; no coefficient is 0, terms keep the order they were met in."""

    terms: dict[Node, int] = field(default_factory=dict)
    constant: int = 0

    def __hash__(self) -> int:
        return hash((frozenset(self.terms.items()), self.constant))

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.constant + other)
        total = dict(self.terms)
        for term, coefficient in other.terms.items():
            total[term] = total.get(term, 0) + coefficient
        return Linear({t: c for t, c in total.items() if c}, self.constant + other.constant)

    def __sub__(self, other: Linear | int) -> Linear:
        return self + -other

    def __neg__(self) -> Linear:
        return self * -1

    def __mul__(self, factor: int) -> Linear:
        return Linear({t: c * factor for t, c in self.terms.items()} if factor else {}, self.constant * factor)

    def without(self, terms: Iterable[Node]) -> Linear:
        """The form less these terms."""
        dropped = set(terms)
        return Linear({t: c for t, c in self.terms.items() if t not in dropped}, self.constant)


def term(n: Node) -> Linear:
    """One node as a form of its own."""
    return Linear({n: 1})


class Algebra:
    """Linear forms of int nodes, with what is known of nodes in any problem; each fact is found once."""

    def __init__(self) -> None:
        self.value = Judge(anywhere)
        self.long: set[Node] = set()  # sums of more than MAX_TERMS terms
        self._local: dict[Node, bool] = {}
        self._forms: dict[Node, Linear] = {}

    def local(self, n: Node) -> bool:
        """Whether the value depends on the position: on q or on k."""
        found = self._local.get(n)
        if found is None:
            for m in walk([n], into=lambda m: m not in self._local):
                if m not in self._local:
                    self._local[m] = m in (Q, K) or any(self._local[o] for o in m.operands)
            found = self._local[n]
        return found

    def form(self, n: Node) -> Linear:
        """The linear form of an int node; what is not linear in it stays a term."""
        found = self._forms.get(n)
        if found is None:
            for m in walk([n], into=lambda m: m not in self._forms):
                if m.dtype.is_int and m not in self._forms:
                    self._forms[m] = self._form(m)
            found = self._forms[n]
        return found

    def _form(self, n: Node) -> Linear:
        if n.op == "const":
            return Linear({}, n.attr)
        forms = [self._forms[o] for o in n.operands if o.dtype.is_int]
        if n.op == "add":
            return self._kept(forms[0] + forms[1], n)
        if n.op == "sub":
            return self._kept(forms[0] - forms[1], n)
        if n.op == "neg":
            return self._kept(-forms[0], n)
        if n.op == "mul":
            for factor, other in (forms, forms[::-1]):
                if not factor.terms:
                    return self._kept(other * factor.constant, n)
        if n.op == "shift_left" and not forms[1].terms and 0 <= forms[1].constant < 32:
            return self._kept(forms[0] * (1 << forms[1].constant), n)
        if n.op == "cast" and forms and self._fits(n):
            return forms[0]
        return term(n)

    def _kept(self, form: Linear, n: Node) -> Linear:
        """The form, or `n` as one term where the form could leave int64 or is long."""
        if len(form.terms) > MAX_TERMS:
            self.long.add(n)
            return term(n)
        return form if self.extent(form) is not None else term(n)

    def _fits(self, cast: Node) -> bool:
        """Whether an int cast changes no value."""
        low, high = (INT32_MIN, INT32_MAX) if cast.dtype is DType.INT32 else (INT64_MIN, INT64_MAX)
        x = self.value(cast.operands[0])
        return low <= int(x.lo) and int(x.hi) <= high

    def extent(self, form: Linear) -> tuple[int, int] | None:
        """The least and greatest value of the form in any problem; None where they may lie outside int64."""
        lo = hi = form.constant
        for n, c in form.terms.items():
            x = self.value(n)
            low, high = int(x.lo) * c, int(x.hi) * c
            lo, hi = lo + min(low, high), hi + max(low, high)
        return (lo, hi) if lo >= INT64_MIN and hi <= INT64_MAX else None

    def _at_edge(self, form: Linear, upper: bool) -> Linear:
        """The form's greatest (or least) value over the positions of a problem, by its own q and k terms."""
        for position, length in LENGTH.items():
            c = form.terms.get(position, 0)
            form = form.without([position])
            if c and (c > 0) == upper:
                form = form + (term(length) - 1) * c
        return form

    def always(self, form: Linear) -> bool:
        """Whether form <= 0 is known at every position of every problem."""
        found = self.extent(self._at_edge(form, upper=True))
        return found is not None and found[1] <= 0

    def never(self, form: Linear) -> bool:
        """Whether form <= 0 is known to fail at every position of every problem."""
        found = self.extent(self._at_edge(form, upper=False))
        return found is not None and found[0] > 0


def expression(form: Linear) -> Node:
    """The form as a node: positive terms first, the constant last."""
    positive = [_scaled(n, c) for n, c in form.terms.items() if c > 0]
    negative = [_scaled(n, -c) for n, c in form.terms.items() if c < 0]
    constant = form.constant
    if positive:
        total = reduce(lambda a, b: apply("add", a, b), positive)
    elif negative and not constant:
        total = apply("neg", negative.pop(0))
    else:
        total, constant = literal(constant), 0
    for n in negative:
        total = apply("sub", total, n)
    if constant:
        total = apply("add", total, constant) if constant > 0 else apply("sub", total, -constant)
    return total


def comparison(relation: str, form: Linear) -> Node:
    """`form relation 0` as a node with no negative coefficient: relation is "<=", "==" or "!="."""
    left = Linear({n: c for n, c in form.terms.items() if c > 0}, max(form.constant, 0))
    right = Linear({n: -c for n, c in form.terms.items() if c < 0}, max(-form.constant, 0))
    op = {"<=": "le", "==": "eq", "!=": "ne"}[relation]
    if op == "le" and left.constant == 1:
        op, left = "lt", left - 1
    return apply(op, expression(left), expression(right))


def _scaled(n: Node, c: int) -> Node:
    return n if c == 1 else apply("mul", n, c)
