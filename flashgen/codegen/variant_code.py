"""The code of a variant: what a kernel template asks of a variant, as CUDA expressions.

`score` and `keep` are the variant's own functions.  `previous_tile` and `classify` say, tile by tile, what a kernel
skips and what it masks: zones by comparing their ends with the tile's, other conditions by range evaluation.  They are
the second back end of `analysis.tiles` and follow the rules at the head of that module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from flashgen.analysis.abstract import Intervals, anywhere, finite_at_zero
from flashgen.analysis.bounds import bounded
from flashgen.analysis.facts import Facts, Term
from flashgen.analysis.powers import in_powers
from flashgen.analysis.tanh import lone_tanh, soft_cap, takes_long
from flashgen.analysis.tiles import Tiling
from flashgen.analysis.words import Word
from flashgen.analysis.zones import REACH, Zone
from flashgen.codegen import per_pair
from flashgen.codegen.device import identifiers
from flashgen.codegen.parts import Parts, parts_of
from flashgen.codegen.printer import (
    CALL,
    DISTANCES,
    Body,
    Formula,
    GivenPrinter,
    Printer,
    RangePrinter,
    ScorePrinter,
    SmallTanhPrinter,
    Text,
    binary,
    call,
    filled,
    joined,
    lines_of,
    used_lines,
)
from flashgen.codegen.readers import (
    Reader,
    found_at_corners,
    index_types,
    loads_of,
    printed_of,
    readers,
    trusted_indices,
)
from flashgen.codegen.rows import RowCode, row_code
from flashgen.codegen.summary_code import SummaryCode, summary_code
from flashgen.codegen.turns import Turns, truths, turns
from flashgen.codegen.words import visible_keys
from flashgen.lang import ranges
from flashgen.lang.expr import Node, const, depends_on, walk
from flashgen.planning.backward import lookup_names
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.plan import Tile, TileSummary
from flashgen.planning.summaries import THREADS

#: Bounds within this need no clamp: sums and differences of two of them and a position fit an int32.
NEAR = 2 * REACH

#: Longer formulas are left to the code.
MAX_FORMULA = 160

#: Which tiles a walk visits: all; those of the runs that the mask shows; of these, what `classify` does not find EMPTY.
Walk = Literal["every_tile", "runs", "classified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The body of `previous_tile` or `classify`: declarations, of the tile's positions first, and what is concluded."""

    lines: tuple[str, ...]
    conclusions: tuple[str, ...]

    @property
    def uses_h(self) -> bool:
        """Whether it depends on the query head."""
        return "h" in identifiers("\n".join((*self.lines, *self.conclusions)))

    @property
    def judgement(self) -> tuple[str, ...]:
        """The body of a function that returns a class by whether something is visible, where that is open, and whether
        something is hidden."""
        *visible, hidden = self.conclusions
        seen = (line for said in visible for line in (f"const bool visible = {said};", "if (!visible) return EMPTY;"))
        return (*self.lines, *seen, f"const bool hidden = {hidden};", "return hidden ? PARTIAL : FULL;")

    def by_groups(self, name: str) -> tuple[str, ...]:
        """The same by both groups of values of a summary."""
        *visible, hidden = self.conclusions
        if "&&" in hidden and "||" not in hidden:
            hidden = f"({hidden})"
        return (
            f"// By keys whose {name} is low, and by those whose it is high: there may be none in between.",
            "bool seen = false, cut = false;",
            "for (Group group = LOW_VALUES; group <= HIGH_VALUES; group = Group(group + 1)) {",
            *(f"  {line}" for line in self.lines),
            f"  const bool visible = {visible[0] if visible else 'true'};",
            "  seen |= visible;",
            f"  cut |= !visible || {hidden};",
            "}",
            "return !seen ? EMPTY : cut ? PARTIAL : FULL;",
        )

    def extreme(self, function: str) -> tuple[str, ...]:
        """The body of a function that returns the least (`min`) or the greatest (`max`) of what is concluded."""
        first, *rest = self.conclusions
        if not rest:
            return (*self.lines, f"return {first};")
        more = (f"found = {function}(found, {run});" for run in rest)
        return (*self.lines, f"int found = {first};", *more, "return found;")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """An element that `keep` is given: its name, C++ type and value, and whether a query selects it, or a key.

    Of keys each lane of a warp reads some, and passes them on: conditions as words that all lanes have, a bit for each
    of 32 keys, and others as they are.
    """

    name: str
    ctype: str
    value: Body
    by_query: bool
    in_words: bool = False  # `visible_keys` is given the words of conditions of keys

    @property
    def operand(self) -> str:
        """The type of what the mask is given."""
        return self.of_thread if self.in_words else self.ctype

    @property
    def in_bits(self) -> bool:
        return self.ctype == "bool" and not self.by_query

    @property
    def of_thread(self) -> str:
        """The type of what a thread keeps."""
        return "u32" if self.in_bits else self.ctype

    def kept(self, read: str) -> str:
        """That, by what a lane has read."""
        return f"__ballot_sync(~0u, {read}) >> column" if self.in_bits else read

    @property
    def passed(self) -> str:
        """The element of the key at `place` from the thread's first on."""
        if self.in_bits:
            return f"{self.name}[place / 32] >> place % 32 & 1"
        return f"__shfl_sync(~0u, {self.name}[place / 32], place % 32 + column)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTanh:
    """The argument of a score's tanh, and the score where that is so small that a polynomial will do."""

    argument: Body
    score: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinBounds:
    """A mask whose bounds are asked apart: bodies of what says whether a pair is inside of them, whether the rest of
    the mask shows it, and the class of a tile by bounds alone."""

    bounds: Body
    rest: Body
    classes: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantCode:
    """A variant as a kernel template sees it; what is None or False is not emitted.

    keep, runs, classes   bodies of `keep`, of `previous_tile`, and of `classify`: whether something is hidden, and
              before it, where a tile inside the runs may be EMPTY, whether something is visible
    last_key  the body of a function that says behind which key some queries see no other, where warpgroups ask
    divides   `keep` has quotients or remainders, which are quick of what is known not to be negative
    parts     of a tile that is not settled as a whole; None: there are none to judge
    turns     of conditions that are judged one after another; None: a tile is judged at once
    uniform   the mask is the same for all pairs of a tile: its first pair tells the class
    within    bounds of the mask apart from the rest of it; None: they are asked together
    small_tanh   where the score has one tanh, and its argument is cheap to look at before
    soft_cap  the c of a score that is c * tanh(s / c), if it is positive and the same for all pairs
    distances   of q and k as floats, by the names that `score` is given them by
    rows      elements of rows of keys that `score` is given
    in_powers   `score` gives powers of two, of products times log2(e)
    clamp_q, clamp_k   the position selects a captured element that is read as it is, or a row of bits: lanes outside
                     the problem must be led back inside
    long_keep, long_score   more than a few operations: they run 16 keys at a time, so that registers suffice
    sink      a logit beside the keys of a row
    finite_at_zero   without it P of rows beyond the last query, whose lse is infinite, has to be made 0
    lookups   what `keep` is given of captured tensors; empty: it reads them itself
    words     the body of `visible_keys`, where the mask is asked for 32 keys at a time
    summaries   what `classify` reads that a kernel before it has found
    formula   (kind, text) lines for the banner
    """

    readers: tuple[Reader, ...]
    score: Body | None
    in_powers: bool
    small_tanh: SmallTanh | None
    soft_cap: Text | None
    distances: tuple[str, ...]
    rows: tuple[RowCode, ...]
    keep: Body | None
    words: tuple[str, ...]
    divides: bool
    runs: Decision | None
    last_key: Decision | None
    classes: Decision | None
    parts: Parts | None
    turns: Turns | None
    uniform: bool
    within: WithinBounds | None
    sink: Body | None
    clamp_q: bool
    clamp_k: bool
    long_keep: bool
    long_score: bool
    finite_at_zero: bool
    lookups: tuple[Lookup, ...]
    summaries: tuple[SummaryCode, ...]
    formula: tuple[tuple[str, str], ...]

    @property
    def summary_threads(self) -> int:
        """Of a block of the kernel that makes summaries."""
        return THREADS

    @property
    def distance_parameters(self) -> str:
        """Of `score`, between the positions and those of the kernel."""
        return "".join(f"float {name}, " for name in self.distances)

    @property
    def row_parameters(self) -> str:
        """Of `score`, behind these."""
        return "".join(f"float {row.name}, " for row in self.rows)

    @property
    def row_elements(self) -> str:
        """Their arguments, of element i of S."""
        return "".join(f"{row.element}, " for row in self.rows)

    @property
    def may_skip(self) -> bool:
        """Whether `classify` may find a tile EMPTY."""
        return self.classes is not None and len(self.classes.conclusions) == 2

    @property
    def judged(self) -> Literal["whole", "parts", "in_turn"]:
        """Which template has `classify`."""
        if self.turns is not None:
            return "in_turn"
        return "whole" if self.parts is None or self.uniform else "parts"

    @property
    def judgement(self) -> tuple[str, ...]:
        """The body of a function that returns the class of a tile, or of a part of one."""
        assert self.classes is not None
        if self.uniform:
            pair = "rows.b, rows.h, rows.q_first, kv_tile * TILE_KV"
            return ("// The mask is the same for all pairs of a tile.", f"return keep({pair}, p) ? FULL : EMPTY;")
        group = next((one for one in self.summaries if one.grouped), None)
        return self.classes.judgement if group is None else self.classes.by_groups(group.name)

    @property
    def bits(self) -> tuple[SummaryCode, ...]:
        """What `keep` is given as bits."""
        return tuple(one for one in self.summaries if one.bits)

    @property
    def bit_parameters(self) -> str:
        """Parameters of `keep` for these."""
        return "".join(f"bool {one.name}, " for one in self.bits)

    @property
    def summarised(self) -> tuple[str, ...]:
        """The statements that make the summaries."""
        return tuple(f"summarise_{one.name}(warp, warps, p);" for one in self.summaries)

    @property
    def walk(self) -> Walk:
        """Which tiles a walk visits."""
        if self.may_skip:
            return "classified"
        return "every_tile" if self.keep is None else "runs"

    @property
    def tiles(self) -> Literal["every_tile", "visible_tiles"]:
        """Which tiles a tile of queries visits."""
        return "every_tile" if self.keep is None else "visible_tiles"

    def exponential(self, x: str, lse: str) -> str:
        """2^x of a row whose lse, infinite where it attends to nothing, has been subtracted."""
        function = "ex2" if self.score is None or self.soft_cap is not None else "ex2_of_score"
        return f"{function}({x})" if self.finite_at_zero else f"{function}_below({x}, {lse})"

    def query(self, at: str, last: str = "p.q_len - 1") -> str:
        """The query at a position, that a lane outside the problem is led back from to the last."""
        return f"min({at}, {last})" if self.clamp_q else at

    def key(self, at: str, last: str = "p.kv_len - 1") -> str:
        """The same for a key."""
        return f"min({at}, {last})" if self.clamp_k else at


