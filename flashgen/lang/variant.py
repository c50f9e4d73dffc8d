"""A Variant: what one kind of attention computes, as a mask and a score function over positions."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flashgen.errors import PlanError, SourceLine, SpecError
from flashgen.lang import build, source, trace
from flashgen.lang.expr import Constant, Node, Param, Tensor, const, digest, walk
from flashgen.lang.sink import Sink, declared_sink
from flashgen.lang.symbols import Symbol, allowed, checked, line_of, summary, symbol_of
from flashgen.locks import Lock

#: The names of variants that nobody named: one without a mask and a score is full attention.
FULL, UNNAMED = "full", "variant"

HEAD_DIMS = (64, 128)
DTYPES = ("float16", "bfloat16")

#: The latest variants of this process by token: a compiled graph holds a token and no object.
_by_token: dict[str, Variant] = {}
#: Those that somebody holds, however many were made since.
_alive: weakref.WeakValueDictionary[str, Variant] = weakref.WeakValueDictionary()
_tokens = Lock()
MAX_TOKENS = 4096


def of_token(token: str) -> Variant | None:
    """The variant of this process with that token, if somebody holds it or it is one of the MAX_TOKENS made last."""
    return _alive.get(token) or _by_token.get(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the author fixed: it is checked by the planner and never changed."""

    tile: tuple[int, int] | None = None
    stages: int | None = None
    pipeline: str | None = None
    arch: str | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Variant:
    """A mask and a score function, traced.

    mask        bool expression of b, h, q, k; a pair is visible where it holds; None: everywhere
    score_node  float32 expression of s, b, h, q, k; None: s itself (`score` is the decorator that sets it)
    sink_node   float32 element of a captured tensor that b and h select, a logit of a row beside its keys; None: none
    head_dims, dtypes  what is emitted ahead; a call outside them works unless `only`
    examples    what makes data for a captured tensor, by its name
    parents     the variants that this one was built from
    where       the line that made it
    file        the file whose top level was running then
    spec        what the command line calls it: a shipped spec's name, a file's; None for one made elsewhere
    bound       the constants that were folded to other values than their defaults
    given       captured tensors and parameters' values that a call takes where it passes none, by name
    token       a text that equal variants share and others do not, in every process (see `of_token`)
    names       those of parameters, constants, captured tensors and sink, which calls take
    without     the variant that gives nothing, where this one does (see `bare`)
    """

    name: str
    doc: str = ""
    mask: Node | None = None
    score_node: Node | None = None
    sink_node: Node | None = None
    head_dims: tuple[int, ...] = HEAD_DIMS
    dtypes: tuple[str, ...] = DTYPES
    only: bool = False
    pins: Pins = field(default_factory=Pins)
    examples: Mapping[str, Callable] = field(default_factory=dict, compare=False, repr=False)
    parents: tuple[Variant, ...] = field(default=(), compare=False, repr=False)
    where: SourceLine | None = field(default=None, compare=False, repr=False)
    file: str | None = field(default=None, compare=False, repr=False)
    spec: str | None = field(default=None, repr=False)
    bound: tuple[tuple[str, int | float], ...] = field(default=(), repr=False)
    given: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    token: str = field(init=False, compare=False, repr=False)
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    without: Variant | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        declared = self._unify()
        named = (self.name, self.doc, self.head_dims, self.dtypes, self.only, self.pins, declared)
        made = (*named, self.spec, self.bound, self.digest())
        token = hashlib.sha256(f"{made}".encode()).hexdigest()[:32]
        object.__setattr__(self, "token", token)
        object.__setattr__(self, "names", tuple(dict.fromkeys(symbol.name for symbol in declared)))
        without = None
        if not self.given.keys() <= set(self.names):  # what an operator left out
            object.__setattr__(self, "given", {name: x for name, x in self.given.items() if name in self.names})
        if self.given:
            without = replace(self, given={}, parents=tuple(parent.bare for parent in self.parents))
        object.__setattr__(self, "without", without)
        if self.given:
            return  # what is found by its token holds no tensor
        with _tokens:
            _alive.setdefault(token, self)
            _by_token[token] = _by_token.pop(token, self)
            if len(_by_token) > MAX_TOKENS:
                del _by_token[next(iter(_by_token))]

    def __hash__(self) -> int:
        return hash(self.token)  # that equal variants share; every request and plan is found by its variant

    def __copy__(self) -> Variant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        """A copy gives calls copies of the tensors: a copied module's own parameters, where they are among these.  What
        was computed from a parameter is no parameter, and PyTorch copies none: it stays."""
        if self.without is None:
            return self
        return self.without.giving(
            {
                name: x if getattr(x, "grad_fn", None) is not None else copy.deepcopy(x, memo)
                for name, x in self.given.items()
            }
        )

    def __reduce__(self) -> Any:
        """Pickled without `parents`, which only the loading of a file asks for, and `examples`, which only commands
        do: a function of a spec has no module that another process could find it in."""
        left = ("parents", "examples")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name not in left}
        return _restored, (kept,)

    # -----------------------------------------------------------------------------------------------------------------
    # What calls are given

    @property
    def bare(self) -> Variant:
        """The variant without what it gives to calls: it alone is planned, kept and found by its token."""
        return self if self.without is None else self.without

    def giving(self, given: Mapping[str, object]) -> Variant:
        """The variant with captured tensors and parameters' values that calls take where they pass none: equal to this
        one, and made without a look at its expressions."""
        made = object.__new__(Variant)
        for put, value in zip(_PUT, _FIELDS(self), strict=True):
            put(made, value)
        object.__setattr__(made, "given", dict(given))
        object.__setattr__(made, "without", self.bare if given else None)
        return made

    # -----------------------------------------------------------------------------------------------------------------
    # Building one from another

    def __call__(self, mask: Callable, *positions: object) -> Variant:
        """Decorate a mask function: a variant like this one with that mask."""
        if positions:
            raise self._refused(
                f"variant {self.name!r} is called with {1 + len(positions)} arguments, and is no function of positions;"
                f" combine variants, as in {self.name} & other, or call the mask function itself"
            )
        if self.mask is not None:
            raise self._refused(f"variant {self.name!r} has a mask already; combine masks with & or |")
        traced = trace.trace_mask(mask)
        return self._made(**self._described_by(mask), mask=traced.node, examples=self.examples | traced.examples)

    def score(self, function: Callable) -> Variant:
        """Decorate a score function (s, b, h, q, k): a variant like this one with that score.

        It is called by its mask, and by the score function only where there is none.
        """
        if self.score_node is not None:
            raise self._refused(
                f"variant {self.name!r} has a score function already; `.then(f)` applies another one after it"
            )
        traced = trace.trace_score(function)
        described = self._described_by(function)
        if self.mask is not None:
            described["name"] = self.name
        return self._made(**described, score_node=traced.node, examples=self.examples | traced.examples)

    def then(self, after: Callable | Variant) -> Variant:
        """Apply another score function to this variant's score; a variant brings its mask along, joined by &."""
        if isinstance(after, Variant):
            score = _compose(self.score_node, after.score_node)
            return self._joined(after, "then", _both(self.mask, after.mask), score)
        traced = trace.trace_score(after, self.score_node)
        return self._made(score_node=traced.node, examples=self.examples | traced.examples)

    def with_sink(self, sink: Sink) -> Variant:
        """A variant like this one whose rows have a learned sink (`fg.sink`) beside their keys."""
        declared = declared_sink(sink)
        if self.sink is not None:
            raise self._refused(f"variant {self.name!r} has the sink {self.sink.name!r} already, and a row has one")
        example = {} if declared.tensor.example is None else {declared.tensor.name: declared.tensor.example}
        return self._made(sink_node=declared.node, examples=self.examples | example)

    def __and__(self, other: Variant) -> Variant:
        if not isinstance(other, Variant):
            return NotImplemented
        if self.score_node is not None and other.score_node is not None:
            raise self._refused(
                f"{self.name!r} & {other.name!r}: both have a score function, and their order matters;"
                f" write {self.name}.then({other.name}) to apply {other.name!r} last"
            )
        return self._joined(other, "and", _both(self.mask, other.mask), self.score_node or other.score_node)

    def __or__(self, other: Variant) -> Variant:
        if not isinstance(other, Variant):
            return NotImplemented
        for variant in (self, other):
            variant._mask_only("|")
        everywhere = self.mask is None or other.mask is None
        return self._joined(other, "or", None if everywhere else build.apply("logical_or", self.mask, other.mask))

    def __invert__(self) -> Variant:
        self._mask_only("~")
        mask = const(False) if self.mask is None else build.apply("logical_not", self.mask)
        return self._made(name=f"not_{self.name}", mask=None if mask is const(True) else mask)

    # -----------------------------------------------------------------------------------------------------------------
    # What it needs

    @property
    def roots(self) -> tuple[Node, ...]:
        """The expressions it has: mask, score, sink."""
        return (*self.pair_roots, *(() if self.sink_node is None else (self.sink_node,)))

    @property
    def pair_roots(self) -> tuple[Node, ...]:
        """Those that are evaluated for a query and a key: mask, then score."""
        return tuple(root for root in (self.mask, self.score_node) if root is not None)

    @property
    def sink(self) -> Tensor | None:
        """The captured tensor that holds the sinks."""
        return None if self.sink_node is None else self.sink_node.attr

    @property
    def params(self) -> tuple[Param, ...]:
        return self._symbols(Param)

    @property
    def constants(self) -> tuple[Constant, ...]:
        return self._symbols(Constant)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        declared, examples = self._symbols(Tensor), self.examples
        return tuple(t if t.example is (e := examples.get(t.name)) else replace(t, example=e) for t in declared)

    @property
    def pair_tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors that mask and score read."""
        return tuple(t for t in self.tensors if t != self.sink)

    def uses(self, symbol: str) -> bool:
        """Whether mask or score reads b, h, q, k, s, a problem size, or a declared name."""
        for n in walk(self.pair_roots):
            if n.op == "score" and symbol == "s":
                return True
            if n.op in ("index", "problem") and n.attr == symbol:
                return True
            declared = symbol_of(n)
            if declared is not None and declared.name == symbol:
                return True
        return False

    def digest(self) -> str:
        """sha256 of what it computes: equal digests mean equal mask, score and sink, whatever the names."""
        marks = f"{'mask' if self.mask is not None else ''} {'score' if self.score_node is not None else ''}"
        marks += " sink" if self.sink_node is not None else ""
        return hashlib.sha256(f"{marks} {digest(self.roots)}".encode()).hexdigest()

    def values(self, given: Mapping[str, object], *, complete: bool = True) -> dict[str, int | float]:
        """Every parameter's value: as given, else its default; one without either is left out unless `complete`.

        Raises PlanError for a name that is no parameter, a missing one, a wrong type, or one outside its bounds.
        """
        known = {p.name: p for p in self.params}
        for name in given:
            if name not in known:
                raise PlanError(self._unknown(name, "parameter"))
        values = {}
        for name, p in known.items():
            if name in given:
                values[name] = checked(self.name, "parameter", p, given[name])
            elif p.default is not None:
                values[name] = p.default
            elif complete:
                raise PlanError(self.missing(p))
        return values

    def bind(self, **constants: int | float) -> Variant:
        """The variant with every constant folded: as given, else its default; and with conditions that only choose
        between a score and -inf in its mask, which kernels know tiles by.

        Raises PlanError for a name that is no constant, a wrong type, or a value outside its bounds.
        """
        known = {c.name: c for c in self.constants}
        for name in constants:
            if name not in known:
                raise PlanError(self._unknown(name, "constant"))
        if not known:
            return self._hiding()
        values = {c: checked(self.name, "constant", c, constants.get(c.name, c.default)) for c in self.constants}
        folded = {c: const(value, c.dtype) for c, value in values.items()}
        rebuilt = self._rebuilt(lambda n: folded[n.attr] if n.op == "constant" else None)
        chosen = ((c.name, value) for c, value in values.items() if value != c.default)
        return replace(rebuilt, spec=self.spec, bound=(*self.bound, *chosen))._hiding()

    def missing(self, symbol: Param | Tensor) -> str:
        """That a parameter or a captured tensor was not given, and how it can be."""
        # Nodes that variants share have the line of the first: the line that made the variant is its own.
        at = f" that {self.where.path}:{self.where.line} is made of" if self.where else ""
        if isinstance(symbol, Param):
            what, option, cure = "parameter", f"--param {symbol.name}=VALUE", f"default= of the fg.param{at}"
            kind = f"{symbol.dtype.value}{allowed(symbol)}"
        else:
            what, maker = ("sink", "sink") if symbol == self.sink else ("captured tensor", "tensor")
            option, cure = f"--tensor {symbol.name}=FILE.npy", f"example= of the fg.{maker}{at}"
            kind = f"{symbol.dtype} [{', '.join('any' if dim is None else str(dim) for dim in symbol.dims)}]"
        return (
            f"{self.name!r} needs the {what} {symbol.name!r}, {kind}\n"
            f"  nearest: {symbol.name}=... in a call, {option} of a command, or {cure}"
        )

    def with_flipped_score(self) -> Variant:
        """The variant whose score function sees -s: called with the negative scale, it computes the same."""
        minus = build.apply("neg", trace.SCORE)
        return self._made(score_node=_compose(minus, self.score_node))

    # -----------------------------------------------------------------------------------------------------------------

    def _symbols(self, kind: type, roots: tuple[Node, ...] | None = None) -> tuple:
        """What is declared of a kind in these expressions, all unless given, by name."""
        return _declared(kind, self.roots if roots is None else roots)

    def _unify(self) -> list[Symbol]:
        """One name is one declaration; every declaration, by name."""
        seen: dict[str, tuple[Symbol, Node]] = {}
        for n in walk(self.roots):
            declared = symbol_of(n)
            if declared is None:
                continue
            first, at = seen.setdefault(declared.name, (declared, n))
            if first != declared:
                raise SpecError(
                    f"the name {declared.name!r} is declared twice, differently: as {summary(first)}{line_of(at)}"
                    f" and as {summary(declared)}{line_of(n)}; declare both alike or rename one",
                    where=self.where,
                )
        if self.sink is not None and self.sink in self._symbols(Tensor, self.pair_roots):
            raise SpecError(
                f"{self.sink.name!r} is the name of the sink and of a captured tensor that mask or score reads;"
                " rename one",
                where=self.where,
            )
        return [seen[name][0] for name in sorted(seen)]

    def _made(self, **changes: object) -> Variant:
        made = {"parents": (self,), "where": source.caller(), "file": source.running_file(), "spec": None}
        return replace(self, **made, **changes)

    def _described_by(self, function: Callable) -> dict[str, str]:
        """The name and docstring after decorating: the function's, unless fg.variant(name=...) chose one before."""
        nothing = self.mask is None and self.score_node is None
        chosen = nothing and self.name != FULL
        name, doc = _described(function, UNNAMED if nothing else self.name, self.doc)
        return {"name": self.name if chosen else name, "doc": doc}

    def _rebuilt(self, change: Callable[[Node], Node | None]) -> Variant:
        mask = None if self.mask is None else build.rebuild(self.mask, change)
        return self._made(
            mask=None if mask is const(True) else mask,
            score_node=None if self.score_node is None else build.rebuild(self.score_node, change),
        )

    def _hiding(self) -> Variant:
        """The same variant: a score of `where(c, x, -inf)` is x, and its mask has c too."""
        mask, score = self.mask, self.score_node
        while score is not None and score.op == "where" and (hidden := _hidden(score)) is not None:
            condition, score = hidden
            mask = _both(mask, condition)
        if score is self.score_node:
            return self
        return replace(
            self, mask=None if mask is const(True) else mask, score_node=None if score is trace.SCORE else score
        )

    def _joined(self, other: Variant, word: str, mask: Node | None, score: Node | None = None) -> Variant:
        return Variant(
            name=f"{self.name}_{word}_{other.name}",
            doc=" ".join(filter(None, (self.doc, other.doc))),
            mask=mask,
            score_node=score,
            sink_node=self._one_sink(other),
            head_dims=self._merged(other, "head_dims", HEAD_DIMS),
            dtypes=self._merged(other, "dtypes", DTYPES),
            only=self.only or other.only,
            pins=Pins(**{name: self._pin(other, name) for name in Pins.__dataclass_fields__}),
            examples=other.examples | self.examples,
            given=self._given_with(other),
            parents=(self, other),
            where=source.caller(),
            file=source.running_file(),
        )

    def _one_sink(self, other: Variant) -> Node | None:
        mine, theirs = self.sink_node, other.sink_node
        if mine is not None and theirs is not None and mine is not theirs:
            raise self._refused(f"{self.name!r} and {other.name!r} have different sinks, and a row has one")
        return theirs if mine is None else mine

    def _given_with(self, other: Variant) -> dict[str, object]:
        """What both give to calls; SpecError where they give two things one name."""
        for name in self.given.keys() & other.given.keys():
            mine, theirs = self.given[name], other.given[name]
            if mine is not theirs and not (isinstance(mine, (int, float)) and mine == theirs):
                raise self._refused(
                    f"{self.name!r} and {other.name!r} capture different things by the name {name!r}: rename one of the"
                    " variables, or trace both functions together"
                )
        return {**other.given, **self.given}

    def _merged(self, other: Variant, name: str, default: tuple) -> tuple:
        mine, theirs = getattr(self, name), getattr(other, name)
        if mine == theirs or theirs == default:
            return mine
        if mine == default:
            return theirs
        shared = tuple(value for value in mine if value in theirs)
        if not shared:
            raise self._refused(f"{self.name!r} has {name} {mine} and {other.name!r} has {theirs}: none is shared")
        return shared

    def _pin(self, other: Variant, name: str) -> object:
        mine, theirs = getattr(self.pins, name), getattr(other.pins, name)
        if mine is not None and theirs is not None and mine != theirs:
            raise self._refused(f"{self.name!r} pins {name}={mine!r} and {other.name!r} pins {name}={theirs!r}")
        return theirs if mine is None else mine

    def _mask_only(self, sign: str) -> None:
        if self.score_node is not None:
            raise self._refused(
                f"`{sign}` combines masks and variant {self.name!r} has a score function;"
                " combine the masks first and add the score with @v.score or .then"
            )

    def _unknown(self, name: str, kind: str) -> str:
        symbols = {s.name: s for s in (*self.params, *self.constants, *self.tensors)}
        if name in symbols:
            return f"{name!r} of {self.name!r} is {summary(symbols[name])}, not a {kind}"
        found = f"{self.name!r} has no {kind} {name!r}{source.nearest(name, symbols)}"
        if not symbols:
            return f"{found}; it takes nothing: its mask and score read none"
        return f"{found}; it takes {', '.join(symbols)}, which its mask and score read"

    @staticmethod
    def _refused(message: str) -> SpecError:
        return SpecError(message, where=source.caller())


