"""Variants, and the traffic of banded masks, as SymPy expressions: for people to read, and for tests to check against.

Import this module only where a formula is wanted: it imports SymPy, and no plan and no launch depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from sympy.printing.latex import LatexPrinter
from sympy.printing.precedence import PRECEDENCE, precedence
from sympy.printing.pretty.pretty import PrettyPrinter
from sympy.printing.pretty.pretty_symbology import pretty_use_unicode
from sympy.printing.pretty.stringpict import prettyForm
from sympy.printing.str import StrPrinter

from flashgen.analysis.derivative import SCORE
from flashgen.analysis.facts import Facts
from flashgen.analysis.zones import clamped_operand
from flashgen.lang.expr import DType, Node, walk
from flashgen.lang.loops import LOOPS
from flashgen.lang.variant import Variant

#: An expression of more operations, shared ones counted as often as they would be written, is not written out; nor is
#: one that nests deeper.
MAX_OPERATIONS = 256
MAX_DEPTH = 48

#: A zone of more bounds and conditions has no traffic formula.
MAX_BOUNDS = 16

# ---------------------------------------------------------------------------------------------------------------------
# Integer operations under names of their own: SymPy has no sound form of them


class _Infix(sympy.Function):
    """A binary integer operation that is printed between its operands and never rewritten."""

    sign = ""
    tex = ""
    is_integer = True
    precedence = PRECEDENCE["Mul"] - 1

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        """Folds known integers only."""
        return cls.fold(int(a), int(b)) if a.is_Integer and b.is_Integer else None

    def _sympystr(self, printer: Any) -> Any:
        a, b = (printer.parenthesize(x, PRECEDENCE["Mul"]) for x in self.args)
        return f"{a} {self.sign} {b}"

    def _pretty(self, printer: PrettyPrinter) -> Any:
        a, b = (_bracketed(printer, x) for x in self.args)
        binding = prettyForm.ADD if self.precedence > PRECEDENCE["Add"] else prettyForm.OPEN
        return prettyForm(*prettyForm.next(a, f" {self.sign} ", b), binding=binding)

    def _latex(self, printer: Any, exp: str | None = None) -> Any:
        a, b = (printer.parenthesize(x, PRECEDENCE["Mul"]) for x in self.args)
        return _power(rf"{a} {self.tex} {b}" if exp is None else rf"\left({a} {self.tex} {b}\right)", exp)


def _power(base: str, exp: str | None) -> str:
    """In LaTeX, where SymPy hands on the exponent of a function."""
    return base if exp is None else f"{base}^{{{exp}}}"


def _bracketed(printer: PrettyPrinter, x: sympy.Basic) -> prettyForm:
    """An operand, in parentheses where it needs them."""
    shown = printer._print(x)
    return prettyForm(*shown.parens()) if precedence(x) <= PRECEDENCE["Mul"] else shown


class floor_div(_Infix):
    """floor(a / b)"""

    sign, fold = "//", staticmethod(lambda a, b: a // b)

    def _pretty(self, printer: Any) -> Any:
        a, b = (_bracketed(printer, x) for x in self.args)
        return prettyForm(*prettyForm(*prettyForm.next(a, "/", b)).parens("lfloor", "rfloor"))

    def _latex(self, printer: Any, exp: str | None = None) -> Any:
        a, b = map(printer._print, self.args)
        return _power(rf"\left\lfloor \frac{{{a}}}{{{b}}} \right\rfloor", exp)


class mod(_Infix):
    """a - b * floor(a / b)"""

    sign, tex, fold = "%", r"\bmod", staticmethod(lambda a, b: a % b)


class shift_left(_Infix):
    """a * 2**b"""

    precedence = PRECEDENCE["Add"] - 1
    sign, tex, fold = "<<", r"\ll", staticmethod(lambda a, b: a << b)


class shift_right(_Infix):
    """floor(a / 2**b)"""

    precedence = PRECEDENCE["Add"] - 1
    sign, tex, fold = ">>", r"\gg", staticmethod(lambda a, b: a >> b)


class _Named(sympy.Function):
    """A function that is never rewritten."""

    is_integer = True

    @classmethod
    def eval(cls, *operands: Any) -> Any:
        """Folds known integers only."""
        return cls.fold(*map(int, operands)) if all(x.is_Integer for x in operands) else None

    def _latex(self, printer: Any, exp: str | None = None) -> Any:
        operands = ", ".join(map(printer._print, self.args))
        return _power(rf"\operatorname{{{type(self).__name__}}}\left({operands}\right)", exp)


class bitand(_Named):
    fold = staticmethod(lambda a, b: a & b)


class bitor(_Named):
    fold = staticmethod(lambda a, b: a | b)


class bitxor(_Named):
    fold = staticmethod(lambda a, b: a ^ b)


class bitnot(_Named):
    fold = staticmethod(lambda a: ~a)


class trunc(_Named):
    """A float without its fraction, as an integer."""

    fold = staticmethod(lambda a: a)


class some(BooleanFunction):
    """Whether a condition holds for one of the integers from 0 to below a number."""

    def _sympystr(self, printer: Any) -> Any:
        condition, index, rounds = map(printer._print, self.args)
        return f"any({rounds}, {index}: {condition})"

    def _pretty(self, printer: PrettyPrinter) -> Any:
        condition, index, rounds = map(printer._print, self.args)
        return prettyForm(*prettyForm.next("any ", index, " < ", rounds, ": ", condition))

    def _latex(self, printer: Any) -> Any:
        condition, index, rounds = map(printer._print, self.args)
        return rf"\bigvee_{{{index} < {rounds}}} \left({condition}\right)"


class where(sympy.Function):
    """A choice by a condition that holds another one, which SymPy's Piecewise rewrites, and not always can."""

    is_commutative = True
    is_extended_real = True

    @classmethod
    def eval(cls, condition: Any, a: Any, b: Any) -> Any:
        """Folds known conditions only."""
        return a if condition == sympy.true else b if condition == sympy.false else None

    def _eval_is_integer(self) -> bool | None:
        return all(x.is_integer for x in self.args[1:]) or None

    def _sympystr(self, printer: Any) -> Any:
        return f"where({', '.join(map(printer._print, self.args))})"


