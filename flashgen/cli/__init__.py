"""The `flashgen` command: one file a verb, and errors and warnings as one clean message each."""

from __future__ import annotations

from collections.abc import Callable


def main() -> None:
    """Entry point of the `flashgen` script: exits 0, 1 where a check fails, 2 on a request that cannot be."""
    import sys
    import warnings

    from flashgen.cli.app import app
    from flashgen.cli.console import complain
    from flashgen.errors import FlashgenError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shown(warnings.showwarning)
            app()
    except FlashgenError as error:
        complain(f"{type(error).__name__}: {error}")
        sys.exit(2)
    except OSError as error:  # a file that cannot be read or written; everything else of flashgen's own is above
        complain(f"{type(error).__name__}: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)


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
