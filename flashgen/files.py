"""Files that are whole or not there: a full disk or an end in the middle leaves what was there before."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def write(path: Path, content: bytes | str) -> None:
    """Write a file by a temporary one beside it, which has its mode; a link, a pipe or a device is written as it is.
    Raises OSError, which names the file."""
    content = content.encode() if isinstance(content, str) else content
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.touch()
        with contextlib.suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
