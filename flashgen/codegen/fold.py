"""Lines of emitted CUDA that a variant made too long, folded as a person would."""

from __future__ import annotations

import re
import textwrap

#: Columns of a line of emitted text.
WIDTH = 120

#: What stays whole: strings, and template arguments of a call (a comparison has spaces around its sign).
_WHOLE = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=\w)<[\w, /*+-]+>(?=\()')

_INDENT = 4  # of what continues a line

#: Where a line may end, by how much it takes apart: after a comma, between conditions, after an operator.
_ENDS = {
    **dict.fromkeys((", ", " && ", " || ", " & ", " | ", " ? ", " : "), 0),
    **dict.fromkeys((" = ", " < ", " <= ", " > ", " >= ", " == ", " != "), 1),
    **dict.fromkeys((" ^ ", " + ", " - ", " << ", " >> "), 2),
    **dict.fromkeys((" * ", " / ", " % "), 3),
}


def folded(text: str) -> str:
    """The text with no line beyond WIDTH columns, where names leave a choice.

    A line breaks where parentheses are nested least, at the last such place that fits; a comment behind it moves above.
    """
    lines = []
    for line in text.split("\n"):
        lines += [line] if len(line) <= WIDTH else _folded(line)
    return "\n".join(lines)


def _folded(line: str) -> list[str]:
    code = line.lstrip(" ")
    margin = line[: len(line) - len(code)]
    if code.startswith("//"):
        return [f"{margin}// {part}" for part in textwrap.wrap(code[2:].strip(), WIDTH - len(margin) - 3)]
    if code.startswith("#"):  # a macro ends with its line
        return [line]
    behind = _opaque(code).find("  // ")
    if behind >= 0:
        return _folded(margin + code[behind + 2 :]) + _broken(code[:behind].rstrip(), margin)
    return _broken(code, margin)


def _broken(code: str, margin: str) -> list[str]:
    lines, indent = [], margin
    while len(indent) + len(code) > WIDTH and (end := _end(code, WIDTH - len(indent))):
        lines.append(indent + code[:end].rstrip())
        code, indent = code[end:], margin + " " * _INDENT
    return [*lines, indent + code]


def _end(code: str, room: int) -> int | None:
    """Where to break: the least nested end of an operand within the room, of those the last, else behind a
    parenthesis; None for nowhere."""
    code = _opaque(code)
    best: tuple[int, int] | None = None
    found, depth = None, 0
    for i, character in enumerate(code):
        depth += (character in "([{") - (character in ")]}")
        sign = next((sign for sign in _ENDS if code.startswith(sign, i)), None)
        if sign is None:
            continue
        end = i + len(sign)
        if end - 1 > room and found is not None:
            break
        # A value moves to a line of its own only if no call of it can be taken apart.
        rank = depth + (sign == " = "), _ENDS[sign]
        if best is None or rank <= best:
            best, found = rank, end
    if found is None or len(code[:found].rstrip()) > room:  # calls in calls, and no comma before the end of the line
        opened = code.rfind("(", 0, room) + 1
        return opened or found
    return found


def _opaque(code: str) -> str:
    """The code with nothing but underscores in its strings and template arguments, which stay whole."""
    return _WHOLE.sub(lambda found: "_" * len(found[0]), code)
