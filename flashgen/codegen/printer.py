"""Expressions as CUDA: the only Python that writes C++."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from flashgen.analysis.abstract import Intervals, anywhere
from flashgen.analysis.tanh import caps_score
from flashgen.analysis.zones import clamped_operand
from flashgen.codegen.device import identifiers
from flashgen.lang.expr import LEAVES, DType, LoopIndex, Node, Tensor, depends_on, layer, loop_indices, walk
from flashgen.lang.loops import LOOPS
from flashgen.lang.ops import OPS
from flashgen.lang.ranges import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN
from flashgen.planning.program import CTYPES

#: Characters of an expression beyond which it is named, so that no text nests without end.
LONGEST = 600

#: How tightly C++ binds: an operand that binds less tightly than its place goes into parentheses.
CALL, UNARY, _TERNARY, _ANYTHING = 16, 15, 3, 0
_BINARY = {
    **dict.fromkeys(("*", "/", "//", "%"), 13),
    **dict.fromkeys(("+", "-"), 12),
    **dict.fromkeys(("<<", ">>"), 11),
    **dict.fromkeys(("<", "<=", ">", ">="), 10),
    **dict.fromkeys(("==", "!="), 9),
    **{"&": 8, "^": 7, "|": 6, "&&": 5, "||": 4},
}

#: Operators that few people can rank: what binds differently stands in parentheses beside them.
_UNFAMILIAR = {8, 7, 6, 11}

#: Within 2 units in the last place, and the reciprocal of what is uniform leaves the loop.
_QUICK = {"div": "{0} * rcp({1})"}

_EXACT = {"add": "__fadd_rn", "sub": "__fsub_rn", "mul": "__fmul_rn", "div": "__fdiv_rn"}

#: What a little more or less of a float may change by much.
JUMPS = {"floor", "eq", "ne", "lt", "le", "gt", "ge"}

#: Conditions of a mask, of which all are cheap: a branch for each element would cost more than to evaluate them all.
_EAGER = {"logical_and": "{0} & {1}", "logical_or": "{0} | {1}"}

#: Integer division of what is never negative.
_PLAIN = {"floor_div": "{0} / {1}", "mod": "{0} % {1}"}

#: Arithmetic whose result may leave 64 bits, which C++ leaves undefined.
_WRAPPING = {
    **{name: f"wrapping_{name}({{0}}, {{1}})" for name in ("add", "sub", "mul", "shift_left", "floor_div")},
    **{name: f"wrapping_{name}({{0}})" for name in ("neg", "abs")},
}

#: Sums, of which NVRTC may see at most one operand when they have 64 bits (`opaque_i64` in device/math.cuh).
_SUMS = {"add", "sub"}


#: What a score function calls the difference of two positions as a float, where it is given that.
DISTANCES = {("q", "k"): "q_minus_k", ("k", "q"): "k_minus_q"}


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of C++ and how tightly its outermost operator binds."""

    text: str
    binds: int = CALL

    def __str__(self) -> str:
        return self.text

    def inside(self, place: int, operator: int = _ANYTHING) -> str:
        """The text where at least `place` must bind, beside an operator that binds as tightly as `operator`."""
        unranked = operator in _UNFAMILIAR and self.binds < UNARY
        and_in_or = (operator, self.binds) == (_BINARY["||"], _BINARY["&&"])
        return f"({self.text})" if self.binds < place or unranked or and_in_or else self.text


@dataclass(frozen=True, slots=True)
class Body:
    """Declarations of shared subexpressions and captured elements, the last root's value, and every node's text.

    A declaration is one line, or several of a loop that computes what its first line declares.
    """

    declarations: tuple[str, ...]
    value: Text
    known: Mapping[Node, Text]

    @property
    def lines(self) -> tuple[str, ...]:
        return lines_of(self.declarations)

    @property
    def statements(self) -> tuple[str, ...]:
        """The body of a function that returns the value."""
        return (*self.lines, f"return {self.value};")


