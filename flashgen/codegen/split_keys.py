"""What kernel templates write where keys are split among blocks, and where a block visits all."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planning.members import FoldedLeaves, Keys, Leaves

#: A loop past the tiles of others delayed the first copy: on an H100 1 sequence of 4k keys, 32:4 heads, took 14.2 us
#: with it and takes 13.6.
_IN_TURN = """\
  // This part's tiles of 32 of which these are visible: it passes `others`, and p.splits - 1 after each of its own.
  DEVICE u32 in_turn(u32 visible, int& others) {
    const int lane = threadIdx.x % 32, rank = __popc(visible & ((1u << lane) - 1)) - others;
    const bool of_this = rank >= 0 && rank == quotient_by(rank, p.by_splits) * p.splits;
    const u32 own = __ballot_sync(~0u, (visible >> lane & 1) && of_this);
    others += __popc(own) * p.splits - __popc(visible);
    return own;
  }

"""

_PLACE = """\
  // This thread's first row and column of a tile.
  const int row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
"""

#: On an H200 8,192 causal tokens at head_dim 64 took 0.95 of the time.  ptxas had kept addresses of O and columns of
#: the mask through the loop, 10 registers more, and for want of them found one row's maximum after the other's.
_PLACE_ANEW = """\
  // This thread's first row and column of a tile.  What seldom needs them finds them anew: registers are short.
  int row, column;

  DEVICE void find_place() {
    const int thread = thread_index();
    row = warpgroup * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
    column = thread % 4 * 2;
  }

