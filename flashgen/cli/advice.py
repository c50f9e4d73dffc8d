"""Advice in the words of the command line: planning names the arguments of Python's calls, and options are theirs."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence

from flashgen.cli.options import Pass, Request
from flashgen.planning.integers import INTEGERS

#: Arguments that are options of one value, or flags.
_OPTIONS = {
    *(f.name for group in (Request, Pass) for f in dataclasses.fields(group)),
    *INTEGERS,
    *("kv_splits", "page_size", "q_offset", "seed"),
} - {"param", "tensor", "gradient", "integers"}

#: An argument with its value, which is neither part of a call nor of another option.
_ARGUMENT = re.compile(
    r"(?<![\w(.=-])(?<!--param )(?<!--tensor )([a-z_]+)=(\([^()]*\)|'[^']*'|\"[^\"]*\"|[\w.+-]*\w)(?=[\s,;:]|$)"
)


def in_options(message: str, arguments: Sequence[str]) -> str:
    """A message whose advice (its lines that begin with "nearest:") names options in place of arguments, for a command
    that was given these."""

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name == "gradients":
            names = ast.literal_eval(value) if value.startswith("(") else ()
            return " ".join(f"--gradient {one}" for one in names) or "leave out --gradient"
        if name not in _OPTIONS:
            return found[0]
        if (name, value) == ("kv_splits", "1") and "--split-keys" in arguments:
            return "leave out --split-keys"
        flag = f"--{name.replace('_', '-')}"
        if value in ("None", "False"):
            return f"leave out {flag}"
        return flag if value == "True" else f"{flag} {value.strip(chr(34) + chr(39)).removeprefix('torch.')}"

    lines = message.split("\n")
    return "\n".join(_ARGUMENT.sub(option, line) if line.lstrip().startswith("nearest:") else line for line in lines)
