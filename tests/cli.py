"""The `flashgen` command in this process, for tests: its exit code, and what it printed."""

import contextlib
import io
import sys
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


def flashgen(*arguments: object, code: int | None = 0, columns: int = 160) -> Ran:
    """Run `flashgen ARGUMENTS`; it must exit with `code` (None: any), never with a traceback.

    `columns` are the terminal's.
    """
    from flashgen.cli import console, main

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["flashgen", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(console.out, "width", columns)  # a console keeps what COLUMNS was when it was made
        try:
            main()
            exited = 0
        except SystemExit as end:
            exited = end.code or 0
    ran = Ran(exited, out.getvalue(), err.getvalue())
    assert code in (ran.code, None), f"exit {ran.code}, not {code}\n{ran.out}\n{ran.err}"
    assert "Traceback" not in ran.err
    return ran
