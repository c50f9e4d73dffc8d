"""What flashgen raises: each error says what was asked, the limit it hit, and the nearest thing that works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a person's file, so that an error can point at it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    {self.text.strip()}"


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class SpecError(FlashgenError):
    """A variant that cannot be read or traced; points at the user's line where one is known."""

    def __init__(self, message: str, *, where: SourceLine | None = None) -> None:
        super().__init__(f"{message}\n  at {where}" if where else message)
        self.where = where


class PlanError(FlashgenError):
    """No kernel plan serves the request (also: a problem that breaks a rule of attention's shapes)."""


class CompileError(FlashgenError):
    """NVRTC refused emitted CUDA; `log` is its report and `source` the text it was given."""

    def __init__(self, message: str, *, log: str = "", source: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class CapturedIndexError(FlashgenError, IndexError):
    """An expression read a captured tensor outside one of its dimensions; said on the CPU, clamped in a kernel."""


class LaunchError(FlashgenError):
    """A call that cannot run: bad tensors, no driver, or the driver's own refusal."""


def shown(value: object) -> str:
    """A value as an error quotes it: what nobody would read to its end by its beginning, an integer by its size."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"{'-' * (value < 0)}2^{value.bit_length() - 1} or more"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
