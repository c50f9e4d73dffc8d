"""What kernel templates write where a sequence has lengths and positions of its own, and where it has none."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.layout import Layout


@dataclass(frozen=True, slots=True)
class SequenceCode:
    """Fragments of CUDA by a plan's layout.

    Where a tile has a problem of its `own`, the kernel's parameter is `all` and the tile's problem is `p`; its rows lie
    behind those of other sequences where they are `joined`.
    """

    layout: Layout

    @property
    def own(self) -> bool:
        return self.layout.own

    @property
    def joined(self) -> bool:
        return self.layout.joined

    @property
    def problem(self) -> str:
        """The kernel's parameter."""
        return "all" if self.own else "p"

    @property
    def prefetches(self) -> str:
        """What is prefetched of where sequences begin and end, and of positions; pages are not among them."""
        names = (name for name in self.layout.pointers if name != "page_table")
        return "".join(f"\n  {self._if_given(name)}prefetch_l2(p.{name} + first);" for name in names)

    @staticmethod
    def _if_given(name: str) -> str:
        """What stands before a pointer is read that may be null: where joined sequences begin is always given."""
        return "" if name.startswith("cu_seqlens") else f"if (p.{name} != nullptr) "

    @property
    def origin(self) -> str:
        """What stands before a row of the sequence, to make it a position."""
        return "p.q_offset + " if self.own else ""

    @property
    def rows_again(self) -> str:
        """A block's rows of queries behind its loop, where registers are dear: of one problem they are found again."""
        return "rows" if self.own else "rows_of_block(p)"

    @property
    def first_query(self) -> str:
        """The position of the first query."""
        return "p.q_offset" if self.own else "0"

    @property
    def queries(self) -> str:
        """How many the sequence has."""
        return "p.q_len - p.q_offset" if self.own else "p.q_len"

    @property
    def tiles_of_queries(self) -> str:
        """Those of the sequence, for a head; `p.q_tiles` says how many workspaces have room for."""
        return "(p.q_len - p.q_offset + TILE_Q - 1) / TILE_Q" if self.own else "p.q_tiles"

    @property
    def q_rows(self) -> str:
        """The rows of q in memory, for a head."""
        return "p.q_rows" if self.own else "p.q_len"

    @property
    def and_params(self) -> str:
        """The last parameter of a function that needs the sequence for a position."""
        return ", const Params& p" if self.own else ""

    @property
    def and_p(self) -> str:
        """Its argument."""
        return ", p" if self.own else ""

    def row(self, position: str) -> str:
        """Where the query at a position lies among the sequence's."""
        return f"({position} - p.q_offset)" if self.own else position

    def head_of_lse(self, tile: str) -> str:
        """Where the lse of a tile's head begins."""
        head = f"(i64){tile}.h" if self.joined else f"((i64){tile}.b * p.heads + {tile}.h)"
        return f"{head} * {self.q_rows}"

    @property
    def tile_of(self) -> str:
        """In workspaces of a backward, the first tile of queries of a step's head."""
        if self.joined:
            return "(i64)step.head * p.q_tiles + first_tile(p.q_start, keys.b)"
        return "(i64)(keys.b * p.heads + step.head) * p.q_tiles"

    @property
    def prefix(self) -> str:
        """Of the functions of a backward that find what a block works on."""
        return "joined_" if self.joined else ""

    @property
    def of_rows(self) -> str:
        """What a block's tile in workspaces is found by."""
        return "rows, p" if self.joined else ""

    @property
    def shift(self) -> str:
        """From a position to its row of q in memory."""
        return "p.q_start - p.q_offset" if self.joined else "-p.q_offset"

    @property
    def set_origins(self) -> str:
        """The first rows of a sequence that is joined to others, for its problem."""
        where = {"q_start": "queries", "k_start": "keys"}
        return "".join(f"\n  p.{name} = {where[name]}.first;" for name in self.layout.origins)

    # -- pipeline hopper

    def and_origins(self, owner: str) -> str:
        """The first rows of a tile's sequence, of an owner of such names."""
        return "".join(f", {owner}{name}" for name in self.layout.origins)

    @property
    def enter(self) -> str:
        """What a member of a role begins with: `p` is the problem of `work`."""
        return "\n    const Params p = of_work(this->p, work);" if self.own else ""

    @property
    def enter_block(self) -> str:
        """The same of a backward's block: read anew from shared memory, where registers are dear."""
        return "\n    const Params p = of_sequence_of_block(this->p, shared.sequence);" if self.own else ""

    @property
    def whose_v(self) -> str:
        """What the loader is told of the sequence of a tile of V."""
        return "work" if self.own else "work.b"

    @property
    def b_of_v(self) -> str:
        """The number of the sequence of a tile of V, for the loader."""
        return "work.b" if self.own else "b"

    @property
    def q_start(self) -> str:
        """What stands before a row of the sequence's queries, to make it one of the tensor."""
        return "work.q_start + " if self.joined else ""

    @property
    def q_batch(self) -> str:
        """The last coordinate of a tile of queries."""
        return "0" if self.joined else "work.b"

    @property
    def start_of_keys(self) -> str:
        """Of a backward, what stands before a row of the sequence's keys, to make it one of the tensor."""
        return "p.k_start + " if self.joined else ""

    @property
    def start_of_queries(self) -> str:
        """The same of its queries."""
        return "p.q_start + " if self.joined else ""

    def landing(self, full: str, rows: str, tile_rows: str) -> str:
        """The barrier on which bytes of a tile count, of which so many rows are the sequence's."""
        return f"landing_of({full}, {rows}, {tile_rows})" if self.own else full

    @property
    def expect(self) -> str:
        """Which function tells a barrier of bytes to come."""
        return "expect" if self.own else "mbarrier_arrive_expect_tx"

    def batch(self, b: str) -> str:
        """The last coordinate of a tile, of a sequence of this number."""
        return "0" if self.joined else b

    @property
    def tile_index(self) -> str:
        """In workspaces of a backward, the first tile of queries of a step's head, counted by an int."""
        if self.joined:
            return "step.head * p.q_tiles + first_tile(p.q_start, keys.b)"
        return "(keys.b * p.heads + step.head) * p.q_tiles"

    @property
    def last_row(self) -> str:
        """The last row of dk and dv that a block writes: behind a sequence they are 0."""
        return "shared.sequence.last_row" if self.own else "keys.k_last"

    @property
    def q_end(self) -> str:
        """One past the last row of a tile's tensor, or sequence, that is written."""
        return self._q_end("work")

    def _q_end(self, work: str) -> str:
        return f"{work}.queries" if self.joined else self.q_rows

    def lower_row(self, work: str, packed: bool) -> str:
        """Whether this thread's second row is one of a tile's tensor, or sequence."""
        end = f"({self._q_end(work)} << p.pack_log2)" if packed else self._q_end(work)
        return f"{work}.q_tile * TILE_Q + row + 8 < {end}"

    @property
    def part_end(self) -> str:
        """One past the last row of a tile's tensor, or sequence, of which a part is written: the last query's."""
        return "work.q_len - work.q_offset" if self.own and not self.joined else self.q_end

    def kv_len(self, work: str) -> str:
        """The keys of the sequence of a tile."""
        return f"{work}.kv_len" if self.own else "p.kv_len"
