"""What follows from a plan or a menu alone, worked out once: both are large, and to hash one takes microseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: Values that a function remembers; when there are more they are all forgotten.
MAX_VALUES = 1024

#: What `Remembered` holds at most.
MAX_REMEMBERED = 4096


def once(function: Callable[[K], V]) -> Callable[[K], V]:
    """The function, which remembers what it gave for a value: this object, not one that is equal to it."""
    known: dict[int, tuple[K, V]] = {}  # the value is kept, so that no other has its id

    @functools.wraps(function)
    def remembered(value: K) -> V:
        found = known.get(id(value))
        if found is not None:
            return found[1]
        made = function(value)
        if len(known) >= MAX_VALUES:
            known.clear()
        known[id(value)] = value, made
        return made

    return remembered


class Remembered(dict[K, V]):
    """What was found by key; when there is more than MAX_REMEMBERED all of it is forgotten."""

    __slots__ = ()

    def keep(self, key: K, found: V) -> V:
        """What was found, which is remembered."""
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        self[key] = found
        return found
