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

    `value` is the part at the position `at`, of C++ type `ctype`; `parameters` and `arguments` are the batch and head
    beside it, `heads` declare them and the positions from `first` to `last` of number i of `number`; `read` gives what
    is known over a range of positions.
    """

    name: str
    at: str
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

    @property
    def position(self) -> str:
        return "query" if self.at == "q" else "key"


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
    return f"{one.name}_over({', '.join([*places, one.side, *(['group'] if one.grouped else []), 'p'])})"


def _summary(one: Summary, how: TileSummary, tile: Tiling, facts: Facts) -> SummaryCode:
    printer, positions = Printer(wide=facts.int64, exact=True), how.positions
    ctype = printer.ctype(one.value)
    length = f"p.{'q' if how.side == 'q' else 'kv'}_len"
    parts = f"(({length} + {positions - 1}) / {positions})"
    sizes = ("b", "p.batch", how.by_batch), ("h", "p.heads", how.by_head)
    dims = [(place, size) for place, size, used in sizes if used]
    place = " * p.heads + ".join(name for name, _ in dims)
    start = f"i % {parts}" if dims else "i"
    heads = [f"const int first = int({start}) * {positions}, last = min(first + {positions}, {length}) - 1;"]
    of_place = {"b": f"int(i / {parts}{' / p.heads' if how.by_head else ''})"}
    of_place["h"] = f"int(i / {parts}{' % p.heads' if how.by_batch else ''})"
    heads += [f"const int {name} = {of_place[name]};" for name, _ in dims]
    suffix = {"Truth": "_bool", "FloatRange": "_f32"}.get(how.range_type, "")
    offset = f" + (i64)({place}) * {parts}" if dims else ""
    if positions < (tile.q if how.side == "q" else tile.kv):
        value = f"over_all{suffix}(found, {how.side}.lo / {positions}, {how.side}.hi / {positions})"
    else:
        value = f"found[{how.side}.lo / {positions}]"
    value = f"of_group({value}, group)" if how.grouped else value
    extremes = f"extremes{suffix}" if suffix else f"{'groups_of' if how.grouped else 'extremes'}<{ctype}>"
    read = f"const {how.ctype}* found = p.{how.pointer}{offset};", f"return {value};"
    return SummaryCode(
        name=how.name,
        at=how.side,
        value=printer.body(one.value),
        ctype=ctype,
        range_type=how.range_type,
        extremes=extremes,
        stored=how.ctype,
        pointer=how.pointer,
        grouped=how.grouped,
        parameters="".join(f"int {name}, " for name, _ in dims),
        arguments="".join(f"{name}, " for name, _ in dims),
        read=read,
        number=" * ".join(["(i64)" + dims[0][1], *(size for _, size in dims[1:]), parts]) if dims else parts[1:-1],
        heads=tuple(heads),
    )
