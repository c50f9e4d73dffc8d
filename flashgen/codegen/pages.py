"""What kernel templates write where keys and values lie in a tensor, and where they lie in the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.layout import Layout

#: Which rows of a tile a lane copies, in one box: none of a tile's end beyond the last key, which then is zero.
#: One lane that copies the boxes of all (elect.sync: no loop over lanes) was no faster: pages of 16 rows, 32 sequences
#: of 8k keys on an H200, 296 us in place of 286.
_BOX_OF_LANE = """\
  // The rows of a tile that this lane copies, from `first` on: they are of one page and lie there from `row` on.
  struct Box { int first, page, row; };

  DEVICE Box box_of_lane(int tile, const Work& work) {
    const int first = threadIdx.x % 32 * p.page_rows;
    if (first >= TILE_KV) return {TILE_KV, -1, 0};
    const InPage at = find_key(tile * TILE_KV + first, work.kv_len, p.page_table + work.b * p.table_row, p);
    return {first, at.page, at.row};
  }

"""

#: What a tile of k or v has in a row.
_COLUMNS = {"k": "QK_COLUMNS", "v": "V_COLUMNS"}

_CLEAR_ROWS = """\
#pragma unroll 1
      for (int d = 0; d < V_COLUMNS; d += 64) {
        Chunk* rows = (Chunk*)shared.v[tail.stage][d / 64][tail.rows];
        for (int i = threadIdx.x % 32; i < (TILE_KV - tail.rows) * 8; i += 32) rows[i] = {};
      }"""

_CLEAR_WHOLE_ROWS = """\
#pragma unroll 1
      for (int row = tail.rows + threadIdx.x % 32 / 8; row < TILE_KV; row += 4)
        for (int d = 0; d < V_COLUMNS; d += 64)
          ((Chunk*)shared.v[tail.stage][row / 8][d / 64][row % 8])[threadIdx.x % 8] = {};"""


@dataclass(frozen=True, slots=True)
class PagesCode:
    """Fragments of CUDA by a plan's layout.

    On pipeline hopper the loader is a warp where there are pages, of which each lane copies a box of rows, else one
    thread.  Boxes of no page lie outside of the tensor map, so that they become zero.  In 8 bits tiles of K are
    `scaled`: the loader finds their descales too.  Of `whole_rows` a box of a page has all columns: in shared memory
    eight rows of 64 columns are followed by the same rows of the next, and then by the next eight rows.
    """

    layout: Layout
    scaled: bool = False
    whole_rows: tuple[str, ...] = ()

    @property
    def paged(self) -> bool:
        return self.layout.paged

    # -- pipeline ampere

    @property
    def own_table(self) -> str:
        """A tile's problem has the table of its own sequence."""
        return "\n  p.page_table += at.b * p.table_row;" if self.paged else ""

    @property
    def own_keys(self) -> str:
        """The keys of a tile's own sequence, where queries are joined."""
        if self.paged:
            return "  p.page_table += at.b * p.table_row;"
        return "  p.k += p.k_start * p.k_row;\n  p.v += p.k_start * p.v_row;"

    def batch_of(self, name: str) -> str:
        """What leads to a sequence in k or v."""
        return "" if self.paged else f"rows.b * p.{name}_batch + "

    def load_kv(self, narrow: tuple[str, ...], *, whole_apart: bool) -> str:
        """Starts to copy a tile of k and one of v; `whole_apart`: of a tile within the sequence no row is asked for."""
        tiles = (("k", "HEAD_DIM"), ("v", "V_HEAD_DIM"))

        def loads(margin: int, rows: str = "p.kv_len - first") -> str:
            return ("\n" + " " * margin).join(self._load(*of, of[0] in narrow, rows) for of in tiles)

        if not whole_apart:
            return loads(4)
        whole, cut = loads(6, "TILE_KV"), loads(6)
        return f"if (first + TILE_KV <= p.kv_len) {{\n      {whole}\n    }} else {{\n      {cut}\n    }}"

    def _load(self, name: str, columns: str, narrow: bool, rows: str) -> str:
        """Starts to copy a tile of k or v; two elements of 8 bits as one of 16."""
        half, source = (" / 2", f"(const u16*){name}") if narrow else ("", name)
        if self.paged:
            strides = f"p.{name}_batch{half}, p.{name}_row{half}"
            return f"load_pages<{columns}{half}>(shared.{name}[stage], {source}, {strides}, first, p);"
        first = f"{name} + first * p.{name}_row"
        source = f"(const u16*)({first})" if narrow else first
        return f"load_tile<THREADS, {columns}{half}>(shared.{name}[stage], {source}, p.{name}_row{half}, {rows});"

    # -- pipeline hopper

    @property
    def prefetch(self) -> str:
        """What the kernel begins with."""
        return "\n  if (threadIdx.x / 32 == 1) prefetch_lengths(p);" if self.layout.own else ""

    @property
    def prefetch_table(self) -> str:
        """What the loader does while it waits for its first tile: before barriers are initialised, all would wait for
        it."""
        return "\n  if (threadIdx.x / 32 == 1) prefetch_pages(p);" if self.paged else ""

    @property
    def loader(self) -> str:
        return "one warp that copies tiles to consumers" if self.paged else "one thread that copies tiles to consumers"

    @property
    def by_one(self) -> str:
        """What stands before what one lane does for all."""
        return "if (threadIdx.x % 32 == 0) " if self.paged else ""

    @property
    def wait_for_one(self) -> str:
        return "\n    __syncwarp();" if self.paged else ""

    @property
    def read_by_all(self) -> str:
        """What stands before a stage is released that all lanes have read."""
        return "__syncwarp();\n    " if self.paged else ""

    @property
    def whose_k(self) -> str:
        """What the loader is told of the sequence of a tile of K: its number, its first row, or all of it."""
        if self._several_of_k:
            return "work"
        return f"work.{self._one_of_k}"

    @property
    def b_of_k(self) -> str:
        """The number of the sequence of a tile of K, for its descale."""
        return "work.b" if self._several_of_k else "b"

    @property
    def k_argument(self) -> str:
        """The parameter for that."""
        return "const Work& work" if self._several_of_k else f"int {self._one_of_k}"

    @property
    def _one_of_k(self) -> str:
        """What of a sequence says where its keys lie, but for pages."""
        return "k_start" if self.layout.joined else "b"

    @property
    def _several_of_k(self) -> bool:
        """Whether more of a sequence is asked for: its pages, or a number for its descale beside its first row."""
        return self.paged or (self.scaled and self.layout.joined)

    @property
    def box_of_lane(self) -> str:
        return _BOX_OF_LANE if self.paged else ""

    def find_box(self, tile: str) -> str:
        """What stands before the loader waits for a free stage: the table is read meanwhile."""
        return f"const Box box = box_of_lane({tile}, work);\n    " if self.paged else ""

    @property
    def tile_to_copy(self) -> str:
        """The parameters that say which tile of K is to be copied."""
        return "const Box& box, int kv_head" if self.paged else f"int tile, int kv_head, int {self._one_of_k}"

    def copied(self, tile: str) -> str:
        """Their arguments."""
        if self.paged:
            return "box, kv_head"
        return f"{tile}, kv_head, {'work.' if self._several_of_k else ''}{self._one_of_k}"

    def copy(self, name: str, box: int, b: str, k_start: str) -> str:
        """Copies a tile of k or v to its stage, in boxes of so many columns, or whole rows."""
        if name in self.whole_rows:
            at = f"0, 0, kv_head * p.{name}_head_boxes, box.row / 8, box.page"
            to = f"shared.{name}[{name}_ring.stage()][box.first / 8]"
            return f"    if (box.first < TILE_KV)\n      tma_load_5d({to}, map_{name}, full, {at});"
        first, if_any, of_keys = "", "", f"tile * TILE_KV, kv_head, {b}"
        if self.paged:
            first, if_any, of_keys = "[box.first]", "if (box.first < TILE_KV)\n        ", "box.row, kv_head, box.page"
        elif self.layout.joined:
            of_keys = f"{k_start} + tile * TILE_KV, kv_head, 0"
        loop = f"#pragma unroll\n    for (int d = 0; d < {_COLUMNS[name]}; d += {box})"
        to = f"shared.{name}[{name}_ring.stage()][d / {box}]{first}"
        return f"{loop}\n      {if_any}tma_load_4d({to}, map_{name}, full, d, {of_keys});"

    def extents(self, name: str, box: int) -> str:
        """Those of a tile of k or v in shared memory, in boxes of so many columns."""
        if name in self.whole_rows:
            return f"[TILE_KV / 8][{_COLUMNS[name]} / {box}][8][{box}];  // whole rows, eight by eight"
        return f"[({_COLUMNS[name]} + {box - 1}) / {box}][TILE_KV][{box}];"

    def between_boxes(self, name: str) -> str:
        """Bytes from 64 columns of a row to the next, in 16 bits."""
        return "1024" if name in self.whole_rows else "TILE_KV * 128"

    def between_rows(self, name: str) -> str:
        """An eighth of the bytes from eight rows to the next, in 16 bits."""
        return f"{_COLUMNS[name]} * 2" if name in self.whole_rows else "128"

    def descriptor(self, name: str, leading_bytes: str) -> str:
        """Where the tiles of k or v lie, for wgmma."""
        if name in self.whole_rows:
            return f"grouped_matrix_descriptor(shared.{name}, {leading_bytes}, {_COLUMNS[name]} * 16)"
        return f"matrix_descriptor(shared.{name}, {leading_bytes})"

    @property
    def clear_rows(self) -> str:
        """Makes the rows of a tile of V zero that are no keys."""
        return _CLEAR_WHOLE_ROWS if "v" in self.whole_rows else _CLEAR_ROWS

    @property
    def ends_with_tensor(self) -> bool:
        """Whether rows behind a sequence that fills its tensor are none of it, which TMA copies as zeros."""
        return not self.layout.joined and not self.paged
