"""What a mask says about tiles, as formulas small enough to judge at run time: a disjunction of zones and conditions.

The mask and its negation are brought to disjunctive normal form.  Comparisons of linear integer forms become bounds of
a `Zone`, conditions free of the position are kept whole, and everything else is left to abstract evaluation, with the
bounds that it implies added to the zone.  A tile is EMPTY exactly when no term of `visible` is possible in it, FULL
exactly when no term of `hidden` is, PARTIAL otherwise; `tiles` does that in Python, emitted CUDA in a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from flashgen.analysis import widths
from flashgen.analysis.cells import Cells, cells
from flashgen.analysis.equalities import chain, substituted
from flashgen.analysis.linear import LENGTH, Algebra, K, Linear, Q, Unspeakable, comparison, expression, term
from flashgen.analysis.summaries import Group, Summary, separated, summaries
from flashgen.analysis.zones import Zone
from flashgen.lang.build import apply
from flashgen.lang.expr import DType, Node, const, walk
from flashgen.lang.loops import LOOPS
from flashgen.lang.ranges import INT64_MAX, INT64_MIN

if TYPE_CHECKING:
    from flashgen.lang.variant import Variant

#: A mask of more terms, or of more bounds and conditions in all its terms, keeps what does not fit as conditions that
#: are judged whole.
MAX_TERMS = 32
MAX_ATOMS = 256

#: Steps of taking a mask apart; a step is a term of a linear form in a case, or two terms of conjunctions joined.  A
#: comparison, or a conjunction's next condition, that needs more than its own steps is judged whole, and so is what
#: still needs any when those of the mask are used up.
MAX_STEPS = 1 << 13
MAX_STEPS_OF_ONE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A conjunction: the pair lies in `zone`, every `uniform` condition holds (free of q and k, so exact for a tile),
    and every condition of `others` holds (judged by abstract evaluation over the tile)."""

    zone: Zone = field(default_factory=Zone)
    uniform: tuple[Node, ...] = ()
    others: tuple[Node, ...] = ()

    def nodes(self) -> Iterator[Node]:
        """Every expression of the term: bounds, then uniform conditions, then others."""
        yield from self.zone.nodes()
        yield from self.uniform
        yield from self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The analysis of a variant whose constants are bound.

    `visible` and `hidden` are disjunctions (no term: never; one term that asks nothing: always).  `exact`: zones and
    uniform conditions only, so that classes are exact and tiles can be counted without a walk.  `uses_batch` and
    `uses_head` say whether the mask depends on them.  `int64` are the int32 nodes, of the mask, the score and both
    disjunctions, whose values may leave int32 (see `widths`).  `judged_whole` are the conditions of the mask, as they
    were written, that were too large to take apart: a tile that one fills or empties may be PARTIAL.  `cells` are those
    of conditions that are judged by abstract evaluation: a PARTIAL tile that they cut is judged again by its parts.
    `summaries` are those of the parts of such conditions that only data bound.
    """

    variant: Variant
    visible: tuple[Term, ...]
    hidden: tuple[Term, ...]
    uses_batch: bool
    uses_head: bool
    exact: bool
    int64: frozenset[Node]
    judged_whole: tuple[Node, ...] = ()
    cells: Cells | None = None
    summaries: tuple[Summary, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of values that a tile is judged by; without any of a summary, all are one."""
        return tuple(Group) if any(one.grouped for one in self.summaries) else (Group.LOW,)

    def notes(self) -> tuple[str, ...]:
        """For a person: which parts of the mask were too large to take apart, and what that costs."""
        found = {_place(n): None for n in self.judged_whole}
        return tuple(
            f"{place} is too large to take apart: its values over a tile are judged as one, so a tile that it fills or"
            " empties may be visited and masked pair by pair"
            for place in found
        )


def _place(n: Node) -> str:
    return f"`{n.where.text.strip()}` ({n.where.path}:{n.where.line})" if n.where else "the mask"