@functools.lru_cache(maxsize=1024)
def _declared(kind: type, roots: tuple[Node, ...]) -> tuple:
    """What is declared of a kind in expressions, by name; each is looked through once."""
    found = {declared for n in walk(roots) if isinstance(declared := symbol_of(n), kind)}
    return tuple(sorted(found, key=lambda symbol: symbol.name))


#: All that a Variant has, and what puts it in its places: every call of FlexAttention makes one that gives its tensors.
_FIELDS = operator.attrgetter(*(f.name for f in fields(Variant)))
_PUT = tuple(getattr(Variant, f.name).__set__ for f in fields(Variant))


def _restored(kept: Mapping[str, object]) -> Variant:
    return Variant(**kept)


def variant(
    mask: Callable | None = None,
    score: Callable | None = None,
    *,
    sink: Sink | None = None,
    name: str | None = None,
    doc: str | None = None,
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[str] | None = None,
    only: bool = False,
    **pins: object,
) -> Variant:
    """A variant from a mask function (b, h, q, k) and a score function (s, b, h, q, k); also a decorator of the mask.

    `fg.variant()` alone is full attention.  `sink` is a learned one (`fg.sink`) beside each row's keys.  `head_dims`
    and `dtypes` say what is emitted ahead and tested; `only=True` refuses a call outside them.  Pins: tile=(q, kv),
    stages, pipeline, arch.
    """
    where = source.caller()
    for given, word in ((mask, "mask"), (score, "score")):
        if isinstance(given, Variant):
            raise SpecError(
                f"{word} is a function and got the variant {given.name!r}; combine variants with &, | and .then",
                where=where,
            )
    described = mask or score
    _check_texts(name, doc, where)
    own_name, own_doc = _described(described, "", "") if described else ("", "")
    nothing = trace.Traced(None, {})
    traced_mask = nothing if mask is None else trace.trace_mask(mask)
    traced_score = nothing if score is None else trace.trace_score(score)
    made = Variant(
        name=name or own_name or (FULL if mask is None and score is None else UNNAMED),
        doc=doc if doc is not None else own_doc,
        mask=traced_mask.node,
        score_node=traced_score.node,
        head_dims=_head_dims(head_dims, where),
        dtypes=_dtypes(dtypes, where),
        only=_only(only, head_dims, dtypes, where),
        pins=_pins(pins, where),
        examples=traced_mask.examples | traced_score.examples,
        where=where,
        file=source.running_file(),
    )
    return made if sink is None else replace(made.with_sink(sink), parents=())


