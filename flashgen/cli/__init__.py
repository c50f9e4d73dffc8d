"""The `flashgen` command: one file a verb, and errors as one clean message."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `flashgen` script: exits 0, 1 where a check fails, 2 on a request that cannot be."""
    import sys

    from flashgen.cli.app import app
    from flashgen.cli.console import complain
    from flashgen.errors import FlashgenError

    try:
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
