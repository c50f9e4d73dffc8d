"""What a backward kernel asks of a variant beyond the forward's, as CUDA: transposed schedule, derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from flashgen.analysis import widths
from flashgen.analysis.abstract import Intervals, anywhere
from flashgen.analysis.derivative import derive
from flashgen.analysis.distances import Seen, selection
from flashgen.analysis.facts import Facts
from flashgen.codegen.params import STORED
from flashgen.codegen.printer import Body, Printer, Text, binary, call, constant
from flashgen.codegen.readers import Reader, inside, loads_of, readers, trusted_indices
from flashgen.codegen.variant_code import Decider, Decision
from flashgen.lang.expr import DType, Node, Tensor, const, depends_on, walk
from flashgen.planning.backward import captured_grads, own_dimensions, storable
from flashgen.planning.layout import DENSE, Layout
from flashgen.planning.plan import KernelPlan, without_sink

#: A float as a captured tensor's element, by the tensor's dtype.
_ROUNDED = {"float16": "(u16)cvt_f16x2({}, 0.f)", "bfloat16": "(u16)cvt_bf16x2({}, 0.f)", "float32": "{}"}

#: An element of dS in the templates, and where it lies.
_DS, _PLACE = "ds[m][j][i]", ("q + 8 * j + i % 2", "k + 16 * m + i / 2 * 8")


class Stored(NamedTuple):
    """The gradient of a captured tensor where its elements are stored: they have the tensor's dtype."""

    tensor: str
    dtype: str

    @property
    def ctype(self) -> str:
        return STORED[self.dtype]

    @property
    def pointer(self) -> str:
        """To the first element."""
        return f"p.grad_{self.tensor}" if self.ctype == "float" else f"({self.ctype}*)p.grad_{self.tensor}"

    def rounded(self, x: str) -> str:
        """A float as an element."""
        return _ROUNDED[self.dtype].format(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGrad:
    """A read of a captured tensor in the score, and where its gradient goes.

    `slope` is the derivative of the score with respect to the element read, `index` the body of a function that gives
    the element's number in the gradient, `selected` what of query and key selects it: what one element is read by is
    summed up before it goes to memory, over rows or columns of a tile, or along its diagonals.

    inside        statements that lead a pair outside of the problem back inside, where a read takes it to lie there
    block         queries of a block in which that holds, of a block of 16 keys; 0: anywhere
    even          the slope is one for all pairs
    kept          the number among those of which lanes keep a sum from tile to tile; None of others
    slope_apart   the slope is one for all that is summed first, and multiplies sums
    diagonals     what has one distance is summed first
    finite        the slope is a number whatever it reads
    by_score      the score itself, before the score function, selects the element
    steps         what makes elements of a number of queries, and of keys, where each pair may have one of its own; None
                  of others
    dtype         of the captured tensor, and of a gradient of which each pair has an element of its own
    """

    name: str
    tensor: str
    slope: Body
    index: tuple[str, ...]
    inside: tuple[str, ...]
    selected: Seen
    block: int
    even: bool
    kept: int | None
    slope_apart: bool
    diagonals: bool
    finite: bool
    by_score: bool
    steps: tuple[str, str] | None
    dtype: str

    @property
    def template(self) -> str:
        """The template of what is summed up first."""
        along = "_along_diagonals" if self.diagonals and not self.by_distance else ""
        return f"captured_grad_by_{self.selected.value}{along}.cu.j2"

    @property
    def keeps(self) -> bool:
        """Whether lanes keep a sum from tile to tile."""
        return self.kept is not None

    @property
    def by_distance(self) -> bool:
        return self.selected is Seen.DISTANCE

    @property
    def kept_index(self) -> str:
        """The number of the element of which a sum is kept."""
        return "kept.of" if self.by_distance else f"index_{self.name}(b, kept.of, 0, 0, p)"

    @property
    def part(self) -> str:
        """What is summed up of element [m][j][i]."""
        return _DS if self.slope_apart else self._part(_DS, *_PLACE, x="x[m][j][i]")

    @property
    def part_alike(self) -> str:
        """The same where all pairs of a tile read one element."""
        return _DS if self.even else self._part(_DS, *_PLACE, x="x[m][j][i]")

    def alike(self, total: str) -> str:
        """What a lane's sum of `part_alike` adds to the element that it is of."""
        return self._part(total, "q", "k") if self.even else total

    @property
    def gain_of_tile(self) -> str:
        """The statement that adds a lane's sum of a tile, where no more than the head selects an element."""
        total = self._part("sum", "q", "k") if self.slope_apart and not self.diagonals else "sum"
        if self.keeps:
            return f"kept_sum += {total};"
        index = f"index_{self.name}(b, h, q, k, p)"
        return (
            f"if (const float all = sum_of_warp({total}); threadIdx.x % 32 == 0) gain_{self.tensor}({index}, all, p);"
        )

    @property
    def stored(self) -> Stored:
        """Its elements where they are stored."""
        return Stored(self.tensor, self.dtype)

    def gain(self, total: str, q: str, k: str) -> str:
        """The statement that adds a sum to the element that a pair selects."""
        gained = self._part(total, q, k) if self.slope_apart else total
        return f"gain_{self.tensor}(index_{self.name}(b, h, {q}, {k}, p), {gained}, p);"

    def _part(self, ds: str, q: str, k: str, x: str = "") -> str:
        score = f"{x}, " if self.uses_score else ""
        return f"part_of_{self.name}({ds}, {score}b, h, {q}, {k}, p)"

    @property
    def uses_score(self) -> bool:
        """Whether the slope or the element depends on the score before the score function."""
        return self.by_score or any(n.op == "score" for n in self.slope.known)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkGrad:
    """Where the gradient of the sink goes: its name, the number of its elements, and the body of a function that gives
    the number of a row's."""

    name: str
    elements: str
    index: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed:
    """The backward's part of the variant's code; what is None or empty is not emitted.

    runs    the runs of queries that see a tile of keys, None without a mask
    later   the runs of keys that a tile of queries sees, going up, None without a mask
    slope   the derivative of the score, None where it is 1 throughout
    captured_grads   gradients of captured tensors that the score reads
    sink    the gradient of the sink
    """

    runs: Decision | None
    later: Decision | None
    slope: Body | None
    captured_grads: tuple[CapturedGrad, ...]
    sink: SinkGrad | None

    @property
    def kept(self) -> tuple[CapturedGrad, ...]:
        """Those of which lanes keep a sum from tile to tile."""
        return tuple(grad for grad in self.captured_grads if grad.keeps)

    def for_kept(self, text: str) -> str:
        """The text for each of them, with its NAME and NUMBER."""
        return "".join(text.replace("NAME", grad.name).replace("NUMBER", str(grad.kept)) for grad in self.kept)

    @property
    def needs_score(self) -> bool:
        """Whether the scores before the score function are used once more after P."""
        return self.slope is not None or bool(self.captured_grads)


def transposed(facts: Facts, gradients: tuple[str, ...], layout: Layout = DENSE) -> Transposed:
    """The code of an analysed variant for a backward that also wants the gradients of these captured tensors."""
    variant = facts.variant
    masked = variant.mask is not None and bool(facts.hidden)
    return Transposed(
        runs=Decider(facts).query_runs() if masked else None,
        later=Decider(facts).later_runs() if masked else None,
        slope=_slope(facts),
        captured_grads=_captured_grads(facts, without_sink(variant, gradients), layout),
        sink=_sink(facts) if gradients != without_sink(variant, gradients) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A captured tensor and C++ expressions: how many elements of its gradient are cleared before the main kernel, by
    which statement, and how many are added up."""

    name: str
    cleared: str
    clear: str
    added: str


def sized(facts: Facts, plan: KernelPlan) -> tuple[Sized, ...]:
    """The captured tensors that the score reads and whose gradients are asked for."""
    found, may_be_stored, skips = [], storable(plan), bool(facts.hidden)
    for tensor in plan.variant.tensors:
        if tensor.name in plan.score_gradients:
            every = _elements(tensor)
            added = f"(p.stored_{tensor.name} ? 0 : {every})" if tensor.name in may_be_stored else every
            clear, alone = f"p.grad_{tensor.name}[i] = 0.f;", Stored(tensor.name, tensor.dtype)
            if skips and tensor.name in may_be_stored and alone.ctype != "float":
                clear = f"if (p.stored_{tensor.name}) ({alone.pointer})[i] = 0;\n    else {clear}"
            found.append(Sized(name=tensor.name, cleared=every if skips else added, clear=clear, added=added))
    return tuple(found)


def _elements(tensor: Tensor) -> str:
    return _product([f"p.size{i}_{tensor.name}" for i in range(len(tensor.dims))])


def _sink(facts: Facts) -> SinkGrad:
    sink, node = facts.variant.sink, facts.variant.sink_node
    assert sink is not None and node is not None  # its gradient is asked for
    return SinkGrad(name=sink.name, elements=_elements(sink), index=_index(node, facts.int64))


def _slope(facts: Facts) -> Body | None:
    score = facts.variant.score_node
    if score is None:
        return None
    slope = derive(score)
    if slope is None:
        return Body((), constant(0.0, DType.FLOAT32), {})
    if slope is const(1.0):
        return None
    return Printer(wide=facts.int64).body(slope)


def _captured_grads(facts: Facts, gradients: tuple[str, ...], layout: Layout) -> tuple[CapturedGrad, ...]:
    """The reads of these tensors that the score depends on, each under a name of its own."""
    found: list[CapturedGrad] = []
    value, reading = Intervals(anywhere), readers(facts, frozenset(), layout)
    reads = ((name, n, slope) for name in gradients for n, slope in captured_grads(facts.variant, name).items())
    for name, n, slope in reads:
        wide = facts.int64 | widths.wide((n, slope))  # a round of a loop has nodes of its own
        taken = {grad.name for grad in found} | (set(gradients) - {name})
        names = chain((name,), (f"{name}{number}" for number in count(2)))
        by = selection(n, aligned=not layout.own)
        selected, of_slope, bounds = by.seen, by.distances.seen(slope), value.range(slope)
        apart = of_slope in (selected, Seen.NOTHING) and selected is not Seen.PAIR
        uneven = selected is Seen.NOTHING and of_slope is Seen.DISTANCE
        found.append(
            CapturedGrad(
                name=next(free for free in names if free not in taken),
                tensor=name,
                slope=Printer(wide=wide).body(slope),
                index=_index(n, wide),
                inside=_inside((n, slope), reading),
                selected=selected,
                block=by.queries,
                even=of_slope is Seen.NOTHING,
                kept=sum(grad.keeps for grad in found) if by.gathers else None,
                slope_apart=apart or uneven,
                diagonals=uneven or selected is Seen.DISTANCE,
                finite=bool(np.isfinite(bounds.lo) & np.isfinite(bounds.hi) & ~bounds.nan),
                by_score=any(m.op == "score" for m in walk(n.operands)),
                dtype=n.attr.dtype,
                steps=_steps(n.attr, own_dimensions(facts.variant, name, layout)),
            )
        )
    return tuple(found)


def _steps(tensor: Tensor, positions: tuple[str, ...]) -> tuple[str, str] | None:
    """By what queries and keys between two elements are multiplied, of a contiguous tensor of these dimensions."""
    if not positions:
        return None
    sizes = [f"p.size{i}_{tensor.name}" for i in range(len(positions))]
    behind = {position: sizes[i + 1 :] for i, position in enumerate(positions)}
    by_query, by_key = (f" * ({_product(sizes)})" if sizes else "" for sizes in (behind["q"], behind["k"]))
    return by_query, by_key


def _product(sizes: list[str]) -> str:
    return " * ".join(("i64(1)", *sizes)) if sizes else "1"


def _inside(roots: tuple[Node, ...], reading: tuple[Reader, ...]) -> tuple[str, ...]:
    """Statements that lead a query and a key back to the last ones, where reads trust them."""
    trusted = [index for n in loads_of(roots) for index in trusted_indices(n, reading)]
    ends = {"q": "q = min(q, p.q_len - 1);", "k": "k = min(k, p.kv_len - 1);"}
    return tuple(line for position, line in ends.items() if any(depends_on(n, position) for n in trusted))


def _index(load: Node, wide: frozenset[Node]) -> tuple[str, ...]:
    """Statements that give the element's number: gradients are contiguous, and a dimension of size 1 has one index."""
    tensor: Tensor = load.attr
    printer = Printer(wide=wide)
    body = printer.body(*load.operands)
    number = None
    for i, (index, dimension) in enumerate(zip(load.operands, tensor.dims, strict=True)):
        size = f"p.size{i}_{tensor.name}"
        within = isinstance(dimension, int) and inside(index, dimension)
        at = body.known[index] if within else call("clamp_index", body.known[index], size)
        number = call("i64", at) if number is None else binary("+", binary("*", number, Text(size)), at)
    return (*body.lines, f"return {number};")
