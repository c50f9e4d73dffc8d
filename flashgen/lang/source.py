"""Where in a person's file something happened, and what they wrote there."""

from __future__ import annotations

import ast
import difflib
import linecache
import os
import sys
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import flashgen
from flashgen.errors import SourceLine, SpecError
from flashgen.lang.spellings import instead

_ASKING = (ast.BoolOp, ast.If, ast.IfExp, ast.While, ast.Assert, ast.Call, ast.Subscript, ast.comprehension)
_LANG = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_LANG)) + os.sep
_FRONTENDS = os.path.join(_PACKAGE, "frontends") + os.sep
_SHIPPED = os.path.join(_PACKAGE, "_resources") + os.sep  # specs in an installed wheel


def caller() -> SourceLine | None:
    """The line outside of what traces that led here."""
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
    instruction = _instruction()
    if instruction is None:
        return None
    inside = [n for n in ast.walk(instruction.tree) if _asks_for_a_value(n) and _spans(n, *instruction.span[:2])]
    return inside[-1] if inside else None  # ast.walk is breadth first: the innermost comes last


def compares_operator() -> bool:
    """Whether the binary operator that the caller applies is, without parentheses, an operand of a comparison."""
    instruction = _instruction()
    if instruction is None:
        return False
    comparisons = (n for n in ast.walk(instruction.tree) if isinstance(n, ast.Compare))
    for part in (part for n in comparisons for part in (n.left, *n.comparators)):
        if isinstance(part, ast.BinOp) and _span(part) == instruction.span:
            first, start, last, end = instruction.span
            before = instruction.lines[first - 1].encode()[:start].decode().rstrip()
            behind = instruction.lines[last - 1].encode()[end:].decode().lstrip()
            return not (before.endswith("(") and behind.startswith(")"))
    return False


def indexed() -> tuple[str, object] | None:
    """The name of what the caller indexes, and its value; None where it has no name."""
    instruction, frame = _instruction(), _calling_frame()
    for n in ast.walk(instruction.tree) if instruction is not None else ():
        if isinstance(n, ast.Subscript) and _span(n) == instruction.span and isinstance(n.value, ast.Name):
            name = n.value.id
            return name, frame.f_locals.get(name, frame.f_globals.get(name))
    return None


class _Instruction(NamedTuple):
    """The caller's file, its lines, and what its instruction spans: line, column, last line, last column."""

    tree: ast.AST
    lines: list[str]
    span: tuple[int, int, int, int]


def _instruction() -> _Instruction | None:
    frame = _calling_frame()
    if frame is None or frame.f_lasti < 0:
        return None
    line, last, column, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or column is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        return _Instruction(ast.parse("".join(lines)), lines, (line, column, last, end))
    except SyntaxError:
        return None


def _span(n: ast.expr) -> tuple[int, int, int, int]:
    return n.lineno, n.col_offset, n.end_lineno, n.end_col_offset


def as_spec_error(error: BaseException, *, folder: str | None = None) -> SpecError:
    """A user's exception as a SpecError at their line: the deepest one in `folder`, or outside flashgen."""
    if isinstance(error, SpecError):
        return error
    if isinstance(error, SyntaxError):
        where = SourceLine(str(error.filename), error.lineno or 0, error.text or "")
        return SpecError(f"the spec is not Python: {error.msg}", where=where)
    where = _deepest(error.__traceback__, folder)
    if isinstance(error, TypeError) and "__array_ufunc__" in str(error):
        text = "NumPy's functions know no traced values: write the function of that name of torch, or of fg in a spec"
        return SpecError(text, where=where)
    if isinstance(error, NameError) and error.name:
        return SpecError(f"unknown symbol {error.name!r}{_suggest(error.name)}", where=where)
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", None) == "flashgen":
        return SpecError(f"{error}{instead(error.name)}", where=where)
    return SpecError(f"{type(error).__name__}: {error}", where=where)


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
    """The frame outside of what traces that led here, and outside PyTorch, whose functions a spec may call."""
    outside = (_LANG, _FRONTENDS, *_torch())
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(outside):
        frame = frame.f_back
    return frame


def _torch() -> tuple[str, ...]:
    """PyTorch's folder, where it is imported."""
    torch = sys.modules.get("torch")
    return (os.path.dirname(torch.__file__) + os.sep,) if getattr(torch, "__file__", None) else ()


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
    return not path.startswith((_PACKAGE, *_torch())) or path.startswith(_SHIPPED)


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