def _chosen(condition: sympy.Basic, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    if condition.has(sympy.Piecewise):
        return where(condition, a, b)
    return sympy.Piecewise((a, condition), (b, True))


# ---------------------------------------------------------------------------------------------------------------------
# Expressions


def _symbol(name: str, dtype: DType, **assumptions: bool) -> sympy.Symbol:
    return sympy.Symbol(name, **({"integer": True} if dtype.is_int else {"real": True}), **assumptions)


def _declared(n: Node) -> sympy.Symbol:
    least = -math.inf if n.attr.min is None else n.attr.min
    sign = {"positive": True} if least > 0 else {"nonnegative": True} if least == 0 else {}
    return _symbol(n.attr.name, n.dtype, **sign)


_OPS: dict[str, Callable[..., sympy.Basic]] = {
    "eq": lambda a, b: sympy.Eq(a, b, evaluate=False),
    "ne": lambda a, b: sympy.Ne(a, b, evaluate=False),
    "lt": lambda a, b: sympy.Lt(a, b, evaluate=False),
    "le": lambda a, b: sympy.Le(a, b, evaluate=False),
    "gt": lambda a, b: sympy.Gt(a, b, evaluate=False),
    "ge": lambda a, b: sympy.Ge(a, b, evaluate=False),
    "logical_and": sympy.And,
    "logical_or": sympy.Or,
    "logical_xor": sympy.Xor,
    "logical_not": sympy.Not,
    "bit_and": bitand,
    "bit_or": bitor,
    "bit_xor": bitxor,
    "bit_not": bitnot,
    "shift_left": shift_left,
    "shift_right": shift_right,
    "add": lambda a, b: sympy.Add(a, b, evaluate=False),
    "sub": lambda a, b: sympy.Add(a, sympy.Mul(-1, b), evaluate=False),
    "mul": lambda a, b: sympy.Mul(a, b, evaluate=False),
    "neg": lambda a: sympy.Mul(-1, a),
    "div": lambda a, b: sympy.Mul(a, sympy.Pow(b, -1, evaluate=False), evaluate=False),
    "floor_div": floor_div,
    "mod": mod,
    "where": _chosen,
    "minimum": lambda a, b: sympy.Min(a, b, evaluate=False),
    "maximum": lambda a, b: sympy.Max(a, b, evaluate=False),
    "abs": lambda a: sympy.Abs(a, evaluate=False),
    "exp": sympy.exp,
    "exp2": lambda a: sympy.Pow(2, a),
    "log": sympy.log,
    "log2": lambda a: sympy.log(a, 2),
    "log1p": lambda a: sympy.log(sympy.Add(1, a, evaluate=False)),
    "pow": sympy.Pow,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "erf": sympy.erf,
    "tanh": sympy.tanh,
    "sigmoid": lambda a: 1 / (1 + sympy.exp(-a)),
    "sqrt": sympy.sqrt,
    "rsqrt": lambda a: 1 / sympy.sqrt(a),
    "floor": sympy.floor,
}


#: The ops that also work on conditions, there.  (SymPy cannot tell: its symbols are conditions and numbers at once.)
_OF_CONDITIONS: dict[str, Callable[..., sympy.Basic]] = {
    "eq": sympy.Equivalent,
    "ne": sympy.Xor,
    "where": lambda choice, a, b: sympy.Or(sympy.And(choice, a), sympy.And(sympy.Not(choice), b)),
    "cast": lambda a: _chosen(a, sympy.Integer(1), sympy.Integer(0)),
}


def _number(value: bool | int | float) -> sympy.Basic:
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, float) and value not in (float("inf"), float("-inf")):
        return sympy.Integer(int(value)) if value == int(value) else sympy.Float(value)
    return sympy.sympify(value)