@dataclass(slots=True)
class _Printing:
    """What is known while expressions are printed: texts of nodes, how often each is used, names, the last root, and
    what is carried into loops."""

    known: dict[Node, Text]
    uses: Mapping[Node, int]
    names: Names
    last: Node | None
    carried: frozenset[Node]


class Printer:
    """Prints expressions over the locals b, h, q, k, s and the kernel's parameters p.

    wide    int32 nodes that need 64 bits (`Facts.int64`)
    exact   float arithmetic is rounded operation by operation and never fused, so that a mask decides as Python does
    """

    def __init__(self, *, wide: frozenset[Node] = frozenset(), exact: bool = False) -> None:
        self.wide = wide
        self.exact = exact
        self.taken: tuple[str, ...] = ()  # names that mean something else
        self._divided: frozenset[Node] = frozenset()
        self._extent = Intervals(anywhere).range

    def is_wide(self, n: Node) -> bool:
        """Whether the node is computed in 64 bits."""
        return n.dtype is DType.INT64 or n in self.wide

    def ctype(self, n: Node) -> str:
        """The C++ type of a node."""
        return "i64" if self.is_wide(n) else CTYPES[n.dtype]

    def body(self, *roots: Node) -> Body:
        """The roots as statements; a subexpression that several others use, or that is long, is named."""
        known: dict[Node, Text] = {}
        uses = Counter(operand for n in self.printed(roots) for operand in self.below(n))
        self._divided = frozenset() if self.exact else _exactly_divided(roots)  # all are, where it is exact
        work = _Printing(known, uses, Names(self.taken), roots[-1] if roots else None, carried(roots))
        declarations = self._declared(roots, (), work)
        return Body(tuple(declarations), known[roots[-1]] if roots else Text(""), known)

    def below(self, n: Node) -> tuple[Node, ...]:
        """The operands that a node's text is made of."""
        return n.operands

    def is_named(self, n: Node) -> bool:
        """Whether a node's text is a name that needs no declaration."""
        return False

    def printed(self, roots: Iterable[Node]) -> Iterator[Node]:
        """Every node that is printed, operands first."""
        return walk(roots, into=lambda n: bool(self.below(n)))

    def _declared(self, roots: Iterable[Node], loops: tuple[LoopIndex, ...], work: _Printing) -> list[str]:
        """The declarations of what is computed in the innermost of these loops."""
        lines = []
        printed = set(self.printed(roots))
        for n in layer(roots, loops):
            if n not in printed:
                continue
            if n.op in LOOPS and self.below(n):
                name = work.names.new(n)
                lines.append(self._looped(n, name, loops, work))
                work.known[n] = Text(name)
                continue
            text = self.one(n, work.known)
            # A captured element is read before any condition is looked at: a lane that skips it saves nothing.
            shared = work.uses[n] > 1 or n in work.carried
            apart = shared or (n.op == "load" and n is not work.last) or len(text.text) > LONGEST
            if n.operands and apart and not self.is_named(n):
                name = work.names.new(n)
                lines.append(f"const {self.ctype(n)} {name} = {text};")
                text = Text(name)
            work.known[n] = text
        return lines

    def _looped(self, n: Node, name: str, loops: tuple[LoopIndex, ...], work: _Printing) -> str:
        """A loop: the declaration of what it computes, and its rounds."""
        rounds, body = n.operands
        inside = self._declared([body], (*loops, n.attr), work)
        value, times = work.known[body], self._times(n, work.known[rounds])
        if n.op == "any":
            return self._block(n, f"bool {name} = false", f"{times} && !{name}", [*inside, f"{name} = {value};"])
        if n.dtype.is_float and self.exact:
            add = f"{name} = {_EXACT['add']}({name}, {value});"
        elif n.dtype.is_int and self._wraps(n):
            add = f"{name} = wrapping_add({name}, {value});"
        else:  # NVRTC may see one operand of a sum of 64 bits
            add = f"{name} += {call('opaque_i64', value) if self.is_wide(n) else value};"
        empty = constant(0.0 if n.dtype.is_float else 0, n.dtype)
        return self._block(n, f"{self.ctype(n)} {name} = {empty}", times, [*inside, add])

    @staticmethod
    def _times(n: Node, rounds: Text, end: str = "") -> str:
        """The condition of a loop.  Data that breaks a promise do not make it any longer."""
        promised = n.operands[0].op != "minimum" and any(m.op == "load" for m in walk(n.operands[:1]))
        most = call("min", Text(f"{rounds.inside(CALL)}{end}"), str(n.attr.most)) if promised else None
        return f"{n.attr.name} < {most or rounds.inside(_BINARY['<'] + 1) + end}"

    @staticmethod
    def _block(n: Node, declared: str, times: str, inside: list[str]) -> str:
        i = n.attr.name
        body = "".join(f"  {line}\n" for line in lines_of(inside))
        # Scores are unrolled already: a loop in each of them would be too much code.
        return f"{declared};\n#pragma unroll 1\nfor (int {i} = 0; {times}; ++{i}) {{\n{body}}}"

    def one(self, n: Node, known: Mapping[Node, Text]) -> Text:
        """One node, its operands printed already."""
        if n.op in LEAVES:
            return self.leaf(n)
        operands = [known[o] for o in n.operands]
        if n.op == "load":
            return self.read(n, operands)
        if (bound := clamped_operand(n)) is not None:
            return call("bounded", known[bound])
        if self.exact and n.dtype.is_float and n.op in _EXACT:
            return Text(f"{_EXACT[n.op]}({operands[0]}, {operands[1]})")
        if n in self._divided:
            return Text(f"{_EXACT['div']}({operands[0]}, {operands[1]})")
        spelling = self.spelling(n)
        text = filled(spelling, *self._widened(n, operands, call="(" in spelling))
        narrows = n.dtype is DType.INT32 and not self.is_wide(n) and n.op != "cast"
        return Text(f"int({text})") if narrows and any(map(self.is_wide, n.operands)) else text

    def spelling(self, n: Node) -> str:
        """The op's text, with places for its operands."""
        if n.op in _PLAIN and self._counts(n):
            return _PLAIN[n.op]
        if n.op in _WRAPPING and n.dtype.is_int and (self._wraps(n) or self._scales_by_2_31(n)):
            return _WRAPPING[n.op]
        if self.exact and n.op in _EAGER:
            return _EAGER[n.op]
        return _QUICK.get(n.op) or OPS[n.op].cuda(n.dtype)

    def _counts(self, n: Node) -> bool:
        """Whether no operand of an integer division can be negative, so that C++ rounds it down too."""
        return all(bool(self._extent(o).lo >= 0) for o in n.operands)

    def _wraps(self, n: Node) -> bool:
        """Whether an integer may leave 64 bits: then nothing is known of it."""
        known = self._extent(n)
        return bool(known.lo == INT64_MIN and known.hi == INT64_MAX)

    def _scales_by_2_31(self, n: Node) -> bool:
        """Whether a 64-bit value is shifted by 31 or multiplied by 2^31, which ptxas gets wrong."""
        by = {"shift_left": (31, n.operands[1:]), "mul": (1 << 31, n.operands)}.get(n.op)
        return by is not None and self.is_wide(n) and any(o.op == "const" and o.attr == by[0] for o in by[1])

    def _cuts(self, n: Node) -> bool:
        """Whether a cast may drop bits of an int64."""
        if n.dtype is not DType.INT32 or n.operands[0].dtype is not DType.INT64:
            return False
        known = self._extent(n.operands[0])
        return bool(known.lo < INT32_MIN or known.hi > INT32_MAX)

    def _widened(self, n: Node, texts: list[Text], *, call: bool) -> list[Text]:
        """The operands in 64 bits where the operation needs it and C++ would not do it by itself.

        NVRTC is kept from what it would narrow: a sum, and an int made of more than an int holds.
        """
        if n.op == "cast":
            return [Text(f"opaque_i64({texts[0]})")] if self._cuts(n) else texts
        ints = [i for i, o in enumerate(n.operands) if o.dtype.is_int]
        narrow = [i for i in ints if not self.is_wide(n.operands[i])]
        if not ints or not any(map(self.is_wide, (n, *n.operands))):
            return texts
        if n.op in _SUMS and "const" not in (o.op for o in n.operands):
            return [texts[0], Text(f"opaque_i64({texts[1]})")]
        if not call:  # one wide operand widens the other, except that a shift has the type of its first
            narrow = narrow[:1] if len(narrow) == len(ints) or (n.op.startswith("shift") and 0 in narrow) else []
        return [Text(f"i64({text})") if i in narrow else text for i, text in enumerate(texts)]

    def leaf(self, n: Node) -> Text:
        """A constant, or what the kernel calls a leaf."""
        if n.op == "const":
            return constant(n.attr, n.dtype)
        if n.op == "index":
            return Text(n.attr)
        if n.op == "score":
            return Text("s")
        if n.op == "problem":
            return Text(f"p.{n.attr}")
        if n.op == "param":
            return Text(f"p.param_{n.attr.name}")
        if n.op == "size":
            tensor, dimension = n.attr
            return Text(f"p.size{dimension}_{tensor.name}")
        if n.op == "loop_index":
            return Text(n.attr.name)
        raise ValueError(f"no CUDA for the leaf {n!r}: bind the variant's constants first")

    def read(self, n: Node, indices: list[Text]) -> Text:
        """An element of a captured tensor."""
        return Text(f"read_{n.attr.name}({', '.join(map(str, indices))}, p)")


