"""The code of summaries: what the kernel that makes them computes, and what `classify` reads of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.printer import Body, Printer
from flashgen.planning.summaries import WORD

if TYPE_CHECKING:
    from flashgen.analysis.facts import Facts
    from flashgen.analysis.summaries import Summary
    from flashgen.analysis.tiles import Tiling
    from flashgen.lang.expr import Node
    from flashgen.planning.plan import RowBits, TileSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryCode:
    """A part of the mask that is summarised over tiles (see `planning.plan.TileSummary`).

    `value` is the part, of C++ type `ctype`, at `positions`; `places` are the batch and head beside them.  `counts`
    declare what `number` is made of, `heads` batch, head and, of number i of `number`, where its values lie: each at
    `place`, by its `index`.  `found` is what is known of them; `read` gives what is known over `ranges`, and `bits` the
    word of a row's bits, where they are kept.
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
    stored: str
    pointer: str
    grouped: bool
    found: str
    bits: tuple[str, ...]
    parameters: str
    places: tuple[str, ...]
    read: tuple[str, ...]
    counts: tuple[str, ...]
    number: str
    heads: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """Batch and head before other arguments."""
        return self.arguments_at("b", "h")

    def arguments_at(self, b: str, h: str) -> str:
        """The same, of this batch and head."""
        return "".join(f"{b if name == 'b' else h}, " for name in self.places)


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
        return f"({self.length} + {self.positions - 1}) / {self.positions}"

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
    sizes = ("b", "p.batch", how.by_batch), ("h", "p.heads", how.by_head)
    dims = [(name, size) for name, size, used in sizes if used]
    heads = _batch_and_head(how, "i", "parts")
    index, place = how.side, how.side
    offset_of = _place(dims)
    extremes = f"extremes{suffix}" if suffix else f"{'groups_of' if how.grouped else 'extremes'}<{ctype}>"
    found = f"{extremes}(first, last, value)"
    if how.bits is not None:
        # 2^31 parts of a table have 2^43 elements: no more fit in memory, and 64-bit division is a call.
        counts = [f"const int columns = {sides[1].count};", f"const i64 parts = {sides[0].count} * (i64)columns;"]
        heads = _batch_and_head(how, "u32(i)", "u32(parts)")
        heads.append(f"const u32 part = {'u32(i) % u32(parts)' if dims else 'u32(i)'};")
        row, column = ("q", "k") if how.bits.by == "q" else ("k", "q")
        start = f"({offset_of} * {_Side(row, 1).length} + {row}_first)" if dims else f"{row}_first"
        heads += [
            sides[0].bounds("q_first", "q_last", "int(part / columns)"),
            sides[1].bounds("k_first", "k_last", "int(part % columns)"),
            f"const i64 words = {_words(how.bits)};",
            f"u32* bits = p.{how.bits_pointer} + {start} * words + {column}_first / {WORD};",
        ]
        index, place = f"{row}, int {column}", "q, k"
        pairs = how.keys if column == "k" else how.positions
        ends = f"{row}_first, {row}_last, {column}_first, {column}_last"
        found = f"rows_of_bits<{pairs}>({ends}, value, bits, words)"
    elif how.keys:
        counts = [f"const int columns = {sides[1].count};", f"const i64 parts = {sides[0].count} * (i64)columns;"]
        heads += _elements(how, sides)
        index, place = "j", _element(how)
    else:
        counts = [f"const int parts = {sides[0].count};"]
        heads.append(sides[0].bounds("first", "last", "int(i % parts)" if dims else "int(i)"))
    needed = counts if dims else counts[:1] if how.keys else []
    offset = f" + {offset_of} * parts" if dims else ""
    several = any(side.positions < (tile.q if side.at == "q" else tile.kv) for side in sides)
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
        found=found,
        bits=_bits(how, offset_of if dims else ""),
        stored=how.ctype,
        pointer=how.pointer,
        grouped=how.grouped,
        parameters="".join(f"int {name}, " for name, _ in dims),
        places=tuple(name for name, _ in dims),
        read=(*needed, f"const {how.ctype}* found = p.{how.pointer}{offset};", *_read(how, sides, suffix, several)),
        counts=tuple(counts),
        number=" * ".join(["(i64)" + dims[0][1], *(s for _, s in dims[1:]), "parts"]) if dims else "parts",
        heads=tuple(heads),
    )


def _batch_and_head(how: TileSummary, number: str, parts: str) -> list[str]:
    """Declarations of those that a number is of."""
    of = {"b": " / p.heads" if how.by_head else "", "h": " % p.heads" if how.by_batch else ""}
    used = (("b", how.by_batch), ("h", how.by_head))
    return [f"const int {name} = int({number} / {parts}{of[name]});" for name, is_used in used if is_used]


def _place(dims: list[tuple[str, str]]) -> str:
    """The number of a batch and head."""
    return "(i64)(b * p.heads + h)" if len(dims) == 2 else "(i64)" + "".join(name for name, _ in dims)


def _words(bits: RowBits) -> str:
    """Words in a row, of whole tiles."""
    length = _Side("k" if bits.by == "q" else "q", 1).length
    return f"({length} + {bits.columns - 1}) / {bits.columns} * {bits.columns // WORD}"


def _bits(how: TileSummary, place: str) -> tuple[str, ...]:
    """Statements that give a word of a row's bits."""
    if how.bits is None:
        return ()
    row = f"({place} * {_Side(how.bits.by, 1).length} + row)" if place else "(i64)row"
    return (f"return __ldg(&p.{how.bits_pointer}[{row} * ({_words(how.bits)}) + word]);",)


def _elements(how: TileSummary, sides: list[_Side]) -> list[str]:
    """Declarations of the tile that number i is of, and of the elements that it selects, row by row."""
    q, k = sides

    def count(at: str, step: int) -> str:
        counted = f"{at}_last - {at}_first"
        return f"{counted} + 1" if step == 1 else f"({counted} + {step - 1}) / {step} + 1"

    rows, of_row = map(count, "qk", how.steps)
    return [
        q.bounds("q_first", "q_last", "int(i % parts / columns)"),
        k.bounds("k_first", "k_last", "int(i % parts % columns)"),
        f"const int rows = {rows}, of_row = {of_row}, first = 0, last = rows * of_row - 1;",
    ]


def _element(how: TileSummary) -> str:
    """The query and the key of element j."""
    at = zip("qk", ("j / of_row", "j % of_row"), how.steps, strict=True)
    return ", ".join(
        f"{side}_first + {i}" if step == 1 else f"min({side}_first + {i} * {step}, {side}_last)" for side, i, step in at
    )


def _read(how: TileSummary, sides: list[_Side], suffix: str, several: bool) -> list[str]:
    """Statements that give what is known over ranges of positions, of what has been `found`."""
    first, last = ([f"{side.at}.{end} / {side.positions}" for side in sides] for end in ("lo", "hi"))
    if not how.keys:
        value = f"over_all{suffix}(found, {first[0]}, {last[0]})" if several else f"found[{first[0]}]"
        return [f"return of_group({value}, group);" if how.grouped else f"return {value};"]
    if not several:
        return [f"return found[(i64)({first[0]}) * columns + {first[1]}];"]
    return [
        f"found += (i64)({first[0]}) * columns;",
        f"{how.range_type} all = found[{first[1]}];",
        f"for (int i = {first[0]}; i <= {last[0]}; i++, found += columns)",
        "#pragma unroll 1",
        f"  for (int j = {first[1]}; j <= {last[1]}; j++) all = either{suffix}(all, found[j]);",
        "return all;",
    ]
