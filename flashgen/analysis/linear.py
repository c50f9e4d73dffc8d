"""Integer expressions as linear forms: a constant plus integer multiples of terms, q and k among them.

A form is a number of any size: an int32 operation that could overflow is widened (`widths`), and one that could leave
int64, where it wraps, is a term of its own.  What is made of a form again, a bound or a comparison, is computed in
int64 and must not wrap: one term that is too large for that, a 64-bit parameter or captured element without bounds, is
clamped so far out that no comparison with the rest changes (`Algebra.tame`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

from flashgen.analysis.abstract import Intervals, anywhere
from flashgen.analysis.zones import REACH, clamped
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

#: Terms that add up to no more than one and a half times this stay in int64 in any order.
FITS = 1 << 62


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


class Unspeakable(Exception):
    """A comparison of a form cannot be computed in int64."""


class Algebra:
    """Linear forms of int nodes, with what is known of nodes in any problem; each fact is found once."""

    def __init__(self) -> None:
        self.value = Intervals(anywhere)
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
        """The form, or `n` as one term where it is long, or could leave int64 and wrap."""
        if len(form.terms) > MAX_TERMS:
            self.long.add(n)
            return term(n)
        lo, hi = self.extent(form)
        return form if lo >= INT64_MIN and hi <= INT64_MAX else term(n)

    def _fits(self, cast: Node) -> bool:
        """Whether an int cast changes no value."""
        low, high = (INT32_MIN, INT32_MAX) if cast.dtype is DType.INT32 else (INT64_MIN, INT64_MAX)
        x = self.value(cast.operands[0])
        return low <= int(x.lo) and int(x.hi) <= high

    def extent(self, form: Linear) -> tuple[int, int]:
        """The least and greatest value of the form in any problem."""
        lo = hi = form.constant
        for n, c in form.terms.items():
            x = self.value(n)
            low, high = int(x.lo) * c, int(x.hi) * c
            lo, hi = lo + min(low, high), hi + max(low, high)
        return lo, hi

    def largest(self, n: Node) -> int:
        """The largest magnitude of a node in any problem."""
        x = self.value(n)
        return max(-int(x.lo), int(x.hi))

    def _sizes(self, form: Linear) -> tuple[dict[Node, int], int]:
        """The largest magnitude of each term in any problem, and that of any part of the form."""
        sizes = {n: abs(c) * self.largest(n) for n, c in form.terms.items()}
        return sizes, sum(sizes.values()) + abs(form.constant)

    def tame(self, form: Linear) -> Linear | None:
        """A form of the same sign at every position, any part of which is within FITS; None where there is none."""
        sizes, total = self._sizes(form)
        if total <= FITS:
            return form
        wild = max(sizes, key=sizes.__getitem__, default=None)
        rest = total - sizes.get(wild, 0)
        if wild is None or abs(form.terms[wild]) != 1 or rest > FITS // 4:
            return None
        limit = REACH if rest <= REACH // 2 else FITS // 2
        return Linear({clamped(n, limit) if n is wild else n: c for n, c in form.terms.items()}, form.constant)

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
        return self.extent(self._at_edge(form, upper=True))[1] <= 0

    def never(self, form: Linear) -> bool:
        """Whether form <= 0 is known to fail at every position of every problem."""
        return self.extent(self._at_edge(form, upper=False))[0] > 0

    def comparison(self, relation: str, form: Linear) -> Node:
        """`form relation 0` as a node with no negative coefficient: relation is "<=", "==" or "!=".

        Raises Unspeakable where it cannot be computed in int64.
        """
        _, *sides = _sides(relation, form)
        computes = any(side.terms and (side.constant or list(side.terms.values()) != [1]) for side in sides)
        if (computes or abs(form.constant) > FITS) and self._sizes(form)[1] > FITS + FITS // 2:
            form = self.tame(form)
            if form is None:
                raise Unspeakable
        return comparison(relation, form)


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
    """`form relation 0` of a tame form as a node."""
    op, left, right = _sides(relation, form)
    return apply(op, expression(left), expression(right))


def _sides(relation: str, form: Linear) -> tuple[str, Linear, Linear]:
    """The op and both sides of `form relation 0`."""
    left = Linear({n: c for n, c in form.terms.items() if c > 0}, max(form.constant, 0))
    right = Linear({n: -c for n, c in form.terms.items() if c < 0}, max(-form.constant, 0))
    op = {"<=": "le", "==": "eq", "!=": "ne"}[relation]
    return ("lt", left - 1, right) if op == "le" and left.constant == 1 else (op, left, right)


def _scaled(n: Node, c: int) -> Node:
    return n if c == 1 else apply("mul", n, c)