def _value(n: Node, operands: list[sympy.Basic]) -> sympy.Basic:
    match n.op:
        case "const":
            return _number(n.attr)
        case "index":
            return _symbol(n.attr, n.dtype, nonnegative=True)
        case "problem":
            return _symbol(n.attr, n.dtype, positive=True)
        case "score":
            return _symbol("s", n.dtype)
        case "loop_index":
            return _symbol(n.attr.name, n.dtype, nonnegative=True)
        case "param" | "constant":
            return _declared(n)
        case "size":
            return sympy.Function("size", integer=True)(sympy.Symbol(n.attr[0].name), n.attr[1])
        case "load":
            kind = {"real": True} if n.dtype.is_float else {"integer": True}
            element = sympy.IndexedBase(n.attr.name, **kind)[tuple(operands)]
            return sympy.Ne(element, 0, evaluate=False) if n.dtype is DType.BOOL else element
    if n.op in LOOPS:
        rounds, body = operands
        index = _symbol(n.attr.name, DType.INT32, nonnegative=True)
        return some(body, index, rounds) if n.op == "any" else sympy.Sum(body, (index, 0, rounds - 1))
    if n.op in _OF_CONDITIONS and n.operands[-1].dtype is DType.BOOL:
        return _OF_CONDITIONS[n.op](*operands)
    if n.op == "cast":
        return trunc(*operands) if n.operands[0].dtype.is_float and n.dtype.is_int else operands[0]
    return _OPS[n.op](*operands)


def symbolic(root: Node) -> sympy.Basic:
    """An expression as SymPy: sums, products and comparisons as they were written, reals for floats, and integer
    operations that SymPy gets wrong (`//`, `%`, shifts, bits) as functions of their own.

    What only keeps a zone's bound in 64 bits is left out."""
    known: dict[Node, sympy.Basic] = {}
    for n in walk([root]):
        bound = clamped_operand(n)
        known[n] = _value(n, [known[o] for o in n.operands]) if bound is None else known[bound]
    return known[root]


