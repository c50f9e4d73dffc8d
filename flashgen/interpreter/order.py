"""What blocks of a launch know of each other's writes to global memory.

Each block counts its releases.  What it wrote is known to another block once that has acquired a word which the first
one released afterwards: by st.release, red.release or atom.release, or by a fence and then a relaxed store or atomic;
and by ld.acquire or atom.acquire, or by a relaxed load or atomic and then a fence.  Other reads are traps, whatever
they find here: a GPU may still have the write on its way, or an old value in the cache of an SM.

A block counts as one thread: what is noticed is a release or an acquire that is missing or comes too early, not a
barrier that is missing between them inside the block.  Of bytes that several update atomically the last one counts.
Copies of TMA, and launches of clusters, which have barriers of their own, are not looked at.
"""

from __future__ import annotations

import numpy as np

#: Bytes of stores, but of single ones, and of atomics, of which one is looked at.
GRANULE, WORD = 2, 4

#: What is known of blocks: of each the number of the release before which all that it wrote is known.
Known = dict[int, int]


def _join(into: Known, other: Known) -> None:
    for block, time in other.items():
        if into.get(block, 0) < time:
            into[block] = time


class Order:
    """The clocks of a launch on so many bytes of memory; words are named by their offsets there."""

    def __init__(self, size: int) -> None:
        self.stored = np.zeros(size, np.int32)  # when the block that stored a byte last did, by its own count
        self.updater = np.zeros(size, np.int32)  # 1 + the block that changed it last by an atomic; 0: none did
        self.updated = np.zeros(size, np.int32)
        self._known: dict[int, Known] = {}
        self._released: dict[int, Known] = {}  # what a word says to who acquires it
        self._seen: dict[int, Known] = {}  # what a block has read of words, and will know after a fence
        self._fenced: dict[int, Known] = {}  # what it knew at its last fence

    def _of(self, block: int) -> Known:
        return self._known.setdefault(block, {block: 1})

    # ------------------------------------------------------------ what orders
    def release(self, block: int, words: np.ndarray, *, alone: bool) -> None:
        """A block releases words; `alone`: by a store, which says nothing of those who did before."""
        known = self._of(block)
        for word in np.unique(words).tolist():
            if alone:
                self._released[word] = {}
            _join(self._released.setdefault(word, {}), known)
        known[block] += 1

    def acquire(self, block: int, words: np.ndarray) -> None:
        """A block acquires what words say."""
        for word in np.unique(words).tolist():
            _join(self._of(block), self._released.get(word, {}))

    def fence(self, block: int) -> None:
        """What it has read of words is known from here on, and what it writes to words says what was known here."""
        known = self._of(block)
        _join(known, self._seen.pop(block, {}))
        self._fenced[block] = dict(known)
        known[block] += 1

    def relaxed_read(self, block: int, words: np.ndarray) -> None:
        """A block reads words, and orders nothing by that alone."""
        if self._released:
            for word in np.unique(words).tolist():
                _join(self._seen.setdefault(block, {}), self._released.get(word, {}))

    def relaxed_write(self, block: int, words: np.ndarray) -> None:
        """It writes them."""
        if block in self._fenced:
            for word in np.unique(words).tolist():
                _join(self._released.setdefault(word, {}), self._fenced[block])

    # ------------------------------------------------------------ what is ordered
    def store(self, block: int, at: np.ndarray) -> None:
        """A block stores the granules that begin at these offsets."""
        self.stored[at] = self._of(block)[block]

    def update(self, block: int, offsets: np.ndarray, width: int) -> None:
        """It changes them by an atomic."""
        time = self._of(block)[block]
        for shift in range(0, width, WORD):
            self.updater[offsets + shift] = block + 1
            self.updated[offsets + shift] = time

    def unknown(self, block: int, at: np.ndarray, writer: np.ndarray, *, atomics: bool) -> tuple[int, int] | None:
        """The first of these bytes that another block stored (1 + its number in `writer`), or changed by an atomic
        where `atomics` count, and that block, where this one does not know of that."""
        found = self._unknown(block, at, writer, self.stored[at])
        return found or (self._unknown(block, at, self.updater[at], self.updated[at]) if atomics else None)

    def _unknown(self, block: int, at: np.ndarray, by: np.ndarray, when: np.ndarray) -> tuple[int, int] | None:
        others = (by != 0) & (by != block + 1)
        if not others.any():
            return None
        known = self._of(block)
        for other in np.unique(by[others]).tolist():
            late = (by == other) & (when > known.get(other - 1, 0))
            if late.any():
                return int(at[int(late.argmax())]), other - 1
        return None
