"""What a query sees of 32 keys, as CUDA: a mask that is made of words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flashgen.analysis.linear import K
from flashgen.analysis.words import Of, Word
from flashgen.codegen.printer import GivenPrinter, Printer, Text, filled, used_lines
from flashgen.lang.build import apply
from flashgen.lang.expr import Node

_SPELLING = {
    Of.BOTH: "{0} & {1}",
    Of.EITHER: "{0} | {1}",
    Of.ONE: "{0} ^ {1}",
    Of.NOT: "~{0}",
    Of.QUERY: "ones_if({0})",
    Of.FROM: "ones_from({0})",
    Of.BELOW: "ones_below({0})",
}


def visible_keys(mask: Word, given: Mapping[Node, str], **options: Any) -> tuple[str, ...]:
    """The body of a function that returns the word of the keys from k on.  Conditions of keys alone are words, which
    are `given`, as is what queries alone select."""
    roots = dict.fromkeys(_scalar(leaf) for leaf in mask.leaves if leaf.of is not Of.KEY)
    printer = GivenPrinter(given, **options)
    body = Printer.body(printer, *roots)
    lines = _lines(mask, {**body.known, **{n: Text(given[n]) for n in mask.having(Of.KEY)}})
    return (*used_lines(body.declarations, "\n".join(lines)), *lines)


def _scalar(leaf: Word) -> Node:
    """What a leaf's word is made of: a condition, or how far a key is from the first one of the word."""
    assert leaf.node is not None
    return apply("sub", leaf.node, K) if leaf.of in (Of.FROM, Of.BELOW) else leaf.node


def _lines(mask: Word, known: Mapping[Node, Text]) -> tuple[str, ...]:
    """The statements that return the word of a mask; a word of words that several others are made of has a name, so
    that none is written twice."""
    uses = Counter(part for word in mask.parts for part in word.words)
    texts, lines = dict[Word, Text](), list[str]()
    for word in mask.parts:
        if word.of is Of.KEY:
            texts[word] = known[_scalar(word)]
            continue
        text = filled(_SPELLING[word.of], *([texts[part] for part in word.words] or [known[_scalar(word)]]))
        if word.words and uses[word] > 1:
            name = f"seen{len(lines) + 1}"
            lines.append(f"const u32 {name} = {text};")
            text = Text(name)
        texts[word] = text
    return (*lines, f"return {texts[mask]};")
