"""Where in a person's file something happened, and what they wrote there."""

from __future__ import annotations

import ast
import difflib
import linecache
import os
import re
import sys
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType

import flashgen
from flashgen.errors import SourceLine, SpecError
from flashgen.lang.ops import OPS

_ASKING = (ast.BoolOp, ast.If, ast.IfExp, ast.While, ast.Assert, ast.Call, ast.Subscript, ast.comprehension)
_LANG = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_LANG)) + os.sep
_SHIPPED = os.path.join(_PACKAGE, "_resources") + os.sep  # specs in an installed wheel


def caller() -> SourceLine | None:
    """The line outside flashgen/lang that led here."""
    frame = _calling_frame()
    return None if frame is None else line(frame.f_code.co_filename, frame.f_lineno)


def running_file() -> str | None:
    """The file whose top level is running: what a function makes there belongs to that file."""
    frame = _calling_frame()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename


def definition(code: CodeType) -> SourceLine:
    """The line of a function's `def`, below its decorators."""
    first = line(code.co_filename, code.co_firstlineno)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if first.text.lstrip().startswith("@"):
        for number, text in enumerate(lines, code.co_firstlineno):
            if text.lstrip().startswith("def "):
                return line(code.co_filename, number)
    return first


def construct() -> ast.AST | None:
    """The innermost Python construct at the caller's instruction that needs a truth value or an integer."""
    frame = _calling_frame()
    if frame is None:
        return None
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[frame.f_lasti // 2] if frame.f_lasti >= 0 else (None,) * 4
    if line is None or column is None:
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:
        return None
    inside = [n for n in ast.walk(tree) if _asks_for_a_value(n) and _spans(n, line, column)]
    return inside[-1] if inside else None  # ast.walk is breadth first: the innermost comes last


def as_spec_error(error: Exception, *, folder: str | None = None) -> SpecError:
    """A user's exception as a SpecError at their line: the deepest one in `folder`, or outside flashgen."""
    if isinstance(error, SpecError):
        return error
    if isinstance(error, SyntaxError):
        where = SourceLine(str(error.filename), error.lineno or 0, error.text or "")
        return SpecError(f"the spec is not Python: {error.msg}", where=where)
    where = _deepest(error.__traceback__, folder)
    if isinstance(error, NameError) and error.name:
        return SpecError(f"unknown symbol {error.name!r}{_suggest(error.name)}", where=where)
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", None) == "flashgen":
        return SpecError(f"{error}; {functions()}", where=where)
    return SpecError(f"{type(error).__name__}: {error}", where=where)


def functions() -> str:
    """The functions that a traced value can be given to."""
    names = [op.name for op in OPS.values() if re.search(rf"fg\.{op.name}\((x|x, c)\)$", op.spelling)]
    return f"the functions of fg are {', '.join([*names, 'minimum', 'maximum', 'clamp', 'where'])} and casts"


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _suggest(name: str) -> str:
    public = dir(flashgen)
    if name in public:
        return f": write fg.{name}"
    close = difflib.get_close_matches(name, public, n=1)
    return f" (fg.{close[0]} is the nearest)" if close else ""


def _calling_frame() -> FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LANG):
        frame = frame.f_back
    return frame


def line(path: str, number: int) -> SourceLine:
    return SourceLine(path, number, linecache.getline(path, number).rstrip("\n"))


def _deepest(traceback: TracebackType | None, folder: str | None) -> SourceLine | None:
    found = None
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.abspath(path)) == folder if folder else _is_users(path):
            found = line(path, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _is_users(path: str) -> bool:
    return not path.startswith(_PACKAGE) or path.startswith(_SHIPPED)


def _asks_for_a_value(n: ast.AST) -> bool:
    if isinstance(n, ast.Compare):
        return len(n.ops) > 1 or isinstance(n.ops[0], (ast.In, ast.NotIn))
    if isinstance(n, ast.UnaryOp):
        return isinstance(n.op, ast.Not)
    return isinstance(n, _ASKING)


def _spans(n: ast.AST, line: int, column: int) -> bool:
    if isinstance(n, ast.comprehension):  # has no position of its own
        return any(_spans(part, line, column) for part in (*n.ifs, n.iter))
    head = n.test if isinstance(n, (ast.If, ast.While)) else n
    return (head.lineno, head.col_offset) <= (line, column) < (head.end_lineno, head.end_col_offset)
