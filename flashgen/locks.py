"""Locks that a forked child finds free, whichever thread of its parent held them: nobody would free them there."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Lock:
    """A lock for `with` statements; `make` is threading.Lock, or threading.RLock where its holder may take it again."""

    __slots__ = ("__weakref__", "_held", "_lock", "_make")

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make, self._lock = make, make()
        self._held: list[Any] = []  # of the thread that has it: a child that its holder forks frees that one
        _all.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held.append(lock)

    def __exit__(self, *_: object) -> None:
        self._held.pop().release()

    def renew(self) -> None:
        """Free, for a process with no other thread."""
        self._lock = self._make()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