def is_short(root: Node) -> bool:
    """Whether an expression may be written out."""
    sizes: dict[Node, tuple[int, int]] = {}  # operations and depth
    for n in walk([root]):
        below = [sizes[o] for o in n.operands]
        size, depth = 1 + sum(size for size, _ in below), 1 + max((depth for _, depth in below), default=0)
        if size > MAX_OPERATIONS or depth > MAX_DEPTH:
            return False
        sizes[n] = size, depth
    return True


def _written(root: Node) -> sympy.Basic:
    """An expression as SymPy; one that is too long to read as a symbol that says so."""
    return symbolic(root) if is_short(root) else sympy.Symbol(f"({sum(1 for _ in walk([root])):,} operations)")


class _Text(StrPrinter):
    """As a spec is written."""

    def parenthesize(self, item: Any, level: Any, strict: Any = False) -> Any:
        if isinstance(item, Relational):
            return f"({self._print(item)})"
        return super().parenthesize(item, level, strict)

    def _print_Mul(self, expr: Any) -> Any:
        if expr.args[0] == -1 and len(expr.args) == 2:  # SymPy 1.13 leaves out the brackets
            return f"-{self.parenthesize(expr.args[1], PRECEDENCE['Mul'])}"
        return super()._print_Mul(expr)

    def _print_Relational(self, expr: Any) -> Any:
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_Piecewise(self, expr: Any) -> Any:
        shown = self._print(expr.args[-1].expr)
        for value, condition in reversed(expr.args[:-1]):
            shown = f"where({self._print(condition)}, {self._print(value)}, {shown})"
        return shown

    def _print_Sum(self, expr: Any) -> Any:
        index, _, last = expr.limits[0]
        return f"sum({self._print(last + 1)}, {self._print(index)}: {self._print(expr.function)})"

    def _print_Abs(self, expr: Any) -> Any:
        return f"abs({self._print(expr.args[0])})"

    def _print_Min(self, expr: Any) -> Any:
        return f"min({self.stringify(expr.args, ', ')})"

    def _print_Max(self, expr: Any) -> Any:
        return f"max({self.stringify(expr.args, ', ')})"


def text(expression: sympy.Basic) -> str:
    """One line of ASCII, as a spec is written."""
    return _Text({"order": "none"}).doprint(expression)


class _Pretty(PrettyPrinter):
    """With names as they are, not split at underscores into subscripts."""

    def _print_Symbol(self, e: Any, bold_name: Any = False) -> Any:
        return prettyForm(e.name)