def _exactly_divided(roots: Iterable[Node]) -> frozenset[Node]:
    """Float quotients on which something jumps: a whole number, an integer, a condition.

    41 times the reciprocal of 41, rounded, is less than 1: its floor would be 0.
    """
    jumps = (
        o
        for n in walk(roots)
        for o in n.operands
        if o.dtype.is_float and (n.op in JUMPS or (n.op == "cast" and not n.dtype.is_float))
    )
    return frozenset(n for n in walk(jumps) if n.op == "div" and n.dtype.is_float)


class SmallTanhPrinter(Printer):
    """Prints a score where the argument of its tanh is known to be small."""

    def spelling(self, n: Node) -> str:
        return "small_tanh({0})" if n.op == "tanh" else super().spelling(n)


class GivenPrinter(Printer):
    """Prints an expression of which some nodes are given as names, and nothing that only they need."""

    def __init__(self, given: Mapping[Node, str], **options: Any) -> None:
        super().__init__(**options)
        self.given = given
        self.taken = tuple(given.values())

    def body(self, *roots: Node) -> Body:
        body = super().body(*roots)
        return replace(body, declarations=used_lines(body.declarations, str(body.value)))

    def one(self, n: Node, known: Mapping[Node, Text]) -> Text:
        return Text(self.given[n]) if n in self.given else super().one(n, known)