def variant_code(
    facts: Facts,
    tile: Tiling,
    lookups: tuple[Node, ...] = (),
    layout: Layout = DENSE,
    summaries: tuple[TileSummary, ...] = (),
    *,
    judged_in_turn: bool = False,
    uniform: bool = False,
    within_bounds: bool = False,
    rough_tanh: bool = False,
    distances: bool = False,
    rows: tuple[Node, ...] = (),
    powers: bool = False,
    words: Word | None = None,
    by_warpgroup: bool = False,
) -> VariantCode:
    """The code of an analysed variant for tiles that start at multiples of `tile` (or of a part of its queries), whose
    `keep` is given these elements of captured tensors, and whose `classify` has these summaries.

    Where sequences have positions of their own, tiles start at any query, and captured tensors may be shorter than
    positions reach.  `judged_in_turn`: conditions are judged one after another, through shared memory.  `uniform`: the
    mask is the same for all pairs of a tile.  `within_bounds`: bounds are asked apart.  `rough_tanh`: a soft cap
    may be off by 2^-11 of the score.  `distances`: a score that takes q - k or k - q as a float is
    given it.  `rows` are the elements of rows of keys that a score is given.  `powers`: scores are wanted as powers
    of two, of products that have been multiplied by log2(e), where that is free.  `words`: the mask is asked for 32
    keys at a time, and given its conditions of keys alone.  `by_warpgroup`: each asks what its queries see of a tile.
    """
    mask, score = printed_of(facts)
    sink, cap, wide = facts.variant.sink_node, soft_cap(score), facts.int64
    apart = _distances(score, facts) if distances and score is not None else {}
    masked = mask is not None
    loads = loads_of(root for root in (mask, score) if root is not None)
    given = _lookups(lookups, facts, in_words=words is not None) if masked else {}
    kept = {one.name for one in summaries if one.bits is not None}
    bits = {one.value: one.name for one in facts.summaries if one.name in kept}
    read = {n: f"at.{one.name}" for n, one in given.items()}
    each = None if mask is None else per_pair.cheaper(mask, facts.int64)
    conditions = GivenPrinter(read | bits, wide=facts.int64, exact=True)
    tile = Tile(q=layout.starts(tile.q), kv=tile.kv)
    cut = facts.cells.within(tile.q, tile.kv) if masked and facts.cells is not None else None
    cornered = found_at_corners(facts, tile, cut)
    made, known = summary_code(facts, tile, summaries)
    reading = readers(facts, cornered, layout)
    in_rows = row_code(rows, reading, wide=facts.int64)
    trusted = [index for n in loads for index in trusted_indices(n, reading)]
    named = apart | {n: row.name for n, row in in_rows.items()}
    power = in_powers(score) if powers and score is not None else None
    emitted = score if power is None else power
    # Bits have as many rows as there are queries, whatever bounds the reader of what they were made of.
    in_bits = any(one.bits is not None and one.bits.by == "q" for one in summaries)
    clamp_q = in_bits or any(depends_on(n, "q") for n in trusted)
    options: dict[str, Any] = {"wide": facts.int64, "indices": index_types(facts), "exact": True, "cornered": cornered}
    judged = RangePrinter(given=known | truths(facts) if judged_in_turn else known, **options)
    in_turn = turns(facts, RangePrinter(given=known, **options), cut, tile) if masked and judged_in_turn else None
    return VariantCode(
        readers=reading,
        score=None if emitted is None else ScorePrinter(emitted, named, rough_tanh=rough_tanh, wide=wide).body(emitted),
        in_powers=power is not None,
        distances=tuple(name for name in DISTANCES.values() if name in apart.values()),
        rows=tuple(in_rows.values()),
        small_tanh=None if score is None else _small_tanh(score, facts),
        soft_cap=None if cap is None else Printer(wide=wide).one(cap, {}),
        keep=None if each is None else conditions.body(each),
        words=() if words is None else visible_keys(words, read, wide=facts.int64, exact=True),
        divides=each is not None and per_pair.divides(each),
        runs=Decider(facts).runs() if masked else None,
        last_key=Decider(facts).last_key() if by_warpgroup else None,
        classes=Decider(facts, judged).classes(by_parts=cut is not None, in_turn=in_turn) if masked else None,
        parts=None if cut is None else parts_of(cut),
        turns=in_turn,
        uniform=uniform,
        within=_within_bounds(facts) if within_bounds else None,
        sink=None if sink is None else Printer(wide=facts.int64).body(sink),
        clamp_q=clamp_q,
        clamp_k=any(depends_on(n, "k") for n in trusted),
        long_keep=masked and not facts.exact,
        long_score=score is not None and any(map(takes_long, walk([score]))),
        finite_at_zero=score is None or finite_at_zero(score, clamped=clamp_q),
        lookups=tuple(given.values()),
        summaries=made,
        formula=_formula(mask, score, sink),
    )