class _Latex(LatexPrinter):
    """With brackets where an operation of integers binds less than what is around it."""

    def _needs_add_brackets(self, expr: Any) -> Any:
        return (isinstance(expr, _Infix) and expr.precedence < PRECEDENCE["Add"]) or super()._needs_add_brackets(expr)

    def _print_Mul(self, expr: Any) -> Any:
        if isinstance(-expr, _Infix) and not isinstance(-expr, floor_div):
            return rf"- \left({self._print(-expr)}\right)"
        return super()._print_Mul(expr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A variant's mask, score and sink (None: there is none) as SymPy expressions."""

    mask: sympy.Basic
    score: sympy.Basic
    sink: sympy.Basic | None = None

    def text(self) -> str:
        """A line each, in ASCII, as a spec is written."""
        return self._lines(text)

    def pretty(self) -> str:
        """In Unicode, over several lines where there is a fraction or a choice."""
        before = pretty_use_unicode(True)
        try:
            return self._lines(_Pretty({"order": "none", "wrap_line": False}).doprint)
        finally:
            pretty_use_unicode(before)

    def latex(self) -> str:
        """LaTeX, a line each; longer names upright."""
        return self._lines(lambda x: _Latex({"order": "none", "symbol_names": _upright(x)}).doprint(x))

    def _lines(self, show: Callable[[sympy.Basic], str]) -> str:
        shown = []
        for name, expression in (("mask", self.mask), ("score", self.score), ("sink", self.sink)):
            if expression is None:
                continue
            for label, line in zip_longest([f"{name:5} = "], show(expression).splitlines(), fillvalue=" " * 8):
                shown.append((label + line).rstrip())
        return "\n".join(shown)


def _upright(expression: sympy.Basic) -> dict[sympy.Symbol, str]:
    names = {x: x.name.replace("_", r"\_") for x in expression.free_symbols if isinstance(x, sympy.Symbol)}
    return {x: rf"\mathrm{{{name}}}" for x, name in names.items() if len(name) > 1}


def formula(variant: Variant) -> Formula:
    """The mask, the score and the sink of a variant as formulas: True where everything is visible, s for an unchanged
    score, None for no sink, and a count of operations for what is too long to be written out."""
    return Formula(
        mask=sympy.true if variant.mask is None else _written(variant.mask),
        score=_written(SCORE if variant.score_node is None else variant.score_node),
        sink=None if variant.sink_node is None else _written(variant.sink_node),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Traffic of masks of one zone

BATCH, HEADS, Q_LEN, KV_LEN, TILE_Q, TILE_KV, HEAD_DIM, V_HEAD_DIM, ITEMSIZE = sympy.symbols(
    "batch heads q_len kv_len tile_q tile_kv head_dim v_head_dim itemsize", integer=True, positive=True
)
_TILE = sympy.Symbol("i", integer=True, nonnegative=True)
_QUERY = sympy.Symbol("q", integer=True, nonnegative=True)
_LSE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TileFormulas:
    """What `counts.count` counts, as formulas summed over batch and query heads: floor sums over the Q tiles.

    Symbols: batch, heads, q_len, kv_len, tile_q, tile_kv, head_dim, v_head_dim, itemsize (bytes), and the parameters of
    the mask.  Bytes are counted as if there were no cache, and leave captured tensors out.
    """

    total: sympy.Expr
    visited: sympy.Expr
    visited_rows: sympy.Expr
    visited_columns: sympy.Expr
    visited_elements: sympy.Expr
    visible: sympy.Expr

    @property
    def read_bytes(self) -> sympy.Expr:
        return ITEMSIZE * (HEAD_DIM * self.visited_rows + (HEAD_DIM + V_HEAD_DIM) * self.visited_columns)

    @property
    def write_bytes(self) -> sympy.Expr:
        return BATCH * HEADS * Q_LEN * (ITEMSIZE * V_HEAD_DIM + _LSE_BYTES)

    @property
    def flops(self) -> sympy.Expr:
        return 2 * (HEAD_DIM + V_HEAD_DIM) * self.visited_elements

    @property
    def flops_useful(self) -> sympy.Expr:
        return 2 * (HEAD_DIM + V_HEAD_DIM) * self.visible


def tile_formulas(facts: Facts) -> TileFormulas | None:
    """The counts of a mask as closed-form sums; None unless it is one zone (full, causal, a band, a prefix) of few and
    short bounds."""
    if not facts.exact or len(facts.visible) != 1:
        return None
    (term,) = facts.visible
    atoms = list(term.nodes())
    if len(atoms) > MAX_BOUNDS or not all(map(is_short, atoms)) or any(n.op in LOOPS for n in walk(atoms)):
        return None
    bounds = {kind: [_evaluated(n) for n in getattr(term.zone, kind)] for kind in term.zone.__slots__}
    holds = [symbolic(n) for n in term.uniform]

    def keys(q_first: sympy.Expr, *q_last: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Basic]:
        """First and last key of the queries from `q_first` to the least of `q_last`, and whether there is any."""
        q_los, q_his = [q_first, *bounds["q_lo"]], [*q_last, *bounds["q_hi"]]
        k_los, k_his = [sympy.Integer(0), *bounds["k_lo"]], [KV_LEN - 1, *bounds["k_hi"]]
        slanted_los = [q - d for q in q_los for d in bounds["d_hi"]]
        slanted_his = [q - d for q in q_his for d in bounds["d_lo"]]
        ordered = [(k_los, k_his), (slanted_los, k_his), (k_los, slanted_his), (bounds["d_lo"], bounds["d_hi"])]
        if bounds["q_lo"] or bounds["q_hi"]:
            ordered.append((q_los, q_his))
        pairs = [(lo, hi) for los, his in ordered for lo in los for hi in his]
        some = sympy.And(*holds, *(lo <= hi for lo, hi in pairs if not _surely_positive(hi - lo + 1)))
        return sympy.Max(*k_los, *slanted_los), sympy.Min(*k_his, *slanted_his), some

    q_first = _TILE * TILE_Q
    first, last, some = keys(q_first, q_first + TILE_Q - 1, Q_LEN - 1)
    from_tile, to_tile = sympy.floor(first / TILE_KV), sympy.floor(last / TILE_KV)
    columns = sympy.Min((to_tile + 1) * TILE_KV, KV_LEN) - from_tile * TILE_KV
    rows = sympy.Min(TILE_Q, Q_LEN - q_first)
    row_first, row_last, row_some = keys(_QUERY, _QUERY)

    q_tiles, kv_tiles = sympy.ceiling(Q_LEN / TILE_Q), sympy.ceiling(KV_LEN / TILE_KV)

    def over_tiles(amount: sympy.Expr) -> sympy.Expr:
        return _over_places(_sum(_where(some, amount), _TILE, q_tiles))

    def over_rows(amount: sympy.Expr) -> sympy.Expr:
        """The sum over Q tiles of an amount for each of their rows."""
        alike = _TILE not in _where(some, amount).free_symbols
        return _over_places(Q_LEN * _where(some, amount)) if alike else over_tiles(rows * amount)

    return TileFormulas(
        total=BATCH * HEADS * q_tiles * kv_tiles,
        visited=over_tiles(to_tile - from_tile + 1),
        visited_rows=over_rows(sympy.Integer(1)),
        visited_columns=over_tiles(columns),
        visited_elements=over_rows(columns),
        visible=_over_places(_sum(_where(row_some, row_last - row_first + 1), _QUERY, Q_LEN)),
    )


def _surely_positive(expression: sympy.Expr) -> bool:
    """Whether SymPy sees that an integer is at least 1, given that positive symbols are."""
    positive = [x for x in expression.free_symbols if x.is_positive]
    shifted = {x: 1 + sympy.Dummy(integer=True, nonnegative=True) for x in positive}
    return bool(sympy.expand(expression.subs(shifted)).is_positive)


def _evaluated(bound: Node) -> sympy.Expr:
    """A bound with like terms gathered, over the symbols of TileFormulas."""
    expression = symbolic(bound).doit()
    lengths = {"q_len": Q_LEN, "kv_len": KV_LEN, "batch": BATCH, "heads": HEADS}
    return expression.subs({x: lengths[x.name] for x in expression.free_symbols if getattr(x, "name", "") in lengths})


def _where(condition: sympy.Basic, amount: sympy.Expr) -> sympy.Expr:
    return amount if condition == sympy.true else sympy.Piecewise((amount, condition), (0, True))


def _sum(amount: sympy.Expr, index: sympy.Symbol, n: sympy.Expr) -> sympy.Expr:
    return sympy.Sum(amount, (index, 0, n - 1)) if index in amount.free_symbols else n * amount


def _over_places(amount: sympy.Expr) -> sympy.Expr:
    """The sum over batch and heads; factors come last, as SymPy takes conditions out of the sum in a product of which a
    sum is made, with the index that they are about."""
    places = [(sympy.Symbol(name, integer=True, nonnegative=True), n) for name, n in (("b", BATCH), ("h", HEADS))]
    for index, n in sorted(places, key=lambda place: place[0] not in amount.free_symbols):
        amount = _sum(amount, index, n)
    return amount
