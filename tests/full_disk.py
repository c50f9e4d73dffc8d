"""A disk that is full, for tests: a file takes a few bytes of what is written and then no more."""

import errno
import os
from pathlib import Path


def full_disk(patch):
    """Let every Path.write_bytes and write_text end in the middle, until `patch` (pytest's) is undone."""

    def write_bytes(self, content):
        with self.open("wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    patch.setattr(Path, "write_bytes", write_bytes)
    patch.setattr(Path, "write_text", lambda self, text, *_, **__: write_bytes(self, text.encode()))