# ---------------------------------------------------------------------------------------------------------------------
# Reading the arguments


def _described(function: Callable, name: str, doc: str) -> tuple[str, str]:
    """A function's name and docstring, unless it has none of its own."""
    own = getattr(function, "__name__", "")
    if not own.isidentifier() or own == "_":  # a lambda, or a decorated `def _`
        own = name
    return own, (getattr(function, "__doc__", None) or doc).strip()


def _check_texts(name: object, doc: object, where: SourceLine | None) -> None:
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise SpecError(f"name is a text, as in name='causal', and got {name!r}", where=where)
    if doc is not None and not isinstance(doc, str):
        raise SpecError(f"doc is a text and got {doc!r}", where=where)


def _head_dims(given: Iterable[int] | None, where: SourceLine | None) -> tuple[int, ...]:
    if given is None:
        return HEAD_DIMS
    dims = tuple(given) if isinstance(given, Iterable) else (given,)
    if not dims or any(isinstance(d, bool) or not isinstance(d, int) or d <= 0 for d in dims):
        raise SpecError(f"head_dims is a tuple of positive integers, as in (64, 128), and got {given!r}", where=where)
    return tuple(sorted(set(dims)))


def _dtypes(given: Iterable[str] | None, where: SourceLine | None) -> tuple[str, ...]:
    if given is None:
        return DTYPES
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    names = tuple(str(n).removeprefix("torch.") for n in names)
    if not names or any(n not in DTYPES for n in names):
        raise SpecError(f"dtypes is a tuple of {' and '.join(map(repr, DTYPES))}, and got {given!r}", where=where)
    return tuple(d for d in DTYPES if d in names)


