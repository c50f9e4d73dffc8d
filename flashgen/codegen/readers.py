"""The functions that read captured tensors: types of indices, which may lie outside, and what an element may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from flashgen.analysis.abstract import Intervals, anywhere
from flashgen.analysis.cells import Cells, cornered, single
from flashgen.analysis.facts import Facts
from flashgen.analysis.tiles import Tiling
from flashgen.codegen.printer import Printer, RangePrinter, constant
from flashgen.lang import ranges
from flashgen.lang.expr import TENSOR_DTYPES, DType, Node, Tensor, depends_on, walk
from flashgen.planning.layout import Layout
from flashgen.planning.program import CTYPES

#: The dimension that each position lies inside of.
OWN_DIMENSION = {"b": "batch", "h": "heads", "q": "q", "k": "kv"}

#: How a stored element becomes what expressions see.
WIDENED = {"bool": "{} != 0", "float16": "from_f16({})", "bfloat16": "from_bf16({})"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corners:
    """The function that looks for an element at the ends of ranges of indices: the body, and the `places` that it looks
    at, for a person."""

    places: str
    statements: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The function that reads an element of a captured tensor, and its twins over ranges of indices.

    `lines` clamp the indices that may lie outside their dimensions, the `clamped` ones; `value` is the element, and
    `offset` where it lies.
    `range_type` is the type of the twins: `ranged`, whether tiles are judged by an element that ranges of indices
    select as such, and `corners`, by those at the ends of few indices.  `declared` is what an element may be.
    """

    name: str
    shape: str
    ctype: str
    indices: tuple[str, ...]
    clamped: tuple[int, ...]
    lines: tuple[str, ...]
    offset: str
    value: str
    ranged: bool
    corners: Corners | None
    range_type: str
    single: str
    declared: str
    sorted: bool

    @property
    def statements(self) -> tuple[str, ...]:
        """The body of the function that reads an element."""
        return (*self.lines, f"return {self.value};")

    @property
    def outward(self) -> bool:
        """Whether an end of a range may be NaN."""
        return self.ctype == CTYPES[DType.FLOAT32]


def printed_of(facts: Facts) -> tuple[Node | None, Node | None]:
    """The mask, where it hides anything, and the score."""
    return facts.variant.mask if facts.hidden else None, facts.variant.score_node


def judged_of(facts: Facts) -> list[Node]:
    """Everything that the choice of tiles evaluates."""
    return [n for term in (*facts.visible, *facts.hidden) for n in term.nodes()]


def loads_of(roots: Iterable[Node]) -> list[Node]:
    return [n for n in walk(roots) if n.op == "load"]


def _sites(facts: Facts) -> dict[Tensor, list[Node]]:
    """Where each captured tensor is read, by name."""
    found: dict[Tensor, list[Node]] = {}
    printed = (*printed_of(facts), facts.variant.sink_node)
    for n in loads_of([*filter(None, printed), *(judged_of(facts) if facts.hidden else ())]):
        found.setdefault(n.attr, []).append(n)
    return dict(sorted(found.items(), key=lambda item: item[0].name))


def index_types(facts: Facts) -> dict[Tensor, tuple[str, ...]]:
    """The C++ types of the indices of each captured tensor's reader: one that needs 64 bits anywhere has them."""
    printer = Printer(wide=facts.int64)
    by_dimension = {tensor: zip(*(n.operands for n in sites), strict=True) for tensor, sites in _sites(facts).items()}
    return {
        tensor: tuple("i64" if any(map(printer.is_wide, at)) else "int" for at in dimensions)
        for tensor, dimensions in by_dimension.items()
    }


def found_at_corners(facts: Facts, tile: Tiling, cut: Cells | None) -> frozenset[Node]:
    """The elements that are looked for at the ends of ranges of few indices: not those of which every part of a tile
    has one, since then the parts are judged by it."""
    if not facts.hidden:
        return frozenset()
    spans = {"q": (cut and cut.q) or tile.q, "k": (cut and cut.k) or tile.kv}
    found = (n for n in loads_of(judged_of(facts)) if cornered(n))
    return frozenset(n for n in found if not all(single(o, spans) for o in n.operands))


def readers(facts: Facts, cornered: frozenset[Node], layout: Layout) -> tuple[Reader, ...]:
    indices = index_types(facts)
    judged = (
        frozenset(n for n in loads_of(judged_of(facts)) if depends_on(n, "q", "k")) if facts.hidden else frozenset()
    )
    return tuple(
        _reader(tensor, sites, indices[tensor], judged.intersection(sites), cornered.intersection(sites), layout)
        for tensor, sites in _sites(facts).items()
    )


def trusted_indices(load: Node, reading: Iterable[Reader]) -> list[Node]:
    """The indices of a read that its reader takes to lie inside, as those of the problem's positions do."""
    clamped = next(r.clamped for r in reading if r.name == load.attr.name)
    return [index for i, index in enumerate(load.operands) if i not in clamped]


