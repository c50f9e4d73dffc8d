"""What pipelines ask of a variant and of what analysis knows of it: made once, when it is first asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flashgen.analysis.bounds import bounded
from flashgen.analysis.cells import single
from flashgen.analysis.derivative import derive
from flashgen.analysis.distances import Seen, Selection, selection
from flashgen.analysis.facts import Facts, analyse
from flashgen.analysis.tanh import lone_tanh, soft_cap
from flashgen.lang.expr import DType, Node, depends_on, loop_indices, node, positions_of, reads_by, walk
from flashgen.lang.variant import Variant
from flashgen.planning.backward import captured_grads, has_slope, looks_up, lookups, word_lookups
from flashgen.planning.plan import Tile
from flashgen.planning.summaries import pair_tables

#: Special-function results that one op of a score function needs.
SPECIAL = {
    **dict.fromkeys(("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "div"), 1),
    **dict.fromkeys(("log1p", "pow", "erf", "tanh", "sigmoid"), 2),
}

#: What ops on ranges cost beyond one: a captured tensor for each dimension but one and for being sorted (both ends are
#: read), a remainder (a division), a summary whose parts are looked at (of one position, or of both).
DIMENSION_OPS, SORTED_OPS, REMAINDER_OPS, SUMMARY_OPS = 2, 3, 8, (4, 12)

#: Of what rows of keys are read by a score, and of how many of them at most.
ROWS_OF, MOST_ROWS = ("float16", "bfloat16", "float32"), 2

_KEY = node("index", DType.INT32, (), "k")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A variant (constants bound) and the captured tensors whose gradients are asked for, by what kernels make of them.

    Nothing is analysed before it is asked for: a request that is refused costs no analysis.
    """

    variant: Variant
    gradients: tuple[str, ...] = ()

    @cached_property
    def facts(self) -> Facts:
        return analyse(self.variant)

    # -----------------------------------------------------------------------------------------------------------------
    # The mask

    @property
    def masked(self) -> bool:
        return self.variant.mask is not None

    @cached_property
    def exact(self) -> bool:
        """Whether zones alone tell the classes of tiles."""
        return self.facts.exact

    @property
    def judged(self) -> bool:
        """Whether classes of tiles are found by evaluating conditions over ranges."""
        return self.masked and not self.exact

    @cached_property
    def band(self) -> bool:
        """Whether the mask is one run of keys and reads nothing."""
        return self.masked and self.exact and len(self.facts.visible) == 1 and not self.variant.pair_tensors

    @cached_property
    def ends_at_query(self) -> bool:
        """Whether all runs of keys have an end, one of them by a query's position, and nothing is read for them."""
        terms = self.facts.visible if self.masked else ()
        ended = all(term.zone.d_lo or term.zone.k_hi for term in terms) and any(term.zone.d_lo for term in terms)
        return ended and not any(n.op == "load" for t in terms for n in walk([*t.zone.nodes(), *t.uniform]))

    @cached_property
    def several_runs_read(self) -> bool:
        """Whether ends of several runs of keys are read from captured tensors."""
        return self.masked and len(self.facts.visible) > 1 and bool(self.variant.pair_tensors)

    @cached_property
    def hides(self) -> bool:
        """Whether a tile can be hidden."""
        return bool(self.facts.hidden)

    @cached_property
    def conditional(self) -> bool:
        """Whether tiles within a run of keys are judged, by conditions beside its ends."""
        return any(term.others for term in self.facts.visible)

    def cuts(self, tile: Tile) -> bool:
        """Whether cells of the mask cut tiles of this size, which are then judged by their parts."""
        cells = self.facts.cells if self.hides else None
        return cells is not None and cells.within(tile.q, tile.kv) is not None

    def bounded(self, tile: Tile) -> bool:
        """Whether the mask is bounds of positions and something else that reads nothing, and which tiles of this size
        are not the same all over by."""
        found = bounded(self.variant) if self.hides and self.judged else None
        return found is not None and not self._alike(found.rest, tile)

    def uniform(self, tile: Tile) -> bool:
        """Whether the mask is the same for all pairs of a tile of this size, whatever data hold: a block mask's, of
        blocks that tiles divide."""
        mask = self.variant.mask
        return mask is not None and self.judged and self._alike(mask, tile)

    @cached_property
    def _known_alike(self) -> dict[tuple[Node, int, int], bool]:
        return {}

    def _alike(self, n: Node, tile: Tile) -> bool:
        """Whether a node is the same all over a tile of this size: found once, as candidates are many and tiles few."""
        key = n, tile.q, tile.kv
        if (found := self._known_alike.get(key)) is None:
            found = self._known_alike[key] = single(n, {"q": tile.q, "k": tile.kv})
        return found

    @cached_property
    def judged_nodes(self) -> tuple[Node, ...]:
        """The expressions that classes of tiles are found by; none for zones alone."""
        if not self.judged:
            return ()
        known = {one.value for one in self.facts.summaries}
        nodes = [n for term in (*self.facts.visible, *self.facts.hidden) for n in term.nodes()]
        return tuple(walk(nodes, into=lambda n: n not in known))

    @cached_property
    def judged_ops(self) -> int:
        """Ops that classes of tiles are found by, weighed by the registers they need."""
        nodes = self.judged_nodes
        loads: int = sum(
            DIMENSION_OPS * (len(n.operands) - 1) + SORTED_OPS * n.attr.sorted for n in nodes if n.op == "load"
        )
        summaries = sum(SUMMARY_OPS[one.side == "qk"] for one in self.facts.summaries) if self.judged else 0
        return len(nodes) + loads + summaries + REMAINDER_OPS * sum(n.op == "mod" for n in nodes)

    @property
    def summarised_by_query(self) -> bool:
        """Whether a part of the mask is bounded over tiles of queries by what data are."""
        return self.masked and any("q" in one.side for one in self.facts.summaries)

    @cached_property
    def mask_ops(self) -> int:
        return sum(rounds(n) for n in walk([self.variant.mask]) if n.operands) if self.variant.mask is not None else 0

    # -----------------------------------------------------------------------------------------------------------------
    # The score

    @property
    def scored(self) -> bool:
        return self.variant.score_node is not None

    @cached_property
    def near_zero(self) -> bool:
        """Whether the score has one tanh, whose argument is cheap to look at before."""
        root = self.variant.score_node
        return root is not None and lone_tanh(root) is not None

    @cached_property
    def soft_capped(self) -> bool:
        """Whether the score is c * tanh(s / c) with one c for the whole call."""
        return soft_cap(self.variant.score_node) is not None

    @property
    def plain(self) -> bool:
        """Whether there is neither mask nor score function: a sink asks nothing of a tile."""
        return not (self.masked or self.scored)

    @cached_property
    def score_ops(self) -> tuple[int, int]:
        """Special-function results and other operations of the score function, for one score."""
        if self.variant.score_node is None:
            return 0, 0
        inner = sum(rounds(n) for n in walk([self.variant.score_node]) if n.operands)
        return special(self.variant.score_node), inner

    @cached_property
    def has_slope(self) -> bool:
        """Whether the derivative of the score is anything but 1."""
        return has_slope(self.variant)

    @cached_property
    def derived_special(self) -> int:
        """Special-function results of the score function and its derivative, for one score."""
        root = self.variant.score_node
        return 0 if root is None else special(root, *filter(None, [derive(root)]))

    @cached_property
    def captured_grads(self) -> tuple[tuple[Node, Node], ...]:
        """The captured elements whose gradients are asked for, each with the score's derivative by it."""
        return tuple(pair for name in self.gradients for pair in captured_grads(self.variant, name).items())

    @cached_property
    def selections(self) -> tuple[Selection, ...]:
        """What of query and key selects each of them."""
        return self._selections(aligned=False)

    @cached_property
    def selections_in_blocks(self) -> tuple[Selection, ...]:
        """The same in blocks, where tiles start at multiples of their size."""
        return self._selections(aligned=True)

    def _selections(self, *, aligned: bool) -> tuple[Selection, ...]:
        return tuple(selection(n, aligned=aligned) for n, _ in self.captured_grads)

    @property
    def kept_sums(self) -> tuple[int, int]:
        """How many of them many pairs of a tile may read, and the bytes that tell which elements a tile has of each:
        one, or two and at which distance the second begins."""
        kept = [one.seen for one in self.selections if one.gathers]
        return len(kept), 24 if Seen.DISTANCE in kept else 8

    # -----------------------------------------------------------------------------------------------------------------
    # What they read

    @cached_property
    def uses_head(self) -> bool:
        """Whether mask or score use the query head: then a tile's rows are of one head."""
        return self._uses("h")

    @cached_property
    def uses_query(self) -> bool:
        return self._uses("q")

    def _uses(self, index: str) -> bool:
        return any(n.op == "index" and n.attr == index for n in walk(self.variant.pair_roots))

    @cached_property
    def loads_by_key(self) -> bool:
        """Whether a captured element is selected by an expression of the key, however indirectly."""
        return any(_KEY in walk([n]) for n in walk(self.variant.pair_roots) if n.op == "load")

    @cached_property
    def score_reads_by_key(self) -> bool:
        return reads_by(self.variant.score_node, "k")

    @cached_property
    def score_rows(self) -> tuple[Node, ...]:
        """The floats that the score reads of a row of keys: the query tells which row, and the key itself which
        element.  None where there are more than a few."""
        root = self.variant.score_node
        found = tuple(n for n in walk([root]) if _of_row(n)) if root is not None else ()
        return found if len(found) <= MOST_ROWS else ()

    @cached_property
    def score_reads_beside_rows(self) -> bool:
        """Whether the score reads an element for each key that is of no such row."""
        return reads_by(self.variant.score_node, "k", known=self.score_rows)

    @cached_property
    def reads_by_key(self) -> bool:
        """Whether mask or score read a captured element for each key."""
        return self.mask_reads_by_key > 0 or self.score_reads_by_key

    @cached_property
    def mask_reads_by_key(self) -> int:
        """How many captured elements the mask reads for each key."""
        roots = () if self.variant.mask is None else (self.variant.mask,)
        return sum(n.op == "load" and "k" in positions_of(n) for n in walk(roots))

    @cached_property
    def mask_reads(self) -> bool:
        """Whether the mask reads any captured element."""
        mask = self.variant.mask
        return mask is not None and any(n.op == "load" for n in walk([mask]))

    @cached_property
    def reads_far_by_pair(self) -> bool:
        """Whether query and key together select an element of the mask by way of three dimensions or of another."""
        roots = () if self.variant.mask is None else (self.variant.mask,)
        pairs = (n for n in walk(roots) if n.op == "load" and {"q", "k"} <= positions_of(n))
        return any(len(n.operands) > 2 or any(m.op == "load" for m in walk(n.operands)) for n in pairs)

    @cached_property
    def mask_divides(self) -> bool:
        """Whether the mask divides by a number that is not known when a kernel is made."""
        nodes = walk([self.variant.mask] if self.variant.mask is not None else [])
        return any(n.op in ("floor_div", "mod") and n.operands[1].op != "const" for n in nodes)

    @cached_property
    def pair_tables(self) -> tuple[Node, ...]:
        """The conditions of the mask that are elements of a table of all pairs."""
        return tuple(one.value for one in pair_tables(self.facts)) if self.hides else ()

    @cached_property
    def mask_reads_beside_tables(self) -> bool:
        """Whether the mask reads an element for each key that is of none of these tables."""
        roots = () if self.variant.mask is None else (self.variant.mask,)
        known = set(self.pair_tables)
        found = (n for n in walk(roots, into=lambda n: n not in known) if n.op == "load" and n not in known)
        return any("k" in positions_of(n) for n in found)

    @cached_property
    def mask_reads_pairs(self) -> bool:
        """Whether the mask reads an element that query and key select together."""
        mask = self.variant.mask
        loads = (n for n in walk([mask] if mask is not None else []) if n.op == "load")
        return any(depends_on(n, "q") and depends_on(n, "k") for n in loads)

    @cached_property
    def score_reads_by_position(self) -> bool:
        return reads_by(self.variant.score_node, "q", "k")

    @cached_property
    def looks_up(self) -> bool:
        """Whether mask or score read a captured tensor by the query or the key."""
        return looks_up(self.variant)

    @cached_property
    def lookups(self) -> tuple[Node, ...]:
        """The elements that the mask reads by the query alone, or by the key and no query head."""
        return lookups(self.variant)

    @cached_property
    def word_lookups(self) -> tuple[Node, ...]:
        """What the mask is given where it is made of words; empty: it is not."""
        return word_lookups(self.variant)


def _of_row(n: Node) -> bool:
    """Whether an element is one of a row of keys: its index there is the key, and the query is in another."""
    if n.op != "load" or n.attr.dtype not in ROWS_OF:
        return False
    others = [index for index in n.operands if index is not _KEY]
    return len(others) == len(n.operands) - 1 and depends_on(n, "q") and not any(depends_on(o, "k") for o in others)


def special(*roots: Node) -> int:
    """Special-function results that expressions need."""
    return sum(SPECIAL.get(n.op, 0) * rounds(n) for n in walk(roots))


def rounds(n: Node) -> int:
    """How often a node is computed at most: once, or in each round of the loops that it depends on."""
    return math.prod(index.most for index in loop_indices(n))


@lru_cache(maxsize=256)
def profile(variant: Variant, gradients: tuple[str, ...] = ()) -> Profile:
    """The profile of a variant; the same one each time."""
    return Profile(variant=variant, gradients=gradients)
