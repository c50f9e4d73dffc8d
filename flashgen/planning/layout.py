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
    joined: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ()
    pointers: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    origins: ClassVar[tuple[str, ...]] = ()
    strides: ClassVar[tuple[str, ...]] = ()
    divisors: ClassVar[tuple[str, ...]] = ()

    def starts(self, tile_q: int) -> int:
        """A position whose multiples are where tiles of so many queries start, if anywhere."""
        return tile_q


class _Own:
    """What layouts share in which a sequence has lengths and positions of its own, which kernels read on the device.

    The positions of a sequence's queries end where the language's `q_len` does.  `origins` are the first rows of joined
    sequences in the tensors; `parts` are templates that say what a sequence has, in order.
    """

    __slots__ = ()
    own: ClassVar[bool] = True
    paged: ClassVar[bool] = False
    strides: ClassVar[tuple[str, ...]] = ()
    divisors: ClassVar[tuple[str, ...]] = ()

    def starts(self, tile_q: int) -> int:
        """Tiles start at any position: no multiple of this but 0 is one."""
        return MAX_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded(_Own):
    """Sequences lie in [batch, heads, length], which they need not fill.

    Kernels take their numbers of queries and of keys and the positions of their first queries: int32 [batch] or null.
    """

    name: ClassVar[str] = "padded"
    joined: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ("own_length", "queries_by_length", "keys_by_length")
    tile_template: ClassVar[str] = "ampere/padded.cu.j2"
    pointers: ClassVar[tuple[str, ...]] = ("q_lengths", "kv_lengths", "q_offsets")
    numbers: ClassVar[tuple[str, ...]] = ("q_rows", "q_offset")
    origins: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen(_Own):
    """Sequences lie behind each other in [heads, rows].

    Kernels take where each begins and the last ends, of queries and of keys: int32 [batch + 1].  `q_len` and `kv_len`
    bound their lengths from above.
    """

    name: ClassVar[str] = "varlen"
    joined: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("queries_by_start", "keys_by_start", "find_tile")
    tile_template: ClassVar[str] = "ampere/varlen.cu.j2"
    pointers: ClassVar[tuple[str, ...]] = ("cu_seqlens_q", "cu_seqlens_k", "q_offsets")
    numbers: ClassVar[tuple[str, ...]] = ("q_rows", "kv_rows", "q_offset", "q_start", "k_start")
    origins: ClassVar[tuple[str, ...]] = ("q_start", "k_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged(_Own):
    """Keys and values lie in the pages of a cache, [pages, kv_heads, page_size]; `queries` lie as they do there.

    Kernels take the numbers of keys and the pages of each sequence in the order of positions: int32 [batch], or null,
    and [batch, most pages], whose rows lie `table_row` apart.  Entries of keys that a sequence does not have are never
    read.  One copy moves `page_rows` rows.
    """

    paged: ClassVar[bool] = True
    strides: ClassVar[tuple[str, ...]] = ("table_row",)
    divisors: ClassVar[tuple[str, ...]] = ("page_size",)
    queries: Padded | Varlen = Padded()

    @property
    def name(self) -> str:
        return "paged_varlen" if self.joined else "paged"

    @property
    def joined(self) -> bool:
        """Whether queries lie behind those of other sequences."""
        return self.queries.joined

    @property
    def parts(self) -> tuple[str, ...]:
        queries = ("queries_by_start", "own_length") if self.joined else self.queries.parts[:2]
        return (*queries, "keys_by_length", *(("find_tile",) if self.joined else ()), "pages")

    @property
    def tile_template(self) -> str:
        return self.queries.tile_template

    @property
    def pointers(self) -> tuple[str, ...]:
        return (self.queries.pointers[0], "kv_lengths", "q_offsets", "page_table")

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("q_rows", "q_offset", *self.origins, "pages", "page_size", "page_rows")

    @property
    def origins(self) -> tuple[str, ...]:
        return self.queries.origins[:1]


Layout = Dense | Padded | Varlen | Paged

#: What kernels are made for unless asked.
DENSE = Dense()

#: By the names that options have for them.
LAYOUTS = {layout.name: layout for layout in (DENSE, Padded(), Varlen(), Paged(), Paged(queries=Varlen()))}

#: The position of the first query that stands for: the last query is beside the last key.
AT_END = -1
