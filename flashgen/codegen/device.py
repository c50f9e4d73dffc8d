"""The device library: templates/device/*.cuh, of which an emitted file gets what it uses and nothing else.

A definition starts at the left margin after a blank line, with the comment above it.  What it declares is found by its
form, what it uses by its identifiers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashgen.resources import folder

#: The files in the order in which they are emitted: a definition uses only what stands above it.  First those of which
#: each definition wraps an instruction of PTX, with the types that they take.
WRAPPERS = (
    *("types", "index", "shared_address", "cp_async", "ldmatrix", "ld_shared", "st_shared", "mma", "red", "redux"),
    *("mul_wide", "mbarrier", "tma", "setmaxnreg", "named_barrier", "griddepcontrol", "prefetch", "wgmma"),
)
LIBRARY = (
    *("math", "float8", "swizzle", "softmax", "progress", "exact", "warp_sums", "rows", "philox"),
    *("quotient", "ring", "hopper_softmax", "hopper_epilogue", "range", "summary", "words"),
)
FILES = (*WRAPPERS, *LIBRARY)

_DECLARED = re.compile(
    r"^(?:template <[^>]*>\s*)?"
    r"(?:DEVICE [\w <>]+?[ &*]+(\w+)\(|(?:struct|enum)(?: alignas\(\w+\))? (\w+)"
    r"|constexpr \w+ (\w+) =|#define (\w+)|typedef .*?(\w+);$)",
    re.MULTILINE,
)
_APART = re.compile(r"\n\n(?=\S)")
_COMMENT = re.compile(r"//.*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One definition of the library: its text, names that it declares, its identifiers, its file and the heading."""

    text: str
    names: frozenset[str]
    uses: frozenset[str]
    file: str
    heading: str


def identifiers(text: str) -> frozenset[str]:
    """Every identifier of CUDA text outside comments and strings."""
    return frozenset(_IDENTIFIER.findall(_STRING.sub('""', _COMMENT.sub("", text))))


def used_by(text: str, files: Collection[str] = FILES) -> str:
    """The definitions of these files that `text` uses, directly or not, in order, each file's under its heading."""
    library = definitions()
    wanted = identifiers(text)
    chosen: set[int] = set()
    while True:
        found = {i for i, d in enumerate(library) if i not in chosen and d.names & wanted}
        if not found:
            break
        chosen |= found
        wanted = wanted.union(*(library[i].uses for i in found))
    return _laid_out(library[i] for i in sorted(chosen) if library[i].file in files)


@lru_cache(maxsize=1)
def definitions() -> tuple[Definition, ...]:
    """The library, in order."""
    return tuple(d for name in FILES for d in _parse(folder("templates") / "device" / f"{name}.cuh"))


def _parse(path: Path) -> Iterable[Definition]:
    heading, *paragraphs = _APART.split(path.read_text().strip())
    first, newline, rest = heading.partition("\n")
    for paragraph in ([rest] if newline else []) + paragraphs:
        names = frozenset(name for groups in _DECLARED.findall(paragraph) for name in groups if name)
        yield Definition(text=paragraph, names=names, uses=identifiers(paragraph), file=path.stem, heading=first)


def _laid_out(chosen: Iterable[Definition]) -> str:
    """The definitions under their headings, with a blank line round each that takes more than one line."""
    text, last = "", None
    for definition in chosen:
        if last is None or definition.heading != last.heading:
            text += f"\n\n{definition.heading}\n{definition.text}"
        else:
            short = "\n" not in definition.text and "\n" not in last.text
            text += f"{'' if short else chr(10)}\n{definition.text}"
        last = definition
    return text.strip()
