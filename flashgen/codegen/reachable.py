"""A kernel's functions and types that its entries reach: what a plan has no use for is not emitted.

A template defines what any plan may need.  A definition stands between blank lines, with its comment above it, at the
left margin or as a member of a struct; it is found by its form and used by its name, whichever struct it is of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashgen.codegen.device import identifiers

#: Comments, then a function, or a struct or a typedef that is all.
_DEFINED = re.compile(
    r"(?: *//.*\n)* *(?:template <[^>]*>\s*)?"
    r"(?:DEVICE [\w <>]+?[ &*]+(\w+)\("
    r"|struct (?:alignas\(\w+\) )?(\w+) \{(?:.*|[\s\S]*\n)\};(?: *//.*)?\Z"
    r"|typedef .*?(\w+)(?:\[[^\]]*\])*;(?: *//.*)?\Z)"
)
_HEADING = re.compile(r"(?:// -{8,}.*\n)*")


def reachable(text: str) -> str:
    """The text without definitions whose names nothing else that is kept uses; a heading above one stays."""
    blocks = list(_blocks(text))
    kept = {i for i, (_, _, name) in enumerate(blocks) if name is None}
    uses = [identifiers(body) - {name} for _, body, name in blocks]
    found = kept
    while found:
        used = frozenset[str]().union(*(uses[i] for i in found))
        found = {i for i, (_, _, name) in enumerate(blocks) if i not in kept and name in used}
        kept |= found
    return "\n\n".join(_joined(blocks, kept))


def _blocks(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Heading, text, and the name that is defined; None for what is none's to leave out."""
    for block in text.split("\n\n"):
        heading = _HEADING.match(block)
        assert heading is not None
        body = block[heading.end() :]
        defined = _DEFINED.match(body)
        yield (
            "".join(heading[0].splitlines(keepends=True)[-1:]),
            body,
            next(filter(None, defined.groups())) if defined else None,
        )


def _joined(blocks: list[tuple[str, str, str | None]], kept: set[int]) -> Iterator[str]:
    """The blocks that are kept; the heading of one that is not stands above the next."""
    above = ""
    for i, (heading, body, _) in enumerate(blocks):
        above = heading or above
        if i in kept:
            yield above + body
            above = ""
