"""How sequences lie in q, k, v and o, and what each has of its own: a value that requests, plans and launches carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.lang.ranges import MAX_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Sequences fill [batch, heads, length] and are all of one length; queries begin at position 0."""

    name: ClassVar[str] = "dense"
    own: ClassVar[bool] = False

    def starts(self, tile_q: int) -> int:
        """A position whose multiples are where tiles of so many queries start, if anywhere."""
        return tile_q


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Sequences lie in [batch, heads, length] and each has a number of queries, a number of keys and the position of
    its first query, which kernels read on the device.

    The positions of a sequence's queries end where the language's `q_len` does.
    """

    name: ClassVar[str] = "padded"
    own: ClassVar[bool] = True

    def starts(self, tile_q: int) -> int:
        """Tiles start at any position: no multiple of this but 0 is one."""
        return MAX_LENGTH


Layout = Dense | Padded

#: What kernels are made for unless asked.
DENSE = Dense()

#: The position of the first query that stands for: the last query is beside the last key.
AT_END = -1

#: What kernels of padded sequences take: int32 [batch] or null, in this order.
POINTERS = ("q_lengths", "kv_lengths", "q_offsets")
