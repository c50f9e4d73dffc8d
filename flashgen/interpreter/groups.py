"""Asynchronous operations of one warp, in groups that it commits and waits for: cp.async, wgmma, bulk stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Queue(Generic[T]):
    """The open group, committed groups, oldest first, and how many were committed."""

    open: list[T] = field(default_factory=list)
    groups: deque[list[T]] = field(default_factory=deque)
    committed: int = 0

    def commit(self) -> None:
        """The open group is one of the others, and a new one is open."""
        self.groups.append(self.open)
        self.open = []
        self.committed += 1

    def leave(self, keep: int) -> Iterator[list[T]]:
        """The groups that are waited for: all but the newest `keep`."""
        while len(self.groups) > keep:
            yield self.groups.popleft()

    @property
    def left(self) -> int:
        """Groups that were waited for."""
        return self.committed - len(self.groups)