def _within_bounds(facts: Facts) -> WithinBounds | None:
    found = bounded(facts.variant)
    if found is None:
        return None
    inside, rest = found.bounds.variant.mask, per_pair.cheaper(found.rest, facts.int64)
    assert inside is not None
    return WithinBounds(
        bounds=Printer(wide=found.bounds.int64, exact=True).body(inside),
        rest=Printer(wide=facts.int64, exact=True).body(rest),
        classes=Decider(found.bounds).classes(),
    )


def _lookups(known: tuple[Node, ...], facts: Facts, *, in_words: bool) -> dict[Node, Lookup]:
    """Each element, or condition of a key, with a name of its own."""
    printer, found = Printer(wide=facts.int64, exact=True), dict[Node, Lookup]()
    for name, n in zip(lookup_names(known), known, strict=True):
        of_query = depends_on(n, "q")
        found[n] = Lookup(
            name=name, ctype=printer.ctype(n), value=printer.body(n), by_query=of_query, in_words=in_words
        )
    return found


def _distances(score: Node, facts: Facts) -> dict[Node, str]:
    """What a score has of the difference of q and k as a float: each order has a name, as -(q - k) would be -0 at 0."""
    ends = [n for n in walk([score]) if n.op == "cast" and n.dtype.is_float and n.operands[0] not in facts.int64]
    found = {n: tuple(o.attr for o in n.operands[0].operands if o.op == "index") for n in ends}
    return {n: DISTANCES[of] for n, of in found.items() if n.operands[0].op == "sub" and of in DISTANCES}


