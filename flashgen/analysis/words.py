"""A mask in words: what a query sees of keys side by side, a bit for each.

A condition of the key alone is found once for all rows of a tile, by the lane that has the key; one of the query alone
is all ones or all zeros; and what bounds the key, `q - k <= 128`, is a run of ones.  An element is then a bit of a word
that costs a few instructions.  Of a window to both sides with tokens by flag that all see, a warp executes 246
instructions fewer for a tile of 128 keys, of 1,086; its forward took 888 us for 1,190 on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from flashgen.analysis.facts import analyse
from flashgen.analysis.linear import Algebra, K, expression
from flashgen.lang.build import apply
from flashgen.lang.expr import Node, depends_on, loop_indices, positions_of, walk
from flashgen.lang.variant import Variant

#: The difference of a position and of what is within this fits in 32 bits.
_FITS = 1 << 30

#: The words that a thread keeps of 32 keys: more conditions of keys alone leave it no registers.
_MOST_BY_KEY = 4

#: A comparison whose sides are exchanged.
_TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}


class Of(Enum):
    """What a word is made of."""

    BOTH = "and"
    EITHER = "or"
    ONE = "xor"
    NOT = "not"
    KEY = "key"  # a condition of the key alone
    QUERY = "query"  # a condition that no key changes
    FROM = "from"  # ones from a key on
    BELOW = "below"  # ones up to a key, without it


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """A word of words, or of a node: a condition, or a key.  One that several others are made of is one object, which
    is compared as such: to compare what words are made of would visit it once for each way that leads to it."""

    of: Of
    words: tuple[Word, ...] = ()
    node: Node | None = None

    @property
    def parts(self) -> tuple[Word, ...]:
        """Itself and the words that it is made of, each once, those of a word before it."""
        done: dict[Word, None] = {}
        left = [(self, False)]
        while left:
            word, expanded = left.pop()
            if expanded:
                done[word] = None
            elif word not in done:
                left.append((word, True))
                left.extend((part, False) for part in reversed(word.words))
        return tuple(done)

    @property
    def leaves(self) -> tuple[Word, ...]:
        """The words of nodes that it is made of, each once, in their order."""
        return tuple(word for word in self.parts if not word.words)

    def having(self, of: Of) -> tuple[Node, ...]:
        """The nodes of its leaves of this kind, each once."""
        return tuple(dict.fromkeys(leaf.node for leaf in self.leaves if leaf.of is of and leaf.node is not None))


#: Operations on conditions, and the words that are made of those of their operands.
_JOINED = {"logical_and": Of.BOTH, "logical_or": Of.EITHER, "logical_xor": Of.ONE, "logical_not": Of.NOT}


class _Unspeakable(Exception):
    """A part of the mask is no word."""


@lru_cache(maxsize=256)
def in_words(variant: Variant) -> Word | None:
    """The mask of a variant whose constants are bound, where it is made of such conditions alone and some of the key
    read a captured tensor; else None."""
    facts = analyse(variant)
    if variant.mask is None or not facts.hidden:
        return None
    try:
        found = _Reader(facts.int64).word(variant.mask)
    except _Unspeakable:
        return None
    reads = any(n.op == "load" for n in walk(found.having(Of.KEY)))
    return found if reads else None


class _Reader:
    """Finds words; `wide` are the ints of 32 bits whose values may leave them."""

    def __init__(self, wide: frozenset[Node]) -> None:
        self.wide, self.algebra = wide, Algebra()
        self.bounds: dict[Node, Word | None] = {}
        self.by_key = 0

    def word(self, root: Node) -> Word:
        """That of a condition; each part of it is read once, however many others use it."""
        words: dict[Node, Word] = {}
        for n in walk([root], into=self._of_words):
            if self._of_words(n):
                words[n] = Word(_JOINED[n.op], tuple(words[o] for o in n.operands))
            else:
                words[n] = self._leaf(n)
        return words[root]

    def _of_words(self, n: Node) -> bool:
        """Whether the word of a condition is made of those of its operands."""
        if n.op not in _JOINED or not depends_on(n, "k"):
            return False
        whole = n.op != "logical_not" and self._of_key(n)
        return not whole or any(map(self._bounds, n.operands))

    def _leaf(self, n: Node) -> Word:
        """That of a condition which is taken as it is; of keys alone there are no more than registers have room for."""
        if not depends_on(n, "k"):
            return Word(Of.QUERY, node=n)
        if (bound := self._bounds(n)) is not None:
            return bound
        self.by_key += 1
        if not self._of_key(n) or self.by_key > _MOST_BY_KEY:
            raise _Unspeakable
        return Word(Of.KEY, node=n)

    @staticmethod
    def _of_key(n: Node) -> bool:
        """Whether the key and neither the query nor the head decides, outside of loops."""
        return positions_of(n) <= {"b", "k"} and not loop_indices(n)

    def _bounds(self, n: Node) -> Word | None:
        """A comparison that bounds the key, by what no key changes; found once, as those above it ask too."""
        if n not in self.bounds:
            self.bounds[n] = self._compared(n)
        return self.bounds[n]

    def _compared(self, n: Node) -> Word | None:
        if n.op not in _TURNED or not n.operands[0].dtype.is_int:
            return None
        if any(o in self.wide or o.dtype.itemsize > 4 for o in n.operands):
            return None
        op, (left, right) = n.op, n.operands
        if right.op == "abs":
            op, left, right = _TURNED[op], right, left
        if left.op == "abs":
            return self._within(op, left.operands[0], right)
        return self._bound(op, left, right)

    def _within(self, op: str, x: Node, most: Node) -> Word | None:
        """|x| compared with a number."""
        inside = {"le": "le", "lt": "lt", "gt": "le", "ge": "lt"}.get(op)
        if inside is None:
            return None
        sides = self._bound(inside, x, most), self._bound(inside, apply("neg", x), most)
        if sides[0] is None or sides[1] is None:
            return None
        both = Word(Of.BOTH, (sides[0], sides[1]))
        return both if inside == op else Word(Of.NOT, (both,))

    def _bound(self, op: str, left: Node, right: Node) -> Word | None:
        form = self.algebra.form(left) - self.algebra.form(right)
        sign, rest = form.terms.get(K, 0), form.without([K])
        if abs(sign) != 1 or any(depends_on(t, "k") for t in rest.terms):
            return None
        if any(t in self.wide or t.dtype.itemsize > 4 for t in rest.terms):
            return None
        if sum(abs(c) * self.algebra.largest(t) for t, c in rest.terms.items()) + abs(rest.constant) >= _FITS:
            return None
        if sign < 0:
            op, rest = _TURNED[op], -rest
        # Now it says that the key is below, at or above -rest.
        at, behind = expression(-rest), expression(-rest + 1)
        first, past = Word(Of.FROM, node=at), Word(Of.FROM, node=behind)
        under, up_to = Word(Of.BELOW, node=at), Word(Of.BELOW, node=behind)
        exactly = Word(Of.BOTH, (first, up_to))
        return {"lt": under, "le": up_to, "ge": first, "gt": past, "eq": exactly, "ne": Word(Of.NOT, (exactly,))}[op]