def _only(only: bool, head_dims: object, dtypes: object, where: SourceLine | None) -> bool:
    if not isinstance(only, bool):
        raise SpecError(f"only is True or False and got {only!r}", where=where)
    if only and head_dims is None and dtypes is None:
        raise SpecError("only=True refuses calls outside head_dims and dtypes: give one of them", where=where)
    return only


def _pins(given: Mapping[str, object], where: SourceLine | None) -> Pins:
    known = tuple(Pins.__dataclass_fields__)
    for name in given:
        if name not in known:
            options = (*known, "sink", "name", "doc", "head_dims", "dtypes", "only")
            raise SpecError(
                f"fg.variant has no option {name!r}{source.nearest(name, options)}; the pins are {', '.join(known)}",
                where=where,
            )
    pins = {name: value for name, value in given.items() if value is not None}
    if "tile" in pins:
        tile = pins["tile"]
        if not isinstance(tile, (tuple, list)) or len(tile) != 2 or not all(_positive(x) for x in tile):
            raise SpecError(f"tile is (rows of q, rows of kv), as in (128, 64), and got {tile!r}", where=where)
        pins["tile"] = tuple(tile)
    if "stages" in pins and not _positive(pins["stages"]):
        raise SpecError(f"stages is a positive integer and got {pins['stages']!r}", where=where)
    for name in ("pipeline", "arch"):
        if name in pins and (not isinstance(pins[name], str) or not pins[name]):
            example = {"pipeline": "ampere", "arch": "sm_80"}[name]
            raise SpecError(f"{name} is a name, as in {name}={example!r}, and got {pins[name]!r}", where=where)
    return Pins(**pins)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# ---------------------------------------------------------------------------------------------------------------------
# Expressions


def _both(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return b if a is None else a
    return build.apply("logical_and", a, b)


def _hidden(choice: Node) -> tuple[Node, Node] | None:
    """Where a choice of scores is not -inf, and the score there; None where neither is -inf throughout, or the score
    itself decides."""
    condition, chosen, otherwise = choice.operands
    if any(n is trace.SCORE for n in walk([condition])):
        return None
    if otherwise is const(-math.inf):
        return condition, chosen
    return (build.apply("logical_not", condition), otherwise) if chosen is const(-math.inf) else None


def _compose(first: Node | None, after: Node | None) -> Node | None:
    """`after` applied to what `first` gives."""
    if first is None or after is None:
        return first if after is None else after
    return build.rebuild(after, lambda n: first if n.op == "score" else None)
