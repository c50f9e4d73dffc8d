"""What the templates of pipeline ampere's forward write of a tile's rows: queries of one head, or of several."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.sequences import SequenceCode

#: Of the heads of a pack, that of a row.
_HEAD = "({} & (1 << p.pack_log2) - 1)"


@dataclass(frozen=True, slots=True)
class PackCode:
    """Fragments of CUDA by whether heads that share keys are `packed`.

    Row r of a tile is then query r >> p.pack_log2 of its head r % (1 << p.pack_log2), from its first ones on."""

    packed: bool
    seq: SequenceCode

    # -- which tile

    @property
    def heads(self) -> str:
        """What tiles of a sequence are numbered by, beside queries: heads, or packs of them."""
        return "p.packs" if self.packed else "p.heads"

    @property
    def first(self) -> str:
        """What stands behind the number of one, to make it its first head's."""
        return " << p.pack_log2" if self.packed else ""

    @property
    def queries(self) -> str:
        """Those of a tile."""
        return "(TILE_Q >> p.pack_log2)" if self.packed else "TILE_Q"

    @property
    def neighbours(self) -> str:
        """How tiles of one range of keys lie."""
        what = "Tiles of heads" if self.packed else "Heads"
        return f"{what} that share keys and values are neighbours."

    @property
    def declared(self) -> str:
        """What a reader of `Rows` is told."""
        if not self.packed:
            return ""
        return (
            "// Row r of a tile is query q_first + (r >> p.pack_log2) of head h + r % (1 << p.pack_log2): heads that"
            " share keys read them once.\n"
        )

    # -- rows of a tile

    @property
    def tile_rows(self) -> str:
        """How many of a tile are there."""
        number = "rows.q_last - rows.q_first + 1"
        return f"({number}) << p.pack_log2" if self.packed else number

    def head(self, row: str) -> str:
        """The head of a row."""
        return f"rows.h + {_HEAD.format(row)}" if self.packed else "rows.h"

    def query(self, row: str) -> str:
        """The position of a row's query."""
        return f"rows.q_first + ({row} >> p.pack_log2)"

    @property
    def row0(self) -> str:
        """A name for the first row of a lane, or for its query, and its value but for the warp's first row."""
        return "row0 = " if self.packed else "q0 = rows.q_first + "

    @property
    def of_element(self) -> str:
        """The query of element [m][.][i]."""
        row = "0 + 16 * m + i / 2 * 8"
        return self.query(f"row{row}") if self.packed else f"q{row}"

    def load(self, threads: str, columns: str, source: str, half: str) -> str:
        """Starts to copy the tile of q."""
        name, head, log2 = "tile", "", ""
        if self.packed:
            name, head, log2 = "packs", f"p.q_head{half}, ", "p.pack_log2, "
        return f"load_{name}<{threads}, {columns}>(shared.q, {source}, {head}p.q_row{half}, {log2}{self.tile_rows});"

    # -- results

    def lse(self, row: str) -> str:
        """Where the lse of a row lies, from that of the tile's first on."""
        if self.packed:
            return f"{_HEAD.format(row)} * {self.seq.q_rows} + ({row} >> p.pack_log2)"
        return row

    def out(self, row: str) -> str:
        """The same of o."""
        if self.packed:
            return f"{_HEAD.format(row)} * p.o_head + ({row} >> p.pack_log2) * p.o_row"
        return f"{row} * p.o_row"

    # -- rows of a tile that a loop counts: rows, or their queries

    @property
    def line(self) -> str:
        return "row" if self.packed else "q"

    @property
    def line_first(self) -> str:
        """What stands before a row, to make it what is counted."""
        return "" if self.packed else "rows.q_first + "

    @property
    def line_beyond(self) -> str:
        """Whether the tile has no such row."""
        return f"row >= {self.tile_rows}" if self.packed else "q > rows.q_last"

    @property
    def every_row(self) -> str:
        """A loop over all, up to its step."""
        if self.packed:
            return f"int row = threadIdx.x; row < {self.tile_rows}; row"
        return "int q = rows.q_first + threadIdx.x; q <= rows.q_last; q"

    def rows_from(self, first: str, end: str) -> str:
        """A loop over those of queries from `first` to `end`, several lanes at a row, up to its step."""
        if self.packed:
            start, stop = (f"({q} - rows.q_first << p.pack_log2)" for q in (first, end))
            return f"int row = {start} + threadIdx.x / LANES; row < {stop}; row"
        return f"int q = {first} + threadIdx.x / LANES; q < {end}; q"

    @property
    def place(self) -> str:
        """The head and the row of the tensor of what is counted."""
        start = "p.q_start + " if self.seq.joined else ""
        at = self.seq.row(f"({self.query('row')})") if self.packed else self.seq.row("q")
        return f"{self.head('row')}, {start}{at}"

    @property
    def of_row(self) -> str:
        """The query and the head of what is counted, by names."""
        return f"    const int q = {self.query('row')}, h = {self.head('row')};\n" if self.packed else ""

    @property
    def h(self) -> str:
        """That head."""
        return "h" if self.packed else "rows.h"

    @property
    def lse_of_tile(self) -> str:
        """Where the lse of a tile's one head begins."""
        return "" if self.packed else "  const i64 of_head = ((i64)rows.b * p.heads + rows.h) * p.q_rows;\n"

    @property
    def lse_of_query(self) -> str:
        """Where that of a query lies."""
        return "((i64)rows.b * p.heads + h) * p.q_rows + q" if self.packed else "of_head + q"

    # -- sinks

    @property
    def sink_of_tile(self) -> str:
        """What is known of them for all rows of a lane."""
        if self.packed:
            return "  const int row0 = thread_index() / 32 * WARP_ROWS + thread_index() % 32 / 4;\n"
        return "  const float sink_log2 = sink(rows.b, rows.h, p) * LOG2E;\n"

    @property
    def sink_of_row(self) -> str:
        """That of a row, to base 2."""
        return f"sink(rows.b, {self.head('(row0 + 16 * m + 8 * r)')}, p) * LOG2E" if self.packed else "sink_log2"