@lru_cache(maxsize=256)
def analyse(variant: Variant) -> Facts:
    """The facts of a variant; its constants must be bound."""
    visible, hidden, too_large = ((Term(),), (), {}) if variant.mask is None else _disjunctions(variant.mask)
    whole = tuple(dict.fromkeys(too_large[n] for t in (*visible, *hidden) for n in t.others if n in too_large))
    algebra = Algebra()
    visible, hidden = (
        tuple(replace(t, others=tuple(separated(n, algebra) for n in t.others)) for t in side)
        for side in (visible, hidden)
    )
    terms = (*visible, *hidden)
    nodes = [n for t in terms for n in t.nodes()]
    others = [n for t in terms for n in t.others]
    found = cells(others)
    symbols = {n.attr for n in walk(nodes) if n.op == "index"}
    return Facts(
        variant=variant,
        visible=visible,
        hidden=hidden,
        uses_batch="b" in symbols,
        uses_head="h" in symbols,
        exact=not any(t.others for t in terms),
        int64=widths.wide([*variant.roots, *nodes]),
        judged_whole=whole,
        cells=found,
        summaries=summaries(others, groups=found is None or found.k is None),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Conditions as trees: literals, conjunctions and disjunctions; `whole` is the same condition as one node


@dataclass(frozen=True, slots=True)
class _Literal:
    """A conjunction of atoms; `bounds` are (kind of the zone, form) pairs."""

    bounds: tuple[tuple[str, Linear], ...] = ()
    uniform: tuple[Node, ...] = ()
    others: tuple[Node, ...] = ()

    @property
    def tells(self) -> bool:
        return bool(self.bounds or self.uniform) or self == _ALWAYS

    @property
    def exact(self) -> bool:
        return not self.others


@dataclass(frozen=True, slots=True, eq=False)
class _Several:
    """Conditions of which all hold (_And) or some (_Or).

    tells     splitting it up tells more than judging it whole
    exact     nothing in it is judged whole
    """

    parts: tuple[_Tree, ...]
    whole: Node
    tells: bool = field(init=False)
    exact: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tells", any(part.tells for part in self.parts))
        object.__setattr__(self, "exact", all(part.exact for part in self.parts))


class _And(_Several):
    __slots__ = ()


class _Or(_Several):
    __slots__ = ()


_Tree = _Literal | _And | _Or

_ALWAYS = _Literal()
_NEVER = _Or((), const(False))


def _all(parts: Iterable[_Tree], whole: Node) -> _Tree:
    parts = tuple(part for part in parts if part != _ALWAYS)
    if _NEVER in parts:
        return _NEVER
    return parts[0] if len(parts) == 1 else _And(parts, whole) if parts else _ALWAYS


def _any(parts: Iterable[_Tree], whole: Node) -> _Tree:
    parts = tuple(part for part in parts if part != _NEVER)
    if _ALWAYS in parts:
        return _ALWAYS
    if len(parts) == 1 or not parts:
        return parts[0] if parts else _NEVER
    return _Or(parts, whole) if any(part.tells for part in parts) else _Literal(others=(whole,))


def negated(condition: Node) -> Node:
    """The opposite condition; comparisons of ints flip, those of floats keep their meaning for NaN."""
    if condition.op == "logical_not":
        return condition.operands[0]
    flipped = {"eq": "ne", "ne": "eq", "lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}.get(condition.op)
    if flipped is None or condition.operands[0].dtype.is_float:
        return apply("logical_not", condition)
    return apply(flipped, *(condition.operands if flipped in ("eq", "ne") else condition.operands[::-1]))


class _TooLarge(Exception):
    """A comparison needs more steps than it has."""


class _Reader:
    """Reads conditions into trees, each once, pushing negation to its atoms.

    steps      that are left of MAX_STEPS
    too_large  what is judged whole for its size, each with the condition of the mask that it is, or is part of
    """

    def __init__(self) -> None:
        self.algebra = Algebra()
        self.steps = MAX_STEPS
        self.too_large: dict[Node, Node] = {}
        self._left, self._written = 0, const(False)  # of the comparison in hand: its steps, itself
        self._conditions: dict[tuple[Node, bool], _Tree] = {}
        self._inequalities: dict[Linear, _Tree] = {}

    def order(self, mask: Node) -> list[Node]:
        """The conditions under a mask, operands first, less those that only continue a chain of & or |."""

        def parts(n: Node) -> bool:
            return n.op not in ("load", *LOOPS) and not n.dtype.is_float and self.algebra.local(n)

        nodes = list(walk([mask], into=parts))
        users: dict[Node, set[str]] = {n: set() for n in nodes}
        for n in filter(parts, nodes):
            for operand in n.operands:
                users[operand].add(n.op)
        chained = ("logical_and", "logical_or")
        return [n for n in nodes if n.dtype is DType.BOOL and not (n.op in chained and users[n] == {n.op})]

    def condition(self, n: Node, polarity: bool) -> _Tree:
        """The tree of `n`, or of its negation where polarity is False."""
        found = self._conditions.get((n, polarity))
        if found is None:
            found = self._conditions[n, polarity] = self._read(n, polarity)
        return found

    def spend(self, steps: int) -> bool:
        """Whether the mask has so many steps left; they are taken then."""
        enough = steps <= self.steps
        if enough:
            self.steps -= steps
        return enough

    def _spend(self, form: Linear) -> None:
        """Take the steps of a case of the comparison in hand."""
        steps = 1 + len(form.terms)
        if steps > self._left or not self.spend(steps):
            raise _TooLarge
        self._left -= steps

    def _read(self, n: Node, polarity: bool) -> _Tree:
        whole = n if polarity else negated(n)
        if n.op == "const":
            return _ALWAYS if n.attr == polarity else _NEVER
        if n.op == "logical_not":
            return self.condition(n.operands[0], not polarity)
        if not self.algebra.local(n):
            return _Literal(uniform=(whole,))
        if n.op in ("logical_and", "logical_or"):
            parts = [self.condition(part, polarity) for part in chain(n)]
            return (_all if (n.op == "logical_and") == polarity else _any)(parts, whole)
        tree = None
        if n.op == "where":
            tree = self._choice(n.operands[0], *(self.condition(o, polarity) for o in n.operands[1:]), whole)
        elif n.op == "logical_xor" or (n.op in ("eq", "ne") and n.operands[0].dtype is DType.BOOL):
            a, b = n.operands
            differ = (n.op != "eq") == polarity
            tree = self._choice(a, self.condition(b, not differ), self.condition(b, differ), whole)
        elif n.op in ("eq", "ne", "lt", "le", "gt", "ge") and all(o.dtype.is_int for o in n.operands):
            return self._comparison(n, polarity, whole)
        return tree if tree is not None and tree.tells else _Literal(others=(whole,))

    def _choice(self, choice: Node, chosen: _Tree, otherwise: _Tree, whole: Node) -> _Tree:
        """`chosen` where the choice holds, else `otherwise`."""
        parts = []
        for polarity, tree in ((True, chosen), (False, otherwise)):
            condition = choice if polarity else negated(choice)
            picked = apply("logical_and", condition, _node(tree))
            parts.append(_all((self.condition(choice, polarity), tree), picked))
        return _any(parts, whole)

    def _comparison(self, n: Node, polarity: bool, whole: Node) -> _Tree:
        """The tree of a comparison of ints, or of its negation."""
        a, b = map(self.algebra.form, n.operands)
        outer = self._left, self._written
        self._left, self._written = MAX_STEPS_OF_ONE, n
        try:
            return self._compared(n.op, a - b, polarity)
        except Unspeakable:
            return _Literal(others=(whole,))
        except _TooLarge:
            self.too_large[whole] = n
            return _Literal(others=(whole,))
        finally:
            self._left, self._written = outer

    def _compared(self, op: str, difference: Linear, polarity: bool) -> _Tree:
        """The tree of `difference op 0`, or of its negation."""
        if op in ("eq", "ne"):
            return self._equal(difference) if (op == "eq") == polarity else self._unequal(difference)
        if op in ("gt", "ge"):
            op, difference = {"gt": "lt", "ge": "le"}[op], -difference
        form = difference + (op == "lt")
        return self._at_most_zero(form if polarity else -form + 1)

    def _condition_of(self, relation: str, form: Linear) -> _Literal:
        whole = self.algebra.comparison(relation, form)
        if not self.algebra.long.isdisjoint(form.terms):
            self.too_large.setdefault(whole, self._written)
        return _Literal(others=(whole,)) if self.algebra.local(whole) else _Literal(uniform=(whole,))

    def _equal(self, form: Linear) -> _Tree:
        whole = self._condition_of("==", form)
        if whole.uniform:
            return whole
        parts = self._at_most_zero(form), self._at_most_zero(-form)
        both = _all(parts, *whole.others)
        if both == _NEVER or both.exact:
            return both
        return _Literal(bounds=tuple(bound for part in parts for bound in _implied(part)), others=whole.others)

    def _unequal(self, form: Linear) -> _Tree:
        whole = self._condition_of("!=", form)
        if whole.uniform:
            return whole
        either = _any((self._at_most_zero(form + 1), self._at_most_zero(-form + 1)), *whole.others)
        return either if either.exact else whole

    def _at_most_zero(self, form: Linear) -> _Tree:
        """The tree of `form <= 0`."""
        found = self._inequalities.get(form)
        if found is None:
            found = self._inequalities[form] = self._inequality(form)
        return found

    def _inequality(self, form: Linear) -> _Tree:
        algebra = self.algebra
        if algebra.always(form):
            return _ALWAYS
        if algebra.never(form):
            return _NEVER
        local = [n for n in form.terms if algebra.local(n)]
        if not local:
            return self._condition_of("<=", form)
        if (bound := self._bound(form, local)) is not None:
            return _Literal(bounds=(bound,))
        for n in local:
            split = self._split(n, form)
            if split is not None and split.tells:
                return split
        return self._relaxed(form)

    def _split(self, n: Node, form: Linear) -> _Tree | None:
        """`form <= 0` by the cases of one of its terms: a minimum, maximum, absolute value, choice or truth value."""
        coefficient, rest = form.terms[n], form.without([n])

        def case(value: Linear) -> _Tree:
            return self._at_most_zero(rest + value * coefficient)

        truth = n.op == "cast" and n.operands[0].dtype is DType.BOOL
        if n.op not in ("minimum", "maximum", "abs", "where") and not truth:
            return None
        self._spend(form)
        whole = self.algebra.comparison("<=", form)
        if n.op in ("minimum", "maximum", "abs"):
            if n.op == "abs" and self.algebra.value(n.operands[0]).lo == INT64_MIN:  # which has none
                return None
            forms = [self.algebra.form(o) for o in n.operands]
            cases = map(case, forms if n.op != "abs" else (forms[0], -forms[0]))
            return (_any if (n.op == "minimum") == (coefficient > 0) else _all)(cases, whole)
        if n.op == "where":
            chosen, otherwise = (case(self.algebra.form(o)) for o in n.operands[1:])
            return self._choice(n.operands[0], chosen, otherwise, whole)
        return self._choice(n.operands[0], case(Linear({}, 1)), case(Linear({}, 0)), whole)

    def _relaxed(self, form: Linear) -> _Tree:
        """`form <= 0` judged whole, with the bounds it implies: x // n lies in [(x - n + 1) / n, x / n], a remainder in
        [0, n - 1], and any other term within what is known of it.  One quotient alone is inverted exactly."""
        algebra = self.algebra
        exact = True
        bounded = form
        while True:
            local = [n for n in bounded.terms if algebra.local(n)]
            curved = [n for n in local if n not in LENGTH]
            if not curved:
                break
            alone = len(local) == 1 and abs(bounded.terms[local[0]]) == 1
            exact = exact and alone and self._quotient(local[0]) is not None
            bounded = self._relax(bounded, curved)
            if bounded is None:
                return self._condition_of("<=", form)
        if exact and bounded is not form:
            self._spend(form)
            return self._at_most_zero(bounded)
        if algebra.never(bounded):
            return _NEVER
        bound = None if algebra.always(bounded) else self._bound(bounded, local)
        implied = [bound]
        if bound is None and len(local) == 2:  # slanted: each of q and k is bounded by the other's range
            edges = [self._without(bounded, position) for position in local]
            implied = [self._bound(e, [p for p in local if p in e.terms]) for e in edges if not algebra.always(e)]
        return _Literal(bounds=tuple(filter(None, implied)), others=self._condition_of("<=", form).others)

    def _bound(self, form: Linear, local: list[Node]) -> tuple[str, Linear] | None:
        """`form <= 0` as a bound that can be computed in int64; None where there is none."""
        tame = self.algebra.tame(form)
        return None if tame is None else _bound(tame, local)

    def _without(self, form: Linear, position: Node) -> Linear:
        """The form with q (or k) at the end of its range where the form is least."""
        coefficient = form.terms[position]
        rest = form.without([position])
        return rest if coefficient > 0 else rest + (term(LENGTH[position]) - 1) * coefficient

    def _quotient(self, n: Node) -> tuple[Linear, Node] | None:
        """(x, n) of x // n or x >> log2(n), for n free of the position and at least 1."""
        if n.op == "floor_div" and self._positive(n.operands[1]):
            return self.algebra.form(n.operands[0]), n.operands[1]
        if n.op == "shift_right" and n.operands[1].op == "const" and 0 <= n.operands[1].attr < 31:
            return self.algebra.form(n.operands[0]), const(1 << n.operands[1].attr)
        return None

    def _positive(self, divisor: Node) -> bool:
        return not self.algebra.local(divisor) and int(self.algebra.value(divisor).lo) >= 1

    def _relax(self, form: Linear, curved: list[Node]) -> Linear | None:
        """A form that is at most `form` times a positive number, with these terms bounded by what they are made of."""
        algebra = self.algebra
        rest = form.without(curved)
        quotients: list[tuple[int, Linear, Node]] = []
        for n in curved:
            c = form.terms[n]
            if (quotient := self._quotient(n)) is not None:
                quotients.append((c, *quotient))
            elif n.op == "mod" and self._positive(n.operands[1]):
                rest = rest + (algebra.form(n.operands[1]) - 1) * min(c, 0)
            else:
                known = algebra.value(n)
                rest = rest + c * int(known.lo if c > 0 else known.hi)
        divisors = [algebra.form(divisor) for _, _, divisor in quotients]
        if all(not divisor.terms for divisor in divisors):
            scale = math.lcm(*(divisor.constant for divisor in divisors))
            total = rest * scale
            factors = [scale // divisor.constant for divisor in divisors]
        elif all(divisor == divisors[0] for divisor in divisors) and not any(map(algebra.local, rest.terms)):
            divisor = quotients[0][2]
            if any(algebra.largest(n) * algebra.largest(divisor) > INT64_MAX for n in rest.terms):
                return None
            total = Linear({apply("mul", n, divisor): c for n, c in rest.terms.items()}) + divisors[0] * rest.constant
            factors = [1] * len(divisors)
        else:
            return None
        for (c, x, _), divisor, factor in zip(quotients, divisors, factors, strict=True):
            total = total + (x - divisor + 1 if c > 0 else x) * (c * factor)
        return total


def _node(tree: _Tree) -> Node:
    """The condition of a tree as one node."""
    if not isinstance(tree, _Literal):
        return tree.whole
    atoms = [*tree.uniform, *tree.others]
    if not tree.others:  # beside a condition judged whole, bounds are what it implies
        atoms += [_bound_condition(kind, form) for kind, form in tree.bounds]
    return reduce(lambda a, b: apply("logical_and", a, b), atoms) if atoms else const(True)


def _bound_condition(kind: str, form: Linear) -> Node:
    quantity = {"q": term(Q), "k": term(K), "d": term(Q) - term(K)}[kind[0]]
    return comparison("<=", quantity - form if kind.endswith("hi") else form - quantity)


def _implied(tree: _Tree) -> tuple[tuple[str, Linear], ...]:
    """Bounds that hold wherever the tree does."""
    found, stack, seen = [], [tree], set()
    while stack:
        part = stack.pop()
        if part in seen:
            continue
        seen.add(part)
        if isinstance(part, _Literal):
            found.extend(part.bounds)
        elif isinstance(part, _And):
            stack.extend(reversed(part.parts))
    return tuple(dict.fromkeys(found))


def _bound(form: Linear, local: list[Node]) -> tuple[str, Linear] | None:
    """`form <= 0` as a bound on q, on k or on d = q - k; None where it is none."""
    q, k = form.terms.get(Q, 0), form.terms.get(K, 0)
    if any(n not in LENGTH for n in local) or not local or (q and k and q != -k):
        return None
    quantity, c = ("q", q) if not k else ("d", q) if q else ("k", k)
    rest = form.without([Q, K])
    return (f"{quantity}_hi", _floor(-rest, c)) if c > 0 else (f"{quantity}_lo", _floor(rest - c - 1, -c))


def _floor(form: Linear, divisor: int) -> Linear:
    """floor(form / divisor) for a positive divisor."""
    whole = Linear({n: c // divisor for n, c in form.terms.items() if c % divisor == 0})
    ragged = Linear({n: c for n, c in form.terms.items() if c % divisor})
    if not ragged.terms:
        return whole + form.constant // divisor
    return whole + term(apply("floor_div", expression(ragged + form.constant), divisor))


# ---------------------------------------------------------------------------------------------------------------------
# Disjunctive normal form


@dataclass(frozen=True, slots=True)
class _Draft:
    """A term in the making: the tightest known bounds of each kind, as forms."""

    bounds: tuple[tuple[str, Linear], ...] = ()
    uniform: tuple[Node, ...] = ()
    others: tuple[Node, ...] = ()

    @property
    def atoms(self) -> int:
        return len(self.bounds) + len(self.uniform) + len(self.others)


def _disjunctions(mask: Node) -> tuple[tuple[Term, ...], tuple[Term, ...], dict[Node, Node]]:
    """The mask and its negation, and what is judged whole for its size."""
    mask = substituted(mask)
    reader = _Reader()
    normaliser = _Normaliser(reader)
    for n in reader.order(mask):  # operands first, so that neither class recurses deeply
        visible, hidden = (normaliser.drafts(reader.condition(n, polarity), n) for polarity in (True, False))
    return tuple(map(_finished, visible)), tuple(map(_finished, hidden)), reader.too_large


class _Normaliser:
    """Multiplies trees out, each once, dropping contradictions, weaker bounds and terms inside other terms."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.algebra = reader.algebra
        self._known: dict[_Tree, list[_Draft]] = {}
        self._implied: dict[tuple[tuple[str, Linear], tuple[str, Linear]], bool] = {}

    def drafts(self, tree: _Tree, written: Node) -> list[_Draft]:
        """At most MAX_TERMS terms, of MAX_ATOMS atoms, whose disjunction is the tree; what does not fit is judged
        whole.  `written` is the condition of the mask that the tree is of."""
        found = self._known.get(tree)
        if found is None:
            found = self._known[tree] = self._drafts(tree, written)
        return found

    def _drafts(self, tree: _Tree, written: Node) -> list[_Draft]:
        if isinstance(tree, _Literal):
            draft = self._joined(_Draft(), tree)
            return [] if draft is None else [draft]
        found: list[_Draft] = []
        if isinstance(tree, _Or):
            for part in tree.parts:
                found = self._absorbed(found, self.drafts(part, written))
                if not self._fits(found):
                    return [self._opaque([tree], written)]
            return found
        found.append(_Draft())
        whole: list[_Tree] = []
        for part in tree.parts:
            by_part = self.drafts(part, written)
            product = None if whole and len(by_part) > 1 else self._affordable(found, by_part)
            if product is not None and self._fits(product):
                found = product
            else:
                whole.append(part)
        return self._product(found, [self._opaque(whole, written)]) if whole else found

    @staticmethod
    def _fits(drafts: list[_Draft]) -> bool:
        return len(drafts) <= MAX_TERMS and sum(draft.atoms for draft in drafts) <= MAX_ATOMS

    def _opaque(self, trees: list[_Tree], written: Node) -> _Draft:
        """All of these conditions, judged as one."""
        found: dict[bool, Node] = {}
        for n in map(_node, trees):
            local = self.algebra.local(n)
            found[local] = apply("logical_and", found[local], n) if local in found else n
        if True in found:
            self.reader.too_large.setdefault(found[True], written)
        return _Draft(*((), *((found[local],) if local in found else () for local in (False, True))))

    def _affordable(self, left: list[_Draft], right: list[_Draft]) -> list[_Draft] | None:
        """The product; None where it takes too many steps.  Joining one term with one takes none."""
        steps = len(left) * len(right)
        affordable = steps <= 1 or (steps <= MAX_STEPS_OF_ONE and self.reader.spend(steps))
        return self._product(left, right) if affordable else None

    def _product(self, left: list[_Draft], right: list[_Draft]) -> list[_Draft]:
        joined = (self._joined(a, b) for a in left for b in right)
        return self._absorbed([], [draft for draft in joined if draft is not None])

    def _joined(self, a: _Draft, b: _Draft | _Literal) -> _Draft | None:
        """Both conditions; None where they contradict each other."""
        bounds = list(a.bounds)
        for kind, form in b.bounds:
            if any(self._implies(known, (kind, form)) for known in bounds):
                continue
            bounds = [known for known in bounds if not self._implies((kind, form), known)]
            bounds.append((kind, form))
        for quantity in "qkd":
            highs = [form for kind, form in bounds if kind == f"{quantity}_hi"]
            if any(self._above(form, hi) for kind, form in bounds if kind == f"{quantity}_lo" for hi in highs):
                return None
        uniform = tuple(dict.fromkeys(a.uniform + b.uniform))
        others = tuple(dict.fromkeys(a.others + b.others))
        conditions = {*uniform, *others}
        if any(negated(n) in conditions for n in conditions):
            return None
        return _Draft(tuple(bounds), uniform, others)

    def _above(self, a: Linear, b: Linear) -> bool:
        """Whether a > b in every problem."""
        return self.algebra.extent(a - b)[0] > 0

    def _implies(self, a: tuple[str, Linear], b: tuple[str, Linear]) -> bool:
        """Whether bound a is known to be at least as tight as bound b."""
        if a[0] != b[0]:
            return False
        found = self._implied.get((a, b))
        if found is None:
            extent = self.algebra.extent(b[1] - a[1] if a[0].endswith("hi") else a[1] - b[1])
            found = self._implied[a, b] = extent[0] >= 0
        return found

    def _inside(self, a: _Draft, b: _Draft) -> bool:
        """Whether term a is known to be part of term b."""
        return (
            set(b.uniform) <= set(a.uniform)
            and set(b.others) <= set(a.others)
            and all(any(self._implies(have, want) for have in a.bounds) for want in b.bounds)
        )

    def _absorbed(self, kept: list[_Draft], drafts: list[_Draft]) -> list[_Draft]:
        """The terms of both lists less those inside another."""
        for draft in drafts:
            if not any(self._inside(draft, other) for other in kept):
                kept = [other for other in kept if not self._inside(other, draft)]
                kept.append(draft)
        return kept


def _finished(draft: _Draft) -> Term:
    bounds: dict[str, list[Node]] = {kind.name: [] for kind in fields(Zone)}
    for kind, form in draft.bounds:
        bounds[kind].append(expression(form))
    zone = Zone(**{kind: tuple(dict.fromkeys(nodes)) for kind, nodes in bounds.items()})
    return Term(zone=zone, uniform=draft.uniform, others=draft.others)
