"""What kernel templates write where a sequence has lengths and positions of its own, and where it has none."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCode:
    """Fragments of CUDA.

    own        whether a tile has a problem of its own, in place of the kernel's
    problem    the parameter of a kernel whose tile's problem is `p`
    origin     what stands before a row of q in memory, to make it a position
    q_rows     the rows of q in memory
    enter      what a member of pipeline hopper's roles begins with: `p` is that of `work`
    """

    own: bool
    problem: str
    origin: str
    q_rows: str
    enter: str

    @property
    def whose_v(self) -> str:
        """What pipeline hopper's loader is told of the sequence of a tile of V."""
        return "work" if self.own else "work.b"

    @property
    def first_query(self) -> str:
        """The position of the first query."""
        return "p.q_offset" if self.own else "0"

    @property
    def queries(self) -> str:
        """How many the sequence has."""
        return "p.q_len - p.q_offset" if self.own else "p.q_len"

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

    def kv_len(self, work: str) -> str:
        """The keys of the sequence of a tile of pipeline hopper."""
        return f"{work}.kv_len" if self.own else "p.kv_len"


def sequence_code(layout: Layout) -> SequenceCode:
    """The fragments of a layout."""
    if not layout.own:
        return SequenceCode(own=False, problem="p", origin="", q_rows="p.q_len", enter="")
    return SequenceCode(
        own=True,
        problem="all",
        origin="p.q_offset + ",
        q_rows="p.q_rows",
        enter="\n    const Params p = of_work(this->p, work);",
    )
