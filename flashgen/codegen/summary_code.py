"""The code of summaries: what the kernel that makes them computes, and what `classify` reads of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.printer import Body, Printer

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.summaries import Summary
    from flashgen.analysis.tiles import Tiling
    from flashgen.lang.expr import Node
    from flashgen.planning.plan import TileSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryCode:
    """A part of the mask that is summarised over tiles (see `planning.plan.TileSummary`).

    `value` is the part, of C++ type `ctype`, at `positions`; `parameters` and `arguments` are the batch and head beside
    them.  `heads` declare these and, of number i of `number`, what its values are, from `first` to `last`: each at
    `place`, by its `index`.  `read` gives what is known over `ranges` of positions.
    """

    name: str
    decided_by: str
    positions: str
    ranges: str
    index: str
    place: str
    value: Body
    ctype: str
    range_type: str
    extremes: str
    stored: str
    pointer: str
    grouped: bool
    parameters: str
    arguments: str
    read: tuple[str, ...]
    number: str
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """The tiles, or parts of them, along queries or keys: how many positions one has, and how many there are."""

    at: str
    positions: int

    @property
    def length(self) -> str:
        return f"p.{'q' if self.at == 'q' else 'kv'}_len"

    @property
    def count(self) -> str:
        return f"(({self.length} + {self.positions - 1}) / {self.positions})"

    def bounds(self, first: str, last: str, number: str) -> str:
        """The declaration of the first and last position of one."""
        return (
            f"const int {first} = {number} * {self.positions},"
            f" {last} = min({first} + {self.positions}, {self.length}) - 1;"
        )


def summary_code(
    facts: Facts, tile: Tiling, plans: tuple[TileSummary, ...]
) -> tuple[tuple[SummaryCode, ...], dict[Node, str]]:
    """The code of the summaries that a plan has, and of what they say of parts of the mask."""
    made = {one.name: one for one in plans}
    found = [(one, made[one.name]) for one in facts.summaries if one.name in made]
    return tuple(_summary(one, how, tile, facts) for one, how in found), {one.value: _over(how) for one, how in found}


def _over(one: TileSummary) -> str:
    """The call that gives what a summarised part is over a tile, or a part of one."""
    places = [place for place, used in (("b", one.by_batch), ("h", one.by_head)) if used]
    return f"{one.name}_over({', '.join([*places, *one.side, *(['group'] if one.grouped else []), 'p'])})"


def _summary(one: Summary, how: TileSummary, tile: Tiling, facts: Facts) -> SummaryCode:
    printer = Printer(wide=facts.int64, exact=True)
    ctype, suffix = printer.ctype(one.value), {"Truth": "_bool", "FloatRange": "_f32"}.get(how.range_type, "")
    sides = [_Side(how.side[0], how.positions), *([_Side("k", how.keys)] if how.keys else [])]
    count = " * ".join(side.count for side in sides)
    of_one = f"({count})" if how.keys else count
    sizes = ("b", "p.batch", how.by_batch), ("h", "p.heads", how.by_head)
    dims = [(name, size) for name, size, used in sizes if used]
    of_place = {"b": f"int(i / {of_one}{' / p.heads' if how.by_head else ''})"}
    of_place["h"] = f"int(i / {of_one}{' % p.heads' if how.by_batch else ''})"
    heads = [f"const int {name} = {of_place[name]};" for name, _ in dims]
    number = f"int(i % {of_one})" if dims else "int(i)"
    index, place = how.side, how.side
    if how.keys:
        heads += _elements(how, sides, number)
        index, place = "j", _element(how)
    else:
        heads.append(sides[0].bounds("first", "last", number))
    start = " * p.heads + ".join(name for name, _ in dims)
    offset = f" + (i64)({start}) * {of_one}" if dims else ""
    several = any(side.positions < (tile.q if side.at == "q" else tile.kv) for side in sides)
    extremes = f"extremes{suffix}" if suffix else f"{'groups_of' if how.grouped else 'extremes'}<{ctype}>"
    return SummaryCode(
        name=how.name,
        decided_by="query and key select" if how.keys else f"a {'query' if how.side == 'q' else 'key'} alone decides",
        positions=", ".join(f"int {side.at}" for side in sides),
        ranges=", ".join(f"Range<int> {side.at}" for side in sides),
        index=index,
        place=place,
        value=printer.body(one.value),
        ctype=ctype,
        range_type=how.range_type,
        extremes=extremes,
        stored=how.ctype,
        pointer=how.pointer,
        grouped=how.grouped,
        parameters="".join(f"int {name}, " for name, _ in dims),
        arguments="".join(f"{name}, " for name, _ in dims),
        read=(f"const {how.ctype}* found = p.{how.pointer}{offset};", *_read(how, sides, suffix, several)),
        number=" * ".join(["(i64)" + dims[0][1], *(s for _, s in dims[1:]), of_one]) if dims else _bare(count, how),
        heads=tuple(heads),
    )


def _bare(count: str, how: TileSummary) -> str:
    """A number without what stands around it; of a table in 64 bits."""
    return f"(i64){count}" if how.keys else count[1:-1]


def _elements(how: TileSummary, sides: list[_Side], number: str) -> list[str]:
    """Declarations of the tile that a number is of, and of the elements that it selects, row by row."""
    q, k = sides
    steps = ((at, step) for at, step in zip("qk", how.steps, strict=True))
    counted = (f"{at}_count = ({at}_last - {at}_first + {step - 1}) / {step} + 1" for at, step in steps)
    return [
        f"const int tile = {number};",
        q.bounds("q_first", "q_last", f"tile / {k.count}"),
        k.bounds("k_first", "k_last", f"tile % {k.count}"),
        f"const int {', '.join(counted)};",
        "const int first = 0, last = q_count * k_count - 1;",
    ]


def _element(how: TileSummary) -> str:
    """The query and the key of element j."""
    q, k = how.steps
    return f"min(q_first + j / k_count * {q}, q_last), min(k_first + j % k_count * {k}, k_last)"


def _read(how: TileSummary, sides: list[_Side], suffix: str, several: bool) -> list[str]:
    """Statements that give what is known over ranges of positions, of what has been `found`."""
    first, last = ([f"{side.at}.{end} / {side.positions}" for side in sides] for end in ("lo", "hi"))
    if not how.keys:
        value = f"over_all{suffix}(found, {first[0]}, {last[0]})" if several else f"found[{first[0]}]"
        return [f"return of_group({value}, group);" if how.grouped else f"return {value};"]
    if not several:
        return [f"return found[{first[0]} * {sides[1].count} + {first[1]}];"]
    rows = f"over_all{suffix}(found + {{}} * {sides[1].count}, {first[1]}, {last[1]})"
    return [
        f"{how.range_type} all = {rows.format(first[0])};",
        f"for (int i = {first[0]} + 1; i <= {last[0]}; i++) all = either{suffix}(all, {rows.format('i')});",
        "return all;",
    ]
