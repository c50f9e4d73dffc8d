"""Every forward: which keys a block visits, of those that its queries see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class AllKeys:
    """All: it finishes o."""

    name: ClassVar[str] = "all"
    split: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKeys:
    """Each of `splits` blocks visits every so many-th tile of them, and leaves a part of o in float32, with the maximum
    and the sum of each row; a second kernel of the call combines the parts of a row in their order."""

    name: ClassVar[str] = "split"
    split: ClassVar[bool] = True
    turns: ClassVar[bool] = True
    invariant: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return None


#: Keys of a leaf, one number for every kind of call.
#: On an H200, of the speed of the default form.  Decoding 8,192 keys of one sequence 1.07, 32,768 1.00, 131,072 0.95,
#: 1,024 keys, which are one leaf, 0.72 to 0.74; a causal prompt of 8,192 tokens 0.93 (head_dim 64), 0.91 (128) and 0.85
#: (256); before rings were counted in uniform registers 0.88, 0.84 and 0.82, and of leaves of 512 keys 0.84 and 0.79.
LEAF = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Those of one leaf: `keys` of them from an absolute multiple of that number on.  A part is that of a leaf, and the
    second kernel folds leaves from the last to the first: what a row becomes depends on the row alone, in every kind of
    call.

    A prompt, whose blocks fold leaves themselves (`FoldedLeaves`), can afford no smaller leaves; larger ones leave SMs
    idle where one sequence is decoded.
    """

    name: ClassVar[str] = "leaves"
    split: ClassVar[bool] = True
    turns: ClassVar[bool] = False
    invariant: ClassVar[bool] = True
    folds: ClassVar[bool] = False
    keys: int = LEAF

    def number(self, kv_len: int) -> int:
        """Leaves of so many keys."""
        return max(1, -(-kv_len // self.keys))

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return _cuts(self.keys, tile_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLeaves:
    """All, leaf by leaf from the last to the first: the block folds each into those behind it, by the steps of the
    second kernel of `Leaves`, and finishes o with the same bits."""

    name: ClassVar[str] = "folded leaves"
    split: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    invariant: ClassVar[bool] = True
    folds: ClassVar[bool] = True
    keys: int = LEAF

    @property
    def in_parts(self) -> Leaves:
        """The same leaves, each a part."""
        return Leaves(keys=self.keys)

    def unfit(self, tile_kv: int) -> str | None:
        """Why tiles of so many keys are not visited, or None."""
        return _cuts(self.keys, tile_kv)


def _cuts(leaf: int, tile_kv: int) -> str | None:
    return f"its keys divide no leaf of {leaf}, at whose ends rows are cut" if leaf % tile_kv else None


Keys = AllKeys | SplitKeys | Leaves | FoldedLeaves

#: What kernels do unless asked.
ALL_KEYS = AllKeys()


def keys_of(*, invariant: bool, split: bool) -> Keys:
    """The keys that a block visits: of leaves, and whether others visit the rest."""
    if invariant:
        return Leaves() if split else FoldedLeaves()
    return SplitKeys() if split else ALL_KEYS
