"""Pipeline hopper: how elements of a tile are masked; each pass has a template of that name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByElement:
    """The mask is asked for each where it is used."""

    form: ClassVar[str] = "by_element"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskWithinBounds:
    """Its bounds of positions are asked of tiles that one of them cuts alone, and the rest of it of each element."""

    form: ClassVar[str] = "within_bounds"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAsBits:
    """It is asked for a few at a time, a bit each, before any is used: registers are short for what it reads."""

    form: ClassVar[str] = "as_bits"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFromBits:
    """It is asked for each, and elements of tables that query and key select are bits by then, which the kernel of
    summaries has made: one word for 32 keys of a row."""

    form: ClassVar[str] = "from_bits"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByWarpgroup:
    """It is the same for all elements of a tile that a warpgroup has, and asked for once."""

    form: ClassVar[str] = "by_warpgroup"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByTile:
    """Nowhere: it is the same for all elements of a tile, which is visited as a whole or not at all."""

    form: ClassVar[str] = "by_tile"
    looks_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskByLookups:
    """It is asked for each where it is used.  What it reads by a query or a key alone is read before, while products
    run: of each key by one lane of a warp, which passes it on."""

    form: ClassVar[str] = "by_lookups"
    looks_up: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskInWords:
    """It is asked for 32 keys of a row at a time, a bit each.  Its conditions of keys alone are found before, while
    products run: of each key by one lane of a warp; all lanes have the words of them."""

    form: ClassVar[str] = "in_words"
    looks_up: ClassVar[bool] = True


Mask = (
    MaskByElement
    | MaskWithinBounds
    | MaskAsBits
    | MaskFromBits
    | MaskByWarpgroup
    | MaskByTile
    | MaskByLookups
    | MaskInWords
)