def _small_tanh(score: Node, facts: Facts) -> SmallTanh | None:
    """The score in two steps; None where it has no such tanh."""
    taken = lone_tanh(score)
    if taken is None:
        return None
    printer = SmallTanhPrinter(wide=facts.int64)
    return SmallTanh(argument=printer.body(*taken.operands), score=printer.body(score))


def _formula(mask: Node | None, score: Node | None, sink: Node | None) -> tuple[tuple[str, str], ...]:
    roots = (("visible", mask), ("score", score), ("sink", sink))
    texts = [(kind, Formula().inline(root, MAX_FORMULA)) for kind, root in roots if root is not None]
    return tuple((kind, text) for kind, text in texts if text is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


class _Clipped(NamedTuple):
    """First and last position of a tile inside bounds, and whether there is any."""

    first: Text
    last: Text
    meets: list[Text]


class _At(NamedTuple):
    """Where a decision finds the first and last positions of a tile."""

    q_first: str = "rows.q_first"
    q_last: str = "rows.q_last"
    k_first: str = "k_first"
    k_last: str = "k_last"


class Decider:
    """Prints what the facts' terms say about one tile."""

    def __init__(self, facts: Facts, printer: RangePrinter | None = None) -> None:
        self.facts = facts
        self.printer = printer or RangePrinter(wide=facts.int64, indices=index_types(facts), exact=True)
        self.at = _At()
        self.known: Mapping[Node, Text] = {}
        self._extent = Intervals(anywhere).range

    def runs(self) -> Decision:
        """The runs of keys that the visible terms give a tile of queries, each as the tile of it to visit next."""
        return self._visits(partial(self._run, function="last_tile_of_run", none="-1"), "-1", _ROWS)

    def last_key(self) -> Decision:
        """The last key of the same runs for some queries, each as it is without the others."""
        terms = self.facts.visible
        lines = self._declare(n for t in terms for n in (*t.zone.nodes(), *t.uniform))
        found = list(dict.fromkeys(str(self._last_key(term)) for term in terms))
        return _decision(lines, found or ["-1"], partial(_heads, _ROWS))

    def later_runs(self) -> Decision:
        """The same runs from the first key to the last."""
        none = "p.kv_tiles"
        return self._visits(partial(self._run, function="first_key_tile_of_run", none=none), none, _ROWS)

    def query_runs(self) -> Decision:
        """The runs of queries that the visible terms give a tile of keys, each as the tile of it to visit next; the
        query head is an argument."""
        return self._visits(self._query_run, "p.q_tiles", {"b": "keys.b"})

    def _visits(self, run: Callable[[Term], Text], none: str, heads: Mapping[str, str]) -> Decision:
        terms = self.facts.visible
        lines = self._declare(n for t in terms for n in (*t.zone.nodes(), *t.uniform))
        found = list(dict.fromkeys(str(run(term)) for term in terms))
        return _decision(lines, ["tile"] if "tile" in found else found or [none], partial(_heads, heads))

    def classes(self, *, by_parts: bool = False, in_turn: Turns | None = None) -> Decision:
        """Whether something is hidden in a tile, or in a part of one; before it, where runs leave it open, whether
        something is visible.  `in_turn`: of a tile in shared memory, where all conditions have been judged."""
        asked = [self.facts.hidden]
        if any(term.others for term in self.facts.visible):
            asked.insert(0, self.facts.visible)
        lines = self._declare(n for terms in asked for term in terms for n in term.nodes())
        positions = _positions_of_part if by_parts else _positions
        if in_turn is not None:
            self.at = _At(*(f"at.{name}" for name in _At._fields))
            positions = in_turn.positions
        return _decision(lines, [str(joined("||", map(self._possible, terms), "false")) for terms in asked], positions)

    def _declare(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        body = self.printer.body(*nodes)
        self.known = body.known
        return body.declarations

    def _run(self, term: Term, *, function: str, none: str) -> Text:
        return _next_of_run(function, *self._ends(term), none)

    def _last_key(self, term: Term) -> Text:
        """The last key of the term's run, where there is one."""
        _, last, end, conditions = self._ends(term)
        found = _extreme("min", last or [Text(end)])
        return filled("{0} ? {1} : -1", joined("&&", conditions, ""), found) if conditions else found

    def _ends(self, term: Term) -> tuple[list[Text], list[Text], str, list[Text]]:
        """Bounds of the first and of the last key that some queries see by a term, the last key of all, and conditions
        without which they see none."""
        zone, q = term.zone, self._clipped("rows.q_first", "rows.q_last", term.zone.q_lo, term.zone.q_hi)
        first = [self._bound(n) for n in zone.k_lo] + [self._less(q.first, n) for n in zone.d_hi]
        last = [self._bound(n) for n in zone.k_hi] + [self._less(q.last, n) for n in zone.d_lo]
        return first, last, "p.kv_len - 1", [*self._uniform(term), *q.meets, *self._bands(zone)]

    def _query_run(self, term: Term) -> Text:
        zone, k = term.zone, self._clipped("keys.k_first", "keys.k_last", term.zone.k_lo, term.zone.k_hi)
        first = [self._bound(n) for n in zone.q_lo] + [self._more(k.first, n) for n in zone.d_lo]
        last = [self._bound(n) for n in zone.q_hi] + [self._more(k.last, n) for n in zone.d_hi]
        conditions = [*self._uniform(term), *k.meets, *self._bands(zone)]
        return _next_of_run("first_tile_of_run", first, last, "p.q_len - 1", conditions, "p.q_tiles")

    def _uniform(self, term: Term) -> list[Text]:
        return [self.known[n] for n in term.uniform]

    def _bands(self, zone: Zone) -> list[Text]:
        """Whether each band of distances holds any."""
        return [
            binary("<=", self._bound(lo), self._bound(hi))
            for lo in zone.d_lo
            for hi in zone.d_hi
            if not self._extent(lo).hi <= self._extent(hi).lo
        ]

    def _possible(self, term: Term) -> Text:
        """Whether the tile may hold a pair of the term: all ends of the zone and the tile are in order."""
        zone = term.zone
        q = self._clipped(self.at.q_first, self.at.q_last, zone.q_lo, zone.q_hi)
        k = self._clipped(self.at.k_first, self.at.k_last, zone.k_lo, zone.k_hi)
        conditions = [*self._uniform(term), *q.meets, *k.meets]
        conditions += [self._apart(q.first, k.last, "<=", n) for n in zone.d_hi]
        conditions += [self._apart(q.last, k.first, ">=", n) for n in zone.d_lo]
        conditions += self._bands(zone)
        conditions += [Text(f"{self.known[n].inside(CALL)}.may_true") for n in term.others]
        return joined("&&", conditions, "true")

    def _clipped(self, first: str, last: str, lo: tuple[Node, ...], hi: tuple[Node, ...]) -> _Clipped:
        """The positions of a tile inside a zone's bounds."""
        inside = (
            _extreme("max", [Text(first), *map(self._bound, lo)]),
            _extreme("min", [Text(last), *map(self._bound, hi)]),
        )
        if lo and hi:
            return _Clipped(*inside, [binary("<=", *inside)])
        meets = [self._ordered(Text(last), ">=", n) for n in lo] + [self._ordered(Text(first), "<=", n) for n in hi]
        return _Clipped(*inside, meets)

    def _bound(self, n: Node) -> Text:
        """A bound as an int that arithmetic may be done on."""
        known = self._extent(n)
        if known.lo < -NEAR or known.hi > NEAR:
            return call("bounded", self.known[n])
        return call("int", self.known[n]) if self.printer.is_wide(n) else self.known[n]

    def _less(self, position: Text, n: Node) -> Text:
        """The position minus a bound."""
        if n is const(0):
            return position
        if n.op == "neg":
            return binary("+", position, self._bound(n.operands[0]))
        known = self._extent(n)
        fits = "(" not in str(position) and known.lo >= -4 * REACH and not self.printer.is_wide(n)
        return binary("-", position, self.known[n] if fits else self._bound(n))

    def _more(self, position: Text, n: Node) -> Text:
        """The position plus a bound."""
        return position if n is const(0) else binary("+", position, self._bound(n))

    def _apart(self, q: Text, k: Text, sign: str, n: Node) -> Text:
        """The distance q - k compared with a bound."""
        if n is const(0):
            return binary(sign, q, k)
        if n is const(-1 if sign == "<=" else 1):
            return binary(sign[0], q, k)
        return self._ordered(binary("-", q, k), sign, n)

    def _ordered(self, position: Text, sign: str, n: Node) -> Text:
        """A position compared with a bound: x <= y - 1 is written x < y, and x <= -1 - y as x < -y."""
        first, *rest = n.operands or (n,)
        if n.op == ("sub" if sign == "<=" else "add") and rest == [const(1)]:
            return binary(sign[0], position, self.known[first])
        if sign == "<=" and n.op == "sub" and first is const(-1) and self._extent(rest[0]).lo > ranges.INT32_MIN:
            return binary("<", position, filled("-{0}", self.known[rest[0]]))
        return binary(sign, position, self.known[n])


def _next_of_run(
    function: str, first: list[Text], last: list[Text], end: str, conditions: list[Text], none: str
) -> Text:
    """The tile to visit next of a run between the largest of `first` and the least of `last`, by default 0 and `end`;
    `none` where a condition fails."""
    run = Text("tile")
    if first or last:
        ends = _extreme("max", first or [Text("0")]), _extreme("min", last or [Text(end)])
        run = call(function, "tile", *ends, "p")
    return filled("{0} ? {1} : {2}", joined("&&", conditions, ""), run, Text(none)) if conditions else run


def _extreme(function: str, parts: list[Text]) -> Text:
    found = parts[-1]
    for part in reversed(parts[:-1]):
        found = call(function, part, found)
    return found


#: Where a decision about a tile of queries finds its batch and head.
_ROWS = {"b": "rows.b", "h": "rows.h"}


def _heads(values: Mapping[str, str], used: frozenset[str]) -> list[str]:
    """Declarations of those of these ints that are used."""
    return [f"const int {name} = {value};" for name, value in values.items() if name in used]


def _positions(used: frozenset[str]) -> list[str]:
    """Declarations of what is used of the positions of `rows` and `kv_tile`, and of ranges of them."""
    lines = _heads(_ROWS, used)
    if not used.isdisjoint(("k_last", "k")):
        lines.append("const int k_first = kv_tile * TILE_KV, k_last = min(k_first + TILE_KV, p.kv_len) - 1;")
    elif "k_first" in used:
        lines.append("const int k_first = kv_tile * TILE_KV;")
    return [*lines, *_ranges(used)]


def _positions_of_part(used: frozenset[str]) -> list[str]:
    """The same of a part, whose keys are arguments."""
    return [*_heads(_ROWS, used), *_ranges(used)]


def _ranges(used: frozenset[str]) -> list[str]:
    ends = {"q": "{rows.q_first, rows.q_last}", "k": "{k_first, k_last}"}
    return [f"const Range<int> {name} = {value};" for name, value in ends.items() if name in used]


def _decision(
    lines: tuple[str, ...], conclusions: list[str], positions: Callable[[frozenset[str]], list[str]]
) -> Decision:
    """The decision without declarations that nothing uses any more, behind those of the positions that it uses."""
    lines = lines_of(used_lines(lines, "\n".join(conclusions)))
    used = identifiers("\n".join((*lines, *conclusions)))
    return Decision(lines=(*positions(used), *lines), conclusions=tuple(conclusions))