"""


@dataclass(frozen=True, slots=True)
class KeyCode:
    """Fragments of CUDA by the keys that a block visits: where they are `split` in `turns`, part i of `p.splits` visits
    tile i of those that its queries see, from the last to the first, and every `p.splits`-th behind it; where they are
    `leaves`, those of leaf i.  Where `placed_anew`, a consumer that folds leaves asks in few tiles where it stands."""

    keys: Keys
    tile_kv: int
    placed_anew: bool = False

    @property
    def split(self) -> bool:
        return self.keys.split

    @property
    def turns(self) -> bool:
        return self.keys.turns

    @property
    def leaves(self) -> bool:
        return isinstance(self.keys, Leaves)

    @property
    def leaf_tiles(self) -> int:
        """Tiles of a leaf."""
        return self.keys.keys // self.tile_kv if isinstance(self.keys, Leaves | FoldedLeaves) else 0

    @property
    def locate(self) -> str:
        """The template of how a block finds a tile by its number, where it is one of as many for each head."""
        return f"hopper/forward_locate_in_{'parts' if self.split else 'order'}.cu.j2"

    @property
    def kv_head(self) -> str:
        """That of a tile of queries."""
        return "quotient_by(work.h, p.by_group)" if self.split else "work.h / (p.heads / p.kv_heads)"

    @property
    def first_sent(self) -> str:
        """What the scheduler waits for before it sends a tile: it finds the first one while others initialise barriers,
        so that short calls begin earlier."""
        return "    if (work_ring.passed == 0) __syncthreads();\n" if self.split else ""

    @property
    def initialises(self) -> str:
        """The thread that initialises barriers, where keys are split of neither the scheduler nor the loader."""
        return "64" if self.split else "0"

    @property
    def initialised(self) -> str:
        """What awaits it."""
        beside = "if (threadIdx.x >= 32) __syncthreads();  // the scheduler does so before it sends"
        return beside if self.split else "__syncthreads();"

    # -- the kernel that combines parts

    @property
    def combined(self) -> str:
        """The template that adds them up."""
        return f"combine_{'leaves' if self.leaves else 'in_turns'}.cu.j2"

    @property
    def combining(self) -> str:
        """What a reader is told of it."""
        if self.leaves:
            return "Leaves are folded from the last to the first, as blocks fold them that visit all."
        return (
            "Parts are added in their order, 32 at a time: what they are multiplied by follows the highest maximum so"
            " far."
        )

    # -- which tiles

    def first(self, work: str) -> str:
        """The first tile that may be visited."""
        return f"{work}.part * LEAF_TILES" if self.leaves else "0"

    def top(self, tiles: str, work: str) -> str:
        """One behind the last tile that may be visited, of so many."""
        return f"min({tiles}, ({work}.part + 1) * LEAF_TILES)" if self.leaves else tiles

    def is_last(self, tile: str, work: str) -> str:
        """Whether a tile of keys is the last of its block."""
        return f"{tile} < p.splits" if self.turns else f"{tile} == {self.first(work)}"

    @property
    def apart(self) -> str:
        """Keys from the last that one part may see to the last of the next."""
        return "LEAF_TILES * TILE_KV" if self.leaves else "TILE_KV"

    @property
    def times(self) -> str:
        """What stands behind a number of tiles of queries, to make it one of tiles to work on."""
        return " * p.splits" if self.split else ""

    # -- pipeline ampere

    def walk(self, visited: str) -> str:
        """Which template has `next_step`: past the tiles of others a warp looks at 32 at once."""
        return "classified" if self.turns and visited == "runs" else visited

    @property
    def declared(self) -> str:
        """The parameter of `next_step` behind `tile`: tiles that others visit before, or the first of a leaf."""
        return ", int first" if self.leaves else ", int others" if self.split else ""

    @property
    def others(self) -> str:
        """Its argument."""
        return f", {self.first('rows')}" if self.leaves else ", p.splits - 1" if self.split else ""

    @property
    def others_first(self) -> str:
        """And before the first tile."""
        return self.others if self.leaves else ", rows.part" if self.split else ""

    @property
    def every_tile(self) -> str:
        """The tile behind `tile` where all are visited."""
        return "tile > first ? tile - 1 : -1" if self.leaves else f"tile - 1{' - others' if self.split else ''}"

    @property
    def lowest(self) -> str:
        """The last tile that `next_step` may find."""
        return "first" if self.leaves else "0"

    @property
    def in_reach(self) -> str:
        """What a lane that looks at the tile `lane` before asks beside."""
        alone = " && previous_tile(tile - lane, rows, p) == tile - lane"
        return " - first" if self.leaves else alone if self.split else ""

    # -- pipeline hopper

    def start(self, kv_len: str, work: str) -> str:
        """The first tile that is visited."""
        last = f"({kv_len} - 1) / TILE_KV"
        if self.leaves:
            return f"min({last}, {work}.part * LEAF_TILES + LEAF_TILES - 1)"
        return f"{last} - {work}.part" if self.split else last

    def first_tile(self, kv_len: str, work: str) -> str:
        """The tile that a consumer begins with where all are visited: of a leaf, of which many have the one before."""
        if self.keys.folds:
            return f"tile = tile == 0 ? ({kv_len} - 1) / TILE_KV : tile - 1"
        return f"const int tile = {self.start(kv_len, work)}"

    def each_tile(self, kv_len: str, work: str) -> str:
        """The loop of a consumer over the tiles behind it."""
        if self.keys.folds:
            return "while (tile % LEAF_TILES != 0) {\n          tile--;"
        first = f"{self.start(kv_len, work)} - {self.step}"
        return f"for (int tile = {first}; tile >= {self.first(work)}; {self.on}) {{"

    def before(self, work: str, do: str) -> str:
        """A statement that does something with the tile that is visited after `tile`, if there is one."""
        more = "tile % LEAF_TILES != 0" if self.keys.folds else f"tile - {self.step} >= {self.first(work)}"
        return f"if ({more}) {do.format(tile=f'tile - {self.step}')};"

    def young(self, kv_len: str, work: str) -> str:
        """Of the first two tiles that are visited those from `tile` on."""
        start = self.start(kv_len, work)
        return f"(tile >= {start}) + (tile >= {start} - {self.step})"

    @property
    def in_turn(self) -> str:
        """What the scheduler asks of 32 tiles, where parts take turns."""
        return _IN_TURN if self.turns else ""

    def of_this_part(self, visible: str) -> str:
        """Those that this part visits of 32 tiles, of which so many are visible."""
        return f"in_turn({visible}, others)" if self.turns else visible

    @property
    def step(self) -> str:
        """Tiles from one that is visited to the next."""
        return "p.splits" if self.turns else "1"

    @property
    def on(self) -> str:
        """How a loop over tiles of keys goes on."""
        return "tile -= p.splits" if self.turns else "tile--"

    @property
    def and_part(self) -> str:
        """What stands behind `visible` in a `Work`."""
        return ", part" if self.split else ""

    # -- pipeline hopper, where a block folds leaves

    @property
    def place(self) -> str:
        """Where a thread of a consumer stands."""
        return _PLACE_ANEW if self.placed_anew else _PLACE

    @property
    def anew(self) -> str:
        """The first line of what seldom asks for it."""
        return "    find_place();\n" if self.placed_anew else ""

    @property
    def thread(self) -> str:
        """The number of a consumer's thread where a tile of queries is over."""
        return "thread_index()" if self.placed_anew else "threadIdx.x"

    def run(self, across_tiles: str) -> str:
        """The template of a consumer's loops."""
        return "hopper/forward_run_across_leaves.cu.j2" if self.keys.folds else across_tiles

    def members(self, masked: bool) -> str:
        """What a consumer has beside."""
        if not self.keys.folds:
            return ""
        where = "last = 0;  // what the step in hand told" if masked else "tile = 0;  // of keys, in hand"
        return (
            "  RowState folded = nothing_folded();  // of the leaves so far of a tile of queries: whole sums\n"
            f"  bool first = true;  // whether a leaf is the first of its tile of queries\n  int {where}\n"
        )

    def over(self, masked: bool) -> str:
        """Whether the tile of keys in hand is the last that its queries see."""
        return "last == 2" if masked else "tile == 0"

    def q_read(self, masked: bool) -> str:
        """What follows a product with the queries: the last one of all releases them, so that the next are loaded while
        leaves are folded."""
        release = "release(shared.q_pipe[warpgroup], q_ring, moved & 1);"
        return f"    if ({self.over(masked)}) {release}\n" if self.keys.folds else ""

    @property
    def of_which(self) -> str:
        """What `last` of a `Step` tells."""
        return ": 1 of its leaf, 2 of all" if self.keys.folds else ""

    @property
    def begin_gives(self) -> str:
        """The type of what a consumer's `begin` returns."""
        return "void" if self.keys.folds else "bool"

    @property
    def begin_tells(self) -> str:
        """And what it is, for a reader."""
        return "" if self.keys.folds else "; true if it is the last too"

    @property
    def begin_kept(self) -> str:
        """What stands before a call of it whose caller gives the same."""
        return "" if self.keys.folds else "const bool last = "

    @property
    def begin_given(self) -> str:
        """How the caller gives it."""
        return "" if self.keys.folds else "    return last;\n"

    @property
    def begin_step(self) -> str:
        """What is kept of its step before the softmax."""
        return "\n    last = step.last;" if self.keys.folds else ""

    @property
    def begin_ends(self) -> str:
        """Its last line."""
        return "" if self.keys.folds else "    return step.last;\n"

    def send_step(self, behind: str) -> str:
        """How a step is sent on when the tile behind it is known."""
        if not self.keys.folds:
            return "send_step(step);"
        return (
            "{\n"
            f"          step.last = step.tile / LEAF_TILES != ({behind}) / LEAF_TILES;\n"
            "          send_step(step);\n"
            "        }"
        )

    @property
    def last_of_all(self) -> str:
        return "2" if self.keys.folds else "1"

    @property
    def goes_on(self) -> str:
        """Whether a loader has tiles left."""
        return "step.last < 2" if self.keys.folds else "!step.last"

    def row_sum(self, sum_of_lane: str) -> str:
        """The sum of a row where o is finished."""
        return f"4.f * {sum_of_lane}" if self.keys.folds else f"quad_sum({sum_of_lane})"

    def lse_of_sink(self, sink: str) -> str:
        """lse of a row that sees no key."""
        return f"lse_of_sink({sink})" if self.keys.folds else sink
