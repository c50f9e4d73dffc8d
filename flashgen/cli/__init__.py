"""The `flashgen` command: one file a verb, and errors and warnings as one clean message each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def main() -> None:
    """Entry point of the `flashgen` script.

    Exits with 0, 1 where a check fails (or nobody reads the output any more), 2 on a request that cannot be, 130 where
    it is interrupted.
    """
    import sys

    try:
        with _interrupts():
            _run()
    except (_Interrupted, KeyboardInterrupt):
        if sys.stderr is not None:
            sys.stderr.write("interrupted\n")  # nothing more is imported: this may be the middle of an import
        sys.exit(130)


class _Interrupted(BaseException):
    """Ctrl-C, as nothing between here and the one who catches it takes for something of its own."""


@contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl-C is _Interrupted, and a second one ends the process at once, unless the caller ignores or catches it."""
    import signal
    import threading

    def interrupted(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise _Interrupted

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:  # there was none
            signal.signal(signal.SIGINT, before)


def _run() -> None:
    import os
    import sys
    import warnings

    from flashgen.cli.advice import in_options
    from flashgen.cli.app import app
    from flashgen.cli.console import complain
    from flashgen.errors import FlashgenError, SpecError

    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may hold what the terminal cannot show
    try:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _shown(warnings.showwarning)
                app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a failure is said
    except FlashgenError as error:
        said = str(error) if isinstance(error, SpecError) else in_options(str(error), sys.argv)  # a spec is Python
        complain(f"{type(error).__name__}: {said}")
        sys.exit(2)
    except BrokenPipeError:  # as `| head` leaves it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a file that cannot be read or written; everything else of flashgen's own is above
        complain(f"{type(error).__name__}: {error}")
        sys.exit(2)


def _shown(plain: Callable[..., None]) -> Callable[..., None]:
    """What shows a warning of flashgen's own without a line of its source, and others as `plain` does."""
    from flashgen.cli.console import complain
    from flashgen.runtime.cache import CacheWarning

    def show(message: Warning, category: type[Warning], *rest: object, **named: object) -> None:
        if issubclass(category, CacheWarning):
            complain(f"{category.__name__}: {message}")
        else:
            plain(message, category, *rest, **named)

    return show