class ScorePrinter(GivenPrinter):
    """Prints a score, of which some nodes may be given.  With `rough_tanh` its soft caps, `c * tanh(s / c)`, may be off
    by 2^-11 of the score; any other tanh is exact."""

    def __init__(self, score: Node, given: Mapping[Node, str], *, rough_tanh: bool, **options: Any) -> None:
        super().__init__(given, **options)
        users = [(n, o) for n in walk([score]) for o in n.operands if o.op == "tanh" and rough_tanh]
        self._rough = {o for _, o in users} - {o for n, o in users if not caps_score(n, o)}

    def is_named(self, n: Node) -> bool:
        return n in self.given

    def spelling(self, n: Node) -> str:
        return "tanh_approx({0})" if n in self._rough else super().spelling(n)


class RangePrinter(Printer):
    """Prints what expressions may be over a tile: q and k are ranges, and so is what depends on them.

    Everything else stays a number.  The functions are those of device/range.cuh, one for each op of the language.
    `indices` are the C++ types of the indices that readers of captured tensors take: their ranges convert to no other.
    `cornered` are elements that are looked for at the ends of these ranges.  `given` has the texts of nodes that
    something else says more of.
    """

    def __init__(
        self,
        *,
        indices: Mapping[Tensor, tuple[str, ...]] = MappingProxyType({}),
        cornered: Set[Node] = frozenset(),
        given: Mapping[Node, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.indices, self.cornered, self.given = indices, cornered, given

    #: Ops whose 64-bit results may overflow, which their functions check.
    CHECKED: ClassVar = frozenset(("add", "sub", "neg", "mul", "abs", "shift_left", "floor_div"))

    @staticmethod
    def types(dtype: DType, *, wide: bool = False) -> tuple[str, str]:
        """The range type of a type, and the function that makes one of a single value."""
        if dtype is DType.BOOL:
            return "Truth", "truth"
        if dtype.is_float:
            return "FloatRange", "single_f32"
        return f"Range<{'i64' if wide or dtype is DType.INT64 else 'int'}>", "single"

    def below(self, n: Node) -> tuple[Node, ...]:
        return () if n in self.given else n.operands

    def ctype(self, n: Node) -> str:
        return self.types(n.dtype, wide=self.is_wide(n))[0] if depends_on(n, "q", "k") else Printer.ctype(self, n)

    def one(self, n: Node, known: Mapping[Node, Text]) -> Text:
        if n in self.given:
            return Text(self.given[n])
        if not n.operands or not depends_on(n, "q", "k"):
            return Printer.one(self, n, known)
        if n.op == "load":
            taken = zip(n.operands, self.indices[n.attr], strict=True)
            indices = [self._ranged(o, known[o], ctype == "i64") for o, ctype in taken]
            return call(f"read_{n.attr.name}_{'corners' if n in self.cornered else 'range'}", *indices, "p")
        if n.op == "cast":
            return self._cast(n, known[n.operands[0]])
        wide = any(o.dtype.is_int and self.is_wide(o) for o in (n, *n.operands))
        operands = [self._ranged(o, known[o], wide) for o in n.operands]
        function = f"range_{n.op}{self._suffix(n, wide)}"
        if n.dtype is DType.INT32 and wide and not self.is_wide(n):
            function = f"range_cast<int>({function}"
            return Text(f"{call(function, *operands)})")
        return call(function, *operands)

    def _looped(self, n: Node, name: str, loops: tuple[LoopIndex, ...], work: _Printing) -> str:
        if not depends_on(n, "q", "k"):
            return Printer._looped(self, n, name, loops, work)
        rounds, body = n.operands
        inside, known = self._declared([body], (*loops, n.attr), work), work.known
        wide = self.is_wide(n)
        value = self._ranged(body, known[body], wide)
        function = "range_logical_or" if n.op == "any" else f"range_add{self._suffix(n, wide)}"
        after = call(function, name, value)
        ranged = depends_on(rounds, "q", "k")
        if ranged:  # rounds that a tile may have or not
            suffix = {DType.BOOL: "_bool", DType.FLOAT32: "_f32"}.get(n.dtype, "")
            after = call(f"after_round{suffix}", f"{n.attr.name} < {known[rounds].inside(CALL)}.lo", name, after)
        empty = constant(False if n.op == "any" else 0.0 if n.dtype.is_float else 0, n.dtype)
        kind, single = self.types(n.dtype, wide=wide)
        times = self._times(n, known[rounds], ".hi" if ranged else "")
        if n.op == "any":
            times += f" && {name}.may_false"
        start = call(single, call("i64", empty) if wide and n.dtype is not DType.INT64 else empty)
        return self._block(n, f"{kind} {name} = {start}", times, [*inside, f"{name} = {after};"])

    def _suffix(self, n: Node, wide: bool) -> str:
        kind = n.operands[-1].dtype
        if kind.is_float:
            return "_f32"
        if kind is DType.BOOL:
            return "" if n.op.startswith("logical") else "_bool"
        if n.op in ("floor_div", "mod") and self._extent(n.operands[-1]).lo > 0:
            return "_positive" if n.op == "mod" else ""
        return "_i64" if wide and (n.op in self.CHECKED or n.op == "sum") else ""

    def _ranged(self, n: Node, text: Text, wide: bool) -> Text:
        """An operand as a range, of 64-bit integers where asked."""
        ranged = depends_on(n, "q", "k")
        if n.dtype.is_int and wide and not self.is_wide(n):
            return call("range_cast<i64>", text) if ranged else call("single", call("i64", text))
        return text if ranged else call(self.types(n.dtype)[1], text)

    def _cast(self, n: Node, text: Text) -> Text:
        (operand,) = n.operands
        if operand.dtype.is_float:
            return call(f"range_truncate<{Printer.ctype(self, n)}>", text)
        if operand.dtype is DType.BOOL:
            text = call("range_cast_bool", text)
        elif n.dtype is DType.INT32:
            return call("range_cast_int", text)
        if n.dtype is DType.INT32:
            return text
        wide = text if operand.dtype.is_int and self.is_wide(operand) else call("range_cast<i64>", text)
        return call("range_cast_f32", wide) if n.dtype.is_float else wide


class Formula(Printer):
    """Prints expressions as a person writes them, for comments."""

    _SPELLED: ClassVar = {"floor_div": "{0} // {1}", "mod": "{0} % {1}", "div": "{0} / {1}"}

    def inline(self, root: Node, most: int) -> str | None:
        """The node as one expression, shared subexpressions repeated; None if that has more than `most` characters."""
        known: dict[Node, Text] = {}
        for n in walk([root]):
            known[n] = self.one(n, known)
            if len(known[n].text) > most:  # and so has what it is a part of
                return None
        return str(known[root])

    def one(self, n: Node, known: Mapping[Node, Text]) -> Text:
        if n.op in LOOPS:
            rounds, body = (known[o] for o in n.operands)
            return Text(f"{n.op}({rounds}, {n.attr.name}: {body})")
        return Printer.one(self, n, known)

    def leaf(self, n: Node) -> Text:
        if n.op == "const":
            return Text(f"{n.attr:g}" if n.dtype.is_float else str(n.attr), UNARY if np.signbit(n.attr) else CALL)
        if n.op == "param":
            return Text(n.attr.name)
        if n.op == "problem":
            return Text(n.attr)
        if n.op == "size":
            tensor, dimension = n.attr
            return Text(f"{tensor.name}.size({dimension})")
        return Printer.leaf(self, n)

    def _widened(self, n: Node, texts: list[Text], *, call: bool) -> list[Text]:
        return texts  # a person's integers have no width

    def read(self, n: Node, indices: list[Text]) -> Text:
        return Text(f"{n.attr.name}[{', '.join(map(str, indices))}]")

    def spelling(self, n: Node) -> str:
        op = OPS[n.op]
        if n.op in self._SPELLED:
            return self._SPELLED[n.op]
        if op.group == "function" and n.op != "cast":
            return f"{n.op}({', '.join(f'{{{i}}}' for i in range(op.arity))})"
        return op.cuda(n.dtype)


def constant(value: bool | int | float, dtype: DType) -> Text:
    """A literal of the type."""
    if dtype is DType.BOOL:
        return Text("true" if value else "false")
    if dtype.is_int:
        suffix = "ll" if dtype is DType.INT64 else ""
        lowest = -(1 << 63) if dtype is DType.INT64 else -(1 << 31)
        if value == lowest:  # C++ has no negative literals
            return Text(f"{value + 1}{suffix} - 1", _BINARY["-"])
        return Text(f"{value}{suffix}", UNARY if value < 0 else CALL)
    number = np.float32(value)
    if np.isinf(number):
        return Text("MINUS_INFINITY" if number < 0 else "PLUS_INFINITY")
    return Text(f"{number!s}f", UNARY if np.signbit(number) else CALL)


def filled(text: str, *operands: Text) -> Text:
    """The operands in the places of an op's CUDA text, in parentheses where they need them."""
    form = _form(text)
    places = zip(operands, form.places, strict=True)
    return Text(text.format(*(o.inside(place, operator) for o, (place, operator) in places)), form.binds)


def binary(sign: str, a: Text, b: Text) -> Text:
    """Two operands of a binary operator."""
    return filled(f"{{0}} {sign} {{1}}", a, b)


def joined(sign: str, parts: Iterable[Text], empty: str) -> Text:
    """The parts between the signs of one binary operator; `empty` where there is none."""
    parts = tuple(parts)
    if len(parts) < 2:
        return parts[0] if parts else Text(empty)
    binds = _BINARY[sign]
    return Text(f" {sign} ".join(part.inside(binds, binds) for part in parts), binds)


def call(function: str, *arguments: Text | str) -> Text:
    """A function's value."""
    return Text(f"{function}({', '.join(map(str, arguments))})")


@dataclass(frozen=True, slots=True)
class _Form:
    """How tightly an op's CUDA text binds, and of each operand: how tightly it must, and beside which operator."""

    binds: int
    places: tuple[tuple[int, int], ...]


@lru_cache
def _form(text: str) -> _Form:
    places = {}
    for found in re.finditer(r"\{(\d)\}", text):
        before, after = text[: found.start()].rstrip(), text[found.end() :].lstrip()
        left, right = re.search(r"(?:^|\s)([^\s\w(){},]+)$", before), re.match(r"([^\s\w(){},]+)\s", after)
        if "?" in text:
            place = (_TERNARY + 1 if after.startswith("?") else _TERNARY, _TERNARY)
        elif left and " " in text:  # a right operand: one that binds the same would be taken apart
            place = (_BINARY[left[1]] + 1, _BINARY[left[1]])
        elif right:
            place = (_BINARY[right[1]], _BINARY[right[1]])
        else:
            # The sign of an operand would join the one before it: two minus signs are a decrement.
            place = (UNARY + 1 if before and before[-1] in "-!~" else _ANYTHING, _ANYTHING)
        places[int(found[1])] = place
    outermost = re.sub(r"\([^()]*\)", "", text)
    operators = re.findall(r"(?<=\s)[^\s\w(){},]+(?=\s)", outermost)
    if "?" in operators:
        binds = _TERNARY
    elif operators:
        binds = min(_BINARY[o] for o in operators)
    else:
        binds = UNARY if text[0] in "-!~" else CALL
    return _Form(binds, tuple(place for _, place in sorted(places.items())))


def carried(roots: Iterable[Node]) -> frozenset[Node]:
    """What loops use and their indices do not move: it is computed before them, by name."""
    pairs = ((n, o) for n in walk(roots) if loop_indices(n) for o in n.operands)
    return frozenset(o for n, o in pairs if n.op not in LOOPS and loop_indices(o) < loop_indices(n))


def lines_of(declarations: Iterable[str]) -> tuple[str, ...]:
    """Each line of declarations that may have several."""
    return tuple(line for declaration in declarations for line in declaration.split("\n"))


def used_lines(lines: Iterable[str], text: str) -> tuple[str, ...]:
    """Of declarations those that the text needs, directly or not."""
    kept: list[str] = []
    wanted = identifiers(text)
    for line in reversed(tuple(lines)):
        name = line.partition(" = ")[0].split()[-1]
        if name in wanted:
            kept.append(line)
            wanted |= identifiers(line)
    return tuple(reversed(kept))


class Names:
    """Names for locals that hide nothing the text uses."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*"bhqksp", "rows", "tile", "kv_tile", "k_first", "k_last", "visible", "hidden", "found"}
        self._taken |= {*DISTANCES.values(), *taken}

    def new(self, n: Node) -> str:
        """A name that says what the node is, where that is short."""
        stem = "t"
        if n.op == "load":
            indices = [getattr(o.attr, "name", o.attr) for o in n.operands if o.op in ("index", "loop_index")]
            stem = "_".join([n.attr.name, indices[-1] if indices else "at"])
        elif n.op == "sub" and [o.attr for o in n.operands] == ["q", "k"]:
            stem = "distance"
        elif n.op in LOOPS:
            stem = {"any": "some", "sum": "total"}[n.op]
        elif n.op == "floor_div" and n.operands[0].op == "index":
            stem = f"{n.operands[0].attr}_block"
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}{number}"
        self._taken.add(name)
        return name