def _reader(
    tensor: Tensor,
    sites: list[Node],
    indices: tuple[str, ...],
    judged: frozenset[Node],
    cornered: frozenset[Node],
    layout: Layout,
) -> Reader:
    offsets, clamped = [], []
    for i, dimension in enumerate(tensor.dims):
        at = [n.operands[i] for n in sites]
        if (layout.own and dimension == OWN_DIMENSION["q"]) or not all(inside(n, dimension) for n in at):
            clamped.append(i)
        offsets.append(f"i{i} * p.stride{i}_{tensor.name}")
    offset = " + ".join(offsets)
    element = f"__ldg(&p.tensor_{tensor.name}[{offset}])"
    dtype = TENSOR_DTYPES[tensor.dtype]
    range_type, one = RangePrinter.types(dtype)
    reader = Reader(
        name=tensor.name,
        shape=f"{tensor.dtype} [{', '.join('any' if d is None else str(d) for d in tensor.dims)}]",
        ctype=CTYPES[dtype],
        indices=indices,
        clamped=tuple(clamped),
        lines=tuple(f"i{i} = clamp_index(i{i}, p.size{i}_{tensor.name});" for i in clamped),
        offset=offset,
        value=WIDENED.get(tensor.dtype, "{}").format(element),
        ranged=bool(judged - cornered),
        corners=None,
        range_type=range_type,
        single=one,
        declared=_declared(tensor),
        sorted=tensor.sorted and dtype is not DType.BOOL,
    )
    moving = {i for n in cornered for i, o in enumerate(n.operands) if depends_on(o, "q", "k")}
    return replace(reader, corners=_corners(reader, sorted(moving))) if cornered else reader


def _corners(reader: Reader, moving: list[int]) -> Corners:
    """The body that looks at both ends of these indices, and of one in order at all between them."""
    count, name = len(reader.indices), reader.name
    few = [i for i in moving if not (reader.sorted and i == count - 1)]
    lines = [f"i{i} = range_clamp_index(i{i}, p.size{i}_{name});" for i in reader.clamped]
    lines += [f"if (i{i}.hi - i{i}.lo > 1) return {reader.declared};" for i in few]

    def read(ends: tuple[str, ...]) -> str:
        return f"read_{name}({', '.join(f'i{i}.{end}' for i, end in enumerate(ends))}, p)"

    values: list[str] = []
    for ends in product(*(("lo", "hi") if i in few else ("lo",) for i in range(count))):
        if reader.sorted:
            first, last = f"first{len(values) + 1}", f"last{len(values) + 1}"
            lines.append(f"const {reader.ctype} {first} = {read(ends)}, {last} = {read((*ends[:-1], 'hi'))};")
            outward = f"outward({first}, {last}, isnan({first}) || isnan({last}))"
            values.append(outward if reader.outward else f"{reader.range_type}{{{first}, {last}}}")
        else:
            values.append(f"{reader.single}({read(ends)})")
    lines.append(f"{reader.range_type} found = {values[0]};")
    either = {"Truth": "either_bool", "FloatRange": "either_f32"}.get(reader.range_type, "either")
    lines += [f"found = {either}(found, {value});" for value in values[1:]]
    places = "both ends of those" if len(few) > 1 else "both ends of that"
    told = " and ".join(f"i{i}" for i in few)
    return Corners(places=f"{places} of {told}, where {told}", statements=(*lines, "return found;"))


def inside(index: Node, dimension: str | int | None) -> bool:
    """Whether an index is known to lie in its dimension for every position of a problem and whatever tensors hold.

    Bounds of parameters are checked at each call and count.  Those of a captured tensor are promises that no kernel
    checks: an index that reads one is computed in widths and by operators that trust them, and proves nothing.
    """
    if index.op == "index":
        return OWN_DIMENSION[index.attr] == dimension
    if not isinstance(dimension, int) or any(n.op == "load" and _promised(n.attr) for n in walk((index,))):
        return False
    known = Intervals(anywhere).range(index)
    return bool(known.lo >= 0 and known.hi < dimension)


def _promised(tensor: Tensor) -> bool:
    """Whether less is taken to be in a tensor than its stored type holds."""
    return tensor.min is not None or tensor.max is not None


def _declared(tensor: Tensor) -> str:
    known = ranges.stored(tensor)
    if isinstance(known, ranges.Truth):
        return "{true, true}"
    dtype = TENSOR_DTYPES[tensor.dtype]
    if not dtype.is_float:
        return f"{{{constant(int(known.lo), dtype)}, {constant(int(known.hi), dtype)}}}"
    ends = ", ".join(str(constant(float(end), dtype)) for end in (known.lo, known.hi))
    return f"{{{ends}, {'true' if known.nan else 'false'}}}"
